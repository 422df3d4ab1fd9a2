"""The arithmetic of a calibration, exactly: medians, spreads, rates from fake clocks, fits of made-up machines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hrm.cost import Work
from hrm.graph import LaneKind
from hrm.units import parse_quantity
from runtime.calibration.constants import (
    GpuConstants,
    Point,
    bound_share,
    fit_attention,
    fit_cpu,
    fit_gpu,
    fit_prefill,
    price,
    worst_error,
)
from runtime.calibration.lanes import keep_busy, run_on
from runtime.calibration.layer_work import AttentionWork, LayerWork
from runtime.calibration.quantities import share_text
from runtime.calibration.samples import Sample, Samples, Stopwatch, median_of, spread_of
from runtime.calibration.sizes import FULL, QUICK, Sizes
from runtime.device import Device, choose_device

TINY = Sizes(hidden=64, ffn=96, experts=4, top_k=2, heads=4, groups=2, head_dim=16, pool_bytes=2**16)


# Samples


def test_median_and_spread_are_of_the_middle_and_the_quartiles() -> None:
    assert median_of([5.0, 1.0, 3.0]) == 3.0
    assert spread_of([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.2)  # quartiles 9 and 11 over 10
    assert spread_of([7.0]) == 0.0


def test_one_slow_repeat_of_five_moves_neither_median_nor_spread() -> None:
    quiet, disturbed = [10.0, 10.0, 10.0, 10.0, 10.0], [10.0, 10.0, 10.0, 10.0, 99.0]
    assert (median_of(disturbed), spread_of(disturbed)) == (median_of(quiet), spread_of(quiet)) == (10.0, 0.0)


def test_a_rate_is_the_amount_over_each_of_the_seconds() -> None:
    samples = Samples()
    sample = samples.add_rate("copy", "byte/s", 100.0, [1.0, 2.0, 4.0])
    assert sample.values == (100.0, 50.0, 25.0)
    assert samples["copy"].median == 50.0


def test_a_name_is_measured_once() -> None:
    samples = Samples()
    samples.add("copy", "s", [1.0])
    with pytest.raises(ValueError, match="measured twice"):
        samples.add("copy", "s", [1.0])


# The stopwatch


class FakeClock:
    """A clock that only the work moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0

    def read(self) -> float:
        return self.now

    def work(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.calls += 1
            self.now += seconds

        return run


def test_every_repeat_is_the_time_of_one_call_after_a_warm_up() -> None:
    clock = FakeClock()
    watch = Stopwatch(repeats=5, least_s=1.0, most_s=100.0, clock=clock.read)
    assert watch.measure(clock.work(2.0)) == [2.0] * 5
    assert clock.calls == 1 + 1 + 5  # warm-up, once to see how long it takes, repeats


def test_what_is_short_is_called_until_a_repeat_is_long_enough() -> None:
    clock = FakeClock()
    watch = Stopwatch(repeats=4, least_s=1.0, most_s=100.0, clock=clock.read)
    assert watch.measure(clock.work(0.125)) == pytest.approx([0.125] * 4)
    assert clock.calls == 2 + 4 * 8


def test_what_is_long_is_repeated_three_times_at_least() -> None:
    clock = FakeClock()
    assert len(Stopwatch(repeats=9, least_s=0.1, most_s=2.0, clock=clock.read).measure(clock.work(0.5))) == 4
    assert len(Stopwatch(repeats=9, least_s=0.1, most_s=2.0, clock=clock.read).measure(clock.work(60.0))) == 3


def test_when_it_is_late_three_repeats_must_do() -> None:
    clock = FakeClock()
    watch = Stopwatch(repeats=9, least_s=0.1, most_s=99.0, clock=clock.read, late=lambda: clock.now > 20)
    assert len(watch.measure(clock.work(1.0))) == 9
    assert len(watch.measure(clock.work(10.0))) == 3


def test_what_is_only_issued_is_waited_for_before_the_clock_is_read() -> None:
    clock = FakeClock()
    watch = Stopwatch(repeats=3, least_s=0.1, most_s=9.0, clock=clock.read)
    assert watch.measure(lambda: None, finish=clock.work(1.0)) == [1.0] * 3


# Lanes


@pytest.fixture
def machine() -> Device:
    return choose_device("cpu", cpu_only=False)


def test_a_lane_measures_on_its_cores_with_its_threads(machine: Device) -> None:
    import os

    cores, threads = run_on(machine, LaneKind.GPU, lambda: (os.sched_getaffinity(0), torch.get_num_threads()))
    assert (cores, threads) == (set(machine.gpu_cores), 1)
    cores, threads = run_on(machine, LaneKind.CPU, lambda: (os.sched_getaffinity(0), torch.get_num_threads()))
    assert (cores, threads) == (set(machine.cpu_cores), len(machine.cpu_cores))
    assert os.sched_getaffinity(0) == set(machine.cores)


def test_an_error_on_a_lane_is_raised_where_it_was_asked_for(machine: Device) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        run_on(machine, LaneKind.CPU, fail)
    with pytest.raises(RuntimeError, match="no"), keep_busy(machine, [(LaneKind.CPU, fail)]):
        pass


def test_other_lanes_are_busy_inside_the_block_and_at_rest_after_it(machine: Device) -> None:
    done = [0]
    again = threading.Event()

    def work() -> None:
        done[0] += 1
        if done[0] > 5:
            again.set()

    with keep_busy(machine, [(LaneKind.H2D, work)]):
        assert done[0] >= 1
        assert again.wait(10)
    count = done[0]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("calibration")]
    assert done[0] == count


