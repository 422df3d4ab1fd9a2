"""The files of a validation: what was to be measured, what was predicted, and the spans of every run.

    setup.json             plan, machine, versions, command, options
    predictions.json       candidates and what every predictor says of them
    predictions.sha256     its hash; every run made after it carries it too
    runs/aa-00.json.gz     the plan, measured before anything was predicted: noise
    runs/000-NAME.json.gz  every other run, in the order they ran

Everything a report says is computed from these.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hrm.errors import InputError
from hrm.graph import Lane, TaskId
from hrm.schedules import Steps
from hrm.trace import Span, Trace
from hrm.trace_names import parse_lane, parse_task
from hrm.validation.forecasts import file_hash

__all__ = [
    "HASH_FILE",
    "PLANS",
    "PREDICTIONS_FILE",
    "SETUP_FILE",
    "RawPiece",
    "Records",
    "holds_records",
    "piece_document",
    "read_json",
    "read_records",
    "remove_records",
    "write_json",
    "write_run",
]

FORMAT = 1
SETUP_FILE, PREDICTIONS_FILE, HASH_FILE, RUNS = "setup.json", "predictions.json", "predictions.sha256", "runs"
WAY_OUT = "a folder that hrm validate wrote"
KINDS = {"run": "hrm validate run", "memory": "hrm validate memory"}
"""By kind, as ``setup.json`` has it: the command that wrote the folder."""

PLANS = "plans"
"""Folder of the plans of `hrm validate memory`, in that of its records."""

NANO = 1e-9


@dataclass(frozen=True, slots=True)
class RawPiece:
    """One graph of a run, as it was written: the passes it covers and its trace."""

    steps: Steps
    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Everything in a folder.

    Attributes
    ----------
    folder : Path
    setup, predictions : mapping
    predictions_hash : str
        SHA-256 that was noted when the predictions were written.
    first, runs : tuple of mapping
        Runs of the plan before anything was predicted, and all others, in the order they ran.
    """

    folder: Path
    setup: Mapping[str, Any]
    predictions: Mapping[str, Any]
    predictions_hash: str
    first: tuple[Mapping[str, Any], ...]
    runs: tuple[Mapping[str, Any], ...]


def piece_document(steps: Steps, spans: Sequence[Span], kind: str) -> dict[str, Any]:
    """One graph of a run in columns, to a nanosecond."""
    lanes: dict[Lane, int] = {}
    for span in spans:
        lanes.setdefault(span.lane, len(lanes))
    return {
        "steps": {"prefill": steps.prefill, "first": steps.first, "last": steps.last},
        "kind": kind,
        "lanes": [str(lane) for lane in lanes],
        "task": [str(span.task) for span in spans],
        "lane": [lanes[span.lane] for span in spans],
        "start_ns": [round(span.start_s / NANO) for span in spans],
        "end_ns": [round(span.end_s / NANO) for span in spans],
    }


@lru_cache(maxsize=2**18)
def _task(name: str) -> TaskId:
    return parse_task(name)


def pieces_of(run: Mapping[str, Any]) -> list[RawPiece]:
    """The graphs of a run.

    Raises
    ------
    InputError
        A task or lane has no known name.
    """
    found = []
    for piece in run["pieces"]:
        lanes = [parse_lane(name) for name in piece["lanes"]]
        columns = zip(piece["task"], piece["lane"], piece["start_ns"], piece["end_ns"], strict=True)
        spans = tuple(Span(_task(name), lanes[lane], start * NANO, end * NANO) for name, lane, start, end in columns)
        found.append(RawPiece(Steps(**piece["steps"]), Trace(spans, piece["kind"])))
    return found


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document, indented.

    Raises
    ------
    InputError
        It cannot be written.
    """
    try:
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None


def write_run(folder: Path, name: str, document: Mapping[str, Any]) -> None:
    """Write one run, compressed; the same run gives the same bytes.

    Raises
    ------
    InputError
        It cannot be written.
    """
    path = folder / RUNS / f"{re.sub('[^A-Za-z0-9_.-]+', '-', name)}.json.gz"
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text, mtime=0))
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, compressed or not.

    Raises
    ------
    InputError
        It is none, or cannot be read.
    """
    try:
        data = path.read_bytes()
        found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path), way_out=WAY_OUT) from None
    except (ValueError, EOFError, RecursionError, zlib.error):
        raise InputError("is not the JSON it should be", where=str(path), way_out=WAY_OUT) from None
    if not isinstance(found, dict):
        raise InputError("is not the JSON it should be", where=str(path), way_out=WAY_OUT)
    return found


