"""The work of one decoder layer as the runtime's kernels do it, beside the FLOPs and bytes that the cost model counts.

Weights are those of a model nobody has: one Mixtral-like layer (`sizes.calibration_config`). There are several sets of
the small ones, and experts larger than a processor's caches, so that weights come from memory as they do in a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from hrm import cost
from hrm.cost import Formats, Work
from hrm.families import read_spec
from hrm.numerics import read_numerics
from runtime.attention import attend_cache, attend_prompts
from runtime.calibration.sizes import Sizes, calibration_config
from runtime.device import Device
from runtime.experts import Routing, apply_segments, group_visits
from runtime.layers import Heads, Rotary, linear, normalise, project_qkv, route
from runtime.threads import lane_threads

__all__ = ["TORCH_DTYPES", "AttentionWork", "LayerWork", "Level", "place"]

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DRAWN_ROWS = 64
"""Rows that are drawn; larger matrices repeat them, which is quick to make and costs the same to multiply."""

Run = Callable[[], object]
Level = Literal["gpu", "cpu"]


def place(device: Device, level: Level, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Random values [rows, columns] in the memory that the runtime has a level in; products with them stay near 1.

    Parameters
    ----------
    level : {"gpu", "cpu"}
    """
    size = rows * columns * dtype.itemsize
    memory = device.gpu_bytes(size) if level == "gpu" else device.host_bytes(size)
    found = memory.view(dtype).view(rows, columns)
    drawn = (torch.randn(min(rows, DRAWN_ROWS), columns) * columns**-0.5).to(dtype).to(found.device)
    for start in range(0, rows, DRAWN_ROWS):
        found[start : start + DRAWN_ROWS] = drawn[: rows - start]
    return found


class LayerWork:
    """A layer on one device: run it, and what the cost model counts for it."""

    def __init__(self, sizes: Sizes, dtype: str, device: Device, level: Level) -> None:
        config = calibration_config(sizes, dtype)
        self.sizes, self.dtype, self.machine, self.level = sizes, TORCH_DTYPES[dtype], device, level
        self.device = device.torch_device if level == "gpu" else torch.device("cpu")
        self.model = read_spec(config, file="", name="calibration")
        self.numerics = read_numerics(config, where="calibration")
        self.formats = Formats(weights=None, kv=dtype, compute=dtype)
        self.heads = Heads(sizes.heads, sizes.groups, sizes.head_dim)
        self.rotary = Rotary(self.numerics, 4096, self.dtype, self.device)
        self.experts = self.place(sizes.experts * sizes.ffn * 3, sizes.hidden)
        packed = self.experts.view(sizes.experts, sizes.ffn, 3, sizes.hidden)
        self.segments = [(expert, packed[expert]) for expert in range(sizes.experts)]
        self._sets: Iterator[dict[str, Tensor]] = itertools.cycle(
            [self._small_weights() for _ in range(sizes.weight_sets)]
        )

    def place(self, rows: int, columns: int) -> Tensor:
        """Random values [rows, columns] on the level of the layer."""
        return place(self.machine, self.level, rows, columns, self.dtype)

    def _small_weights(self) -> dict[str, Tensor]:
        s, width = self.sizes, self.sizes.head_dim
        return {
            "input_norm": torch.ones(s.hidden, dtype=self.dtype, device=self.device),
            "post_norm": torch.ones(s.hidden, dtype=self.dtype, device=self.device),
            "qkv": self.place((s.heads + 2 * s.groups) * width, s.hidden),
            "o": self.place(s.hidden, s.heads * width),
            "router": self.place(s.experts, s.hidden),
        }

    def hidden(self, tokens: int) -> Tensor:
        """Hidden states [T, h]."""
        return torch.randn(tokens, self.sizes.hidden).to(self.dtype).to(self.device)

    def routing(self, tokens: int) -> Routing:
        """Every expert is as likely as any other."""
        chances = torch.rand(tokens, self.sizes.experts, device=self.device)
        weights, experts = torch.topk(chances, self.sizes.top_k, dim=-1)
        return group_visits(experts, weights, self.sizes.experts)

    def decode(self, tokens: int) -> Run:
        """All a layer does on the GPU for a micro-batch but attention: what `start_layer` and `finish_layer` do."""
        hidden, positions = self.hidden(tokens), torch.full((tokens,), 300, device=self.device)

        def run() -> None:
            weights = next(self._sets)
            x = normalise(hidden, weights["input_norm"], self.numerics)
            q, _, _ = project_qkv(x, weights, self.heads, self.numerics, self.rotary, positions)
            self._finish(hidden, q.reshape(tokens, -1), weights)

        return run

    def _finish(self, hidden: Tensor, attended: Tensor, weights: dict[str, Tensor]) -> None:
        after = hidden + linear(attended, weights["o"])
        x = normalise(after, weights["post_norm"], self.numerics)
        routing = route(x, weights["router"], self.sizes.top_k, self.numerics)
        apply_segments(x, self.segments, routing, after, threads=lane_threads())

    def prefill(self, prompts: int, length: int) -> Run:
        """The same for whole prompts, their attention included."""
        hidden = self.hidden(prompts * length)
        positions = torch.arange(length, device=self.device).repeat(prompts)

        def run() -> None:
            weights = next(self._sets)
            x = normalise(hidden, weights["input_norm"], self.numerics)
            q, k, v = project_qkv(x, weights, self.heads, self.numerics, self.rotary, positions)
            attended = attend_prompts(q, k, v, [length] * prompts, scale=self.numerics.attention_scale)
            self._finish(hidden, attended, weights)

        return run

    def ffn(self, tokens: int) -> Run:
        """The routed experts alone."""
        x, routing = self.hidden(tokens), self.routing(tokens)
        out = torch.zeros(x.shape, dtype=torch.float32, device=self.device)
        return lambda: apply_segments(x, self.segments, routing, out, threads=lane_threads())

    def decode_works(self, tokens: int) -> list[Work]:
        """What the cost model counts for `decode`, operator by operator."""
        return [work for _, _, work in cost.layer_operators(self.model, self.formats, tokens)]

    def prefill_works(self, prompts: int, length: int) -> list[Work]:
        """What it counts for `prefill`."""
        tokens = prompts * length
        attention = cost.attention_prefill(self.model, self.formats, tokens, prompts * length**2 / 2)
        return [*self.decode_works(tokens), attention]

    def ffn_works(self, tokens: int) -> list[Work]:
        """What it counts for `ffn`."""
        return [cost.routed_experts(self.model, self.formats, tokens)]


