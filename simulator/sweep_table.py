"""The table of a sweep on disk: one CSV line per point and schedule, written as points finish, read again to go on.

The first line holds a fingerprint of everything the rows follow from; a file of other inputs is refused. A line that a
crash tore off is dropped with its point, and what is left is computed again.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

from hrm import __version__
from hrm.errors import InputError
from hrm.profile_files import profile_document
from simulator.sweep_points import Study, profile_keys
from simulator.sweep_rows import Row
from simulator.sweep_values import SECTIONS, Point

__all__ = ["COLUMNS", "SweepTable", "fingerprint_of", "table_columns"]

ColumnKind = Literal["text", "whole", "number"]

COLUMNS: Final[Mapping[str, ColumnKind]] = {
    "schedule": "text",
    "predicted_tokens_per_s": "number",
    "simulated_tokens_per_s": "number",
    "bound_tokens_per_s": "number",
    "bottleneck": "text",
    "bound_bottleneck": "text",
    "limits": "text",
    "bound_limits": "text",
    "ran": "text",
    "batch_size": "whole",
    "micro_batch_size": "whole",
    "num_micro_batches": "whole",
    "attention_on_gpu": "whole",
    "ffn_on_gpu": "whole",
    "weights_on_gpu": "number",
    "weights_on_cpu": "number",
    "weights_on_disk": "number",
    "kv_on_gpu": "number",
    "kv_on_cpu": "number",
    "kv_on_disk": "number",
    "gpu_peak_bytes": "number",
    "cpu_peak_bytes": "number",
    "cpu_limit_bytes": "number",
    "batch_seconds": "number",
    "reason": "text",
}
"""Columns after those that are varied; empty where a point does not fit."""

_HEAD: Final = "# hrm sweep 1, inputs "


def table_columns(study: Study) -> dict[str, ColumnKind]:
    """All columns: what is varied, the profile values that follow, and `COLUMNS`."""
    columns: dict[str, ColumnKind] = {}
    for axis in study.axes:
        columns[axis.name] = "text" if not axis.numeric else "whole" if axis.kind == "count" else "number"
    for axis in study.axes:
        if axis.times or len(axis.keys) > 1 or axis.keys[0] in SECTIONS:
            for profile in study.profiles.values():
                columns |= dict.fromkeys(profile_keys(axis, profile), "number")
    return columns | dict(COLUMNS)


def fingerprint_of(study: Study) -> str:
    """Hash of all that the rows follow from: axes, machines, models, workload, pins, schedules, this version."""
    document = {
        "version": __version__,
        "study": {
            field.name: _plain(getattr(study, field.name))
            for field in fields(study)
            if field.name not in ("profiles", "configs")
        },
        "profiles": {name: profile_document(profile) for name, profile in study.profiles.items()},
        "configs": {name: config["values"] for name, config in study.configs.items()},
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


class SweepTable:
    """A CSV file that is being filled.

    Use as a context manager. `rows` holds what an earlier run left there, complete points only; `dropped` how many
    lines were torn or of unfinished points.
    """

    def __init__(self, path: Path, study: Study, *, overwrite: bool = False) -> None:
        self.path = path
        self.columns = table_columns(study)
        self.head = f"{_HEAD}{fingerprint_of(study)}"
        self.axes = [axis.name for axis in study.axes]
        self.schedules = study.schedules
        self.rows: dict[Point, list[Row]] = {}
        self.dropped = 0
        self._overwrite = overwrite
        self._file: IO[str] | None = None

    def __enter__(self) -> SweepTable:
        """Read what is there and leave the file open for more.

        Raises
        ------
        InputError
            The file cannot be opened, belongs to other inputs, or is being written by another sweep.
        """
        try:
            self._file = self.path.open("a+", encoding="utf-8", newline="", errors="replace")
        except OSError as error:
            raise self._refusal(f"cannot be opened: {error.strerror or error}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise self._refusal("another sweep is writing it", "wait, or another file") from None
        except OSError:
            pass  # a file system without locks
        try:
            self._read()
        except InputError:
            self._file.close()
            raise
        self._start_again()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _refusal(self, fact: str, way_out: str = "") -> InputError:
        return InputError(fact, where=f"--output: {self.path}", way_out=way_out)

    def _read(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        lines = self._file.read().split("\n")
        if self._overwrite or lines == [""]:
            return
        torn = lines.pop()  # empty where the last line is whole
        if not lines and self.head.startswith(torn):
            return
        if not lines or not lines[0].startswith(_HEAD):
            raise self._refusal("is not the table of a sweep", "another file, or --overwrite")
        if lines[0] != self.head:
            raise self._refusal("holds a sweep of other inputs or another version", "another file, or --overwrite")
        self.dropped = 1 if torn else 0
        for line in lines[2:]:
            row = self._parse(line)
            if row is None:
                self.dropped += 1
                continue
            self.rows.setdefault(tuple(row[name] for name in self.axes), []).append(row)
        for point, rows in list(self.rows.items()):
            if [row["schedule"] for row in rows] != list(self.schedules):
                self.dropped += len(rows)
                del self.rows[point]

    def _parse(self, line: str) -> Row | None:
        """One line as a row, or None where it is not whole."""
        try:
            cells = next(csv.reader([line], strict=True))
            if len(cells) != len(self.columns):
                return None
            return {
                name: None if cell == "" and kind != "text" else _READ[kind](cell)
                for (name, kind), cell in zip(self.columns.items(), cells, strict=True)
            }
        except (ValueError, csv.Error, StopIteration):
            return None

    def _start_again(self) -> None:
        """Write the head and the rows that were kept."""
        assert self._file is not None
        kept = [row for rows in self.rows.values() for row in rows]
        text = self._text(kept)
        try:
            self._file.seek(0)
            if self._file.read() != text:
                self._replace(text)
        except OSError as error:
            raise self._refusal(f"cannot be written: {error.strerror or error}") from None

    def _text(self, rows: Iterable[Row]) -> str:
        return f"{self.head}\n{_csv_line(self.columns)}" + "".join(self._line(row) for row in rows)

    def _line(self, row: Row) -> str:
        return _csv_line([_cell(row.get(name)) for name in self.columns])

    def _replace(self, text: str) -> None:
        """The whole file anew, at no moment half of it; the lock is taken along."""
        beside = self.path.with_name(f".{self.path.name}.new")
        file = beside.open("w+", encoding="utf-8", newline="")
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(beside, self.path)
        assert self._file is not None
        self._file.close()
        self._file = file

    def append(self, rows: Sequence[Row]) -> None:
        """Write the rows of one point, now.

        Raises
        ------
        InputError
            The disk is full, or the like.
        """
        assert self._file is not None
        try:
            self._file.seek(0, os.SEEK_END)
            self._file.write("".join(self._line(row) for row in rows))
            self._file.flush()
        except OSError as error:
            raise self._refusal(f"cannot be written: {error.strerror or error}") from None

    def finish(self, rows: Iterable[Row]) -> None:
        """Put all rows in the order of the points, whatever the order in which they came."""
        try:
            self._replace(self._text(rows))
        except OSError as error:
            raise self._refusal(f"cannot be written: {error.strerror or error}") from None


_READ: Final[Mapping[ColumnKind, Any]] = {"text": str, "whole": int, "number": float}


def _cell(value: Any) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _csv_line(cells: Iterable[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()
