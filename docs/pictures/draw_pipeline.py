"""Draws `pipeline.svg`, the picture in README.md: `python docs/pictures/draw_pipeline.py` (matplotlib only)."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK = "#1f2933"
INPUT, STEP, RESULT = "#dbeafe", "#fef3c7", "#d1fae5"


def box(axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str, colour: str) -> None:
    """A rounded box with a bold first line."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=colour,
            edgecolor=INK,
            linewidth=1.1,
        )
    )
    lines = text.count("\n") + 1
    middle, step = y + height / 2, 0.235
    top = middle + step * lines / 2
    axes.text(x + width / 2, top, title, ha="center", va="center", fontsize=11, fontweight="bold", color=INK)
    axes.text(
        x + width / 2,
        top - step * (lines + 1) / 2,
        text,
        ha="center",
        va="center",
        fontsize=9.2,
        color=INK,
        linespacing=1.35,
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """An arrow between two boxes."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=13,
            shrinkA=2,
            shrinkB=2,
            color=INK,
            linewidth=1.3,
        )
    )


def draw(path: Path) -> None:
    """Draw the pipeline into an SVG file."""
    plt.rcParams["svg.fonttype"] = "path"  # the same on every page, whatever fonts it has
    plt.rcParams["svg.hashsalt"] = "hrm"  # the same bytes every time
    figure, axes = plt.subplots(figsize=(11.2, 4.3))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, 11.2), ylim=(0, 4.3))
    axes.axis("off")

    box(axes, 0.15, 3.02, 2.5, 0.98, "hardware profile", "levels, links, peaks,\neach with its source", INPUT)
    box(axes, 0.15, 1.74, 2.5, 0.98, "model", "config.json: shapes,\nparameters, KV cache", INPUT)
    box(axes, 0.15, 0.46, 2.5, 0.98, "workload", "prompt lengths,\ntokens to generate", INPUT)

    box(axes, 3.35, 2.42, 2.35, 1.58, "cost", "FLOPs and bytes of\nevery operator and copy\n→ seconds per lane", STEP)
    box(axes, 3.35, 0.46, 2.35, 1.58, "memory", "peak bytes per level\nand phase, as named\nterms", STEP)
    box(axes, 6.3, 1.44, 2.0, 1.58, "search", "mixed-integer\nprogram, bounds,\nproven gap", STEP)
    box(axes, 8.95, 1.44, 2.1, 1.58, "plan", "policy, prediction,\nbottleneck, memory,\nwhat would help", RESULT)
    box(axes, 8.95, 3.42, 2.1, 0.74, "simulate", "every task in SimPy", RESULT)
    box(axes, 8.95, 0.14, 2.1, 0.74, "run, measure", "every task with tensors", RESULT)

    for y in (3.51, 2.23, 0.95):  # every input counts for both: they meet on one line
        axes.plot((2.65, 3.0), (y, y), color=INK, linewidth=1.3)
    axes.plot((3.0, 3.0), (0.95, 3.51), color=INK, linewidth=1.3, solid_capstyle="projecting")
    for y in (3.21, 1.25):
        arrow(axes, (2.97, y), (3.35, y))
    arrow(axes, (5.7, 3.21), (6.3, 2.53))
    arrow(axes, (5.7, 1.25), (6.3, 1.93))
    arrow(axes, (8.3, 2.23), (8.95, 2.23))
    arrow(axes, (10.0, 3.02), (10.0, 3.42))
    arrow(axes, (10.0, 1.44), (10.0, 0.88))

    figure.savefig(path, facecolor="white", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_name("pipeline.svg"))
