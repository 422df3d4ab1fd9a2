"""From measurements to the quantities of a profile: each with its value, its source and the measurements it comes from.

A rate is written once: as a base rate where there is no share for it (links, staging, CPU memory), else as a peak and
the share of it that was reached. So nothing is discounted twice (docs/profiles.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hrm.executable import PROCESS_BYTES
from hrm.full_cost import KERNELS_PER_LAYER
from hrm.profile import Source
from hrm.profile_schema import FIELDS
from hrm.units import GIB
from runtime.calibration.bench import Bench
from runtime.calibration.constants import (
    GpuConstants,
    Point,
    bound_share,
    fit_attention,
    fit_cpu_flops,
    fit_gpu,
    fit_prefill,
    worst_error,
)
from runtime.calibration.cpu_rates import CPU_TOKENS
from runtime.calibration.layer_work import AttentionWork, LayerWork
from runtime.calibration.machine import MachineFacts
from runtime.calibration.samples import Sample

__all__ = ["EMULATED_SHARE", "Datasheet", "Item", "collect_items"]

WAYS: Final = ("host_to_device", "device_to_host")
EMULATED_SHARE: Final = 0.2
"""Of the machine's memory that the emulated accelerator is given; a choice, not a measurement."""


DISK_SHARE: Final = 0.9
"""Of the free space of a disk, that a plan may fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One quantity of the profile.

    Attributes
    ----------
    text : str
        Value and unit.
    source : Source
    note : str
        How it was found.
    samples : tuple of str
        Names of the measurements it comes from; none for what was read from the system or is a default.
    """

    text: str
    source: Source
    note: str
    samples: tuple[str, ...] = ()


Datasheet = Mapping[str, tuple[str, float]]
"""Of a bundled GPU model: text and value in SI of ``gpu.bandwidth`` and ``gpu.peak.*``; empty for an unknown one."""


def collect_items(
    bench: Bench, facts: MachineFacts, layer: LayerWork, attention: AttentionWork, datasheet: Datasheet
) -> dict[str, Item]:
    """Every quantity by its dotted key, in the order of the schema."""
    items = _capacities(bench, facts) | _copies(bench) | _cpu(bench, layer, attention)
    items |= _gpu(bench, layer, attention, datasheet)
    return {key: items[key] for key in FIELDS if key in items}


def _rate(value: float) -> str:
    return f"{value / 1e9:.4g} GB/s"


def _size(value: float) -> str:
    return f"{math.floor(value / GIB * 100) / 100:g} GiB"


def _flops(value: float) -> str:
    return f"{value / 1e12:.4g} TFLOP/s"


def _share(value: float) -> str:
    return f"{100 * value:.4g} %"


def _seconds(value: float) -> str:
    return f"{value * 1e6:.4g} us"


def _measured(text: str, sample: Sample, more: str = "") -> Item:
    note = f"{sample.name}: median of {len(sample.values)}, spread {100 * sample.spread:.1f} %"
    return Item(text=text, source="measured", note=f"{note}; {more}" if more else note, samples=(sample.name,))


def _fitted(text: str, what: str, samples: Sequence[str]) -> Item:
    return Item(text=text, source="measured", note=what, samples=tuple(samples))


def _read(text: str, note: str) -> Item:
    return Item(text=text, source="measured", note=f"read from {note}")


def _default(text: str, note: str) -> Item:
    return Item(text=text, source="estimated", note=f"default: {note}")


