"""Predictions of rows by constants that their fold had no part in, of the full model and of the simulation alike.

Every fold is fitted once, and both models predict its rows with the same constants. Folds are independent, so they are
spread over the cores.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from hrm.errors import HrmError
from hrm.published.comparisons import FOLD_KEYS, Fold, fold_rows
from hrm.published.constants import Values
from hrm.published.fit import fit_constants, usable_rows
from hrm.published.model import full_row
from hrm.published.predictions import Simulator, Tell
from hrm.published.rows import Row

__all__ = ["GATE_FOLDS", "CrossValidation", "cross_predict", "predict_fold"]

GATE_FOLDS = "setting x workload"
"""The folds that are judged; the others are printed beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossValidation:
    """One way to fold the rows.

    Attributes
    ----------
    folds : tuple of tuple of str
        Ids of each fold.
    predicted : mapping of str to mapping of str to float
        By model (``full``, ``simulated``) and id [token/s]; rows that cannot be predicted are missing.
    """

    folds: tuple[tuple[str, ...], ...]
    predicted: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


_Job = tuple[str, Fold, tuple[Row, ...], Simulator | None]
_Found = tuple[str, dict[str, dict[str, float]]]


def predict_fold(rows: Sequence[Row], fold: Fold, simulate: Simulator | None = None) -> dict[str, dict[str, float]]:
    """Both models' predictions of a fold by constants fitted to the rest.

    A constant that no row of the rest touches, or that they do not identify, takes its public value.

    Returns
    -------
    dict
        By model and id [token/s].
    """
    known = {row.id: row for row in rows}
    training = usable_rows([known[name] for name in fold.train_ids])
    values: Values = fit_constants(training).values if training else {}
    found: dict[str, dict[str, float]] = {"full": {}, **({} if simulate is None else {"simulated": {}})}
    for name in fold.test_ids:
        try:
            found["full"][name] = full_row(known[name], values).tokens_per_s
            if simulate is not None:
                found["simulated"][name] = simulate(known[name], values).throughput_tokens_per_s
        except HrmError:
            continue
    return found


def cross_predict(
    rows: Sequence[Row],
    simulate: Simulator | None = None,
    *,
    by: Sequence[str] = tuple(FOLD_KEYS),
    jobs: int | None = None,
    tell: Tell | None = None,
) -> dict[str, CrossValidation]:
    """Cross-validate in each of several ways to fold.

    Parameters
    ----------
    rows : sequence of Row
        Those that were not measured are left out.
    simulate : callable, optional
        Must be importable by name where several processes are used. Without it nothing is simulated.
    by : sequence of str
        Keys of `FOLD_KEYS`.
    jobs : int, optional
        Processes; by default one per core.
    tell : callable, optional
        Takes a line about progress.
    """
    measured = tuple(row for row in rows if row.measured_tokens_per_s is not None)
    work: list[_Job] = [(name, fold, measured, simulate) for name in by for fold in fold_rows(measured, name)]
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in by}
    for number, (name, predicted) in enumerate(_results(work, jobs), start=1):
        for model, values in predicted.items():
            found[name].setdefault(model, {}).update(values)
        if tell is not None:
            tell(f"cross-validation: {number} of {len(work)} folds")
    return {
        name: CrossValidation(
            folds=tuple(fold.test_ids for each, fold, _, _ in work if each == name), predicted=found[name]
        )
        for name in by
    }


def _results(work: Sequence[_Job], jobs: int | None) -> Iterator[_Found]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores if jobs is None else jobs, len(work))
    if count <= 1:
        yield from map(_solve, work)
        return
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(count, mp_context=context, initializer=_leave_interrupts)
    try:
        results: Iterable[_Found] = executor.map(_solve, work)
        yield from results
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _leave_interrupts() -> None:
    """Ctrl-C is for the parent, which then lets the workers end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _solve(job: _Job) -> _Found:
    name, fold, rows, simulate = job
    return name, predict_fold(rows, fold, simulate)
