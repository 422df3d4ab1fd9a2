"""The document of `hrm validate memory`, from its records alone: every point, both curves, memory ratio, verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hrm.errors import BarMissedError
from hrm.units import GIB
from hrm.validation.caps_curves import Curve, match_curves
from hrm.validation.measures import measure_run
from hrm.validation.noise import bootstrap_medians, interval, median_noise, pooled_noise
from hrm.validation.records import Records

__all__ = ["CLAIM", "build_memory_document", "check_caps"]

CLAIM = (2.0, 3.0)
"""How many times less CPU memory MoE-Lightning is said to reach the throughput bound with (its abstract)."""

RATE = "throughput_tokens_per_s"


def build_memory_document(records: Records) -> dict[str, Any]:
    """Everything a report says.

    Parameters
    ----------
    records : Records
        Of a folder that `hrm validate memory` wrote.
    """
    setup, predictions = records.setup, records.predictions
    seed, repeats = int(predictions["seed"]), int(predictions["repeats"])
    points = [_point(point, records, place + seed) for place, point in enumerate(predictions["points"])]
    names = list(predictions["schedules"])
    measured = {name: _curve(name, points, measured=True) for name in names}
    simulated = {name: _curve(name, points, measured=False) for name in names}
    groups = [point["measured"]["repeats"] for point in points if point["measured"] is not None]
    noise = pooled_noise(groups) if any(len(group) > 1 for group in groups) else None
    document: dict[str, Any] = {
        **{key: value for key, value in setup.items() if key != "format"},
        "repeats": repeats,
        "seed": seed,
        "predictions_sha256": records.predictions_hash,
        "schedules": names,
        "caps_bytes": list(predictions["caps_bytes"]),
        "reserve_bytes": predictions["reserve_bytes"],
        "bounds": predictions["bounds"],
        "noise": None if noise is None else {"of_a_run": noise, "of_a_median": median_noise(noise, repeats)},
        "points": points,
        "matched": {
            "measured": match_curves(measured[names[0]], measured[names[1]], seed=seed),
            "simulated": match_curves(simulated[names[0]], simulated[names[1]], seed=seed),
        },
        "claim": list(CLAIM),
    }
    document["verdict"] = _verdict(document)
    return document


def _point(point: Mapping[str, Any], records: Records, seed: int) -> dict[str, Any]:
    """A schedule under a cap: plan, prediction, runs."""
    found: dict[str, Any] = {
        "name": point["name"],
        "schedule": point["schedule"],
        "cap_bytes": point["cap_bytes"],
        "status": "infeasible",
        "reason": point["infeasible"],
        "plan": None,
        "policy": None,
        "planned_bytes": None,
        "accelerator_bytes": None,
        "limit_bytes": None,
        "predicted": None,
        "measured": None,
        "simulated_over_measured": None,
        "memory": None,
        "runs": [],
    }
    if point["infeasible"]:
        return found
    found |= {key: point[key] for key in ("plan", "policy", "planned_bytes", "accelerator_bytes", "limit_bytes")}
    found["predicted"] = {
        name: None if forecast is None else forecast[RATE] for name, forecast in point["forecasts"].items()
    }
    runs = [run for run in records.runs if run["candidate"] == point["name"]]
    statuses = [run["status"] for run in runs]
    found["status"] = next((status for status in ("broken", "failed", "held") if status in statuses), "not run")
    found["reason"] = next((run["reason"] for run in runs if run["status"] != "held"), "")
    rates = []
    for run in runs:
        rate = None
        if run["status"] == "held":
            rate = _rate(run, point, records)
            rates.append(rate)
        found["runs"].append(
            {
                "status": run["status"],
                "reason": run["reason"],
                RATE: rate,
                "memory": run["memory"],
                "order": run["order"],
            }
        )
    found["memory"] = _memory([run["memory"] for run in runs if run["memory"] is not None])
    if rates:
        low, high = interval(bootstrap_medians([rates], seed=seed)[:, 0]) if len(rates) > 1 else (rates[0], rates[0])
        found["measured"] = {"median": median(rates), "low": low, "high": high, "repeats": rates}
        found["simulated_over_measured"] = found["predicted"]["simulated"] / found["measured"]["median"]
    return found


def _rate(run: Mapping[str, Any], point: Mapping[str, Any], records: Records) -> float:
    return measure_run(
        run,
        layers=int(records.setup["layers"]),
        requests=int(point["policy"]["batch_size"]),
        generated=int(records.setup["workload"]["generation_length"]),
    ).throughput_tokens_per_s


def _memory(seen: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Of all runs of a point the highest of each peak, and the least of what the limit was."""
    if not seen:
        return None
    keys = ("peak_bytes", "high_water_bytes", "shared_peak_bytes")
    return {key: max(each[key] for each in seen) for key in keys}