# Fits


MADE_UP = GpuConstants(flops_per_s=200.0, bytes_per_s=50.0, overlap=0.25, fixed_s=0.5)
POINTS = [
    Point(name=str(n), works=[Work(40.0 * n, 100.0 + n), Work(8.0 * n, 30.0)], seconds=1.0) for n in (1, 4, 16, 64, 256)
]


def priced(points: list[Point], constants: GpuConstants) -> list[Point]:
    return [Point(name=p.name, works=p.works, seconds=price(p, constants), fixed=p.fixed) for p in points]


def test_a_point_costs_its_fixed_time_and_per_operator_the_longer_and_what_of_the_shorter_does_not_hide() -> None:
    one = Point(name="", works=[Work(400.0, 50.0), Work(0.0, 100.0)], seconds=1.0)
    # 2 s of FLOPs over 1 s of bytes, three quarters of which show; then 2 s of bytes alone
    assert price(one, MADE_UP) == pytest.approx(0.5 + (2.0 + 0.75) + 2.0)
    assert price(Point(name="", works=one.works, seconds=1.0, fixed=False), MADE_UP) == pytest.approx(4.75)


def test_the_constants_of_a_made_up_gpu_are_found_again() -> None:
    points = priced(POINTS, MADE_UP)
    found = fit_gpu(points, fixed_s=0.5, peak_flops_per_s=500.0, peak_bytes_per_s=60.0)
    assert found.flops_per_s == pytest.approx(200.0, rel=0.01)
    assert found.bytes_per_s == pytest.approx(50.0, rel=0.01)
    assert found.overlap == pytest.approx(0.25, abs=0.02)
    assert found.fixed_s == 0.5
    assert worst_error(points, found) < 0.01


def test_one_point_that_something_disturbed_hardly_moves_the_others() -> None:
    points = priced(POINTS * 2, MADE_UP)
    disturbed = [*points[:-1], replace(points[-1], seconds=3 * points[-1].seconds)]
    found = fit_gpu(disturbed, fixed_s=0.5, peak_flops_per_s=500.0, peak_bytes_per_s=60.0)
    assert worst_error(points[:5], found) < 0.12


def test_attention_has_a_memory_rate_of_its_own() -> None:
    cached = [Point(name=str(n), works=[Work(20.0 * n, 100.0 * n)], seconds=1.0, fixed=False) for n in (1, 10)]
    faster = replace(MADE_UP, bytes_per_s=58.0)
    assert fit_attention(priced(cached, faster), MADE_UP, peak_bytes_per_s=60.0) == pytest.approx(58.0, rel=1e-3)


def test_no_constant_is_above_its_peak() -> None:
    found = fit_gpu(priced(POINTS, MADE_UP), fixed_s=0.5, peak_flops_per_s=100.0, peak_bytes_per_s=20.0)
    assert found.flops_per_s <= 100.0 * (1 + 1e-9)
    assert found.bytes_per_s <= 20.0 * (1 + 1e-9)


def test_prefill_has_a_rate_of_its_own_and_shares_the_rest() -> None:
    faster = GpuConstants(flops_per_s=320.0, bytes_per_s=50.0, overlap=0.25, fixed_s=0.5)
    assert fit_prefill(priced(POINTS, faster), MADE_UP, peak_flops_per_s=500.0) == pytest.approx(320.0, rel=1e-3)


CPU = {"bytes_per_s": 100.0, "least_flops_per_s": 1.0, "peak_flops_per_s": 1000.0}


