"""A sweep: every point of a grid solved on all cores, kept as it goes, and put together in one document."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from hrm.errors import InputError
from hrm.profile_schema import FIELDS
from hrm.terminal import say
from simulator.sweep_points import Study, profile_keys, scenario_at
from simulator.sweep_rows import Row
from simulator.sweep_table import SweepTable, table_columns
from simulator.sweep_values import Axis, Point, grid_points
from simulator.sweep_workers import available_cores, solve_points

__all__ = ["ENOUGH", "first_reaching", "run_sweep", "sweep_document"]

ENOUGH: Final = 0.95
"""Share of the bound that counts as reaching it."""


def run_sweep(
    study: Study,
    *,
    output: Path | None = None,
    overwrite: bool = False,
    jobs: int | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Solve every point.

    Parameters
    ----------
    study : Study
    output : Path, optional
        CSV file: rows are written there as they are found, and a sweep of the same inputs goes on from it.
    overwrite : bool
        Start anew whatever the file holds.
    jobs : int, optional
        Processes; by default one per core.
    show_progress : bool
        A bar on standard error, where that is a terminal.

    Returns
    -------
    dict
        `rows`, `varied`, `first_at_95_percent`, `first_at_95_percent_predicted`, `inputs`, `notes`, `seconds`.

    Raises
    ------
    InputError
        No point makes sense, or the file is not one of this sweep.
    KeyboardInterrupt
        What is finished stays in the file.
    """
    started = time.perf_counter()
    points = grid_points(study.axes)
    _check_some_point(study, points)
    table = nullcontext() if output is None else SweepTable(output, study, overwrite=overwrite)
    with table as opened:
        done: dict[Point, list[Row]] = dict(opened.rows) if opened is not None else {}
        if opened is not None and opened.dropped:
            say(f"{output}: {opened.dropped} unfinished or torn lines dropped")
        if done:
            say(f"{output}: {len(done)} of {len(points)} points are there already")
        pending = [point for point in points if point not in done]
        try:
            with _bar(len(points), len(done), show_progress) as advance:
                for point, rows in solve_points(study, pending, jobs or available_cores()):
                    if opened is not None:
                        opened.append(rows)
                    done[point] = rows
                    advance()
        except KeyboardInterrupt:
            if opened is not None:
                say(f"{len(done)} of {len(points)} points are in {output}; the same command goes on from there")
            raise
        names = [axis.name for axis in study.axes]
        ordered = [row | dict(zip(names, point, strict=True)) for point in points for row in done[point]]
        if opened is not None:
            opened.finish(ordered)
    return sweep_document(study, ordered, seconds=time.perf_counter() - started)


def sweep_document(study: Study, solved: Sequence[Row], *, seconds: float) -> dict[str, Any]:
    """The document of a sweep.

    Parameters
    ----------
    study : Study
    solved : sequence of Row
        Of every point, in the order of the grid, with the values of its axes.
    seconds : float
        That it took [s].

    Returns
    -------
    dict
        As `run_sweep`.
    """
    columns = table_columns(study)
    rows = [
        {name: row.get(name) or "" if kind == "text" else row.get(name) for name, kind in columns.items()}
        for row in solved
    ]
    varied = [_varied(axis) for axis in study.axes]
    return {
        "rows": rows,
        "varied": varied,
        "first_at_95_percent": first_reaching(rows, varied, study.schedules, predicted=not study.simulate),
        "first_at_95_percent_predicted": first_reaching(rows, varied, study.schedules, predicted=True),
        "inputs": _inputs(study),
        "notes": _notes(study),
        "seconds": seconds,
    }


def first_reaching(
    rows: Sequence[Row], varied: Sequence[dict[str, Any]], schedules: Sequence[str], *, predicted: bool
) -> dict[str, Any]:
    """Where each schedule first reaches `ENOUGH` of the bound, along the first key whose values are numbers.

    Returns
    -------
    dict
        By schedule: the value [SI], or None where it never does. With further keys, a list of
        ``{"at": {key: value}, "value": value}``. Empty where no key has numbers.
    """
    along = next((axis["name"] for axis in varied if axis["kind"] != "text"), None)
    if along is None:
        return {}
    others = [axis["name"] for axis in varied if axis["name"] != along]
    rate = "predicted_tokens_per_s" if predicted else "simulated_tokens_per_s"
    found: dict[str, Any] = {}
    for schedule in schedules:
        mine = [row for row in rows if row["schedule"] == schedule]
        lines: dict[tuple[Any, ...], list[Row]] = {}
        for row in mine:
            lines.setdefault(tuple(row[name] for name in others), []).append(row)
        reached = []
        for at, line in lines.items():
            enough = [
                row[along]
                for row in line
                if row.get(rate) and row.get("bound_tokens_per_s") and row[rate] >= ENOUGH * row["bound_tokens_per_s"]
            ]
            reached.append({"at": dict(zip(others, at, strict=True)), "value": min(enough, default=None)})
        found[schedule] = reached if others else reached[0]["value"]
    return found


def _varied(axis: Axis) -> dict[str, Any]:
    return {
        "name": axis.name,
        "keys": list(axis.keys),
        "times": axis.times,
        "kind": axis.kind,
        "unit": axis.unit,
        "unit_size": axis.unit_size,
        "values": list(axis.values),
    }


def _inputs(study: Study) -> dict[str, Any]:
    varied = {key for axis in study.axes for key in axis.keys}
    return {
        "hardware": "" if "hw" in varied else study.hw,
        "model": "" if "model" in varied else study.configs[study.model]["name"],
        "workload": "" if varied & {"workload", "workload.prompt_len"} else study.workload.name,
        "generation_length": None if "workload.gen_len" in varied else study.workload.generation_length,
        "num_requests": None if "workload.requests" in varied else study.workload.num_requests,
        "padded": study.workload.padded,
        "pins": study.pins.given,
        "schedules": list(study.schedules),
        "cost_model": study.cost_model,
        "simulated": study.simulate,
        "contention": study.contention,
        "max_hours": study.max_hours,
    }


def _notes(study: Study) -> list[str]:
    """Values that might be expected to follow what is varied, and do not."""
    notes = list(study.notes)
    for name, profile in study.profiles.items():
        changed = {key for axis in study.axes for key in profile_keys(axis, profile)}
        for key, quantity in profile.quantities.items():
            source = FIELDS[key].share_of
            if source in changed and key not in changed and "%" not in quantity.text:
                notes.append(f"{name}: {key} stays at {quantity.text} while {source} is varied")
        for direction in ("host_to_device", "device_to_host"):
            total, each = f"host_totals.{direction}", f"link.{direction}.pinned"
            if each in changed and total not in changed and total in profile.quantities:
                notes.append(f"{name}: {total} stays at {profile.quantities[total].text} while {each} is varied")
    return notes


def _check_some_point(study: Study, points: Sequence[Point]) -> None:
    """Refuse a sweep of which no point makes sense, with what is wrong at the first."""
    first: InputError | None = None
    for point in points:
        try:
            scenario_at(study, point)
            return
        except InputError as error:
            first = first or error
    if first is not None:
        raise first


@contextmanager
def _bar(total: int, done: int, wanted: bool) -> Iterator[Any]:
    """A progress bar on standard error; calls what it yields once per point."""
    import sys

    if not (wanted and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("points"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("points", total=total, completed=done)
        yield lambda: progress.advance(task)
