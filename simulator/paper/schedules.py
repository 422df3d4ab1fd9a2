"""Figure 6: four schedules of one decode layer under one policy, simulated.

The policy is a published one: MoE-Lightning's on S2 (L4, Mixtral 8x7B), MTBench padded, 128 generated; on the machine
with its fitted constants. Every schedule keeps its N, mu and r_w; S4 puts attention on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from hrm.errors import InputError
from hrm.gantt import Panel, draw_timelines, layer_panel
from hrm.notebook_size import at_size
from hrm.paper.showing import PaperFigure
from hrm.policy import Policy
from hrm.published.model import policy_of_row, scenario_for
from hrm.published.rows import bundled_rows
from hrm.published.systems import fitted_values
from hrm.rates import derive_rates
from hrm.scenario import Scenario, measure_sizes
from hrm.schedules import SCHEDULES
from hrm.trivial import predict_policy
from simulator.own_plans import same_policy
from simulator.step_account import COPIES, StepAccount, account_for_step, run_step

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["SHOWN", "ScheduledLayer", "ScheduledLayers", "schedule_layers", "simulate_schedules"]

SHOWN: Final = ("cgopipe", "s2", "s3", "s4")
ROW: Final = "P054"
FEW_LAYERS: Final = 8
"""Of the model at the small size; the layer that is shown has as many before and after it."""

WORDS: Final = {
    "cgopipe": "CGOPipe: CPU attention, weights in pages",
    "s2": "S2: CPU attention, weights in one block",
    "s3": "S3: CPU attention, one micro-batch at a time",
    "s4": "S4: GPU attention, KV cache copied",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledLayer:
    """One schedule.

    Attributes
    ----------
    schedule : str
    panel : Panel
        One layer in the middle of the stack.
    account : StepAccount
        Of the whole decode step.
    layers : int
    fits : bool
        Whether the policy, as this schedule runs it, keeps every memory limit of the machine.
    """

    schedule: str
    panel: Panel
    account: StepAccount
    layers: int
    fits: bool

    @property
    def layer_s(self) -> float:
        """Decode step over its layers [s]."""
        return self.account.seconds / self.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledLayers(PaperFigure):
    """Schedules beside each other.

    Attributes
    ----------
    scenario : Scenario
    policy : Policy
    entries : tuple of ScheduledLayer
    """

    scenario: Scenario
    policy: Policy
    entries: tuple[ScheduledLayer, ...]

    def to_frame(self) -> pd.DataFrame:
        """A row per schedule: a layer's time [ms], over the first schedule's, of its busiest lane alone, of its copies.

        "bubble" is the share of the layer's time above that lane.
        """
        import pandas as pd

        first = self.entries[0].layer_s
        found = []
        for entry in self.entries:
            account, seconds = entry.account, entry.account.seconds
            gpu = sum(busy for lane, busy in account.busy_s.items() if lane.startswith("gpu")) / seconds
            found.append(
                {
                    "schedule": entry.schedule,
                    "layer [ms]": entry.layer_s * 1e3,
                    f"over {self.entries[0].schedule}": entry.layer_s / first,
                    "busiest lane alone [ms]": account.bound_s / entry.layers * 1e3,
                    "bubble": account.bubble_s / seconds,
                    "GPU busy": gpu,
                    **{f"{name} [ms]": account.copies[name].seconds / entry.layers * 1e3 for name in COPIES.values()},
                    "fits": entry.fits,
                }
            )
        return pd.DataFrame(found).set_index("schedule")

    def draw(self) -> Figure:
        """A timeline per schedule."""
        policy, work = self.policy, self.scenario.workload
        title = f"One decode layer of {self.scenario.model.name} on {self.scenario.profile.name}, simulated"
        note = (
            f"N = {policy.batch_size:,} in {policy.num_micro_batches} micro-batches of {policy.micro_batch_size}, "
            f"r_w = {policy.weights_on_gpu:.3g}; prompts of {work.max_prompt_tokens} tokens, "
            f"{work.generation_length} generated; numbers on bars are micro-batches"
        )
        return draw_timelines([entry.panel for entry in self.entries], title=title, note=note)


def simulate_schedules(scenario: Scenario, policy: Policy, names: tuple[str, ...] = SHOWN) -> ScheduledLayers:
    """Simulate one decode step under each schedule, with the same N, mu and r_w.

    Raises
    ------
    InputError
        A schedule cannot run the policy.
    """
    sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, scenario.formats)
    entries = []
    for name in names:
        own = same_policy(SCHEDULES[name], policy, scenario)
        run = run_step(scenario, own, name)
        if run is None:
            raise InputError("one token is generated: there is no decode step", where="workload", way_out="two or more")
        entries.append(
            ScheduledLayer(
                schedule=name,
                panel=layer_panel(run.trace, run.first, title=WORDS.get(name, name), layers=1),
                account=account_for_step(run),
                layers=scenario.model.n_layers,
                fits=all(use.fits for use in predict_policy(scenario, sizes, rates, own).memory.values()),
            )
        )
    return ScheduledLayers(scenario=scenario, policy=policy, entries=tuple(entries))


def schedule_layers() -> ScheduledLayers:
    """Figure 6; at the small size of a model with few layers."""
    row = next(row for row in bundled_rows() if row.id == ROW)
    policy, _ = policy_of_row(row)
    scenario = scenario_for(row, fitted_values(), num_requests=policy.batch_size)
    layers = at_size(full=scenario.model.n_layers, small=FEW_LAYERS)
    return simulate_schedules(replace(scenario, model=replace(scenario.model, n_layers=layers)), policy)
