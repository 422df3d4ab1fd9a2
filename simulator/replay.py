"""A whole run of a plan, simulated: prefill, every decode step, and what the schedule leaves idle.

Event by event (`full`), or fast: from passes over few layers and micro-batches (`simulator.passes`), a step evaluated
at as few contexts as it takes for straight lines between them to hold.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hrm.graph import Op, Phase, TaskGraph
from hrm.layout import Layout
from hrm.policy import Policy
from hrm.rates import derive_rates
from hrm.scenario import Scenario
from hrm.schedules import Steps, held_before
from hrm.trace import Trace, holds_over_time
from simulator.contention import sharing_of
from simulator.durations import Durations, roofline_durations
from simulator.passes import ALL_THERE, Repeated, Run, Step, account_for_pass, pass_seconds

__all__ = ["Replay", "Wrap", "replay_plan", "short_step", "step_trace"]

STRAIGHT = 1e-3
"""What a straight line between two contexts may add to the error of all decode, relative, before more are looked at."""
Wrap = Callable[[Durations], Durations]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Outcome of a simulated run of one batch.

    Attributes
    ----------
    throughput_tokens_per_s, prefill_s, decode_s : float
        Generated tokens over prefill + decode [token/s]; [s].
    layer_latency_s, bound_layer_latency_s : float
        Seconds per layer of the decode step in the middle of the run; of its busiest lane, or of what lanes share,
        whichever is more [s].
    busy_s, utilisation : mapping of str to float
        Per lane, in that step [s], [share of its time].
    seconds_by_op, bytes_by_op : mapping of str to float
        Seconds of all tasks of a kind in that step [s], and bytes they move [byte].
    tasks : int
        Tasks replayed.
    simulate_seconds : float
        Wall-clock time it took [s].
    """

    throughput_tokens_per_s: float
    prefill_s: float
    decode_s: float
    layer_latency_s: float
    bound_layer_latency_s: float
    busy_s: Mapping[str, float]
    utilisation: Mapping[str, float]
    seconds_by_op: Mapping[str, float]
    bytes_by_op: Mapping[str, float]
    tasks: int
    simulate_seconds: float


def around(step: int, steps: int) -> Steps:
    """A step with its neighbours: the one before fills the pipeline, the one after is prefetched for."""
    return Steps(first=max(0, step - 1), last=min(steps, step + 2))


def replay_plan(
    scenario: Scenario,
    policy: Policy,
    schedule: str | None = None,
    *,
    contention: bool = True,
    full: bool = False,
    wrap: Wrap | None = None,
    gathers_weights: bool = False,
) -> Replay:
    """Simulate a run of one batch.

    Parameters
    ----------
    scenario : Scenario
    policy : Policy
    schedule : str, optional
        One of `hrm.schedules.SCHEDULES`; the policy's own by default.
    contention : bool
        Let lanes share memory, link and cores.
    full : bool
        Every task of every step, instead of a few passes.
    wrap : callable, optional
        Changes the durations: jitter, skewed routing.
    gathers_weights : bool
        Every GPU of a group gets the whole of each layer.

    Returns
    -------
    Replay

    Raises
    ------
    InputError
        The schedule cannot run the policy.
    """
    started = time.perf_counter()
    run = _start(scenario, policy, schedule or policy.schedule, contention=contention, wrap=wrap, folded=not full)
    run = replace(run, layout=replace(run.layout, gathers_weights=gathers_weights))
    steps = scenario.workload.generation_length - 1
    with _without_collection():
        prefill, decode, middle = _every_task(run, steps) if full else _few_passes(run, steps)
    tokens, layers = policy.batch_size * scenario.workload.generation_length, run.layout.num_layers
    busy = _unfolded(middle.busy, run.layout)
    bound = max([*middle.alone.values(), *middle.shared.values()], default=0.0)
    return Replay(
        throughput_tokens_per_s=tokens / (prefill + decode),
        prefill_s=prefill,
        decode_s=decode,
        layer_latency_s=middle.seconds / layers,
        bound_layer_latency_s=bound / layers,
        busy_s=busy,
        utilisation={lane: seconds / middle.seconds for lane, seconds in busy.items()},
        seconds_by_op=middle.by_op,
        bytes_by_op=middle.moved,
        tasks=run.tasks,
        simulate_seconds=time.perf_counter() - started,
    )


