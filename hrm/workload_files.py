"""Reads prompt lengths from a person's file: CSV with one column, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from hrm.errors import InputError

__all__ = ["LENGTH_COLUMNS", "MAX_TOKENS", "read_prompt_lengths"]

LENGTH_COLUMNS = ("prompt_tokens", "prompt_len", "prompt_length", "input_len", "length", "tokens")
"""Names of the one column, or key, that holds the prompt length [tokens]."""

ID_LIST_KEY = "prompt_token_ids"
"""JSON key of a tokenised prompt, whose length counts."""

MAX_TOKENS = 10_000_000
"""A longer prompt is taken for a mistake [tokens]."""

MAX_FILE_BYTES = 256 * 2**20
"""A larger file is not a list of lengths [byte]."""

_ACCEPTED_CSV = f"one column of whole numbers, with a header ({', '.join(LENGTH_COLUMNS)}) or none"
_ACCEPTED_JSON = f'lines such as 77 or {{"prompt_tokens": 77}}; keys: {", ".join(LENGTH_COLUMNS)}, {ID_LIST_KEY}'
_ACCEPTED_LENGTH = f"a whole number of tokens from 1 to {MAX_TOKENS:,}"


def read_prompt_lengths(path: str | Path) -> tuple[int, ...]:
    """Read the prompt lengths of a file, in file order.

    Parameters
    ----------
    path : str or Path
        ``.jsonl`` or ``.ndjson``, or any file that starts with ``{`` or ``[``: JSON lines, each a whole number, an
        object with one of `LENGTH_COLUMNS`, or one with ``prompt_token_ids``. Anything else: CSV with one column, with
        or without a header. Blank lines are skipped, in CSV also lines that start with ``#``.

    Returns
    -------
    tuple of int
        Prompt lengths [tokens], at least one.

    Raises
    ------
    InputError
        If the file cannot be read or a line holds anything else; names file and line.
    """
    name = str(path) or "."
    lines = _read_text(path, name).splitlines()
    first = next((line.strip() for line in lines if line.strip()), "")
    is_json = name.lower().endswith((".jsonl", ".ndjson")) or first.startswith(("{", "["))
    lengths = tuple(_parse_json(lines, name) if is_json else _parse_csv(lines, name))
    if not lengths:
        raise InputError("holds no prompt lengths", where=name, way_out=_ACCEPTED_JSON if is_json else _ACCEPTED_CSV)
    return lengths


def _read_text(path: str | Path, name: str) -> str:
    try:
        file = Path(path)
        if file.is_dir():
            raise InputError("is a folder", where=name, way_out="a CSV or JSONL file of prompt lengths")
        if not file.exists():
            raise InputError("no such file", where=name, way_out="a CSV or JSONL file of prompt lengths")
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        raise InputError(f"cannot be read: {error}", where=name) from error
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"is larger than {MAX_FILE_BYTES // 2**20} MiB", where=name, way_out=_ACCEPTED_CSV)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"is not text in UTF-8: byte {error.start}", where=name, way_out=_ACCEPTED_CSV) from error
    if "\0" in text:
        raise InputError("is a binary file", where=name, way_out=_ACCEPTED_CSV)
    return text


def _parse_csv(lines: list[str], name: str) -> Iterator[int]:
    is_first = True
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        where = f"{name}: line {number}"
        cells = [cell.strip().strip('"').strip() for cell in text.split(",")]
        if is_first and not _looks_like_number(cells[0]):
            unknown = [cell for cell in cells if cell.lower() not in LENGTH_COLUMNS]
            if unknown:
                raise InputError(f"{_quote(unknown[0])} is not a known column", where=where, way_out=_ACCEPTED_CSV)
        if len(cells) != 1:
            raise InputError(f"has {len(cells)} columns", where=where, way_out=_ACCEPTED_CSV)
        if not is_first or _looks_like_number(cells[0]):
            yield _parse_length(cells[0], where)
        is_first = False


def _looks_like_number(cell: str) -> bool:
    """Tell a first value, even a wrong one such as ``-3`` or ``nan``, from a header."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _parse_length(cell: str, where: str) -> int:
    # int() would also take "1_000", and digits of other scripts.
    if not (cell.isascii() and cell.isdigit()):
        _refuse_length(_quote(cell), where)
    if len(cell.lstrip("0")) > len(str(MAX_TOKENS)):  # also keeps int() off strings of thousands of digits
        _refuse_length(_quote(cell), where)
    return _check_length(int(cell), where)


def _parse_json(lines: list[str], name: str) -> Iterator[int]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}: line {number}"
        try:
            value = json.loads(line, object_pairs_hook=_JsonPairs)
        except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
            raise InputError(f"{_quote(line.strip())} is not JSON", where=where, way_out=_ACCEPTED_JSON) from error
        yield _length_of_object(value, where) if isinstance(value, _JsonPairs) else _check_length(value, where)


class _JsonPairs(list[tuple[str, Any]]):
    """A JSON object with its keys as written, repeated ones included."""


def _length_of_object(pairs: _JsonPairs, where: str) -> int:
    for key, _ in pairs:
        if key not in LENGTH_COLUMNS and key != ID_LIST_KEY:
            raise InputError(f"unknown key {_quote(key)}", where=where, way_out=_ACCEPTED_JSON)
    if len(pairs) != 1:
        raise InputError(f"{len(pairs)} lengths in one line", where=where, way_out=_ACCEPTED_JSON)
    key, value = pairs[0]
    if key != ID_LIST_KEY:
        return _check_length(value, f"{where}: {key}")
    if isinstance(value, _JsonPairs) or not isinstance(value, list):
        raise InputError(f"{_quote(value)} is not a list", where=f"{where}: {key}", way_out="a list of token ids")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InputError(f"{_quote(token)} is not a token id", where=f"{where}: {key}", way_out="0 or more")
    return _check_length(len(value), f"{where}: {key}")


def _check_length(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        _refuse_length(_quote(value), where)
    return value


def _refuse_length(quoted: str, where: str) -> NoReturn:
    raise InputError(f"{quoted} is not a prompt length", where=where, way_out=_ACCEPTED_LENGTH)


def _quote(value: object) -> str:
    """Show a value as it was given, cut where it would fill the screen."""
    if isinstance(value, _JsonPairs):
        return "an object"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**40:
        return "a number of more than 40 digits"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
