"""What kind of machine this is: read from the system and the driver, nothing measured."""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hrm.host_facts import container_limit_bytes, free_cpu_bytes, memory_bytes
from runtime.device import Device
from runtime.disk_file import file_system
from runtime.native_library import open_library

__all__ = [
    "GpuFact",
    "LinkState",
    "MachineFacts",
    "busy_seconds",
    "own_seconds",
    "read_link_states",
    "read_machine",
    "read_numa_nodes",
]

INSTRUCTIONS = {0: "generic", 2: "AVX2", 5: "AVX-512", 6: "AVX-512 with bf16 products"}
"""What `hrm_instructions` answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFact:
    """One CUDA device: name, its memory [byte], compute capability."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """PCIe generation and width of one GPU: now, and the most that card and slot can do."""

    generation: int
    width: int
    most_generation: int
    most_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What a calibration says of the machine.

    Attributes
    ----------
    memory_bytes : float
        Of the machine, or the limit of the container where that is less [byte].
    container_limit_bytes, lockable_bytes : float or None
        None: no limit [byte].
    kernels : str
        Instructions of the compiled CPU kernels; empty where there are none.
    """

    gpus: tuple[GpuFact, ...]
    cpu: str
    cores: int
    lane_cores: int
    numa_nodes: int
    memory_bytes: float
    free_bytes: float
    container_limit_bytes: float | None
    lockable_bytes: float | None
    disk_folder: str
    disk_file_system: str
    disk_free_bytes: float
    kernels: str
    versions: dict[str, str]

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def read_machine(device: Device, folder: Path) -> MachineFacts:
    """Look at this machine; `folder` is where the disk tier would lie."""
    from hrm import __version__

    lockable = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = container_limit_bytes()
    whole = memory_bytes()
    library = open_library()
    return MachineFacts(
        gpus=_gpus() if device.cuda else (),
        cpu=_cpu_name(),
        cores=len(device.cores),
        lane_cores=len(device.cpu_cores),
        numa_nodes=read_numa_nodes(),
        memory_bytes=whole if limit is None else min(whole, limit),
        free_bytes=free_cpu_bytes(),
        container_limit_bytes=limit,
        lockable_bytes=None if lockable == resource.RLIM_INFINITY else float(lockable),
        disk_folder=str(folder),
        disk_file_system=file_system(folder),
        disk_free_bytes=float(shutil.disk_usage(folder).free),
        kernels="" if library is None else INSTRUCTIONS[int(library.hrm_instructions())],
        versions={
            "hrm": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda or ""),
            "kernel": platform.release(),
        },
    )


def _gpus() -> tuple[GpuFact, ...]:
    found = []
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        found.append(
            GpuFact(name=facts.name, memory_bytes=facts.total_memory, compute_capability=(facts.major, facts.minor))
        )
    return tuple(found)


def _cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def busy_seconds(cores: Sequence[int], stat: Path = Path("/proc/stat")) -> float:
    """Seconds that these cores have been busy since the start, whoever had them [s]; NaN where it is not said."""
    total, found = 0, False
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return math.nan
    wanted = {f"cpu{core}" for core in cores}
    for line in lines:
        name, *ticks = line.split()
        if name in wanted:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, (ticks + ["0"] * 8)[:8])
            total, found = total + user + nice + system + irq + softirq + steal, True
    return total / os.sysconf("SC_CLK_TCK") if found else math.nan


def own_seconds() -> float:
    """Processor time of this process [s]."""
    times = os.times()
    return times.user + times.system


def read_numa_nodes(root: Path = Path("/sys/devices/system/node")) -> int:
    """NUMA nodes of the machine; 1 where the system does not say."""
    return max(1, sum(1 for path in root.glob("node[0-9]*") if path.is_dir()))


QUERY = (
    "nvidia-smi",
    "--query-gpu=pcie.link.gen.current,pcie.link.width.current,pcie.link.gen.max,pcie.link.width.max",
    "--format=csv,noheader,nounits",
)


def read_link_states(command: Sequence[str] = QUERY) -> tuple[LinkState, ...]:
    """PCIe of every GPU as the driver has it now: to be asked while copies run, an idle card slows its link down.

    Empty where the driver's command is missing or does not say.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = []
    for line in done.stdout.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4 and all(word.isdigit() for word in words):
            now, width, most, most_width = map(int, words)
            found.append(LinkState(generation=now, width=width, most_generation=most, most_width=most_width))
    return tuple(found)
