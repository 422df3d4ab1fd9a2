"""What a sweep varies: `--vary KEY=VALUES` read into an axis, and axes into a grid of points.

A KEY is a value of the hardware profile (as `--set` takes it), a section of it (`link`, `cpu.peak`, ...), one of the
workload, a pinned variable, a number of the model's config.json, or the name of a machine, model, workload or format:

    cpu.memory=64GiB:512GiB:16GiB      every 16 GiB
    cpu.bandwidth=50GB/s:800GB/s:x2    each twice the one before
    policy.micro_batch=32,64,128       a list
    link+host_totals=16GB/s,32GB/s     the same value for several keys
    cpu.memory*cpu.bandwidth*=1:10:1   these, times a factor
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Final, Literal

from hrm.errors import InputError
from hrm.profile_schema import FIELDS
from hrm.units import EXAMPLES, Kind, parse_quantity

__all__ = ["PIN_KEYS", "SECTIONS", "Axis", "Point", "Value", "grid_points", "parse_axes", "parse_axis"]

Value = float | int | str
Point = tuple[Value, ...]
"""One value per axis, in their order."""
AxisKind = Kind | Literal["factor", "text", "number"]

MOST_VALUES: Final = 10_000
MOST_POINTS: Final = 100_000
"""A larger grid is taken for a slip of a unit or a step."""

SECTIONS: Final[dict[str, Kind]] = {
    "link": "bandwidth",
    "link.host_to_device": "bandwidth",
    "link.device_to_host": "bandwidth",
    "host_totals": "bandwidth",
    "cpu.peak": "compute",
    "gpu.peak": "compute",
}
"""Sections of a profile that stand for those of their keys that are there and are no percentages of another."""

PIN_KEYS: Final[dict[str, tuple[str, AxisKind]]] = {
    "policy.batch": ("batch_size", "count"),
    "policy.micro_batch": ("micro_batch_size", "count"),
    "policy.num_micro_batches": ("num_micro_batches", "count"),
    "policy.prefill_micro_batch": ("prefill_micro_batch_size", "count"),
    "policy.attention": ("attention_on_gpu", "text"),
    "policy.ffn": ("ffn_on_gpu", "text"),
    "policy.weights_on_gpu": ("weights_on_gpu", "share"),
    "policy.weights_on_disk": ("weights_on_disk", "share"),
    "policy.kv_on_gpu": ("kv_on_gpu", "share"),
    "policy.kv_on_disk": ("kv_on_disk", "share"),
    "policy.weight_slots": ("weight_slots", "text"),
    "policy.dense_weights": ("dense_weights_on_gpu", "text"),
    "policy.embedding": ("embedding_on_gpu", "text"),
    "policy.lm_head": ("lm_head_on_gpu", "text"),
    "policy.pin_weights": ("pin_weights", "text"),
}
"""Pinned variables by the names of their options: the field of `Pins`, and what values look like."""

_WORKLOAD_KEYS: Final[dict[str, AxisKind]] = {
    "workload.prompt_len": "count",
    "workload.gen_len": "count",
    "workload.requests": "count",
}
_NAME_KEYS: Final = ("hw", "model", "workload", "weights_dtype", "kv_dtype", "compute_dtype")
_UNIT = re.compile(r"[\s0-9.+-]*(?:[eE][+-]?[0-9]+)?\s*(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One `--vary`.

    Attributes
    ----------
    name : str
        What stands before the values, without spaces: the column of the table.
    keys : tuple of str
        What gets the value.
    times : bool
        Values are factors on what the profile has.
    kind : str
        What a value measures; "factor", "number" (of a config.json) or "text".
    values : tuple
        In SI base units, in the order they were asked for.
    unit : str
        Unit of the first value as typed; empty where it has none.
    """

    name: str
    keys: tuple[str, ...]
    times: bool
    kind: AxisKind
    values: tuple[Value, ...]
    unit: str

    @property
    def unit_size(self) -> float:
        """One `unit` in SI base units."""
        if not self.unit or self.kind in ("factor", "number", "text"):
            return 1.0
        return float(parse_quantity(f"1 {self.unit}", _quantity_kind(self.kind), where=self.name))

    @property
    def numeric(self) -> bool:
        """Its values are numbers."""
        return self.kind != "text"


