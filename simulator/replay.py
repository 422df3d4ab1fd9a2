"""A whole run of a plan, simulated: prefill, every decode step, and what the schedule leaves idle.

Event by event (`full`), or fast. In the steady state the pattern of layers repeats, and within a layer the
micro-batches do; so the seconds of a pass grow in proportion to both, and those of L layers and n micro-batches follow
from passes over few of each (`Layout.only_layers`, `only_micro_batches`). The seconds of a step are evaluated at as few
contexts as it takes for straight lines between them to hold.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hrm.graph import Op, Phase, TaskGraph
from hrm.layout import Layout
from hrm.policy import Policy
from hrm.rates import derive_rates
from hrm.scenario import Scenario
from hrm.schedules import Steps, held_before, schedule_graph
from hrm.trace import Trace, holds_over_time
from simulator.contention import Sharing, sharing_of
from simulator.durations import Durations, roofline_durations
from simulator.engine import simulate

__all__ = ["Replay", "Wrap", "replay_plan", "short_step", "step_trace"]

STRAIGHT = 1e-3
"""What a straight line between two contexts may add to the error of all decode, relative, before more are looked at."""

SHORT = ((7, 3, 5), (10, 6, 8), (14, 6, 12))
"""Short passes that are tried in turn: repetitions of the pattern of layers, and which of them, from and to, say how
long one takes in the steady state. The last two are left out: they have none after them to load weights for."""

STACKS = (4, 6)
"""Repetitions per device of the two stacks that stand for a pipeline."""

ENDS_A_LAYER = (Op.POST_ATTENTION, Op.EXPERTS)
"""Tasks whose end is that of a layer; copies and writes of it may come much later."""

SETTLED = 2e-4
"""Relative difference between two neighbouring repetitions below which the steady state is there."""

WIDTHS = (6, 9, 12, 15)
"""Micro-batches of narrow passes: the first two neighbours are taken on whose line the next one lies."""

LINE = 5e-5
"""Relative difference from that line that is none."""

RING_TIMES = 4
"""So many times as wide are narrow passes with a ring of experts."""

WORTH = 20
"""Micro-batches from which narrow passes are looked at instead."""


class Repeated(NamedTuple):
    """A short pass of `short` layers, of which those from `first` to `last` - 1 stand for `times` as many more.

    `length` is the period of the pattern of layers. The whole pass has `short` None.
    """

    short: int | None
    first: int = 0
    last: int = 0
    times: float = 0.0
    length: int = 0


ALL_THERE = Repeated(None)

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


@dataclass(frozen=True, slots=True)
class _Step:
    """One decode step [s]; and by lane alone, by lane as it ran, by kind of task and by shared resource [s].

    `moved` are bytes by kind of task [byte].
    """

    seconds: float
    alone: Mapping[str, float] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)
    by_op: Mapping[str, float] = field(default_factory=dict)
    moved: Mapping[str, float] = field(default_factory=dict)
    shared: Mapping[str, float] = field(default_factory=dict)

    def towards(self, other: _Step, share: float) -> _Step:
        """The step that lies `share` of the way to another, and beyond it where that is over 1."""

        def between(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
            names = [*first, *(name for name in second if name not in first)]
            return {
                name: first.get(name, 0.0) + share * (second.get(name, 0.0) - first.get(name, 0.0)) for name in names
            }

        return _Step(
            self.seconds + share * (other.seconds - self.seconds),
            between(self.alone, other.alone),
            between(self.busy, other.busy),
            between(self.by_op, other.by_op),
            between(self.moved, other.moved),
            between(self.shared, other.shared),
        )


@dataclass(slots=True)
class _Run:
    """What one replay needs, and how many tasks it took so far."""

    layout: Layout
    schedule: str
    durations: Durations
    sharing: Sharing | None
    tasks: int = 0
    narrow: dict[Phase, tuple[int, int]] = field(default_factory=dict)

    def replay(self, layout: Layout, steps: Steps) -> tuple[TaskGraph, Trace]:
        """Graph and trace of a range of steps."""
        graph = schedule_graph(layout, self.schedule, steps)
        self.tasks += len(graph)
        return graph, simulate(graph, self.durations, self.sharing)

    def short_passes(self) -> Iterator[Repeated]:
        """Short passes to try, the last one the whole: each with the layers that stand for those it leaves out."""
        prefix, length = self.layout.period()
        whole = self.layout.num_layers
        before = prefix + (whole - prefix) % length if length else 0
        for repetitions, first, last in SHORT if length else ():
            short = before + repetitions * length
            if short < whole:
                first, last = before + first * length, before + last * length
                yield Repeated(short, first, last, (whole - short) / (last - first), length)
        yield ALL_THERE

    def two_stacks(self) -> tuple[int, int] | None:
        """Layers of two stacks, some repetitions per device apart; None where there are not enough."""
        prefix, length = self.layout.period()
        if not length:
            return None
        length *= self.layout.gpus
        before = prefix + (self.layout.num_layers - prefix) % length
        few, more = before + STACKS[0] * length, before + STACKS[1] * length
        return (few, more) if more < self.layout.num_layers else None

    def widths(self, phase: Phase) -> tuple[int, ...]:
        """Numbers of micro-batches of the narrow passes of a phase; none where it has few."""
        # What a ring of experts holds does not grow with the batch, so its passes are straight only once they are wide.
        times = RING_TIMES if phase == "decode" and self.layout.policy.weight_slots == "experts" else 1
        if self.layout.micro_batches(phase) < times * WORTH:
            return ()
        parts = self.layout.gpus if self.layout.pipelined else 1
        found = tuple(dict.fromkeys(-(-times * width // parts) * parts for width in WIDTHS))
        return found if len(found) > 1 else ()

    def few_of_prefill(self, layout: Layout) -> Layout:
        """The layout with no more micro-batches of prefill than there are of decode, or than is narrow."""
        if layout.only_micro_batches is not None or layout.pipelined:
            return layout
        return replace(layout, only_micro_batches=max(layout.every_micro_batch("decode"), WIDTHS[1]))

    def extrapolate(self, phase: Phase, measure: Callable[[Layout, Repeated], _Step | None]) -> _Step:
        """What the whole pass of a phase measures, from short and narrow ones.

        `measure` gives None where a short pass has not reached the steady state; then a longer one is tried.
        """
        widths, passes = self.widths(phase), dict[int, _Step]()

        def over_layers(only: int | None) -> _Step:
            if self.layout.pipelined:
                return over_stacks(only)
            for repeated in self.short_passes():
                found = measure(replace(self.layout, only_layers=repeated.short, only_micro_batches=only), repeated)
                if found is not None:
                    return found
            raise AssertionError("the whole pass is always there")

        def over_stacks(only: int | None) -> _Step:
            """From two stacks of which every device of a pipeline has its even part."""
            stacks = self.two_stacks()
            if stacks is None:
                return whole_of(replace(self.layout, only_micro_batches=only))
            few, more = (whole_of(replace(self.layout, only_layers=count, only_micro_batches=only)) for count in stacks)
            return few.towards(more, (self.layout.num_layers - stacks[0]) / (stacks[1] - stacks[0]))

        def whole_of(layout: Layout) -> _Step:
            found = measure(layout, ALL_THERE)
            assert found is not None  # nothing stands for anything else
            return found

        def narrow(width: int) -> _Step:
            if width not in passes:
                passes[width] = over_layers(width)
            return passes[width]

        if not widths:
            return over_layers(None)
        if phase not in self.narrow:
            self.narrow[phase] = widths[-2], widths[-1]
            for first, second, third in zip(widths, widths[1:], widths[2:], strict=False):
                line = narrow(first).towards(narrow(second), (third - first) / (second - first)).seconds
                if abs(narrow(third).seconds - line) <= LINE * line:
                    self.narrow[phase] = first, second
                    break
        first, second = self.narrow[phase]
        return narrow(first).towards(narrow(second), (self.layout.micro_batches(phase) - first) / (second - first))


def pass_seconds(
    graph: TaskGraph, trace: Trace, phase: Phase, step: int, *, since: float = 0.0, repeated: Repeated = ALL_THERE
) -> float | None:
    """Seconds from the end of the step before (`since`, where there is none) to the end of a step [s].

    In a short pass, with the layers that are not there; None where their time is not the same from one to the next.
    """
    ended = begun = since
    layers: dict[int, float] = {}
    for task, span in zip(graph.tasks, trace.spans, strict=True):
        name = task.id
        if name.phase != phase:
            continue
        if name.op is Op.SAMPLE:
            if name.step == step:
                ended = max(ended, span.end_s)
            elif name.step == step - 1:
                begun = max(begun, span.end_s)
        elif repeated.times and name.step == step and name.layer < repeated.last and name.op in ENDS_A_LAYER:
            layers[name.layer] = max(layers.get(name.layer, 0.0), span.end_s)
    if not repeated.times:
        return ended - begun
    low, high, length = repeated.first - 1, repeated.last - 1, repeated.length
    seconds = layers[high] - layers[low]
    if abs(seconds - (layers[high - length] - layers[low - length])) > SETTLED * seconds:
        return None
    return ended - begun + repeated.times * seconds


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
) -> _Run:
    rates = derive_rates(scenario.profile, scenario.formats)
    durations = roofline_durations(rates, shared=contention)
    layout = Layout(scenario, policy)
    return _Run(
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


def _account(
    run: _Run, graph: TaskGraph, trace: Trace, step: int, repeated: Repeated, since: float = 0.0
) -> _Step | None:
    """One step of a trace; None where a short pass has not reached the steady state."""
    alone: dict[str, float] = {}
    busy: dict[str, float] = {}
    by_op: dict[str, float] = {}
    moved: dict[str, float] = {}
    shared: dict[str, float] = {}
    seconds = pass_seconds(graph, trace, "decode", step, since=since, repeated=repeated)
    if seconds is None:
        return None
    for task, span in zip(graph.tasks, trace.spans, strict=True):
        if task.id.step != step or task.id.phase != "decode":
            continue
        times = 1.0 + repeated.times if repeated.first <= task.id.layer < repeated.last else 1.0
        lane, op, by_itself = str(task.lane), task.id.op.value, run.durations(task)
        alone[lane] = alone.get(lane, 0.0) + times * by_itself
        busy[lane] = busy.get(lane, 0.0) + times * (span.end_s - span.start_s)
        twins = run.layout.group_size if run.layout.folded and task.lane.device is not None else 1
        by_op[op] = by_op.get(op, 0.0) + twins * times * (span.end_s - span.start_s)
        moved[op] = moved.get(op, 0.0) + twins * times * task.bytes_moved
        if run.sharing is not None:
            for name, amount in run.sharing.demand(task, by_itself).items():
                shared[name] = shared.get(name, 0.0) + times * amount * by_itself / run.sharing.capacities[name]
    return _Step(seconds, alone, busy, by_op, moved, shared)


def _ends(graph: TaskGraph, trace: Trace, phase: Phase) -> float:
    """End of the last token of a phase [s]."""
    return max(
        span.end_s
        for task, span in zip(graph.tasks, trace.spans, strict=True)
        if task.id.phase == phase and task.id.op is Op.SAMPLE
    )


def _every_task(run: _Run, steps: int) -> tuple[float, float, _Step]:
    """Prefill and decode seconds, and the step in the middle, event by event over the whole run."""
    graph, trace = run.replay(run.layout, Steps(prefill=True, first=0, last=steps))
    prefill = _ends(graph, trace, "prefill")
    if not steps:
        return prefill, 0.0, _Step(0.0)
    middle = _account(run, graph, trace, steps // 2, ALL_THERE, since=prefill)
    assert middle is not None  # every layer is there
    return prefill, _ends(graph, trace, "decode") - prefill, middle


def _prefilled(run: _Run, layout: Layout, repeated: Repeated) -> _Step | None:
    """Prefill, from one short pass; from two where micro-batches go through all layers one after the other."""
    graph, trace = run.replay(layout, Steps(prefill=True))
    apart = layout.policy.weight_slots == "experts"
    if not apart or not repeated.times or repeated.short is None:
        seconds = pass_seconds(graph, trace, "prefill", 0, repeated=repeated)
        return None if seconds is None else _Step(seconds)
    short = repeated.short - (repeated.last - repeated.first)
    graph, first = run.replay(replace(layout, only_layers=short), Steps(prefill=True))
    more = trace.makespan_s - first.makespan_s
    return _Step(trace.makespan_s + repeated.times * more)


def _few_passes(run: _Run, steps: int) -> tuple[float, float, _Step]:
    """Prefill and decode seconds, and the step in the middle: straight lines between contexts, halved until they hold.

    The first step follows prefill and the last one prefetches for none: both stand apart.
    """
    known: dict[int, _Step] = {}

    def measured(step: int) -> _Step:
        if step not in known:

            def measure(layout: Layout, repeated: Repeated) -> _Step | None:
                graph, trace = run.replay(layout, around(step, steps))
                return _account(run, graph, trace, step, repeated)

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

    def prefilled(layout: Layout, repeated: Repeated) -> _Step | None:
        return _prefilled(run, layout, repeated)

    def first_step(layout: Layout, repeated: Repeated) -> _Step | None:
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
        return _Step(steady + here - there)

    prefill = run.extrapolate("prefill", prefilled).seconds
    if not steps:
        return prefill, 0.0, _Step(0.0)
    shown = measured(steps // 2)
    first = run.extrapolate("decode", first_step).seconds
    if steps < 4:
        return prefill, first + sum(at(step) for step in range(1, steps)), shown
    return prefill, first + between(1, steps - 2) + at(steps - 2) + at(steps - 1), shown
