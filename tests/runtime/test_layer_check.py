"""`hrm validate layer` on tiny models: real tasks, real copies, a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
from command import run

from hrm.plans import read_plan_document
from hrm.trace_files import read_trace
from hrm.trace_order import find_violation
from runtime.device import choose_device
from runtime.layer_check import check_layer, repeat_layer
from runtime.numerics import read_numerics


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


def test_a_plan_of_one_token_has_no_decode_step(config) -> None:
    plan = make_plan(config, "--attention", "cpu", "--gen-len", "1")
    found = run("validate", "layer", str(plan), "--device", "cpu")
    assert found.code == 2 and "no decode step" in found.err
