"""How much the notebooks compute: everything, or so little that a continuous integration can run them all."""

from __future__ import annotations

import os
from typing import TypeVar

from hrm.errors import InputError

__all__ = ["SIZE_VARIABLE", "at_size", "is_small"]

SIZE_VARIABLE = "HRM_NOTEBOOK_SIZE"
"""Environment variable: `full`, which it is where it is not set, or `small`."""

T = TypeVar("T")


def is_small() -> bool:
    """Whether the notebooks are to compute little.

    Raises
    ------
    InputError
        The variable is neither `full` nor `small`.
    """
    size = os.environ.get(SIZE_VARIABLE, "full")
    if size not in ("full", "small"):
        raise InputError(f"{size!r} is no size", where=SIZE_VARIABLE, way_out="full or small")
    return size == "small"


def at_size(*, full: T, small: T) -> T:
    """One of two values, by `SIZE_VARIABLE`."""
    return small if is_small() else full
