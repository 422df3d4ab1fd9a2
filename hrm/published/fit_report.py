"""What `hrm fit` does and says: which rows and constants take part, the constants with their intervals, a YAML file."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.errors import HrmError, InputError
from hrm.published.constants import CONSTANTS, Constant
from hrm.published.fit import Fitted, FittedConstant, certain_policy, fit_constants
from hrm.published.model import full_row
from hrm.published.rows import Row, bundled_rows, read_rows
from hrm.published.scores import quantile
from hrm.published.settings import SETTINGS, SYSTEMS

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "FitReport",
    "choose_constants",
    "constants_document",
    "fit_command",
    "format_constant",
    "format_interval",
    "print_fit",
    "sort_rows",
    "write_constants",
]

MOST_CONSTANTS = 14
"""More would fit anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """A fit, and what went into it.

    Attributes
    ----------
    fitted : Fitted
    moved : tuple of str
        Constants that were allowed to move.
    rows : tuple of Row
        Those fitted to.
    left_out : mapping of str to str
        Reason by id of every other row.
    touching : mapping of str to tuple of str
        Ids of the rows whose prediction depends on a constant.
    median_error : float
        |predicted / measured - 1| of the rows fitted to, in sample.
    data : str
        File of the rows; empty for the bundled ones.
    command : str
        That does it again.
    day : str
        ISO date.
    """

    fitted: Fitted
    moved: tuple[str, ...]
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]
    touching: Mapping[str, tuple[str, ...]]
    median_error: float
    data: str
    command: str
    day: str


def choose_constants(components: str | None) -> tuple[str, ...]:
    """Names of the constants of components, given with commas between them; all without any.

    Raises
    ------
    InputError
        A component is not known, none of them has a constant, or there are more constants than are ever fitted.
    """
    owners = {constant.component for constant in CONSTANTS.values()}
    known = owners | {name for each in SETTINGS.values() for name in (each.gpu, each.host)} | set(SYSTEMS)
    wanted = owners if components is None else {name.strip() for name in components.split(",")}
    for name in sorted(wanted - known):
        raise InputError(f"there is no component {name!r}", where="--components", way_out=", ".join(sorted(known)))
    names = tuple(name for name, constant in CONSTANTS.items() if constant.component in wanted)
    if not names:
        raise InputError(
            f"{components} has no constant to fit", where="--components", way_out=", ".join(sorted(owners))
        )
    if len(names) > MOST_CONSTANTS:
        raise InputError(
            f"{len(names)} constants are too many to learn anything from a fit",
            where="--components",
            way_out=f"components with {MOST_CONSTANTS} at most",
        )
    return names


def sort_rows(rows: Sequence[Row]) -> tuple[tuple[Row, ...], dict[str, str]]:
    """Rows that a fit may use, and why each of the others is left out, by id."""
    usable, left_out = [], {}
    for row in rows:
        try:
            certain = certain_policy(row)
            full_row(row, {})
        except HrmError as error:
            left_out[row.id] = str(error).removeprefix(f"{row.id}: ")
            continue
        if row.measured_tokens_per_s is None:
            left_out[row.id] = "it was not measured"
        elif not certain:
            left_out[row.id] = "its policy is not certain: no micro-batch is given, or more requests than they hold"
        else:
            usable.append(row)
    return tuple(usable), left_out


