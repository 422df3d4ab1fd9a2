"""The document of a validation, from the files that it left: `hrm.validation.records`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hrm.errors import InputError
from hrm.validation.bars import judge_bars, verdict_of
from hrm.validation.candidates import Candidate
from hrm.validation.choice import AGAIN, CHOSEN, in_neighbourhood
from hrm.validation.forecasts import COPIES, PREDICTORS
from hrm.validation.measures import MeasuredRun, measure_run
from hrm.validation.memory import HOST_RESERVE_BYTES, STAGING
from hrm.validation.noise import bootstrap_medians, interval, least_difference, median_noise, pooled_noise
from hrm.validation.records import Records
from hrm.validation.scores import Order, find_inversions, order_of_pairs, regret_of, spread_of

__all__ = ["METRICS", "build_document"]

METRICS: Mapping[str, str] = {
    "layer_latency_s": "decode, seconds per layer and step",
    "prefill_layer_s": "prefill, seconds per layer",
    "throughput_tokens_per_s": "throughput, token/s",
}
LATENCY, PREFILL, THROUGHPUT = METRICS
ORDERED = (THROUGHPUT, LATENCY)

FEWEST = 2
"""Policies of a regime whose ratios have a spread."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """A candidate with its timed runs and the record of the first one of its loading."""

    candidate: Candidate
    row: Mapping[str, Any]
    runs: tuple[MeasuredRun, ...]
    first: Mapping[str, Any] | None
    reason: str

    def values(self, metric: str) -> list[float]:
        return [float(getattr(run, metric)) for run in self.runs]


def build_document(records: Records) -> dict[str, Any]:
    """Everything that a validation found, as one JSON document (docs/cli.md).

    Raises
    ------
    InputError
        A file makes no sense.
    """
    setup, predictions = records.setup, records.predictions
    seed = int(predictions["seed"])
    every = _measured(records)
    counted = [each for each in every if not each.reason]
    if not counted or counted[0].candidate.name != CHOSEN:
        reasons = "; ".join(dict.fromkeys(each.reason for each in every)) or "none was measured to the end"
        raise InputError(f"no policy counts: {reasons}", where=str(records.folder), way_out="runs that are not paced")
    if not any(each.candidate.name == AGAIN for each in counted):
        fact = "was stopped before the plan had run for the second time in its turn"
        raise InputError(fact, where=str(records.folder), way_out="hrm validate run once more, to the end")
    repeats = min(len(each.runs) for each in counted)  # one that was stopped has fewer than were asked for
    noise = _noise(records, every, repeats, seed)
    near = [index for index, each in enumerate(counted) if in_neighbourhood(each.candidate)]
    used = {metric: float(noise[metric]["used"]) for metric in ORDERED}
    scores = {name: _scores(name, counted, near, used, seed) for name in PREDICTORS}
    regret = _regret(counted, seed)
    policies = [_policy(each, seed) for each in every]
    bars = judge_bars(
        scores["simulated"],
        regret,
        [row for row in policies if row["counted"]],
        noise=used,
        repeats=repeats,
        near=len(near),
        alike=_alike(counted, used[THROUGHPUT]),
        seed=seed,
    )
    document = {
        **{key: setup[key] for key in SETUP_KEYS},
        "repeats": predictions["repeats"],
        "seed": seed,
        "predictions_sha256": records.predictions_hash,
        "noise": noise,
        "policies": policies,
        "lacking": {**predictions["lacking"], **_not_reached(records, every)},
        "scores": scores,
        "regret": regret,
        "ops": _by_kind(counted, "ops"),
        "copies": _by_kind(counted, "copies"),
        "contexts": _contexts(every, predictions["contexts"]),
        "bars": bars,
    }
    return document | {"verdict": verdict_of(document)}


SETUP_KEYS = (
    "title",
    "hardware",
    "model",
    "workload",
    "layers",
    "layers_of_model",
    "schedule",
    "policy",
    "device",
    "device_name",
    "emulated",
    "same_machine",
    "weights",
    "machine",
    "versions",
    "command",
    "date",
    "paced",
    "notes",
)


def _measured(records: Records) -> list[_Measured]:
    layers, generated = int(records.setup["layers"]), int(records.setup["workload"]["generation_length"])
    found = []
    for row in records.predictions["candidates"]:
        candidate = Candidate.from_dict(row, where="predictions.json")
        own = [run for run in records.runs if run["candidate"] == candidate.name]
        before = records.first if candidate.name in (CHOSEN, AGAIN) else ()  # loaded for the first runs already
        timed = tuple(
            measure_run(run, layers=layers, requests=candidate.policy.batch_size, generated=generated)
            for run in own
            if not run["warm_up"]
        )
        if not timed:
            continue  # stopped before its turn came
        first = next((run for run in (*before, *own) if run["warm_up"]), None)
        found.append(_Measured(candidate, row, timed, first, _not_counted(candidate, records.setup)))
    return found


def _not_reached(records: Records, every: Sequence[_Measured]) -> dict[str, str]:
    """Policies that were chosen and predicted, and never ran."""
    measured = {each.candidate.name for each in every}
    names = [str(row["name"]) for row in records.predictions["candidates"]]
    return {name: "the validation was stopped before its turn came" for name in names if name not in measured}


def _not_counted(candidate: Candidate, setup: Mapping[str, Any]) -> str:
    """Why a policy counts in no figure of accuracy; empty where it does."""
    if setup["paced"]:
        return "its lanes are paced"
    if candidate.policy.everything_on_cpu and setup["emulated"]:
        return "it also computes on the core that stands in for the accelerator, which the profile's CPU does not have"
    return ""


def _noise(records: Records, every: Sequence[_Measured], repeats: int, seed: int) -> dict[str, Any]:
    """Of latency and throughput: all policies between their repeats, and the plan against itself."""
    before = float(records.predictions["noise"])
    plan, again = (next(each for each in every if each.candidate.name == name) for name in (CHOSEN, AGAIN))
    found: dict[str, Any] = {"before": before}
    for metric in ORDERED:
        between = pooled_noise([each.values(metric) for each in every])
        used = max(before, between)
        pair = [plan.values(metric), again.values(metric)]
        medians = bootstrap_medians(pair, seed=seed)
        found[metric] = {
            "between": between,
            "used": used,
            "of_a_median": median_noise(used, repeats),
            "least_difference": least_difference(used, repeats),
            "same_plan_twice": {
                "ratio": median(pair[0]) / median(pair[1]),
                "interval": list(interval(medians[:, 0] / medians[:, 1])),
            },
        }
    return found


def _predicted(each: _Measured, predictor: str, metric: str) -> float | None:
    forecast = each.row["forecasts"][predictor]
    return None if forecast is None else float(forecast[metric])


def _policy(each: _Measured, seed: int) -> dict[str, Any]:
    """One policy: predicted, simulated, measured, ratios."""
    measured: dict[str, Any] = {}
    for metric in METRICS:
        values = each.values(metric)
        low, high = interval(bootstrap_medians([values], seed=seed)[:, 0])
        measured[metric] = {"median": median(values), "low": low, "high": high, "repeats": values}
    for phase in ("prefill_s", "decode_s"):
        measured[phase] = median(each.values(phase))
    predicted = {
        predictor: None
        if each.row["forecasts"][predictor] is None
        else {metric: _predicted(each, predictor, metric) for metric in METRICS}
        for predictor in PREDICTORS
    }
    first = each.first or {}
    return {
        **each.candidate.to_dict(),
        "neighbourhood": in_neighbourhood(each.candidate),
        "counted": not each.reason,
        "reason": each.reason or None,
        "measured": measured,
        "predicted": predicted,
        "predicted_over_measured": {
            predictor: None
            if values is None
            else {metric: values[metric] / measured[metric]["median"] for metric in METRICS}
            for predictor, values in predicted.items()
        },
        "ops": _of_policy(each, "ops"),
        "copies": _of_policy(each, "copies"),
        "memory": _memory(each),
        "routing": first.get("routing"),
        "load_s": first.get("load_s"),
    }


def _of_policy(each: _Measured, what: str) -> dict[str, dict[str, float]]:
    """Seconds of a layer by kind of task or copy: alone by the cost model's rates, simulated, measured."""
    runs: list[Mapping[str, float]] = [run.ops_s if what == "ops" else run.copies_s for run in each.runs]
    rows: Mapping[str, Any] = each.row["forecasts"]["simulated"][what]
    found = {}
    for name in sorted({*rows, *(key for run in runs for key in run)}):
        row = rows.get(name, {"alone_s": 0.0, "simulated_s": 0.0, "bytes": 0.0})
        found[name] = {**row, "measured_s": median(run.get(name, 0.0) for run in runs)}
    return found


