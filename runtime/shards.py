"""Shards: the safetensors files of a checkpoint, checked to the last byte before a tensor is used.

A file begins with the length of its header (8 bytes, little endian), the header (JSON: format, shape and bytes of each
tensor), then the bytes (https://github.com/huggingface/safetensors#format). So a download that broke off shows in the
length of the file, without reading it. Pickled checkpoints are refused: reading one can run code that is in it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hrm.errors import InputError
from hrm.model_files import read_config_file

__all__ = ["StoredTensor", "find_tensors"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format
_VALUE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_AGAIN = "download it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor as the header of its file has it: the file, the format's safetensors name, and the shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor that the safetensors files of a folder hold.

    Parameters
    ----------
    folder : Path
        A model folder with `model.safetensors`, or with `model.safetensors.index.json` and the files it names.

    Returns
    -------
    dict of str to StoredTensor
        By key.

    Raises
    ------
    InputError
        No such files, one that is missing, unreadable, truncated or too long, or a tensor that the index promises and
        the file does not hold.
    """
    if (folder / _SINGLE).is_file():
        return _read_shard(folder / _SINGLE)
    if not (folder / _INDEX).is_file():
        raise _no_weights(folder)
    index = read_config_file(folder / _INDEX, way_out="the index that was released with the checkpoint")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise InputError("this key is missing or empty", where=f"{folder / _INDEX}: weight_map", way_out=_AGAIN)
    for key, name in weight_map.items():
        # A shard lies beside its index; a path would let a downloaded file choose what is opened.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            where = f"{folder / _INDEX}: weight_map: {key:.80}"
            raise InputError(f"{name!r:.80} is not the name of a safetensors file", where=where)
    tensors: dict[str, StoredTensor] = {}
    held = Counter(weight_map.values())
    missing = [name for name in sorted(held) if not (folder / name).is_file()]
    if missing:
        fact = f"{missing[0]} is missing, which holds {held[missing[0]]} of {len(weight_map)} tensors"
        if len(missing) > 1:
            fact += f"; so are {len(missing) - 1} more of the {len(held)} files"
        raise InputError(fact, where=str(folder), way_out="download the rest of the checkpoint")
    for name in sorted(held):
        tensors |= _read_shard(folder / name)
    for key, name in weight_map.items():
        if key not in tensors or tensors[key].file.name != name:
            raise InputError(f"does not hold {key}, as {_INDEX} says", where=str(folder / name), way_out=_AGAIN)
    return tensors


def _no_weights(folder: Path) -> InputError:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        fact = f"holds its weights in pickle files only ({pickled[0]}), and reading one can run code that is in it"
        way_out = "take the safetensors files of this model, or load it with transformers and save_pretrained it again"
        return InputError(fact, where=str(folder), way_out=way_out)
    gguf = next((path.name for path in folder.glob("*.gguf")), "")
    fact = f"holds {gguf}, which is not a format this runtime reads" if gguf else "holds no weights"
    return InputError(fact, where=str(folder), way_out=f"{_SINGLE}, or {_INDEX} and the files it names")


def _read_shard(file: Path) -> dict[str, StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            beginning = stream.read(8)
            length = int.from_bytes(beginning, "little")
            if beginning == b"version ":  # the text that git leaves where git-lfs was not at work
                raise InputError("is a git-lfs pointer, not the file", where=str(file), way_out="git lfs pull")
            if len(beginning) < 8 or length > size - 8:
                raise InputError(f"ends within its header, after {size:,} bytes", where=str(file), way_out=_AGAIN)
            header = _parse_header(stream.read(length) if length <= _MAX_HEADER_BYTES else b"", file)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(file)) from error
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        tensors[key], last = _read_entry(key, entry, file)
        end = max(end, last)
    expected = 8 + length + end
    if size < expected:
        fact = f"is truncated: {size:,} bytes, {expected - size:,} fewer than the {expected:,} its header says"
        raise InputError(fact, where=str(file), way_out=_AGAIN)
    if size > expected:
        fact = f"has {size - expected:,} bytes more than the {expected:,} its header says"
        raise InputError(fact, where=str(file), way_out=_AGAIN)
    return tensors


def _parse_header(text: bytes, file: Path) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError("has a header that cannot be read", where=str(file), way_out=_AGAIN) from error
    if not isinstance(header, dict):
        raise InputError("has a header that cannot be read", where=str(file), way_out=_AGAIN)
    return header


def _read_entry(key: str, entry: Any, file: Path) -> tuple[StoredTensor, int]:
    try:
        dtype, shape, (first, last) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        sound = all(isinstance(number, int) and number >= 0 for number in (*shape, first, last)) and first <= last
    except (TypeError, KeyError, ValueError):
        sound = False
    if sound and dtype in _VALUE_BYTES:
        sound = last - first == math.prod(shape) * _VALUE_BYTES[dtype]
    if not sound:
        fact = f"has a header in which {key!r:.80} makes no sense"
        raise InputError(fact, where=str(file), way_out=_AGAIN)
    return StoredTensor(file=file, dtype=dtype, shape=shape), last
