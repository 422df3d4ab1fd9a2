"""Attention of decode on the CPU against the machine's roofs: part "attention" of `benchmarks/runtime.py`.

The roof of a context is the lower of reading the KV cache at the rate memory is read, and of its multiply-adds at the
rate of the processor; both are measured in turn with attention. Keys and values come from memory, not from a cache:
layers follow each other as in a model.
"""

from __future__ import annotations

import time

import torch

from benchmarks.bars import Line, Section, Settings, median, tell
from benchmarks.machine_rates import MultiplyAddRate, ReadRate
from runtime.cpu_attention import attend_decode

__all__ = ["measure"]

BATCH, HEADS, KV_HEADS, WIDTH = 16, 32, 8, 128
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BARS = {128: 0.6, 512: 0.7, 2048: 0.7}
"""Least share of the roof, by context [tokens]."""

KV_BYTES = 2**29
"""Keys and values of all layers: many times a last-level cache [byte]."""

PASSES = 4
"""Over all layers, of one measurement."""


class Case:
    """One format and context: as many layers of KV cache as fill `KV_BYTES`, read one after the other."""

    def __init__(self, dtype: torch.dtype, context: int) -> None:
        tokens = BATCH * context
        self.layer_bytes = 2 * tokens * KV_HEADS * WIDTH * dtype.itemsize
        count = max(2, KV_BYTES // self.layer_bytes)
        self.calls = PASSES * count
        pool = torch.empty(count, 2, tokens, KV_HEADS, WIDTH, dtype=dtype)
        block = torch.randn(2, tokens, KV_HEADS, WIDTH).to(dtype)
        for layer in pool:
            layer.copy_(block)
        self.pool = pool
        self.q = torch.randn(BATCH, HEADS, WIDTH).to(dtype)
        self.out = torch.empty_like(self.q)
        self.first = torch.arange(BATCH, dtype=torch.int64) * context
        self.lengths = torch.full((BATCH,), context, dtype=torch.int64)
        self.intensity = 4.0 * BATCH * context * HEADS * WIDTH / self.layer_bytes  # FLOP per byte of KV cache

    def measure(self) -> float:
        """Bytes of KV cache read per second [byte/s]."""
        began = time.perf_counter()
        for call in range(self.calls):
            keys, values = self.pool[call % len(self.pool)]
            attend_decode(
                self.q,
                keys,
                values,
                self.first,
                self.lengths,
                self.out,
                scale=WIDTH**-0.5,
                window=None,
                threads=torch.get_num_threads(),
            )
        return self.calls * self.layer_bytes / (time.perf_counter() - began)


def measure(settings: Settings) -> Section:
    """Run the part."""
    reading = ReadRate()
    products = MultiplyAddRate()
    lines, samples = [], {}
    for name, dtype in DTYPES.items():
        for context, bar in BARS.items():
            tell(f"attention, {name}, context {context}")
            case = Case(dtype, context)
            case.measure()
            reached, reads, peaks = [], [], []
            for _ in range(settings.rounds):
                reads.append(reading.measure())
                peaks.append(products.measure())
                reached.append(case.measure())
            roof = min(median(reads), median(peaks) / case.intensity)
            which = "memory" if roof == median(reads) else "multiply-adds"
            what = f"{name}, context {context}: {median(reached) / 1e9:.1f} of {roof / 1e9:.1f} GB/s ({which})"
            lines.append(Line(what=what, value=median(reached) / roof, bar=bar))
            samples[f"{name}/{context}"] = {"attention": reached, "read": reads, "multiply_adds": peaks}
    notes = [f"batch {BATCH}, {HEADS} query and {KV_HEADS} KV heads of {WIDTH}; multiply-adds: {products.words}"]
    return Section(title="attention: decode on the CPU", lines=lines, notes=notes, samples=samples)
