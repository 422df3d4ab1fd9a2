"""What a plan says beside its policy: alternatives, warnings, trivial plans, pinned variables."""

from __future__ import annotations

from typing import Any

import pytest
from command import AT_PEAKS, PAPER, SMALL, plan_of, refused, run
from hypothesis import given, settings
from hypothesis import strategies as st

from hrm.pins import Pins, option_name
from hrm.plans import Plan
from hrm.prediction import Prediction
from hrm.workload import uniform_workload


def seconds_of_all_requests(prediction: Prediction) -> float:
    return prediction.num_batches * prediction.batch_s


def warned(plan: Plan, words: str) -> bool:
    return any(words in text for text in plan.warnings)


@pytest.mark.parametrize(("overrides", "least"), [(AT_PEAKS, 2.0), ((), 1.0)], ids=["peaks", "calibrated"])
def test_dbrx_on_a_t4_uses_the_disk_and_shows_int4_and_a_416_gb_host_beside_it(
    overrides: tuple[tuple[str, str], ...], least: float
) -> None:
    """At peaks the disk binds, and a quarter of the bytes doubles the rate; calibrated, the GPU binds beside it."""
    plan = plan_of("t4", "dbrx", overrides=overrides)
    assert plan.policy.weights_on_disk > 0
    assert plan.prediction.decode.bottleneck == ("disk" if overrides else "gpu")
    rates = {each.name: each.throughput_tokens_per_s for each in plan.alternatives}
    mine = plan.prediction.throughput_tokens_per_s
    assert {"int4 weights", "a 416 GB host"} <= set(rates)
    assert (rates["int4 weights"] or 0) > least * mine
    assert (rates["a 416 GB host"] or 0) > mine


def test_an_alternative_that_does_not_fit_says_so_in_a_few_words() -> None:
    """263.2 GB of bf16 weights against 184.29 - 8 GiB of host and 14.74 GiB of GPU, which holds more than weights."""
    without = next(each for each in plan_of("t4", "dbrx").alternatives if each.name == "without the disk")
    assert without.throughput_tokens_per_s is None
    size, words = without.note.split(" GiB over ")
    assert words == "CPU memory"
    assert 263.2e9 / 2**30 - (184.29 - 8) - 14.74 <= float(size) <= 263.2e9 / 2**30 - (184.29 - 8) + 2.0


def test_without_a_disk_the_error_says_what_int4_or_a_larger_host_would_give() -> None:
    text = refused("plan", "--hw", "t4", "--model", "dbrx", "--set", "disk=none", code=3)
    assert text.startswith("no plan fits dbrx on t4: at the smallest batch (1 request) it is ")
    assert "GiB over the limit of CPU memory" in text
    assert "int4 weights would give " in text and "(--weights-dtype int4)" in text
    assert "a 416 GB host would give " in text and "(--set cpu.memory='416 GB')" in text


def test_alternatives_are_solved_only_with_disk_or_when_asked_for() -> None:
    assert plan_of("t4", "granite-3.1-1b-a400m", requests=8).alternatives == ()
    names = [each.name for each in plan_of("t4", "mixtral-8x7b", requests=16, explain=True).alternatives]
    assert names[:2] == ["int4 weights", "a 416 GB host"]
    for words in ("attention on", "experts on", "page-locked", "more GPU memory", "more CPU memory", "more link"):
        assert sum(words in name for name in names) == 1, words


@pytest.mark.parametrize(
    ("hardware", "model", "requests"),
    [("a100-80g", "olmoe", 10_000), ("t4", "granite-3.1-1b-a400m", 8), ("rtx4090", "llama-3.1-8b", 1)],
)
def test_where_it_all_fits_the_gpu_offloading_is_called_pointless(hardware: str, model: str, requests: int) -> None:
    plan = plan_of(hardware, model, requests=requests)
    everything = plan.trivial[0]
    assert everything.name == "all in GPU memory" and everything.prediction is not None
    assert plan.prediction.throughput_tokens_per_s <= 1.1 * everything.prediction.throughput_tokens_per_s
    assert warned(plan, "offloading is pointless")


def test_where_it_does_not_fit_the_gpu_nothing_is_called_pointless() -> None:
    plan = plan_of("t4", "mixtral-8x7b", requests=16)
    assert not warned(plan, "pointless")
    assert plan.trivial[0].prediction is None
    assert plan.trivial[0].reason.startswith("weights are 5.9x the GPU memory")


