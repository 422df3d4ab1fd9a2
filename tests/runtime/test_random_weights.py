"""Random weights have the shapes of the model, repeat with their seed, and take little memory and time to make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_forward import plain_logits, plain_stream
from tiny_models import FAMILIES, tiny_config

from hrm.families import read_spec
from hrm.model_files import find_config
from runtime.numerics import read_numerics
from runtime.random_weights import RandomWeights
from runtime.weight_source import dense_shapes, expert_shape, top_shapes


def tiny_weights(family: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> RandomWeights:
    config = tiny_config(family)
    return RandomWeights(read_spec(config, file="", name=""), read_numerics(config, where=""), dtype=dtype, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_and_formats_are_the_models(family: str) -> None:
    weights = tiny_weights(family, dtype=torch.bfloat16)
    spec, numerics = weights.spec, weights.numerics
    assert {name: tuple(weights.top(name).shape) for name in top_shapes(spec)} == top_shapes(spec)
    for layer in range(3):
        dense = weights.dense(layer)
        assert {name: tuple(tensor.shape) for name, tensor in dense.items()} == dense_shapes(spec, numerics, layer)
        assert {tensor.dtype for tensor in dense.values()} == {torch.bfloat16}
        if spec.moe_layers[layer] or not spec.is_moe:
            for number in range(spec.streamed_experts):
                three = weights.expert(layer, number)
                assert [(tuple(each.shape), each.dtype) for each in three] == [(expert_shape(spec), torch.bfloat16)] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_stay_finite_and_logits_of_the_order_of_one(family: str) -> None:
    weights = tiny_weights(family)
    logits = plain_logits(weights, weights.spec, weights.numerics, [*range(64)])
    assert 0.2 < logits.std() < 5


def test_activations_stay_within_fp16_over_all_layers_of_a_deep_model() -> None:
    """The 94 layers of Qwen3-235B, narrowed: the residual stream grows by a factor of two at most, not with depth."""
    values = find_config("qwen3-235b-a22b")["values"] | {
        "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "moe_intermediate_size": 48, "num_experts": 8,
        "vocab_size": 128, "num_experts_per_tok": 8,
    }  # fmt: skip
    spec, numerics = read_spec(values, file="", name=""), read_numerics(values, where="")
    assert spec.n_layers == 94
    weights = RandomWeights(spec, numerics, dtype=torch.float32)
    stream = plain_stream(weights, spec, numerics, [*range(32)])
    assert 0.9 < stream.std() < 2 and stream.abs().max() < 20  # fp16 ends at 65,504


def test_the_same_seed_gives_the_same_weights_and_another_does_not() -> None:
    one, same, other = (tiny_weights("mixtral", seed=seed) for seed in (7, 7, 8))
    assert torch.equal(one.expert(1, 2)[0], same.expert(1, 2)[0])
    assert torch.equal(one.dense(1)["q"], same.dense(1)["q"])
    assert not torch.equal(one.expert(1, 2)[0], other.expert(1, 2)[0])
    assert not torch.equal(one.dense(1)["q"], other.dense(1)["q"])


def test_no_two_matrices_of_a_model_are_alike() -> None:
    weights = tiny_weights("qwen2_moe")
    matrices = [weights.top("embedding"), weights.top("lm_head")]
    for layer in range(3):
        matrices += [tensor for tensor in weights.dense(layer).values() if tensor.ndim == 2]
        if weights.spec.moe_layers[layer]:
            matrices += [each for expert in range(6) for each in weights.expert(layer, expert)]
    beginnings = {tuple((each / each.std()).flatten()[:8].tolist()) for each in matrices}
    assert len(beginnings) == len(matrices) == 2 + 3 * 4 + 3 + 2 * (1 + 4 + 18)


def test_a_tied_head_is_the_embedding() -> None:
    weights = tiny_weights("llama")
    assert torch.equal(weights.top("lm_head"), weights.top("embedding"))


def test_experts_of_all_layers_share_the_memory_of_little_more_than_two_matrices() -> None:
    weights = tiny_weights("mixtral")
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for layer in range(3)
        for expert in range(6)
        for each in weights.expert(layer, expert)
    }
    assert sorted(storages.values()) == [4 * (24 * 32 + 2**20)] * 2


def test_rows_of_a_large_matrix_are_not_repeated() -> None:
    """Mixtral's 14,336 rows of 4,096 are 58,720,256 values, 14 times those that are drawn."""
    found = find_config("mixtral-8x7b")
    spec = read_spec(found["values"], file="", name="")
    weights = RandomWeights(spec, read_numerics(found["values"], where=""), dtype=torch.bfloat16)
    gate = weights.expert(31, 7)[0]
    assert gate.shape == (14336, 4096)
    assert len({tuple(row) for row in gate[:, :8].tolist()}) == 14336
    assert 0.9 < gate.float().std() * 64 < 1.1


def test_fewer_layers_can_be_kept_and_others_are_refused() -> None:
    weights = tiny_weights("qwen2_moe", layers=2)
    assert (weights.spec.n_layers, weights.spec.moe_layers) == (2, (False, True))
    for missing in (lambda: weights.dense(2), lambda: weights.expert(2, 0), lambda: weights.expert(0, 0)):
        with pytest.raises(IndexError):
            missing()
    with pytest.raises(IndexError):
        weights.expert(1, 6)


def test_one_layer_stands_for_all_of_its_kind() -> None:
    weights = tiny_weights("qwen2_moe", one_layer=True)
    one, other = weights.dense(1), weights.dense(2)
    assert {name: tensor.data_ptr() for name, tensor in one.items()} == {
        name: tensor.data_ptr() for name, tensor in other.items()
    }
    assert weights.expert(1, 3)[0].data_ptr() == weights.expert(2, 3)[0].data_ptr()
    assert "dense_w1" in weights.dense(0) and "dense_w1" not in one
