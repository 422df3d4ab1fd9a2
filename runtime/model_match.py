"""Whether a model folder holds the model that a plan was made for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from hrm.errors import InputError
from hrm.families import read_spec
from hrm.model import ModelSpec
from runtime.numerics import Numerics, read_numerics

__all__ = ["check_same_model"]

NOT_OF_THE_SHAPE = {
    *("name", "hub_id", "origin", "assumptions"),
    *("checkpoint_dtype", "expert_dtype", "linear_dtype"),  # weights are brought into the plan's format as they load
}


def check_same_model(
    planned: Mapping[str, Any],
    found: Mapping[str, Any],
    *,
    where: str,
    whose: str = "the plan",
    there: str = "in the plan",
    way_out: str = "the folder of the model that was planned for, or hrm plan --model with this folder",
) -> None:
    """Refuse a model that has other shapes, or computes otherwise, than the one a plan was made for.

    Parameters
    ----------
    planned, found : mapping
        The keys of both config.json. What does not matter to a run (versions, names, token ids) may differ.
    where : str
        What messages call the file that was found.
    whose, there : str
        What they call that which has the other one, and say of its values.
    way_out : str

    Raises
    ------
    InputError
        Names the keys that make the difference, with both values.
    """
    first, second = _essence(planned, where="plan"), _essence(found, where=where)
    if first == second:
        return
    mine, other = dict(_flatten(planned)), dict(_flatten(found))
    different = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
    telling = [key for key in different if _matters(planned, key, other.get(key), first)]
    if not telling:  # only together do keys make a difference: name what they make
        mine, other = first, second
        telling = [key for key in mine if mine[key] != other[key]]
    shown = [f"{key} is {_in_words(other.get(key))}, {there} {_in_words(mine.get(key))}" for key in telling]
    more = f"; and {len(shown) - 3} more" if len(shown) > 3 else ""
    raise InputError(
        f"is another model than that of {whose}: {'; '.join(shown[:3])}{more}",
        where=where,
        way_out=way_out,
    )


def _in_words(value: Any) -> str:
    return "missing" if value is None else f"{value!r:.60}"


def _essence(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Everything of a config that a run depends on, by name."""
    spec, numerics = read_spec(config, file=where, name=""), read_numerics(config, where=where)
    found = {each.name: getattr(spec, each.name) for each in fields(ModelSpec) if each.name not in NOT_OF_THE_SHAPE}
    return found | {each.name: getattr(numerics, each.name) for each in fields(Numerics)}


def _matters(config: Mapping[str, Any], key: str, value: Any, essence: Mapping[str, Any]) -> bool:
    """Whether a config with one key exchanged would be another model."""
    try:
        return _essence(_exchanged(config, key.split("."), value), where="plan") != essence
    except InputError:  # it makes no sense beside the other keys
        return True


def _exchanged(config: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    changed = dict(config)
    if len(path) > 1:
        inner = changed.get(path[0])
        changed[path[0]] = _exchanged(inner if isinstance(inner, Mapping) else {}, path[1:], value)
    elif value is None:
        changed.pop(path[0], None)
    else:
        changed[path[0]] = value
    return changed


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots between them, and values; null is like a key that is not there."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