def _capacities(bench: Bench, facts: MachineFacts) -> dict[str, Item]:
    """Sizes and counts: read from the system, or chosen."""
    limit = "the container's limit" if facts.container_limit_bytes == facts.memory_bytes else "/proc/meminfo, MemTotal"
    items = {
        "cpu.cores": _read(str(facts.lane_cores), "the process's affinity"),
        "gpu.count": _read("1", "the system: one accelerator"),
    }
    memory = facts.memory_bytes
    if bench.device.cuda:
        total = facts.gpus[0].memory_bytes
        items["gpu.memory"] = items["gpu.usable_memory"] = _read(_size(total), "the driver, total memory")
        items["gpu.count"] = _read(str(len(facts.gpus)), "the driver")
        if "gpu context" in bench.samples:
            items["gpu.context"] = _measured(_size(bench.samples["gpu context"].median), bench.samples["gpu context"])
    else:
        given = max(0.25, math.floor(EMULATED_SHARE * memory / GIB * 4) / 4) * GIB
        memory -= given
        chosen = f"the emulated accelerator is given {100 * EMULATED_SHARE:.0f} % of the machine's memory"
        items["gpu.memory"] = items["gpu.usable_memory"] = _default(_size(given), chosen)
        items["gpu.context"] = _default("0 GiB", "nothing emulated has a CUDA context")
        items["cpu.cores"] = _read(
            str(facts.lane_cores),
            f"the process's affinity: {facts.cores} cores, less the accelerator's where there are two",
        )
        if facts.cores > facts.lane_cores:
            items["gpu.host_cores"] = _read(
                str(facts.cores - facts.lane_cores), "what the runtime gives the accelerator"
            )
        limit += ", less the accelerator's"
    items["cpu.memory"] = _read(_size(memory), limit)
    in_use = max(0.0, facts.memory_bytes - facts.free_bytes)
    items["cpu.reserved"] = _read(
        f"{math.ceil((in_use + PROCESS_BYTES) / GIB * 100) / 100:g} GiB",
        f"/proc/meminfo: {in_use / GIB:.2f} GiB in use by others; and {PROCESS_BYTES / GIB:g} GiB for a run's process",
    )
    if bench.device.cuda and facts.lockable_bytes is not None:
        items["cpu.lockable"] = _read(_size(facts.lockable_bytes), "ulimit -l")
    if "disk read" in bench.samples:
        free = math.floor(DISK_SHARE * facts.disk_free_bytes / GIB) * GIB
        how = f"{facts.disk_folder}: {100 * DISK_SHARE:.0f} % of its free space ({facts.disk_file_system})"
        items["disk.size"] = _read(_size(free), how)
        for way in ("read", "write"):
            sample = bench.samples[f"disk {way}"]
            items[f"disk.{way}"] = _measured(_rate(sample.median), sample, "past the page cache where that is possible")
    return items


def _copies(bench: Bench) -> dict[str, Item]:
    """Both directions of the link, staging, page-locking."""
    samples, items = bench.samples, {}
    for way in WAYS:
        largest = f"{bench.sizes.copies[-1] / 2**20:g} MiB"
        pinned = samples[f"copy {way} pinned {largest}"]
        items[f"link.{way}.pinned"] = _measured(_rate(pinned.median), pinned)
        for key, name in (
            ("pageable", f"copy {way} pageable {largest}"),
            ("with_opposite", f"copy {way} pinned {largest} while the other direction copies"),
        ):
            sample = samples[name]
            more = "came out above the pinned rate, which is written" if sample.median > pinned.median else ""
            items[f"link.{way}.{key}"] = _measured(_rate(min(sample.median, pinned.median)), sample, more)
    small = samples["copy of 4 KiB"]
    latency, names, more = small.median, [small.name], ""
    if "hand-over between threads" in samples:
        latency += samples["hand-over between threads"].median
        names, more = [*names, "hand-over between threads"], " plus hand-over between threads, emulated"
    items["link.copy_latency"] = _fitted(_seconds(latency), f"copy of 4 KiB{more}", names)
    staging = samples["staging 1 thread"]
    items["staging"] = _measured(_rate(staging.median), staging, "the runtime stages with one thread")
    name = "page-locking" if bench.device.cuda else "first write of fresh pages"
    more = "" if bench.device.cuda else "nothing is page-locked where the accelerator is emulated"
    items["pinning"] = _measured(_rate(samples[name].median), samples[name], more)
    for way in WAYS:
        name = f"copy {way} of all GPUs"
        if name in samples:
            items[f"host_totals.{way}"] = _measured(_rate(samples[name].median), samples[name])
    return items


def _peaks(bench: Bench, level: str) -> dict[str, Sample]:
    """The fastest product of every format, on a level."""
    found: dict[str, Sample] = {}
    for sample in bench.samples.starting(f"{level} product "):
        dtype = sample.name.split()[2]
        if dtype not in found or sample.median > found[dtype].median:
            found[dtype] = sample
    return found


