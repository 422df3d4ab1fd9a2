"""The software systems that ran: what of them decides in a run, besides the machine, and the constants fitted to them.

A system changes a machine's profile (its own copy path, its own kernels) and how the lanes of a pass add up. What it
changes is in `hrm/data/systems/*.yaml`, one small file per system, each constant with how it came about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from hrm.errors import InputError
from hrm.profile import HardwareProfile, HostTotals
from hrm.published.constants import CONSTANTS, Values
from hrm.published.settings import SETTINGS, Setting, System
from hrm.units import Kind, parse_quantity

__all__ = ["Behaviour", "behaviour_of", "fitted_values", "profile_for"]

KINDS: dict[str, Kind] = {"": "share", "byte/s": "bandwidth", "s": "time"}
"""What a constant of a unit is written as in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How a family of systems runs a pass.

    Attributes
    ----------
    overlaps : bool
        Lanes run beside each other; else copies and computation of a layer follow each other.
    pins_weights : bool
        Weights are page-locked at load; else each copy goes through a pinned buffer.
    own_copy_path : bool
        Its copies to the GPU have a rate of their own, per GPU.
    gathers_weights : bool
        Every GPU of a group gets the whole of each layer, through the host.
    """

    overlaps: bool
    pins_weights: bool
    own_copy_path: bool
    gathers_weights: bool


@cache
def _documents() -> Mapping[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for entry in (files("hrm") / "data" / "systems").iterdir():
        if entry.name.endswith(".yaml"):
            document = yaml.safe_load(entry.read_text(encoding="utf-8"))
            found[document["family"]] = document
    return found


def behaviour_of(system: System) -> Behaviour:
    """How the family of a system runs.

    Raises
    ------
    InputError
        There is no file of that family.
    """
    document = _documents().get(system.family)
    if document is None:
        raise InputError(f"no file describes {system.family!r}", where="hrm/data/systems", way_out="add one")
    return Behaviour(**document["behaviour"])


@cache
def fitted_values() -> Values:
    """The constants as they are shipped: of a GPU and a host in its profile, of a system in its file.

    Raises
    ------
    InputError
        A file of a system has a constant that is none, or a value that is no quantity.
    """
    found: dict[str, float] = {}
    for setting in SETTINGS.values():
        shares = setting.profile.efficiency
        for name, value in (
            (f"{setting.gpu}.gpu_flops", shares.gpu_flops_prefill),
            (f"{setting.host}.link", shares.link),
        ):
            if name in CONSTANTS:
                found[name] = value
    for family, document in _documents().items():
        for name, entry in document.get("constants", {}).items():
            where = f"hrm/data/systems, {family}: {name}"
            if name not in CONSTANTS:
                raise InputError("there is no such constant", where=where, way_out=", ".join(CONSTANTS))
            found[name] = parse_quantity(entry["value"], KINDS[CONSTANTS[name].unit], where=where)
    return found


def profile_for(setting: Setting, system: System, values: Values) -> HardwareProfile:
    """The machine of a setting as a system uses it, with these constants.

    Parameters
    ----------
    setting : Setting
    system : System
    values : mapping of str to float
        Constants by name (`hrm.published.constants`); those that are left out have their public value.
    """
    profile, behaviour = setting.profile, behaviour_of(system)
    known = {name: constant.public for name, constant in CONSTANTS.items()} | dict(values)
    share = known.get(f"{system.family}.gpu_flops", known[f"{setting.gpu}.gpu_flops"])
    link = known.get(f"{setting.host}.link", 1.0)
    totals = profile.host_totals
    if behaviour.own_copy_path:
        link = known[f"{system.family}.copies"] / profile.link.host_to_device.pinned_bytes_per_s
        totals = HostTotals()
    efficiency = replace(
        profile.efficiency,
        gpu_flops_prefill=share,
        gpu_flops_decode=share,
        link=link,
        staging=1.0,
        overhead_per_micro_batch_s=known.get(f"{system.family}.overhead", 0.0),
    )
    own_attention = known.get(f"{system.name}.cpu_attention")
    if own_attention is not None:
        efficiency = replace(efficiency, cpu_attention=own_attention / profile.cpu.bandwidth_bytes_per_s)
    return replace(profile, efficiency=efficiency, host_totals=totals)
