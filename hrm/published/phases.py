"""Decode and prefill apart: rows equal in all but the generation length, and what the models say of each phase itself.

Measured is a difference of two runs (`hrm.published.comparisons`). Predicted is the phase as the model has it: prefill
of the shorter run, and a decode step per layer of the longer, whose mean context lies nearer the steps that the
difference is of. Differencing predicted totals, as the document does too, hides a prefill that is wrong in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hrm.published.comparisons import difference_rows
from hrm.published.predictions import RowResult
from hrm.published.scores import quantile
from hrm.published.settings import find_setting

__all__ = ["phase_errors", "phase_pairs"]

PHASES = {"layer_s": "decode, per layer and step", "prefill_s": "prefill"}


def phase_pairs(results: Sequence[RowResult]) -> list[dict[str, Any]]:
    """Every pair that can be differenced, with both phases measured and as the models have them.

    Returns
    -------
    list of dict
        ``short_ids``, ``long_ids``, ``gen_len``; ``measured``, ``full`` and ``simulated``: ``layer_s``, ``prefill_s``
        [s]; the last two only where every row of the pair is predicted.
    """
    by_id = {result.row.id: result for result in results}
    rows = [result.row for result in results if result.full is not None and result.row.batch_size is not None]
    entries = []
    for each in difference_rows(rows, lambda row: find_setting(row).model.n_layers):
        short, long = [by_id[name] for name in each.short_ids], [by_id[name] for name in each.long_ids]
        entry: dict[str, Any] = {
            "short_ids": list(each.short_ids),
            "long_ids": list(each.long_ids),
            "gen_len": [each.short_gen_len, each.long_gen_len],
            "measured": {"layer_s": each.layer_s, "prefill_s": each.prefill_s},
            "full": {"layer_s": _mean(long, _full_layer), "prefill_s": _mean(short, _full_prefill)},
        }
        if all(result.simulated is not None for result in (*short, *long)):
            entry["simulated"] = {
                "layer_s": _mean(long, _simulated_layer),
                "prefill_s": _mean(short, _simulated_prefill),
            }
        entries.append(entry)
    return entries


def phase_errors(pairs: Sequence[dict[str, Any]], model: str) -> dict[str, float]:
    """Median |predicted / measured - 1| of each phase over the pairs that a model has; nan without any."""
    found = [pair for pair in pairs if model in pair]
    return {
        phase: quantile([_error(pair[model][phase], pair["measured"][phase]) for pair in found], 0.5)
        for phase in PHASES
    }


def _error(predicted: float, measured: float) -> float:
    """Infinite where noise leaves nothing, or less, of the measured phase."""
    return abs(predicted / measured - 1.0) if measured > 0 else math.inf


def _mean(results: Sequence[RowResult], seconds: Callable[[RowResult], float]) -> float:
    """Geometric mean over repeats."""
    return math.exp(sum(math.log(seconds(result)) for result in results) / len(results))


def _full_layer(result: RowResult) -> float:
    return result.full.layer_s if result.full is not None else math.nan


def _full_prefill(result: RowResult) -> float:
    return result.full.prefill_s if result.full is not None else math.nan


def _simulated_layer(result: RowResult) -> float:
    if result.simulated is None:
        return math.nan
    steps = max(1, result.row.gen_len - 1)
    return result.simulated.decode_s / steps / find_setting(result.row).model.n_layers


def _simulated_prefill(result: RowResult) -> float:
    return result.simulated.prefill_s if result.simulated is not None else math.nan
