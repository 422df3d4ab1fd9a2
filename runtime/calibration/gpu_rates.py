"""What the GPU lane reaches: memory, products, launches, a layer by micro-batch, attention.

Emulated, this is one core and memory of its own, as the runtime uses them. The CUDA paths are untested on hardware.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hrm.graph import LaneKind
from runtime.calibration.bench import Bench
from runtime.calibration.layer_work import AttentionWork, LayerWork, place
from runtime.calibration.products import product_run, read_memory
from runtime.calibration.sizes import Sizes

__all__ = ["measure_gpu"]

SMALL_VALUES = 64
"""Of the tensor whose kernel is timed for its launch."""

LAUNCHES = 100
"""Kernels issued before the clock is read."""


def measure_gpu(bench: Bench) -> tuple[LayerWork, AttentionWork]:
    """All of it; returns the layer and its attention in the first format, for what is measured beside copies."""
    _measure_memory(bench)
    _measure_launch(bench)
    for dtype in bench.dtypes:
        for rows, inputs, outputs in bench.sizes.products:
            run = product_run(bench, "gpu", dtype, rows, inputs, outputs)
            name = f"gpu product {dtype} {rows} x {inputs} x {outputs}"
            bench.rate_on(LaneKind.GPU, name, "FLOP/s", 2.0 * rows * inputs * outputs, run)
    small = LayerWork(small_layer(bench.sizes), bench.dtypes[0], bench.device, "gpu")
    bench.seconds_on(LaneKind.GPU, "gpu layer of small widths", small.decode(bench.sizes.experts))
    first = LayerWork(bench.sizes, bench.dtypes[0], bench.device, "gpu")
    attention = AttentionWork(first)
    _measure_layer(bench, first, bench.dtypes[0])
    for requests, context in bench.sizes.attention:
        amount = float(attention.work(requests, context).bytes_touched)
        name = f"gpu attention {bench.dtypes[0]} {requests} requests of {context}"
        bench.rate_on(LaneKind.GPU, name, "byte/s", amount, attention.decode(requests, context))
    return first, attention


def small_layer(sizes: Sizes) -> Sizes:
    """The same layer with widths so small that what it takes is not for its FLOPs and bytes."""
    return replace(sizes, hidden=64, ffn=64, heads=2, groups=1, head_dim=32)


def _measure_layer(bench: Bench, layer: LayerWork, dtype: str) -> None:
    for tokens in bench.sizes.decode_tokens:
        flops = float(layer.ffn_works(tokens)[0].flops)
        bench.rate_on(LaneKind.GPU, f"gpu experts {dtype} {tokens} tokens", "FLOP/s", flops, layer.ffn(tokens))
        bench.seconds_on(LaneKind.GPU, f"gpu layer {dtype} {tokens} tokens", layer.decode(tokens))
    for prompts, length in bench.sizes.prefill:
        name = f"gpu prefill {dtype} {prompts} prompts of {length}"
        bench.seconds_on(LaneKind.GPU, name, layer.prefill(prompts, length))


def _measure_memory(bench: Bench) -> None:
    size = bench.sizes.span_bytes
    memory = bench.device.gpu_bytes(size)
    memory.fill_(1)
    if bench.device.cuda:
        other = torch.empty_like(memory)
        bench.rate_on(LaneKind.GPU, "gpu memory", "byte/s", 2.0 * size, lambda: other.copy_(memory))
    else:
        bench.rate_on(LaneKind.GPU, "gpu memory", "byte/s", float(size), lambda: read_memory(memory, 1))


def _measure_launch(bench: Bench) -> None:
    small = place(bench.device, "gpu", 1, SMALL_VALUES, torch.float32)

    def issue() -> None:
        for _ in range(LAUNCHES):
            small.add_(1.0)

    bench.tell("gpu launch")
    seconds = bench.time_on(LaneKind.GPU, issue)
    bench.samples.add("gpu launch", "s", [each / LAUNCHES for each in seconds])
