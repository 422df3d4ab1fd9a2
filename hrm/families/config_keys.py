"""ConfigKeys: a config.json being read, where every wrong value is an error that names file, key and value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hrm.errors import InputError

__all__ = ["ConfigKeys"]

_ABSENT = object()


class ConfigKeys:
    """The keys of one config.json.

    A getter without `or` in its name insists on its key. The `_or` getters are for keys that released files of a family
    do not carry: they take the family's value and write down that they did, in `assumptions`.

    Parameters
    ----------
    values : mapping
        The JSON object.
    file : str
        What messages call the file.

    Attributes
    ----------
    assumptions : list of str
        One line for every value that was not in the file.
    """

    def __init__(self, values: Mapping[str, Any], *, file: str) -> None:
        self.values = values
        self.file = file
        self.assumptions: list[str] = []

    def error(self, key: str, fact: str, way_out: str = "") -> InputError:
        """An error about `key`, for the caller to raise."""
        return InputError(fact, where=f"{self.file}: {key}", way_out=way_out)

    def assume(self, key: str, value: object, because: str) -> None:
        """Write down that `key` is absent and which value stands for it."""
        self.assumptions.append(f"{key} is not in the file: taken as {value}, {because}")

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self._find(key) not in (_ABSENT, None)

    def size(self, key: str, *, at_least: int = 1, at_most: int) -> int:
        """A whole number within limits."""
        return self._whole_number(key, self._require(key), at_least, at_most)

    def size_or_null(self, key: str, *, at_least: int = 1, at_most: int) -> int | None:
        """A whole number within limits, or null; the key must be there."""
        value = self._require(key)
        return None if value is None else self._whole_number(key, value, at_least, at_most)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._require(key)
        if not isinstance(value, bool):
            raise self.error(key, f"{_show(value)} is not a flag", "true or false")
        return value

    def flag_or(self, key: str, default: bool, because: str) -> bool:
        """True or false; `default` where the key is absent or null."""
        if self.has(key):
            return self.flag(key)
        self.assume(key, str(default).lower(), because)
        return default

    def word(self, key: str) -> str:
        """A text that is not empty."""
        value = self._require(key)
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, f"{_show(value)} is not a text")
        return value

    def words(self, key: str, *, length: int, accepted: Iterable[str]) -> tuple[str, ...]:
        """A list of exactly `length` texts, each one of `accepted`."""
        choices = tuple(accepted)
        value = self._require(key)
        if not isinstance(value, list):
            raise self.error(key, f"{_show(value)} is not a list", f"a list of {length} of {', '.join(choices)}")
        if len(value) != length:
            raise self.error(key, f"has {len(value)} entries for {length} layers", "one entry for each layer")
        for index, item in enumerate(value):
            if item not in choices:
                raise self.error(f"{key}[{index}]", f"{_show(item)} is not supported", f"one of {', '.join(choices)}")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list, possibly empty, of texts."""
        value = self._require(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"{_show(value)} is not a list of texts")
        return tuple(value)

    def numbers(self, key: str, *, at_most: int) -> tuple[int, ...]:
        """A list, possibly empty, of whole numbers from 0 to `at_most`."""
        value = self._require(key)
        if not isinstance(value, list):
            raise self.error(key, f"{_show(value)} is not a list", f"a list of whole numbers from 0 to {at_most}")
        return tuple(self._whole_number(f"{key}[{index}]", item, 0, at_most) for index, item in enumerate(value))

    def _whole_number(self, key: str, value: object, at_least: int, at_most: int) -> int:
        way_out = f"a whole number from {at_least} to {at_most}"
        # bool is a kind of int in Python, and JSON's true is not a size.
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"{_show(value)} is not a whole number", way_out)
        if not at_least <= value <= at_most:
            raise self.error(key, f"{_show(value)} is out of range", way_out)
        return value

    def _require(self, key: str) -> Any:
        value = self._find(key)
        if value is _ABSENT:
            raise self.error(key, "this key is missing", "add it as the released config.json of the checkpoint has it")
        return value

    def _find(self, key: str) -> Any:
        section: Any = self.values
        for depth, part in enumerate(parts := key.split(".")):
            if not isinstance(section, Mapping):
                raise self.error(".".join(parts[:depth]), f"{_show(section)} is not an object", "{...} with the keys")
            section = section.get(part, _ABSENT)
            if section is _ABSENT:
                break
        return section


def _show(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an int of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