def _cpu(bench: Bench, layer: LayerWork, attention: AttentionWork) -> dict[str, Item]:
    samples, dtype = bench.samples, bench.dtypes[0]
    read = samples["cpu read"]
    bandwidth = read.median
    items = {"cpu.bandwidth": _measured(_rate(bandwidth), read, "by the cores of the CPU lane")}
    if bench.device.emulated:
        items["host_totals.memory"] = _memory_total(bench)
    peaks = _peaks(bench, "cpu")
    for name, sample in peaks.items():
        items[f"cpu.peak.{name}"] = _measured(_flops(sample.median), sample, "the fastest of the products timed")
    alone = [s for s in samples.starting(f"cpu attention {dtype} ") if " while " not in s.name]
    rates = [sample.median for sample in alone]
    rate = math.exp(math.fsum(map(math.log, rates)) / len(rates))
    share = bound_share(rate, bandwidth)
    items["efficiency.cpu_attention"] = _fitted(
        _share(share),
        f"{rate / 1e9:.3g} GB/s of KV cache, queries and results, geometric mean of {len(rates)} batches and contexts "
        f"({min(rates) / 1e9:.3g} to {max(rates) / 1e9:.3g}), over cpu.bandwidth",
        [sample.name for sample in alone] + [read.name],
    )
    work = attention.work(*bench.sizes.attention[-1])
    needed = rate * float(work.flops / work.bytes_touched)
    points = []
    for tokens in CPU_TOKENS:
        works = layer.ffn_works(tokens)
        sample = samples[f"cpu experts {dtype} {tokens} tokens"]
        points.append(Point(name=sample.name, works=works, seconds=float(works[0].flops) / sample.median))
    flops = fit_cpu_flops(points, bytes_per_s=bandwidth, least_flops_per_s=needed)
    items["efficiency.cpu_flops"] = _fitted(
        _share(bound_share(flops, peaks[dtype].median)),
        f"{flops / 1e9:.4g} GFLOP/s of experts in {dtype} where reading them does not bind, over cpu.peak.{dtype}",
        [point.name for point in points] + [peaks[dtype].name],
    )
    return items


def _memory_total(bench: Bench) -> Item:
    """The most that lanes together were seen to move in CPU memory; a copy there reads and writes."""
    samples, sizes = bench.samples, bench.sizes
    largest = f"{sizes.copies[-1] / 2**20:g} MiB"
    opposite = [f"copy {way} pinned {largest} while the other direction copies" for way in WAYS]
    requests, context = sizes.attention[-1]
    attention = f"cpu attention {bench.dtypes[0]} {requests} requests of {context} while copies to the GPU run"
    beside = f"copy host_to_device pinned {largest} while the CPU attends"
    seen: dict[tuple[str, ...], float] = {
        ("cpu read",): samples["cpu read"].median,
        ("all cores read",): samples["all cores read"].median,
    }
    seen[tuple(opposite)] = 2.0 * sum(samples[name].median for name in opposite)
    seen[attention, beside] = samples[attention].median + 2.0 * samples[beside].median
    best = max(seen, key=lambda names: seen[names])
    twice = ", a copy counted twice" if len(best) > 1 else ""
    return _fitted(_rate(seen[best]), f"the most that was seen: {' and '.join(best)}{twice}", best)