def parse_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """Read every `--vary`.

    Raises
    ------
    InputError
        As `parse_axis`; a key is varied twice; the grid is too large.
    """
    if not texts:
        raise InputError(
            "nothing is varied", where="--vary", way_out="e.g. --vary cpu.memory=64GiB:512GiB:64GiB; may be repeated"
        )
    axes = tuple(parse_axis(text) for text in texts)
    seen: set[str] = set()
    for axis in axes:
        for key in axis.keys:
            clash = next((other for other in seen if other == key or _holds(other, key) or _holds(key, other)), None)
            if clash is not None:
                fact = f"{key} is varied twice" if clash == key else f"{key} and {clash} are the same values"
                raise InputError(fact, where="--vary", way_out="all its values in one --vary")
            seen.add(key)
    points = math.prod(len(axis.values) for axis in axes)
    if points > MOST_POINTS:
        raise InputError(f"the grid has {points:,} points", where="--vary", way_out=f"at most {MOST_POINTS:,}")
    return axes


def grid_points(axes: Sequence[Axis]) -> list[Point]:
    """All combinations, the last axis fastest."""
    return list(product(*(axis.values for axis in axes)))


def parse_axis(text: str) -> Axis:
    """Read one `KEY=VALUES`.

    Parameters
    ----------
    text : str
        `KEY=START:STOP:STEP`, `KEY=START:STOP:xFACTOR` or `KEY=A,B,C`; `A+B=...` for several keys with the same value,
        `A*B*=...` for factors on the profile's own values.

    Raises
    ------
    InputError
        No such key (names the nearest), keys that do not go together, or values that are none.
    """
    left, separator, right = text.partition("=")
    name = re.sub(r"\s+", "", left)
    if not separator or not name or not right.strip():
        raise InputError(f"{text!r:.80} is no KEY=VALUES", where="--vary", way_out="e.g. cpu.memory=64GiB:512GiB:16GiB")
    where = f"--vary {name}"
    times = "*" in name
    if times and "+" in name:
        raise InputError(
            "'+' and '*' in one key", where=where, way_out="A+B=... sets one value, A*B*=... multiplies by a factor"
        )
    keys = tuple(key.removesuffix(".*") if not times else key for key in re.split(r"[+*]", name) if key)
    if not keys or len(set(keys)) < len(keys):
        raise InputError("the keys are not distinct", where=where, way_out="e.g. cpu.memory*cpu.bandwidth*=1:10:1")
    kinds = {key: _kind_of(key, where) for key in keys}
    if times or len(keys) > 1:
        for key in keys:
            if key not in FIELDS and key not in SECTIONS:
                way_out = "a number of the hardware profile; others stand alone in a --vary"
                raise InputError(f"{key} cannot be varied together with others", where=where, way_out=way_out)
    if not times and len(set(kinds.values())) > 1:
        shown = ", ".join(f"{key} is a {kind}" for key, kind in kinds.items())
        raise InputError(f"one value cannot be all of these: {shown}", where=where, way_out="A*B*=1:10:1 multiplies")
    kind: AxisKind = "factor" if times else kinds[keys[0]]
    values = _parse_values(right.strip(), kind, where)
    if len(set(values)) < len(values):
        raise InputError("a value is there twice", where=where, way_out="each value once")
    found = _UNIT.fullmatch(re.split(r"[:,]", right.strip())[0].strip())
    unit = found[1].strip() if found is not None and kind in EXAMPLES else ""
    return Axis(
        name=name.rstrip("*") + ("*" if times and len(keys) == 1 else ""),
        keys=keys,
        times=times,
        kind=kind,
        values=values,
        unit=unit,
    )


def _holds(section: str, key: str) -> bool:
    return section in SECTIONS and key.startswith(f"{section}.")


