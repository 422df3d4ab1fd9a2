"""Memory of a whole model's run, seen from outside, against its plan: `python benchmarks/memory.py`.

Two plans of OLMoE (16 layers, 13.8 GB in bf16) with random weights, each in a process of its own: the accelerator
emulated, and everything on the CPU. What the kernel counts (RssAnon of the CPU level, RssShmem of the emulated GPU
memory, peaks, less what Python and torch held after they were imported) must be within 5 % of plan + host reserve, and
never above. Exit code 4 where it is not. Takes about 16 GiB and some minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

BAR = 0.95

MODEL = (
    *("--hw", "l4", "--model", "olmoe", "--requests", "64", "--prompt-len", "128", "--gen-len", "4"),
    *("--batch", "64", "--micro-batch", "64"),
)
PLANS = {
    "accelerator emulated": (
        *("--attention", "cpu", "--ffn", "gpu", "--no-pin-weights", "--weights-on-gpu", "0", "--weights-on-disk", "0"),
        *("--weight-slots", "2", "--dense-weights", "streamed", "--embedding", "cpu", "--lm-head", "streamed"),
    ),
    "everything on the CPU": ("--set", "gpu.usable_memory=1 GiB", "--set", "link.host_to_device.pinned=0.001 GB/s"),
}


def hrm(*arguments: str) -> str:
    """Run the command, and give what it prints."""
    done = subprocess.run([sys.executable, "-m", "hrm", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def main() -> int:
    """Run both plans and print a line per level."""
    missed = False
    for name, pins in PLANS.items():
        with tempfile.TemporaryDirectory() as folder:
            plan = str(Path(folder) / "plan.json")
            hrm("plan", *MODEL, *pins, "-o", plan)
            found = json.loads(hrm("run", plan, "--random-weights", "--device", "cpu", "--json"))
        for level, use in found["memory"].items():
            if level == "disk":
                continue
            allowed, taken = use["plan_bytes"] + use["reserve_bytes"], use["running_bytes"]
            passes = BAR * allowed <= taken <= allowed
            missed |= not passes
            print(
                f"{name}, {level.upper()} memory: {taken / 2**30:.2f} GiB of {use['plan_bytes'] / 2**30:.2f} in the "
                f"plan + {use['reserve_bytes'] / 2**30:.3f} of reserve: {taken / allowed:.3f}"
                + ("" if passes else "  MISSED")
            )
    return 4 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
