"""Whether the runtime can run a plan, here and now, and the nearest plan that it can."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import PAPER, SMALL, paper_plan, plan_of, run, screen_of

from hrm.errors import InfeasibleError
from hrm.executable import PROCESS_BYTES, RUNTIME_FAMILIES, Execution, describe_execution
from hrm.executable_plans import nearest_runnable, with_executable_plan
from hrm.families import READERS
from hrm.host_facts import GpuFacts, HostFacts
from hrm.model_files import find_config, load_model, model_names
from hrm.pins import Pins
from hrm.plans import Plan, read_plan_document, save_plan

GIB = 2**30
T4 = GpuFacts(name="Tesla T4", free_bytes=14.9 * GIB, compute_capability=(7, 5))
L4 = GpuFacts(name="NVIDIA L4", free_bytes=22.5 * GIB, compute_capability=(8, 9))
OLMOE = ("plan", "--hw", "t4", "--model", "olmoe", "--requests", "16", "--gen-len", "4", "--prompt-len", "32")


def host(**changes: Any) -> HostFacts:
    """A machine with a T4, 1,000 GiB of memory and of disk, and nothing that stands in the way."""
    facts: dict[str, Any] = {
        "torch": "cuda",
        "gpus": (T4,),
        "cpu_bytes": 1000.0 * GIB,
        "lockable_bytes": math.inf,
        "disk_bytes": 1000.0 * GIB,
    }
    return HostFacts(**(facts | changes))


def on(plan: Plan, machine: HostFacts) -> Execution:
    return describe_execution(plan.scenario, plan.policy, memory=plan.prediction.memory, host=machine)


def with_formats(plan: Plan, **formats: str) -> Plan:
    scenario = plan.scenario
    return replace(plan, scenario=replace(scenario, formats=replace(scenario.formats, **formats)))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Mixtral on a T4, with attention on the CPU, in the memory of both."""
    return plan_of("t4", "mixtral-8x7b", requests=16)


# Kernels


def test_the_families_of_the_runtime_are_families_the_planner_reads() -> None:
    assert set(RUNTIME_FAMILIES) <= set(READERS)


@pytest.mark.parametrize("model", model_names())
def test_every_bundled_model_of_those_families_has_its_kernels(model: str, plan: Plan) -> None:
    spec = load_model(model)
    scenario = replace(plan.scenario, model=replace(plan.scenario.model, family=spec.family))
    assert describe_execution(scenario, plan.policy, host=host()).supported == (spec.family in RUNTIME_FAMILIES)


def test_a_family_without_kernels_is_named_beside_those_that_have_them() -> None:
    assert plan_of("t4", "granite-3.1-1b-a400m", requests=8).execution == Execution(
        supported=False,
        here=False,
        device=None,
        why="the runtime has no kernels for models of the family granitemoe, only for mixtral, dbrx, qwen2_moe, "
        "qwen3_moe, olmoe and llama",
    )


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        ({"weights": "int4"}, "no kernels for weights in int4"),
        ({"weights": "fp8"}, "no kernels for weights in fp8"),
        ({"kv": "int8"}, "no kernels for a KV cache in int8"),
        ({"compute": "fp8"}, "no arithmetic in fp8"),
        ({"weights": "mxfp4", "kv": "int4"}, "no kernels for weights in mxfp4, no kernels for a KV cache in int4"),
    ],
)
def test_formats_without_kernels_are_named(formats: dict[str, str], words: str, plan: Plan) -> None:
    execution = on(with_formats(plan, **formats), host())
    assert (execution.supported, execution.here, execution.device) == (False, False, None)
    assert execution.why == f"the runtime has {words}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_three_plain_formats_have_kernels(dtype: str, plan: Plan) -> None:
    assert on(with_formats(plan, weights=dtype, kv=dtype, compute=dtype), host()).supported