def _kind_of(key: str, where: str) -> AxisKind:
    if key in FIELDS:
        return FIELDS[key].kind
    if key in SECTIONS:
        return SECTIONS[key]
    if key in PIN_KEYS:
        return PIN_KEYS[key][1]
    if key in _WORKLOAD_KEYS:
        return _WORKLOAD_KEYS[key]
    if key in _NAME_KEYS:
        return "text"
    if key.startswith("model.") and key != "model.":
        return "number"  # whether config.json has it shows once there is a model
    known = [*FIELDS, *SECTIONS, *PIN_KEYS, *_WORKLOAD_KEYS, *_NAME_KEYS]
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    inside = [other for other in known if other.startswith(f"{key}.")]
    if inside:
        way_out = f"it has {', '.join(inside[:8])}"
    elif near:
        way_out = f"did you mean {', '.join(near)}?"
    else:
        way_out = "e.g. cpu.memory, link, workload.prompt_len, policy.micro_batch, model, hw"
    raise InputError(f"unknown key '{key[:60]}'", where=where, way_out=way_out)


def _parse_values(text: str, kind: AxisKind, where: str) -> tuple[Value, ...]:
    if kind == "text":
        return tuple(_words(text, where))
    parts = [part.strip() for part in text.split(":")]
    if len(parts) == 1:
        return tuple(_number(part, kind, where) for part in _words(text, where))
    if len(parts) != 3 or not all(parts) or "," in text:
        raise InputError(
            f"{text!r:.60} is no range", where=where, way_out="START:STOP:STEP, START:STOP:xFACTOR or A,B,C"
        )
    start, stop = _exact(_number(parts[0], kind, where)), _exact(_number(parts[1], kind, where))
    if stop < start:
        raise InputError(f"{parts[1]} lies below {parts[0]}", where=where, way_out="START:STOP:STEP, upwards")
    found: list[Fraction] = []
    if parts[2][0] in "xX×":
        factor = _exact(_plain(parts[2][1:].strip(), where))
        if factor <= 1 or start == 0:
            raise InputError(f"{parts[2]} makes no range from {parts[0]}", where=where, way_out="e.g. 1:64:x2")
        each = start
        while each <= stop and len(found) <= MOST_VALUES:
            found.append(each)
            each *= factor
    else:
        step = _exact(_number(parts[2], kind, where))
        if step <= 0:
            raise InputError(f"a step of {parts[2]} leads nowhere", where=where, way_out="a step above zero")
        count = min((stop - start) // step, MOST_VALUES) + 1
        found = [start + index * step for index in range(int(count))]
    if len(found) > MOST_VALUES:
        raise InputError(f"{text!r:.60} makes too many values", where=where, way_out=f"at most {MOST_VALUES:,}")
    if kind == "count":
        return tuple(round(each) for each in found)
    return tuple(_plain_number(float(each), kind) for each in found)


def _words(text: str, where: str) -> list[str]:
    words = [word.strip().strip("'\"") for word in text.split(",")]
    if not all(words):
        raise InputError(f"{text!r:.60} has an empty value", where=where, way_out="A,B,C")
    return words


def _number(text: str, kind: AxisKind, where: str) -> float | int:
    if kind in ("factor", "number"):
        return _plain_number(_plain(text, where), kind)
    return parse_quantity(text, _quantity_kind(kind), where=where)


def _quantity_kind(kind: AxisKind) -> Kind:
    assert kind not in ("factor", "number", "text")
    return kind  # type: ignore[return-value]


def _plain(text: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e18:
        raise InputError(f"{text!r:.40} is no number above zero without a unit", where=where, way_out="e.g. 1:10:1")
    return number


def _plain_number(number: float, kind: AxisKind) -> float | int:
    """Numbers of a config.json that are whole stay whole: layers, heads and widths are counts."""
    return int(number) if kind == "number" and number == int(number) else number


def _exact(number: float) -> Fraction:
    """The decimal number that was typed, so that 0.1:0.3:0.1 ends at 0.3."""
    return Fraction(repr(number))
