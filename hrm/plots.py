"""Figures. Matplotlib is imported inside the functions, so importing this module costs nothing.

Colours are the Okabe-Ito set, told apart by colour-blind readers, and every line also differs in style, so a figure
reads in grey print too. Labels are placed one after the other where they cover no earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.errors import InputError
from hrm.roofline import attainable_local, link_bandwidth
from hrm.roofline_report import RooflineView, calibration_of, format_intensity
from hrm.units import format_bandwidth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_figure_path", "draw_roofline", "render_png", "save_figure"]

FIGURE_TYPES = (".png", ".svg")
BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, BROWN, BLACK, GREY = "#AA4499", "#7F4F00", "#000000", "#666666"  # darker than the set's, for thin lines and text
SAMPLE_COLOURS = (PURPLE, BLACK, BROWN)
LEVEL_STYLES = ((BLUE, "-"), (VERMILLION, "--"))
LINK_STYLES = ((GREEN, "-."), (GREY, ":"))
FULL = ((10.2, 5.4), (0.095, 0.135, 0.53, 0.755))
"""Size [inch] and axes (left, bottom, width, height) with a legend; fixed, so that the angles of labels are known."""
COMPACT = ((7.2, 4.9), (0.125, 0.145, 0.835, 0.755))
"""The same without a legend."""
Box = tuple[float, float, float, float]  # left, bottom, right, top [pixels]
Candidate = tuple[float, float, str, str]  # x, y [data]; which edge of the label is there; how it hangs on
GFLOP = 1e9
SMALL, NORMAL = 8.5, 10.0


def check_figure_path(path: str | Path) -> Path:
    """Accept a path that ends in ``.png`` or ``.svg``.

    Raises
    ------
    InputError
        Any other ending.
    """
    path = Path(path)
    if path.suffix.lower() not in FIGURE_TYPES:
        raise InputError(
            f"{path.name!r} is not a figure this writes", where="--output", way_out="a name that ends in .png or .svg"
        )
    return path


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG, by the ending of the path; the same figure gives the same bytes.

    Raises
    ------
    InputError
        The ending is another one, or the file cannot be written.
    """
    import matplotlib

    path = check_figure_path(path)
    kind = path.suffix.lower()[1:]
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "hrm"}):
            figure.savefig(path, format=kind, dpi=160, metadata=metadata)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}", where="--output") from None


def render_png(figure: Figure, dpi: int = 90) -> bytes:
    """The figure as PNG, for a notebook."""
    from io import BytesIO

    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, pil_kwargs={"compress_level": 1})
    return buffer.getvalue()


