"""What a person sees of a plan: one screen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hrm.account import pass_work
from hrm.plans import Plan
from hrm.prediction import MemoryUse
from hrm.scenario import measure_sizes
from hrm.units import GIB, format_bandwidth

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_plan", "seconds_in_words"]

LANES = {
    "gpu": "GPU",
    "cpu": "CPU",
    "host_to_device": "link, host to device",
    "device_to_host": "link, device to host",
    "staging": "staging copy",
    "disk": "disk",
    "cpu_memory": "CPU memory",
}


def seconds_in_words(seconds: float) -> str:
    """A duration as a person says it."""
    if not math.isfinite(seconds):
        return "not in this model"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 86400:.3g} days"


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= 0.01 * GIB else f"{size / 2**20:,.1f} MiB"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share in (0.0, 1.0) else f"{share:.2%}"


def _lane_name(name: str) -> str:
    """A lane, or sum of lanes, in words."""
    if name in LANES:
        return LANES[name]
    if name == "chain":
        return "chain of one micro-batch: GPU, copies and CPU one after the other"
    if name.startswith("one_slot_"):
        rest = name.removeprefix("one_slot_")
        return f"weight copies + {LANES.get(rest, 'chain of one micro-batch')} (one weight slot)"
    if name.startswith("ring_"):
        first, second = name.removeprefix("ring_").split("_then_")
        return f"attention ({LANES.get(first, first)}), then experts ({LANES.get(second, second)}) through the ring"
    return name.replace("_", " ")


def bottleneck_in_words(plan: Plan) -> str:
    """What sets the time, for the screen."""
    phase, _, lane = plan.prediction.bottleneck.partition(": ")
    return f"{_lane_name(lane)} in {phase}"


def policy_lines(plan: Plan) -> list[tuple[str, str]]:
    """The policy in words and symbols: (what, how)."""
    policy, formats = plan.policy, plan.formats_as_run
    if policy.everything_on_cpu:
        on_disk = f", {_percent(policy.weights_on_disk)} of the expert weights on disk" if policy.weights_on_disk else ""
        return [
            ("batch", f"N = {policy.batch_size} requests in one go"),
            ("compute", f"everything on the CPU{on_disk}; the GPU is not used"),
            ("formats", f"weights {formats['weights']}, KV cache {formats['kv']}, arithmetic {formats['compute']}"),
        ]

    def place(on_gpu: bool) -> str:
        return "GPU" if on_gpu else "CPU"

    weights_cpu = max(0.0, 1.0 - policy.weights_on_gpu - policy.weights_on_disk)
    kv_cpu = max(0.0, 1.0 - policy.kv_on_gpu - policy.kv_on_disk)
    locked = "page-locked once" if policy.pin_weights else "pageable, staged"
    slots = {
        1: "one slot of a layer on the GPU (copy and compute take turns)",
        2: "two slots of a layer on the GPU",
        "experts": f"a ring of {policy.ring_experts} experts on the GPU",
    }[policy.weight_slots]
    experts = f"{_percent(policy.weights_on_gpu)} GPU (r_w), {_percent(weights_cpu)} CPU ({locked}), "
    experts += f"{_percent(policy.weights_on_disk)} disk"
    if policy.weights_on_gpu < 1.0:
        experts += f"; through {slots}"
    rest = [
        f"non-expert weights {'on the GPU' if policy.dense_weights_on_gpu else 'streamed with their layer'}",
        f"embedding on the {place(policy.embedding_on_gpu)}",
        f"lm_head {'on the GPU' if policy.lm_head_on_gpu else 'streamed like a layer'}",
    ]
    return [
        (
            "batch",
            f"N = {policy.batch_size:,} requests, n_ub = {policy.num_micro_batches} micro-batches of mu <= "
            f"{policy.micro_batch_size} ({policy.micro_batch_token_budget:,} tokens at most); prefill "
            f"{policy.prefill_micro_batch_size} at a time",
        ),
        (
            "compute",
            f"attention on the {place(policy.attention_on_gpu)} (A_g = {int(policy.attention_on_gpu)}), experts on the "
            f"{place(policy.ffn_on_gpu)} (F_g = {int(policy.ffn_on_gpu)}), schedule {policy.schedule}"
            + (f", tensor parallel over {plan.parallelism['degree']} GPUs" if plan.parallelism["degree"] > 1 else ""),
        ),
        ("experts", experts),
        ("the rest", ", ".join(rest)),
        (
            "KV cache",
            f"{_percent(policy.kv_on_gpu)} GPU (r_c), {_percent(kv_cpu)} CPU, {_percent(policy.kv_on_disk)} disk",
        ),
        ("formats", f"weights {formats['weights']}, KV cache {formats['kv']}, arithmetic {formats['compute']}"),
    ]


def _grid(*, pad: int = 2) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, pad))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table


def _predicted(plan: Plan) -> Table:
    prediction, workload = plan.prediction, plan.scenario.workload
    table = _grid()
    paper = plan.inputs.cost_model == "paper"
    scope = "decode only, as the paper's objective" if paper else "end to end: generated tokens / (prefill + decode)"
    table.add_row("throughput", f"[bold green]{prediction.throughput_tokens_per_s:,.2f} token/s[/] ({scope})")
    decode = f"decode {seconds_in_words(prediction.decode_s)}"
    decode += f" ({prediction.decode_throughput_tokens_per_s:,.2f} token/s, "
    decode += f"{seconds_in_words(prediction.layer_latency_s)} per layer and step)"
    if paper:
        table.add_row("one batch", decode)
    else:
        table.add_row("one batch", f"prefill {seconds_in_words(prediction.prefill_s)}, {decode}")
        batches = prediction.num_batches
        table.add_row(
            "all requests",
            f"{seconds_in_words(prediction.completion_s)} for {workload.num_requests:,} requests in {batches} "
            f"batch{'es' if batches > 1 else ''}, start-up of {seconds_in_words(prediction.startup_s)} (load, pin) included",
        )
    table.add_row("bottleneck", f"[bold]{bottleneck_in_words(plan)}[/]")
    return table


def _resources(plan: Plan) -> Table:
    from rich import box
    from rich.table import Table

    prediction, layers = plan.prediction, plan.scenario.model.n_layers
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("resource")
    for head in ("decode s/layer", "busy", "GB/layer", "GFLOP/layer", "prefill busy"):
        table.add_column(head, justify="right")
    paper = plan.inputs.cost_model == "paper"
    work = {} if paper else pass_work(plan.scenario, measure_sizes(plan.scenario), plan.policy, "decode")
    step = prediction.decode
    for lane, name in LANES.items():
        seconds = step.lanes.get(lane, 0.0)
        prefill = prediction.prefill.lanes.get(lane, 0.0)
        if not seconds and not prefill:
            continue
        operators = work.get(lane, {}).values()
        flops = sum(float(each.flops) for each in operators)
        moved = step.bytes_moved.get(lane) or sum(float(each.bytes_touched) for each in operators)
        busy = seconds / step.seconds if step.seconds else 0.0
        busy_prefill = prefill / prediction.prefill.seconds if prediction.prefill.seconds else 0.0
        table.add_row(
            name,
            f"{seconds / layers:.4g}",
            f"{busy:.0%}",
            f"{moved / layers / 1e9:.3f}" if moved else "-",
            f"{flops / layers / 1e9:,.1f}" if flops else "-",
            f"{busy_prefill:.0%}" if not paper else "-",
            style="bold" if lane in step.bottleneck else None,
        )
    return table


def _memory(plan: Plan) -> Table:
    table = _grid()
    for level, name in (("gpu", "GPU memory"), ("cpu", "CPU memory"), ("disk", "disk")):
        use = plan.prediction.memory[level]
        if use.limit_bytes <= 0 and use.peak_bytes <= 0:
            continue
        table.add_row(name, f"{_gib(use.peak_bytes)} of {_gib(use.limit_bytes)} (peak in {use.phase}): {_items(use)}")
    return table


def _items(use: MemoryUse) -> str:
    parts = sorted(use.terms.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts if size > 0) or "nothing"


def _worth(plan: Plan) -> Table:
    table = _grid()
    points = plan.turning_points
    if points is not None:
        where = "never (the link is as fast as the CPU's memory)" if points.p1_flop_per_byte == 0 else ""
        break_even = points.break_even_tokens
        crossing = where or (
            f"from {break_even:,} tokens per step" if break_even is not None else "not below ten million tokens"
        )
        table.add_row(
            "experts",
            f"P1 = {points.p1_flop_per_byte:.4g}, P2 = {points.p2_flop_per_byte:.4g}, balance point "
            f"{points.balance_flop_per_byte:.4g} FLOP/byte (theoretical); copying beats computing on the CPU {crossing}",
        )
    values = plan.marginal_values
    if values:
        words = {
            "gpu_memory_gib": "1 GiB GPU memory",
            "cpu_memory_gib": "1 GiB CPU memory",
            "link_gb_per_s": "1 GB/s link",
            "cpu_bandwidth_gb_per_s": "1 GB/s CPU memory bandwidth",
            "disk_read_gb_per_s": "1 GB/s disk",
        }
        said = ", ".join(f"{name} {_gain(values[key])}" for key, name in words.items() if key in values)
        table.add_row("one more", f"{said} (token/s, at this batch)")
    others = [
        f"{each.name}: "
        + (f"{each.prediction.throughput_tokens_per_s:,.2f} token/s" if each.prediction else f"no ({each.reason})")
        for each in plan.trivial
    ]
    if others:
        table.add_row("trivial plans", "; ".join(others))
    for each in plan.alternatives:
        rate = each.throughput_tokens_per_s
        table.add_row(
            "instead" if each is plan.alternatives[0] else "",
            f"{each.name}: {rate:,.2f} token/s  [dim]{each.note}[/]" if rate is not None else f"{each.name}: {each.note}",
        )
    return table


def _gain(value: float) -> str:
    return "+0" if value < 5e-4 else f"+{value:.3g}"


def print_plan(plan: Plan, console: Console) -> None:
    """Print the screen of a plan."""
    scenario, solver = plan.scenario, plan.solver
    workload, profile, model = scenario.workload, scenario.profile, scenario.model
    padded = "padded to the longest" if workload.padded else "unpadded"
    console.print(
        f"[bold]{model.name}[/] ({model.total_parameters / 1e9:.1f}B parameters, "
        f"{model.weight_bytes(scenario.formats.weights) / 1e9:.1f} GB) on [bold]{profile.name}[/]: {profile.title}"
    )
    console.print(
        f"{workload.num_requests:,} x {workload.name}, prompt {workload.mean_prompt_tokens:.0f} tokens on average, "
        f"{workload.max_prompt_tokens} at most, {padded}; {workload.generation_length} generated"
    )
    console.print()
    table = _grid()
    for what, how in policy_lines(plan):
        table.add_row(what, how)
    console.print(table)
    console.print()
    console.print(_predicted(plan))
    console.print(_resources(plan))
    console.print(_memory(plan))
    console.print()
    console.print(_worth(plan))
    console.print()
    for text in plan.warnings:
        console.print(f"[yellow]![/] {text}")
    for text in plan.notes:
        console.print(f"[dim]- {text}[/]")
    console.print(
        f"[dim]{plan.inputs.cost_model} cost model; {solver.name}: optimal within {solver.gap:.3%}, "
        f"{solver.points_bounded:,} points bounded, {solver.programs_solved} programs, {solver.seconds:.2f} s; "
        f"link {format_bandwidth(profile.link.host_to_device.pinned_bytes_per_s)} host to device[/]"
    )
