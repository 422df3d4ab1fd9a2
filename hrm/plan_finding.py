"""Plans from names, as `hrm plan` makes them: for a notebook or a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.diverse import Candidate, find_policies
from hrm.dtypes import KV_DTYPES, WEIGHT_DTYPES, parse_dtype
from hrm.families import read_spec
from hrm.graph import TaskGraph
from hrm.layout import Layout
from hrm.model_files import find_config
from hrm.pins import Pins
from hrm.planning import make_plan
from hrm.plans import CostModel, Plan
from hrm.profile import HardwareProfile
from hrm.profile_files import load_profile, profile_document, with_overrides
from hrm.scenario import COMPUTE_DTYPES, Scenario, choose_formats
from hrm.schedules import Steps, check_schedule, middle_steps, schedule_graph
from hrm.shown import Shown
from hrm.workload import Workload, load_workload

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

__all__ = ["Alternatives", "build_graph", "find_alternatives", "find_plan"]


def find_plan(
    hardware: str | Path | HardwareProfile,
    model: str | Path,
    workload: str | Workload = "mtbench",
    *,
    generation_length: int | None = None,
    num_requests: int | None = None,
    padded: bool | None = None,
    pins: Pins | None = None,
    overrides: Mapping[str, object] | None = None,
    weights_dtype: str | None = None,
    kv_dtype: str | None = None,
    compute_dtype: str | None = None,
    cost_model: CostModel = "full",
    max_hours: float = 24.0,
    explain: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Plan:
    """Find the best plan.

    Parameters
    ----------
    hardware : str, Path or HardwareProfile
        Name of a bundled profile, a YAML file, "auto" for the calibrated profile of this machine, or a profile.
    model : str or Path
        Name of a bundled model, a config.json, or the folder it is in.
    workload : str or Workload
        Name of a published one, or prompts of one's own (`hrm.workload.uniform_workload`, `prompts_workload`).
    generation_length, num_requests : int, optional
        Tokens generated per request [tokens]; requests in all, 10,000 by default. Of a workload by name.
    padded : bool, optional
        Run every prompt at the length of the longest. Of a workload by name.
    pins : Pins, optional
        Variables that are given; the others are searched.
    overrides : mapping, optional
        Values of the profile to change, e.g. ``{"cpu.memory": "416 GB", "disk": "none"}``.
    weights_dtype, kv_dtype, compute_dtype : str, optional
        Formats; by default as `hrm plan` chooses them.
    cost_model : {"full", "paper"}
    max_hours : float
        Bound on one batch [h].
    explain : bool
        Solve what other hardware or formats would give, in any case.
    on_progress : callable, optional
        Called with a line of text now and then.

    Raises
    ------
    InputError
        A name or a value is none, or they contradict each other.
    InfeasibleError
        No plan fits.
    """
    profile = hardware if isinstance(hardware, HardwareProfile) else load_profile(hardware)
    if overrides:
        profile = with_overrides(profile, overrides)
    config = find_config(model)
    work = workload if isinstance(workload, Workload) else _published(workload, generation_length, num_requests, padded)
    _check_only_by_name(workload, generation_length, num_requests, padded)
    spec = read_spec(**config)
    formats = choose_formats(
        profile,
        spec,
        weights=_dtype(weights_dtype, "weights_dtype", WEIGHT_DTYPES),
        kv=_dtype(kv_dtype, "kv_dtype", KV_DTYPES),
        compute=_dtype(compute_dtype, "compute_dtype", COMPUTE_DTYPES),
    )
    return make_plan(
        Scenario(profile=profile, model=spec, workload=work, formats=formats),
        hardware={"name": profile.name, "document": profile_document(profile)},
        model={"name": spec.name, "config": config["values"]},
        pins=pins,
        cost_model=cost_model,
        max_hours=max_hours,
        explain=explain,
        notes=(work.note,) if work.note else (),
        on_progress=on_progress,
    )


def _published(name: str, generated: int | None, requests: int | None, padded: bool | None) -> Workload:
    count = 10_000 if requests is None else requests
    return load_workload(name, generation_length=generated, num_requests=count, padded=bool(padded))


def _check_only_by_name(workload: str | Workload, *given: object) -> None:
    from hrm.errors import InputError

    if isinstance(workload, Workload) and any(value is not None for value in given):
        raise InputError(
            "generation_length, num_requests and padded are of a workload by name",
            where="workload",
            way_out="dataclasses.replace(workload, ...)",
        )


def _dtype(text: str | None, where: str, allowed: Any) -> str | None:
    return None if text is None else parse_dtype(text, where=where, allowed=allowed)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Alternatives(Shown):
    """The best plans that differ in something a person would call different, by the cost model.

    Attributes
    ----------
    plan : Plan
    candidates : tuple of Candidate
        The plan first.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]

    def to_dict(self) -> dict[str, Any]:
        """As one JSON document; rates over all batches of all requests [token/s]."""
        workload = self.plan.scenario.workload
        tokens = workload.num_requests * workload.generation_length
        return {
            "model": self.plan.scenario.model.name,
            "hardware": self.plan.scenario.profile.name,
            "alternatives": [
                {
                    "schedule": each.policy.schedule,
                    "policy": each.policy.to_dict(),
                    "predicted_throughput_tokens_per_s": tokens / each.seconds,
                }
                for each in self.candidates
            ],
        }

    def to_frame(self) -> pd.DataFrame:
        """A row per plan: schedule, the six variables of Table 1, and what was predicted."""
        import pandas as pd

        rows = []
        for entry, each in zip(self.to_dict()["alternatives"], self.candidates, strict=True):
            policy, prediction = each.policy, each.prediction
            rows.append(
                {
                    "schedule": policy.schedule,
                    "N": policy.batch_size,
                    "mu": policy.micro_batch_size,
                    "n_ub": policy.num_micro_batches,
                    "A_g": int(policy.attention_on_gpu),
                    "F_g": int(policy.ffn_on_gpu),
                    "r_w": policy.weights_on_gpu,
                    "r_c": policy.kv_on_gpu,
                    "slots": str(policy.weight_slots),
                    "pinned": policy.pin_weights,
                    "token/s": entry["predicted_throughput_tokens_per_s"],
                    "bottleneck": prediction.bottleneck,
                }
            )
        return pd.DataFrame(rows)

    def print_to(self, console: Console) -> None:
        """A table, the plan first."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        frame = self.to_frame()
        console.print(
            escape(f"{self.plan.scenario.model.name} on {self.plan.scenario.profile.name}: plans that differ")
        )
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in frame.columns:
            table.add_column(escape(name), justify="left" if name in ("schedule", "bottleneck", "slots") else "right")
        for row in frame.to_dict("records"):
            table.add_row(*[escape(_cell(str(name), value)) for name, value in row.items()])
        console.print(table)
        console.print("token/s over all requests, predicted")
        ring = any(str(each.policy.weight_slots) == "experts" for each in self.candidates[1:])
        if ring and self.plan.policy.weight_slots != "experts":
            console.print(
                "a ring of experts (slots) is searched for a plan only where layers do not fit, or where pinned"
            )


def _cell(name: str, value: object) -> str:
    if name == "pinned":
        return "yes" if value else "no"
    if name in ("r_w", "r_c", "token/s") and isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def find_alternatives(plan: Plan, count: int = 6, *, on_progress: Callable[[str], None] | None = None) -> Alternatives:
    """Find the best plans for the same scenario and pins that differ from the plan and from each other.

    Raises
    ------
    InputError
        `count` is out of range, or the plan is one of the paper's cost model, which this search does not have.
    """
    from hrm.errors import InputError

    if plan.inputs.cost_model == "paper":
        raise InputError("a plan of the paper's cost model", where="plan", way_out="one of the full cost model")
    found = find_policies(
        plan.scenario, plan.inputs.pins, count, max_hours=plan.inputs.max_hours, on_progress=on_progress
    )
    return Alternatives(plan=plan, candidates=found)


def build_graph(plan: Plan, schedule: str | None = None, *, steps: int = 1, prefill: bool = False) -> TaskGraph:
    """Lay out the task graph of a plan: decode steps from the middle of a batch, or prefill.

    Parameters
    ----------
    plan : Plan
    schedule : str, optional
        One that can run the policy; its own by default.
    steps : int
        Consecutive decode steps.
    prefill : bool
        The prefill of the batch in place of decode steps.

    Raises
    ------
    InputError
        The schedule cannot run the policy, or there are not so many steps.
    """
    name = schedule or plan.policy.schedule
    check_schedule(name, plan.policy)
    shown = Steps(prefill=True)
    if not prefill:
        shown, _ = middle_steps(plan.scenario.workload.generation_length - 1, steps)
    return schedule_graph(Layout(plan.scenario, plan.policy), name, shown)