def test_a_plan_of_months_is_called_hopeless() -> None:
    plan = plan_of("t4", "mixtral-8x7b", requests=1_000_000, pins=Pins(batch_size=1))
    assert plan.prediction.completion_s > 30 * 86400
    days = plan.prediction.completion_s / 86400
    assert warned(plan, f"hopeless as asked: all requests take {days:,.0f} days")


def test_a_plan_of_minutes_is_not_called_hopeless() -> None:
    assert not warned(plan_of("t4", "mixtral-8x7b", requests=16), "hopeless")


def test_a_bf16_checkpoint_on_a_gpu_without_bf16_is_pointed_out() -> None:
    plan = plan_of("t4", "granite-3.1-1b-a400m", requests=8)
    assert plan.formats_as_run == {"weights": "bf16", "kv": "fp16", "compute": "fp16"}
    assert warned(plan, "NVIDIA T4 has no bf16")
    assert not warned(plan_of("rtx4090", "llama-3.1-8b", requests=1), "bf16")


@pytest.mark.parametrize("efficiency", [(), (("efficiency.link", "0.8"),)])
def test_only_rates_that_were_never_measured_are_said_to_be_peaks(efficiency: tuple[tuple[str, str], ...]) -> None:
    plan = plan_of("rtx4090", "granite-3.1-1b-a400m", requests=8, overrides=efficiency)
    assert warned(plan, "rates are peaks, not measured here") == (not efficiency)
    assert not any("fitted" in note for note in plan.notes)


def test_fitted_rates_say_to_what_they_were_fitted_unless_they_are_replaced() -> None:
    plan = plan_of("t4", "granite-3.1-1b-a400m", requests=8)
    share = plan.scenario.profile.quantities["efficiency.gpu_flops_prefill"]
    assert "published rows of S1" in share.note
    assert not warned(plan, "rates are peaks")
    assert plan.notes[0] == (
        f"GPU rates are fitted, not measured here: {share.text} of its peak ({share.note}); how well they predict: hrm "
        "validate published."
    )
    other = plan_of("t4", "granite-3.1-1b-a400m", requests=8, overrides=(("efficiency.link", "0.8"),))
    assert "fitted" in other.notes[0]
    mine = plan_of("t4", "granite-3.1-1b-a400m", requests=8, overrides=(("efficiency.gpu_flops_decode", "0.3"),))
    assert not any("fitted" in note for note in mine.notes) and not warned(mine, "rates are peaks")


@pytest.mark.parametrize(
    ("hardware", "model", "requests"),
    [
        ("t4", "dbrx", 10_000),
        ("a100-80g", "olmoe", 10_000),
        ("t4", "granite-3.1-1b-a400m", 8),
        ("t4", "granite-3.1-1b-a400m", 500),
        ("kaggle-t4x2", "olmoe", 64),
        ("colab-t4", "llama-3.1-8b", 20),
        ("rtx4090", "gpt-oss-20b", 33),
        ("t4", "mixtral-8x7b", 16),
    ],
)
def test_a_plan_is_never_worse_than_a_trivial_one(hardware: str, model: str, requests: int) -> None:
    plan = plan_of(hardware, model, requests=requests)
    assert [each.name for each in plan.trivial] == ["all in GPU memory", "CPU only"]
    tokens = requests * plan.scenario.workload.generation_length
    mine = tokens / seconds_of_all_requests(plan.prediction)
    for each in plan.trivial:
        if each.prediction is not None:
            assert mine >= tokens / seconds_of_all_requests(each.prediction) * (1 - 1e-9), each.name
        else:
            assert each.reason


@pytest.mark.parametrize("requests", [1, 8, 30])
def test_a_plan_is_never_worse_than_one_micro_batch(requests: int) -> None:
    """The third trivial plan is a point of the program: n_ub = 1 pinned must not win."""
    free = plan_of("t4", "mixtral-8x7b", requests=requests)
    one = plan_of("t4", "mixtral-8x7b", requests=requests, pins=Pins(num_micro_batches=1))
    assert one.policy.num_micro_batches == 1
    mine, theirs = seconds_of_all_requests(free.prediction), seconds_of_all_requests(one.prediction)
    assert mine <= theirs * (1 + free.solver.gap)


