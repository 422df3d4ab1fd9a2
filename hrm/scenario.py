"""Scenario: profile + model + workload + number formats, and the byte counts that follow from them alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hrm.affine import Number
from hrm.cost import Formats
from hrm.errors import InputError
from hrm.model import ModelSpec
from hrm.profile import HardwareProfile
from hrm.workload import Workload

__all__ = [
    "Scenario",
    "Sizes",
    "choose_formats",
    "kv_capacity_bytes",
    "kv_replicas",
    "measure_sizes",
    "truncated",
    "worst_prompt_tokens",
]

DECODE_CONTEXTS = ((0.5, 8.0 / 18.0), (0.5 - 0.15**0.5, 5.0 / 18.0), (0.5 + 0.15**0.5, 5.0 / 18.0))
"""Where in the course of decode a step is priced, and with what weight: the middle, and with it the two other nodes of
Gauss-Legendre quadrature: exact where the seconds of a step are a straight line in the context, and close at a kink."""

COMPUTE_DTYPES = ("fp16", "bf16", "fp32", "fp8", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything a plan depends on, apart from its choices.

    Attributes
    ----------
    profile : HardwareProfile
    model : ModelSpec
    workload : Workload
    formats : Formats
        Storage and arithmetic formats.
    """

    profile: HardwareProfile
    model: ModelSpec
    workload: Workload
    formats: Formats

    def __post_init__(self) -> None:
        longest, limit = self.workload.max_request_tokens, self.model.max_positions
        if longest > limit:
            raise InputError(
                f"the longest request has {longest} tokens (prompt + generation), {self.model.name} allows {limit}",
                where="workload",
                way_out="shorter prompts or --gen-len, or another model",
            )


def choose_formats(
    profile: HardwareProfile,
    model: ModelSpec,
    *,
    weights: str | None = None,
    kv: str | None = None,
    compute: str | None = None,
) -> Formats:
    """Formats of a run: weights as in the checkpoint, arithmetic in what the GPU has.

    A bf16 checkpoint computes in fp16 on a GPU without bf16 (T4); fp8 and int8 arithmetic must be asked for and then
    needs weights of the same format, since a product runs at the peak of the format both sides share.

    Raises
    ------
    InputError
        The GPU does not compute in that format, or the weights do not match it.
    """
    if compute is None:
        compute = model.checkpoint_dtype
        if compute not in profile.gpu.dtypes:
            compute = "fp16"
    if compute not in profile.gpu.dtypes:
        raise InputError(
            f"{profile.gpu.name} does not compute in {compute}",
            where="--compute-dtype",
            way_out=f"one of {', '.join(profile.gpu.dtypes)}",
        )
    stored = {weights or model.linear_dtype, model.expert_matrix_dtype(weights)}
    if compute in ("fp8", "int8") and stored != {compute}:
        raise InputError(
            f"{compute} arithmetic needs {compute} weights, these are {', '.join(sorted(stored))}",
            where="--compute-dtype",
            way_out=f"--weights-dtype {compute}",
        )
    default_kv = "fp32" if compute == "fp32" else (compute if compute in ("fp16", "bf16") else "fp16")
    if kv is None and compute in ("fp8", "int8") and "bf16" in profile.gpu.dtypes:
        default_kv = "bf16"
    return Formats(weights=weights, kv=kv or default_kv, compute=compute)


