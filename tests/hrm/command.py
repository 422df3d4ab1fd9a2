"""Runs the `hrm` command inside the test process: what it prints where, and its exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

from hrm.cli import main
from hrm.families import read_spec
from hrm.model_files import find_config
from hrm.pins import Pins
from hrm.planning import make_plan
from hrm.plans import CostModel, Plan
from hrm.profile_files import load_profile, profile_document, with_overrides
from hrm.report import print_plan
from hrm.scenario import Scenario, choose_formats
from hrm.workload import Workload, load_workload, uniform_workload

PAPER = ("plan", "--hw", "l4-paper", "--model", "mixtral-8x7b", "--cost-model", "paper", "--gen-len", "32")
SMALL = ("plan", "--hw", "t4", "--model", "granite-3.1-1b-a400m", "--requests", "8", "--gen-len", "4")

AT_PEAKS = tuple(
    (f"efficiency.{name}", "100 %")
    for name in ("gpu_flops_prefill", "gpu_flops_decode", "gpu_bandwidth", "gpu_overlap", "link", "cpu_attention")
)
"""Overrides that undo the calibration of a bundled profile."""

WIDE = {"COLUMNS": ""}
"""Test runners set COLUMNS; without it the screen is 118 columns wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as the one JSON document it must be; NaN and infinity are no JSON."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} in JSON")

        return json.loads(self.out, parse_constant=refuse)


def run(*arguments: object) -> Outcome:
    """Run `hrm` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = None
    with (
        mock.patch.dict(os.environ, WIDE),
        mock.patch.object(sys, "argv", ["hrm", *(str(argument) for argument in arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    assert isinstance(code, int), "the command must end with an exit code"
    return Outcome(code=code, out=out.getvalue(), err=err.getvalue())


def refused(*arguments: object, code: int = 2) -> str:
    """The one line with which `hrm` refuses these arguments, without ``hrm: ``."""
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (code, ""), outcome
    assert outcome.err.startswith("hrm: ") and outcome.err.count("\n") == 1, outcome.err
    return outcome.err.removeprefix("hrm: ").rstrip("\n")


def plan_of(
    hardware: str,
    model: str,
    *,
    workload: Workload | None = None,
    requests: int = 10_000,
    cost_model: CostModel = "full",
    pins: Pins | None = None,
    overrides: tuple[tuple[str, str], ...] = (),
    explain: bool = False,
) -> Plan:
    """A plan as `hrm plan` makes it, once per test process."""
    requests_of = workload or load_workload("mtbench", num_requests=requests)
    return _plan_of(hardware, model, requests_of, cost_model, pins or Pins(), overrides, explain)


@cache
def _plan_of(
    hardware: str,
    model: str,
    workload: Workload,
    cost_model: CostModel,
    pins: Pins,
    overrides: tuple[tuple[str, str], ...],
    explain: bool,
) -> Plan:
    profile = with_overrides(load_profile(hardware), dict(overrides))
    config = find_config(model)
    spec = read_spec(**config)
    scenario = Scenario(
        profile=profile,
        model=spec,
        workload=workload,
        formats=choose_formats(profile, spec),
    )
    return make_plan(
        scenario,
        hardware={"name": profile.name, "document": profile_document(profile)},
        model={"name": spec.name, "config": config["values"]},
        pins=pins,
        cost_model=cost_model,
        explain=explain,
    )


def paper_plan(prompt: int = 77, **pins: Any) -> Plan:
    """A plan of the worked example on the paper's terms."""
    return plan_of(
        "l4-paper",
        "mixtral-8x7b",
        workload=uniform_workload(prompt, 32),
        cost_model="paper",
        pins=Pins(**pins),
    )


def screen_of(plan: Plan, width: int = 118) -> str:
    """What a person sees of a plan."""
    from rich.console import Console

    file = io.StringIO()
    print_plan(plan, Console(file=file, width=width, highlight=False, soft_wrap=False))
    return file.getvalue()
