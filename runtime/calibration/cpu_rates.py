"""What the CPU lane reaches on its cores: memory, products, experts, attention by context and batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from hrm.graph import LaneKind
from runtime.calibration.bench import Bench
from runtime.calibration.lanes import synchronise
from runtime.calibration.layer_work import TORCH_DTYPES, AttentionWork, LayerWork
from runtime.calibration.products import product_run, read_memory
from runtime.threads import settle_thread

__all__ = ["CPU_TOKENS", "measure_cpu"]

CPU_TOKENS = (2, 8, 32, 64, 160)
"""Tokens of the micro-batches whose experts are timed on the CPU: those for which they are computed there."""


def measure_cpu(bench: Bench) -> AttentionWork:
    """All of it; returns attention in the first format, for what is measured beside copies."""
    device, size = bench.device, bench.sizes.span_bytes
    memory, other = device.host_bytes(size), device.host_bytes(size)
    memory.fill_(1)
    other.fill_(2)
    threads = device.lane_cores(LaneKind.CPU)[1]
    bench.rate_on(LaneKind.CPU, "cpu read", "byte/s", float(size), lambda: read_memory(memory, threads))
    bench.rate_on(LaneKind.CPU, "cpu copy", "byte/s", float(size), lambda: other.copy_(memory))
    _measure_all_cores(bench, memory)
    _measure_products(bench)
    layer = LayerWork(bench.sizes, bench.dtypes[0], device, "cpu")
    for tokens in CPU_TOKENS:
        flops = float(layer.ffn_works(tokens)[0].flops)
        name = f"cpu experts {bench.dtypes[0]} {tokens} tokens"
        bench.rate_on(LaneKind.CPU, name, "FLOP/s", flops, layer.ffn(tokens))
    attention = AttentionWork(layer)
    for requests, context in bench.sizes.attention:
        amount = float(attention.work(requests, context).bytes_touched)
        name = f"cpu attention {bench.dtypes[0]} {requests} requests of {context}"
        bench.rate_on(LaneKind.CPU, name, "byte/s", amount, attention.decode(requests, context))
    return attention


def _measure_all_cores(bench: Bench, memory: Tensor) -> None:
    """Reads by every core of the machine together, the emulated accelerator's among them."""
    cores = bench.device.cores
    bench.tell("all cores read")

    def read() -> list[float]:
        settle_thread(cores, len(cores))
        return bench.watch.measure(lambda: read_memory(memory, len(cores)), synchronise)

    with ThreadPoolExecutor(1) as pool:
        seconds = pool.submit(read).result()
    bench.samples.add_rate("all cores read", "byte/s", float(memory.numel()), seconds)


def _measure_products(bench: Bench) -> None:
    for dtype in TORCH_DTYPES if not bench.device.cuda else bench.dtypes:
        for rows, inputs, outputs in bench.sizes.products[:3]:
            run = product_run(bench, "cpu", dtype, rows, inputs, outputs)
            name = f"cpu product {dtype} {rows} x {inputs} x {outputs}"
            bench.rate_on(LaneKind.CPU, name, "FLOP/s", 2.0 * rows * inputs * outputs, run)
