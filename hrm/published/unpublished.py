"""The policy of a row whose micro-batch or batch was not published.

Of MoE-Lightning without either: what the authors' own planner (Eqs. 12-14) says on the grid of micro-batches that it
steps through. On the cells whose policy was published it finds the micro-batch that ran in every one, and N in half.
With N known and the micro-batch not: the best plan of this project's search for that N, over the same grid. Of FlexGen:
the best plan of the search for its schedule, with a micro-batch of the size of its published ones. DeepSpeed needs
none: its batch is what fits the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hrm.errors import HrmError, InputError
from hrm.paper_cost import paper_terms
from hrm.paper_search import find_paper_policy
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.published.policies import RowPolicy, room_for_weights
from hrm.published.rows import Row
from hrm.published.settings import System, find_setting, scenario_of
from hrm.published.systems import behaviour_of
from hrm.scenario import Scenario
from hrm.search import find_policy

__all__ = ["choose_policy", "grid_of_authors", "is_unpublished"]

SMALL = (1, 2, 3, 4)
STEP = 32
LARGEST = 4096
"""The authors' planner steps its micro-batch through 1, 2, 3, 4, 36, 68, ...; none that fits comes near the largest."""

FLEXGEN_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Its published micro-batches are 3 to 64 on these cards, whatever a planner would have taken."""

ScenarioOf = Callable[[int], Scenario]
"""The row's requests, as many as asked for, on its machine as its system uses it."""


def is_unpublished(row: Row, system: System) -> bool:
    """Whether a policy has to be chosen: the micro-batch is not known, or neither N nor the number of micro-batches."""
    if system.schedule == "streaming":
        return False
    return row.micro_batch_size is None or (row.batch_size is None and row.num_micro_batches is None)


