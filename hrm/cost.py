"""Work of every operator: FLOPs and bytes, no seconds (those appear where Work meets a profile, in `hrm.rates`).

Legend (per layer): B tokens in the micro-batch, h hidden width, q and kv query and KV heads, d_k and d_v their widths,
f expert width, E experts, k top-k, m matrices of one expert, a bytes per activation value. Products count 2 FLOPs per
multiply-add. Left out: softmax, rotary embedding and activation functions (below 1 % of the FLOPs of a layer).
All token counts may be numpy arrays. Bytes are those touched in the memory of the processor that runs the operator
(section 3.2 of the paper: operational intensity is FLOPs over these bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hrm.affine import Number
from hrm.dtypes import is_quantised
from hrm.model import ModelSpec

__all__ = [
    "Formats",
    "Work",
    "attention_decode_per_kv_byte",
    "attention_prefill",
    "attention_result_values",
    "dense_mlp",
    "embedding",
    "experts_touched",
    "layer_operators",
    "lm_head",
    "norms",
    "output_projection",
    "qkv_projection",
    "qkv_values",
    "routed_experts",
    "router",
    "shared_expert",
]


@dataclass(frozen=True, slots=True)
class Work:
    """What an operator does, wherever it runs.

    Attributes
    ----------
    flops : float or ndarray
        Floating-point operations at the activation precision [FLOP].
    bytes_touched : float or ndarray
        Bytes read and written in the memory of the processor that runs it [byte].
    dequantised : float or ndarray
        Quantised weights expanded to the activation precision on the way [values].
    """

    flops: Number = 0.0
    bytes_touched: Number = 0.0
    dequantised: Number = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.bytes_touched + other.bytes_touched,
            self.dequantised + other.dequantised,
        )

    def __mul__(self, factor: Number) -> Work:
        return Work(self.flops * factor, self.bytes_touched * factor, self.dequantised * factor)

    __rmul__ = __mul__

    @property
    def intensity(self) -> Number:
        """Operational intensity I = FLOPs / bytes [FLOP/byte] (Eq. 3 of the paper)."""
        return self.flops / self.bytes_touched


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Number formats of one run.

    Attributes
    ----------
    weights : str or None
        Storage of the linear layers; None = as in the checkpoint.
    kv : str
        Storage of the KV cache.
    compute : str
        Activations and arithmetic.
    """

    weights: str | None
    kv: str
    compute: str

    @property
    def activation_bytes(self) -> float:
        """Bytes of one activation value [byte]; fp8 and int8 arithmetic keeps 16-bit activations between operators."""
        return 4.0 if self.compute == "fp32" else 2.0

    def linear(self, model: ModelSpec) -> str:
        """Storage format of attention, shared-expert and dense-MLP matrices."""
        return self.weights or model.linear_dtype

    def experts(self, model: ModelSpec) -> str:
        """Storage format of the streamed expert matrices."""
        return self.weights or model.expert_dtype


def _dequantised(values: Number, dtype: str, formats: Formats) -> Number:
    """Values that must be expanded before arithmetic: none where weights and activations share the format."""
    return values if is_quantised(dtype) and dtype != formats.compute else values * 0.0


def _linear(
    model: ModelSpec, formats: Formats, tokens: Number, parameters: int, activations: float, weight_bytes: float
) -> Work:
    """A product of `tokens` rows (`activations` values each) with matrices of `parameters` values, read once."""
    return Work(
        2.0 * tokens * parameters,
        weight_bytes + tokens * (activations * formats.activation_bytes),
        _dequantised(parameters + tokens * 0.0, formats.linear(model), formats),
    )


def embedding(model: ModelSpec, formats: Formats, tokens: Number) -> Work:
    """Look up `tokens` rows of the embedding table."""
    return Work(0.0 * tokens, 2.0 * tokens * model.hidden_size * formats.activation_bytes)