PINS = {
    "batch_size": st.integers(1, 8),
    "micro_batch_size": st.integers(1, 8),
    "num_micro_batches": st.integers(1, 4),
    "prefill_micro_batch_size": st.integers(1, 8),
    "attention_on_gpu": st.booleans(),
    "ffn_on_gpu": st.booleans(),
    "weights_on_gpu": st.sampled_from([0.0, 0.25, 1.0]),
    "weights_on_disk": st.sampled_from([0.0, 0.5]),
    "kv_on_gpu": st.sampled_from([0.0, 0.5, 1.0]),
    "kv_on_disk": st.sampled_from([0.0, 0.5]),
    "weight_slots": st.sampled_from([1, 2, "experts"]),
    "dense_weights_on_gpu": st.booleans(),
    "embedding_on_gpu": st.booleans(),
    "lm_head_on_gpu": st.booleans(),
    "pin_weights": st.booleans(),
}
WORDS = {
    "attention_on_gpu": ("cpu", "gpu"),
    "ffn_on_gpu": ("cpu", "gpu"),
    "embedding_on_gpu": ("cpu", "gpu"),
    "dense_weights_on_gpu": ("streamed", "resident"),
    "lm_head_on_gpu": ("streamed", "resident"),
}


def as_options(pins: dict[str, Any]) -> list[str]:
    options: list[str] = []
    for key, value in pins.items():
        if key == "pin_weights":
            options.append("--pin-weights" if value else "--no-pin-weights")
        else:
            options += [option_name(key), WORDS[key][value] if key in WORDS else str(value)]
    return options


@given(st.lists(st.sampled_from(sorted(PINS)), min_size=1, max_size=3, unique=True), st.data())
@settings(max_examples=40, deadline=None)
def test_a_pinned_variable_has_its_value_in_the_plan(keys: list[str], data: st.DataObject) -> None:
    pins = {key: data.draw(PINS[key], label=key) for key in keys}
    outcome = run(*SMALL, *as_options(pins), "--json")
    assert outcome.code in (0, 2, 3), outcome
    if outcome.code:
        assert outcome.out == "" and outcome.err.startswith("hrm: ")
        assert outcome.code == 3 or any(option_name(key) in outcome.err for key in pins), outcome.err
        return
    document = outcome.document
    policy = document["policy"]
    assert not policy["everything_on_cpu"] or set(pins) <= {"batch_size", "micro_batch_size", "num_micro_batches"}
    for key, value in pins.items():
        if key.startswith("kv_on"):  # whole requests of a micro-batch, rounded down
            smallest = policy["batch_size"] // policy["num_micro_batches"]
            least = int(value * smallest) * policy["num_micro_batches"] / policy["batch_size"]
            assert least - 1e-9 <= policy[key] <= value + 1e-9
        elif key in ("micro_batch_size", "prefill_micro_batch_size"):
            assert policy[key] == min(value, policy["batch_size"])
            clamped = any(note.startswith(f"{option_name(key)} {value:,} comes out as") for note in document["notes"])
            assert clamped == (value > policy["batch_size"])
        elif isinstance(value, float):  # whole rows of an expert
            assert policy[key] == pytest.approx(value, abs=2e-3)
        else:
            assert policy[key] == value, key
    for use in document["memory"].values():
        assert use["peak_bytes"] <= use["limit_bytes"] * (1 + 1e-9) + 1


def test_a_share_that_rounds_away_is_pointed_out() -> None:
    outcome = run(*SMALL, "--kv-on-gpu", 0.5, "--batch", 1, "--json")
    assert outcome.document["policy"]["kv_on_gpu"] == 0
    note = "--kv-on-gpu 0.5 comes out as 0: only whole requests of a micro-batch move."
    assert note in outcome.document["notes"]


def test_more_requests_than_can_be_searched_are_refused_before_memory_runs_out() -> None:
    text = (
        "--requests: 1,000,000,000 requests make more batch sizes than are searched "
        "(at most 10,000,000, which give the same throughput, or --batch)"
    )
    assert refused(*SMALL, "--requests", 10**9) == text
    assert run(*SMALL, "--requests", 10**9, "--batch", 8, "--json").document["policy"]["batch_size"] == 8


def test_a_micro_batch_that_no_batch_fills_is_pointed_out() -> None:
    plan = plan_of("colab-t4", "olmoe", pins=Pins(micro_batch_size=5000))
    size = plan.policy.batch_size
    assert size < 5000 and plan.policy.micro_batch_size == size
    assert f"--micro-batch 5,000 comes out as {size}, all the requests of a batch." in plan.notes