class AttentionWork:
    """Attention of one new token per request over a KV cache that is larger than a processor's caches."""

    def __init__(self, layer: LayerWork) -> None:
        sizes = layer.sizes
        self.layer = layer
        row = 2 * sizes.groups * sizes.head_dim * layer.dtype.itemsize
        rows = sizes.pool_bytes // row
        self.pool = layer.place(2 * rows, sizes.groups * sizes.head_dim).view(2, rows, sizes.groups, sizes.head_dim)

    def fits(self, requests: int, context: int) -> bool:
        """Whether the pool holds them."""
        return requests * context <= self.pool.shape[1]

    def decode(self, requests: int, context: int) -> Run:
        """Keep the new tokens and attend, each call over other rows of the pool than the last."""
        sizes, device = self.layer.sizes, self.layer.device
        rows, dtype = requests * context, self.layer.dtype
        places = itertools.cycle(range(max(1, self.pool.shape[1] // rows)))
        firsts = torch.arange(requests, device=device) * context
        lengths = torch.full((requests,), context, device=device)
        q = torch.randn(requests, sizes.heads, sizes.head_dim).to(dtype).to(device)
        k = torch.randn(requests, sizes.groups, sizes.head_dim).to(dtype).to(device)
        out = torch.empty_like(q)

        def run() -> None:
            first = firsts + next(places) * rows
            for side in range(2):
                self.pool[side].index_copy_(0, first + (context - 1), k)
            attend_cache(
                q,
                self.pool[0],
                self.pool[1],
                first,
                lengths,
                out,
                scale=sizes.head_dim**-0.5,
                window=None,
                longest=context,
                threads=lane_threads(),
            )

        return run

    def work(self, requests: int, context: int) -> Work:
        """What the cost model counts for it."""
        model, formats = self.layer.model, self.layer.formats
        read = float(model.kv_bytes_per_token_per_layer(formats.kv)) * context
        return requests * read * cost.attention_decode_per_kv_byte(model, formats, read)
