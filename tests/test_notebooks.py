"""The notebooks run from top to bottom, hold no logic and keep no outputs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PICTURES = {"roofline_exploration": 4, "paper_figures": 6}
WIDGETS = {"roofline_exploration": 1}


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Any:
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(request.param, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_roofline_notebook_is_there():
    assert "roofline_exploration" in {path.stem for path in NOTEBOOKS}


def test_notebook_is_valid_and_every_cell_has_its_own_id(notebook):
    import nbformat

    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    ids = [cell["id"] for cell in notebook.cells]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_stored(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


def test_notebook_holds_no_logic_only_imports_of_the_packages_and_calls(notebook):
    for cell in code_cells(notebook):
        for statement in ast.parse(cell.source).body:
            assert isinstance(statement, ast.ImportFrom | ast.Import | ast.Expr | ast.Assign), cell.source
            if isinstance(statement, ast.ImportFrom):
                assert (statement.module or "").split(".")[0] in {"hrm", "simulator", "runtime"}
            nested = [
                node for node in ast.walk(statement) if isinstance(node, ast.Lambda | ast.comprehension | ast.BinOp)
            ]
            assert nested == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_at_its_small_size_and_shows_its_pictures_and_widgets(path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("ipywidgets")
    monkeypatch.setenv("HRM_NOTEBOOK_SIZE", "small")
    notebook = nbformat.read(path, as_version=4)
    done = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    kinds = []
    for cell in code_cells(done):
        assert [output.output_type for output in cell.outputs if output.output_type in ("error", "stream")] == []
        for output in cell.outputs:
            kinds += [kind for kind in output.data if kind != "text/plain"]
    assert kinds.count("image/png") == PICTURES[path.stem]
    assert kinds.count("application/vnd.jupyter.widget-view+json") == WIDGETS.get(path.stem, 0)
