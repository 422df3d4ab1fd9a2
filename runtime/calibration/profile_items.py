"""From measurements to the quantities of a profile: each with its value, its source and the measurements it comes from.

A rate is written once: as a base rate where there is no share for it (links, staging, CPU memory), else as a peak and
the share of it that was reached. So nothing is discounted twice (docs/profiles.md).
"""

from __future__ import annotations

import math
from typing import Final

from hrm.executable import PROCESS_BYTES
from hrm.profile_schema import FIELDS
from hrm.units import GIB
from runtime.calibration.bench import Bench
from runtime.calibration.constants import GpuConstants, Point, bound_share, fit_cpu, worst_error
from runtime.calibration.cpu_rates import CPU_TOKENS
from runtime.calibration.gpu_items import gpu_quantities
from runtime.calibration.layer_work import AttentionWork, LayerWork
from runtime.calibration.machine import MachineFacts
from runtime.calibration.quantities import (
    Datasheet,
    Item,
    default,
    derived,
    fastest_products,
    flops_text,
    measured,
    rate_text,
    read_out,
    seconds_text,
    share_text,
    size_text,
)

__all__ = ["DISK_SHARE", "EMULATED_SHARE", "collect_items"]

WAYS: Final = ("host_to_device", "device_to_host")
EMULATED_SHARE: Final = 0.2
"""Of the machine's memory that the emulated accelerator is given; a choice, not a measurement."""


DISK_SHARE: Final = 0.9
"""Of the free space of a disk, that a plan may fill."""


def collect_items(
    bench: Bench, facts: MachineFacts, layer: LayerWork, attention: AttentionWork, datasheet: Datasheet
) -> dict[str, Item]:
    """Every quantity by its dotted key, in the order of the schema."""
    items = _capacities(bench, facts) | _copies(bench) | _cpu(bench, layer, attention)
    items |= gpu_quantities(bench, layer, attention, datasheet)
    return {key: items[key] for key in FIELDS if key in items}


def _capacities(bench: Bench, facts: MachineFacts) -> dict[str, Item]:
    """Sizes and counts: read from the system, or chosen."""
    limit = "the container's limit" if facts.container_limit_bytes == facts.memory_bytes else "/proc/meminfo, MemTotal"
    items = {
        "cpu.cores": read_out(str(facts.lane_cores), "the process's affinity"),
        "gpu.count": read_out("1", "the system: one accelerator"),
    }
    memory = facts.memory_bytes
    if bench.device.cuda:
        total = facts.gpus[0].memory_bytes
        items["gpu.memory"] = items["gpu.usable_memory"] = read_out(size_text(total), "the driver, total memory")
        items["gpu.count"] = read_out(str(len(facts.gpus)), "the driver")
        if "gpu context" in bench.samples:
            items["gpu.context"] = measured(
                size_text(bench.samples["gpu context"].median), bench.samples["gpu context"]
            )
    else:
        given = max(0.25, math.floor(EMULATED_SHARE * memory / GIB * 4) / 4) * GIB
        memory -= given
        chosen = f"the emulated accelerator is given {100 * EMULATED_SHARE:.0f} % of the machine's memory"
        items["gpu.memory"] = items["gpu.usable_memory"] = default(size_text(given), chosen)
        items["gpu.context"] = default("0 GiB", "nothing emulated has a CUDA context")
        items["cpu.cores"] = read_out(
            str(facts.lane_cores),
            f"the process's affinity: {facts.cores} cores, less the accelerator's where there are two",
        )
        if facts.cores > facts.lane_cores:
            items["gpu.host_cores"] = read_out(
                str(facts.cores - facts.lane_cores), "what the runtime gives the accelerator"
            )
        limit += ", less the accelerator's"
    items["cpu.memory"] = read_out(size_text(memory), limit)
    in_use = max(0.0, facts.memory_bytes - facts.free_bytes)
    items["cpu.reserved"] = read_out(
        f"{math.ceil((in_use + PROCESS_BYTES) / GIB * 100) / 100:g} GiB",
        f"/proc/meminfo: {in_use / GIB:.2f} GiB in use by others; and {PROCESS_BYTES / GIB:g} GiB for a run's process",
    )
    if bench.device.cuda and facts.lockable_bytes is not None:
        items["cpu.lockable"] = read_out(size_text(facts.lockable_bytes), "ulimit -l")
    if "disk read" in bench.samples:
        free = math.floor(DISK_SHARE * facts.disk_free_bytes / GIB) * GIB
        how = f"{facts.disk_folder}: {100 * DISK_SHARE:.0f} % of its free space ({facts.disk_file_system})"
        items["disk.size"] = read_out(size_text(free), how)
        for way in ("read", "write"):
            sample = bench.samples[f"disk {way}"]
            items[f"disk.{way}"] = measured(
                rate_text(sample.median), sample, "past the page cache where that is possible"
            )
    return items


