"""Numerics: what the forward pass of a model needs to know beyond its shape, read from the keys of its config.json.

Sources: the configuration and modelling files of each family in transformers 5.24.0 and, for DBRX, the modelling file
released with the checkpoint. Nothing is assumed that a file of the family may say otherwise: what there is no kernel
for is refused by name, because running it as something else would give fluent nonsense. The planner reads it too: what
is refused here cannot be run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hrm.families import read_spec
from hrm.families.config_keys import ConfigKeys
from hrm.model import ModelSpec

__all__ = ["RUNTIME_FAMILIES", "Numerics", "Rope", "read_numerics"]

RUNTIME_FAMILIES = ("mixtral", "dbrx", "qwen2_moe", "qwen3_moe", "olmoe", "llama")
"""Those that the runtime has kernels for."""

# What transformers takes where the files, mostly those older than the key, do not say.
_DEFAULT_THETA = {"mixtral": 1e6}
_DEFAULT_EPS = {"olmoe": 1e-5}  # released OLMoE files do not have the key; those of the others do
_ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding.

    Attributes
    ----------
    theta : float
        Base of the wavelengths.
    kind : {"default", "linear", "llama3"}
        How the frequencies are scaled for long contexts.
    factor : float
        What the (low, for llama3) frequencies are divided by; 1 without scaling.
    low_freq_factor, high_freq_factor : float
        llama3: wavelengths over `original_positions / low` are scaled, those under `original_positions / high` are not.
    original_positions : int
        llama3: positions the model was trained with before scaling; 0 otherwise.
    """

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How a model computes. The shapes, and the attention window of every layer, are in its ModelSpec.

    Attributes
    ----------
    family : str
        `model_type` of the config.
    norm : {"rms", "layer"}
        Norm before attention, before the MLP and at the end: RMS norm, or LayerNorm without bias (DBRX).
    norm_eps : float
        Added to the variance, in every norm of the model.
    qkv_bias, output_bias : bool
        Whether Q, K, V and the output projection have biases.
    qk_norm : {"none", "head", "full"}
        RMS norm of queries and keys before the rotation: of each head (Qwen3-MoE), or of the whole projection (OLMoE).
    clip_qkv : float or None
        Queries, keys and values are clipped to plus or minus this before the rotation, after biases and norms.
    rope : Rope
        The rotation.
    rotary_width : int
        Values of a head that are rotated; element i pairs with element i + rotary_width / 2.
    activation : {"silu"}
        Of the gate of every MLP.
    router_norm : float or None
        The router takes a softmax over all experts and keeps the top k; their weights are divided by the p-norm of the
        k of them, with this p (1: they sum to 1), or left as they are (None).
    shared_expert_gate : bool
        Whether the output of the shared expert is multiplied by the sigmoid of one more row (Qwen2-MoE).
    attention_scale : float
        Factor of the scores, head_dim to the power of -1/2.
    """

    family: str
    norm: Literal["rms", "layer"]
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    qk_norm: Literal["none", "head", "full"]
    clip_qkv: float | None
    rope: Rope
    rotary_width: int
    activation: Literal["silu"]
    router_norm: float | None
    shared_expert_gate: bool
    attention_scale: float


def read_numerics(config: Mapping[str, Any], *, where: str) -> Numerics:
    """Read how a model computes.

    Parameters
    ----------
    config : mapping
        The keys of its config.json.
    where : str
        What messages call the file.

    Returns
    -------
    Numerics
        Everything but shapes.

    Raises
    ------
    InputError
        A family, an activation, a rope scaling or another variant that the runtime has no kernel for; a key that is
        missing or makes no sense.
    """
    keys = ConfigKeys(config, file=where)
    family = keys.word("model_type")
    if family not in RUNTIME_FAMILIES:
        fact = f"the runtime has no kernels for {family!r:.80} models"
        raise keys.error("model_type", fact, f"it runs {', '.join(RUNTIME_FAMILIES)}")
    spec = read_spec(config, file=where, name=family)
    if family == "dbrx":
        return _read_dbrx(keys, spec)
    if family == "llama" and spec.dense_vector_parameters:
        raise keys.error("mlp_bias", "the runtime has no kernel for an MLP with biases", "false")
    _check_activation(keys, "hidden_act")
    if family == "mixtral":
        router_norm: float | None = 1.0
    elif family == "llama":
        router_norm = None
    else:
        router_norm = 1.0 if keys.flag("norm_topk_prob") else None
    qk_norm: dict[str, Literal["head", "full"]] = {"qwen3_moe": "head", "olmoe": "full"}
    return Numerics(
        family=family,
        norm="rms",
        norm_eps=_number(keys, "rms_norm_eps", default=_DEFAULT_EPS.get(family)),
        # The readers count Q, K, V biases together with the q/k norms, so the flags are read again here.
        qkv_bias=keys.flag_or("qkv_bias", True, "") if family == "qwen2_moe" else _has_attention_bias(keys),
        output_bias=spec.output_vector_parameters > 0,
        qk_norm=qk_norm.get(family, "none"),
        clip_qkv=_number(keys, "clip_qkv") if family == "olmoe" and keys.has("clip_qkv") else None,
        rope=_read_rope(keys, theta_key="rope_theta", theta=_DEFAULT_THETA.get(family, 1e4)),
        rotary_width=spec.head_dim,
        activation="silu",
        router_norm=router_norm,
        shared_expert_gate=family == "qwen2_moe",
        attention_scale=spec.head_dim**-0.5,
    )


def _read_dbrx(keys: ConfigKeys, spec: ModelSpec) -> Numerics:
    _check_activation(keys, "ffn_config.ffn_act_fn.name")
    assigned = "ffn_config.uniform_expert_assignment"  # an aid for debugging the training: experts in turn
    if keys.has(assigned) and keys.flag(assigned):
        raise keys.error(assigned, "the runtime has no kernel for experts in turn", "false")
    power = "ffn_config.moe_normalize_expert_weights"
    return Numerics(
        family="dbrx",
        norm="layer",
        norm_eps=1e-5,  # not in the file: what torch's LayerNorm takes
        qkv_bias=False,
        output_bias=False,
        qk_norm="none",
        clip_qkv=_number(keys, "attn_config.clip_qkv") if keys.has("attn_config.clip_qkv") else None,
        rope=_read_rope(keys, theta_key="attn_config.rope_theta", theta=1e4),
        rotary_width=spec.head_dim,
        activation="silu",
        router_norm=_number(keys, power) if keys.has(power) else None,
        shared_expert_gate=False,
        attention_scale=spec.head_dim**-0.5,
    )


def _has_attention_bias(keys: ConfigKeys) -> bool:
    if keys.word("model_type") == "mixtral":  # has no such key
        return False
    return keys.flag_or("attention_bias", False, "")


def _check_activation(keys: ConfigKeys, key: str) -> None:
    if not keys.has(key):  # SiLU is the default of every family here
        return
    name = keys.word(key)
    if name.lower() not in ("silu", "swish"):
        raise keys.error(key, f"the runtime has no kernel for the activation {name!r:.80}", "silu")


def _read_rope(keys: ConfigKeys, *, theta_key: str, theta: float) -> Rope:
    # Up to transformers 4: rope_theta and rope_scaling; since 5: both in rope_parameters. Files that were edited may
    # have the old and the new.
    if keys.has("rope_parameters") and keys.has("rope_scaling"):
        raise keys.error("rope_scaling", "rope_parameters is there too, and may say something else", "delete one")
    section = "rope_scaling" if keys.has("rope_scaling") else "rope_parameters"
    # transformers 5 does not read attn_config of DBRX for this and writes its own default into rope_parameters, so
    # the key of the release comes first there; elsewhere rope_parameters does, as in transformers.
    theta_keys = [theta_key, "rope_parameters.rope_theta"]
    for key in theta_keys if theta_key.startswith("attn_config") else reversed(theta_keys):
        if keys.has(key):
            theta = _number(keys, key)
            break
    for key in ("partial_rotary_factor", "rope_parameters.partial_rotary_factor"):
        if keys.has(key) and _number(keys, key) != 1:
            raise keys.error(key, "the runtime has no kernel for a rotation of part of a head", "1")
    kind_key = next((f"{section}.{key}" for key in ("rope_type", "type") if keys.has(f"{section}.{key}")), "")
    if not kind_key:
        inner = keys.values.get(section)
        if isinstance(inner, Mapping) and set(inner) - {"rope_theta", "partial_rotary_factor"}:
            fact = "the runtime has no kernel for a rope of its own for each kind of layer, and there is no rope_type"
            raise keys.error(section, fact, f"rope_type, one of {', '.join(_ROPE_KINDS)}")
        return Rope(theta=theta)
    kind = keys.word(kind_key)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=_number(keys, f"{section}.factor"))
    if kind == "llama3":
        rope = Rope(
            theta=theta,
            kind="llama3",
            factor=_number(keys, f"{section}.factor"),
            low_freq_factor=_number(keys, f"{section}.low_freq_factor"),
            high_freq_factor=_number(keys, f"{section}.high_freq_factor"),
            original_positions=keys.size(f"{section}.original_max_position_embeddings", at_most=10**9),
        )
        if rope.high_freq_factor <= rope.low_freq_factor:
            fact = f"{rope.high_freq_factor:g} is not above low_freq_factor {rope.low_freq_factor:g}"
            raise keys.error(f"{section}.high_freq_factor", fact)
        return rope
    fact = f"the runtime has no kernel for the rope scaling {kind!r:.80}"
    raise keys.error(kind_key, fact, f"one of {', '.join(_ROPE_KINDS)}")


def _number(keys: ConfigKeys, key: str, *, default: float | None = None) -> float:
    value: Any = keys.values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        value = default
    if value is None:
        raise keys.error(key, "this key is missing", "add it as the released config.json of the checkpoint has it")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise keys.error(key, f"{value!r:.80} is not a number above 0")
    return float(value)
