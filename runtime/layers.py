"""The arithmetic of a decoder layer, as the released models compute it: norms, projections, rotary positions, router.

Legend: T tokens, h hidden width, H query heads, G KV heads, d head width, E experts, k top-k.
Products in fp16 go through float32 on a CPU, which has no fp16 matrix units.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime import cpu_linear
from runtime.cpu_linear import MOST_TOKENS
from runtime.native_library import open_library
from runtime.numerics import Numerics, inverse_frequencies
from runtime.threads import lane_threads

__all__ = ["Heads", "Rotary", "linear", "mlp", "normalise", "project_qkv", "route", "shared_expert"]


WIDE_VALUES = 2**22
"""Weights that are widened to float32 at a time: 16 MiB of them."""


class Heads(NamedTuple):
    """H, G and d."""

    query: int
    kv: int
    width: int


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, n] times weight [m, n] transposed, [T, m]."""
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if x.shape[0] <= MOST_TOKENS[weight.dtype] and open_library() is not None:
        return cpu_linear.linear(x, weight, bias, lane_threads())
    if x.dtype == torch.float16:
        return _through_float32(x, weight, bias)
    return F.linear(x, weight, bias)


def _through_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same in float32, a block of rows at a time: a second copy of a large table would take too much memory."""
    wide, rows = x.float(), max(1, WIDE_VALUES // weight.shape[1])
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
    for start in range(0, weight.shape[0], rows):
        out[:, start : start + rows] = wide @ weight[start : start + rows].float().t()
    return out if bias is None else out + bias


def normalise(x: Tensor, weight: Tensor, numerics: Numerics) -> Tensor:
    """RMSNorm or LayerNorm without bias of x [..., h], in float32."""
    if numerics.norm == "layer":
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


def project_qkv(
    x: Tensor, weights: dict[str, Tensor], heads: Heads, numerics: Numerics, rotary: Rotary, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, d], keys and values [T, G, d] of normalised x [T, h], turned to their positions [T]."""
    if "qkv" in weights and ("q_bias" in weights) == ("qkv_bias" in weights):
        widths = [count * heads.width for count in (heads.query, heads.kv, heads.kv)]
        found = list(torch.split(linear(x, weights["qkv"], weights.get("qkv_bias")), widths, dim=-1))
    else:
        found = [linear(x, weights[name], weights.get(f"{name}_bias")) for name in ("q", "k", "v")]
    if numerics.qk_norm == "full":
        found[:2] = [normalise(found[i], weights[name], numerics) for i, name in enumerate(("q_norm", "k_norm"))]
    if numerics.clip_qkv is not None:
        found = [each.clamp(-numerics.clip_qkv, numerics.clip_qkv) for each in found]
    counts = (heads.query, heads.kv, heads.kv)
    q, k, v = (each.reshape(-1, count, heads.width) for each, count in zip(found, counts, strict=True))
    if numerics.qk_norm == "head":
        q, k = normalise(q, weights["q_norm"], numerics), normalise(k, weights["k_norm"], numerics)
    return rotary.turn(q, positions), rotary.turn(k, positions), v.contiguous()


def route(x: Tensor, router: Tensor, top_k: int, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """Experts [T, k] of every token of x [T, h], and their weights [T, k].

    Both in float32 for all families; transformers does so for Mixtral, and rounds the weights of the others.
    """
    chances = torch.softmax(linear(x, router).float(), dim=-1)
    weights, experts = torch.topk(chances, top_k, dim=-1)
    if numerics.router_norm is not None:
        weights = weights / torch.linalg.vector_norm(weights, ord=numerics.router_norm, dim=-1, keepdim=True)
    return experts, weights


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
