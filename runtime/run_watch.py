"""What is counted while a run goes on: how far it is, experts that tokens chose, seconds of every lane."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hrm import cost
from hrm.graph import Lane, Phase, TaskId
from hrm.prediction import Prediction
from hrm.scenario import Scenario
from hrm.schedules import Steps
from runtime.experts import Routing
from runtime.session import Piece

__all__ = ["RunWatch", "Touched"]

TELL_EVERY_S = 0.2
"""Between two lines of progress [s]."""


@dataclass(slots=True)
class Touched:
    """Experts that the tokens of one micro-batch chose in one layer, added up over `layers` such looks.

    `uniform` is what routing without preferences would give, E (1 - (1 - k/E)^B).
    """

    experts: int = 0
    uniform: float = 0.0
    layers: int = 0


@dataclass(slots=True)
class RunWatch:
    """Told by a session as it runs.

    Attributes
    ----------
    scenario : Scenario
    batches : sequence of (int, Prediction)
        Requests of every batch, in the order they run, and what is predicted of it.
    window : Steps or None
        Of the first batch, the graph to keep.
    tell : callable, optional
        Called with a line of text now and then.
    touched : dict
        By phase.
    busy_s : dict
        Seconds by phase and lane [s].
    """

    scenario: Scenario
    batches: Sequence[tuple[int, Prediction]]
    window: Steps | None = None
    tell: Callable[[str], None] | None = None
    touched: dict[Phase, Touched] = field(default_factory=dict)
    busy_s: dict[tuple[Phase, Lane], float] = field(default_factory=dict)
    batch: int = 0
    _began: float = field(default_factory=time.perf_counter)
    _told: float = 0.0

    def on_experts(self, task: TaskId, routing: Routing) -> None:
        """A micro-batch has been routed in a layer."""
        model = self.scenario.model
        if model.is_moe:
            found = self.touched.setdefault(task.phase, Touched())
            starts = routing.starts
            found.experts += sum(after > before for before, after in pairwise(starts))
            found.uniform += float(cost.experts_touched(model, routing.order.numel() / model.top_k))
            found.layers += 1
        now = time.perf_counter()
        if self.tell is not None and now - self._told > TELL_EVERY_S:
            self._told = now
            self.tell(self._line(task, now - self._began))

    def on_piece(self, piece: Piece) -> bool:
        """A graph has run: add up its lanes; kept is the window's."""
        for span in piece.trace.spans:
            key = (span.task.phase, span.lane)
            self.busy_s[key] = self.busy_s.get(key, 0.0) + span.end_s - span.start_s
        first = self.batch == 0
        if piece.steps.last == self.scenario.workload.generation_length - 1:
            self.batch, self._began = self.batch + 1, time.perf_counter()
        return first and piece.steps == self.window

    def _line(self, task: TaskId, elapsed_s: float) -> str:
        requests, predicted = self.batches[self.batch]
        batch = f"batch {self.batch + 1} of {len(self.batches)}, " if len(self.batches) > 1 else ""
        layers, steps = self.scenario.model.n_layers, self.scenario.workload.generation_length - 1
        if task.phase == "prefill":
            return f"{batch}prefill of {requests:,} requests: layer {task.layer + 1} of {layers}"
        share = (task.step + task.layer / layers) / steps
        tokens = requests * (1.0 + share * steps)  # prefill gave the first one of each
        by_now = predicted.prefill_s + predicted.decode_s * share
        rates = f"{tokens / elapsed_s:,.4g} token/s so far ({tokens / by_now:,.4g} predicted)"
        return f"{batch}decode {share:.0%}, step {task.step + 1} of {steps}: {rates}"
