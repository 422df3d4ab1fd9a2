"""What a sweep computes from, and the scenario and pinned variables of each of its points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hrm.dtypes import KV_DTYPES, WEIGHT_DTYPES, parse_dtype
from hrm.errors import InputError
from hrm.families import read_spec
from hrm.pins import Pins, option_name
from hrm.profile import HardwareProfile
from hrm.profile_files import with_overrides
from hrm.profile_schema import FIELDS
from hrm.scenario import COMPUTE_DTYPES, Scenario, choose_formats
from hrm.workload import Workload, load_workload
from simulator.sweep_values import PIN_KEYS, SECTIONS, Axis, Point, Value

__all__ = ["NOT_SEARCHED", "SWEEP_SCHEDULES", "Study", "profile_keys", "scenario_at", "settled_pins"]

_CPU: Final = {"attention_on_gpu": False}
SWEEP_SCHEDULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "best": {},
    "cgopipe": _CPU,
    "s2": _CPU,
    "s3": _CPU,
    "s4": {"attention_on_gpu": True},
    "streaming": {"attention_on_gpu": True, "num_micro_batches": 1, "kv_on_gpu": 1.0},
    "static_experts": {"attention_on_gpu": True, "ffn_on_gpu": False, "kv_on_gpu": 1.0},
    "cpu_only": {},
    "serial": {},
}
"""Schedules of a sweep and the variables each settles; "best" is the plan that `hrm plan` would make."""

NOT_SEARCHED: Final = ("static_experts", "cpu_only")
"""Schedules whose plans the search does not have: whole experts on the GPU beside others on the CPU, and no GPU."""

_UNITS: Final = {"size": " B", "bandwidth": " B/s", "compute": " FLOP/s", "time": " s", "share": "", "count": ""}
_WORDS: Final[dict[str, dict[str, Any]]] = {
    "attention_on_gpu": {"cpu": False, "gpu": True},
    "ffn_on_gpu": {"cpu": False, "gpu": True},
    "embedding_on_gpu": {"cpu": False, "gpu": True},
    "dense_weights_on_gpu": {"streamed": False, "resident": True},
    "lm_head_on_gpu": {"streamed": False, "resident": True},
    "weight_slots": {"1": 1, "2": 2, "experts": "experts"},
    "pin_weights": {"no": False, "yes": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Everything a sweep computes from.

    Attributes
    ----------
    axes : tuple of Axis
    hw, model : str
        Where no axis varies them.
    profiles, configs : mapping
        By name: every machine, `--set` applied, and every model's config.json (as `find_config` gives it).
    workload : Workload
    generation_length : int or None
        As given, for a `workload` that is varied by name.
    weights_dtype, kv_dtype, compute_dtype : str or None
    pins : Pins
    cost_model : {"full", "paper"}
    max_hours : float
        Bound on one batch [h].
    schedules : tuple of str
        Of `SWEEP_SCHEDULES`.
    simulate, contention : bool
        Replay every plan; with lanes that share memory, link and cores.
    notes : tuple of str
        What was assumed on the way here.
    """

    axes: tuple[Axis, ...]
    hw: str
    model: str
    profiles: Mapping[str, HardwareProfile]
    configs: Mapping[str, dict[str, Any]]
    workload: Workload
    generation_length: int | None = None
    weights_dtype: str | None = None
    kv_dtype: str | None = None
    compute_dtype: str | None = None
    pins: Pins = field(default_factory=Pins)
    cost_model: str = "full"
    max_hours: float = 24.0
    schedules: tuple[str, ...] = ("cgopipe", "s4")
    simulate: bool = True
    contention: bool = True
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.schedules:
            if name not in SWEEP_SCHEDULES:
                raise InputError(
                    f"there is no schedule '{name}'", where="--schedules", way_out=f"of {', '.join(SWEEP_SCHEDULES)}"
                )
            if name in NOT_SEARCHED and self.cost_model == "paper":
                raise InputError(f"the paper's model has no {name}", where="--schedules", way_out="leave it out")
            if name == "static_experts" and not self.simulate:
                raise InputError(
                    "static_experts is not in the cost model, only in the simulator",
                    where="--schedules",
                    way_out="leave one of the two out",
                )
            settled_pins(self.pins, name)
        if not self.schedules or len(set(self.schedules)) < len(self.schedules):
            raise InputError("the schedules are not distinct", where="--schedules", way_out="e.g. cgopipe,s4")
        if self.cost_model == "paper" and self.simulate:
            raise InputError(
                "the paper's model has no prefill, so its plans are not simulated",
                where="--cost-model paper",
                way_out="--predict-only",
            )


def profile_keys(axis: Axis, profile: HardwareProfile) -> tuple[str, ...]:
    """Keys of a profile that an axis changes: sections stand for what is there and is no percentage of another.

    Raises
    ------
    InputError
        The profile has none of a section.
    """
    found: list[str] = []
    for key in axis.keys:
        if key not in SECTIONS:
            found += [key] if key in FIELDS else []
            continue
        inside = [
            name
            for name, quantity in profile.quantities.items()
            if name.startswith(f"{key}.") and FIELDS[name].kind == SECTIONS[key] and "%" not in quantity.text
        ]
        if not inside:
            raise InputError(f"{profile.name} has no {key}", where=f"--vary {axis.name}", way_out="leave it out")
        found += inside
    return tuple(found)


