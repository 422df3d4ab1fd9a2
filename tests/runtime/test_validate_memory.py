"""`hrm validate memory` on a small model: measured here, once, each run a process under its cap; then its records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cases import model_folder
from command import refused, run

from runtime.validation.capped_bench import ProcessMeasurer

GENERATED = 4
WORKLOAD = ("--prompt-len", 12, "--gen-len", GENERATED, "--requests", 16)
MACHINE = ("--hw", "l4", "--set", "disk=none", "--set", "gpu.usable_memory=0.6 GiB", "--set", "gpu.context=0 GiB")


def model() -> Path:
    return model_folder("mixtral")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The document and the folder of its files: one cap that is too small, one that is not."""
    folder = tmp_path_factory.mktemp("memory")
    files = ("--records", folder / "records", "--report", folder / "a.html", "--plot", folder / "a.png")
    caps = ("--caps", "128.1MiB,1GiB", "--repeats", 2, "--device", "cpu", "--random-weights")
    arguments = ("--model", model(), *MACHINE, *WORKLOAD, *caps, *files, "-o", folder / "a.json")
    done = run("validate", "memory", "--compute-dtype", "fp32", *arguments, "--json")
    assert done.code == 0, done.err
    return done.document, folder


def test_every_run_held_its_cap_by_the_counters_of_the_kernel(measured: tuple[dict[str, Any], Path]) -> None:
    points = measured[0]["points"]
    assert [point["status"] for point in points] == ["infeasible"] * 2 + ["held"] * 2
    for point in points[2:]:
        assert len(point["runs"]) == 2
        for each in point["runs"]:
            memory = each["memory"]
            assert memory["enforced_by"] == "RLIMIT_DATA"
            assert 0 < memory["peak_bytes"] <= memory["limit_bytes"] == point["limit_bytes"]
            assert memory["high_water_bytes"] > memory["peak_bytes"]
        assert all(rate > 0.0 for rate in point["measured"]["repeats"])


def test_document_and_page_are_rebuilt_from_the_records_alone(
    measured: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    document, folder = measured
    again = run("validate", "memory", "--from", folder / "records", "--report", tmp_path / "b.html", "--json")
    assert (again.code, again.document) == (0, document)
    assert json.loads((folder / "a.json").read_text(encoding="utf-8")) == document
    page = (folder / "a.html").read_text(encoding="utf-8")
    assert (tmp_path / "b.html").read_text(encoding="utf-8") == page
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_screen_ends_with_the_verdict(measured: tuple[dict[str, Any], Path]) -> None:
    shown = run("validate", "memory", "--from", measured[1] / "records")
    said = " ".join(shown.out.split())
    assert said.endswith(f"verdict: {measured[0]['verdict']['sentence']}")


def test_a_run_that_needs_more_than_its_cap_is_broken_by_the_kernel(measured: tuple[dict[str, Any], Path]) -> None:
    document, folder = measured
    point = document["points"][-1]
    measurer = ProcessMeasurer(None, None, "cpu", None, 0)
    found = measurer.measure({**point, "limit_bytes": 2**20}, folder / "records" / "plans" / point["plan"])
    assert found["status"] == "broken", found
    assert found["reason"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "what to measure is not given"),
        (("--model", "MODEL", "--hw", "l4"), "which weights is not said"),
        (("--model", "MODEL", "--hw", "l4", "--random-weights", "--repeats", "1"), "one run says nothing of noise"),
        (("--model", "MODEL", "--hw", "l4", "--caps", "1GiB,2GiB", "--points", "6"), "caps are given twice"),
        (("--model", "MODEL", "--hw", "l4", "--dry-run", "--plot", "a.png"), "none of what was not measured"),
        (("--model", "MODEL", "--hw", "l4", "--plot", "a.jpg"), "not a figure this writes"),
        (("--from", "nowhere"), "no such folder"),
        (("--from", "nowhere", "--model", "MODEL", "--hw", "l4"), "nothing is measured with --from"),
    ],
)
def test_options_that_make_no_sense_are_refused_with_a_way_out(options: tuple[str, ...], said: str) -> None:
    given = [model() if option == "MODEL" else option for option in options]
    line = refused("validate", "memory", *given, *WORKLOAD)
    assert said in line
    assert line.endswith(")")


def test_a_dry_run_measures_nothing_and_says_how_long_it_would_take(tmp_path: Path) -> None:
    done = run("validate", "memory", "--model", model(), *MACHINE, *WORKLOAD, "--caps", "1GiB,2GiB", "--dry-run")
    assert done.code == 0, done.err
    assert "4 points, 3 runs of each: about" in done.out
