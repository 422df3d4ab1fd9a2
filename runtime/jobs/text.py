"""Text and tokens by the files of a model's folder: tokenizer.json, and the tokens that end a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hrm.errors import InputError
from hrm.model_files import read_config_file

__all__ = ["Tokenizer", "find_end_tokens", "open_tokenizer"]


class Tokenizer:
    """A folder's tokenizer, as `tokenizers` reads it: no network, no code of the folder."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids, with the tokens that the tokenizer puts around a text."""
        return [list(each.ids) for each in self._inner.encode_batch(list(texts))]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=True))


def open_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model's folder; None where it has no tokenizer.json.

    Raises
    ------
    InputError
        The file cannot be read.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    import tokenizers

    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        fact = f"is no tokenizer that can be read: {error!s:.120}"
        raise InputError(fact, where=str(file), way_out="download it again") from None
    inner.no_padding()
    inner.no_truncation()
    return Tokenizer(inner)


def find_end_tokens(folder: Path, config: Any) -> frozenset[int]:
    """Tokens that end a text: of generation_config.json, else of config.json; none where neither says.

    Raises
    ------
    InputError
        eos_token_id is there and is no token.
    """
    file = folder / "generation_config.json"
    found, where = None, f"{file}: eos_token_id"
    if file.is_file():
        found = read_config_file(file, way_out="the file as released with the checkpoint").get("eos_token_id")
    if found is None:
        found, where = config.get("eos_token_id"), "config.json: eos_token_id"
    if found is None:
        return frozenset()
    every = found if isinstance(found, list) else [found]
    for token in every:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InputError(f"{token!r:.60} is no token", where=where, way_out="a token id, or a list of them")
    return frozenset(every)
