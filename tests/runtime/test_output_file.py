"""Results of a job: what is there stays, what is half is cut off, who comes second waits outside."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from hrm.errors import InputError
from runtime.jobs.output_file import Done, Result, open_output


def result(name: str | int, *tokens: int) -> Result:
    return Result(id=name, token_ids=tokens, text="é\n", finish_reason="stop", prompt_tokens=3)


WHOLE = (
    b'{"id": "a", "token_ids": [1, 2], "text": "\xc3\xa9\\n", "finish_reason": "stop", '
    b'"prompt_tokens": 3, "generated_tokens": 2}\n'
)


def test_a_result_is_one_line(tmp_path: Path) -> None:
    with open_output(tmp_path / "out") as file:
        file.add([result("a", 1, 2)])
        assert (tmp_path / "out").read_bytes() == WHOLE


def test_a_text_never_breaks_its_line_for_any_reader(tmp_path: Path) -> None:
    text = "a\x85b\u2028c\u2029d\r\ne\x0bf\x1cg"
    with open_output(tmp_path / "out") as file:
        file.add([Result(id=1, token_ids=(1,), text=text, finish_reason="stop", prompt_tokens=1)])
    (line,) = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["text"] == text


def test_opened_again_it_says_what_is_done_and_goes_on(tmp_path: Path) -> None:
    with open_output(tmp_path / "out") as file:
        assert file.finished == {}
        file.add([result("a", 1, 2), result(7, 5)])
    with open_output(tmp_path / "out") as file:
        assert file.finished == {"a": Done(3, 2, "stop"), 7: Done(3, 1, "stop")}
        file.add([result("7", 6)])
    assert [json.loads(line)["id"] for line in (tmp_path / "out").read_text().splitlines()] == ["a", 7, "7"]


@pytest.mark.parametrize("kept", range(len(WHOLE)))
def test_half_a_line_is_cut_off_wherever_it_ends(kept: int, tmp_path: Path) -> None:
    second = WHOLE.replace(b'"a"', b'"b"')
    (tmp_path / "out").write_bytes(WHOLE + second[:kept])
    with open_output(tmp_path / "out") as file:
        assert (file.finished, file.cut) == ({"a": Done(3, 2, "stop")}, kept)
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_zeros_that_a_power_cut_left_are_cut_off(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(WHOLE + WHOLE[:20] + bytes(100))
    with open_output(tmp_path / "out") as file:
        assert file.cut == 120
    assert (tmp_path / "out").read_bytes() == WHOLE


@pytest.mark.parametrize(
    "held", [b"hello", b"hello\n", b"[1, 2]\n", b'{"id": "a", "prompt": "x"}\n', b"\xff\xfe\n", WHOLE + b"x\n" + WHOLE]
)
def test_a_file_that_holds_something_else_is_left_alone(held: bytes, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(held)
    with pytest.raises(InputError, match="is not the result of a job"):
        open_output(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == held


def test_an_id_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(WHOLE + WHOLE)
    with pytest.raises(InputError, match="line 2 has the id 'a' once more"):
        open_output(tmp_path / "out")


def test_a_second_run_is_refused_and_a_later_one_is_not(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from runtime.jobs.output_file import open_output; open_output(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    with open_output(tmp_path / "out"):
        with pytest.raises(InputError, match="another run is writing to it"):
            open_output(tmp_path / "out")
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert other.returncode == 1 and "another run is writing to it" in other.stderr
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize("room", [0, 10, len(WHOLE), len(WHOLE) + 1, 3 * len(WHOLE) - 1])
def test_a_file_that_cannot_grow_keeps_its_whole_lines(room: int, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_output(tmp_path / "out") as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(
                InputError, match=r"cannot be written any more: File too large; it has .* results, whole"
            ):
                file.add(result(name, 1, 2) for name in "abc")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    whole = room // len(WHOLE)
    assert (tmp_path / "out").read_bytes() == b"".join(WHOLE.replace(b'"a"', b'"%c"' % name) for name in b"abc"[:whole])
    with open_output(tmp_path / "out") as file:
        assert list(file.finished) == list("abc"[:whole])


def test_a_disk_that_fails_at_the_last_moment_loses_nothing_before(tmp_path: Path) -> None:
    with open_output(tmp_path / "out") as file:
        file.add([result("a", 1, 2)])
        with (
            mock.patch("os.write", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
            pytest.raises(InputError, match="No space left on device; it has 1 results, whole"),
        ):
            file.add([result("b", 1)])
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_a_folder_and_a_file_in_none_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "out"):
        with pytest.raises(InputError, match=r"--output: .*: cannot be written"):
            open_output(path)


def test_a_file_that_is_moved_away_is_not_written_to_for_long(tmp_path: Path) -> None:
    with open_output(tmp_path / "out") as file:
        file.add([result("a", 1)])
        (tmp_path / "out").rename(tmp_path / "moved")
        with pytest.raises(InputError, match="was moved or removed; all 2 results are in the file that had the name"):
            file.add([result("b", 2)])
    with open_output(tmp_path / "moved") as file:
        assert list(file.finished) == ["a", "b"]


def test_a_file_that_vanishes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run made it, had nothing to write, and removed it."""
    (tmp_path / "out").touch()
    lock, calls = fcntl.flock, []

    def lock_late(handle: int, how: int) -> None:
        if not calls:
            (tmp_path / "out").unlink()
        calls.append(handle)
        lock(handle, how)

    monkeypatch.setattr("fcntl.flock", lock_late)
    with open_output(tmp_path / "out") as file:
        file.add([result("a", 1, 2)])
    assert (tmp_path / "out").read_bytes() == WHOLE and len(calls) == 2
