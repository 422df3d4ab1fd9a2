"""A plan simulated: the whole run beside its prediction, and a decode step task by task, as one result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.errors import InputError
from hrm.pictures import Picture
from hrm.plans import Plan
from hrm.policy import Policy
from hrm.scenario import Scenario
from hrm.schedules import check_schedule
from hrm.shown import Shown
from hrm.trace import Trace
from simulator.step_account import StepRun, run_step
from simulator.summary import policy_document, run_figure, run_title

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

__all__ = ["Simulation", "draw_timeline", "simulate_plan", "simulate_policy"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Simulation(Shown):
    """A simulated run.

    Attributes
    ----------
    document : dict
        As `hrm simulate --json` prints it (docs/cli.md).
    run : StepRun or None
        A decode step in the middle with its neighbours; None where one token is generated.
    """

    document: dict[str, Any]
    run: StepRun | None

    @property
    def throughput_tokens_per_s(self) -> float:
        """Generated tokens over prefill + decode [token/s]."""
        return float(self.document["throughput_tokens_per_s"])

    @property
    def trace(self) -> Trace | None:
        """When every task of the step and its neighbours ran; None where there is no decode step."""
        return None if self.run is None else self.run.trace

    def to_dict(self) -> dict[str, Any]:
        """The document."""
        return dict(self.document)

    def to_frame(self) -> pd.DataFrame:
        """Predicted beside simulated, a row per quantity, in SI units."""
        import pandas as pd

        predicted, ratio = self.document["predicted"], self.document["predicted_over_simulated"]
        return pd.DataFrame(
            [
                {
                    "quantity": name,
                    "predicted": value,
                    "simulated": self.document[name],
                    "predicted / simulated": ratio[name],
                }
                for name, value in predicted.items()
            ]
        )

    def print_to(self, console: Console) -> None:
        """The screen of `hrm simulate`."""
        from simulator.replay_tables import print_replay

        print_replay(self.document, console)


def simulate_plan(
    plan: Plan,
    schedule: str | None = None,
    *,
    contention: bool = True,
    on_progress: Callable[[str], None] | None = None,
) -> Simulation:
    """Replay a plan event by event.

    Parameters
    ----------
    plan : Plan
    schedule : str, optional
        One that can run the policy; its own by default.
    contention : bool
        Let lanes share memory, link and cores.
    on_progress : callable, optional
        Called with a line of text now and then.

    Raises
    ------
    InputError
        The schedule cannot run the policy, or the plan is one of the paper's cost model.
    """
    if plan.inputs.cost_model == "paper":
        raise InputError(
            "the paper's cost model has no prefill, embedding or lm_head, so its plan cannot be replayed",
            where="plan",
            way_out="a plan of the full cost model; pin what you want of it",
        )
    return simulate_policy(plan.scenario, plan.policy, schedule, contention=contention, on_progress=on_progress)


def simulate_policy(
    scenario: Scenario,
    policy: Policy,
    schedule: str | None = None,
    *,
    contention: bool = True,
    on_progress: Callable[[str], None] | None = None,
) -> Simulation:
    """Replay a policy that no search found, e.g. a published one.

    Parameters and errors are those of `simulate_plan`.
    """
    tell = on_progress or (lambda _: None)
    name = schedule or policy.schedule
    check_schedule(name, policy)
    tell(f"simulating a decode step of {name}")
    run = run_step(scenario, policy, name, contention=contention)
    tell(f"replaying {name}")
    document = policy_document(
        scenario, policy, name, run, layers_of_model=scenario.model.n_layers, contention=contention
    )
    return Simulation(document=document, run=run)


def draw_timeline(simulation: Simulation, path: str | Path | None = None) -> Picture:
    """Draw two layers of a simulated decode step, a row per lane, a bar per task.

    Parameters
    ----------
    simulation : Simulation
    path : str or Path, optional
        Also written there, PNG or SVG.

    Raises
    ------
    InputError
        One token is generated: there is no decode step.
    """
    if simulation.run is None:
        raise InputError(
            "one token is generated, and prefill gives it: there is no decode step to draw",
            where="simulation",
            way_out="a plan with generation_length 2 or more",
        )
    picture = Picture(run_figure(simulation.run, title=run_title(simulation.document)))
    if path is not None:
        picture.save(path)
    return picture
