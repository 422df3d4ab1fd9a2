"""Figures 6 and 10 and Table 5 of the paper, at the small size of the notebooks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hrm.errors import InputError
from hrm.notebook_size import SIZE_VARIABLE
from simulator.paper.case_study import map_policies
from simulator.paper.schedules import ScheduledLayers, schedule_layers, simulate_schedules
from simulator.paper.throughputs import helm_throughputs, policy_ablation


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, "small")


@pytest.fixture(scope="module")
def layers() -> ScheduledLayers:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIZE_VARIABLE, "small")
        return schedule_layers()


def test_paged_weights_beat_one_block_and_that_beats_one_micro_batch_at_a_time(layers):
    seconds = layers.to_frame()["layer [ms]"]
    assert seconds["cgopipe"] < seconds["s4"] < seconds["s2"] < seconds["s3"]
    assert layers.to_frame().loc["cgopipe", "over cgopipe"] == 1.0


def test_every_schedule_copies_the_same_weights_and_only_gpu_attention_the_kv_cache(layers):
    frame = layers.to_frame()
    assert frame["D3 [ms]"].max() / frame["D3 [ms]"].min() < 1.001
    assert list(frame["D4 [ms]"] > 0) == [False, False, False, True]
    assert list(frame["D2 [ms]"] > 0) == [True, True, True, False]


def test_no_schedule_is_faster_than_its_busiest_lane_and_the_bubble_is_the_rest(layers):
    frame = layers.to_frame()
    assert (frame["busiest lane alone [ms]"] <= frame["layer [ms]"] * (1 + 1e-9)).all()
    assert list(frame["bubble"]) == pytest.approx(list(1 - frame["busiest lane alone [ms]"] / frame["layer [ms]"]))


def test_the_picture_has_a_timeline_per_schedule_and_says_which_policy_it_shows(layers):
    figure = layers.draw()
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes] == ["CGOPipe", "S2", "S3", "S4"]
    words = " ".join(text.get_text() for text in figure.texts)
    assert "N = 884 in 13 micro-batches of 68" in words and "418 tokens" in words


def test_without_a_decode_step_there_is_nothing_to_schedule(layers):
    workload = replace(layers.scenario.workload, generation_length=1)
    with pytest.raises(InputError, match="no decode step"):
        simulate_schedules(replace(layers.scenario, workload=workload), layers.policy, ("cgopipe",))


def test_table_5_is_simulated_and_each_step_of_it_gains():
    frame = policy_ablation().to_frame()
    assert frame["simulated"].is_monotonic_increasing
    assert list(frame["simulated"] / frame["full model"]) == pytest.approx([1.0] * 3, abs=0.02)


def test_table_4_is_not_simulated_at_the_small_size():
    frame = helm_throughputs().to_frame()
    assert len(frame) == 8 and frame["simulated"].isna().all()


def test_a_strong_cpu_takes_attention_and_the_kv_cache_at_any_link():
    frame = map_policies().to_frame()
    for link in (100.0, 500.0):
        assert frame.loc[(link, 1.0), "attention on"] == "GPU" and frame.loc[(link, 10.0), "attention on"] == "CPU"
        assert frame.loc[(link, 1.0), "KV cache on the CPU"] < frame.loc[(link, 10.0), "KV cache on the CPU"] == 1.0
    rate = frame["throughput [token/s]"]
    assert rate[500.0, 1.0] > rate[100.0, 1.0] and rate[500.0, 10.0] == pytest.approx(rate[100.0, 10.0], rel=1e-6)
