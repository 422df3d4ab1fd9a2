"""How right the shipped constants are, measured once and kept: `hrm/data/published/accuracy.yaml`.

The intervals that every prediction carries come from there, and so do the figures of the cross-validation where the
command is given rows of its own. `python docs/refresh_accuracy.py` writes it anew after a fit; a test fails when it is
older than the constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hrm.errors import InputError
from hrm.published.comparisons import fold_rows
from hrm.published.constants import Values
from hrm.published.cross_validation import GATE_FOLDS, CrossValidation, cross_predict
from hrm.published.fit import fit_constants, usable_rows
from hrm.published.gates import Gate, coverage_of, error_gates, figures_of, interval_gate
from hrm.published.intervals import covered_without_own_fold, error_quantiles
from hrm.published.model import price_run, run_of_row
from hrm.published.predictions import RowResult, Simulator, Tell, eq12_row, judge_rows
from hrm.published.rows import Row, bundled_rows
from hrm.published.systems import fitted_values
from hrm.published.terms import at_peaks, term_errors

__all__ = [
    "ACCURACY_FILE",
    "eq12_refitted",
    "in_sample",
    "interval_entries",
    "measure_accuracy",
    "rounded",
    "validate_folds",
    "write_accuracy",
]

ACCURACY_FILE = Path(__file__).resolve().parent.parent / "data" / "published" / "accuracy.yaml"

HEAD = """\
# How right the shipped constants are against the published rows (throughput.csv beside this file).
# Written by `python docs/refresh_accuracy.py`; nothing here is edited by hand. Errors are |predicted / measured - 1|.
"""


def validate_folds(
    rows: Sequence[Row], simulate: Simulator | None, *, jobs: int | None = None, tell: Tell | None = None
) -> tuple[dict[str, Any], list[Gate], dict[str, CrossValidation]]:
    """Cross-validate both models in every way to fold.

    Returns
    -------
    summary : dict
        By folds and model: `figures_of`; of the folds that are judged ``interval`` too.
    gates : list of Gate
    found : dict of str to CrossValidation
        The predictions.
    """
    found = cross_predict(rows, simulate, jobs=jobs, tell=tell)
    models = ["full", *(["simulated"] if simulate is not None else [])]
    summary: dict[str, Any] = {
        name: {model: figures_of(rows, each.predicted[model]) for model in models} for name, each in found.items()
    }
    gates: list[Gate] = []
    for model in models:
        coverage = coverage_of(rows, found[GATE_FOLDS], model)
        summary[GATE_FOLDS][model]["interval"] = coverage
        gates += error_gates(model, {name: entry[model] for name, entry in summary.items()})
        gates.append(interval_gate(model, coverage))
    return summary, gates, found


def interval_entries(rows: Sequence[Row], validation: CrossValidation) -> dict[str, dict[str, float]]:
    """Both kinds of interval, as factors from the prediction: see `hrm.published.intervals`.

    Returns
    -------
    dict
        ``calibrated`` and ``uncalibrated``: ``low``, ``high``, ``n``, and ``coverage`` by intervals that a fold's own
        rows had no part in.
    """
    measured = {row.id: row.measured_tokens_per_s or math.nan for row in rows}
    known = {row.id: row for row in rows}
    priced = {name: price_run(at_peaks(run_of_row(known[name], {}))) for name in validation.predicted["full"]}
    peaks = {name: each.tokens_per_s for name, each in priced.items()}
    entries = {}
    for kind, predicted in (("calibrated", validation.predicted["full"]), ("uncalibrated", peaks)):
        folds = [[measured[name] / predicted[name] for name in fold if name in predicted] for fold in validation.folds]
        folds = [fold for fold in folds if fold]
        ratios = [ratio for fold in folds for ratio in fold]
        low, high = error_quantiles(ratios)
        inside = [first <= ratio <= last for ratio, first, last in covered_without_own_fold(folds)]
        entries[kind] = {"low": low, "high": high, "n": len(ratios), "coverage": sum(inside) / len(inside)}
    return entries


def _eq12_rate(row: Row, values: Values) -> float:
    return eq12_row(row, values)["eq12_fitted"].tokens_per_s


def eq12_refitted(rows: Sequence[Row]) -> dict[str, Any]:
    """The form of Eq. 12 with prefill and its own fit of the same constants: what it can do at best.

    Returns
    -------
    dict
        ``in_sample`` and ``cross_validated`` (`figures_of`), and the ``constants``.
    """
    values = fit_constants(usable_rows(rows), predict=_eq12_rate).values
    crossed: dict[str, float] = {}
    by_id = {row.id: row for row in rows}
    for fold in fold_rows(rows, GATE_FOLDS):
        training = usable_rows([by_id[name] for name in fold.train_ids])
        own = fit_constants(training, predict=_eq12_rate).values
        crossed |= {name: _eq12_rate(by_id[name], own) for name in fold.test_ids}
    return {
        "in_sample": figures_of(rows, {row.id: _eq12_rate(row, values) for row in rows}),
        "cross_validated": figures_of(rows, crossed),
        "constants": values,
    }


def measure_accuracy(
    simulate: Simulator | None = None, *, jobs: int | None = None, tell: Tell | None = None
) -> dict[str, Any]:
    """All that `accuracy.yaml` holds, from the bundled rows and the shipped constants.

    Parameters
    ----------
    simulate : callable, optional
        Simulates a row; without it the simulation is left out.
    """
    rows, values = bundled_rows(), fitted_values()
    results = judge_rows(rows, values, simulate, tell, with_interval=False)
    summary, gates, found = validate_folds(rows, simulate, jobs=jobs, tell=tell)
    return {
        "rows": len(rows),
        "constants": dict(values),
        "intervals": interval_entries(rows, found[GATE_FOLDS]),
        "in_sample": in_sample(results),
        "cross_validation": summary,
        "gates": [gate.entry() for gate in gates],
        "eq12_refitted": eq12_refitted(rows),
        "terms": term_errors(rows, values),
    }


def in_sample(results: Sequence[RowResult]) -> dict[str, Any]:
    """`figures_of` of every model, by its key."""
    rows = [result.row for result in results]
    keys = dict.fromkeys(key for result in results for key in result.prediction.predicted)
    return {
        key: figures_of(rows, {r.row.id: r.prediction.predicted[key] for r in results if key in r.prediction.predicted})
        for key in keys
    }


def write_accuracy(
    path: str | Path = ACCURACY_FILE,
    simulate: Simulator | None = None,
    *,
    jobs: int | None = None,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Measure how right the shipped constants are, and write it.

    Parameters
    ----------
    path : str or Path
    simulate : callable, optional
        Simulates a row (`simulator.published.replay_row`); without it the file has no figures of the simulation.
    jobs : int, optional
        Processes; one per core by default.
    tell : callable, optional
        Takes a line about progress.

    Returns
    -------
    dict
        What was written.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    document: dict[str, Any] = rounded(measure_accuracy(simulate, jobs=jobs, tell=tell))
    text = HEAD + yaml.safe_dump(document, sort_keys=False, width=120, default_flow_style=None)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None
    return document


def rounded(value: Any) -> Any:
    """Numbers to five significant digits, which is more than they mean; what is infinite or no number is None."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
