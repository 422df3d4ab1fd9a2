"""What ran beside what is simulated: the same tasks, in the same order, under the same rule; memory within the plan."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import (
    DEFAULTS,
    GENERATED,
    Case,
    Ran,
    cases,
    layout_of,
    make_prompts,
    model_folder,
    open_tiny,
    policy_of,
    run_case,
    run_session,
)
from command import run
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from hrm.graph import Lane, LaneKind, Task
from hrm.layout import Layout
from hrm.rates import derive_rates
from hrm.schedules import SCHEDULES, Steps, held_before, schedule_graph
from hrm.trace import Trace
from hrm.trace_facts import TraceFacts
from hrm.trace_files import read_trace, write_trace
from hrm.trace_order import find_violation
from runtime.arena_terms import make_arenas
from runtime.disk_file import DiskFile
from runtime.kv_cache import KvCache
from runtime.run_state import RunState
from runtime.session import Piece, Session
from simulator.durations import roofline_durations
from simulator.engine import simulate

LANDINGS = "KV landing buffers"

EVERYWHERE: dict[str, Any] = {
    "weights_on_disk": 0.25,
    "dense_weights_on_gpu": False,
    "embedding_on_gpu": False,
    "lm_head_on_gpu": False,
    "pin_weights": False,
}


def case_of(schedule: str) -> Case:
    """A policy in which as many kinds of task as possible have something to do."""
    changes: dict[str, Any] = {} if schedule == "cpu_only" else EVERYWHERE
    if DEFAULTS.get(schedule, {}).get("kv_on_gpu") is None and schedule != "cpu_only":
        changes = changes | {"kv_on_gpu": 0.25, "kv_on_disk": 0.25, "micro_batch_size": 4, "num_micro_batches": 2}
    return Case(schedule, policy_of(schedule, **changes))


def layout_in(case: Case, policy: Any) -> Layout:
    return replace(layout_of(model_folder("mixtral"), case), policy=policy)


def simulated(case: Case, policy: Any, piece: Piece) -> Trace:
    layout = layout_in(case, policy)
    graph = schedule_graph(layout, case.schedule, piece.steps)
    return simulate(graph, roofline_durations(derive_rates(layout.scenario.profile, layout.scenario.formats)))


def order_by_lane(trace: Trace) -> dict[Lane, list[str]]:
    """Tasks of every lane as they followed each other in time; of one instant in the order of the graph."""
    found: dict[Lane, list[str]] = {}
    for span in sorted(trace.spans, key=lambda span: (span.start_s, span.end_s)):
        found.setdefault(span.lane, []).append(str(span.task))
    return found


def check_rule(ran: Ran) -> None:
    for batch in ran.batches:
        for piece in batch.pieces:
            assert find_violation(piece.trace.spans, piece.graph.before) is None


@pytest.fixture(scope="module")
def runs() -> dict[str, Ran]:
    return {schedule: run_case(model_folder("mixtral"), case_of(schedule)) for schedule in SCHEDULES}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_ran_joins_what_is_simulated_task_by_task(schedule: str, runs: dict[str, Ran]) -> None:
    for batch in runs[schedule].batches:
        assert [piece.steps for piece in batch.pieces] == [Steps(prefill=True), Steps(first=0, last=GENERATED - 1)]
        for piece in batch.pieces:
            other = simulated(case_of(schedule), batch.policy, piece)
            assert [(span.task, span.lane) for span in piece.trace.spans] == [
                (span.task, span.lane) for span in other.spans
            ]
            assert order_by_lane(piece.trace) == order_by_lane(other)
            assert piece.trace.kind == ("measured" if schedule == "cpu_only" else "emulated")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_ran_kept_the_rule_of_its_graph(schedule: str, runs: dict[str, Ran]) -> None:
    check_rule(runs[schedule])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_run_keeps_the_rule_and_stays_within_the_peak_of_the_plan(case: Case) -> None:
    ran = run_case(model_folder("qwen2_moe"), case)
    check_rule(ran)
    layout = layout_of(model_folder("qwen2_moe"), case)
    check_memory(ran, make_arenas(layout.scenario, case.policy, layout).levels)


def check_memory(ran: Ran, levels: Any) -> None:
    for batch in ran.batches:
        for piece in batch.pieces:
            for level, samples in piece.trace.memory.items():
                highest = max(held for _, held in samples)
                assert min(held for _, held in samples) >= 0.0
                assert highest <= levels[level].peak * (1 + 1e-6) + 1.0, level


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_over_time_stays_within_the_peak_of_the_plan(schedule: str, runs: dict[str, Ran]) -> None:
    case = case_of(schedule)
    layout = layout_of(model_folder("mixtral"), case)
    check_memory(runs[schedule], make_arenas(layout.scenario, case.policy, layout).levels)
    batch = runs[schedule].batches[0]
    for piece in batch.pieces:
        held = held_before(layout_in(case, batch.policy), piece.steps)
        assert piece.trace.memory["cpu"][0] == (0.0, held["cpu"])


@pytest.mark.parametrize("slow", [LaneKind.GPU, LaneKind.CPU, LaneKind.H2D, LaneKind.D2H, LaneKind.DISK, LaneKind.PIN])
def test_memory_stays_within_the_peak_whichever_lane_is_slow(slow: LaneKind) -> None:
    """What tasks say that they take meanwhile is bounded by what they wait for, not by luck."""
    for schedule in ("cgopipe", "s4", "s2"):
        for changes in ({}, {"ffn_on_gpu": False, "num_micro_batches": 4, "micro_batch_size": 2}):
            case = case_of(schedule)
            case = Case(schedule, replace(case.policy, **({"batch_size": 8} | changes if changes else {})))
            ran = run_case(model_folder("mixtral"), case, pace=lambda task: 1e-3 * (task.lane.kind is slow))
            layout = layout_of(model_folder("mixtral"), case)
            check_memory(ran, make_arenas(layout.scenario, case.policy, layout).levels)
            check_rule(ran)


@pytest.mark.parametrize("schedule", ["cgopipe", "s3", "s4"])
def test_tensors_that_wait_to_be_written_stay_within_the_plan_however_slow_the_disk(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six prompts one by one through three layers: two of them in memory; of steps the tokens of a few positions."""
    taken: dict[int, int] = {}
    states: list[RunState] = []
    prompts, steps = [0], [0]
    prepare, take, give, write = Session.prepare, KvCache.take_landing, KvCache.give_landing, DiskFile.write

    def prepared(self: Session, *args: Any) -> RunState:
        states.append(prepare(self, *args))
        return states[-1]

    def took(self: KvCache) -> Tensor:
        landing = take(self)
        taken[landing.data_ptr()] = landing.nbytes
        prompts.append(sum(taken.values()))
        return landing

    def gave(self: KvCache, landing: Tensor, left: Any = None) -> None:
        del taken[landing.data_ptr()]
        give(self, landing, left)

    def slow(self: DiskFile, offset: int, data: Tensor) -> None:
        if states:
            time.sleep(1e-3)
            waiting = list(states[-1].disk_writes.values())
            steps.append(sum(k.nbytes + v.nbytes for tokens in waiting for _, _, k, v in tokens))
        write(self, offset, data)

    monkeypatch.setattr(Session, "prepare", prepared)
    monkeypatch.setattr(KvCache, "take_landing", took)
    monkeypatch.setattr(KvCache, "give_landing", gave)
    monkeypatch.setattr(DiskFile, "write", slow)
    monkeypatch.setattr("hrm.holds.STAGING_BUFFER_BYTES", 0.0)  # no more buffers than the two
    case = Case(schedule, policy_of(schedule, kv_on_disk=1.0, prefill_micro_batch_size=1))
    run_case(model_folder("mixtral"), case)
    buffer = 2 * 64 * 64 * 2  # keys and values, of each of two requests a block of 64 tokens, 64 byte each
    layout = layout_of(model_folder("mixtral"), case)
    arena = make_arenas(layout.scenario, case.policy, layout)["cpu"]
    assert max(prompts) == 2 * buffer <= arena.planned[LANDINGS] + arena.rounding[LANDINGS]
    assert 0 < max(steps) <= 4 * 2 * 2 * 64  # of two requests each, besides the one that is being written
    assert not taken and not states[-1].disk_writes and not states[-1].prompt_writes


