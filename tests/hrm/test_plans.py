"""The plan as a document: every key that is promised, the paper's numbers, saving and reading it again."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from command import PAPER, SMALL, paper_plan, plan_of, refused, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hrm.errors import InputError
from hrm.model_files import find_config
from hrm.plans import read_plan_document, save_plan
from hrm.rates import derive_rates
from hrm.scenario import measure_sizes
from hrm.trivial import predict_policy

GIB = 2**30
NUMBER = (int, float)

POLICY = {
    "batch_size": int,
    "micro_batch_size": int,
    "num_micro_batches": int,
    "prefill_micro_batch_size": int,
    "attention_on_gpu": bool,
    "ffn_on_gpu": bool,
    "weights_on_gpu": NUMBER,
    "weights_on_disk": NUMBER,
    "kv_on_gpu": NUMBER,
    "kv_on_disk": NUMBER,
    "dense_weights_on_gpu": bool,
    "embedding_on_gpu": bool,
    "lm_head_on_gpu": bool,
    "pin_weights": bool,
    "micro_batch_token_budget": int,
}
PREDICTED = {
    "throughput_tokens_per_s": NUMBER,
    "decode_throughput_tokens_per_s": NUMBER,
    "prefill_s": NUMBER,
    "decode_s": NUMBER,
    "startup_s": NUMBER,
    "completion_s": NUMBER,
    "layer_latency_s": NUMBER,
    "bottleneck": str,
}
NOT_IN_THE_PAPER = ("prefill_s", "startup_s", "completion_s")


def is_a(value: object, kinds: Any) -> bool:
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return type(value) in kinds  # bool is no int here


@pytest.fixture(scope="module")
def full() -> dict[str, Any]:
    outcome = run(*SMALL, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    document: dict[str, Any] = outcome.document
    return document


@pytest.fixture(scope="module")
def paper() -> dict[str, Any]:
    outcome = run(*PAPER, "--prompt-len", 77, "--micro-batch", 324, "--num-micro-batches", 14, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    document: dict[str, Any] = outcome.document
    return document


@pytest.fixture(params=["full", "paper"])
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = request.getfixturevalue(request.param)
    return chosen


def test_the_policy_has_every_promised_key_with_its_type(document: dict[str, Any]) -> None:
    policy = document["policy"]
    assert {key: is_a(policy.get(key), kind) for key, kind in POLICY.items()} == dict.fromkeys(POLICY, True)
    assert policy["weight_slots"] in (1, 2, "experts")
    assert {key: is_a(policy["dtypes"][key], str) for key in ("weights", "kv", "compute")} == {
        "weights": True,
        "kv": True,
        "compute": True,
    }


def test_the_prediction_has_every_promised_key_with_its_type(document: dict[str, Any]) -> None:
    predicted = document["predicted"]
    wrong = [key for key, kind in PREDICTED.items() if not is_a(predicted[key], kind)]
    assert wrong == (list(NOT_IN_THE_PAPER) if document["inputs"]["cost_model"] == "paper" else [])


def test_what_the_paper_leaves_out_is_null(paper: dict[str, Any]) -> None:
    assert [paper["predicted"][key] for key in NOT_IN_THE_PAPER] == [None, None, None]


def test_memory_has_three_levels_with_peak_limit_and_terms_that_add_up(document: dict[str, Any]) -> None:
    assert set(document["memory"]) == {"gpu", "cpu", "disk"}
    for use in document["memory"].values():
        assert is_a(use["peak_bytes"], NUMBER) and is_a(use["limit_bytes"], NUMBER)
        assert all(is_a(size, NUMBER) for size in use["terms"].values())
        assert sum(use["terms"].values()) == pytest.approx(use["peak_bytes"], rel=1e-9, abs=1)
        assert use["peak_bytes"] <= use["limit_bytes"] * (1 + 1e-9)


def test_solver_schedule_and_parallelism_are_there(document: dict[str, Any]) -> None:
    solver = document["solver"]
    assert is_a(solver["name"], str) and solver["status"] == "optimal"
    assert 0 <= solver["gap"] <= 1e-3 and solver["seconds"] > 0
    assert document["schedule"] in ("cgopipe", "s4", "streaming", "cpu_only")
    assert document["parallelism"] == {"kind": "none", "degree": 1}


def test_several_gpus_work_tensor_parallel() -> None:
    plan = plan_of("kaggle-t4x2", "granite-3.1-1b-a400m", requests=8)
    assert plan.to_dict()["parallelism"] == {"kind": "tensor", "degree": 2}


def test_throughput_is_generated_tokens_over_prefill_and_decode(full: dict[str, Any]) -> None:
    predicted, batch = full["predicted"], full["policy"]["batch_size"]
    seconds = predicted["prefill_s"] + predicted["decode_s"]
    assert predicted["throughput_tokens_per_s"] == pytest.approx(batch * 4 / seconds, rel=1e-12)
    batches = math.ceil(8 / batch)
    assert predicted["completion_s"] == pytest.approx(predicted["startup_s"] + batches * seconds, rel=1e-12)


def test_the_worked_example_of_the_paper_comes_out_exactly(paper: dict[str, Any]) -> None:
    """Printed by the authors' planner: mu 324, n_ub 14, r_w 0.0559, 0.1549 s per layer, 20.640 and 147.28 GiB."""
    predicted, policy, memory = paper["predicted"], paper["policy"], paper["memory"]
    assert predicted["throughput_tokens_per_s"] == pytest.approx(944.66, abs=0.05)
    assert predicted["decode_throughput_tokens_per_s"] == pytest.approx(944.66, abs=0.05)
    assert policy["weights_on_gpu"] == pytest.approx(0.0559, abs=5e-5)
    assert predicted["layer_latency_s"] == pytest.approx(0.1549, abs=5e-5)
    assert predicted["bottleneck"] == "decode: host_to_device"
    assert memory["gpu"]["peak_bytes"] / GIB == pytest.approx(20.640, abs=5e-4)
    assert memory["cpu"]["peak_bytes"] / GIB == pytest.approx(147.28, abs=5e-3)