def truncated(scenario: Scenario, layers: int) -> Scenario:
    """The scenario with the first so many layers of its model, for a run of part of it.

    Raises
    ------
    InputError
        The model has not so many, or of a mixture-of-experts model they have no experts.
    """
    model = scenario.model
    if not 1 <= layers <= model.n_layers:
        raise InputError(
            f"{layers} of the {model.n_layers} layers of {model.name}",
            where="--layers",
            way_out=f"from 1 to {model.n_layers}",
        )
    if model.is_moe and not any(model.moe_layers[:layers]):
        raise InputError(
            f"no experts in the first {layers} of the layers of {model.name}",
            where="--layers",
            way_out=f"from {model.moe_layers.index(True) + 1} on",
        )
    cut = replace(
        model, n_layers=layers, moe_layers=model.moe_layers[:layers], layer_windows=model.layer_windows[:layers]
    )
    return replace(scenario, model=cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Byte and token counts of a scenario; `per request` is the mean over the workload's requests.

    Attributes
    ----------
    streamed_layers : int
        Layers whose expert weights the planner places.
    layer_expert_bytes, expert_bytes, streamed_bytes : float
        Routed experts of one layer, one of them, and of all layers (W*L) [byte].
    dense_bytes, largest_dense_layer_bytes : float
        Non-expert weights of all layers, and of the largest layer [byte].
    embedding_bytes, lm_head_bytes : float
        Tables [byte]; where they are tied both name the same matrix.
    kv_bytes_per_request : float
        KV cache one request holds when it ends, mean [byte].
    kv_read_bytes_per_request : float
        KV cache one request reads in a decode step at the mean context, all layers [byte].
    contexts : tuple of (float, float)
        Contexts that decode is priced at: share of the steps that stands for, and KV cache one request reads in such a
        step, all layers [byte]. The first is the mean context; it is the only one where reads do not grow.
    kv_prompt_bytes_per_request : float
        KV cache its prompt leaves [byte].
    kv_new_bytes_per_token : float
        KV cache written per token, all layers [byte].
    prompt_tokens, prompt_pairs : float
        Mean prompt length [tokens] and mean sum of s^2/2 per full-attention layer [pairs].
    decode_steps : int
        Steps after the token that prefill already gives: n - 1.
    """

    streamed_layers: int
    layer_expert_bytes: float
    expert_bytes: float
    streamed_bytes: float
    dense_bytes: float
    largest_dense_layer_bytes: float
    embedding_bytes: float
    lm_head_bytes: float
    tied: bool
    kv_bytes_per_request: float
    kv_read_bytes_per_request: float
    contexts: tuple[tuple[float, float], ...]
    kv_prompt_bytes_per_request: float
    kv_new_bytes_per_token: float
    prompt_tokens: float
    prompt_pairs_by_window: dict[int | None, float]
    decode_steps: int
    generation_length: int

    def at_context(self, number: int) -> Sizes:
        """The same where a step reads what it reads at one of `contexts`."""
        return replace(self, kv_read_bytes_per_request=self.contexts[number][1])

    @property
    def weight_bytes(self) -> float:
        """All weights [byte]."""
        head = 0.0 if self.tied else self.lm_head_bytes
        return self.streamed_bytes + self.dense_bytes + self.embedding_bytes + head


def measure_sizes(scenario: Scenario) -> Sizes:
    """Count the bytes of a scenario once; every cost and memory function starts from these."""
    model, workload, formats = scenario.model, scenario.workload, scenario.formats
    weights = formats.weights
    prompts = np.asarray(workload.padded_prompt_lengths, dtype=np.float64)
    generated = workload.generation_length
    # Decode step t = 1..n-1 reads s + t tokens, the one it adds included: s + n/2 on average.
    first, last = 1.0, max(1.0, generated - 1.0)
    contexts = [prompts + first + position * (last - first) for position, _ in DECODE_CONTEXTS]
    reads: list[Any] = [0.0 for _ in contexts]
    pairs: dict[int | None, float] = {}
    dense = 0.0
    largest = 0.0
    for kind in model.layer_kinds:
        layer = float(model.layer_dense_bytes(kind.is_moe, weights))
        dense += kind.count * layer
        largest = max(largest, layer)
        for number, context in enumerate(contexts):
            reads[number] = reads[number] + kind.count * model.kv_bytes_read(context, formats.kv, kind.window)
        reach = prompts if kind.window is None else np.minimum(prompts, kind.window)
        pairs[kind.window] = float(np.mean(prompts * reach - reach**2 / 2.0))
    read = [float(np.mean(each)) for each in reads]
    grows = max(read) > min(read) * (1.0 + 1e-9)
    priced = tuple((weight, each) for (_, weight), each in zip(DECODE_CONTEXTS, read, strict=True))
    layer_expert_bytes = float(model.layer_expert_bytes(weights))
    layers = model.streamed_layers
    return Sizes(
        streamed_layers=layers,
        layer_expert_bytes=layer_expert_bytes,
        expert_bytes=float(model.expert_bytes(weights)),
        streamed_bytes=layer_expert_bytes * layers,
        dense_bytes=dense + float(model.final_norm_bytes(weights)),
        largest_dense_layer_bytes=largest,
        embedding_bytes=float(model.embedding_bytes(weights)),
        lm_head_bytes=float(model.lm_head_read_bytes(weights)),
        tied=model.tie_embeddings,
        kv_bytes_per_request=float(np.mean(model.kv_bytes_stored(prompts + generated, formats.kv))),
        kv_read_bytes_per_request=read[0],
        contexts=priced if grows else ((1.0, read[0]),),
        kv_prompt_bytes_per_request=float(np.mean(model.kv_bytes_stored(prompts, formats.kv))),
        kv_new_bytes_per_token=float(model.kv_bytes_stored(1, formats.kv)),
        prompt_tokens=float(np.mean(prompts)),
        prompt_pairs_by_window=pairs,
        decode_steps=generated - 1,
        generation_length=generated,
    )


def worst_prompt_tokens(scenario: Scenario, batch_size: Number) -> Number:
    """Prompt tokens N requests taken in input order hold at worst [tokens]."""
    if isinstance(batch_size, np.ndarray):
        return scenario.workload.batch_tokens(batch_size.astype(np.int64)).astype(np.float64)
    return float(scenario.workload.batch_tokens(int(batch_size)))


def kv_capacity_bytes(scenario: Scenario, sizes: Sizes, batch_size: Number) -> Number:
    """KV cache that N requests taken in input order hold at worst, when they end [byte].

    The N consecutive requests with the longest prompts fill every layer; a sliding-window layer holds at most its
    window of each request, whatever their order.
    """
    model, longest = scenario.model, scenario.workload.max_request_tokens
    worst = worst_prompt_tokens(scenario, batch_size) + batch_size * float(sizes.generation_length)
    layer_tokens: Any = 0.0
    for kind in model.layer_kinds:
        held = worst if kind.window is None else np.minimum(worst, batch_size * float(min(kind.window, longest)))
        layer_tokens = layer_tokens + kind.count * held
    kept: Number = layer_tokens * float(model.kv_bytes_per_token_per_layer(scenario.formats.kv))
    return kept


def kv_replicas(scenario: Scenario) -> float:
    """GPUs of a tensor-parallel group that each hold the KV cache kept on the GPU.

    Heads are split over the group, and their keys and values with them; the latent of multi-head latent attention
    serves all heads, so every GPU has the whole of it.
    """
    return float(scenario.profile.gpu.count) if scenario.model.mla is not None else 1.0
