"""Runs the command that README.md shows and pastes its screen there: `python docs/refresh_screen.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
COMMAND = ["plan", "--hw", "t4.yaml", "--model", "dbrx"]
SHOWN = re.compile(r"(<!-- screen -->\n```text\n).*?(```\n<!-- end of screen -->)", re.DOTALL)


def main() -> None:
    """Replace what stands between the two comments."""
    environment = os.environ | {"COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-m", "hrm", *COMMAND], capture_output=True, text=True, check=True, env=environment
    )
    screen = "".join(f"{line.rstrip()}\n" for line in done.stdout.rstrip().splitlines())
    text, count = SHOWN.subn(lambda found: f"{found[1]}{screen}{found[2]}", README.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"README.md shows {count} screens")
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
