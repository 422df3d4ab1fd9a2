"""Two traces beside each other on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hrm.gantt import lane_in_words
from hrm.trace_names import parse_lane

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_diff"]

MANY_LAYERS = 12
"""More layers than this are summed up."""
SHORT_S = 10.0
"""Traces below this are shown in milliseconds."""
PACED = {"none": "", "some": "~", "all": "*"}


def print_diff(document: Mapping[str, Any], console: Console) -> None:
    """Print what `hrm.diff.diff_files` found."""
    one, other = document["labels"]
    for label, key in ((one, "first"), (other, "second")):
        alike = document["first"]["kind"] == document["second"]["kind"]
        console.print(
            _origin_line(f"{label} ({document[key]['kind']})" if alike else label, document[key]), markup=False
        )
    for line in _difference_lines(document):
        console.print(line, markup=False)
    show = _Numbers(document)
    console.print(
        f"{document['tasks']:,} tasks in both; {show.unit} of task time, added up; ratio: {other} / {one}", markup=False
    )
    for table in (_totals(document, show), _ops(document, show), _lanes(document, show), _layers(document, show)):
        console.print(table)
    console.print(_top(document, show))
    for line in (*_accuracy_lines(document), *_emulation_lines(document), *_order_lines(document)):
        console.print(line, markup=False)


class _Numbers:
    """Seconds as the screen shows them: one unit for all."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        longest = max(document["makespan"]["first_s"], document["makespan"]["second_s"])
        self.unit, self._scale = ("ms", 1e3) if longest < SHORT_S else ("s", 1.0)

    def seconds(self, seconds: float | None) -> str:
        if seconds is None:
            return "-"
        shown = seconds * self._scale
        return ("<0.001" if shown > 0.0 else ">-0.001") if 0.0 < abs(shown) < 0.0005 else f"{shown:,.3f}"

    def row(self, row: Mapping[str, Any]) -> list[str]:
        """Predicted, first, second and their ratio."""
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        return [*(self.seconds(row[key]) for key in ("predicted_s", "first_s", "second_s")), ratio + _mark(row)]


def _mark(row: Mapping[str, Any]) -> str:
    return PACED[row.get("paced", "none")]


def _origin_line(label: str, trace: Mapping[str, Any]) -> str:
    words = [f"{trace['model']} on {trace['hardware']}", trace["workload"], f"schedule {trace['schedule']}"]
    words += [trace["steps"], *(f"{key} {value}" for key, value in trace["origin"].items())]
    return f"{label}: {trace['file']} ({', '.join(words)})"


def _difference_lines(document: Mapping[str, Any]) -> list[str]:
    one, other = document["labels"]
    return [
        f"! another {each['what']}: {one} {each['first']}, {other} {each['second']}" for each in document["differs"]
    ]


