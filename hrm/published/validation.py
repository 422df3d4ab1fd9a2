"""`hrm validate published`: every prediction beside every measurement, the bars, and what the errors are made of.

Without a file of one's own: the bundled rows, in sample and cross-validated, all of it computed anew. With one: its
rows by the shipped constants, as they are; the figures of the cross-validation are then those that `accuracy.yaml`
holds of the bundled rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hrm.errors import BarMissedError, HrmError, InputError
from hrm.published.accuracy import in_sample, validate_folds
from hrm.published.constants import Constant
from hrm.published.cross_validation import GATE_FOLDS
from hrm.published.document import build_document
from hrm.published.fit import fit_constants, usable_rows
from hrm.published.gates import kernel_gates, phase_gates
from hrm.published.intervals import accuracy_document
from hrm.published.kernels import kernel_document
from hrm.published.phases import phase_errors, phase_pairs
from hrm.published.predictions import Simulator, Tell, judge_rows
from hrm.published.rows import Row, bundled_kernels, bundled_rows, read_kernels, read_rows
from hrm.published.settings import SETTINGS, find_setting
from hrm.published.shares import time_shares
from hrm.published.systems import fitted_values
from hrm.published.terms import term_errors

__all__ = ["check_bar", "save_page", "validate_command", "validate_rows"]


def validate_command(
    data: Path | None,
    kernels: Path | None,
    *,
    simulate: Simulator | None,
    report: Path | None = None,
    max_median_error: float = 0.15,
    jobs: int | None = None,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Validate, and write the report where one is asked for.

    Parameters
    ----------
    data, kernels : Path or None
        CSV files; the bundled rows where None.
    simulate : callable or None
        Simulates a row; without it nothing is simulated.
    report : Path or None
        HTML file.
    max_median_error : float
        The bar that `check_bar` looks at; kept in the document.
    jobs : int, optional
        Processes; one per core by default.
    tell : callable, optional
        Takes a line about progress.

    Raises
    ------
    InputError
        A file cannot be read, is none of its kind, or cannot be written.
    """
    if not 0.0 < max_median_error < math.inf:
        raise InputError(
            f"{max_median_error} is no error", where="--max-median-error", way_out="a share above 0, e.g. 0.15"
        )
    for option, given in (("--data", data), ("--kernels", kernels)):
        if report is not None and given is not None and report.resolve() == given.resolve():
            raise InputError(f"is also {option}", where=f"--report: {report}", way_out="another file")
    if report is not None and not report.absolute().parent.is_dir():
        raise InputError("its folder does not exist", where=f"--report: {report}")
    rows = bundled_rows() if data is None else read_rows(data)
    kernel_rows = bundled_kernels() if kernels is None else read_kernels(kernels)
    document = validate_rows(rows, simulate, bundled=data is None, jobs=jobs, tell=tell)
    document["data"] = {
        "rows": "bundled" if data is None else str(data),
        "kernels": "bundled" if kernels is None else str(kernels),
        "simulated": simulate is not None,
    }
    document["kernels"] = kernel_document(kernel_rows)
    document["summary"]["gates"] += [gate.entry() for gate in kernel_gates(document["kernels"]["summary"])]
    document["summary"]["max_median_error"] = max_median_error
    document["summary"]["bar_missed"] = bar_message(document)
    if report is not None:
        save_page(document, report)
    return document


