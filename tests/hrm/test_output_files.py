"""Files that could not be written are refused beforehand, and nothing is left behind or lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hrm.errors import InputError
from hrm.output_files import check_file, check_folder


def test_a_file_that_is_there_keeps_what_it_holds_and_a_new_one_is_not_made(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("before")
    check_file(kept, "--output")
    check_file(tmp_path / "new", "--output")
    assert kept.read_text() == "before" and list(tmp_path.iterdir()) == [kept]


def test_a_link_to_a_file_that_is_not_there_yet_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "new")
    check_file(tmp_path / "link", "--output")
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("path", "said"),
    [("/proc/x.jsonl", "cannot be written: "), ("/proc", "is a folder"), ("/nowhere/x", "its folder does not exist")],
)
def test_a_file_that_cannot_be_written_is_refused_with_its_option(path: str, said: str) -> None:
    with pytest.raises(InputError) as raised:
        check_file(Path(path), f"--output: {path}")
    assert str(raised.value).startswith(f"--output: {path}: {said}")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_file(tmp_path / "pipe", "--output")
    check_file(Path("/dev/null"), "--output")


def test_a_folder_is_made_for_the_check_only(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b", ["x.json"], "--trace")
    assert list(tmp_path.iterdir()) == []
    there = tmp_path / "there"
    there.mkdir()
    (there / "x.json").write_text("before")
    check_folder(there, ["x.json", "y.json"], "--trace")
    assert [path.name for path in there.iterdir()] == ["x.json"] and (there / "x.json").read_text() == "before"


def test_a_folder_that_cannot_be_made_or_written_to_is_refused_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "x.json").mkdir()
    for folder, said in (
        (Path("/proc/xx"), "cannot be made: "),
        (tmp_path / "file", "is no folder"),
        (tmp_path / "file" / "below", "cannot be made: "),
        (tmp_path, "x.json: is a folder"),
        (Path("/proc"), "x.json: cannot be written: "),
    ):
        with pytest.raises(InputError) as raised:
            check_folder(folder, ["x.json"], f"--trace: {folder}")
        assert str(raised.value).startswith(f"--trace: {folder}: {said}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "x.json"]
