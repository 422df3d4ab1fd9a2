"""Run the notebooks from top to bottom, in full size.

    python scripts/run_notebooks.py [--size full|small] [--output FOLDER] [NOTEBOOK ...]

All of `notebooks/` where none is named. Progress goes to stderr. Exit status: 0 when every cell ran, 1 when one failed,
which is named, 2 for wrong arguments. The files stay as they are; `--output` keeps the notebooks with their results.
Needs what `pip install '.[notebooks]'` installs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The notebooks, the size and the folder; ends with status 2 where they make no sense."""
    parser = argparse.ArgumentParser(description="Run the notebooks from top to bottom.")
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK", help="all of notebooks/ by default")
    parser.add_argument("--size", choices=("full", "small"), default="full", help="how much they compute")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="keep them with their results here")
    found = parser.parse_args(arguments)
    found.notebooks = found.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in found.notebooks:
        if path.suffix != ".ipynb" or not path.is_file():
            parser.error(f"{path} is no notebook; name a file that ends in .ipynb")
    if found.output is not None and not found.output.is_dir():
        parser.error(f"--output: {found.output} is no folder that exists")
    if found.output is not None and any(path.resolve().parent == found.output.resolve() for path in found.notebooks):
        parser.error(f"--output: {found.output} has the notebooks themselves, which keep no results; name another")
    return found


def run_notebook(path: Path, output: Path | None) -> str | None:
    """Run one; what failed, or None."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    code = [cell["id"] for cell in notebook.cells if cell.cell_type == "code"]
    running = "its first cell"

    def tell(cell: Any, cell_index: int) -> None:
        nonlocal running
        if cell.cell_type == "code":
            running = f"cell {cell['id']!r}"
            print(f"{path.name}: {running}, {code.index(cell['id']) + 1} of {len(code)}", file=sys.stderr)

    client = NotebookClient(
        notebook,
        timeout=None,
        startup_timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.resolve().parent)}},
        on_cell_start=tell,
    )
    failed = None
    try:
        client.execute()
    except CellExecutionError as error:
        failed = f"{path}: {running}: {error.ename}: {error.evalue}"
    except (CellTimeoutError, DeadKernelError) as error:
        failed = f"{path}: {running}: {error}"
    if output is not None:
        nbformat.write(notebook, output / path.name)
    return failed


def main(arguments: Sequence[str]) -> int:
    """Run them in turn; the first that fails ends it."""
    asked = read_arguments(arguments)
    os.environ["HRM_NOTEBOOK_SIZE"] = asked.size
    for path in asked.notebooks:
        began = time.monotonic()
        failed = run_notebook(path, asked.output)
        if failed is not None:
            print(failed, file=sys.stderr)
            return 1
        print(f"{path.name}: done in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
