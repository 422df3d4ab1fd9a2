"""YAML text to plain mappings, lists and scalars: duplicate keys and keys that are no text are errors."""

from __future__ import annotations

from typing import Any

import yaml

from hrm.errors import InputError

__all__ = ["read_yaml"]

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser is about ten times as fast


class _StrictLoader(_SafeLoader):  # type: ignore[misc]
    """The safe loader, with mappings that refuse what a profile cannot mean."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in getattr(node, "value", ()):
            key = key_node.value
            if key_node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge") or not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {str(key)[:40]!r} is not a text (quote it)", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key[:40]!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def read_yaml(text: str, origin: str) -> Any:
    """The one document in `text`.

    Raises
    ------
    InputError
        Broken YAML, more than one document, duplicate keys, keys that are no text; with line and column.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        fact = f"{error.problem or error.context or 'broken YAML'}{place}"
        raise InputError(fact, where=origin, way_out="a profile is one YAML mapping, each key once") from None
    except yaml.YAMLError as error:
        raise InputError(f"is not YAML: {str(error).splitlines()[0]}", where=origin) from None
    except Exception as error:
        # PyYAML lets ValueError, KeyError, IndexError, AttributeError and RecursionError through: for a value that does
        # not suit its own tag (!!int "x", 2001-99-99), a number of 5,000 digits, 1,000 nested brackets.
        raise InputError(f"is not usable YAML: {str(error)[:100]}", where=origin) from None
