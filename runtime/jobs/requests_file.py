"""Requests of a job from a file of JSON lines: what is wrong with a line is said with its number, the others run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hrm.errors import InputError
from hrm.workload_files import ID_LIST_KEY

__all__ = ["Fault", "JobRequest", "Limits", "read_requests"]

ACCEPTED = f'lines such as {{"id": "a", "prompt": "Once", "max_new_tokens": 64}}, or with "{ID_LIST_KEY}": [1, 2, 3]'
KEYS = ("id", "prompt", ID_LIST_KEY, "max_new_tokens")
ENCODED_AT_ONCE = 1000
"""Texts that are given to the tokenizer together: it takes several threads."""

Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A prompt to complete: its line in the file, what a person calls it, token ids, most tokens to generate."""

    line: int
    id: str | int
    tokens: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that cannot be run, and why."""

    line: int
    fact: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request must keep within.

    Attributes
    ----------
    vocabulary : int
        Tokens that the model knows.
    positions : int or None
        Of a prompt and what is generated, by the model.
    new_tokens : int or None
        Most that the plan generates for a request; where a line says nothing, so many are.
    request_tokens : int or None
        Of a prompt and what is generated, by the plan.
    prompt_tokens : int or None
        Of a prompt, by the plan.
    """

    vocabulary: int
    positions: int | None = None
    new_tokens: int | None = None
    request_tokens: int | None = None
    prompt_tokens: int | None = None


class _BadLine(Exception):  # noqa: N818 (a fact, told as a Fault)
    pass


def read_requests(
    path: Path, limits: Limits, *, encode: Encode | None, default_new_tokens: int | None = None
) -> tuple[list[JobRequest], list[Fault]]:
    """Read all requests, in file order.

    Parameters
    ----------
    path : Path
    limits : Limits
    encode : callable, optional
        Texts to token ids; without it a line must have token ids.
    default_new_tokens : int, optional
        For lines that do not say; `limits.new_tokens` if not given.

    Returns
    -------
    tuple of (list of JobRequest, list of Fault)
        Each line that is not empty is in one of them.

    Raises
    ------
    InputError
        The file cannot be read, or has no line at all.
    """
    faults: list[Fault] = []
    parsed: list[tuple[int, str | int, str | tuple[int, ...], int]] = []
    seen: dict[str | int, int] = {}
    default = default_new_tokens or limits.new_tokens
    for number, raw in _lines(path):
        try:
            name, prompt, most = _parse(raw, default)
            if name in seen:
                raise _BadLine(f"the id {name!r:.60} is that of line {seen[name]}")
            seen[name] = number
            if isinstance(prompt, str) and encode is None:
                raise _BadLine(f"has a text, and the model's folder no tokenizer.json: give {ID_LIST_KEY}")
            parsed.append((number, name, prompt, most))
        except _BadLine as error:
            faults.append(Fault(number, str(error)))
    if not parsed and not faults:
        raise InputError("holds no requests", where=str(path), way_out=ACCEPTED)
    texts = [prompt for _, _, prompt, _ in parsed if isinstance(prompt, str)]
    encoded = iter(_encode(texts, encode))
    found = []
    for number, name, prompt, most in parsed:
        tokens = tuple(next(encoded)) if isinstance(prompt, str) else prompt
        try:
            _check(tokens, most, limits)
        except _BadLine as error:
            faults.append(Fault(number, str(error)))
        else:
            found.append(JobRequest(number, name, tokens, most))
    return found, sorted(faults, key=lambda fault: fault.line)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if line.strip():
                    yield number, line
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path), way_out=ACCEPTED) from None


def _parse(raw: bytes, default: int | None) -> tuple[str | int, str | tuple[int, ...], int]:
    try:
        value: Any = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise _BadLine("is no text in UTF-8") from None
    except (ValueError, RecursionError):
        raise _BadLine(f"{raw.decode('utf-8', 'replace').strip()!r:.60} is not JSON") from None
    if not isinstance(value, dict):
        raise _BadLine(f"{raw.decode().strip()!r:.60} is no object with an id and a prompt")
    unknown = [key for key in value if key not in KEYS]
    if unknown:
        raise _BadLine(f"unknown key {unknown[0]!r:.60}, known are {', '.join(KEYS)}")
    name = value.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise _BadLine(f"{name!r:.60} is no id: a text or a whole number" if "id" in value else "has no id")
    if isinstance(name, str) and not _is_text(name):
        raise _BadLine("has an id that is no text in UTF-8")
    given = [key for key in ("prompt", ID_LIST_KEY) if value.get(key) is not None]
    if len(given) != 1:
        words = ("both", "and") if given else ("neither", "nor")
        raise _BadLine(f"has {words[0]} prompt {words[1]} {ID_LIST_KEY}: one of them is needed")
    return name, _prompt(value[given[0]], given[0]), _most(value.get("max_new_tokens"), default)


def _prompt(value: Any, key: str) -> str | tuple[int, ...]:
    if key == "prompt":
        if not isinstance(value, str) or not value or not _is_text(value):
            raise _BadLine(f"prompt: {value!r:.60} is no text")
        return value
    if not isinstance(value, list) or not value:
        raise _BadLine(f"{key}: {value!r:.60} is no list of token ids")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise _BadLine(f"{key}: {token!r:.60} is no token id")
    return tuple(value)


def _is_text(value: str) -> bool:
    """JSON may escape half a surrogate pair, which no file can hold and no tokenizer take."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _most(value: Any, default: int | None) -> int:
    if value is None:
        if default is None:
            raise _BadLine("has no max_new_tokens, and no default is given")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _BadLine(f"max_new_tokens: {value!r:.60} is no whole number from 1 on")
    return value


def _encode(texts: Sequence[str], encode: Encode | None) -> Iterator[list[int]]:
    for start in range(0, len(texts), ENCODED_AT_ONCE):
        assert encode is not None
        yield from encode(texts[start : start + ENCODED_AT_ONCE])


def _check(tokens: tuple[int, ...], most: int, limits: Limits) -> None:
    if not tokens:
        raise _BadLine("has a prompt without a token")
    if max(tokens) >= limits.vocabulary:
        raise _BadLine(f"has the token {max(tokens)}, the model has {limits.vocabulary:,}")
    if limits.new_tokens is not None and most > limits.new_tokens:
        raise _BadLine(f"max_new_tokens: {most:,} is more than the {limits.new_tokens:,} of the plan")
    every = len(tokens) + most
    words = f"has {len(tokens):,} tokens, {every:,} with what is generated"
    if limits.positions and every > limits.positions:
        raise _BadLine(f"{words}, the model has {limits.positions:,} positions")
    if limits.request_tokens and every > limits.request_tokens:
        raise _BadLine(f"{words}, the plan has room for {limits.request_tokens:,}")
    if limits.prompt_tokens and len(tokens) > limits.prompt_tokens:
        raise _BadLine(f"has {len(tokens):,} tokens, the plan has prompts of {limits.prompt_tokens:,} at most")
