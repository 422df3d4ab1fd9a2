"""Figure 7 and Tables 4 and 5: end-to-end runs of five systems, published beside predicted.

The predictions use the constants as shipped, which were fitted to these same rows (`hrm fit`); only Eq. 12 with
the authors' constants has nothing fitted. Cross-validated errors are what `hrm validate published` prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hrm.paper.showing import PaperFigure
from hrm.published.figures import SYSTEM_STYLES
from hrm.published.model import policy_of_row
from hrm.published.predictions import RowResult, Simulator, judge_rows
from hrm.published.rows import Row, bundled_rows
from hrm.published.settings import find_setting
from hrm.published.systems import fitted_values

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["Throughputs", "compare_rows", "figure_7_rows", "table_4_rows", "table_5_rows"]

TABLE_5: Final = ("P014", "P100", "P050")
"""FlexGen under its own policy, under MoE-Lightning's, and MoE-Lightning."""

FIGURE_7_SETTINGS: Final = ("S1", "S2", "S6")


def figure_7_rows() -> tuple[Row, ...]:
    """MTBench on S1, S2 and S6, every system under its own policy."""
    return tuple(
        row
        for row in bundled_rows()
        if row.workload == "mtbench" and row.setting in FIGURE_7_SETTINGS and not row.source.startswith("Tab 5")
    )


def table_4_rows() -> tuple[Row, ...]:
    """HELM synthetic reasoning and summarization on S1."""
    return tuple(row for row in bundled_rows() if row.source.startswith("Tab 4"))


def table_5_rows() -> tuple[Row, ...]:
    """S1, MTBench, 128 generated: two policies of FlexGen, and MoE-Lightning under the second."""
    known = {row.id: row for row in bundled_rows()}
    return tuple(known[name] for name in TABLE_5)


@dataclass(frozen=True, slots=True)
class Throughputs(PaperFigure):
    """Rows and what is predicted of them.

    Attributes
    ----------
    results : tuple of RowResult
    """

    results: tuple[RowResult, ...]

    def to_frame(self) -> pd.DataFrame:
        """A row per run: its policy, throughput published and predicted [token/s].

        The last two columns are ratios of throughputs to that of FlexGen (S4) in the same cell, where there is one; in
        Table 5 that is the first row, FlexGen under its own policy.
        """
        import pandas as pd

        return pd.DataFrame([self._entry(result) for result in self.results]).set_index("id")

    def _entry(self, result: RowResult) -> dict[str, Any]:
        row, predicted = result.row, result.prediction.predicted
        policy, _ = policy_of_row(row)
        over, ours = self._baseline(row), predicted.get("full")
        measured = row.measured_tokens_per_s
        base, base_ours = (None, None) if over is None else (over.row.measured_tokens_per_s, over.prediction.predicted)
        return {
            "id": row.id,
            "setting": row.setting,
            "workload": row.workload,
            "system": row.system,
            "prompts": "padded" if row.padded else "unpadded",
            "generated": row.gen_len,
            "N": policy.batch_size,
            "mu": policy.micro_batch_size,
            "published [token/s]": measured,
            "Eq. 12, authors' constants": predicted.get("eq12_authors"),
            "full model": ours,
            "simulated": predicted.get("simulated"),
            "full / published": ours / measured if ours and measured else None,
            "over FlexGen, published": measured / base if measured and base else None,
            "over FlexGen, full model": ours / base_ours["full"]
            if ours and base_ours and "full" in base_ours
            else None,
        }

    def _baseline(self, row: Row) -> RowResult | None:
        """FlexGen's first row in the same setting, workload and generation length."""
        cell = (row.setting, row.workload, row.gen_len)
        for each in self.results:
            if each.row.system == "FlexGen" and (each.row.setting, each.row.workload, each.row.gen_len) == cell:
                return each
        return None

    def draw(self) -> Figure:
        """A panel per setting: every run as published, beside it what is predicted; throughput is logarithmic."""
        from matplotlib.figure import Figure as NewFigure
        from matplotlib.lines import Line2D

        settings = sorted({result.row.setting for result in self.results})
        figure = NewFigure(figsize=(10.2, 4.6), layout="constrained")
        for axes, setting in zip(figure.subplots(1, len(settings), squeeze=False)[0], settings, strict=True):
            _draw_setting(axes, [result for result in self.results if result.row.setting == setting])
        figure.supylabel("throughput, prefill and decode [token/s]", fontsize=10)
        handles: list[Any] = [
            Line2D([], [], color=colour, marker=marker, markersize=8, linestyle="none", label=name)
            for name, (colour, marker) in SYSTEM_STYLES.items()
            if any(result.row.system == name for result in self.results)
        ]
        handles.append(Line2D([], [], marker="D", linestyle="none", label="full model", **_hollow("D")))
        if any("simulated" in result.prediction.predicted for result in self.results):
            handles.append(
                Line2D([], [], marker="x", markersize=4, linestyle="none", label="simulated", **_hollow("x"))
            )
        figure.legend(handles=handles, loc="outside upper center", ncols=7, frameon=False, fontsize=9)
        return figure


def _hollow(marker: str) -> dict[str, Any]:
    return {"color": "black"} if marker == "x" else {"markeredgecolor": "black", "markerfacecolor": "none"}


def _draw_setting(axes: Any, results: Sequence[RowResult]) -> None:
    """Groups by generation length; repeats of a point stand above each other, joined by a line."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    lengths = sorted({result.row.gen_len for result in results})
    systems = [name for name in SYSTEM_STYLES if any(result.row.system == name for result in results)]
    width = 0.8 / len(systems)
    for group, length in enumerate(lengths):
        for place, system in enumerate(systems):
            rows = [each for each in results if (each.row.gen_len, each.row.system) == (length, system)]
            rates = [each.row.measured_tokens_per_s for each in rows if each.row.measured_tokens_per_s is not None]
            x, (colour, marker) = group + (place - (len(systems) - 1) / 2) * width, SYSTEM_STYLES[system]
            axes.plot([x] * len(rates), rates, color=colour, marker=marker, markersize=8, linewidth=2, alpha=0.9)
            for each in rows[:1]:
                for key, sign, points in (("full", "D", 7), ("simulated", "x", 3.5)):
                    value = each.prediction.predicted.get(key)
                    if value is not None:
                        at = x + 0.4 * width
                        axes.plot(
                            [at], [value], marker=sign, markersize=points, linestyle="none", zorder=3, **_hollow(sign)
                        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.set_xticks(range(len(lengths)), [f"{length} generated" for length in lengths])
    axes.set_xlim(-0.6, len(lengths) - 0.4)
    setting = find_setting(results[0].row)
    axes.set_title(f"{setting.name}: {setting.model_name} on {setting.profile_name}", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)


def compare_rows(rows: Sequence[Row], simulate: Simulator | None = None) -> Throughputs:
    """Predict rows with the shipped constants.

    Parameters
    ----------
    rows : sequence of Row
    simulate : callable, optional
        Simulates a row as well; without it nothing is simulated.
    """
    return Throughputs(tuple(judge_rows(rows, fitted_values(), simulate, with_interval=False)))