def _curve(name: str, points: Sequence[Mapping[str, Any]], *, measured: bool) -> Curve:
    """Points that held their cap in every run; as simulated, all that have a plan."""
    own = [point for point in points if point["schedule"] == name and point["status"] != "infeasible"]
    if measured:
        own = [point for point in own if point["status"] == "held"]
    own.sort(key=lambda point: float(point["cap_bytes"]))
    rates = [
        tuple(point["measured"]["repeats"]) if measured else (float(point["predicted"]["simulated"]),) for point in own
    ]
    return Curve(name, tuple(float(point["cap_bytes"]) for point in own), tuple(rates))


def _verdict(document: Mapping[str, Any]) -> dict[str, Any]:
    """One sentence, and the runs that broke their cap or failed."""
    measured, simulated = document["matched"]["measured"], document["matched"]["simulated"]
    broken = [point["name"] for point in document["points"] if point["status"] == "broken"]
    failed = [point["name"] for point in document["points"] if point["status"] == "failed"]
    lacking = [point["name"] for point in document["points"] if point["status"] == "not run"]
    first, second = document["schedules"]
    claim = "not tested"
    if not measured["matched"]:
        said = f"Not matched: {measured['reason']}, so no throughput is reached by both {first} and {second}"
    else:
        top = measured["rows"][-1]
        said = (
            f"At {top['tokens_per_s']:,.4g} token/s, the most that both reach, {second} needs {top['ratio']:.2f} times "
            f"the CPU memory of {first} ({top['second_bytes'] / GIB:.3g} against {top['first_bytes'] / GIB:.3g} GiB"
        )
        if top["low"] is not None:
            said += f"; 95 % interval {top['low']:.2f} to {top['high']:.2f}"
            claim = "below" if top["high"] < CLAIM[0] else "above" if top["low"] > CLAIM[1] else "reached"
            if claim == "reached" and not top["low"] >= CLAIM[0]:
                claim = "not excluded"
        said += ")"
        ratios = [row["ratio"] for row in measured["rows"]]
        said += f", {min(ratios):.2f} to {max(ratios):.2f} over all throughputs that both reach"
    if simulated["matched"]:
        said += f"; as simulated {simulated['rows'][-1]['ratio']:.2f} at the most that both reach"
    else:
        said += "; as simulated not matched"
    words = {
        "below": "below the 2 to 3 times of the paper",
        "above": "above the 2 to 3 times of the paper",
        "reached": "the 2 times or more of the paper",
        "not excluded": "the 2 times of the paper are within the interval",
    }
    said += f"; {words[claim]}" if claim in words else ""
    if document["emulated"]:
        said += ", here with an emulated accelerator"
    if broken:
        said += f"; broke their cap: {', '.join(broken)}"
    if failed:
        said += f"; failed: {', '.join(failed)}"
    if lacking:
        said += f"; stopped, not run: {', '.join(lacking)}"
    return {"sentence": f"{said}.", "claim": claim, "broken": broken, "failed": failed}


def check_caps(document: Mapping[str, Any]) -> None:
    """Exit with 4 where a run broke its cap or failed.

    Raises
    ------
    BarMissedError
        Names the points.
    """
    verdict = document["verdict"]
    missed = [
        *(f"{name} broke its cap" for name in verdict["broken"]),
        *(f"{name} failed" for name in verdict["failed"]),
    ]
    if missed:
        raise BarMissedError(f"missed: {', '.join(missed)}")
