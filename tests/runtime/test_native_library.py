"""Building the compiled kernels once, whatever an earlier process left behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.utils import cpp_extension

from runtime import native_library

NO_COMPILER = shutil.which(os.environ.get("CXX", "c++")) is None


@pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler on this machine: torch does the work")
def test_where_there_is_a_compiler_the_kernels_are_compiled() -> None:
    """Else a source that no longer compiles would only be skipped, here and in the tests of the kernels."""
    assert native_library.open_library() is not None


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was built into an empty folder, by a builder that copies the library that is there."""
    if NO_COMPILER:
        pytest.skip("no C++ compiler on this machine")
    ready = Path(native_library.open_library()._name)  # type: ignore[union-attr]
    found: list[str] = []

    def load(*, name: str, build_directory: str, **_: Any) -> None:
        folder = Path(build_directory)
        assert not (folder / "lock").exists(), "torch would wait for it for ever"
        shutil.copy(ready, folder / f"{name}.so")
        found.append(name)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "load", load)
    return found


def test_it_is_built_once(builds: list[str]) -> None:
    native_library._build()
    native_library._build()
    assert len(builds) == 1


def test_a_killed_build_is_neither_waited_for_nor_loaded(builds: list[str], tmp_path: Path) -> None:
    name = f"hrm_kernels_{native_library._machine()}_{native_library._contents()}"
    left = tmp_path / name
    left.mkdir()
    (left / "lock").touch()
    (left / f"{name}.so").write_bytes(b"half a library")
    native_library._build()
    assert builds == [name]


def test_other_sources_are_another_library(builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_library._build()
    other = tmp_path / "native"
    shutil.copytree(native_library.FOLDER, other)
    (other / "vector.h").write_text((other / "vector.h").read_text() + "// changed\n")
    monkeypatch.setattr(native_library, "FOLDER", other)
    native_library._build()
    assert len(set(builds)) == 2
