"""How long the fast replay takes, and how far it is from event by event: `python benchmarks/simulate.py [--runs 5]`.

Wanted on two idle cores, median of 5: at most 1 s for DBRX on t4 (40 layers, 256 generated tokens); and throughput,
prefill and decode within 0.1 % of `--full` on the runs of `SET`.

Seconds depend on the machine and on what else it does, so each is also given as a multiple of a loop of 100,000 SimPy
timeouts, timed in turn with it. Tests assert none of the seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any, NamedTuple

import simpy

from hrm.families import read_spec
from hrm.model_files import find_config
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.profile_files import load_profile
from hrm.scenario import Scenario, choose_formats
from hrm.search import find_policy
from hrm.workload import load_workload
from simulator.replay import replay_plan

SHORT = {
    "num_micro_batches": "n_ub",
    "attention_on_gpu": "A_g",
    "pin_weights": "pinned",
    "kv_on_disk": "KV on disk",
}
BAR_S, BAR_SHARE = 1.0, 1e-3
TIMEOUTS = 100_000


class Run(NamedTuple):
    """What is replayed: the best plan by the cost model with these variables pinned."""

    hw: str
    model: str
    generated: int
    requests: int = 10_000
    schedule: str = ""  # the plan's own
    pins: Pins = Pins()
    config: dict[str, Any] = {}  # what is changed of the model's config.json  # noqa: RUF012 (never written)

    @property
    def title(self) -> str:
        """In words."""
        changed = "".join(f", {value} {key.strip('n_')}" for key, value in self.config.items())
        given = "".join(f", {SHORT[key]} = {value:g}" for key, value in self.pins.given.items())
        return f"{self.model} on {self.hw}, {self.generated} tokens{changed}{given}"


TIMED = Run("t4", "dbrx", 256)
SET = (
    Run("l4", "mixtral-8x7b", 16, 3_000),
    Run("l4", "mixtral-8x7b", 16, 3_000, pins=Pins(num_micro_batches=24, attention_on_gpu=False)),
    Run("l4", "mixtral-8x7b", 16, 3_000, pins=Pins(num_micro_batches=24, attention_on_gpu=True)),
    Run("t4", "mixtral-8x7b", 4, 1_000, "s2", Pins(num_micro_batches=8, attention_on_gpu=False, pin_weights=False)),
    Run("t4", "mixtral-8x7b", 8, 3_000, pins=Pins(num_micro_batches=8, attention_on_gpu=False, kv_on_disk=0.5)),
    Run("t4", "dbrx", 4, 3_000, config={"n_layers": 8}),
    Run("t4x2", "mixtral-8x22b", 4, 3_000),
)


def load(run: Run) -> tuple[Scenario, Policy]:
    """Scenario and best policy of a run."""
    config = find_config(run.model)
    model = read_spec(**config | {"values": config["values"] | run.config})
    profile = load_profile(run.hw)
    workload = load_workload("mtbench", generation_length=run.generated, num_requests=run.requests)
    scenario = Scenario(profile=profile, model=model, workload=workload, formats=choose_formats(profile, model))
    return scenario, find_policy(scenario, run.pins).policy


def time_reference() -> float:
    """Seconds of a loop of SimPy timeouts [s]."""

    def process(environment: simpy.Environment) -> Any:
        for _ in range(TIMEOUTS):
            yield environment.timeout(1.0)

    environment = simpy.Environment()
    environment.process(process(environment))
    began = time.perf_counter()
    environment.run()
    return time.perf_counter() - began


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def show_times(runs: int) -> bool:
    """Time the fast replay; whether the bar is met."""
    scenario, policy = load(TIMED)
    replay_plan(scenario, policy)  # imports, caches
    loops: list[float] = []
    seconds: list[float] = []
    for _ in range(runs):
        loops.append(time_reference())
        began = time.perf_counter()
        found = replay_plan(scenario, policy)
        seconds.append(time.perf_counter() - began)
    median, loop = statistics.median(seconds), statistics.median(loops)
    met = median <= BAR_S
    print(f"{f'seconds, {runs} runs':60} {'median':>7} {'least':>7} {'most':>7} {'/ loop':>7}")
    print(f"{f'{TIMEOUTS:,} SimPy timeouts':60} {loop:7.3f} {min(loops):7.3f} {max(loops):7.3f} {1.0:7.2f}")
    print(
        f"{f'{TIMED.title}, n_ub = {policy.num_micro_batches}, {found.tasks:,} tasks':60} {median:7.3f} "
        f"{min(seconds):7.3f} {max(seconds):7.3f} {median / loop:7.2f}   bar {BAR_S:.1f} s: {_verdict(met)}"
    )
    return met


def show_differences() -> bool:
    """Set the fast replay beside event by event; whether every run meets the bar."""
    heads = f"{'token/s':>10} {'full':>10} {'rate':>9} {'prefill':>9} {'decode':>9} {'tasks':>9} {'full':>9}"
    print(f"\n{'fast against --full':72} {heads}")
    good = True
    for run in SET:
        scenario, policy = load(run)
        schedule = run.schedule or policy.schedule
        fast, full = (replay_plan(scenario, policy, schedule, full=each) for each in (False, True))
        off = [
            one / other - 1.0
            for one, other in (
                (fast.throughput_tokens_per_s, full.throughput_tokens_per_s),
                (fast.prefill_s, full.prefill_s),
                (fast.decode_s, full.decode_s),
            )
        ]
        met = all(abs(share) <= BAR_SHARE for share in off)
        good &= met
        print(
            f"{f'{run.title}: {schedule}':72} {fast.throughput_tokens_per_s:10.3f} "
            f"{full.throughput_tokens_per_s:10.3f} {off[0]:+9.4%} {off[1]:+9.4%} {off[2]:+9.4%} "
            f"{fast.tasks:9,} {full.tasks:9,}   bar {BAR_SHARE:.1%}: {_verdict(met)}",
            flush=True,
        )
    return good


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Time the fast replay and compare it with event by event.")
    parser.add_argument("--runs", type=int, default=5, help="runs, of which the median counts (5)")
    runs = parser.parse_args().runs
    if runs < 1:
        parser.error(f"--runs {runs}: at least 1")
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} before; Python {sys.version.split()[0]}")
    met = show_times(runs)
    met &= show_differences()
    print(f"load {os.getloadavg()[0]:.1f} after; {'all bars met' if met else 'a bar was MISSED'}")


if __name__ == "__main__":
    main()