def validate_rows(
    rows: Sequence[Row],
    simulate: Simulator | None = None,
    *,
    bundled: bool,
    jobs: int | None = None,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """The document of a validation, all but kernels.

    Parameters
    ----------
    rows : sequence of Row
    simulate : callable, optional
        Simulates a row.
    bundled : bool
        Whether these are the rows that the constants were fitted to, so that they can be cross-validated.

    Returns
    -------
    dict
        What `hrm.published.document` builds, and: ``summary.in_sample``, ``summary.cross_validation``,
        ``summary.gates``, ``summary.phases``, ``summary.eq12_refitted``, ``shares``, ``terms``, ``constants``,
        ``correlation``, and of the bundled rows ``cross_validated``.
    """
    values = fitted_values()
    results = judge_rows(rows, values, simulate, tell)
    document = build_document(rows, {r.row.id: r.prediction for r in results}, layers_of=_layers_of)
    summary = document["summary"]
    known = {row.id for row in rows if row.setting in SETTINGS}
    summary["differences"] = [each for each in summary["differences"] if known.issuperset(each["short_ids"])]
    summary["in_sample"] = in_sample(results)
    pairs = phase_pairs(results)
    summary["phases"] = pairs
    if bundled:
        crossed, gates, found = validate_folds(rows, simulate, jobs=jobs, tell=tell)
        summary["cross_validation"], summary["gates"] = crossed, [gate.entry() for gate in gates]
        for model in ("full", *(["simulated"] if simulate is not None else [])):
            summary["gates"] += [gate.entry() for gate in phase_gates(model, phase_errors(pairs, model))]
        document["cross_validated"] = {name: dict(each.predicted) for name, each in found.items()}
    else:
        stored = accuracy_document()
        summary["cross_validation"], summary["gates"] = stored["cross_validation"], list(stored["gates"])
    summary["eq12_refitted"] = accuracy_document()["eq12_refitted"]
    summary["intervals"] = accuracy_document()["intervals"]
    if tell is not None:
        tell("terms, shares and constants")
    document["terms"] = term_errors(rows, values)
    document["shares"] = [{"id": r.row.id, "terms": time_shares(r.row, values)} for r in results if r.full is not None]
    document |= constant_sections(values)
    cleaned: dict[str, Any] = finite(document)
    return cleaned


def constant_sections(values: Mapping[str, float]) -> dict[str, Any]:
    """Sections ``constants`` and ``correlation``: the shipped values, and how well the bundled rows know them."""
    fitted = fit_constants(usable_rows(bundled_rows()))
    entries = []
    for each in fitted.constants:
        constant = each.constant
        entries.append(
            {
                "component": constant.component,
                "name": constant.name.rpartition(".")[2],
                "value": values.get(constant.name, constant.public),
                "unit": constant.unit,
                "low": each.low,
                "high": each.high,
                "public_low": constant.low,
                "public_high": constant.high,
                "status": each.status,
                "source": _constant_words(constant, each.status),
            }
        )
    moving = [each.constant.name for each in fitted.constants if each.status == "fitted"]
    return {
        "constants": entries,
        "correlation": {"names": moving, "matrix": [[float(cell) for cell in row] for row in fitted.correlation]},
    }


def _constant_words(constant: Constant, status: str) -> str:
    how = {
        "fitted": "fitted to the published rows",
        "dropped": "not identified by the rows (90 % interval above a factor 3): its public value",
        "untouched": "no row depends on it: its public value",
    }[status]
    return f"{constant.words}; {how}. Public range: {constant.source}"


def bar_message(document: Mapping[str, Any]) -> str | None:
    """What is above `max_median_error`, in words; None where nothing is."""
    summary, said = document["summary"], []
    bar = summary["max_median_error"]
    crossed = summary["cross_validation"][GATE_FOLDS]["full"]["all rows"]
    errors = {f"cross-validated by {GATE_FOLDS}, over {crossed['n']} bundled rows": crossed["median_error"]}
    given = summary["models"].get("full", {}).get("all")
    if document["data"]["rows"] != "bundled":
        measured = sum(row["measured"] is not None for row in document["rows"])
        if measured:
            missed = math.inf if given is None else given["median_error"]
            errors[f"over the {measured} measured rows given"] = missed
    for words, error in errors.items():
        if error is None or error > bar:
            found = "rows without a prediction" if error is None or math.isinf(error) else f"{100 * error:.1f} %"
            said.append(f"median error of the full model, {words}: {found}, above {100 * bar:g} %")
    return "; ".join(said) or None


def check_bar(document: Mapping[str, Any]) -> None:
    """Raise where the bar of `--max-median-error` was missed.

    Raises
    ------
    BarMissedError
        It names what was missed, and by how much (exit code 4).
    """
    message = document["summary"]["bar_missed"]
    if message is not None:
        raise BarMissedError(message)


def save_page(document: Mapping[str, Any], path: Path) -> None:
    """Write the HTML report.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    from hrm.published.page import render_page

    page = render_page(document, title="hrm: predicted and measured")
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=f"--report: {path}") from None


def finite(value: Any) -> Any:
    """A document without infinity and nan, which are no JSON: None instead."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _layers_of(row: Row) -> int:
    """Layers of the model of a row; 1 where its setting is not known (such rows are not differenced)."""
    try:
        return find_setting(row).model.n_layers
    except HrmError:
        return 1
