"""Memory added up from what the tasks of a trace hold: never above the peaks the plan states, and close to them."""

from typing import Any

import pytest

from hrm.model_files import load_model
from hrm.pins import Pins
from hrm.prediction import memory_use
from hrm.profile_files import load_profile
from hrm.scenario import Scenario, choose_formats, measure_sizes
from hrm.schedules import Steps
from hrm.search import find_policy
from hrm.workload import load_workload, uniform_workload
from simulator.replay import step_trace

MTBENCH = load_workload("mtbench", generation_length=64, num_requests=400)
LONG = uniform_workload(512, 32, num_requests=400)

PLANS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "two slots": ("t4", "mixtral-8x7b", {"attention_on_gpu": False, "weight_slots": 2}),
    "all free": ("l4", "mixtral-8x7b", {}),
    "one slot, KV slots": (
        "t4",
        "mixtral-8x7b",
        {"attention_on_gpu": True, "weight_slots": 1, "batch_size": 400, "num_micro_batches": 4},
    ),
    "one slot, disk": ("t4", "dbrx", {}),
    "ring": ("t4", "dbrx", {"weight_slots": "experts"}),
    "two GPUs": ("t4x2", "mixtral-8x22b", {}),
    "everything streamed": (
        "l4",
        "mixtral-8x7b",
        {
            "lm_head_on_gpu": False,
            "dense_weights_on_gpu": False,
            "embedding_on_gpu": False,
            "attention_on_gpu": False,
        },
    ),
    "staged": ("l4", "mixtral-8x7b", {"attention_on_gpu": False, "pin_weights": False}),
    "experts on the CPU": ("t4", "qwen3-30b-a3b", {"ffn_on_gpu": False}),
}


@pytest.mark.parametrize("workload", [MTBENCH, LONG], ids=["mtbench", "long"])
@pytest.mark.parametrize("name", PLANS)
def test_what_the_tasks_hold_comes_within_two_percent_of_the_stated_peaks_and_never_above(
    name: str, workload: Any
) -> None:
    """Prefill and the first decode steps, event by event over all layers. Observed: 98.3 to 100.0 %."""
    machine, model, pins = PLANS[name]
    profile, spec = load_profile(machine), load_model(model)
    scenario = Scenario(profile=profile, model=spec, workload=workload, formats=choose_formats(profile, spec))
    policy = find_policy(scenario, Pins(**pins)).policy
    _, trace = step_trace(scenario, policy, policy.schedule, step=0, steps=Steps(prefill=True, first=0, last=2))
    for level, use in memory_use(scenario, measure_sizes(scenario), policy).items():
        held = max(held for _, held in trace.memory[level])
        assert held <= use.peak_bytes * (1 + 1e-9) + 1.0, level
        assert held >= 0.98 * use.peak_bytes, level
