"""`hrm fit --trace`: the efficiencies of a profile from one measured run, task by task.

Every share scales the tasks of its own lanes, and is chosen so that the seconds of each kind of task, alone, come as
close to the measured ones as they can: least squares of ln(predicted / measured), each kind weighted by its seconds.
What the run shows nothing of stays as it was. Paced lanes take no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from hrm.errors import InputError
from hrm.graph import Lane, LaneKind, Op, Task, TaskGraph
from hrm.profile import Efficiency, HardwareProfile
from hrm.profile_files import profile_document, profile_from_document
from hrm.trace import Trace, check_same_tasks

__all__ = ["FittedShare", "TraceFit", "fit_efficiency", "with_efficiency"]

Seconds = Callable[[HardwareProfile], Callable[[Task], float]]
"""Seconds of a task alone by the rates of a profile: the simulator's."""

LEAST, MOST = 0.005, 1.0
SWEEPS = 6
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
NARROW = 1e-4
"""Width of the bracket of ln(share) at which a search ends."""

MOVES = 1e-3
"""A share that changes no kind of task by so much of its seconds is not determined by the run."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Tasks of one kind: representatives with how often each comes, and the seconds measured."""

    lane: LaneKind
    op: Op
    phase: str
    tasks: tuple[tuple[Task, int], ...]
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedShare:
    """One share of a peak.

    Attributes
    ----------
    name : str
        Field of `Efficiency`.
    before, after : float
    determined : bool
        Whether the run says anything of it.
    at_limit : bool
        Whether even the whole peak is too slow for what was measured.
    """

    name: str
    before: float
    after: float
    determined: bool
    at_limit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFit:
    """What came of it.

    Attributes
    ----------
    profile : HardwareProfile
        With the new shares.
    shares : tuple of FittedShare
    kinds : tuple of mapping
        By kind of task: seconds measured, and predicted before and after.
    """

    profile: HardwareProfile
    shares: tuple[FittedShare, ...]
    kinds: tuple[Mapping[str, Any], ...]


def _touches(name: str, kind: _Kind) -> bool:
    """Whether a share scales a kind of task."""
    attention = kind.lane is LaneKind.CPU and kind.op is Op.ATTENTION
    return {
        "gpu_bandwidth": kind.lane is LaneKind.GPU,
        "gpu_flops_prefill": kind.lane is LaneKind.GPU and kind.phase == "prefill",
        "gpu_flops_decode": kind.lane is LaneKind.GPU and kind.phase == "decode",
        "link": kind.lane in (LaneKind.H2D, LaneKind.D2H),
        "staging": kind.lane is LaneKind.PIN,
        "cpu_attention": attention,
        "cpu_flops": kind.lane is LaneKind.CPU,
    }[name]


SHARES = ("link", "staging", "cpu_attention", "cpu_flops", "gpu_flops_prefill", "gpu_flops_decode", "gpu_bandwidth")
assert set(SHARES) <= {field.name for field in fields(Efficiency)}


