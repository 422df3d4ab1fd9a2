"""Pages that need nothing else: HTML with tables and figures in it, no network and no other file."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Column", "figure_svg", "heading", "html_page", "html_table", "note_line"]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; max-width: 1060px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; border-top: 1px solid #ccc; padding-top: 1rem; }
svg { max-width: 100%; height: auto; } p.note { color: #555; }
p.verdict { font-size: 1.05rem; border-left: 4px solid #0072B2; padding-left: 0.8rem; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 2px 8px; text-align: left; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
th { border-bottom: 1px solid #555; } td { white-space: nowrap; } td.number, th.number { text-align: right; }
td.note { white-space: normal; min-width: 34rem; color: #555; } tr:hover td { background: #f6f6f6; }
td:first-child, th:first-child { position: sticky; left: 0; background: #fff; }
"""

Column = tuple[str, bool]
"""Head of a column, and whether it holds numbers."""


def html_page(title: str, parts: Sequence[str]) -> str:
    """The whole page as text, its parts one below the other."""
    name, body = html.escape(title), "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{name}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n{body}\n</body>\n</html>\n"
    )


def heading(text: str) -> str:
    """Above a section."""
    return f"<h2>{html.escape(text)}</h2>"


def figure_svg(figure: Figure) -> str:
    """A figure as an SVG element to stand inside a page; the same figure always gives the same text."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "hrm", "svg.fonttype": "path"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = stream.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return f"<figure>{text.strip()}</figure>"


def note_line(text: str) -> str:
    """A paragraph."""
    return f'<p class="note">{html.escape(text)}</p>'


def html_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """Cells are texts, escaped here; a last column called `note` may be long."""

    def cell(tag: str, text: str, column: Column) -> str:
        kind = "number" if column[1] else "note" if column[0] == "note" and tag == "td" else ""
        return f"<{tag}{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", column[0], column) for column in columns)
    lines = ["".join(cell("td", text, column) for text, column in zip(row, columns, strict=True)) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