def draw_roofline(view: RooflineView, figure: Figure | None = None, *, legend: bool = True) -> Figure:
    """Draw a hierarchical roofline (Figures 4 and 5 of the paper).

    Roofs of GPU, CPU and of every link to the GPU; the operator on the CPU, and on the GPU with data from the CPU; P1, P2
    and the balance point; a plan's point where the view has one. Both axes are logarithmic.

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
    picture = _RooflinePicture(figure, figure.add_axes(place), view, size, place)
    picture.set_up_axes()
    picture.draw_roofs()
    picture.draw_samples()
    picture.draw_turning_points()
    picture.draw_plan()
    picture.write_labels()
    if legend:
        picture.add_legend()
    picture.add_titles(long=legend)
    return figure


class _RooflinePicture:
    """One roofline being drawn: artists first, then the labels, each where it covers no earlier one."""

    def __init__(
        self,
        figure: Figure,
        axes: Any,
        view: RooflineView,
        size: tuple[float, float],
        place: tuple[float, float, float, float],
    ) -> None:
        self.figure, self.axes, self.view, self.place = figure, axes, view, place
        self.inches = size
        self.width, self.height = size[0] * figure.dpi, size[1] * figure.dpi
        stack, places = view.stack, view.places
        self.link = link_bandwidth(stack, 1, 0)
        peak = stack.levels[0].peak_flops_per_s
        marked = [
            value
            for value in (
                places.turning_point_1,
                places.turning_point_2,
                places.balance_point,
                *(sample.places.intensity_moved for sample in view.samples),
                *(sample.places.intensity_i for sample in view.samples),
                view.plan.intensity if view.plan else 0.0,
            )
            if value > 0
        ]
        self.low_x = 10 ** math.floor(math.log10(min([1.0, *marked]) * 0.8))
        self.high_x = 10 ** math.ceil(math.log10(max(2 * peak / self.link, *(3 * value for value in marked))))
        slowest = link_bandwidth(stack, len(stack.levels) - 1, 0)
        self.low_y = 10 ** math.floor(math.log10(max(slowest, self.link / 8) * self.low_x / GFLOP))
        self.high_y = 4 * peak / GFLOP
        self.boxes: list[Box] = []
        self.lines: list[Box] = []
        self.pending: list[tuple[str, str, list[Candidate], float]] = []

    # Geometry, in pixels of the figure

    def to_pixels(self, x: float, y: float) -> tuple[float, float]:
        """Position of a point, from the fixed axes and its limits."""
        along = math.log(x / self.low_x) / math.log(self.high_x / self.low_x)
        up = math.log(y / self.low_y) / math.log(self.high_y / self.low_y)
        left, bottom, width, height = self.place
        return (left + width * along) * self.width, (bottom + height * up) * self.height

    @property
    def slope_deg(self) -> float:
        """Angle of a line of constant bandwidth on the figure."""
        x0, y0 = self.to_pixels(self.low_x, self.low_y)
        x1, y1 = self.to_pixels(self.low_x * 10, self.low_y * 10)
        return math.degrees(math.atan2(y1 - y0, x1 - x0))

    def visible_start(self, bandwidth: float) -> float:
        """Intensity at which a line of a bandwidth enters the axes."""
        return max(self.low_x, self.low_y * GFLOP / bandwidth)

    # Artists

    def set_up_axes(self) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        axes = self.axes
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(self.low_x, self.high_x)
        axes.set_ylim(self.low_y, self.high_y)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(base=10, numticks=12))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.grid(True, which="major", color="0.9", linewidth=0.7)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_xlabel("Operational intensity, theoretical [FLOP/byte]", fontsize=NORMAL)
        axes.set_ylabel("Attainable performance [GFLOP/s]", fontsize=NORMAL)
        axes.yaxis.set_label_coords(0.24 / self.inches[0], 0.5, transform=self.figure.transFigure)
        axes.tick_params(labelsize=SMALL)

    def draw_roofs(self) -> None:
        stack = self.view.stack
        for index, level in enumerate(stack.levels):
            if level.peak_flops_per_s:
                colour, style = LEVEL_STYLES[min(index, 1)]
                self._roof(level.bytes_per_s, level.peak_flops_per_s, f"{level.name} roof", colour, style)
                self._label_slope(f"{level.name} memory {format_bandwidth(level.bytes_per_s)}", colour, level.bytes_per_s, 1)
                self._label_flat(f"{level.name} peak {_gflops(level.peak_flops_per_s)}", colour, level.peak_flops_per_s)
        for j in range(1, len(stack.levels)):
            bandwidth, peak = link_bandwidth(stack, j, 0), stack.levels[0].peak_flops_per_s
            colour, style = LINK_STYLES[min(j - 1, 1)]
            name = f"{stack.levels[j].name} to GPU"
            self._roof(bandwidth, peak, f"{name} roof", colour, style)
            self._label_slope(f"{name} {format_bandwidth(bandwidth)}", colour, bandwidth, -1)

    def _roof(self, bandwidth: float, peak: float, label: str, colour: str, style: str) -> None:
        ridge = peak / bandwidth
        xs = sorted({self.low_x, min(ridge, self.high_x), self.high_x})
        ys = [min(peak, bandwidth * x) / GFLOP for x in xs]
        self.axes.plot(xs, ys, color=colour, linestyle=style, linewidth=1.8, label=label, zorder=3)

    def draw_samples(self) -> None:
        view, axes = self.view, self.axes
        attention = view.operator == "attention"
        for index, sample in enumerate(view.samples):
            places, colour = sample.places, SAMPLE_COLOURS[index % len(SAMPLE_COLOURS)]
            chosen = index == view.chosen
            if attention:
                x = places.intensity_moved
                axes.plot([x, x], [self.low_y, self.high_y], color=colour, linewidth=1.0, linestyle=(0, (1, 2)), zorder=2)
                text = f"{sample.label}: {x:.3f} FLOP/byte"
                ys = [places.stay_flops_per_s / GFLOP, places.fetch_flops_per_s / GFLOP]
                for y, marker, where in zip(ys, "so", ("on the CPU", "fetched to the GPU"), strict=True):
                    faster = (marker == "s") == (places.better == 1)
                    axes.plot(
                        [x],
                        [y],
                        marker=marker,
                        markersize=8,
                        linestyle="none",
                        markeredgecolor=colour,
                        markerfacecolor=colour if faster else "white",
                        markeredgewidth=1.5,
                        label=(f"{text}\n" if marker == "s" else "") + _rate_line(where, y, faster),
                        zorder=6,
                    )
                kv = sample.label.removeprefix("KV cache in ")
                self._label_vertical(kv, colour, x)
            else:
                y = places.resident_flops_per_s / GFLOP
                axes.plot(
                    [self.low_x, self.high_x],
                    [y, y],
                    color=colour,
                    linewidth=1.6 if chosen else 1.0,
                    linestyle=(0, (4, 1, 1, 1)) if chosen else (0, (1, 2)),
                    label=f"{sample.label}: {places.intensity_i:.3f} FLOP/byte,\n   {y:,.0f} GFLOP/s on the GPU",
                    zorder=2,
                )
                at_peak = places.resident_flops_per_s >= view.stack.levels[0].peak_flops_per_s
                if chosen or not at_peak:
                    self._label_flat(sample.label, colour, places.resident_flops_per_s)
        if not attention:
            self._draw_batch()

    def _draw_batch(self) -> None:
        view, axes, places = self.view, self.axes, self.view.places
        x = places.intensity_moved
        axes.plot([x, x], [self.low_y, self.high_y], color=BLACK, linewidth=1.0, linestyle=(0, (6, 3)), zorder=2)
        given = "" if view.batch_given else " (where P2 is reached)"
        axes.plot(
            [x],
            [places.fetch_flops_per_s / GFLOP],
            marker="o",
            markersize=13,  # a ring, since P2 may lie inside
            linestyle="none",
            markeredgecolor=BLACK,
            markerfacecolor="none",
            markeredgewidth=1.5,
            label=f"N = {view.batch:,}{given}:\n   {format_intensity(x)} on the link\n"
            + _rate_line("fetched to the GPU", places.fetch_flops_per_s / GFLOP, places.better == 0),
            zorder=5,
        )
        axes.plot(
            [places.intensity_j],
            [places.stay_flops_per_s / GFLOP],
            marker="s",
            markersize=7,
            linestyle="none",
            markeredgecolor=BLACK,
            markerfacecolor="white",
            label=_rate_line("on the CPU", places.stay_flops_per_s / GFLOP, places.better == 1),
            zorder=5,
        )
        self._label_vertical(f"N = {view.batch:,}", BLACK, x)

    def draw_turning_points(self) -> None:
        view, places = self.view, self.view.places
        stack = view.stack
        if places.turning_point_1 > 0:
            x = places.turning_point_1
            self._mark(x, self.link * x, "P1", VERMILLION, "v", 12, f"P1 = {format_intensity(x)}")
        same = math.isclose(places.turning_point_2, places.balance_point, rel_tol=1e-9)
        x = places.turning_point_2
        y = attainable_local(stack, 0, places.intensity_i)
        name = "P2 = balance point" if same else "P2"
        self._mark(x, y, "P2" if not same else "P2, balance", BLUE, "D", 7, f"{name}: {format_intensity(x)}")
        if not same:
            x = places.balance_point
            self._mark(x, min(self.link * x, stack.levels[0].peak_flops_per_s), "balance", BLUE, "^", 9, f"balance point: {format_intensity(x)}")

    def _mark(self, x: float, flops_per_s: float, short: str, colour: str, marker: str, size: int, text: str) -> None:
        y = flops_per_s / GFLOP
        self.axes.plot(
            [x],
            [y],
            marker=marker,
            markersize=size,
            color=colour,
            markeredgecolor="white",
            markeredgewidth=0.8,
            linestyle="none",
            label=text,
            zorder=7,
        )
        self._label_point(short, colour, x, y)

    def draw_plan(self) -> None:
        plan = self.view.plan
        if plan is None:
            return
        y = plan.flops_per_s / GFLOP
        self.axes.plot(
            [plan.intensity],
            [y],
            marker="*",
            markersize=15,
            color=ORANGE,
            markeredgecolor=BLACK,
            markeredgewidth=0.8,
            linestyle="none",
            label=f"the plan: {format_intensity(plan.intensity)},\n   {y:,.0f} GFLOP/s",
            zorder=8,
        )
        self._label_point("plan", BLACK, plan.intensity, y)

    # Labels: collected first, written last, the least movable ones first

    def _label_slope(self, text: str, colour: str, bandwidth: float, side: int) -> None:
        start = self.visible_start(bandwidth)
        end = min(self.view.stack.levels[0].peak_flops_per_s / bandwidth, self.high_x)
        candidates = []
        for other in (side, -side):
            for share in (0.03, 0.12, 0.2, 0.28, 0.36, 0.45, 0.55, 0.65, 0.75):
                x = start * (end / start) ** share
                shift = 2.5 if other > 0 else -2.5
                candidates.append((x, bandwidth * x / GFLOP, "bottom" if other > 0 else "top", f"{shift}"))
        self.pending.append((text, colour, candidates, self.slope_deg))

    def _label_flat(self, text: str, colour: str, flops_per_s: float) -> None:
        y = flops_per_s / GFLOP
        candidates = []
        for share in (0.995, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2):
            x = self.low_x * (self.high_x / self.low_x) ** share
            for vertical, shift in (("bottom", 2.0), ("top", -2.0)):
                candidates.append((x, y, vertical, f"right {shift}"))
        self.pending.append((text, colour, candidates, 0.0))

    def _label_vertical(self, text: str, colour: str, x: float) -> None:
        candidates = []
        for share in (0.015, 0.25, 0.5, 0.7, 0.85):
            y = self.low_y * (self.high_y / self.low_y) ** share
            for horizontal in ("right", "left"):
                candidates.append((x, y, "bottom", f"{horizontal} 90"))
        self.pending.append((text, colour, candidates, 90.0))

    def _label_point(self, text: str, colour: str, x: float, y: float) -> None:
        candidates = [(x, y, vertical, f"point {across}") for across in ("left", "right", "middle") for vertical in ("top", "bottom")]
        self.pending.append((text, colour, candidates, 0.0))

    def write_labels(self) -> None:
        """Write every label at the first of its places that covers no earlier one; points go first, they move least."""
        for line in self.axes.lines:
            if line.get_linestyle() == "None":
                for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True):
                    px, py = self.to_pixels(x, y)
                    self.boxes.append((px - 6, py - 6, px + 6, py + 6))
            xs, ys = [float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()]
            for x0, y0, x1, y1 in zip(xs, ys, xs[1:], ys[1:], strict=False):
                if y0 == y1:
                    left, level = self.to_pixels(x0, y0)
                    self.lines.append((left, level - 1, self.to_pixels(x1, y1)[0], level + 1))
        ordered = sorted(self.pending, key=lambda each: (not each[2][0][3].startswith("point"), each[3] in (0.0, 90.0)))
        for text, colour, candidates, angle in ordered:
            self._write(text, colour, candidates, angle)

    def _write(self, text: str, colour: str, candidates: Sequence[Candidate], angle: float) -> None:
        best: tuple[int, Any, list[Box]] | None = None
        for x, y, vertical, how in candidates:
            place = self._place(text, x, y, vertical, how, angle)
            boxes = self._boxes_of(text, place, angle)
            hits = 10 * sum(_overlap(one, other) for one in boxes for other in self.boxes)
            hits += sum(_overlap(one, other) for one in boxes for other in self.lines) + 10 * self._outside(boxes)
            if best is None or hits < best[0]:
                best = (hits, place, boxes)
            if hits == 0:
                break
        if best is None:
            return
        px, py = best[1]
        self.figure.text(
            px / self.width,
            py / self.height,
            text,
            color=colour,
            fontsize=SMALL,
            ha="center",
            va="center",
            rotation=angle,
            rotation_mode="anchor",
            zorder=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
        )
        self.boxes.extend(best[2])

    def _extent(self, text: str) -> tuple[float, float]:
        """Width and height of a label before rotation [pixels]."""
        points = self.figure.dpi / 72
        return _text_width(text) * points, SMALL * 1.15 * points

    def _place(self, text: str, x: float, y: float, vertical: str, how: str, angle: float) -> tuple[float, float]:
        """Centre of a label [pixels]."""
        px, py = self.to_pixels(x, y)
        width, height = self._extent(text)
        points = self.figure.dpi / 72
        if how.startswith("point"):
            gap = 6.5 * points
            up = 1 if vertical == "bottom" else -1
            if how.endswith("middle"):
                return px, py + up * (gap * 1.3 + height / 2)
            side = -1 if how.endswith("left") else 1
            return px + side * (gap + width / 2), py + up * (gap * 0.4 + height / 2)
        if angle == 90.0:
            side = -1 if how.startswith("right") else 1
            return px + side * (2 * points + height / 2), py + width / 2
        if how.startswith("right"):
            shift = float(how.split()[1]) * points
            return px - width / 2, py + shift + math.copysign(height / 2, shift)
        shift = float(how) * points
        across = shift + math.copysign(height / 2, shift)
        turn = math.radians(angle)
        return (
            px + math.cos(turn) * width / 2 - math.sin(turn) * across,
            py + math.sin(turn) * width / 2 + math.cos(turn) * across,
        )

    def _boxes_of(self, text: str, centre: tuple[float, float], angle: float) -> list[Box]:
        """What a label covers [pixels]: a chain of squares along it."""
        width, height = self._extent(text)
        tilted = angle not in (0.0, 90.0)
        count = max(1, math.ceil(width / height * (1.5 if tilted else 1.0)))
        turn, half = math.radians(angle), height * (0.6 if tilted else 0.5)
        boxes = []
        for index in range(count):
            along = (index + 0.5) / count * width - width / 2
            x, y = centre[0] + math.cos(turn) * along, centre[1] + math.sin(turn) * along
            boxes.append((x - half, y - half, x + half, y + half))
        return boxes

    def _outside(self, boxes: Sequence[Box]) -> int:
        left, bottom = self.to_pixels(self.low_x, self.low_y)
        right, top = self.to_pixels(self.high_x, self.high_y)
        return sum(x0 < left or y0 < bottom or x1 > right + 2 or y1 > top for x0, y0, x1, y1 in boxes)

    # Around the axes

    def add_legend(self) -> None:
        self.axes.legend(
            loc="upper left",
            bbox_to_anchor=(1.02, 1.01),
            fontsize=SMALL,
            frameon=False,
            handlelength=2.6,
            labelspacing=0.65,
            borderaxespad=0.0,
        )

    def add_titles(self, *, long: bool) -> None:
        view = self.view
        if view.operator == "attention":
            what = f"decode attention, context {view.context:,}"
        else:
            kind = view.formats.experts(view.model)
            what = f"expert FFN, {kind} weights, µ = {view.micro_batch:,}"
        count = view.profile.gpu.count
        name = f"{count}x {view.profile.gpu.name}" if count > 1 else view.profile.gpu.name
        machine = f"{view.profile.name} ({name})" if long else view.profile.name
        title = f"{view.model.name} on {machine}: {what}"
        self.figure.text(self.place[0], 0.945, title, fontsize=11.5 if long else NORMAL)
        terms = "the authors' terms" if view.cost_model == "paper" else "all terms of this planner"
        footer = "Theoretical intensity: counted from shapes, not measured."
        if long:
            footer = f"Theoretical intensity: FLOPs and bytes counted from shapes ({terms}), not measured."
        self.figure.text(
            self.place[0], 0.015, f"{footer} Roofs: {calibration_of(view)} of the profile.", fontsize=SMALL, color="0.3"
        )


def _rate_line(where: str, gflop_per_s: float, faster: bool) -> str:
    return f"   {where}: {gflop_per_s:,.0f} GFLOP/s" + (" (faster)" if faster else "")


def _gflops(flops_per_s: float) -> str:
    return f"{flops_per_s / GFLOP:,.0f} GFLOP/s"


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _text_width(text: str) -> float:
    """Width of a label at the small size [points]; DejaVu Sans is 0.6 em wide on average, narrow letters less."""
    narrow = sum(letter in " .,:;il/|'" for letter in text)
    return SMALL * (0.64 * (len(text) - narrow) + 0.36 * narrow)