def _copies(bench: Bench) -> dict[str, Item]:
    """Both directions of the link, staging, page-locking."""
    samples, items = bench.samples, {}
    for way in WAYS:
        largest = f"{bench.sizes.copies[-1] / 2**20:g} MiB"
        pinned = samples[f"copy {way} pinned {largest}"]
        items[f"link.{way}.pinned"] = measured(rate_text(pinned.median), pinned)
        for key, name in (
            ("pageable", f"copy {way} pageable {largest}"),
            ("with_opposite", f"copy {way} pinned {largest} while the other direction copies"),
        ):
            sample = samples[name]
            more = "came out above the pinned rate, which is written" if sample.median > pinned.median else ""
            items[f"link.{way}.{key}"] = measured(rate_text(min(sample.median, pinned.median)), sample, more)
    small = samples["copy of 4 KiB"]
    latency, names, more = small.median, [small.name], ""
    if "hand-over between threads" in samples:
        latency += samples["hand-over between threads"].median
        names, more = [*names, "hand-over between threads"], " plus hand-over between threads, emulated"
    items["link.copy_latency"] = derived(seconds_text(latency), f"copy of 4 KiB{more}", names)
    staging = samples["staging 1 thread"]
    items["staging"] = measured(rate_text(staging.median), staging, "the runtime stages with one thread")
    name = "page-locking" if bench.device.cuda else "first write of fresh pages"
    more = "" if bench.device.cuda else "nothing is page-locked where the accelerator is emulated"
    items["pinning"] = measured(rate_text(samples[name].median), samples[name], more)
    for way in WAYS:
        name = f"copy {way} of all GPUs"
        if name in samples:
            items[f"host_totals.{way}"] = measured(rate_text(samples[name].median), samples[name])
    return items


def _cpu(bench: Bench, layer: LayerWork, attention: AttentionWork) -> dict[str, Item]:
    samples, dtype = bench.samples, bench.dtypes[0]
    read = samples["cpu read"]
    bandwidth = read.median
    items = {"cpu.bandwidth": measured(rate_text(bandwidth), read, "by the cores of the CPU lane")}
    if bench.device.emulated:
        items["host_totals.memory"] = _memory_total(bench)
    peaks = fastest_products(bench, "cpu")
    for name, sample in peaks.items():
        items[f"cpu.peak.{name}"] = measured(flops_text(sample.median), sample, "the fastest of the products timed")
    alone = [s for s in samples.starting(f"cpu attention {dtype} ") if " while " not in s.name]
    rates = [sample.median for sample in alone]
    rate = math.exp(math.fsum(map(math.log, rates)) / len(rates))
    share = bound_share(rate, bandwidth)
    items["efficiency.cpu_attention"] = derived(
        share_text(share),
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
    peak = peaks[dtype].median
    flops, overlap = fit_cpu(points, bytes_per_s=bandwidth, least_flops_per_s=needed, peak_flops_per_s=peak)
    names = [point.name for point in points] + [peaks[dtype].name]
    constants = GpuConstants(flops_per_s=flops, bytes_per_s=bandwidth, overlap=overlap, fixed_s=0.0)
    how = f"fitted to experts in {dtype} of {len(points)} sizes, which it prices within "
    how += f"{100 * worst_error(points, constants):.0f} %"
    items["efficiency.cpu_flops"] = derived(
        share_text(bound_share(flops, peak)), f"{flops / 1e9:.4g} GFLOP/s, {how}, over cpu.peak.{dtype}", names
    )
    items["efficiency.cpu_overlap"] = derived(share_text(overlap), how, names)
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
    return derived(rate_text(seen[best]), f"the most that was seen: {' and '.join(best)}{twice}", best)