def test_a_quantised_checkpoint_counts_as_it_is_stored(plan: Plan) -> None:
    model = replace(plan.scenario.model, expert_dtype="fp8", linear_dtype="fp8")
    stored = replace(plan, scenario=replace(plan.scenario, model=model))
    assert on(stored, host()).why == "the runtime has no kernels for weights in fp8"
    assert on(with_formats(stored, weights="bf16"), host()).supported


@pytest.mark.parametrize(
    ("config", "lacks"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "kernel for the rope scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "kernel for the rope scaling 'dynamic'"),
        ({"hidden_act": "gelu"}, "kernel for the activation 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "kernel for a rotation of part of a head"),
        ({"rms_norm_eps": None}, "reading of its config.json (rms_norm_eps: this key is missing)"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ""),
        ({"rope_parameters": {"rope_theta": 1e6}}, ""),
        ({"rope_scaling": None, "hidden_act": "SiLU"}, ""),
    ],
)
def test_what_only_the_config_says_counts_too(config: dict[str, Any], lacks: str, plan: Plan) -> None:
    changed = find_config("mixtral-8x7b")["values"] | config
    execution = describe_execution(plan.scenario, plan.policy, config=changed, host=host())
    assert execution.supported == (not lacks)
    assert execution.why == f"the runtime has no {lacks}" or execution.supported


@pytest.mark.parametrize(
    ("checkpoint", "weights", "compute", "lacks"),
    [
        ("bf16", None, "fp32", "bf16 beside arithmetic in fp32"),
        ("fp32", None, "bf16", "fp32 beside arithmetic in bf16"),
        ("fp32", None, "fp16", "fp32 beside arithmetic in fp16"),
        ("bf16", "fp32", "fp16", "fp32 beside arithmetic in fp16"),
        ("fp32", "bf16", "fp16", ""),
        ("bf16", None, "fp16", ""),
        ("fp16", None, "bf16", ""),
        ("bf16", "fp32", "fp32", ""),
    ],
)
def test_weights_of_another_size_than_the_arithmetic_cannot_be_kept(
    checkpoint: str, weights: str | None, compute: str, lacks: str, plan: Plan
) -> None:
    model = replace(plan.scenario.model, checkpoint_dtype=checkpoint, expert_dtype=checkpoint, linear_dtype=checkpoint)
    stored = replace(plan, scenario=replace(plan.scenario, model=model))
    execution = on(with_formats(stored, weights=weights, compute=compute), host())
    assert execution.supported == (not lacks)
    said = f"the runtime has no way to keep weights in {lacks}: it keeps them in the format of the arithmetic"
    assert execution.why == said or execution.supported


@pytest.mark.parametrize("part", ["checkpoint_dtype", "expert_dtype", "linear_dtype"])
def test_every_part_of_the_weights_counts(part: str, plan: Plan) -> None:
    model = replace(plan.scenario.model, **{part: "fp32"})
    odd = replace(plan, scenario=replace(plan.scenario, model=model))
    assert "no way to keep weights in fp32 beside arithmetic in fp16" in on(odd, host()).why


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (("--compute-dtype", "fp32"), "weights fp32 instead of bf16"),
        (("--weights-dtype", "fp32"), "weights bf16 instead of fp32"),
        (("--weights-dtype", "int4", "--compute-dtype", "fp32"), "weights fp32 instead of int4 and bf16"),
    ],
)
def test_the_nearest_plan_has_weights_of_the_size_of_the_arithmetic(options: tuple[str, ...], difference: str) -> None:
    lengths = ("--requests", "16", "--gen-len", "4", "--prompt-len", "32")
    found = run("plan", "--hw", "l4", "--model", "olmoe", *lengths, *options, "--json").document
    assert not found["executable"]["supported"]
    nearest = found["executable_plan"]
    assert nearest["differences"] == [difference]
    again = run(*shlex.split(nearest["command"])[1:]).document
    assert again["executable"]["supported"] and again["executable_plan"] is None