def test_with_only_the_places_pinned_the_paper_terms_give_287_by_16() -> None:
    document = run(*PAPER, "--prompt-len", 77, "--attention", "cpu", "--ffn", "gpu", "--json").document
    policy = document["policy"]
    assert (policy["micro_batch_size"], policy["num_micro_batches"], policy["batch_size"]) == (287, 16, 287 * 16)
    assert document["predicted"]["throughput_tokens_per_s"] == pytest.approx(964.53, abs=0.05)


def test_a_published_policy_that_breaks_the_limits_is_refused_with_the_excess() -> None:
    text = refused(*PAPER, "--prompt-len", 418, "--micro-batch", 68, "--num-micro-batches", 16, "--json", code=3)
    assert "the CPU memory limit (0.8 of the host) is exceeded by 1.90 GiB at mu = 68, n_ub = 16" in text
    assert "with the largest share of the weights the GPU holds" in text
    assert "needs 149.33 of 147.43 GiB" in text


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--padded", "--kv-dtype", "int8", "--weights-dtype", "int4", "--set", "cpu.memory=20 GB"),
        ("--hw", "kaggle-t4x2", "--model", "olmoe", "--attention", "cpu", "--weights-on-disk", "0.25"),
        ("--workload", "summarization"),
    ],
)
def test_a_saved_plan_reads_back_as_the_same_scenario_policy_and_prediction(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "plän.json"
    outcome = run(*SMALL, *options, "--json", "-o", file)
    assert (outcome.code, outcome.err) == (0, f"saved to {file}\n")
    scenario, policy, document = read_plan_document(file)
    assert document["policy"] == outcome.document["policy"]
    assert document["predicted"] == outcome.document["predicted"]
    sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, scenario.formats)
    predicted = predict_policy(scenario, sizes, rates, policy)
    assert predicted.prefill_s == document["predicted"]["prefill_s"]
    assert predicted.decode_s == document["predicted"]["decode_s"]
    assert predicted.startup_s == document["predicted"]["startup_s"]
    assert {level: use.terms for level, use in predicted.memory.items()} == {
        level: use["terms"] for level, use in document["memory"].items()
    }


def test_a_plan_saved_in_process_equals_what_is_read(tmp_path: Path) -> None:
    plan = plan_of("t4", "granite-3.1-1b-a400m", requests=8)
    save_plan(plan, tmp_path / "plan.json")
    scenario, policy, _ = read_plan_document(tmp_path / "plan.json")
    assert scenario == plan.scenario
    assert policy == plan.policy
    sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, scenario.formats)
    assert predict_policy(scenario, sizes, rates, policy) == plan.prediction


def test_a_plan_on_the_papers_terms_reads_back_too(tmp_path: Path) -> None:
    plan = paper_plan(micro_batch_size=324, num_micro_batches=14)
    save_plan(plan, tmp_path / "plan.json")
    assert read_plan_document(tmp_path / "plan.json")[:2] == (plan.scenario, plan.policy)


