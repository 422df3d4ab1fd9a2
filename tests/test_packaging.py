"""The wheel has what a person needs and nothing else, and the base install plans without the extras."""

from __future__ import annotations

import ast
import email
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import hrm

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MODULE_OF = {"pyyaml": "yaml", "jupyter": "notebook"}
"""Name under which a distribution is imported, where it is not its own."""


def name_of(requirement: str) -> str:
    """Distribution of a requirement such as ``torch==2.13.0``."""
    return re.split(r"[<>=!~ \[;]", requirement, maxsplit=1)[0]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    """Files of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_installed(installed: Path, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Python with the files of the wheel before everything else, in a folder outside the checkout."""
    environment = {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def tracked(*folders: str) -> set[str]:
    """Files under folders of the checkout, without what Python leaves there."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


def test_wheel_holds_every_file_of_the_three_packages_and_every_profile(names: set[str]) -> None:
    profiles = {f"hrm/data/{name}" for name in tracked("hardware_profiles") if name.endswith(".yaml")}
    assert len(profiles) > 17
    assert (tracked("hrm", "simulator", "runtime") | profiles) - names == set()


def test_wheel_holds_only_packages_and_its_own_metadata(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names} == {
        "hrm",
        "simulator",
        "runtime",
        f"hrm_offload-{hrm.__version__}.dist-info",
    }


def test_every_package_says_that_it_is_typed(names: set[str]) -> None:
    assert {f"{package}/py.typed" for package in ("hrm", "simulator", "runtime")} <= names


def test_metadata_names_version_licence_python_and_command(wheel: Path) -> None:
    info = f"hrm_offload-{hrm.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
    assert metadata["Version"] == hrm.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == {"runtime", "notebooks", "benchmarks", "docs", "dev"}
    assert "hrm = hrm.cli:main" in entry_points
    assert "Version 2.0, January 2004" in licence and "END OF TERMS AND CONDITIONS" in licence


def test_bundled_data_is_found_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = """
import json, hrm
from hrm.profile_files import bundled_directory, load_profile, profile_names
from hrm.model_files import load_model, model_names
from hrm.workload import load_workload
print(json.dumps({
    "package": hrm.__file__, "profiles_in": str(bundled_directory()),
    "profiles": [load_profile(name).name for name in profile_names()],
    "models": [load_model(name).name for name in model_names()],
    "prompts": len(load_workload("mtbench").prompt_lengths),
}))
"""
    done = run_installed(installed, tmp_path, code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["package"] == str(installed / "hrm" / "__init__.py")
    assert found["profiles_in"] == str(installed / "hrm" / "data" / "hardware_profiles")
    assert set(found["profiles"]) == {path.stem for path in (ROOT / "hardware_profiles").glob("*.yaml")}
    assert len(found["models"]) == 21
    assert found["prompts"] >= 80


def test_base_install_plans_where_no_extra_can_be_imported(installed: Path, tmp_path: Path) -> None:
    base = {name_of(each).lower() for each in PROJECT["dependencies"]}
    extras = {name_of(each) for group in EXTRAS.values() for each in group} - base
    modules = sorted({MODULE_OF.get(name, name).replace("-", "_") for name in extras})
    assert {"torch", "safetensors", "tokenizers", "ipywidgets"} <= set(modules)
    code = f"""
import sys
for name in {modules!r}:
    sys.modules[name] = None  # importing it raises ImportError
from hrm.cli import main
sys.argv = "hrm plan --hw t4.yaml --model olmoe-1b-7b --prompt-len 32 --gen-len 4 --requests 8 --json".split()
main()
"""
    done = run_installed(installed, tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["policy"]["batch_size"] >= 1


def test_base_needs_no_torch_and_dev_pins_it() -> None:
    assert "torch" not in {name_of(each) for each in PROJECT["dependencies"]}
    assert "torch==2.13.0" in EXTRAS["dev"]
    assert {name_of(each) for each in EXTRAS["runtime"]} == {"ninja", "torch", "safetensors", "tokenizers"}
    assert {name_of(each) for each in EXTRAS["notebooks"]} == {"jupyter", "ipywidgets"}


def imported_modules(*folders: str) -> set[str]:
    """Top-level modules that the files of folders import, wherever in the file."""
    found: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names


def modules_of(requirements: list[str]) -> set[str]:
    """Modules that requirements give."""
    names = {name_of(each).lower() for each in requirements}
    return {MODULE_OF.get(name, name).replace("-", "_") for name in names}


def test_packages_import_only_what_they_declare() -> None:
    base = modules_of(PROJECT["dependencies"])
    widgets = modules_of(EXTRAS["notebooks"])  # for the notebook, which the base install does without
    assert imported_modules("hrm") <= base | widgets | {"hrm", "simulator", "runtime"}
    assert imported_modules("simulator") <= base | {"hrm", "simulator"}
    assert imported_modules("runtime") <= base | modules_of(EXTRAS["runtime"]) | {"hrm", "runtime"}


def test_tests_and_benchmarks_import_only_what_their_extras_install() -> None:
    own = {path.stem for folder in ("tests", "benchmarks", "docs", "scripts") for path in (ROOT / folder).rglob("*.py")}
    allowed = modules_of(PROJECT["dependencies"]) | modules_of(EXTRAS["dev"]) | {"hrm", "simulator", "runtime"} | own
    assert imported_modules("tests") <= allowed
    assert imported_modules("docs") <= allowed | modules_of(EXTRAS["docs"])
    assert imported_modules("benchmarks") <= allowed | modules_of(EXTRAS["benchmarks"]) | {"benchmarks"}


def test_every_dependency_earns_its_place_in_one_sentence() -> None:
    groups = {"## Base": PROJECT["dependencies"]} | {f"## `[{name}]`": group for name, group in EXTRAS.items()}
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    assert len(sections) == len(groups)
    for head, requirements in groups.items():
        section = next(each for each in sections if each.startswith(head))
        rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, flags=re.MULTILINE)
        assert [name for name, _ in rows] == sorted(map(name_of, requirements), key=str.lower)
        assert all(reason.strip() for _, reason in rows)
