"""Print the tables of docs/findings.md that the published rows give: `python docs/findings_published.py`.

What the rows say of other forms of the model; what a plan of this project would gain over the published policies, and
how much CPU memory it needs for the same throughput; what four GPUs give over two; what binds as generation grows. But
for the column that says so nothing here is a measurement: it is the full cost model with the shipped constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

from hrm.errors import HrmError
from hrm.pins import Pins
from hrm.prediction import Prediction
from hrm.published.constants import Values
from hrm.published.fit import fit_constants, usable_rows
from hrm.published.model import Run, full_row, policy_of_row, price_run, run_of_row, scenario_for
from hrm.published.rows import Row, bundled_rows
from hrm.published.systems import fitted_values
from hrm.scenario import Scenario
from hrm.search import find_policy
from hrm.units import GIB

GAIN_ROWS = ("P048", "P050", "P064", "P066", "P052", "P054", "P068", "P070", "P056", "P058", "P076", "P078")
NO_DISK = {"weights_on_disk": 0.0, "kv_on_disk": 0.0}


def best_plan(scenario: Scenario, **pins: object) -> Prediction | None:
    """Prediction of the best plan without the disk; None where nothing fits."""
    try:
        return find_policy(scenario, Pins(**NO_DISK, **pins), max_hours=1000.0).prediction  # type: ignore[arg-type]
    except HrmError:
        return None


def with_cpu_memory(scenario: Scenario, size: float) -> Scenario:
    """The same machine with another amount of CPU memory [byte]."""
    profile = scenario.profile
    return replace(scenario, profile=replace(profile, cpu=replace(profile.cpu, memory_bytes=size)))


def memory_for(scenario: Scenario, tokens_per_s: float) -> float | None:
    """Least CPU memory with which the best plan is as fast, to 1 GiB [byte]; None where all of it is not enough."""

    def reaches(size: float) -> bool:
        found = best_plan(with_cpu_memory(scenario, size))
        return found is not None and found.throughput_tokens_per_s >= tokens_per_s

    low, high = 16.0 * GIB, scenario.profile.cpu.memory_bytes
    if not reaches(high):
        return None
    while high - low > GIB:
        middle = (low + high) / 2.0
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def other_forms() -> None:
    """The model with one assumption turned round, its constants fitted again."""

    def flexgen_overlaps(run: Run) -> Run:
        return replace(run, behaviour=replace(run.behaviour, overlaps=True))

    def kernels_overlap(run: Run) -> Run:
        profile = run.scenario.profile
        profile = replace(profile, efficiency=replace(profile.efficiency, gpu_overlap=1.0))
        return replace(run, scenario=replace(run.scenario, profile=profile))

    def nothing_overlaps(run: Run) -> Run:
        whose = run.policy.attention_on_gpu or not run.behaviour.overlaps
        return run if whose else replace(run, behaviour=replace(run.behaviour, overlaps=False))

    forms: dict[str, Callable[[Run], Run]] = {
        "as shipped": lambda run: run,
        "FlexGen's lanes overlap too": flexgen_overlaps,
        "in a GPU operator the shorter of bytes and FLOPs hides (roofline)": kernels_overlap,
        "MoE-Lightning's lanes add up too": nothing_overlaps,
    }
    rows = usable_rows(bundled_rows())
    print("| form | median, 38 rows | p90 | MoE-Lightning | FlexGen | DeepSpeed | constants it takes |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for words, change in forms.items():

        def rate(row: Row, values: Values, change: Callable[[Run], Run] = change) -> float:
            return price_run(change(run_of_row(row, values))).tokens_per_s

        fitted = fit_constants(rows, predict=rate)
        errors = {row: abs(rate(row, fitted.values) / float(row.measured_tokens_per_s or 1.0) - 1.0) for row in rows}
        by = [
            median(error for row, error in errors.items() if row.system.startswith(family))
            for family in ("MoE", "FlexGen", "DeepSpeed")
        ]
        every = sorted(errors.values())
        taken = ", ".join(
            f"{each.constant.name} {each.value:.3g}" for each in fitted.constants if each.status == "fitted"
        )
        cells = [median(every), every[round(0.9 * (len(every) - 1))], *by]
        print(f"| {words} | {' | '.join(f'{cell:.1%}' for cell in cells)} | {taken} |")


def gains(rows: dict[str, Row]) -> None:
    """The published policies against plans of this project."""
    print(
        "| row | setting, generated, prompts | measured | published policy, model | best plan, staged | pinned |",
        end="",
    )
    print(" gain | CPU memory for the same rate |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    values = fitted_values()
    for name in GAIN_ROWS:
        row = rows[name]
        modelled = full_row(row, values).tokens_per_s
        policy, _ = policy_of_row(row)
        scenario = scenario_for(row, values, num_requests=max(10_000, policy.batch_size))
        staged, pinned = (best_plan(scenario, pin_weights=pin) for pin in (False, True))
        if staged is None or pinned is None:
            continue
        needed = memory_for(scenario, modelled)
        memory = "-" if needed is None else f"{needed / GIB:.0f} of {scenario.profile.cpu.memory_bytes / GIB:.0f} GiB"
        padded = "padded" if row.padded else "unpadded"
        best = max(staged.throughput_tokens_per_s, pinned.throughput_tokens_per_s)
        print(
            f"| {name} | {row.setting}, {row.gen_len}, {padded} | {row.measured_tokens_per_s:.1f} | {modelled:.1f} | "
            f"{staged.throughput_tokens_per_s:.1f} | {pinned.throughput_tokens_per_s:.1f} | {best / modelled:.2f} | "
            f"{memory} |"
        )


def four_gpus(rows: dict[str, Row]) -> None:
    """Four T4s over two: by the policy the authors' planner finds on each, and by the best plan on each."""
    print(
        "| model | generated, prompts | authors' policy, 2 x T4 | 4 x T4 | ratio | best plan, 2 x T4 | 4 x T4 | ratio |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    values = fitted_values()
    for name, more in (("P056", "S7"), ("P058", "S7"), ("P076", "S9"), ("P078", "S9")):
        row = rows[name]
        unknown = replace(row, id="", batch_size=None, micro_batch_size=None, num_micro_batches=None)
        theirs = [full_row(replace(unknown, setting=each), values).tokens_per_s for each in (row.setting, more)]
        rates = []
        for setting in (row.setting, more):
            scenario = scenario_for(replace(row, setting=setting), values, num_requests=10_000)
            found = best_plan(scenario, pin_weights=False)
            rates.append(0.0 if found is None else found.throughput_tokens_per_s)
        padded = "padded" if row.padded else "unpadded"
        model = "Mixtral 8x22B" if more == "S7" else "DBRX"
        pairs = " | ".join(f"{two:.1f} | {four:.1f} | {four / two:.2f}" for two, four in (theirs, rates))
        print(f"| {model} | {row.gen_len}, {padded} | {pairs} |")


def longer_generation(rows: dict[str, Row]) -> None:
    """What binds, and what is full, as generation grows."""
    print("| setting | generated | token/s | N | mu | binds | GPU memory | CPU memory |")
    print("|---|---:|---:|---:|---:|---|---:|---:|")
    values = fitted_values()
    for name in ("P066", "P070", "P058"):
        for generated in (32, 128, 512):
            row = replace(rows[name], gen_len=generated)
            scenario = scenario_for(row, values, num_requests=10_000)
            try:
                found = find_policy(scenario, Pins(**NO_DISK, pin_weights=False), max_hours=1000.0)  # type: ignore[arg-type]
            except HrmError as error:
                print(f"| {row.setting} | {generated} | {error} | | | | | |")
                continue
            use = found.prediction.memory
            full = [f"{use[level].peak_bytes / use[level].limit_bytes:.0%}" for level in ("gpu", "cpu")]
            print(
                f"| {row.setting} | {generated} | {found.prediction.throughput_tokens_per_s:.1f} | "
                f"{found.policy.batch_size} | {found.policy.micro_batch_size} | {found.prediction.bottleneck} | "
                f"{full[0]} | {full[1]} |"
            )


def main() -> None:
    """Print all tables."""
    rows = {row.id: row for row in bundled_rows()}
    other_forms()
    print()
    for table in (gains, four_gpus, longer_generation):
        table(rows)
        print()


if __name__ == "__main__":
    main()