def _by_kind(counted: Iterable[_Measured], what: str) -> list[dict[str, Any]]:
    """Predicted over measured by kind of task, over all policies that have it."""
    rows: dict[str, list[dict[str, float]]] = {}
    for each in counted:
        for name, row in _of_policy(each, what).items():
            if row["measured_s"] > 0.0 and row["alone_s"] > 0.0:
                rows.setdefault(name, []).append(row)
    order = list(COPIES) if what == "copies" else sorted(rows, key=lambda name: -_total(rows[name], "measured_s"))
    found = []
    for name in order:
        if name not in rows:
            continue
        ratios = {key: [row[key] / row["measured_s"] for row in rows[name]] for key in ("alone_s", "simulated_s")}
        found.append(
            {
                "name": name,
                "policies": len(rows[name]),
                "measured_s": _total(rows[name], "measured_s") / len(rows[name]),
                "alone_over_measured": median(ratios["alone_s"]),
                "simulated_over_measured": median(ratios["simulated_s"]),
                "simulated_low": min(ratios["simulated_s"]),
                "simulated_high": max(ratios["simulated_s"]),
            }
        )
    return found


def _total(rows: Iterable[Mapping[str, float]], key: str) -> float:
    return sum(row[key] for row in rows)


def _memory(each: _Measured) -> dict[str, dict[str, float]] | None:
    """Planned and taken bytes of GPU and CPU memory; None where the kernel does not say."""
    memory = None if each.first is None else each.first.get("memory")
    if not memory or not memory["running_bytes"]:
        return None
    planned = each.row["memory"]
    staging = memory["terms"]["cpu"].get(STAGING, {"planned": 0.0, "made": 0.0})
    not_made = max(0.0, staging["planned"] - staging["made"])
    found = {}
    for level in ("gpu", "cpu"):
        taken = max(memory[key].get(level, 0) for key in ("loading_bytes", "running_bytes"))
        if not planned[level]:
            continue
        found[level] = {
            "planned_bytes": planned[level],
            "not_made_bytes": not_made if level == "cpu" else 0.0,
            "reserve_bytes": float(HOST_RESERVE_BYTES) if level == "cpu" else 0.0,
            "taken_bytes": float(taken),
        }
    return found


