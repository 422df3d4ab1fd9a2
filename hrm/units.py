"""Quantities with units: text as a person writes it, to SI floats and back.

GB is 10^9 bytes and GiB is 2^30 bytes everywhere. A dimensional quantity without a unit is an error, never a guess.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import Final, Literal

from hrm.errors import InputError

__all__ = [
    "EXAMPLES",
    "GB",
    "GIB",
    "KB",
    "KIB",
    "MB",
    "MIB",
    "TB",
    "TFLOP",
    "TIB",
    "Kind",
    "format_bandwidth",
    "format_compute",
    "format_size",
    "format_time",
    "parse_quantity",
]

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12
KIB, MIB, GIB, TIB = 2.0**10, 2.0**20, 2.0**30, 2.0**40
TFLOP = 1e12

Kind = Literal["size", "bandwidth", "compute", "time", "duration", "share", "count"]

# The first two units of a kind are what a person most likely meant: suggestions prefer them.
_SIZES: Final[Mapping[str, float]] = (
    {"GB": GB, "GiB": GIB, "MB": MB, "MiB": MIB, "TB": TB, "TiB": TIB, "kB": KB, "KiB": KIB}
    | {"PB": 1e15, "PiB": 2.0**50}
    | {"B": 1.0, "byte": 1.0, "bytes": 1.0}
)
_RATES: Final[Mapping[str, float]] = {"T": 1e12, "G": 1e9, "P": 1e15, "M": 1e6, "": 1.0}
_SECONDS: Final[Mapping[str, float]] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_UNITS: Final[Mapping[Kind, Mapping[str, float]]] = {
    "size": _SIZES,
    "bandwidth": {f"{unit}/s": factor for unit, factor in _SIZES.items()},
    "compute": {
        **{f"{prefix}FLOP/s": factor for prefix, factor in _RATES.items()},
        **{f"{prefix}OP/s": factor for prefix, factor in _RATES.items()},
        **{f"{prefix}FLOPS": factor for prefix, factor in _RATES.items()},
        **{f"{prefix}OPS": factor for prefix, factor in _RATES.items()},
    },
    "time": {**_SECONDS, "min": 60.0, "h": 3600.0},
    "duration": {"h": 3600.0, "min": 60.0, **_SECONDS, "d": 86400.0, "days": 86400.0, "hours": 3600.0},
    "share": {"%": 0.01},
    "count": {},
}
# Lower bounds keep 1 / rate finite; upper bounds catch a slipped prefix.
_RANGES: Final[Mapping[Kind, tuple[float, float, str]]] = {
    "size": (1.0, 1e18, "between 1 B and 1 EB"),
    "bandwidth": (1e3, 1e15, "between 1 kB/s and 1 PB/s"),
    "compute": (1e6, 1e18, "between 1 MFLOP/s and 1 EFLOP/s"),
    "time": (1e-12, 3.2e7, "between 1 ps and 1 year"),
    "duration": (1e-3, 3.2e8, "between 1 ms and 10 years"),
    "share": (1e-9, 1.0, "between 0 and 1, or between 0 % and 100 %"),
    "count": (1.0, 1e12, "between 1 and 10^12"),
}
_ZERO_MEANS_SOMETHING: Final = frozenset({"size", "time", "share"})
_WORDS: Final[Mapping[Kind, str]] = {kind: f"a {kind}" for kind in _UNITS} | {"compute": "a compute rate"}
EXAMPLES: Final[Mapping[Kind, str]] = {
    "size": "16 GB",
    "bandwidth": "300 GB/s",
    "compute": "65 TFLOP/s",
    "time": "3 us",
    "duration": "24 h",
    "share": "0.8",
    "count": "4",
}
"""One accepted text per kind, for error messages."""

_QUANTITY = re.compile(r"\s*([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(\S.*?)?\s*", re.DOTALL)
_BITS = re.compile(r"[kKMGT]i?(?:b|bits?)(?:/s|ps)?")


def parse_quantity(text: object, kind: Kind, *, where: str) -> float:
    """Read one quantity.

    Parameters
    ----------
    text : str, int or float
        ``"14.74 GiB"``, ``"285 GiB/s"``, ``"65 TFLOP/s"``, ``"3 us"``, ``"24 h"``, ``0.8``, ``"80 %"``, ``4``. Anything
        else is refused like a wrong text.
    kind : {"size", "bandwidth", "compute", "time", "duration", "share", "count"}
        What it measures; all but shares and counts need a unit.
    where : str
        File and key, for the error.

    Returns
    -------
    float
        [bytes], [bytes/s], [FLOP/s], [s], [s], [1], or an int for a count.

    Raises
    ------
    InputError
        No number, no unit, an unknown unit, NaN, infinite, negative, zero where that is senseless, or absurdly large.
    """
    shown = _quoted(text)
    number, unit = _split(text, kind, where=where, shown=shown)
    factors = _UNITS[kind]
    if unit:
        if unit not in factors:
            raise InputError(f"{shown} is not {_WORDS[kind]}", where=where, way_out=_try_instead(text, unit, kind))
        number *= factors[unit]
    elif kind not in ("share", "count"):
        first, second = list(factors)[:2]
        plain = str(text).strip()
        raise InputError(f"{shown} has no unit", where=where, way_out=f"try '{plain} {first}' or '{plain} {second}'")
    lowest, highest, accepted = _RANGES[kind]
    if number == 0 and kind in _ZERO_MEANS_SOMETHING:
        return 0.0
    if number < 0:
        raise InputError(f"{shown} is negative", where=where, way_out=f"accepted: {accepted}")
    if number == 0:
        raise InputError(f"{shown} is zero", where=where, way_out=f"accepted: {accepted}")
    if not lowest <= number <= highest:
        raise InputError(f"{shown} is out of range", where=where, way_out=f"accepted: {accepted}")
    if kind == "count":
        if number != int(number):
            raise InputError(f"{shown} is not a whole number", where=where, way_out="try e.g. '4'")
        return int(number)
    return number


def _split(text: object, kind: Kind, *, where: str, shown: str) -> tuple[float, str]:
    """Number and unit of a text; a bare number has the unit ''."""
    refusal = InputError(f"{shown} is not {_WORDS[kind]}", where=where, way_out=f"try e.g. '{EXAMPLES[kind]}'")
    if isinstance(text, bool):
        raise refusal
    if isinstance(text, int | float):
        try:
            number = float(text)
        except OverflowError:
            raise refusal from None
        if not math.isfinite(number):
            raise InputError(f"{shown} is not finite", where=where, way_out=f"try e.g. '{EXAMPLES[kind]}'")
        return number, ""
    found = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise refusal
    return float(found[1]), found[2] or ""


def _try_instead(text: object, unit: str, kind: Kind) -> str:
    """What the person probably meant by an unknown unit."""
    number = str(text)[: len(str(text).rstrip()) - len(unit)].strip()
    if _BITS.fullmatch(unit) and kind in ("size", "bandwidth"):
        return f"'{unit}' counts bits; write bytes, e.g. '{EXAMPLES[kind]}'"
    factors = _UNITS[kind]
    if not factors:
        return f"try '{number}'"

    def likeness(known: str) -> float:
        return difflib.SequenceMatcher(None, known.lower(), unit.lower()).ratio()

    nearest = sorted(factors, key=likeness, reverse=True)[:2]  # stable: of equals, the usual unit comes first
    return "try " + " or ".join(f"'{number} {known}'" for known in nearest)


def _quoted(value: object) -> str:
    """A value as an error shows it: quoted and never longer than a line."""
    shown = repr(str(value)) if isinstance(value, str | int | float) and not _is_huge(value) else type(value).__name__
    return shown if len(shown) <= 60 else f"{shown[:56]}...'"


def _is_huge(value: object) -> bool:
    """Ints of thousands of digits, which Python refuses to print."""
    return isinstance(value, int) and value.bit_length() > 512


def format_size(size_bytes: float, unit: str | None = None) -> str:
    """``"14.74 GiB"``; MiB, KiB or B below 0.1 GiB, unless a unit is asked for. Argument in [bytes]."""
    if unit is None:
        unit = next((u for u in ("GiB", "MiB", "KiB") if abs(size_bytes) >= 0.1 * _SIZES[u]), "B")
        unit = "GiB" if size_bytes == 0 else unit
    return f"{size_bytes / _SIZES[unit]:.{0 if unit == 'B' else 2}f} {unit}"


def format_bandwidth(bytes_per_s: float) -> str:
    """``"12.2 GB/s"``; MB/s below 0.1 GB/s. Argument in [bytes/s]."""
    unit, factor = ("GB/s", GB) if bytes_per_s == 0 or abs(bytes_per_s) >= 0.1 * GB else ("MB/s", MB)
    return f"{_rounded(bytes_per_s / factor)} {unit}"


def format_compute(flops_per_s: float) -> str:
    """``"65 TFLOP/s"``; GFLOP/s below 0.1 TFLOP/s. Argument in [FLOP/s]."""
    unit, factor = ("TFLOP/s", TFLOP) if flops_per_s == 0 or abs(flops_per_s) >= 0.1 * TFLOP else ("GFLOP/s", 1e9)
    return f"{_rounded(flops_per_s / factor)} {unit}"


def format_time(seconds: float) -> str:
    """``"3 us"``, ``"154.9 ms"``, ``"12.5 s"``, ``"5 min 20 s"``, ``"3 h 12 min"``, ``"2 d 3 h"``. Argument in [s]."""
    if not math.isfinite(seconds) or seconds < 0:
        return f"{seconds:.4g} s"
    for unit, factor in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        if 0 < seconds < 999.95 * factor:
            return f"{_rounded(seconds / factor)} {unit}"
    if seconds < 119.95:
        return f"{_rounded(seconds)} s"
    if round(seconds) < 7200:
        big, small, factor, ratio = "min", "s", 1, 60
    elif round(seconds / 60) < 48 * 60:
        big, small, factor, ratio = "h", "min", 60, 60
    else:
        big, small, factor, ratio = "d", "h", 3600, 24
    whole, rest = divmod(round(seconds / factor), ratio)
    return f"{whole} {big} {rest} {small}" if rest else f"{whole} {big}"


def _rounded(number: float) -> str:
    """Four significant digits, without exponent for numbers people print."""
    if not math.isfinite(number) or not 1e-3 <= abs(number) < 1e7:
        return f"{number:.4g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(number))))
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
