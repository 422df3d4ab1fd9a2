"""The task graph: what runs on which lane after what, and how much work it is. No seconds, no tensors.

A schedule (`hrm.schedules`) lays tasks out; the simulator gives each a duration, the runtime gives each (op, lane) a
kernel. Both walk the same graph by one rule: a task starts when its lane is free and its dependencies are done. Lanes
take their tasks in issue order and a dependency is always issued earlier, so neither can deadlock, and without
contention the end of every task has a closed form (`finish_times`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

from hrm.cost import Work
from hrm.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Hold", "Lane", "LaneKind", "Op", "Operator", "Phase", "Task", "TaskGraph", "TaskId", "finish_times"]

Phase = Literal["prefill", "decode"]


class LaneKind(StrEnum):
    """What a lane is; each does one task at a time."""

    GPU = "gpu"
    CPU = "cpu"
    H2D = "host_to_device"
    D2H = "device_to_host"
    PIN = "staging"
    DISK = "disk"
    P2P = "gpu_to_gpu"


class Lane(NamedTuple):
    """One lane: its kind, and the device it belongs to (None: a lane of the host, shared by all devices)."""

    kind: LaneKind
    device: int | None = None

    def __str__(self) -> str:
        return self.kind.value if self.device is None else f"{self.kind.value}{self.device}"


class Op(StrEnum):
    """Kinds of task; the same in prefill and decode."""

    EMBED = "embed"
    PRE_ATTENTION = "pre_attention"
    ATTENTION = "attention"
    POST_ATTENTION = "post_attention"
    EXPERTS = "experts"
    LM_HEAD = "lm_head"
    SAMPLE = "sample"
    OFFLOAD_QKV = "offload_qkv"
    LOAD_HIDDEN = "load_hidden"
    STORE_HIDDEN = "store_hidden"
    STAGE_WEIGHTS = "stage_weights"
    LOAD_WEIGHTS = "load_weights"
    LOAD_KV = "load_kv"
    STORE_KV = "store_kv"
    READ_DISK = "read_disk"
    WRITE_DISK = "write_disk"
    ALL_REDUCE = "all_reduce"


class TaskId(NamedTuple):
    """Name of a task; a measured trace joins a simulated one by equality of these.

    `micro_batch`, `page`, `device` and `part` are None where the task has none; `layer` counts the lm_head as layer L.
    """

    op: Op
    phase: Phase
    step: int
    layer: int
    micro_batch: int | None = None
    page: int | None = None
    device: int | None = None
    part: int | None = None

    def __str__(self) -> str:
        text = f"{self.op.value}/{self.phase}/s{self.step}/l{self.layer}"
        for letter, value in (("b", self.micro_batch), ("p", self.page), ("g", self.device), ("part", self.part)):
            if value is not None:
                text += f"/{letter}{value}"
        return text


class Operator(NamedTuple):
    """One operator of a task, with a roofline of its own."""

    name: str
    work: Work


class Hold(NamedTuple):
    """Memory a task takes or gives back: level, the plan's term, bytes."""

    level: str
    term: str
    bytes: float


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Attributes
    ----------
    id : TaskId
    lane : Lane
    after : tuple of TaskId
        Tasks that must be done first, all issued earlier.
    operators : tuple of Operator
        Work of a computation, one roofline each.
    bytes_moved : float
        Of a copy [byte].
    launches : int
        Kernels launched.
    acquires, releases : tuple of Hold
        Memory taken when it starts, and given back when it ends.
    """

    id: TaskId
    lane: Lane
    after: tuple[TaskId, ...] = ()
    operators: tuple[Operator, ...] = ()
    bytes_moved: float = 0.0
    launches: int = 0
    acquires: tuple[Hold, ...] = ()
    releases: tuple[Hold, ...] = ()


class TaskGraph:
    """Tasks in issue order, checked when it is made.

    Parameters
    ----------
    tasks : iterable of Task
        In issue order.

    Attributes
    ----------
    tasks : tuple of Task
    lanes : tuple of Lane
        In order of first use.
    before : tuple of tuple of int
        For each task, the indices of its dependencies.

    Raises
    ------
    InputError
        Two tasks have one id, or a dependency is not issued earlier; the message names them.
    """

    __slots__ = ("before", "lanes", "tasks")

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks: tuple[Task, ...] = tuple(tasks)
        index: dict[TaskId, int] = {}
        lanes: dict[Lane, None] = {}
        before: list[tuple[int, ...]] = []
        for position, task in enumerate(self.tasks):
            try:
                before.append(tuple([index[other] for other in task.after]))
            except KeyError as error:
                raise _not_earlier(self.tasks, task, error.args[0]) from None
            if task.id in index:
                raise InputError(
                    f"two tasks are called {task.id} (numbers {index[task.id]} and {position})",
                    where="task graph",
                    way_out="ids must be unique: tell them apart by page, device or part",
                )
            index[task.id] = position
            lanes[task.lane] = None
        self.before: tuple[tuple[int, ...], ...] = tuple(before)
        self.lanes: tuple[Lane, ...] = tuple(lanes)

    def __len__(self) -> int:
        return len(self.tasks)

    def of_lane(self, lane: Lane) -> tuple[int, ...]:
        """Indices of the tasks of a lane, in issue order."""
        return tuple(i for i, task in enumerate(self.tasks) if task.lane == lane)

    def __repr__(self) -> str:
        return f"<TaskGraph: {len(self.tasks):,} tasks on {len(self.lanes)} lanes>"

    def to_frame(self) -> pd.DataFrame:
        """A row per task, in issue order: where it runs, what it waits for, bytes moved [byte]."""
        import pandas as pd

        rows = [
            {
                "task": str(task.id),
                "op": str(task.id.op),
                "lane": str(task.lane.kind),
                "layer": task.id.layer,
                "micro_batch": task.id.micro_batch,
                "after": ", ".join(str(other) for other in task.after),
                "bytes_moved": task.bytes_moved,
            }
            for task in self.tasks
        ]
        return pd.DataFrame(rows)


def _not_earlier(tasks: Sequence[Task], task: Task, missing: TaskId) -> InputError:
    later = any(other.id == missing for other in tasks)
    fact = f"{task.id} waits for {missing}, which is " + ("issued later" if later else "not in the graph")
    return InputError(fact, where="task graph", way_out="a dependency must be issued before the task that waits for it")


def finish_times(graph: TaskGraph, seconds: Callable[[Task], float]) -> list[float]:
    """End of every task without contention [s]: the closed form of the rule, in one pass.

    ``end = max(end of dependencies, end of the previous task on the lane) + seconds``.
    """
    ends: list[float] = []
    free: dict[Lane, float] = dict.fromkeys(graph.lanes, 0.0)
    for task, before in zip(graph.tasks, graph.before, strict=True):
        start = free[task.lane]
        for other in before:
            if ends[other] > start:
                start = ends[other]
        end = start + seconds(task)
        ends.append(end)
        free[task.lane] = end
    return ends
