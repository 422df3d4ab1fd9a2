"""Experts and linear layers on the CPU against sums written out in float64, compiled and by torch."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime import cpu_experts, cpu_linear
from runtime.cpu_experts import MOST_VISITS, Routing, apply_experts
from runtime.cpu_linear import linear
from runtime.native_library import DTYPES

Segments = list[tuple[int, Tensor]]


def answer_in_float64(x: Tensor, segments: Segments, visits: list[list[int]], weights: list[list[float]]) -> Tensor:
    """One visit after the other, as the definition says."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert, rows in segments:
        w1, w3, w2 = rows.double().unbind(1)
        for token, weight in zip(visits[expert], weights[expert], strict=True):
            gate, up = w1 @ x[token].double(), w3 @ x[token].double()
            out[token] += weight * (gate / (1 + torch.exp(-gate)) * up) @ w2
    return out


def routing_of(visits: list[list[int]], weights: list[list[float]]) -> Routing:
    return Routing(
        order=torch.tensor(list(itertools.chain(*visits)), dtype=torch.int64),
        starts=list(itertools.accumulate((len(each) for each in visits), initial=0)),
        weights=torch.tensor(list(itertools.chain(*weights)), dtype=torch.float32),
    )


def draw_segment(rows: int, hidden: int, dtype: torch.dtype, seed: int) -> Tensor:
    drawn = torch.randn(rows, 3, hidden, generator=torch.Generator().manual_seed(seed))
    return (drawn * hidden**-0.5).to(dtype)


def check(
    tokens: int,
    hidden: int,
    rows: list[tuple[int, int]],
    visits: list[list[int]],
    dtypes: tuple[torch.dtype, torch.dtype],
    threads: int = 2,
) -> None:
    """What is added to an `out` of ones; segments that nobody visits are NaN throughout."""
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).to(dtypes[0])
    weights = [[(1 + i + e) % 7 / 8 for i in range(len(each))] for e, each in enumerate(visits)]
    segments = [
        (
            expert,
            draw_segment(n, hidden, dtypes[1], i)
            if visits[expert]
            else torch.full((n, 3, hidden), math.nan).to(dtypes[1]),
        )
        for i, (expert, n) in enumerate(rows)
    ]
    out = torch.ones(tokens, hidden)
    apply_experts(x, segments, routing_of(visits, weights), out, threads=threads)
    wanted = answer_in_float64(x, [each for each in segments if visits[each[0]]], visits, weights)
    # Where all is bf16 the kernel rounds what the down rows are multiplied with to 8 bits, torch's products also gate,
    # up and the answer. Everywhere else sums and factors are float32.
    is_compiled = os.environ.get("HRM_NATIVE") != "0" and max(map(len, visits)) <= MOST_VISITS[torch.bfloat16]
    allowed = (2 if is_compiled else 4) * 2.0**-8 if dtypes == (torch.bfloat16, torch.bfloat16) else 2e-5
    assert (out.double() - 1 - wanted).abs().max().item() <= allowed * max(0.1, wanted.abs().max().item())


EVERY_SECOND = [[0, 2, 4, 6], [], [1, 3, 5, 7, 8], list(range(9))]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("given_in", DTYPES)
def test_every_dtype_gives_the_sums_of_the_definition(
    way: str, given_in: torch.dtype, stored: torch.dtype, threads: int
) -> None:
    rows = [(0, 40), (2, 17), (1, 5), (2, 1), (3, 150), (0, 0), (0, 3)]  # an expert in several segments
    check(9, 64, rows, EVERY_SECOND, (given_in, stored), threads)


