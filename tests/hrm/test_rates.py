"""Seconds of an operator on the CPU: the roofline, and what of the shorter side does not hide."""

from __future__ import annotations

import pytest
from tiny import tiny_profile

from hrm.cost import Formats, Work
from hrm.profile import Efficiency
from hrm.rates import Rates, derive_rates
from hrm.roofline import attainable_local, stack_of, turning_point_1


def rates_of(**shares: float) -> Rates:
    formats = Formats(weights=None, kv="fp16", compute="fp16")
    return derive_rates(tiny_profile(efficiency=Efficiency(**shares)), formats)


@pytest.mark.parametrize(("overlap", "seconds"), [(1.0, 4.0), (0.75, 4.5), (0.0, 6.0)])
def test_an_operator_takes_the_longer_side_and_what_of_the_shorter_does_not_hide(
    overlap: float, seconds: float
) -> None:
    rates = rates_of(cpu_overlap=overlap)
    computing = Work(4 * rates.cpu_flops_per_s, 2 * rates.cpu_bytes_per_s)
    reading = Work(2 * rates.cpu_flops_per_s, 4 * rates.cpu_bytes_per_s)
    assert rates.cpu_seconds(computing) == pytest.approx(seconds)
    assert rates.cpu_seconds(reading) == pytest.approx(seconds)


def test_attention_on_the_cpu_has_its_own_rate_and_overlaps() -> None:
    rates = rates_of(cpu_overlap=0.0, cpu_attention=0.5)
    work = Work(1.0 * rates.cpu_flops_per_s, 1.0 * rates.cpu_bytes_per_s)
    assert rates.cpu_attention_seconds(work) == pytest.approx(2.0)


def test_where_nothing_hides_the_roof_of_the_cpu_is_half_as_high_at_its_ridge_and_p1_is_less() -> None:
    hides, adds = (stack_of(tiny_profile(efficiency=Efficiency(cpu_overlap=overlap)), "fp16") for overlap in (1.0, 0.0))
    ridge = hides.levels[1].peak_flops_per_s / hides.levels[1].bytes_per_s
    assert attainable_local(adds, 1, ridge) == pytest.approx(attainable_local(hides, 1, ridge) / 2)
    assert turning_point_1(adds, 0, 1) < turning_point_1(hides, 0, 1)
    attention = stack_of(tiny_profile(efficiency=Efficiency(cpu_overlap=0.0)), "fp16", operator="attention")
    assert attention.levels[1].overlap == 1.0
