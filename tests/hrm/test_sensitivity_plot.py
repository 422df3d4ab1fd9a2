"""What each resource is worth, drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hrm.errors import InputError
from hrm.plan_finding import find_plan
from hrm.sensitivity_plot import draw_tornado


def test_bars_are_the_marginal_values_the_largest_on_top_and_a_plan_without_any_is_refused() -> None:
    plan = find_plan("t4", "mixtral-8x7b", generation_length=4, num_requests=64, overrides={"disk": "none"})
    given = {"gpu_memory_gib": 0.5, "cpu_memory_gib": 0.0, "link_gb_per_s": 2.0}
    axes = draw_tornado(replace(plan, marginal_values=given)).figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == [0.0, 0.5, 2.0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [
        "1 GiB CPU memory",
        "1 GiB GPU memory",
        "1 GB/s link",
    ]
    assert [text.get_text() for text in axes.texts] == ["+0", "+0.5", "+2"]
    with pytest.raises(InputError, match="no marginal values"):
        draw_tornado(replace(plan, marginal_values={}))
