"""What a check on a GPU does, in order, and running it within a time budget: each step is a command with a limit.

Nothing here needs a GPU, or the project: the commands do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30

PASS, FAIL, TIMEOUT, NOT_RUN = "passed", "failed", "timed out", "not run"
Status = Literal["passed", "failed", "timed out", "not run"]

PINS = ("--attention", "cpu", "--ffn", "gpu", "--num-micro-batches", "8")
"""The schedule of the paper with every lane at work: attention on the CPU, experts on the GPU, weights streamed."""

LEAST = {"t4": 14.5 * GIB, "l4": 22.0 * GIB}
"""Profiles whose plans are run, and the memory that a GPU has for them at least [byte]."""

WORKLOAD = ("--model", "mixtral-8x7b", "--workload", "mtbench", "--gen-len", "16", "--requests", "1024")
LAYERS = 4
T4_USABLE = "14.74 GiB"
"""Of a T4's memory, what its profile has as usable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command.

    Attributes
    ----------
    name : str
        Of the step in all reports.
    command : tuple of str
    most_s, least_s : float
        Its own limit; and what it takes at least, so that it is not begun with less [s].
    after : tuple of str
        Steps that must have passed.
    about : str
        What it shows, in words.
    """

    name: str
    command: tuple[str, ...]
    most_s: float
    least_s: float
    about: str
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command did; `code` is None where it was stopped."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a step; `document` is the JSON it printed."""

    step: Step
    status: Status
    why: str = ""
    seconds: float = 0.0
    document: dict[str, Any] | None = None
    stdout: str = ""
    stderr: str = ""


class Runner(Protocol):
    """Runs a command for so long at most."""

    def __call__(self, command: Sequence[str], timeout_s: float) -> Outcome: ...


def run_command(command: Sequence[str], timeout_s: float) -> Outcome:
    """Run a command in the repository's root; what it started ends with it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *_given("PYTHONPATH")]), "COLUMNS": "118"}
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    code: int | None
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        code = None
    return Outcome(code=code, stdout=stdout, stderr=stderr, seconds=time.monotonic() - began)


def _given(name: str) -> list[str]:
    return [os.environ[name]] if os.environ.get(name) else []


MACHINE_SOURCE = """
import importlib.util, json, os, platform, subprocess
needed = ("torch", "transformers", "safetensors", "pytest", "hypothesis", "numpy", "scipy", "simpy", "pulp", "highspy",
          "fastjsonschema", "yaml", "typer", "rich")
found = {"python": platform.python_version(), "cpu_cores": len(os.sched_getaffinity(0)),
         "cpu_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
         "missing": [name for name in needed if importlib.util.find_spec(name) is None], "cuda": False}