def fit_efficiency(
    profile: HardwareProfile, graph: TaskGraph, trace: Trace, seconds: Seconds, *, paced: Iterable[Lane] = ()
) -> TraceFit:
    """Fit the shares of a profile to a measured run.

    Parameters
    ----------
    profile : HardwareProfile
        What the plan of the run was made for.
    graph : TaskGraph
    trace : Trace
        Measured, of that graph.
    seconds : callable
    paced : iterable of Lane
        Lanes that are no evidence.

    Raises
    ------
    InputError
        The trace is simulated or of another graph, or all of its lanes were paced.
    """
    if trace.kind == "simulated":
        raise InputError("is simulated", where="--trace", way_out="a trace that hrm run --trace wrote")
    check_same_tasks(graph, trace.spans)
    kinds = _kinds(graph, trace, set(paced))
    if not kinds:
        raise InputError("every lane of it was paced", where="--trace", way_out="hrm run without --pace-links")
    shares = {name: float(getattr(profile.efficiency, name)) for name in SHARES}

    def predicted(values: Mapping[str, float], some: Sequence[_Kind]) -> list[float]:
        alone = seconds(replace(profile, efficiency=replace(profile.efficiency, **values)))
        return [sum(count * alone(task) for task, count in kind.tasks) for kind in some]

    def loss(values: Mapping[str, float], some: Sequence[_Kind]) -> float:
        found = predicted(values, some)
        return sum(
            kind.measured_s * math.log(guess / kind.measured_s) ** 2
            for guess, kind in zip(found, some, strict=True)
            if guess > 0.0
        )

    def loss_of(name: str, values: Mapping[str, float], share: float) -> float:
        return loss({**values, name: share}, own[name])

    own = {name: [kind for kind in kinds if _touches(name, kind)] for name in SHARES}
    moving = [name for name in SHARES if own[name] and _moves(name, shares, own[name], predicted)]
    fitted = dict(shares)
    for _ in range(SWEEPS):
        for name in moving:
            fitted[name] = _least(partial(loss_of, name, fitted))
    determined = {name for name in moving if _moves(name, fitted, own[name], predicted)}
    fitted = {name: fitted[name] if name in determined else shares[name] for name in SHARES}
    before, after = predicted(shares, kinds), predicted(fitted, kinds)
    return TraceFit(
        profile=with_efficiency(profile, {name: fitted[name] for name in determined}),
        shares=tuple(
            FittedShare(
                name=name,
                before=shares[name],
                after=fitted[name],
                determined=name in determined,
                at_limit=name in determined and fitted[name] > MOST * (1.0 - 1e-3),
            )
            for name in SHARES
        ),
        kinds=tuple(
            {
                "op": kind.op.value,
                "lane": kind.lane.value,
                "phase": kind.phase,
                "measured_s": kind.measured_s,
                "before_s": early,
                "after_s": late,
            }
            for kind, early, late in zip(kinds, before, after, strict=True)
        ),
    )


def _kinds(graph: TaskGraph, trace: Trace, paced: set[Lane]) -> list[_Kind]:
    """Kinds of tasks that took time, the longest first; the same work is priced once."""
    tasks: dict[tuple[LaneKind, Op, str], dict[tuple[Any, ...], tuple[Task, int]]] = {}
    measured: dict[tuple[LaneKind, Op, str], float] = {}
    for task, span in zip(graph.tasks, trace.spans, strict=True):
        if task.lane in paced:
            continue
        kind = (task.lane.kind, task.id.op, task.id.phase)
        same = (task.id.part, task.bytes_moved, task.launches, id(task.operators))
        one, count = tasks.setdefault(kind, {}).get(same, (task, 0))
        tasks[kind][same] = (one, count + 1)
        measured[kind] = measured.get(kind, 0.0) + span.end_s - span.start_s
    found = [_Kind(*kind, tuple(tasks[kind].values()), seconds) for kind, seconds in measured.items() if seconds > 0.0]
    return sorted(found, key=lambda kind: -kind.measured_s)


def _moves(
    name: str,
    values: Mapping[str, float],
    kinds: Sequence[_Kind],
    predicted: Callable[[Mapping[str, float], Sequence[_Kind]], list[float]],
) -> bool:
    """Whether a little more or less of a share changes what is predicted of any of its kinds."""
    here = predicted(values, kinds)
    for factor in (0.9, 1.1):
        there = predicted({**values, name: values[name] * factor}, kinds)
        if any(abs(one - other) > MOVES * other for one, other in zip(there, here, strict=True)):
            return True
    return False


def _least(loss: Callable[[float], float]) -> float:
    """The share at which a function of one minimum is least, by golden sections of its logarithm."""
    low, high = math.log(LEAST), math.log(MOST)
    one, other = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_one, at_other = loss(math.exp(one)), loss(math.exp(other))
    while high - low > NARROW:
        if at_one < at_other:
            high, other, at_other = other, one, at_one
            one = high - GOLDEN * (high - low)
            at_one = loss(math.exp(one))
        else:
            low, one, at_one = one, other, at_other
            other = low + GOLDEN * (high - low)
            at_other = loss(math.exp(other))
    return math.exp((low + high) / 2.0)


def with_efficiency(profile: HardwareProfile, shares: Mapping[str, float], *, note: str = "") -> HardwareProfile:
    """The profile with other shares, each with where it comes from."""
    document = profile_document(profile)
    entries = document.setdefault("efficiency", {})
    for name, share in shares.items():
        said = note or f"hrm fit --trace; was {getattr(profile.efficiency, name):.4g}"
        entries[name] = {"value": f"{100.0 * share:.6g} %", "source": "measured", "note": said}
    return profile_from_document(document, name=profile.name, origin=profile.origin)
