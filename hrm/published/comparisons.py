"""What several rows say together: folds for cross-validation, decode and prefill by difference, speed-ups."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hrm.published.rows import Row
from hrm.published.scores import point_of

__all__ = [
    "Difference",
    "Fold",
    "SpeedUp",
    "difference_rows",
    "difference_totals",
    "fold_rows",
    "speed_ups",
]

OURS = ("MoE-Lightning", "MoE-Lightning(p)")
BASELINES = ("FlexGen", "DeepSpeed")

FOLD_KEYS: dict[str, Callable[[Row], tuple[Hashable, ...]]] = {
    "setting x workload": lambda row: (row.setting, row.workload),
    "setting x generation length": lambda row: (row.setting, row.gen_len),
    "leave one setting out": lambda row: (row.setting,),
}
"""How rows are grouped for cross-validation; every key is part of what repeats have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """One part of a cross-validation: fitted on `train_ids`, judged on `test_ids`."""

    name: str
    train_ids: tuple[str, ...]
    test_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two points equal in all but the generation length.

    Attributes
    ----------
    short_ids, long_ids : tuple of str
        Repeats of each.
    short_gen_len, long_gen_len : int
        [tokens]
    step_s, layer_s : float
        One decode step, and one layer of it [s].
    prefill_s : float
        What the decode steps leave of the shorter run [s].
    """

    short_ids: tuple[str, ...]
    long_ids: tuple[str, ...]
    short_gen_len: int
    long_gen_len: int
    step_s: float
    layer_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """One row over a baseline on the same setting, workload and generation length.

    Attributes
    ----------
    setting, id, baseline_id, baseline_system : str
    padded, baseline_padded : bool
        Both sides say how they ran their prompts.
    measured : float
        Ratio of throughputs.
    predicted : float or None
    """

    setting: str
    id: str
    baseline_id: str
    baseline_system: str
    padded: bool
    baseline_padded: bool
    measured: float
    predicted: float | None


def fold_rows(rows: Sequence[Row], by: str) -> list[Fold]:
    """Leave one group out at a time.

    Parameters
    ----------
    rows : sequence of Row
        Those to fit and to judge on: leave out what was not measured.
    by : str
        A key of `FOLD_KEYS`. Repeats of one point have equal keys, so none is ever split.
    """
    key = FOLD_KEYS[by]
    groups: dict[tuple[Hashable, ...], list[str]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row.id)
    return [
        Fold(
            name=", ".join(str(part) for part in group),
            train_ids=tuple(row.id for row in rows if key(row) != group),
            test_ids=tuple(ids),
        )
        for group, ids in groups.items()
    ]


def difference_totals(
    short_total_s: float, long_total_s: float, short_gen_len: int, long_gen_len: int
) -> tuple[float, float]:
    """Seconds of a decode step and of prefill from two total times: total = prefill + (n - 1) * step.

    The same for measured and for predicted totals, so that both are the same quantity.

    Returns
    -------
    step_s, prefill_s : float
        [s]
    """
    step = (long_total_s - short_total_s) / (long_gen_len - short_gen_len)
    return step, short_total_s - (short_gen_len - 1) * step


def difference_rows(
    rows: Sequence[Row],
    layers_of: Callable[[Row], int],
    total_of: Callable[[Row], float | None] = lambda row: row.measured_total_s,
) -> list[Difference]:
    """Differences of neighbouring generation lengths of rows equal in all else, N included.

    Parameters
    ----------
    layers_of : callable
        Layers of the model of a row.
    total_of : callable
        Prefill + decode of a row [s]: measured by default, or predicted; rows without it are left out. Repeats count
        by their geometric mean.
    """
    groups: dict[tuple[Hashable, ...], dict[int, list[tuple[Row, float]]]] = {}
    for row in rows:
        total = total_of(row)
        if total is not None:
            rest = (row.batch_size, row.weights_on_gpu, *point_of(replace(row, gen_len=0)))
            groups.setdefault(rest, {}).setdefault(row.gen_len, []).append((row, total))
    found = []
    for group in groups.values():
        for (short, shorter), (long, longer) in pairwise(sorted(group.items())):
            totals = [math.exp(sum(math.log(total) for _, total in side) / len(side)) for side in (shorter, longer)]
            step, prefill = difference_totals(totals[0], totals[1], short, long)
            found.append(
                Difference(
                    short_ids=tuple(row.id for row, _ in shorter),
                    long_ids=tuple(row.id for row, _ in longer),
                    short_gen_len=short,
                    long_gen_len=long,
                    step_s=step,
                    layer_s=step / layers_of(shorter[0][0]),
                    prefill_s=prefill,
                )
            )
    return found


def speed_ups(rows: Sequence[Row], predicted: Callable[[Row], float | None]) -> list[SpeedUp]:
    """Measured and predicted speed-up of every MoE-Lightning row over FlexGen and DeepSpeed.

    A ratio of an unpadded run and a padded one is no ratio of systems alone: both sides say which they are.
    """
    found = []
    for ours in (row for row in rows if row.system in OURS):
        for baseline in (row for row in rows if row.system in BASELINES):
            alike = (ours.setting, ours.workload, ours.gen_len) == (
                baseline.setting,
                baseline.workload,
                baseline.gen_len,
            )
            fast, slow = ours.measured_tokens_per_s, baseline.measured_tokens_per_s
            if not alike or fast is None or slow is None:
                continue
            ours_predicted, baseline_predicted = predicted(ours), predicted(baseline)
            ratio = None
            if ours_predicted is not None and baseline_predicted is not None:
                ratio = ours_predicted / baseline_predicted
            found.append(
                SpeedUp(
                    setting=ours.setting,
                    id=ours.id,
                    baseline_id=baseline.id,
                    baseline_system=baseline.system,
                    padded=ours.padded,
                    baseline_padded=baseline.padded,
                    measured=fast / slow,
                    predicted=ratio,
                )
            )
    return found
