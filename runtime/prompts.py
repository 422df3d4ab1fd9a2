"""Prompts of a run: token ids from a file of JSON lines, or drawn at random with the lengths of a workload."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hrm.errors import InputError
from hrm.workload import Workload
from hrm.workload_files import ID_LIST_KEY

__all__ = ["Prompt", "random_prompts", "read_prompts"]

ACCEPTED = f'lines such as {{"id": "a", "{ID_LIST_KEY}": [1, 2, 3]}}, or [1, 2, 3]'


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a person calls it, and its token ids."""

    id: str | int
    tokens: tuple[int, ...]


def random_prompts(workload: Workload, count: int, vocabulary: int, *, seed: int) -> list[Prompt]:
    """The first requests of a workload with random tokens: same seed, same prompts.

    Parameters
    ----------
    count : int
        Requests.
    vocabulary : int
        Tokens are drawn from 0 to this less one.
    """
    lengths, draw = workload.padded_prompt_lengths, random.Random(f"prompts/{seed}")
    return [
        Prompt(number, tuple(draw.choices(range(vocabulary), k=lengths[number % len(lengths)])))
        for number in range(count)
    ]


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts from JSON lines, in file order; one without an id gets its number, from 0.

    Raises
    ------
    InputError
        The file cannot be read, or a line is no prompt: names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path), way_out=ACCEPTED) from None
    except UnicodeDecodeError:
        raise InputError("is not a text file in UTF-8", where=str(path), way_out=ACCEPTED) from None
    found = list(_parse(text, str(path)))
    if not found:
        raise InputError("holds no prompts", where=str(path), way_out=ACCEPTED)
    seen: dict[str | int, int] = {}
    for number, prompt in enumerate(found):
        if seen.setdefault(prompt.id, number) != number:
            fact = f"two prompts have the id {prompt.id!r:.80}"
            raise InputError(fact, where=str(path), way_out="an id of its own for each, or none")
    return found


def _parse(text: str, name: str) -> Iterator[Prompt]:
    count = 0
    for line_number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{name}: line {line_number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{line.strip()!r:.60} is not JSON", where=where, way_out=ACCEPTED) from None
        identity: object = count
        if isinstance(value, dict):
            unknown = [key for key in value if key not in ("id", ID_LIST_KEY)]
            if unknown or ID_LIST_KEY not in value:
                fact = f"unknown key {unknown[0]!r:.60}" if unknown else f"the key {ID_LIST_KEY} is missing"
                raise InputError(fact, where=where, way_out=ACCEPTED)
            identity, value = value.get("id", count), value[ID_LIST_KEY]
        if isinstance(identity, bool) or not isinstance(identity, str | int):
            raise InputError(f"{identity!r:.60} is no id", where=f"{where}: id", way_out="a text or a whole number")
        if not isinstance(value, list) or not value:
            raise InputError(f"{value!r:.60} is no list of token ids", where=where, way_out=ACCEPTED)
        for token in value:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise InputError(f"{token!r:.60} is not a token id", where=where, way_out="whole numbers from 0 on")
        yield Prompt(identity, tuple(value))
        count += 1
