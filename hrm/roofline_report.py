"""A roofline figure in words and as numbers, and what `hrm roofline` does (Figures 4 and 5)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.model import ModelSpec
from hrm.profile import Efficiency, HardwareProfile
from hrm.roofline import CostModel, Operator, Places, Stack, link_bandwidth, ridge_point
from hrm.roofline_operators import linear_places
from hrm.roofline_view import CPU, GPU, RooflineView, build_view
from hrm.units import format_bandwidth

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "calibration_of",
    "explain_roofline",
    "format_intensity",
    "print_roofline",
    "roofline_command",
    "roofline_document",
]


def explain_roofline(view: RooflineView) -> list[str]:
    """The figure in words, one sentence a line: P1, the operator, P2, the balance point, break-even, the plan."""
    p1, link = view.places.turning_point_1, format_bandwidth(link_bandwidth(view.stack, CPU, GPU))
    if p1 > 0:
        lines = [
            f"P1 = {format_intensity(p1)} (CPU peak over the {link} link): below it, computing on the CPU beats moving "
            "the data to the GPU."
        ]
    else:
        lines = [f"P1 = 0: CPU memory is no faster than the {link} link, so moving data to the GPU is never slower."]
    lines += _attention_sentences(view) if view.operator == "attention" else _ffn_sentences(view)
    if view.plan is not None:
        lines.append(f"{view.plan.text[0].upper()}{view.plan.text[1:]}: at most {_rate(view.plan.flops_per_s)}.")
    return lines


def _attention_sentences(view: RooflineView) -> list[str]:
    lines = []
    for sample in view.samples:
        each = sample.places
        side = "left of" if each.intensity_moved < each.turning_point_1 else "not left of"
        lines.append(
            f"Attention with its {sample.label} has {each.intensity_moved:.3f} FLOP/byte, {side} P1: "
            f"{_rate(each.stay_flops_per_s)} on the CPU, {_rate(each.fetch_flops_per_s)} on the GPU through the link. "
            f"It belongs on the {view.stack.levels[each.better].name}."
        )
    p2, balance = view.places.turning_point_2, view.places.balance_point
    return [
        *lines,
        f"P2 = {format_intensity(p2)}: below it the link binds, above it the GPU. Context and batch hardly move "
        "attention: FLOPs and bytes both grow with them.",
        f"Balance point = {format_intensity(balance)}: there the link and GPU memory take equally long.",
    ]


def _ffn_sentences(view: RooflineView) -> list[str]:
    places = view.places
    bound = "peak" if places.intensity_i >= ridge_point(view.stack, GPU) else "memory"
    if view.stack.levels[GPU].overlap < 1:
        bound = "peak and memory together"
    given = "" if view.batch_given else " (the smallest that reaches P2)"
    p2, balance = places.turning_point_2, places.balance_point
    return [
        f"A micro-batch of {view.micro_batch:,} gives the GPU {places.intensity_i:.3f} FLOP/byte: at most "
        f"{_rate(places.resident_flops_per_s)}, bound by its {bound}.",
        f"P2 = {format_intensity(p2)} on the link{_batch(view.turning_point_2_batch)}: below it the link binds, "
        f"above it the GPU's {bound}.",
        f"Balance point = {format_intensity(balance)}{_batch(view.balance_point_batch)}: past it a larger batch no "
        "longer helps, only a larger micro-batch.",
        f"A batch of {view.batch:,}{given} has {format_intensity(places.intensity_moved)} on the link: "
        f"{_rate(places.fetch_flops_per_s)} on the GPU, {_rate(places.stay_flops_per_s)} on the CPU.",
        _break_even_sentence(view.break_even_batch),
    ]


def _break_even_sentence(tokens: int | None) -> str:
    if tokens is None:
        return "Experts stay on the CPU: there is no batch from which copying them to the GPU is faster."
    if tokens == 1:
        return "Experts belong on the GPU at any batch: copying them is never slower than computing on the CPU."
    return (
        f"Break-even batch: {tokens:,} tokens. With fewer, experts run faster on the CPU; from there on, copied to the "
        "GPU and computed as one micro-batch."
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
                "overlap": level.overlap,
            }
            for level in stack.levels
        ],
        "links_to_gpu": [
            {"from": level.name, "bytes_per_s": link_bandwidth(stack, j, GPU)}
            for j, level in enumerate(stack.levels)
            if j != GPU
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
    if view.profile.efficiency == Efficiency() or view.cost_model == "paper":
        return "peaks"
    words = "peaks times calibrated efficiencies"
    overlap = view.stack.levels[GPU].overlap
    if overlap < 1:
        words += ", FLOPs and bytes on the GPU " + ("added up" if overlap == 0 else f"overlapping by {overlap:.0%}")
    return words


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


def print_roofline(document: dict[str, Any], console: Console) -> None:
    """Print what `roofline_command` returned: a table of the points, the sentences, and where the figure went.

    Parameters
    ----------
    document : dict
    console : rich.console.Console
    """
    from rich import box
    from rich.table import Table

    names = {"attention": "decode attention", "ffn": "expert FFN"}
    title = f"{names[document['operator']]} of {document['model']} on {document['hardware']}"
    console.print(f"{title}: theoretical intensity, not measured; roofs are {document['roofs']}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in (
        "on the GPU\n[FLOP/byte]",
        "on the link\n[FLOP/byte]",
        "CPU",
        "GPU through\nthe link",
        "GPU, data\nresident",
    ):
        table.add_column(column.replace("[", "\\["), justify="right")
    table.add_column("faster on")
    for point in document["points"]:
        table.add_row(
            point["label"],
            f"{point['intensity_gpu_flops_per_byte']:,.3f}",
            f"{point['intensity_link_flops_per_byte']:,.3f}",
            _rate(point["on_cpu_flops_per_s"]),
            _rate(point["on_gpu_from_cpu_flops_per_s"]),
            _rate(point["on_gpu_resident_flops_per_s"]),
            point["better_on"],
        )
    console.print(table)
    for line in document["explanation"]:
        console.print(line, markup=False, highlight=False)
    if "output" in document:
        console.print(f"Figure: {document['output']}", markup=False, highlight=False)


def format_intensity(intensity: float) -> str:
    """``"81.25 FLOP/byte"``, ``"599.0 FLOP/byte"``, ``"17,852 FLOP/byte"``."""
    decimals = 2 if intensity < 100 else 1 if intensity < 10_000 else 0
    return f"{intensity:,.{decimals}f} FLOP/byte"


def _rate(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e9:,.0f} GFLOP/s"


def _batch(tokens: int | None) -> str:
    return "" if tokens is None else f" (a batch of {tokens:,})"
