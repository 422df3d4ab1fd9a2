"""Figures of the validation report, each from the document alone (`hrm.published.document`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hrm.published.document import MODELS, scores_of_document
from hrm.published.scores import group_scores, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_constants", "draw_errors", "draw_scatter", "draw_shares", "draw_terms", "shown_models"]

# Okabe-Ito: told apart by every common kind of colour vision.
BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
SKY, PURPLE, YELLOW, BLACK, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#000000", "#999999"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW, BLACK, GREY)
HATCHES = ("", "////", "....", "xxxx")

PREFILL = "prefill: "
"""How parts of prefill are named: in the colour of the same part of decode, hatched."""

SYSTEM_STYLES = {
    "MoE-Lightning": (BLUE, "o"),
    "MoE-Lightning(p)": (SKY, "D"),
    "FlexGen": (VERMILLION, "s"),
    "FlexGen(c)": (ORANGE, "^"),
    "DeepSpeed": (GREEN, "v"),
}
OTHER_STYLES = ((PURPLE, "X"), (BLACK, "P"), (GREY, "*"), (YELLOW, "h"))
MODEL_COLOURS = {
    "eq12_authors": VERMILLION,
    "eq12_datasheet": ORANGE,
    "eq12_fitted": SKY,
    "full": BLUE,
    "simulated": GREEN,
}
LEAST_ERROR = 0.005
"""What smaller errors are drawn as on a logarithmic axis."""

LONGEST_BAR = 2.0
"""Errors above 200 % are cut there, with their value beside the bar: the others would not be seen."""


def shown_models(document: Mapping[str, Any]) -> list[str]:
    """Predictions with prefill that the document has, in the order of `MODELS`."""
    present = {key for row in document["rows"] for key, value in row.get("predicted", {}).items() if value is not None}
    return [key for key in MODELS if key in present and not key.endswith("_decode_only")]


def draw_scatter(document: Mapping[str, Any]) -> Figure:
    """Predicted against measured throughput, one panel per prediction, with the 1:1 line and +-20 %."""
    models = shown_models(document)
    columns = 2 if len(models) in (1, 2, 4) else 3
    lines = math.ceil(len(models) / columns)
    figure = _figure(10.4, 10.4 / columns * lines + 0.7)
    everything = [
        value
        for model in models
        for each in scores_of_document(document, model)
        for value in (each.measured, each.predicted)
        if value is not None and each.ratio is not None
    ]
    low, high = (min(everything) / 1.4, max(everything) * 1.4) if everything else (1.0, 10.0)
    styles = _system_styles(document)
    shown: dict[str, Any] = {}
    panels = figure.subplots(lines, columns, squeeze=False)
    for number, axes in enumerate(panels.flat):
        if number >= len(models):
            axes.set_visible(False)
            continue
        _draw_panel(axes, document, models[number], (low, high), styles, shown)
        if number % columns == 0:
            axes.set_ylabel("predicted [token/s]")
        if number + columns >= len(models):
            axes.set_xlabel("measured [token/s]")
    figure.legend(
        shown.values(), shown.keys(), loc="outside upper center", ncols=min(8, max(1, len(shown))), frameon=False
    )
    return figure


def _draw_panel(
    axes: Any,
    document: Mapping[str, Any],
    model: str,
    limits: tuple[float, float],
    styles: Mapping[str, tuple[str, str]],
    shown: dict[str, Any],
) -> None:
    scored = scores_of_document(document, model)
    axes.set(xscale="log", yscale="log", xlim=limits, ylim=limits, aspect="equal")
    _plain_ticks(axes)
    (shown["1:1"],) = axes.plot(limits, limits, color=BLACK, linewidth=1)
    for share in (0.8, 1.2):
        (shown["± 20 %"],) = axes.plot(
            limits, [share * limit for limit in limits], color=BLACK, linewidth=0.8, linestyle="--"
        )
    by_system = group_scores(scored, lambda each: each.system)
    for system, (colour, marker) in styles.items():
        rows = by_system.get(system, [])
        found = [(each.measured, each.predicted, each) for each in rows if each.ratio is not None]
        for measured, _, each in found:
            if each.low is not None:
                axes.plot([measured, measured], [each.low, each.high], color=colour, linewidth=1, alpha=0.5, zorder=2)
        drawn = axes.scatter(
            [measured for measured, _, _ in found],
            [predicted for _, predicted, _ in found],
            c=colour,
            marker=marker,
            s=38,
            edgecolors="white",
            linewidths=0.6,
            zorder=3,
        )
        shown.setdefault(system, drawn)
    summary = summarise(scored)
    missed = f", {summary.missed} missed" if summary.missed else ""
    axes.set_title(MODELS[model], fontsize=10, loc="left")
    axes.text(
        0.97,
        0.03,
        f"median error {_percent(summary.median_error)}\nof {summary.count} rows{missed}",
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        fontsize=9,
    )


def draw_errors(document: Mapping[str, Any]) -> Figure:
    """Median error of every prediction by setting and by system."""
    models = shown_models(document)
    scored = {model: scores_of_document(document, model) for model in models}
    groups = [
        ("by setting", lambda each: each.setting),
        ("by system", lambda each: each.system),
    ]
    sizes = [len(group_scores(scored[models[0]], key)) if models else 1 for _, key in groups]
    bar = 0.19
    figure = _figure(10.4, bar * (len(models) + 1.2) * max(sizes) + 1.3)
    handles: dict[str, Any] = {}
    for axes, (title, key) in zip(figure.subplots(1, 2), groups, strict=True):
        by_model = {model: group_scores(rows, key) for model, rows in scored.items()}
        names = sorted(next(iter(by_model.values()), {}), key=_place_of_group)
        for place, name in enumerate(names):
            for index, model in enumerate(models):
                summary = summarise(by_model[model][name])
                y = place + (index - (len(models) - 1) / 2) / (len(models) + 1.2)
                missed = not math.isfinite(summary.median_error)
                length = 0.0 if missed else min(summary.median_error, LONGEST_BAR)
                colour = MODEL_COLOURS.get(model, GREY)
                handles[MODELS[model]] = axes.barh(y, length, height=0.9 / (len(models) + 1.2), color=colour)
                cut = " →" if length == LONGEST_BAR else ""
                axes.text(length + 0.02, y, _percent(summary.median_error) + cut, va="center", fontsize=7.5)
        counts = [summarise(by_model[models[0]][name]).count for name in names] if models else []
        axes.set_yticks(range(len(names)), [f"{name}\n(n = {n})" for name, n in zip(names, counts, strict=True)])
        axes.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, LONGEST_BAR * 1.17))
        axes.set_xticks([0, 0.5, 1.0, 1.5, 2.0], ["0", "50", "100", "150", "200"])
        axes.set_xlabel("median |predicted / measured − 1| [%]")
        axes.set_title(title, fontsize=10, loc="left")
        _frame(axes)
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=max(1, len(handles)), frameon=False
    )
    return figure


def draw_shares(shares: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> Figure:
    """Share of each term in the time of every row, stacked; those of prefill first, and hatched.

    Parameters
    ----------
    shares : sequence of mapping
        ``{"id": ..., "terms": {name: share}}``.
    labels : mapping of str to str
        What to write for a row, by id.
    """
    names = list(dict.fromkeys(name for entry in shares for name in entry["terms"]))
    names.sort(key=lambda name: not name.startswith(PREFILL))  # of every bar, first things first
    parts = list(dict.fromkeys(name.partition(": ")[2] or name for name in names))
    figure = _figure(10.4, 0.2 * len(shares) + 1.3 + 0.22 * math.ceil(len(names) / 4))
    axes = figure.subplots()
    left = [0.0] * len(shares)
    for name in names:
        place = parts.index(name.partition(": ")[2] or name)
        width = [float(entry["terms"].get(name, 0.0)) for entry in shares]
        axes.barh(
            range(len(shares)),
            width,
            left=left,
            height=0.8,
            color=COLOURS[place % len(COLOURS)],
            hatch=HATCHES[1] if name.startswith(PREFILL) else HATCHES[2 * (place // len(COLOURS)) % len(HATCHES)],
            edgecolor="white",
            linewidth=0.4,
            label=name,
        )
        left = [start + more for start, more in zip(left, width, strict=True)]
    axes.set_yticks(range(len(shares)), [labels.get(entry["id"], entry["id"]) for entry in shares], fontsize=8)
    axes.set(ylim=(len(shares) - 0.4, -0.6), xlim=(0, max([1.0, *left])))
    ticks = [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    axes.set_xticks(ticks, [f"{tick * 100:.0f}" for tick in ticks])
    axes.set_xlabel("share of the row's time [%]")
    _frame(axes)
    figure.legend(loc="outside upper center", ncols=min(4, max(1, len(names))), frameon=False, fontsize=8.5)
    return figure


def draw_terms(terms: Sequence[Mapping[str, Any]]) -> Figure:
    """Median error without and with each term: what Eq. 12 leaves out, by how much.

    Parameters
    ----------
    terms : sequence of mapping
        ``{"term": ..., "error_without": ..., "error_with": ...}``, in the order they are switched on.
    """
    figure = _figure(10.4, 0.42 * len(terms) + 1.4)
    axes = figure.subplots()
    for place, entry in enumerate(terms):
        before, after = (max(LEAST_ERROR, float(entry[key])) for key in ("error_without", "error_with"))
        better = after <= before
        axes.plot([before, after], [place, place], color=BLUE if better else VERMILLION, linewidth=2.5, zorder=1)
        without = axes.scatter([before], [place], s=46, facecolors="white", edgecolors=BLACK, zorder=2)
        with_it = axes.scatter([after], [place], s=46, c=BLUE if better else VERMILLION, zorder=2)
        axes.annotate(
            f"{100 * (after - before):+.1f} points".replace("-", "−"),
            (max(before, after), place),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
        if place == 0:
            figure.legend(
                [without, with_it], ["without the term", "with it"], loc="outside upper center", ncols=2, frameon=False
            )
    ends = [max(LEAST_ERROR, float(each[key])) for each in terms for key in ("error_without", "error_with")]
    low, high = min(0.1, *ends) / 1.3, max(0.1, *ends) * 2.2
    axes.set_yticks(range(len(terms)), [str(entry["term"]) for entry in terms])
    axes.set(xscale="log", ylim=(len(terms) - 0.4, -0.6), xlim=(low, high))
    ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if low < tick < high]
    axes.set_xticks(ticks, [f"{100 * tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("median |predicted / measured − 1| [%]")
    _frame(axes)
    return figure


def draw_constants(constants: Sequence[Mapping[str, Any]]) -> Figure:
    """Fitted constants with their 90 % intervals and public ranges, relative to the fitted value.

    Parameters
    ----------
    constants : sequence of mapping
        ``{"name", "component", "value", "low", "high", "public_low", "public_high", "unit"}``; missing bounds are not
        drawn.
    """
    figure = _figure(10.4, 0.34 * len(constants) + 1.4)
    axes = figure.subplots()
    handles: dict[str, Any] = {}
    reach = [2.0]
    for place, entry in enumerate(constants):
        value = float(entry["value"])
        for low, high, style in (("public_low", "public_high", "public"), ("low", "high", "fitted")):
            if entry.get(low) is None or entry.get(high) is None or value <= 0:
                continue
            ends = [float(entry[low]) / value, float(entry[high]) / value]
            reach += [end if end > 1 else 1 / end for end in ends if end > 0]
            if style == "public":
                handles["public range"] = axes.barh(
                    place, ends[1] - ends[0], left=ends[0], height=0.62, color="0.82", zorder=1
                )
            else:
                (handles["90 % interval"],) = axes.plot(ends, [place, place], color=BLUE, linewidth=2.5, zorder=2)
        known = entry.get("status", "fitted") == "fitted"
        name = "fitted value" if known else "public value, not identified by the rows"
        handles[name] = axes.scatter(
            [1.0],
            [place],
            s=40,
            zorder=3,
            facecolors=BLUE if known else "white",
            edgecolors="white" if known else BLACK,
        )
    limit = min(10.0, max(reach)) * 1.1
    axes.axvline(1.0, color=BLACK, linewidth=0.8, zorder=0)
    names = [f"{entry.get('component', '')} {entry['name']}".strip() for entry in constants]
    axes.set_yticks(range(len(constants)), names)
    axes.set(xscale="log", ylim=(len(constants) - 0.4, -0.6), xlim=(1 / limit, limit))
    ticks = [tick for tick in (0.1, 0.2, 0.33, 0.5, 1, 2, 3, 5, 10) if 1 / limit < tick < limit]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("relative to the value used")
    _frame(axes)
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def _frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)


def _plain_ticks(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10, subs=(1.0,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(color="0.92", linewidth=0.7)
    axes.set_axisbelow(True)


def _percent(error: float) -> str:
    if math.isnan(error):
        return "none"
    return f"{100 * error:.0f} %" if math.isfinite(error) else "missed"


def _place_of_group(name: str) -> tuple[int, str]:
    """Systems in the order of the legend, settings and others by name."""
    known = list(SYSTEM_STYLES)
    return (known.index(name) if name in known else len(known), name)


def _system_styles(document: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    others: Iterator[tuple[str, str]] = iter(OTHER_STYLES * 20)
    names = sorted({row.get("system") or "?" for row in document["rows"]}, key=_place_of_group)
    return {name: SYSTEM_STYLES.get(name) or next(others) for name in names}
