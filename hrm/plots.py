"""Figures. Matplotlib is imported inside the functions, so importing this module costs nothing.

Colours are of the Okabe-Ito set, told apart by colour-blind readers, and every line also differs in style, so that a
figure reads in grey print too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.errors import InputError
from hrm.plot_labels import LABEL_POINTS, Box, Frame, Label, place_labels
from hrm.roofline import attainable_local, link_bandwidth
from hrm.roofline_report import calibration_of, format_intensity
from hrm.roofline_view import RooflineView
from hrm.units import format_bandwidth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_figure_path", "draw_roofline", "render_png", "save_figure"]

FIGURE_TYPES = (".png", ".svg")
GFLOP = 1e9

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, BROWN, BLACK, GREY = "#AA4499", "#7F4F00", "#000000", "#666666"  # darker, for thin lines and text
SAMPLE_COLOURS = (PURPLE, BLACK, BROWN)
LEVEL_STYLES = ((BLUE, "-"), (VERMILLION, "--"))
LINK_STYLES = ((GREEN, "-."), (GREY, ":"))

BEND_STEPS = 80
"""Pieces of a roof that is a curve."""

FULL = ((10.2, 5.4), (0.095, 0.155, 0.53, 0.735))
"""Size [inch] and axes (left, bottom, width, height) with a legend; fixed, so that the angles of labels are known."""
COMPACT = ((7.2, 4.9), (0.125, 0.168, 0.835, 0.732))
"""The same without a legend."""


def check_figure_path(path: str | Path, *, where: str = "--output") -> Path:
    """Accept a path that ends in ``.png`` or ``.svg``.

    Raises
    ------
    InputError
        Any other ending.
    """
    path = Path(path)
    if path.suffix.lower() not in FIGURE_TYPES:
        raise InputError(
            f"{path.name!r} is not a figure this writes", where=where, way_out="a name that ends in .png or .svg"
        )
    return path


def save_figure(figure: Figure, path: Path, *, where: str = "--output") -> None:
    """Write a figure as PNG or SVG, by the ending of the path; the same figure gives the same bytes.

    Raises
    ------
    InputError
        The ending is another one, or the file cannot be written.
    """
    import matplotlib

    path = check_figure_path(path, where=where)
    kind = path.suffix.lower()[1:]
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "hrm"}):
            figure.savefig(path, format=kind, dpi=160, metadata=metadata)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}",
            where=where,
            way_out="a file in a folder that exists",
        ) from None


def render_png(figure: Figure, dpi: int = 90) -> bytes:
    """The figure as PNG, for a notebook."""
    from io import BytesIO

    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, pil_kwargs={"compress_level": 1})
    return buffer.getvalue()


def draw_roofline(view: RooflineView, figure: Figure | None = None, *, legend: bool = True) -> Figure:
    """Draw a hierarchical roofline (Figures 4 and 5 of the paper).

    Roofs of GPU, CPU and of every link to the GPU; the operator on the CPU, and on the GPU with data from the CPU; P1,
    P2 and the balance point; a plan's point where the view has one. Both axes are logarithmic.

    Parameters
    ----------
    view : RooflineView
    figure : matplotlib.figure.Figure, optional
        Cleared and drawn on; a new one by default.
    legend : bool
        With the numbers beside the axes. Without, it draws in half the time, for a notebook that shows them in words.

    Returns
    -------
    matplotlib.figure.Figure
        Its first axes hold the roofline, lines and markers labelled as in the legend.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewFigure

    size, place = FULL if legend else COMPACT
    if figure is None:
        figure = NewFigure()
        FigureCanvasAgg(figure)
    figure.clear()
    figure.set_size_inches(size)
    axes = figure.add_axes(place)
    frame = _frame_of(view, size, place, figure.dpi)
    _set_up_axes(axes, frame)
    axes.yaxis.set_label_coords(0.24 / size[0], 0.5, transform=figure.transFigure)
    labels = _draw_roofs(axes, frame, view)
    labels += _draw_attention(axes, frame, view) if view.operator == "attention" else _draw_ffn(axes, frame, view)
    labels += _draw_turning_points(axes, frame, view)
    labels += _draw_plan(axes, frame, view)
    _write_labels(figure, axes, frame, labels)
    if legend:
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(1.02, 1.01),
            fontsize=LABEL_POINTS,
            frameon=False,
            handlelength=2.6,
            labelspacing=0.65,
            borderaxespad=0.0,
        )
    _write_titles(figure, view, place[0], long=legend)
    return figure


