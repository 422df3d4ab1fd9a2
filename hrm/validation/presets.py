"""Plans that come with `hrm validate run`: the reviewers' setting on a T4 host, and what fits a free Colab T4.

They need a GPU to be measured; predicted they are anywhere (`--dry-run`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hrm.errors import InfeasibleError, InputError
from hrm.families import read_spec
from hrm.host_facts import read_host_facts
from hrm.model_files import find_config
from hrm.pins import Pins
from hrm.planning import make_plan
from hrm.plans import Plan, save_plan
from hrm.profile_files import load_profile, profile_document
from hrm.scenario import Scenario, choose_formats
from hrm.validation.command import Ready, read_dry
from hrm.workload import Workload, load_workload

__all__ = ["PRESETS", "Preset", "find_preset"]

MODEL = "mixtral-8x7b"
REVIEWERS_LAYERS = 2
"""Of 32: the same in all, so that a few say what a layer takes, and a batch does not take half an hour."""

COLAB_REQUESTS, COLAB_GENERATED = 48, 8
"""Enough for several micro-batches, few enough for a quarter of an hour."""

COLAB_SHARE = 0.35
"""Of the experts that the GPU holds at least, where the layers are as many as the host's memory holds of the rest: so
there is room for more or less of them on either side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Plans under their names.

    Attributes
    ----------
    name : str
    hardware : str
        Profile that they are made for.
    repeats, randoms : int
        Runs of every policy; random policies.
    layers : int or None
        Of the plan's model that are run; all if None.
    plans : mapping of str to callable
        Writes a plan to a file.
    """

    name: str
    hardware: str
    repeats: int
    randoms: int
    layers: int | None
    plans: Mapping[str, Callable[[Path], None]]

    def check_machine(self) -> None:
        """Refuse a machine without a GPU, before anything is planned.

        Raises
        ------
        InputError
            There is no CUDA device, or torch is not built for one.
        """
        host = read_host_facts()
        if host.gpus and host.torch == "cuda":
            return
        found = "no CUDA device here" if not host.gpus else "torch is not built for CUDA here"
        raise InputError(
            f"needs the GPU of a machine such as {self.hardware}, and there is {found}",
            where=f"--preset {self.name}",
            way_out="--dry-run shows its policies, predictions and how long it would take",
        )

    def ready(self, name: str, layers: int | None = None) -> Ready:
        """One of its plans, to be predicted only."""
        with tempfile.TemporaryDirectory(prefix="hrm-preset-") as folder:
            plan = Path(folder) / "plan.json"
            self.plans[name](plan)
            return read_dry(plan, layers or self.layers, None)


def find_preset(name: str) -> Preset:
    """The preset of that name.

    Raises
    ------
    InputError
        There is none.
    """
    if name not in PRESETS:
        raise InputError("there is no such preset", where=f"--preset {name}", way_out=" or ".join(PRESETS))
    return PRESETS[name]


def plan_layers(hardware: str, workload: Workload, layers: int | None = None, pins: Pins | None = None) -> Plan:
    """The best plan of Mixtral 8x7B's shapes, of all layers or the first so many.

    Raises
    ------
    InfeasibleError
        None fits.
    """
    profile, config = load_profile(hardware), find_config(MODEL)
    values = dict(config["values"])
    if layers is not None:
        values["num_hidden_layers"] = layers
    spec = read_spec(**(config | {"values": values}))
    scenario = Scenario(profile=profile, model=spec, workload=workload, formats=choose_formats(profile, spec))
    return make_plan(
        scenario,
        hardware={"name": profile.name, "document": profile_document(profile)},
        model={"name": spec.name, "config": values},
        pins=pins,
    )


def _reviewers(path: Path, *, padded: bool) -> None:
    """MTBench prompts, 128 tokens generated, on a T4 host."""
    save_plan(plan_layers("t4", load_workload("mtbench", num_requests=10_000, padded=padded)), path)


def _colab(path: Path) -> None:
    """As many layers of the real shapes as a free Colab machine holds."""
    workload = load_workload("mtbench", generation_length=COLAB_GENERATED, num_requests=COLAB_REQUESTS)
    in_memory = Pins(weights_on_disk=0.0, kv_on_disk=0.0)
    low, high, most = 1, int(find_config(MODEL)["values"]["num_hidden_layers"]), 0
    while low <= high:
        layers = (low + high) // 2
        try:
            plan_layers("colab-t4", workload, layers, replace(in_memory, weights_on_gpu=COLAB_SHARE))
            most, low = layers, layers + 1
        except InfeasibleError:
            high = layers - 1
    save_plan(plan_layers("colab-t4", workload, max(1, most), in_memory), path)


PRESETS: Mapping[str, Preset] = {
    "reviewers-s1": Preset(
        name="reviewers-s1",
        hardware="t4",
        repeats=2,
        randoms=10,
        layers=REVIEWERS_LAYERS,
        plans={"unpadded": partial(_reviewers, padded=False), "padded": partial(_reviewers, padded=True)},
    ),
    "colab-t4": Preset(
        name="colab-t4", hardware="colab-t4", repeats=4, randoms=4, layers=None, plans={"colab": _colab}
    ),
}
