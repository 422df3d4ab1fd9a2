"""Figures of a job's page, each from the document alone (`runtime.jobs.job_document`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hrm.gantt import OP_COLOURS, lane_in_words, op_in_words
from hrm.graph import Op
from hrm.trace_names import parse_lane
from runtime.jobs.progress import size_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LEVELS", "draw_lanes", "draw_memory", "draw_throughput"]

BLUE, VERMILLION, GREY = "#0072B2", "#D55E00", "#666666"  # Okabe-Ito: told apart by every common kind of colour vision
WIDTH = 10.4  # inch
MOST_WINDOWS = 48
"""In which throughput is shown: more are noise."""

BATCHES_EACH = 8
"""From so many batches on, each is a window of its own."""

LEVELS = {"gpu": "GPU memory", "cpu": "CPU memory", "disk": "disk"}
UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


def draw_throughput(document: Mapping[str, Any]) -> Figure:
    """Tokens by when they were there, and token/s over time, each beside the prediction."""
    points = [{"at_s": 0.0, "predicted_at_s": 0.0, "tokens": 0, "batch": -1}, *document["timeline"]]
    unit, name = _unit(max(points[-1]["at_s"], points[-1]["predicted_at_s"]))
    figure = _figure(6.2)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    tokens = [point["tokens"] for point in points]
    upper.plot([p["at_s"] / unit for p in points], tokens, color=BLUE, linewidth=2, label="measured")
    predicted = [p["predicted_at_s"] / unit for p in points]
    upper.plot(predicted, tokens, color=VERMILLION, linewidth=2, linestyle="--", label="predicted")
    upper.set_ylabel("tokens generated")
    edges = _windows(points)
    at = [points[edge]["at_s"] / unit for edge in edges]
    rows = (("at_s", BLUE, "-"), ("predicted_at_s", VERMILLION, "--"))
    for key, colour, style in rows:  # the prediction of a window stands where the window is, and not when it would be
        rates = [_rate(points[a], points[b], key) for a, b in pairwise(edges)]
        lower.stairs(rates, at, baseline=None, color=colour, linewidth=1.8, linestyle=style)
    batches = {point["batch"] for point in points[1:]}
    each = "of each batch" if len(batches) >= BATCHES_EACH else "over time"
    lower.set_ylabel(f"token/s, {each}")
    lower.set_xlabel(f"time since the first batch began [{name}]")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.92", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}")
    upper.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.0)
    return figure


def _windows(points: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places of points between which throughput is shown: ends of batches, or graphs put together."""
    last = len(points) - 1
    ends = [n for n, (a, b) in enumerate(pairwise(points)) if b["batch"] != a["batch"]] + [last]
    if len(ends) <= BATCHES_EACH:
        ends = list(range(last + 1))
    every = -(-len(ends) // MOST_WINDOWS)
    return sorted({0, last, *ends[::every]})


def _rate(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> float:
    took = after[key] - before[key]
    return float((after["tokens"] - before["tokens"]) / took) if took > 0.0 else 0.0


def draw_lanes(document: Mapping[str, Any]) -> Figure:
    """Seconds that every lane was busy, by kind of task, with the prediction below."""
    from matplotlib.patches import Patch

    lanes = document["lanes"]
    figure = _figure(0.62 * len(lanes) + 2.1)
    axes = figure.subplots()
    unit, name = _unit(max(document["run_s"], *(_predicted(row) for row in lanes.values())))
    shown: dict[Op, None] = {}
    for place, row in enumerate(lanes.values()):
        left = below = 0.0
        for phase in ("prefill", "decode"):
            for task, seconds in row["tasks"][phase].items():
                shown.setdefault(Op(task))
                _bar(axes, phase, (place - 0.2, 0.36), (left / unit, seconds / unit), OP_COLOURS[Op(task)])
                left += seconds
            seconds = row[f"predicted_{phase}_s"]
            _bar(axes, phase, (place + 0.13, 0.2), (below / unit, seconds / unit), "0.72")
            below += seconds
    axes.axvline(document["run_s"] / unit, color=BLUE, linewidth=1.2)
    axes.text(
        document["run_s"] / unit, -0.56, "the job ", color=BLUE, ha="right", va="bottom", fontsize=9, clip_on=False
    )
    names = [lane_in_words(parse_lane(lane), several=False) for lane in lanes]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"busy [{name}]")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    order = [op for op in OP_COLOURS if op in shown]
    handles = [Patch(facecolor=OP_COLOURS[op], label=op_in_words(op)) for op in order]
    handles += [Patch(facecolor="0.72", label="predicted"), Patch(facecolor="0.5", hatch="////", label="prefill")]
    for patch in handles:
        patch.set_edgecolor("white")
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _bar(axes: Any, phase: str, rows: tuple[float, float], along: tuple[float, float], colour: str) -> None:
    """A piece of a bar: place and height, beginning and length; prefill is hatched."""
    (place, height), (left, length) = rows, along
    hatch = "////" if phase == "prefill" else ""
    axes.barh(place, length, left=left, height=height, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)


def _predicted(row: Mapping[str, Any]) -> float:
    return float(row["predicted_prefill_s"] + row["predicted_decode_s"])


def draw_memory(document: Mapping[str, Any]) -> Figure:
    """Peak of every level as a share of what the plan states."""
    memory = {level: row for level, row in document["memory"].items() if row["plan_bytes"] > 0.0}
    figure = _figure(0.5 * len(memory) + 0.9)
    axes = figure.subplots()
    for place, row in enumerate(memory.values()):
        peak = _peak(row)
        share = 100.0 * peak / row["plan_bytes"]
        axes.barh(place, share, height=0.5, color=BLUE)
        text = f" {size_text(peak)} of {size_text(row['plan_bytes'])}"
        axes.text(max(share, 100.0), place, text, va="center", ha="left", fontsize=9)
    axes.axvline(100.0, color=VERMILLION, linewidth=1.5, linestyle="--")
    axes.set_yticks(range(len(memory)), [LEVELS[level] for level in memory])
    highest = max(100.0, *(100.0 * _peak(row) / row["plan_bytes"] for row in memory.values()))
    axes.set(ylim=(len(memory) - 0.4, -0.6), xlim=(0.0, 1.32 * highest), xlabel="peak, of what the plan states [%]")
    axes.set_xticks(range(0, int(highest) + 1, 20 if highest < 300 else 100))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def _peak(row: Mapping[str, Any]) -> float:
    return float(max(row["loading_bytes"] or 0, row["running_bytes"] or 0))


def _unit(seconds: float) -> tuple[float, str]:
    return next((pair for pair in UNITS if seconds >= 3.0 * pair[0]), UNITS[-1])


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), dpi=100, layout="constrained")
