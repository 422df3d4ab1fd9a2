"""A validation from end to end with a measurer that measures nothing: what happens in which order, and its document."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from command import plan_of

from hrm.errors import BarMissedError, InputError
from hrm.host_facts import HostFacts
from hrm.policy import Policy
from hrm.scenario import Scenario
from hrm.validation.candidates import Candidate, Pricer, as_run
from hrm.validation.choice import choose_candidates
from hrm.validation.command import check_verdict, rebuild
from hrm.validation.forecasts import file_hash, forecast_of
from hrm.validation.noise import tightest_regret
from hrm.validation.procedure import Forecaster, Request, estimate_seconds, predict_candidates, validate_plan
from hrm.validation.records import HASH_FILE, PREDICTIONS_FILE, read_json
from hrm.workload import uniform_workload

ROOMY = HostFacts(torch="cpu", gpus=(), cpu_bytes=1e15, lockable_bytes=1e15, disk_bytes=1e15)
GENERATED, LAYERS = 4, 16
PLAN = Policy(
    batch_size=64,
    micro_batch_size=16,
    num_micro_batches=4,
    prefill_micro_batch_size=16,
    attention_on_gpu=False,
    ffn_on_gpu=True,
    weights_on_gpu=0.25,
)


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    """OLMoE on the host of an L4 with little memory on the GPU."""
    plan = plan_of("l4", "olmoe-1b-7b", workload=uniform_workload(128, GENERATED, num_requests=64))
    gpu = replace(plan.scenario.profile.gpu, usable_memory_bytes=8e9)
    return replace(plan.scenario, profile=replace(plan.scenario.profile, gpu=gpu))


def simulate(scenario: Scenario, policy: Policy, schedule: str) -> dict[str, Any]:
    """A simulator that says a millisecond for every request, and half a millisecond of it per step."""
    decode = 0.001 * policy.batch_size
    row = {"alone_s": 0.001, "simulated_s": 0.002, "bytes": 10.0}
    return forecast_of(scenario, policy, decode / 2.0, decode) | {"ops": {"sample": row}, "copies": {}}


FORECASTER = Forecaster(simulate, lambda *_: [], lambda *_: None)


@dataclass
class Fake:
    """Measures what `simulate` says, times a factor of every policy; notes what was there when it was asked."""

    folder: Path
    factors: dict[str, float] = field(default_factory=dict)
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    loaded: set[tuple[Policy, str]] = field(default_factory=set)

    def measure(self, candidate: Candidate) -> list[dict[str, Any]]:
        path = self.folder / PREDICTIONS_FILE
        self.seen.append((candidate.name, file_hash(path) if path.exists() else None))
        wobble = 1.0 + 0.001 * (len(self.seen) % 3)
        decode = 0.001 * candidate.policy.batch_size * self.factors.get(candidate.name, 1.0) * wobble
        ends = [decode / 2.0 + decode * step / (GENERATED - 1) for step in range(GENERATED)]
        names = ["sample/prefill/s0/l16/b0/g0", *(f"sample/decode/s{step}/l16/b0/g0" for step in range(GENERATED - 1))]
        nanoseconds = [round(end * 1e9) for end in ends]
        piece = {
            "steps": {"prefill": True, "first": 0, "last": GENERATED - 1},
            "kind": "measured",
            "lanes": ["gpu0"],
            "task": names,
            "lane": [0] * len(names),
            "start_ns": [0, *nanoseconds[:-1]],
            "end_ns": nanoseconds,
        }
        run = {"warm_up": False, "wall_s": ends[-1], "laid_out_s": 0.0, "pieces": [piece], "routing": {}}
        place = (candidate.policy, candidate.schedule)
        if place in self.loaded:
            return [run]
        self.loaded.add(place)
        return [{**run, "warm_up": True}, run]


def request_of(scenario: Scenario, **changes: Any) -> Request:
    facts = dict.fromkeys(("title", "hardware", "model", "device", "device_name", "weights", "date"), "any")
    setup = {
        "format": 1,
        **facts,
        "workload": {"name": "w", "generation_length": GENERATED, "mean_prompt_tokens": 128.0, "padded": False},
        "layers": LAYERS,
        "layers_of_model": LAYERS,
        "schedule": "cgopipe",
        "policy": PLAN.to_dict(),
        "emulated": False,
        "same_machine": True,
        "machine": {},
        "versions": {},
        "command": [],
        "paced": [],
        "notes": [],
    }
    wanted: dict[str, Any] = {"repeats": 3, "seed": 0} | changes
    return Request(
        pricer=Pricer.start(scenario, {}, ROOMY),
        policy=PLAN,
        schedule="cgopipe",
        memory=lambda _: {"gpu": 1e9, "cpu": 1e9},
        setup=setup,
        **wanted,
    )


@pytest.fixture(scope="module")
def done(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Fake]:
    folder = tmp_path_factory.mktemp("validation")
    fake = Fake(folder, factors={"mu down": 1.25})
    validate_plan(request_of(scenario), fake, FORECASTER, folder)
    return folder, fake


def test_only_the_plan_runs_before_predictions_are_written_and_nothing_changes_them_after(
    done: tuple[Path, Fake],
) -> None:
    folder, fake = done
    before = [name for name, found in fake.seen if found is None]
    after = {found for _, found in fake.seen if found is not None}
    assert set(before) == {"chosen"}
    assert after == {file_hash(folder / PREDICTIONS_FILE)}
    assert (folder / HASH_FILE).read_text(encoding="utf-8") == f"{after.pop()}  {PREDICTIONS_FILE}\n"
    assert [found is None for _, found in fake.seen] == [True] * len(before) + [False] * (len(fake.seen) - len(before))


def test_every_round_has_every_policy_once_in_an_order_of_its_own(done: tuple[Path, Fake]) -> None:
    folder, fake = done
    names = [row["name"] for row in json.loads((folder / PREDICTIONS_FILE).read_text())["candidates"]]
    turns = [name for name, found in fake.seen if found is not None]
    rounds = [turns[start : start + len(names)] for start in range(0, len(turns), len(names))]
    assert len(rounds) == 3
    assert all(sorted(each) == sorted(names) for each in rounds)
    assert rounds[0] != rounds[1] != rounds[2]


def test_no_prediction_depends_on_what_was_measured(scenario: Scenario, tmp_path: Path) -> None:
    written = []
    for factor in (1.0, 3.0):
        folder = tmp_path / f"{factor}"
        folder.mkdir()
        validate_plan(request_of(scenario), Fake(folder, {"chosen": factor}), FORECASTER, folder)
        written.append(json.loads((folder / PREDICTIONS_FILE).read_text()))
    assert written[0].pop("noise") == pytest.approx(written[1].pop("noise"), rel=1e-3)
    assert written[0] == written[1]


def test_the_document_says_what_was_put_in(done: tuple[Path, Fake]) -> None:
    found = rebuild(done[0])
    rows = {row["name"]: row for row in found["policies"]}
    ratios = [row["predicted_over_measured"]["simulated"]["layer_latency_s"] for row in rows.values()]
    slow = rows["mu down"]["predicted_over_measured"]["simulated"]["layer_latency_s"]
    assert slow == pytest.approx(0.8, rel=3e-3)
    assert sorted(ratios)[1:] == pytest.approx([1.0] * (len(ratios) - 1), rel=3e-3)
    near = found["scores"]["simulated"]["layer_latency_s"]["neighbourhood"]
    assert near["spread"] == pytest.approx(0.25, rel=0.02)
    # A millisecond per request over 16 layers and 3 steps.
    assert rows["chosen"]["measured"]["layer_latency_s"]["median"] == pytest.approx(0.064 / 48.0, rel=3e-3)
    assert rows["chosen"]["measured"]["prefill_layer_s"]["median"] == pytest.approx(0.032 / 16.0, rel=3e-3)
    # Half a step of the same for every token, whatever the batch: 1000 requests of 4 tokens in 1.5 s.
    assert rows["chosen"]["measured"]["throughput_tokens_per_s"]["median"] == pytest.approx(4000 / 1.5, rel=3e-3)


def test_noise_is_that_of_the_repeats(done: tuple[Path, Fake]) -> None:
    noise = rebuild(done[0])["noise"]
    assert 0.0005 < noise["before"] < 0.0013  # 1.000, 1.001 and 1.002 in turn
    for metric in ("layer_latency_s", "throughput_tokens_per_s"):
        assert noise[metric]["used"] == max(noise["before"], noise[metric]["between"])
        assert noise[metric]["same_plan_twice"]["ratio"] == pytest.approx(1.0, abs=2e-3)


def test_a_missed_bar_ends_with_its_own_exit_code(done: tuple[Path, Fake]) -> None:
    found = rebuild(done[0])
    spreads = {"spread of the simulator, decode latency", "spread of the simulator, throughput"}
    assert spreads <= set(found["verdict"]["missed"])
    with pytest.raises(BarMissedError) as caught:
        check_verdict(found)
    assert caught.value.exit_code == 4


def test_the_same_records_give_the_same_document(done: tuple[Path, Fake]) -> None:
    assert json.dumps(rebuild(done[0])) == json.dumps(rebuild(done[0]))


def test_a_plan_all_on_the_cpu_counts_in_no_figure_where_the_accelerator_is_emulated(
    scenario: Scenario, tmp_path: Path
) -> None:
    request = request_of(scenario)
    request = replace(request, setup={**request.setup, "emulated": True})
    validate_plan(request, Fake(tmp_path, {"trivial: CPU only": 50.0}), FORECASTER, tmp_path)
    found = rebuild(tmp_path)
    reasons = {row["name"]: row["reason"] for row in found["policies"] if not row["counted"]}
    assert list(reasons) == ["trivial: CPU only"]
    assert found["scores"]["simulated"]["layer_latency_s"]["all"]["spread"] < 0.01


def test_paced_lanes_count_in_no_figure(scenario: Scenario, tmp_path: Path) -> None:
    request = request_of(scenario)
    request = replace(request, setup={**request.setup, "paced": ["host_to_device0"]})
    validate_plan(request, Fake(tmp_path), FORECASTER, tmp_path)
    with pytest.raises(InputError, match="no policy counts"):
        rebuild(tmp_path)


def test_one_repeat_is_refused(scenario: Scenario, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="2 or more"):
        validate_plan(request_of(scenario, repeats=1), Fake(tmp_path), FORECASTER, tmp_path)


def test_where_models_do_not_stay_loaded_a_policy_runs_twice_in_its_turn(scenario: Scenario, tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    validate_plan(request_of(scenario, per_turn=2), fake, FORECASTER, tmp_path)
    names = [name for name, found in fake.seen if found is not None]
    policies = len(set(names))
    assert len(names) == 3 * policies
    assert all(names[at] == names[at + 1] for at in range(0, 2 * policies, 2))
    assert len(set(names[2 * policies :])) == policies


def test_the_estimate_adds_up_runs_warm_ups_and_loading(scenario: Scenario) -> None:
    request = request_of(scenario, repeats=4)
    chosen = choose_candidates(request.pricer, PLAN, "cgopipe", noise=0.5, seed=0, count_random=0)
    chosen.candidates[2:] = []
    document = predict_candidates(request, chosen, FORECASTER, noise=0.5)
    loading = 2.0 * document["candidates"][0]["forecasts"]["full"]["loading_s"]
    # The plan twice, 0.096 s a batch: 4 runs and 2 warm-ups each, and 8 runs of it before.
    assert estimate_seconds(document, turns=2) == pytest.approx(2 * 6 * 0.096 + 2 * loading + 8 * 0.096)


def test_eq_12_leaves_out_what_it_does_not_describe(scenario: Scenario) -> None:
    request = request_of(scenario)
    chosen = choose_candidates(request.pricer, PLAN, "cgopipe", noise=0.01, seed=0)
    document = predict_candidates(request, chosen, FORECASTER, noise=0.01)
    rows = {row["name"]: row["forecasts"] for row in document["candidates"]}
    assert rows["trivial: CPU only"]["eq12_peaks"] is None
    plan = rows["chosen"]
    batch = as_run(scenario, 64)
    for name in ("eq12_peaks", "eq12_rates", "full"):
        assert plan[name]["throughput_tokens_per_s"] == pytest.approx(
            64 * GENERATED / (plan[name]["prefill_s"] + plan[name]["decode_s"])
        )
        assert plan[name]["layer_latency_s"] == pytest.approx(plan[name]["decode_s"] / (3 * batch.model.n_layers))
    assert plan["eq12_rates"]["layer_latency_s"] > plan["eq12_peaks"]["layer_latency_s"]


def stopped(done: tuple[Path, Fake], folder: Path, keep: Callable[[str, int], bool]) -> Path:
    """Records of a validation that was stopped: only some of its runs (policy, repeat) are there."""
    shutil.copytree(done[0], folder)
    for path in (folder / "runs").glob("[0-9]*.json.gz"):
        run = read_json(path)
        if not keep(run["candidate"], run["repeat"]):
            path.unlink()
    return folder


def test_a_validation_that_was_stopped_says_what_it_did_not_reach(done: tuple[Path, Fake], tmp_path: Path) -> None:
    found = rebuild(stopped(done, tmp_path / "stopped", lambda name, repeat: name != "mu down" and repeat < 2))
    assert "mu down" not in {row["name"] for row in found["policies"]}
    assert found["lacking"]["mu down"] == "the validation was stopped before its turn came"
    noise = found["noise"]["layer_latency_s"]
    assert noise["of_a_median"] == noise["used"]  # two runs each, of the three that were asked for


def test_a_validation_that_was_stopped_before_the_second_copy_of_the_plan_is_refused(
    done: tuple[Path, Fake], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="was stopped before the plan had run for the second time"):
        rebuild(stopped(done, tmp_path / "stopped", lambda name, _: name != "chosen again"))


def test_a_plan_of_one_token_is_refused(scenario: Scenario, tmp_path: Path) -> None:
    one = replace(scenario, workload=uniform_workload(128, 1, num_requests=64))
    with pytest.raises(InputError, match="there is no decode to measure"):
        validate_plan(request_of(one), Fake(tmp_path), FORECASTER, tmp_path)
    assert not any(tmp_path.iterdir())


def test_noise_decides_about_regret_only_among_policies_that_it_is_of(done: tuple[Path, Fake]) -> None:
    # The measurer gives every policy the same throughput but `mu down`; the plan counts once, larger batches never.
    rows = [row for row in rebuild(done[0])["policies"] if row["counted"]]
    able = [row for row in rows if row["policy"]["batch_size"] <= PLAN.batch_size]
    assert len(able) < len(rows)
    names = {row["name"] for row in able} - {"mu down", "chosen again"}
    repeats, noise = 3, rebuild(done[0])["noise"]["throughput_tokens_per_s"]["used"]
    (bar,) = [bar for bar in rebuild(done[0])["bars"] if bar["name"] == "regret of the plan"]
    assert bar["tightest"] == tightest_regret(noise, repeats, len(names), seed=0)
