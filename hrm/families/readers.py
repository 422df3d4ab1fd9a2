"""One reader per `model_type`: where its config.json keeps each size, and which biases and norms it has.

Keys that differ, and the traps, were checked against transformers 5.24.0 by building each bundled model on the meta
device. Sizes are never taken from a class default: those of DBRX, OLMoE, DeepSeek-V2, GraniteMoe, Qwen3-MoE and OPT are
not the released checkpoints' sizes.
"""

from __future__ import annotations

from dataclasses import replace

from hrm.families.config_keys import ConfigKeys
from hrm.families.decoder import (
    MAX_EXPERTS,
    MAX_FFN,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    add_attention_bias,
    add_experts,
    check_kv_heads,
    derive_head_dim,
    read_checkpoint_dtype,
    read_decoder,
    read_matrix_dtypes,
    read_window,
)
from hrm.model import MlaShape, ModelSpec

__all__ = [
    "read_dbrx",
    "read_deepseek_v2",
    "read_deepseek_v3",
    "read_glm4_moe",
    "read_gpt_oss",
    "read_granitemoe",
    "read_llama",
    "read_mixtral",
    "read_olmoe",
    "read_opt",
    "read_phimoe",
    "read_qwen2_moe",
    "read_qwen3_moe",
]


def read_mixtral(keys: ConfigKeys) -> ModelSpec:
    """Mixtral: `intermediate_size` is the width of one expert; a window, where given, holds in every layer."""
    spec = read_decoder(keys)
    spec = replace(spec, layer_windows=(read_window(spec, keys),) * spec.n_layers)
    return add_experts(spec, keys, experts_key="num_local_experts", ffn_key="intermediate_size")


def read_dbrx(keys: ConfigKeys) -> ModelSpec:
    """DBRX: sizes in `attn_config` and `ffn_config`, read by name: released files carry noise there (`top_k: 50`)."""
    hidden = keys.size("d_model", at_most=MAX_HIDDEN)
    layers = keys.size("n_layers", at_most=MAX_LAYERS)
    heads = keys.size("n_heads", at_most=MAX_HEADS)
    head_dim = derive_head_dim(keys, "d_model", hidden, "n_heads", heads)
    dtype = read_checkpoint_dtype(keys)
    expert_dtype, linear_dtype = read_matrix_dtypes(keys, dtype)
    spec = ModelSpec(
        name="",
        family="dbrx",
        origin=keys.file,
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=check_kv_heads(keys, "attn_config.kv_n_heads", heads),
        head_dim=head_dim,
        value_head_dim=head_dim,
        vocab_size=keys.size("vocab_size", at_most=MAX_VOCAB),
        max_positions=keys.size("max_seq_len", at_most=MAX_POSITIONS),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        moe_layers=(True,) * layers,
        layer_windows=(None,) * layers,
        checkpoint_dtype=dtype,
        expert_dtype=expert_dtype,
        linear_dtype=linear_dtype,
        norm_parameters_per_layer=2 * hidden,  # LayerNorm without bias
        final_norm_parameters=hidden,
    )
    return add_experts(
        spec,
        keys,
        experts_key="ffn_config.moe_num_experts",
        ffn_key="ffn_config.ffn_hidden_size",
        top_k_key="ffn_config.moe_top_k",
    )


def read_qwen2_moe(keys: ConfigKeys) -> ModelSpec:
    """Qwen1.5-MoE and Qwen2-MoE: biases on Q, K, V; a shared expert with a gate of one row."""
    spec = read_decoder(keys)
    if keys.flag_or("qkv_bias", True, "which this family always has"):
        spec = add_attention_bias(spec, output=False)
    spec = replace(
        _add_qwen_experts(spec, keys, mlp_only_layers_required=False),
        shared_ffn=keys.size("shared_expert_intermediate_size", at_most=MAX_FFN),
        shared_vector_parameters=spec.hidden_size,
    )
    return _add_qwen_windows(spec, keys)


