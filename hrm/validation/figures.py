"""Figures of a validation: ratios, scatter, latency over context, two layers overlaid, memory. Matplotlib inside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from hrm.gantt import Panel, draw_timelines, layer_panel
from hrm.trace import Trace
from hrm.validation.choice import CHOSEN
from hrm.validation.forecasts import PREDICTORS
from hrm.validation.records import Records, pieces_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_contexts", "draw_layers", "draw_memory", "draw_ratios", "draw_scatter"]

COLOURS: Mapping[str, str] = {
    "eq12_peaks": "#999999",
    "eq12_rates": "#E69F00",
    "full": "#56B4E9",
    "simulated": "#0072B2",
}
"""Of Okabe and Ito's set."""

MARKS: Mapping[str, str] = {"eq12_peaks": "v", "eq12_rates": "^", "full": "s", "simulated": "o"}
WIDTH = 10.4  # inch


def _figure(height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _tidy(axes: Any, *, grid: str = "both") -> None:
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)
    axes.grid(axis=grid, color="0.88", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5)


def draw_ratios(document: Mapping[str, Any]) -> Figure:
    """Predicted over measured of every policy, decode latency and throughput; bars: 95 % of resampled repeats."""
    rows = document["policies"]
    figure = _figure(1.3 + 0.27 * len(rows))
    panels = figure.subplots(1, 2, sharey=True)
    words = {
        "layer_latency_s": "decode, per layer: predicted / measured",
        "throughput_tokens_per_s": "throughput: predicted / measured",
    }
    for axes, (metric, label) in zip(panels, words.items(), strict=True):
        axes.axvline(1.0, color="0.3", linewidth=0.9)
        for place, row in enumerate(rows):
            measured = row["measured"][metric]
            if row["neighbourhood"]:
                axes.axhspan(place - 0.5, place + 0.5, color="#F3F3E8", linewidth=0, zorder=0)
            for name in PREDICTORS:
                ratios = row["predicted_over_measured"][name]
                if ratios is None:
                    continue
                ratio = ratios[metric]
                if name == "simulated":
                    low, high = (ratio * measured["median"] / measured[key] for key in ("high", "low"))
                    axes.plot([low, high], [place, place], color=COLOURS[name], linewidth=2.0, alpha=0.55, zorder=2)
                axes.plot(
                    ratio,
                    place,
                    MARKS[name],
                    color=COLOURS[name],
                    markersize=5.5 if name == "simulated" else 4.5,
                    fillstyle="full" if row["counted"] else "none",
                    linestyle="none",
                    zorder=3,
                    label=PREDICTORS[name] if place == 0 else None,
                )
        axes.set_xscale("log")
        shown = [each[metric] for row in rows for each in row["predicted_over_measured"].values() if each is not None]
        _log_ticks(axes, min(shown) / 1.15, max(shown) * 1.15)
        axes.set_xlabel(label, fontsize=9)
        _tidy(axes, grid="x")
    panels[0].set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8.5)
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    panels[0].tick_params(axis="y", length=0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def _log_ticks(axes: Any, low: float, high: float) -> None:
    """A logarithmic axis of ratios with few ticks that a person can read, 1 among them."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(low, 0.8) / 1.08, max(high, 1.25) * 1.08
    axes.set_xlim(low, high)
    least = math.log(high / low) / 9.0
    every = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 20.0, 50.0]
    shown = [1.0]
    for tick in sorted(every, key=lambda each: abs(math.log(each))):
        if low <= tick <= high and all(abs(math.log(tick / other)) >= least for other in shown):
            shown.append(tick)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def draw_scatter(document: Mapping[str, Any]) -> Figure:
    """Simulated against measured, in throughput and in decode latency, by what binds."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    rows = document["policies"]
    figure = _figure(4.7)
    panels = figure.subplots(1, 2)
    kinds = ("neighbourhood", "other", "counts in no figure")
    styles = {
        kinds[0]: {"color": "#0072B2", "marker": "o"},
        kinds[1]: {"color": "#E69F00", "marker": "s"},
        kinds[2]: {"color": "#555555", "marker": "x"},
    }
    words = {
        "layer_latency_s": ("decode, ms per layer and step", 1e3),
        "throughput_tokens_per_s": ("throughput, token/s", 1.0),
    }
    for axes, (metric, (label, scale)) in zip(panels, words.items(), strict=True):
        points = []
        for kind in kinds:
            first = True
            for row in rows:
                own = (
                    "counts in no figure"
                    if not row["counted"]
                    else "neighbourhood"
                    if row["neighbourhood"]
                    else "other"
                )
                guess = row["predicted"]["simulated"]
                if own != kind or guess is None:
                    continue
                measured = row["measured"][metric]
                x, y = measured["median"] * scale, guess[metric] * scale
                points += [x, y]
                axes.plot([measured["low"] * scale, measured["high"] * scale], [y, y], color="0.6", linewidth=1.0)
                axes.plot(x, y, linestyle="none", markersize=5, label=kind if first else None, **styles[kind])
                first = False
        low, high = min(points) / 1.15, max(points) * 1.15
        axes.plot([low, high], [low, high], color="0.3", linewidth=0.9)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_aspect("equal")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"measured {label}", fontsize=9)
        axes.set_ylabel(f"simulated {label}", fontsize=9)
        _tidy(axes)
    panels[0].legend(fontsize=8.5, frameon=False, loc="upper left")
    return figure