def choose_policy(row: Row, system: System, scenario_with: ScenarioOf) -> tuple[Policy | RowPolicy, str]:
    """The policy that a row is taken to have run, and a note that says how it was chosen.

    Raises
    ------
    InputError, InfeasibleError
        There is none; the message says why.
    """
    n, n_ub = row.batch_size, row.num_micro_batches
    if system.schedule != "cgopipe":
        return _searched(row, system, scenario_with)
    if n is None:
        return _by_authors(row)
    if n_ub is not None:
        mu = -(-n // n_ub)
        return _filled(row, system, mu, n), f"mu = {mu} from N and n_ub"
    return _for_its_batch(row, n, scenario_with)


def grid_of_authors(most: int = LARGEST) -> tuple[int, ...]:
    """Micro-batches that the authors' planner looks at."""
    return (*SMALL, *range(SMALL[-1] + STEP, most + 1, STEP))


def _by_authors(row: Row) -> tuple[RowPolicy, str]:
    """The authors' planner: most decode throughput by Eq. 12, over its grid of mu and every n_ub."""
    scenario = scenario_of(row, profile=find_setting(row).authors_profile)
    best: tuple[float, Policy] | None = None
    reason: HrmError | None = None
    known = row.micro_batch_size
    for mu in grid_of_authors() if known is None else (known,):
        pins = Pins(
            micro_batch_size=mu, num_micro_batches=row.num_micro_batches, attention_on_gpu=False, ffn_on_gpu=True
        )
        try:
            found = find_paper_policy(scenario, pins)
        except HrmError as error:
            reason = reason or error
            if mu > SMALL[-1]:
                break  # a larger one takes more memory still
            continue
        rate = found.prediction.decode_throughput_tokens_per_s
        if best is None or rate > best[0]:
            best = (rate, found.policy)
    if best is None:
        raise reason or InputError("no micro-batch fits", where=row.id)
    policy = best[1]
    share = policy.weights_on_gpu if row.weights_on_gpu is None else row.weights_on_gpu
    note = (
        f"mu = {policy.micro_batch_size}, n_ub = {policy.num_micro_batches}, r_w = {share:.4g}: what the authors' "
        "planner (Eqs. 12-14) says on its grid, as the policy was not published"
    )
    return RowPolicy(
        batch_size=policy.batch_size,
        micro_batch_size=policy.micro_batch_size,
        num_micro_batches=policy.num_micro_batches,
        attention_on_gpu=False,
        weights_on_gpu=share,
        kv_on_gpu=0.0,
        note=note,
    ), note


def _for_its_batch(row: Row, batch_size: int, scenario_with: ScenarioOf) -> tuple[Policy, str]:
    """The best plan for N among the grid's micro-batches that keep the authors' GPU memory limit.

    Those that divide N, as in every published policy; where only the smallest do (N is what finished), all of them.
    """
    terms = paper_terms(scenario_of(row, profile=find_setting(row).authors_profile, num_requests=batch_size))
    grid = [
        mu
        for mu in grid_of_authors(batch_size)
        if mu <= batch_size and room_for_weights(terms, float(mu), float(batch_size)) >= 0
    ]
    dividing = [mu for mu in grid if batch_size % mu == 0]
    whole = any(mu > SMALL[-1] for mu in dividing) or grid == dividing
    scenario = scenario_with(batch_size)
    best: tuple[float, Policy] | None = None
    reason: HrmError | None = None
    for mu in dividing if whole else grid:
        pins = Pins(
            batch_size=batch_size,
            micro_batch_size=mu,
            attention_on_gpu=False,
            ffn_on_gpu=True,
            weights_on_gpu=row.weights_on_gpu,
            weights_on_disk=0.0,
            kv_on_disk=0.0,
            weight_slots=2,
            pin_weights=False,
        )
        try:
            found = find_policy(scenario, pins, max_hours=1000.0)
        except HrmError as error:
            reason = error
            continue
        rate = found.prediction.throughput_tokens_per_s
        if best is None or rate > best[0]:
            best = (rate, found.policy)
    if best is None:
        raise reason or InputError("no micro-batch keeps the authors' GPU memory limit", where=row.id)
    policy = best[1]
    return policy, (
        f"mu = {policy.micro_batch_size}, n_ub = {policy.num_micro_batches}: this planner's plan for its N over the "
        "authors' grid of micro-batches"
    )


def _searched(row: Row, system: System, scenario_with: ScenarioOf) -> tuple[Policy, str]:
    """The best plan of the search for the system's schedule, with what is known of the policy given."""
    scenario = scenario_with(row.batch_size or 10_000)
    best: tuple[float, Policy] | None = None
    reason: HrmError | None = None
    for mu in FLEXGEN_MICRO_BATCHES if row.micro_batch_size is None else (row.micro_batch_size,):
        try:
            pins = Pins(
                batch_size=row.batch_size,
                micro_batch_size=mu,
                num_micro_batches=row.num_micro_batches,
                attention_on_gpu=system.attention_on_gpu,
                ffn_on_gpu=True,
                weights_on_gpu=row.weights_on_gpu,
                kv_on_gpu=0.0,
                weights_on_disk=0.0,
                kv_on_disk=0.0,
                weight_slots=2,
                pin_weights=behaviour_of(system).pins_weights,
            )
            found = find_policy(scenario, pins, max_hours=1000.0, explain=False)
        except HrmError as error:
            reason = error
            continue
        rate = found.prediction.throughput_tokens_per_s
        if best is None or rate > best[0]:
            best = (rate, found.policy)
    if best is None:
        raise reason or InputError("no micro-batch fits", where=row.id)
    policy = replace(best[1], parallelism=system.parallelism)
    return policy, (
        f"mu = {policy.micro_batch_size}, n_ub = {policy.num_micro_batches}, N = {policy.batch_size}: this planner's "
        f"plan for {system.schedule}, as the policy was not published; what ran may be far from it"
    )


def _filled(row: Row, system: System, mu: int, batch_size: int) -> RowPolicy:
    """A policy whose micro-batches are known, with the share of weights that the authors' planner fills in."""
    terms = paper_terms(scenario_of(row, profile=find_setting(row).authors_profile, num_requests=batch_size))
    share = row.weights_on_gpu
    if share is None:
        share = max(0.0, room_for_weights(terms, float(mu), float(batch_size)))
    return RowPolicy(
        batch_size=batch_size,
        micro_batch_size=mu,
        num_micro_batches=-(-batch_size // mu),
        attention_on_gpu=system.attention_on_gpu,
        weights_on_gpu=share,
        kv_on_gpu=0.0,
    )
