"""One decoder layer at its real shapes, in decode, under the plan's schedule: does the model's bound hold here?

The graph is a decode step of a model whose layers are all the same one, so that a layer's weights, a layer's KV cache
and the buffers are all it takes, and every layer after the first few runs in the steady state: the next one's weights
come in while it computes. Weights and KV cache are random; which experts are chosen is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from hrm.batching import assign_batch
from hrm.errors import InputError
from hrm.graph import TaskGraph, TaskId
from hrm.layout import Layout
from hrm.policy import Policy
from hrm.scenario import Scenario
from hrm.schedules import Steps
from hrm.trace import Trace
from runtime.device import Device
from runtime.experts import Routing
from runtime.numerics import Numerics
from runtime.placement import place_batch
from runtime.random_weights import RandomWeights
from runtime.requests import make_requests
from runtime.run_state import RunState
from runtime.session import open_session, torch_dtype

__all__ = ["LayerRun", "check_layer", "repeat_layer"]

LAYERS_AT_ONCE = 12
"""Layers of one graph: three to get into the steady state and out of it, the rest measured."""

WARM_UP = 2
"""Layers at the beginning of a graph that are not counted; nor is the last, for which nothing is fetched ahead."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """What was measured.

    Attributes
    ----------
    scenario : Scenario
        Of the model of equal layers.
    steps : Steps
        The decode step.
    graph : TaskGraph
    traces : tuple of Trace
        One per pass over the layers.
    touched : tuple of (int, int)
        Of every micro-batch and layer: tokens, and experts that at least one of them chose.
    """

    scenario: Scenario
    steps: Steps
    graph: TaskGraph
    traces: tuple[Trace, ...]
    touched: tuple[tuple[int, int], ...]

    @property
    def counted(self) -> range:
        """Layers in the steady state."""
        return range(WARM_UP, self.scenario.model.n_layers - 1)


def repeat_layer(scenario: Scenario, layers: int) -> Scenario:
    """The scenario with a model of so many equal layers: its first one with routed experts, or the first."""
    model = scenario.model
    which = model.moe_layers.index(True) if model.is_moe else 0
    repeated = replace(
        model,
        n_layers=layers,
        moe_layers=(model.moe_layers[which],) * layers,
        layer_windows=(model.layer_windows[which],) * layers,
    )
    return replace(scenario, model=repeated)


def check_layer(
    scenario: Scenario,
    policy: Policy,
    schedule: str,
    numerics: Numerics,
    device: Device,
    *,
    repeats: int = 20,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> LayerRun:
    """Run one layer so many times.

    Parameters
    ----------
    repeats : int
        Layers to measure, at least; a first pass that warms everything up is not counted.

    Raises
    ------
    InputError
        Nothing to measure, or the machine has not the memory for one layer under the plan.
    """
    if repeats < 1:
        raise InputError(f"{repeats} repeats", where="--repeats", way_out="1 or more")
    if scenario.workload.generation_length < 2:
        raise InputError(
            "the plan generates one token, so it has no decode step",
            where="plan",
            way_out="hrm plan --gen-len 2, or more",
        )
    tell = on_progress or (lambda text: None)
    layers = min(LAYERS_AT_ONCE, repeats + WARM_UP + 1)
    virtual = repeat_layer(scenario, layers)
    dtype = torch_dtype(scenario.formats.compute)
    source = RandomWeights(virtual.model, numerics, dtype=dtype, seed=seed, one_layer=True)
    tell("making one layer of random weights")
    session = open_session(virtual, policy, schedule, source, numerics, device, one_layer=True)
    layout = Layout(virtual, policy)
    lengths = virtual.workload.padded_prompt_lengths
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(virtual.model.vocab_size, (lengths[i % len(lengths)],), generator=generator).tolist()
        for i in range(policy.batch_size)
    ]
    batch, deferred, _ = assign_batch(
        make_requests(prompts, virtual),
        num_micro_batches=policy.num_micro_batches,
        micro_batch_size=policy.micro_batch_size,
        token_budget=policy.micro_batch_token_budget or sum(map(len, prompts)) * 2 + policy.batch_size * 4096,
    )
    if len(batch.micro_batches) != policy.num_micro_batches or deferred:
        raise InputError("its requests do not fill its micro-batches", where="plan", way_out="hrm plan makes a new one")
    state = session.prepare(layout, place_batch(batch.micro_batches, policy), prompts)
    tell("filling the KV cache")
    _fill(state, generator)
    steps = layout.sizes.decode_steps // 2
    window = Steps(first=steps, last=steps + 1)
    touched: list[tuple[int, int]] = []

    def record(name: TaskId, routing: Routing) -> None:
        starts = [int(start) for start in routing.starts]
        counts = [high - low for low, high in pairwise(starts)]
        touched.append((sum(counts) // virtual.model.streamed_top_k, sum(count > 0 for count in counts)))

    traces = []
    graph = TaskGraph(())
    passes = 1 + -(-repeats // (layers - WARM_UP - 1))
    for number in range(passes):
        tell(f"pass {number} of {passes - 1}" if number else "warming up")
        state.on_experts = record if number else None
        piece = session.run_steps(state, window)
        graph = piece.graph
        if number:
            traces.append(piece.trace)
    state.cache.close(session.arenas)
    return LayerRun(virtual, window, graph, tuple(traces), tuple(touched))


def _fill(state: RunState, generator: torch.Generator) -> None:
    """Random KV cache and hidden states, by repeating one random block, so that every page is really there."""
    for tier in ("gpu", "cpu"):
        pool = state.cache.pools[tier]
        if pool.memory is not None:
            _repeat(pool.memory[0].view(-1), generator)
    disk, last = state.cache.pools["disk"], state.cache
    if disk.tokens:
        token = torch.randn(1, last.heads, last.width, generator=generator).to(last.dtype)
        for row in disk.rows:
            every = token.expand(disk.capacity[row], -1, -1)
            last.write_disk(0, row, 0, every, every)
        assert last.disk is not None
        last.disk.flush()
    tokens = torch.randint(state.layout.scenario.model.vocab_size, state.generated.shape, generator=generator)
    state.generated.copy_(tokens)
    if state.device.cuda:
        torch.cuda.synchronize()


def _repeat(flat: torch.Tensor, generator: torch.Generator) -> None:
    block = torch.randn(min(flat.numel(), 2**20), generator=generator).to(flat.device, flat.dtype)
    for start in range(0, flat.numel(), block.numel()):
        part = flat[start : start + block.numel()]
        part.copy_(block[: part.numel()])
