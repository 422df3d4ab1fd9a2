"""A whole run of a plan, simulated: prefill, every decode step, and what the schedule leaves idle.

Event by event (`full`), or fast: the pattern of layers repeats, so the seconds of a pass over L layers follow from two
passes over a few layers each; and the seconds of a step are evaluated at as few contexts as it takes for straight
lines between them to hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hrm.graph import Op, TaskGraph
from hrm.layout import Layout
from hrm.policy import Policy
from hrm.rates import derive_rates
from hrm.scenario import Scenario
from hrm.schedules import Steps, schedule_graph
from hrm.trace import Trace
from simulator.contention import Sharing, sharing_of
from simulator.durations import Durations, roofline_durations
from simulator.engine import simulate

__all__ = ["Replay", "replay_plan", "step_trace"]

STRAIGHT = 2e-4
"""Relative deviation from a straight line below which no more contexts are looked at."""

FEW, MORE = 4, 6
"""Repetitions of the pattern of layers in the two short passes; with 2 and 4, s2 with staged weights is 1 % off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Outcome of a simulated run of one batch.

    Attributes
    ----------
    throughput_tokens_per_s, prefill_s, decode_s : float
        Generated tokens over prefill + decode [token/s]; [s].
    layer_latency_s, bound_layer_latency_s : float
        Seconds per layer of the decode step in the middle of the run, and of its busiest lane [s].
    busy_s, utilisation : mapping of str to float
        Per lane, in that step [s], [share of its time].
    seconds_by_op : mapping of str to float
        Seconds of all tasks of a kind in that step [s].
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
    tasks: int
    simulate_seconds: float


@dataclass(slots=True)
class _Run:
    """What one replay needs, and how many tasks it took so far."""

    layout: Layout
    schedule: str
    durations: Durations
    sharing: Sharing | None
    tasks: int = 0

    def replay(self, layout: Layout, steps: Steps) -> tuple[TaskGraph, Trace]:
        """Graph and trace of a range of steps."""
        graph = schedule_graph(layout, self.schedule, steps)
        self.tasks += len(graph)
        return graph, simulate(graph, self.durations, self.sharing)

    def short_layouts(self) -> tuple[Layout, Layout] | None:
        """The same model with few and with more layers, a whole number of repetitions apart; None: no repetition."""
        prefix, length = self.layout.period()
        whole = self.layout.num_layers
        if not length:
            return None
        rest = (whole - prefix) % length
        few, more = prefix + FEW * length + rest, prefix + MORE * length + rest
        if more >= whole:
            return None
        return replace(self.layout, only_layers=few), replace(self.layout, only_layers=more)

    def over_layers(self, seconds: Callable[[Layout], tuple[float, ...]]) -> tuple[float, ...]:
        """Seconds of passes over all layers, from two short ones where the pattern of layers repeats."""
        short = self.short_layouts()
        if short is None:
            return seconds(self.layout)
        few, more = short
        first, second = seconds(few), seconds(more)
        share = (self.layout.num_layers - few.num_layers) / (more.num_layers - few.num_layers)
        return tuple(low + share * (high - low) for low, high in zip(first, second, strict=True))


def step_seconds(graph: TaskGraph, trace: Trace, step: int, *, since: float = 0.0) -> float:
    """Seconds between the end of the step before (or `since`) and the end of a step [s]."""
    ends: dict[int, float] = {}
    for task, span in zip(graph.tasks, trace.spans, strict=True):
        if task.id.op is Op.SAMPLE and task.id.phase == "decode":
            ends[task.id.step] = max(ends.get(task.id.step, 0.0), span.end_s)
    return ends[step] - ends.get(step - 1, since)


def around(step: int, steps: int) -> Steps:
    """A step with its neighbours: the one before fills the pipeline, the one after is prefetched for."""
    return Steps(first=max(0, step - 1), last=min(steps, step + 2))


