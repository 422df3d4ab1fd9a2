"""Kernel latencies by rooflines of one kernel each, every size predicted by constants that the others give.

Sizes are of one layer of Mixtral 8x7B in fp16 on the L4 host (`hrm/data/published`):

    kv_transfer_htod   t = latency + KV bytes / rate                     pinned CPU memory to the GPU
    cpu_attention      t = latency + KV bytes / rate                     rate a share of the host's DRAM bandwidth
    moe_ffn_gpu        t = max(touched expert bytes / rate, FLOPs / 68 TFLOP/s)   rate a share of the GPU's bandwidth

What is fitted is the rate and, of the first two, the latency: least squares of relative errors. 68 TFLOP/s is the
middle of what others measured of matrix products on an L4 (65-71, `hardware_profiles/components/gpus/l4.yaml`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hrm import cost
from hrm.model import ModelSpec
from hrm.model_files import load_model
from hrm.profile_files import load_profile
from hrm.published.rows import KernelRow
from hrm.published.scores import quantile
from hrm.scenario import choose_formats

__all__ = ["KERNELS", "KernelFit", "fit_kernel", "kernel_bytes", "kernel_document", "kernel_flops", "predict_kernel"]

GEMM_FLOPS_PER_S = 68e12
"""Sustained fp16 matrix products of an L4 [FLOP/s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFit:
    """Constants of a kernel.

    Attributes
    ----------
    bytes_per_s : float
        [byte/s]
    latency_s : float
        Fixed time of a call [s].
    """

    bytes_per_s: float
    latency_s: float = 0.0


@cache
def _inputs() -> tuple[ModelSpec, cost.Formats]:
    model, profile = load_model("mixtral-8x7b"), load_profile("l4")
    return model, choose_formats(profile, model)


def _kv_bytes(row: KernelRow) -> float:
    model, formats = _inputs()
    per_token = float(model.kv_bytes_stored(1, formats.kv)) / model.n_layers
    return row.micro_batch_size * (row.context_len or 0) * per_token


def _expert_bytes(row: KernelRow) -> float:
    model, formats = _inputs()
    return float(cost.routed_experts(model, formats, float(row.micro_batch_size)).bytes_touched)


def kernel_flops(row: KernelRow) -> float:
    """FLOPs of the experts of a micro-batch; 0 for kernels that bytes alone set the time of [FLOP]."""
    if row.kernel != "moe_ffn_gpu":
        return 0.0
    model, formats = _inputs()
    return float(cost.routed_experts(model, formats, float(row.micro_batch_size)).flops)


KERNELS: dict[str, Callable[[KernelRow], float]] = {
    "kv_transfer_htod": _kv_bytes,
    "cpu_attention": _kv_bytes,
    "moe_ffn_gpu": _expert_bytes,
}
"""Bytes of every kernel that is known."""

WITH_LATENCY = ("kv_transfer_htod", "cpu_attention")


def kernel_bytes(row: KernelRow) -> float:
    """Bytes that a kernel moves or reads [byte]."""
    return KERNELS[row.kernel](row)


def fit_kernel(rows: Sequence[KernelRow]) -> KernelFit:
    """Rate and latency of one kernel: the least sum of squared relative errors.

    Parameters
    ----------
    rows : sequence of KernelRow
        Of one kernel, at least one; a latency needs two sizes or more.
    """
    import numpy as np

    per_second = np.array([kernel_bytes(row) / row.latency_s for row in rows])
    if rows[0].kernel not in WITH_LATENCY or len({kernel_bytes(row) for row in rows}) < 2:
        return KernelFit(bytes_per_s=float(np.sum(per_second**2) / np.sum(per_second)))
    relative = np.array([[kernel_bytes(row) / row.latency_s, 1.0 / row.latency_s] for row in rows])
    (seconds_per_byte, latency), *_ = np.linalg.lstsq(relative, np.ones(len(rows)), rcond=None)
    if latency < 0:  # no call takes less than nothing
        return KernelFit(bytes_per_s=float(np.sum(per_second**2) / np.sum(per_second)))
    return KernelFit(bytes_per_s=1.0 / float(seconds_per_byte), latency_s=float(latency))


def predict_kernel(row: KernelRow, fit: KernelFit) -> float:
    """Seconds of a kernel by its roofline [s]."""
    return max(kernel_bytes(row) / fit.bytes_per_s, kernel_flops(row) / GEMM_FLOPS_PER_S) + fit.latency_s


def _shipped(kernel: str) -> tuple[float, str]:
    """Rate in the bundled L4 profile, which these rows gave, and where it stands there."""
    profile = load_profile("l4")
    if kernel == "kv_transfer_htod":
        return profile.link.host_to_device.pinned_bytes_per_s, "link.host_to_device.pinned"
    if kernel == "cpu_attention":
        return profile.cpu.bandwidth_bytes_per_s * profile.efficiency.cpu_attention, "efficiency.cpu_attention"
    return profile.gpu.bandwidth_bytes_per_s * profile.efficiency.gpu_bandwidth, "efficiency.gpu_bandwidth"


def kernel_document(rows: Sequence[KernelRow]) -> dict[str, Any]:
    """Section ``kernels`` of the document: every row by the constants of the others, and the error of each kernel.

    Returns
    -------
    dict
        ``rows``: ``kernel, mu, context_len, measured, predicted, ratio, note``; seconds. ``summary``: by kernel ``n``,
        ``missed``, ``median_error``, the fitted ``bytes_per_s`` and ``latency_s``, and ``profile``: which value of the
        L4 profile it stands beside.
    """
    entries: list[dict[str, Any]] = []
    for row in rows:
        size = (row.micro_batch_size, row.context_len)
        others = [each for each in _usable(rows, row.kernel) if (each.micro_batch_size, each.context_len) != size]
        predicted, note = None, ""
        if row.kernel not in KERNELS:
            note = f"kernel {row.kernel!r} is not known: {', '.join(KERNELS)}"
        elif row.kernel in WITH_LATENCY and row.context_len is None:
            note = "its context length is blank"
        elif not others:
            predicted = predict_kernel(row, KernelFit(bytes_per_s=_shipped(row.kernel)[0]))
            note = "no other size: by the rate of the shipped profile"
        else:
            predicted = predict_kernel(row, fit_kernel(others))
        entries.append(
            {
                "kernel": row.kernel,
                "mu": row.micro_batch_size,
                "context_len": row.context_len,
                "measured": row.latency_s,
                "predicted": predicted,
                "ratio": None if predicted is None else predicted / row.latency_s,
                "note": note,
            }
        )
    return {
        "rows": entries,
        "summary": {name: _summary(name, rows, entries) for name in dict.fromkeys(row.kernel for row in rows)},
    }


def _usable(rows: Sequence[KernelRow], kernel: str) -> list[KernelRow]:
    """Rows of a known kernel that say what it needs."""
    found = [row for row in rows if row.kernel == kernel and kernel in KERNELS]
    return [row for row in found if kernel not in WITH_LATENCY or row.context_len is not None]


def _summary(kernel: str, rows: Sequence[KernelRow], entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ratios = [entry["ratio"] for entry in entries if entry["kernel"] == kernel]
    errors = [float("inf") if ratio is None else abs(ratio - 1.0) for ratio in ratios]
    median = quantile(errors, 0.5)
    usable = _usable(rows, kernel)
    fit = fit_kernel(usable) if usable else None
    return {
        "n": len(ratios),
        "missed": sum(ratio is None for ratio in ratios),
        "median_error": None if median == float("inf") else median,
        "bytes_per_s": None if fit is None else fit.bytes_per_s,
        "latency_s": None if fit is None else fit.latency_s,
        "profile": _shipped(kernel)[1] if kernel in KERNELS else None,
        "profile_bytes_per_s": _shipped(kernel)[0] if kernel in KERNELS else None,
    }
