"""Draws pictures of the documentation with the tool itself: `python docs/pictures/draw_schedules.py`, half a minute.

`schedules.png` for the explanation of the schedules; `tutorial-lanes.png` and `tutorial-roofline.png` with the
commands of the tutorial.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PICTURES = Path(__file__).resolve().parent
TUTORIAL = ["--hw", "t4", "--model", "mixtral-8x7b", "--workload", "mtbench", "--gen-len", "128"]
PEAKS = ["gpu_flops_decode", "gpu_flops_prefill", "gpu_bandwidth", "gpu_overlap"]


def hrm(*arguments: str) -> None:
    """Run a command that must succeed."""
    subprocess.run([sys.executable, "-m", "hrm", *arguments], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Draw them all."""
    peaks = [word for name in PEAKS for word in ("--set", f"efficiency.{name}=100 %")]
    one_policy = ["--micro-batch", "256", "--num-micro-batches", "4", "--pin-weights", "--weight-slots", "2"]
    off_disk = ["--weights-on-gpu", "0", "--weights-on-disk", "0", "--kv-on-gpu", "0", "--kv-on-disk", "0"]
    schedules = ["--schedules", "cgopipe,s2,s3,s4", "--plot", str(PICTURES / "schedules.png")]
    hrm("compare", *TUTORIAL, *peaks, *one_policy, *off_disk, *schedules)
    hrm("roofline", *TUTORIAL[:4], "--op", "ffn", "-o", str(PICTURES / "tutorial-roofline.png"))
    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder) / "plan.json")
        hrm("plan", *TUTORIAL, "-o", plan)
        hrm("simulate", plan, "--plot", str(PICTURES / "tutorial-lanes.png"))


if __name__ == "__main__":
    main()
