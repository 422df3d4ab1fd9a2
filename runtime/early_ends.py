"""A batch whose requests end when they are done: short graphs, and after each the rows that ended are handed over.

`Session.generate` runs all requests of a batch to the workload's generation length. Here each has its own: at an end
token, or at its own limit. What stays goes on in a smaller batch (`runtime.shrinking`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from hrm.graph import TaskId
from hrm.layout import Layout
from hrm.schedules import Steps, schedule_graph
from runtime import session as sessions
from runtime.batches import SizedBatch
from runtime.cpu_experts import Routing
from runtime.placement import place_batch
from runtime.run_state import RunState
from runtime.session import Piece, Session
from runtime.shrinking import keep_rows

__all__ = ["EarlyEnds", "Ended", "Reason", "Stopped", "finish_batch"]

Reason = Literal["stop", "length"]

RequestScore = Callable[[Tensor, Sequence[int], int, int], Tensor]
"""As `runtime.run_state.Score`, with indices of requests in place of rows."""

GRAPH_SECONDS = 20.0
"""What a graph of decode steps should take [s]: so long a request that is done waits, and a SIGTERM."""

LEAST_STEPS = 2
MOST_STEPS = 16
"""Decode steps of a graph: lanes drain where one ends, which costs about one layer's share of a step."""


class Stopped(Exception):  # noqa: N818 (no error: somebody asked)
    """The run was asked to stop, and has after what it was in."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that is done: its index, what was generated (with the end token, if one ended it), and why."""

    index: int
    tokens: tuple[int, ...]
    reason: Reason


@dataclass(slots=True, kw_only=True)
class EarlyEnds:
    """How a batch ends, and who is told.

    Attributes
    ----------
    ends : collection of int
        End tokens.
    deliver : callable
        Told the requests that are done, after every graph in which some are.
    steps : int or None
        Decode steps of every graph; by the seconds that a step takes if None.
    score : callable, optional
        As `Session.score`, with indices of requests.
    whole : bool
        The score looks at the whole vocabulary at once.
    stop : callable
        Whether to stop before the next graph.
    on_piece : callable, optional
        Told every graph as it ran, the state of the batch in it, and the seconds it took, those of laying out included.
    on_experts : callable, optional
        Told every routing, as in `Session.generate`.
    decoding : bool
        Prefill is over: there may be requests that end with the next graph.
    phases : dict
        Seconds by phase, those of laying out included [s].
    """

    ends: Collection[int]
    deliver: Callable[[Sequence[Ended]], None]
    steps: int | None = None
    score: RequestScore | None = None
    whole: bool = False
    stop: Callable[[], bool] = lambda: False
    on_piece: Callable[[Piece, RunState, float], None] | None = None
    on_experts: Callable[[TaskId, Routing], None] | None = None
    decoding: bool = False
    phases: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})


def finish_batch(session: Session, batch: SizedBatch, prompts: Sequence[Sequence[int]], how: EarlyEnds) -> None:
    """Run a batch until every request is done; each is handed over after the graph in which it ended.

    Parameters
    ----------
    session : Session
    batch : SizedBatch
        Its requests say how many tokens are generated for each at most.
    prompts : sequence of sequence of int
        Token ids by request index.

    Raises
    ------
    InputError
        As `Session.generate`; what was handed over before stays so.
    Stopped
        `stop` said so.
    """
    layout = Layout(session.scenario, batch.policy)
    placement = place_batch(batch.micro_batches, batch.policy)
    most = session.policy.micro_batch_size
    state = session.prepare(layout, placement, prompts)
    cache = state.cache
    state.score_whole, state.on_experts = how.whole, how.on_experts
    _score_requests(state, how.score)
    seen, done, per_step = 0, 0, 0.0  # columns looked at, decode steps run, seconds of one
    try:
        _run(session, state, Steps(prefill=True), how)
        how.decoding = True
        while True:
            ended, staying = _look(state, seen, done + 1, how.ends)
            seen = done + 1
            if ended:
                how.deliver(ended)
            if not staying:
                return
            if how.stop():
                raise Stopped
            if ended:
                state = keep_rows(state, staying, most)
                _score_requests(state, how.score)
            soonest = min(request.generation_tokens for request in state.placement.requests) - 1
            last = min(soonest, done + _steps_at_once(session, state, how.steps, per_step))
            took = _run(session, state, Steps(first=done, last=last), how)
            per_step, done = took / (last - done), last
    finally:
        how.decoding = False
        cache.close(session.arenas)


def _run(session: Session, state: RunState, steps: Steps, how: EarlyEnds) -> float:
    began = time.perf_counter()
    piece = session.run_steps(state, steps)
    took = time.perf_counter() - began
    how.phases["prefill" if steps.prefill else "decode"] += took
    if how.on_piece is not None:
        how.on_piece(piece, state, took)
    return took


def _steps_at_once(session: Session, state: RunState, steps: int | None, per_step: float) -> int:
    """Decode steps of the next graph."""
    if steps is None:
        steps = LEAST_STEPS if per_step <= 0.0 else int(GRAPH_SECONDS / per_step)
        steps = max(LEAST_STEPS, min(MOST_STEPS, steps))
    one = len(schedule_graph(state.layout, session.schedule, Steps(first=0, last=1)))
    return max(1, min(steps, sessions.TASKS_AT_ONCE // one))


def _score_requests(state: RunState, score: RequestScore | None) -> None:
    """Rows change their requests when some leave, so a score is told of requests."""
    if score is None:
        return
    told, requests = score, state.placement.requests

    def by_row(logits: Tensor, rows: Sequence[int], column: int, first: int) -> Tensor:
        return told(logits, [requests[row].index for row in rows], column, first)

    state.score = by_row


def _look(state: RunState, seen: int, count: int, ends: Collection[int]) -> tuple[list[Ended], list[int]]:
    """Which rows have ended with the tokens from `seen` to `count`, and which go on."""
    ended, staying = [], []
    for row, tokens in enumerate(state.generated[:, seen:count].tolist()):
        request = state.placement.requests[row]
        last = next((place for place, token in enumerate(tokens, start=seen + 1) if token in ends), None)
        if last is None and count < request.generation_tokens:
            staying.append(row)
            continue
        every = state.generated[row, : last or count].tolist()
        ended.append(Ended(request.index, tuple(every), "length" if last is None else "stop"))
    return ended, staying
