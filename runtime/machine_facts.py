"""The machine that something was measured on, and the versions of what measured it."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

import hrm
from runtime.device import Device
from runtime.device_names import device_name

__all__ = ["describe_machine"]


def describe_machine(device: Device) -> dict[str, Any]:
    """What a measurement depends on beside the plan.

    Returns
    -------
    dict
        `device` in words, `cores` that this process may use, `memory_bytes` of the machine [byte], `system`,
        and versions: `hrm`, `python`, `torch`, `cuda` (None where torch was built without).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "device": device_name(device),
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.platform(),
        "hrm": hrm.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
    }
