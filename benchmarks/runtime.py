"""What the runtime reaches on this machine: `python benchmarks/runtime.py [--only NAME] [--rounds 3] [--json FILE]`.

Four parts, each with its own references, measured in the same run and in turn with what they are held against:

    attention   attention on the CPU against the machine's own roofs
    generate    a random Mixtral under the CPU-only plan, against transformers and against a floor
    disk        the same with all routed experts on disk, against accelerate and against the disk
    schedules   schedules with the accelerator emulated, against the bound of their tasks

A bar is the least a result has to be; one that is missed makes the exit code 4. Medians of the rounds count. Run it on
an idle machine: seconds of two cores that others use mean little. Needs `pip install '.[dev,benchmarks]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # this file's folder would put it before the package of the same name

SECTIONS = {
    "attention": "benchmarks.runtime_attention",
    "generate": "benchmarks.runtime_hf",
    "disk": "benchmarks.runtime_disk",
    "schedules": "benchmarks.runtime_schedules",
}
BAR_MISSED = 4
IDLE = 0.5
"""Load up to which the machine counts as idle."""


def describe_machine() -> dict[str, Any]:
    """What the figures hold for."""
    import torch

    from runtime.device import choose_device
    from runtime.device_names import device_name

    device = choose_device("cpu", cpu_only=True)
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "accelerate") if _has(name)}
    return {
        "processor": device_name(device),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "versions": versions,
        "python": sys.version.split()[0],
    }


def _has(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the runtime against the machine and other software.")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this part alone; may be given again")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repeats, of which the median counts (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every measurement there")
    parser.add_argument("--dir", type=Path, help="where the temporary folder is made: the disk that is measured")
    parser.add_argument(
        "--cgroup",
        type=Path,
        metavar="DIR",
        help="a memory cgroup (v1 or v2) you may make another one in: caps the memory of the disk part",
    )
    found = parser.parse_args()
    if found.rounds < 1:
        parser.error(f"--rounds {found.rounds}: at least 1")
    return found


def main() -> int:
    """Run the parts; 0, or 4 where a bar was missed."""
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary folders go away
    import torch

    from benchmarks.bars import Settings, print_section, section_json, tell

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    machine = describe_machine()
    print(f"{machine['processor']}, load {machine['load_before']:.1f} before; {machine['versions']}", flush=True)
    if machine["load_before"] > IDLE:
        print("! others compute on this machine: what follows is not its own speed, and bars mean little", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="hrm-benchmark-", dir=arguments.dir))
    settings = Settings(rounds=arguments.rounds, folder=folder, cgroup=arguments.cgroup)
    found = {}
    try:
        for name in arguments.only or SECTIONS:
            tell(f"{name} ...")
            section = import_module(SECTIONS[name]).measure(settings)
            print_section(section)
            found[name] = section
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    met = all(section.met for section in found.values())
    print(f"\nload {os.getloadavg()[0]:.1f} after; {'all bars met' if met else 'a bar was MISSED'}")
    if arguments.json is not None:
        document = {"machine": machine, "sections": {name: section_json(each) for name, each in found.items()}}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if met else BAR_MISSED


if __name__ == "__main__":
    sys.exit(main())