def read_qwen3_moe(keys: ConfigKeys) -> ModelSpec:
    """Qwen3-MoE: its own head_dim, and norms on each query and key head."""
    spec = read_decoder(keys, head_dim_required=True)
    if keys.flag("attention_bias"):
        spec = add_attention_bias(spec, output=True)
    spec = replace(spec, qkv_vector_parameters=spec.qkv_vector_parameters + 2 * spec.head_dim)
    return _add_qwen_windows(_add_qwen_experts(spec, keys, mlp_only_layers_required=True), keys)


def _add_qwen_experts(spec: ModelSpec, keys: ConfigKeys, *, mlp_only_layers_required: bool) -> ModelSpec:
    # Early revisions of Qwen1.5-MoE call the step expert_interval.
    step_key = "expert_interval" if keys.has("expert_interval") else "decoder_sparse_step"
    step = keys.size(step_key, at_most=MAX_LAYERS)
    if mlp_only_layers_required or keys.has("mlp_only_layers"):
        dense = keys.numbers("mlp_only_layers", at_most=spec.n_layers - 1)
    else:
        keys.assume("mlp_only_layers", "[]", "as Qwen2-MoE files do not carry it")
        dense = ()
    moe_layers = [layer not in dense and (layer + 1) % step == 0 for layer in range(spec.n_layers)]
    # transformers 5 writes the experts of Qwen3-MoE under the name of another family.
    renamed = keys.has("num_local_experts") and not keys.has("num_experts")
    experts_key = "num_local_experts" if renamed else "num_experts"
    return add_experts(spec, keys, experts_key=experts_key, ffn_key="moe_intermediate_size", moe_layers=moe_layers)


def _add_qwen_windows(spec: ModelSpec, keys: ConfigKeys) -> ModelSpec:
    # sliding_window alone means nothing here: revisions of one checkpoint disagree about it.
    if not keys.flag("use_sliding_window"):
        return spec
    if not keys.has("layer_types"):
        way_out = "add layer_types with one entry for each layer, or set use_sliding_window to false"
        raise keys.error("use_sliding_window", "true, but the file does not say which layers have the window", way_out)
    return _add_layer_types(spec, keys)


def _add_layer_types(spec: ModelSpec, keys: ConfigKeys) -> ModelSpec:
    types = keys.words("layer_types", length=spec.n_layers, accepted=("full_attention", "sliding_attention"))
    if "sliding_attention" not in types:
        return spec
    if not keys.has("sliding_window"):
        raise keys.error(
            "sliding_window", "missing or null, but layer_types has windowed layers", "the window [tokens]"
        )
    window = read_window(spec, keys)
    return replace(spec, layer_windows=tuple(window if kind == "sliding_attention" else None for kind in types))


def read_olmoe(keys: ConfigKeys) -> ModelSpec:
    """OLMoE: norms over the full width of the query and key projections, not per head."""
    spec = read_decoder(keys)
    if keys.flag("attention_bias"):
        spec = add_attention_bias(spec, output=True)
    norms = (spec.n_heads + spec.n_kv_heads) * spec.head_dim
    spec = replace(spec, qkv_vector_parameters=spec.qkv_vector_parameters + norms)
    return add_experts(spec, keys, experts_key="num_experts", ffn_key="intermediate_size")


def read_deepseek_v2(keys: ConfigKeys) -> ModelSpec:
    """DeepSeek-V2: latent attention, dense first layers, shared experts; the router has no bias."""
    return _read_deepseek(keys, router_bias=False)


def read_deepseek_v3(keys: ConfigKeys) -> ModelSpec:
    """DeepSeek-V3 and Kimi-K2: as V2, with a score correction per expert. The MTP layer is not part of the model."""
    return _read_deepseek(keys, router_bias=True)


