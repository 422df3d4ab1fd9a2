"""How long `hrm plan` takes, solve and whole command: `python benchmarks/speed.py [--pair HW MODEL] [--runs 5]`.

Wanted on two idle cores, medians of 5: Mixtral 8x7B on l4 with a solve of at most 0.5 s (0.3 is better) and a whole
command of at most 1.2 s (1.0); the slowest bundled pair, without `--explain`, at most 2 s. That pair is found by
running every model on t4, l4, colab-t4 and rtx4090 once, unless `--pair` names one.

Seconds depend on the machine and on what else it does, so each is also given as a multiple of starting Python and
importing numpy, timed in turn with it. Tests assert none of this.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

HARDWARE = ("t4", "l4", "colab-t4", "rtx4090")
FIRST = ("l4", "mixtral-8x7b")
BARS = {"first solve": 0.5, "first command": 1.2, "slowest command": 2.0}
REFERENCES = {"python -c pass": "pass", 'python -c "import numpy"': "import numpy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One run of `hrm plan`: wall-clock seconds of the command, and of the solve as it reports them (0: no plan)."""

    command_s: float
    solve_s: float
    exit_code: int


def time_python(arguments: Sequence[str]) -> tuple[float, int, bytes]:
    """Wall-clock seconds of a Python process [s], its exit code and its output; run in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, capture_output=True, cwd=folder, check=False
        )
        return time.perf_counter() - began, done.returncode, done.stdout


def time_plan(hardware: str, model: str) -> Timing:
    """Time `hrm plan --hw HARDWARE --model MODEL --json` once."""
    seconds, code, output = time_python(["-m", "hrm", "plan", "--hw", hardware, "--model", model, "--json"])
    if code not in (0, 3):
        raise SystemExit(f"hrm plan --hw {hardware} --model {model}: exit code {code}")
    solve = json.loads(output)["solver"]["seconds"] if code == 0 else 0.0
    return Timing(command_s=seconds, solve_s=solve, exit_code=code)


def find_slowest() -> tuple[str, str]:
    """The pair whose command takes longest, of one run each."""
    _, _, output = time_python(["-m", "hrm", "models", "--json"])
    models = [row["name"] for row in json.loads(output)["models"]]
    found: list[tuple[float, str, str]] = []
    for hardware in HARDWARE:
        for model in models:
            timing = time_plan(hardware, model)
            found.append((timing.command_s, hardware, model))
            answer = f"solve {timing.solve_s:.2f} s" if timing.exit_code == 0 else "no plan fits"
            print(f"  {hardware:9} {model:22} {timing.command_s:6.2f} s  {answer}", flush=True)
    found.sort(reverse=True)
    print("slowest: " + ", ".join(f"{hardware}/{model} {seconds:.2f} s" for seconds, hardware, model in found[:5]))
    return found[0][1], found[0][2]


def show(name: str, seconds: list[float], references: Sequence[float], bar: float | None = None) -> None:
    """One row of the table."""
    median = statistics.median(seconds)
    ratios = "".join(f"{median / reference:9.1f}" for reference in references)
    verdict = "" if bar is None else f"   bar {bar:.1f} s: {'met' if median <= bar else 'MISSED'}"
    print(f"{name:44} {median:7.3f} {min(seconds):7.3f} {max(seconds):7.3f} {ratios}{verdict}")


def main() -> None:
    """Time everything and print one table."""
    parser = argparse.ArgumentParser(description="Time hrm plan.")
    parser.add_argument("--pair", nargs=2, metavar=("HW", "MODEL"), help="the slow pair, instead of looking for it")
    parser.add_argument("--runs", type=int, default=5, help="runs of each, of which the median counts (5)")
    given = parser.parse_args()
    if given.runs < 1:
        parser.error(f"--runs {given.runs}: at least 1")

    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} before; Python {sys.version.split()[0]}")
    slow: tuple[str, str] = (given.pair[0], given.pair[1]) if given.pair else find_slowest()
    time_plan(*FIRST)  # fills the file cache
    plans: dict[tuple[str, str], list[Timing]] = {FIRST: [], slow: []}
    starts: dict[str, list[float]] = {name: [] for name in REFERENCES}
    for _ in range(given.runs):  # in turn, so that a busy moment hits all of them
        for name, code in REFERENCES.items():
            starts[name].append(time_python(["-c", code])[0])
        for pair, timings in plans.items():
            timings.append(time_plan(*pair))

    references = [statistics.median(starts[name]) for name in REFERENCES]
    heads = f"{'median':>7} {'least':>7} {'most':>7} {'/ pass':>9}{'/ numpy':>9}"
    print(f"\n{f'seconds, {given.runs} runs':44} {heads}")
    for name in REFERENCES:
        show(name, starts[name], references)
    for title, pair in (("first", FIRST), ("slowest", slow)):
        words = "/".join(pair)
        show(f"{words}, solve", [each.solve_s for each in plans[pair]], references, BARS.get(f"{title} solve"))
        show(f"{words}, whole command", [each.command_s for each in plans[pair]], references, BARS[f"{title} command"])
    print(f"load {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
