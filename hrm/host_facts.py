"""What this machine has: torch, CUDA devices, memory and disk that are free. Nothing heavy is loaded to find out.

GPUs are asked for through NVML, which comes with every NVIDIA driver and is what nvidia-smi asks: it starts nothing of
CUDA, so a process may still fork afterwards, and where there is no driver, finding out takes microseconds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

__all__ = [
    "GpuFacts",
    "HostFacts",
    "container_limit_bytes",
    "free_cpu_bytes",
    "memory_bytes",
    "read_gpus",
    "read_host_facts",
]

TorchBuild = Literal["cuda", "cpu"]

NO_LIMIT_BYTES = 2.0**60
"""A cgroup (version 1) without a limit states one of this size or more [byte]."""

CGROUP_FILES: Mapping[str, tuple[str, str, str]] = {
    "2": ("memory.max", "memory.current", "inactive_file"),
    "1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By version: limit, use, and the part of the use that is file cache the kernel gives back when asked (memory.stat)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One CUDA device: name, memory that is free now [byte], compute capability as (major, minor)."""

    name: str
    free_bytes: float
    compute_capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a plan could use of this machine now.

    Attributes
    ----------
    torch : {"cuda", "cpu"} or None
        How the installed torch was built; None where there is none.
    gpus : tuple of GpuFacts
        Visible CUDA devices, in the order of CUDA_VISIBLE_DEVICES, else in that of their slots.
    cpu_bytes : float
        Memory a new process may take, within the limits of its container [byte].
    lockable_bytes : float
        Limit of page-locked memory of a process (ulimit -l) [byte]; infinite where there is none.
    disk_bytes : float
        Free where the disk tier would lie [byte].
    """

    torch: TorchBuild | None
    gpus: tuple[GpuFacts, ...]
    cpu_bytes: float
    lockable_bytes: float
    disk_bytes: float


def read_host_facts(folder: Path | None = None) -> HostFacts:
    """Look at this machine: about a millisecond where it has no GPU.

    Parameters
    ----------
    folder : Path, optional
        Where the disk tier would lie; the current folder if not given.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return HostFacts(
        torch=_torch_build(),
        gpus=read_gpus(),
        cpu_bytes=free_cpu_bytes(),
        lockable_bytes=math.inf if limit == resource.RLIM_INFINITY else float(limit),
        disk_bytes=_free_disk_bytes(folder or Path()),
    )


def _torch_build() -> TorchBuild | None:
    """Importing torch takes a second: its files say as well whether it was built for CUDA."""
    try:
        found = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    folders = found.submodule_search_locations or ()
    return "cuda" if any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders) else "cpu"


def _free_disk_bytes(folder: Path) -> float:
    try:
        return float(shutil.disk_usage(folder).free)
    except OSError:
        return 0.0


def free_cpu_bytes(root: Path = Path("/")) -> float:
    """Memory that a new process may take before the kernel, or the limit of its container, stops it [byte].

    Parameters
    ----------
    root : Path
        Where ``proc`` and ``sys`` lie.
    """
    return max(0.0, min(_available_bytes(root / "proc" / "meminfo"), *_cgroup_rooms(root), math.inf))


def memory_bytes(root: Path = Path("/")) -> float:
    """Memory of the machine, free or not, whatever a container may take of it [byte]."""
    return _meminfo_bytes(root / "proc" / "meminfo", "MemTotal")


def container_limit_bytes(root: Path = Path("/")) -> float | None:
    """The least memory limit of the groups that this process is in, directly or by a parent [byte]; None: no limit."""
    limits = (_limit(folder, names[0]) for folder, names in _cgroup_folders(root))
    return min((limit for limit in limits if limit is not None), default=None)


def _available_bytes(meminfo: Path) -> float:
    return _meminfo_bytes(meminfo, "MemAvailable")


def _meminfo_bytes(meminfo: Path, wanted: str) -> float:
    for line in _lines(meminfo):
        key, _, value = line.partition(":")
        if key == wanted:
            return float(value.split()[0]) * 1024.0  # "kB" there is 1024 byte
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _cgroup_rooms(root: Path) -> Iterator[float]:
    """What every limited memory group that this process is in, directly or by a parent, has left [byte]."""
    for folder, names in _cgroup_folders(root):
        room = _room(folder, *names)
        if room is not None:
            yield room


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of the memory groups that this process is in, and the names of their files."""
    mount = root / "sys" / "fs" / "cgroup"
    for line in _lines(root / "proc" / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, base = "2", mount
        elif "memory" in controllers.split(","):
            version, base = "1", mount / "memory"
        else:
            continue
        parts = PurePosixPath(path).parts[1:]
        # A container may see only its own group, mounted as the top one, under the path that the host has for it.
        depths = range(len(parts) + 1) if ".." not in parts else range(1)
        for depth in depths:
            yield base.joinpath(*parts[:depth]), CGROUP_FILES[version]


def _limit(folder: Path, limit_file: str) -> float | None:
    limit = next(iter(_lines(folder / limit_file)), "")
    return float(limit) if limit.isdigit() and float(limit) < NO_LIMIT_BYTES else None


def _room(folder: Path, limit_file: str, use_file: str, cache_key: str) -> float | None:
    limit, use = _limit(folder, limit_file), next(iter(_lines(folder / use_file)), "")
    if limit is None or not use.isdigit():
        return None
    cache = next((line.split()[1] for line in _lines(folder / "memory.stat") if line.split()[0] == cache_key), "0")
    return limit - float(use) + float(cache)


def _lines(path: Path) -> list[str]:
    """Lines of a small file of the kernel, none where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


class _Memory(ctypes.Structure):
    """nvmlMemory_t [byte]."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def read_gpus(library: Any = None, visible: str | None = None) -> tuple[GpuFacts, ...]:
    """The CUDA devices of this machine; none where its driver is missing or does not answer.

    Parameters
    ----------
    library : optional
        NVML, or what answers like it; that of the driver if not given.
    visible : str, optional
        As CUDA_VISIBLE_DEVICES, which counts if not given: numbers and UUIDs with commas between them.
    """
    if library is None:
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return ()
    if library.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        found = {number: _gpu(library, number) for number in range(count.value)}
    finally:
        library.nvmlShutdown()
    numbers = _visible_numbers({number: uuid for number, (uuid, _) in found.items()}, visible)
    return tuple(gpu for _, gpu in (found[number] for number in numbers) if gpu is not None)


def _gpu(library: Any, number: int) -> tuple[str, GpuFacts | None]:
    """UUID and facts of one device; a call that fails leaves it out."""
    handle, memory = ctypes.c_void_p(), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(handle)) != 0:
        return "", None
    failed = (
        library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        or library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        or library.nvmlDeviceGetName(handle, name, ctypes.c_uint(96))
        or library.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(96))
    )
    if failed:
        return "", None
    return uuid.value.decode("utf-8", "replace"), GpuFacts(
        name=name.value.decode("utf-8", "replace"),
        free_bytes=float(memory.free),
        compute_capability=(major.value, minor.value),
    )


def _visible_numbers(uuids: Mapping[int, str], visible: str | None) -> list[int]:
    """Numbers of the devices that CUDA shows, in its order: all where nothing is said, none for an empty text or -1."""
    if visible is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(number) for number in uuids))
    shown = []
    for word in (each.strip() for each in visible.split(",")):
        named = [
            number
            for number, uuid in uuids.items()
            if word == str(number) or (word.startswith("GPU-") and uuid.startswith(word))
        ]
        if not named:
            break  # CUDA too shows none from the first one on that there is not
        shown += named[:1]
    return shown
