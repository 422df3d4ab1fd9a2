"""Figures of a sweep, drawn from the rows of its document: throughput against one value, or maps over two.

One key: a line per schedule beside the bound. Two keys: a panel per value of the second where these are few, else maps
of the best plan of each point. Matplotlib is imported inside the functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from hrm.errors import InputError
from hrm.plots import BLACK, BLUE, BROWN, GREEN, GREY, ORANGE, PURPLE, VERMILLION
from hrm.sweep_labels import SMALL, axis_label, axis_name, has_plan, value_text, write_head
from hrm.sweep_maps import draw_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_drawable", "draw_sweep"]

Axis = Mapping[str, Any]
Row = Mapping[str, Any]

MOST_PANELS: Final = 4
"""Values of a second key that get a panel each; with more, maps are drawn."""

SKY, OLIVE = "#56B4E9", "#7A7200"

STYLES: Final = {
    "cgopipe": (BLUE, "o"),
    "s4": (VERMILLION, "s"),
    "streaming": (GREEN, "^"),
    "s2": (ORANGE, "D"),
    "s3": (PURPLE, "v"),
    "serial": (GREY, "P"),
    "static_experts": (SKY, "*"),
    "cpu_only": (OLIVE, "p"),
    "best": (BROWN, "X"),
}


def check_drawable(varied: Sequence[Axis]) -> None:
    """Refuse what has no figure.

    Raises
    ------
    InputError
        More than two keys, or two of which one has no numbers and many values.
    """
    if len(varied) > 2:
        raise InputError(f"{len(varied)} keys are varied", where="--plot", way_out="one or two, or no --plot")
    if len(varied) == 2 and varied[0]["kind"] == "text" and len(varied[1]["values"]) > MOST_PANELS:
        raise InputError(
            f"{varied[0]['name']} has no numbers for the horizontal axis",
            where="--plot",
            way_out="the key with numbers in the first --vary",
        )


def draw_sweep(document: Mapping[str, Any]) -> Figure:
    """Draw a sweep.

    Parameters
    ----------
    document : mapping
        With `rows`, `varied`, `first_at_95_percent`, `inputs`, `notes`.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    InputError
        More than two keys were varied.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewFigure

    varied = document["varied"]
    check_drawable(varied)
    figure = NewFigure()
    FigureCanvasAgg(figure)
    if len(varied) == 2 and len(varied[1]["values"]) > MOST_PANELS:
        draw_maps(figure, document)
    else:
        _draw_lines(figure, document)
    return figure


def _draw_lines(figure: Figure, document: Mapping[str, Any]) -> None:
    """One panel, or one per value of the second key, with a legend to the right."""
    along = document["varied"][0]
    second = document["varied"][1] if len(document["varied"]) == 2 else None
    values = list(second["values"]) if second is not None else [None]
    columns = len(values) if len(values) <= 3 else 2
    lines = -(-len(values) // columns)
    width, height = (9.6, 5.4) if len(values) == 1 else (12.4 if columns == 2 else 14.6, 0.9 + 3.7 * lines)
    figure.set_size_inches(width, height)
    top = 1 - 0.95 / height
    right = 0.63 if len(values) == 1 else 1 - 3.1 / width
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True, sharex=True)
    bottom = 0.62 / height
    figure.subplots_adjust(left=0.75 / width, right=right, top=top, bottom=bottom, wspace=0.07, hspace=0.22)
    flat = [panel for line in panels for panel in line]
    for panel, value in zip(flat, values, strict=False):
        rows = [row for row in document["rows"] if second is None or row[second["name"]] == value]
        _draw_panel(panel, along, rows, document, None if second is None else (second, value))
    for panel in flat[len(values) :]:
        panel.set_visible(False)
    ceiling = max(
        (row[key] or 0.0 for row in document["rows"] for key in RATES if row.get(key) is not None), default=1.0
    )
    flat[0].set_ylim(0, 1.08 * ceiling)
    for line in panels:
        line[0].set_ylabel("Throughput, end to end [token/s]", fontsize=10)
    for panel in panels[-1]:
        panel.set_xlabel(axis_label(along), fontsize=10)
    handles: dict[str, Any] = {}
    for panel in flat:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="upper left",
        bbox_to_anchor=(right + 0.01, top + 0.015),
        fontsize=SMALL,
        frameon=False,
        labelspacing=0.8,
        handlelength=3.0,
    )
    write_head(figure, document, 0.75 / width)


RATES: Final = ("simulated_tokens_per_s", "predicted_tokens_per_s", "bound_tokens_per_s")