def _frame_of(
    view: RooflineView, size: tuple[float, float], place: tuple[float, float, float, float], dpi: float
) -> Frame:
    """Limits that hold every roof's ridge and every marked intensity, whole decades on x."""
    stack, places = view.stack, view.places
    peak, link = stack.levels[0].peak_flops_per_s, link_bandwidth(stack, 1, 0)
    marked = [places.turning_point_1, places.turning_point_2, places.balance_point]
    for sample in view.samples:
        marked += [sample.places.intensity_moved, sample.places.intensity_i, sample.places.intensity_j]
    if view.plan is not None:
        marked.append(view.plan.intensity)
    marked = [value for value in marked if value > 0]
    low_x = 10.0 ** math.floor(math.log10(0.8 * min([1.0, *marked])))
    high_x = 10.0 ** math.ceil(math.log10(max(2 * peak / link, *(3 * value for value in marked))))
    slowest = link_bandwidth(stack, len(stack.levels) - 1, 0)
    low_y = 10.0 ** math.floor(math.log10(max(slowest, link / 8) * low_x / GFLOP))
    width, height = size[0] * dpi, size[1] * dpi
    return Frame(
        left=place[0] * width,
        bottom=place[1] * height,
        right=(place[0] + place[2]) * width,
        top=(place[1] + place[3]) * height,
        x_limits=(low_x, high_x),
        y_limits=(low_y, 4 * peak / GFLOP),
        pixels_per_point=dpi / 72,
    )


