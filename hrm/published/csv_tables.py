"""Tables of measurements as CSV: columns checked by name, cells by kind, errors with file, line, column and value."""

from __future__ import annotations

import csv
import difflib
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hrm.errors import InputError

__all__ = [
    "Cells",
    "read_count",
    "read_flag",
    "read_length",
    "read_percent",
    "read_positive",
    "read_table",
    "read_text",
]

MAX_FILE_BYTES = 16 * 2**20
"""A larger file is not a table of measurements [byte]."""

Value = TypeVar("Value")


# One cell: a text or a number, else a ValueError whose text is what would be accepted.


def read_text(cell: str) -> str:
    """Any text."""
    return cell


def _number(cell: str, accepted: str) -> float:
    try:
        value = float(cell) if "_" not in cell else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(accepted)
    return value


def read_count(cell: str) -> int:
    """A whole number from 1 on."""
    accepted = "a whole number from 1 on"
    value = _number(cell, accepted)
    if value < 1 or value != int(value):
        raise ValueError(accepted)
    return int(value)


def read_length(cell: str) -> float:
    """A number from 1 on [tokens]."""
    accepted = "a number of tokens from 1 on"
    value = _number(cell, accepted)
    if value < 1:
        raise ValueError(accepted)
    return value


def read_positive(cell: str) -> float:
    """A number above 0."""
    accepted = "a number above 0"
    value = _number(cell, accepted)
    if value <= 0:
        raise ValueError(accepted)
    return value


def read_percent(cell: str) -> float:
    """Per cent, 0 to 100."""
    accepted = "per cent, 0 to 100"
    value = _number(cell, accepted)
    if not 0 <= value <= 100:
        raise ValueError(accepted)
    return value


def read_flag(cell: str) -> bool:
    """1 or 0."""
    known = {"1": True, "0": False, "true": True, "false": False}
    if cell.lower() not in known:
        raise ValueError("1 or 0")
    return known[cell.lower()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """One line of a table: its cells by column, and where it stands."""

    name: str
    line: int
    cells: Mapping[str, str]

    def error(self, column: str, fact: str, way_out: str) -> InputError:
        """What is wrong with a cell, with file, line and column."""
        return InputError(fact, where=f"{self.name}: line {self.line}, {column}", way_out=way_out)

    def need(self, column: str, parse: Callable[[str], Value]) -> Value:
        """The value of a column that may not be blank."""
        value = self.have(column, parse)
        if value is None:
            raise self.error(column, "is blank", "every row needs it")
        return value

    def have(self, column: str, parse: Callable[[str], Value]) -> Value | None:
        """The value of a column, None where it is blank or missing."""
        cell = self.cells.get(column, "")
        if not cell:
            return None
        try:
            return parse(cell)
        except ValueError as problem:
            raise self.error(column, f"{cell!r:.60} is not accepted", str(problem)) from None


def read_table(path: str | Path, needed: tuple[str, ...], optional: tuple[str, ...]) -> Iterator[Cells]:
    """Rows of a CSV file with a header, below which blank lines and lines that start with ``#`` are ignored.

    Parameters
    ----------
    path : str or Path
    needed, optional : tuple of str
        Columns that must be there, and those that may be missing. Others are ignored, unless they look like a missing
        one misspelt.

    Raises
    ------
    InputError
        The file cannot be read, has no such columns, no rows, or a row with more or fewer cells than the header.
    """
    name = str(path)
    reader = csv.reader(io.StringIO(_load(path, name)), strict=True)
    header: list[str] | None = None
    rows = 0
    try:
        for record in reader:
            cells = [cell.strip() for cell in record]
            if not any(cells) or cells[0].startswith("#"):
                continue
            if header is None:
                header = cells
                _check_header(name, header, needed, optional)
                continue
            if len(cells) != len(header):
                raise InputError(
                    f"has {len(cells)} cells",
                    where=f"{name}: line {reader.line_num}",
                    way_out=f"{len(header)}, as the header",
                )
            rows += 1
            yield Cells(name=name, line=reader.line_num, cells=dict(zip(header, cells, strict=True)))
    except csv.Error as problem:
        raise InputError(f"is not CSV: {problem}", where=f"{name}: line {reader.line_num}") from None
    if rows == 0:
        raise InputError("holds no rows", where=name, way_out=f"a header with {', '.join(needed)}, and rows below it")


def _check_header(name: str, header: list[str], needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """A column may be missing or extra, but not misspelt: that would drop it silently."""
    for column in (each for each in header if each and header.count(each) > 1):
        raise InputError(f"has the column {column!r} twice", where=f"{name}: header")
    absent = [column for column in (*needed, *optional) if column not in header]
    for column in (each for each in header if each not in needed and each not in optional):
        near = difflib.get_close_matches(column, absent, n=1, cutoff=0.75)
        if near:
            raise InputError(f"has no column {near[0]!r} but {column!r}", where=f"{name}: header", way_out=near[0])
    for column in (each for each in needed if each in absent):
        raise InputError(f"has no column {column!r}", where=f"{name}: header", way_out=", ".join(needed))


def _load(path: str | Path, name: str) -> str:
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read: {reason}", where=name, way_out="a CSV file of measurements") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"is larger than {MAX_FILE_BYTES // 2**20} MiB", where=name)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"is not text in UTF-8: byte {error.start}", where=name) from None
