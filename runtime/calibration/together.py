"""Attention and layers while other lanes work: what computation loses to copies and to each other.

What copies lose to computation is measured with the copies.
"""

from __future__ import annotations

from collections.abc import Sequence

from hrm.graph import LaneKind
from runtime.calibration.bench import Bench
from runtime.calibration.copies import COPY_LANES, CopyBuffers
from runtime.calibration.lanes import Load
from runtime.calibration.layer_work import AttentionWork, LayerWork

__all__ = ["loads_of", "measure_together"]


def loads_of(bench: Bench, layer: LayerWork, attention: AttentionWork) -> tuple[Load, Load]:
    """The GPU lane on a layer, and the CPU lane on attention, of middling sizes."""
    requests, context = bench.sizes.attention[-1]
    tokens = bench.sizes.decode_tokens[len(bench.sizes.decode_tokens) // 2]
    return (LaneKind.GPU, layer.decode(tokens)), (LaneKind.CPU, attention.decode(requests, context))


def measure_together(bench: Bench, layer: LayerWork, attention: AttentionWork, buffers: CopyBuffers) -> None:
    """Attention on the CPU and a layer on the GPU, each beside copies, beside the other and beside both."""
    size = bench.sizes.copies[-1]
    copies: list[Load] = [(kind, buffers.run(kind, "pinned", size)) for kind in COPY_LANES]
    gpu, cpu = loads_of(bench, layer, attention)
    requests, context = bench.sizes.attention[-1]
    amount = float(attention.work(requests, context).bytes_touched)
    tokens = bench.sizes.decode_tokens[len(bench.sizes.decode_tokens) // 2]
    cases: list[tuple[str, Sequence[Load], Sequence[Load]]] = [
        ("copies to the GPU run", copies[:1], copies[:1]),
        ("copies both ways run", copies, copies),
        ("the other lane computes", [gpu], [cpu]),
        ("the other lane computes and copies to the GPU run", [gpu, copies[0]], [cpu, copies[0]]),
    ]
    for words, beside_cpu, beside_gpu in cases:
        name = f"cpu attention {bench.dtypes[0]} {requests} requests of {context} while {words}"
        bench.rate_on(LaneKind.CPU, name, "byte/s", amount, attention.decode(requests, context), beside_cpu)
        name = f"gpu layer {bench.dtypes[0]} {tokens} tokens while {words}"
        bench.seconds_on(LaneKind.GPU, name, layer.decode(tokens), beside_gpu)
