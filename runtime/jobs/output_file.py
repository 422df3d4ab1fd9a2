"""Results of a job: a line of JSON per finished request, on the disk before the next batch goes on.

The file is the only memory of a job: started again, it says which requests are done. A line counts once its newline is
there; half a line, from a process that was killed or a disk that was full, is cut off. One process has the file at a
time, by a lock that the system takes back when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hrm.errors import InputError

__all__ = ["Done", "OutputFile", "Result", "open_output", "sync_folder"]

BEGINNING = b'{"id": '
"""Of every line."""

TRIES = 3
"""To open a file that another run removes: where numbers of files change, as on some network disks, it never is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished request, as its line has it."""

    id: str | int
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    prompt_tokens: int

    def to_line(self) -> bytes:
        """The line, its newline included."""
        document = {
            "id": self.id,
            "token_ids": list(self.token_ids),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": len(self.token_ids),
        }
        text = json.dumps(document, ensure_ascii=False)
        for separator in "\x85\u2028\u2029":  # ends of lines to some readers, none in JSON
            text = text.replace(separator, f"\\u{ord(separator):04x}")
        return text.encode("utf-8", "replace") + b"\n"


class Done(NamedTuple):
    """What the line of a finished request says of it: token counts, and why it ended."""

    prompt_tokens: int
    generated_tokens: int
    finish_reason: str


class OutputFile:
    """The results of a job, open and locked. Made by `open_output`.

    Attributes
    ----------
    finished : dict of id to Done
        Requests that have their line.
    cut : int
        Bytes of half a line that were cut off [byte].
    """

    def __init__(
        self, path: Path, handle: int, finished: dict[str | int, Done], size: int, cut: int, *, new: bool
    ) -> None:
        self.path, self.finished, self.cut = path, finished, cut
        self._handle, self._size, self._new = handle, size, new

    def add(self, results: Iterable[Result]) -> None:
        """Write lines, and return when the disk has them.

        Raises
        ------
        InputError
            The disk is full, or the like: every line that is whole stays, the rest of a line is cut off.
        """
        try:
            for result in results:
                line = result.to_line()
                written = 0
                while written < len(line):
                    written += os.write(self._handle, line[written:])
                self._size += len(line)
                self.finished[result.id] = Done(result.prompt_tokens, len(result.token_ids), result.finish_reason)
            os.fsync(self._handle)
        except OSError as error:
            self._cut_off()
            raise InputError(
                f"cannot be written any more: {error.strerror or error}; it has {len(self.finished):,} results, whole",
                where=f"--output: {self.path}",
                way_out="make room and start the same command again: it goes on from there",
            ) from None
        if _is_gone(self.path):
            raise InputError(
                f"was moved or removed; all {len(self.finished):,} results are in the file that had the name",
                where=f"--output: {self.path}",
                way_out="put it back and start the same command again",
            )

    def _cut_off(self) -> None:
        try:
            os.ftruncate(self._handle, self._size)
            os.fsync(self._handle)
        except OSError:  # the next start cuts it off
            return

    def drop_if_new(self) -> None:
        """Remove a file that was made for this run and got no result."""
        if self._new and self._size == 0:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file and of its lock."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_output(path: Path) -> OutputFile:
    """Open the results of a job, new or to be gone on with.

    Raises
    ------
    InputError
        It cannot be written, another run has it, or what it holds are not the results of a job.
    """
    where = f"--output: {path}"
    there = path.exists()
    handle = _open_locked(path, where)
    for _ in range(TRIES):
        if _is_at(path, handle):
            break
        os.close(handle)  # another run had made it, and removed it again between opening and locking
        there, handle = False, _open_locked(path, where)
    try:
        finished, size, cut = _read(path, handle, where)
        if cut:
            os.ftruncate(handle, size)
        if cut or not there:
            os.fsync(handle)
            sync_folder(path)
    except OSError as error:
        os.close(handle)
        raise InputError(f"cannot be read: {error.strerror or error}", where=where) from None
    except BaseException:
        os.close(handle)
        raise
    return OutputFile(path, handle, finished, size, cut, new=not there)


def _open_locked(path: Path, where: str) -> int:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=where) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        way_out = "wait for it, or another file"
        raise InputError("another run is writing to it", where=where, way_out=way_out) from None
    except OSError:  # a file system without locks, e.g. some network ones: better none than no run
        pass
    return handle


def _is_at(path: Path, handle: int) -> bool:
    """Whether an open file is the one of this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except OSError:
        return False


def _is_gone(path: Path) -> bool:
    """Whether there is no such file; one that only has another number by now is there, as on some network disks."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _read(path: Path, handle: int, where: str) -> tuple[dict[str | int, Done], int, int]:
    """Ids that are done, bytes of whole lines, bytes after them."""
    finished: dict[str | int, Done] = {}
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                torn = line.rstrip(b"\0")  # after a power cut a file may end in zeros
                if not (torn.startswith(BEGINNING) or BEGINNING.startswith(torn)):
                    raise _foreign(where, number)
                return finished, size, len(line)
            name, done = _parse(line, where, number)
            if name in finished:
                raise InputError(
                    f"line {number} has the id {name!r:.60} once more", where=where, way_out="another file"
                )
            finished[name] = done
            size += len(line)
    return finished, size, 0


def _parse(line: bytes, where: str, number: int) -> tuple[str | int, Done]:
    try:
        value: Any = json.loads(line)
        name, tokens = value["id"], value["token_ids"]
        done = Done(value["prompt_tokens"], len(tokens), value["finish_reason"])
        sound = isinstance(name, str | int) and isinstance(tokens, list) and isinstance(done.prompt_tokens, int)
    except (ValueError, RecursionError, TypeError, KeyError):
        sound = False
    if not sound:
        raise _foreign(where, number)
    return name, done


def _foreign(where: str, number: int) -> InputError:
    return InputError(
        f"line {number} is not the result of a job, and nothing is written to such a file",
        where=where,
        way_out="the name of a new file",
    )


def sync_folder(path: Path) -> None:
    """A new name is safe once its folder is."""
    try:
        folder = os.open(path.absolute().parent, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(folder)
    except OSError:
        return
    finally:
        os.close(folder)
