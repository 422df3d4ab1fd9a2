"""How near the CPU kernels of the runtime come to what the machine can do: `python -m benchmarks.cpu_kernels`.

Every case runs in turn with a read of 256 MiB by the same threads and with multiply-adds in registers, several times
over; the roof of a repeat is min(read bandwidth, peak / intensity) of that repeat, since what else runs on a machine
changes from second to second. Rates and shares are medians. Data is cold: each call finds other rows than the last.

Wanted: attention at least 0.7 of the roof from 512 tokens of context on and 0.6 at 128, experts at 8 tokens 0.7.
`--crossover` times experts and linear layers by the compiled kernel and by torch, for ever more tokens: what
`MOST_VISITS` and `MOST_TOKENS` come from. Tests assert none of this.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from runtime import cpu_experts, cpu_linear
from runtime.cpu_attention import attend_decode
from runtime.cpu_experts import Routing, apply_experts
from runtime.cpu_products import multiplies_bf16
from runtime.native_library import open_library

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
READ_BYTES = 1 << 28
COLD_BYTES = 3 << 28
"""Bytes of data that a case goes round in; several times what the caches of two cores see."""

ROUNDS = 2_000_000
REPEATS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case: medians over the repeats."""

    case: str
    dtype: str
    gb_per_s: float
    gflop_per_s: float
    read_gb_per_s: float
    roof_gb_per_s: float
    share_of_roof: float


class Machine:
    """What the machine can do at this moment."""

    def __init__(self, threads: int) -> None:
        library = open_library()
        if library is None:
            raise SystemExit("the compiled kernels are what this measures, and there are none here")
        self.library, self.threads = library, threads
        self.memory = torch.ones(READ_BYTES, dtype=torch.uint8)  # of zeros all pages would be one

    def read(self) -> float:
        """Bytes per second."""
        began = time.perf_counter()
        self.library.hrm_read(self.memory.data_ptr(), READ_BYTES, self.threads)
        return READ_BYTES / (time.perf_counter() - began)

    def multiply_add(self, is_bf16: bool) -> float:
        """FLOP per second; 0 for bf16 where there are no bf16 products."""
        done = ctypes.c_double()
        began = time.perf_counter()
        self.library.hrm_multiply_add(ROUNDS, is_bf16, self.threads, ctypes.byref(done))
        return done.value / (time.perf_counter() - began)


def measure(
    machine: Machine, case: str, dtype: torch.dtype, run: Callable[[], None], moved: int, flop: int, in_pairs: bool
) -> Row:
    """Time one round of a case, `moved` bytes and `flop` FLOP, against the roof of the same moment.

    `in_pairs`: all products can be bf16 pairs where the machine has them; else the peak is that of float32.
    """
    reads, roofs, rates = [], [], []
    run()
    for _ in range(REPEATS):
        before, peak = machine.read(), (in_pairs and machine.multiply_add(True)) or machine.multiply_add(False)
        began = time.perf_counter()
        run()
        rates.append(moved / (time.perf_counter() - began))
        reads.append((before + machine.read()) / 2)
        roofs.append(min(reads[-1], peak * moved / flop))
    return Row(
        case=case,
        dtype=NAMES[dtype],
        gb_per_s=statistics.median(rates) / 1e9,
        gflop_per_s=statistics.median(rates) * flop / moved / 1e9,
        read_gb_per_s=statistics.median(reads) / 1e9,
        roof_gb_per_s=statistics.median(roofs) / 1e9,
        share_of_roof=statistics.median(rate / roof for rate, roof in zip(rates, roofs, strict=True)),
    )


