"""The one document of a validation: what `--json` prints and the HTML page shows. Throughputs in token/s."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hrm.published.comparisons import Difference, difference_rows, speed_ups
from hrm.published.eq12 import VARIANTS, Eq12, Variant
from hrm.published.rows import Row
from hrm.published.scores import Scored, Summary, group_scores, interval_coverage, pair_order, summarise

__all__ = ["MODELS", "RowPrediction", "build_document", "eq12_predictions", "scores_of_document"]

MODELS = {
    "eq12_authors": "Eq. 12, authors' constants",
    "eq12_authors_decode_only": "Eq. 12, authors' constants, decode only",
    "eq12_datasheet": "Eq. 12, datasheet peaks",
    "eq12_datasheet_decode_only": "Eq. 12, datasheet peaks, decode only",
    "eq12_fitted": "Eq. 12, fitted rates",
    "eq12_fitted_decode_only": "Eq. 12, fitted rates, decode only",
    "full": "full cost model",
    "simulated": "simulated",
}
"""Key of a prediction, and what it is."""

INTERVAL_MODEL = "full"
"""The prediction that the interval of a row belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrediction:
    """What is predicted of one row.

    Attributes
    ----------
    predicted : Mapping of str to float
        By key of `MODELS`; those without a prediction are left out [token/s].
    interval : tuple of float or None
        80 % interval of the full model [token/s].
    bottleneck : str
    note : str
        What was assumed; where nothing is predicted, why.
    """

    predicted: Mapping[str, float] = field(default_factory=dict)
    interval: tuple[float, float] | None = None
    bottleneck: str = ""
    note: str = ""


def eq12_predictions(found: Mapping[Variant, Eq12]) -> dict[str, float]:
    """The six numbers of Eq. 12 under their keys: each variant with prefill, and its decode alone [token/s]."""
    predicted: dict[str, float] = {}
    for variant in (each for each in VARIANTS if each in found):
        predicted[variant] = found[variant].tokens_per_s
        if found[variant].decode_only_tokens_per_s > 0.0:  # one generated token comes out of prefill
            predicted[f"{variant}_decode_only"] = found[variant].decode_only_tokens_per_s
    return predicted


def build_document(
    rows: Sequence[Row], predictions: Mapping[str, RowPrediction], *, layers_of: Callable[[Row], int]
) -> dict[str, Any]:
    """Rows and summary as plain values; what is infinite or not a number is None.

    Parameters
    ----------
    rows : sequence of Row
    predictions : mapping of str to RowPrediction
        By id; a row without one is missed.
    layers_of : callable
        Layers of the model of a row.
    """
    entries = [_row_entry(row, predictions.get(row.id, RowPrediction(note="no prediction"))) for row in rows]
    document: dict[str, Any] = {"rows": entries, "summary": {}}
    present = {key for entry in entries for key, value in entry["predicted"].items() if value is not None}
    models = [key for key in MODELS if key in present]
    document["summary"] = {
        "models": {key: _model_entry(scores_of_document(document, key), key) for key in models},
        "eq12_error": _eq12_split(entries),
        "differences": _differences(rows, predictions, models, layers_of),
        "speed_ups": _speed_ups(rows, predictions, [key for key in models if not key.endswith("_decode_only")]),
    }
    return document


def scores_of_document(document: Mapping[str, Any], model: str) -> list[Scored]:
    """The rows of a document beside one of its predictions."""
    found = []
    for entry in document["rows"]:
        low, high = entry.get("interval") or (None, None)
        if model != INTERVAL_MODEL:
            low, high = None, None
        keys = ("setting", "system", "workload", "prompt_len", "padded", "gen_len", "mu", "n_ub")
        found.append(
            Scored(
                id=entry["id"],
                setting=entry.get("setting") or "?",
                system=entry.get("system") or "?",
                # without its context a row cannot be told to repeat another
                point=tuple(entry.get(key) for key in keys) if "setting" in entry else (entry["id"],),
                measured=entry.get("measured"),
                predicted=entry.get("predicted", {}).get(model),
                low=low,
                high=high,
            )
        )
    return found