def _read_deepseek(keys: ConfigKeys, *, router_bias: bool) -> ModelSpec:
    hidden = keys.size("hidden_size", at_most=MAX_HIDDEN)
    layers = keys.size("num_hidden_layers", at_most=MAX_LAYERS)
    heads = keys.size("num_attention_heads", at_most=MAX_HEADS)
    # 0 is how DeepSeek's own inference files write null: one plain query projection.
    mla = MlaShape(
        q_lora_rank=keys.size_or_null("q_lora_rank", at_least=0, at_most=MAX_HIDDEN) or None,
        kv_lora_rank=keys.size("kv_lora_rank", at_most=MAX_HIDDEN),
        qk_nope_head_dim=keys.size("qk_nope_head_dim", at_most=MAX_HEAD_DIM),
        qk_rope_head_dim=keys.size("qk_rope_head_dim", at_most=MAX_HEAD_DIM),
        v_head_dim=keys.size("v_head_dim", at_most=MAX_HEAD_DIM),
    )
    dtype = read_checkpoint_dtype(keys)
    expert_dtype, linear_dtype = read_matrix_dtypes(keys, dtype)
    # Biases sit on the down projections and the output projection only; a plain query projection has none.
    down_rows = (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim
    bias = keys.flag("attention_bias")
    spec = ModelSpec(
        name="",
        family=keys.word("model_type"),
        origin=keys.file,
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=heads,  # num_key_value_heads says the same, and nothing about the cache
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        value_head_dim=mla.v_head_dim,
        vocab_size=keys.size("vocab_size", at_most=MAX_VOCAB),
        max_positions=keys.size("max_position_embeddings", at_most=MAX_POSITIONS),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        mla=mla,
        moe_layers=(False,) * layers,
        layer_windows=(None,) * layers,
        checkpoint_dtype=dtype,
        expert_dtype=expert_dtype,
        linear_dtype=linear_dtype,
        norm_parameters_per_layer=2 * hidden,
        qkv_vector_parameters=(mla.q_lora_rank or 0) + mla.kv_lora_rank + (down_rows if bias else 0),
        output_vector_parameters=hidden if bias else 0,
        final_norm_parameters=hidden,
    )
    step = keys.size("moe_layer_freq", at_most=MAX_LAYERS)
    return _add_shared_and_routed(spec, keys, step=step, router_bias=router_bias)


def _add_shared_and_routed(spec: ModelSpec, keys: ConfigKeys, *, step: int, router_bias: bool) -> ModelSpec:
    first = keys.size("first_k_dense_replace", at_least=0, at_most=spec.n_layers - 1)
    spec = add_experts(
        spec,
        keys,
        experts_key="n_routed_experts",
        ffn_key="moe_intermediate_size",
        router_bias=router_bias,
        moe_layers=[layer >= first and layer % step == 0 for layer in range(spec.n_layers)],
    )
    shared = keys.size_or_null("n_shared_experts", at_least=0, at_most=MAX_EXPERTS) or 0
    return replace(spec, shared_ffn=shared * spec.expert_ffn)


def read_glm4_moe(keys: ConfigKeys) -> ModelSpec:
    """GLM-4.5: its own head_dim; biases on Q, K, V but not on the output; dense first layers, a shared expert."""
    spec = read_decoder(keys, head_dim_required=True)
    if keys.flag("attention_bias"):
        spec = add_attention_bias(spec, output=False)
    if keys.flag("use_qk_norm"):
        spec = replace(spec, qkv_vector_parameters=spec.qkv_vector_parameters + 2 * spec.head_dim)
    return _add_shared_and_routed(spec, keys, step=1, router_bias=True)


def read_phimoe(keys: ConfigKeys) -> ModelSpec:
    """Phi-3.5-MoE: LayerNorm with bias, and a bias on the lm_head."""
    spec = read_decoder(keys)
    if keys.flag("attention_bias"):
        spec = add_attention_bias(spec, output=True)
    spec = replace(
        spec,
        layer_windows=(read_window(spec, keys),) * spec.n_layers,
        norm_parameters_per_layer=4 * spec.hidden_size,
        final_norm_parameters=2 * spec.hidden_size,
        lm_head_vector_parameters=spec.vocab_size if keys.flag("lm_head_bias") else 0,
    )
    return add_experts(spec, keys, experts_key="num_local_experts", ffn_key="intermediate_size")


def read_gpt_oss(keys: ConfigKeys) -> ModelSpec:
    """gpt-oss: its own head_dim, every other layer windowed, sinks, and biases on attention, router and experts."""
    spec = read_decoder(keys, head_dim_required=True, absent_dtype="bf16")
    if keys.flag("attention_bias"):
        spec = add_attention_bias(spec, output=True)
    # One sink per head: a learned logit that takes part in the softmax.
    spec = replace(spec, qkv_vector_parameters=spec.qkv_vector_parameters + spec.n_heads)
    spec = _add_layer_types(spec, keys)
    spec = add_experts(spec, keys, experts_key="num_local_experts", ffn_key="intermediate_size", router_bias=True)
    if keys.has("experts_per_token"):
        second = keys.size("experts_per_token", at_most=MAX_EXPERTS)
        if second != spec.top_k:
            raise keys.error("experts_per_token", f"{second} contradicts num_experts_per_tok {spec.top_k}")
    return replace(spec, expert_vector_parameters=2 * spec.expert_ffn + spec.hidden_size)


def read_granitemoe(keys: ConfigKeys) -> ModelSpec:
    """Granite-3 MoE: a plain decoder with experts; its embeddings are tied."""
    spec = read_decoder(keys)
    if keys.flag("attention_bias"):
        spec = add_attention_bias(spec, output=True)
    return add_experts(spec, keys, experts_key="num_local_experts", ffn_key="intermediate_size")


def read_llama(keys: ConfigKeys) -> ModelSpec:
    """Llama: dense."""
    spec = read_decoder(keys)
    older = "as in files older than this key"
    if keys.flag_or("attention_bias", False, older):
        spec = add_attention_bias(spec, output=True)
    ffn = keys.size("intermediate_size", at_most=MAX_FFN)
    bias = keys.flag_or("mlp_bias", False, older)
    return replace(spec, dense_ffn=ffn, dense_vector_parameters=2 * ffn + spec.hidden_size if bias else 0)


def read_opt(keys: ConfigKeys) -> ModelSpec:
    """OPT: dense; a plain two-matrix MLP, as many KV heads as heads, LayerNorm with bias, learned positions."""
    hidden = keys.size("hidden_size", at_most=MAX_HIDDEN)
    layers = keys.size("num_hidden_layers", at_most=MAX_LAYERS)
    heads = keys.size("num_attention_heads", at_most=MAX_HEADS)
    head_dim = derive_head_dim(keys, "hidden_size", hidden, "num_attention_heads", heads)
    embedding_width = keys.size("word_embed_proj_dim", at_most=MAX_HIDDEN)
    if embedding_width != hidden:
        fact = f"{embedding_width} differs from hidden_size {hidden}; the projection this needs is not modelled"
        raise keys.error("word_embed_proj_dim", fact, f"{hidden}")
    positions = keys.size("max_position_embeddings", at_most=MAX_POSITIONS)
    ffn = keys.size("ffn_dim", at_most=MAX_FFN)
    older = "as in files older than this key"
    bias = keys.flag_or("enable_bias", True, older)
    norm = 2 * hidden if keys.flag_or("layer_norm_elementwise_affine", True, older) else 0
    norm_before = keys.flag("do_layer_norm_before")
    final_norm = norm_before and not keys.flag_or("_remove_final_layer_norm", False, older)
    dtype = read_checkpoint_dtype(keys)
    expert_dtype, linear_dtype = read_matrix_dtypes(keys, dtype)
    spec = ModelSpec(
        name="",
        family="opt",
        origin=keys.file,
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        vocab_size=keys.size("vocab_size", at_most=MAX_VOCAB),
        max_positions=positions,
        tie_embeddings=keys.flag_or("tie_word_embeddings", True, "as OPT files do not carry it"),
        dense_ffn=ffn,
        mlp_matrices=2,
        moe_layers=(False,) * layers,
        layer_windows=(None,) * layers,
        checkpoint_dtype=dtype,
        expert_dtype=expert_dtype,
        linear_dtype=linear_dtype,
        norm_parameters_per_layer=2 * norm,
        dense_vector_parameters=ffn + hidden if bias else 0,
        final_norm_parameters=norm if final_norm else 0,
        position_parameters=(positions + 2) * hidden,  # OPT's table starts at position 2
    )
    return add_attention_bias(spec, output=True) if bias else spec
