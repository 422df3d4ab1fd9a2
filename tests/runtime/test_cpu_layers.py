"""What a layer does besides its products, on the CPU: compiled and by torch, against its definition in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import cpu_layers
from runtime.attention import attend_prompts
from runtime.layers import Rotary, find_best, normalise, put_rows, route
from runtime.native_library import DTYPES, open_library
from runtime.numerics import Numerics, Rope

ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a unit in the last place of a number just over 1; of float32, a whole one, for sums."""
LARGE = 2**16
"""Values over which the kernels use several threads."""
NUMERICS = Numerics(
    family="mixtral",
    norm="rms",
    norm_eps=1e-5,
    qkv_bias=False,
    output_bias=False,
    qk_norm="none",
    clip_qkv=None,
    rope=Rope(theta=1e4),
    rotary_width=8,
    activation="silu",
    router_norm=1.0,
    shared_expert_gate=False,
    attention_scale=1.0,
)


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute."""
    found: str = request.param
    if found == "torch":
        monkeypatch.setenv("HRM_NATIVE", "0")
    elif open_library() is None:
        pytest.skip("no compiled kernels on this machine")
    return found


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def apart(x: Tensor) -> Tensor:
    """The same values, with other values between the rows of two tokens."""
    wide = torch.full((len(x), x[0].numel() + 5) if len(x) else (0, 5 + math.prod(x.shape[1:])), math.nan).to(x.dtype)
    part = wide[:, : math.prod(x.shape[1:])].view(x.shape)
    part.copy_(x)
    return part


# Norms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 1024), (3, 37), (0, 8), (5, 3, 24), (2, 4, 128), (LARGE // 64 + 1, 67)])
def test_a_norm_is_its_definition_rounded(kernels: str, dtype: torch.dtype, norm: Any, shape: tuple[int, ...]) -> None:
    x, weight = apart(draw(*shape, dtype=dtype, scale=3)), draw(shape[-1], dtype=dtype, seed=1)
    wide, eps = x.double(), NUMERICS.norm_eps
    if norm == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    wanted = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()
    found = normalise(x, weight, replace(NUMERICS, norm=norm))
    assert found.dtype == dtype and found.shape == x.shape
    # rounded before and after the weight, and float32 sums
    torch.testing.assert_close(found.double(), wanted, rtol=2.1 * ULP[dtype], atol=4 * ULP[torch.float32] * 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_rms_norm_rounds_before_the_weight_as_released_models_do(dtype: torch.dtype) -> None:
    if open_library() is None:
        pytest.skip("no compiled kernels on this machine")
    x, weight = draw(50, 64, dtype=dtype), draw(64, dtype=dtype, seed=1)
    wide = x.float()
    wanted = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(dtype)
    found = cpu_layers.normalise(x, weight, 1e-5, by_layer=False, threads=1)
    assert found is not None
    if dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=3e-7, atol=1e-9)
    else:  # sums of another order: a number in hundreds may lie at the other side of a tie
        assert (found != wanted).float().mean().item() < 0.01


def test_a_norm_in_place_writes_nothing_but_its_rows(kernels: str) -> None:
    wide = draw(6, 20)
    x, weight = wide[:, 4:16].view(6, 2, 6), draw(6, seed=1)
    before, wanted = wide.clone(), normalise(x.contiguous(), weight, NUMERICS)
    found = normalise(x, weight, NUMERICS, in_place=True)
    assert torch.equal(found, wanted)
    assert torch.equal(wide[:, :4], before[:, :4]) and torch.equal(wide[:, 16:], before[:, 16:])
    assert (found.data_ptr() == x.data_ptr()) == (kernels == "compiled")


def test_a_norm_leaves_its_input_alone_unless_it_may_not(kernels: str) -> None:
    x = draw(4, 16)
    before = x.clone()
    normalise(x, draw(16, seed=1), NUMERICS)
    assert torch.equal(x, before)


def test_a_norm_of_nan_is_nan_in_that_row_only(kernels: str) -> None:
    x = draw(3, 40, dtype=torch.bfloat16)
    x[1, 7] = math.nan
    found = normalise(x, torch.ones(40, dtype=torch.bfloat16), NUMERICS)
    assert found.isnan().all(-1).tolist() == [False, True, False]
    assert not found[::2].isnan().any()


def test_weights_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="do not go with rows of 8"):
        cpu_layers.normalise(draw(2, 8), draw(7), 1e-5, by_layer=False, threads=1)


# Rotation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, heads, width", [(0, (1, 1), 8), (1, (4, 2), 2), (7, (3, 1), 26), (300, (8, 2), 64)])
def test_queries_and_keys_turn_to_the_bits_that_torch_gives(
    kernels: str, dtype: torch.dtype, tokens: int, heads: tuple[int, int], width: int
) -> None:
    rotary = Rotary(replace(NUMERICS, rotary_width=width), 11, dtype, torch.device("cpu"))
    positions = torch.randint(11, (tokens,), generator=torch.Generator().manual_seed(3))
    fused = draw(tokens, heads[0] + 2 * heads[1], width, dtype=dtype)
    before = fused.clone()
    q, k = fused[:, : heads[0]], fused[:, heads[0] : sum(heads)]
    wanted = rotary.turn(q, positions), rotary.turn(k, positions)
    found = rotary.turn_both(q, k, positions)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert torch.equal(fused[:, sum(heads) :], before[:, sum(heads) :])
    if kernels == "compiled":
        assert torch.equal(q, wanted[0])


def test_a_turn_is_a_rotation_of_pairs_half_a_head_apart(kernels: str) -> None:
    numerics = replace(NUMERICS, rotary_width=4)  # 1 and 1/100 radian per position
    rotary = Rotary(numerics, 4, torch.float32, torch.device("cpu"))
    q = torch.tensor([[[1.0, 1.0, 0.0, 0.0]]])
    found, _ = rotary.turn_both(q, torch.zeros(1, 1, 4), torch.tensor([3]))
    wanted = [math.cos(3), math.cos(0.03), math.sin(3), math.sin(0.03)]
    torch.testing.assert_close(found[0, 0], torch.tensor(wanted), rtol=1e-6, atol=1e-7)


def test_a_position_outside_the_tables_is_refused_before_anything_turns() -> None:
    if open_library() is None:
        pytest.skip("no compiled kernels on this machine")
    q, k, table = draw(2, 1, 4), draw(2, 1, 4), draw(5, 4)
    before = q.clone()
    for wrong in (5, -1):
        with pytest.raises(ValueError, match=f"token 1: position {wrong} is not one of 5"):
            cpu_layers.turn(q, k, table, table, torch.tensor([0, wrong]), threads=1)
    assert torch.equal(q, before)


# Routing


def route_in_float64(logits: Tensor, top_k: int, power: float | None) -> tuple[Tensor, Tensor]:
    """Experts [T, k] and their weights, one token after the other."""
    experts, weights = [], []
    for row in logits.double().tolist():
        whole = sum(math.exp(each - max(row)) for each in row)
        chances = [math.exp(each - max(row)) / whole for each in row]
        best = sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k]
        kept = [chances[e] for e in best]
        norm = 1.0 if power is None else sum(each**power for each in kept) ** (1 / power)
        experts.append(best)
        weights.append([each / norm for each in kept])
    return torch.tensor(experts, dtype=torch.int64), torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize("power", [None, 1.0, 2.0, 3.0])
@pytest.mark.parametrize(
    "tokens, count, top_k", [(1, 8, 2), (1, 1, 1), (5, 3, 3), (40, 17, 4), (9, 128, 8), (LARGE // 60 + 1, 60, 4)]
)
def test_visits_are_the_likeliest_experts_sorted_by_expert(
    kernels: str, tokens: int, count: int, top_k: int, power: float | None
) -> None:
    # The identity as tokens, so that the logits are the router's columns.
    logits = draw(tokens, count, scale=4)
    found = _route(logits, top_k, power)
    experts, weights = route_in_float64(logits, top_k, power)
    by_expert = sorted(
        (e, t, w)
        for t, row in enumerate(zip(experts.tolist(), weights.tolist(), strict=True))
        for e, w in zip(*row, strict=True)
    )
    assert found.order.tolist() == [token for _, token, _ in by_expert]
    assert found.starts == [sum(e < bound for e, _, _ in by_expert) for bound in range(count + 1)]
    wanted = torch.tensor([weight for _, _, weight in by_expert], dtype=torch.float64)
    torch.testing.assert_close(found.weights.double(), wanted, rtol=2e-6, atol=1e-30)


def _route(logits: Tensor, top_k: int, power: float | None) -> Any:
    tokens = logits.shape[0]
    if tokens > 100:  # the kernel alone: an identity of that size would be slow
        found = cpu_layers.route(logits, top_k, power, threads=2)
        if found is not None:
            return found
    return route(torch.eye(tokens), logits.t().contiguous(), top_k, replace(NUMERICS, router_norm=power))


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_any_dtype_are_read(dtype: torch.dtype) -> None:
    if open_library() is None:
        pytest.skip("no compiled kernels on this machine")
    logits = draw(33, 19, dtype=dtype)
    found, wanted = (cpu_layers.route(each, 3, 1.0, threads=1) for each in (logits, logits.float()))
    assert found is not None and wanted is not None
    assert found.starts == wanted.starts
    assert torch.equal(found.order, wanted.order) and torch.equal(found.weights, wanted.weights)


def test_of_equally_likely_experts_the_first_are_chosen() -> None:
    if open_library() is None:
        pytest.skip("no compiled kernels on this machine")
    found = cpu_layers.route(torch.tensor([[0.0, 1.0, 1.0, 1.0, -1.0]]), 2, 1.0, threads=1)
    assert found is not None
    assert found.starts == [0, 0, 1, 2, 2, 2] and found.weights.tolist() == [0.5, 0.5]


def test_large_logits_and_hopeless_experts_are_no_trouble(kernels: str) -> None:
    found = _route(torch.tensor([[5000.0, 4999.0, -5000.0, -math.inf]]), 3, 1.0)
    assert found.starts == [0, 1, 2, 3, 3] or found.starts == [0, 1, 2, 2, 3]
    share = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(found.weights, torch.tensor([share, 1 - share, 0.0]), rtol=1e-6, atol=0)


def test_without_a_number_among_the_logits_visits_stay_within_the_layer(kernels: str) -> None:
    found = _route(torch.full((2, 6), math.nan), 2, 1.0)
    assert found.starts[0] == 0 and found.starts[-1] == 4 and found.starts == sorted(found.starts)
    assert sorted(found.order.tolist()) == [0, 0, 1, 1]


def test_no_tokens_make_no_visits() -> None:
    if open_library() is None:
        pytest.skip("no compiled kernels on this machine")
    found = cpu_layers.route(torch.empty(0, 4), 2, 1.0, threads=2)
    assert found is not None and found.starts == [0] * 5 and not len(found.order)


def test_more_experts_than_there_are_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match="5 of 4 experts"):
        cpu_layers.route(torch.empty(1, 4), 5, 1.0, threads=1)


# The likeliest token


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, count", [(1, 1), (3, 15), (2, 16), (4, 513), (5, 1000), (3, LARGE // 2 + 7)])
def test_the_likeliest_token_is_torchs(kernels: str, dtype: torch.dtype, rows: int, count: int) -> None:
    scores = draw(rows, count + 3, dtype=dtype)[:, :count]  # bf16 has many equals
    value, place = find_best(scores)
    wide = scores.float()
    first = [row.index(max(row)) for row in wide.tolist()]
    assert value.dtype == torch.float32 and place.dtype == torch.int64
    assert place.tolist() == first
    assert value.tolist() == [max(row) for row in wide.tolist()]


@pytest.mark.parametrize("at", [0, 5, 600, 999])
def test_nan_comes_before_all_and_infinity_before_numbers(kernels: str, at: int) -> None:
    scores = draw(3, 1000)
    scores[0, at] = math.nan
    scores[1, at] = math.inf
    scores[2] = -math.inf
    scores[2, at] = 0.0
    scores[0, 700] = math.inf
    value, place = find_best(scores)
    assert place.tolist() == [at] * 3
    assert math.isnan(value[0]) and value[1:].tolist() == [math.inf, 0.0]


def test_where_all_are_minus_infinity_the_first_is_taken(kernels: str) -> None:
    _, place = find_best(torch.full((1, 600), -math.inf))
    assert place.tolist() == [0]


# Rows into the cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("tokens, groups, width", [(1, 1, 3), (6, 2, 20), (LARGE // 32, 2, 16)])
def test_rows_go_to_their_places_and_nowhere_else(
    kernels: str, dtype: torch.dtype, kept: torch.dtype, tokens: int, groups: int, width: int
) -> None:
    k, v = (apart(draw(tokens, groups, width, dtype=dtype, seed=seed)) for seed in (1, 2))
    pool = torch.full((2, 2 * tokens + 1, groups, width), 7.0).to(kept)
    places = torch.randperm(2 * tokens + 1, generator=torch.Generator().manual_seed(0))[:tokens]
    put_rows(k, v, pool, places)
    assert torch.equal(pool[0, places], k.to(kept)) and torch.equal(pool[1, places], v.to(kept))
    others = sorted(set(range(2 * tokens + 1)) - set(places.tolist()))
    assert (pool[:, others] == 7).all()


def test_only_some_tokens_go_there(kernels: str) -> None:
    k, v, pool = draw(4, 1, 2), draw(4, 1, 2, seed=1), torch.zeros(2, 3, 1, 2)
    put_rows(k, v, pool, torch.tensor([2, 0]), torch.tensor([1, 3]))
    assert torch.equal(pool[:, 2], torch.stack((k[1], v[1])))
    assert torch.equal(pool[:, 0], torch.stack((k[3], v[3])))
    assert not pool[:, 1].any()


@pytest.mark.parametrize("places, sources", [([0, 3], [0, 1]), ([0, -1], [0, 1]), ([0, 1], [0, 4]), ([0, 1], [-1, 0])])
def test_a_row_that_is_not_there_is_refused_before_anything_is_copied(places: list[int], sources: list[int]) -> None:
    if open_library() is None:
        pytest.skip("no compiled kernels on this machine")
    pool = torch.zeros(2, 3, 1, 2)
    with pytest.raises(ValueError, match="cannot go to row"):
        cpu_layers.put_rows(draw(4, 1, 2), draw(4, 1, 2), pool, torch.tensor(places), torch.tensor(sources), threads=1)
    assert not pool.any()


# Prompts


@pytest.mark.parametrize("lengths", [(5, 5, 5), (1,), (4, 4, 1, 4, 9, 9), (3, 2, 1)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_that_are_parts_of_one_tensor_attend_where_they_lie(
    lengths: tuple[int, ...], window: int | None, dtype: torch.dtype
) -> None:
    tokens, width = sum(lengths), 16
    fused = draw(tokens, 8, width, dtype=dtype)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    found = attend_prompts(q, k, v, lengths, scale=0.25, window=window)
    wanted, start = torch.empty(tokens, 4, width, dtype=torch.float64), 0
    for length in lengths:
        for at in range(start, start + length):
            first = max(start, at + 1 - (window or length))
            for head in range(4):
                scores = k[first : at + 1, head // 2].double() @ q[at, head].double() * 0.25
                wanted[at, head] = torch.softmax(scores, 0) @ v[first : at + 1, head // 2].double()
        start += length
    assert found.shape == (tokens, 4 * width) and found.dtype == dtype
    rounding = 4 * ULP[dtype] * wanted.abs().max().item()
    assert (found.double() - wanted.view(tokens, -1)).abs().max().item() <= rounding
