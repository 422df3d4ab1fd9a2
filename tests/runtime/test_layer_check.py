"""`hrm validate layer` on tiny models: real tasks, real copies, a report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import tiny_models
from command import refused, run

from hrm.errors import InputError
from hrm.host_facts import GpuFacts, HostFacts, read_host_facts
from hrm.plans import read_plan_document
from hrm.trace_files import read_trace
from hrm.trace_order import find_violation
from runtime.device import Device, choose_device
from runtime.layer_check import check_layer, repeat_layer
from runtime.layer_room import check_layer_room, layer_bytes
from runtime.memory_watch import MemoryWatch
from runtime.numerics import read_numerics

WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 768,
    "num_local_experts": 8,
    "num_attention_heads": 8,
    "vocab_size": 4000,
    "num_hidden_layers": 12,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(tiny_models.tiny_config("mixtral")))
    return folder


def make_plan(config: Path, *options: str) -> Path:
    plan = config / "plan.json"
    given = dict(zip(options[::2], options[1::2], strict=True))
    every = {"--hw": "l4", "--model": str(config / "config.json"), "--prompt-len": "6", "--gen-len": "8"}
    every |= {"--requests": "12", "-o": str(plan)} | given
    found = run("plan", *(word for pair in every.items() for word in pair))
    assert found.code == 0, found.err
    return plan


def test_every_layer_of_the_repeated_model_is_its_first_layer_with_experts(config) -> None:
    scenario, _, _ = read_plan_document(make_plan(config))
    repeated = repeat_layer(scenario, 9).model
    assert repeated.n_layers == 9
    assert repeated.moe_layers == (True,) * 9


@pytest.mark.parametrize(
    "options",
    [
        ("--attention", "cpu", "--ffn", "gpu", "--batch", "12", "--micro-batch", "3", "--weights-on-gpu", "0.5"),
        ("--attention", "gpu", "--kv-on-gpu", "0.5", "--batch", "12", "--micro-batch", "4"),
        ("--attention", "cpu", "--ffn", "cpu", "--batch", "8", "--micro-batch", "4"),
    ],
)
def test_one_layer_is_run_in_the_order_of_its_graph(config, options) -> None:
    scenario, policy, document = read_plan_document(make_plan(config, *options))
    numerics = read_numerics(document["inputs"]["model"]["config"], where="plan")
    device = choose_device("cpu", cpu_only=False)
    found = check_layer(scenario, policy, policy.schedule, numerics, device, repeats=4)
    assert len(found.traces) == 1 and len(found.counted) >= 4
    for trace in found.traces:
        assert trace.kind == "emulated"
        assert [span.task for span in trace.spans] == [task.id for task in found.graph.tasks]
        assert find_violation(trace.spans, found.graph.before) is None
    assert len(found.touched) == found.scenario.model.n_layers * policy.num_micro_batches
    assert all(0 < touched <= min(tokens * 2, 6) for tokens, touched in found.touched)


def test_the_command_prints_one_document_and_writes_both_traces(config, tmp_path) -> None:
    plan = make_plan(config, "--attention", "cpu", "--batch", "12", "--micro-batch", "4")
    found = run(
        "validate", "layer", str(plan), "--device", "cpu", "--repeats", "3", "--json", "--trace", str(tmp_path / "t")
    )
    assert found.code == 0, found.err
    document = json.loads(found.out)
    assert document["kind"] == "emulated"
    assert document["verdict"] == {
        "tested": False,
        "holds": None,
        "threshold": 1.10,
        "layers_above": document["verdict"]["layers_above"],
    }
    assert document["layers_measured"] >= 3
    simulated, measured = (read_trace(tmp_path / "t" / f"{name}.json") for name in ("simulated", "measured"))
    assert [span.task for span in simulated.trace.spans] == [span.task for span in measured.trace.spans]
    assert run("diff", str(tmp_path / "t/simulated.json"), str(tmp_path / "t/measured.json")).code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "tpu"), "'tpu' is no device"),
        (("--repeats", "0"), "0 repeats"),
        (("--schedule", "s4"), "it has attention on the GPU, the plan on the CPU"),
    ],
)
def test_what_cannot_be_measured_is_refused(config, options, words) -> None:
    plan = make_plan(config, "--attention", "cpu")
    found = run("validate", "layer", str(plan), *options)
    assert found.code == 2
    assert words in found.err


def test_where_everything_is_on_the_cpu_there_is_no_verdict(config, tmp_path) -> None:
    plan = tmp_path / "cpu.json"
    lengths = ("--prompt-len", "6", "--gen-len", "8", "--requests", "12")
    made = run("plan", "--hw", "t4", "--model", config / "config.json", "--compute-dtype", "fp32", *lengths, "-o", plan)
    assert made.code == 0 and read_plan_document(plan)[1].everything_on_cpu
    document = run("validate", "layer", plan, "--repeats", "3", "--json").document
    assert (document["kind"], document["same_machine"]) == ("measured", None)
    assert (document["verdict"]["tested"], document["verdict"]["holds"]) == (False, None)
    assert "verdict: not tested: the rates are those of t4, this is " in run(
        "validate", "layer", plan, "--repeats", "3"
    ).out.replace("\n", " ")


def test_a_trace_folder_that_cannot_be_made_is_refused_before_anything_runs(config) -> None:
    plan = make_plan(config, "--attention", "cpu")
    with mock.patch("runtime.layer_command.measure_layer") as measured:
        said = refused("validate", "layer", plan, "--trace", "/proc/xx")
    assert said.startswith("--trace: /proc/xx: cannot be made: ")
    measured.assert_not_called()


# Room


def test_a_layer_takes_no_more_than_was_foreseen_and_not_much_less(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.tiny_config("mixtral", **WIDE)))
    options = {"--attention": "gpu", "--kv-on-gpu": "0.3", "--prompt-len": "100", "--requests": "64", "--batch": "64"}
    plan = make_plan(tmp_path, *(word for pair in options.items() for word in pair), "--micro-batch", "32")
    scenario, policy, document = read_plan_document(plan)
    device = choose_device("cpu", cpu_only=False)
    foreseen = layer_bytes(repeat_layer(scenario, 1), policy, device)
    watch = MemoryWatch(device)
    numerics = read_numerics(document["inputs"]["model"]["config"], where="plan")
    check_layer(scenario, policy, policy.schedule, numerics, device, repeats=1)
    taken = watch.take()
    watch.close()
    assert 0.7 * foreseen["gpu"] < taken["gpu"] < foreseen["gpu"] + 8 * 2**20
    assert taken["cpu"] < foreseen["cpu"]


def test_a_layer_is_refused_where_it_does_not_fit_to_the_byte(config) -> None:
    scenario, policy, _ = read_plan_document(make_plan(config, "--attention", "gpu", "--kv-on-gpu", "0.5"))
    one, gpu = repeat_layer(scenario, 1), GpuFacts(name="A GPU", free_bytes=1e12, compute_capability=(9, 0))
    emulated, real = choose_device("cpu", cpu_only=False), Device("cuda", False, (0,))
    host = HostFacts(torch="cpu", gpus=(), cpu_bytes=1e12, lockable_bytes=1e12, disk_bytes=1e12)
    needs = layer_bytes(one, policy, emulated)
    check_layer_room(one, policy, emulated, replace(host, cpu_bytes=needs["cpu"] + needs["gpu"]))
    with pytest.raises(InputError, match=r"takes \d\.\d GiB of CPU memory, for GPU and CPU, \d\.\d GiB are free"):
        check_layer_room(one, policy, emulated, replace(host, cpu_bytes=needs["cpu"] + needs["gpu"] - 1))
    needs = layer_bytes(one, policy, real)
    enough = replace(host, cpu_bytes=needs["cpu"], gpus=(replace(gpu, free_bytes=needs["gpu"]),))
    check_layer_room(one, policy, real, enough)
    with pytest.raises(InputError, match="GiB of memory on A GPU, "):
        check_layer_room(one, policy, real, replace(enough, gpus=(replace(gpu, free_bytes=needs["gpu"] - 1),)))
    with pytest.raises(InputError, match="GiB of CPU memory, "):
        check_layer_room(one, policy, real, replace(enough, cpu_bytes=needs["cpu"] - 1))


def test_the_command_refuses_a_layer_that_is_too_large_and_says_a_way_out(tmp_path) -> None:
    lengths = ("--prompt-len", "64", "--gen-len", "4", "--requests", "8")
    assert run("plan", "--hw", "t4", "--model", "dbrx", *lengths, "-o", tmp_path / "plan.json").code == 0
    small = replace(read_host_facts(), cpu_bytes=2.0 * 2**30, gpus=())
    with mock.patch("runtime.layer_command.read_host_facts", return_value=small):
        said = refused("validate", "layer", tmp_path / "plan.json", "--device", "cpu")
    assert said.startswith("hrm validate layer: one layer of this plan takes ")
    assert "2.0 GiB are free (a plan for less: hrm plan with a smaller --batch" in said


def test_a_plan_of_one_token_has_no_decode_step(config) -> None:
    plan = make_plan(config, "--attention", "cpu", "--gen-len", "1")
    found = run("validate", "layer", str(plan), "--device", "cpu")
    assert found.code == 2 and "no decode step" in found.err
