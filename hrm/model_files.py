"""Finding and reading a model: a config.json, a model folder, or a bundled checkpoint by the names people type.

A bundled name, alias or hub id stands for a checkpoint only where every key that is read here is the same, so
`mistralai/Mixtral-8x22B-Instruct-v0.1` (larger vocabulary) is not an alias of the base model.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hrm.errors import InputError
from hrm.families import REFUSED, read_spec
from hrm.model import ModelSpec

__all__ = ["BundledModel", "bundled_models", "find_config", "load_model", "model_names", "read_config_file"]

_FOLDER = Path(__file__).parent / "data" / "models"
_MAX_CONFIG_BYTES = 8_000_000

# Names that people will try, by how they begin, and the family whose reason they get.
_REFUSED_NAMES = {"jamba": "jamba", "ai21-jamba": "jamba", "llama-4": "llama4", "llama4": "llama4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledModel:
    """One bundled config: how it may be called, and where it was copied from.

    Attributes
    ----------
    name : str
        Name of the bundled file.
    hub_ids, aliases : tuple of str
        Hugging Face ids with exactly this shape, the first being the one the file is for; short names.
    source, status : str
        Public source of the file, and how faithful the copy is.
    notes : tuple of str
        What to know about the checkpoint: traps, disagreeing sources, published parameter counts.
    """

    name: str
    hub_ids: tuple[str, ...]
    aliases: tuple[str, ...]
    source: str
    status: str
    notes: tuple[str, ...]


@lru_cache(maxsize=1)
def bundled_models() -> Mapping[str, BundledModel]:
    """All bundled models by name, in the order they are listed to a person."""
    index = json.loads((_FOLDER / "index.json").read_text(encoding="utf-8"))
    return {
        name: BundledModel(
            name=name,
            hub_ids=tuple(entry["hub_ids"]),
            aliases=tuple(entry["aliases"]),
            source=entry["source"],
            status=entry["status"],
            notes=tuple(entry["notes"]),
        )
        for name, entry in index.items()
    }


def model_names() -> tuple[str, ...]:
    """Names of the bundled models."""
    return tuple(bundled_models())


def load_model(name_or_path: str | Path) -> ModelSpec:
    """Read a model.

    Parameters
    ----------
    name_or_path : str or Path
        A config.json, a folder with one in it, or the name, alias or hub id of a bundled model, in any case. What
        exists on disk comes first.

    Returns
    -------
    ModelSpec
        The model.

    Raises
    ------
    InputError
        Nothing of that name; a family that is not supported; a file that cannot be read or makes no sense.
    """
    return read_spec(**find_config(name_or_path))


def find_config(name_or_path: str | Path) -> dict[str, Any]:
    """The config.json of a model as written, and what to call it: the arguments of `hrm.families.read_spec`.

    Raises
    ------
    InputError
        Nothing of that name, or a file that cannot be read.
    """
    text = str(name_or_path).strip()
    if not text:
        raise InputError("the name of the model is empty", where="model", way_out="see `hrm models`")
    file = _find_file(text)
    if file is not None:
        name = file.stem if file.name != "config.json" else (file.absolute().parent.name or file.stem)
        return {"values": read_config_file(file), "file": str(file), "name": name}
    bundled = _spellings().get(_fold(text))
    if bundled is None:
        raise _unknown(text)
    values = read_config_file(_FOLDER / f"{bundled}.json")
    hub_id = bundled_models()[bundled].hub_ids[0]
    return {"values": values, "file": f"{bundled}.json (bundled)", "name": bundled, "hub_id": hub_id}


def read_config_file(file: Path, *, way_out: str = "a config.json as released with the checkpoint") -> dict[str, Any]:
    """Read a JSON object, strictly: no NaN, no key twice.

    Parameters
    ----------
    file : Path
        The file.
    way_out : str
        What would be accepted, for messages.

    Returns
    -------
    dict
        Its keys and values.

    Raises
    ------
    InputError
        The file cannot be read, is not JSON, or holds something other than one object.
    """
    where = str(file)
    try:
        size = file.stat().st_size
        if size > _MAX_CONFIG_BYTES:
            raise InputError(f"{size} bytes are too many for a config", where=where, way_out=way_out)
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=where, way_out=way_out) from error
    except UnicodeDecodeError as error:
        raise InputError("is not a text file in UTF-8", where=where, way_out=way_out) from error
    if not text.strip():
        raise InputError("is empty", where=where, way_out=way_out)

    def refuse_bad(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise InputError("this key is there twice", where=f"{where}: {key!r:.80}", way_out="delete one")
            for each in value if isinstance(value, list) else [value]:  # json takes NaN, and 1e999 for infinity
                if isinstance(each, float) and not math.isfinite(each):
                    said = f"holds {json.dumps(each)} as {key!r:.80}, which is not a number"
                    raise InputError(said, where=where, way_out=way_out)
            values[key] = value
        return values

    try:
        values = json.loads(text, object_pairs_hook=refuse_bad)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"is not valid JSON: {error.msg} at {place}", where=where, way_out=way_out) from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or thousands of nested brackets.
        raise InputError("is not JSON that can be read", where=where, way_out=way_out) from error
    if not isinstance(values, dict):
        raise InputError(f"holds a {type(values).__name__}, not an object", where=where, way_out=way_out)
    return values


def _find_file(text: str) -> Path | None:
    try:
        path = Path(text).expanduser() if text.startswith("~") else Path(text)
        if path.is_dir():
            if (path / "config.json").exists():
                return path / "config.json"
            if _fold(text) not in _spellings():
                raise InputError("this folder holds no config.json", where=text, way_out="a model folder, or its file")
            return None
        if path.exists() and not path.is_file():  # a device or a pipe may never end
            raise InputError("this is not a regular file", where=text, way_out="the path of a config.json")
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError) as error:  # too long a name, a null character, no home folder
        raise InputError(
            "cannot be a path or a name", where=f"model {text[:80]!r}", way_out="see `hrm models`"
        ) from error


@lru_cache(maxsize=1)
def _spellings() -> Mapping[str, str]:
    spellings: dict[str, str] = {}
    for model in bundled_models().values():
        for spelling in (model.name, *model.aliases, *model.hub_ids):
            spellings[_fold(spelling)] = model.name
            spellings.setdefault(_fold(spelling.split("/")[-1]), model.name)
    return spellings


def _fold(text: str) -> str:
    return text.strip().lower().replace("_", "-").replace(" ", "-").rstrip("/")


def _unknown(text: str) -> InputError:
    folded = _fold(text)
    short = folded.split("/")[-1]
    for beginning, family in _REFUSED_NAMES.items():
        if short.startswith(beginning):
            way_out = "see `hrm models` for those that are"
            return InputError(f"not supported: {REFUSED[family]}", where=f"model {text!r:.80}", way_out=way_out)
    extended = [name for name in model_names() if short.startswith(name)]
    close = [_spellings()[match] for match in difflib.get_close_matches(short, _spellings(), n=6)]
    nearest = list(dict.fromkeys([*extended, *close]))[:3]
    if folded.endswith(".json") or text.startswith(("/", ".", "~")):
        fact, way_out = "no such file", "the path of a config.json or of its folder"
    elif nearest:
        fact, way_out = "unknown model", f"did you mean {', '.join(nearest)}? Or give the path of a config.json"
    else:
        fact, way_out = "unknown model", f"the path of a config.json, or one of {', '.join(model_names())}"
    return InputError(fact, where=f"model {text!r:.80}", way_out=way_out)
