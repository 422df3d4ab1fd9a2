"""Fit the constants to rows that were measured, and say how well they are known.

Least squares of ln(predicted / measured) with a soft loss, so that a row the model does not understand pulls less, and
bounds from physics. A constant whose 90 % interval spans more than a factor of three is dropped: it takes its public
value, and the others are fitted again. Cross-validation fits once per fold, on the rows outside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hrm.errors import HrmError, InputError
from hrm.published.comparisons import Fold
from hrm.published.constants import CONSTANTS, Constant, Values
from hrm.published.model import full_row
from hrm.published.rows import Row
from hrm.published.settings import find_system

__all__ = ["Fitted", "FittedConstant", "certain_policy", "cross_validate", "fit_constants", "usable_rows"]

SOFT = 0.15
"""Error from which a row pulls less than by its square [1]."""

SPAN = 3.0
"""Ratio of the ends of a 90 % interval above which a constant is dropped."""

NORMAL_90 = 1.6449

UNKNOWN = 1e-6
"""Added to the information on every constant: where rows say nothing its interval is wide, not missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstant:
    """One constant after the fit.

    Attributes
    ----------
    constant : Constant
    value : float
        Fitted, or the public value where it was dropped or no row touches it.
    low, high : float
        90 % interval of the fit.
    status : {"fitted", "dropped", "untouched"}
    """

    constant: Constant
    value: float
    low: float
    high: float
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Outcome of a fit.

    Attributes
    ----------
    constants : tuple of FittedConstant
    correlation : ndarray, shape [n, n]
        Of the logarithms of the fitted ones, in their order among `constants`.
    rows : tuple of str
        Ids of the rows fitted to.
    """

    constants: tuple[FittedConstant, ...]
    correlation: npt.NDArray[np.float64]
    rows: tuple[str, ...]

    @property
    def values(self) -> dict[str, float]:
        """Value of every constant by name."""
        return {each.constant.name: each.value for each in self.constants}


def certain_policy(row: Row) -> bool:
    """Whether the policy that ran is known: its micro-batches are, and as many requests finished as they hold.

    DeepSpeed has one micro-batch, as large as its GPU memory allows.
    """
    if find_system(row).schedule == "streaming":
        return True
    mu, n_ub, n = row.micro_batch_size, row.num_micro_batches, row.batch_size
    return mu is not None and (n is None or n_ub is None or n <= mu * n_ub)


def usable_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows that a fit may use: measured, of a certain policy, and predictable."""
    found = []
    for row in rows:
        if row.measured_tokens_per_s is None:
            continue
        try:
            certain = certain_policy(row)
            full_row(row, {})
        except HrmError:
            continue
        if certain:
            found.append(row)
    return found


def fit_constants(
    rows: Sequence[Row],
    names: Sequence[str] = tuple(CONSTANTS),
    predict: Callable[[Row, Values], float] | None = None,
) -> Fitted:
    """Fit constants to rows.

    Parameters
    ----------
    rows : sequence of Row
        Measured rows (`usable_rows`).
    names : sequence of str
        Constants that may move; the others keep their public values.
    predict : callable, optional
        (row, constants) -> token/s, which is what is fitted; the full model by default.

    Raises
    ------
    InputError
        No rows, or a name that is none.
    """
    for name in names:
        if name not in CONSTANTS:
            raise InputError(f"there is no constant {name!r}", where="constants", way_out=", ".join(CONSTANTS))
    if not rows:
        raise InputError("no measured row that can be predicted", where="fit")
    wanted = list(names)
    status = dict.fromkeys(wanted, "fitted")
    intervals: dict[str, tuple[float, float]] = {}
    while True:
        moving = [name for name in wanted if status[name] == "fitted"]
        values, spread, correlation, touched = _least_squares(rows, moving, predict or _full_rate)
        for name in moving:
            intervals[name] = (values[name] / spread[name], values[name] * spread[name])
        untouched = [name for name in moving if name not in touched]
        wide = [name for name in moving if name in touched and spread[name] ** 2 > SPAN]
        if untouched:
            status.update(dict.fromkeys(untouched, "untouched"))
        elif wide:
            status[max(wide, key=lambda name: spread[name])] = "dropped"  # the least known first: it frees the others
        else:
            break
    found = []
    for name, constant in CONSTANTS.items():
        state = status.get(name, "untouched")
        low, high = intervals.get(name, (math.nan, math.nan))
        value = values[name] if state == "fitted" else constant.public
        if state == "untouched":
            low, high = math.nan, math.nan
        found.append(FittedConstant(constant=constant, value=value, low=low, high=high, status=state))
    return Fitted(constants=tuple(found), correlation=correlation, rows=tuple(row.id for row in rows))


