"""Two traces beside each other: sums by hand, what is refused, and what a person sees."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import refused, run
from traces import (
    AGAIN,
    FACTS,
    GPU,
    GRAPH,
    H2D,
    LOAD,
    MEASURED,
    MEASUREMENT,
    POST,
    PRE,
    PREDICTED,
    SIMULATED,
    SIMULATION,
    document,
    spans_of,
)

from hrm.diff import diff_documents, labels_of
from hrm.diff_tables import print_diff
from hrm.errors import InputError
from hrm.graph import Lane, LaneKind, Op, Task, TaskGraph, TaskId
from hrm.schedules import Steps
from hrm.trace import Trace
from hrm.trace_files import TraceDocument, write_trace
from hrm.trace_order import find_violation

FOUND = diff_documents(SIMULATION, MEASUREMENT)


def seconds(row: dict[str, Any]) -> tuple[float | None, float, float, float | None]:
    return row["predicted_s"], row["first_s"], row["second_s"], row["ratio"]


def rows(found: dict[str, Any], table: str) -> dict[Any, tuple[Any, ...]]:
    """Tasks and seconds by name."""
    return {row["name"]: (row["tasks"], *seconds(row)) for row in found[table]}


def test_seconds_by_kind_of_task() -> None:
    assert rows(FOUND, "by_op") == {
        "load_weights": (2, 5.0, 6.0, 7.0, 7 / 6),
        "pre_attention": (1, 1.0, 1.0, 1.0, 1.0),
        "post_attention": (1, 2.0, 2.0, 3.0, 1.5),
    }


def test_seconds_and_idle_time_by_lane() -> None:
    assert rows(FOUND, "by_lane") == {
        "host_to_device0": (2, 5.0, 6.0, 7.0, 7 / 6),
        "gpu0": (2, 3.0, 3.0, 4.0, 4 / 3),
    }
    idle = {row["name"]: (row["first_idle_s"], row["second_idle_s"]) for row in FOUND["by_lane"]}
    assert idle == {"host_to_device0": (2.0, 3.0), "gpu0": (5.0, 6.0)}


def test_seconds_by_layer() -> None:
    assert rows(FOUND, "by_layer") == {0: (3, 5.0, 6.0, 8.0, 8 / 6), 1: (1, 3.0, 3.0, 3.0, 1.0)}


def test_the_makespan_is_that_between_start_and_end_beside_the_busiest_lane() -> None:
    assert seconds(FOUND["makespan"]) == (5.0, 8.0, 10.0, 1.25)  # measured from 10 to 20 s


def test_the_error_is_the_sum_of_all_differences_over_what_was_measured() -> None:
    found = FOUND["accuracy"]
    assert (found["tasks"], found["lanes"]) == (4, ["host_to_device0", "gpu0"])
    assert (found["first_s"], found["second_s"], found["ratio"], found["error"]) == (9.0, 11.0, 11 / 9, 2 / 11)


def test_tasks_that_differ_most_come_first_and_of_equals_the_one_issued_first() -> None:
    assert [(row["name"], row["difference_s"]) for row in FOUND["top"]["tasks"]] == [(str(LOAD), 1.0), (str(POST), 1.0)]
    assert FOUND["top"]["share"] == 1.0
    slower = document(*MEASURED[:3], (17.0, 17.5), kind="measured")
    found = diff_documents(SIMULATION, slower, top=2)["top"]
    assert [(row["name"], row["difference_s"]) for row in found["tasks"]] == [(str(AGAIN), -2.5), (str(LOAD), 1.0)]
    assert found["share"] == 3.5 / 4.5


def test_traces_of_one_kind_are_called_first_and_second() -> None:
    assert labels_of(SIMULATION, MEASUREMENT) == ("simulated", "measured")
    assert labels_of(MEASUREMENT, MEASUREMENT) == ("first", "second")
    found = diff_documents(MEASUREMENT, MEASUREMENT)
    assert (found["accuracy"]["error"], found["top"]) == (0.0, {"share": None, "tasks": []})
    assert seconds(found["makespan"]) == (None, 10.0, 10.0, 1.0)  # neither knows what was predicted


def test_a_prediction_is_taken_from_whichever_trace_has_it() -> None:
    assert seconds(diff_documents(MEASUREMENT, SIMULATION)["makespan"]) == (5.0, 10.0, 8.0, 0.8)


def test_tasks_are_joined_by_name_whatever_the_order_of_issue() -> None:
    turned = TaskGraph([GRAPH.tasks[index] for index in (1, 0, 2, 3)])
    other = document(
        *(MEASURED[index] for index in (1, 0, 2, 3)), kind="measured", graph=turned, predicted=(1.0, 2.0, 2.0, 3.0)
    )
    found = diff_documents(replace(SIMULATION, predicted_s=None), other)
    assert [found[key] for key in ("makespan", "by_op", "by_lane", "by_layer", "top")] == [
        FOUND[key] for key in ("makespan", "by_op", "by_lane", "by_layer", "top")
    ]
    assert [each["what"] for each in found["differs"]] == ["order of issue"]
    assert FOUND["differs"] == []


# A layer of decode


def layers_by_hand(*ends: float) -> tuple[TaskGraph, tuple[tuple[float, float], ...]]:
    """Three layers, each a page of 1 s at time 0 and a task of 1 s that ends then."""
    tasks, times = [], []
    for layer, end in enumerate(ends):
        tasks.append(Task(TaskId(Op.LOAD_WEIGHTS, "decode", 0, layer, page=0), H2D))
        tasks.append(Task(TaskId(Op.POST_ATTENTION, "decode", 0, layer), GPU))
        times += [(0.0, 1.0), (end - 1.0, end)]
    return TaskGraph(tasks), tuple(times)


def test_a_layer_is_what_lies_between_the_ends_of_the_first_and_the_last_and_its_bound_the_busiest_lane() -> None:
    graph, simulated = layers_by_hand(2.0, 5.0, 9.0)
    _, measured = layers_by_hand(2.0, 5.0, 12.0)
    predicted = (9.0, 9.0, 2.0, 3.0, 4.0, 1.0)  # layer 0 does not count; then 3 and 4
    first = document(*simulated, graph=graph, predicted=predicted, layers=3)
    second = document(*measured, graph=graph, kind="measured", layers=3)
    assert seconds(diff_documents(first, second)["layer_latency"]) == (3.5, 3.5, 5.0, 5.0 / 3.5)


def test_a_trace_without_two_layers_of_a_step_has_no_layer_latency() -> None:
    assert FOUND["layer_latency"] is None  # of layer 1 only the page is there
    one = document(*SIMULATED, layers=1)
    assert diff_documents(one, one)["layer_latency"] is None


# Paced lanes

EMULATION = document(*MEASURED, kind="emulated", paced=(GPU,), clock_error_s=2e-6)


def test_paced_lanes_are_shown_and_marked_but_count_in_no_accuracy() -> None:
    found = diff_documents(SIMULATION, EMULATION)
    assert rows(found, "by_lane") == rows(FOUND, "by_lane")
    paced = {row["name"]: row["paced"] for table in ("by_op", "by_lane", "by_layer") for row in found[table]}
    assert paced == {
        "load_weights": "none",
        "pre_attention": "all",
        "post_attention": "all",
        "host_to_device0": "none",
        "gpu0": "all",
        0: "some",
        1: "none",
    }
    assert found["accuracy"] == {
        "tasks": 2,
        "lanes": ["host_to_device0"],
        "first_s": 6.0,
        "second_s": 7.0,
        "ratio": 7 / 6,
        "error": 1 / 7,
    }
    assert (found["labels"], found["second"]["kind"]) == (["simulated", "emulated"], "emulated")


def test_where_every_lane_is_paced_there_is_no_accuracy() -> None:
    all_paced = document(*MEASURED, kind="emulated", paced=(GPU, H2D))
    assert diff_documents(SIMULATION, all_paced)["accuracy"] is None


# Traces of other tasks


def reason(first: TraceDocument, second: TraceDocument) -> str:
    with pytest.raises(InputError) as raised:
        diff_documents(first, second)
    return str(raised.value)


SHORT = TaskGraph(GRAPH.tasks[:3])


def test_the_first_task_that_one_trace_lacks_is_named() -> None:
    short = document(*MEASURED[:3], kind="measured", graph=SHORT)
    for said in (reason(SIMULATION, short), reason(short, SIMULATION)):
        assert said == (
            f"measured.json: has no {AGAIN}, which is task 3 of simulated.json "
            "(two traces of one plan, schedule and range of steps)"
        )


def test_what_the_traces_say_of_themselves_explains_why_tasks_differ() -> None:
    short = document(*MEASURED[:3], graph=SHORT, kind="measured", schedule="s2", steps=Steps(True, 0, 2))
    assert "; they differ in schedule: cgopipe and s2; steps: decode step 3 and prefill and decode steps 0 to 1 (" in (
        reason(SIMULATION, short)
    )


def test_a_task_on_another_lane_is_refused() -> None:
    elsewhere = TaskGraph([replace(GRAPH.tasks[0], lane=Lane(LaneKind.CPU)), *GRAPH.tasks[1:]])
    other = document(*MEASURED, kind="measured", graph=elsewhere)
    assert f"{LOAD} ran on cpu, in simulated.json on host_to_device0" in reason(SIMULATION, other)


def test_another_plan_is_told_where_the_tasks_are_the_same() -> None:
    found = diff_documents(SIMULATION, document(*MEASURED, kind="measured", plan="f" * 16, hardware="other"))
    assert found["differs"] == [
        {"what": "plan", "first": "0123456789abcdef", "second": "f" * 16},
        {"what": "hardware", "first": "box", "second": "other"},
    ]


# Order

BROKEN = [
    (((0.0, 3.0), (4.0, 4.0), (3.0, 5.0), (5.0, 8.0)), "order", POST, PRE, 1.0),
    (((0.0, 3.0), (0.0, 3.5), (3.0, 5.0), (5.0, 8.0)), "one at a time", POST, PRE, 0.5),
    (((0.0, 3.0), (0.0, 1.0), (2.75, 5.0), (5.0, 8.0)), "dependency", POST, LOAD, 0.25),
    (((0.0, 3.0), (0.0, 1.0), (3.0, 5.0), (4.0, 8.0)), "dependency", AGAIN, POST, 1.0),
]


@pytest.mark.parametrize(("times", "rule", "task", "other", "early"), BROKEN)
def test_the_first_task_that_starts_too_early_is_found(
    times: tuple[tuple[float, float], ...], rule: str, task: TaskId, other: TaskId, early: float
) -> None:
    found = find_violation(spans_of(*times), GRAPH.before)
    assert found is not None
    assert (found.rule, found.task, found.other, found.early_s) == (rule, task, other, early)
    assert find_violation(spans_of(*times), GRAPH.before, clock_error_s=early) is None
    assert find_violation(spans_of(*times), GRAPH.before, clock_error_s=0.9 * early) == found


@pytest.mark.parametrize("times", [SIMULATED, MEASURED])
def test_a_trace_that_keeps_the_rule_is_fine(times: tuple[tuple[float, float], ...]) -> None:
    assert find_violation(spans_of(*times), GRAPH.before) is None


# The command


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "simulated.json", tmp_path / "measured.json"
    write_trace(GRAPH, Trace(spans_of(*SIMULATED), "simulated"), first, plan_facts=FACTS, predicted_s=PREDICTED)
    write_trace(GRAPH, Trace(spans_of(*MEASURED), "measured"), second, plan_facts=FACTS)
    return first, second


def test_the_document_of_the_command_is_that_of_the_files(files: tuple[Path, Path]) -> None:
    outcome = run("diff", *files, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    for key in ("labels", "makespan", "by_op", "by_lane", "by_layer", "top", "accuracy", "differs", "tasks"):
        assert outcome.document[key] == FOUND[key]
    assert outcome.document["first"]["file"] == str(files[0])
    assert outcome.document["second"]["violation"] is None


def test_every_key_of_the_document_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    table = page.split("| key of `hrm diff` | what it is |")[1].split("\n\n")[0]
    named = [cell for line in table.splitlines()[2:] for cell in line.split("|")[1].replace("`", "").split(", ")]
    assert {name.strip() for name in named} == set(FOUND)


def test_the_csv_file_has_every_task(files: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "tasks.csv"
    outcome = run("diff", *files, "-o", output)
    assert (outcome.code, outcome.err) == (0, f"saved to {output}\n")
    assert output.read_text() == (
        "task,op,phase,step,layer,micro_batch,page,device,part,lane,paced,"
        "predicted_s,simulated_s,measured_s,difference_s\n"
        f"{LOAD},load_weights,decode,3,0,,0,0,,host_to_device0,0,2.0,3.0,4.0,1.0\n"
        f"{PRE},pre_attention,decode,3,0,,,0,,gpu0,0,1.0,1.0,1.0,0.0\n"
        f"{POST},post_attention,decode,3,0,,,0,,gpu0,0,2.0,2.0,3.0,1.0\n"
        f"{AGAIN},load_weights,decode,3,1,,0,0,,host_to_device0,0,3.0,3.0,3.0,0.0\n"
    )


def test_a_trace_that_breaks_the_rule_is_shown_and_the_exit_code_is_2(files: tuple[Path, Path]) -> None:
    times, rule, task, _, _ = BROKEN[2]
    write_trace(GRAPH, Trace(spans_of(*times), "measured"), files[1], plan_facts=FACTS)
    said = f"{task} started before {LOAD}, which it waits for, had ended: 0.25 s too early"
    outcome = run("diff", *files, "--json")
    assert (outcome.code, outcome.document["second"]["violation"]) == (2, said)
    assert outcome.err == f"hrm: {files[1]}: {said}\n"
    assert f"! measured: {said}" in run("diff", *files).out.replace("\n", " ")
    assert rule == "dependency"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--top", 0), "--top: 0 tasks (1 or more)"),
        (("-o", "x.html"), "--output: x.html: is not a file this writes (a name that ends in .csv)"),
        (("-o", "/none/x.csv"), "--output: /none/x.csv: its folder does not exist"),
    ],
)
def test_wrong_options_are_refused(files: tuple[Path, Path], options: tuple[Any, ...], said: str) -> None:
    assert refused("diff", *files, *options) == said


def test_a_trace_is_not_written_over(files: tuple[Path, Path]) -> None:
    renamed = files[0].rename(files[0].with_suffix(".csv"))
    assert "is also a trace to compare" in refused("diff", renamed, files[1], "-o", renamed)


# The screen


def screen_of(found: dict[str, Any], width: int) -> str:
    from rich.console import Console

    file = io.StringIO()
    print_diff(found, Console(file=file, width=width, highlight=False, soft_wrap=False))
    return file.getvalue()


def test_the_screen_has_each_number_beside_the_others() -> None:
    lines = [" ".join(line.split()) for line in screen_of(FOUND, 118).splitlines()]
    for line in (
        "makespan (predicted: busiest lane) 5.000 8.000 10.000 1.250",
        "load weights 5.000 6.000 7.000 1.167 2",
        "GPU 3.000 3.000 4.000 1.333 5.000 6.000",
        "1 3.000 3.000 3.000 1.000 1",
        f"{LOAD} 3.000 4.000 +1.000",
        "4 tasks on all lanes: measured / simulated 1.222, differences of the tasks add up to 18.2% of measured time",
        "measured: order kept on 2 lanes, 3 dependencies respected",
    ):
        assert line in lines, line


def test_short_traces_are_shown_in_milliseconds() -> None:
    short = document(*((start / 1e3, end / 1e3) for start, end in SIMULATED))
    screen = " ".join(screen_of(diff_documents(short, short), 118).split())
    assert "ms of task time" in screen and " - 8.000 8.000 1.000 " in screen
    assert "every task takes as long in both" in screen
    assert "; s of task time" in screen_of(FOUND, 118)


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_says_what_is_paced_and_fits(width: int) -> None:
    screen = screen_of(diff_documents(SIMULATION, EMULATION), width)
    assert max(map(len, screen.splitlines())) <= width
    assert "…" not in screen
    text = " ".join(screen.split())
    for words in (
        "1.333*",
        "1.250~",
        "* paced: tasks on GPU last as long as they are told to, which says nothing of accuracy; ~ in part",
        "2 tasks on 1 lane not paced: emulated / simulated 1.167",
        "! emulated: a CPU stood in for the GPU, so its seconds, and ratios to them, say nothing of a GPU",
        "emulated: order kept on 2 lanes, 3 dependencies respected, within 2 us",
    ):
        assert words in text, words


def test_only_of_an_emulated_trace_is_said_that_it_says_nothing_of_a_gpu() -> None:
    assert "say nothing of a GPU" not in screen_of(FOUND, 120)
    assert "say nothing of a GPU" in screen_of(diff_documents(EMULATION, SIMULATION), 120)


def test_of_many_layers_those_that_differ_most_are_shown() -> None:
    graph = TaskGraph([Task(TaskId(Op.ATTENTION, "decode", 0, layer), GPU) for layer in range(20)])
    first = document(*((float(i), i + 0.5) for i in range(20)), graph=graph, layers=20)
    second = document(*((float(i), i + 0.5 + (i % 2) * 0.25) for i in range(20)), graph=graph, layers=20)
    screen = screen_of(diff_documents(first, second), 118)
    lines = [line.split() for line in screen.splitlines() if line.split()[-1:] == ["1"]]  # rows of one task
    shown = [int(words[0]) for words in lines if words[0].isdecimal()]
    assert shown == [0, 1, 2, 3, 5, 7, 9, 11, 13, 15, 17, 19]  # of those that do not differ the first two
    assert "the 12 of 20" in screen
