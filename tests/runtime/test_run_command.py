"""`hrm run` on tiny models: tokens, traces, figures beside predictions, refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import make_prompts, model_folder
from command import Outcome, refused, run
from tiny_models import VOCABULARY, reference_generate

from hrm.graph import LaneKind, Op, Task
from hrm.host_facts import read_host_facts
from hrm.layout import Layout
from hrm.plans import read_plan_document
from hrm.schedules import Steps, schedule_graph
from hrm.trace_files import TraceDocument, read_trace
from runtime.device import Device
from runtime.memory_watch import MemoryWatch
from runtime.model_match import check_same_model
from runtime.pace import pace_links
from runtime.run_command import run_saved_plan
from runtime.run_trace import clock_error_s

GENERATED, REQUESTS, PROMPT = 6, 12, 10
PINS = ("--micro-batch", "4", "--num-micro-batches", "3", "--attention", "cpu", "--weights-on-gpu", "0.3")


@pytest.fixture(scope="module")
def model() -> Path:
    return model_folder("mixtral")


def make_plan(folder: Path, model: Path, *options: object) -> Path:
    """Twelve requests of ten tokens in three micro-batches, attention on the CPU, on the host of an L4."""
    lengths = ("--prompt-len", PROMPT, "--gen-len", GENERATED, "--requests", REQUESTS)
    every = ("--hw", "l4", "--model", model, "--compute-dtype", "fp32", *lengths, *PINS)
    done = run("plan", *every, *options, "-o", folder / "plan.json")
    assert done.code == 0, done.err
    return folder / "plan.json"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return make_plan(tmp_path_factory.mktemp("run"), model)


def document_of(plan: Path, *options: object) -> dict[str, Any]:
    done = run("run", plan, "--device", "cpu", *options, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = done.document
    return found


@pytest.fixture(scope="module")
def document(plan: Path, model: Path) -> dict[str, Any]:
    return document_of(plan, "--model-dir", model)


def write_prompts(file: Path, prompts: dict[str, tuple[int, ...]]) -> Path:
    lines = [json.dumps({"id": name, "prompt_token_ids": tokens}) for name, tokens in prompts.items()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def tokens_in(file: Path) -> dict[str | int, list[int]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert all(set(row) == {"id", "token_ids"} for row in rows)
    return {row["id"]: row["token_ids"] for row in rows}


# Tokens


def test_tokens_are_those_of_transformers_under_the_ids_of_the_file(plan: Path, model: Path, tmp_path: Path) -> None:
    prompts = {f"request {number}": tokens for number, tokens in enumerate(make_prompts((5, 1, 10, 3)))}
    file = write_prompts(tmp_path / "prompts.jsonl", prompts)
    document_of(plan, "--model-dir", model, "--prompt-ids", file, "-o", tmp_path / "out.jsonl")
    expected, _ = reference_generate(model, list(prompts.values()), GENERATED)
    assert tokens_in(tmp_path / "out.jsonl") == dict(zip(prompts, expected, strict=True))


def test_neither_a_traced_window_nor_short_graphs_change_a_token(plan: Path, model: Path, tmp_path: Path) -> None:
    traced = ("--trace", tmp_path / "trace.json")
    found = []
    for at_once, options in ((60_000, ()), (60_000, traced), (60_000, (*traced, "--full")), (1, traced), (1, ())):
        with mock.patch("runtime.session.TASKS_AT_ONCE", at_once):
            document_of(plan, "--model-dir", model, "-o", tmp_path / "out.jsonl", *options)
        found.append(tokens_in(tmp_path / "out.jsonl"))
    assert all(each == found[0] for each in found) and len(found[0]) == REQUESTS


def test_requests_beyond_a_batch_run_in_further_batches_and_come_out_in_order(
    plan: Path, model: Path, tmp_path: Path
) -> None:
    found = document_of(plan, "--model-dir", model, "--requests", 15, "-o", tmp_path / "out.jsonl")
    assert found["batches"] == [12, 3]
    assert list(tokens_in(tmp_path / "out.jsonl")) == list(range(15))
    assert found["generated_tokens"] == 15 * GENERATED


def test_same_seed_same_tokens_and_another_seed_others(plan: Path, tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        document_of(plan, "--random-weights", "--seed", seed, "-o", tmp_path / name)
        found.append(tokens_in(tmp_path / name))
    assert found[0] == found[1] != found[2]


# The document


def test_keys_of_the_document_are_those_of_the_page(document: dict[str, Any]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = text.split("| key of `hrm run` | what it is |\n")[1].split("\n\n")[0].splitlines()[1:]
    cells = [row.split("|")[1:3] for row in rows]
    assert set(document) == {key for name, _ in cells for key in re.findall(r"`(\w+)`", name)}
    said = {name.strip(" `"): set(re.findall(r"`(\w+)`", meaning)) for name, meaning in cells}
    assert set(document["lanes"]["gpu0"]) == said["lanes"]
    assert set(document["memory"]["cpu"]) == said["memory"]
    assert set(document["experts"]["decode"]) == said["experts"]


def test_the_prediction_of_a_whole_batch_is_that_of_the_plan(plan: Path, document: dict[str, Any]) -> None:
    saved = json.loads(plan.read_text())["predicted"]
    for key in ("throughput_tokens_per_s", "prefill_s", "decode_s", "layer_latency_s"):
        assert document["predicted"][key] == pytest.approx(saved[key], rel=1e-9), key
    lanes = saved["decode_step"]["lanes_s"]
    for name, lane in (("gpu0", "gpu"), ("host_to_device0", "host_to_device"), ("cpu", "cpu")):
        assert document["lanes"][name]["predicted_decode_s"] == pytest.approx(5 * lanes[lane])


def test_measured_figures_belong_together(document: dict[str, Any]) -> None:
    seconds = document["prefill_s"] + document["decode_s"]
    assert document["throughput_tokens_per_s"] == pytest.approx(12 * 6 / seconds)
    assert document["layer_latency_s"] == pytest.approx(document["decode_s"] / (5 * 3))
    for use in document["lanes"].values():
        assert 0 < use["prefill_s"] + use["decode_s"] <= seconds
        assert use["utilisation"] == pytest.approx((use["prefill_s"] + use["decode_s"]) / seconds)


def test_staging_buffers_that_nothing_passes_are_accounted_for(model: Path, tmp_path: Path) -> None:
    for option, said in (("--pin-weights", True), ("--no-pin-weights", False)):
        notes = document_of(make_plan(tmp_path, model, option), "--model-dir", model)["notes"]
        assert any(note.startswith("0.50 GiB of the plan's CPU memory are staging buffers") for note in notes) is said


def test_experts_of_random_weights_are_chosen_evenly_only_by_random_prompts(plan: Path, tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "one.jsonl", {"a": (7, 7)})
    random = ("run", plan, "--device", "cpu", "--random-weights")
    assert "tokens mean nothing, and experts are chosen nearly evenly." in run(*random).out
    told = run(*random, "--prompt-ids", file).out
    assert "tokens mean nothing." in told and "evenly" not in told


def test_part_of_the_layers_is_predicted_as_simulate_predicts_it(plan: Path, model: Path) -> None:
    found = document_of(plan, "--model-dir", model, "--layers", 2)
    simulated = run("simulate", plan, "--layers", 2, "--json").document
    assert (found["layers"], found["layers_of_model"]) == (2, 3) == (simulated["layers"], simulated["layers_of_model"])
    for key in ("prefill_s", "decode_s"):
        assert found["predicted"][key] == pytest.approx(simulated["predicted"][key], rel=1e-9)


def test_one_token_visits_as_many_experts_as_the_router_keeps(plan: Path, model: Path, tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "one.jsonl", {"a": (7,)})
    experts = document_of(plan, "--model-dir", model, "--prompt-ids", file)["experts"]
    for phase in ("prefill", "decode"):  # 6 experts of which 2 are kept: 6 (1 - (1 - 2/6)^1) = 2
        assert experts[phase] == {"touched": 2.0, "uniform": pytest.approx(2.0), "of": 6}


def test_an_emulated_run_says_so_and_that_its_ratio_means_nothing(plan: Path, model: Path) -> None:
    done = run("run", plan, "--device", "cpu", "--model-dir", model)
    assert "the accelerator emulated" in done.out.splitlines()[0]
    assert "says nothing about l4" in " ".join(done.out.split())


def test_a_plan_on_the_cpu_alone_is_measured_not_emulated(model: Path, tmp_path: Path) -> None:
    lengths = ("--prompt-len", PROMPT, "--gen-len", GENERATED, "--requests", REQUESTS)
    every = ("--hw", "t4", "--model", model, "--compute-dtype", "fp32", *lengths)
    assert run("plan", *every, "-o", tmp_path / "plan.json").code == 0
    assert read_plan_document(tmp_path / "plan.json")[1].everything_on_cpu
    found = document_of(tmp_path / "plan.json", "--model-dir", model, "--trace", tmp_path / "trace.json")
    assert not found["emulated"] and list(found["lanes"]) == ["cpu"] and list(found["memory"]) == ["cpu"]
    assert read_trace(tmp_path / "trace.json").trace.kind == "measured"
    assert refused("run", tmp_path / "plan.json", "--model-dir", model, "--pace-links").startswith("--pace-links: ")


def test_progress_tells_what_is_done_and_how_fast(plan: Path, model: Path) -> None:
    told: list[str] = []
    with mock.patch("runtime.run_watch.TELL_EVERY_S", 0.0):
        run_saved_plan(plan, model_dir=model, device="cpu", requests=15, on_progress=told.append)
    assert "loading layers: 3 of 3" in told
    assert "batch 1 of 2, prefill of 12 requests: layer 3 of 3" in told
    assert any(
        re.fullmatch(r"batch 2 of 2, decode 80%, step 5 of 5: .* token/s so far \(.* predicted\)", line)
        for line in told
    )


# Traces


def traced(plan: Path, model: Path, file: Path, *options: object) -> TraceDocument:
    document_of(plan, "--model-dir", model, "--trace", file, *options)
    return read_trace(file)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ((), (False, 1, 4)),  # the middle one of five, and its neighbours
        (("--steps", 2), (False, 1, 5)),
        (("--full",), (True, 0, 5)),
        (("--layers", 2), (False, 1, 4)),
    ],
)
def test_a_trace_joins_that_of_simulate_with_the_same_options(
    plan: Path, model: Path, tmp_path: Path, options: tuple[object, ...], steps: tuple[bool, int, int]
) -> None:
    found = traced(plan, model, tmp_path / "measured.json", *options)
    assert run("simulate", plan, *options, "--trace", tmp_path / "simulated.json").code == 0
    assert (found.trace.kind, tuple(found.steps)) == ("emulated", steps)
    done = run("diff", tmp_path / "simulated.json", tmp_path / "measured.json", "--json")
    assert done.code == 0, done.err
    assert done.document["differs"] == [] and done.document["second"]["violation"] is None
    assert done.document["tasks"] == len(found.trace.spans)


def test_a_trace_of_fewer_requests_says_that_it_joins_nothing(plan: Path, model: Path, tmp_path: Path) -> None:
    notes = document_of(plan, "--model-dir", model, "--requests", 3, "--trace", tmp_path / "t.json")["notes"]
    assert any("the traced batch has 3 requests, the plan's 12" in note for note in notes)


def test_clocks_of_a_gpu_and_its_host_are_apart_by_what_float32_and_the_first_reading_lose() -> None:
    assert clock_error_s(8.388608, cuda=True) == pytest.approx(1e-6 + 20e-6)  # 2^23 microseconds
    assert clock_error_s(8.388608, cuda=False) == 0.0


# Paced links

SLOW_LINK = (
    "--kv-on-gpu",
    0,
    "--set",
    "link.host_to_device.pinned=4 MB/s",
    "--set",
    "link.device_to_host.pinned=4 MB/s",
)


@pytest.fixture(scope="module")
def slow_plan(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return make_plan(tmp_path_factory.mktemp("slow"), model, *SLOW_LINK)


def test_a_copy_is_paced_to_its_bytes_over_the_rate_and_the_latency(slow_plan: Path) -> None:
    scenario, policy, _ = read_plan_document(slow_plan)
    seconds, latency = pace_links(scenario), scenario.profile.link.copy_latency_s
    share = scenario.profile.efficiency.link
    graph = schedule_graph(Layout(scenario, policy), policy.schedule, Steps(prefill=True, last=1))
    for task in graph.tasks:
        link = task.lane.kind in (LaneKind.H2D, LaneKind.D2H)
        assert seconds(task) == pytest.approx(task.bytes_moved / (4e6 * share) + latency if link else 0.0)


def test_paced_lanes_last_as_long_as_told_and_count_in_no_accuracy(
    slow_plan: Path, model: Path, tmp_path: Path
) -> None:
    found = traced(slow_plan, model, tmp_path / "paced.json", "--pace-links")
    assert [str(lane) for lane in found.facts.paced] == ["host_to_device0", "device_to_host0"]
    scenario, policy, _ = read_plan_document(slow_plan)
    tasks: dict[object, Task] = {
        task.id: task for task in schedule_graph(Layout(scenario, policy), policy.schedule, found.steps).tasks
    }
    least = pace_links(scenario)
    copies = [span for span in found.trace.spans if span.lane in found.facts.paced]
    assert len(copies) > 50
    assert all(span.end_s - span.start_s >= least(tasks[span.task]) - 1e-9 for span in copies)
    assert run("simulate", slow_plan, "--trace", tmp_path / "simulated.json").code == 0
    diff = run("diff", tmp_path / "simulated.json", tmp_path / "paced.json", "--json").document
    assert not {"host_to_device0", "device_to_host0"} & set(diff["accuracy"]["lanes"])


# Memory


@pytest.mark.parametrize(
    ("make", "level", "other"), [(Device.gpu_bytes, "gpu", "cpu"), (Device.host_bytes, "cpu", "gpu")]
)
def test_what_is_written_on_a_level_is_seen_on_that_level(
    make: Callable[[Device, int], torch.Tensor], level: str, other: str
) -> None:
    device, size = Device("cpu", False, (0,)), 64 * 2**20
    watch = MemoryWatch(device)
    memory = make(device, size).fill_(1)
    peaks = watch.take()
    watch.close()
    assert size <= peaks[level] < size + 8 * 2**20 and peaks[other] < 8 * 2**20
    assert int(memory[-1]) == 1


# Refusals


def test_weights_must_be_given_once(plan: Path, model: Path) -> None:
    assert "which weights is not said" in refused("run", plan)
    assert "weights are given twice" in refused("run", plan, "--random-weights", "--model-dir", model)


def test_another_model_is_refused_with_key_and_both_values(plan: Path) -> None:
    said = refused("run", plan, "--model-dir", model_folder("mixtral", num_hidden_layers=2))
    assert "num_hidden_layers is 2, in the plan 3 (" in said
    said = refused("run", plan, "--model-dir", model_folder("mixtral", rope_theta=5000.0))
    assert "rope_theta is 5000.0, in the plan 1000000.0 (" in said


def test_keys_that_matter_to_no_run_may_differ(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    other = config | {"transformers_version": "4.0", "eos_token_id": 3, "torch_dtype": "bfloat16", "use_cache": False}
    check_same_model(config, other, where="config.json")


def test_what_does_not_fit_is_refused_with_the_nearest_that_does(tmp_path: Path) -> None:
    lengths = ("--prompt-len", 64, "--gen-len", 4, "--requests", 8, "--attention", "gpu")
    assert run("plan", "--hw", "l4", "--model", "mixtral-8x7b", *lengths, "-o", tmp_path / "plan.json").code == 0
    small = replace(read_host_facts(), cpu_bytes=16 * 2.0**30, disk_bytes=500 * 2.0**30, gpus=())
    with mock.patch("runtime.run_job.read_host_facts", return_value=small):
        said = refused("run", tmp_path / "plan.json", "--random-weights")
    assert said.startswith(f"{tmp_path / 'plan.json'}: this plan cannot be run here: no CUDA device here; needs ")
    assert "hrm plan --hw l4 --model mixtral-8x7b" in said and "--set 'cpu.memory=" in said
    fits = re.search(r"or part of this one: --layers (\d+)\)$", said)
    assert fits is not None and 1 <= int(fits[1]) <= 5  # 2.9 GB each


def test_what_has_no_kernel_is_refused(model: Path, tmp_path: Path) -> None:
    quantised = make_plan(tmp_path, model, "--weights-dtype", "int4")
    said = refused("run", quantised, "--model-dir", model)
    assert "this plan cannot be run: the runtime has no kernels for weights in int4" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--layers", 4), "--layers: 4 of the 3 layers"),
        (("--requests", 0), "--requests: 0 requests"),
        (("--steps", 1), "--steps: says what a trace has, and none is written"),
        (("--full",), "--full: says what a trace has, and none is written"),
        (("--device", "tpu"), "--device: 'tpu' is no device"),
        (("--schedule", "s4"), "schedule 's4': it has attention on the GPU"),
        (("--disk-dir", "nowhere"), "--disk-dir: nowhere: no such folder"),
        (("-o", "nowhere/out.jsonl"), "--output: nowhere/out.jsonl: its folder does not exist"),
        (("--trace", "nowhere/t.json"), "--trace: nowhere/t.json: its folder does not exist"),
        (("-o", "/proc/x.jsonl"), "--output: /proc/x.jsonl: cannot be written: "),
        (("--trace", "/proc/x.json"), "--trace: /proc/x.json: cannot be written: "),
        (("--trace", "t.json", "--steps", 9), "--steps: 9 of 5 decode steps"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_loaded(
    plan: Path, model: Path, options: tuple[object, ...], said: str
) -> None:
    with mock.patch("runtime.run_command.open_session") as opened:
        assert refused("run", plan, "--model-dir", model, *options).startswith(said)
    opened.assert_not_called()


def test_tokens_that_cannot_be_written_in_the_end_are_kept_elsewhere(plan: Path, model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    with mock.patch.object(tempfile, "tempdir", str(tmp_path)):
        said = refused("run", plan, "--device", "cpu", "--model-dir", model, "-o", "/dev/full", "--trace", trace)
    found = re.fullmatch(r"--output: /dev/full: cannot be written any more: .* \(the tokens are in (.*)\)", said)
    assert found is not None, said
    assert len(tokens_in(Path(found[1]))) == REQUESTS
    assert read_trace(trace).trace.kind == "emulated"


def test_files_are_not_written_over_each_other(plan: Path, model: Path, tmp_path: Path) -> None:
    assert refused("run", plan, "--model-dir", model, "-o", plan).endswith("is also PLAN (another file)")
    twice = ("-o", tmp_path / "x", "--trace", tmp_path / "x")
    assert refused("run", plan, "--model-dir", model, *twice).endswith("is also --trace (another file)")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompts"),
        ("[1, 2]\nnope\n", "line 2: 'nope' is not JSON"),
        ("[]\n", "line 1: [] is no list of token ids"),
        ("[1, -2]\n", "line 1: -2 is not a token id"),
        ("[true]\n", "line 1: True is not a token id"),
        ('{"prompt": "hello"}\n', "line 1: unknown key 'prompt'"),
        ('{"id": "a"}\n', "line 1: the key prompt_token_ids is missing"),
        ('{"id": 1.5, "prompt_token_ids": [1]}\n', "line 1: id: 1.5 is no id"),
        ('{"id": 1, "prompt_token_ids": [1]}\n[2]\n', "two prompts have the id 1"),
        (f"[{VOCABULARY}]\n", "prompts: prompt 0 has the token 96, "),
        (f"[{'1,' * 60} 1]\n", "request 0 has 67 tokens with what is generated, a micro-batch of the plan holds 64"),
    ],
)
def test_wrong_prompts_are_refused_by_line(plan: Path, model: Path, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    assert said in refused("run", plan, "--model-dir", model, "--prompt-ids", file)


def test_one_generated_token_runs_and_has_no_step_to_trace(model: Path, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, model, "--gen-len", 1)
    found = document_of(plan, "--model-dir", model)
    assert (found["decode_s"], found["layer_latency_s"]) == (0.0, 0.0)
    assert found["predicted_over_measured"]["decode_s"] is None
    assert "there is no decode step to show" in refused("run", plan, "--model-dir", model, "--trace", tmp_path / "t")
    assert traced(plan, model, tmp_path / "t.json", "--full").steps.prefill


# What goes wrong in a lane


def run_with_fault(plan: Path, model: Path, fault: Callable[[], None]) -> Outcome:
    """Run with a kernel that fails the first time attention on the CPU is computed."""
    from runtime.kernels import kernel_of

    def find(task: Task) -> Any:
        return kernel_of(task) if task.id.op is not Op.ATTENTION else lambda *_: fault()

    with mock.patch("runtime.session.kernel_of", side_effect=find):
        return run("run", plan, "--device", "cpu", "--model-dir", model)


def test_memory_that_runs_out_in_a_lane_is_told_in_one_line(plan: Path, model: Path) -> None:
    def fault() -> None:
        raise MemoryError("no more")

    done = run_with_fault(plan, model, fault)
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1
    assert "CPU memory ran out: attention/prefill/s0/l0/b0/g0 failed" in done.err


def test_a_fault_of_the_program_names_the_task(plan: Path, model: Path) -> None:
    def fault() -> None:
        raise ZeroDivisionError("by nothing")

    done = run_with_fault(plan, model, fault)
    assert done.code == 1 and done.err.count("\n") == 1
    assert "attention/prefill/s0/l0/b0/g0 failed: ZeroDivisionError: by nothing" in done.err


def test_an_interrupted_run_ends_cleanly(plan: Path, model: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored in the background
    try:
        done = run_with_fault(plan, model, lambda: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.code, done.out, done.err) == (130, "", "hrm: interrupted\n")


@pytest.mark.parametrize(
    ("module", "command", "options"),
    [("run_command", "hrm run", ("--random-weights",)), ("layer_command", "hrm validate layer", ())],
)
def test_without_torch_the_command_says_what_installs_it(
    plan: Path, module: str, command: str, options: tuple[str, ...]
) -> None:
    missing = ModuleNotFoundError("No module named 'torch'", name="torch")
    with mock.patch("builtins.__import__", side_effect=_failing_import(f"runtime.{module}", missing)):
        said = refused(*command.split()[1:], plan, *options)
    assert said == f"{command}: torch is not installed (pip install '.[runtime]')"


def _failing_import(name: str, error: Exception) -> Callable[..., Any]:
    real = __import__

    def find(wanted: str, *arguments: Any, **others: Any) -> Any:
        if wanted == name:
            raise error
        return real(wanted, *arguments, **others)

    return find
