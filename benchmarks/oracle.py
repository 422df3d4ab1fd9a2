"""Long run of the search's oracle: many random small scenarios in full, and full-size ones by random points.

    python benchmarks/oracle.py --cases 2000 --first 10000 --points 40000

Prints one line per case that differs from brute force by more than the search says it may, and a summary. The same
checks, fewer of them, are in `tests/hrm/test_search.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "hrm"))

from search_oracle import Oracle, random_pins, random_scenario
from test_search import brute_force, rounding_loss, search_or_none, seconds_of


def check(seed: int, points: int) -> tuple[int, float, str]:
    """(integer points, seconds of the plan over the best of brute force, what is wrong)."""
    oracle = Oracle(random_scenario(seed))
    pins = random_pins(oracle, seed, points)
    least, count = brute_force(oracle, pins)
    result = search_or_none(oracle.scenario, pins, 24.0)
    if result is None:
        return count, 1.0, "" if least == float("inf") else f"no plan, brute force has one of {least:.6g} s"
    found = seconds_of(result)
    wrong = ""
    if found > least / (1.0 - result.solver.gap) + rounding_loss(oracle, result):
        wrong = f"{found:.6g} s, brute force {least:.6g} s, gap {result.solver.gap:.2g}"
    elif found < least * (1.0 - 1e-6) and not result.policy.everything_on_cpu:
        wrong = f"{found:.6g} s is better than brute force, {least:.6g} s"
    elif not all(use.fits for use in result.prediction.memory.values()):
        wrong = "it does not fit"
    return count, found / least if least < float("inf") else 1.0, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=10_000, help="seed of the first case")
    parser.add_argument("--points", type=int, default=20_000, help="most integer points of a case")
    options = parser.parse_args()
    started, points, worst, wrong = time.perf_counter(), 0, 1.0, 0
    for seed in range(options.first, options.first + options.cases):
        count, ratio, what = check(seed, options.points)
        points, worst = points + count, max(worst, ratio)
        if what:
            wrong += 1
            print(f"case {seed}: {what}", flush=True)
    took = time.perf_counter() - started
    print(f"{options.cases} cases, {points:,} integer points, {wrong} wrong, worst ratio {worst:.6f}, {took:.0f} s")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