def measure_attention(machine: Machine, context: int, dtype: torch.dtype, heads: tuple[int, int, int]) -> Row:
    """16 requests of one context."""
    requests, (query_heads, groups, width) = 16, heads
    rows = requests * context
    moved = 2 * rows * groups * width * dtype.itemsize
    layers = max(1, COLD_BYTES // moved)
    pool = (
        torch.randn(64, groups, width)
        .to(dtype)
        .repeat(2 * layers * rows // 64, 1, 1)
        .view(layers, 2, rows, groups, width)
    )
    q = torch.randn(requests, query_heads, width).to(dtype)
    first, lengths = torch.arange(requests) * context, torch.full((requests,), context)
    out = torch.empty_like(q)

    def run() -> None:
        for keys, values in pool:
            attend_decode(q, keys, values, first, lengths, out, scale=width**-0.5, window=None, threads=machine.threads)

    name = f"attention {query_heads}/{groups} heads, context {context}"
    flop = 4 * rows * query_heads * width
    # In bf16 half of the work is in float32, whose peak is taken for all of it.
    return measure(machine, name, dtype, run, layers * moved, layers * flop, in_pairs=False)


def draw_experts(count: int, hidden: int, width: int, dtype: torch.dtype) -> list[tuple[int, Tensor]]:
    """Packed experts whose rows repeat after 64, which is quick to draw and costs the same to compute."""
    some = (torch.randn(64, 3, hidden) * hidden**-0.5).to(dtype)
    return [(expert, some.repeat(width // 64, 1, 1)) for expert in range(count)]


def visit_all(tokens: int, experts: int) -> Routing:
    """Every token visits every expert."""
    return Routing(
        order=torch.arange(tokens).repeat(experts),
        starts=[tokens * expert for expert in range(experts + 1)],
        weights=torch.full((tokens * experts,), 1 / experts),
    )


def measure_experts(machine: Machine, tokens: int, count: int, hidden: int, width: int, dtype: torch.dtype) -> Row:
    """Experts that some tokens visit each."""
    segments, routing = draw_experts(count, hidden, width, dtype), visit_all(tokens, count)
    x, out = torch.randn(tokens, hidden).to(dtype), torch.zeros(tokens, hidden)

    def run() -> None:
        apply_experts(x, segments, routing, out, threads=machine.threads)

    moved = sum(rows.nbytes for _, rows in segments)
    name = f"experts {count} x {hidden} x {width}, {tokens} tokens each"
    flop = 2 * tokens * moved // dtype.itemsize
    return measure(machine, name, dtype, run, moved, flop, in_pairs=dtype == torch.bfloat16)


def measure_linear(
    machine: Machine,
    tokens: int,
    n: int,
    hidden: int,
    dtype: torch.dtype,
    by: str,
    run_one: Callable[[Tensor, Tensor], object],
) -> Row:
    """A linear layer by the kernel or by torch."""
    count = max(1, COLD_BYTES // (n * hidden * dtype.itemsize))
    weights = torch.randn(64, hidden).to(dtype).repeat(count * n // 64, 1).view(count, n, hidden)
    x = torch.randn(tokens, hidden).to(dtype)

    def run() -> None:
        for w in weights:
            run_one(x, w)

    name = f"linear [{tokens}, {hidden}] x [{n}, {hidden}] by {by}"
    flop = 2 * tokens * weights.numel()
    return measure(machine, name, dtype, run, weights.nbytes, flop, in_pairs=dtype == torch.bfloat16)


def measure_all(machine: Machine, dtypes: Sequence[torch.dtype], is_quick: bool) -> Iterator[Row]:
    """The cases, one after the other."""
    for context, dtype in itertools.product((128, 512) if is_quick else (128, 512, 1024, 4096), dtypes):
        yield measure_attention(machine, context, dtype, (32, 8, 128))
    for dtype in dtypes:
        yield measure_attention(machine, 512, dtype, (16, 16, 128))
    for tokens, dtype in itertools.product((8,) if is_quick else (1, 8, 32), dtypes):
        yield measure_experts(machine, tokens, 8, 1024, 3584, dtype)
    for dtype in dtypes:
        yield measure_experts(machine, 8, 1, 4096, 14336, dtype)
    ways: dict[str, Callable[[Tensor, Tensor], object]] = {
        "kernel": lambda x, w: cpu_linear.linear(x, w, None, machine.threads),
        "torch": torch.nn.functional.linear,
    }
    shapes = ((32, 4096),) if is_quick else ((8, 4096), (32, 4096), (32, 32000))
    for (tokens, n), dtype, (by, way) in itertools.product(shapes, dtypes, ways.items()):
        if dtype != torch.float16:
            yield measure_linear(machine, tokens, n, 1024, dtype, by, way)


def measure_crossover(machine: Machine, dtypes: Sequence[torch.dtype]) -> Iterator[dict[str, object]]:
    """Fastest times of each way for ever more tokens: which is fastest when nothing comes between."""
    can_group = cpu_experts.takes_many
    # What the limits of `runtime.cpu_experts` and `runtime.cpu_linear` are set to, so that all goes one way.
    ways = {"streaming": (1 << 30, True), "side by side": (0, True), "torch": (0, False)}
    for dtype, tokens in itertools.product(dtypes, (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)):
        segments, routing = draw_experts(2, 1024, 3584, dtype), visit_all(tokens, 2)
        w = segments[0][1].view(-1, 1024)
        x, out = torch.randn(tokens, 1024).to(dtype), torch.zeros(tokens, 1024)
        found: dict[str, list[float]] = {}
        for _ in range(REPEATS):
            for by, (most, grouped) in ways.items():
                cpu_experts.MOST_VISITS[dtype] = cpu_experts.MOST_STREAMED = most
                cpu_experts.takes_many = can_group if grouped else lambda *_: False
                began = time.perf_counter()
                apply_experts(x, segments, routing, out, threads=machine.threads)
                found.setdefault(f"experts {by} [ms]", []).append((time.perf_counter() - began) * 1e3)
            for by, most in (("kernel", 1 << 30), ("torch", 0)):
                cpu_linear.MOST_TOKENS[dtype] = most
                began = time.perf_counter()
                cpu_linear.linear(x, w, None, machine.threads)
                found.setdefault(f"linear by {by} [ms]", []).append((time.perf_counter() - began) * 1e3)
        yield {"dtype": NAMES[dtype], "tokens": tokens, **{name: min(ms) for name, ms in found.items()}}


def measure_peaks(machine: Machine) -> dict[str, float]:
    """Medians of what the machine and torch's matrix products do, taken in turn."""
    dtypes = (torch.float32, torch.bfloat16) if multiplies_bf16() else (torch.float32,)  # else 0.3 GFLOP/s, for minutes
    a = {dtype: torch.randn(1024, 2048).to(dtype) for dtype in dtypes}
    b = {dtype: torch.randn(2048, 2048).to(dtype) for dtype in a}
    found: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        found.setdefault("read [GB/s]", []).append(machine.read() / 1e9)
        found.setdefault("fp32 multiply-add [GFLOP/s]", []).append(machine.multiply_add(False) / 1e9)
        found.setdefault("bf16 pairs [GFLOP/s]", []).append(machine.multiply_add(True) / 1e9)
        for dtype, left in a.items():
            began = time.perf_counter()
            left @ b[dtype]
            rate = 2 * 1024 * 2048 * 2048 / (time.perf_counter() - began)
            found.setdefault(f"torch {NAMES[dtype]} product [GFLOP/s]", []).append(rate / 1e9)
    return {name: statistics.median(each) for name, each in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=NAMES.values(), action="append", help="again for several; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--crossover", action="store_true", help="kernel and torch for ever more tokens instead")
    parser.add_argument("--json", action="store_true", help="one document")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    dtypes = [dtype for dtype, name in NAMES.items() if not options.dtype or name in options.dtype]
    machine = Machine(options.threads)
    peaks = measure_peaks(machine)
    document: dict[str, object] = {"threads": options.threads, "cores": os.cpu_count(), "peaks": peaks}
    out = sys.stderr if options.json else sys.stdout
    for name, value in peaks.items():
        print(f"{name:32} {value:7.1f}", file=out)
    if options.crossover:
        times = []
        for found in measure_crossover(machine, dtypes):
            times.append(found)
            print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v:>4}" for k, v in found.items()), file=out)
        document["crossover"] = times
    else:
        rows = []
        print(f"{'case':52} dtype   GB/s GFLOP/s   read   roof  share", file=out)
        for row in measure_all(machine, dtypes, options.quick):
            rows.append(asdict(row))
            print(
                f"{row.case:52} {row.dtype:5} {row.gb_per_s:6.1f} {row.gflop_per_s:7.0f} "
                f"{row.read_gb_per_s:6.1f} {row.roof_gb_per_s:6.1f} {row.share_of_roof:6.2f}",
                file=out,
                flush=True,
            )
        document["cases"] = rows
    if options.json:
        print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
