"""The validation report: one HTML page that needs nothing else, no network and no other file.

It shows the document of `hrm.published.document`, and more sections where the document has them:

- ``shares``: ``[{"id", "terms": {name: share of the row's time}}]``
- ``terms``: ``[{"term", "error_without", "error_with"}]``, medians over all rows, in the order terms are switched on
- ``constants``: ``[{"component", "name", "value", "unit", "low", "high", "public_low", "public_high", "source"}]``
- ``correlation``, ``kernels``, and in ``summary`` ``gates``, ``in_sample``, ``cross_validation`` and ``phases``: as
  `hrm.published.validation` makes them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hrm.html_pages import figure_svg, heading, html_page, note_line
from hrm.published.figures import draw_constants, draw_errors, draw_scatter, draw_shares, draw_terms, shown_models
from hrm.published.page_sections import correlation_table, folds_table, gates_table, kernel_tables, phases_table
from hrm.published.page_tables import (
    constants_table,
    differences_table,
    error_tables,
    rows_table,
    speed_up_table,
    terms_table,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure_svg", "render_page"]

TERMS_NOTE = (
    "From the top: Eq. 12's form in this model's counting (decode alone, datasheet peaks, the busiest lane), and each "
    "term switched on after those above it. What a term does depends on those before it, so the table also leaves each "
    "out of the whole model alone: over all rows, and over those it changes by more than 1 %."
)


def render_page(document: Mapping[str, Any], *, title: str = "Predicted and measured") -> str:
    """The whole page as HTML text.

    Parameters
    ----------
    document : mapping
        ``rows`` must be there; every other section is left out where the document does not have it.
    title : str
    """
    parts: list[str] = []
    rows = document["rows"]
    models = shown_models(document)
    measured = sum(row.get("measured") is not None for row in rows)
    parts.append(
        note_line(
            f"{len(rows)} rows, {measured} of them measured. Throughput is generated tokens over prefill and decode, "
            "in token/s. The error of a row is |predicted / measured − 1|; a measured row without a prediction is "
            "missed, and counts as infinitely wrong in medians."
        )
    )
    if models and measured:
        parts += [heading("Predicted against measured"), figure_svg(draw_scatter(document))]
        if any(row.get("interval") for row in rows):
            parts.append(note_line("Thin vertical lines are the 80 % intervals of the full cost model."))
        parts += [heading("Error by system and setting"), figure_svg(draw_errors(document)), *error_tables(document)]
    summary = document.get("summary") or {}
    if summary.get("gates"):
        parts += [heading("Bars"), gates_table(summary["gates"])]
    if summary.get("cross_validation"):
        parts += [heading("In sample and cross-validated"), folds_table(summary)]
    if document.get("terms"):
        terms = document["terms"]
        parts += [heading("What Eq. 12 leaves out, by how much"), note_line(TERMS_NOTE)]
        parts += [figure_svg(draw_terms(terms)), terms_table(terms)]
    parts += _section(document, "shares", "Where the time of each row goes", lambda rows: _shares(rows, document), None)
    parts += _section(document, "constants", "Constants, with their 90 % intervals", draw_constants, constants_table)
    if document.get("correlation"):
        parts.append(correlation_table(document["correlation"]))
    if document.get("kernels"):
        parts += [heading("Kernels"), *kernel_tables(document["kernels"])]
    if summary.get("phases"):
        parts += [heading("Decode and prefill, each as the models have it"), phases_table(summary["phases"])]
    if summary.get("differences"):
        parts += [heading("Decode and prefill, by difference"), differences_table(summary["differences"])]
    if summary.get("speed_ups"):
        parts += [heading("Speed-ups over FlexGen and DeepSpeed"), speed_up_table(summary["speed_ups"])]
    parts += [heading("All rows"), rows_table(rows, models)]
    return html_page(title, parts)


def _section(
    document: Mapping[str, Any],
    key: str,
    title: str,
    draw: Callable[[Sequence[Mapping[str, Any]]], Figure],
    table: Callable[[Sequence[Mapping[str, Any]]], str] | None,
) -> list[str]:
    found = document.get(key)
    if not found:
        return []
    return [heading(title), figure_svg(draw(found)), *([table(found)] if table is not None else [])]


def _shares(shares: Sequence[Mapping[str, Any]], document: Mapping[str, Any]) -> Figure:
    labels = {}
    for row in document["rows"]:
        words = [row["id"], *(row.get(key) for key in ("setting", "system", "workload", "gen_len"))]
        labels[row["id"]] = " ".join(str(word) for word in words if word is not None)
    return draw_shares(shares, labels)
