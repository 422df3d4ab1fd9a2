"""What one roofline figure shows, worked out: roofs, operator, turning points, and where a plan lies on it.

`hrm.plots.draw_roofline` draws a `RooflineView`, `hrm.roofline_report` says it in words and as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hrm.cost import Formats
from hrm.dtypes import KV_DTYPES, WEIGHT_DTYPES, parse_dtype
from hrm.errors import InputError
from hrm.model import ModelSpec
from hrm.profile import HardwareProfile
from hrm.roofline import CostModel, Operator, Places, Stack, attainable_from, attainable_local, stack_of
from hrm.roofline_operators import (
    MOST_TOKENS,
    attention_places,
    batch_at_intensity,
    break_even_batch,
    ffn_intensity,
    ffn_places,
    ffn_work,
)
from hrm.scenario import choose_formats

if TYPE_CHECKING:
    from hrm.policy import Policy

__all__ = ["PlanPoint", "RooflineView", "Sample", "build_view", "locate_plan"]

GPU, CPU, DISK = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One operator as it is drawn: attention with one KV format, or the experts with one micro-batch."""

    label: str
    places: Places


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """Where a plan runs the operator.

    Attributes
    ----------
    intensity : float
        On the axis of the figure [FLOP/byte].
    flops_per_s : float
        What the roofs allow there [FLOP/s].
    text : str
        In words.
    """

    intensity: float
    flops_per_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineView:
    """What one roofline figure shows.

    Attributes
    ----------
    profile, model, operator, cost_model, formats
        Inputs.
    context, micro_batch, batch : int
        Cached tokens per request (attention); tokens the GPU computes at once, and per copy of the weights (ffn).
    batch_given : bool
        Else the batch is the one at P2.
    stack : Stack
        Data lie on level 1 (CPU), level 0 (GPU) may fetch them.
    samples : tuple of Sample
        ``samples[chosen]`` is the one that P2 and the balance point belong to.
    chosen : int
    break_even_batch : int or None
        Tokens from which the experts run faster on the GPU (ffn).
    turning_point_2_batch, balance_point_batch : int or None
        P2 and the balance point as tokens per batch (ffn).
    plan : PlanPoint or None
    """

    profile: HardwareProfile
    model: ModelSpec
    operator: Operator
    cost_model: CostModel
    formats: Formats
    context: int
    micro_batch: int
    batch: int
    batch_given: bool
    stack: Stack
    samples: tuple[Sample, ...]
    chosen: int
    break_even_batch: int | None
    turning_point_2_batch: int | None
    balance_point_batch: int | None
    plan: PlanPoint | None = None

    @property
    def places(self) -> Places:
        """The chosen sample."""
        return self.samples[self.chosen].places


