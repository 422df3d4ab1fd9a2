"""Rates: where Work meets a profile and becomes seconds.

The roofline (Eq. 8): an operator takes max(FLOPs / peak, bytes / bandwidth), plus what of the shorter does not hide
behind the longer (`efficiency.gpu_overlap`, `efficiency.cpu_overlap`). The GPUs of a tensor-parallel group act as one
with their peaks added up; the link does too, up to what the host gives all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hrm.affine import Number
from hrm.cost import Formats, Work
from hrm.profile import HardwareProfile

__all__ = ["Phase", "Rates", "derive_rates"]

Phase = Literal["prefill", "decode"]

DEQUANTISATION_FLOPS = 2.0
"""Scale and shift per weight, on the vector units, each time a quantised weight is read for a product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the machine delivers: peaks times the profile's efficiencies (1 where none were measured).

    Attributes
    ----------
    gpu_flops_per_s : dict of phase to float
        All GPUs of the group, at the compute format [FLOP/s].
    gpu_wide_flops_per_s : dict of phase to float
        The same for operators whose weights are never quantised (attention, router, lm_head): the 16-bit peak where
        the compute format is fp8 or int8 [FLOP/s].
    gpu_vector_flops_per_s, gpu_bytes_per_s : float
        Vector units [FLOP/s], memory [byte/s].
    gpu_overlap : float
        Share of the shorter of computation and memory access that hides behind the longer.
    cpu_flops_per_s, cpu_attention_bytes_per_s, cpu_bytes_per_s : float
        CPU peak [FLOP/s]; CPU memory as attention reaches it, and in all [byte/s].
    h2d_bytes_per_s, d2h_bytes_per_s : float
        Host-to-device and device-to-host, all GPUs together, pinned [byte/s].
    h2d_per_gpu_bytes_per_s, d2h_per_gpu_bytes_per_s : float
        Of one GPU while the others' links are idle [byte/s].
    h2d_loss, d2h_loss : float
        Share of a direction's rate that is lost while the other direction is busy.
    staging_bytes_per_s, disk_read_bytes_per_s, disk_write_bytes_per_s, pinning_bytes_per_s : float
        [byte/s]; the disk's are 0 without a disk.
    launch_s, copy_s, overhead_s : float
        Per kernel, per copy, per micro-batch and layer [s].
    all_reduce_bytes_per_s : float or None
        GPU to GPU, each way; None = through the host.
    host_memory_bytes_per_s : float or None
        Host memory for cores and copies together; None = `cpu_bytes_per_s` [byte/s].
    cpu_overlap : float
        As `gpu_overlap`, for operators of the CPU other than attention.
    gpu_attention_bytes_per_s : float or None
        GPU memory as attention in decode reaches it; None = `gpu_bytes_per_s` [byte/s].
    """

    gpus: int
    gpu_flops_per_s: dict[Phase, float]
    gpu_wide_flops_per_s: dict[Phase, float]
    gpu_vector_flops_per_s: float
    gpu_bytes_per_s: float
    gpu_overlap: float
    cpu_flops_per_s: float
    cpu_attention_bytes_per_s: float
    cpu_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_per_gpu_bytes_per_s: float
    d2h_per_gpu_bytes_per_s: float
    h2d_loss: float
    d2h_loss: float
    staging_bytes_per_s: float
    pinning_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    launch_s: float
    copy_s: float
    overhead_s: float
    all_reduce_bytes_per_s: float | None
    host_memory_bytes_per_s: float | None = None
    cpu_overlap: float = 1.0
    gpu_attention_bytes_per_s: float | None = None

    @property
    def memory_bytes_per_s(self) -> float:
        """Host memory for all that draws on it: the total where one is known, else what the CPU reads [byte/s]."""
        return self.cpu_bytes_per_s if self.host_memory_bytes_per_s is None else self.host_memory_bytes_per_s

    def gpu_seconds(self, work: Work, phase: Phase, *, wide: bool = False) -> Number:
        """Seconds of one operator on the GPU(s) [s]; `wide` = its weights are never quantised.

        The roofline (Eq. 8), and of the shorter of computation and memory access what does not hide behind the longer.
        """
        compute = work.flops / (self.gpu_wide_flops_per_s if wide else self.gpu_flops_per_s)[phase]
        memory = work.bytes_touched / self.gpu_bytes_per_s
        expand = work.dequantised * (DEQUANTISATION_FLOPS / self.gpu_vector_flops_per_s)
        exposed = (1.0 - self.gpu_overlap) * np.minimum(compute, memory)
        return np.maximum(compute, memory) + exposed + expand

    def gpu_attention_seconds(self, work: Work) -> Number:
        """Seconds of attention over the KV cache on the GPU(s), in decode [s]; it may have a rate of its own."""
        rate = self.gpu_attention_bytes_per_s
        at_its_rate = self if rate is None else replace(self, gpu_bytes_per_s=rate)
        return at_its_rate.gpu_seconds(work, "decode", wide=True)

    def cpu_seconds(self, work: Work) -> Number:
        """Seconds of one operator on the CPU with its operands in CPU memory [s].

        The roofline (Eq. 8), and of the shorter of computation and memory access what does not hide behind the longer.
        """
        compute = (work.flops + work.dequantised * DEQUANTISATION_FLOPS) / self.cpu_flops_per_s
        memory = work.bytes_touched / self.cpu_bytes_per_s
        return np.maximum(compute, memory) + (1.0 - self.cpu_overlap) * np.minimum(compute, memory)

    def cpu_attention_seconds(self, work: Work) -> Number:
        """Seconds of attention on the CPU [s]; its memory rate has an efficiency of its own."""
        flops = work.flops + work.dequantised * DEQUANTISATION_FLOPS
        return np.maximum(flops / self.cpu_flops_per_s, work.bytes_touched / self.cpu_attention_bytes_per_s)


def derive_rates(profile: HardwareProfile, formats: Formats) -> Rates:
    """Rates of a profile for the given number formats; without efficiencies everything works from peaks."""
    gpus, shares, link = profile.gpu.count, profile.efficiency, profile.link
    peak = gpus * profile.gpu.peak(formats.compute)
    wide = peak
    if formats.compute in ("fp8", "int8"):  # both operands must have the format: attention, router and tables do not
        wide = gpus * profile.gpu.peak("bf16" if "bf16" in profile.gpu.dtypes else "fp16")
    vector = gpus * profile.gpu.peak_flops_per_s.get("fp32", profile.gpu.peak(formats.compute))
    totals = profile.host_totals

    def together(per_device: float, host_total: float | None, count: int = gpus) -> float:
        rate = count * per_device * shares.link
        return rate if host_total is None else min(rate, host_total * shares.link)

    h2d, d2h = link.host_to_device, link.device_to_host
    return Rates(
        gpus=gpus,
        gpu_flops_per_s={"prefill": peak * shares.gpu_flops_prefill, "decode": peak * shares.gpu_flops_decode},
        gpu_wide_flops_per_s={"prefill": wide * shares.gpu_flops_prefill, "decode": wide * shares.gpu_flops_decode},
        gpu_vector_flops_per_s=vector,
        gpu_bytes_per_s=gpus * profile.gpu.bandwidth_bytes_per_s * shares.gpu_bandwidth,
        gpu_overlap=shares.gpu_overlap,
        cpu_flops_per_s=profile.cpu.peak(formats.compute) * shares.cpu_flops,
        cpu_attention_bytes_per_s=profile.cpu.bandwidth_bytes_per_s * shares.cpu_attention,
        cpu_bytes_per_s=profile.cpu.bandwidth_bytes_per_s,
        h2d_bytes_per_s=together(h2d.pinned_bytes_per_s, totals.host_to_device_bytes_per_s),
        d2h_bytes_per_s=together(d2h.pinned_bytes_per_s, totals.device_to_host_bytes_per_s),
        h2d_per_gpu_bytes_per_s=together(h2d.pinned_bytes_per_s, totals.host_to_device_bytes_per_s, 1),
        d2h_per_gpu_bytes_per_s=together(d2h.pinned_bytes_per_s, totals.device_to_host_bytes_per_s, 1),
        h2d_loss=1.0 - min(1.0, h2d.with_opposite_bytes_per_s / h2d.pinned_bytes_per_s),
        d2h_loss=1.0 - min(1.0, d2h.with_opposite_bytes_per_s / d2h.pinned_bytes_per_s),
        staging_bytes_per_s=profile.staging_bytes_per_s * shares.staging,
        pinning_bytes_per_s=profile.pinning_bytes_per_s,
        disk_read_bytes_per_s=profile.disk.read_bytes_per_s if profile.disk else 0.0,
        disk_write_bytes_per_s=profile.disk.write_bytes_per_s if profile.disk else 0.0,
        launch_s=profile.launch_latency_s,
        copy_s=link.copy_latency_s,
        overhead_s=shares.overhead_per_micro_batch_s,
        all_reduce_bytes_per_s=profile.gpu_link_bytes_per_s,
        host_memory_bytes_per_s=totals.memory_bytes_per_s,
        cpu_overlap=shares.cpu_overlap,
        gpu_attention_bytes_per_s=(
            None if shares.gpu_attention is None else gpus * profile.gpu.bandwidth_bytes_per_s * shares.gpu_attention
        ),
    )
