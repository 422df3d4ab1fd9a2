"""Maps of a sweep over two keys: what the fastest plan of each point reaches, keeps on the CPU and computes there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from hrm.plots import BLACK
from hrm.sweep_labels import SMALL, axis_label, has_plan, write_head

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["best_rows", "draw_maps"]

Axis = Mapping[str, Any]
Row = Mapping[str, Any]


def best_rows(document: Mapping[str, Any]) -> dict[tuple[Any, ...], Row]:
    """The row of the fastest schedule at each point: simulated where it was, else predicted."""
    key = "simulated_tokens_per_s" if document["inputs"]["simulated"] else "predicted_tokens_per_s"
    names = [axis["name"] for axis in document["varied"]]
    found: dict[tuple[Any, ...], Row] = {}
    for row in document["rows"]:
        point = tuple(row[name] for name in names)
        before = found.get(point)
        if before is None or (row[key] or 0.0) > (before[key] or 0.0):
            found[point] = row
    return found


def draw_maps(figure: Figure, document: Mapping[str, Any]) -> None:
    """Four maps over two keys: throughput, experts on the CPU, what the CPU computes, KV cache on the CPU."""
    first, second = document["varied"]
    best = best_rows(document)
    simulated = document["inputs"]["simulated"]
    rate = "simulated_tokens_per_s" if simulated else "predicted_tokens_per_s"
    columns, lines = len(first["values"]), len(second["values"])
    width = max(9.4, 2 * (0.62 * columns + 2.2))
    height = max(7.0, 2 * (0.34 * lines + 0.95) + 1.0)
    figure.set_size_inches(width, height)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    figure.subplots_adjust(
        left=0.85 / width, right=1 - 0.25 / width, top=1 - 1.15 / height, bottom=0.6 / height, wspace=0.12, hspace=0.2
    )
    what = "simulated" if simulated else "predicted"
    maps = (
        (
            f"throughput, {what} [token/s]",
            lambda row: row[rate],
            lambda value: f"{value:,.3g}" if value < 1e3 else f"{value:,.0f}",
        ),
        ("share of the expert weights on the CPU", lambda row: row["weights_on_cpu"], lambda value: f"{value:.0%}"),
        ("computed on the CPU in decode", _on_cpu, lambda value: ON_CPU[int(value)][0]),
        ("share of the KV cache on the CPU", lambda row: row["kv_on_cpu"], lambda value: f"{value:.0%}"),
    )
    for panel, (title, value_of, text_of) in zip(panels.flat, maps, strict=True):
        grid = [[_cell_value(best.get((x, y)), value_of) for x in first["values"]] for y in second["values"]]
        _draw_map(panel, title, grid, text_of)
        panel.set_xticks([index + 0.5 for index in range(columns)], [_tick(first, value) for value in first["values"]])
        panel.set_yticks([index + 0.5 for index in range(lines)], [_tick(second, value) for value in second["values"]])
        panel.tick_params(labelsize=SMALL, length=0)
    for panel in panels[1]:
        panel.set_xlabel(axis_label(first), fontsize=10)
    figure.supylabel(axis_label(second), fontsize=10, x=0.16 / width)
    write_head(figure, document, 0.85 / width)
    schedules = document["inputs"]["schedules"]
    if len(schedules) > 1:
        figure.text(
            0.85 / width,
            1 - 0.62 / height,
            f"at each point the fastest of {', '.join(schedules)}",
            fontsize=SMALL,
            va="top",
        )


ON_CPU: Final = (("nothing", "#F7F7F7"), ("attention", "#9CC9E8"), ("experts", "#F5D28C"), ("both", "#E3A58B"))
"""What decode computes on the CPU: word and colour, by A_g = 0 plus twice F_g = 0."""


def _on_cpu(row: Row) -> float:
    return float((not row["attention_on_gpu"]) + 2 * (not row["ffn_on_gpu"]))


def _cell_value(row: Row | None, value_of: Any) -> float:
    if row is None or not has_plan(row):
        return math.nan
    value = value_of(row)
    return math.nan if value is None else float(value)


def _draw_map(panel: Any, title: str, grid: Sequence[Sequence[float]], text_of: Any) -> None:
    from matplotlib.colors import BoundaryNorm, ListedColormap

    categories = title.startswith("computed")
    if categories:
        colours: dict[str, Any] = {
            "cmap": ListedColormap([colour for _, colour in ON_CPU]),
            "norm": BoundaryNorm([-0.5, 0.5, 1.5, 2.5, 3.5], 4),
        }
    elif title.startswith("share"):
        colours = {"cmap": "cividis", "vmin": 0.0, "vmax": 1.0}
    else:
        colours = {"cmap": "cividis"}
    panel.set_facecolor("0.85")
    mesh = panel.pcolormesh(grid, edgecolors="white", linewidth=0.8, **colours)
    panel.set_title(title, fontsize=9.5, loc="left")
    for side in panel.spines.values():
        side.set_visible(False)
    small = max((len(line) for line in grid), default=0) > 12 or len(grid) > 24
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            if small and not categories:
                continue
            text = "no fit" if math.isnan(value) else text_of(value)
            light = math.isnan(value) or categories or mesh.norm(value) > 0.45
            panel.text(
                x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7.2, color=BLACK if light else "white"
            )


def _tick(axis: Axis, value: Any) -> str:
    if axis["kind"] == "text":
        return str(value)
    number = f"{value / axis['unit_size']:,.4g}"
    return f"{number}x" if axis["times"] else number
