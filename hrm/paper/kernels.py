"""Figure 9: attention on the CPU, the KV copy it saves and the expert FFN, one layer of Mixtral 8x7B on the L4 host.

Every latency is predicted by a roofline whose constants the other sizes give (`hrm.published.kernels`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hrm.paper.showing import PaperFigure
from hrm.plots import BLUE, GREEN, VERMILLION
from hrm.published.kernels import kernel_document
from hrm.published.rows import bundled_kernels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["KernelLatencies", "kernel_latencies"]

STYLES: Final = {
    "kv_transfer_htod": ("KV cache to the GPU", VERMILLION, "s"),
    "cpu_attention": ("attention on the CPU", BLUE, "o"),
    "moe_ffn_gpu": ("experts on the GPU", GREEN, "^"),
}
MS: Final = 1e3


@dataclass(frozen=True, slots=True)
class KernelLatencies(PaperFigure):
    """Latencies, measured and predicted.

    Attributes
    ----------
    rows : tuple of mapping
        ``kernel, mu, context_len, measured, predicted``; [s], and None for the context of what has none.
    """

    rows: tuple[Mapping[str, Any], ...]

    def to_frame(self) -> pd.DataFrame:
        """A row per micro-batch and context: measured and predicted [ms], and how often attention fits in the copy."""
        import pandas as pd

        known = {(row["kernel"], row["mu"], row["context_len"]): row for row in self.rows}
        found = []
        for mu, context in dict.fromkeys((row["mu"], row["context_len"]) for row in self.rows if row["context_len"]):
            entry: dict[str, Any] = {"mu": mu, "context [tokens]": context}
            for kernel, (words, _, _) in STYLES.items():
                row = known.get((kernel, mu, None if kernel == "moe_ffn_gpu" else context))
                for key in ("measured", "predicted"):
                    entry[f"{words}, {key} [ms]"] = None if row is None else row[key] * MS
            for key in ("measured", "predicted"):
                copied, computed = (known[kernel, mu, context][key] for kernel in ("kv_transfer_htod", "cpu_attention"))
                entry[f"copy / attention, {key}"] = copied / computed
            found.append(entry)
        return pd.DataFrame(found).set_index(["mu", "context [tokens]"])

    def draw(self) -> Figure:
        """A panel per micro-batch: latency over context, measured and predicted."""
        from matplotlib.figure import Figure as NewFigure
        from matplotlib.ticker import FuncFormatter, NullLocator

        sizes = list(dict.fromkeys(row["mu"] for row in self.rows))
        figure = NewFigure(figsize=(10.2, 4.6), layout="constrained")
        panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        contexts = sorted({row["context_len"] for row in self.rows if row["context_len"]})
        for axes, mu in zip(panels, sizes, strict=True):
            for kernel, (words, colour, marker) in STYLES.items():
                rows = [row for row in self.rows if (row["kernel"], row["mu"]) == (kernel, mu)]
                _draw_kernel(axes, rows, contexts, words, colour, marker)
            axes.set(xscale="log", yscale="log", xlabel="cached tokens of each request [tokens]")
            axes.set_title(f"micro-batch of {mu} requests", fontsize=10, loc="left")
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.grid(color="0.92", linewidth=0.7)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel("latency of one layer [ms]")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
        return figure


def _draw_kernel(
    axes: Any, rows: Sequence[Mapping[str, Any]], contexts: Sequence[int], words: str, colour: str, marker: str
) -> None:
    """Markers are measured, the dashed line is predicted; what has no context is level."""
    if rows and rows[0]["context_len"] is None:
        at: Sequence[int] = contexts
        measured, predicted = ([rows[0][key] * MS] * len(at) for key in ("measured", "predicted"))
    else:
        at = [row["context_len"] for row in rows]
        measured, predicted = ([row[key] * MS for row in rows] for key in ("measured", "predicted"))
    axes.plot(at, measured, color=colour, marker=marker, linestyle="none", markersize=6, label=f"{words}, measured")
    axes.plot(at, predicted, color=colour, linestyle="--", linewidth=1.3, label=f"{words}, predicted")


def kernel_latencies() -> KernelLatencies:
    """The published latencies beside their predictions."""
    return KernelLatencies(tuple(kernel_document(bundled_kernels())["rows"]))
