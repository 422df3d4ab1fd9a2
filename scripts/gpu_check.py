"""Check the runtime on a machine with a CUDA GPU, within a few minutes: one JSON document and one page.

    python scripts/gpu_check.py --out check --minutes 8

Runs the tests that need a GPU, one layer of Mixtral 8x7B, and a few of its layers, under the plans of a T4 and an L4
and, where there is a profile of this GPU, under its own with the memory of a T4. What there was no time for is listed
as not run. Needs this checkout, and torch for CUDA with what `pip install '.[dev]'` installs; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_check_report import WANTED, find_title, summarise, write_page
from gpu_check_steps import FAIL, MACHINE, TIMEOUT, Result, Runner, hrm, list_steps, run_command, run_steps

KEPT_S = 10.0
"""Of the time given, for writing what was found [s]."""


def find_own_profile(gpu: str, runner: Runner) -> str | None:
    """The profile of one GPU of this name; all words of the profile's GPU are in the name."""
    outcome = runner(hrm("hardware", "--json"), 60.0)
    try:
        profiles = json.loads(outcome.stdout)["hardware"]
    except (ValueError, KeyError):
        return None
    here = gpu.lower().replace("-", " ").split()
    for profile in profiles:
        count, _, name = profile["gpu"].partition(" x ")
        words = [word for word in name.lower().replace("-", " ").split() if word not in ("nvidia", "tesla")]
        if count == "1" and words and all(word in here for word in words):
            return str(profile["name"])
    return None


def check(
    out: Path,
    minutes: float,
    *,
    runner: Runner = run_command,
    now: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = lambda text: None,
) -> int:
    """Run everything and write `gpu-check.json`, `gpu-check.md` and `gpu-check.log`; the exit code."""
    deadline = now() + minutes * 60.0 - KEPT_S
    out.mkdir(parents=True, exist_ok=True)
    results = run_steps([MACHINE], deadline, runner=runner, now=now, tell=tell)
    machine: dict[str, Any] = results[0].document or {}
    if machine.get("cuda"):
        own = find_own_profile(machine["gpu"], runner)
        steps = list_steps(out.resolve(), machine, own)
        results += run_steps(steps, deadline, runner=runner, now=now, tell=tell)
    write_reports(out, machine, results, minutes)
    tell(f"saved to {out / 'gpu-check.md'} and {out / 'gpu-check.json'}")
    if results[0].status in (FAIL, TIMEOUT):
        tell(f"machine: {results[0].why}")
        return 1
    if not machine.get("cuda"):
        tell("torch sees no CUDA device here: nothing was checked")
        return 0
    return 1 if any(result.status in (FAIL, TIMEOUT) for result in results) else 0


def write_reports(out: Path, machine: dict[str, Any], results: Sequence[Result], minutes: float) -> None:
    """The document, the page, and all that the commands said."""
    document = {
        "title": find_title(machine),
        "machine": machine,
        "minutes": minutes,
        "wanted": {"measured_over_simulated_at_most": WANTED},
        **summarise(results),
        "steps": [
            {
                "name": result.step.name,
                "status": result.status,
                "why": result.why,
                "seconds": result.seconds,
                "command": [Path(part).name if part == sys.executable else part for part in result.step.command],
                "document": result.document,
            }
            for result in results
            if result.step is not MACHINE
        ],
    }
    (out / "gpu-check.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (out / "gpu-check.md").write_text(write_page(machine, results, minutes=minutes), encoding="utf-8")
    log = [
        f"== {result.step.name}: {result.status} {result.why}\n{result.stdout}\n-- standard error\n{result.stderr}\n"
        for result in results
    ]
    (out / "gpu-check.log").write_text("".join(log), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, say where it was written."""
    parser = argparse.ArgumentParser(description="Check the runtime on a machine with a CUDA GPU.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where reports and plans are written")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything (default: 8)")
    given = parser.parse_args(arguments)
    if not given.minutes * 60.0 > KEPT_S:
        parser.error(f"--minutes {given.minutes:g} is too little: {KEPT_S:.0f} s are kept for the reports")
    return check(given.out, given.minutes, tell=lambda text: print(text, file=sys.stderr, flush=True))


if __name__ == "__main__":
    sys.exit(main())
