"""What is said of one row: Eq. 12 three times, the full cost model, the simulation, with interval and bottleneck.

The third Eq. 12 takes the rates of the row's own system, as the full cost model has them (`profile_for`): what tells
the two apart is then the form alone. The constants were fitted through the full model's form, not through Eq. 12's;
what the same form can do with the same constants fitted through it is said beside it (`hrm.published.accuracy`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hrm.errors import HrmError
from hrm.published.constants import Values
from hrm.published.document import RowPrediction, eq12_predictions
from hrm.published.eq12 import Eq12, Variant, eq12_of_row
from hrm.published.intervals import interval_of
from hrm.published.model import FullRow, full_row, policy_of_row
from hrm.published.policies import RowPolicy
from hrm.published.rows import Row
from hrm.published.settings import find_setting, find_system, workload_of
from hrm.published.systems import behaviour_of, profile_for

__all__ = ["RowResult", "Simulated", "Simulator", "Tell", "eq12_row", "judge_row", "judge_rows", "run_policy"]


NOTHING_IN_THE_WAY = 1e15
"""A rate that never binds [byte/s]."""


class Simulated(Protocol):
    """What a simulation says of a row."""

    @property
    def throughput_tokens_per_s(self) -> float:
        """[token/s]"""

    @property
    def prefill_s(self) -> float:
        """[s]"""

    @property
    def decode_s(self) -> float:
        """[s]"""


Simulator = Callable[[Row, Values], Simulated]
"""Simulates a row with these constants; raises HrmError with the reason where it cannot."""

Tell = Callable[[str], None]
"""Takes a line about progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """A row and all that is said of it; what could not be found is None or empty, and `prediction.note` says why."""

    row: Row
    prediction: RowPrediction
    full: FullRow | None = None
    simulated: Simulated | None = None


def run_policy(row: Row) -> RowPolicy:
    """The policy that Eq. 12 is asked about: the one that the full cost model prices."""
    policy, note = policy_of_row(row)
    return RowPolicy(
        batch_size=policy.batch_size,
        micro_batch_size=policy.micro_batch_size,
        num_micro_batches=policy.num_micro_batches,
        attention_on_gpu=policy.attention_on_gpu,
        weights_on_gpu=policy.weights_on_gpu,
        kv_on_gpu=policy.kv_on_gpu,
        note=note,
    )


def eq12_row(row: Row, values: Values) -> dict[Variant, Eq12]:
    """Eq. 12 with the authors' constants, with datasheet peaks, and with the rates that these constants give.

    Raises
    ------
    InputError, InfeasibleError
        The row cannot be predicted; the message says why.
    """
    system = find_system(row)
    fitted = profile_for(find_setting(row), system, values)
    if behaviour_of(system).pins_weights:  # no staging copy is on the way of its weights
        fitted = replace(fitted, staging_bytes_per_s=NOTHING_IN_THE_WAY)
    return eq12_of_row(row, policy_of=run_policy, fitted=fitted)


def judge_row(row: Row, values: Values, simulate: Simulator | None = None, *, with_interval: bool = True) -> RowResult:
    """All predictions of a row; one that fails leaves the others standing, and its reason in the note.

    Parameters
    ----------
    row : Row
    values : mapping of str to float
        Constants by name; those left out have their public value.
    simulate : callable, optional
        Without it nothing is simulated.
    with_interval : bool
        Whether to look up the interval, which needs `accuracy.yaml`.
    """
    predicted: dict[str, float] = {}
    full: FullRow | None = None
    simulated: Simulated | None = None
    notes: list[str] = []
    try:
        full = full_row(row, values)
        predicted["full"] = full.tokens_per_s
        notes += [full.note, _workload_note(row)]
        predicted |= eq12_predictions(eq12_row(row, values))
    except HrmError as error:
        notes.append(str(error))
    if simulate is not None and full is not None:
        try:
            simulated = simulate(row, values)
            predicted["simulated"] = simulated.throughput_tokens_per_s
        except HrmError as error:
            notes.append(f"not simulated: {error}")
    prediction = RowPrediction(
        predicted=predicted,
        interval=interval_of(full.tokens_per_s, calibrated=True) if full is not None and with_interval else None,
        bottleneck="" if full is None else full.bottleneck.replace("_", " "),
        note="; ".join(note for note in notes if note),
    )
    return RowResult(row=row, prediction=prediction, full=full, simulated=simulated)


def judge_rows(
    rows: Sequence[Row],
    values: Values,
    simulate: Simulator | None = None,
    tell: Tell | None = None,
    *,
    with_interval: bool = True,
) -> list[RowResult]:
    """`judge_row` of every row, in order."""
    found = []
    for number, row in enumerate(rows, start=1):
        if tell is not None:
            tell(f"predicting row {number} of {len(rows)}: {row.id}")
        found.append(judge_row(row, values, simulate, with_interval=with_interval))
    return found


def _workload_note(row: Row) -> str:
    """What is assumed of a workload that is not bundled."""
    note = workload_of(row).note
    return note if "not bundled" in note else ""
