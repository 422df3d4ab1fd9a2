"""Datasheet values of this machine's GPU, where it is a model that comes with the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hrm.profile_files import bundled_directory
from hrm.profile_schema import FIELDS
from hrm.profile_yaml import read_yaml
from hrm.units import parse_quantity
from runtime.device_names import same_gpu_name

__all__ = ["find_datasheet"]


def find_datasheet(driver_name: str, folder: Path | None = None) -> dict[str, tuple[str, float]]:
    """Text and value in SI of ``gpu.bandwidth`` and ``gpu.peak.*`` of the GPU that the driver calls so; empty: unknown.

    Parameters
    ----------
    folder : Path, optional
        Of GPU components; the bundled ones if not given.
    """
    for path in sorted((folder or bundled_directory() / "components" / "gpus").glob("*.yaml")):
        gpu = read_yaml(path.read_text(encoding="utf-8"), path.name)["gpu"]
        if not same_gpu_name(gpu["name"], driver_name):
            continue
        quantities = {"gpu.bandwidth": gpu["bandwidth"]}
        quantities |= {f"gpu.peak.{dtype}": each for dtype, each in gpu["peak"].items()}
        return {key: _value(key, each) for key, each in quantities.items()}
    return {}


def _value(key: str, quantity: Any) -> tuple[str, float]:
    text = str(quantity["value"] if isinstance(quantity, dict) else quantity)
    return text, parse_quantity(text, FIELDS[key].kind, where=key)
