"""What is counted while a job runs: graphs with their tokens and seconds, lanes by kind of task, why requests end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hrm.graph import Lane, Op, Phase
from hrm.policy import Policy
from runtime.early_ends import Ended
from runtime.run_state import RunState
from runtime.session import Piece

__all__ = ["JobWatch", "Stretch"]


@dataclass(slots=True)
class Stretch:
    """A graph that has run.

    Attributes
    ----------
    batch : int
        Of the job, from 0.
    phase : {"prefill", "decode"}
    first, last : int
        Decode steps, the last one excluded.
    requests, prompt_tokens : int
        Rows in it, and the tokens of their prompts.
    policy : Policy
        With the size of the batch as it was then.
    tokens : int
        Of all requests so far, when it was over; what a request got beyond its end does not count.
    end_s, seconds : float
        When it was over, since the job began, and what it took [s].
    """

    batch: int
    phase: Phase
    first: int
    last: int
    requests: int
    prompt_tokens: int
    policy: Policy
    tokens: int
    end_s: float
    seconds: float

    @property
    def steps(self) -> int:
        """Decode steps."""
        return self.last - self.first


@dataclass(slots=True)
class JobWatch:
    """Told of a job as it runs.

    Attributes
    ----------
    busy_s : dict
        Seconds by phase, lane and kind of task [s].
    laid_out_s : float
        Making graphs and choosing buffers, while every lane is idle [s].
    reasons : Counter
        Why requests ended.
    prompt_tokens : int
        Of all prompts that were computed.
    done_tokens : int
        Of requests that have finished.
    """

    stretches: list[Stretch] = field(default_factory=list)
    busy_s: dict[tuple[Phase, Lane, Op], float] = field(default_factory=dict)
    laid_out_s: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    done_tokens: int = 0
    batch: int = 0
    _began: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        """The first batch begins now."""
        self._began = time.perf_counter()

    def on_piece(self, piece: Piece, state: RunState, took_s: float) -> None:
        """A graph has run."""
        phase: Phase = "prefill" if piece.steps.prefill else "decode"
        requests = state.placement.requests
        each = piece.steps.last + 1
        prompt_tokens = sum(request.prompt_tokens for request in requests)
        self.prompt_tokens += prompt_tokens if phase == "prefill" else 0
        self.stretches.append(
            Stretch(
                batch=self.batch,
                phase=phase,
                first=piece.steps.first,
                last=piece.steps.last,
                requests=len(requests),
                prompt_tokens=prompt_tokens,
                policy=state.layout.policy,
                tokens=self.done_tokens + len(requests) * each,
                end_s=time.perf_counter() - self._began,
                seconds=took_s,
            )
        )
        self.laid_out_s += piece.laid_out_s
        for span in piece.trace.spans:
            key = (span.task.phase, span.lane, span.task.op)
            self.busy_s[key] = self.busy_s.get(key, 0.0) + span.end_s - span.start_s

    def on_ended(self, ended: Sequence[Ended]) -> None:
        """Requests have finished, with the graph that was told last."""
        last = self.stretches[-1]
        tokens = sum(len(each.tokens) for each in ended)
        last.tokens += tokens - len(ended) * (last.last + 1)  # what was computed beyond an end is no token
        self.done_tokens += tokens
        self.reasons.update(each.reason for each in ended)

    def on_batch(self) -> None:
        """A batch is done."""
        self.batch += 1