FACTS = TraceFacts(plan="0123456789abcdef", schedule="cgopipe", layers=3, model="tiny", hardware="l4", workload="tiny")


def test_a_measured_trace_is_read_back_and_compared_with_the_simulated_one(
    runs: dict[str, Ran], tmp_path: Path
) -> None:
    batch = runs["cgopipe"].batches[0]
    piece = batch.pieces[1]
    write_trace(piece.graph, piece.trace, tmp_path / "measured.json", plan_facts=FACTS)
    found = read_trace(tmp_path / "measured.json")
    assert (found.trace.spans, dict(found.trace.memory)) == (piece.trace.spans, dict(piece.trace.memory))
    assert (found.before, found.steps, found.trace.kind) == (piece.graph.before, piece.steps, "emulated")
    layout = layout_in(case_of("cgopipe"), batch.policy)
    seconds = roofline_durations(derive_rates(layout.scenario.profile, layout.scenario.formats))
    predicted = [seconds(task) for task in piece.graph.tasks]
    write_trace(
        piece.graph,
        simulate(piece.graph, seconds),
        tmp_path / "simulated.json",
        plan_facts=FACTS,
        predicted_s=predicted,
    )
    done = run("diff", tmp_path / "simulated.json", tmp_path / "measured.json", "--json")
    assert (done.code, done.err) == (0, "")
    document = done.document
    assert (document["tasks"], document["differs"]) == (len(piece.graph), [])
    assert (document["first"]["violation"], document["second"]["violation"]) == (None, None)
    took = sum(span.end_s - span.start_s for span in piece.trace.spans)
    assert sum(row["second_s"] for row in document["by_op"]) == pytest.approx(took, rel=1e-9)