def holds_records(folder: Path) -> bool:
    """Whether a validation wrote the setup that is in a folder: other programs have a setup.json too."""
    path = folder / SETUP_FILE
    try:
        found = read_json(path) if path.is_file() else {}
    except InputError:
        return False
    ours = "plan" in found or found.get("kind") == "memory"
    return ours and {"format", "layers_of_model"} <= found.keys()


def remove_records(folder: Path) -> None:
    """Remove what a validation wrote; whatever else lies in its folder stays.

    Raises
    ------
    InputError
        A file cannot be removed.
    """
    try:
        for name in (SETUP_FILE, PREDICTIONS_FILE, HASH_FILE):
            (folder / name).unlink(missing_ok=True)
        for path in [*(folder / RUNS).glob("*.json.gz"), *(folder / PLANS).glob("*-MiB.json")]:
            path.unlink()
    except OSError as error:
        raise InputError(f"cannot be removed: {error.strerror or error}", where=str(error.filename or folder)) from None


def read_records(folder: Path, kind: Literal["run", "memory"] = "run") -> Records:
    """Read a folder of a validation, and check that its predictions are those that were hashed.

    Parameters
    ----------
    folder : Path
    kind : {"run", "memory"}
        Which command wrote it.

    Raises
    ------
    InputError
        A file is missing or no such file, or another command wrote it, or the predictions are not those that the runs
        were made after.
    """
    if not folder.is_dir():
        raise InputError("no such folder", where=str(folder), way_out=WAY_OUT)
    setup = read_json(folder / SETUP_FILE)
    if setup.get("format") != FORMAT:
        raise InputError(f"format is {setup.get('format')!r:.40}", where=str(folder / SETUP_FILE), way_out=WAY_OUT)
    found = setup.get("kind", "run")
    if found != kind:
        words = KINDS.get(found, "something else")
        raise InputError(f"was written by {words}", where=str(folder), way_out=f"a folder that {KINDS[kind]} wrote")
    files = sorted((folder / RUNS).glob("*.json.gz"))
    first = _ordered(read_json(path) for path in files if path.name.startswith("aa-"))
    runs = _ordered(read_json(path) for path in files if not path.name.startswith("aa-"))
    noted = _noted_hash(folder)
    if not runs:
        raise InputError("holds no measured run", where=str(folder), way_out=WAY_OUT)
    if any(run["predictions_sha256"] != noted for run in runs):
        raise InputError("a run was made after other predictions", where=str(folder / RUNS), way_out=WAY_OUT)
    return Records(
        folder=folder,
        setup=setup,
        predictions=read_json(folder / PREDICTIONS_FILE),
        predictions_hash=noted,
        first=first,
        runs=runs,
    )


def _ordered(runs: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    return tuple(sorted(runs, key=lambda run: run["order"]))


def _noted_hash(folder: Path) -> str:
    path = folder / HASH_FILE
    try:
        noted = path.read_text(encoding="utf-8").split()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path), way_out=WAY_OUT) from None
    if not noted or file_hash(folder / PREDICTIONS_FILE) != noted[0]:
        raise InputError(
            "the predictions are not those that were hashed before anything was measured",
            where=str(folder / PREDICTIONS_FILE),
            way_out="the file as it was written",
        )
    return noted[0]