def draw_contexts(document: Mapping[str, Any]) -> Figure | None:
    """Latency of a layer of the plan in every decode step; None where there is too little to draw."""
    contexts = document["contexts"]
    steps = contexts["measured_layer_s"]
    if len(steps) < 3:
        return None
    prompt = document["workload"]["mean_prompt_tokens"]
    figure = _figure(3.2)
    axes = figure.subplots()
    # The first step follows prefill, and nothing is fetched ahead in the last.
    shown = range(1, len(steps) - 1)
    xs = [prompt + step + 1 for step in shown]
    axes.plot(xs, [steps[step] * 1e3 for step in shown], ".-", color="#D55E00", linewidth=1.0, label="measured, median")
    simulated = contexts["simulated"]
    axes.plot(
        [row["context_tokens"] for row in simulated],
        [row["layer_s"] * 1e3 for row in simulated],
        "o--",
        color=COLOURS["simulated"],
        linewidth=1.2,
        label="simulated",
    )
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("context, tokens (mean of the requests)", fontsize=9)
    axes.set_ylabel("decode, ms per layer", fontsize=9)
    axes.legend(fontsize=8.5, frameon=False, loc="lower right")
    _tidy(axes)
    return figure


def draw_layers(records: Records) -> Figure | None:
    """Two layers of decode, simulated and measured, on one axis; None without a decode step.

    Measured is the repeat of the plan whose decode took the median time.
    """
    saved = records.predictions["trace"]
    if saved is None:
        return None
    step = int(saved["step"])
    simulated = pieces_of({"pieces": [saved["spans"]]})[0].trace
    own = [run for run in records.runs if run["candidate"] == CHOSEN and not run["warm_up"]]
    middle = median(run["wall_s"] for run in own)
    run = min(own, key=lambda each: abs(each["wall_s"] - middle))
    spans = tuple(span for piece in pieces_of(run) for span in piece.trace.spans if span.task.phase == "decode")
    measured = layer_panel(Trace(spans, "measured"), step, title=f"measured, decode step {step}")
    panels = [
        Panel(
            title=f"simulated, decode step {step}",
            trace=simulated,
            start_s=saved["start_s"],
            end_s=saved["end_s"],
            marks=tuple((time, words) for time, words in saved["marks"]),
        ),
        measured,
    ]
    return draw_timelines(panels, title="Two layers from the middle of the stack, one time axis")


def draw_memory(document: Mapping[str, Any]) -> Figure | None:
    """Planned and taken bytes of every policy; None where the kernel does not say."""
    rows = [row for row in document["policies"] if row["memory"]]
    if not rows:
        return None
    figure = _figure(1.2 + 0.25 * len(rows))
    panels = figure.subplots(1, 2, sharey=True)
    mib = 2.0**20
    for axes, level in zip(panels, ("gpu", "cpu"), strict=True):
        seen: set[str] = set()
        for place, row in enumerate(rows):
            use = row["memory"].get(level)
            if use is None:
                continue
            plan = (use["planned_bytes"] - use["not_made_bytes"]) / mib

            def label(text: str, seen: set[str] = seen) -> str | None:
                new = text not in seen
                seen.add(text)
                return text if new else None

            axes.barh(place, plan, height=0.62, color="#BFD7EA", label=label("plan"))
            if use["reserve_bytes"]:
                axes.barh(
                    place,
                    use["reserve_bytes"] / mib,
                    left=plan,
                    height=0.62,
                    color="#EDEDED",
                    label=label("reserve for torch and the allocator"),
                )
            axes.plot(
                use["taken_bytes"] / mib,
                place,
                "|",
                color="#D55E00",
                markersize=11,
                markeredgewidth=2.2,
                label=label("most taken"),
            )
        axes.set_xlabel(f"{level.upper()} memory, MiB", fontsize=9)
        _tidy(axes, grid="x")
    panels[0].set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8.5)
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    panels[0].tick_params(axis="y", length=0)
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure
