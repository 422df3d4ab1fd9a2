"""`scripts/example_job.py`: a tiny model made on the spot, a job that is killed and gone on with, in under a minute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "example_job.py"


def test_the_example_of_a_job_runs_to_its_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "48 results, none lost, none twice" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["id"] for row in rows} == {f"r{number}" for number in range(48)}
    assert all(row["text"] and row["finish_reason"] in ("stop", "length") for row in rows)
    assert "<svg" in (tmp_path / "job.html").read_text(encoding="utf-8")
