"""Memory of a plan added up anew, from the policy, the model and the real requests of the job alone.

Nothing of `hrm.memory`, `hrm.full_cost`, `hrm.prediction` or the program is used: every term is stated here, and the
KV cache and the micro-batches are those of the batches the job really has, dealt out by Algorithm 2. So a plan that
counts too little in any term is found by `sum of these terms <= limit`. What is a choice of the project and not a
consequence of the plan (buffer sizes, the share kept free) is repeated as a number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hrm.batching import fill_micro_batches
from hrm.cost import Formats
from hrm.dtypes import DTYPES, is_quantised
from hrm.model import ModelSpec
from hrm.policy import Policy
from hrm.profile import HardwareProfile
from hrm.workload import Workload

MIB = 2**20
GPU_SHARE_KEPT_FREE = 0.03
HEAD_PIECES, HEAD_PIECE_BYTES = 2, 256 * MIB
STAGING_PIECES, STAGING_PIECE_BYTES = 4, 128 * MIB
IN_FLIGHT = 3  # micro-batches of which QKV or results are under way in CGOPipe: two ahead, one in use


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What the batches of the job ask for at most: tokens, and KV cache [byte]."""

    batch_prompt_tokens: int
    batch_kv_bytes: int
    decode_tokens: int  # prompt and generated, of the fullest decode micro-batch
    decode_requests: int
    prefill_tokens: int  # prompt tokens of the fullest prefill micro-batch


