"""`hrm validate memory`, the part that needs torch: each run a process of its own, under a cap the kernel enforces."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hrm import __version__
from hrm.errors import InputError
from hrm.host_facts import HostFacts, read_host_facts
from hrm.model_files import read_config_file
from hrm.scenario import Scenario
from runtime.device import choose_device
from runtime.device_names import device_name
from runtime.model_match import check_same_model
from runtime.numerics import read_numerics
from runtime.validation.cap import ENFORCED_BY, capped
from runtime.validation.capped_process import STACK_BYTES
from runtime.validation.command import describe_machine, same_machine

__all__ = ["CappedBench", "ProcessMeasurer", "open_capped_bench"]

ROOT = Path(__file__).resolve().parents[2]
"""Where the packages are, so that another process finds the same ones."""


@dataclass(frozen=True, slots=True)
class ProcessMeasurer:
    """Runs a plan in a process of its own.

    Attributes
    ----------
    model_dir : Path or None
        None for random weights.
    layers : int or None
    device : {"cuda", "cpu"}
    disk_dir : Path or None
    seed : int
    """

    model_dir: Path | None
    layers: int | None
    device: str
    disk_dir: Path | None
    seed: int

    def measure(self, point: Mapping[str, Any], plan: Path) -> dict[str, Any]:
        """Run a point; a process that ends without an answer broke its cap where it says so, or failed."""
        with tempfile.TemporaryDirectory(prefix="hrm-capped-") as folder:
            request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
            document = {
                "name": point["name"],
                "plan": str(plan.resolve()),
                "schedule": point["schedule"],
                "limit_bytes": point["limit_bytes"],
                "model_dir": None if self.model_dir is None else str(self.model_dir.resolve()),
                "layers": self.layers,
                "device": self.device,
                "disk_dir": None if self.disk_dir is None else str(self.disk_dir.resolve()),
                "seed": self.seed,
                "answer": str(answer),
            }
            request.write_text(json.dumps(document), encoding="utf-8")
            done = subprocess.run(
                [sys.executable, "-m", "runtime.validation.capped_process", str(request)],
                env=_environment(),
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
            if answer.is_file():
                found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
                return found
            return without_answer(done.returncode, done.stderr)


def without_answer(code: int, said: str) -> dict[str, Any]:
    """The record of a process that ended by a signal, or could not say what happened.

    Native code that gets no memory aborts: its last words tell, as does the kernel's SIGKILL.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else "it said nothing"
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    no_memory = any(words in said for words in ("bad_alloc", "MemoryError", "allocate memory"))
    broke = no_memory or code == -signal.SIGKILL
    return {"status": "broken" if broke else "failed", "reason": f"{how}: {last}", "memory": None}


def _environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_STACKSIZE": f"{STACK_BYTES // 1024}K"}


@dataclass(frozen=True, slots=True)
class CappedBench:
    """This machine and what measures on it.

    Attributes
    ----------
    host : HostFacts
        What is free; without GPUs where the CPU is to stand in for one.
    measurer : ProcessMeasurer
    facts : mapping
        Device, machine, versions, for the report.
    """

    host: HostFacts
    measurer: ProcessMeasurer
    facts: Mapping[str, Any]


def open_capped_bench(
    scenario: Scenario,
    config: Mapping[str, Any],
    *,
    model_dir: Path | None,
    layers: int | None,
    device: str | None,
    disk_dir: Path | None,
    seed: int,
) -> CappedBench:
    """Everything that can be refused is, before anything takes long.

    Raises
    ------
    InputError
        No such device, another model's weights, or a system that enforces no cap.
    """
    machine = choose_device(device, cpu_only=False)
    if disk_dir is not None and not disk_dir.is_dir():
        raise InputError("no such folder", where=f"--disk-dir: {disk_dir}")
    read_numerics(config, where="config.json")
    notes: tuple[str, ...] = ()
    if model_dir is not None:
        from runtime.checkpoint import open_checkpoint  # needs safetensors

        file = model_dir.expanduser() / "config.json"
        check_same_model(config, read_config_file(file), where=str(file))
        notes = tuple(f"{model_dir}: {warning}" for warning in open_checkpoint(model_dir).warnings)
    with capped(2.0**30):  # whether this system does
        pass
    host = read_host_facts(disk_dir or Path(tempfile.gettempdir()))
    if not machine.cuda:
        host = replace(host, gpus=())
    facts = {
        "device": machine.kind,
        "device_name": device_name(machine),
        "emulated": machine.emulated,
        "same_machine": same_machine(scenario.profile.gpu.name, machine),
        "weights": "random" if model_dir is None else model_dir.absolute().name,
        "machine": describe_machine(host),
        "versions": {"hrm": __version__, "python": platform.python_version(), "torch": str(torch.__version__)},
        "enforced_by": ENFORCED_BY,
        "notes": list(notes),
    }
    measurer = ProcessMeasurer(model_dir, layers, machine.kind, disk_dir, seed)
    return CappedBench(host, measurer, facts)
