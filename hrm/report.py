"""What a person sees of a plan: one screen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hrm.account import pass_work
from hrm.diverse import Refinement
from hrm.plans import Alternative, Plan
from hrm.policy import Policy
from hrm.prediction import MemoryUse
from hrm.scenario import measure_sizes
from hrm.units import GIB
from hrm.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["bottleneck_in_words", "policy_lines", "print_plan", "seconds_in_words"]

LANES = {
    "gpu": "GPU",
    "cpu": "CPU",
    "host_to_device": "link, host to device",
    "device_to_host": "link, device to host",
    "staging": "staging copy",
    "disk": "disk",
    "cpu_memory": "CPU memory",
}
CHAIN = "GPU, copies and CPU one after the other, as one micro-batch needs them"
MORE = {
    "gpu_memory_gib": "1 GiB GPU memory",
    "cpu_memory_gib": "1 GiB CPU memory",
    "link_gb_per_s": "1 GB/s link",
    "cpu_bandwidth_gb_per_s": "1 GB/s CPU memory bandwidth",
    "disk_read_gb_per_s": "1 GB/s disk",
}


def print_plan(plan: Plan, console: Console) -> None:
    """Print the screen of a plan: about 45 lines of 118 columns."""
    from rich.markup import escape

    scenario = plan.scenario
    profile, model = scenario.profile, scenario.model
    console.print(
        f"[bold]{escape(model.name)}[/] ({model.total_parameters / 1e9:,.1f}B parameters, "
        f"{model.weight_bytes(scenario.formats.weights) / 1e9:,.1f} GB) on [bold]{escape(profile.name)}[/]: "
        f"{escape(profile.title)}"
    )
    console.print(escape(_workload_line(scenario.workload, counted=plan.inputs.cost_model == "full")))
    console.print()
    console.print(_grid(policy_lines(plan)))
    console.print()
    console.print(_grid(_predicted(plan)))
    console.print()
    console.print(_resources(plan))
    console.print()
    console.print(_grid(_memory(plan)))
    console.print()
    console.print(_grid([*_worth(plan), *_runs(plan)]))
    console.print()
    if plan.refinement is not None:
        console.print(_grid([("simulation", _changes(plan.refinement))]))
        console.print(_candidates(plan.refinement))
        console.print()
    for text in plan.warnings:
        console.print(f"[yellow]![/] {escape(text)}")
    for text in plan.notes:
        console.print(f"[dim]- {escape(text)}[/]")
    solver = plan.solver
    console.print(
        f"[dim]{plan.inputs.cost_model} cost model; {escape(solver.name)}: gap {solver.gap:.3%}, "
        f"{_count(solver.points_bounded, 'point')}, {_count(solver.programs_solved, 'program')}, "
        f"{solver.seconds:.2f} s[/]"
    )


def seconds_in_words(seconds: float) -> str:
    """A duration as a person says it: seconds, and beside them what is easier to read from two minutes on."""
    if not math.isfinite(seconds):
        return "not in this model"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{_significant(seconds)} s"
    unit, size = ("min", 60.0) if seconds < 7200 else ("h", 3600.0) if seconds < 2 * 86400 else ("days", 86400.0)
    return f"{seconds:,.0f} s ({_significant(seconds / size)} {unit})"


def bottleneck_in_words(plan: Plan) -> str:
    """What sets the time, for the screen."""
    phase, _, lane = plan.bottleneck.partition(": ")
    return f"{_lane_name(lane)}, in {phase}"


def policy_lines(plan: Plan) -> list[tuple[str, str]]:
    """The policy in words and symbols: (what, how)."""
    policy, formats = plan.policy, plan.formats_as_run
    arithmetic = f"weights {formats['weights']}, KV cache {formats['kv']}, arithmetic {formats['compute']}"
    blocks = "experts" if plan.scenario.model.is_moe else "MLP"
    if policy.everything_on_cpu:
        on_disk = (
            f", {_percent(policy.weights_on_disk)} of the {blocks} weights on disk" if policy.weights_on_disk else ""
        )
        return [
            ("batch", f"N = {_count(policy.batch_size, 'request')} in one go (n_ub = 1)"),
            ("compute", f"everything on the CPU (A_g = 0, F_g = 0){on_disk}; the GPU is not used"),
            ("formats", arithmetic),
        ]
    gpus = plan.parallelism["degree"]
    batch = (
        f"N = {_count(policy.batch_size, 'request')} in n_ub = {_count(policy.num_micro_batches, 'micro-batch')} of up "
        f"to mu = {policy.micro_batch_size:,}, {_count(policy.micro_batch_token_budget, 'token')}"
    )
    compute = (
        f"attention on the {_place(policy.attention_on_gpu)} (A_g = {int(policy.attention_on_gpu)}), {blocks} on the "
        f"{_place(policy.ffn_on_gpu)} (F_g = {int(policy.ffn_on_gpu)}), schedule {policy.schedule}"
    )
    kept = f"{'non-expert' if plan.scenario.model.is_moe else 'other'} weights "
    kept += "on the GPU" if policy.dense_weights_on_gpu else "streamed with their layer"
    if plan.inputs.cost_model == "paper":
        kept += "; embedding and lm_head are not in this model"
    else:
        batch += f"; prefill {policy.prefill_micro_batch_size:,} at a time"
        kept += f"; embedding on the {_place(policy.embedding_on_gpu)}; lm_head "
        kept += "on the GPU" if policy.lm_head_on_gpu else "streamed like a layer"
    return [
        ("batch", batch),
        ("compute", compute + (f", tensor parallel over {gpus} GPUs" if gpus > 1 else "")),
        (blocks, _experts_line(plan)),
        ("the rest", kept),
        ("KV cache", _shares(policy.kv_on_gpu, "r_c", policy.kv_on_disk, "")),
        ("formats", arithmetic),
    ]


def _experts_line(plan: Plan) -> str:
    policy = plan.policy
    locked = " (page-locked once)" if policy.pin_weights else " (not page-locked: every copy is staged)"
    line = _shares(policy.weights_on_gpu, "r_w", policy.weights_on_disk, locked)
    if policy.weights_on_gpu >= 1.0 or (plan.inputs.cost_model == "paper" and not policy.ffn_on_gpu):
        return line
    return (
        f"{line}; through "
        + {
            1: "one slot of a layer, so copy and compute take turns",
            2: "two slots of a layer",
            "experts": f"a ring of {policy.ring_experts} experts",
        }[policy.weight_slots]
    )


def _shares(on_gpu: float, symbol: str, on_disk: float, in_memory: str) -> str:
    """Where the bytes are, places with nothing left out."""
    parts = [f"{_percent(on_gpu)} on the GPU ({symbol} = {on_gpu:.4g})"]
    on_cpu = 1.0 - on_gpu - on_disk
    if on_cpu > 5e-7:
        parts.append(f"{_percent(on_cpu)} in CPU memory{in_memory}")
    if on_disk > 0:
        parts.append(f"{_percent(on_disk)} on disk")
    return ", ".join(parts)


def _workload_line(workload: Workload, *, counted: bool) -> str:
    longest, mean = workload.max_prompt_tokens, workload.mean_prompt_tokens
    who = _count(workload.num_requests, "request") if counted else "requests"
    if min(workload.prompt_lengths) == longest:
        prompts = f"prompts of {_count(longest, 'token')}"
    else:
        who += f" of {workload.name}"
        prompts = f"prompts of {mean:.0f} tokens on average, {longest:,} at most, unpadded"
        if workload.padded:
            prompts = f"prompts padded to the longest, {_count(longest, 'token')}"
    return f"{who}: {prompts}; {_count(workload.generation_length, 'token')} generated for each"


def _predicted(plan: Plan) -> Iterator[tuple[str, str]]:
    prediction, workload = plan.prediction, plan.scenario.workload
    paper = plan.inputs.cost_model == "paper"
    scope = "decode only, as the paper's objective" if paper else "end to end: generated tokens / (prefill + decode)"
    yield "throughput", f"[bold green]{prediction.throughput_tokens_per_s:,.2f} token/s[/] ({scope})"
    if plan.interval is not None:
        low, high = plan.interval
        why = "from the errors of published T4 and L4 runs" if plan.calibrated else "of runs predicted from peaks alone"
        yield "80 % interval", f"{low:,.2f} to {high:,.2f} token/s, {why}"
    elif plan.scenario.profile.gpu.host_cores:
        yield "80 % interval", "not known where the accelerator is emulated; hrm validate run measures how far off"
    if prediction.decode_s > 0:
        rate, latency = prediction.decode_throughput_tokens_per_s, seconds_in_words(prediction.layer_latency_s)
        decode = f"decode {seconds_in_words(prediction.decode_s)}: {rate:,.2f} token/s, {latency} per layer and step"
    else:
        decode = "no decode, as prefill gives the only token"
    if paper:
        yield "one batch", decode
    else:
        yield "one batch", f"prefill {seconds_in_words(prediction.prefill_s)}, {decode}"
        yield (
            "completion",
            f"{seconds_in_words(prediction.completion_s)} for {_count(workload.num_requests, 'request')} in "
            f"{_count(prediction.num_batches, 'batch')}, start-up (load and pin) of "
            f"{seconds_in_words(prediction.startup_s)} included",
        )
    yield "bottleneck", f"[bold]{bottleneck_in_words(plan)}[/]"


def _resources(plan: Plan) -> Table:
    """One row per resource: seconds and share of a decode step, bytes, FLOPs, share of prefill, what it sets."""
    from rich.table import Table

    prediction, layers = plan.prediction, plan.scenario.model.n_layers
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("\nresource", no_wrap=True)
    for head in ("decode\ns/layer", "\nbusy", "\nGB/layer", "\nGFLOP/layer", "prefill\nbusy"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("\nbinds", no_wrap=True)
    step, prefill = prediction.decode, prediction.prefill
    sets = {"decode": _lanes_of(step.bottleneck), "prefill": _lanes_of(prefill.bottleneck)}
    paper = plan.inputs.cost_model == "paper"
    work = {} if paper else pass_work(plan.scenario, measure_sizes(plan.scenario), plan.policy, "decode")
    decimals = max(0, 3 - math.floor(math.log10(step.seconds / layers))) if step.seconds > 0 else 0
    for lane, name in LANES.items():
        busy = _share(step.lanes.get(lane, 0.0), step.seconds)
        busy_prefill = _share(prefill.lanes.get(lane, 0.0), prefill.seconds)
        if busy < 5e-4 and busy_prefill < 5e-4:
            continue
        operators = work.get(lane, {}).values()
        flops = sum(float(each.flops) for each in operators)
        moved = step.bytes_moved.get(lane) or sum(float(each.bytes_touched) for each in operators)
        phases = [phase for phase, lanes in sets.items() if lane in lanes]
        table.add_row(
            name,
            f"{busy * step.seconds / layers:,.{decimals}f}",
            _busy(busy),
            _significant(moved / layers / 1e9) if moved else "-",
            _significant(flops / layers / 1e9) if flops else "-",
            "-" if paper else _busy(busy_prefill),
            "both" if len(phases) == 2 else "".join(phases),
            style="bold" if phases else None,
        )
    return table


def _lanes_of(bottleneck: str) -> tuple[str, ...]:
    """The lanes that set the time of a phase, one or several in turn."""
    if bottleneck == "chain":
        return ("gpu", "host_to_device", "device_to_host", "cpu")
    if bottleneck.startswith("one_slot_"):
        first, other = _one_slot(bottleneck)
        return (first, *_lanes_of(other))
    if bottleneck.startswith("ring_"):
        return tuple(lane for part in bottleneck.removeprefix("ring_").split("_then_") for lane in _lanes_of(part))
    return (bottleneck,)


def _one_slot(bottleneck: str) -> tuple[str, str]:
    """The two lanes that take turns through one weight slot: what brings weights, and what uses them."""
    other = bottleneck.removeprefix("one_slot_")
    for prefix, lane in (("reads_", "disk"), ("staging_", "staging")):
        if other.startswith(prefix):
            return lane, other.removeprefix(prefix)
    return "host_to_device", other


def _lane_name(name: str) -> str:
    """A lane, or sum of lanes, in words."""
    if name == "chain":
        return CHAIN
    if name.startswith("one_slot_"):
        first, other = _one_slot(name)
        weights = {"disk": "disk reads of weights", "staging": "staging copies"}.get(first, "weight copies")
        return f"{weights} and {LANES.get(other, CHAIN)} in turn, through one weight slot"
    if name.startswith("ring_"):
        first, second = (_lane_name(part) for part in name.removeprefix("ring_").split("_then_"))
        return f"attention ({first}), then experts through the ring ({second})"
    return LANES.get(name, name.replace("_", " "))


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    is_moe = plan.scenario.model.is_moe
    for level, name in (("gpu", "GPU memory"), ("cpu", "CPU memory"), ("disk", "disk")):
        use = plan.prediction.memory[level]
        if use.peak_bytes < 1.0:
            if use.limit_bytes > 0:
                yield name, f"not used, {_gib(use.limit_bytes)} GiB there"
            continue
        peak = f"{_gib(use.peak_bytes)} of {_gib(use.limit_bytes)} GiB"
        peak += f" at the peak, in {use.phase}" if use.phase in ("prefill", "decode") else ""
        items = _items(use)
        yield name, f"{peak}: {items if is_moe else items.replace('non-expert', 'other').replace('expert', 'MLP')}"


def _items(use: MemoryUse) -> str:
    parts = sorted(use.terms.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts if size >= 1.0)


def _worth(plan: Plan) -> Iterator[tuple[str, str]]:
    """What moving work, a larger machine or other settings would give."""
    from rich.markup import escape

    points = plan.turning_points
    blocks = "experts" if plan.scenario.model.is_moe else "MLP blocks"
    if points is not None:
        yield (
            "turning points",
            f"P1 = {_significant(points.p1_flop_per_byte)}, P2 = {_significant(points.p2_flop_per_byte)}, balance "
            f"point {_significant(points.balance_flop_per_byte)} FLOP/byte of the {blocks}, theoretical intensity",
        )
        tokens = points.break_even_tokens
        if tokens is None:
            yield "break-even", f"{blocks} always run faster on the CPU than copied to the GPU"
        elif tokens <= 1:
            yield "break-even", f"{blocks} run faster copied to the GPU than on the CPU, at any batch"
        else:
            below = f"below {_count(tokens, 'token')} a step, copied to the GPU from there on"
            yield "break-even", f"{blocks} run faster on the CPU {below}"
    values = plan.marginal_values
    if values:
        gains = {name: values[key] for key, name in MORE.items() if key in values}
        useful = [f"{name} +{_significant(gain)}" for name, gain in gains.items() if gain >= 5e-4]
        nothing = [name for name, gain in gains.items() if gain < 5e-4]
        said = [f"{', '.join(useful)} token/s"] if useful else []
        said += [f"+0 from {', '.join(nothing)}"] if nothing else []
        yield "one more", f"{'; '.join(said)} (at this batch)"
    elif plan.inputs.cost_model == "full":
        yield "one more", "not priced: the plan is one of the trivial ones, at its best batch"
    trivial = [
        f"{each.name}: {each.prediction.throughput_tokens_per_s:,.2f} token/s"
        if each.prediction is not None
        else f"{each.name}: no, {each.reason}"
        for each in plan.trivial
    ]
    if trivial:
        yield "trivial plans", escape("; ".join(trivial))
    for index, each in enumerate(plan.alternatives):
        yield "" if index else "instead", escape(_alternative(each, plan.prediction.throughput_tokens_per_s))


def _runs(plan: Plan) -> Iterator[tuple[str, str]]:
    """Whether the runtime can run it, here and now, and the best plan that it can where it cannot run this one."""
    from rich.markup import escape

    execution, other = plan.execution, plan.executable_plan
    can = {(True, True): "yes, here", (True, False): "yes, not here"}.get((execution.supported, execution.here))
    yield "can be run", escape(f"{can or 'no'}: {execution.why}")
    if other is not None:
        rate = other.throughput_tokens_per_s
        share = rate / plan.prediction.throughput_tokens_per_s
        differs = ", ".join(other.differences)
        yield "runnable", escape(f"{rate:,.2f} token/s, {share:.2f}x, with {differs}: {other.command}")


def _alternative(each: Alternative, throughput: float) -> str:
    rate = each.throughput_tokens_per_s
    if rate is None:
        return f"{each.name}: no, {each.note}"
    return f"{each.name}: {rate:,.2f} token/s, {rate / throughput:.2f}x ({each.note})"


def _changes(refinement: Refinement) -> str:
    """How far simulation and cost model disagree on the order, and what following the simulation gives."""
    first, chosen = refinement.candidates[0], refinement.candidates[refinement.chosen]
    text = f"the best of {_count(len(refinement.candidates), 'plan')} that differ is returned"
    if refinement.pairs:
        text += f"; of {_count(refinement.pairs, 'pair')} {refinement.inversions:,} change places"
        text += f", by up to {refinement.largest_change:.1%}" if refinement.inversions else ""
    if refinement.chosen == 0:
        return f"{text}. It is the plan of the cost model alone."
    rate, own = chosen.simulated_tokens_per_s, first.simulated_tokens_per_s
    if rate is None or own is None:
        return f"{text}."
    return f"{text}. The plan of the cost model alone: {own:,.2f} token/s in simulation, this one {rate / own:.2f}x."


def _candidates(refinement: Refinement) -> Table:
    """The plans that were replayed, best first, with their rank by prediction."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("rank by\nprediction", justify="right", no_wrap=True)
    table.add_column("\nplan")
    for head in ("predicted\ntoken/s", "simulated\ntoken/s"):
        table.add_column(head, justify="right", no_wrap=True)
    every = refinement.candidates
    by_prediction = sorted(every, key=lambda each: -each.predicted_tokens_per_s)
    chosen = every[refinement.chosen]
    others = sorted(
        (each for each in every if each is not chosen),
        key=lambda each: -(each.simulated_tokens_per_s or each.predicted_tokens_per_s),
    )
    for each in (chosen, *others):
        simulated = each.simulated_tokens_per_s
        table.add_row(
            str(by_prediction.index(each) + 1),
            _in_short(each.policy),
            f"{each.predicted_tokens_per_s:,.2f}",
            "-" if simulated is None else f"{simulated:,.2f}",
            style="bold" if each is chosen else None,
        )
    return table


