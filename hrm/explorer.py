"""The roofline explorer behind the notebook: widgets, and the same picture without them.

Widgets and matplotlib are imported inside the functions. A change redraws at once with what is known; a plan that has
not been searched for yet follows when it is found, and is kept.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hrm.errors import HrmError
from hrm.model_files import load_model, model_names
from hrm.pictures import Picture
from hrm.profile_files import load_profile, profile_names
from hrm.roofline import Operator
from hrm.roofline_report import explain_roofline
from hrm.roofline_view import RooflineView, build_view, locate_plan

if TYPE_CHECKING:
    from hrm.policy import Policy

__all__ = ["Picture", "Settings", "describe_settings", "explore_roofline", "show_roofline", "view_of"]

NATIVE = "as in a plan"
DTYPE_CHOICES = (NATIVE, "fp16", "fp8", "int8", "int4", "mxfp4")
OPERATORS: dict[str, Operator] = {"attention (Figure 4)": "attention", "expert FFN (Figure 5)": "ffn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the explorer lets a person choose.

    Attributes
    ----------
    hardware, model : str
        Names of bundled profiles and models, or paths.
    operator : {"attention", "ffn"}
    dtype : str or None
        Storage of the KV cache (attention) or of the weights (ffn); None as in a plan.
    context, micro_batch : int
        [tokens]
    batch : int or None
        [tokens]; None is the batch at P2.
    """

    hardware: str = "t4"
    model: str = "mixtral-8x7b"
    operator: Operator = "attention"
    dtype: str | None = None
    context: int = 512
    micro_batch: int = 128
    batch: int | None = None

    @property
    def weights_dtype(self) -> str | None:
        """Storage of the weights."""
        return self.dtype if self.operator == "ffn" else None

    @property
    def kv_dtype(self) -> str | None:
        """Storage of the KV cache."""
        return self.dtype if self.operator == "attention" else None


@lru_cache(maxsize=64)
def _find_best(hardware: str, model: str, weights_dtype: str | None, kv_dtype: str | None) -> Policy | str:
    """The best policy for MTBench with 128 generated tokens, or why there is none; searched for once."""
    from hrm.scenario import Scenario, choose_formats
    from hrm.search import find_policy
    from hrm.workload import load_workload

    profile, spec = load_profile(hardware), load_model(model)
    try:
        formats = choose_formats(profile, spec, weights=weights_dtype, kv=kv_dtype)
        workload = load_workload("mtbench")
        return find_policy(Scenario(profile=profile, model=spec, workload=workload, formats=formats)).policy
    except HrmError as error:
        return str(error)


def view_of(settings: Settings, *, with_plan: bool = True) -> RooflineView:
    """The view of a choice, with the point of the plan where there is one.

    Raises
    ------
    InputError
        A value is out of range for the model or the hardware.
    """
    view = _bare_view(settings)
    if not with_plan:
        return view
    plan = _find_best(settings.hardware, settings.model, settings.weights_dtype, settings.kv_dtype)
    return view if isinstance(plan, str) else replace(view, plan=locate_plan(view, plan))


def _bare_view(settings: Settings) -> RooflineView:
    profile, model = _load_hardware(settings.hardware), _load_model(settings.model)
    batch = settings.batch if settings.batch is None else max(settings.batch, settings.micro_batch)
    return build_view(
        profile,
        model,
        operator=settings.operator,
        context=min(settings.context, model.max_positions),
        micro_batch=settings.micro_batch,
        batch=batch,
        weights_dtype=settings.weights_dtype,
        kv_dtype=settings.kv_dtype,
    )


_load_hardware = lru_cache(maxsize=64)(load_profile)
_load_model = lru_cache(maxsize=64)(load_model)


def describe_settings(settings: Settings, *, with_plan: bool = True) -> list[str]:
    """The view in sentences; says why where there is no plan."""
    lines = explain_roofline(view_of(settings, with_plan=with_plan))
    if with_plan:
        plan = _find_best(settings.hardware, settings.model, settings.weights_dtype, settings.kv_dtype)
        if isinstance(plan, str):
            lines.append(f"No plan: {plan}")
    return lines


