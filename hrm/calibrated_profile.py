"""Where `hrm calibrate` keeps the profile of a machine, so that `--hw auto` finds it.

A home folder may be shared by machines that differ, and a container has another name each time: a machine is known by
its processor, the cores a process may use, and its GPUs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from hrm.errors import InputError
from hrm.host_facts import read_gpus

__all__ = ["AUTO", "calibrated_path", "find_calibrated"]

AUTO = "auto"
"""What `--hw` takes for this machine's own profile."""


def calibrated_path(root: Path | None = None, gpus: Sequence[str] | None = None) -> Path:
    """The file of this machine, there or not.

    Parameters
    ----------
    root : Path, optional
        Folder for data of the user's programs; XDG_DATA_HOME, or ``~/.local/share``, if not given.
    gpus : sequence of str, optional
        Names of the GPUs; those the driver has if not given.
    """
    data = os.environ.get("XDG_DATA_HOME", "")
    folder = root or (Path(data) if data.startswith("/") else Path.home() / ".local" / "share")
    names = [gpu.name for gpu in read_gpus()] if gpus is None else list(gpus)
    facts = "/".join([_processor(), str(len(os.sched_getaffinity(0))), *names])
    machine = hashlib.sha256(facts.encode()).hexdigest()[:12]
    return folder / "hrm" / "machines" / machine / "this-machine.yaml"


def find_calibrated() -> Path:
    """The file of this machine.

    Raises
    ------
    InputError
        It was never calibrated.
    """
    path = calibrated_path()
    if not path.is_file():
        raise InputError(
            "this machine has not been calibrated",
            where=f"--hw {AUTO}",
            way_out="hrm calibrate (three minutes at most; with --quick, 40 s)",
        )
    return path


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Its model, in the kernel's words."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
