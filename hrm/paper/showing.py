"""What all figures of the paper have in common: drawn for a notebook, saved as a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["PaperFigure"]


class PaperFigure(ABC):
    """A figure that a notebook shows as a picture; what it is made of is `to_frame()`."""

    __slots__ = ()

    @abstractmethod
    def draw(self) -> Figure:
        """The figure."""

    @abstractmethod
    def to_frame(self) -> pd.DataFrame:
        """The numbers in it."""

    def save(self, path: str | Path) -> None:
        """Write the figure as PNG or SVG, by the ending of the path.

        Raises
        ------
        InputError
            The ending is another one, or the file cannot be written.
        """
        from hrm.plots import save_figure

        save_figure(self.draw(), Path(path), where="save")

    def _repr_png_(self) -> bytes:
        from hrm.plots import render_png

        return render_png(self.draw())