def norms(model: ModelSpec, formats: Formats, tokens: Number) -> Work:
    """The two normalisations of a layer: square, sum, scale, weight per value."""
    values = tokens * (2.0 * model.hidden_size)
    return Work(4.0 * values, 2.0 * values * formats.activation_bytes)


def qkv_values(model: ModelSpec) -> int:
    """Values per token that attention needs from the projections (D1 copies them when attention runs on the CPU).

    With multi-head latent attention the query is absorbed into the latent space: q*(rank + rope) values and one latent.
    """
    if model.mla is not None:
        latent = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
        return model.n_heads * latent + latent
    return model.n_heads * model.head_dim + model.n_kv_heads * (model.head_dim + model.value_head_dim)


def attention_result_values(model: ModelSpec) -> int:
    """Values per token that attention hands back (D2 copies them when attention runs on the CPU)."""
    return model.n_heads * (model.mla.kv_lora_rank if model.mla is not None else model.value_head_dim)


def qkv_projection(model: ModelSpec, formats: Formats, tokens: Number) -> Work:
    """Q, K and V projections (MLA: the down and up projections, absorbed or not: the same products)."""
    parameters, weights = model.qkv_parameters_per_layer, model.qkv_bytes(formats.weights)
    return _linear(model, formats, tokens, parameters, model.hidden_size + qkv_values(model), weights)


def attention_decode_per_kv_byte(model: ModelSpec, formats: Formats, kv_read_bytes: Number | None = None) -> Work:
    """Scores and values of one decode step, per byte of KV cache that is read.

    Attention is linear in the cached tokens, so one byte stands for all: 2*q*(d_k + d_v) FLOPs per cached token and
    query; with MLA both products run in the latent space. The authors' planner counts scores only (`hrm.paper_cost`).

    Parameters
    ----------
    kv_read_bytes : float or ndarray, optional
        KV cache one request reads in a step, over all layers [byte]: its queries and results, which every layer reads
        and writes too, are spread over these bytes. Without it the KV cache alone is counted (a long context).
    """
    if model.mla is not None:
        key = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
        width = key + model.mla.kv_lora_rank
    else:
        key = model.head_dim
        width = key + model.value_head_dim
    token_bytes = float(model.kv_bytes_per_token_per_layer(formats.kv))
    dequantised = model.kv_values_per_token_per_layer / token_bytes if is_quantised(formats.kv) else 0.0
    touched: Number = 1.0
    if kv_read_bytes is not None:
        rows = model.n_layers * (model.n_heads * key + attention_result_values(model))
        touched = 1.0 + rows * formats.activation_bytes / kv_read_bytes
    return Work(2.0 * model.n_heads * width / token_bytes, touched, dequantised)


def attention_prefill(model: ModelSpec, formats: Formats, tokens: Number, token_pairs: Number) -> Work:
    """Causal attention over the prompts of a micro-batch, in one fused kernel.

    Parameters
    ----------
    tokens : float or ndarray
        Prompt tokens of the micro-batch.
    token_pairs : float or ndarray
        Query-key pairs: sum over its prompts of s^2/2 (fewer in a sliding-window layer).
    """
    if model.mla is not None:
        key, value = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim, model.mla.v_head_dim
        cached = model.n_heads * (key + value)  # prefill expands the latent, as is cheaper for long queries
    else:
        key, value = model.head_dim, model.value_head_dim
        cached = model.n_kv_heads * (key + value)
    values = tokens * float(model.n_heads * (key + value) + cached)
    return Work(2.0 * token_pairs * model.n_heads * (key + value), values * formats.activation_bytes)


def output_projection(model: ModelSpec, formats: Formats, tokens: Number) -> Work:
    """O projection after attention."""
    parameters, weights = model.output_parameters_per_layer, model.output_bytes(formats.weights)
    return _linear(model, formats, tokens, parameters, attention_result_values(model) + model.hidden_size, weights)