def _row_entry(row: Row, prediction: RowPrediction) -> dict[str, Any]:
    measured = row.measured_tokens_per_s
    predicted = {key: _plain(prediction.predicted.get(key)) for key in MODELS}
    ratio = {key: value / measured for key, value in predicted.items() if value is not None and measured is not None}
    return {
        "id": row.id,
        "setting": row.setting,
        "system": row.system,
        "workload": row.workload,
        "prompt_len": row.prompt_len,
        "padded": row.padded,
        "gen_len": row.gen_len,
        "mu": row.micro_batch_size,
        "n_ub": row.num_micro_batches,
        "N": row.batch_size,
        "measured": measured,
        "predicted": predicted,
        "ratio": ratio,
        "interval": None if prediction.interval is None else list(prediction.interval),
        "bottleneck": prediction.bottleneck or None,
        "note": prediction.note,
    }


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _summary_entry(summary: Summary) -> dict[str, Any]:
    return {key: _plain(value) if isinstance(value, float) else value for key, value in asdict(summary).items()}


def _model_entry(scored: list[Scored], model: str) -> dict[str, Any]:
    groups: dict[str, Callable[[Scored], str]] = {
        "by_setting": lambda each: each.setting,
        "by_system": lambda each: each.system,
        "by_system_and_setting": lambda each: f"{each.system}, {each.setting}",
    }
    entry: dict[str, Any] = {"all": _summary_entry(summarise(scored))}
    for name, key in groups.items():
        entry[name] = {group: _summary_entry(summarise(rows)) for group, rows in group_scores(scored, key).items()}
    for name, within in (("order", False), ("order_within_system", True)):
        order = pair_order(scored, within_system=within)
        entry[name] = {"pairs": order.pairs, "ordered": order.ordered, "share": _plain(order.share)}
    if model == INTERVAL_MODEL:
        intervals = interval_coverage(scored)
        entry["interval"] = {
            "count": intervals.count,
            "coverage": _plain(intervals.coverage),
            "mean_width": _plain(intervals.mean_width),
        }
    return entry


def _eq12_split(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Error of Eq. 12 with the authors' constants: what the constants do, and what is left with fitted rates."""
    split = []
    for entry in entries:
        authors, fitted = entry["predicted"]["eq12_authors"], entry["predicted"]["eq12_fitted"]
        measured = entry["measured"]
        if None not in (authors, fitted, measured):
            split.append({"id": entry["id"], "constants": authors - fitted, "form": fitted - measured})
    return split


def _difference_entry(difference: Difference) -> dict[str, float]:
    return {"step_s": difference.step_s, "layer_s": difference.layer_s, "prefill_s": difference.prefill_s}


def _differences(
    rows: Sequence[Row],
    predictions: Mapping[str, RowPrediction],
    models: Sequence[str],
    layers_of: Callable[[Row], int],
) -> list[dict[str, Any]]:
    """Decode and prefill by difference, measured and, from predicted totals in the same way, predicted."""
    measured = [row for row in rows if row.measured_total_s is not None and row.batch_size is not None]
    predicted: dict[str, dict[tuple[str, ...], Difference]] = {}
    for model in (each for each in models if not each.endswith("_decode_only")):

        def total_of(row: Row, model: str = model) -> float | None:
            value = predictions.get(row.id, RowPrediction()).predicted.get(model)
            return None if value is None or row.batch_size is None else row.batch_size * row.gen_len / value

        found = difference_rows(measured, layers_of, total_of)
        predicted[model] = {(*each.short_ids, *each.long_ids): each for each in found}
    entries = []
    for each in difference_rows(measured, layers_of):
        ids = (*each.short_ids, *each.long_ids)
        entries.append(
            {
                "short_ids": list(each.short_ids),
                "long_ids": list(each.long_ids),
                "gen_len": [each.short_gen_len, each.long_gen_len],
                "measured": _difference_entry(each),
                "predicted": {model: _difference_entry(by[ids]) for model, by in predicted.items() if ids in by},
            }
        )
    return entries


def _speed_ups(
    rows: Sequence[Row], predictions: Mapping[str, RowPrediction], models: Sequence[str]
) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for model in models or [""]:

        def predicted(row: Row, model: str = model) -> float | None:
            return predictions.get(row.id, RowPrediction()).predicted.get(model)

        for index, each in enumerate(speed_ups(rows, predicted)):
            if index == len(entries):
                entries.append(
                    {
                        "setting": each.setting,
                        "id": each.id,
                        "baseline_id": each.baseline_id,
                        "baseline_system": each.baseline_system,
                        "padded": each.padded,
                        "baseline_padded": each.baseline_padded,
                        "measured": each.measured,
                        "predicted": {},
                    }
                )
            if model:
                entries[index]["predicted"][model] = each.predicted
    return entries
