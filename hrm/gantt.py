"""Timelines of a trace: one row per lane, a bar per task (Figure 6 of the paper, from a simulated or measured run).

Colours are of Okabe and Ito's set and of Tol's, told apart by colour-blind readers; the pages of one layer's weights
are hatched one way and those of the next layer the other. Matplotlib is imported inside the functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hrm.errors import InputError
from hrm.graph import Lane, LaneKind, Op
from hrm.trace import Span, Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["OP_COLOURS", "Panel", "draw_timelines", "lane_in_words", "layer_panel", "op_in_words"]

OP_COLOURS: Mapping[Op, str] = {
    Op.PRE_ATTENTION: "#56B4E9",
    Op.ATTENTION: "#E69F00",
    Op.POST_ATTENTION: "#0072B2",
    Op.EXPERTS: "#CC79A7",
    Op.ALL_REDUCE: "#000000",
    Op.OFFLOAD_QKV: "#009E73",
    Op.LOAD_HIDDEN: "#D55E00",
    Op.LOAD_WEIGHTS: "#F0E442",
    Op.LOAD_KV: "#AA4499",
    Op.STORE_KV: "#44AA99",
    Op.STORE_HIDDEN: "#117733",
    Op.STAGE_WEIGHTS: "#DDCC77",
    Op.READ_DISK: "#999999",
    Op.WRITE_DISK: "#882255",
    Op.EMBED: "#332288",
    Op.LM_HEAD: "#661100",
    Op.SAMPLE: "#444444",
}
"""In the order of the legend."""

OP_WORDS: Mapping[Op, str] = {
    Op.PRE_ATTENTION: "before attention (norm, QKV)",
    Op.POST_ATTENTION: "after attention (output, router, experts)",
    Op.EXPERTS: "experts on the CPU",
    Op.ALL_REDUCE: "all-reduce",
    Op.OFFLOAD_QKV: "D1: QKV to the CPU",
    Op.LOAD_HIDDEN: "D2: hidden states to the GPU",
    Op.LOAD_WEIGHTS: "D3: weights to the GPU",
    Op.LOAD_KV: "D4: KV cache to the GPU",
    Op.STORE_KV: "new KV to the CPU",
    Op.STORE_HIDDEN: "hidden states to the CPU",
    Op.STAGE_WEIGHTS: "weights to the pinned buffer",
    Op.READ_DISK: "disk read",
    Op.WRITE_DISK: "disk write",
}

LANE_WORDS: Mapping[LaneKind, str] = {  # in the order of the rows
    LaneKind.GPU: "GPU",
    LaneKind.CPU: "CPU",
    LaneKind.H2D: "host to GPU",
    LaneKind.D2H: "GPU to host",
    LaneKind.PIN: "staging",
    LaneKind.DISK: "disk",
    LaneKind.P2P: "GPU to GPU",
}

HATCHES = ("////", "\\\\\\\\")
"""Of pages for layers of even and of odd number."""

OF_A_LAYER = (Op.PRE_ATTENTION, Op.ATTENTION, Op.POST_ATTENTION, Op.EXPERTS, Op.LOAD_HIDDEN, Op.ALL_REDUCE)
"""What a layer is done with when the last of these is."""

WIDTH, ROW, LEGEND_ROW = 13.0, 0.36, 0.22  # inch
LEFT, RIGHT = 0.085, 0.985  # share of the width
NUMBER_POINTS = 6.5
THIN_POINTS = 2.0
CROWD = 80
LIGHT = (Op.PRE_ATTENTION, Op.ATTENTION, Op.EXPERTS, Op.STORE_KV, Op.READ_DISK)
"""Of those that have micro-batches, whose colour wants black numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One timeline.

    Attributes
    ----------
    title : str
    trace : Trace
    start_s, end_s : float
        What of it is shown [s]; the axis starts at `start_s`.
    marks : tuple of (float, str)
        Ends of what is named, e.g. of layers [s].
    """

    title: str
    trace: Trace
    start_s: float
    end_s: float
    marks: tuple[tuple[float, str], ...] = ()

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Lanes that do something within it, GPUs first."""
        order = list(LANE_WORDS)
        used = {span.lane for span in self.spans}
        return tuple(sorted(used, key=lambda lane: (order.index(lane.kind), lane.device or 0)))

    @property
    def spans(self) -> tuple[Span, ...]:
        """Tasks that run within it, in the order of the trace."""
        return tuple(span for span in self.trace.spans if span.end_s > self.start_s and span.start_s < self.end_s)


