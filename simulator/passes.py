"""Passes over few layers and micro-batches, and what the whole pass follows from them.

In the steady state the pattern of layers repeats, and within a layer the micro-batches do. So the seconds of a pass
grow in proportion to both, and those of L layers and n micro-batches follow from passes over few of each
(`Layout.only_layers`, `only_micro_batches`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hrm.graph import Op, Phase, TaskGraph
from hrm.layout import Layout
from hrm.schedules import Steps, schedule_graph
from hrm.trace import Trace
from simulator.contention import Sharing
from simulator.durations import Durations
from simulator.engine import simulate

__all__ = ["ALL_THERE", "Repeated", "Run", "Step", "account_for_pass", "pass_seconds"]

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


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step [s]; and by lane alone, by lane as it ran, by kind of task and by shared resource [s].

    `moved` are bytes by kind of task [byte].
    """

    seconds: float
    alone: Mapping[str, float] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)
    by_op: Mapping[str, float] = field(default_factory=dict)
    moved: Mapping[str, float] = field(default_factory=dict)
    shared: Mapping[str, float] = field(default_factory=dict)

    def towards(self, other: Step, share: float) -> Step:
        """The step that lies `share` of the way to another, and beyond it where that is over 1."""

        def between(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
            names = [*first, *(name for name in second if name not in first)]
            return {
                name: first.get(name, 0.0) + share * (second.get(name, 0.0) - first.get(name, 0.0)) for name in names
            }

        return Step(
            self.seconds + share * (other.seconds - self.seconds),
            between(self.alone, other.alone),
            between(self.busy, other.busy),
            between(self.by_op, other.by_op),
            between(self.moved, other.moved),
            between(self.shared, other.shared),
        )


@dataclass(slots=True)
class Run:
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

    def extrapolate(self, phase: Phase, measure: Callable[[Layout, Repeated], Step | None]) -> Step:
        """What the whole pass of a phase measures, from short and narrow ones.

        `measure` gives None where a short pass has not reached the steady state; then a longer one is tried.
        """
        widths, passes = self.widths(phase), dict[int, Step]()

        def over_layers(only: int | None) -> Step:
            if self.layout.pipelined:
                return over_stacks(only)
            for repeated in self.short_passes():
                found = measure(replace(self.layout, only_layers=repeated.short, only_micro_batches=only), repeated)
                if found is not None:
                    return found
            raise AssertionError("the whole pass is always there")

        def over_stacks(only: int | None) -> Step:
            """From two stacks of which every device of a pipeline has its even part."""
            stacks = self.two_stacks()
            if stacks is None:
                return whole_of(replace(self.layout, only_micro_batches=only))
            few, more = (whole_of(replace(self.layout, only_layers=count, only_micro_batches=only)) for count in stacks)
            return few.towards(more, (self.layout.num_layers - stacks[0]) / (stacks[1] - stacks[0]))

        def whole_of(layout: Layout) -> Step:
            found = measure(layout, ALL_THERE)
            assert found is not None  # nothing stands for anything else
            return found

        def narrow(width: int) -> Step:
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


def account_for_pass(
    run: Run, graph: TaskGraph, trace: Trace, step: int, repeated: Repeated, since: float = 0.0
) -> Step | None:
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
    return Step(seconds, alone, busy, by_op, moved, shared)
