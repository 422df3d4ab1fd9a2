"""Measures how right the shipped constants are and shows it: `python docs/refresh_accuracy.py`, some two minutes.

Writes `hrm/data/published/accuracy.yaml`, which predictions take their intervals from, and the tables of README.md
between its two comments.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hrm.published.accuracy import ACCURACY_FILE, write_accuracy
from hrm.published.accuracy_tables import readme_tables
from hrm.published.intervals import accuracy_document
from simulator.published import replay_row

README = Path(__file__).resolve().parent.parent / "README.md"
SHOWN = re.compile(r"(<!-- accuracy -->\n).*?(<!-- end of accuracy -->)", re.DOTALL)


def main() -> None:
    """Measure, write, and replace what stands between the two comments; with `--tables` only the last."""
    if "--tables" not in sys.argv:
        write_accuracy(ACCURACY_FILE, replay_row, tell=lambda line: print(line, file=sys.stderr))
        accuracy_document.cache_clear()
    tables = readme_tables(accuracy_document())
    text, count = SHOWN.subn(lambda found: f"{found[1]}{tables}{found[2]}", README.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"README.md has {count} places for the tables")
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
