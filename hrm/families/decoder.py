"""The pieces that decoder families share: sizes under their usual names, experts, windows, number formats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hrm.dtypes import parse_dtype
from hrm.families.config_keys import ConfigKeys
from hrm.model import ModelSpec

__all__ = [
    "MAX_EXPERTS",
    "MAX_FFN",
    "MAX_HEADS",
    "MAX_HEAD_DIM",
    "MAX_HIDDEN",
    "MAX_LAYERS",
    "MAX_POSITIONS",
    "MAX_VOCAB",
    "add_attention_bias",
    "add_experts",
    "check_kv_heads",
    "derive_head_dim",
    "read_checkpoint_dtype",
    "read_decoder",
    "read_matrix_dtypes",
    "read_window",
]

# Far above any released checkpoint; beyond them a number is a typing mistake, and byte counts would leave 64 bits.
MAX_LAYERS = 1_000
MAX_HIDDEN = 131_072
MAX_FFN = 1_048_576
MAX_HEADS = 4_096
MAX_HEAD_DIM = 8_192
MAX_EXPERTS = 65_536
MAX_VOCAB = 10_000_000
MAX_POSITIONS = 1_000_000_000

QUANTISATION_WAY_OUT = (
    "take the config.json of the checkpoint that is not quantised, or delete quantization_config from a copy,"
    " and give the format as --weights-dtype int4, int8 or fp8"
)


def read_decoder(keys: ConfigKeys, *, head_dim_required: bool = False, absent_dtype: str = "") -> ModelSpec:
    """Read what most families name alike, as a dense model with RMS norms, no biases and full attention.

    Parameters
    ----------
    keys : ConfigKeys
        The file.
    head_dim_required : bool
        True for families whose head width is not hidden_size / num_attention_heads, so that it must be given.
    absent_dtype : str
        The format of a family whose files do not give it; "" where they must.

    Returns
    -------
    ModelSpec
        To be completed by the family with `dataclasses.replace`.

    Raises
    ------
    InputError
        A key is missing or its value makes no sense.
    """
    hidden = keys.size("hidden_size", at_most=MAX_HIDDEN)
    layers = keys.size("num_hidden_layers", at_most=MAX_LAYERS)
    heads = keys.size("num_attention_heads", at_most=MAX_HEADS)
    kv_heads = check_kv_heads(keys, "num_key_value_heads", heads)
    if head_dim_required or keys.has("head_dim"):
        head_dim = keys.size("head_dim", at_most=MAX_HEAD_DIM)
    else:
        head_dim = derive_head_dim(keys, "hidden_size", hidden, "num_attention_heads", heads)
    checkpoint_dtype = read_checkpoint_dtype(keys, absent_dtype)
    expert_dtype, linear_dtype = read_matrix_dtypes(keys, checkpoint_dtype)
    return ModelSpec(
        name="",
        family=keys.word("model_type"),
        origin=keys.file,
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        vocab_size=keys.size("vocab_size", at_most=MAX_VOCAB),
        max_positions=keys.size("max_position_embeddings", at_most=MAX_POSITIONS),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        moe_layers=(False,) * layers,
        layer_windows=(None,) * layers,
        checkpoint_dtype=checkpoint_dtype,
        expert_dtype=expert_dtype,
        linear_dtype=linear_dtype,
        norm_parameters_per_layer=2 * hidden,
        final_norm_parameters=hidden,
    )


def check_kv_heads(keys: ConfigKeys, key: str, heads: int) -> int:
    """Read the number of KV heads, which must divide the number of heads."""
    kv_heads = keys.size(key, at_most=MAX_HEADS)
    if heads % kv_heads:
        raise keys.error(key, f"{kv_heads} does not divide the {heads} attention heads", "a divisor of the heads")
    return kv_heads


def derive_head_dim(keys: ConfigKeys, hidden_key: str, hidden: int, heads_key: str, heads: int) -> int:
    """Take hidden / heads as the head width, for families whose files do not give it; it must come out whole."""
    if hidden % heads:
        raise keys.error(heads_key, f"{heads} heads do not divide {hidden_key} {hidden}", "give head_dim")
    keys.assume("head_dim", hidden // heads, f"{hidden_key} / {heads_key}")
    return hidden // heads


def add_attention_bias(spec: ModelSpec, *, output: bool) -> ModelSpec:
    """Add biases to the Q, K, V projections and, if `output`, to the output projection."""
    return replace(
        spec,
        qkv_vector_parameters=spec.qkv_vector_parameters + sum(rows for rows, _ in spec.qkv_matrices),
        output_vector_parameters=spec.output_vector_parameters + (spec.hidden_size if output else 0),
    )


def add_experts(
    spec: ModelSpec,
    keys: ConfigKeys,
    *,
    experts_key: str,
    ffn_key: str,
    top_k_key: str = "num_experts_per_tok",
    router_bias: bool = False,
    moe_layers: Iterable[bool] | None = None,
) -> ModelSpec:
    """Add routed experts and their router.

    Parameters
    ----------
    spec, keys
        The model so far, and the file.
    experts_key, ffn_key, top_k_key : str
        What the family calls the number of experts, the width of one, and how many a token visits.
    router_bias : bool
        Whether the router has one value more per expert: a bias, or the score correction of DeepSeek-V3 and GLM-4.5.
    moe_layers : iterable of bool, optional
        Which layers have experts; all where not given. The others get a dense MLP of width `intermediate_size`.

    Returns
    -------
    ModelSpec
        The model with experts.

    Raises
    ------
    InputError
        More experts per token than experts, or no layer is left with experts.
    """
    experts = keys.size(experts_key, at_most=MAX_EXPERTS)
    top_k = keys.size(top_k_key, at_most=MAX_EXPERTS)
    if top_k > experts:
        raise keys.error(top_k_key, f"{top_k} is more than the {experts} experts", f"1 to {experts}")
    layers = (True,) * spec.n_layers if moe_layers is None else tuple(moe_layers)
    if not any(layers):
        raise keys.error("num_hidden_layers", f"none of the {spec.n_layers} layers is left with experts")
    return replace(
        spec,
        n_experts=experts,
        top_k=top_k,
        expert_ffn=keys.size(ffn_key, at_most=MAX_FFN),
        dense_ffn=0 if all(layers) else keys.size("intermediate_size", at_most=MAX_FFN),
        moe_layers=layers,
        router_parameters_per_layer=experts * (spec.hidden_size + router_bias),
    )


def read_window(spec: ModelSpec, keys: ConfigKeys) -> int | None:
    """Read `sliding_window` [tokens]; null, or as wide as the longest sequence, means full attention."""
    window = keys.size_or_null("sliding_window", at_most=MAX_POSITIONS)
    return None if window is None or window >= spec.max_positions else window


def read_checkpoint_dtype(keys: ConfigKeys, absent_dtype: str = "") -> str:
    """Read the format of the checkpoint, which is `torch_dtype` or, since transformers 5, `dtype`."""
    names = [key for key in ("torch_dtype", "dtype") if keys.has(key)]
    if not names and absent_dtype:
        keys.assume("torch_dtype", absent_dtype, "as files of this family do not carry it")
        return absent_dtype
    if not names:
        raise keys.error("torch_dtype", "this key is missing", "torch_dtype or dtype: bfloat16, float16 or float32")
    found = [
        parse_dtype(keys.word(key), where=f"{keys.file}: {key}", allowed=("bf16", "fp16", "fp32")) for key in names
    ]
    if len(set(found)) > 1:
        raise keys.error("dtype", f"{found[1]} contradicts torch_dtype {found[0]}", "delete one of the two")
    return found[0]


def read_matrix_dtypes(keys: ConfigKeys, checkpoint_dtype: str) -> tuple[str, str]:
    """Read the formats of the routed experts' matrices and of the other linear matrices.

    Known are no quantisation, DeepSeek's fp8 (e4m3 in 128 x 128 blocks, all linear matrices) and gpt-oss's mxfp4 (the
    experts). Of the other schemes a config does not say which matrices they leave alone, so they are refused.
    """
    if keys.has("quantization"):  # what MLX writes
        raise keys.error("quantization", "quantised MLX checkpoints are not supported", QUANTISATION_WAY_OUT)
    if not keys.has("quantization_config"):
        return checkpoint_dtype, checkpoint_dtype
    method = keys.word("quantization_config.quant_method")
    if method == "fp8":
        _refuse_partial_fp8(keys)
        blocks = keys.numbers("quantization_config.weight_block_size", at_most=MAX_HIDDEN)
        if blocks != (128, 128):
            raise keys.error("quantization_config.weight_block_size", f"{list(blocks)} is not supported", "[128, 128]")
        return "fp8", "fp8"
    if method == "mxfp4" and keys.word("model_type") == "gpt_oss":
        return "mxfp4", checkpoint_dtype
    raise keys.error("quantization_config.quant_method", f"{method!r:.80} is not supported", QUANTISATION_WAY_OUT)


def _refuse_partial_fp8(keys: ConfigKeys) -> None:
    key = "quantization_config.modules_to_not_convert"
    kept = keys.texts(key) if keys.has(key) else ()
    for module in kept:
        # Embedding, lm_head, norms and the router's gate are 16 bit anyway.
        if any(part in module for part in ("proj", "attn", "experts")):
            raise keys.error(key, f"{module!r:.80} is kept out of fp8, which is not supported", QUANTISATION_WAY_OUT)
