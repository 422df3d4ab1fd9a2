"""One decode step as it ran: where its seconds went, lane by lane, copy by copy, and what memory was held.

Read off one trace of the whole stack of layers (`account_for_step`), or off a replay and a short pass
(`account_in_short`, quick for any plan). Either way the pieces of the critical path add up to the seconds of the step,
and the bubble is what they exceed the busiest lane by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hrm.graph import Op, TaskGraph
from hrm.policy import Policy
from hrm.rates import derive_rates
from hrm.scenario import Scenario
from hrm.schedules import middle_steps
from hrm.trace import Trace
from simulator.contention import Sharing, sharing_of
from simulator.critical_path import WAITING, Window, find_critical_path, seconds_on_path, step_window
from simulator.durations import Durations, roofline_durations
from simulator.replay import Replay, Wrap, short_step, step_trace

__all__ = ["COPIES", "Copied", "StepAccount", "StepRun", "account_for_step", "account_in_short", "run_step"]

COPIES: Mapping[Op, str] = {
    Op.OFFLOAD_QKV: "D1",
    Op.LOAD_HIDDEN: "D2",
    Op.LOAD_WEIGHTS: "D3",
    Op.LOAD_KV: "D4",
}
"""The four kinds of copies of Figure 6 of the paper; whatever else moves is "other"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Copies of one kind in a step.

    Attributes
    ----------
    bytes : float
        [byte]
    seconds : float
        That their lanes were busy with them [s].
    """

    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """A decode step.

    Attributes
    ----------
    step : int
        Number of the step; 0 generates the second token.
    seconds, bound_s : float
        Its length; and what its busiest lane would need alone, or what lanes share for all of them, whichever is
        more [s].
    busy_s : mapping of str to float
        Per lane, all tasks of the step [s]; some of them may have run ahead, in the step before.
    critical_path : mapping of str to float
        By kind of task, and `waiting`; they add up to `seconds` [s].
    copies : mapping of str to Copied
        D1 to D4 of Figure 6, and "other", always all five.
    peak_bytes : mapping of str to float
        Largest number of bytes held in the trace, by level, where the trace has it [byte].
    """

    step: int
    seconds: float
    bound_s: float
    busy_s: Mapping[str, float]
    critical_path: Mapping[str, float]
    copies: Mapping[str, Copied]
    peak_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def bubble_s(self) -> float:
        """What the schedule leaves idle: seconds above the bound [s]."""
        return self.seconds - self.bound_s


@dataclass(frozen=True, slots=True)
class StepRun:
    """Decode steps `first` to `last` - 1 as they ran, with neighbours that fill and drain the pipeline.

    `durations` are those of every task alone, `sharing` what lanes shared (None: nothing).
    """

    graph: TaskGraph
    trace: Trace
    first: int
    last: int
    durations: Durations
    sharing: Sharing | None = None

    @property
    def window(self) -> Window:
        """All of the steps."""
        start = step_window(self.graph, self.trace, self.first).start_s
        return Window(start, step_window(self.graph, self.trace, self.last - 1).end_s)


def run_step(
    scenario: Scenario,
    policy: Policy,
    schedule: str,
    *,
    steps: int = 1,
    contention: bool = True,
    change: Wrap | None = None,
) -> StepRun | None:
    """Run decode steps from the middle of a batch, over all layers.

    Parameters
    ----------
    scenario : Scenario
    policy : Policy
    schedule : str
        One of `hrm.schedules.SCHEDULES`.
    steps : int
        How many consecutive steps.
    contention : bool
        Let lanes share memory, link and cores.
    change : callable, optional
        Changes the durations: jitter, skewed routing.

    Returns
    -------
    StepRun or None
        None where one token is generated: prefill gives it, and there is no decode step.

    Raises
    ------
    InputError
        More steps than there are, or the schedule cannot run the policy.
    """
    decode = scenario.workload.generation_length - 1
    shown, wanted = middle_steps(decode, steps)
    if decode == 0:
        return None
    first = shown.first
    graph, trace = step_trace(scenario, policy, schedule, step=first, contention=contention, steps=wanted, wrap=change)
    rates = derive_rates(scenario.profile, scenario.formats)
    alone = roofline_durations(rates, shared=contention)
    return StepRun(
        graph,
        trace,
        first,
        first + steps,
        alone if change is None else change(alone),
        sharing_of(scenario.profile, rates) if contention else None,
    )


def account_in_short(
    scenario: Scenario,
    policy: Policy,
    schedule: str,
    replay: Replay,
    *,
    contention: bool = True,
    change: Wrap | None = None,
) -> StepAccount | None:
    """Account for the decode step in the middle from what a replay found, and the critical path of a short pass.

    A short pass has few layers and micro-batches: pieces of the path in layers that stand for others count as often.

    Parameters
    ----------
    replay : Replay
        Of the same plan under the same schedule.

    Returns
    -------
    StepAccount or None
        None where one token is generated.
    """
    decode = scenario.workload.generation_length - 1
    if decode == 0:
        return None
    step = decode // 2
    graph, trace, repeated = short_step(scenario, policy, schedule, step=step, contention=contention, wrap=change)
    path: dict[str, float] = {}
    for segment in find_critical_path(graph, trace, step):
        layer = -1 if segment.task is None else segment.task.layer
        times = 1.0 + repeated.times if repeated.first <= layer < repeated.last else 1.0
        name = WAITING if segment.task is None else segment.task.op.value
        path[name] = path.get(name, 0.0) + times * (segment.end_s - segment.start_s)
    path = dict(sorted(path.items(), key=lambda entry: -entry[1]))
    seconds = replay.layer_latency_s * scenario.model.n_layers
    scale = seconds / sum(path.values())  # micro-batches that are not there
    copies = {name: [0.0, 0.0] for name in (*COPIES.values(), "other")}
    for op, size in replay.bytes_by_op.items():
        if size > 0.0:
            kind = copies[COPIES.get(Op(op), "other")]
            kind[0] += size
            kind[1] += replay.seconds_by_op[op]
    return StepAccount(
        step=step,
        seconds=seconds,
        bound_s=replay.bound_layer_latency_s * scenario.model.n_layers,
        busy_s=replay.busy_s,
        critical_path={name: scale * each for name, each in path.items()},
        copies={name: Copied(bytes=size, seconds=spent) for name, (size, spent) in copies.items()},
        peak_bytes={level: max(held for _, held in samples) for level, samples in trace.memory.items() if samples},
    )


def account_for_step(run: StepRun, step: int | None = None) -> StepAccount:
    """Account for one decode step of a run.

    Parameters
    ----------
    run : StepRun
    step : int, optional
        The first one of the run by default.
    """
    step = run.first if step is None else step
    window = step_window(run.graph, run.trace, step)
    alone: dict[str, float] = {}
    busy: dict[str, float] = {}
    moved = {name: [0.0, 0.0] for name in (*COPIES.values(), "other")}
    for task, span in zip(run.graph.tasks, run.trace.spans, strict=True):
        if task.id.step != step or task.id.phase != "decode":
            continue
        lane = str(task.lane)
        seconds = run.durations(task)
        alone[lane] = alone.get(lane, 0.0) + seconds
        if run.sharing is not None:
            for name, amount in run.sharing.demand(task, seconds).items():
                alone[name] = alone.get(name, 0.0) + amount * seconds / run.sharing.capacities[name]
        busy[lane] = busy.get(lane, 0.0) + span.end_s - span.start_s
        if task.bytes_moved > 0.0:
            kind = moved[COPIES.get(task.id.op, "other")]
            kind[0] += task.bytes_moved
            kind[1] += span.end_s - span.start_s
    return StepAccount(
        step=step,
        seconds=window.seconds,
        bound_s=max(alone.values()),
        busy_s=busy,
        critical_path=seconds_on_path(find_critical_path(run.graph, run.trace, step)),
        copies={name: Copied(bytes=size, seconds=seconds) for name, (size, seconds) in moved.items()},
        peak_bytes={level: max(held for _, held in samples) for level, samples in run.trace.memory.items() if samples},
    )
