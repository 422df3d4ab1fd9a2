"""A session: a model loaded under a plan on this machine, ready to run batches.

Data flows one way: plan -> layout -> task graph -> kernels on lanes -> tokens and trace. The graph is that of
`hrm.schedules`, the same the simulator replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hrm.graph import Lane, LaneKind, Op, Task, TaskGraph, TaskId
from hrm.layout import Layout
from hrm.memory import PIPELINE_DEPTH
from hrm.policy import Policy
from hrm.scenario import Scenario, truncated
from hrm.schedules import SCHEDULES, Steps, check_schedule, held_before, schedule_graph
from hrm.trace import Trace
from runtime.arena import Arenas
from runtime.arena_terms import make_arenas
from runtime.batches import SizedBatch, cut_batches
from runtime.bindings import RING_PIECES, as_load, bind_buffers
from runtime.cuda_attention import kernel_works
from runtime.device import Device
from runtime.disk_file import BLOCK, DiskFile
from runtime.executor import Pace, execute
from runtime.experts import Routing
from runtime.host_allocator import bound_kernel_caches, give_back_free_memory
from runtime.kernels import kernel_of
from runtime.kv_cache import KvCache, make_kv_cache
from runtime.layers import Heads, Rotary
from runtime.native_library import open_library
from runtime.numerics import Numerics
from runtime.placement import Placement, place_batch
from runtime.requests import make_requests
from runtime.run_state import RunState, Score, greedy
from runtime.weight_source import WeightSource
from runtime.weights import WeightStore, load_weights

__all__ = ["BatchRun", "Piece", "Session", "open_session", "torch_dtype", "truncated"]

TASKS_AT_ONCE = 60_000
"""Tasks of one graph at most, unless one decode step has more: lanes drain where the next graph begins."""

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a format of a plan."""
    return DTYPES[name]


@dataclass(frozen=True, slots=True)
class Piece:
    """One graph and how it ran."""

    steps: Steps
    graph: TaskGraph
    trace: Trace
    laid_out_s: float = 0.0


@dataclass(slots=True)
class BatchRun:
    """What became of a batch.

    Attributes
    ----------
    tokens : dict of int to list of int
        Generated tokens by request index.
    pieces : list of Piece
        Graphs in the order they ran, each with its trace.
    prefill_s, decode_s : float
        [s]
    laid_out_s : float
        Of them, making graphs and choosing buffers, while every lane is idle [s].
    """

    policy: Policy
    tokens: dict[int, list[int]]
    pieces: list[Piece]
    prefill_s: float
    decode_s: float
    laid_out_s: float = 0.0