def test_a_saved_plan_stands_alone_and_a_printed_one_is_short(tmp_path: Path) -> None:
    plan = plan_of("t4", "granite-3.1-1b-a400m", requests=8)
    saved, printed = plan.to_dict(complete=True)["inputs"], plan.to_dict()["inputs"]
    assert saved["model"]["config"]["num_local_experts"] == 32
    assert saved["hardware"]["document"]["gpu"]["bandwidth"]["source"]
    assert len(saved["workload"]["prompt_lengths"]) == 80
    assert (set(printed["hardware"]), set(printed["model"])) == ({"name"}, {"name"})
    file = tmp_path / "short.json"
    file.write_text(json.dumps(plan.to_dict()), encoding="utf-8")
    with pytest.raises(InputError, match=r"short\.json: inputs: this is the short form of a plan"):
        read_plan_document(file)


LEAVES = (
    ("format",),
    ("inputs",),
    ("inputs", "hardware", "document"),
    ("inputs", "hardware", "document", "gpu", "memory"),
    ("inputs", "hardware", "name"),
    ("inputs", "model", "config"),
    ("inputs", "model", "config", "hidden_size"),
    ("inputs", "model", "hub_id"),
    ("inputs", "workload", "prompt_lengths"),
    ("inputs", "workload", "generation_length"),
    ("inputs", "workload", "num_requests"),
    ("inputs", "workload", "padded"),
    ("inputs", "workload", "note"),
    ("inputs", "weights_dtype"),
    ("policy",),
    ("policy", "batch_size"),
    ("policy", "weights_on_gpu"),
    ("policy", "attention_on_gpu"),
    ("policy", "weight_slots"),
    ("policy", "ring_experts"),
    ("policy", "dtypes"),
    ("policy", "dtypes", "kv"),
    ("policy", "dtypes", "compute"),
)
WRONG = (-1, 0.5, True, [], {}, [1, "x"], "", "banana", 10**30, -(10**9), 1e300, "16 GBs")


@given(path=st.sampled_from(LEAVES), value=st.one_of(st.sampled_from(WRONG), st.none(), st.text(max_size=8)))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_wrong_value_in_a_saved_plan_is_an_input_error_that_names_the_file(
    path: tuple[str, ...], value: object, tmp_path: Path
) -> None:
    document = copy.deepcopy(plan_of("t4", "granite-3.1-1b-a400m", requests=8).to_dict(complete=True))
    holder: Any = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    try:
        read_plan_document(file)
    except InputError as error:
        assert str(error).startswith(f"{file}: ")


@pytest.mark.parametrize("path", [path for path in LEAVES if path[-1] not in ("weights_dtype", "note", "hub_id")])
def test_a_missing_key_of_a_saved_plan_is_named(path: tuple[str, ...], tmp_path: Path) -> None:
    document = copy.deepcopy(plan_of("t4", "granite-3.1-1b-a400m", requests=8).to_dict(complete=True))
    holder: Any = document
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InputError) as raised:
        read_plan_document(file)
    last = {"document": "short form", "config": "short form", "prompt_lengths": "short form"}.get(path[-1], path[-1])
    last = {"generation_length": "generation length", "num_requests": "number of requests"}.get(last, last)
    assert last in str(raised.value)


def belonging(**changes: Any) -> dict[str, Any]:
    """A saved plan of Granite on a T4, with other inputs or another policy put in."""
    document = copy.deepcopy(plan_of("t4", "granite-3.1-1b-a400m", requests=8).to_dict(complete=True))
    for path, value in changes.items():
        *parents, last = path.split("__")
        holder = document
        for key in parents:
            holder = holder[key]
        holder[last] = value
    return document


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"inputs__model__config": find_config("olmoe")["values"], "inputs__model__name": "olmoe"},
            ("memory: it holds 2.49 GiB of weights, but olmoe as its inputs have it 12.89 GiB", "another model"),
        ),
        ({"inputs__model__config__num_hidden_layers": 23}, ("it holds 2.49 GiB of weights", "2.39 GiB")),
        ({"inputs__weights_dtype": "int4"}, ("it holds 2.49 GiB of weights", "or of other formats")),
        (
            {"policy__weight_slots": "experts", "policy__ring_experts": 33},
            ("policy.ring_experts: a ring of 33 experts, but granite-3.1-1b-a400m has 32 in a layer",),
        ),
        ({"inputs__workload__num_requests": 7}, ("policy.batch_size: a batch of 8 of 7 requests",)),
        ({"memory__cpu": 1.0}, ("memory: the key 'cpu' is missing or no object",)),
    ],
)
def test_a_plan_with_the_inputs_of_another_is_refused(
    changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(belonging(**changes)), encoding="utf-8")
    text = refused("simulate", file)
    assert text.startswith(f"{file}: ")
    for each in words:
        assert each in text