@pytest.mark.parametrize("overlap", [1.0, 0.6, 0.0])
def test_rate_and_overlap_of_the_cpu_come_back_from_experts_of_few_and_of_many_tokens(overlap: float) -> None:
    made_up = GpuConstants(flops_per_s=400.0, bytes_per_s=100.0, overlap=overlap, fixed_s=0.0)
    blank = [Point(name=str(f), works=[Work(f, 100.0)], seconds=0.0) for f in (40.0, 160.0, 400.0, 1600.0, 3200.0)]
    flops, found = fit_cpu(priced(blank, made_up), **CPU)
    assert flops == pytest.approx(400.0, rel=5e-3)
    assert found == pytest.approx(overlap, abs=0.021)


def test_without_a_point_that_computing_binds_the_rate_of_the_cpu_is_no_more_than_was_reached() -> None:
    read = [Point(name="few", works=[Work(10.0, 100.0)], seconds=1.0)]  # 100 byte at 100 byte/s
    assert fit_cpu(read, **CPU) == (pytest.approx(10.0), 1.0)


def test_the_rate_of_the_cpu_lies_between_what_attention_reaches_and_the_fastest_product() -> None:
    points = [Point(name=str(f), works=[Work(f, 100.0)], seconds=max(1.0, f / 400.0)) for f in (40.0, 1600.0)]
    assert fit_cpu(points, **{**CPU, "least_flops_per_s": 500.0})[0] == pytest.approx(500.0)
    assert fit_cpu(points, **{**CPU, "peak_flops_per_s": 300.0})[0] == pytest.approx(300.0)


def test_a_share_stays_within_what_a_profile_takes() -> None:
    assert [bound_share(value, 10.0) for value in (0.0, 5.0, 20.0)] == [0.001, 0.5, 1.0]


# Sizes


@pytest.mark.parametrize("sizes", [FULL, QUICK], ids=["full", "quick"])
def test_experts_and_caches_are_larger_than_the_caches_of_a_processor(sizes: Sizes) -> None:
    assert 3 * sizes.experts * sizes.ffn * sizes.hidden * 2 > 150e6
    assert sizes.pool_bytes > 150e6
    assert all(
        requests * context * 4 * sizes.groups * sizes.head_dim <= sizes.pool_bytes
        for requests, context in sizes.attention
    )


def test_no_size_is_that_of_a_bundled_model() -> None:
    from hrm.model_files import load_model, model_names

    shapes = {(model.hidden_size, model.streamed_ffn) for model in map(load_model, model_names())}
    assert (FULL.hidden, FULL.ffn) not in shapes


# The layer


@pytest.fixture(scope="module")
def layer() -> LayerWork:
    return LayerWork(TINY, "fp32", choose_device("cpu", cpu_only=False), "gpu")


def test_work_of_a_layer_is_what_the_cost_model_counts(layer: LayerWork) -> None:
    norms, qkv, output, experts, router = layer.decode_works(10)
    assert float(qkv.flops) == 2 * 10 * 64 * (4 + 2 * 2) * 16
    assert float(output.flops) == 2 * 10 * 64 * 64
    assert float(experts.flops) == 2 * 10 * 2 * 3 * 64 * 96
    assert float(router.flops) == 2 * 10 * 64 * 4
    assert float(norms.bytes_touched) > 0
    assert float(layer.ffn_works(10)[0].flops) == float(experts.flops)


def test_work_of_attention_is_its_cache_and_its_queries_and_results(layer: LayerWork) -> None:
    work = AttentionWork(layer).work(3, 8)
    assert float(work.bytes_touched) == pytest.approx(3 * (8 * 2 * 2 * 16 * 4 + 2 * 4 * 16 * 4))
    assert float(work.flops) == pytest.approx(3 * 8 * 2 * 4 * (16 + 16))


def test_a_layer_runs_in_decode_and_prefill_and_alone_its_experts(layer: LayerWork) -> None:
    for run in (layer.decode(5), layer.prefill(2, 6), layer.ffn(5)):
        run()
    assert bool(torch.isfinite(layer.experts).all())
    AttentionWork(layer).decode(3, 8)()


def test_a_sample_keeps_its_repeats() -> None:
    assert Sample(name="x", unit="s", values=(1.0, 2.0, 3.0)).median == 2.0


@pytest.mark.parametrize("share", [0.0, 6e-25, 1e-3, 0.37, 1.0])
def test_a_profile_takes_every_share_that_a_fit_may_find(share: float) -> None:
    assert parse_quantity(share_text(share), "share", where="here") == pytest.approx(max(share, 1e-3), rel=1e-3)
