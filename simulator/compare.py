"""Every schedule beside the others: under the best plan of the search, and each under the best plan of its own.

"Same policy" means the same N, mu and r_w, with what a schedule cannot do replaced (and said). A plan of its own is the
best of several by simulation, since the cost model takes schedules with attention in the same place for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hrm.errors import HrmError, InputError
from hrm.gantt import Panel, layer_panel
from hrm.pictures import Picture
from hrm.plans import Plan
from hrm.policy import Policy
from hrm.prediction import Prediction
from hrm.rates import derive_rates
from hrm.scenario import Scenario, measure_sizes
from hrm.schedules import SCHEDULES, check_schedule
from hrm.shown import Shown
from hrm.trivial import predict_policy
from simulator.own_plans import Candidates, overrides_for, same_policy
from simulator.replay import Replay, replay_plan
from simulator.step_account import run_step

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

__all__ = ["Comparison", "Entry", "compare_schedules", "read_schedules", "take_fastest"]

BEST = "cgopipe"
"""The schedule that the paper puts first; where it is not, that is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One schedule under one policy.

    Attributes
    ----------
    schedule : str
    policy : Policy or None
        None where there is none that the schedule can run.
    overrides : mapping of str to value
        Fields of the policy that differ from the best plan's because the schedule needs it.
    prediction : Prediction or None
        By the full cost model, which knows attention on GPU or CPU but no schedule.
    replay : Replay or None
        Simulated.
    panel : Panel or None
        Timeline of two layers of the decode step in the middle, where it was asked for.
    reason : str
        Why there is nothing to show, else empty.
    """

    schedule: str
    policy: Policy | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    prediction: Prediction | None = None
    replay: Replay | None = None
    panel: Panel | None = None
    reason: str = ""

    @property
    def over_bytes(self) -> dict[str, float]:
        """By how much it does not fit, by level [byte]; empty where it fits."""
        if self.prediction is None:
            return {}
        return {
            level: use.peak_bytes - use.limit_bytes for level, use in self.prediction.memory.items() if not use.fits
        }

    @property
    def is_priced(self) -> bool:
        """Whether the cost model has it: experts on the CPU with some of them on the GPU are priced by simulation."""
        policy = self.policy
        return policy is not None and (policy.ffn_on_gpu or policy.weights_on_gpu == 0.0)

    @property
    def fits(self) -> bool:
        """Whether it was simulated and fits every level."""
        return self.replay is not None and not self.over_bytes

    @property
    def rate(self) -> float:
        """Simulated throughput, 0 where there is none [token/s]."""
        return 0.0 if self.replay is None else self.replay.throughput_tokens_per_s

    @property
    def bubble_share(self) -> float | None:
        """Share of the decode step in the middle above its busiest lane; None where one token is generated."""
        if self.replay is None or self.replay.layer_latency_s == 0.0:
            return None
        return max(0.0, 1.0 - self.replay.bound_layer_latency_s / self.replay.layer_latency_s)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Shown):
    """Schedules beside each other.

    Attributes
    ----------
    scenario : Scenario
    plan : Plan
        The best of the search, whose policy is the same one for all.
    contention : bool
    same, own : tuple of Entry
        Under that policy; each under a plan of its own. In the order of `SCHEDULES`.
    """

    scenario: Scenario
    plan: Plan
    contention: bool
    same: tuple[Entry, ...]
    own: tuple[Entry, ...]

    def to_dict(self) -> dict[str, Any]:
        """As `hrm compare --json` prints it (docs/cli.md)."""
        from simulator.compare_tables import comparison_document  # it imports this module

        return comparison_document(self)

    def to_frame(self) -> pd.DataFrame:
        """A row per schedule, under the same policy and under a plan of its own, in SI units."""
        import pandas as pd

        found = self.to_dict()
        rows = [{"under": key.replace("_", " ")} | row for key in ("same_policy", "own_plan") for row in found[key]]
        return pd.DataFrame(rows)

    def print_to(self, console: Console) -> None:
        """The screen of `hrm compare`."""
        from simulator.compare_tables import print_comparison

        print_comparison(self, console)

    def draw(self) -> Picture:
        """Timelines of two layers under the same policy, a panel per schedule; needs ``panels=True``.

        Raises
        ------
        InputError
            No schedule has a decode step to show.
        """
        from simulator.compare_tables import comparison_figure

        return Picture(comparison_figure(self))


def read_schedules(text: str | None) -> tuple[str, ...]:
    """Names from a list with commas, in the order of `SCHEDULES`; all where none are given.

    Raises
    ------
    InputError
        A name that is none, twice the same, or an empty list.
    """
    if text is None:
        return tuple(SCHEDULES)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SCHEDULES:
            way_out = f"some of {', '.join(SCHEDULES)}, with commas between them"
            raise InputError(f"there is no schedule {name!r}", where="--schedules", way_out=way_out)
        if names.count(name) > 1:
            raise InputError(f"{name} is there twice", where="--schedules", way_out="each once")
    return tuple(name for name in SCHEDULES if name in names)


def compare_schedules(
    plan: Plan,
    names: Sequence[str] | None = None,
    *,
    contention: bool = True,
    panels: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Simulate schedules under the policy of a plan, and under plans of their own.

    Parameters
    ----------
    plan : Plan
        The best one of the full cost model.
    names : sequence of str, optional
        Schedules; all by default.
    contention : bool
        Let lanes share memory, link and cores.
    panels : bool
        Keep the timelines of the entries under the same policy.
    on_progress : callable, optional
        Called with a line of text now and then.

    Returns
    -------
    Comparison
    """
    runs = _Runs(plan.scenario, contention, on_progress)
    candidates = Candidates(
        scenario=plan.scenario,
        pins=plan.inputs.pins,
        max_hours=plan.inputs.max_hours,
        trivial=plan.trivial,
        on_progress=on_progress,
    )
    chosen = tuple(SCHEDULES) if names is None else tuple(names)
    same = tuple(_under(name, plan.policy, runs, panel=panels) for name in chosen)
    return Comparison(
        scenario=plan.scenario,
        plan=plan,
        contention=contention,
        same=same,
        own=tuple(_by_itself(entry, candidates, runs) for entry in same),
    )


