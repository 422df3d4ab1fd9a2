"""Parameters, weight bytes and KV bytes against published and independently counted totals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrm.model import LayerKind, ModelSpec
from hrm.model_files import load_model, model_names

TOTALS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "model_totals.json").read_text("utf-8"))["models"]
MODELS: dict[str, ModelSpec] = {name: load_model(name) for name in model_names()}
MOE = [name for name, model in MODELS.items() if model.is_moe]
DENSE = ["llama-3.1-8b", "llama-3.1-70b", "opt-30b"]

# The totals file spreads the scales of a 576-row matrix over 4.5 blocks of 128 rows; a checkpoint stores 5 rows of
# scales. That is half a row of 56 fp32 scales for the kv down projection of each of 61 layers.
EDGE_BLOCKS = {"deepseek-v3": 61 * 56 * 4 // 2, "kimi-k2": 61 * 56 * 4 // 2}


def test_there_are_18_moe_models_and_3_dense_ones() -> None:
    assert sorted(MODELS) == sorted(TOTALS)
    assert sorted(set(MODELS) - set(MOE)) == sorted(DENSE)
    assert len(MOE) == 18


@pytest.mark.parametrize("name", TOTALS)
def test_parameters_equal_the_counts_of_transformers(name: str) -> None:
    model, derived = MODELS[name], TOTALS[name]["derived"]
    parts = derived["components"]
    counts = model.parameters
    assert model.total_parameters == counts.total == derived["total_params"]
    assert model.active_parameters == derived["active_params"]
    assert counts.embedding == parts["embed"]
    assert counts.position == parts.get("pos", 0)
    assert counts.lm_head == parts["lm_head"]
    assert counts.attention == parts["attn_or_mixer"]
    assert counts.router == parts["router"]
    assert counts.routed_experts == parts["routed_experts"]
    assert counts.shared_experts == parts["shared_experts"]
    assert counts.dense_mlp == parts["dense_mlp"]
    assert counts.norms == parts["norms"]


@pytest.mark.parametrize("name", TOTALS)
def test_native_bytes_equal_the_computed_file_size(name: str) -> None:
    assert MODELS[name].weight_bytes() == TOTALS[name]["derived"]["weight_bytes_native"] + EDGE_BLOCKS.get(name, 0)


@pytest.mark.parametrize("name", MOE)
def test_expert_equals_the_counts_of_transformers(name: str) -> None:
    model, derived = MODELS[name], TOTALS[name]["derived"]
    assert model.n_moe_layers == derived["moe_layer_count"]
    assert model.parameters_per_expert == derived["params_per_routed_expert"]
    assert model.expert_bytes() == derived["bytes_per_routed_expert_native"]


@pytest.mark.parametrize("name", TOTALS)
def test_cache_of_one_token_equals_the_counts(name: str) -> None:
    model, derived = MODELS[name], TOTALS[name]["derived"]
    assert model.kv_values_per_token_per_layer == derived["kv_values_per_token_per_attention_layer"]
    assert model.kv_bytes_stored(1, "bf16") == derived["kv_bytes_per_token_16bit_no_window"]


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_latent_cache_is_28_times_below_what_head_counts_suggest(name: str) -> None:
    model = MODELS[name]
    assert model.kv_values_per_token_per_layer == 576
    assert 2 * model.n_kv_heads * 64 / 576 == pytest.approx(28.44, abs=0.01)


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [("qwen3-30b-a3b", 128), ("gpt-oss-20b", 64), ("glm-4.5-air", 128), ("mixtral-8x7b", 128), ("deepseek-v3", 192)],
)
def test_head_width_is_the_checkpoints(name: str, head_dim: int) -> None:
    assert MODELS[name].head_dim == head_dim


def test_gpt_oss_alternates_windowed_and_full_layers() -> None:
    model = MODELS["gpt-oss-20b"]
    assert model.layer_windows[:4] == (128, None, 128, None)
    assert model.layer_kinds == (
        LayerKind(count=12, is_moe=True, window=128),
        LayerKind(count=12, is_moe=True, window=None),
    )
    assert [kind.count for kind in MODELS["gpt-oss-120b"].layer_kinds] == [18, 18]


def test_windowed_layers_store_and_read_at_most_their_window() -> None:
    model = MODELS["gpt-oss-20b"]
    token = 2 * 8 * 64 * 2  # K and V, 8 heads of 64, bf16
    assert model.kv_bytes_stored(100, "bf16") == 24 * 100 * token
    assert model.kv_bytes_stored(1000, "bf16") == (12 * 128 + 12 * 1000) * token
    assert model.kv_bytes_read(1000, "bf16", 128) == 128 * token
    assert model.kv_bytes_read(1000, "bf16", None) == 1000 * token
    assert model.kv_bytes_read(127.5, "bf16", 128) == 127.5 * token


@given(tokens=st.lists(st.integers(0, 10_000), min_size=1, max_size=5), dtype=st.sampled_from(["bf16", "int4", "fp8"]))
def test_arrays_of_lengths_give_what_single_lengths_give(tokens: list[int], dtype: str) -> None:
    model = MODELS["gpt-oss-20b"]
    stored = model.kv_bytes_stored(np.array(tokens), dtype)
    assert stored.tolist() == [model.kv_bytes_stored(length, dtype) for length in tokens]
    read = model.kv_bytes_read(np.array(tokens), dtype, 128)
    assert read.tolist() == [model.kv_bytes_read(length, dtype, 128) for length in tokens]


def test_windows_as_wide_as_the_longest_sequence_are_none() -> None:
    assert set(MODELS["phi-3.5-moe"].layer_windows) == {None}
    assert set(MODELS["qwen2-57b-a14b"].layer_windows) == {None}


def test_first_layers_of_deepseek_are_dense() -> None:
    model = MODELS["deepseek-v3"]
    assert model.moe_layers[:4] == (False, False, False, True)
    assert [(kind.count, kind.is_moe) for kind in model.layer_kinds] == [(3, False), (58, True)]
    assert (model.n_dense_layers, model.dense_ffn, model.shared_ffn) == (3, 18432, 2048)


@pytest.mark.parametrize("dtype", [None, "fp32", "fp16", "bf16", "fp8", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize("name", TOTALS)
def test_weight_bytes_are_the_sum_of_the_named_parts(name: str, dtype: str | None) -> None:
    model = MODELS[name]
    layers = 0
    for is_moe in model.moe_layers:
        layers += model.attention_bytes(dtype) + model.norm_bytes(dtype)
        layers += model.router_bytes(dtype) + model.shared_bytes(dtype) if is_moe else model.dense_mlp_bytes(dtype)
    experts = model.n_moe_layers * model.n_experts * model.expert_bytes(dtype)
    tables = model.embedding_bytes(dtype) + model.lm_head_bytes(dtype) + model.final_norm_bytes(dtype)
    assert model.weight_bytes(dtype) == layers + experts + tables


def test_16_bit_override_dequantises_the_whole_checkpoint() -> None:
    for name in ("gpt-oss-20b", "deepseek-v3", "mixtral-8x7b", "opt-30b"):
        assert MODELS[name].weight_bytes("fp16") == 2 * MODELS[name].total_parameters
        assert MODELS[name].weight_bytes("fp32") == 4 * MODELS[name].total_parameters


def test_quantised_override_leaves_tables_router_norms_and_biases_in_16_bit() -> None:
    model = MODELS["gpt-oss-20b"]
    counts = model.parameters
    biases = 24 * (model.qkv_vector_parameters + model.output_vector_parameters + 32 * model.expert_vector_parameters)
    kept = counts.embedding + counts.lm_head + counts.router + counts.norms + biases
    assert model.weight_bytes("int8") - 2 * kept == pytest.approx((counts.total - kept) * 8.125 / 8, rel=2e-3)
    assert model.embedding_bytes("int4") == model.embedding_bytes() == 2 * 201088 * 2880
    assert model.router_bytes("int4") == 2 * (32 * 2880 + 32)


def test_int4_expert_of_mixtral_is_a_group_scale_above_half_a_byte() -> None:
    assert MODELS["mixtral-8x7b"].expert_bytes("int4") == 176160768 * 4.125 / 8
    assert MODELS["dbrx"].layer_expert_bytes() == 16 * 396361728


def test_mlp_of_a_dense_model_is_its_one_streamed_expert() -> None:
    model = MODELS["llama-3.1-8b"]
    assert (model.is_moe, model.n_experts, model.top_k) == (False, 0, 0)
    assert (model.streamed_experts, model.streamed_top_k, model.streamed_ffn) == (1, 1, 14336)
    assert (model.streamed_layers, model.streamed_expert_parameters) == (32, 3 * 4096 * 14336)
    assert model.expert_bytes() == model.layer_expert_bytes() == 2 * 3 * 4096 * 14336
    assert model.layer_dense_bytes(False) == 2 * (1342177280 // 32 + 2 * 4096)


def test_streamed_part_of_a_moe_model_is_its_routed_experts() -> None:
    model = MODELS["deepseek-v2-lite"]
    assert (model.streamed_experts, model.streamed_top_k, model.streamed_ffn) == (64, 6, 1408)
    assert (model.streamed_layers, model.streamed_expert_parameters) == (26, 8650752)
    assert model.layer_dense_bytes(False) - model.attention_bytes() - model.norm_bytes() == 2 * 67239936


def test_tied_head_adds_nothing_but_is_read_whole() -> None:
    granite = MODELS["granite-3.1-3b-a800m"]
    assert granite.lm_head_shares_embedding
    assert granite.lm_head_bytes() == 0
    assert granite.lm_head_read_bytes() == 2 * 49155 * 1536
    mixtral = MODELS["mixtral-8x7b"]
    assert not mixtral.lm_head_shares_embedding
    assert mixtral.lm_head_bytes() == mixtral.lm_head_read_bytes() == 2 * 131072000


def test_opt_has_two_matrices_biases_and_a_position_table() -> None:
    model = MODELS["opt-30b"]
    assert (model.mlp_matrices, model.checkpoint_dtype) == (2, "fp16")
    assert model.dense_parameters_per_layer == 2 * 7168 * 28672 + 28672 + 7168
    assert model.embedding_bytes() == 2 * (50272 + 2050) * 7168


def test_attention_splits_into_before_and_after() -> None:
    mixtral = MODELS["mixtral-8x7b"]
    assert mixtral.qkv_parameters_per_layer == 4096 * (4096 + 2 * 1024)
    assert mixtral.output_parameters_per_layer == 4096 * 4096
    v3 = MODELS["deepseek-v3"]
    assert v3.output_parameters_per_layer == 7168 * 128 * 128
    up_and_down = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256
    assert v3.qkv_parameters_per_layer == up_and_down + 1536 + 512
    assert (v3.expert_dtype, v3.linear_dtype, v3.checkpoint_dtype) == ("fp8", "fp8", "bf16")
