"""Figure 10: how link and CPU change the policy of Mixtral 8x7B on two A100 (section 6.3, docs/case-study.md)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hrm.notebook_size import at_size
from hrm.paper.showing import PaperFigure
from hrm.sweep_maps import draw_maps
from hrm.workload import uniform_workload
from simulator.sweep import sweep_document
from simulator.sweep_rows import Bound, solve_point
from simulator.sweep_study import make_study
from simulator.sweep_values import grid_points

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["PolicyMap", "map_policies"]

LINK: Final = "link+host_totals"
CPU: Final = "cpu.memory*cpu.bandwidth*cpu.peak"
FULL: Final = (f"{LINK}=100GB/s:500GB/s:100GB/s", f"{CPU}=1:10:1")
SMALL: Final = (f"{LINK}=100GB/s,500GB/s", f"{CPU}=1,10")
GB: Final = 1e9
NO_BOUND: Final = Bound(tokens_per_s=None, bottleneck="", limits="")
"""The maps show none, and looking for it takes three times as long as the policies."""


@dataclass(frozen=True, slots=True)
class PolicyMap(PaperFigure):
    """Best policies over a grid.

    Attributes
    ----------
    document : mapping
        Of the sweep, as `hrm sweep --json` prints it.
    """

    document: Mapping[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """A row per point: throughput [token/s], where attention runs, shares of weights and KV cache on the CPU."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "link [GB/s]": row[LINK] / GB,
                    "CPU [x]": row[CPU],
                    "throughput [token/s]": row["predicted_tokens_per_s"],
                    "set by": row["bottleneck"],
                    "attention on": "GPU" if row["attention_on_gpu"] else "CPU",
                    "experts on the CPU": row["weights_on_cpu"],
                    "KV cache on the CPU": row["kv_on_cpu"],
                    "N": row["batch_size"],
                    "mu": row["micro_batch_size"],
                }
                for row in self.document["rows"]
            ]
        ).set_index(["link [GB/s]", "CPU [x]"])

    def draw(self) -> Figure:
        """Four maps over link and CPU."""
        from matplotlib.figure import Figure as NewFigure

        figure = NewFigure()
        draw_maps(figure, self.document)
        return figure


def map_policies() -> PolicyMap:
    """The grid of section 6.3 on the paper's terms (Eqs. 12-14, decode only); at the small size its four corners."""
    study = make_study(
        list(at_size(full=FULL, small=SMALL)),
        hw="a100x2-paper",
        model="mixtral-8x7b",
        overrides=None,
        schedules="best",
        workload=uniform_workload(512, 32, num_requests=10_000),
        cost_model="paper",
        simulate=False,
    )
    started = time.perf_counter()
    rows = [row for point in grid_points(study.axes) for row in solve_point(study, point, {point: NO_BOUND})]
    return PolicyMap(sweep_document(study, rows, seconds=time.perf_counter() - started))