@dataclass(slots=True)
class _Runs:
    """Simulated runs, each made once."""

    scenario: Scenario
    contention: bool
    on_progress: Callable[[str], None] | None
    known: dict[tuple[str, Policy], Replay] = field(default_factory=dict)

    def replay(self, name: str, policy: Policy) -> Replay:
        found = self.known.get((name, policy))
        if found is None:
            if self.on_progress is not None:
                self.on_progress(f"replaying {name}, N = {policy.batch_size:,}, n_ub = {policy.num_micro_batches:,}")
            found = replay_plan(self.scenario, policy, name, contention=self.contention)
            self.known[(name, policy)] = found
        return found

    def entry(self, name: str, policy: Policy, overrides: Mapping[str, Any], *, panel: bool) -> Entry:
        """Everything about a schedule under a policy that it can run."""
        scenario = self.scenario
        rates = derive_rates(scenario.profile, scenario.formats)
        replay = self.replay(name, policy)
        run = run_step(scenario, policy, name, contention=self.contention) if panel else None
        return Entry(
            schedule=name,
            policy=policy,
            overrides=overrides,
            prediction=predict_policy(scenario, measure_sizes(scenario), rates, policy),
            replay=replay,
            panel=None if run is None else layer_panel(run.trace, run.first, title=name),
        )


def _under(name: str, base: Policy, runs: _Runs, *, panel: bool) -> Entry:
    """A schedule under the policy of the best plan."""
    try:
        policy = same_policy(SCHEDULES[name], base, runs.scenario)
        check_schedule(name, policy)
        return runs.entry(name, policy, overrides_for(SCHEDULES[name], base, runs.scenario), panel=panel)
    except HrmError as error:
        return Entry(schedule=name, reason=_reason(error))


def _by_itself(same: Entry, candidates: Candidates, runs: _Runs) -> Entry:
    """A schedule under the fastest of its candidates; the same policy as the others have is one where it fits."""
    name = same.schedule

    def rate(policy: Policy) -> float:
        check_schedule(name, policy)
        return runs.replay(name, policy).throughput_tokens_per_s

    try:
        tried = candidates.of(SCHEDULES[name])
        if same.fits and same.policy is not None and same.prediction is not None:
            tried = sorted({**dict(tried), same.policy: same.prediction}.items(), key=_predicted, reverse=True)
        # Experts on the CPU with some of them on the GPU are not in the cost model: its word is no bound there.
        policy = take_fastest(tried, rate, bounded=name != "static_experts")
        return runs.entry(name, policy, {}, panel=False)
    except HrmError as error:
        return Entry(schedule=name, reason=_reason(error))


def take_fastest(
    candidates: Sequence[tuple[Policy, Prediction]], rate: Callable[[Policy], float], *, bounded: bool = True
) -> Policy:
    """The policy with the highest rate; where predictions bound rates, those that cannot win are not tried.

    Parameters
    ----------
    candidates : sequence of (Policy, Prediction)
        The best by prediction first; at least one.
    rate : callable
        Policy -> token/s; an `InputError` where it cannot run.
    bounded : bool
        No rate is above its prediction, since no schedule is faster than its busiest lane.

    Raises
    ------
    InputError
        None of them can run; the reason of the first.
    """
    best: tuple[float, Policy] | None = None
    refused: list[InputError] = []
    for policy, prediction in candidates:
        if bounded and best is not None and prediction.throughput_tokens_per_s <= best[0]:
            break
        try:
            found = rate(policy)
        except InputError as error:
            refused.append(error)
            continue
        if best is None or found > best[0]:
            best = found, policy
    if best is None:
        raise refused[0]
    return best[1]


def _predicted(entry: tuple[Policy, Prediction]) -> float:
    return entry[1].throughput_tokens_per_s


def _reason(error: HrmError) -> str:
    """The message without the name of the schedule, which stands beside it."""
    if isinstance(error, InputError) and error.where.startswith("schedule"):
        return f"{error.fact} ({error.way_out})" if error.way_out else error.fact
    return str(error)
