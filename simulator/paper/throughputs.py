"""Figure 7 and Tables 4 and 5 with every run simulated under the schedule of its system."""

from __future__ import annotations

from hrm.notebook_size import at_size
from hrm.paper.throughputs import Throughputs, compare_rows, figure_7_rows, table_4_rows, table_5_rows
from hrm.published.predictions import Simulator
from simulator.published import replay_row

__all__ = ["helm_throughputs", "mtbench_throughputs", "policy_ablation"]


def mtbench_throughputs() -> Throughputs:
    """Figure 7: five systems on MTBench, settings S1, S2 and S6; at the small size not simulated."""
    return compare_rows(figure_7_rows(), _simulate_unless_small())


def helm_throughputs() -> Throughputs:
    """Table 4: HELM's synthetic reasoning and summarization on S1; at the small size not simulated."""
    return compare_rows(table_4_rows(), _simulate_unless_small())


def policy_ablation() -> Throughputs:
    """Table 5: what of MoE-Lightning's gain its policy brings to FlexGen, and what its schedule adds."""
    return compare_rows(table_5_rows(), replay_row)


def _simulate_unless_small() -> Simulator | None:
    return at_size(full=replay_row, small=None)
