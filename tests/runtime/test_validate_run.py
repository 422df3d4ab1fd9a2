"""`hrm validate run` on a tiny model: measured here, once; everything else comes from its records."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from cases import model_folder
from command import refused, run

from hrm.validation.records import Records, pieces_of, read_records

GENERATED, REQUESTS, PROMPT = 4, 8, 10
PINS = ("--micro-batch", "4", "--num-micro-batches", "2", "--attention", "cpu", "--weights-on-gpu", "0.3")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight requests in two micro-batches, attention on the CPU."""
    file = tmp_path_factory.mktemp("validate") / "plan.json"
    lengths = ("--prompt-len", PROMPT, "--gen-len", GENERATED, "--requests", REQUESTS)
    every = ("--hw", "l4", "--model", model_folder("mixtral"), "--compute-dtype", "fp32", *lengths, *PINS)
    assert run("plan", *every, "-o", file).code == 0
    return file


@pytest.fixture(scope="module")
def measured(plan: Path) -> tuple[dict[str, Any], Path]:
    """The document, and the folder of its records; with a report beside the plan."""
    files = ("-o", plan.with_name("out.json"), "--report", plan.with_name("report.html"))
    options = ("--random-weights", "--device", "cpu", "--repeats", 2, *files, "--json")
    done = run("validate", "run", plan, *options)
    assert done.code == 0, done.err
    return done.document, plan.with_name("plan-validation")


@pytest.fixture(scope="module")
def records(measured: tuple[dict[str, Any], Path]) -> Records:
    return read_records(measured[1])


def test_the_document_is_that_of_its_records_and_of_its_file(measured: tuple[dict[str, Any], Path], plan: Path) -> None:
    document, folder = measured
    again = run("validate", "run", "--from", folder, "--json")
    assert (again.code, again.document) == (0, document)
    assert json.loads(plan.with_name("out.json").read_text(encoding="utf-8")) == document


def test_the_page_is_rebuilt_word_for_word_and_needs_no_other_file(
    measured: tuple[dict[str, Any], Path], plan: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again.html"
    assert run("validate", "run", "--from", measured[1], "--report", again).code == 0
    page = plan.with_name("report.html").read_text(encoding="utf-8")
    assert again.read_text(encoding="utf-8") == page
    assert page.count("<figure>") == 5
    assert not re.search(r'(?:src|href)="(?!#)', page)


def test_rates_of_another_machine_are_no_test_of_it(measured: tuple[dict[str, Any], Path]) -> None:
    document = measured[0]
    assert (document["same_machine"], document["emulated"]) == (False, True)
    assert document["verdict"]["tested"] is False
    assert "the rates are those of l4" in document["verdict"]["sentence"]


def test_every_policy_ran_as_often_as_asked_and_all_after_their_predictions(records: Records) -> None:
    names = [row["name"] for row in records.predictions["candidates"]]
    for name in names:
        own = [run for run in records.runs if run["candidate"] == name and not run["warm_up"]]
        assert len(own) == 2, name
    assert len([run for run in records.first if not run["warm_up"]]) == 8
    assert all(run["predictions_sha256"] is None for run in records.first)


def test_a_policy_gives_the_same_tokens_in_every_run(records: Records) -> None:
    found: dict[str, set[str]] = {}
    for each in records.runs:
        found.setdefault(each["candidate"], set()).add(each["tokens_sha256"])
    assert all(len(hashes) == 1 for hashes in found.values())
    assert found["chosen"] == found["chosen again"]
    assert {each["tokens_sha256"] for each in records.first} == found["chosen"]


def test_a_run_is_one_graph_of_the_passes_of_its_batch(records: Records) -> None:
    (piece,) = pieces_of(records.runs[0])
    assert (piece.steps.prefill, piece.steps.first, piece.steps.last) == (True, 0, GENERATED - 1)
    assert {span.task.phase for span in piece.trace.spans} == {"prefill", "decode"}


def test_seconds_of_the_phases_are_within_the_clock_on_the_wall(
    measured: tuple[dict[str, Any], Path], records: Records
) -> None:
    for row in measured[0]["policies"]:
        walls = [run["wall_s"] for run in records.runs if run["candidate"] == row["name"] and not run["warm_up"]]
        rates = row["measured"]["throughput_tokens_per_s"]["repeats"]
        tokens = row["policy"]["batch_size"] * GENERATED
        assert all(tokens / rate < wall for rate, wall in zip(rates, walls, strict=True)), row["name"]


def test_memory_and_routing_are_those_of_the_first_run_of_a_policy(measured: tuple[dict[str, Any], Path]) -> None:
    rows = {row["name"]: row for row in measured[0]["policies"]}
    chosen = rows["chosen"]["memory"]
    assert chosen == rows["chosen again"]["memory"]
    assert 0 < chosen["gpu"]["taken_bytes"] <= chosen["gpu"]["planned_bytes"] + 2**20
    routing = next(row["routing"] for row in rows.values() if row["routing"])
    assert 0.0 < routing["decode"]["touched"] <= 8.0


def test_records_with_other_predictions_are_refused(measured: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    copy = shutil.copytree(measured[1], tmp_path / "copy")
    file = copy / "predictions.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"simulated_s"', '"simulated_s" '), encoding="utf-8")
    assert "not those that were hashed" in refused("validate", "run", "--from", copy)


def test_a_dry_run_measures_nothing_and_says_how_long_it_would_take(plan: Path, tmp_path: Path) -> None:
    before = sorted(plan.parent.iterdir())
    done = run("validate", "run", plan, "--dry-run", "--json")
    assert done.code == 0, done.err
    assert done.document["estimated_seconds"] > 0.0
    assert {"chosen", "chosen again"} <= {row["name"] for row in done.document["candidates"]}
    assert sorted(plan.parent.iterdir()) == before
    shown = run("validate", "run", plan, "--dry-run")
    assert shown.code == 0
    assert "policies, 5 runs of each: about" in shown.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "nothing to validate is given"),
        (("PLAN",), "which weights is not said"),
        (("PLAN", "--preset", "colab-t4"), "PLAN and --preset are given"),
        (("PLAN", "--random-weights", "--repeats", "1"), "one run says nothing of noise"),
        (("PLAN", "--random-weights", "--layers", "99"), "99 of the"),
        (("--preset", "a100"), "reviewers-s1 or colab-t4"),
        (("--from", "nowhere"), "no such folder"),
        (("--from", "nowhere", "--dry-run"), "nothing is measured with --from either"),
        (("PLAN", "--dry-run", "--report", "report.html"), "no report of what was not measured"),
    ],
)
def test_options_that_make_no_sense_are_refused_with_a_way_out(plan: Path, options: tuple[str, ...], said: str) -> None:
    given = [plan if option == "PLAN" else option for option in options]
    line = refused("validate", "run", *given)
    assert said in line
    assert line.endswith(")")


def test_records_are_not_written_over_something_else(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    line = refused("validate", "run", plan, "--random-weights", "--records", tmp_path)
    assert "holds something else" in line
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "mine"
