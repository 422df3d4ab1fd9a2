"""The order of `hrm validate memory`: predictions of every cap and their hash first, then runs in random order.

What runs a plan under a cap is handed in, so that this order can be tested without it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hrm.errors import InfeasibleError, InputError
from hrm.validation.caps_study import MEMORY_SCHEDULES, Study, Theory, find_bounds, predict_points
from hrm.validation.forecasts import write_forecasts
from hrm.validation.memory import HOST_RESERVE_BYTES
from hrm.validation.records import (
    HASH_FILE,
    PLANS,
    PREDICTIONS_FILE,
    SETUP_FILE,
    holds_records,
    remove_records,
    write_json,
    write_run,
)

__all__ = ["CappedMeasurer", "estimate_seconds", "measure_study", "predict_study"]

START_S = 5.0
"""Seconds in which a process starts and imports torch, about (measured on two cores)."""

Tell = Callable[[str], None]


class CappedMeasurer(Protocol):
    """What runs a point."""

    def measure(self, point: Mapping[str, Any], plan: Path) -> dict[str, Any]:
        """Run a plan in a process of its own under ``limit_bytes``.

        Returns
        -------
        dict
            ``status``: ``"held"``, ``"broken"`` (more memory than the cap) or ``"failed"``; ``reason``; what the
            kernel counted under ``cap``; of a run that held also what `hrm.validation.records` has of one.
        """
        ...


def predict_study(
    study: Study,
    caps: Sequence[float],
    theory: Theory,
    host: Any,
    folder: Path | None,
    *,
    repeats: int,
    seed: int,
    tell: Tell,
) -> dict[str, Any]:
    """What is predicted of every schedule under every cap, and the two bounds.

    Raises
    ------
    InfeasibleError
        Nothing fits under any cap.
    """
    points = predict_points(study, caps, theory, host, folder, tell)
    if all(point["infeasible"] for point in points):
        raise InfeasibleError(f"nothing fits under any cap; under the largest: {points[-1]['infeasible']}")
    tell("bounds")
    return {
        "seed": seed,
        "repeats": repeats,
        "schedules": list(MEMORY_SCHEDULES),
        "caps_bytes": list(caps),
        "reserve_bytes": HOST_RESERVE_BYTES,
        "bounds": find_bounds(study),
        "points": points,
    }


def estimate_seconds(predictions: Mapping[str, Any]) -> float:
    """Seconds of all runs as simulated: each starts a process, loads, warms up with a batch and times one [s]."""
    rows = [point for point in predictions["points"] if not point["infeasible"]]
    batches = [point["forecasts"]["simulated"] for point in rows]
    once = sum(2.0 * (each["prefill_s"] + each["decode_s"]) + START_S for each in batches)
    once += sum(point["forecasts"]["full"]["loading_s"] for point in rows)
    return float(predictions["repeats"] * once)


def measure_study(
    study: Study,
    caps: Sequence[float],
    theory: Theory,
    host: Any,
    measurer: CappedMeasurer,
    folder: Path,
    *,
    setup: Mapping[str, Any],
    repeats: int,
    seed: int,
    tell: Tell = lambda _: None,
) -> None:
    """Predict, hash, measure; everything is left in a folder (`hrm.validation.records`).

    Raises
    ------
    InfeasibleError
        Nothing fits under any cap.
    InputError
        A file cannot be written, or every run failed for another reason than memory.
    """
    if holds_records(folder):  # an earlier one
        remove_records(folder)
    plans = folder / PLANS
    try:
        plans.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made: {error.strerror or error}", where=str(plans)) from None
    write_json(folder / SETUP_FILE, setup)
    document = predict_study(study, caps, theory, host, plans, repeats=repeats, seed=seed, tell=tell)
    noted = write_forecasts(document, folder / PREDICTIONS_FILE)
    (folder / HASH_FILE).write_text(f"{noted}  {PREDICTIONS_FILE}\n", encoding="utf-8")
    points = [point for point in document["points"] if not point["infeasible"]]
    shuffle = random.Random(f"order/{seed}")
    order, failures = 0, []
    for repeat in range(repeats):
        turn = list(points)
        shuffle.shuffle(turn)
        for place, point in enumerate(turn, 1):
            tell(f"measuring: {repeat + 1} of {repeats}, run {place} of {len(turn)}: {point['name']}")
            record = measurer.measure(point, plans / point["plan"])
            facts = {"candidate": point["name"], "repeat": repeat, "order": order, "predictions_sha256": noted}
            write_run(folder, f"{order:03d}-{re.sub('[^a-z0-9_]+', '-', point['name'].lower())}", {**record, **facts})
            order += 1
            if record["status"] == "failed":
                failures.append(record["reason"])
        if len(failures) == order:
            raise InputError(f"no run succeeded: {failures[0]}", where="hrm validate memory")
