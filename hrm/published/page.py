"""The validation report: one HTML page that needs nothing else, no network and no other file.

It shows the document of `hrm.published.document`, and more sections where the document has them:

- ``shares``: ``[{"id", "terms": {name: share of the row's time}}]``
- ``terms``: ``[{"term", "error_without", "error_with"}]``, medians over all rows, in the order terms are switched on
- ``constants``: ``[{"component", "name", "value", "unit", "low", "high", "public_low", "public_high", "source"}]``
- ``correlation``, ``kernels``, and in ``summary`` ``gates``, ``in_sample``, ``cross_validation`` and ``phases``: as
  `hrm.published.validation` makes them
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hrm.published.figures import draw_constants, draw_errors, draw_scatter, draw_shares, draw_terms, shown_models
from hrm.published.page_sections import correlation_table, folds_table, gates_table, kernel_tables, phases_table
from hrm.published.page_tables import (
    constants_table,
    differences_table,
    error_tables,
    note_line,
    rows_table,
    speed_up_table,
    terms_table,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure_svg", "render_page"]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; max-width: 1060px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; border-top: 1px solid #ccc; padding-top: 1rem; }
svg { max-width: 100%; height: auto; } p.note { color: #555; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 2px 8px; text-align: left; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
th { border-bottom: 1px solid #555; } td { white-space: nowrap; } td.number, th.number { text-align: right; }
td.note { white-space: normal; min-width: 34rem; color: #555; } tr:hover td { background: #f6f6f6; }
td:first-child, th:first-child { position: sticky; left: 0; background: #fff; }
"""


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
        parts += [_head("Predicted against measured"), figure_svg(draw_scatter(document))]
        if any(row.get("interval") for row in rows):
            parts.append(note_line("Thin vertical lines are the 80 % intervals of the full cost model."))
        parts += [_head("Error by system and setting"), figure_svg(draw_errors(document)), *error_tables(document)]
    summary = document.get("summary") or {}
    if summary.get("gates"):
        parts += [_head("Bars"), gates_table(summary["gates"])]
    if summary.get("cross_validation"):
        parts += [_head("In sample and cross-validated"), folds_table(summary)]
    if document.get("terms"):
        terms = document["terms"]
        parts += [_head("What Eq. 12 leaves out, by how much"), note_line(TERMS_NOTE)]
        parts += [figure_svg(draw_terms(terms)), terms_table(terms)]
    parts += _section(document, "shares", "Where the time of each row goes", lambda rows: _shares(rows, document), None)
    parts += _section(document, "constants", "Constants, with their 90 % intervals", draw_constants, constants_table)
    if document.get("correlation"):
        parts.append(correlation_table(document["correlation"]))
    if document.get("kernels"):
        parts += [_head("Kernels"), *kernel_tables(document["kernels"])]
    if summary.get("phases"):
        parts += [_head("Decode and prefill, each as the models have it"), phases_table(summary["phases"])]
    if summary.get("differences"):
        parts += [_head("Decode and prefill, by difference"), differences_table(summary["differences"])]
    if summary.get("speed_ups"):
        parts += [_head("Speed-ups over FlexGen and DeepSpeed"), speed_up_table(summary["speed_ups"])]
    parts += [_head("All rows"), rows_table(rows, models)]
    body = "\n".join(parts)
    name = html.escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{name}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n{body}\n</body>\n</html>\n"
    )


def figure_svg(figure: Figure) -> str:
    """A figure as an SVG element to stand inside a page; the same figure always gives the same text."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "hrm", "svg.fonttype": "path"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = stream.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return f"<figure>{text.strip()}</figure>"


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
    return [_head(title), figure_svg(draw(found)), *([table(found)] if table is not None else [])]


def _shares(shares: Sequence[Mapping[str, Any]], document: Mapping[str, Any]) -> Figure:
    labels = {}
    for row in document["rows"]:
        words = [row["id"], *(row.get(key) for key in ("setting", "system", "workload", "gen_len"))]
        labels[row["id"]] = " ".join(str(word) for word in words if word is not None)
    return draw_shares(shares, labels)


def _head(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"