def _set_up_axes(axes: Any, frame: Frame) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*frame.x_limits)
    axes.set_ylim(*frame.y_limits)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10, numticks=12))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.grid(True, which="major", color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("Operational intensity, theoretical [FLOP/byte]", fontsize=10)
    axes.set_ylabel("Attainable performance [GFLOP/s]", fontsize=10)
    axes.tick_params(labelsize=LABEL_POINTS)


def _draw_roofs(axes: Any, frame: Frame, view: RooflineView) -> list[Label]:
    """Each level's min(P, B*I), or what is left of it where both add up, and each link's min(P_gpu, B_ji*I)."""
    stack = view.stack
    peak = stack.levels[0].peak_flops_per_s
    roofs = []
    labels = []
    for index, level in enumerate(stack.levels):
        if level.peak_flops_per_s:
            style = LEVEL_STYLES[min(index, 1)]
            roofs.append((level.bytes_per_s, level.peak_flops_per_s, level.name, f"{level.name} memory", style, True))
            text = f"{level.name} peak {level.peak_flops_per_s / GFLOP:,.0f} GFLOP/s"
            labels.append(Label.along_flat(frame, text, style[0], y=level.peak_flops_per_s / GFLOP))
    for j in range(1, len(stack.levels)):
        name = f"{stack.levels[j].name} to {stack.levels[0].name}"
        roofs.append((link_bandwidth(stack, j, 0), peak, name, name, LINK_STYLES[min(j - 1, 1)], False))
    bent = {level.name: index for index, level in enumerate(stack.levels) if level.overlap < 1}
    for bandwidth, top, name, what, (colour, line), above in roofs:
        end = min(top / bandwidth, frame.x_limits[1])
        if name in bent:
            xs = [frame.x_at(step / BEND_STEPS) for step in range(BEND_STEPS + 1)]
            ys = [attainable_local(stack, bent[name], x) / GFLOP for x in xs]
        else:
            xs = sorted({frame.x_limits[0], end, frame.x_limits[1]})
            ys = [min(top, bandwidth * x) / GFLOP for x in xs]
        axes.plot(xs, ys, color=colour, linestyle=line, linewidth=1.8, label=f"{name} roof", zorder=3)
        text = f"{what} {format_bandwidth(bandwidth)}"
        labels.append(Label.along_slope(frame, text, colour, slope=bandwidth / GFLOP, end=end, above=above))
    return labels


def _draw_attention(axes: Any, frame: Frame, view: RooflineView) -> list[Label]:
    """A vertical line per KV format, with what the CPU, and the GPU through the link, attain on it (Figure 4)."""
    labels = []
    for sample, colour in zip(view.samples, SAMPLE_COLOURS, strict=False):
        places = sample.places
        x = places.intensity_moved
        axes.plot([x, x], frame.y_limits, color=colour, linewidth=1.0, linestyle=(0, (1, 2)), zorder=2)
        text = f"{sample.label}: {x:.3f} FLOP/byte\n" + _rate_line(
            "on the CPU", places.stay_flops_per_s, places.better == 1
        )
        _dot(axes, x, places.stay_flops_per_s, "s", 8, colour, text, filled=places.better == 1)
        text = _rate_line("fetched to the GPU", places.fetch_flops_per_s, places.better == 0)
        _dot(axes, x, places.fetch_flops_per_s, "o", 8, colour, text, filled=places.better == 0)
        labels.append(Label.along_vertical(frame, sample.label.removeprefix("KV cache in "), colour, x=x))
    return labels


def _draw_ffn(axes: Any, frame: Frame, view: RooflineView) -> list[Label]:
    """A horizontal line per micro-batch, a vertical one for the batch (Figure 5)."""
    labels = []
    peak = view.stack.levels[0].peak_flops_per_s
    for index, (sample, colour) in enumerate(zip(view.samples, SAMPLE_COLOURS, strict=False)):
        rate, chosen = sample.places.resident_flops_per_s, index == view.chosen
        y = rate / GFLOP
        axes.plot(
            frame.x_limits,
            [y, y],
            color=colour,
            linewidth=1.6 if chosen else 1.0,
            linestyle=(0, (4, 1, 1, 1)) if chosen else (0, (1, 2)),
            label=f"{sample.label}: {sample.places.intensity_i:.3f} FLOP/byte,\n   {y:,.0f} GFLOP/s on the GPU",
            zorder=2,
        )
        if chosen or rate < peak:
            labels.append(Label.along_flat(frame, sample.label, colour, y=y))
    places = view.places
    x = places.intensity_moved
    axes.plot([x, x], frame.y_limits, color=BLACK, linewidth=1.0, linestyle=(0, (6, 3)), zorder=2)
    given = "" if view.batch_given else " (where P2 is reached)"
    text = f"N = {view.batch:,}{given}:\n   {format_intensity(x)} on the link\n"
    text += _rate_line("fetched to the GPU", places.fetch_flops_per_s, places.better == 0)
    _dot(axes, x, places.fetch_flops_per_s, "o", 13, BLACK, text, filled=None)  # a ring, since P2 may lie inside
    text = _rate_line("on the CPU", places.stay_flops_per_s, places.better == 1)
    _dot(axes, places.intensity_j, places.stay_flops_per_s, "s", 7, BLACK, text, filled=False)
    labels.append(Label.along_vertical(frame, f"N = {view.batch:,}", BLACK, x=x))
    return labels


def _draw_turning_points(axes: Any, frame: Frame, view: RooflineView) -> list[Label]:
    """P1 where the link's roof meets the CPU's, P2 where it meets what level 0 attains, and the balance point."""
    stack, places = view.stack, view.places
    p1, p2, balance = places.turning_point_1, places.turning_point_2, places.balance_point
    link, labels = link_bandwidth(stack, 1, 0), []
    if p1 > 0:
        _mark(axes, p1, link * p1, "v", 12, VERMILLION, f"P1 = {format_intensity(p1)}")
        labels.append(Label.at_point(frame, "P1", VERMILLION, x=p1, y=link * p1 / GFLOP))
    rate = attainable_local(stack, 0, places.intensity_i)
    if math.isclose(p2, balance, rel_tol=1e-9):
        _mark(axes, p2, rate, "D", 7, BLUE, f"P2 = balance point: {format_intensity(p2)}")
        return [*labels, Label.at_point(frame, "P2, balance", BLUE, x=p2, y=rate / GFLOP)]
    _mark(axes, p2, rate, "D", 7, BLUE, f"P2 = {format_intensity(p2)}")
    labels.append(Label.at_point(frame, "P2", BLUE, x=p2, y=rate / GFLOP))
    rate = min(link * balance, stack.levels[0].peak_flops_per_s)
    _mark(axes, balance, rate, "^", 9, BLUE, f"balance point: {format_intensity(balance)}")
    return [*labels, Label.at_point(frame, "balance", BLUE, x=balance, y=rate / GFLOP)]


def _draw_plan(axes: Any, frame: Frame, view: RooflineView) -> list[Label]:
    plan = view.plan
    if plan is None:
        return []
    y = plan.flops_per_s / GFLOP
    text = f"the plan: {format_intensity(plan.intensity)},\n   {y:,.0f} GFLOP/s"
    _mark(axes, plan.intensity, plan.flops_per_s, "*", 15, ORANGE, text, edge=BLACK)
    return [Label.at_point(frame, "plan", BLACK, x=plan.intensity, y=y)]


def _dot(
    axes: Any, x: float, flops_per_s: float, marker: str, size: int, colour: str, label: str, *, filled: bool | None
) -> None:
    """One attainable rate; filled where it is the better place, None = a ring that hides nothing."""
    face = "none" if filled is None else colour if filled else "white"
    axes.plot(
        [x],
        [flops_per_s / GFLOP],
        marker=marker,
        markersize=size,
        linestyle="none",
        markeredgecolor=colour,
        markerfacecolor=face,
        markeredgewidth=1.5,
        label=label,
        zorder=6,
    )


def _mark(
    axes: Any, x: float, flops_per_s: float, marker: str, size: int, colour: str, label: str, *, edge: str = "white"
) -> None:
    axes.plot(
        [x],
        [flops_per_s / GFLOP],
        marker=marker,
        markersize=size,
        color=colour,
        markeredgecolor=edge,
        markeredgewidth=0.8,
        linestyle="none",
        label=label,
        zorder=7,
    )


def _write_labels(figure: Figure, axes: Any, frame: Frame, labels: Sequence[Label]) -> None:
    """Write the labels where they cover no marker, no horizontal line and no bend."""
    markers: list[Box] = []
    lines: list[Box] = []
    for line in axes.lines:
        points = [frame.to_pixels(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]
        if line.get_linestyle() == "None":
            markers += [(x - 6, y - 6, x + 6, y + 6) for x, y in points]
        for (x0, y0), (x1, y1) in pairwise(points):
            bends = len(points) > BEND_STEPS and y1 - y0 < 0.8 * (points[1][1] - points[0][1])
            if y0 == y1 or bends:
                lines.append((x0, y0 - 1, x1, y1 + 1))
    width, height = figure.bbox.width, figure.bbox.height
    for label, (x, y) in place_labels(frame, labels, markers=markers, lines=lines):
        figure.text(
            x / width,
            y / height,
            label.text,
            color=label.colour,
            fontsize=LABEL_POINTS,
            ha="center",
            va="center",
            rotation=label.angle,
            rotation_mode="anchor",
            zorder=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
        )


def _write_titles(figure: Figure, view: RooflineView, left: float, *, long: bool) -> None:
    if view.operator == "attention":
        what = f"decode attention, context {view.context:,}"
    else:
        what = f"expert FFN, {view.formats.experts(view.model)} weights, µ = {view.micro_batch:,}"
    count = view.profile.gpu.count
    gpu = f"{count}x {view.profile.gpu.name}" if count > 1 else view.profile.gpu.name
    machine = f"{view.profile.name} ({gpu})" if long else view.profile.name
    figure.text(left, 0.945, f"{view.model.name} on {machine}: {what}", fontsize=11.5 if long else 10)
    terms = "the authors' terms" if view.cost_model == "paper" else "all terms of this planner"
    counted = f"FLOPs and bytes counted from shapes ({terms})" if long else "counted from shapes"
    note = f"Theoretical intensity: {counted}, not measured.\nRoofs of the profile: {calibration_of(view)}."
    figure.text(left, 0.015, note, fontsize=LABEL_POINTS, color="0.3")


def _rate_line(where: str, flops_per_s: float, faster: bool) -> str:
    return f"   {where}: {flops_per_s / GFLOP:,.0f} GFLOP/s" + (" (faster)" if faster else "")
