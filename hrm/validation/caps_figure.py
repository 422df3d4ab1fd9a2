"""The figure of `hrm validate memory`: throughput against CPU memory, measured and simulated, and what was taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hrm.plots import BLACK, BLUE, BROWN, GREY, VERMILLION
from hrm.units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_caps"]

STYLES: Mapping[str, tuple[str, str, str]] = {
    "cgopipe": (BLUE, "o", "cgopipe (attention on the CPU)"),
    "s4": (VERMILLION, "s", "s4 (attention on the GPU)"),
}
SMALL = 8.5

FAR = 2.2
"""A bound more than so many times above everything else is said, not drawn: the curves would lie on the axis."""

BOUNDS = {
    "roofline": ("roofline, CPU memory no limit", (0, (6, 2, 1, 2))),
    "all_on_gpu": ("all in GPU memory, had it room", (0, (1, 1.2))),
}


def draw_caps(document: Mapping[str, Any]) -> Figure:
    """Both curves and bounds above; below, peak memory as the kernel counted it beside the limit of each run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(9.8, 7.6))
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 1, sharex=True, height_ratios=(2.3, 1.0))
    figure.subplots_adjust(left=0.085, right=0.655, top=0.885, bottom=0.075, hspace=0.1)
    _rates(panels[0], document)
    _peaks(panels[1], document)
    for axes, corner in zip(panels, (0.885, 0.33), strict=True):
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=SMALL)
        for edge in ("top", "right"):
            axes.spines[edge].set_visible(False)
        figure.legend(
            *axes.get_legend_handles_labels(),
            loc="upper left",
            bbox_to_anchor=(0.665, corner),
            fontsize=SMALL,
            frameon=False,
            labelspacing=0.75,
            handlelength=2.8,
        )
    caps = [cap / GIB for cap in document["caps_bytes"]]
    margin = 0.05 * (caps[-1] - caps[0])
    panels[1].set_xlim(caps[0] - margin, caps[-1] + margin)
    panels[1].set_xlabel(
        f"cap on the CPU memory of the process [GiB], enforced by {document['enforced_by']}", fontsize=9.5
    )
    figure.text(0.02, 0.978, document["title"], fontsize=11, weight="bold", va="top")
    figure.text(0.02, 0.947, _conditions(document), fontsize=SMALL, va="top", color="0.25")
    return figure


def _conditions(document: Mapping[str, Any]) -> str:
    workload = document["workload"]
    return (
        f"{document['layers']} layers; prompts of {workload['mean_prompt_tokens']:.4g} tokens, "
        f"{workload['generation_length']} generated; median of {document['repeats']} runs, bars: 95 % interval; "
        f"{document['device_name']}"
    )


def _own(document: Mapping[str, Any], schedule: str, *statuses: str) -> list[Mapping[str, Any]]:
    return [each for each in document["points"] if each["schedule"] == schedule and each["status"] in statuses]


def _rates(axes: Any, document: Mapping[str, Any]) -> None:
    shown: list[float] = []
    for place, schedule in enumerate(document["schedules"]):
        colour, marker, words = STYLES[schedule]
        held = _own(document, schedule, "held")
        xs = [each["cap_bytes"] / GIB for each in held]
        medians = [each["measured"]["median"] for each in held]
        errors = [
            [each["measured"]["median"] - each["measured"]["low"] for each in held],
            [each["measured"]["high"] - each["measured"]["median"] for each in held],
        ]
        axes.errorbar(
            xs,
            medians,
            yerr=errors,
            color=colour,
            marker=marker,
            markersize=5.5,
            linestyle="none",
            capsize=3,
            label=f"{words},\nmeasured",
            zorder=5,
        )
        axes.plot(
            xs, _running_best(medians), color=colour, linewidth=1.6, label=f"{schedule}: best with so much", zorder=4
        )
        planned = [each for each in document["points"] if each["schedule"] == schedule and each["predicted"]]
        guesses = [each["predicted"]["simulated"] for each in planned]
        axes.plot(
            [each["cap_bytes"] / GIB for each in planned],
            guesses,
            color=colour,
            linewidth=1.2,
            linestyle="--",
            marker=".",
            label=f"{schedule}, simulated",
            zorder=3,
        )
        shown += [*medians, *guesses]
        _mark_missing(axes, document, schedule, place, colour)
    _draw_bounds(axes, document, max(shown, default=1.0))
    _mark_ratio(axes, document)
    axes.set_ylabel("throughput, end to end [token/s]", fontsize=9.5)