def test_decode_is_cut_into_graphs_where_it_has_too_many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("cgopipe", policy_of())
    layout = layout_of(model_folder("mixtral"), case)
    two = len(schedule_graph(layout, "cgopipe", Steps(first=0, last=1))) * 5 // 2
    monkeypatch.setattr("runtime.session.TASKS_AT_ONCE", two)
    ran = run_case(model_folder("mixtral"), case)
    assert [piece.steps for piece in ran.batches[0].pieces] == [
        Steps(prefill=True),
        Steps(first=0, last=2),
        Steps(first=2, last=4),
    ]
    monkeypatch.undo()
    assert ran.tokens == run_case(model_folder("mixtral"), case).tokens


def test_a_window_is_one_graph_and_changes_no_token() -> None:
    session: Session = open_tiny(model_folder("mixtral"), Case("cgopipe", policy_of()))
    runs = session.generate(make_prompts(), window=Steps(first=1, last=3))
    assert [piece.steps for piece in runs[0].pieces] == [
        Steps(prefill=True),
        Steps(first=0, last=1),
        Steps(first=1, last=3),
        Steps(first=3, last=4),
    ]
    plain = run_session(open_tiny(model_folder("mixtral"), Case("cgopipe", policy_of())))
    assert Ran(runs).tokens == plain.tokens


def test_a_task_lasts_as_long_as_its_lane_is_told() -> None:
    def pace(task: Task) -> float:
        return 2e-3 if task.lane.kind is LaneKind.H2D else 0.0

    ran = run_case(model_folder("mixtral"), Case("s3", policy_of("s3")), pace=pace)
    spans = [span for batch in ran.batches for piece in batch.pieces for span in piece.trace.spans]
    copies = [span.end_s - span.start_s for span in spans if span.lane.kind is LaneKind.H2D]
    assert copies and min(copies) >= 2e-3
