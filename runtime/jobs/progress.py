"""How far a job is: requests and tokens, tokens per second beside the prediction, time left, memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hrm.graph import TaskId
from hrm.units import GIB, KIB, MIB
from runtime.early_ends import Ended
from runtime.experts import Routing

__all__ = ["JobProgress", "duration", "rate_text", "size_text"]

TELL_EVERY_S = 0.5
"""Between two lines [s]."""

SIZES = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


def duration(seconds: float) -> str:
    """In words: "3 h 20 min", "4 min", "12 s"."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(round(whole / 60), 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min"


def rate_text(number: float) -> str:
    """Three digits of a small number, a large one whole, as people read them."""
    return f"{number:,.3g}" if abs(number) < 1000 else f"{number:,.0f}"


def size_text(size: float) -> str:
    """Bytes in a unit that suits them."""
    unit, name = next(((unit, name) for unit, name in SIZES if size >= unit), SIZES[-1])
    return f"{size / unit:,.2f} {name}"


@dataclass(slots=True, kw_only=True)
class JobProgress:
    """Told of a job as it runs.

    Attributes
    ----------
    requests, done : int
        Of this start, and finished of them.
    limits : mapping of int to int
        Most tokens of each, by index.
    batches : sequence of (int, float)
        Requests of every batch, and token/s predicted for it, were all to run to the plan's length.
    layers : int
    tell : callable, optional
        Called with a line of text now and then.
    memory : callable
        Peaks by level since it was last asked [byte].
    """

    requests: int
    limits: Mapping[int, int]
    batches: Sequence[tuple[int, float]]
    layers: int
    tell: Callable[[str], None] | None = None
    memory: Callable[[], Mapping[str, int]] = dict
    done: int = 0
    tokens: int = 0
    batch: int = 0
    held: dict[str, int] = field(default_factory=dict)
    _flying: float = 0.0  # tokens of requests that go on
    _waiting: int = 0  # tokens at most of requests that are not done
    _began: float = field(default_factory=time.perf_counter)
    _told: float = 0.0

    def __post_init__(self) -> None:
        self._waiting = sum(self.limits.values())

    def on_ended(self, ended: Sequence[Ended]) -> None:
        """Requests have finished."""
        self.done += len(ended)
        self.tokens += sum(len(each.tokens) for each in ended)
        self._waiting -= sum(self.limits[each.index] for each in ended)

    def on_steps(self, requests: int, tokens_each: int) -> None:
        """A graph has run: so many requests have so many tokens each."""
        self._flying = float(requests * tokens_each)
        for level, size in self.memory().items():
            self.held[level] = max(self.held.get(level, 0), size)

    def on_batch(self) -> None:
        """A batch is done."""
        self.batch, self._flying = self.batch + 1, 0.0

    def on_experts(self, task: TaskId, routing: Routing) -> None:
        """A micro-batch has been routed in a layer."""
        now = time.perf_counter()
        if self.tell is not None and now - self._told >= TELL_EVERY_S:
            self._told = now
            self.tell(self.line(task, now - self._began))

    def line(self, task: TaskId, elapsed_s: float) -> str:
        """All of it in one line."""
        many = len(self.batches) > 1
        words = [f"batch {self.batch + 1} of {len(self.batches)}"] if many else []
        size, predicted = self.batches[min(self.batch, len(self.batches) - 1)]
        if task.phase == "prefill":
            words.append(f"prefill of {size:,} requests, layer {task.layer + 1} of {self.layers}")
        else:
            words.append(f"token {task.step + 2}")
        words.append(f"{self.done:,} of {self.requests:,} done")
        so_far = self.tokens + self._flying
        if so_far > 0 and elapsed_s > 0:
            rate = so_far / elapsed_s
            words.append(f"{rate_text(rate)} token/s ({rate_text(predicted)} predicted)")
            words.append(f"{duration(max(0.0, self._waiting - self._flying) / rate)} left at most")
        names = {"gpu": "GPU", "cpu": "CPU"}
        words += [f"{names[level]} {size_text(size)}" for level, size in self.held.items() if level in names]
        return ", ".join(words)
