"""What stands behind a row: the machine and model of its setting, the system that ran, the prompts of its workload.

Settings S1 to S9 of the MoE-Lightning paper (Cao et al., ASPLOS 2025, arXiv 2411.11217), Table 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hrm.errors import InputError
from hrm.model import ModelSpec
from hrm.model_files import load_model
from hrm.profile import HardwareProfile
from hrm.profile_files import load_profile, with_overrides
from hrm.published.rows import Row
from hrm.scenario import Scenario, choose_formats
from hrm.workload import Workload
from hrm.workload_presets import PUBLISHED, fold_name, read_published_lengths

__all__ = ["SETTINGS", "SYSTEMS", "Setting", "System", "find_setting", "find_system", "scenario_of", "workload_of"]

Schedule = Literal["cgopipe", "s3", "s4", "streaming"]
Parallelism = Literal["tensor", "pipeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A machine and a model.

    Attributes
    ----------
    name : str
    profile_name : str
        Bundled profile of the real hardware.
    authors_profile_name : str
        Bundled profile with the constants of the authors' planner, for one GPU.
    gpu, host : str
        Components that calibrated constants belong to.
    gpus : int
    model_name : str
    """

    name: str
    profile_name: str
    authors_profile_name: str
    gpu: str
    host: str
    gpus: int
    model_name: str

    @property
    def profile(self) -> HardwareProfile:
        """Real hardware."""
        return _profile(self.profile_name)

    @property
    def authors_profile(self) -> HardwareProfile:
        """Constants of the authors' planner, with this setting's GPUs and its host memory."""
        return _authors_profile(self.authors_profile_name, self.gpus, self.profile_name)

    @property
    def model(self) -> ModelSpec:
        """The checkpoint that ran."""
        return _model(self.model_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system that ran.

    Attributes
    ----------
    name : str
    family : str
        Software whose constants it shares.
    schedule : {"cgopipe", "s3", "s4", "streaming"}
    attention_on_gpu : bool
        A_g.
    parallelism : {"tensor", "pipeline"}
        Over several GPUs.
    """

    name: str
    family: str
    schedule: Schedule
    attention_on_gpu: bool
    parallelism: Parallelism


def _setting(name: str, profile: str, authors: str, gpu: str, host: str, gpus: int, model: str) -> Setting:
    return Setting(
        name=name,
        profile_name=profile,
        authors_profile_name=authors,
        gpu=gpu,
        host=host,
        gpus=gpus,
        model_name=model,
    )


SETTINGS = {
    each.name: each
    for each in (
        _setting("S1", "t4", "t4-paper", "t4", "n1-48", 1, "mixtral-8x7b"),
        _setting("S2", "l4", "l4-paper", "l4", "g2", 1, "mixtral-8x7b"),
        _setting("S6", "t4x2", "t4-paper", "t4", "n1-416", 2, "mixtral-8x22b"),
        _setting("S7", "t4x4", "t4-paper", "t4", "n1-416", 4, "mixtral-8x22b"),
        _setting("S8", "t4x2", "t4-paper", "t4", "n1-416", 2, "dbrx"),
        _setting("S9", "t4x4", "t4-paper", "t4", "n1-416", 4, "dbrx"),
    )
}


def _system(name: str, family: str, schedule: Schedule, parallelism: Parallelism) -> System:
    on_gpu = schedule in ("s4", "streaming")
    return System(name=name, family=family, schedule=schedule, attention_on_gpu=on_gpu, parallelism=parallelism)


SYSTEMS = {
    each.name: each
    for each in (
        _system("MoE-Lightning", "MoE-Lightning", "cgopipe", "tensor"),
        _system("MoE-Lightning(p)", "MoE-Lightning", "cgopipe", "tensor"),
        _system("FlexGen", "FlexGen", "s4", "pipeline"),
        _system("FlexGen(c)", "FlexGen", "s3", "pipeline"),
        _system("DeepSpeed", "DeepSpeed", "streaming", "tensor"),
    )
}


def find_setting(row: Row) -> Setting:
    """The setting of a row.

    Raises
    ------
    InputError
        Its machine and model are not known; a report counts the row as missed.
    """
    if row.setting not in SETTINGS:
        raise InputError(f"setting {row.setting!r} is not known", where=row.id, way_out=", ".join(SETTINGS))
    return SETTINGS[row.setting]


def find_system(row: Row) -> System:
    """The system of a row.

    Raises
    ------
    InputError
        It is not known how it schedules; a report counts the row as missed.
    """
    if row.system not in SYSTEMS:
        raise InputError(f"system {row.system!r} is not known", where=row.id, way_out=", ".join(SYSTEMS))
    return SYSTEMS[row.system]


def workload_of(row: Row, *, num_requests: int | None = None) -> Workload:
    """The requests of a row.

    Padded: every prompt has `prompt_len` tokens. Unpadded: the lengths of the bundled workload of that name, repeated
    (its mean is used, not the one the row prints); of a workload that is not bundled, its mean for all.

    Parameters
    ----------
    row : Row
    num_requests : int, optional
        By default the row's N, or 10,000 where it is not known.
    """
    requests = num_requests or row.batch_size or 10_000
    known = {fold_name(each): each for each in PUBLISHED}.get(fold_name(row.workload))
    note = ""
    if row.padded:
        lengths: tuple[int, ...] = (round(row.prompt_len),)
    elif known is not None:
        lengths, note = read_published_lengths(known), PUBLISHED[known].note
    else:
        lengths = (max(1, round(row.prompt_len)),)
        note = f"{row.workload} is not bundled: its mean prompt length is used for every prompt"
    return Workload(
        name=row.workload,
        prompt_lengths=lengths,
        generation_length=row.gen_len,
        num_requests=requests,
        padded=row.padded,
        origin=row.source,
        note=note,
    )


def scenario_of(row: Row, *, profile: HardwareProfile | None = None, num_requests: int | None = None) -> Scenario:
    """What the cost models take, on the real hardware of the setting unless another profile is given.

    Raises
    ------
    InputError
        The setting is not known, or its requests are longer than the model allows.
    """
    setting = find_setting(row)
    profile = profile or setting.profile
    return Scenario(
        profile=profile,
        model=setting.model,
        workload=workload_of(row, num_requests=num_requests),
        formats=choose_formats(profile, setting.model),
    )


@lru_cache(maxsize=32)
def _profile(name: str) -> HardwareProfile:
    return load_profile(name)


@lru_cache(maxsize=32)
def _authors_profile(name: str, gpus: int, real: str) -> HardwareProfile:
    profile = load_profile(name)
    if gpus == profile.gpu.count:
        return profile
    # The planner's constants are known for one GPU; on the larger host only its memory is published (Table 2).
    memory = f"{_profile(real).cpu.memory_bytes:.0f} B"
    return with_overrides(profile, {"gpu.count": str(gpus), "cpu.memory": memory})


@lru_cache(maxsize=32)
def _model(name: str) -> ModelSpec:
    return load_model(name)
