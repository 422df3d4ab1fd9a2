"""What a trace file holds, key by key and checked: each refusal names file, key and value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from hrm.errors import InputError
from hrm.graph import Lane
from hrm.trace_names import parse_lane

__all__ = ["TRACE_WAY_OUT", "column_of", "lanes_of", "number_in", "numbers_of", "seconds_of", "texts_of", "value_of"]

TRACE_WAY_OUT = "what hrm simulate PLAN --trace FILE writes, or a run of the plan"
_Kind = TypeVar("_Kind")


def value_of(document: Mapping[str, Any], key: str, kind: type[_Kind], where: str) -> _Kind:
    """The value of a key, of that type."""
    found = document.get(key)
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        words = {str: "text", int: "whole number", bool: "flag", list: "list", dict: "object"}[kind]
        raise InputError(f"is missing or no {words}", where=f"{where}.{key}", way_out=TRACE_WAY_OUT)
    return found


def number_in(value: object, where: str) -> float:
    """A finite number as it stands in a file."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:  # a whole number of hundreds of digits
            found = math.inf
        if math.isfinite(found):
            return found
    raise InputError(f"{value!r:.80} is no number", where=where, way_out=TRACE_WAY_OUT)


def column_of(document: Mapping[str, Any], key: str, where: str, count: int | None = None) -> list[Any]:
    """A list, of one entry per task where their number is given."""
    found: list[Any] = value_of(document, key, list, where)
    if count is not None and len(found) != count:
        raise InputError(f"has {len(found)} entries for {count} tasks", where=f"{where}.{key}", way_out=TRACE_WAY_OUT)
    return found


def numbers_of(document: Mapping[str, Any], key: str, where: str, count: int | None = None) -> tuple[float, ...]:
    """A column of finite numbers."""
    found = column_of(document, key, where, count)
    return tuple([number_in(value, f"{where}.{key}[{index}]") for index, value in enumerate(found)])


def seconds_of(document: Mapping[str, Any], key: str, where: str, count: int) -> tuple[float, ...]:
    """A column of durations [s]."""
    found = numbers_of(document, key, where, count)
    for index, seconds in enumerate(found):
        if seconds < 0.0:
            raise InputError(
                f"{seconds} s is less than nothing", where=f"{where}.{key}[{index}]", way_out=TRACE_WAY_OUT
            )
    return found


def texts_of(document: Mapping[str, Any], key: str, where: str) -> list[str]:
    """A column of texts."""
    found = column_of(document, key, where)
    for index, text in enumerate(found):
        if not isinstance(text, str):
            raise InputError(f"{text!r:.80} is no text", where=f"{where}.{key}[{index}]", way_out=TRACE_WAY_OUT)
    return found


def lanes_of(document: Mapping[str, Any], key: str, where: str) -> tuple[Lane, ...]:
    """A column of lanes by name."""
    found = []
    for index, text in enumerate(texts_of(document, key, where)):
        try:
            found.append(parse_lane(text))
        except InputError as error:
            raise InputError(error.fact, where=f"{where}.{key}[{index}]", way_out=error.way_out) from None
    return tuple(found)
