"""The 80 % interval of a prediction, from the errors that published rows had: `hrm/data/published/accuracy.yaml`.

Two kinds. Of a calibrated profile: the 10 % and 90 % quantiles of measured over predicted in cross-validation, each row
predicted by constants that its setting and workload did not see. Of datasheet peaks: the same of what the full cost
model says without any constant of a component or system. Both are of T4 and L4 runs of five systems; other machines,
and systems that were never measured, may be further off than either says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from hrm.errors import InputError
from hrm.published.scores import quantile

__all__ = ["HIGH", "LOW", "accuracy_document", "covered_without_own_fold", "error_quantiles", "interval_of"]

LOW, HIGH = 0.1, 0.9
"""Quantiles between which 80 % lie."""


@cache
def accuracy_document() -> Mapping[str, Any]:
    """What `hrm.published.accuracy.write_accuracy` found for the shipped rows and constants.

    Raises
    ------
    InputError
        The file is not there or is none of its kind.
    """
    where = "hrm/data/published/accuracy.yaml"
    path = files("hrm") / "data" / "published" / "accuracy.yaml"
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("is not there", where=where, way_out="python docs/refresh_accuracy.py writes it") from None
    if not isinstance(document, dict) or "intervals" not in document:
        raise InputError("has no intervals", where=where, way_out="python docs/refresh_accuracy.py writes it")
    return document


def interval_of(tokens_per_s: float, calibrated: bool) -> tuple[float, float]:
    """80 % interval of a throughput that the full cost model predicts.

    Parameters
    ----------
    tokens_per_s : float
        The prediction [token/s].
    calibrated : bool
        Whether the profile has fitted or measured efficiencies, else it works from datasheet peaks.

    Returns
    -------
    low, high : float
        [token/s]. From datasheet peaks even `high` may lie below the prediction: peaks are ceilings.
    """
    entry = accuracy_document()["intervals"]["calibrated" if calibrated else "uncalibrated"]
    return tokens_per_s * float(entry["low"]), tokens_per_s * float(entry["high"])


def error_quantiles(measured_over_predicted: Sequence[float]) -> tuple[float, float]:
    """Factors from a prediction to the ends of its interval: quantiles of ln(measured / predicted)."""
    logs = [math.log(ratio) for ratio in measured_over_predicted]
    return math.exp(quantile(logs, LOW)), math.exp(quantile(logs, HIGH))


def covered_without_own_fold(folds: Sequence[Sequence[float]]) -> list[tuple[float, float, float]]:
    """Every measured-over-predicted ratio beside an interval that its own fold had no part in.

    Parameters
    ----------
    folds : sequence of sequence of float
        Ratios by fold; at least two folds.

    Returns
    -------
    list of (ratio, low, high)
        In the order given.
    """
    found = []
    for index, fold in enumerate(folds):
        others = [ratio for place, other in enumerate(folds) if place != index for ratio in other]
        low, high = error_quantiles(others)
        found += [(ratio, low, high) for ratio in fold]
    return found