def _gpu(bench: Bench, layer: LayerWork, attention: AttentionWork, datasheet: Datasheet) -> dict[str, Item]:
    samples, dtype, items = bench.samples, bench.dtypes[0], {}
    peaks = _peaks(bench, "gpu")
    for name, sample in peaks.items():
        items[f"gpu.peak.{name}"] = _peak(f"gpu.peak.{name}", sample, _flops, datasheet)
    memory = samples["gpu memory"]
    items["gpu.bandwidth"] = _peak("gpu.bandwidth", memory, _rate, datasheet)
    launch = samples["gpu launch"]
    items["launch_latency"] = _measured(_seconds(launch.median), launch)
    peak = max(peaks[dtype].median, datasheet.get(f"gpu.peak.{dtype}", ("", 0.0))[1])
    bandwidth = max(memory.median, datasheet.get("gpu.bandwidth", ("", 0.0))[1])
    points, cached, prefill = gpu_points(bench, layer, attention)
    small = samples["gpu layer of small widths"]
    fixed = min(small.median, *(point.seconds for point in points))
    # What is reached is at most what was measured of products and memory, whatever a datasheet says.
    found = fit_gpu(points, fixed_s=fixed, peak_flops_per_s=peaks[dtype].median, peak_bytes_per_s=memory.median)
    read = fit_attention(cached, found, peak_bytes_per_s=memory.median)
    flops = fit_prefill(prefill, found, peak_flops_per_s=peaks[dtype].median)
    names = [point.name for point in points]
    how = f"fitted to {len(points)} layers in {dtype}, which it prices within {_worst(points, found)}"
    items["efficiency.gpu_flops_decode"] = _fitted(_share(bound_share(found.flops_per_s, peak)), how, names)
    items["efficiency.gpu_bandwidth"] = _fitted(_share(bound_share(found.bytes_per_s, bandwidth)), how, names)
    items["efficiency.gpu_overlap"] = _fitted(_share(found.overlap), how, names)
    items["efficiency.gpu_attention"] = _fitted(
        _share(bound_share(read, bandwidth)),
        f"fitted to {len(cached)} attentions in {dtype}, which it prices within "
        f"{_worst(cached, replace(found, bytes_per_s=read))}",
        [point.name for point in cached],
    )
    after = replace(found, flops_per_s=flops)
    items["efficiency.gpu_flops_prefill"] = _fitted(
        _share(bound_share(flops, peak)),
        f"fitted to {len(prefill)} prefills in {dtype}, which it prices within {_worst(prefill, after)}",
        [point.name for point in prefill],
    )
    rest = max(0.0, found.fixed_s - KERNELS_PER_LAYER * launch.median)
    items["efficiency.overhead_per_micro_batch"] = _fitted(
        _seconds(rest),
        f"{small.name}: {fixed * 1e6:.4g} us, less {KERNELS_PER_LAYER} launches",
        [small.name, launch.name],
    )
    if "all-reduce" in samples:
        items["gpu_link"] = _measured(_rate(samples["all-reduce"].median), samples["all-reduce"])
    return items


def _peak(key: str, sample: Sample, words: Callable[[float], str], datasheet: Datasheet) -> Item:
    """The datasheet's value of a known GPU, unless more was measured; else what was measured."""
    text, value = datasheet.get(key, ("", 0.0))
    if value >= sample.median:
        note = f"datasheet of the bundled GPU model; {sample.name} reaches {words(sample.median)}"
        return Item(text=text, source="datasheet", note=note, samples=(sample.name,))
    return _measured(words(sample.median), sample)


def _worst(points: Sequence[Point], constants: GpuConstants) -> str:
    return f"{100 * worst_error(points, constants):.0f} %"


def gpu_points(
    bench: Bench, layer: LayerWork, attention: AttentionWork
) -> tuple[list[Point], list[Point], list[Point]]:
    """What the GPU's constants are fitted to: (layers in decode, attention in decode, prefill)."""
    samples, dtype, sizes = bench.samples, bench.dtypes[0], bench.sizes
    decode, cached = [], []
    for tokens in sizes.decode_tokens:
        sample = samples[f"gpu layer {dtype} {tokens} tokens"]
        decode.append(Point(name=sample.name, works=layer.decode_works(tokens), seconds=sample.median))
    for requests, context in sizes.attention:
        sample = samples[f"gpu attention {dtype} {requests} requests of {context}"]
        work = attention.work(requests, context)
        seconds = float(work.bytes_touched) / sample.median
        cached.append(Point(name=sample.name, works=[work], seconds=seconds, fixed=False))
    prefill = []
    for prompts, length in sizes.prefill:
        sample = samples[f"gpu prefill {dtype} {prompts} prompts of {length}"]
        works = layer.prefill_works(prompts, length)
        prefill.append(Point(name=sample.name, works=works, seconds=sample.median))
    return decode, cached, prefill
