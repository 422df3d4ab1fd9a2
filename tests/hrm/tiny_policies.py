"""Policies for the tiny scenario: one to change by hand, and any legal one for a schedule, drawn by hypothesis."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st
from tiny import tiny_model, tiny_profile, tiny_scenario

from hrm.layout import Layout
from hrm.policy import Policy
from hrm.schedules import SCHEDULES, Steps

MODELS = (
    tiny_model(),
    tiny_model(n_layers=3, moe_layers=(False, True, True), layer_windows=(None, 4, None), dense_ffn=4, shared_ffn=2),
    tiny_model(n_experts=0, top_k=0, expert_ffn=0, dense_ffn=4, moe_layers=(False, False)),
)


EVERYTHING_ON_CPU: dict[str, Any] = {
    "everything_on_cpu": True,
    "attention_on_gpu": False,
    "ffn_on_gpu": False,
    "weights_on_gpu": 0.0,
    "kv_on_gpu": 0.0,
    "kv_on_disk": 0.0,
    "weight_slots": 2,
    "ring_experts": 0,
    "dense_weights_on_gpu": False,
    "embedding_on_gpu": False,
    "lm_head_on_gpu": False,
    "pin_weights": False,
}


class Case(NamedTuple):
    """A schedule with a policy that it can run, and the passes to lay out."""

    layout: Layout
    schedule: str
    steps: Steps


def policy_of(**changes: Any) -> Policy:
    """Two micro-batches of two requests, attention on the CPU, all weights streamed from pinned memory."""
    count = changes.get("num_micro_batches", 2)
    base: dict[str, Any] = {
        "batch_size": 2 * count,
        "micro_batch_size": 2,
        "num_micro_batches": count,
        "prefill_micro_batch_size": 2,
        "attention_on_gpu": False,
        "ffn_on_gpu": True,
        "micro_batch_token_budget": 20,
    }
    return Policy(**(base | changes))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any schedule with any policy it accepts: slots, places, shares, staging, disk, GPUs, with and without prefill."""
    schedule = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    quarters = st.integers(0, 4).map(lambda n: n / 4)
    attention_on_gpu = draw(st.booleans()) if schedule.attention_on_gpu is None else schedule.attention_on_gpu
    count = 1 if schedule.one_micro_batch else draw(st.integers(1, 4))
    gpus = draw(st.sampled_from((1, 1, 2, 3)))
    parallelism = draw(st.sampled_from(("tensor", "pipeline")))
    ring = schedule.paged and parallelism == "tensor" and not schedule.on_cpu
    slots = draw(st.sampled_from((1, 2, "experts") if ring else (1, 2)))
    weights_on_gpu = draw(st.sampled_from((0.25, 0.5, 0.75)) if schedule.static_experts else quarters)
    kv_on_gpu = 1.0 if schedule.one_micro_batch or schedule.static_experts else draw(quarters)
    changes: dict[str, Any] = {
        "num_micro_batches": count,
        "prefill_micro_batch_size": draw(st.sampled_from((1, 2, 8))),
        "attention_on_gpu": attention_on_gpu,
        "ffn_on_gpu": draw(st.booleans()) and not schedule.static_experts,
        "weights_on_gpu": weights_on_gpu,
        "weights_on_disk": draw(quarters) * (1 - weights_on_gpu),
        "kv_on_gpu": kv_on_gpu,
        "kv_on_disk": draw(quarters) * (1 - kv_on_gpu),
        "weight_slots": slots,
        "ring_experts": draw(st.integers(1, 9)) if slots == "experts" else 0,
        "dense_weights_on_gpu": draw(st.booleans()),
        "embedding_on_gpu": draw(st.booleans()),
        "lm_head_on_gpu": draw(st.booleans()),
        "pin_weights": draw(st.booleans()),
        "parallelism": parallelism,
    }
    if schedule.on_cpu or (schedule.serial and draw(st.integers(0, 5)) == 0):
        changes |= EVERYTHING_ON_CPU | {"weights_on_disk": draw(quarters)}
    profile = tiny_profile(
        gpus=gpus,
        gpu_link=draw(st.sampled_from((None, 25.0))),
        host_total=draw(st.sampled_from((None, 80.0))),
        disk=True,
        copy_s=0.25,
        launch_s=0.125,
        h2d_with_opposite=75.0,
        d2h_with_opposite=40.0,
    )
    scenario = tiny_scenario(profile=profile, model=draw(st.sampled_from(MODELS)))
    prefill, last = draw(st.sampled_from(((True, 0), (True, 2), (False, 1), (False, 3))))
    return Case(Layout(scenario, policy_of(**changes)), schedule.name, Steps(prefill=prefill, first=0, last=last))