def router(model: ModelSpec, formats: Formats, tokens: Number) -> Work:
    """Scores of all experts for every token (kept in 16 bit in every checkpoint)."""
    parameters = model.router_parameters_per_layer
    weights = model.router_bytes(formats.weights)
    return Work(2.0 * tokens * parameters, weights + tokens * (model.hidden_size * formats.activation_bytes))


def _mlp_activations(model: ModelSpec, width: int) -> float:
    """Activation values per token of one MLP: gate and up together read the input once, down reads what they wrote."""
    return 2.0 * model.hidden_size + 2.0 * (model.mlp_matrices - 1) * width


def shared_expert(model: ModelSpec, formats: Formats, tokens: Number) -> Work:
    """Expert that every token passes."""
    parameters, weights = model.shared_parameters_per_layer, model.shared_bytes(formats.weights)
    if parameters == 0:
        return Work(tokens * 0.0, tokens * 0.0, tokens * 0.0)
    return _linear(model, formats, tokens, parameters, _mlp_activations(model, model.shared_ffn), weights)


def dense_mlp(model: ModelSpec, formats: Formats, tokens: Number) -> Work:
    """MLP of a layer without routed experts, in a mixture-of-experts model (the first layers of DeepSeek)."""
    parameters, weights = model.dense_parameters_per_layer, model.dense_mlp_bytes(formats.weights)
    return _linear(model, formats, tokens, parameters, _mlp_activations(model, model.dense_ffn), weights)


def experts_touched(model: ModelSpec, tokens: Number) -> Number:
    """Experts that a micro-batch of B tokens reaches under uniform routing: E*(1 - (1 - k/E)^B).

    Fewer where routing is skewed; a dense model has one "expert", always touched.
    """
    experts, top_k = model.streamed_experts, model.streamed_top_k
    if top_k >= experts:
        return experts + tokens * 0.0
    return experts * (1.0 - np.power(1.0 - top_k / experts, tokens))


def routed_experts(model: ModelSpec, formats: Formats, tokens: Number) -> Work:
    """Routed experts of one layer (for a dense model: its MLP), reading only the experts that tokens reach."""
    touched = experts_touched(model, tokens)
    visits = tokens * float(model.streamed_top_k)
    parameters = model.streamed_expert_parameters
    activations = visits * (_mlp_activations(model, model.streamed_ffn) * formats.activation_bytes)
    return Work(
        2.0 * visits * parameters,
        touched * float(model.expert_bytes(formats.weights)) + activations,
        _dequantised(touched * parameters, formats.experts(model), formats),
    )


def lm_head(model: ModelSpec, formats: Formats, tokens: Number) -> Work:
    """Logits of `tokens` positions, written in float32."""
    parameters = float(model.hidden_size) * model.vocab_size
    return Work(
        2.0 * tokens * parameters,
        model.lm_head_read_bytes(formats.weights)
        + tokens * (model.hidden_size * formats.activation_bytes + 4.0 * model.vocab_size),
    )


def layer_operators(model: ModelSpec, formats: Formats, tokens: Number) -> list[tuple[str, int, Work]]:
    """Operators of the layers but attention, for one micro-batch: (name, layers that have it, work in one layer)."""
    found = [
        ("norms", model.n_layers, norms(model, formats, tokens)),
        ("QKV projection", model.n_layers, qkv_projection(model, formats, tokens)),
        ("output projection", model.n_layers, output_projection(model, formats, tokens)),
        ("routed experts", model.streamed_layers, routed_experts(model, formats, tokens)),
    ]
    if model.n_moe_layers:
        found.append(("router", model.n_moe_layers, router(model, formats, tokens)))
        if model.shared_ffn:
            found.append(("shared expert", model.n_moe_layers, shared_expert(model, formats, tokens)))
        if model.n_dense_layers:
            found.append(("dense MLP", model.n_dense_layers, dense_mlp(model, formats, tokens)))
    return found