def test_an_mlp_with_biases_has_no_kernel() -> None:
    plan = plan_of("rtx4090", "llama-3.1-8b", requests=1)
    assert on(plan, host()).supported
    biased = replace(plan.scenario, model=replace(plan.scenario.model, dense_vector_parameters=8))
    assert (
        describe_execution(biased, plan.policy, host=host()).why == "the runtime has no kernel for an MLP with biases"
    )


def test_several_gpus_cannot_be_used_unless_none_is() -> None:
    plan = plan_of("kaggle-t4x2", "olmoe", requests=64)
    assert on(plan, host()).why == "the runtime has no way to use 2 GPUs"
    cpu = next(each for each in plan.trivial if each.name == "CPU only")
    assert cpu.policy is not None and cpu.policy.everything_on_cpu
    execution = describe_execution(plan.scenario, cpu.policy, host=host(gpus=()))
    assert (execution.supported, execution.here, execution.device) == (True, True, "cpu")


def test_a_plan_on_the_papers_terms_leaves_out_what_a_run_needs() -> None:
    execution = paper_plan(micro_batch_size=324, num_micro_batches=14).execution
    assert not execution.supported and "which leaves out embedding, lm_head and prefill" in execution.why


# This machine


def needs(plan: Plan) -> tuple[float, float, float]:
    """GPU memory on a GPU, GPU memory where a CPU stands in for it, and CPU memory [byte]."""
    gpu, cpu = plan.prediction.memory["gpu"], plan.prediction.memory["cpu"]
    real = gpu.peak_bytes - gpu.terms["reserve"]
    return real, real - gpu.terms["CUDA context"], cpu.peak_bytes + PROCESS_BYTES


def test_a_gpu_runs_what_fits_its_free_memory_to_the_byte(plan: Plan) -> None:
    on_gpu, stand_in, on_cpu = needs(plan)
    enough = host(gpus=(replace(T4, free_bytes=on_gpu),), cpu_bytes=on_cpu)
    assert (on(plan, enough).here, on(plan, enough).device) == (True, "cuda")
    assert not on(plan, replace(enough, cpu_bytes=on_cpu - 1)).here
    small = replace(enough, gpus=(replace(T4, free_bytes=on_gpu - 1),))
    assert not on(plan, small).here
    assert on(plan, replace(small, cpu_bytes=on_cpu + stand_in)).device == "cpu"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpus": ()}, "no CUDA device here"),
        ({"torch": "cpu"}, "torch is built without CUDA here"),
        ({"gpus": (replace(T4, free_bytes=GIB), L4)}, " GiB of memory on Tesla T4 (1.0 GiB free)"),
    ],
)
def test_without_a_gpu_that_will_do_a_cpu_with_memory_for_both_stands_in(
    changes: dict[str, Any], why: str, plan: Plan
) -> None:
    _, stand_in, on_cpu = needs(plan)
    enough = on(plan, host(**changes, cpu_bytes=on_cpu + stand_in))
    assert (enough.supported, enough.here, enough.device) == (True, True, "cpu")
    assert enough.why.startswith("on the CPU, which stands in for the accelerator (") and f"{why})" in enough.why
    less = on(plan, host(**changes, cpu_bytes=on_cpu + stand_in - 1))
    assert (less.supported, less.here, less.device) == (True, False, None)
    assert why in less.why and " of CPU memory for both (" in less.why


def test_bf16_is_not_computed_by_a_gpu_before_ampere(plan: Plan) -> None:
    computed = with_formats(plan, compute="bf16")
    assert on(computed, host(gpus=(L4,))).device == "cuda"
    before = on(computed, host(gpus=(replace(L4, name="Quadro", compute_capability=(7, 9)),)))
    assert before.device == "cpu" and "(Quadro has no bf16)" in before.why
    assert on(plan, host()).device == "cuda"


def test_without_torch_nothing_runs(plan: Plan) -> None:
    execution = on(plan, host(torch=None))
    assert (execution.supported, execution.here) == (True, False)
    assert execution.why == "torch is not installed (pip install '.[runtime]')"