def fit_command(
    *,
    data: Path | None = None,
    components: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> FitReport:
    """Fit the constants of components to the rows of a file, or to the bundled ones.

    Raises
    ------
    InputError
        The file or the components are not as they should be, or no row of it can be used: why not, for the first.
    """
    names = choose_constants(components)
    rows, left_out = sort_rows(bundled_rows() if data is None else read_rows(data))
    if not rows:
        first, reason = next(iter(left_out.items()))
        raise InputError(f"no row can be used: {first}: {reason}", where="bundled rows" if data is None else str(data))
    if on_progress is not None:
        on_progress(f"fitting {len(names)} constants to {len(rows)} rows")
    fitted = fit_constants(rows, names)
    words = ["hrm", "fit"]
    for option, value in (("--data", data), ("--components", components)):
        words += [] if value is None else [option, shlex.quote(str(value))]
    return FitReport(
        fitted=fitted,
        moved=names,
        rows=rows,
        left_out=left_out,
        touching={name: _touching(rows, name, fitted) for name in names},
        median_error=quantile((_error(row, fitted) for row in rows), 0.5),
        data="" if data is None else str(data),
        command=" ".join(words),
        day=date.today().isoformat(),
    )


def _error(row: Row, fitted: Fitted) -> float:
    measured = row.measured_tokens_per_s
    assert measured is not None
    return abs(full_row(row, fitted.values).tokens_per_s / measured - 1.0)


def _touching(rows: Sequence[Row], name: str, fitted: Fitted) -> tuple[str, ...]:
    """Ids of rows that a constant a hundredth larger or smaller would predict otherwise."""
    values = fitted.values
    found = []
    for row in rows:
        less, more = (
            full_row(row, {**values, name: factor * values[name]}).tokens_per_s for factor in (1 / 1.01, 1.01)
        )
        if abs(more - less) > 1e-9 * more:
            found.append(row.id)
    return tuple(found)


# Numbers


def _in_unit(constant: Constant, value: float) -> tuple[float, str]:
    """A value in the unit a person reads it in, and the unit."""
    factor, unit = {"": (100.0, "%"), "byte/s": (1e-9, "GB/s"), "s": (1e3, "ms")}[constant.unit]
    return factor * value, unit


def _digits(number: float, unit: str) -> str:
    """Rates to three digits, shares and milliseconds to a tenth, or a hundredth below one."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    decimals = max(0, 2 - math.floor(math.log10(number))) if unit == "GB/s" else 1 if number >= 1 else 2
    return f"{number:.{decimals}f}"


def format_constant(constant: Constant, value: float) -> str:
    """``"10.4 %"``, ``"8.36 GB/s"``, ``"0.95 ms"``."""
    number, unit = _in_unit(constant, value)
    return f"{_digits(number, unit)} {unit}"


def format_interval(constant: Constant, low: float, high: float) -> str:
    """``"9.3-11.6 %"``; empty where there is none."""
    if math.isnan(low) or math.isnan(high):
        return ""
    (least, unit), (most, _) = _in_unit(constant, low), _in_unit(constant, high)
    if most > 1e6:
        return "nothing known"
    return f"{_digits(least, unit)}-{_digits(most, unit)} {unit}"


def _beside_public(each: FittedConstant) -> str:
    if each.status != "fitted":
        return ""
    return "below" if each.value < each.constant.low else "above" if each.value > each.constant.high else "inside"


# What comes out


def constants_document(report: FitReport) -> dict[str, Any]:
    """The fit as one document, for JSON and YAML; numbers in SI units, None where there is none."""
    fitted = [each.constant.name for each in report.fitted.constants if each.status == "fitted"]

    def known(value: float) -> float | None:
        return value if math.isfinite(value) and 1e-20 < value < 1e20 else None

    return {
        "command": report.command,
        "date": report.day,
        "rows": [row.id for row in report.rows],
        "left_out": dict(report.left_out),
        "median_error_in_sample": report.median_error,
        "constants": {
            each.constant.name: {
                "value": each.value,
                "low": known(each.low),
                "high": known(each.high),
                "unit": each.constant.unit or "share",
                "status": each.status if each.constant.name in report.moved else "not asked for",
                "rows": len(report.touching.get(each.constant.name, ())),
                "public_low": each.constant.low,
                "public_high": each.constant.high,
                "public_source": each.constant.source,
                "what": each.constant.words,
            }
            for each in report.fitted.constants
        },
        "correlation": {
            name: {other: float(report.fitted.correlation[i, j]) for j, other in enumerate(fitted)}
            for i, name in enumerate(fitted)
        },
    }


def write_constants(report: FitReport, path: Path) -> None:
    """Write the document as YAML.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    import yaml

    text = yaml.safe_dump(constants_document(report), sort_keys=False, allow_unicode=True, width=118)
    try:
        path.write_text(f"# Constants by `{report.command}`; intervals are of 90 %.\n{text}", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=f"--output: {path}") from None


def print_fit(report: FitReport, console: Console) -> None:
    """Print the constants, their correlation, and the rows that were left out."""
    from rich import box
    from rich.table import Table

    source = f" of {report.data}" if report.data else ", the published ones"
    console.print(
        f"{len(report.rows)} rows{source}; median error in sample {report.median_error:.1%} (cross-validated: "
        "hrm validate published)",
        markup=False,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("constant", "value", "90 % interval", "rows", "status", "public range", "value is"):
        table.add_column(column, justify="left" if column in ("constant", "status", "value is") else "right")
    for each in report.fitted.constants:
        constant = each.constant
        moved = constant.name in report.moved
        table.add_row(
            constant.name,
            format_constant(constant, each.value),
            format_interval(constant, each.low, each.high),
            str(len(report.touching[constant.name])) if moved else "",
            each.status if moved else "not asked for",
            format_interval(constant, constant.low, constant.high),
            _beside_public(each),
        )
    console.print(table)
    fitted = [each.constant.name for each in report.fitted.constants if each.status == "fitted"]
    if len(fitted) > 1:
        matrix = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        matrix.add_column("correlation")
        for number in range(1, len(fitted) + 1):
            matrix.add_column(str(number), justify="right")
        for i, name in enumerate(fitted):
            matrix.add_row(f"{i + 1}  {name}", *(f"{report.fitted.correlation[i, j]:.2f}" for j in range(len(fitted))))
        console.print(matrix)
    for reason, ids in _by_reason(report.left_out).items():
        console.print(f"left out: {', '.join(ids)}: {reason}", markup=False)
    console.print(
        "dropped: its interval spans more than a factor of three; untouched: no row depends on it. These and those not "
        "asked for have the geometric middle of their public range.",
        markup=False,
    )


def _by_reason(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        found.setdefault(reason, []).append(name)
    return found
