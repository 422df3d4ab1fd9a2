"""Prints the table of docs/findings.md on pinning weights: `python docs/findings_pinning.py [--quick]`, two minutes.

Every setting of the paper's evaluation: the best plan with the CPU's weights page-locked once at load, against the best
one that stages every copy. Both leave the disk out, so that they differ in that alone; each is the fastest of several
plans under cgopipe and s4, simulated with contention. The last column is the same ratio at the peaks of the datasheets,
without the profiles' efficiencies.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from typing import NamedTuple

from hrm.errors import HrmError, InfeasibleError
from hrm.model_files import load_model
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.prediction import Prediction
from hrm.profile import Efficiency
from hrm.profile_files import load_profile
from hrm.scenario import Scenario, choose_formats
from hrm.schedules import SCHEDULES
from hrm.workload import load_workload
from simulator.own_plans import Candidates
from simulator.replay import Replay, replay_plan

REQUESTS = 10_000
SETTINGS = (
    ("S1", "t4", "mixtral-8x7b"),
    ("S2", "l4", "mixtral-8x7b"),
    ("S6", "t4x2", "mixtral-8x22b"),
    ("S7", "t4x4", "mixtral-8x22b"),
    ("S8", "t4x2", "dbrx"),
    ("S9", "t4x4", "dbrx"),
)
MTBENCH = (("mtbench", 32), ("mtbench", 128), ("mtbench", 256))
HELM = (("synthetic-reasoning", 50), ("summarization", 64))  # on S1 and S2 only, as in the paper
HEAD = (
    *("setting", "workload, generated", "pinned, token/s", "staged, token/s", "pinned / staged"),
    *("start-up, s more", "pays after requests", "batches", "ratio at peaks"),
)


class Run(NamedTuple):
    """The fastest plan found with weights pinned, or staged."""

    schedule: str
    policy: Policy
    prediction: Prediction
    replay: Replay

    @property
    def rate(self) -> float:
        """Simulated throughput [token/s]."""
        return self.replay.throughput_tokens_per_s


def fastest(scenario: Scenario, *, pinned: bool) -> Run:
    """The fastest of the plans under cgopipe and s4, none of them on disk; plans that cannot win are not simulated.

    Raises
    ------
    InfeasibleError
        Without the disk none fits.
    """
    pins = Pins(pin_weights=pinned, weights_on_disk=0.0, kv_on_disk=0.0)
    candidates = Candidates(scenario=scenario, pins=pins, max_hours=24.0)
    best: Run | None = None
    for name in ("cgopipe", "s4"):
        try:
            tried = candidates.of(SCHEDULES[name])
        except HrmError:
            continue
        for policy, prediction in tried:
            if best is not None and prediction.throughput_tokens_per_s <= best.rate:
                break
            run = Run(name, policy, prediction, replay_plan(scenario, policy, name))
            if best is None or run.rate > best.rate:
                best = run
    if best is None:
        raise InfeasibleError("none fits without the disk")
    return best


def row_of(setting: str, machine: str, model: str, workload: str, generated: int) -> list[str]:
    """One line of the table."""
    profile, spec = load_profile(machine), load_model(model)
    work = load_workload(workload, generation_length=generated, num_requests=REQUESTS)
    scenario = Scenario(profile=profile, model=spec, workload=work, formats=choose_formats(profile, spec))
    peaks = replace(scenario, profile=replace(profile, efficiency=Efficiency()))
    first = [f"{setting}: {spec.name}, {machine}", f"{workload}, {generated}"]
    try:
        pinned, staged = (fastest(scenario, pinned=each) for each in (True, False))
    except InfeasibleError:
        return [*first, *["needs the disk"] * 2, *["-"] * 5]
    at_peaks = fastest(peaks, pinned=True).rate / fastest(peaks, pinned=False).rate
    more = pinned.prediction.startup_s - staged.prediction.startup_s
    saved = generated * (1.0 / staged.rate - 1.0 / pinned.rate)  # seconds a request
    # Rates within 1e-3 are the same to the simulator's fast way: then pinning never pays.
    never = pinned.rate <= staged.rate * (1.0 + 1e-3)
    requests = math.inf if never else max(0.0, more) / saved
    rates = [
        f"{run.rate:,.1f} ({run.schedule}, {run.policy.num_micro_batches} x {run.policy.micro_batch_size:,})"
        for run in (pinned, staged)
    ]
    pays = ["never"] * 2 if never else [f"{math.ceil(requests):,}", f"{requests / pinned.policy.batch_size:.2f}"]
    return [*first, *rates, f"{pinned.rate / staged.rate:.3f}", f"{more:,.0f}", *pays, f"{at_peaks:.3f}"]


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description="What pinning the weights once is worth.")
    parser.add_argument("--quick", action="store_true", help="mtbench with 128 generated tokens only")
    quick = parser.parse_args().quick
    print(f"| {' | '.join(HEAD)} |")
    print(f"|{'|'.join('---:' if place > 1 else '---' for place in range(len(HEAD)))}|")
    for setting, machine, model in SETTINGS:
        everything = (*MTBENCH, *(HELM if setting in ("S1", "S2") else ()))
        for workload, generated in (("mtbench", 128),) if quick else everything:
            print(f"{setting} {workload} {generated} ...", file=sys.stderr, flush=True)
            print(f"| {' | '.join(row_of(setting, machine, model, workload, generated))} |", flush=True)


if __name__ == "__main__":
    main()