def test_the_disk_must_hold_what_the_plan_puts_there() -> None:
    plan = plan_of("t4", "dbrx")
    size = plan.prediction.memory["disk"].peak_bytes
    assert size > 100 * GIB
    assert on(plan, host(disk_bytes=size)).here
    less = on(plan, host(disk_bytes=size - 1))
    assert not less.here and less.why.startswith(f"needs {size / GIB:,.1f} GiB of disk (")


def test_a_limit_of_page_locked_memory_is_mentioned_where_weights_are_locked_and_stops_nothing(plan: Plan) -> None:
    locked = replace(plan, policy=replace(plan.policy, pin_weights=True))
    limited = on(locked, host(lockable_bytes=8 * 2.0**20))
    assert limited.here and limited.why.endswith("(ulimit -l), CUDA may go beyond")
    assert "ulimit" not in on(locked, host()).why
    staged = replace(plan, policy=replace(plan.policy, pin_weights=False))
    assert "ulimit" not in on(staged, host(lockable_bytes=0.0)).why


def test_a_plan_all_on_the_cpu_needs_no_gpu_and_its_memory_alone() -> None:
    plan = plan_of("t4", "olmoe", requests=16)
    trivial = next(each for each in plan.trivial if each.name == "CPU only")
    assert trivial.policy is not None and trivial.prediction is not None
    on_cpu = trivial.prediction.memory["cpu"].peak_bytes + PROCESS_BYTES
    enough = describe_execution(plan.scenario, trivial.policy, host=host(gpus=(), cpu_bytes=on_cpu))
    assert (enough.here, enough.device) == (True, "cpu") and enough.why.startswith("on the CPU, in ")
    assert not describe_execution(plan.scenario, trivial.policy, host=host(cpu_bytes=on_cpu - 1)).here


# The best plan that the runtime can run


@pytest.mark.parametrize(
    ("options", "differences"),
    [
        (("--weights-dtype", "int4"), ["weights bf16 instead of int4"]),
        (("--kv-dtype=int8",), ["KV cache fp16 instead of int8"]),
        (("--hw", "kaggle-t4x2"), ["one GPU instead of 2"]),
        (("--hw", "t4x4", "--set", "gpu.count=3", "--set", "cpu.memory=40 GiB"), ["one GPU instead of 3"]),
        (
            ("--hw", "l4", "--weights-dtype", "fp8", "--compute-dtype", "fp8"),
            ["weights bf16 instead of fp8", "arithmetic bf16 instead of fp8"],
        ),
    ],
)
def test_where_the_best_plan_cannot_be_run_the_command_of_one_that_can_gives_just_that(
    options: tuple[str, ...], differences: list[str]
) -> None:
    document = run(*OLMOE, *options, "--json").document
    other = document["executable_plan"]
    assert not document["executable"]["supported"] and other["differences"] == differences
    words = shlex.split(other["command"])
    again = run(*words[1:]).document
    assert again["executable"]["supported"] and again["executable_plan"] is None
    assert again["predicted"]["throughput_tokens_per_s"] == other["throughput_tokens_per_s"]
    assert {**again["policy"], "dtypes": None} == {**other["policy"], "dtypes": None}
    assert again["schedule"] == other["schedule"]
    for option in ("--weights-dtype", "--kv-dtype", "--compute-dtype"):
        assert sum(word.startswith(option) for word in words) <= 1
    assert sum("gpu.count" in word for word in words) <= 1


def test_pinned_variables_stay_pinned() -> None:
    document = run(*OLMOE, "--weights-dtype", "int4", "--weights-on-gpu", 0.25, "--batch", 8, "--json").document
    policy = document["executable_plan"]["policy"]
    assert policy["batch_size"] == 8 and policy["weights_on_gpu"] == pytest.approx(0.25, abs=2e-3)
    assert document["inputs"]["command"][:2] == ["plan", "--hw"]