def _running_best(rates: Sequence[float]) -> list[float]:
    return [max(rates[: place + 1]) for place in range(len(rates))]


def _mark_missing(axes: Any, document: Mapping[str, Any], schedule: str, place: int, colour: str) -> None:
    """Crosses near the axis: caps without a plan, and with a run that broke its cap or failed."""
    kinds = {"infeasible": ("x", "no plan fits"), "broken": ("X", "broke its cap"), "failed": ("P", "failed")}
    for status, (marker, words) in kinds.items():
        own = _own(document, schedule, status)
        if own:
            axes.plot(
                [each["cap_bytes"] / GIB for each in own],
                [0.03 + 0.045 * place] * len(own),
                transform=axes.get_xaxis_transform(),
                color=colour,
                linestyle="none",
                marker=marker,
                markersize=7,
                markeredgewidth=1.6,
                label=f"{schedule}: {words}",
                zorder=6,
            )


def _draw_bounds(axes: Any, document: Mapping[str, Any], highest: float) -> None:
    top = highest
    for name, (words, style) in BOUNDS.items():
        rate = document["bounds"][name]["tokens_per_s"]
        colour = BLACK if name == "roofline" else BROWN
        if rate is None:
            axes.plot([], [], linestyle="none", label=f"{words}: none\n({document['bounds'][name]['why'][:60]})")
        elif rate > FAR * highest:
            axes.plot([], [], color=colour, linestyle=style, label=f"bound: {words},\nabove, at {rate:,.4g} token/s")
        else:
            axes.axhline(rate, color=colour, linestyle=style, linewidth=1.4, label=f"bound: {words}\n(cost model)")
            top = max(top, rate)
    axes.set_ylim(0.0, 1.1 * top)


def _mark_ratio(axes: Any, document: Mapping[str, Any]) -> None:
    """An arrow between both curves at the highest throughput that both reach, with the ratio of memory."""
    matched = document["matched"]["measured"]
    if not matched["matched"]:
        axes.plot([], [], linestyle="none", label="no throughput is reached by both")
        return
    row = matched["rows"][-1]
    ends = (row["first_bytes"] / GIB, row["second_bytes"] / GIB)
    said = f"{row['ratio']:.2f}x the memory"
    if row["low"] is not None:
        said += f"\n({row['low']:.2f} to {row['high']:.2f})"
    arrow = {"arrowstyle": "<->", "color": BLACK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (ends[0], row["tokens_per_s"]), (ends[1], row["tokens_per_s"]), arrowprops=arrow, zorder=7)
    axes.annotate(
        said,
        (sum(ends) / 2.0, row["tokens_per_s"]),
        (0, -7),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=SMALL,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
        zorder=8,
    )


def _peaks(axes: Any, document: Mapping[str, Any]) -> None:
    caps = [cap / GIB for cap in document["caps_bytes"]]
    axes.plot(caps, caps, color=GREY, linewidth=1.0, label="the cap")
    for schedule in document["schedules"]:
        colour, marker, _ = STYLES[schedule]
        own = [each for each in document["points"] if each["schedule"] == schedule and each["memory"] is not None]
        xs = [each["cap_bytes"] / GIB for each in own]
        axes.plot(
            xs,
            [each["memory"]["peak_bytes"] / GIB for each in own],
            color=colour,
            marker=marker,
            markersize=4.5,
            linestyle="none",
            label=f"{schedule}: most taken (RssAnon)",
        )
        axes.plot(
            xs,
            [each["limit_bytes"] / GIB for each in own],
            color=colour,
            marker="_",
            markersize=13,
            linestyle="none",
            label=f"{schedule}: limit of the process"
            + (",\ncap + emulated activations" if document["emulated"] else ""),
        )
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("peak memory [GiB]", fontsize=9.5)
