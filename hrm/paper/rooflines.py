"""Figures 4 and 5: hierarchical rooflines of Mixtral 8x7B on the L4 host of the paper's case study.

On the paper's own terms: its constants (`l4-figures`, with the GPU's sparse peak) and its count of attention's FLOPs.
All intensities are theoretical, counted from the model's shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hrm.model_files import load_model
from hrm.paper.showing import PaperFigure
from hrm.profile_files import load_profile
from hrm.roofline import Operator
from hrm.roofline_view import RooflineView, build_view

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["RooflineFigure", "attention_roofline", "experts_roofline"]

GFLOP = 1e9


@dataclass(frozen=True, slots=True)
class RooflineFigure(PaperFigure):
    """A roofline.

    Attributes
    ----------
    view : RooflineView
    """

    view: RooflineView

    def draw(self) -> Figure:
        """The roofs, the operator and its turning points."""
        from hrm.plots import draw_roofline

        return draw_roofline(self.view)

    def to_frame(self) -> pd.DataFrame:
        """A row per operator: intensities and turning points [FLOP/byte], rates [GFLOP/s], where it runs faster."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "operator": sample.label,
                    "intensity on the GPU [FLOP/byte]": sample.places.intensity_i,
                    "on the link [FLOP/byte]": sample.places.intensity_moved,
                    "P1 [FLOP/byte]": sample.places.turning_point_1,
                    "P2 [FLOP/byte]": sample.places.turning_point_2,
                    "on the CPU [GFLOP/s]": sample.places.stay_flops_per_s / GFLOP,
                    "on the GPU, through the link [GFLOP/s]": sample.places.fetch_flops_per_s / GFLOP,
                    "on the GPU, data there [GFLOP/s]": sample.places.resident_flops_per_s / GFLOP,
                    "faster on": self.view.stack.levels[sample.places.better].name,
                }
                for sample in self.view.samples
            ]
        ).set_index("operator")


def attention_roofline() -> RooflineFigure:
    """Figure 4: decode attention at a context of 512 tokens, KV cache in 16 bit and in int4."""
    return _roofline("attention")


def experts_roofline() -> RooflineFigure:
    """Figure 5: the expert FFN at micro-batches up to 4 x 128 tokens, with the batch at P2 of 128."""
    return _roofline("ffn")


def _roofline(operator: Operator) -> RooflineFigure:
    profile, model = load_profile("l4-figures"), load_model("mixtral-8x7b")
    return RooflineFigure(
        build_view(profile, model, operator=operator, cost_model="paper", context=512, micro_batch=128)
    )