@dataclass(slots=True)
class Session:
    """A loaded model under a policy and schedule."""

    scenario: Scenario
    policy: Policy
    schedule: str
    numerics: Numerics
    device: Device
    store: WeightStore
    arenas: Arenas
    disk: DiskFile | None
    dtype: torch.dtype
    streams: dict[Lane, Any]
    pace: Pace | None = None
    one_layer: bool = False
    score: Score = greedy
    kv_region: int | None = None
    ring_bytes: int = 0
    buffers: dict[str, list[Tensor]] = field(default_factory=dict)
    rotary: Rotary | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        keep_logits: Callable[[int, int, Tensor], None] | None = None,
        on_experts: Callable[[TaskId, Routing], None] | None = None,
        on_progress: Callable[[str, float], None] | None = None,
        window: Steps | None = None,
        on_piece: Callable[[Piece], bool] | None = None,
    ) -> list[BatchRun]:
        """Generate for all prompts, batch by batch.

        Parameters
        ----------
        prompts : sequence of sequence of int
            Token ids.
        keep_logits : callable, optional
            Told (request index, n-th generated token, logits [V]).
        window : Steps, optional
            Of the first batch, these run as one graph, however many tasks it has: for a trace of them.
        on_piece : callable, optional
            Told every graph that has run, and whether to keep it; all are kept if not given. A long run has many.

        Raises
        ------
        InputError
            A prompt the plan or the model has no room for.
        """
        requests = make_requests(prompts, self.scenario)
        runs = []
        for batch in cut_batches(requests, self.policy, self.scenario):
            run = self._batch(batch, prompts, keep_logits, on_experts, on_progress, window, on_piece)
            runs.append(run)
            window = None
        return runs

    def _batch(
        self,
        batch: SizedBatch,
        prompts: Sequence[Sequence[int]],
        keep_logits: Callable[[int, int, Tensor], None] | None,
        on_experts: Callable[[TaskId, Routing], None] | None,
        on_progress: Callable[[str, float], None] | None,
        window: Steps | None,
        on_piece: Callable[[Piece], bool] | None,
    ) -> BatchRun:
        layout = Layout(self.scenario, batch.policy)
        placement = place_batch(batch.micro_batches, batch.policy)
        state = self.prepare(layout, placement, prompts)
        if keep_logits is not None:
            kept = keep_logits

            def keep(row: int, column: int, logits: Tensor) -> None:
                kept(placement.requests[row].index, column, logits)

            state.keep_logits = keep
        state.on_experts = on_experts
        pieces: list[Piece] = []
        seconds, laid_out = {"prefill": 0.0, "decode": 0.0}, 0.0
        try:
            for steps in self._cut_steps(layout, window):
                began = time.perf_counter()
                piece = self.run_steps(state, steps)
                laid_out += piece.laid_out_s
                took = time.perf_counter() - began
                phase = "prefill" if steps.prefill and steps.last == 0 else "decode"
                if steps.prefill and steps.last > 0:  # both in one graph: decode begins where prefill ends
                    ahead = max(span.end_s for span in piece.trace.spans if span.task.phase == "prefill")
                    seconds["prefill"] += took - piece.trace.makespan_s + ahead
                    took = piece.trace.makespan_s - ahead
                seconds[phase] += took
                if on_piece is None or on_piece(piece):
                    pieces.append(piece)
                if on_progress is not None:
                    on_progress(phase, steps.last / max(1, self.scenario.workload.generation_length - 1))
            generated = state.generated.cpu()
        finally:
            state.cache.close(self.arenas)
        tokens = {request.index: generated[row].tolist() for row, request in enumerate(placement.requests)}
        return BatchRun(batch.policy, tokens, pieces, seconds["prefill"], seconds["decode"], laid_out)

    def _cut_steps(self, layout: Layout, window: Steps | None = None) -> list[Steps]:
        """Prefill, then decode in graphs of a bounded number of tasks; a window is one graph whatever it has."""
        steps = self.scenario.workload.generation_length - 1
        found = [] if window is not None and window.prefill else [Steps(prefill=True)]
        ranges = [(0, steps)] if window is None else [(0, window.first), (window.last, steps)]
        if window is not None:
            found.append(window)
        if any(last > first for first, last in ranges):
            one = len(schedule_graph(layout, self.schedule, Steps(first=0, last=1)))
            at_once = max(1, TASKS_AT_ONCE // one)
            for begin, end in ranges:
                found += [Steps(first=first, last=min(end, first + at_once)) for first in range(begin, end, at_once)]
        return sorted(found, key=lambda each: (not each.prefill, each.first))

    def prepare(self, layout: Layout, placement: Placement, prompts: Sequence[Sequence[int]]) -> RunState:
        """Everything a batch needs before its first task."""
        give_back_free_memory()  # of loading, or of the batch before
        model, policy = self.scenario.model, layout.policy
        there = self.device.torch_device
        cache = make_kv_cache(
            placement,
            layers=layout.num_layers,
            heads=model.n_kv_heads,
            width=model.head_dim,
            dtype=torch_dtype(self.scenario.formats.kv),
            slots=policy.attention_on_gpu and policy.kv_on_gpu < 1.0,
            device=self.device,
            arenas=self.arenas,
            disk=self.disk,
            disk_offset=self.kv_region,
            copied=not policy.everything_on_cpu,
            one_layer=self.one_layer,
        )
        if cache.pools["disk"].tokens and self.kv_region is None:
            self.kv_region = cache.pools["disk"].offset
        waits = len(placement.prefill) > 1 and not policy.everything_on_cpu and policy.weight_slots != "experts"
        try:
            self._reserve_rows(cache, waiting=waits)
            self._make_buffers()
        except BaseException:
            cache.close(self.arenas)
            raise
        length = self.scenario.workload.generation_length
        if self.rotary is None or self.rotary.positions < max(request.tokens for request in placement.requests):
            longest = max(request.tokens for request in placement.requests)
            positions = max(longest, self.scenario.workload.max_prompt_tokens + length)
            self.rotary = Rotary(self.numerics, positions, self.dtype, there)
        state = RunState(
            layout=layout,
            numerics=self.numerics,
            heads=Heads(model.n_heads, model.n_kv_heads, model.head_dim),
            device=self.device,
            store=self.store,
            cache=cache,
            placement=placement,
            bindings=bind_buffers(layout, TaskGraph(()), experts_on_gpu=True),
            rotary=self.rotary,
            prompts=[torch.tensor(list(prompts[request.index])) for request in placement.requests],
            generated=torch.zeros((placement.size, length), dtype=torch.int64, device=there),
            hidden=torch.zeros((placement.size, model.hidden_size), dtype=self.dtype, device=there),
            score=self.score,
            experts_on_gpu=policy.ffn_on_gpu
            or (SCHEDULES[self.schedule].static_experts and not policy.everything_on_cpu and layout.copies_experts),
            dtype=self.dtype,
            pinned_qkv=self.buffers.get("qkv", []),
            pinned_results=self.buffers.get("results", []),
            pinned_expert_in=self.buffers.get("expert_in", []),
            pinned_expert_out=self.buffers.get("expert_out", []),
            compute_stream=next((s for lane, s in self.streams.items() if lane.kind is LaneKind.GPU), None),
        )
        if waits:
            self._make_waiting(state)
        if self.device.cuda:  # made here, whole, as several lanes read them
            for j in range(len(placement.decode)):
                for tier in ("gpu", "cpu", "disk"):
                    state.index(j, tier)
            for kind in (self.dtype, cache.dtype):  # checked before the first task is timed
                kernel_works(state.hidden.device, kind, model.head_dim)
        return state

    def _reserve_rows(self, cache: KvCache, *, waiting: bool) -> None:
        """Hidden states of all requests on the GPU, and of all prompts where they wait in CPU memory."""
        row, requests = self.scenario.model.hidden_size * self.dtype.itemsize, cache.placement.requests
        if not self.policy.everything_on_cpu:
            cache.reserve("gpu", "hidden states of the batch", len(requests) * row)
        if waiting:
            prompts = sum(request.prompt_tokens for request in requests)
            cache.reserve("cpu", "hidden states of all prompts", prompts * row)

    def _make_waiting(self, state: RunState) -> None:
        """Room in CPU memory for the hidden states of all prompts between two layers."""
        width = self.scenario.model.hidden_size
        tokens = [sum(state.lengths(("prefill", j))) for j in range(len(state.placement.prefill))]
        every = self.device.pinned_bytes(sum(tokens) * width * self.dtype.itemsize).view(self.dtype).view(-1, width)
        start = 0
        for j, count in enumerate(tokens):
            state.waiting[j] = every[start : start + count]
            start += count

    def _make_buffers(self) -> None:
        """Page-locked buffers, made once for all batches."""
        if self.buffers or self.policy.everything_on_cpu:
            return
        model, most = self.scenario.model, self.policy.micro_batch_size
        width = model.head_dim

        qkv, result, row = (model.n_heads + 2 * model.n_kv_heads) * width, model.n_heads * width, model.hidden_size
        wanted: dict[str, dict[str, tuple[int, tuple[int, ...]]]] = {}  # by term: values and shape of each buffer
        if not self.policy.attention_on_gpu:
            shapes = {"qkv": (most * qkv, (-1,)), "results": (most * result, (most, -1))}
            wanted["QKV and hidden-state buffers"] = shapes
        if not self.policy.ffn_on_gpu:
            wanted["expert input and output buffers"] = dict.fromkeys(
                ("expert_in", "expert_out"), (most * row, (most, row))
            )
        for term, buffers in wanted.items():
            if term not in self.arenas["cpu"].reserved:
                values = sum(count for count, _ in buffers.values())
                self.arenas["cpu"].reserve(term, PIPELINE_DEPTH * values * self.dtype.itemsize)
        for buffers in wanted.values():
            for name, (count, shape) in buffers.items():
                self.buffers[name] = [
                    self.device.pinned_bytes(count * self.dtype.itemsize).view(self.dtype).view(shape)
                    for _ in range(PIPELINE_DEPTH)
                ]

    def run_steps(self, state: RunState, steps: Steps) -> Piece:
        """Run a range of steps of a batch."""
        began = time.perf_counter()
        graph = schedule_graph(state.layout, self.schedule, steps)
        state.bindings = bind_buffers(state.layout, graph, experts_on_gpu=state.experts_on_gpu)
        self._make_ring(state, graph)
        held = held_before(state.layout, steps)
        self.arenas.held = {level: held.get(level, 0.0) for level in self.arenas.levels}

        for task in graph.tasks:
            kernel_of(task)  # refused, if any is, before the first runs

        def run(task: Task) -> Callable[[], None] | None:
            return kernel_of(task)(state, task)

        laid_out = time.perf_counter() - began
        trace = execute(
            graph, run, self.device, arenas=self.arenas, held_before=held, pace=self.pace, streams=self.streams
        )
        return Piece(steps, graph, trace, laid_out)

    def _make_ring(self, state: RunState, graph: TaskGraph) -> None:
        """Pinned pieces between CPU memory or disk and the link, as large as the largest that passes them."""
        through: dict[TaskId, float] = {}  # of each piece what passes the ring
        for task in graph.tasks:
            load = as_load(task.id)
            if task.id.op in (Op.STAGE_WEIGHTS, Op.READ_DISK) and load in state.bindings.pieces:
                through[load] = through.get(load, 0.0) + task.bytes_moved
        if not through:
            return
        largest = int(max(through.values()))
        wanted = largest + 4 * BLOCK + 4 * self.store.row_bytes  # pieces end at whole rows and blocks
        if not self.store.ring or self.store.ring[0].numel() < wanted:
            arena, term = self.arenas["cpu"], "weight staging buffers"
            arena.release(term, self.ring_bytes)
            self.ring_bytes = 0
            arena.reserve(term, RING_PIECES * largest)
            self.ring_bytes = RING_PIECES * largest
            self.store.ring = [self.device.pinned_bytes(wanted) for _ in range(RING_PIECES)]


def open_session(
    scenario: Scenario,
    policy: Policy,
    schedule: str,
    source: WeightSource,
    numerics: Numerics,
    device: Device,
    *,
    disk_dir: Path | None = None,
    one_layer: bool = False,
    pace: Pace | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Session:
    """Load a model as a plan places it.

    Raises
    ------
    InputError
        The schedule does not run the policy, or a level lacks the room the plan has.
    """
    check_schedule(schedule, policy)
    bound_kernel_caches()
    if not device.cuda or not policy.attention_on_gpu or not policy.ffn_on_gpu:
        open_library()  # compiled now, at the first use on a machine, not while a task is timed
    layout = Layout(scenario, policy)
    arenas = make_arenas(scenario, policy, layout)
    dtype = torch_dtype(scenario.formats.compute)
    disk = DiskFile(disk_dir) if policy.weights_on_disk > 0 or policy.kv_on_disk > 0 else None
    streams: dict[Lane, Any] = {}
    if device.cuda:
        gpu = scenario.profile.gpu
        device.limit_gpu_memory(gpu.usable_memory_bytes - gpu.context_bytes)
        for kind in (LaneKind.GPU, LaneKind.H2D, LaneKind.D2H):
            streams[Lane(kind, 0)] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    store = load_weights(
        layout,
        source,
        dtype=dtype,
        device=device,
        arenas=arenas,
        disk=disk,
        one_layer=one_layer,
        on_progress=on_progress,
    )
    if disk is not None:
        disk.flush()
    if device.cuda:  # what loading left over belongs to a stream that computes nothing
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return Session(scenario, policy, schedule, numerics, device, store, arenas, disk, dtype, streams, pace, one_layer)
