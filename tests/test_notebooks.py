"""The notebooks run from top to bottom, hold no logic and keep no outputs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from hrm.notebook_size import SIZE_VARIABLE

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PICTURES = {"paper_figures": (6, 0), "plan_and_simulate": (5, 0), "roofline_exploration": (4, 1)}
"""Pictures and widgets that each shows."""


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Any:
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(request.param, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_every_notebook_is_known_here():
    assert {path.stem for path in NOTEBOOKS} == set(PICTURES)


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
                assert (statement.module or "").split(".")[0] in {"hrm", "simulator", "runtime", "dataclasses"}
            nested = [
                node for node in ast.walk(statement) if isinstance(node, ast.Lambda | ast.comprehension | ast.BinOp)
            ]
            assert nested == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_every_result_is_a_picture_a_widget_or_a_screen(path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("ipywidgets")
    monkeypatch.setenv(SIZE_VARIABLE, "small")
    done = nbclient.NotebookClient(
        nbformat.read(path, as_version=4),
        timeout=300,
        startup_timeout=300,  # on a busy machine a kernel takes minutes to start
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
    ).execute()
    kinds = []
    for cell in code_cells(done):
        assert [output.output_type for output in cell.outputs if output.output_type in ("error", "stream")] == []
        for output in cell.outputs:
            kinds += [kind for kind in output.data if kind != "text/plain"]
    assert (kinds.count("image/png"), kinds.count("application/vnd.jupyter.widget-view+json")) == PICTURES[path.stem]
    assert set(kinds) <= {"image/png", "application/vnd.jupyter.widget-view+json", "text/html"}
