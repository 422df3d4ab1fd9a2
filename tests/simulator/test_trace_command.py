"""`hrm simulate --trace` and `hrm diff`, together: what is written is read, covers what it says, and predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Outcome, run

from hrm.plans import read_plan_document
from hrm.trace_files import TraceDocument, fingerprint_plan, read_trace

PLAN = ("plan", "--hw", "t4", "--model", "olmoe", "--prompt-len", "32", "--gen-len", "6", "--requests", "8")
PINS = ("--micro-batch", "4", "--num-micro-batches", "2", "--attention", "cpu", "--weights-on-gpu", "0.2")
STEPS = 5  # decode steps of six generated tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("traces")
    done = run(*PLAN, *PINS, "-o", found / "plan.json", "--json")
    assert done.code == 0, done.err
    return found


def simulated(folder: Path, *options: object) -> TraceDocument:
    done = run("simulate", folder / "plan.json", *options, "--trace", folder / "trace.json", "--json")
    assert done.code == 0, done.err
    return read_trace(folder / "trace.json")


def test_a_trace_says_of_what_plan_schedule_and_steps_it_is(folder: Path) -> None:
    found = simulated(folder)
    _, _, saved = read_plan_document(folder / "plan.json")
    assert (found.trace.kind, found.facts.plan, found.facts.schedule) == (
        "simulated",
        fingerprint_plan(saved),
        "cgopipe",
    )
    assert (found.facts.model, found.facts.hardware, found.facts.layers) == ("olmoe-1b-7b", "t4", 16)
    assert tuple(found.steps) == (False, 1, 4)  # the middle one of five, and its neighbours
    assert dict(found.facts.origin) == {"contention": "on"}


def test_a_full_trace_without_steps_has_prefill_and_every_step(folder: Path) -> None:
    assert tuple(simulated(folder, "--full").steps) == (True, 0, STEPS)
    assert tuple(simulated(folder, "--full", "--steps", 1).steps) == (False, 1, 4)


def test_a_full_trace_is_as_long_as_the_run(folder: Path) -> None:
    done = run("simulate", folder / "plan.json", "--full", "--trace", folder / "trace.json", "--json")
    spans = read_trace(folder / "trace.json").trace.spans
    run_s = done.document["prefill_s"] + done.document["decode_s"]
    assert max(span.end_s for span in spans if span.task.op == "sample") == pytest.approx(run_s, rel=1e-12)


def test_without_contention_every_task_takes_what_is_predicted_for_it(folder: Path) -> None:
    found = simulated(folder, "--full", "--no-contention")
    assert found.predicted_s is not None
    took = [span.end_s - span.start_s for span in found.trace.spans]
    assert took == pytest.approx(found.predicted_s, rel=1e-6, abs=1e-9)


def test_jitter_changes_what_is_simulated_and_not_what_is_predicted(folder: Path) -> None:
    plain, jittered = simulated(folder), simulated(folder, "--jitter", 0.1, "--seed", 3)
    assert plain.predicted_s == jittered.predicted_s
    assert plain.trace.makespan_s != jittered.trace.makespan_s
    assert dict(jittered.facts.origin) == {"contention": "on", "jitter": "0.1", "routing skew": "0", "seed": "3"}


def diff(folder: Path, *options: object) -> Outcome:
    return run("diff", folder / "one.json", folder / "other.json", *options)


@pytest.mark.parametrize("schedule", ["cgopipe", "s2", "s3"])
def test_simulated_traces_keep_the_rule_with_contention_and_without(folder: Path, schedule: str) -> None:
    for name, options in (("one", ()), ("other", ("--no-contention", "--jitter", 0.2))):
        simulated(folder, "--full", "--schedule", schedule, *options)
        (folder / "trace.json").rename(folder / f"{name}.json")
    done = diff(folder, "--json")
    assert (done.code, done.err) == (0, "")
    found: dict[str, Any] = done.document
    assert (found["first"]["violation"], found["second"]["violation"], found["differs"]) == (None, None, [])
    assert found["makespan"]["predicted_s"] <= found["makespan"]["first_s"] * (1 + 1e-9)
    for table in ("by_op", "by_lane", "by_layer"):
        assert sum(row["tasks"] for row in found[table]) == found["tasks"]
        assert sum(row["first_s"] for row in found[table]) == pytest.approx(found["accuracy"]["first_s"], rel=1e-9)


def test_traces_of_two_schedules_are_refused_and_the_reason_is_named(folder: Path) -> None:
    for name, schedule in (("one", "cgopipe"), ("other", "s2")):
        simulated(folder, "--schedule", schedule)
        (folder / "trace.json").rename(folder / f"{name}.json")
    done = diff(folder)
    assert (done.code, done.out) == (2, "")
    assert "other.json: has no load_weights/decode/s1/l0/p1/g0, which is task " in done.err
    assert "they differ in schedule: cgopipe and s2 (two traces of one plan" in done.err


def test_a_plan_or_a_trace_without_what_is_needed_is_no_trace(folder: Path) -> None:
    trace = folder / "trace.json"
    simulated(folder)
    done = run("diff", folder / "plan.json", trace)
    assert (done.code, done.out) == (2, "")
    assert "plan.json: is not a trace (what hrm simulate PLAN --trace FILE writes" in done.err
    document = json.loads(trace.read_text(encoding="utf-8"))
    del document["hrm"]
    (folder / "bare.json").write_text(json.dumps(document))
    assert "bare.json: is a trace without the key 'hrm'" in run("diff", folder / "bare.json", trace).err