if "torch" not in found["missing"]:
    import torch
    found |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "cuda": torch.cuda.is_available()}
    if found["cuda"]:
        facts = torch.cuda.get_device_properties(0)
        found |= {"gpu": facts.name, "gpu_memory_bytes": facts.total_memory, "gpus": torch.cuda.device_count(),
                  "capability": [facts.major, facts.minor], "gpu_free_bytes": torch.cuda.mem_get_info()[0]}
        query = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current",
                 "--format=csv,noheader", "--id=0"]
        try:
            found["driver_and_link"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            pass
print(json.dumps(found))
"""

MACHINE = Step(
    name="machine",
    command=(sys.executable, "-c", MACHINE_SOURCE),
    most_s=90.0,
    least_s=1.0,
    about="what machine this is",
)


def hrm(*arguments: str) -> tuple[str, ...]:
    """A command of the project, from this checkout."""
    return (sys.executable, "-m", "hrm", *arguments)


def list_steps(out: Path, machine: dict[str, Any], own_profile: str | None) -> list[Step]:
    """All steps but the first, most wanted first.

    Parameters
    ----------
    out : Path
        Folder for the plans.
    machine : dict
        What `MACHINE` printed.
    own_profile : str or None
        Name of the profile of this very GPU, if there is one.
    """
    tests = (sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu", "tests/runtime")
    found = [
        Step(
            name="tests",
            command=tests,
            most_s=150.0,
            least_s=20.0,
            about="token for token what transformers generates, memory, streams, kernels",
        )
    ]
    has = machine["gpu_memory_bytes"]
    cases: list[tuple[str, str, tuple[str, ...]]] = [(name, name, ()) for name, least in LEAST.items() if has >= least]
    if own_profile is not None and own_profile not in LEAST and has >= LEAST["t4"]:
        cases.append((f"{own_profile} as a t4", own_profile, own_settings(machine)))
    plans, layers, runs = [], [], []
    for label, profile, settings in cases:
        plan = str(out / f"plan-{label.replace(' ', '-')}.json")
        plans.append(
            Step(
                name=f"plan {label}",
                command=hrm("plan", "--hw", profile, *settings, *WORKLOAD, *PINS, "-o", plan, "--json"),
                most_s=60.0,
                least_s=3.0,
                about="the plan that the next ones run",
            )
        )
        layers.append(
            Step(
                name=f"layer {label}",
                command=hrm("validate", "layer", plan, "--device", "cuda", "--repeats", "18", "--json"),
                most_s=75.0,
                least_s=15.0,
                after=(f"plan {label}",),
                about="one layer of Mixtral 8x7B in decode: does it take max(link, CPU, GPU)?",
            )
        )
        options = ("--random-weights", "--layers", str(LAYERS), "--device", "cuda", "--json")
        runs.append(
            Step(
                name=f"run {label}",
                command=hrm("run", plan, *options),
                most_s=90.0,
                least_s=20.0,
                after=(f"plan {label}",),
                about=f"{LAYERS} layers of Mixtral 8x7B, prefill and 15 decode steps of 1,024 requests",
            )
        )
    for plan_step, layer in zip(plans, layers, strict=True):
        found += [plan_step, layer]
    return found + runs


def own_settings(machine: dict[str, Any]) -> tuple[str, ...]:
    """This GPU with the memory of a T4, in this host."""
    memory = machine["cpu_memory_bytes"] / GIB
    return ("--set", f"gpu.usable_memory={T4_USABLE}", "--set", f"cpu.memory={memory:.1f} GiB")


def run_steps(
    steps: Sequence[Step],
    deadline_s: float,
    *,
    runner: Runner = run_command,
    now: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Run steps until a point in time; what is not begun is listed as such.

    Parameters
    ----------
    deadline_s : float
        By `now` [s].
    """
    results: list[Result] = []
    passed: set[str] = set()
    for step in steps:
        missing = [name for name in step.after if name not in passed]
        left = deadline_s - now()
        if missing:
            results.append(Result(step=step, status="not run", why=f"{missing[0]!r} did not pass"))
        elif left < step.least_s:
            why = f"{max(left, 0.0):.0f} s were left, it takes {step.least_s:.0f} s at least"
            results.append(Result(step=step, status="not run", why=why))
        else:
            limit = min(step.most_s, left)
            tell(f"{step.name} (at most {limit:.0f} s)")
            results.append(_judge(step, runner(step.command, limit), limit))
        if results[-1].status == PASS:
            passed.add(step.name)
    return results


def _judge(step: Step, outcome: Outcome, limit_s: float) -> Result:
    status: Status = "passed"
    why = ""
    if outcome.code is None:
        status, why = "timed out", f"stopped after {limit_s:.0f} s"
    elif outcome.code != 0:
        status, why = "failed", _last_line(outcome.stderr) or _last_line(outcome.stdout) or f"exit code {outcome.code}"
    return Result(
        step=step,
        status=status,
        why=why,
        seconds=outcome.seconds,
        document=_document(outcome.stdout),
        stdout=outcome.stdout,
        stderr=outcome.stderr,
    )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


def _document(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