def _scores(
    predictor: str, counted: Sequence[_Measured], near: Sequence[int], noise: Mapping[str, float], seed: int
) -> dict[str, Any] | None:
    """How one predictor did; None where it says nothing of these plans."""
    known = [index for index, each in enumerate(counted) if each.row["forecasts"][predictor] is not None]
    if len(known) < FEWEST:
        return None
    found: dict[str, Any] = {"policies": len(known)}
    groups: dict[str, list[int]] = {"neighbourhood": [index for index in known if index in near], "all": known}
    regimes: dict[str, list[int]] = {}
    for index in known:
        regimes.setdefault(counted[index].candidate.regime, []).append(index)
    for metric in METRICS:
        found[metric] = {name: _spread(predictor, metric, counted, group, seed) for name, group in groups.items()} | {
            "by_regime": {
                name: _spread(predictor, metric, counted, group, seed) for name, group in sorted(regimes.items())
            }
        }
    for metric in ORDERED:
        # The plan stands there twice; it is no pair with itself.
        once = [index for index in known if counted[index].candidate.name != AGAIN]
        guesses, repeats = _columns(predictor, metric, counted, once)
        order: Order = order_of_pairs(guesses, repeats, noise=noise[metric])
        found[metric]["order"] = {"pairs": order.pairs, "ordered": order.ordered, "share": order.share}
        found[metric]["inversions"] = [
            {
                "first": counted[once[each.first]].candidate.name,
                "second": counted[once[each.second]].candidate.name,
                "predicted": each.predicted,
                "measured": each.measured,
                "certainty": each.certainty,
            }
            for each in find_inversions(guesses, repeats, seed=seed)
        ]
    return found


def _columns(
    predictor: str, metric: str, counted: Sequence[_Measured], group: Sequence[int]
) -> tuple[list[float], list[list[float]]]:
    guesses = [_predicted(counted[index], predictor, metric) for index in group]
    return [guess for guess in guesses if guess is not None], [counted[index].values(metric) for index in group]


def _spread(
    predictor: str, metric: str, counted: Sequence[_Measured], group: Sequence[int], seed: int
) -> dict[str, Any] | None:
    if len(group) < FEWEST:
        return None
    guesses, repeats = _columns(predictor, metric, counted, group)
    spread, (low, high) = spread_of(guesses, repeats, seed=seed)
    ratios = [guess / median(values) for guess, values in zip(guesses, repeats, strict=True)]
    return {
        "policies": len(group),
        "spread": spread,
        "low": low,
        "high": high,
        "median_ratio": median(ratios),
        "least_ratio": min(ratios),
        "largest_ratio": max(ratios),
    }


def _regret(counted: Sequence[_Measured], seed: int) -> dict[str, Any]:
    """The plan against the fastest measured; batches larger than the plan's are none it could have chosen."""
    able = _able(counted)
    chosen = [index for index, each in enumerate(able) if each.candidate.name in (CHOSEN, AGAIN)]
    found = regret_of([each.values(THROUGHPUT) for each in able], chosen=chosen, seed=seed)
    return {
        "best": able[found.best].candidate.name,
        "share": found.share,
        "low": found.low,
        "high": found.high,
        "policies": len(able),
    }


def _able(counted: Sequence[_Measured]) -> list[_Measured]:
    """The plan, and those that it is held against for its regret."""
    size = counted[0].candidate.policy.batch_size
    return [each for each in counted if each.candidate.policy.batch_size <= size]


def _alike(counted: Sequence[_Measured], noise: float) -> int:
    """The plan, and those of its regret that are about as fast: among so many noise decides which is fastest."""
    chosen = median(counted[0].values(THROUGHPUT))
    least = least_difference(noise, len(counted[0].runs))
    others = [each for each in _able(counted) if each.candidate.name not in (CHOSEN, AGAIN)]
    return 1 + sum(abs(median(each.values(THROUGHPUT)) / chosen - 1.0) <= least for each in others)


def _contexts(every: Sequence[_Measured], simulated: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Latency of a layer of the plan over the context: every step measured, a few simulated."""
    plan = [run for each in every if each.candidate.name in (CHOSEN, AGAIN) for run in each.runs]
    steps: list[float] = [median(step) for step in zip(*(run.steps_s for run in plan), strict=True)]
    return {"simulated": list(simulated), "measured_layer_s": steps}