def scenario_at(study: Study, point: Point, *, cpu_memory_bytes: float | None = None) -> tuple[Scenario, Pins]:
    """Scenario and pinned variables of a point.

    Parameters
    ----------
    study : Study
    point : tuple
        A value per axis.
    cpu_memory_bytes : float, optional
        CPU memory instead of the point's [byte].

    Raises
    ------
    InputError
        The values of the point contradict each other, or a key is not one of this model or machine.
    """
    by_key = {key: value for axis, value in zip(study.axes, point, strict=True) for key in axis.keys}
    profile = _profile_at(study, point, str(by_key.get("hw", study.hw)), cpu_memory_bytes)
    spec = read_spec(**_config_at(study.configs[str(by_key.get("model", study.model))], by_key))
    pins = study.pins
    for key, (name, _) in PIN_KEYS.items():
        if key in by_key:
            pins = replace(pins, **{name: _pinned(key, name, by_key[key])})

    def dtype(key: str, given: str | None, allowed: Any) -> str | None:
        text = by_key.get(key, given)
        return None if text is None else parse_dtype(str(text), where=key, allowed=allowed)

    formats = choose_formats(
        profile,
        spec,
        weights=dtype("weights_dtype", study.weights_dtype, WEIGHT_DTYPES),
        kv=dtype("kv_dtype", study.kv_dtype, KV_DTYPES),
        compute=dtype("compute_dtype", study.compute_dtype, COMPUTE_DTYPES),
    )
    return Scenario(profile=profile, model=spec, workload=_workload_at(study, by_key), formats=formats), pins


def _profile_at(study: Study, point: Point, hw: str, cpu_memory_bytes: float | None) -> HardwareProfile:
    profile = study.profiles[hw]
    changes: dict[str, object] = {}
    for axis, value in zip(study.axes, point, strict=True):
        for key in profile_keys(axis, profile):
            if axis.times:
                if key not in profile.quantities:
                    raise InputError(f"{profile.name} has no {key}", where=f"--vary {axis.name}", way_out="a value")
                value_of_key = profile.quantities[key].value * float(value)
            else:
                value_of_key = float(value)
            changes[key] = f"{value_of_key!r}{_UNITS[FIELDS[key].kind]}"
    if cpu_memory_bytes is not None:
        changes["cpu.memory"] = f"{cpu_memory_bytes!r} B"
    return with_overrides(profile, changes) if changes else profile


def _config_at(config: dict[str, Any], by_key: Mapping[str, Value]) -> dict[str, Any]:
    changed = {key.removeprefix("model."): value for key, value in by_key.items() if key.startswith("model.")}
    for key in changed:
        if not isinstance(config["values"].get(key), int | float):
            import difflib

            numbers = [name for name, value in config["values"].items() if isinstance(value, int | float)]
            near = difflib.get_close_matches(key, numbers, n=3) or numbers
            raise InputError(
                f"its config.json has no number '{key}'",
                where=f"--vary model.{key}: {config['name']}",
                way_out=f"it has {', '.join(near)}",
            )
    return config | {"values": config["values"] | changed}


def _workload_at(study: Study, by_key: Mapping[str, Value]) -> Workload:
    workload = study.workload
    if "workload" in by_key:
        workload = load_workload(
            str(by_key["workload"]),
            generation_length=study.generation_length,
            num_requests=workload.num_requests,
            padded=workload.padded,
        )
    changes: dict[str, Any] = {}
    if "workload.prompt_len" in by_key:
        length = int(by_key["workload.prompt_len"])
        changes = {"name": f"prompt-{length}", "prompt_lengths": (length,), "origin": "given", "note": ""}
    for key, name in (("workload.gen_len", "generation_length"), ("workload.requests", "num_requests")):
        if key in by_key:
            changes[name] = int(by_key[key])
    return replace(workload, **changes)


def _pinned(key: str, name: str, value: Value) -> Any:
    if name not in _WORDS:
        return value
    words = _WORDS[name]
    if value not in words:
        raise InputError(f"'{value}' is not accepted", where=f"--vary {key}", way_out=f"of {', '.join(words)}")
    return words[str(value)]


def settled_pins(pins: Pins, schedule: str) -> Pins:
    """The pins with what the schedule settles.

    Raises
    ------
    InputError
        They contradict each other.
    """
    for key, value in SWEEP_SCHEDULES[schedule].items():
        if getattr(pins, key) not in (None, value):
            raise InputError(
                f"schedule {schedule} does not allow {option_name(key)} as pinned",
                where="--schedules",
                way_out=f"leave out {option_name(key)}, or {schedule}",
            )
    return replace(pins, **SWEEP_SCHEDULES[schedule])
