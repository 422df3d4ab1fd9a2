"""The account of one decode step, on the tiny machine."""

from __future__ import annotations

import pytest
from tiny import tiny_profile, tiny_scenario
from tiny_policies import policy_of

from hrm.errors import InputError
from simulator.critical_path import step_window
from simulator.step_account import StepAccount, account_for_step, run_step

SCENARIO = tiny_scenario(generated=8)  # seven decode steps, the middle one is number 3
POLICY = policy_of()


def account(**changes: object) -> StepAccount:
    run = run_step(SCENARIO, policy_of(**changes), policy_of(**changes).schedule, contention=False)
    assert run is not None
    return account_for_step(run)


def test_copies_are_those_of_figure_6() -> None:
    """Per layer and step: QKV and attention results of 4 requests, and all weights; 2 layers.

    QKV of a token: (2 heads + 2 x 1 KV head) of width 4 in fp16, 32 byte; a result: 2 x 4 values, 16 byte; an embedded
    row 8 values, 16 byte, is on the GPU already. A layer's experts: 4 x 96 parameters, 768 byte.
    """
    found = account()
    assert {name: copied.bytes for name, copied in found.copies.items()} == {
        "D1": 2 * 4 * 32.0,
        "D2": 2 * 4 * 16.0,
        "D3": 2 * 768.0,
        "D4": 0.0,
        "other": 0.0,
    }
    assert found.copies["D1"].seconds == pytest.approx(256.0 / 50.0)  # the link: 50 byte/s down, 100 up
    assert found.copies["D3"].seconds == pytest.approx(1536.0 / 100.0)


def test_attention_on_the_gpu_moves_the_kv_cache_up_and_what_is_new_down() -> None:
    """Step 3 reads 6 + 4 tokens of 4 requests, 16 byte each and layer; it adds one token each."""
    found = account(attention_on_gpu=True)
    assert found.copies["D4"].bytes == pytest.approx(2 * 4 * 10 * 16.0)
    assert found.copies["other"].bytes == pytest.approx(2 * 4 * 16.0)
    assert (found.copies["D1"].bytes, found.copies["D2"].bytes) == (0.0, 0.0)


def test_the_bubble_is_what_the_step_takes_above_its_busiest_lane() -> None:
    """One micro-batch: nothing overlaps but copies of weights, and the GPU waits for attention on the CPU."""
    busy_gpu, one = account(), account(num_micro_batches=1)
    assert busy_gpu.bubble_s == pytest.approx(0.0, abs=1e-9)  # two micro-batches keep the GPU busy
    assert one.bound_s == pytest.approx(one.busy_s["gpu0"])  # without contention as fast as alone
    waits = one.busy_s["device_to_host0"] + one.copies["D2"].seconds + one.busy_s["cpu"]
    assert one.bubble_s == pytest.approx(waits)


def test_the_middle_step_is_shown_and_more_steps_around_it() -> None:
    one = run_step(SCENARIO, POLICY, "cgopipe", contention=False)
    three = run_step(SCENARIO, POLICY, "cgopipe", steps=3, contention=False)
    every = run_step(SCENARIO, POLICY, "cgopipe", steps=7, contention=False)
    assert one is not None and three is not None and every is not None
    assert [(run.first, run.last) for run in (one, three, every)] == [(3, 4), (3, 6), (0, 7)]
    assert {span.task.step for span in three.trace.spans} == {2, 3, 4, 5, 6}
    assert three.window == (
        step_window(three.graph, three.trace, 3).start_s,
        step_window(three.graph, three.trace, 5).end_s,
    )


def test_more_steps_than_there_are_is_wrong_input() -> None:
    for steps in (0, 8):
        with pytest.raises(InputError, match="from 1 to 7"):
            run_step(SCENARIO, POLICY, "cgopipe", steps=steps)


def test_one_generated_token_has_no_decode_step() -> None:
    assert run_step(tiny_scenario(generated=1), POLICY, "cgopipe") is None


def test_lanes_are_those_that_did_something() -> None:
    assert set(account().busy_s) == {"gpu0", "cpu", "host_to_device0", "device_to_host0"}
    profile = tiny_profile(disk=True)
    scenario = tiny_scenario(profile=profile, generated=8)
    run = run_step(scenario, policy_of(weights_on_disk=0.5, pin_weights=False), "cgopipe", contention=False)
    assert run is not None
    assert {"staging", "disk"} <= set(account_for_step(run).busy_s)