@pytest.mark.parametrize("hidden", [1, 8, 31, 32, 100, 4096 + 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_hidden_size_gives_the_sums_of_the_definition(way: str, hidden: int, dtype: torch.dtype) -> None:
    check(9, hidden, [(0, 20), (2, 9), (3, 33)], EVERY_SECOND, (dtype, dtype))


@pytest.mark.parametrize("tokens", [*range(1, 20), 48, 64, 65, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_of_visits_gives_the_sums_of_the_definition(way: str, tokens: int, dtype: torch.dtype) -> None:
    check(tokens, 64, [(0, 33)], [list(range(tokens))], (dtype, dtype))


def test_experts_with_few_and_with_many_visits_mix(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_experts, "MOST_VISITS", dict.fromkeys(DTYPES, 4))
    monkeypatch.setattr(cpu_experts, "WIDE_VALUES", 7 * 3 * 64)
    for dtype in DTYPES:
        check(9, 64, [(0, 40), (2, 17), (1, 5), (2, 20), (3, 30)], EVERY_SECOND, (dtype, dtype))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 33, 64, 100])
@pytest.mark.parametrize("hidden", [32, 96, 128, 224])
def test_visits_side_by_side_give_the_sums_of_the_definition(
    way: str, monkeypatch: pytest.MonkeyPatch, hidden: int, tokens: int, threads: int
) -> None:
    monkeypatch.setattr(cpu_experts, "MOST_STREAMED", 0)
    every, odd = list(range(tokens)), list(range(1, tokens, 2))
    rows = [(0, 1), (1, 13), (0, 12), (2, 8), (0, 47)]
    check(tokens, hidden, rows, [every, odd, every[-1:]], (torch.bfloat16, torch.bfloat16), threads)


def test_experts_of_more_rows_and_visits_than_are_taken_at_a_time(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_experts, "MOST_STREAMED", 0)
    monkeypatch.setattr(cpu_experts, "VISITS_AT_A_TIME", 7)
    check(40, 64, [(0, 1024 + 1), (0, 2 * 1024 + 5)], [list(range(40))], (torch.bfloat16, torch.bfloat16))


def test_many_tokens_go_side_by_side_sooner(way: str) -> None:
    visits = [list(range(8)), list(range(100, 109))]  # among 600: the first streams, the second does not
    check(600, 64, [(0, 20), (1, 30)], visits, (torch.bfloat16, torch.bfloat16))


def test_among_many_tokens_experts_of_few_visits_are_streamed_some_at_a_time(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts 0 and 3, in two pieces, make a batch; 1 has more visits than a batch is to have; 2 has none."""
    monkeypatch.setattr(cpu_experts, "MANY_TOKENS", 6)
    visits = [[0, 2, 8], list(range(8)), [], [8, 1, 2]]
    for dtype in DTYPES:
        check(9, 64, [(3, 40), (1, 17), (0, 5), (3, 20), (2, 30)], visits, (dtype, dtype))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 40),
    hidden=st.sampled_from([8, 32, 48, 96]),
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 70)), max_size=6),
    dtypes=st.tuples(*[st.sampled_from(sorted(DTYPES, key=str))] * 2),
    drawn=st.randoms(use_true_random=False),
)
def test_any_routing_gives_the_sums_of_the_definition(
    way: str,
    tokens: int,
    hidden: int,
    rows: list[tuple[int, int]],
    dtypes: tuple[torch.dtype, torch.dtype],
    drawn: object,
) -> None:
    choose = drawn.sample  # type: ignore[attr-defined]
    visits = [sorted(choose(range(tokens), drawn.randint(0, tokens))) for _ in range(4)]  # type: ignore[attr-defined]
    check(tokens, hidden, rows, visits, dtypes)


def test_one_row_by_hand(way: str) -> None:
    """gate 0 * 3 = 0, silu(0) = 0; gate 40, silu(40) = 40 to the last bit, up 2, times 0.5, times the down row."""
    rows = torch.tensor([[[0.0, 1.0], [1.0, 1.0], [9.0, 9.0]], [[20.0, 0.0], [1.0, 0.0], [1.0, -2.0]]])
    out = torch.zeros(2, 2)
    routing = Routing(order=torch.tensor([1]), starts=[0, 1], weights=torch.tensor([0.5]))
    apply_experts(torch.tensor([[7.0, 7.0], [2.0, 0.0]]), [(0, rows)], routing, out, threads=2)
    assert out.tolist() == [[0.0, 0.0], [40.0, -80.0]]


def test_rows_of_experts_nobody_chose_are_not_touched(way: str) -> None:
    """They lie in memory that nothing may read."""
    locked = mmap.mmap(-1, 1 << 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(locked))
    whole = torch.frombuffer(locked, dtype=torch.float32)
    forbidden = whole[: 100 * 96].view(100, 3, 32)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(address, 1 << 16, 0) == 0
    try:
        out = torch.zeros(3, 32)
        routing = Routing(order=torch.tensor([0, 2]), starts=[0, 0, 2], weights=torch.ones(2))
        segments = [(0, forbidden), (1, draw_segment(40, 32, torch.float32, 1)), (0, forbidden)]
        apply_experts(torch.ones(3, 32), segments, routing, out, threads=2)
    finally:
        assert protect(address, 1 << 16, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    assert out[1].tolist() == [0.0] * 32
    assert torch.allclose(out[0], out[2], rtol=1e-5, atol=1e-6) and out[0].abs().min() > 0


def test_results_repeat_bit_by_bit(way: str) -> None:
    segments = [(e, draw_segment(2000, 64, torch.bfloat16, e)) for e in range(3)]
    visits = [[0, 1, 2, 3, 4], [1, 3], [0, 2, 4]]
    routing = routing_of(visits, [[0.5] * len(each) for each in visits])
    x, found = torch.randn(5, 64).bfloat16(), []
    for _ in range(10):
        found.append(torch.zeros(5, 64))
        apply_experts(x, segments, routing, found[-1], threads=2)
    assert all(torch.equal(each, found[0]) for each in found)


def test_nobody_chose_anybody(way: str) -> None:
    out = torch.ones(2, 8)
    routing = Routing(order=torch.empty(0, dtype=torch.int64), starts=[0, 0], weights=torch.empty(0))
    apply_experts(torch.ones(2, 8), [(0, torch.full((4, 3, 8), math.nan))], routing, out, threads=2)
    assert torch.equal(out, torch.ones(2, 8))


@pytest.mark.parametrize(
    ("rows", "out"),
    [
        (torch.zeros(4, 3, 7), torch.zeros(2, 8)),
        (torch.zeros(3, 4, 8).transpose(0, 1), torch.zeros(2, 8)),
        (torch.zeros(4, 3, 8, dtype=torch.float64), torch.zeros(2, 8)),
        (torch.zeros(4, 3, 8), torch.zeros(2, 8).bfloat16()),
    ],
)
def test_what_does_not_go_together_is_an_error(way: str, rows: Tensor, out: Tensor) -> None:
    routing = Routing(order=torch.tensor([0]), starts=[0, 1], weights=torch.ones(1))
    with pytest.raises(ValueError, match=r"must be|wanted are"):
        apply_experts(torch.zeros(2, 8), [(0, rows)], routing, out, threads=1)


# Linear layers


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("given_in", DTYPES)
def test_linear_gives_the_products_of_the_definition(
    way: str, given_in: torch.dtype, stored: torch.dtype, biased: bool, threads: int
) -> None:
    shapes = [(1, 1, 1), (3, 50, 64), (7, 33, 100), (20, 130, 32), (70, 9, 48)]
    shapes += [(tokens, n, 64) for tokens in (12, 13, 16, 17, 32, 33, 48) for n in (63, 64, 65, 67, 99, 107, 250)]
    for tokens, n, hidden in shapes:
        generator = torch.Generator().manual_seed(n)
        x = torch.randn(tokens, hidden, generator=generator).to(given_in)
        w = torch.randn(n, hidden, generator=generator).mul(hidden**-0.5).to(stored)
        bias = torch.randn(n, generator=generator).to(stored) if biased else None
        found = linear(x, w, bias, threads)
        wanted = x.double() @ w.double().t() + (0 if bias is None else bias.double())
        allowed = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[given_in]
        assert found.dtype == given_in
        assert (found.double() - wanted).abs().max().item() <= 1.01 * allowed * max(1.0, wanted.abs().max().item())


def test_linear_goes_to_torch_where_tokens_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "MOST_TOKENS", dict.fromkeys(DTYPES, 4))
    monkeypatch.setattr(cpu_linear, "open_library", lambda: pytest.fail("asked for the compiled kernel"))
    assert torch.equal(linear(torch.ones(5, 8), torch.ones(2, 8), None, 1), torch.full((5, 2), 8.0))


def test_linear_refuses_shapes_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="do not go together"):
        linear(torch.ones(5, 8), torch.ones(2, 7), None, 1)
