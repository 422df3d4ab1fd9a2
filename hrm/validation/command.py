"""`hrm validate run`: from options to the document of a validation; torch and the simulator are handed in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hrm.errors import BarMissedError, InputError
from hrm.host_facts import HostFacts
from hrm.output_files import check_file, check_folder
from hrm.plans import read_plan_document
from hrm.policy import Policy
from hrm.scenario import Scenario, truncated
from hrm.schedules import check_schedule
from hrm.validation.candidates import Candidate, Pricer, as_run
from hrm.validation.choice import RANDOM, choose_candidates
from hrm.validation.judging import build_document
from hrm.validation.memory import planned_bytes
from hrm.validation.procedure import (
    Forecaster,
    Measurer,
    Request,
    estimate_seconds,
    predict_candidates,
    validate_plan,
)
from hrm.validation.records import (
    HASH_FILE,
    PREDICTIONS_FILE,
    SETUP_FILE,
    holds_records,
    read_records,
    remove_records,
    write_json,
)

__all__ = [
    "Ready",
    "check_outputs",
    "check_verdict",
    "dry_run",
    "read_dry",
    "rebuild",
    "save_document",
    "validate",
]

DRY_NOISE = 0.02
"""Noise that neighbours are chosen by where nothing is measured [share]."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A plan that can be measured here.

    Attributes
    ----------
    scenario : Scenario
        With the layers that are run.
    whole_layers : int
        Of the model.
    policy : Policy
    schedule : str
    document : mapping
        The saved plan.
    host : HostFacts or None
        None for a dry run: the machine is that of the plan.
    measurer : Measurer or None
    facts : mapping
        Device, machine, versions.
    randoms : int
        Random policies.
    per_turn : int
        Timed runs of a policy at a time (`Request`).
    """

    scenario: Scenario
    whole_layers: int
    policy: Policy
    schedule: str
    document: Mapping[str, Any]
    host: HostFacts | None
    measurer: Measurer | None
    facts: Mapping[str, Any]
    randoms: int = RANDOM
    per_turn: int = 1


def check_outputs(folder: Path | None, report: Path | None, output: Path | None) -> None:
    """Refuse what could not be written, before anything takes long.

    Raises
    ------
    InputError
        A file cannot be written, or the folder holds something else.
    """
    for option, path in (("--report", report), ("--output", output)):
        if path is not None:
            check_file(path, f"{option}: {path}")
    if report is not None and output is not None and report.resolve() == output.resolve():
        raise InputError("is also --report", where=f"--output: {output}", way_out="another file")
    if folder is None:
        return
    if folder.is_dir() and any(folder.iterdir()) and not holds_records(folder):
        raise InputError("holds something else", where=f"--records: {folder}", way_out="a new folder")
    check_folder(folder, (SETUP_FILE, PREDICTIONS_FILE, HASH_FILE), f"--records: {folder}")


def read_dry(plan_file: Path, layers: int | None, schedule: str | None) -> Ready:
    """A plan that is only to be predicted, for the machine it was made for.

    Raises
    ------
    InputError
        The file is no plan, or it has not so many layers.
    """
    whole, policy, document = read_plan_document(plan_file)
    scenario = whole if layers is None else truncated(whole, layers)
    name = schedule or policy.schedule
    check_schedule(name, policy)
    return Ready(scenario, whole.model.n_layers, policy, name, document, None, None, {"emulated": False})


def dry_run(
    ready: Ready, forecaster: Forecaster, *, repeats: int, seed: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Policies, predictions and how long measuring them would take; nothing is measured."""
    request = _request(ready, repeats, seed)
    chosen = choose_candidates(
        request.pricer, ready.policy, ready.schedule, noise=DRY_NOISE, seed=seed, count_random=ready.randoms
    )
    found = predict_candidates(request, chosen, forecaster, noise=DRY_NOISE, tell=tell)
    found.pop("trace", None)
    return {
        **_title(ready),
        "dry_run": True,
        "estimated_seconds": estimate_seconds(found, turns=-(-repeats // ready.per_turn) if ready.per_turn > 1 else 1),
        **found,
    }


def validate(
    ready: Ready,
    forecaster: Forecaster,
    folder: Path,
    *,
    repeats: int,
    seed: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Measure, and build the document from what was written.

    Raises
    ------
    InputError
        The plan cannot be run, or a file cannot be written.
    """
    assert ready.measurer is not None
    if holds_records(folder):  # an earlier one of this command
        remove_records(folder)
    folder.mkdir(parents=True, exist_ok=True)
    validate_plan(_request(ready, repeats, seed), ready.measurer, forecaster, folder, tell=tell)
    return rebuild(folder)


def rebuild(folder: Path) -> dict[str, Any]:
    """The document of a validation from its folder alone.

    Raises
    ------
    InputError
        The folder is none of its kind.
    """
    return build_document(read_records(folder))


def check_verdict(document: Mapping[str, Any]) -> None:
    """Exit with 4 where a bar was missed.

    Raises
    ------
    BarMissedError
        Names the bars.
    """
    missed = document["verdict"]["missed"]
    if missed:
        raise BarMissedError(f"missed: {', '.join(missed)}")


def _title(ready: Ready) -> dict[str, Any]:
    workload, scenario = ready.scenario.workload, ready.scenario
    return {
        "title": f"{scenario.model.name} as planned for {scenario.profile.name}: predicted, simulated, measured",
        "hardware": scenario.profile.name,
        "model": scenario.model.name,
        "workload": {
            "name": workload.name,
            "generation_length": workload.generation_length,
            "mean_prompt_tokens": workload.mean_prompt_tokens,
            "padded": workload.padded,
        },
        "layers": scenario.model.n_layers,
        "layers_of_model": ready.whole_layers,
        "schedule": ready.schedule,
        "policy": ready.policy.to_dict(),
        "formats": {
            "weights": scenario.formats.experts(scenario.model),
            "kv": scenario.formats.kv,
            "compute": scenario.formats.compute,
        },
    }


def _request(ready: Ready, repeats: int, seed: int) -> Request:
    config: Mapping[str, Any] = ready.document["inputs"]["model"]["config"]

    def memory(candidate: Candidate) -> dict[str, Any]:
        scenario = as_run(ready.scenario, candidate.policy.batch_size)
        emulated = bool(ready.facts["emulated"]) and not candidate.policy.everything_on_cpu
        return planned_bytes(scenario, candidate.policy, emulated=emulated)

    setup = {
        "format": 1,
        **_title(ready),
        **ready.facts,
        "paced": [],
        "command": ["hrm", *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": dict(ready.document),
    }
    return Request(
        pricer=Pricer.start(ready.scenario, config, ready.host),
        policy=ready.policy,
        schedule=ready.schedule,
        memory=memory,
        repeats=repeats,
        seed=seed,
        randoms=ready.randoms,
        per_turn=ready.per_turn,
        setup=setup,
    )


def save_document(document: Mapping[str, Any], path: Path) -> None:
    """Write the document.

    Raises
    ------
    InputError
        It cannot be written.
    """
    write_json(path, document)