def test_weights_pinned_to_the_gpu_keep_the_experts_there() -> None:
    policy = run(*SMALL, "--weights-on-gpu", 0.25, "--json").document["policy"]
    assert policy["ffn_on_gpu"] is True
    assert policy["weights_on_gpu"] == pytest.approx(0.25, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--batch", 9), "--batch: 9 is more than the 8 requests (at most as many, or more --requests)"),
        (("--micro-batch", 9), "--micro-batch: 9 is more than the 8 requests (at most as many, or more --requests)"),
        (
            ("--micro-batch", 4, "--batch", 3),
            "--micro-batch: 4 is more than the batch of 3 (at most 3, or a larger --batch)",
        ),
        (
            ("--micro-batch", 4, "--num-micro-batches", 3),
            "--num-micro-batches: 3 micro-batches of 4 are more than the 8 requests (at most 2, or more --requests)",
        ),
        (
            ("--batch", 6, "--num-micro-batches", 5),
            "--num-micro-batches: 6 requests do not make 5 micro-batches, all but the last of one size "
            "(3, or another --batch)",
        ),
        (
            ("--batch", 7, "--micro-batch", 2, "--num-micro-batches", 3),
            "--batch: 7 requests do not make 3 micro-batches of 2 (between 5 and 6)",
        ),
        (("--batch", 0), "--batch: 0 is out of range (a whole number from 1 to 1,000,000,000)"),
        (("--weights-on-gpu", 1.5), "--weights-on-gpu: 1.5 is not a share (from 0 to 1)"),
        (("--kv-on-gpu", "nan"), "--kv-on-gpu: nan is not a share (from 0 to 1)"),
        (
            ("--kv-on-gpu", 0.6, "--kv-on-disk", 0.6),
            "--kv-on-gpu, --kv-on-disk: 0.6 + 0.6 is more than the whole "
            "(shares that add up to at most 1; the rest stays in CPU memory)",
        ),
        (
            ("--ffn", "cpu", "--weights-on-gpu", 0.5),
            "--weights-on-gpu: 0.5, but experts computed on the CPU keep no weights on the GPU (0, or --ffn gpu)",
        ),
    ],
)
def test_pinned_variables_that_cannot_be_are_refused_with_a_way_out(options: tuple[object, ...], text: str) -> None:
    assert refused(*SMALL, *options) == text


@pytest.mark.parametrize(
    "option",
    [
        ("--prefill-micro-batch", 4),
        ("--weights-on-disk", 0.5),
        ("--kv-on-disk", 0.0),
        ("--weight-slots", "experts"),
        ("--dense-weights", "resident"),
        ("--embedding", "cpu"),
        ("--lm-head", "resident"),
        ("--pin-weights",),
    ],
)
def test_the_papers_model_refuses_variables_it_does_not_have(option: tuple[object, ...]) -> None:
    text = f"{option[0]}: the paper's model has no such variable (--cost-model full)"
    assert refused(*PAPER, "--prompt-len", 77, *option) == text


@pytest.mark.parametrize(
    ("model", "has"),
    [
        ("deepseek-v3", "latent attention"),
        ("gpt-oss-20b", "sliding-window layers"),
        ("llama-3.1-8b", "no experts"),
        ("qwen2-57b-a14b", "dense layers or shared experts"),
    ],
)
def test_the_papers_model_refuses_models_it_does_not_describe(model: str, has: str) -> None:
    text = f"--cost-model paper: the paper's formulas do not describe {model}: it has {has} (--cost-model full)"
    assert refused(*PAPER, "--model", model, "--prompt-len", 77) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("--batch", 7, "--micro-batch", 3),
            "--batch: 7 is no multiple of --micro-batch 3 (a multiple, as N = mu * n_ub in the paper, e.g. 9)",
        ),
        (
            ("--attention", "cpu", "--kv-on-gpu", 0.1),
            "--kv-on-gpu: with attention on the CPU the paper's model keeps no KV cache on the GPU "
            "(--attention gpu, or --cost-model full)",
        ),
    ],
)
def test_the_papers_model_refuses_what_its_equations_cannot_express(options: tuple[object, ...], text: str) -> None:
    assert refused(*PAPER, "--prompt-len", 77, *options) == text


def test_an_infeasible_policy_never_breaks_a_limit_by_less_than_nothing() -> None:
    text = refused(*PAPER, *("--prompt-len", 77, "--weights-on-gpu", 0.1, "--kv-on-gpu", 0.9), "--batch", 2000, code=3)
    assert "exceeded by -" not in text


def test_the_papers_model_says_that_it_ignores_the_number_of_requests() -> None:
    few, many = (
        plan_of(
            "l4-paper",
            "mixtral-8x7b",
            workload=uniform_workload(77, 32, num_requests=requests),
            cost_model="paper",
            pins=Pins(micro_batch_size=324, num_micro_batches=14),
        )
        for requests in (1, 10_000)
    )
    assert few.policy == many.policy
    assert any("--requests and --max-hours play no part" in note for note in few.notes)
