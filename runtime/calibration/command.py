"""`hrm calibrate`: detects the machine, measures it, writes its profile; the result as one JSON document."""

from __future__ import annotations

import datetime
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hrm.calibrated_profile import calibrated_path
from hrm.errors import InputError
from hrm.graph import LaneKind
from hrm.host_facts import free_cpu_bytes, read_gpus
from hrm.output_files import check_file, check_folder
from hrm.profile import HardwareProfile
from runtime.calibration.bench import Bench, make_bench
from runtime.calibration.copies import measure_copies, measure_staging
from runtime.calibration.cpu_rates import measure_cpu
from runtime.calibration.datasheet import find_datasheet
from runtime.calibration.disk_rates import measure_disk
from runtime.calibration.gpu_rates import measure_gpu
from runtime.calibration.lanes import keep_busy
from runtime.calibration.layer_work import AttentionWork, LayerWork
from runtime.calibration.machine import (
    LinkState,
    MachineFacts,
    busy_seconds,
    own_seconds,
    read_link_states,
    read_machine,
)
from runtime.calibration.profile_items import collect_items
from runtime.calibration.profile_writing import profile_text, write_profile
from runtime.calibration.quantities import Item
from runtime.calibration.samples import Samples
from runtime.calibration.several_gpus import measure_several
from runtime.calibration.sizes import FULL, QUICK, Sizes
from runtime.calibration.suspicions import find_suspicions
from runtime.calibration.together import loads_of, measure_together
from runtime.device import Device, choose_device

__all__ = ["calibrate"]

FIRST_BF16 = (8, 0)
"""Compute capability from which a GPU has bf16 products."""


