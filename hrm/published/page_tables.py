"""Tables of the validation report, as HTML, each from a section of the document (`hrm.published.document`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hrm.html_pages import Column, html_table, note_line
from hrm.published.document import MODELS, scores_of_document
from hrm.published.figures import shown_models
from hrm.published.scores import Scored, group_scores, summarise

__all__ = [
    "constants_table",
    "differences_table",
    "error_tables",
    "number_text",
    "percent_text",
    "rows_table",
    "speed_up_table",
    "terms_table",
]


def error_tables(document: Mapping[str, Any]) -> list[str]:
    """Every prediction over all rows, then the errors of each by system and setting."""
    models = shown_models(document)
    scored = {model: scores_of_document(document, model) for model in models}
    entries = (document.get("summary") or {}).get("models") or {}
    overall = []
    for model in models:
        summary = summarise(scored[model])
        entry = entries.get(model) or {}
        interval = entry.get("interval") or {}
        overall.append(
            [
                MODELS[model],
                str(summary.count),
                str(summary.missed),
                percent_text(summary.median_error),
                percent_text(summary.p90_error),
                percent_text(summary.mean_error),
                percent_text(summary.bias, signed=True),
                f"{summary.worst_id} ({percent_text(summary.worst_error)})",
                percent_text((entry.get("order") or {}).get("share")),
                percent_text((entry.get("order_within_system") or {}).get("share")),
                percent_text(interval.get("coverage")),
                number_text(interval.get("mean_width")),
            ]
        )
    heads = ("prediction", "n", "missed", "median", "p90", "mean", "bias", "worst row")
    more = ("pairs in order", "of one system", "in the interval", "high / low")
    first = html_table([(name, name not in ("prediction", "worst row")) for name in heads + more], overall)
    groups = {model: group_scores(rows, _system_and_setting) for model, rows in scored.items()}
    names = sorted(next(iter(groups.values()), {}))
    by_group = [
        [
            *name,
            str(summarise(groups[models[0]][name]).count),
            *(percent_text(summarise(groups[model][name]).median_error) for model in models),
        ]
        for name in names
    ]
    columns = [("system", False), ("setting", False), ("n", True), *((MODELS[model], True) for model in models)]
    return [first, note_line("Median error by system and setting:"), html_table(columns, by_group)]


def _system_and_setting(scored: Scored) -> tuple[str, str]:
    return scored.system, scored.setting


def terms_table(terms: Sequence[Mapping[str, Any]]) -> str:
    """Each term switched on in turn; and, where the document has it, left out of the full model alone."""
    rows = [
        [
            str(entry["term"]),
            percent_text(entry["error_without"]),
            percent_text(entry["error_with"]),
            _points(entry["error_with"] - entry["error_without"]),
            percent_text(entry.get("error_left_out")),
            str(entry.get("rows", "")),
            percent_text(entry.get("touched_left_out")),
            percent_text(entry.get("touched_full")),
        ]
        for entry in terms
    ]
    heads = (
        "median without",
        "median with",
        "change",
        "left out alone",
        "rows it touches",
        "those without",
        "those with",
    )
    return html_table([("term", False), *((head, True) for head in heads)], rows)


def constants_table(constants: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            str(entry.get("component", "")),
            str(entry["name"]),
            _quantity(entry["value"], entry.get("unit") or ""),
            _quantity_range(entry.get("low"), entry.get("high"), entry.get("unit") or ""),
            _quantity_range(entry.get("public_low"), entry.get("public_high"), entry.get("unit") or ""),
            str(entry.get("source") or ""),
        ]
        for entry in constants
    ]
    heads = [
        ("component", False),
        ("constant", False),
        ("value", True),
        ("90 % interval", True),
        ("public range", True),
    ]
    return html_table([*heads, ("note", False)], rows)


def differences_table(differences: Sequence[Mapping[str, Any]]) -> str:
    models = list(dict.fromkeys(model for entry in differences for model in entry["predicted"]))
    rows = []
    for entry in differences:
        ids = " / ".join(", ".join(entry[key]) for key in ("short_ids", "long_ids"))
        for name, key in (("decode, per layer and step", "layer_s"), ("prefill", "prefill_s")):
            seconds = entry["measured"][key]
            cells = [f"{number_text(seconds)} s"]
            for model in models:
                value = (entry["predicted"].get(model) or {}).get(key)
                ratio = (
                    f" ({percent_text(value / seconds - 1, signed=True)})" if value is not None and seconds > 0 else ""
                )
                cells.append("" if value is None else f"{number_text(value)} s{ratio}")
            rows.append([ids, name, *cells])
    columns = [("rows", False), ("phase", False), ("measured", True), *((MODELS[model], True) for model in models)]
    return html_table(columns, rows)


def speed_up_table(speed_ups: Sequence[Mapping[str, Any]]) -> str:
    models = list(dict.fromkeys(model for entry in speed_ups for model in entry["predicted"]))
    words = {True: "padded", False: "unpadded"}
    rows = [
        [
            entry["setting"],
            f"{entry['id']}, {words[entry['padded']]}",
            f"{entry['baseline_id']} {entry['baseline_system']}, {words[entry['baseline_padded']]}",
            f"{entry['measured']:.2f}x",
            *(_times(entry["predicted"].get(model)) for model in models),
        ]
        for entry in speed_ups
    ]
    columns = [
        ("setting", False),
        ("row", False),
        ("over", False),
        ("measured", True),
        *((MODELS[model], True) for model in models),
    ]
    return html_table(columns, rows)


def rows_table(rows: Sequence[Mapping[str, Any]], models: Sequence[str]) -> str:
    described = ["setting", "system", "workload", "prompt_len", "padded", "gen_len", "mu", "n_ub", "N"]
    described = [key for key in described if any(key in row for row in rows)]
    lines = []
    for row in rows:
        measured, predicted = row.get("measured"), row.get("predicted", {})
        cells = [row["id"], *(_plain(row.get(key)) for key in described), number_text(measured)]
        for model in models:
            value = predicted.get(model)
            ratio = f" ({value / measured:.2f}x)" if value is not None and measured else ""
            cells.append(number_text(value) + ratio)
        interval = row.get("interval")
        cells.append(_range(*interval) if interval else "")
        lines.append([*cells, row.get("bottleneck") or "", row.get("note") or ""])
    words = ("setting", "system", "workload")
    columns: list[Column] = [("id", False), *((key, key not in words) for key in described), ("measured", True)]
    columns += [(MODELS[model], True) for model in models]
    columns += [("80 % interval", True), ("bottleneck", False), ("note", False)]
    return html_table(columns, lines)


def _plain(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def number_text(value: float | None) -> str:
    """Four significant figures, without an exponent where that can be read."""
    if value is None or value != value:
        return ""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def percent_text(share: float | None, *, signed: bool = False) -> str:
    if share is None or share != share:
        return ""
    if share == float("inf"):
        return "missed"
    return f"{100 * share:+.1f} %".replace("-", "−") if signed else f"{100 * share:.1f} %"


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points".replace("-", "−")


UNITS = {"byte/s": (1e-9, "GB/s"), "s": (1e3, "ms"), "": (100.0, "%")}
"""What a person reads a quantity in; other units stand as they are."""


def _quantity(value: float, unit: str) -> str:
    factor, shown = UNITS.get(unit, (1.0, unit))
    return f"{value * factor:.3g} {shown}"


def _quantity_range(low: float | None, high: float | None, unit: str) -> str:
    if low is None or high is None:
        return ""
    factor, shown = UNITS.get(unit, (1.0, unit))
    return f"{low * factor:.3g} to {high * factor:.3g} {shown}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _range(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f"{number_text(low)} to {number_text(high)}"