def show_roofline(settings: Settings | None = None) -> Picture:
    """The figure of a choice as a static picture, with its legend and the plan's point.

    Parameters
    ----------
    settings : Settings, optional
        The explorer's first view by default.

    Raises
    ------
    InputError
        As `view_of`.
    """
    from hrm.plots import draw_roofline

    return Picture(draw_roofline(view_of(settings or Settings())))


def explore_roofline(settings: Settings | None = None) -> Any:
    """Widgets over hardware, model, operator, context, dtype, micro-batch and batch.

    Parameters
    ----------
    settings : Settings, optional
        What is shown first.

    Returns
    -------
    ipywidgets.VBox
        Its last child holds the picture and, beside it, P1, P2 and the balance point in words.
    """
    import ipywidgets as widgets

    first = settings or Settings()
    wide = widgets.Layout(width="320px")
    style = {"description_width": "90px"}

    def slider(name: str, value: int, low: int, high: int) -> Any:
        options = [("at P2", 0)] if name == "batch" else []
        options += [(f"{2**power:,}", 2**power) for power in range(low, high + 1)]
        nearest = min((number for _, number in options), key=lambda number: abs(number - value))
        return widgets.SelectionSlider(
            description=name, options=options, value=nearest, layout=wide, style=style, continuous_update=True
        )

    controls: dict[str, Any] = {
        "hardware": widgets.Dropdown(
            description="hardware", options=profile_names(), value=first.hardware, layout=wide, style=style
        ),
        "model": widgets.Dropdown(
            description="model", options=model_names(), value=first.model, layout=wide, style=style
        ),
        "operator": widgets.Dropdown(
            description="operator", options=list(OPERATORS.items()), value=first.operator, layout=wide, style=style
        ),
        "dtype": widgets.Dropdown(
            description="stored as", options=DTYPE_CHOICES, value=first.dtype or NATIVE, layout=wide, style=style
        ),
        "context": slider("context", first.context, 5, 15),
        "micro_batch": slider("micro-batch", first.micro_batch, 0, 13),
        "batch": slider("batch", first.batch or 0, 0, 17),
    }
    picture = widgets.Image(format="png", layout=widgets.Layout(width="648px"))
    words = widgets.HTML(layout=widgets.Layout(width="420px"))
    redraw = _redrawer(controls, picture, words)
    for control in controls.values():
        control.observe(redraw, names="value")
    redraw(None)
    rows = [widgets.HBox(list(controls.values())[:4]), widgets.HBox(list(controls.values())[4:])]
    rows = [widgets.HBox(row.children, layout=widgets.Layout(flex_flow="row wrap")) for row in rows]
    return widgets.VBox([*rows, widgets.HBox([picture, words])])


def _redrawer(controls: dict[str, Any], picture: Any, words: Any) -> Callable[[object], None]:
    """Redraw on one figure that is kept; first without a plan that is not known yet, then with it."""
    from hrm.plots import draw_roofline, render_png

    figure: Any = None
    known: set[tuple[str, str, str | None, str | None]] = set()

    def read() -> Settings:
        values = {name: control.value for name, control in controls.items()}
        values["dtype"] = None if values["dtype"] == NATIVE else values["dtype"]
        values["batch"] = values["batch"] or None
        return Settings(**values)

    def draw(settings: Settings, *, with_plan: bool) -> None:
        nonlocal figure
        view = view_of(settings, with_plan=with_plan)
        figure = draw_roofline(view, figure, legend=False)
        picture.value = render_png(figure)
        lines = [html.escape(line) for line in describe_settings(settings, with_plan=with_plan)]
        words.value = "".join(f"<p style='line-height:1.35; margin:0 0 0.6em'>{line}</p>" for line in lines)

    def redraw(_: object) -> None:
        settings = read()
        key = (settings.hardware, settings.model, settings.weights_dtype, settings.kv_dtype)
        try:
            draw(settings, with_plan=key in known)
            if key not in known:
                known.add(key)
                draw(settings, with_plan=True)
        except HrmError as error:
            words.value = f"<p><b>{html.escape(str(error))}</b></p>"

    return redraw