def replay_plan(
    scenario: Scenario, policy: Policy, schedule: str | None = None, *, contention: bool = True, full: bool = False
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

    Returns
    -------
    Replay

    Raises
    ------
    InputError
        The schedule cannot run the policy.
    """
    started = time.perf_counter()
    rates = derive_rates(scenario.profile, scenario.formats)
    name = schedule or policy.schedule
    sharing = sharing_of(scenario.profile, rates) if contention else None
    run = _Run(Layout(scenario, policy), name, roofline_durations(rates), sharing)
    steps = scenario.workload.generation_length - 1
    prefill, decode = _every_task(run, steps) if full else _few_passes(run, steps)
    middle = steps // 2
    short = run.short_layouts()
    shown = run.layout if short is None else short[1]
    step, layers = 0.0, run.layout.num_layers
    alone: dict[str, float] = {}
    busy: dict[str, float] = {}
    by_op: dict[str, float] = {}
    if steps:
        graph, trace = run.replay(shown, around(middle, steps))
        step, alone, busy, by_op = _account(run, graph, trace, middle)
        scale = layers / shown.num_layers  # the head and the embedding weigh a little more in a short stack
        step, alone, busy, by_op = step * scale, _scaled(alone, scale), _scaled(busy, scale), _scaled(by_op, scale)
    tokens = policy.batch_size * scenario.workload.generation_length
    return Replay(
        throughput_tokens_per_s=tokens / (prefill + decode),
        prefill_s=prefill,
        decode_s=decode,
        layer_latency_s=step / layers,
        bound_layer_latency_s=max(alone.values(), default=0.0) / layers,
        busy_s=busy,
        utilisation={lane: seconds / step for lane, seconds in busy.items()},
        seconds_by_op=by_op,
        tasks=run.tasks,
        simulate_seconds=time.perf_counter() - started,
    )


def step_trace(
    scenario: Scenario, policy: Policy, schedule: str, *, step: int, contention: bool = True
) -> tuple[TaskGraph, Trace]:
    """Graph and trace of a decode step with its neighbours, so that the pipeline is full."""
    rates = derive_rates(scenario.profile, scenario.formats)
    steps = around(step, scenario.workload.generation_length - 1)
    graph = schedule_graph(Layout(scenario, policy), schedule, steps)
    sharing = sharing_of(scenario.profile, rates) if contention else None
    return graph, simulate(graph, roofline_durations(rates), sharing)


def _scaled(values: dict[str, float], scale: float) -> dict[str, float]:
    return {name: value * scale for name, value in values.items()}


def _account(
    run: _Run, graph: TaskGraph, trace: Trace, step: int
) -> tuple[float, dict[str, float], dict[str, float], dict[str, float]]:
    """Of one step: seconds, seconds of each lane alone, as it ran, and by kind of task [s]."""
    alone: dict[str, float] = {}
    busy: dict[str, float] = {}
    by_op: dict[str, float] = {}
    for task, span in zip(graph.tasks, trace.spans, strict=True):
        if task.id.step != step or task.id.phase != "decode":
            continue
        lane, op, seconds = str(task.lane), task.id.op.value, span.end_s - span.start_s
        alone[lane] = alone.get(lane, 0.0) + run.durations(task)
        busy[lane] = busy.get(lane, 0.0) + seconds
        by_op[op] = by_op.get(op, 0.0) + seconds
    return step_seconds(graph, trace, step), alone, busy, by_op


def _prefill_end(graph: TaskGraph, trace: Trace) -> float:
    """End of the last first token [s]."""
    return max(
        span.end_s
        for task, span in zip(graph.tasks, trace.spans, strict=True)
        if task.id.phase == "prefill" and task.id.op is Op.SAMPLE
    )


def _every_task(run: _Run, steps: int) -> tuple[float, float]:
    """Prefill and decode seconds, event by event over the whole run."""
    graph, trace = run.replay(run.layout, Steps(prefill=True, first=0, last=steps))
    prefill = _prefill_end(graph, trace)
    return prefill, (_decode_end(graph, trace) - prefill if steps else 0.0)


def _decode_end(graph: TaskGraph, trace: Trace) -> float:
    return max(
        span.end_s
        for task, span in zip(graph.tasks, trace.spans, strict=True)
        if task.id.phase == "decode" and task.id.op is Op.SAMPLE
    )


def _few_passes(run: _Run, steps: int) -> tuple[float, float]:
    """Prefill and decode seconds: straight lines between contexts, halved until they hold."""
    known: dict[int, float] = {}

    def start(layout: Layout) -> tuple[float, float]:
        graph, trace = run.replay(layout, Steps(prefill=True, first=0, last=min(steps, 2)))
        prefill = _prefill_end(graph, trace)
        return prefill, (step_seconds(graph, trace, 0, since=prefill) if steps else 0.0)

    def at(step: int) -> float:
        if step not in known:

            def seconds(layout: Layout) -> tuple[float]:
                graph, trace = run.replay(layout, around(step, steps))
                return (step_seconds(graph, trace, step),)

            known[step] = run.over_layers(seconds)[0]
        return known[step]

    def between(low: int, high: int) -> float:
        """Sum over steps low .. high - 1."""
        if high - low <= 1:
            return at(low) if high > low else 0.0
        middle = (low + high) // 2
        straight = (at(low) * (high - middle) + at(high) * (middle - low)) / (high - low)
        if abs(at(middle) - straight) <= STRAIGHT * at(middle):
            return trapezium(low, middle) + trapezium(middle, high)
        return between(low, middle) + between(middle, high)

    def trapezium(low: int, high: int) -> float:
        """Sum over steps low .. high - 1 of a straight line through both ends."""
        count = high - low
        return count * at(low) + (at(high) - at(low)) * (count - 1) / 2.0

    prefill, first = run.over_layers(start)
    if steps < 4:
        return prefill, first + sum(at(step) for step in range(1, steps))
    # The first step follows prefill and the last one prefetches for none: both stand apart.
    return prefill, first + between(1, steps - 2) + at(steps - 2) + at(steps - 1)
