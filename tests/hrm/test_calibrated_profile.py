"""Where the profile of a machine is kept, and that `--hw auto` is that one."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import refused, run

from hrm.calibrated_profile import calibrated_path
from hrm.profile_files import dump_profile, load_profile, with_overrides


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def test_without_a_calibration_auto_says_how_to_make_one(data: Path) -> None:
    said = refused("plan", "--hw", "auto", "--model", "olmoe")
    assert "this machine has not been calibrated" in said
    assert "hrm calibrate" in said


def test_auto_is_the_profile_that_is_kept(data: Path) -> None:
    path = calibrated_path()
    assert path.is_relative_to(data)
    path.parent.mkdir(parents=True)
    path.write_text(dump_profile(with_overrides(load_profile("t4"), {"cpu.memory": "77 GiB"})))
    assert load_profile("auto").cpu.memory_bytes == 77 * 2**30
    assert run("hardware", "show", "auto", "--json").document["cpu"]["memory"]["value"] == "77 GiB"


def test_machines_with_other_gpus_have_other_files() -> None:
    paths = {calibrated_path(Path("/data"), gpus) for gpus in ([], ["Tesla T4"], ["Tesla T4", "Tesla T4"])}
    assert len(paths) == 3
    assert calibrated_path(Path("/data"), ["Tesla T4"]) in paths


def test_a_relative_xdg_folder_is_ignored_as_its_specification_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "here")
    assert calibrated_path().is_relative_to(Path.home() / ".local" / "share")
