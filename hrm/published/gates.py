"""The bars that the models have to meet, each with what was found: in sample, and in every cross-validation.

What is judged is cross-validation by setting and workload: repeats of one point are never split, and a row is predicted
by constants that saw neither its setting with its workload nor, of course, itself. In-sample errors and the other folds
stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hrm.published.comparisons import OURS
from hrm.published.cross_validation import GATE_FOLDS, CrossValidation
from hrm.published.fit import certain_policy
from hrm.published.intervals import covered_without_own_fold
from hrm.published.rows import Row
from hrm.published.scores import pair_order, score_row, summarise

__all__ = ["Gate", "coverage_of", "error_gates", "figures_of", "interval_gate", "kernel_gates", "phase_gates"]

SETTING_FOLDS = "leave one setting out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One bar.

    Attributes
    ----------
    name, model : str
    value : float
        What was found; infinite where missed rows decide, nan where nothing could be judged.
    bar : float
    at_most : bool
        Whether the value must not be above the bar, else not below.
    bar_high : float or None
        Upper bar, where there are two.
    """

    name: str
    model: str
    value: float
    bar: float
    at_most: bool = True
    bar_high: float | None = None

    @property
    def passes(self) -> bool:
        """Whether the bar is met."""
        if math.isnan(self.value):
            return False
        if self.bar_high is not None:
            return self.bar <= self.value <= self.bar_high
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def entry(self) -> dict[str, Any]:
        """As the document has it; infinite and nan are None."""
        return {
            "name": self.name,
            "model": self.model,
            "value": self.value if math.isfinite(self.value) else None,
            "bar": self.bar,
            "bar_high": self.bar_high,
            "at_most": self.at_most,
            "passes": self.passes,
        }


def _certain(row: Row) -> bool:
    return row.system in OURS and certain_policy(row)


def _single_gpu(row: Row) -> bool:
    return row.setting in ("S1", "S2")


GROUPS: dict[str, Callable[[Row], bool]] = {
    "MoE-Lightning, certain policy": _certain,
    "S1 and S2": _single_gpu,
    "all rows": lambda row: True,
}
"""Rows that are judged together."""

ERROR_BARS = (
    ("MoE-Lightning, certain policy", "median_error", 0.12, "median error"),
    ("S1 and S2", "median_error", 0.15, "median error"),
    ("all rows", "median_error", 0.20, "median error"),
    ("S1 and S2", "p90_error", 0.35, "p90 error"),
    ("all rows", "p90_error", 0.45, "p90 error"),
)


def figures_of(rows: Sequence[Row], predicted: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Errors of every group, and the order of pairs, of one model.

    Returns
    -------
    dict
        By group: ``n``, ``missed``, ``median_error``, ``p90_error``, ``mean_error``, ``bias``, ``worst_id``; and
        ``order``, ``order_within_system``: ``pairs``, ``ordered``, ``share``.
    """
    scored = {row.id: score_row(row, predicted.get(row.id)) for row in rows if row.measured_tokens_per_s is not None}
    found: dict[str, dict[str, Any]] = {}
    for group, belongs in GROUPS.items():
        summary = summarise(scored[row.id] for row in rows if row.id in scored and belongs(row))
        found[group] = {
            "n": summary.count,
            "missed": summary.missed,
            "median_error": summary.median_error,
            "p90_error": summary.p90_error,
            "mean_error": summary.mean_error,
            "bias": summary.bias,
            "worst_id": summary.worst_id,
        }
    for name, within in (("order", False), ("order_within_system", True)):
        order = pair_order(list(scored.values()), within_system=within)
        found[name] = {"pairs": order.pairs, "ordered": order.ordered, "share": order.share}
    return found


def error_gates(model: str, by_folds: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Gate]:
    """Bars on errors and order of one model.

    Parameters
    ----------
    model : str
        ``full`` or ``simulated``.
    by_folds : mapping
        `figures_of` of every cross-validation by name.
    """
    judged = by_folds[GATE_FOLDS]
    gates = [
        Gate(name=f"{words}, {group}", model=model, value=judged[group][key], bar=bar)
        for group, key, bar, words in ERROR_BARS
    ]
    if SETTING_FOLDS in by_folds:
        value = by_folds[SETTING_FOLDS]["all rows"]["median_error"]
        gates.append(Gate(name=f"median error, {SETTING_FOLDS}", model=model, value=value, bar=0.20))
    for key, bar, words in (
        ("order", 0.90, "pairs of a setting in order"),
        ("order_within_system", 0.85, "pairs of one system in order"),
    ):
        gates.append(Gate(name=words, model=model, value=judged[key]["share"], bar=bar, at_most=False))
    return gates


def coverage_of(rows: Sequence[Row], validation: CrossValidation, model: str) -> dict[str, float]:
    """How many rows lie in an interval whose width their own fold had no part in, and how wide intervals are.

    Returns
    -------
    dict
        ``n``, ``covered``, ``coverage``, ``mean_width``: geometric mean of high / low.
    """
    measured = {row.id: row.measured_tokens_per_s for row in rows}
    predicted = validation.predicted[model]
    folds = [
        [(measured[name] or math.nan) / predicted[name] for name in fold if name in predicted]
        for fold in validation.folds
    ]
    entries = covered_without_own_fold([fold for fold in folds if fold])
    covered = sum(low <= ratio <= high for ratio, low, high in entries)
    width = math.exp(sum(math.log(high / low) for _, low, high in entries) / len(entries))
    count = sum(len(fold) for fold in validation.folds)  # a row without a prediction is not covered
    return {"n": count, "covered": covered, "coverage": covered / count, "mean_width": width}


def interval_gate(model: str, coverage: Mapping[str, float]) -> Gate:
    """Bar on the share of rows in their 80 % interval."""
    return Gate(name="rows in their 80 % interval", model=model, value=coverage["coverage"], bar=0.70, bar_high=0.90)


def kernel_gates(summary: Mapping[str, Mapping[str, Any]]) -> list[Gate]:
    """Bar on every kernel, each size left out in turn."""
    found = []
    for kernel, entry in summary.items():
        error = entry["median_error"]
        value = math.inf if error is None else error
        found.append(Gate(name=f"median error, {kernel}", model="kernel roofline", value=value, bar=0.08))
    return found


def phase_gates(model: str, errors: Mapping[str, float]) -> list[Gate]:
    """Bars on decode and prefill of the differenced rows, in sample: they are too few to cross-validate."""
    words = {"layer_s": "decode", "prefill_s": "prefill"}
    return [
        Gate(name=f"median error, {words[phase]} by difference, each pair below", model=model, value=error, bar=0.25)
        for phase, error in errors.items()
    ]
