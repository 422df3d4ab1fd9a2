"""Peak bytes per memory level and phase, as named terms: what a plan says it needs is what it needs.

Every term is `Affine` in the unknowns of the search. GPU bytes are those of all GPUs of a tensor-parallel group
together: matrices and KV heads are split over it; activations of full width, the latent cache of multi-head latent
attention and the CUDA context are on each.
Pinned buffers have fixed sizes, rounded up as the allocator does; weights are pinned in place, page by page.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from hrm import cost
from hrm.affine import Affine, Number
from hrm.dtypes import is_quantised
from hrm.full_cost import (
    DENSE,
    EMBEDDING,
    EXPERTS_ON_DISK,
    EXPERTS_ON_GPU,
    HEAD,
    KV_ON_DISK,
    KV_ON_GPU,
    RING_SLOTS,
    STAGING_BUFFER_BYTES,
    Batch,
)
from hrm.profile import HardwareProfile
from hrm.scenario import Scenario, Sizes, kv_capacity_bytes, kv_replicas, worst_prompt_tokens
from hrm.units import GIB, MIB

__all__ = [
    "ActivationPieces",
    "Terms",
    "activation_pieces",
    "activations_per_token",
    "cpu_terms",
    "dequantisation_bytes",
    "describe_limit",
    "disk_terms",
    "gpu_terms",
    "kv_slot_bytes",
    "limit_bytes",
    "pinned_terms",
    "rounding_bytes",
]

Terms: TypeAlias = dict[str, Affine]

EXPERT_SLOTS = "expert_slots"  # bytes of GPU buffers for streamed experts
DENSE_SLOTS = "dense_slots"  # bytes of GPU buffers for streamed non-expert weights

GPU_RESERVE_SHARE = 0.03
"""Of usable GPU memory, kept free for fragmentation and what libraries allocate (estimated, no public source)."""

HEAD_BUFFER_BYTES = 256 * MIB
"""A streamed lm_head comes in two pieces of at most this size."""

PIPELINE_DEPTH = 3
"""Micro-batches whose QKV or attention results are in flight: two looked ahead, one in use (Algorithm 1)."""


KV_LANDINGS = 2
"""Micro-batches whose KV cache of one layer is in CPU memory on its way from or to the disk: in use, and the next."""


def limit_bytes(profile: HardwareProfile) -> dict[str, float]:
    """Plannable bytes per level [byte]: usable GPU memory of all GPUs, CPU memory less the reserve, disk size."""
    return {
        "gpu": profile.gpu.count * profile.gpu.usable_memory_bytes,
        "cpu": profile.cpu.memory_bytes - profile.cpu.reserved_bytes,
        "disk": profile.disk.size_bytes if profile.disk else 0.0,
    }


def _power_of_two(size: Number) -> Number:
    """Size rounded up to a power of two, as page-locked allocators do [byte]."""
    return np.exp2(np.ceil(np.log2(np.maximum(size, 1.0))))


def activations_per_token(scenario: Scenario, *, ring: bool) -> float:
    """Bytes alive per token at the widest point of one layer, on all GPUs of the group [byte].

    With a ring the experts run one after the other, on their share of the tokens (twice the mean, for skewed routing),
    and add to a float32 sum; otherwise all experts of a layer run in one grouped product.
    """
    model, gpus = scenario.model, scenario.profile.gpu.count
    value = scenario.formats.activation_bytes
    hidden = 2.0 * model.hidden_size * gpus  # the residual stream and its normalised copy are on every GPU
    attention = cost.qkv_values(model) + cost.attention_result_values(model)
    expert = _expert_visit_values(scenario)
    shared = model.mlp_matrices * model.shared_ffn
    if ring:
        experts = _ring_visits(scenario) * expert + 4.0 / value * model.hidden_size * gpus
    else:
        experts = model.streamed_top_k * expert
    widths = [attention, experts + shared]
    if model.n_dense_layers and model.is_moe:
        widths.append(model.mlp_matrices * model.dense_ffn)
    return (hidden + max(widths)) * value


def _expert_visit_values(scenario: Scenario) -> float:
    """Values alive while a token visits one expert: its rows in and out, whole on every GPU, and those between."""
    model, gpus = scenario.model, scenario.profile.gpu.count
    return 2.0 * model.hidden_size * gpus + model.mlp_matrices * model.streamed_ffn


def _ring_visits(scenario: Scenario) -> float:
    """Share of the tokens that one expert of a ring serves at most: twice the mean, for skewed routing."""
    return min(2.0 * scenario.model.streamed_top_k / scenario.model.streamed_experts, 1.0)


def dequantisation_bytes(scenario: Scenario) -> float:
    """Room for the largest quantised matrix expanded to the activation precision, one at a time [byte]."""
    model, formats = scenario.model, scenario.formats
    others = model.qkv_matrices + model.output_matrices + model.shared_matrices
    if model.is_moe and model.n_dense_layers:
        others += model.dense_matrices
    experts = model.streamed_expert_matrices
    found = [(experts, model.expert_matrix_dtype(formats.weights)), (others, formats.linear(model))]
    values = [
        rows * columns
        for matrices, dtype in found
        if is_quantised(dtype) and dtype != formats.compute
        for rows, columns in matrices
    ]
    return max(values, default=0) * formats.activation_bytes


class ActivationPieces(NamedTuple):
    """What one micro-batch holds on the GPU(s) while it passes a layer [byte].

    `compute`: the widest point of the layer; `row`: hidden states in or out; `new_kv`: KV cache of its prompts for one
    layer; `logits`: with a copy for sampling; `qkv`, `result`: on their way to and from attention on the CPU.
    """

    compute: Number
    row: Number
    new_kv: Number
    logits: Number
    qkv: Number
    result: Number


def activation_pieces(
    scenario: Scenario, sizes: Sizes, *, phase: str, requests: Number, tokens: Number, ring: bool
) -> ActivationPieces:
    """Pieces of the activations of one micro-batch; parameters as in `gpu_terms`."""
    model, value, gpus = scenario.model, scenario.formats.activation_bytes, scenario.profile.gpu.count
    passing = tokens if phase == "prefill" else requests
    return ActivationPieces(
        compute=passing * activations_per_token(scenario, ring=ring),
        row=passing * (model.hidden_size * value * gpus),
        new_kv=passing * (sizes.kv_new_bytes_per_token / model.n_layers),
        logits=requests * (8.0 * model.vocab_size),  # float32, plus a copy for sampling
        qkv=requests * (cost.qkv_values(model) * value),
        result=requests * (cost.attention_result_values(model) * value),
    )


def gpu_terms(
    scenario: Scenario,
    sizes: Sizes,
    batch: Batch,
    *,
    phase: str,
    requests: Number,
    tokens: Number,
    ring: bool,
    prefill_micro_batches: Number = 2.0,
) -> Terms:
    """GPU bytes of one phase [byte].

    Parameters
    ----------
    batch : Batch
        N, n_ub, A_g, F_g.
    phase : {"prefill", "decode"}
    requests, tokens : float or ndarray
        What one micro-batch of this phase holds at most: requests; tokens (prefill: prompt tokens, decode: prompt and
        generated tokens, whose KV cache two slots hold where attention needs it on the GPU).
    ring : bool
        Weights come through a ring of experts, so experts run one after the other.
    prefill_micro_batches : float or ndarray
        With more than one, hidden states go out to CPU memory after each layer and come in again before the next.
    """
    model, profile, value = scenario.model, scenario.profile, scenario.formats.activation_bytes
    n, gpus = batch.size, profile.gpu.count
    capacity = kv_capacity_bytes(scenario, sizes, n)
    terms: Terms = {
        "resident expert weights": Affine.of(EXPERTS_ON_GPU),
        "non-expert weights": Affine.of(DENSE, sizes.dense_bytes),
        "embedding": Affine.of(EMBEDDING, sizes.embedding_bytes),
        "lm_head": Affine.of(HEAD, 0.0 if sizes.tied else sizes.lm_head_bytes),
        "non-expert weight slots": Affine.of(DENSE_SLOTS),
        "KV cache": Affine.of(KV_ON_GPU, kv_replicas(scenario)),
        "dequantisation scratch": Affine(dequantisation_bytes(scenario)),
        "CUDA context": Affine(gpus * profile.gpu.context_bytes),
        "reserve": Affine(gpus * profile.gpu.usable_memory_bytes * GPU_RESERVE_SHARE),
    }
    head_buffer = min(sizes.lm_head_bytes, 2.0 * HEAD_BUFFER_BYTES)
    terms["lm_head buffers"] = head_buffer - Affine.of(HEAD, head_buffer)
    # Also where decode computes experts on the CPU: the buffers of prefill are made once and stay.
    terms["expert weight slots"] = Affine.of(EXPERT_SLOTS)
    alive = activation_pieces(scenario, sizes, phase=phase, requests=requests, tokens=tokens, ring=ring)
    if phase == "prefill":
        # One micro-batch comes in and one goes out while one computes; the KV cache of two, less what stays on the GPU,
        # is on its way out. Where hidden states stay, at most the embedded prompts come in.
        several = np.asarray(prefill_micro_batches) > 1
        widest = np.maximum(alive.compute, alive.logits)
        embedded = np.where(several, 0.0, alive.row)
        rows = np.where(several, 2.0 * alive.row, embedded)
        new_kv = 2.0 * alive.new_kv
        terms["activations"] = (
            widest + rows + new_kv - Affine.of(KV_ON_GPU, new_kv / capacity) - Affine.of(EMBEDDING, embedded)
        )
        return terms
    compute = alive.compute
    if ring:  # one expert serves its tokens of the whole batch at once
        compute = np.maximum(compute, n * (_ring_visits(scenario) * _expert_visit_values(scenario) * value))
    flight = 0.0 if batch.attention_on_gpu else PIPELINE_DEPTH * (alive.qkv + alive.result)
    terms["activations"] = Affine(np.maximum(compute, alive.logits) + flight)
    # With a ring of experts the whole batch is between attention and experts at once: input and float32 sum per token.
    row = model.hidden_size * gpus
    terms["hidden states of the batch"] = n * (row * value) + Affine.of(RING_SLOTS, n * (row * (value + 4.0)))
    if batch.attention_on_gpu:
        # Two micro-batches' KV of one layer: one read while the next one arrives. As full as the budget allows.
        slots = 2.0 * kv_slot_bytes(scenario, requests, tokens)
        terms["KV slots"] = slots - Affine.of(KV_ON_GPU, slots / capacity)
    return terms


def kv_slot_bytes(scenario: Scenario, requests: Number, tokens: Number) -> Number:
    """KV cache of one micro-batch in one layer, that of the widest window, on all GPUs that hold it [byte]."""
    model = scenario.model
    windows = [kind.window for kind in model.layer_kinds]
    held = tokens
    if None not in windows:
        held = np.minimum(tokens, requests * float(max(window for window in windows if window is not None)))
    per_token = float(model.kv_bytes_per_token_per_layer(scenario.formats.kv))
    slot: Number = held * (per_token * kv_replicas(scenario))
    return slot


def pinned_terms(scenario: Scenario, batch: Batch, requests: Number) -> Terms:
    """Page-locked buffers of fixed size in CPU memory [byte], rounded up to powers of two as the allocator does.

    Parameters
    ----------
    requests : float or ndarray
        Requests of a micro-batch in decode.
    """
    model, value = scenario.model, scenario.formats.activation_bytes
    terms: Terms = {"weight staging buffers": Affine(STAGING_BUFFER_BYTES + 0.0 * requests)}
    if not batch.attention_on_gpu:
        rows = _power_of_two(requests * cost.qkv_values(model) * value) + _power_of_two(
            requests * cost.attention_result_values(model) * value
        )
        terms["QKV and hidden-state buffers"] = Affine(PIPELINE_DEPTH * rows)
    if not batch.ffn_on_gpu:
        rows = 2.0 * _power_of_two(requests * model.hidden_size * value)
        terms["expert input and output buffers"] = Affine(PIPELINE_DEPTH * rows)
    return terms


def cpu_terms(
    scenario: Scenario,
    sizes: Sizes,
    batch: Batch,
    *,
    requests: Number,
    prefill_micro_batches: Number,
    prefill_tokens: Number,
) -> Terms:
    """CPU bytes at the peak [byte]: the end of prefill, when hidden states and the whole KV cache are there.

    Parameters
    ----------
    requests : float or ndarray
        Requests of a micro-batch in decode.
    prefill_micro_batches : float or ndarray
        With more than one, the hidden states of all prompts wait in CPU memory.
    prefill_tokens : float or ndarray
        Prompt tokens of the fullest prefill micro-batch.
    """
    model, value = scenario.model, scenario.formats.activation_bytes
    n = batch.size
    capacity = kv_capacity_bytes(scenario, sizes, n)
    waiting = worst_prompt_tokens(scenario, n) * (model.hidden_size * value)
    head = 0.0 if sizes.tied else sizes.lm_head_bytes
    terms: Terms = {
        "expert weights": sizes.streamed_bytes - Affine.of(EXPERTS_ON_GPU) - Affine.of(EXPERTS_ON_DISK),
        "non-expert weights": sizes.dense_bytes - Affine.of(DENSE, sizes.dense_bytes),
        "embedding": sizes.embedding_bytes - Affine.of(EMBEDDING, sizes.embedding_bytes),
        "lm_head": head - Affine.of(HEAD, head),
        "KV cache": capacity - Affine.of(KV_ON_GPU) - Affine.of(KV_ON_DISK),
        "hidden states of all prompts": Affine(np.where(np.asarray(prefill_micro_batches) > 1, waiting, 0.0)),
    }
    # One micro-batch's KV cache of a layer is in use while the next one is read; in prefill, instead, what prompts add
    # to a layer is written while that of the next micro-batch arrives.
    read = 1.0 / (model.n_layers * batch.micro_batches)
    written = prefill_tokens * float(model.kv_bytes_per_token_per_layer(scenario.formats.kv)) / capacity
    terms["KV landing buffers"] = Affine.of(KV_ON_DISK, KV_LANDINGS * np.maximum(read, written))
    if not batch.ffn_on_gpu:
        width = 2.0 * model.hidden_size + model.mlp_matrices * model.streamed_ffn
        scratch = requests * (model.streamed_top_k * width * value) + dequantisation_bytes(scenario)
        terms["expert scratch"] = Affine(scratch)
        # Every micro-batch passes a layer's experts, so those on disk stay in memory for the whole layer: two layers,
        # one in use while the other is read. (With experts on the GPU the weight slots there do this.)
        terms["disk landing buffers"] = Affine.of(EXPERTS_ON_DISK, 2.0 / sizes.streamed_layers)
    terms.update(pinned_terms(scenario, batch, requests))
    return terms


def rounding_bytes(scenario: Scenario, sizes: Sizes) -> float:
    """CPU memory the program keeps free, as the share on the GPU is rounded down to whole rows of each layer [byte]."""
    row = scenario.model.hidden_size * sizes.expert_bytes / scenario.model.streamed_expert_parameters
    return 2.0 * row * sizes.streamed_layers


def disk_terms() -> Terms:
    """Disk bytes [byte]: expert weights read from it in every pass, and whole requests of KV cache."""
    return {"expert weights": Affine.of(EXPERTS_ON_DISK), "KV cache": Affine.of(KV_ON_DISK)}


def describe_limit(profile: HardwareProfile, level: str) -> str:
    """How a limit comes about, in words."""
    if level == "gpu":
        count = f"{profile.gpu.count} x " if profile.gpu.count > 1 else ""
        return f"{count}{profile.gpu.usable_memory_bytes / GIB:.2f} GiB usable"
    if level == "cpu":
        return f"{profile.cpu.memory_bytes / GIB:.2f} GiB less {profile.cpu.reserved_bytes / GIB:.2f} GiB reserved"
    return "disk size"