@contextmanager
def _without_collection() -> Iterator[None]:
    """No search for cycles: the tasks of a pass have none, and looking through them takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _unfolded(busy: Mapping[str, float], layout: Layout) -> dict[str, float]:
    """Seconds of the lanes of every GPU, where only the first of a group was laid out [s]."""
    if not layout.folded:
        return dict(busy)
    found: dict[str, float] = {}
    for lane, seconds in busy.items():
        kind = lane.rstrip("0123456789")
        names = [lane] if kind == lane else [f"{kind}{device}" for device in range(layout.gpus)]
        found.update(dict.fromkeys(names, seconds))
    return found


def _start(
    scenario: Scenario, policy: Policy, schedule: str, *, contention: bool, wrap: Wrap | None, folded: bool = False
) -> Run:
    rates = derive_rates(scenario.profile, scenario.formats)
    durations = roofline_durations(rates, shared=contention)
    layout = Layout(scenario, policy)
    return Run(
        replace(layout, folded=folded and layout.group_size > 1),
        schedule,
        durations if wrap is None else wrap(durations),
        sharing_of(scenario.profile, rates, alike=layout.group_size if folded else 1) if contention else None,
    )


def step_trace(
    scenario: Scenario,
    policy: Policy,
    schedule: str,
    *,
    step: int,
    contention: bool = True,
    wrap: Wrap | None = None,
    steps: Steps | None = None,
) -> tuple[TaskGraph, Trace]:
    """Graph and trace of a decode step with its neighbours, so that the pipeline is full; or of any `steps`.

    The trace has the memory held over time, by level.
    """
    run = _start(scenario, policy, schedule, contention=contention, wrap=wrap)
    wanted = steps or around(step, scenario.workload.generation_length - 1)
    graph, trace = run.replay(run.layout, wanted)
    return graph, replace(trace, memory=holds_over_time(graph, trace.spans, held_before(run.layout, wanted)))


def short_step(
    scenario: Scenario, policy: Policy, schedule: str, *, step: int, contention: bool = True, wrap: Wrap | None = None
) -> tuple[TaskGraph, Trace, Repeated]:
    """The same as `step_trace`, of few layers and micro-batches where the model has more: quick for any plan.

    Also which of its layers stand for how many others.
    """
    run = _start(scenario, policy, schedule, contention=contention, wrap=wrap)
    widths, repeated = run.widths("decode"), next(run.short_passes())
    layout = replace(run.layout, only_layers=repeated.short, only_micro_batches=widths[1] if widths else None)
    steps = around(step, scenario.workload.generation_length - 1)
    graph, trace = run.replay(layout, steps)
    held = holds_over_time(graph, trace.spans, held_before(layout, steps))
    return graph, replace(trace, memory=held), repeated


def _ends(graph: TaskGraph, trace: Trace, phase: Phase) -> float:
    """End of the last token of a phase [s]."""
    return max(
        span.end_s
        for task, span in zip(graph.tasks, trace.spans, strict=True)
        if task.id.phase == phase and task.id.op is Op.SAMPLE
    )


def _every_task(run: Run, steps: int) -> tuple[float, float, Step]:
    """Prefill and decode seconds, and the step in the middle, event by event over the whole run."""
    graph, trace = run.replay(run.layout, Steps(prefill=True, first=0, last=steps))
    prefill = _ends(graph, trace, "prefill")
    if not steps:
        return prefill, 0.0, Step(0.0)
    middle = account_for_pass(run, graph, trace, steps // 2, ALL_THERE, since=prefill)
    assert middle is not None  # every layer is there
    return prefill, _ends(graph, trace, "decode") - prefill, middle


def _prefilled(run: Run, layout: Layout, repeated: Repeated) -> Step | None:
    """Prefill, from one short pass; from two where micro-batches go through all layers one after the other."""
    graph, trace = run.replay(layout, Steps(prefill=True))
    apart = layout.policy.weight_slots == "experts"
    if not apart or not repeated.times or repeated.short is None:
        seconds = pass_seconds(graph, trace, "prefill", 0, repeated=repeated)
        return None if seconds is None else Step(seconds)
    short = repeated.short - (repeated.last - repeated.first)
    graph, first = run.replay(replace(layout, only_layers=short), Steps(prefill=True))
    more = trace.makespan_s - first.makespan_s
    return Step(trace.makespan_s + repeated.times * more)


def _few_passes(run: Run, steps: int) -> tuple[float, float, Step]:
    """Prefill and decode seconds, and the step in the middle: straight lines between contexts, halved until they hold.

    The first step follows prefill and the last one prefetches for none: both stand apart.
    """
    known: dict[int, Step] = {}

    def measured(step: int) -> Step:
        if step not in known:

            def measure(layout: Layout, repeated: Repeated) -> Step | None:
                graph, trace = run.replay(layout, around(step, steps))
                return account_for_pass(run, graph, trace, step, repeated)

            known[step] = run.extrapolate("decode", measure)
        return known[step]

    def at(step: int) -> float:
        return measured(step).seconds

    def between(low: int, high: int) -> float:
        """Sum over steps low .. high - 1."""
        if high - low <= 1:
            return at(low) if high > low else 0.0
        if bends_little(low, high):
            return trapezium(low, high)
        middle = (low + high) // 2
        straight = (at(low) * (high - middle) + at(high) * (middle - low)) / (high - low)
        if abs(at(middle) - straight) * (high - low) <= STRAIGHT * at(middle) * steps:
            return trapezium(low, middle) + trapezium(middle, high)
        return between(low, middle) + between(middle, high)

    def bends_little(low: int, high: int) -> bool:
        """Whether the lines on both sides, drawn on, leave no room for a bend between them that matters."""
        before = max((step for step in known if 0 < step < low), default=None)
        after = min((step for step in known if high < step < steps - 1), default=None)
        if before is None or after is None:
            return False
        slopes = [(at(end) - at(start)) / (end - start) for start, end in ((before, low), (low, high), (high, after))]
        one, other = slopes[1] - slopes[0], slopes[2] - slopes[1]
        if one * other < 0.0:  # neither all the way up nor all the way down
            return False
        bend = one * other / (one + other) * (high - low) if one + other else 0.0
        return abs(bend) * (high - low) <= 0.5 * STRAIGHT * at(low) * steps

    def trapezium(low: int, high: int) -> float:
        """Sum over steps low .. high - 1 of a straight line through both ends."""
        count = high - low
        return count * at(low) + (at(high) - at(low)) * (count - 1) / 2.0

    def prefilled(layout: Layout, repeated: Repeated) -> Step | None:
        return _prefilled(run, layout, repeated)

    def first_step(layout: Layout, repeated: Repeated) -> Step | None:
        """The first step in the steady state, and what it differs from that, in the same short pass, after prefill."""
        layout = run.few_of_prefill(layout)
        after, trace_after = run.replay(layout, Steps(prefill=True, first=0, last=min(steps, 2)))
        alike, trace_alike = run.replay(layout, Steps(first=-1, last=min(steps, 2)))
        since = _ends(after, trace_after, "prefill")
        steady = pass_seconds(alike, trace_alike, "decode", 0, repeated=repeated)
        here = pass_seconds(after, trace_after, "decode", 0, since=since)
        there = pass_seconds(alike, trace_alike, "decode", 0)
        if steady is None or here is None or there is None:
            return None
        return Step(steady + here - there)

    prefill = run.extrapolate("prefill", prefilled).seconds
    if not steps:
        return prefill, 0.0, Step(0.0)
    shown = measured(steps // 2)
    first = run.extrapolate("decode", first_step).seconds
    if steps < 4:
        return prefill, first + sum(at(step) for step in range(1, steps)), shown
    return prefill, first + between(1, steps - 2) + at(steps - 2) + at(steps - 1), shown