def demands_of(model: ModelSpec, workload: Workload, formats: Formats, policy: Policy) -> Demands:
    """Deal out every distinct batch of the job and take the largest of each demand."""
    period = workload.padded_prompt_lengths
    size = min(policy.batch_size, workload.num_requests)
    starts = {
        start % len(period): min(size, workload.num_requests - start) for start in _starts(workload, size, len(period))
    }
    found = [0, 0, 0, 0, 0]
    for start, count in starts.items():
        prompts = sorted((period[(start + i) % len(period)] for i in range(count)), reverse=True)
        kv = sum(_kv_bytes(model, formats, prompt + workload.generation_length) for prompt in prompts)
        whole = [prompt + workload.generation_length for prompt in prompts]
        dealt = fill_micro_batches(
            whole, num_micro_batches=policy.num_micro_batches, micro_batch_size=policy.micro_batch_size
        )
        held = min(policy.prefill_micro_batch_size, count)
        first = fill_micro_batches(prompts, num_micro_batches=-(-count // held), micro_batch_size=held)
        new = (
            sum(prompts),
            kv,
            max(sum(whole[i] for i in part) for part in dealt),
            max(len(part) for part in dealt),
            max(sum(prompts[i] for i in part) for part in first),
        )
        found = [max(pair) for pair in zip(found, new, strict=True)]
    return Demands(
        batch_prompt_tokens=found[0],
        batch_kv_bytes=found[1],
        decode_tokens=found[2],
        decode_requests=found[3],
        prefill_tokens=found[4],
    )


def _starts(workload: Workload, size: int, period: int) -> list[int]:
    """First request of every batch that is not a repetition of an earlier one; the last, part-filled one left out."""
    distinct = period // math.gcd(period, size)
    return [index * size for index in range(min(distinct, max(1, workload.num_requests // size)))]


def _token_bytes(model: ModelSpec, formats: Formats) -> int:
    """KV cache of one token in one layer [byte]."""
    if model.mla is not None:
        values = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
    else:
        values = model.n_kv_heads * (model.head_dim + model.value_head_dim)
    kind = DTYPES[formats.kv]
    return math.ceil(values * kind.value_bits / 8) + math.ceil(values / kind.kv_group) * kind.kv_scale_bytes


def _kv_bytes(model: ModelSpec, formats: Formats, tokens: int) -> int:
    """KV cache of one request over all layers; a sliding-window layer keeps its window [byte]."""
    kept = sum(tokens if window is None else min(tokens, window) for window in model.layer_windows)
    return kept * _token_bytes(model, formats)


def _attention_values(model: ModelSpec) -> tuple[int, int]:
    """Values per token before and after attention (with MLA in the latent space)."""
    if model.mla is not None:
        latent = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
        return (model.n_heads + 1) * latent, model.n_heads * model.mla.kv_lora_rank
    before = model.n_heads * model.head_dim + model.n_kv_heads * (model.head_dim + model.value_head_dim)
    return before, model.n_heads * model.value_head_dim


def _expanded_matrix_bytes(model: ModelSpec, formats: Formats) -> float:
    """The largest matrix that must be expanded from its quantised form [byte]."""
    largest = 0
    attention = [*model.qkv_matrices, *model.output_matrices, *model.shared_matrices]
    if model.is_moe and model.n_dense_layers:
        attention += model.dense_matrices
    for matrices, dtype in (
        (attention, formats.weights or model.linear_dtype),
        (model.streamed_expert_matrices, model.expert_matrix_dtype(formats.weights)),
    ):
        if is_quantised(dtype) and dtype != formats.compute:
            largest = max([largest, *(rows * columns for rows, columns in matrices)])
    return largest * formats.activation_bytes


def _power_of_two(size: float) -> int:
    return 1 << (max(1, math.ceil(size)) - 1).bit_length()


def add_up(
    profile: HardwareProfile, model: ModelSpec, workload: Workload, formats: Formats, policy: Policy
) -> dict[str, dict[str, float]]:
    """Bytes by level and term, each level at its peak.

    Returns
    -------
    dict of str to dict of str to float
        For "gpu", "cpu" and "disk" [byte].
    """
    need = demands_of(model, workload, formats, policy)
    if policy.everything_on_cpu:
        return {"gpu": {}, **_cpu_only(model, workload, formats, policy, need)}
    return {
        "gpu": _gpu(profile, model, formats, policy, need),
        "cpu": _cpu(model, formats, policy, need),
        "disk": _disk(model, formats, policy, need),
    }


def limits(profile: HardwareProfile) -> dict[str, float]:
    """What each level holds [byte]."""
    return {
        "gpu": profile.gpu.count * profile.gpu.usable_memory_bytes,
        "cpu": profile.cpu.memory_bytes - profile.cpu.reserved_bytes,
        "disk": profile.disk.size_bytes if profile.disk else 0.0,
    }


def _weights(model: ModelSpec, formats: Formats) -> dict[str, float]:
    kind = formats.weights
    dense = [float(model.layer_dense_bytes(moe, kind)) for moe in model.moe_layers]
    return {
        "experts": float(model.layer_expert_bytes(kind) * model.streamed_layers),
        "layer": float(model.layer_expert_bytes(kind)),
        "dense": sum(dense) + model.final_norm_bytes(kind),
        "dense_layer": max(dense),
        "embedding": float(model.embedding_bytes(kind)),
        "head": float(model.lm_head_read_bytes(kind)),
        "head_stored": 0.0 if model.tie_embeddings else float(model.lm_head_read_bytes(kind)),
    }


def _gpu(
    profile: HardwareProfile, model: ModelSpec, formats: Formats, policy: Policy, need: Demands
) -> dict[str, float]:
    gpus, value, weights = profile.gpu.count, formats.activation_bytes, _weights(model, formats)
    latent_copies = gpus if model.mla is not None else 1  # heads are split over the GPUs, a latent serves them all
    always = {
        "experts that stay": policy.weights_on_gpu * weights["experts"],
        "other weights that stay": weights["dense"] if policy.dense_weights_on_gpu else 0.0,
        "embedding": weights["embedding"] if policy.embedding_on_gpu else 0.0,
        "lm_head": weights["head_stored"] if policy.lm_head_on_gpu else 0.0,
        "KV cache": policy.kv_on_gpu * need.batch_kv_bytes * latent_copies,
        "context": gpus * profile.gpu.context_bytes,
        "kept free": gpus * profile.gpu.usable_memory_bytes * GPU_SHARE_KEPT_FREE,
        "expanded matrix": _expanded_matrix_bytes(model, formats),
    }
    if not policy.dense_weights_on_gpu:  # streamed with their layer, into as many slots
        always["slots of other weights"] = (1 if policy.weight_slots == 1 else 2) * weights["dense_layer"]
    if not policy.lm_head_on_gpu:
        always["lm_head pieces"] = min(weights["head"], HEAD_PIECES * HEAD_PIECE_BYTES)
    if policy.weight_slots == "experts":
        slots = policy.ring_experts * weights["layer"] / model.streamed_experts
    else:
        slots = policy.weight_slots * weights["layer"] * (1.0 - policy.weights_on_gpu)

    before, after = _attention_values(model)
    visit = 2 * model.hidden_size * gpus + model.mlp_matrices * model.streamed_ffn  # rows in and out, and between
    shared = model.mlp_matrices * model.shared_ffn
    dense_mlp = model.mlp_matrices * model.dense_ffn if model.is_moe and model.n_dense_layers else 0
    residual = 2 * model.hidden_size * gpus  # and its normalised copy
    ring = policy.weight_slots == "experts"
    # Tokens that one expert of a ring serves, at twice the mean; without a ring all visits are computed at once.
    visits = min(1.0, 2.0 * model.streamed_top_k / model.streamed_experts) if ring else float(model.streamed_top_k)
    layer = residual + max(before + after, visits * visit + shared, dense_mlp)

    rows_in_and_out = 2  # between two layers, where other micro-batches come in between
    if ring or policy.prefill_micro_batch_size >= policy.batch_size:
        rows_in_and_out = 0 if policy.embedding_on_gpu else 1
    prefill = {
        "slots": slots,
        "activations": need.prefill_tokens * layer * value,
        "hidden states in and out": rows_in_and_out * need.prefill_tokens * model.hidden_size * value * gpus,
        "new KV of two layers, on its way out": (
            2 * need.prefill_tokens * _token_bytes(model, formats) * (1 - policy.kv_on_gpu)
        ),
    }
    requests = need.decode_requests
    flight = 0 if policy.attention_on_gpu else IN_FLIGHT * (before + after)
    decode = {
        "slots": slots if policy.ffn_on_gpu else 0.0,
        "activations": requests * (layer + flight) * value,
        "hidden states": policy.batch_size * model.hidden_size * value * gpus,
    }
    if ring:  # every expert serves its tokens of the whole batch at once, and adds to a float32 sum
        decode["activations"] = max(decode["activations"], policy.batch_size * visits * visit * value)
        decode["expert input and sum"] = policy.batch_size * model.hidden_size * gpus * (value + 4)
    if policy.attention_on_gpu:  # two micro-batches' KV cache of one layer, the fullest one
        windows = model.layer_windows
        held = need.decode_tokens
        if all(window is not None for window in windows):
            held = min(held, requests * max(window or 0 for window in windows))
        decode["KV slots"] = 2 * held * _token_bytes(model, formats) * (1 - policy.kv_on_gpu) * latent_copies
    return always | max((prefill, decode), key=lambda terms: sum(terms.values()))


def _cpu(model: ModelSpec, formats: Formats, policy: Policy, need: Demands) -> dict[str, float]:
    value, weights, requests = formats.activation_bytes, _weights(model, formats), need.decode_requests
    before, after = _attention_values(model)
    terms = {
        "experts": (1.0 - policy.weights_on_gpu - policy.weights_on_disk) * weights["experts"],
        "other weights": 0.0 if policy.dense_weights_on_gpu else weights["dense"],
        "embedding": 0.0 if policy.embedding_on_gpu else weights["embedding"],
        "lm_head": 0.0 if policy.lm_head_on_gpu else weights["head_stored"],
        "KV cache": (1.0 - policy.kv_on_gpu - policy.kv_on_disk) * need.batch_kv_bytes,
        "staging ring": float(STAGING_PIECES * STAGING_PIECE_BYTES),
    }
    ring = policy.weight_slots == "experts"
    if policy.prefill_micro_batch_size < policy.batch_size and not ring:  # layer by layer: they wait for each other
        terms["hidden states of all prompts"] = need.batch_prompt_tokens * model.hidden_size * value
    read = need.batch_kv_bytes / (model.n_layers * policy.num_micro_batches)
    written = need.prefill_tokens * _token_bytes(model, formats)  # of a layer that keeps all of it
    terms["two micro-batches' KV from or to disk"] = 2.0 * policy.kv_on_disk * max(read, written)
    if not policy.attention_on_gpu:  # page-locked, so rounded up
        rows = _power_of_two(requests * before * value) + _power_of_two(requests * after * value)
        terms["QKV and results"] = float(IN_FLIGHT * rows)
    if not policy.ffn_on_gpu:
        terms["expert rows"] = float(IN_FLIGHT * 2 * _power_of_two(requests * model.hidden_size * value))
        visit = 2 * model.hidden_size + model.mlp_matrices * model.streamed_ffn
        terms["expert activations"] = requests * model.streamed_top_k * visit * value
        terms["expanded matrix"] = _expanded_matrix_bytes(model, formats)
        terms["two layers from disk"] = 2.0 * policy.weights_on_disk * weights["layer"]
    return terms


def _disk(model: ModelSpec, formats: Formats, policy: Policy, need: Demands) -> dict[str, float]:
    experts = _weights(model, formats)["experts"]
    return {"experts": policy.weights_on_disk * experts, "KV cache": policy.kv_on_disk * need.batch_kv_bytes}


def _cpu_only(
    model: ModelSpec, workload: Workload, formats: Formats, policy: Policy, need: Demands
) -> dict[str, dict[str, float]]:
    weights, value, n = _weights(model, formats), formats.activation_bytes, policy.batch_size
    cpu = {
        "experts": (1.0 - policy.weights_on_disk) * weights["experts"],
        "two layers from disk": 2.0 * policy.weights_on_disk * weights["layer"],
        "other weights": weights["dense"] + weights["embedding"] + weights["head_stored"],
        "KV cache": float(need.batch_kv_bytes),
        "hidden states": need.batch_prompt_tokens * model.hidden_size * value,
        "activations": max(
            _cpu_activations(model, formats, need.prefill_tokens),
            _cpu_activations(model, formats, n) + n * 8.0 * model.vocab_size,
        ),
    }
    return {"cpu": cpu, "disk": {"experts": policy.weights_on_disk * weights["experts"]}}


def _cpu_activations(model: ModelSpec, formats: Formats, tokens: float) -> float:
    """Of so many tokens beside their hidden states: stages of a layer, one expert at a time, in fp16 in both widths."""
    value, h = formats.activation_bytes, model.hidden_size
    qkv, result = _attention_values(model)
    inner = [model.shared_ffn, model.dense_ffn if model.is_moe and model.n_dense_layers else 0]
    again = 4.0 if formats.compute == "fp16" else 0.0
    stages = [
        (h + qkv) * value + h * again,
        (qkv + 2 * result) * (value + again),
        h * (value + 4.0) + 12.0 * model.streamed_top_k,
        *((h + model.mlp_matrices * width) * value + max(h, width) * again for width in inner),
    ]
    visit = 2 * h + model.mlp_matrices * model.streamed_ffn
    copied = 2048 * model.mlp_matrices * h * again
    return tokens * max(stages) + min(tokens, 1024) * visit * max(value, again) + copied