def build_view(
    profile: HardwareProfile,
    model: ModelSpec,
    *,
    operator: Operator = "attention",
    cost_model: CostModel = "full",
    context: int = 512,
    micro_batch: int = 128,
    batch: int | None = None,
    weights_dtype: str | None = None,
    kv_dtype: str | None = None,
) -> RooflineView:
    """Work out one roofline figure.

    Parameters
    ----------
    profile : HardwareProfile
    model : ModelSpec
    operator : {"attention", "ffn"}
        Figure 4 or 5.
    cost_model : {"paper", "full"}
    context : int
        Cached tokens per request [tokens].
    micro_batch, batch : int
        Tokens computed at once on the GPU, and per copy of a layer's weights. Without a batch it is the one at P2.
    weights_dtype, kv_dtype : str, optional
        Storage formats; by default as in a plan.

    Returns
    -------
    RooflineView

    Raises
    ------
    InputError
        A value is out of range, or the authors' formulas do not describe the model.
    """
    _check_choice("--op", operator, ("attention", "ffn"))
    _check_choice("--cost-model", cost_model, ("paper", "full"))
    _check_tokens("--context", context, model.max_positions)
    _check_tokens("--micro-batch", micro_batch, MOST_TOKENS)
    if batch is not None:
        _check_tokens("--batch", batch, MOST_TOKENS)
        if batch < micro_batch:
            raise InputError(
                f"a batch of {batch} does not hold a micro-batch of {micro_batch}",
                where="--batch",
                way_out=f"at least {micro_batch}, or a smaller --micro-batch",
            )
    if weights_dtype is not None:
        weights_dtype = parse_dtype(weights_dtype, where="--weights-dtype", allowed=WEIGHT_DTYPES)
    if kv_dtype is not None:
        kv_dtype = parse_dtype(kv_dtype, where="--kv-dtype", allowed=KV_DTYPES)
    formats = choose_formats(profile, model, weights=weights_dtype, kv=kv_dtype)
    stack = stack_of(profile, formats.compute, operator=operator, cost_model=cost_model)
    size = batch or micro_batch
    even = at_p2 = at_balance = None
    if operator == "attention":
        samples, chosen = _attention_samples(stack, model, formats, context, cost_model)
    else:
        reference = ffn_places(stack, model, formats, micro_batch, micro_batch, cost_model)
        at_p2 = batch_at_intensity(model, formats, reference.turning_point_2, cost_model)
        at_balance = batch_at_intensity(model, formats, reference.balance_point, cost_model)
        even = break_even_batch(stack, model, formats, cost_model)
        size = batch or max(micro_batch, at_p2 or micro_batch)
        sizes = sorted({max(1, micro_batch // 4), micro_batch, min(size, 4 * micro_batch)})
        samples = tuple(
            Sample(label=f"µ = {mu:,}", places=ffn_places(stack, model, formats, mu, size, cost_model)) for mu in sizes
        )
        chosen = sizes.index(micro_batch)
    return RooflineView(
        profile=profile,
        model=model,
        operator=operator,
        cost_model=cost_model,
        formats=formats,
        context=context,
        micro_batch=micro_batch,
        batch=size,
        batch_given=batch is not None,
        stack=stack,
        samples=samples,
        chosen=chosen,
        break_even_batch=even,
        turning_point_2_batch=at_p2,
        balance_point_batch=at_balance,
    )


def _attention_samples(
    stack: Stack, model: ModelSpec, formats: Formats, context: int, cost_model: CostModel
) -> tuple[tuple[Sample, ...], int]:
    """The chosen KV format beside 16 bit and int4, the two of Figure 4; the index of the chosen one."""
    sixteen = formats.compute if formats.compute in ("fp16", "bf16") else "fp16"
    if formats.kv in ("fp16", "bf16"):
        sixteen = formats.kv
    kinds = list(dict.fromkeys([sixteen, formats.kv, "int4"]))
    samples = tuple(
        Sample(
            label=f"KV cache in {kv}",
            places=attention_places(stack, model, replace(formats, kv=kv), context, cost_model),
        )
        for kv in kinds
    )
    return samples, kinds.index(formats.kv)


def locate_plan(view: RooflineView, policy: Policy) -> PlanPoint:
    """Where a policy runs the view's operator, from what the roofs allow.

    Parameters
    ----------
    view : RooflineView
    policy : Policy
        A plan for the same profile, model and formats.

    Returns
    -------
    PlanPoint
        Intensity is over the bytes that cross the link, or, where the computation stays beside its data, over the bytes
        touched there.
    """
    stack = view.stack
    if view.operator == "attention":
        places = view.places
        if policy.everything_on_cpu or not policy.attention_on_gpu:
            return PlanPoint(
                intensity=places.intensity_j,
                flops_per_s=places.stay_flops_per_s,
                text="the plan runs attention on the CPU",
            )
        if policy.kv_on_gpu >= 1.0:
            return PlanPoint(
                intensity=places.intensity_i,
                flops_per_s=places.resident_flops_per_s,
                text="the plan runs attention on the GPU, with the KV cache there",
            )
        reach = {CPU: 1.0 - policy.kv_on_gpu, DISK: policy.kv_on_disk}
        rate = _from_several(stack, places.intensity_i, places.intensity_moved, reach)
        source = "disk and CPU memory" if policy.kv_on_disk > 0 else "CPU memory"
        moved = places.intensity_moved / reach[CPU]
        text = f"the plan runs attention on the GPU and fetches {reach[CPU]:.1%} of the KV cache from {source}"
        return PlanPoint(intensity=moved, flops_per_s=rate, text=text)
    tokens, batch = policy.batch_size / policy.num_micro_batches, float(policy.batch_size)
    if policy.everything_on_cpu or not policy.ffn_on_gpu:
        intensity = ffn_intensity(view.model, view.formats, tokens, view.cost_model)
        return PlanPoint(
            intensity=intensity,
            flops_per_s=attainable_local(stack, CPU, intensity),
            text=f"the plan runs the experts on the CPU, {tokens:,.0f} tokens at a time",
        )
    if policy.weight_slots == "experts":
        tokens = batch  # a ring of experts applies each expert to the whole batch at once
    at_gpu = ffn_intensity(view.model, view.formats, tokens, view.cost_model)
    if policy.weights_on_gpu >= 1.0:
        return PlanPoint(
            intensity=at_gpu,
            flops_per_s=attainable_local(stack, GPU, at_gpu),
            text=f"the plan keeps the experts on the GPU, {tokens:,.0f} tokens at a time",
        )
    # A plan streams whole layers, touched or not.
    layer = float(view.model.layer_expert_bytes(view.formats.weights))
    whole = float(ffn_work(view.model, view.formats, batch, view.cost_model).flops) / layer
    reach = {CPU: 1.0 - policy.weights_on_gpu, DISK: policy.weights_on_disk}
    rate = _from_several(stack, at_gpu, whole, reach)
    text = (
        f"the plan streams {reach[CPU]:.1%} of the experts for each batch of {policy.batch_size:,} "
        f"and computes {tokens:,.0f} tokens at a time on the GPU"
    )
    return PlanPoint(intensity=whole / reach[CPU], flops_per_s=rate, text=text)


def _from_several(stack: Stack, intensity_i: float, whole: float, shares: Mapping[int, float]) -> float:
    """Eqs. 4-7 with data from several levels: `shares` of what `whole` counts comes from or through each [FLOP/s]."""
    rates = [attainable_local(stack, GPU, intensity_i)]
    for j, share in shares.items():
        if share > 0 and j < len(stack.levels):
            rates.append(attainable_from(stack, GPU, j, intensity_i, whole / share))
    return min(rates)


def _check_choice(option: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{value!r} is not known", where=option, way_out=f"one of {', '.join(choices)}")


def _check_tokens(option: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InputError(f"{value!r:.40} tokens", where=option, way_out=f"a whole number from 1 to {most:,}")
