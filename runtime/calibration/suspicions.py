"""What looks wrong about a machine or its measurements, and what to check. Rules, each on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from runtime.calibration.machine import LinkState, MachineFacts
from runtime.calibration.samples import Samples

__all__ = ["find_suspicions"]

LANE_BYTES_PER_S: Final = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
"""One PCIe lane, one way, by generation, line code deducted [byte/s]."""

LEAST_LINK_SHARE: Final = 0.65
"""Large pinned copies reach 75 to 90 % of the line rate."""

LEAST_MEMORY_SHARE: Final = 0.6
LEAST_PRODUCT_SHARE: Final = 0.35
"""A T4 or L4 holds 55 to 65 % of its datasheet peak in large products, for want of power."""

ONE_CHANNEL_BYTES_PER_S: Final = 28e9
"""A channel of DDR4-3200 has 25.6 GB/s; of DDR5 more, but a server that reads no faster has few of them."""

ENOUGH_CORES: Final = 8
"""Cores that could read faster than one channel gives."""

MOST_LOSS: Final = 0.4
MOST_SPREAD: Final = 0.15
MOST_IN_USE: Final = 0.25
MOST_OTHERS: Final = 0.05
"""Of the cores, that other processes may have."""

FASTEST_DISK: Final = 15e9
"""What an NVMe drive on four lanes of PCIe 5 reads [byte/s]."""


def find_suspicions(
    facts: MachineFacts,
    samples: Samples,
    links: Sequence[LinkState],
    datasheet: Mapping[str, tuple[str, float]],
    others: float,
) -> list[str]:
    """Every one in a sentence: what was found, and what to check.

    Parameters
    ----------
    links : sequence of LinkState
        PCIe of every GPU while copies ran.
    datasheet : mapping
        Of the bundled GPU model of the same name (`quantities.Datasheet`); empty where there is none.
    others : float
        Cores that other processes had while it was measured, on average; NaN where that is not known.
    """
    return [
        *_links(samples, links),
        *_against_datasheet(samples, datasheet),
        *_memory(facts, samples),
        *(_interference(samples) if facts.gpus else ()),  # emulated, copies take a core: it is no surprise
        *_disk(samples),
        *_in_use(facts),
        *_noise(facts, samples, others),
    ]


def _links(samples: Samples, links: Sequence[LinkState]) -> Iterator[str]:
    for number, link in enumerate(links):
        if link.width < link.most_width:
            yield (
                f"GPU {number} runs on {link.width} of {link.most_width} PCIe lanes: check the slot, a riser, and "
                "whether the board splits the lanes between slots"
            )
        if link.generation < link.most_generation:
            yield (
                f"GPU {number} runs PCIe {link.generation} where the card can do {link.most_generation}: the host's "
                "own generation, or a setting of its firmware"
            )
    if not links or links[0].generation not in LANE_BYTES_PER_S:
        return
    line = LANE_BYTES_PER_S[links[0].generation] * links[0].width
    for way in ("host_to_device", "device_to_host"):
        found = [s for s in samples.starting(f"copy {way} pinned ") if " while " not in s.name]
        if found and found[-1].median < LEAST_LINK_SHARE * line:
            yield (
                f"{way.replace('_', ' ')} copies reach {found[-1].median / 1e9:.3g} GB/s of the link's "
                f"{line / 1e9:.3g}: check that the process's memory lies on the GPU's own NUMA node (numactl), and "
                "that nothing else copies"
            )


def _against_datasheet(samples: Samples, datasheet: Mapping[str, tuple[str, float]]) -> Iterator[str]:
    if "gpu.bandwidth" in datasheet and "gpu memory" in samples:
        text, value = datasheet["gpu.bandwidth"]
        if samples["gpu memory"].median < LEAST_MEMORY_SHARE * value:
            yield (
                f"GPU memory reaches {samples['gpu memory'].median / 1e9:.3g} GB/s, its datasheet says {text}: check "
                "that no other process uses the GPU, its temperature, and its memory clock (nvidia-smi -q -d CLOCK)"
            )
    for dtype in ("fp16", "bf16"):
        products = samples.starting(f"gpu product {dtype} ")
        if products and f"gpu.peak.{dtype}" in datasheet:
            text, value = datasheet[f"gpu.peak.{dtype}"]
            best = max(sample.median for sample in products)
            if best < LEAST_PRODUCT_SHARE * value:
                yield (
                    f"{dtype} products reach {best / 1e12:.3g} TFLOP/s, the datasheet says {text}: check the power "
                    "limit (nvidia-smi -q -d POWER,PERFORMANCE) and that no other process uses the GPU"
                )


def _memory(facts: MachineFacts, samples: Samples) -> Iterator[str]:
    if "all cores read" in samples and facts.cores >= ENOUGH_CORES:
        rate = samples["all cores read"].median
        if rate < ONE_CHANNEL_BYTES_PER_S:
            yield (
                f"{facts.cores} cores read CPU memory at {rate / 1e9:.3g} GB/s, which one memory channel gives: check "
                "that the modules fill all channels (dmidecode -t memory), or that a virtual machine is not throttled"
            )
    if facts.numa_nodes > 1:
        yield (
            f"the machine has {facts.numa_nodes} NUMA nodes: memory of another node is slower, so run and calibrate "
            "under the same numactl"
        )
    if facts.gpus and facts.lockable_bytes is not None and facts.lockable_bytes < 0.5 * facts.memory_bytes:
        yield (
            f"only {facts.lockable_bytes / 2**30:.2f} GiB may be page-locked (ulimit -l): weights would be staged, a "
            "copy more each time; raise the limit (/etc/security/limits.conf, docker --ulimit memlock=-1)"
        )
    if not facts.kernels:
        yield "there are no compiled CPU kernels (no compiler?): attention and experts there are slower than need be"


def _interference(samples: Samples) -> Iterator[str]:
    for way in ("host_to_device", "device_to_host"):
        found = samples.starting(f"copy {way} pinned ")
        alone = [sample for sample in found if " while " not in sample.name]
        beside = [sample for sample in found if sample.name.endswith(" while the CPU attends")]
        if alone and beside and beside[0].median < (1.0 - MOST_LOSS) * alone[-1].median:
            yield (
                f"{way.replace('_', ' ')} copies fall from {alone[-1].median / 1e9:.3g} to "
                f"{beside[0].median / 1e9:.3g} GB/s while the CPU attends: they share its memory, which the simulator "
                "prices and the search does not"
            )


def _disk(samples: Samples) -> Iterator[str]:
    if "disk read" not in samples:
        return
    read, write = samples["disk read"].median, samples["disk write"].median
    if read > FASTEST_DISK or write > 1.3 * read:
        yield (
            f"the disk reads {read / 1e9:.3g} and writes {write / 1e9:.3g} GB/s: a cache of the drive, its controller "
            "or the host of a virtual machine seems to answer, and what lasts may be slower"
        )


def _in_use(facts: MachineFacts) -> Iterator[str]:
    used = facts.memory_bytes - facts.free_bytes
    if used > MOST_IN_USE * facts.memory_bytes:
        yield (
            f"{used / 2**30:.1f} of {facts.memory_bytes / 2**30:.1f} GiB of memory are in use, and cpu.reserved leaves "
            "them out of every plan: calibrate when they are free, or --set cpu.reserved"
        )


def _noise(facts: MachineFacts, samples: Samples, others: float) -> Iterator[str]:
    if others > MOST_OTHERS * facts.cores:
        yield (
            f"other processes had {others:.1f} of the {facts.cores} cores meanwhile: stop what else runs, and "
            "calibrate again"
        )
    wide = [s for s in samples.by_name.values() if s.spread > MOST_SPREAD and " while " not in s.name]
    if wide:
        worst = max(wide, key=lambda sample: sample.spread)
        yield (
            f"{len(wide)} of {len(samples.by_name)} measurements spread by more than {100 * MOST_SPREAD:.0f} %, most "
            f"'{worst.name}' ({100 * worst.spread:.0f} %): something else runs, or clocks change"
        )