def no_search(*_: object, **__: object) -> None:
    raise AssertionError("a second search")


@pytest.mark.parametrize(
    "made",
    [
        lambda: plan_of("t4", "mixtral-8x7b", requests=16),
        lambda: plan_of("t4", "granite-3.1-1b-a400m", requests=8),
        lambda: paper_plan(micro_batch_size=324, num_micro_batches=14),
    ],
)
def test_there_is_a_second_search_only_where_other_inputs_would_help(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made()
    monkeypatch.setattr("hrm.search.find_policy", no_search)
    assert with_executable_plan(first).executable_plan is None
    with pytest.raises(AssertionError, match="a second search"):
        with_executable_plan(with_formats(plan_of("t4", "mixtral-8x7b", requests=16), kv="int8"))


def test_where_no_such_plan_fits_a_note_says_so(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    def nothing_fits(*_: object, **__: object) -> None:
        raise InfeasibleError("no plan fits")

    monkeypatch.setattr("hrm.search.find_policy", nothing_fits)
    found = with_executable_plan(with_formats(plan, weights="int4", kv="int8"))
    assert found.executable_plan is None
    assert found.notes == (
        *plan.notes,
        "with weights bf16 instead of int4 and KV cache fp16 instead of int8, as the runtime would need it, no plan "
        "fits.",
    )


def test_without_words_the_command_says_what_to_add(plan: Plan) -> None:
    found = with_executable_plan(with_formats(plan, kv="int8")).executable_plan
    assert found is not None and found.command == "hrm plan ... --kv-dtype fp16"


def test_the_screen_says_whether_it_can_be_run_and_what_can() -> None:
    quantised = run(*OLMOE, "--weights-dtype", "int4").out
    assert "\ncan be run      no: the runtime has no kernels for weights in int4\n" in quantised
    found = re.search(
        r"^runnable +([\d,.]+) token/s, ([\d.]+)x, with weights bf16 instead of int4: hrm plan", quantised, re.M
    )
    assert found is not None
    best = run(*OLMOE, "--weights-dtype", "int4", "--json").document
    rate = best["executable_plan"]["throughput_tokens_per_s"]
    assert found[1] == f"{rate:,.2f}"
    assert found[2] == f"{rate / best['predicted']['throughput_tokens_per_s']:.2f}"
    plain = screen_of(plan_of("t4", "mixtral-8x7b", requests=16))
    assert re.search(r"^can be run +yes, (here|not here): ", plain, re.M) and "\nrunnable" not in plain


def test_what_a_saved_plan_says_of_another_machine_is_not_believed(tmp_path: Path) -> None:
    plan = plan_of("t4", "mixtral-8x7b", requests=16)
    save_plan(plan, tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert set(document["executable"]) == {"supported", "here", "device", "why"}
    document["executable"] = "nonsense"
    (tmp_path / "other.json").write_text(json.dumps(document), encoding="utf-8")
    assert read_plan_document(tmp_path / "other.json")[:2] == read_plan_document(tmp_path / "plan.json")[:2]


# The way out of a refusal


def way_out(plan: Plan, machine: HostFacts, words: tuple[str, ...] = ()) -> str:
    typed = with_executable_plan(plan, words)
    return nearest_runnable(typed.scenario, typed.policy, typed.to_dict(complete=True), host=machine)


@pytest.mark.parametrize(
    ("options", "machine", "parts"),
    [
        (("--weights-dtype", "int4"), host(), ("with weights bf16 instead of int4, ",)),
        ((), host(torch="cpu", cpu_bytes=12 * GIB), (" of GPU memory instead of ", " of CPU memory instead of ")),
        (
            ("--hw", "l4"),
            host(gpus=(replace(T4, free_bytes=4 * GIB),), cpu_bytes=10 * GIB),
            ("arithmetic fp16 instead",),
        ),
        (
            ("--set", "gpu.usable_memory=4 GiB", "--set", "cpu.memory=12 GiB", "--set", "efficiency.link=1 %"),
            host(disk_bytes=8.5 * GIB),
            (" of disk instead of ",),
        ),
    ],
)
def test_the_way_out_is_a_command_whose_plan_runs_on_that_machine(
    options: tuple[str, ...], machine: HostFacts, parts: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    assert run(*OLMOE, *options, "-o", file).code == 0
    scenario, policy, document = read_plan_document(file)
    assert describe_execution(scenario, policy, host=machine).device != "cuda"
    said = nearest_runnable(scenario, policy, document, host=machine)
    assert said.startswith("the nearest plan that runs here with ")
    for part in parts:
        assert part in said
    assert run(*shlex.split(said.partition(": hrm ")[2])).code == 0
    scenario, policy, document = read_plan_document(file)  # the command has its -o
    assert describe_execution(scenario, policy, host=machine).here
    rate = document["predicted"]["throughput_tokens_per_s"]
    assert f"{rate:,.2f} token/s predicted" in said


def test_the_way_out_of_a_plan_that_runs_is_that_plan(plan: Plan) -> None:
    rate = plan.prediction.throughput_tokens_per_s
    expected = f"the nearest plan that runs here, {rate:,.2f} token/s predicted: hrm plan --hw t4"
    assert way_out(plan, host(), ("plan", "--hw", "t4")) == expected


def test_where_a_model_has_no_kernels_the_way_out_is_another_model() -> None:
    said = way_out(plan_of("t4", "granite-3.1-1b-a400m", requests=8), host())
    assert said.startswith("it runs other models, of mixtral, ") and said.endswith("hrm simulate replays this plan")


def test_where_torch_is_missing_the_way_out_is_to_install_it(plan: Plan) -> None:
    assert way_out(plan, host(torch=None)) == "pip install '.[runtime]' installs torch"


def test_where_nothing_fits_the_way_out_says_what_is_free(plan: Plan) -> None:
    said = way_out(plan, host(gpus=(), cpu_bytes=4 * GIB, disk_bytes=2 * GIB))
    free = "4.0 GiB of CPU memory, 2.0 GiB of disk and no CUDA device"
    assert said == f"no plan of mixtral-8x7b fits what is free here, {free}: a smaller model (hrm models)"


def test_a_plan_on_the_papers_terms_is_made_again_with_the_full_model(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert run(*PAPER, "--prompt-len", 77, "-o", file).code == 0
    said = nearest_runnable(*read_plan_document(file), host=host(gpus=(L4,)))
    assert said.startswith("the nearest plan that runs here with the full cost model")
    command = f"hrm plan --hw l4-paper --model mixtral-8x7b --gen-len 32 --prompt-len 77 -o {file} --cost-model full"
    assert said.endswith(f" token/s predicted: {command}")


@pytest.mark.parametrize("pins", [{"banana": 1}, {"batch_size": "x"}, {"batch_size": 0}])
def test_pins_that_make_no_sense_are_left_out_of_the_way_out(pins: dict[str, Any], plan: Plan) -> None:
    document = plan.to_dict(complete=True)
    document["inputs"]["pins"] = pins
    said = nearest_runnable(plan.scenario, plan.policy, document, host=host())
    assert said.startswith("the nearest plan that runs here, ")


# The documents


def test_the_keys_are_documented() -> None:
    document = run(*SMALL, "--json").document
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| `executable` |"))
    assert set(document["executable"]) <= set(re.findall(r"`([^`]+)`", row))
    section = page.partition("| key of `executable_plan` |")[2].partition("\n\n")[0]
    other = run(*OLMOE, "--kv-dtype", "int8", "--json").document["executable_plan"]
    assert set(other) == set(re.findall(r"`([^`]+)`", "".join(line.split("|")[1] for line in section.splitlines()[2:])))
    assert document["executable_plan"] is None and Pins(**document["inputs"]["pins"]) == Pins()
