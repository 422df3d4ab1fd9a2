"""The tables of README.md: how right every model is, and what each term does, from `accuracy.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hrm.published.cross_validation import GATE_FOLDS
from hrm.published.document import MODELS

__all__ = ["readme_tables"]

GROUPS = ("MoE-Lightning, certain policy", "S1 and S2", "all rows")


def readme_tables(accuracy: Mapping[str, Any]) -> str:
    """Both tables as Markdown.

    Parameters
    ----------
    accuracy : mapping
        What `hrm.published.accuracy.measure_accuracy` gives.
    """
    return f"{_models(accuracy)}\n{_terms(accuracy['terms'])}"


def _models(accuracy: Mapping[str, Any]) -> str:
    found, crossed = accuracy["in_sample"], accuracy["cross_validation"][GATE_FOLDS]
    own = accuracy["eq12_refitted"]
    lines: list[tuple[str, str, Mapping[str, Any]]] = [
        (MODELS[key], "in sample" if "fitted" in key else "nothing fitted", found[key])
        for key in ("eq12_authors_decode_only", "eq12_authors", "eq12_datasheet", "eq12_fitted")
    ]
    lines.append(("Eq. 12, the same constants fitted through it", "cross-validated", own["cross_validated"]))
    for key in (each for each in ("full", "simulated") if each in found):
        lines.append((MODELS[key], "in sample", found[key]))
        if key in crossed:
            lines.append((f"**{MODELS[key]}**", "**cross-validated**", crossed[key]))
    rows = [
        [
            name,
            how,
            *(_percent(entry[group]["median_error"]) for group in GROUPS),
            _percent(entry["all rows"]["p90_error"]),
            _percent(entry["order"]["share"]),
        ]
        for name, how, entry in lines
    ]
    counts = [found["full"][group]["n"] for group in GROUPS]
    groups = [f"{group} ({count})" for group, count in zip(GROUPS, counts, strict=True)]
    return _table(["median error of", "", *groups, "p90, all", "pairs in order"], rows, words=2)


def _terms(terms: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            entry["term"],
            f"{_percent(entry['error_without'])} → {_percent(entry['error_with'])}",
            _percent(entry["error_left_out"]),
            str(entry["rows"]),
            "" if not entry["rows"] else f"{_percent(entry['touched_full'])} → {_percent(entry['touched_left_out'])}",
        ]
        for entry in terms
    ]
    heads = ["term that Eq. 12 leaves out", "switched on in turn", "left out alone", "rows", "of those, left out"]
    return _table(heads, rows, words=1)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, words: int) -> str:
    """A Markdown table whose first columns are words and whose others are numbers."""
    marks = ["---" if place < words else "---:" for place in range(len(heads))]
    lines = [heads, marks, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _percent(share: float | None) -> str:
    if share is None:
        return "missed"
    return f"{100 * share:.0f} %" if share >= 1 else f"{100 * share:.1f} %"
