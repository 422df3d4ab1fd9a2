"""`hrm fit --trace`: shares that were put into a trace come out of it, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from command import plan_of, refused, run

from hrm.errors import InputError
from hrm.graph import Lane, LaneKind, TaskGraph
from hrm.layout import Layout
from hrm.plans import read_plan_document
from hrm.policy import Policy
from hrm.profile import Efficiency, HardwareProfile
from hrm.profile_files import dump_profile, with_overrides
from hrm.rates import derive_rates
from hrm.scenario import Scenario
from hrm.schedules import Steps, schedule_graph
from hrm.trace import Span, Trace
from hrm.validation.fitting import records_for
from hrm.validation.forecasts import write_forecasts
from hrm.validation.records import HASH_FILE, PREDICTIONS_FILE, SETUP_FILE, write_json, write_run
from hrm.validation.trace_fit import TraceFit, fit_efficiency
from hrm.workload import uniform_workload
from simulator.durations import roofline_durations
from simulator.validation_price import seconds_alone

POLICY = Policy(
    batch_size=32,
    micro_batch_size=16,
    num_micro_batches=2,
    prefill_micro_batch_size=16,
    attention_on_gpu=False,
    ffn_on_gpu=True,
    weights_on_gpu=0.25,
    pin_weights=False,
    micro_batch_token_budget=16 * 160,
)
TRUE = Efficiency(gpu_bandwidth=0.6, gpu_flops_prefill=0.3, link=0.5, staging=0.25, cpu_attention=0.4, gpu_overlap=1.0)
"""What the machine of the trace has; its profile says 1."""


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    plan = plan_of("rtx4090", "olmoe-1b-7b", workload=uniform_workload(128, 8, num_requests=32))
    return replace(plan.scenario, profile=with_shares(plan.scenario.profile, Efficiency()))


def with_shares(profile: HardwareProfile, efficiency: Efficiency) -> HardwareProfile:
    """The profile with these shares and no fixed times: those are no share of a peak."""
    link = replace(profile.link, copy_latency_s=0.0)
    quantities = {key: value for key, value in profile.quantities.items() if not key.startswith("efficiency")}
    return replace(profile, efficiency=efficiency, link=link, launch_latency_s=0.0, quantities=quantities)


@pytest.fixture(scope="module")
def graph(scenario: Scenario) -> TaskGraph:
    return schedule_graph(Layout(scenario, POLICY), "cgopipe", Steps(prefill=True, last=3))


def traced(scenario: Scenario, graph: TaskGraph, efficiency: Efficiency, *, kind: str = "measured") -> Trace:
    """Every task as long as a machine with these shares takes for it alone."""
    alone = roofline_durations(derive_rates(with_shares(scenario.profile, efficiency), scenario.formats))
    return Trace(tuple(Span(task.id, task.lane, 0.0, alone(task)) for task in graph.tasks), kind)


@pytest.fixture(scope="module")
def fitted(scenario: Scenario, graph: TaskGraph) -> TraceFit:
    return fit_efficiency(scenario.profile, graph, traced(scenario, graph, TRUE), seconds_alone(scenario))


@pytest.mark.parametrize("name", ["link", "staging", "cpu_attention", "gpu_flops_prefill", "gpu_bandwidth"])
def test_a_share_comes_out_as_it_was_put_in(fitted: TraceFit, name: str) -> None:
    (share,) = [each for each in fitted.shares if each.name == name]
    assert (share.before, share.determined, share.at_limit) == (1.0, True, False)
    assert share.after == pytest.approx(getattr(TRUE, name), rel=2e-3)
    assert getattr(fitted.profile.efficiency, name) == pytest.approx(share.after, rel=1e-4)


def test_every_kind_of_task_then_takes_what_was_measured(fitted: TraceFit) -> None:
    for kind in fitted.kinds:
        assert kind["after_s"] == pytest.approx(kind["measured_s"], rel=5e-3), kind
    assert any(kind["before_s"] < 0.5 * kind["measured_s"] for kind in fitted.kinds)


def test_what_the_run_shows_nothing_of_stays_as_it_was(fitted: TraceFit) -> None:
    shares = {each.name: each for each in fitted.shares}
    # Decode of few tokens is bound by memory, and the CPU's attention by its own rate.
    for name in ("gpu_flops_decode", "cpu_flops"):
        assert (shares[name].determined, shares[name].after) == (False, 1.0)
        assert getattr(fitted.profile.efficiency, name) == 1.0


def test_a_machine_that_is_faster_than_the_peak_says_so(scenario: Scenario, graph: TaskGraph) -> None:
    alone = traced(scenario, graph, Efficiency())
    half = Trace(tuple(span._replace(end_s=span.end_s / 2.0) for span in alone.spans), "measured")
    found = fit_efficiency(scenario.profile, graph, half, seconds_alone(scenario))
    assert {each.name for each in found.shares if each.at_limit} >= {"link", "staging", "cpu_attention"}


def test_paced_lanes_take_no_part(scenario: Scenario, graph: TaskGraph) -> None:
    paced = [Lane(LaneKind.H2D, 0), Lane(LaneKind.D2H, 0)]
    found = fit_efficiency(scenario.profile, graph, traced(scenario, graph, TRUE), seconds_alone(scenario), paced=paced)
    (link,) = [each for each in found.shares if each.name == "link"]
    assert (link.determined, link.after) == (False, 1.0)
    assert not any(kind["lane"].startswith(("host_to", "device_to")) for kind in found.kinds)
    with pytest.raises(InputError, match="every lane of it was paced"):
        fit_efficiency(
            scenario.profile, graph, traced(scenario, graph, TRUE), seconds_alone(scenario), paced=graph.lanes
        )


def test_a_simulated_trace_is_no_measurement(scenario: Scenario, graph: TaskGraph) -> None:
    trace = traced(scenario, graph, TRUE, kind="simulated")
    with pytest.raises(InputError, match="is simulated"):
        fit_efficiency(scenario.profile, graph, trace, seconds_alone(scenario))


def test_the_profile_says_where_its_shares_come_from(fitted: TraceFit) -> None:
    text = dump_profile(fitted.profile)
    assert "hrm fit --trace; was 1" in text
    assert fitted.profile.quantities["efficiency.link"].source == "measured"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--trace", "t.json"), "the plan that was run is not said"),
        (("--plan", "p.json"), "belong to --trace"),
        (("--trace", "t.json", "--plan", "p.json", "--install"), "are for published rows"),
    ],
)
def test_options_of_the_two_ways_of_fitting_do_not_mix(options: tuple[str, ...], said: str) -> None:
    assert said in refused("fit", *options)


def test_a_fit_is_judged_only_by_records_of_the_same_rates(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    sizes = ("--prompt-len", 32, "--gen-len", 4, "--requests", 32, "--micro-batch", 16)
    assert run("plan", "--hw", "l4", "--model", "olmoe-1b-7b", *sizes, "-o", plan).code == 0
    scenario, _, document = read_plan_document(plan)
    layers = scenario.model.n_layers
    write_json(tmp_path / SETUP_FILE, {"format": 1, "layers": layers, "layers_of_model": layers, "plan": document})
    noted = write_forecasts({"candidates": []}, tmp_path / PREDICTIONS_FILE)
    (tmp_path / HASH_FILE).write_text(noted, encoding="utf-8")
    write_run(tmp_path, "000-any", {"order": 0, "predictions_sha256": noted})
    more = with_overrides(scenario.profile, {"cpu.memory": "900 GB", "efficiency.link": "50 %"})
    assert records_for(tmp_path, more).predictions_hash == noted
    with pytest.raises(InputError, match=r"another machine: cpu\.bandwidth differs"):
        records_for(tmp_path, with_overrides(scenario.profile, {"cpu.bandwidth": "1 GB/s"}))
