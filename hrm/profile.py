"""HardwareProfile: the memory levels of a machine, the links between them, and what each can do.

Values only: hrm/profile_files.py reads them from YAML. A machine is a stack of levels (GPU, CPU, disk), as in section
3.2 of the paper; every rate is per direction and, for GPUs and links, per device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hrm.errors import InputError

__all__ = [
    "CpuLevel",
    "DiskLevel",
    "Efficiency",
    "GpuLevel",
    "HardwareProfile",
    "HostTotals",
    "Link",
    "LinkDirection",
    "Quantity",
    "Source",
]

Source = Literal["datasheet", "measured", "fitted", "estimated", "published", "user"]
"""Where a number comes from; `published` = a constant of the paper's planner or of its case study."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number of a profile as it was written, with where it comes from.

    Attributes
    ----------
    value : float
        In SI base units [bytes, bytes/s, FLOP/s, s, or 1 for shares and counts].
    text : str
        As written in the file, e.g. ``"300 GB/s"``.
    source : Source
        Kind of source; ``"user"`` where the file does not say.
    note : str
        Citation or derivation.
    """

    value: float
    text: str
    source: Source
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLevel:
    """GPUs of one model; every number is per device.

    Attributes
    ----------
    name : str
        Model, e.g. ``"NVIDIA T4"``.
    count : int
        How many of them.
    memory_bytes : float
        Marketed size [bytes].
    usable_memory_bytes : float
        What one process can allocate, before its own CUDA context [bytes].
    context_bytes : float
        CUDA context and libraries of one process [bytes].
    bandwidth_bytes_per_s : float
        Device memory [bytes/s].
    peak_flops_per_s : Mapping[str, float]
        Dense peaks by dtype (fp16, bf16, fp8, int8: tensor cores, fp32 or int32 accumulate; fp32: vector units)
        [FLOP/s].
    dtypes : tuple[str, ...]
        Activation dtypes it computes natively (a T4 has no bf16).
    host_cores : int
        Of an accelerator that is emulated: cores of the host it computes on, beside those of the CPU; 0 for a GPU.
    """

    name: str
    count: int
    memory_bytes: float
    usable_memory_bytes: float
    context_bytes: float
    bandwidth_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]
    dtypes: tuple[str, ...]
    host_cores: int = 0

    def peak(self, dtype: str) -> float:
        """Dense peak for a dtype [FLOP/s].

        Raises
        ------
        InputError
            When the GPU has no peak for it; the message lists those it has.
        """
        try:
            return self.peak_flops_per_s[dtype]
        except KeyError:
            raise InputError(
                f"{self.name} has no {dtype} peak",
                where=f"gpu.peak.{dtype}",
                way_out=f"it has {', '.join(self.peak_flops_per_s)}",
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLevel:
    """The host's processors and memory.

    Attributes
    ----------
    name : str
        Processor, in words.
    memory_bytes : float
        Host memory the machine shows [bytes].
    reserved_bytes : float
        Operating system and the process itself: not plannable [bytes].
    bandwidth_bytes_per_s : float
        Host memory, reads, all cores together [bytes/s].
    peak_flops_per_s : Mapping[str, float]
        By dtype; fp32 is always there [FLOP/s].
    cores : int
        Physical cores.
    lockable_bytes : float or None
        Most host memory that may be pinned [bytes]; None = no limit known.
    """

    name: str
    memory_bytes: float
    reserved_bytes: float
    bandwidth_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]
    cores: int
    lockable_bytes: float | None

    def peak(self, dtype: str) -> float:
        """Peak for a dtype, else that of fp32, in which CPU kernels accumulate [FLOP/s]."""
        found = self.peak_flops_per_s.get(dtype)
        return self.peak_flops_per_s["fp32"] if found is None else found


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLevel:
    """The disk tier: size [bytes], sequential read and write [bytes/s]."""

    name: str
    size_bytes: float
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDirection:
    """One direction of a GPU's host link, large copies [bytes/s].

    Attributes
    ----------
    pinned_bytes_per_s : float
        From or to pinned host memory, the other direction idle.
    pageable_bytes_per_s : float
        From or to pageable host memory (the driver stages it on one thread).
    with_opposite_bytes_per_s : float
        Pinned, while the other direction is busy too.
    """

    pinned_bytes_per_s: float
    pageable_bytes_per_s: float
    with_opposite_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Host link of one GPU: both directions, and the fixed time of one asynchronous copy [s]."""

    name: str
    host_to_device: LinkDirection
    device_to_host: LinkDirection
    copy_latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTotals:
    """What all GPUs of the host together can move, per direction [bytes/s]; None = no shared limit known.

    `memory` is what cores and copies together get from host memory, where that is not what the CPU's cores read.
    """

    host_to_device_bytes_per_s: float | None = None
    device_to_host_bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Calibrated shares of the peaks [1], and one overhead [s]. All 1 and 0: work from peaks.

    `gpu_overlap` is the share of the shorter of computation and memory access of a GPU operator that hides behind the
    longer: 1 is the roofline (Eq. 8), 0 adds both up; `cpu_overlap` is that of a CPU operator, attention apart, whose
    rate is that of its bytes. `gpu_attention` takes the place of `gpu_bandwidth` for
    attention in decode; None: the same.
    """

    gpu_bandwidth: float = 1.0
    gpu_attention: float | None = None
    gpu_flops_prefill: float = 1.0
    gpu_flops_decode: float = 1.0
    gpu_overlap: float = 1.0
    link: float = 1.0
    staging: float = 1.0
    cpu_attention: float = 1.0
    cpu_flops: float = 1.0
    cpu_overlap: float = 1.0
    overhead_per_micro_batch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """A machine: levels, links, host rates, efficiencies.

    Attributes
    ----------
    name : str
        Short name, e.g. ``"t4"``.
    title, description : str
        One line, and a paragraph, for people.
    gpu, cpu, disk, link
        The levels and the host link (disk None = no disk tier).
    staging_bytes_per_s : float
        Pageable to pinned host copy, one way [bytes/s].
    pinning_bytes_per_s : float
        Page-locking host memory, once at load [bytes/s].
    launch_latency_s : float
        One kernel launch [s].
    gpu_link_bytes_per_s : float or None
        GPU to GPU, each way [bytes/s]; None = through the host.
    host_totals : HostTotals
        Limits that the GPUs of the host share.
    efficiency : Efficiency
        Calibrated shares of the peaks.
    quantities : Mapping[str, Quantity]
        Every number as written, by dotted key (``"gpu.bandwidth"``), with its source and note.
    origin : str
        File name shown in errors.
    """

    name: str
    title: str
    description: str
    gpu: GpuLevel
    cpu: CpuLevel
    disk: DiskLevel | None
    link: Link
    staging_bytes_per_s: float
    pinning_bytes_per_s: float
    launch_latency_s: float
    gpu_link_bytes_per_s: float | None
    host_totals: HostTotals
    efficiency: Efficiency
    quantities: Mapping[str, Quantity] = field(repr=False)
    origin: str
