"""`scripts/run_notebooks.py`: which notebooks, in which size, and what it says of a cell that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "scripts" / "run_notebooks.py"), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)


def notebook_of(folder: Path, **cells: str) -> Path:
    nbformat = pytest.importorskip("nbformat")
    made = nbformat.v4.new_notebook()
    made.cells = [nbformat.v4.new_code_cell(source, id=name) for name, source in cells.items()]
    path = folder / "made.ipynb"
    nbformat.write(made, path)
    return path


def test_a_cell_that_fails_is_named_and_the_status_is_1(tmp_path: Path) -> None:
    path = notebook_of(tmp_path, good="x = 1", bad="x / 0", never="x = 2")
    done = run(path)
    assert done.returncode == 1 and done.stdout == ""
    told = [line for line in done.stderr.splitlines() if line.startswith(("made.ipynb", str(path)))]
    assert told == [
        "made.ipynb: cell 'good', 1 of 3",
        "made.ipynb: cell 'bad', 2 of 3",
        f"{path}: cell 'bad': ZeroDivisionError: division by zero",
    ]


@pytest.mark.parametrize(("options", "size"), [((), "full"), (("--size", "small"), "small")])
def test_the_size_is_full_unless_asked_and_results_go_to_the_folder_asked_for(
    tmp_path: Path, options: tuple[str, ...], size: str
) -> None:
    path = notebook_of(tmp_path, size="import os\nprint(os.environ['HRM_NOTEBOOK_SIZE'])")
    before = path.read_bytes()
    (tmp_path / "done").mkdir()
    done = run(path, *options, "--output", tmp_path / "done")
    assert done.returncode == 0, done.stderr
    nbformat = pytest.importorskip("nbformat")
    assert nbformat.read(tmp_path / "done" / "made.ipynb", as_version=4).cells[0].outputs[0].text == f"{size}\n"
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("README.md",), "README.md is no notebook"),
        (("none.ipynb",), "none.ipynb is no notebook"),
        (("--size", "tiny"), "invalid choice: 'tiny'"),
        (("--output", "none"), "--output: none is no folder that exists"),
        (("--output", str(ROOT / "notebooks")), "has the notebooks themselves"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2 and said in done.stderr and "cell" not in done.stderr
