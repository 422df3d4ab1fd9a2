"""Plan every bundled model on every bundled machine for every published workload, and add up each plan's memory anew.

    python benchmarks/grid.py [--machines t4,l4] [--models dbrx] [--workloads mtbench] [--jobs 2] [--csv grid.csv]

Progress goes to stderr, one row per case to stdout. Exit code 1 if any plan exceeds a limit by the independent sum
(`tests/hrm/memory_oracle.py`), counts less than that sum itself, or has a number that makes no sense.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "hrm"))

from memory_oracle import add_up, limits

from hrm.errors import InfeasibleError, InputError
from hrm.model_files import load_model, model_names
from hrm.profile_files import load_profile, profile_names
from hrm.scenario import Scenario, choose_formats
from hrm.search import SearchResult, find_policy
from hrm.workload import load_workload, workload_names

MAX_HOURS = 24.0
COLUMNS = (
    "machine", "model", "workload", "token_s", "N", "mu", "n_ub", "prefill", "A_g", "F_g", "r_w", "w_disk", "r_c",
    "kv_disk", "slots", "dense", "emb", "head", "pin", "gpu_use", "cpu_use", "bottleneck", "solve_s", "problem",
)  # fmt: skip


def problems_of(scenario: Scenario, found: SearchResult) -> list[str]:
    """What is wrong with a plan: nothing, as it should be."""
    problems = []
    added = add_up(scenario.profile, scenario.model, scenario.workload, scenario.formats, found.policy)
    room = limits(scenario.profile)
    for level, terms in added.items():
        needed, own = sum(terms.values()), found.prediction.memory[level].peak_bytes
        if needed > room[level] * (1 + 1e-9) + 1.0:
            problems.append(f"{level} over its limit by {(needed - room[level]) / 2**30:.3f} GiB")
        if needed > own * (1 + 1e-9) + 1.0:
            problems.append(f"{level} counts {(needed - own) / 2**30:.3f} GiB too little")
        problems += [f"{level}: {name} is negative" for name, value in terms.items() if value < -1.0]
    prediction = found.prediction
    for name in ("prefill_s", "decode_s", "startup_s", "completion_s", "throughput_tokens_per_s"):
        value = getattr(prediction, name)
        if not math.isfinite(value) or value < 0:
            problems.append(f"{name} is {value}")
    if prediction.batch_s > MAX_HOURS * 3600 * (1 + 1e-6):
        problems.append(f"a batch takes {prediction.batch_s / 3600:.1f} h")
    for phase in (prediction.decode, prediction.prefill):
        if min(phase.lanes.values()) < -1e-9 or min(phase.bytes_moved.values(), default=0.0) < -1.0:
            problems.append("a lane is negative")
    return problems


def run_case(machine: str, name: str, workload_name: str) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row |= {"machine": machine, "model": name, "workload": workload_name}
    started = time.perf_counter()
    try:
        profile, model = load_profile(machine), load_model(name)
        scenario = Scenario(
            profile=profile, model=model, workload=load_workload(workload_name), formats=choose_formats(profile, model)
        )
        found = find_policy(scenario, max_hours=MAX_HOURS)
    except (InfeasibleError, InputError) as error:
        named = isinstance(error, InputError) or "over the limit of" in str(error)
        row |= {"bottleneck": f"no plan: {error}"[:110], "problem": "" if named else "no limit is named"}
    except Exception as error:
        row["problem"] = f"{type(error).__name__}: {error}"
    else:
        policy, prediction = found.policy, found.prediction
        use = {level: memory.peak_bytes / max(memory.limit_bytes, 1.0) for level, memory in prediction.memory.items()}
        row |= {
            "token_s": f"{prediction.throughput_tokens_per_s:.2f}",
            "N": policy.batch_size,
            "mu": policy.micro_batch_size,
            "n_ub": policy.num_micro_batches,
            "prefill": policy.prefill_micro_batch_size,
            "A_g": int(policy.attention_on_gpu),
            "F_g": int(policy.ffn_on_gpu),
            "r_w": f"{policy.weights_on_gpu:.3f}",
            "w_disk": f"{policy.weights_on_disk:.3f}",
            "r_c": f"{policy.kv_on_gpu:.3f}",
            "kv_disk": f"{policy.kv_on_disk:.3f}",
            "slots": f"ring {policy.ring_experts}" if policy.ring_experts else policy.weight_slots,
            "dense": int(policy.dense_weights_on_gpu),
            "emb": int(policy.embedding_on_gpu),
            "head": int(policy.lm_head_on_gpu),
            "pin": int(policy.pin_weights),
            "gpu_use": f"{use['gpu']:.3f}",
            "cpu_use": f"{use['cpu']:.3f}",
            "bottleneck": "CPU only" if policy.everything_on_cpu else prediction.bottleneck,
            "problem": "; ".join(problems_of(scenario, found)),
        }
    row["solve_s"] = f"{time.perf_counter() - started:.2f}"
    return row


def main() -> int:
    """Run the grid and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, choices in (("machines", profile_names()), ("models", model_names()), ("workloads", workload_names())):
        parser.add_argument(f"--{option}", default=",".join(choices), help="comma-separated; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--csv", type=Path, help="also write the table here")
    given = parser.parse_args()
    cases = list(product(given.machines.split(","), given.models.split(","), given.workloads.split(",")))
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    with ProcessPoolExecutor(max_workers=given.jobs) as pool:
        futures = {pool.submit(run_case, *case): case for case in cases}
        for done, future in enumerate(as_completed(futures), 1):
            case, row = futures[future], future.result()
            rows[case] = row
            state = row["problem"] or (f"{row['token_s']} token/s" if row["token_s"] else "no plan")
            print(f"[{done}/{len(cases)}] {' '.join(case)}: {state}", file=sys.stderr, flush=True)
    table = [rows[case] for case in cases]
    widths = {column: max(len(column), *(len(str(row[column])) for row in table)) for column in COLUMNS}
    for line in ({column: column for column in COLUMNS}, *table):
        print("  ".join(str(line[column]).ljust(widths[column]) for column in COLUMNS).rstrip())
    if given.csv is not None:
        with given.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(table)
    wrong = sum(bool(row["problem"]) for row in table)
    planned = sum(bool(row["token_s"]) for row in table)
    print(f"{len(table)} cases, {planned} plans, {wrong} with a problem", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
