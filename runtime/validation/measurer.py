"""Runs one batch of a candidate at a time; keeps models loaded under as many policies as memory holds.

The first run after loading warms everything up and is the one whose memory is watched: that is what its policy takes,
from the first weight to the last token. Later runs are timed only. What torch takes once in a process counts with the
plan, which runs first.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hrm import cost
from hrm.full_cost import STAGING_BUFFER_BYTES
from hrm.graph import TaskId
from hrm.layout import Layout
from hrm.scenario import Scenario
from hrm.schedules import Steps, schedule_graph
from hrm.validation.candidates import Candidate, as_run
from hrm.validation.memory import planned_bytes
from hrm.validation.records import piece_document
from runtime.device import Device
from runtime.experts import Routing
from runtime.memory_watch import MemoryWatch
from runtime.numerics import Numerics
from runtime.prompts import random_prompts
from runtime.session import TASKS_AT_ONCE, BatchRun, Session, open_session
from runtime.weight_source import WeightSource

__all__ = ["RuntimeMeasurer"]


@dataclass(slots=True)
class _Loaded:
    session: Session
    scenario: Scenario
    prompts: list[tuple[int, ...]]
    window: Steps | None
    bytes: float


@dataclass(slots=True)
class RuntimeMeasurer:
    """Measures candidates of one scenario.

    Attributes
    ----------
    scenario : Scenario
        Of the plan, with the layers that are run.
    source : WeightSource
    numerics : Numerics
    device : Device
        Of plans that use the GPU; those all on the CPU run on `cpu_device`.
    room : float
        Memory that models may stay loaded in [byte].
    """

    scenario: Scenario
    source: WeightSource
    numerics: Numerics
    device: Device
    cpu_device: Device
    room: float
    disk_dir: Path | None = None
    seed: int = 0
    tell: Callable[[str], None] = lambda _: None
    loaded: OrderedDict[tuple[Any, ...], _Loaded] = field(default_factory=OrderedDict)

    def measure(self, candidate: Candidate) -> list[dict[str, Any]]:
        """Run one batch, after one that warms up where the model has to be loaded."""
        key = (candidate.policy, candidate.schedule)
        if key in self.loaded:
            self.loaded.move_to_end(key)
            return [self._run(self.loaded[key], warm_up=False)]
        wanted = self._planned(candidate)
        while self.loaded and sum(each.bytes for each in self.loaded.values()) + wanted > self.room:
            self.loaded.popitem(last=False)
        device = self._device_of(candidate)
        _give_back()
        _keep_freed(False)
        watch = MemoryWatch(device)
        began = time.perf_counter()
        try:
            found = self._load(candidate, device, wanted)
            load_s, loading = time.perf_counter() - began, watch.take()
            first = self._run(found, warm_up=True)
            running = watch.take()
        finally:
            watch.close()
            _keep_freed(True)
        self.loaded[key] = found
        first |= {
            "load_s": load_s,
            "memory": {
                "loading_bytes": loading,
                "running_bytes": running,
                "terms": _terms_made(found.session),
                "disk_bytes": found.session.disk.size if found.session.disk is not None else 0,
            },
        }
        return [first, self._run(found, warm_up=False)]

    def _device_of(self, candidate: Candidate) -> Device:
        return self.cpu_device if candidate.policy.everything_on_cpu else self.device

    def _planned(self, candidate: Candidate) -> float:
        scenario = as_run(self.scenario, candidate.policy.batch_size)
        emulated = self._device_of(candidate).emulated
        planned = planned_bytes(scenario, candidate.policy, emulated=emulated)
        if emulated:  # staging buffers are made only as large as their pieces are, or not at all
            planned["cpu"] -= STAGING_BUFFER_BYTES
        return planned["cpu"] + (0.0 if self.device.cuda else planned["gpu"])

    def _load(self, candidate: Candidate, device: Device, planned: float) -> _Loaded:
        scenario = as_run(self.scenario, candidate.policy.batch_size)
        session = open_session(
            scenario,
            candidate.policy,
            candidate.schedule,
            self.source,
            self.numerics,
            device,
            disk_dir=self.disk_dir,
        )
        count = candidate.policy.batch_size
        prompts = random_prompts(scenario.workload, count, scenario.model.vocab_size, seed=self.seed)
        whole = Steps(prefill=True, last=scenario.workload.generation_length - 1)
        return _Loaded(
            session,
            scenario,
            [prompt.tokens for prompt in prompts],
            whole if _few_tasks(session, scenario, whole) else None,
            planned,
        )

    def _run(self, loaded: _Loaded, *, warm_up: bool) -> dict[str, Any]:
        routing: dict[str, list[float]] = {}

        def record(task: TaskId, chosen: Routing) -> None:
            seen = routing.setdefault(task.phase, [0.0, 0.0, 0.0])
            starts = [int(start) for start in chosen.starts]
            model = loaded.scenario.model
            seen[0] += sum(after > before for before, after in pairwise(starts))
            seen[1] += float(cost.experts_touched(model, starts[-1] / model.top_k))
            seen[2] += 1.0

        began = time.perf_counter()
        runs = loaded.session.generate(
            loaded.prompts,
            on_experts=record if warm_up and loaded.scenario.model.is_moe else None,  # it takes time of its lane
            window=loaded.window,
        )
        took = time.perf_counter() - began
        return {
            "warm_up": warm_up,
            "wall_s": took,
            "laid_out_s": sum(run.laid_out_s for run in runs),
            "batches": len(runs),
            "pieces": [piece_document(each.steps, each.trace.spans, each.trace.kind) for each in runs[0].pieces],
            "tokens_sha256": _hash(runs),
            "routing": {
                phase: {"touched": seen[0] / seen[2], "uniform": seen[1] / seen[2]} for phase, seen in routing.items()
            },
        }


def _few_tasks(session: Session, scenario: Scenario, whole: Steps) -> bool:
    """Whether a whole run may be one graph, so that no lane drains between prefill and decode."""
    layout = Layout(scenario, session.policy)
    one = len(schedule_graph(layout, session.schedule, Steps(first=0, last=min(1, whole.last))))
    return len(schedule_graph(layout, session.schedule, Steps(prefill=True))) + one * whole.last <= TASKS_AT_ONCE


def _hash(runs: list[BatchRun]) -> str:
    tokens = {index: found for run in runs for index, found in run.tokens.items()}
    return hashlib.sha256(json.dumps([tokens[index] for index in sorted(tokens)]).encode()).hexdigest()


def _terms_made(session: Session) -> dict[str, dict[str, dict[str, float]]]:
    """By level and term: bytes planned, and bytes of buffers that were made."""
    return {
        level: {
            term: {"planned": float(size), "made": float(session.arenas[level].reserved.get(term, 0))}
            for term, size in session.arenas[level].planned.items()
        }
        for level in session.arenas.levels
    }


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""

LARGE_BYTES, LARGEST_BYTES = 2**18, 2**25
"""From where on memory is the system's again as soon as it is freed: while memory is watched, and in timed runs, where
the allocator comes to that by itself in a process that frees large blocks [byte]."""


def _c_function(name: str) -> Any:
    """A function of the C library; None where there is none."""
    library = ctypes.util.find_library("c")
    return None if library is None else getattr(ctypes.CDLL(library), name, None)


def _give_back() -> None:
    """Return what was freed to the system, so that what a run takes is seen as taken."""
    gc.collect()
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(0)


def _keep_freed(keep: bool) -> None:
    """Whether the allocator keeps freed blocks: in a process that ran other policies their gaps would count too."""
    option = _c_function("mallopt")
    if option is not None:
        size = LARGEST_BYTES if keep else LARGE_BYTES
        option(M_MMAP_THRESHOLD, size)
        option(M_TRIM_THRESHOLD, 2 * size)