def layer_panel(trace: Trace, step: int, *, title: str, layers: int = 2) -> Panel:
    """A few layers from the middle of the stack, in one decode step.

    Parameters
    ----------
    trace : Trace
    step : int
        Decode step.
    title : str
    layers : int
        How many.

    Returns
    -------
    Panel
        From the end of the layer before to the end of the last one.

    Raises
    ------
    InputError
        The trace does not have the step.
    """
    ends: dict[int, float] = {}
    starts: dict[int, float] = {}
    for span in trace.spans:
        task = span.task
        if task.phase == "decode" and task.step == step and task.op in OF_A_LAYER:
            ends[task.layer] = max(ends.get(task.layer, span.end_s), span.end_s)
            starts[task.layer] = min(starts.get(task.layer, span.start_s), span.start_s)
    if not ends:
        raise InputError(f"the trace has no decode step {step}", where="timeline")
    first = max(0, (len(ends) - layers) // 2)
    shown = range(first, min(first + layers, len(ends)))
    start = ends[first - 1] if first else starts[first]
    end = ends[shown[-1]]
    return Panel(
        title=title,
        trace=Trace(tuple(span for span in trace.spans if span.end_s > start and span.start_s < end), trace.kind),
        start_s=start,
        end_s=end,
        marks=tuple((ends[layer], f"layer {layer}") for layer in shown),
    )


def op_in_words(op: Op) -> str:
    """A kind of task as the legend and tables name it."""
    return OP_WORDS.get(op, op.value.replace("_", " "))


def lane_in_words(lane: Lane, *, several: bool) -> str:
    """A lane; with the number of its GPU where there are several."""
    words = LANE_WORDS[lane.kind]
    return f"{words} {lane.device}" if several and lane.device is not None else words


def draw_timelines(panels: Sequence[Panel], *, title: str, note: str = "", longest_s: float | None = None) -> Figure:
    """Draw timelines below each other, on one time axis that starts at 0 for each.

    Parameters
    ----------
    panels : sequence of Panel
        At least one.
    title, note : str
        Above and below.
    longest_s : float, optional
        Where the axis ends; a longer panel is cut there and says so. None: at the end of the longest panel [s].

    Returns
    -------
    matplotlib.figure.Figure
        Its axes are the panels, in order.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    length = max(panel.end_s - panel.start_s for panel in panels)
    length = length if longest_s is None else min(length, longest_s)
    scale, unit = (1e3, "ms") if length < 2.0 else (1.0, "s")
    legend = _legend(panels)
    top, gap, bottom = 0.34, 0.54, 0.5 + LEGEND_ROW * -(-len(legend) // 4) + (0.24 if note else 0.06)
    heights = [ROW * len(panel.lanes) for panel in panels]
    height = top + sum(heights) + gap * len(panels) + bottom
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    edge = height - top
    for number, (panel, rows) in enumerate(zip(panels, heights, strict=True)):
        edge -= gap + rows
        axes = figure.add_axes((LEFT, edge / height, RIGHT - LEFT, rows / height))
        _draw_panel(axes, panel, length, scale, unit)
        if number < len(panels) - 1:
            axes.tick_params(labelbottom=False)
        else:
            axes.set_xlabel(f"time [{unit}]", labelpad=1)
    figure.text(LEFT, 1.0 - 0.26 / height, title, fontsize=11.5)
    if note:
        figure.text(LEFT, 0.07 / height, note, fontsize=8, color="0.3")
    figure.legend(
        handles=legend,
        loc="lower left",
        bbox_to_anchor=(LEFT - 0.006, (0.22 if note else 0.04) / height),
        ncols=4,
        fontsize=8,
        frameon=False,
        handlelength=2.2,
        columnspacing=1.6,
        labelspacing=0.35,
    )
    return figure


def _draw_panel(axes: Any, panel: Panel, length: float, scale: float, unit: str) -> None:
    lanes = panel.lanes
    several = len({lane.device for lane in lanes if lane.device is not None}) > 1
    rows = {lane: len(lanes) - 1 - number for number, lane in enumerate(lanes)}
    end_s = min(panel.end_s, panel.start_s + length)
    cut = panel.end_s > end_s
    bars: dict[tuple[Lane, Op, int | None, bool], list[tuple[float, float]]] = {}
    for span in panel.spans:
        start, end = max(span.start_s, panel.start_s), min(span.end_s, end_s)
        if end <= start:
            continue
        bar = ((start - panel.start_s) * scale, (end - start) * scale)
        points = (end - start) / length * WIDTH * (RIGHT - LEFT) * 72.0
        key = (span.lane, span.task.op, _side(span), points < THIN_POINTS)
        spots = bars.setdefault(key, [])
        if key[-1] and spots and bar[0] - sum(spots[-1]) <= 1e-6 * length * scale:
            spots[-1] = (spots[-1][0], sum(bar) - spots[-1][0])  # many thin ones in a row would leave white seams
        else:
            spots.append(bar)
        _write_number(axes, span, bar, rows[span.lane], points)
    for (lane, op, side, thin), spots in bars.items():
        # Edges make a few thin bars visible; of many they would cover what lies between.
        edges = 0.15 if len(spots) > CROWD else 0.5
        axes.broken_barh(spots, (rows[lane] - 0.4, 0.8), **_style(op, side, edges=edges if thin else None))
    for time, words in panel.marks:
        at = (time - panel.start_s) * scale
        if time > end_s + 1e-12:
            continue
        axes.axvline(at, color="black", linewidth=0.9, linestyle=(0, (4, 2)), zorder=5)
        if not cut or at < 0.85 * length * scale:  # beyond it stands that the panel goes on
            axes.text(at, len(lanes) - 0.42, f"{words} done ", fontsize=7.5, ha="right", va="bottom")
    if cut:
        rest = f"goes on to {(panel.end_s - panel.start_s) * scale:,.4g} {unit} \N{RIGHTWARDS ARROW}"
        axes.text(length * scale, len(lanes) - 0.42, rest, fontsize=7.5, ha="right", va="bottom")
    axes.set_xlim(0.0, length * scale)
    axes.set_ylim(-0.5, len(lanes) - 0.5)
    axes.set_yticks(list(rows.values()), [lane_in_words(lane, several=several) for lane in rows], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8.5)
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)
    axes.grid(axis="x", color="0.85", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(panel.title, loc="left", fontsize=9.5, pad=15 if panel.marks else 5)


def _side(span: Span) -> int | None:
    """Which way a page of weights is hatched: by whether its layer is even or odd."""
    return span.task.layer % 2 if span.task.page is not None else None


def _style(op: Op, side: int | None, *, edges: float | None = None) -> dict[str, Any]:
    """How bars are drawn; `edges` is the line width where they are thin, and of their own colour [point]."""
    style: dict[str, Any] = {"facecolor": OP_COLOURS[op], "edgecolor": "white", "linewidth": 0.4}
    if side is not None:
        style |= {"hatch": HATCHES[side], "edgecolor": "#6B6300", "linewidth": 0.3 if edges is None else 0.0}
        style |= {} if edges is None else {"snap": False}
    elif edges is not None:  # white edges would leave nothing of it
        style |= {"edgecolor": OP_COLOURS[op], "linewidth": edges, "snap": False}  # snapped to pixels, most would go
    return style


def _write_number(axes: Any, span: Span, bar: tuple[float, float], row: int, points: float) -> None:
    """The number of the micro-batch on its bar, where it fits."""
    if span.task.micro_batch is None:
        return
    text = str(span.task.micro_batch)
    if points < 0.62 * NUMBER_POINTS * len(text) + 1.5:
        return
    colour = "black" if span.task.op in LIGHT else "white"
    at = bar[0] + bar[1] / 2.0
    axes.text(at, row, text, fontsize=NUMBER_POINTS, ha="center", va="center_baseline", color=colour, zorder=6)


def _legend(panels: Iterable[Panel]) -> list[Any]:
    """A patch for every kind of task that is shown; pages of weights by layer, or by side where there are many."""
    from matplotlib.patches import Patch

    shown: dict[tuple[Op, int | None], set[int]] = {}
    for panel in panels:
        for span in panel.spans:
            side = _side(span) if span.task.op is Op.LOAD_WEIGHTS else None if span.task.page is None else 0
            shown.setdefault((span.task.op, side), set()).add(span.task.layer)
    patches = []
    for op in OP_COLOURS:
        for side in (None, 0, 1):
            layers = shown.get((op, side))
            if layers is None:
                continue
            words = op_in_words(op)
            if op is Op.LOAD_WEIGHTS and len(layers) <= 2:
                words += f", layer {' or '.join(map(str, sorted(layers)))}"
            elif op is Op.LOAD_WEIGHTS:
                words += ", odd layers" if side else ", even layers"
            elif op is Op.READ_DISK and side is not None:
                words += " of weights"
            patches.append(Patch(**_style(op, side), label=words))
    return patches
