"""What measurements of the GPU make of a profile: peaks, shares of them, launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hrm.full_cost import KERNELS_PER_LAYER
from runtime.calibration.bench import Bench
from runtime.calibration.constants import (
    GpuConstants,
    Point,
    bound_share,
    fit_attention,
    fit_gpu,
    fit_prefill,
    worst_error,
)
from runtime.calibration.layer_work import AttentionWork, LayerWork
from runtime.calibration.quantities import (
    Datasheet,
    Item,
    derived,
    fastest_products,
    flops_text,
    measured,
    rate_text,
    seconds_text,
    share_text,
)
from runtime.calibration.samples import Sample

__all__ = ["gpu_points", "gpu_quantities"]


def gpu_quantities(bench: Bench, layer: LayerWork, attention: AttentionWork, datasheet: Datasheet) -> dict[str, Item]:
    samples, dtype, items = bench.samples, bench.dtypes[0], {}
    peaks = fastest_products(bench, "gpu")
    for name, sample in peaks.items():
        items[f"gpu.peak.{name}"] = _peak(f"gpu.peak.{name}", sample, flops_text, datasheet)
    memory = samples["gpu memory"]
    items["gpu.bandwidth"] = _peak("gpu.bandwidth", memory, rate_text, datasheet)
    launch = samples["gpu launch"]
    items["launch_latency"] = measured(seconds_text(launch.median), launch)
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
    items["efficiency.gpu_flops_decode"] = derived(share_text(bound_share(found.flops_per_s, peak)), how, names)
    items["efficiency.gpu_bandwidth"] = derived(share_text(bound_share(found.bytes_per_s, bandwidth)), how, names)
    items["efficiency.gpu_overlap"] = derived(share_text(found.overlap), how, names)
    items["efficiency.gpu_attention"] = derived(
        share_text(bound_share(read, bandwidth)),
        f"fitted to {len(cached)} attentions in {dtype}, which it prices within "
        f"{_worst(cached, replace(found, bytes_per_s=read))}",
        [point.name for point in cached],
    )
    after = replace(found, flops_per_s=flops)
    items["efficiency.gpu_flops_prefill"] = derived(
        share_text(bound_share(flops, peak)),
        f"fitted to {len(prefill)} prefills in {dtype}, which it prices within {_worst(prefill, after)}",
        [point.name for point in prefill],
    )
    rest = max(0.0, found.fixed_s - KERNELS_PER_LAYER * launch.median)
    items["efficiency.overhead_per_micro_batch"] = derived(
        seconds_text(rest),
        f"{small.name}: {fixed * 1e6:.4g} us, less {KERNELS_PER_LAYER} launches",
        [small.name, launch.name],
    )
    if "all-reduce" in samples:
        items["gpu_link"] = measured(rate_text(samples["all-reduce"].median), samples["all-reduce"])
    return items


def _peak(key: str, sample: Sample, words: Callable[[float], str], datasheet: Datasheet) -> Item:
    """The datasheet's value of a known GPU, unless more was measured; else what was measured."""
    text, value = datasheet.get(key, ("", 0.0))
    if value >= sample.median:
        note = f"datasheet of the bundled GPU model; {sample.name} reaches {words(sample.median)}"
        return Item(text=text, source="datasheet", note=note, samples=(sample.name,))
    return measured(words(sample.median), sample)


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