def calibrate(
    output: Path | None,
    *,
    quick: bool = False,
    device: str | None = None,
    disk_dir: Path | None = None,
    sizes: Sizes | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure this machine and write its profile: to a file, and where `--hw auto` looks for it.

    Parameters
    ----------
    output : Path, optional
        The file.
    quick : bool
        Fewer sizes and repeats.
    device : {"cuda", "cpu"}, optional
        What there is if not given; "cpu" emulates the accelerator.
    disk_dir : Path, optional
        Folder whose disk is measured; the system's temporary folder if not given.
    sizes : Sizes, optional
        Instead of those of `quick`, for tests.
    on_progress : callable, optional
        Called with a line of text now and then.

    Returns
    -------
    dict
        See docs/calibration.md.

    Raises
    ------
    InputError
        A file cannot be written, there is no such device, or no room.
    """
    tell = on_progress or (lambda _: None)
    folder = disk_dir or Path(tempfile.gettempdir())
    kept = calibrated_path()
    if output is not None:
        check_file(output, f"--output: {output}")
    check_folder(folder, (), f"--disk-dir: {folder}")
    check_folder(kept.parent, (kept.name,), "the folder of --hw auto (XDG_DATA_HOME)")
    began, today = time.perf_counter(), datetime.date.today().isoformat()
    machine = choose_device(device, cpu_only=False)
    tell("looking at the machine")
    free_before = read_gpus()[0].free_bytes if machine.cuda and read_gpus() else 0.0
    facts = read_machine(machine, folder)
    chosen = sizes or (QUICK if quick else FULL)
    _check_room(chosen)
    bench = make_bench(machine, chosen, dtypes=_dtypes(facts), tell=tell)
    datasheet = find_datasheet(facts.gpus[0].name) if facts.gpus else {}
    busy, own, measuring = busy_seconds(machine.cores), own_seconds(), time.perf_counter()
    layer, attention, links, remark = _measure(bench, folder)
    taken = busy_seconds(machine.cores) - busy - (own_seconds() - own)
    others = max(0.0, taken / (time.perf_counter() - measuring))
    if free_before:
        _measure_context(bench.samples, free_before)
    items = collect_items(bench, facts, layer, attention, datasheet)
    suspicions = find_suspicions(facts, bench.samples, links, datasheet, others) + ([remark] if remark else [])
    seconds = time.perf_counter() - began
    words = _words(machine, facts, today, quick)
    if "disk.size" in items:
        words["disk.name"] = f"{facts.disk_folder} ({facts.disk_file_system or 'unknown'})"
    text, profile = profile_text(
        items,
        words,
        bench.dtypes,
        bench.samples,
        _remarks(facts, links, suspicions, others, seconds, today),
        name=kept.stem,
    )
    for path in [kept] if output is None else [output, kept]:
        write_profile(path, text)
    return _document(profile, items, bench.samples, facts, links, suspicions, others, seconds, today, output, kept)


def _check_room(sizes: Sizes) -> None:
    """Refuse a machine whose memory the measurement itself would not fit."""
    layer = 4 * sizes.experts * sizes.ffn * 3 * sizes.hidden
    needed = 2 * layer + 5 * sizes.span_bytes + 2 * sizes.pool_bytes + 2**28
    free = free_cpu_bytes()
    if free < needed:
        raise InputError(
            f"measuring takes {needed / 2**30:.1f} GiB of CPU memory, and {free / 2**30:.1f} GiB are free",
            where="hrm calibrate",
            way_out="stop what else runs, or --quick",
        )


def _dtypes(facts: MachineFacts) -> tuple[str, ...]:
    """Formats to measure, that of most checkpoints first; bf16 is emulated on a T4, hence left out."""
    if not facts.gpus:
        return ("bf16", "fp32", "fp16")
    return ("bf16", "fp16", "fp32") if facts.gpus[0].compute_capability >= FIRST_BF16 else ("fp16", "fp32")


def _measure(bench: Bench, folder: Path) -> tuple[LayerWork, AttentionWork, tuple[LinkState, ...], str]:
    """Everything; returns the GPU's layer, the CPU's attention, the state of the links, and a remark on the disk."""
    attention = measure_cpu(bench)
    layer, _ = measure_gpu(bench)
    gpu, cpu = loads_of(bench, layer, attention)
    beside = [("the CPU attends", [cpu])]
    if bench.device.emulated:  # a real GPU's kernels take neither cores nor memory of the host
        beside.append(("the CPU attends and the GPU computes", [cpu, gpu]))
    buffers = measure_copies(bench, beside)
    links: tuple[LinkState, ...] = ()
    if bench.device.cuda:
        kind = LaneKind.H2D
        with keep_busy(bench.device, [(kind, buffers.run(kind, "pinned", bench.sizes.copies[-1]))]):
            links = read_link_states()
        if not links:
            bench.samples.skip("PCIe generation and width", "nvidia-smi does not say")
    else:
        bench.samples.skip("PCIe generation and width", "there is no GPU: the accelerator is emulated")
        bench.samples.skip("page-locking", "nothing is page-locked where the accelerator is emulated")
    measure_staging(bench, buffers)
    measure_together(bench, layer, attention, buffers)
    measure_several(bench)
    return layer, attention, links, measure_disk(bench, folder)


def _measure_context(samples: Samples, free_before: float) -> None:
    """Memory that CUDA and its libraries took since the start, besides what torch has for tensors."""
    taken = free_before - float(torch.cuda.mem_get_info()[0]) - float(torch.cuda.memory_reserved())
    if taken > 0:
        samples.add("gpu context", "byte", [taken])


def _words(device: Device, facts: MachineFacts, today: str, quick: bool) -> dict[str, str]:
    how = "hrm calibrate --quick" if quick else "hrm calibrate"
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    if device.cuda:
        gpu, title = facts.gpus[0].name, f"{facts.gpus[0].name}, {facts.cpu}, {facts.cores} cores"
        link, what = "PCIe", "Measured on this machine."
    else:
        gpu, title = f"emulated on a core of {facts.cpu}", f"No GPU: emulated on {facts.cores} cores of {facts.cpu}"
        link = "copies in CPU memory"
        what = (
            "There is no GPU here. The accelerator is emulated: a core and memory of its own, and real copies between "
            "that and the rest. Its rates say nothing of any GPU."
        )
    return {
        "title": title,
        "description": f"{what} {how}, {today}; {versions}.",
        "gpu.name": gpu,
        "cpu.name": facts.cpu,
        "link.name": link,
    }


def _remarks(
    facts: MachineFacts,
    links: Sequence[LinkState],
    suspicions: Sequence[str],
    others: float,
    seconds: float,
    today: str,
) -> list[str]:
    """Lines above the measurements in the file."""
    limit = facts.container_limit_bytes
    lockable = facts.lockable_bytes
    lines = [
        f"Measured on {today} in {seconds:.0f} s; other processes had {others:.2f} of {facts.cores} cores meanwhile.",
        f"CPU {facts.cpu}, {facts.cores} cores, {facts.lane_cores} for the CPU lane, {facts.numa_nodes} NUMA node(s), "
        f"kernels {facts.kernels or 'not compiled'}.",
        f"Memory {facts.memory_bytes / 2**30:.2f} GiB, {facts.free_bytes / 2**30:.2f} free, container's limit "
        f"{'none' if limit is None else f'{limit / 2**30:.2f} GiB'}, page-locking limit "
        f"{'none' if lockable is None else f'{lockable / 2**20:.0f} MiB'}.",
    ]
    lines += [f"GPU {gpu.name}, {gpu.memory_bytes / 2**30:.2f} GiB." for gpu in facts.gpus]
    lines += [f"Link of GPU {n}: PCIe {link.generation} x{link.width} under load." for n, link in enumerate(links)]
    return lines + [f"Looks wrong: {each}." for each in suspicions]


def _document(
    profile: HardwareProfile,
    items: dict[str, Item],
    samples: Samples,
    facts: MachineFacts,
    links: Sequence[LinkState],
    suspicions: list[str],
    others: float,
    seconds: float,
    today: str,
    output: Path | None,
    kept: Path,
) -> dict[str, Any]:
    return {
        "title": profile.title,
        "date": today,
        "seconds": round(seconds, 1),
        "emulated": not facts.gpus,
        "files": [str(path) for path in (output, kept) if path is not None],
        "machine": facts.document(),
        "cores_of_others": None if math.isnan(others) else round(others, 2),
        "links": [
            {"generation": link.generation, "width": link.width, "most_width": link.most_width} for link in links
        ],
        "quantities": {
            key: {
                "value": profile.quantities[key].value,
                "text": item.text,
                "source": item.source,
                "note": item.note,
                "measurements": list(item.samples),
            }
            for key, item in items.items()
        },
        "measurements": [
            {
                "name": sample.name,
                "unit": sample.unit,
                "median": sample.median,
                "spread": sample.spread,
                "values": list(sample.values),
            }
            for sample in samples.by_name.values()
        ],
        "looks_wrong": suspicions,
        "not_measured": dict(samples.skipped),
    }
