"""`hrm fit --trace`: read a measured run and its plan, fit, judge on other runs, write the profile."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hrm.errors import InputError
from hrm.layout import Layout
from hrm.output_files import check_file
from hrm.plans import read_plan_document
from hrm.profile import HardwareProfile
from hrm.profile_files import dump_profile
from hrm.scenario import Scenario, truncated
from hrm.schedules import schedule_graph
from hrm.trace_files import fingerprint_plan, read_trace
from hrm.validation.candidates import Candidate, as_run
from hrm.validation.choice import AGAIN
from hrm.validation.forecasts import SimulateCandidate
from hrm.validation.measures import measure_run
from hrm.validation.records import Records, read_records
from hrm.validation.trace_fit import Seconds, TraceFit, fit_efficiency

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Simulator", "fit_trace", "print_trace_fit", "records_for"]

CAPACITIES = (
    "gpu.memory",
    "gpu.usable_memory",
    "gpu.context",
    "cpu.memory",
    "cpu.reserved",
    "cpu.lockable",
    "disk.size",
)
"""Quantities that no seconds depend on."""


@dataclass(frozen=True, slots=True)
class Simulator:
    """Seconds of tasks alone, and of whole batches, by the rates of a scenario's profile."""

    seconds: Callable[[Scenario], Seconds]
    batch: SimulateCandidate


