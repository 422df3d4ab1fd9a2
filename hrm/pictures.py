"""A figure as a notebook shows it and as a file: matplotlib's own figures show nothing outside of pyplot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Picture"]

NOTEBOOK_DPI = 90
"""A figure 10 inches wide then fills the 900 pixels of a notebook's column."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure that a notebook shows.

    Attributes
    ----------
    figure : matplotlib.figure.Figure
    """

    figure: Figure

    @property
    def png(self) -> bytes:
        """The figure as PNG."""
        from hrm.plots import render_png

        return render_png(self.figure, NOTEBOOK_DPI)

    def save(self, path: str | Path) -> Path:
        """Write it as PNG or SVG, by the ending of the path.

        Raises
        ------
        InputError
            The ending is another one, or the file cannot be written.
        """
        from hrm.plots import save_figure

        save_figure(self.figure, Path(path), where="save")
        return Path(path)

    def _repr_png_(self) -> bytes:
        return self.png
