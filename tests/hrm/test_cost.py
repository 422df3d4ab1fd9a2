"""Work of every operator on the tiny model, by mental arithmetic (2 tokens: B = 2)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import FP16, tiny_mla, tiny_model

from hrm import cost
from hrm.cost import Formats, Work
from hrm.dtypes import matrix_bytes
from hrm.model_files import load_model

MODEL = tiny_model()


def test_work_adds_and_scales() -> None:
    assert Work(1.0, 2.0, 3.0) + 2 * Work(10.0, 20.0, 30.0) == Work(21.0, 42.0, 63.0)
    assert Work(8.0, 4.0).intensity == 2.0


def test_embedding_reads_and_writes_one_row_per_token() -> None:
    assert cost.embedding(MODEL, FP16, 2.0) == Work(0.0, 2 * 2 * 8 * 2)  # read + write, 8 values, 2 byte


def test_norms_are_two_per_layer() -> None:
    assert cost.norms(MODEL, FP16, 2.0) == Work(4.0 * 32, 2 * 32 * 2)  # 2 tokens x 2 norms x 8 values


def test_qkv_projection() -> None:
    # 8 -> 8 query, 4 key and 4 value values: 128 parameters. In 8 values, out 16.
    assert cost.qkv_values(MODEL) == 16
    assert cost.qkv_projection(MODEL, FP16, 2.0) == Work(2 * 2 * 128, 256 + 2 * (8 + 16) * 2)


def test_output_projection() -> None:
    assert cost.attention_result_values(MODEL) == 8
    assert cost.output_projection(MODEL, FP16, 2.0) == Work(2 * 2 * 64, 128 + 2 * (8 + 8) * 2)


def test_router() -> None:
    assert cost.router(MODEL, FP16, 2.0) == Work(2 * 2 * 32, 64 + 2 * 8 * 2)


def test_routed_experts_read_only_the_experts_touched() -> None:
    # 2 tokens visit 2 of 4 experts each: 4 visits, 4*(1 - 1/4) = 3 experts read, 192 byte each.
    # One visit: 8 in, gate and up out (8), those in again (8), 8 out = 32 values.
    assert cost.routed_experts(MODEL, FP16, 2.0) == Work(2 * 4 * 96, 3 * 192 + 4 * 32 * 2)


def test_plain_mlp_has_two_products() -> None:
    model = tiny_model(mlp_matrices=2)
    # An expert has 64 parameters; one visit: 8 in, 4 out, 4 in, 8 out = 24 values.
    assert cost.routed_experts(model, FP16, 2.0) == Work(2 * 4 * 64, 3 * 128 + 4 * 24 * 2)


def test_shared_expert_is_passed_by_every_token() -> None:
    assert cost.shared_expert(MODEL, FP16, 2.0) == Work(0.0, 0.0)
    model = tiny_model(shared_ffn=2)
    assert cost.shared_expert(model, FP16, 2.0) == Work(2 * 2 * 48, 96 + 2 * (16 + 2 * 2 * 2) * 2)


def test_biases_are_read_and_added() -> None:
    with_bias = tiny_model(qkv_vector_parameters=16)
    biased, plain = (cost.qkv_projection(model, FP16, 2.0) for model in (with_bias, MODEL))
    assert biased.bytes_touched - plain.bytes_touched == 16 * 2


def test_lm_head_writes_logits_in_float32() -> None:
    assert cost.lm_head(MODEL, FP16, 2.0) == Work(2 * 2 * 128, 256 + 2 * (8 * 2 + 16 * 4))


def test_decode_attention_counts_scores_and_values() -> None:
    # A cached token: 1 KV head x 8 values x 2 byte = 16 byte; 2 heads x (4 + 4) products x 2 FLOP = 32 FLOP.
    assert cost.attention_decode_per_kv_byte(MODEL, FP16) == Work(2.0, 1.0)


def test_decode_attention_reads_queries_and_writes_results_too() -> None:
    # 2 layers x (8 query + 8 result values) x 2 byte = 64 byte beside 2 layers x 8 tokens x 16 byte = 256 of KV cache.
    assert cost.attention_decode_per_kv_byte(MODEL, FP16, 256.0) == Work(2.0, 1.25)


def test_full_attention_flops_are_twice_the_papers_scores_only_count() -> None:
    context = 512.0
    for d in (64, 128):
        model = tiny_model(head_dim=d, value_head_dim=d, n_heads=8, n_kv_heads=2)
        full = cost.attention_decode_per_kv_byte(model, FP16).flops * context * 2 * 2 * d * 2
        paper = context * 8 * (2 * d + 2)
        assert full / paper == pytest.approx(2 * d / (d + 1), rel=1e-12)  # the paper adds 1 of d for the softmax


def test_quantised_kv_is_expanded() -> None:
    formats = Formats(weights=None, kv="int8", compute="fp16")
    # 8 values and one 2-byte scale: 10 byte per cached token, 8 values expanded.
    assert cost.attention_decode_per_kv_byte(MODEL, formats) == Work(3.2, 1.0, 0.8)


def test_mla_decode_attends_in_the_latent_space() -> None:
    model = tiny_mla()
    # Cache: 6 + 2 values = 16 byte for both heads; scores 8 products, values 6, 2 heads, 2 FLOP.
    assert cost.attention_decode_per_kv_byte(model, FP16) == Work(2 * 2 * 14 / 16, 1.0)
    assert cost.qkv_values(model) == 2 * 8 + 8  # absorbed queries and one latent
    assert cost.attention_result_values(model) == 2 * 6


def test_mla_of_deepseek_v3_caches_576_values() -> None:
    model = load_model("deepseek-v3")
    assert model.kv_bytes_stored(1, "bf16") == 61 * 576 * 2
    assert cost.qkv_values(model) == 128 * 576 + 576
    assert cost.attention_decode_per_kv_byte(model, FP16).flops == 2 * 128 * (576 + 512) / (576 * 2)


def test_prefill_attention_is_causal() -> None:
    # Two prompts of 6: 36 pairs of query and key. Queries and results 2*(4+4), cache 1*(4+4) values per token.
    assert cost.attention_prefill(MODEL, FP16, 12.0, 36.0) == Work(2 * 36 * 2 * 8, 12 * 24 * 2)


def test_mla_prefill_expands_keys_and_values() -> None:
    # Keys 4 + 2, values 4, for both heads: 2 x 10 for queries and results, 2 x 10 for keys and values.
    assert cost.attention_prefill(tiny_mla(), FP16, 12.0, 36.0) == Work(2 * 36 * 2 * 10, 12 * 40 * 2)


def test_quantised_weights_change_bytes_and_are_expanded_but_flops_stay() -> None:
    formats = Formats(weights="int4", kv="fp16", compute="fp16")
    plain, small = cost.routed_experts(MODEL, FP16, 2.0), cost.routed_experts(MODEL, formats, 2.0)
    expert = 2 * matrix_bytes(4, 8, "int4") + matrix_bytes(8, 4, "int4")
    assert small == Work(plain.flops, 3 * expert + 4 * 32 * 2, 3 * 96)
    assert cost.lm_head(MODEL, formats, 2.0) == cost.lm_head(MODEL, FP16, 2.0)  # tables are never quantised
    assert cost.router(MODEL, formats, 2.0) == cost.router(MODEL, FP16, 2.0)


def test_fp8_weights_with_fp8_activations_are_not_expanded() -> None:
    formats = Formats(weights="fp8", kv="bf16", compute="fp8")
    assert cost.routed_experts(MODEL, formats, 2.0).dequantised == 0.0
    assert formats.activation_bytes == 2.0


def test_fp32_activations_take_four_bytes() -> None:
    formats = Formats(weights="fp32", kv="fp32", compute="fp32")
    assert cost.qkv_projection(MODEL, formats, 2.0) == Work(512, 512 + 2 * 24 * 4)


def test_layer_operators_name_every_operator_once_and_how_often_it_occurs() -> None:
    model = tiny_model(shared_ffn=2, dense_ffn=16, moe_layers=(False, True))
    counts = {name: layers for name, layers, _ in cost.layer_operators(model, FP16, 1.0)}
    assert counts == {
        "norms": 2,
        "QKV projection": 2,
        "output projection": 2,
        "routed experts": 1,
        "router": 1,
        "shared expert": 1,
        "dense MLP": 1,
    }


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2", "qwen1.5-moe-a2.7b", "gpt-oss-20b", "llama-3.1-8b"])
def test_operators_of_one_token_use_every_active_parameter_once(name: str) -> None:
    """2 FLOPs per active parameter: what is left are embedding, norms, and vectors counted with their matrices."""
    model = load_model(name)
    flops = cost.lm_head(model, FP16, 1.0).flops
    for operator, layers, work in cost.layer_operators(model, FP16, 1.0):
        flops += layers * work.flops * (operator != "norms")
    counted = model.active_parameters - model.parameters.norms - model.parameters.position
    if not model.tie_embeddings:
        counted -= model.parameters.embedding
    assert flops == pytest.approx(2.0 * counted, rel=1e-9)


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(8, 2, 1), (8, 2, 5), (16, 4, 3), (64, 6, 20)])
def test_experts_touched_is_the_expectation_under_uniform_routing(experts: int, top_k: int, tokens: int) -> None:
    rng = np.random.default_rng(7)
    trials = 4000
    scores = rng.random((trials, tokens, experts))
    chosen = np.argpartition(scores, top_k - 1, axis=-1)[..., :top_k]  # [trials, tokens, top_k]
    hit = np.zeros((trials, experts), dtype=bool)
    hit[np.arange(trials)[:, None, None], chosen] = True
    simulated = hit.sum(axis=1)
    expected = cost.experts_touched(tiny_model(n_experts=experts, top_k=top_k), float(tokens))
    assert simulated.mean() == pytest.approx(expected, abs=4 * max(simulated.std(), 1e-9) / math.sqrt(trials) + 1e-9)


@given(st.integers(2, 256), st.integers(1, 8), st.integers(1, 5000))
def test_experts_touched_grows_with_tokens_between_top_k_and_all(experts: int, top_k: int, tokens: int) -> None:
    model = tiny_model(n_experts=experts, top_k=min(top_k, experts))
    fewer, more = cost.experts_touched(model, float(tokens)), cost.experts_touched(model, float(tokens + 1))
    assert fewer <= more <= experts
    assert fewer <= tokens * model.top_k * (1 + 1e-12)
    assert cost.experts_touched(model, 1.0) == pytest.approx(model.top_k, rel=1e-12)


def test_dense_model_has_one_expert_that_is_always_read() -> None:
    model = tiny_model(n_experts=0, top_k=0, expert_ffn=0, dense_ffn=4, moe_layers=(False, False))
    assert cost.experts_touched(model, 3.0) == 1.0
    assert cost.routed_experts(model, FP16, 2.0) == Work(2 * 2 * 96, 192 + 2 * 32 * 2)
    assert "router" not in [name for name, _, _ in cost.layer_operators(model, FP16, 1.0)]


def test_work_of_many_batches_at_once_equals_work_of_each() -> None:
    tokens = np.array([1.0, 2.0, 7.5])
    at_once = cost.routed_experts(MODEL, FP16, tokens)
    for index, count in enumerate(tokens):
        alone = cost.routed_experts(MODEL, FP16, float(count))
        assert (at_once.flops[index], at_once.bytes_touched[index]) == (alone.flops, alone.bytes_touched)  # type: ignore[index]