def _in_short(policy: Policy) -> str:
    """A policy in half a line."""
    if policy.everything_on_cpu:
        return f"all on the CPU, N = {policy.batch_size:,}"
    through = {1: "1 slot", 2: "2 slots", "experts": f"ring of {policy.ring_experts}"}[policy.weight_slots]
    parts = [
        f"A_g {int(policy.attention_on_gpu)}, F_g {int(policy.ffn_on_gpu)}",
        f"{policy.num_micro_batches:,} x {policy.micro_batch_size:,}",
        "all weights on the GPU" if policy.weights_on_gpu >= 1.0 else f"{through}, r_w {policy.weights_on_gpu:.3f}",
        "locked" if policy.pin_weights else "staged",
    ]
    on_disk = [("experts", policy.weights_on_disk), ("KV", policy.kv_on_disk)]
    disk = ", ".join(f"{share:.0%} {what}" for what, share in on_disk if share >= 0.005)
    return ", ".join(parts) + (f"; disk {disk}" if disk else "")


def _grid(rows: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, min_width=14)
    table.add_column()
    for what, how in rows:
        table.add_row(what, how)
    return table


def _place(on_gpu: bool) -> str:
    return "GPU" if on_gpu else "CPU"


def _count(number: int, what: str) -> str:
    """``1 request``, ``2,500 micro-batches``."""
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}" if size >= 0.005 * GIB else "under 0.01"


def _percent(share: float) -> str:
    """Never rounded to none or all of it."""
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    text = f"{share:.2%}"
    return {"0.00%": "under 0.01%", "100.00%": "over 99.99%"}.get(text, text)


def _share(seconds: float, whole: float) -> float:
    """Share of a phase that a lane is busy; 0 where a model leaves either out."""
    return max(0.0, seconds / whole) if math.isfinite(whole) and whole > 0 else 0.0


def _busy(share: float) -> str:
    return "<1%" if 5e-4 <= share < 5e-3 else f"{share:.0%}"


def _significant(number: float) -> str:
    """Three significant digits, without an exponent: ``20,980`` is four, ``145``, ``0.312``."""
    if not math.isfinite(number):
        return "no limit"
    if number == 0 or abs(number) < 1e-6:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{decimals}f}"