def _draw_panel(
    axes: Any, along: Axis, rows: Sequence[Row], document: Mapping[str, Any], at: tuple[Axis, Any] | None
) -> None:
    places = _places(along)
    inputs = document["inputs"]
    bound_rows = {row[along["name"]]: row for row in rows if row["bound_tokens_per_s"]}
    text_axis = along["kind"] == "text"
    xs = [places[value] for value in along["values"] if value in bound_rows]
    bound = [bound_rows[value]["bound_tokens_per_s"] for value in along["values"] if value in bound_rows]
    style = {"linestyle": "none", "marker": "_", "markersize": 26} if text_axis else {"linestyle": (0, (6, 2, 1, 2))}
    axes.plot(xs, bound, color=BLACK, linewidth=1.4, label=_bound_label(rows), zorder=2, **style)
    if not text_axis:
        low = [0.95 * each for each in bound]
        axes.plot(xs, low, color=GREY, linewidth=0.9, linestyle=":", label="95 % of the bound", zorder=1)
    reached = document["first_at_95_percent"]
    for index, schedule in enumerate(inputs["schedules"]):
        colour, marker = STYLES.get(schedule, (GREY, "o"))
        mine = [row for row in rows if row["schedule"] == schedule]
        for key, what, line in (
            ("predicted_tokens_per_s", "predicted", "--"),
            ("simulated_tokens_per_s", "simulated", "-"),
        ):
            if what == "simulated" and not inputs["simulated"]:
                continue
            if what == "predicted" and schedule == "static_experts":
                continue  # it is simulated only
            solid = what == "simulated" or not inputs["simulated"]
            axes.plot(
                [places[row[along["name"]]] for row in mine],
                [math.nan if row[key] is None else row[key] for row in mine],
                color=colour,
                linestyle="none" if text_axis else line,
                linewidth=1.9 if solid else 1.2,
                marker=marker if solid else ("x" if text_axis else None),
                markersize=4.5,
                label=f"{schedule}, {what}",
                zorder=4 if solid else 3,
            )
        _mark_reached(axes, places, along, mine, schedule, reached, at, colour, inputs["simulated"], alone=at is None)
        absent = [places[row[along["name"]]] for row in mine if not has_plan(row)]
        axes.plot(
            absent,
            [0.025 + 0.035 * index] * len(absent),
            transform=axes.get_xaxis_transform(),
            color=colour,
            linestyle="none",
            marker="x",
            markersize=6,
            markeredgewidth=1.6,
            label=f"{schedule} does not fit" if absent else "_",
            zorder=5,
        )
    _set_up(axes, along, places)
    if at is not None:
        axes.set_title(f"{axis_name(at[0])}: {value_text(at[0], at[1])}", fontsize=9.5, loc="left")


def _mark_reached(
    axes: Any,
    places: Mapping[Any, float],
    along: Axis,
    rows: Sequence[Row],
    schedule: str,
    reached: Mapping[str, Any],
    at: tuple[Axis, Any] | None,
    colour: str,
    simulated: bool,
    *,
    alone: bool,
) -> None:
    """A ring where a schedule first reaches 95 % of the bound, with a line down to the axis."""
    found = reached.get(schedule)
    if at is not None:
        entries = found if isinstance(found, list) else []
        found = next((each["value"] for each in entries if each["at"].get(at[0]["name"]) == at[1]), None)
    what = "simulated" if simulated else "predicted"
    if found is None:
        if along["kind"] != "text" and alone:
            axes.plot([], [], linestyle="none", label=f"{schedule}: never 95 % of the\nbound here ({what})")
        return
    key = f"{what}_tokens_per_s"
    y = next(row[key] for row in rows if row[along["name"]] == found)
    x = places[found]
    text = f"{schedule}: 95 % of the bound\nfrom {value_text(along, found)} ({what})"
    label = text if alone else f"{schedule}: first at 95 % ({what})"
    axes.plot([x, x], [0, y], color=colour, linewidth=1.0, linestyle=(0, (1, 1.5)), zorder=1)
    axes.plot(
        [x],
        [y],
        color=colour,
        linestyle="none",
        marker="o",
        markersize=13,
        markerfacecolor="none",
        markeredgewidth=1.8,
        label=label,
        zorder=6,
    )


def _bound_label(rows: Sequence[Row]) -> str:
    limits = {row["bound_limits"] for row in rows if row["bound_limits"]}
    words = {"requests": "holds all requests", "hours": "is bounded by --max-hours"}
    said = "".join(f"\n(its batch {words[each]})" for each in sorted(limits))
    return f"bound: CPU memory no limit,\nbest schedule (predicted){said}"


def _places(along: Axis) -> dict[Any, float]:
    """Where each value stands on the horizontal axis."""
    if along["kind"] == "text":
        return {value: float(index) for index, value in enumerate(along["values"])}
    return {value: value / along["unit_size"] for value in along["values"]}


def _set_up(axes: Any, along: Axis, places: Mapping[Any, float]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.grid(True, color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=SMALL)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    xs = sorted(places.values())
    if along["kind"] == "text":
        axes.set_xticks(list(places.values()), [str(value) for value in places])
        axes.set_xlim(-0.5, len(xs) - 0.5)
        return
    if _geometric(xs):
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    if len(xs) <= 9:
        shown = xs
    elif _geometric(xs):
        shown = xs[:: -(-len(xs) // 9)]
    else:
        shown = xs[:: -(-len(xs) // 8)]
    axes.set_xticks(shown, [f"{x:,.5g}" for x in shown])


def _geometric(xs: Sequence[float]) -> bool:
    if len(xs) < 3 or xs[0] <= 0 or xs[-1] / xs[0] < 8:
        return False
    ratio = xs[1] / xs[0]
    return all(math.isclose(b / a, ratio, rel_tol=1e-6) for a, b in pairwise(xs))
