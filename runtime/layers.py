"""The arithmetic of a decoder layer, as the released models compute it: norms, projections, rotary positions, router.

Legend: T tokens, h hidden width, H query heads, G KV heads, d head width, E experts, k top-k.
On a CPU products in fp16 go through float32, as do those in bf16 where it does not multiply bf16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime import cpu_layers, cpu_linear
from runtime.experts import Routing, group_visits
from runtime.numerics import Numerics, inverse_frequencies
from runtime.threads import lane_threads

__all__ = [
    "Heads",
    "Rotary",
    "find_best",
    "linear",
    "mlp",
    "normalise",
    "project_qkv",
    "put_rows",
    "route",
    "shared_expert",
]


class Heads(NamedTuple):
    """H, G and d."""

    query: int
    kv: int
    width: int


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, n] times weight [m, n] transposed, [T, m]."""
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    return cpu_linear.linear(x, weight, bias, lane_threads())


def normalise(x: Tensor, weight: Tensor, numerics: Numerics, *, in_place: bool = False) -> Tensor:
    """RMSNorm or LayerNorm without bias of x [..., h], in float32; `in_place` allows to write over x."""
    by_layer = numerics.norm == "layer"
    if x.device.type == "cpu":
        found = cpu_layers.normalise(
            x, weight, numerics.norm_eps, by_layer=by_layer, in_place=in_place, threads=lane_threads()
        )
        if found is not None:
            return found
    if by_layer:
        return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), None, numerics.norm_eps).to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, numerics.norm_eps)


class Rotary:
    """Cosines and sines of rotary positions, [positions, d] each, made once."""

    def __init__(self, numerics: Numerics, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self.positions = positions
        frequencies = inverse_frequencies(numerics.rope, numerics.rotary_width)  # [d/2]
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        both = torch.cat((angles, angles), dim=-1)
        self.cos = both.cos().to(device=device, dtype=dtype)
        self.sin = both.sin().to(device=device, dtype=dtype)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn x [T, heads, d] by its positions [T]."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)  # [T, 1, d]
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos + turned * sin

    def turn_both(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Turn queries [T, H, d] and keys [T, G, d]; they may be written over."""
        if q.device.type == "cpu" and cpu_layers.turn(q, k, self.cos, self.sin, positions, threads=lane_threads()):
            return q, k
        return self.turn(q, positions), self.turn(k, positions)


def project_qkv(
    x: Tensor, weights: dict[str, Tensor], heads: Heads, numerics: Numerics, rotary: Rotary, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, d], keys and values [T, G, d] of normalised x [T, h], turned to their positions [T].

    On the CPU they may be parts of one tensor, in which rows of tokens lie apart.
    """
    if "qkv" in weights and ("q_bias" in weights) == ("qkv_bias" in weights):
        widths = [count * heads.width for count in (heads.query, heads.kv, heads.kv)]
        found = list(torch.split(linear(x, weights["qkv"], weights.get("qkv_bias")), widths, dim=-1))
    else:
        found = [linear(x, weights[name], weights.get(f"{name}_bias")) for name in ("q", "k", "v")]
    norms = [weights[name] for name in ("q_norm", "k_norm")] if numerics.qk_norm != "none" else []
    if numerics.qk_norm == "full":
        found[:2] = [normalise(x, weight, numerics, in_place=True) for x, weight in zip(found, norms, strict=False)]
    if numerics.clip_qkv is not None:
        found = [each.clamp_(-numerics.clip_qkv, numerics.clip_qkv) for each in found]
    counts = (heads.query, heads.kv, heads.kv)
    q, k, v = (each.reshape(-1, count, heads.width) for each, count in zip(found, counts, strict=True))
    if numerics.qk_norm == "head":
        q, k = (normalise(x, weight, numerics, in_place=True) for x, weight in zip((q, k), norms, strict=True))
    q, k = rotary.turn_both(q, k, positions)
    return q, k, v if v.device.type == "cpu" else v.contiguous()


def route(x: Tensor, router: Tensor, top_k: int, numerics: Numerics) -> Routing:
    """Which of x [T, h] visits which experts, and with what weight.

    Chances and weights are float32 for all families; transformers does so for Mixtral, and rounds the weights of the
    others.
    """
    logits = linear(x, router)
    if logits.device.type == "cpu":
        routing = cpu_layers.route(logits, top_k, numerics.router_norm, threads=lane_threads())
        if routing is not None:
            return routing
    chances = torch.softmax(logits.float(), dim=-1)
    weights, experts = torch.topk(chances, top_k, dim=-1)
    if numerics.router_norm is not None:
        weights = weights / torch.linalg.vector_norm(weights, ord=numerics.router_norm, dim=-1, keepdim=True)
    return group_visits(experts, weights, router.shape[0])


def find_best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of every row of scores [B, V], float32 [B], and where it is, int64 [B]."""
    if scores.device.type == "cpu":
        found = cpu_layers.find_best(scores, threads=lane_threads())
        if found is not None:
            return found
    value, place = scores.max(dim=-1)
    return value.float(), place


def put_rows(k: Tensor, v: Tensor, pool: Tensor, places: Tensor, sources: Tensor | None = None) -> None:
    """Copy keys and values [T, G, d] of some tokens, or all, to their rows of a pool [2, rows, G, d]."""
    if k.device.type == "cpu" and cpu_layers.put_rows(k, v, pool, places, sources, threads=lane_threads()):
        return
    for side, each in zip(pool, (k, v), strict=True):
        side.index_copy_(0, places, (each if sources is None else each[sources]).to(pool.dtype))


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A gated MLP of x [T, h]."""
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)


def shared_expert(x: Tensor, weights: dict[str, Tensor]) -> Tensor | None:
    """The expert every token visits, [T, h], behind its own gate; None where a layer has none."""
    if "shared_w1" not in weights:
        return None
    found = mlp(x, weights["shared_w1"], weights["shared_w3"], weights["shared_w2"])
    if "shared_gate" in weights:
        found = torch.sigmoid(linear(x, weights["shared_gate"])) * found
    return found
