"""`hrm sweep`: what is varied, what the rows say, and what is left after a kill."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from command import refused, run

from hrm.errors import InputError
from hrm.model_files import find_config
from hrm.pins import Pins
from hrm.profile_files import load_profile, with_overrides
from hrm.scenario import Scenario
from hrm.search import find_policy
from hrm.workload import load_workload, uniform_workload
from simulator.replay import replay_plan
from simulator.sweep import first_reaching
from simulator.sweep_points import Study, scenario_at
from simulator.sweep_table import fingerprint_of
from simulator.sweep_values import grid_points, parse_axes, parse_axis

GIB = 2**30
PEAKS = {
    f"efficiency.{name}": "100 %"
    for name in ("gpu_flops_prefill", "gpu_flops_decode", "gpu_bandwidth", "gpu_overlap", "cpu_attention", "link")
}
"""What is said of Mixtral here is said at the peaks of the machine, and does not change when its efficiencies do."""

AT_PEAKS = tuple(word for key, value in PEAKS.items() for word in ("--set", f"{key}={value}"))
BASE = ("sweep", "--hw", "t4", "--model", "mixtral-8x7b", "--workload", "mtbench", *AT_PEAKS, "--predict-only")
NO_DISK = ("--kv-on-disk", "0", "--weights-on-disk", "0")
MEMORY = (*BASE, *NO_DISK, "--vary", "cpu.memory=64GiB:288GiB:16GiB")
SMALL = ("sweep", "--hw", "t4", "--model", "granite-3.1-1b-a400m", "--requests", "8", "--gen-len", "4")


def study_of(*vary: str, hw: str = "t4", **settings: Any) -> Study:
    """A study of Mixtral, nothing computed yet."""
    fields: dict[str, Any] = {
        "axes": parse_axes(vary),
        "hw": hw,
        "model": "mixtral-8x7b",
        "profiles": {hw: with_overrides(load_profile(hw), PEAKS)},
        "configs": {"mixtral-8x7b": find_config("mixtral-8x7b")},
        "workload": load_workload("mtbench"),
    }
    return Study(**fields | settings)


# What is varied


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("cpu.memory=64GiB:512GiB:64GiB", tuple(64 * GIB * k for k in range(1, 9))),
        ("cpu.memory=64GiB:250GiB:64GiB", (64 * GIB, 128 * GIB, 192 * GIB)),
        ("cpu.bandwidth=100 GB/s, 0.2 TB/s", (1e11, 2e11)),
        ("link=16GB/s:128GB/s:x2", (16e9, 32e9, 64e9, 128e9)),
        ("policy.kv_on_gpu=0:0.3:0.1", (0.0, 0.1, 0.2, 0.3)),
        ("policy.micro_batch=32,64", (32, 64)),
        ("workload.prompt_len=128:1024:x2", (128, 256, 512, 1024)),
        ("gpu.count=1:4:1", (1, 2, 3, 4)),
        ("cpu.memory*cpu.bandwidth=1:2:0.5", (1.0, 1.5, 2.0)),
        ("cpu.bandwidth*=0.5,1,2", (0.5, 1.0, 2.0)),
        ("hw=t4,l4", ("t4", "l4")),
        ("model.num_local_experts=8,16", (8, 16)),
    ],
)
def test_values_are_exactly_those_written(text: str, values: tuple[Any, ...]) -> None:
    axis = parse_axis(text)
    assert axis.values == values
    assert [type(value) is int for value in axis.values] == [axis.kind in ("count", "number")] * len(values)


def test_a_grid_is_in_the_order_of_the_options_with_the_last_key_fastest() -> None:
    axes = parse_axes(["cpu.cores=2,1", "hw=t4,l4"])
    assert grid_points(axes) == [(2, "t4"), (2, "l4"), (1, "t4"), (1, "l4")]


def test_values_are_shown_in_the_unit_they_were_typed_in() -> None:
    assert (parse_axis("cpu.memory=64 GiB:128GiB:64GiB").unit, parse_axis("cpu.memory=64GiB,1TB").unit_size) == (
        "GiB",
        GIB,
    )
    assert parse_axis("policy.micro_batch=1:3:1").unit == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cpu.mem=1GiB", "unknown key 'cpu.mem' (did you mean cpu.memory"),
        ("cpu=1GiB", "unknown key 'cpu' (it has cpu.memory, cpu.reserved"),
        ("zzz=1", "unknown key 'zzz' (e.g. cpu.memory, link"),
        ("cpu.memory", "is no KEY=VALUES"),
        ("cpu.memory=64:512:64", "'64' has no unit (try '64 GB' or '64 GiB')"),
        ("cpu.memory=64GiB:512GiB", "is no range (START:STOP:STEP"),
        ("cpu.memory=512GiB:64GiB:64GiB", "64GiB lies below 512GiB"),
        ("cpu.memory=64GiB:512GiB:0GiB", "a step of 0GiB leads nowhere"),
        ("cpu.memory=64GiB:512GiB:x1", "x1 makes no range"),
        ("cpu.memory=1GiB,,2GiB", "has an empty value"),
        ("cpu.memory=1GiB,1GiB", "a value is there twice"),
        ("cpu.memory=1B:1EB:1B", "too many values"),
        (
            "cpu.memory+cpu.bandwidth=1GiB",
            "cpu.memory is a size, cpu.bandwidth is a bandwidth (A*B*=1:10:1 multiplies)",
        ),
        ("cpu.memory*cpu.bandwidth=1GiB", "is no number above zero without a unit"),
        ("hw*cpu.memory=1:2:1", "hw cannot be varied together with others"),
        ("cpu.memory*cpu.cores+link=1", "'+' and '*' in one key"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(text: str, said: str) -> None:
    with pytest.raises(InputError) as refusal:
        parse_axes([text])
    if text == "cpu.memory=1B:1EB:1B":
        assert "EB" in str(refusal.value) or said in str(refusal.value)
    else:
        assert said in str(refusal.value)


def test_a_value_may_be_varied_once_only() -> None:
    for pair in (["link=1GB/s", "link.host_to_device.pinned=1GB/s"], ["hw=t4", "hw=l4"]):
        with pytest.raises(InputError, match=r"same values|varied twice"):
            parse_axes(pair)


# Points


def test_factors_multiply_what_the_profile_has() -> None:
    study = study_of("cpu.memory*cpu.bandwidth*cpu.peak=1:3:1", hw="a100x2-paper", workload=uniform_workload(512, 32))
    profile = scenario_at(study, (3.0,))[0].profile
    assert (profile.cpu.memory_bytes, profile.cpu.bandwidth_bytes_per_s) == (600e9, 300e9)
    assert dict(profile.cpu.peak_flops_per_s) == {"fp32": pytest.approx(4.8e12, rel=1e-15)}


def test_a_section_stands_for_its_values_and_percentages_follow() -> None:
    study = study_of("link+host_totals=500GB/s", hw="a100x2-paper", workload=uniform_workload(512, 32))
    profile = scenario_at(study, (500e9,))[0].profile
    for direction in (profile.link.host_to_device, profile.link.device_to_host):
        rates = (direction.pinned_bytes_per_s, direction.pageable_bytes_per_s, direction.with_opposite_bytes_per_s)
        assert rates == (500e9, 500e9, 500e9)
    assert profile.host_totals.host_to_device_bytes_per_s == profile.host_totals.device_to_host_bytes_per_s == 500e9


def test_workload_model_and_pins_of_a_point_are_its_own() -> None:
    study = study_of("workload.prompt_len=100", "model.num_hidden_layers=16", "policy.attention=cpu")
    scenario, pins = scenario_at(study, (100, 16, "cpu"))
    assert scenario.workload.prompt_lengths == (100,)
    assert scenario.model.n_layers == 16
    assert pins == Pins(attention_on_gpu=False)
    with pytest.raises(InputError, match=r"has no number 'num_hiden_layers' \(it has num_hidden_layers"):
        scenario_at(study_of("model.num_hiden_layers=16"), (16,))


def test_the_fingerprint_follows_the_inputs_and_nothing_else() -> None:
    one = fingerprint_of(study_of("cpu.memory=64GiB,128GiB"))
    assert one == fingerprint_of(study_of("cpu.memory=64GiB,128GiB"))
    slower = with_overrides(load_profile("t4"), {"cpu.bandwidth": "50 GB/s"})
    others = [
        study_of("cpu.memory=64GiB,96GiB"),
        study_of("cpu.memory=64GiB,128GiB", pins=Pins(kv_on_disk=0.0)),
        study_of("cpu.memory=64GiB,128GiB", schedules=("s4",)),
        study_of("cpu.memory=64GiB,128GiB", profiles={"t4": slower}),
    ]
    assert len({one, *(fingerprint_of(study) for study in others)}) == 5


# Rows


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """Mixtral on a T4, 15 sizes of CPU memory, two schedules, predicted."""
    outcome = run(*MEMORY, "--jobs", "1", "--json")
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = outcome.document
    return found


def test_there_is_a_row_for_every_point_and_schedule_in_order(document: dict[str, Any]) -> None:
    expected = [(size * GIB, name) for size in range(64, 289, 16) for name in ("cgopipe", "s4")]
    assert [(row["cpu.memory"], row["schedule"]) for row in document["rows"]] == expected
    assert document["varied"][0]["values"] == [size * GIB for size in range(64, 289, 16)]


def test_what_does_not_fit_is_a_row_with_a_reason(document: dict[str, Any]) -> None:
    unfit = [row for row in document["rows"] if row["predicted_tokens_per_s"] is None]
    assert {row["cpu.memory"] for row in unfit} == {64 * GIB, 80 * GIB}
    assert all(row["reason"].startswith("does not fit: ") and "GiB over CPU memory" in row["reason"] for row in unfit)
    assert all(row["reason"] == "" for row in document["rows"] if row not in unfit)


def test_more_cpu_memory_never_lowers_the_prediction(document: dict[str, Any]) -> None:
    for schedule in ("cgopipe", "s4"):
        rates = [row["predicted_tokens_per_s"] or 0.0 for row in document["rows"] if row["schedule"] == schedule]
        assert all(after >= before * (1 - 3e-4) for before, after in pairwise(rates))
        assert rates[-1] > 1.5 * rates[4] > 0


def test_a_row_holds_what_the_search_finds_for_its_machine_and_schedule(document: dict[str, Any]) -> None:
    study = study_of("cpu.memory=192GiB")
    scenario, _ = scenario_at(study, (192.0 * GIB,))
    found = find_policy(scenario, Pins(attention_on_gpu=False, kv_on_disk=0.0, weights_on_disk=0.0))
    row = next(r for r in document["rows"] if (r["cpu.memory"], r["schedule"]) == (192 * GIB, "cgopipe"))
    assert row["predicted_tokens_per_s"] == found.prediction.throughput_tokens_per_s
    assert (row["batch_size"], row["micro_batch_size"]) == (found.policy.batch_size, found.policy.micro_batch_size)
    assert row["weights_on_cpu"] == 1.0 - found.policy.weights_on_gpu
    assert row["cpu_peak_bytes"] == found.prediction.memory["cpu"].peak_bytes <= row["cpu_limit_bytes"]
    assert row["cpu_limit_bytes"] == (192 - 8) * GIB  # 8 GiB of it are reserved
    assert (row["attention_on_gpu"], row["kv_on_gpu"], row["kv_on_disk"]) == (0, 0.0, 0.0)


def test_the_bound_is_the_best_plan_with_a_hundred_times_the_largest_cpu_memory(document: dict[str, Any]) -> None:
    scenario, _ = scenario_at(study_of("cpu.memory=28800GiB"), (28800.0 * GIB,))
    free = find_policy(scenario, Pins(kv_on_disk=0.0, weights_on_disk=0.0))
    assert {row["bound_tokens_per_s"] for row in document["rows"]} == {free.prediction.throughput_tokens_per_s}
    assert {row["bound_limits"] for row in document["rows"]} == {"requests"}
    assert free.policy.batch_size == 10_000


def test_hours_that_bind_are_named() -> None:
    outcome = run(*BASE, *NO_DISK, "--vary", "cpu.memory=288GiB", "--schedules", "s4", "--max-hours", "0.1", "--json")
    (row,) = outcome.document["rows"]
    assert row["limits"] == "hours" and row["batch_seconds"] <= 360.0


def test_a_simulated_row_is_the_replay_of_its_plan() -> None:
    outcome = run(*SMALL, "--vary", "link=4GB/s,8GB/s", "--schedules", "s4", "--jobs", "1", "--json")
    assert outcome.code == 0, outcome.err
    row = outcome.document["rows"][0]
    scenario = small_scenario("4 GB/s")
    found = find_policy(scenario, Pins(attention_on_gpu=True))
    replay = replay_plan(scenario, found.policy, "s4")
    assert row["simulated_tokens_per_s"] == replay.throughput_tokens_per_s
    assert row["link.host_to_device.pinned"] == 4e9


def small_scenario(link: str) -> Scenario:
    overrides = dict.fromkeys(("link.host_to_device.pinned", "link.device_to_host.pinned"), link)
    study = study_of(
        "cpu.cores=24",
        profiles={"t4": with_overrides(load_profile("t4"), overrides)},
        model="granite-3.1-1b-a400m",
        configs={"granite-3.1-1b-a400m": find_config("granite-3.1-1b-a400m")},
        workload=load_workload("mtbench", generation_length=4, num_requests=8),
    )
    return scenario_at(study, (24,))[0]


def test_the_paper_cost_model_is_swept_too() -> None:
    outcome = run(
        *("sweep", "--hw", "l4-paper", "--model", "mixtral-8x7b", "--prompt-len", "77", "--gen-len", "32"),
        *("--cost-model", "paper", "--predict-only", "--schedules", "cgopipe", "--vary", "policy.micro_batch=287"),
        *("--num-micro-batches", "16", "--json"),
    )
    assert outcome.code == 0, outcome.err
    assert outcome.document["rows"][0]["predicted_tokens_per_s"] == pytest.approx(964.53, abs=0.005)


def test_first_reaching_is_the_smallest_value_at_95_percent_of_its_own_bound() -> None:
    def row(x: float, y: str, rate: float | None, bound: float, schedule: str = "s4") -> dict[str, Any]:
        return {"x": x, "hw": y, "schedule": schedule, "predicted_tokens_per_s": rate, "bound_tokens_per_s": bound}

    x, hw = {"name": "x", "kind": "size"}, {"name": "hw", "kind": "text"}
    line = [row(1, "a", None, 100), row(2, "a", 94.9, 100), row(3, "a", 95.0, 100), row(4, "a", 99.0, 100)]
    assert first_reaching(line, [x], ["s4"], predicted=True) == {"s4": 3}
    assert first_reaching(line[:2], [x], ["s4"], predicted=True) == {"s4": None}
    both = [*line, row(2, "b", 40.0, 41.0)]
    found = first_reaching(both, [hw, x], ["s4"], predicted=True)
    assert found == {"s4": [{"at": {"hw": "a"}, "value": 3}, {"at": {"hw": "b"}, "value": 2}]}


def test_the_screen_says_where_the_bound_is_reached_and_what_does_not_fit(document: dict[str, Any]) -> None:
    outcome = run(*BASE, *NO_DISK, "--vary", "cpu.memory=64GiB,512GiB", "--jobs", "1")
    assert outcome.code == 0
    assert f"cpu.memory 64 GiB (cgopipe, s4): {document['rows'][0]['reason']}\n" in outcome.out
    assert "95 % of the bound, predicted: cgopipe from cpu.memory = 512 GiB" in outcome.out
    assert "95 % of the bound, predicted: s4 at no value here" in outcome.out
    assert max(len(line) for line in outcome.out.splitlines() if "GiB  " in line) <= 118


# Errors of the command


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--vary", "cpu.memori=1GiB"), "did you mean cpu.memory"),
        (("--vary", "cpu.memory=64GiB", "--schedules", "cgopype"), "there is no schedule 'cgopype'"),
        (("--vary", "cpu.memory=64GiB", "--attention", "gpu"), "schedule cgopipe does not allow --attention as pinned"),
        (("--vary", "hw=t4,t5"), "no bundled hardware profile of the name 't5'"),
        (("--vary", "cpu.memory=64GiB", "--jobs", "0"), "0 processes are none"),
        (("--vary", "cpu.memory=64GiB", "--plot", "a.jpg"), "not a figure this writes"),
        (("--vary", "cpu.memory=64GiB", "-o", "/nowhere/a.csv"), "its folder does not exist"),
        (("--vary", "cpu.cores=1,2", "--vary", "hw=t4", "--vary", "kv_dtype=int8", "--plot", "a.png"), "3 keys"),
        (("--vary", "cpu.memory=1GiB"), "cpu.reserved"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_computed(options: tuple[str, ...], said: str) -> None:
    assert said in refused(*BASE, *options)


def test_the_papers_model_is_not_simulated() -> None:
    assert "--predict-only" in refused(*BASE[:-1], "--vary", "cpu.memory=64GiB", "--cost-model", "paper")


def test_where_nothing_fits_the_rows_are_shown_and_the_exit_code_is_3() -> None:
    outcome = run(*BASE, *NO_DISK, "--vary", "cpu.memory=32GiB,64GiB", "--json")
    assert outcome.code == 3
    assert len(outcome.document["rows"]) == 4
    assert outcome.err == f"hrm: no point has a plan; the first: {outcome.document['rows'][0]['reason']}\n"
    missing = [float(row["reason"].split(": ")[1].split(" GiB")[0]) for row in outcome.document["rows"]]
    assert missing[0] - missing[2] == pytest.approx(32.0, abs=0.0101)  # 32 GiB less are 32 GiB more missing


# Files


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        assert file.readline().startswith("# hrm sweep 1, inputs ")
        return list(csv.DictReader(file))


def start(*arguments: str) -> subprocess.Popen[str]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored in the background
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "hrm", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for_rows(path: Path, process: subprocess.Popen[str], least: int) -> None:
    """Until the file holds so many rows."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_text(encoding="utf-8").count("\n") >= least + 2:
            return
        time.sleep(0.01)
    raise AssertionError(f"no {least} rows came: {process.communicate()[1] if process.poll() is not None else ''}")