def _full_rate(row: Row, values: Values) -> float:
    return full_row(row, values).tokens_per_s


def _least_squares(
    rows: Sequence[Row], names: Sequence[str], predict: Callable[[Row, Values], float]
) -> tuple[dict[str, float], dict[str, float], npt.NDArray[np.float64], set[str]]:
    """Values, factor of the 90 % interval to either side, correlation, and which constants any row depends on."""
    from scipy.optimize import least_squares

    if not names:
        return {}, {}, np.zeros((0, 0)), set()
    constants = [CONSTANTS[name] for name in names]
    low, high = (np.log([getattr(each, end) for each in constants]) for end in ("least", "most"))
    start = np.clip(np.log([each.public for each in constants]), low + 1e-6, high - 1e-6)
    measured = np.array([row.measured_tokens_per_s for row in rows], dtype=np.float64)

    def residuals(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        values = {name: float(value) for name, value in zip(names, np.exp(logs), strict=True)}
        predicted = np.array([predict(row, values) for row in rows], dtype=np.float64)
        found: npt.NDArray[np.float64] = np.log(predicted / measured)
        return found

    found = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=SOFT, diff_step=1e-3)
    values = {name: float(value) for name, value in zip(names, np.exp(found.x), strict=True)}
    touched = {name for name, column in zip(names, np.abs(found.jac).max(axis=0), strict=True) if column > 1e-6}
    freedom = len(rows) - len(touched)
    # As many constants as rows leave no residual to judge by: then each row is taken to be as wrong as `SOFT`.
    variance = 2.0 * found.cost / freedom if freedom > 0 else SOFT**2
    inverse = np.linalg.inv(found.jac.T @ found.jac + UNKNOWN * np.eye(len(names)))
    scale = np.sqrt(np.diag(inverse))
    deviation = scale * math.sqrt(variance)
    spread = {
        name: math.exp(min(50.0, NORMAL_90 * float(each))) if name in touched else math.inf
        for name, each in zip(names, deviation, strict=True)
    }
    return values, spread, inverse / np.outer(scale, scale), touched


def cross_validate(
    rows: Sequence[Row],
    folds: Sequence[Fold],
    names: Sequence[str] = tuple(CONSTANTS),
    predict: Callable[[Row, Values], float] | None = None,
) -> dict[str, float]:
    """Predictions of every row from constants that its fold did not see [token/s].

    Parameters
    ----------
    rows : sequence of Row
    folds : sequence of Fold
        Of all rows; repeats of one point are never split.
    names : sequence of str
        Constants that may move. One that no training row touches takes its public value.
    predict : callable, optional
        (row, constants) -> token/s; the full model by default.

    Returns
    -------
    dict of str to float
        By id; rows that cannot be predicted are missing.
    """
    known = {row.id: row for row in rows}
    usable = {row.id for row in usable_rows(rows)}
    found: dict[str, float] = {}
    for fold in folds:
        training = [known[name] for name in fold.train_ids if name in usable]
        values: Mapping[str, float] = fit_constants(training, names).values if training else {}
        for name in fold.test_ids:
            try:
                found[name] = (
                    full_row(known[name], values).tokens_per_s if predict is None else predict(known[name], values)
                )
            except HrmError:
                continue
    return found
