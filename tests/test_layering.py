"""Arrows go one way: `hrm` knows neither `simulator` nor `runtime`, these not each other, and only `runtime` torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("hrm", "simulator", "runtime")
SOURCES = {package: sorted((ROOT / package).rglob("*.py")) for package in PACKAGES}
HEAVY = ("torch", "pandas", "scipy", "matplotlib")
FORBIDDEN_NAMES = ("util", "utils", "common", "base", "manager", "helpers", "misc")

# The one exception: the command line reaches the other packages, inside its command functions.
COMMAND_LINE = tuple(ROOT / "hrm" / name for name in ("cli.py", "cli_running.py", "cli_judging.py"))


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Top-level package of every import of a file, and whether it stands outside functions (runs at import)."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    yield from _imports_below(tree, at_import=True)


def _imports_below(node: ast.AST, *, at_import: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name.partition(".")[0], at_import
        elif isinstance(child, ast.ImportFrom):
            yield (child.module or "").partition(".")[0] if child.level == 0 else "relative", at_import
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _imports_below(child, at_import=False)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports_below(child, at_import=at_import and not inside)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES["hrm"], ids=relative)
def test_hrm_imports_neither_simulator_nor_runtime_nor_torch(path: Path) -> None:
    for package, at_import in imports_of(path):
        if package in ("simulator", "runtime"):
            assert path in COMMAND_LINE and not at_import, f"{relative(path)} imports {package}"
        assert package != "torch", f"{relative(path)} imports torch"


@pytest.mark.parametrize(("package", "other"), [("simulator", "runtime"), ("runtime", "simulator")])
def test_simulator_and_runtime_do_not_know_each_other(package: str, other: str) -> None:
    found = {name for path in SOURCES[package] for name, _ in imports_of(path)}
    assert other not in found


def test_simulator_imports_no_torch() -> None:
    assert "torch" not in {name for path in SOURCES["simulator"] for name, _ in imports_of(path)}


@pytest.mark.parametrize("path", [path for paths in SOURCES.values() for path in paths], ids=relative)
def test_imports_are_absolute(path: Path) -> None:
    assert "relative" not in {package for package, _ in imports_of(path)}


def test_imports_in_every_place_are_found(tmp_path: Path) -> None:
    source = tmp_path / "sample.py"
    source.write_text(
        "import a.b\nfrom c import d\ntry:\n    import e\nexcept ImportError:\n    pass\n"
        "def f():\n    import g.h\n    def k():\n        from i import j\n"
        "if TYPE_CHECKING:\n    import l\nclass C:\n    import m\nfrom . import n\n"
    )
    assert set(imports_of(source)) == {
        ("a", True),
        ("c", True),
        ("e", True),
        ("g", False),
        ("i", False),
        ("l", False),
        ("m", True),
        ("relative", True),
    }


def test_importing_every_module_of_hrm_and_simulator_loads_nothing_heavy() -> None:
    """Plots and tables load matplotlib and pandas when they are drawn, so that a plan does not wait for them."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in ("hrm", "simulator")
        for path in SOURCES[package]
        if path.name != "__main__.py"
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
        "    assert not loaded, f'{name} loads {loaded}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_file_names_say_what_is_in_them(package: str) -> None:
    assert not [relative(path) for path in SOURCES[package] if path.stem.strip("_") in FORBIDDEN_NAMES]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_function_shares_a_modules_name(package: str) -> None:
    """A submodule `hrm/plan.py` would overwrite a function `hrm.plan`."""
    modules = {path.stem for path in SOURCES[package]} - {"__init__", "__main__"}
    clashes = [
        f"{relative(path)}: {node.name}"
        for path in SOURCES[package]
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in modules
    ]
    assert not clashes
