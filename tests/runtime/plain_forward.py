"""The forward pass written out once, from neutral tensors and Numerics alone: slow, whole sequences, no cache, fp32.

It shows that the two together say all there is to say of a model, and is a second oracle beside transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hrm.model import ModelSpec
from runtime.numerics import Numerics, inverse_frequencies
from runtime.weight_source import WeightSource


def plain_logits(weights: WeightSource, spec: ModelSpec, numerics: Numerics, tokens: Sequence[int]) -> Tensor:
    """Logits [T, V] of one sequence of token ids."""
    hidden = plain_stream(weights, spec, numerics, tokens)
    return _norm(hidden, weights.top("final_norm").float(), numerics) @ weights.top("lm_head").float().t()


def plain_stream(weights: WeightSource, spec: ModelSpec, numerics: Numerics, tokens: Sequence[int]) -> Tensor:
    """The residual stream [T, h] after the last layer."""
    hidden = weights.top("embedding").float()[list(tokens)]  # [T, h]
    for layer in range(spec.n_layers):
        tensors = {name: tensor.float() for name, tensor in weights.dense(layer).items()}
        normed = _norm(hidden, tensors["input_norm"], numerics)
        hidden = hidden + _attention(normed, tensors, spec, numerics, spec.layer_windows[layer])
        normed = _norm(hidden, tensors["post_norm"], numerics)
        hidden = hidden + _mlp(normed, tensors, weights, spec, numerics, layer)
    return hidden


def route(x: Tensor, router: Tensor, spec: ModelSpec, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """Experts [T, k] that each token visits, and their weights."""
    weights, chosen = (x @ router.t()).softmax(dim=-1).topk(spec.top_k, dim=-1)
    if numerics.router_norm is not None:
        weights = weights / weights.norm(p=numerics.router_norm, dim=-1, keepdim=True)
    return chosen, weights


def _attention(x: Tensor, t: dict[str, Tensor], spec: ModelSpec, numerics: Numerics, window: int | None) -> Tensor:
    q, k, v = (functional.linear(x, t[name], t.get(f"{name}_bias")) for name in "qkv")
    if numerics.qk_norm == "full":
        q, k = _norm(q, t["q_norm"], numerics), _norm(k, t["k_norm"], numerics)
    q, k, v = (each.unflatten(-1, (-1, spec.head_dim)) for each in (q, k, v))  # [T, heads, d]
    if numerics.qk_norm == "head":
        q, k = _norm(q, t["q_norm"], numerics), _norm(k, t["k_norm"], numerics)
    if numerics.clip_qkv is not None:
        q, k, v = (each.clamp(-numerics.clip_qkv, numerics.clip_qkv) for each in (q, k, v))
    q, k = _rotate(q, numerics), _rotate(k, numerics)
    group = spec.n_heads // spec.n_kv_heads
    k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * numerics.attention_scale
    age = torch.arange(len(x))[:, None] - torch.arange(len(x))[None, :]
    unseen = (age < 0) if window is None else (age < 0) | (age >= window)
    mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(unseen, -torch.inf).softmax(dim=-1), v)
    return functional.linear(mixed.flatten(1), t["o"], t.get("o_bias"))


def _rotate(x: Tensor, numerics: Numerics) -> Tensor:
    width = numerics.rotary_width
    angles = torch.arange(len(x))[:, None, None] * inverse_frequencies(numerics.rope, width)
    first, second = x[..., : width // 2], x[..., width // 2 :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _mlp(
    x: Tensor, t: dict[str, Tensor], weights: WeightSource, spec: ModelSpec, numerics: Numerics, layer: int
) -> Tensor:
    if "dense_w1" in t:
        return _expert(x, t["dense_w1"], t["dense_w3"], t["dense_w2"].t())
    if not spec.is_moe:
        return _expert(x, *(each.float() for each in weights.expert(layer, 0)))
    total = torch.zeros_like(x)
    chosen, share = route(x, t["router"], spec, numerics)
    for expert in range(spec.n_experts):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        output = _expert(x[token], *(each.float() for each in weights.expert(layer, expert)))
        total[token] += share[token, place, None] * output
    if "shared_w1" in t:
        shared = _expert(x, t["shared_w1"], t["shared_w3"], t["shared_w2"].t())
        total += shared * (x @ t["shared_gate"].t()).sigmoid() if numerics.shared_expert_gate else shared
    return total


def _expert(x: Tensor, gate: Tensor, up: Tensor, down_transposed: Tensor) -> Tensor:
    return (functional.silu(x @ gate.t()) * (x @ up.t())) @ down_transposed


def _norm(x: Tensor, weight: Tensor, numerics: Numerics) -> Tensor:
    # Norms of queries and keys are RMS norms in every family that has them.
    if numerics.norm == "layer":
        return functional.layer_norm(x, (x.shape[-1],), weight, None, numerics.norm_eps)
    return functional.rms_norm(x, (x.shape[-1],), weight, numerics.norm_eps)
