"""What a person sees of a sweep: a line per point and schedule, and where each first reaches the bound."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hrm.sweep_labels import has_plan, title_of, value_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["limit_lines", "print_sweep", "reaching_lines"]

MOST_REASONS = 10


def print_sweep(document: dict[str, Any], console: Console) -> None:
    """Print the document of a sweep."""
    from rich import box
    from rich.table import Table

    for line in title_of(document):
        console.print(line)
    varied, simulated = document["varied"], document["inputs"]["simulated"]
    heads = [re.sub(r"([*+.])(?=.)", r"\1\n", axis["name"]) for axis in varied]  # values are short
    rates = ["simulated", "predicted"] if simulated else ["predicted"]
    heads += ["schedule", *rates, "of bound", "N", "mu", "A_g F_g", "r_w", "KV CPU", "bottleneck"]
    rows = [
        [*(value_text(axis, row[axis["name"]]) for axis in varied), *_numbers(row, simulated)]
        for row in document["rows"]
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head, *cells in zip(heads, *rows, strict=True):
        needed = max(len(line) for cell in (*head.split("\n"), *cells) for line in cell.split("\n"))
        words = head in ("schedule", "A_g F_g", "bottleneck")
        needed = 0 if head == "bottleneck" else needed  # the one that is cut where the screen is narrow
        table.add_column(head, justify="left" if words else "right", no_wrap=True, min_width=needed)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print("rates in token/s; of bound: share of what the cost model predicts where CPU memory is no limit")
    lines = [*_reason_lines(document), *reaching_lines(document), *limit_lines(document), *document["notes"]]
    for line in lines:
        console.print(line, soft_wrap=True)


def _numbers(row: dict[str, Any], simulated: bool) -> list[str]:
    predicted, bound = row["predicted_tokens_per_s"], row["bound_tokens_per_s"]
    rates = [row["simulated_tokens_per_s"], predicted] if simulated else [predicted]
    shown = next((rate for rate in rates if rate is not None), None)
    name = row["schedule"] if row["schedule"] != "best" or not row["ran"] else f"best: {row['ran']}"
    cells = [name, *("-" if rate is None else f"{rate:,.4g}" for rate in rates)]
    cells.append("-" if shown is None or not bound else f"{shown / bound:.1%}")
    if not has_plan(row):
        return [*cells, *["-"] * 5, "does not fit, see below" if "does not fit" in row["reason"] else "see below"]
    places = " ".join("GPU" if row[key] else "CPU" for key in ("attention_on_gpu", "ffn_on_gpu"))
    cells += [f"{row['batch_size']:,}", f"{row['micro_batch_size']:,}", places]
    return [*cells, f"{row['weights_on_gpu']:.3f}", f"{row['kv_on_cpu']:.0%}", row["bottleneck"].replace("_", " ")]


def _reason_lines(document: dict[str, Any]) -> list[str]:
    """Why rows have no numbers, one line for all schedules of a point that share the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in document["rows"]:
        if row["reason"]:
            at = ", ".join(f"{axis['name']} {value_text(axis, row[axis['name']])}" for axis in document["varied"])
            found.setdefault((at, row["reason"]), []).append(row["schedule"])
    lines = [f"{at} ({', '.join(schedules)}): {reason}" for (at, reason), schedules in found.items()]
    if len(lines) <= MOST_REASONS:
        return lines
    return [*lines[:MOST_REASONS], f"{len(lines) - MOST_REASONS} more reasons: see the column `reason` (-o, --json)"]


def reaching_lines(document: dict[str, Any]) -> list[str]:
    """Where each schedule first reaches 95 % of the bound, in words."""
    along = next((axis for axis in document["varied"] if axis["kind"] != "text"), None)
    if along is None:
        return []
    kinds = [("predicted", document["first_at_95_percent_predicted"])]
    if document["inputs"]["simulated"]:
        kinds.insert(0, ("simulated", document["first_at_95_percent"]))
    others = {axis["name"]: axis for axis in document["varied"] if axis is not along}
    lines = []
    for what, found in kinds:
        for schedule, reached in found.items():
            if what == "predicted" and schedule == "static_experts":
                continue  # it is simulated only
            places: dict[str, list[str]] = {}
            for entry in reached if others else [{"at": {}, "value": reached}]:
                value = entry["value"]
                said = "at no value here" if value is None else f"from {along['name']} = {value_text(along, value)}"
                at = [f"{name} {value_text(others[name], each)}" for name, each in entry["at"].items()]
                places.setdefault(said, []).append(", ".join(at))
            start = f"95 % of the bound, {what}: {schedule} "
            if len(places) == 1:
                lines.append(start + next(iter(places)))
            else:
                lines += [f"{start}{said} with {'; '.join(at)}" for said, at in places.items()]
    return lines


def limit_lines(document: dict[str, Any]) -> list[str]:
    """Limits other than memory that bind somewhere."""
    lines = []
    for limit, words in (
        ("requests", "the batch holds all requests (more --requests would give more, where memory allows)"),
        ("hours", "--max-hours bounds the batch"),
    ):
        rows = [row for row in document["rows"] if row["limits"] == limit]
        bounds = [row for row in document["rows"] if row["bound_limits"] == limit]
        if rows:
            lines.append(f"in {len(rows)} of {len(document['rows'])} rows {words}")
        if bounds:
            lines.append(f"in the bound of {len(bounds)} of {len(document['rows'])} rows {words}")
    return lines