def fit_trace(
    trace: Path,
    plan: Path | None,
    judge: Path | None,
    output: Path | None,
    simulator: Simulator,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Fit the profile of a plan to a run of it.

    Parameters
    ----------
    trace : Path
        Written by `hrm run --trace`.
    plan : Path or None
        The plan that was run.
    judge : Path or None
        Records of `hrm validate run`: the errors on its runs, but those of this plan, before and after.
    output : Path or None
        YAML file of the profile with the new shares.

    Raises
    ------
    InputError
        A file is none of its kind, or the trace is not of the plan.
    """
    if plan is None:
        raise InputError("the plan that was run is not said", where="--trace", way_out="--plan PLAN")
    if output is not None:
        check_file(output, f"--output: {output}")
    tell("reading the trace")
    measured = read_trace(trace)
    whole, policy, document = read_plan_document(plan)
    if measured.facts.plan != fingerprint_plan(document):
        raise InputError(
            "is of another plan", where=f"--trace: {trace}", way_out=f"the trace of a run of {plan}, or its own plan"
        )
    layers = measured.facts.layers
    scenario = whole if layers == whole.model.n_layers else truncated(whole, layers)
    records = None if judge is None else records_for(judge, scenario.profile)
    graph = schedule_graph(Layout(scenario, policy), measured.facts.schedule, measured.steps)
    tell("fitting")
    found = fit_efficiency(
        scenario.profile, graph, measured.trace, simulator.seconds(scenario), paced=measured.facts.paced
    )
    judged = None if records is None else _judge(records, found, policy.to_dict(), simulator, tell)
    if output is not None:
        _write(found.profile, output)
    return {
        "trace": str(trace),
        "plan": str(plan),
        "hardware": scenario.profile.name,
        "kind": measured.trace.kind,
        "paced": [str(lane) for lane in measured.facts.paced],
        "shares": [
            {
                "name": each.name,
                "before": each.before,
                "after": each.after,
                "determined": each.determined,
                "at_limit": each.at_limit,
            }
            for each in found.shares
        ],
        "kinds": [dict(kind) for kind in found.kinds],
        "judged": judged,
    }


def _write(profile: HardwareProfile, path: Path) -> None:
    try:
        path.write_text(dump_profile(profile), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=f"--output: {path}") from None


def _judge(
    records: Records, found: TraceFit, fitted_to: Mapping[str, Any], simulator: Simulator, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Errors of the simulator on runs of other policies, with the shares as they were and as fitted."""
    before = _scenario_of(records)
    after = replace(before, profile=replace(before.profile, efficiency=found.profile.efficiency))
    generated, layers = before.workload.generation_length, before.model.n_layers
    rows = []
    for row in records.predictions["candidates"]:
        candidate = Candidate.from_dict(row, where="predictions.json")
        own = [run for run in records.runs if run["candidate"] == candidate.name and not run["warm_up"]]
        if candidate.name == AGAIN or not own or candidate.policy.everything_on_cpu:
            continue
        if _same_policy(candidate.policy.to_dict(), fitted_to):
            continue
        tell(f"judging on {candidate.name}")
        requests = candidate.policy.batch_size
        runs = [measure_run(run, layers=layers, requests=requests, generated=generated) for run in own]
        entry: dict[str, Any] = {"name": candidate.name}
        for metric in ("layer_latency_s", "throughput_tokens_per_s"):
            entry[metric] = {"measured": median(getattr(run, metric) for run in runs)}
        for name, scenario in (("before", before), ("after", after)):
            forecast = simulator.batch(as_run(scenario, requests), candidate.policy, candidate.schedule)
            for metric in ("layer_latency_s", "throughput_tokens_per_s"):
                entry[metric][name] = forecast[metric]
        rows.append(entry)
    summary = {}
    for metric in ("layer_latency_s", "throughput_tokens_per_s"):
        summary[metric] = {
            name: _summary([row[metric][name] / row[metric]["measured"] for row in rows])
            for name in ("before", "after")
        }
    return {"records": str(records.folder), "runs_of": len(rows), "summary": summary, "rows": rows}


def _summary(ratios: list[float]) -> dict[str, float] | None:
    if not ratios:
        return None
    return {
        "median_error": median(abs(ratio - 1.0) for ratio in ratios),
        "median_ratio": median(ratios),
        "spread": max(ratios) / min(ratios) - 1.0,
    }


def records_for(folder: Path, profile: HardwareProfile) -> Records:
    """Records to judge a fit by; shares of the peaks of another machine would mean nothing for them.

    Raises
    ------
    InputError
        They are none, or of a plan for other rates.
    """
    records = read_records(folder)
    there = _peaks_of(_scenario_of(records).profile)
    here = _peaks_of(profile)
    differing = sorted(key for key in there.keys() | here.keys() if there.get(key) != here.get(key))
    if differing:
        raise InputError(
            f"is of a plan for another machine: {differing[0]} differs",
            where=f"--judge: {folder}",
            way_out="records of a plan for the same profile",
        )
    return records


def _peaks_of(profile: HardwareProfile) -> dict[str, float]:
    """All rates of a profile: neither shares of them, nor room."""
    left_out = (*CAPACITIES, *(key for key in profile.quantities if key.startswith("efficiency.")))
    return {key: each.value for key, each in profile.quantities.items() if key not in left_out}


def _same_policy(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """The token budget is as small as the requests at hand allow, so it may differ for one policy."""
    return {**one, "micro_batch_token_budget": 0} == {**other, "micro_batch_token_budget": 0}


def _scenario_of(records: Records) -> Scenario:
    """The scenario that was validated."""
    with tempfile.TemporaryDirectory(prefix="hrm-fit-") as folder:
        file = Path(folder) / "plan.json"
        file.write_text(json.dumps(records.setup["plan"]), encoding="utf-8")
        whole = read_plan_document(file)[0]
    layers = int(records.setup["layers"])
    return whole if layers == whole.model.n_layers else truncated(whole, layers)


def print_trace_fit(document: Mapping[str, Any], console: Console) -> None:
    """Show a fit to a person."""
    from rich.table import Table

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    line(f"efficiencies of {document['hardware']} from {document['trace']} ({document['kind']})")
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(("share of a peak", "before", "after", "")):
        table.add_column(head, justify="right" if number in (1, 2) else "left")
    for row in document["shares"]:
        remark = "" if row["determined"] else "the run shows nothing of it"
        remark = "even the whole peak is too slow: raise the peak" if row["at_limit"] else remark
        table.add_row(row["name"].replace("_", " "), f"{row['before']:.1%}", f"{row['after']:.1%}", remark)
    console.print(table)
    kinds = Table(box=None, pad_edge=False, title="seconds of all tasks of a kind", title_justify="left")
    for number, head in enumerate(("task", "lane", "phase", "measured", "before", "after")):
        kinds.add_column(head, justify="right" if number > 2 else "left")
    for row in document["kinds"]:
        kinds.add_row(
            row["op"].replace("_", " "),
            row["lane"].replace("_", " "),
            row["phase"],
            *(f"{row[key]:.4g}" for key in ("measured_s", "before_s", "after_s")),
        )
    console.print(kinds)
    judged = document["judged"]
    if judged is None:
        line("error on other runs: not tested (--judge DIR, records of hrm validate run)")
        return
    line(f"simulator on runs of {judged['runs_of']} other policies, not used for the fit:")
    for metric, words in (("layer_latency_s", "decode latency"), ("throughput_tokens_per_s", "throughput")):
        found = judged["summary"][metric]
        if found["before"] is None:
            line(f"  {words}: no run of another policy")
            continue
        parts = [
            f"{name}: median error {found[name]['median_error']:.1%}, ratio {found[name]['median_ratio']:.2f}, "
            f"spread {found[name]['spread']:.1%}"
            for name in ("before", "after")
        ]
        line(f"  {words}, {'; '.join(parts)}")
