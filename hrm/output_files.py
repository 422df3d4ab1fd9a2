"""Files that are written when everything else is done: whether they could be is found out before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hrm.errors import InputError

__all__ = ["check_file", "check_folder"]


def check_file(path: Path, where: str) -> None:
    """Refuse a file that could not be written; one that is there keeps what it holds.

    Parameters
    ----------
    path : Path
    where : str
        What a message calls it, e.g. ``"--output: tokens.jsonl"``.

    Raises
    ------
    InputError
        It is a folder or in none, or the system does not open it for writing.
    """
    if not path.absolute().parent.is_dir():
        raise InputError("its folder does not exist", where=where)
    if path.is_dir():
        raise InputError("is a folder", where=where, way_out="the name of a file")
    there = path.exists()
    if there and not path.is_file():
        return  # a pipe would wait for its reader, and what is read from a device may notice
    try:
        path.open("ab").close()
        if not there:
            path.resolve().unlink()  # what a link points to, not the link
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=where) from None


def check_folder(folder: Path, names: Sequence[str], where: str) -> None:
    """Refuse a folder that could not be made, or where files of these names could not be written; leaves no trace.

    Parameters
    ----------
    folder : Path
        With its parents, where they are missing.
    names : sequence of str
    where : str
        As in `check_file`.

    Raises
    ------
    InputError
        It is a file, or the system does not let it be made or written to.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError("is no folder", where=where, way_out="the name of a folder")
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            check_file(folder / name, f"{where}: {name}")
    except OSError as error:
        raise InputError(f"cannot be made: {error.strerror or error}", where=where) from None
    finally:
        for each in made:
            if each.is_dir():
                each.rmdir()