def _table(head: str, labels: Sequence[str], *more: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(head, overflow="fold")
    for name in ("predicted", *labels, "ratio", *more):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _totals(document: Mapping[str, Any], show: _Numbers) -> Table:
    table = _table("from start to end", document["labels"])
    table.add_row("makespan (predicted: busiest lane)", *show.row(document["makespan"] | _any_paced(document)))
    if document["layer_latency"] is not None:
        table.add_row("a layer of decode", *show.row(document["layer_latency"] | _any_paced(document)))
    return table


def _any_paced(document: Mapping[str, Any]) -> dict[str, str]:
    return {"paced": "some" if any(row["paced"] != "none" for row in document["by_lane"]) else "none"}


def _ops(document: Mapping[str, Any], show: _Numbers) -> Table:
    table = _table("by kind of task", document["labels"], "tasks")
    for row in sorted(document["by_op"], key=lambda row: -row["second_s"]):
        table.add_row(row["name"].replace("_", " "), *show.row(row), f"{row['tasks']:,}")
    return table


def _lanes(document: Mapping[str, Any], show: _Numbers) -> Table:
    table = _table("by lane", document["labels"], *(f"idle,\n{label}" for label in document["labels"]))
    for row in sorted(document["by_lane"], key=lambda row: -row["second_s"]):
        idle = (show.seconds(row[key]) for key in ("first_idle_s", "second_idle_s"))
        table.add_row(_lane_text(document, row["name"]), *show.row(row), *idle)
    return table


def _lane_text(document: Mapping[str, Any], name: str) -> str:
    """A lane in words; which GPU it belongs to only where there are several."""
    devices = {parse_lane(row["name"]).device for row in document["by_lane"]} - {None}
    return lane_in_words(parse_lane(name), several=len(devices) > 1)


def _layers(document: Mapping[str, Any], show: _Numbers) -> Table:
    """Every layer; of many only those that differ most."""
    rows: list[Mapping[str, Any]] = document["by_layer"]
    layers = max(document["first"]["layers"], document["second"]["layers"])
    head = "by layer"
    if len(rows) > MANY_LAYERS:
        most = sorted(rows, key=lambda row: -abs(row["second_s"] - row["first_s"]))[:MANY_LAYERS]
        head = f"by layer, the {MANY_LAYERS} of {len(rows)}\nthat differ most"
        rows = sorted(most, key=lambda row: row["name"])
    table = _table(head, document["labels"], "tasks")
    for row in rows:
        name = "lm_head" if row["name"] == layers else str(row["name"])
        table.add_row(name, *show.row(row), f"{row['tasks']:,}")
    return table


def _top(document: Mapping[str, Any], show: _Numbers) -> Table | str:
    from rich import box
    from rich.table import Table

    tasks, share = document["top"]["tasks"], document["top"]["share"]
    if not tasks:
        return "\nevery task takes as long in both\n"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{len(tasks)} that differ most, {share:.1%} of all differences", overflow="fold")
    for name in (*document["labels"], "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in tasks:
        numbers = [show.seconds(row[key]) for key in ("first_s", "second_s", "difference_s")]
        if row["difference_s"] > 0.0:
            numbers[-1] = f"+{numbers[-1]}"
        table.add_row(row["name"], *numbers[:-1], numbers[-1] + _mark(row))
    return table


def _accuracy_lines(document: Mapping[str, Any]) -> list[str]:
    one, other = document["labels"]
    paced = [_lane_text(document, row["name"]) for row in document["by_lane"] if row["paced"] != "none"]
    lines = []
    if paced:
        said = f"* paced: tasks on {', '.join(paced)} last as long as they are told to, which says nothing of accuracy"
        lines.append(f"{said}; ~ in part")
    found = document["accuracy"]
    if found is None:
        return [*lines, "no lane ran at a speed of its own: there is no accuracy to speak of"]
    where = f"{_count(len(found['lanes']), 'lane')} not paced" if paced else "all lanes"
    if found["error"] is not None:
        ratio = "" if found["ratio"] is None else f"{other} / {one} {found['ratio']:.3f}, "
        lines.append(
            f"{_count(found['tasks'], 'task')} on {where}: {ratio}differences of the tasks add up to "
            f"{found['error']:.1%} of {other} time"
        )
    return lines


def _emulation_lines(document: Mapping[str, Any]) -> list[str]:
    if "emulated" not in (document["first"]["kind"], document["second"]["kind"]):
        return []
    return ["! emulated: a CPU stood in for the GPU, so its seconds, and ratios to them, say nothing of a GPU"]


def _order_lines(document: Mapping[str, Any]) -> list[str]:
    lines = []
    for label, key in zip(document["labels"], ("first", "second"), strict=True):
        trace = document[key]
        if trace["violation"] is not None:
            lines.append(f"! {label}: {trace['violation']}")
            continue
        within = f", within {trace['clock_error_s'] * 1e6:.4g} us" if trace["clock_error_s"] else ""
        kept = f"order kept on {_count(len(document['by_lane']), 'lane')}"
        lines.append(f"{label}: {kept}, {_count(trace['dependencies'], 'dependency')} respected{within}")
    return lines


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun.removesuffix('y')}ies" if noun.endswith("y") else f"{number:,} {noun}s"
