"""One roofline picture and the numbers behind it: what `hrm roofline` and the notebook show (Figures 4 and 5).

A `RooflineView` holds what is drawn; `hrm.plots.draw_roofline` draws it, `roofline_document` writes it as JSON,
`explain_roofline` says it in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.cost import Formats
from hrm.dtypes import KV_DTYPES, WEIGHT_DTYPES, parse_dtype
from hrm.errors import InputError
from hrm.model import ModelSpec
from hrm.profile import Efficiency, HardwareProfile
from hrm.roofline import CostModel, Operator, Places, Stack, attainable_from, attainable_local, link_bandwidth, stack_of
from hrm.roofline_operators import (
    MOST_TOKENS,
    attention_places,
    batch_at_intensity,
    break_even_batch,
    ffn_intensity,
    ffn_places,
    ffn_work,
    linear_places,
)
from hrm.scenario import choose_formats
from hrm.units import format_bandwidth, format_compute, format_size

if TYPE_CHECKING:
    from hrm.policy import Policy

__all__ = [
    "PlanPoint",
    "RooflineView",
    "Sample",
    "build_view",
    "calibration_of",
    "explain_roofline",
    "format_intensity",
    "locate_plan",
    "roofline_command",
    "roofline_document",
]

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
        Cached tokens per request (attention); tokens the GPU computes at once, and per copy of the weights (ffn) [tokens].
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
        Tokens computed at once on the GPU, and per copy of a layer's weights [tokens]. Without a batch it is the one at P2.
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
    weights = None if weights_dtype is None else parse_dtype(weights_dtype, where="--weights-dtype", allowed=WEIGHT_DTYPES)
    kv = None if kv_dtype is None else parse_dtype(kv_dtype, where="--kv-dtype", allowed=KV_DTYPES)
    formats = choose_formats(profile, model, weights=weights, kv=kv)
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


def explain_roofline(view: RooflineView) -> list[str]:
    """The figure in words, one sentence a line: P1, the operator, P2, the balance point, break-even, the plan."""
    places, link = view.places, format_bandwidth(link_bandwidth(view.stack, CPU, GPU))
    p1, p2 = places.turning_point_1, places.turning_point_2
    lines = []
    if p1 > 0:
        lines.append(
            f"P1 = {format_intensity(p1)} (CPU peak over the {link} link): below it, computing on the CPU beats moving the "
            "data to the GPU."
        )
    else:
        lines.append(f"P1 = 0: CPU memory is no faster than the {link} link, so moving data to the GPU is never slower.")
    if view.operator == "attention":
        for sample in view.samples:
            each = sample.places
            side = "left of" if each.intensity_moved < p1 else "at or right of"
            where = view.stack.levels[each.better].name
            lines.append(
                f"Attention with its {sample.label} has {each.intensity_moved:.3f} FLOP/byte, {side} P1: "
                f"{_rate(each.stay_flops_per_s)} on the CPU, {_rate(each.fetch_flops_per_s)} on the GPU through the link. "
                f"It belongs on the {where}."
            )
        lines.append(
            f"P2 = {format_intensity(p2)}: below it the link binds, above it the GPU. Context and batch hardly move "
            "attention: FLOPs and bytes both grow with them."
        )
        lines.append(
            f"Balance point = {format_intensity(places.balance_point)}: there the link and GPU memory take equally long."
        )
    else:
        bound = "memory" if places.resident_flops_per_s < view.stack.levels[GPU].peak_flops_per_s else "peak"
        lines.append(
            f"A micro-batch of {view.micro_batch:,} gives the GPU {places.intensity_i:.3f} FLOP/byte: at most "
            f"{_rate(places.resident_flops_per_s)}, bound by its {bound}."
        )
        lines.append(
            f"P2 = {format_intensity(p2)} on the link{_batch(view.turning_point_2_batch)}: below it the link binds, above it "
            f"the GPU's {bound}."
        )
        lines.append(
            f"Balance point = {format_intensity(places.balance_point)}{_batch(view.balance_point_batch)}: past it a larger "
            "batch no longer helps, only a larger micro-batch."
        )
        given = "" if view.batch_given else " (the smallest that reaches P2)"
        lines.append(
            f"A batch of {view.batch:,}{given} has {format_intensity(places.intensity_moved)} on the link: "
            f"{_rate(places.fetch_flops_per_s)} on the GPU, {_rate(places.stay_flops_per_s)} on the CPU."
        )
        lines.append(_break_even_sentence(view.break_even_batch))
    if view.plan is not None:
        lines.append(f"{view.plan.text[0].upper()}{view.plan.text[1:]}: at most {_rate(view.plan.flops_per_s)}.")
    return lines


def _break_even_sentence(tokens: int | None) -> str:
    if tokens is None:
        return "Experts stay on the CPU: there is no batch from which copying them to the GPU is faster."
    if tokens == 1:
        return "Experts belong on the GPU at any batch: copying them is never slower than computing on the CPU."
    return (
        f"Break-even batch: {tokens:,} tokens. With fewer, experts run faster on the CPU; from there on, copied to the GPU "
        "and computed as one micro-batch."
    )


def roofline_document(view: RooflineView) -> dict[str, Any]:
    """All numbers of a figure, in SI base units, for `--json`."""
    stack, profile = view.stack, view.profile
    places = view.places
    document: dict[str, Any] = {
        "figure": "roofline",
        "intensity": "theoretical",
        "hardware": profile.name,
        "model": view.model.name,
        "operator": view.operator,
        "cost_model": view.cost_model,
        "dtypes": {"weights": view.formats.experts(view.model), "kv": view.formats.kv, "compute": view.formats.compute},
        "roofs": calibration_of(view),
        "levels": [
            {
                "name": level.name,
                "peak_flops_per_s": level.peak_flops_per_s,
                "bytes_per_s": level.bytes_per_s,
                "bytes": level.bytes,
            }
            for level in stack.levels
        ],
        "links_to_gpu": [
            {"from": stack.levels[j].name, "bytes_per_s": link_bandwidth(stack, j, GPU)} for j in range(1, len(stack.levels))
        ],
        "sources": {
            key: profile.quantities[key].note
            for key in (f"gpu.peak.{view.formats.compute}", "gpu.bandwidth", "cpu.peak.fp32", "cpu.bandwidth")
            if key in profile.quantities
        },
        "turning_point_1_flops_per_byte": places.turning_point_1,
        "turning_point_2_flops_per_byte": places.turning_point_2,
        "balance_point_flops_per_byte": places.balance_point,
        "points": [{"label": sample.label, **_places_document(stack, sample.places)} for sample in view.samples],
        "chosen": view.chosen,
        "explanation": explain_roofline(view),
    }
    if view.operator == "attention":
        document["context_tokens"] = view.context
    else:
        document |= {
            "micro_batch_tokens": view.micro_batch,
            "batch_tokens": view.batch,
            "batch_given": view.batch_given,
            "break_even_batch_tokens": view.break_even_batch,
            "turning_point_2_batch_tokens": view.turning_point_2_batch,
            "balance_point_batch_tokens": view.balance_point_batch,
        }
        if view.cost_model == "full":
            others = linear_places(stack, view.model, view.formats, view.micro_batch, view.batch)
            document["operators"] = {name: _places_document(stack, each) for name, each in others.items()}
    if view.plan is not None:
        document["plan"] = {
            "intensity_flops_per_byte": view.plan.intensity,
            "attainable_flops_per_s": view.plan.flops_per_s,
            "text": view.plan.text,
        }
    return document


def calibration_of(view: RooflineView) -> str:
    """What the roofs are, in words."""
    calibrated = view.profile.efficiency != Efficiency() and view.cost_model == "full"
    return "peaks times calibrated efficiencies" if calibrated else "peaks"


def _places_document(stack: Stack, places: Places) -> dict[str, Any]:
    return {
        "intensity_gpu_flops_per_byte": places.intensity_i,
        "intensity_cpu_flops_per_byte": places.intensity_j,
        "intensity_link_flops_per_byte": places.intensity_moved,
        "on_cpu_flops_per_s": places.stay_flops_per_s,
        "on_gpu_from_cpu_flops_per_s": places.fetch_flops_per_s,
        "on_gpu_resident_flops_per_s": places.resident_flops_per_s,
        "turning_point_2_flops_per_byte": places.turning_point_2,
        "balance_point_flops_per_byte": places.balance_point,
        "better_on": stack.levels[places.better].name,
    }


def roofline_command(
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
    output: Path | None = None,
) -> dict[str, Any]:
    """What `hrm roofline` does: draw the figure if an output is asked for, and return its numbers.

    Parameters
    ----------
    profile, model, operator, cost_model, context, micro_batch, batch, weights_dtype, kv_dtype
        As in `build_view`.
    output : Path, optional
        A ``.png`` or ``.svg`` file; without one nothing is drawn and matplotlib is not imported.

    Returns
    -------
    dict
        `roofline_document`, with ``"output"`` where a figure was written.

    Raises
    ------
    InputError
        As `build_view`; or the output is neither PNG nor SVG, or cannot be written.
    """
    view = build_view(
        profile,
        model,
        operator=operator,
        cost_model=cost_model,
        context=context,
        micro_batch=micro_batch,
        batch=batch,
        weights_dtype=weights_dtype,
        kv_dtype=kv_dtype,
    )
    document = roofline_document(view)
    if output is not None:
        from hrm.plots import check_figure_path, draw_roofline, save_figure

        save_figure(draw_roofline(view), check_figure_path(output))
        document["output"] = str(output)
    return document


def describe_stack(stack: Stack) -> str:
    """The levels in one line, e.g. ``"GPU 242 TFLOP/s, 300 GB/s, 22.35 GiB; CPU ..."``."""
    parts = []
    for level in stack.levels:
        peak = f"{format_compute(level.peak_flops_per_s)}, " if level.peak_flops_per_s else ""
        parts.append(f"{level.name} {peak}{format_bandwidth(level.bytes_per_s)}, {format_size(level.bytes)}")
    return "; ".join(parts)


def _check_choice(option: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{value!r} is not known", where=option, way_out=f"one of {', '.join(choices)}")


def _check_tokens(option: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InputError(f"{value!r:.40} tokens", where=option, way_out=f"a whole number from 1 to {most:,}")


def format_intensity(intensity: float) -> str:
    """``"81.25 FLOP/byte"``, ``"599.0 FLOP/byte"``, ``"17,852 FLOP/byte"``."""
    decimals = 2 if intensity < 100 else 1 if intensity < 10_000 else 0
    return f"{intensity:,.{decimals}f} FLOP/byte"


def _rate(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e9:,.0f} GFLOP/s"


def _batch(tokens: int | None) -> str:
    return "" if tokens is None else f" (a batch of {tokens:,})"