def children_of(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


def test_after_a_kill_and_a_torn_line_the_same_command_goes_on(tmp_path: Path, document: dict[str, Any]) -> None:
    file = tmp_path / "out.csv"
    process = start(*MEMORY, "--jobs", "2", "-o", str(file))
    wait_for_rows(file, process, 6)
    workers = children_of(process.pid)
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers), "workers outlive their parent"
    done = {row["cpu.memory"] for row in read_rows(file)}
    assert 3 <= len(done) < 15
    torn = file.read_text(encoding="utf-8").splitlines()[-1][:40]
    with file.open("a", encoding="utf-8") as append:
        append.write(torn)
    outcome = run(*MEMORY, "--jobs", "1", "-o", file, "--json")
    assert outcome.code == 0, outcome.err
    assert "1 unfinished or torn lines dropped" in outcome.err
    assert f"{len(done)} of 15 points are there already" in outcome.err
    assert outcome.document["rows"] == document["rows"]
    assert [(row["cpu.memory"], row["schedule"]) for row in read_rows(file)] == [
        (repr(row["cpu.memory"]), row["schedule"]) for row in document["rows"]
    ]


def test_an_interrupt_ends_with_130_and_says_how_to_go_on(tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    process = start(*MEMORY, "--jobs", "2", "-o", str(file))
    wait_for_rows(file, process, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert f"points are in {file}; the same command goes on from there" in err
    assert err.endswith("hrm: interrupted\n") and "Traceback" not in err
    assert len(read_rows(file)) >= 2


def test_a_point_with_a_schedule_missing_is_computed_again(tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    command = (*SMALL, "--predict-only", "--vary", "cpu.memory=32GiB,64GiB", "--jobs", "1", "-o", file)
    assert run(*command).code == 0
    whole = file.read_text(encoding="utf-8")
    file.write_text("".join(whole.splitlines(keepends=True)[:-1]), encoding="utf-8")
    outcome = run(*command)
    assert "1 of 2 points are there already" in outcome.err
    assert file.read_text(encoding="utf-8") == whole


def test_a_file_of_another_sweep_is_refused_unless_it_may_be_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    command = (*SMALL, "--predict-only", "--jobs", "1", "-o", file)
    assert run(*command, "--vary", "cpu.memory=32GiB").code == 0
    before = file.read_text(encoding="utf-8")
    other = (*command, "--vary", "cpu.memory=48GiB")
    assert "holds a sweep of other inputs" in refused(*other)
    assert file.read_text(encoding="utf-8") == before
    assert run(*other, "--overwrite").code == 0
    assert {row["cpu.memory"] for row in read_rows(file)} == {repr(48.0 * GIB)}
    file.write_text("a,b\n1,2\n", encoding="utf-8")
    assert "is not the table of a sweep" in refused(*other)
    assert file.read_text(encoding="utf-8") == "a,b\n1,2\n"


def test_more_points_than_processes_come_back_complete_and_sorted(tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    done = start(
        *SMALL, "--predict-only", "--vary", "cpu.memory=16GiB:160GiB:16GiB", "--jobs", "2", "-o", str(file), "--json"
    )
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    sizes = [size * GIB for size in range(16, 161, 16) for _ in ("cgopipe", "s4")]
    assert [row["cpu.memory"] for row in json.loads(out)["rows"]] == sizes
    assert [float(row["cpu.memory"]) for row in read_rows(file)] == sizes
    assert not [name for name in os.listdir(tmp_path) if name != "out.csv"]


# Schedules whose plans are not searched


def test_static_experts_and_the_cpu_alone_have_rows_of_their_own() -> None:
    """A model of 13.8 GB on a T4: the search beats both; only the CPU's plan has a prediction, which it runs at."""
    varied = ("--vary", "cpu.memory=16GiB,24GiB", "--schedules", "best,static_experts,cpu_only", "--jobs", "1")
    document = run("sweep", "--hw", "colab-t4", "--model", "olmoe", "--requests", "64", *varied, "--json").document
    for best, static, alone in (document["rows"][:3], document["rows"][3:]):
        assert [row["reason"] for row in (best, static, alone)] == [""] * 3
        assert best["simulated_tokens_per_s"] > static["simulated_tokens_per_s"] > alone["simulated_tokens_per_s"] > 0
        assert static["predicted_tokens_per_s"] is None
        assert (static["attention_on_gpu"], static["ffn_on_gpu"], static["kv_on_gpu"]) == (1, 0, 1.0)
        assert (static["weights_on_gpu"] * 64).is_integer() and 0.0 < static["weights_on_gpu"] < 1.0
        assert static["bottleneck"].split(":")[0] in ("prefill", "decode")
        assert (alone["attention_on_gpu"], alone["ffn_on_gpu"], alone["weights_on_gpu"]) == (0, 0, 0.0)
        assert alone["simulated_tokens_per_s"] <= alone["predicted_tokens_per_s"] * 1.001


def test_the_cpu_alone_keeps_to_what_is_pinned_or_says_what_it_has() -> None:
    base = ("sweep", "--hw", "t4", "--model", "mixtral-8x7b", "--predict-only", "--schedules", "cgopipe,cpu_only")
    outcome = run(*base, *NO_DISK, "--vary", "cpu.memory=64GiB,192GiB", "--jobs", "1", "--json")
    rows = [row for row in outcome.document["rows"] if row["schedule"] == "cpu_only"]
    assert rows[0]["reason"].startswith("on the CPU alone: ") and "GiB over CPU memory" in rows[0]["reason"]
    assert rows[1]["weights_on_disk"] == rows[1]["kv_on_disk"] == 0.0 and rows[1]["predicted_tokens_per_s"] > 0
    pinned = run(*base, "--attention", "cpu", "--ffn", "gpu", "--vary", "cpu.memory=192GiB", "--jobs", "1", "--json")
    assert pinned.document["rows"][1]["reason"] == "--ffn: the plan on the CPU alone has False (leave it out)"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--schedules", "static_experts"), "--schedules: static_experts is not in the cost model, only in the simul"),
        (("--schedules", "cpu_only", "--cost-model", "paper"), "--schedules: the paper's model has no cpu_only"),
        (("--schedules", "cpu"), "--schedules: there is no schedule 'cpu' (of best, cgopipe"),
    ],
)
def test_a_schedule_that_the_cost_model_does_not_have_is_refused_where_only_it_is_asked(
    options: tuple[str, ...], said: str
) -> None:
    assert refused(*BASE, "--vary", "cpu.memory=192GiB", *options).startswith(said)
