"""From the keys of a config.json to a ModelSpec: which reader serves which `model_type`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from hrm.families import readers
from hrm.families.config_keys import ConfigKeys
from hrm.model import ModelSpec

__all__ = ["READERS", "REFUSED", "read_spec"]

READERS: Mapping[str, Callable[[ConfigKeys], ModelSpec]] = MappingProxyType(
    {
        "mixtral": readers.read_mixtral,
        "dbrx": readers.read_dbrx,
        "qwen2_moe": readers.read_qwen2_moe,
        "qwen3_moe": readers.read_qwen3_moe,
        "olmoe": readers.read_olmoe,
        "deepseek_v2": readers.read_deepseek_v2,
        "deepseek_v3": readers.read_deepseek_v3,
        "kimi_k2": readers.read_deepseek_v3,
        "phimoe": readers.read_phimoe,
        "gpt_oss": readers.read_gpt_oss,
        "glm4_moe": readers.read_glm4_moe,
        "granitemoe": readers.read_granitemoe,
        "llama": readers.read_llama,
        "opt": readers.read_opt,
    }
)

_LLAMA4 = "its chunked attention and its vision tower are not modelled, so memory and speed would come out wrong"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "jamba": "28 of its 32 layers keep a Mamba state instead of a KV cache, which is not modelled",
        "llama4": _LLAMA4,
        "llama4_text": _LLAMA4,
    }
)

MAX_PARAMETERS = 10**14


def read_spec(values: Mapping[str, Any], *, file: str, name: str, hub_id: str = "") -> ModelSpec:
    """Read a model from the keys of its config.json.

    Parameters
    ----------
    values : mapping
        The JSON object.
    file : str
        What messages call the file.
    name, hub_id : str
        How the model is called, and its Hugging Face id if known.

    Returns
    -------
    ModelSpec
        The model; what the file left open is in its `assumptions`.

    Raises
    ------
    InputError
        A family that is not supported; a key that is missing or makes no sense.
    """
    keys = ConfigKeys(values, file=file)
    model_type = keys.word("model_type")
    if model_type in REFUSED:
        raise keys.error("model_type", f"{model_type} models are not supported: {REFUSED[model_type]}", _supported())
    if keys.has("text_config"):
        raise keys.error("text_config", "models of several modalities are not supported", _supported())
    if model_type not in READERS:
        near = difflib.get_close_matches(model_type, READERS, n=1)
        suggestion = f"did you mean {near[0]}? " if near else ""
        raise keys.error("model_type", f"{model_type!r:.80} is not supported", suggestion + _supported())
    spec = READERS[model_type](keys)
    if spec.total_parameters > MAX_PARAMETERS:
        raise keys.error("hidden_size", f"the sizes add up to {spec.total_parameters:.3g} parameters", "at most 1e14")
    return replace(spec, name=name, hub_id=hub_id, assumptions=tuple(keys.assumptions))


def _supported() -> str:
    return f"supported: {', '.join(READERS)}"
