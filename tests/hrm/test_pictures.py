"""Pictures: shown by a notebook, written by name."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from hrm.errors import InputError
from hrm.pictures import NOTEBOOK_DPI, Picture


def test_a_notebook_gets_a_png_of_the_figure_in_its_resolution() -> None:
    png = Picture(Figure(figsize=(4, 2)))._repr_png_()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == (4 * NOTEBOOK_DPI, 2 * NOTEBOOK_DPI)


def test_it_is_written_by_the_ending_of_its_name(tmp_path: Path) -> None:
    picture = Picture(Figure(figsize=(4, 2)))
    assert picture.save(tmp_path / "a.svg") == tmp_path / "a.svg"
    assert "<svg" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="a name that ends in"):
        picture.save(tmp_path / "a.pdf")
