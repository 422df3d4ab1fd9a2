"""What each resource is worth, as a picture: a tornado chart of a plan's marginal values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hrm.errors import InputError
from hrm.pictures import Picture
from hrm.plots import BLUE, GREY
from hrm.report import MORE
from hrm.sweep_labels import SMALL

if TYPE_CHECKING:
    from hrm.plans import Plan

__all__ = ["draw_tornado"]


def draw_tornado(plan: Plan, path: str | Path | None = None) -> Picture:
    """Draw what one more GiB or GB/s of each resource would add at this batch, the largest on top.

    Parameters
    ----------
    plan : Plan
    path : str or Path, optional
        Also written there, PNG or SVG.

    Raises
    ------
    InputError
        The plan has no marginal values: it is a trivial one, or one of the paper's cost model.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    values = plan.marginal_values
    if not values:
        raise InputError(
            "has no marginal values: a trivial plan, or one of the paper's cost model",
            where="plan",
            way_out="a plan of the full cost model that streams weights",
        )
    gains = sorted(((values[key], name) for key, name in MORE.items() if key in values), key=lambda each: each[0])
    figure = Figure(figsize=(8.2, 1.3 + 0.36 * len(gains)))
    FigureCanvasAgg(figure)
    height = float(figure.get_size_inches()[1])
    axes = figure.add_axes((0.27, 0.52 / height, 0.66, 1 - 1.12 / height))
    axes.barh([name for _, name in gains], [gain for gain, _ in gains], color=BLUE, height=0.6)
    for row, (gain, _) in enumerate(gains):
        text = f"+{gain:,.3g}" if gain >= 5e-4 else "+0"
        axes.annotate(text, (gain, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=SMALL)
    axes.set_xlim(0, gains[-1][0] * 1.15 if gains[-1][0] >= 5e-4 else 1.0)
    axes.set_xlabel("throughput added, at this batch [token/s]", fontsize=SMALL)
    axes.tick_params(labelsize=SMALL)
    axes.grid(axis="x", color=GREY, alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    name = f"{plan.scenario.model.name} on {plan.scenario.profile.name}"
    rate = f"{plan.prediction.throughput_tokens_per_s:,.4g} token/s"
    figure.text(0.02, 1 - 0.14 / height, f"{name}: what one more would add to {rate}", va="top", weight="bold")
    picture = Picture(figure)
    if path is not None:
        picture.save(path)
    return picture
