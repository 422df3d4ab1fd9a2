"""Kernels of the CUDA path without a GPU: what they ask torch for, and that it comes to what the CPU path gives.

Shapes, types and arguments are checked on tensors without memory against torch's own schema and shape functions; the
arithmetic on the CPU, with the attention operator written out from its CUDA source (`attention_op`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from attention_op import Calls, attend, operator_on_the_cpu
from cases import Case, largest_error, model_folder, policy_of, reference, run_case
from torch import Tensor

from runtime import attention, cuda_attention, cuda_experts, experts
from runtime.attention import attend_cache, attend_prompts
from runtime.cpu_attention import attend_decode
from runtime.cuda_attention import attend_cache_plainly, attend_cache_ragged, attend_prompts_ragged, kernel_works
from runtime.cuda_experts import add_experts, add_grouped, add_one, find_runs, grouped_product_works
from runtime.experts import Routing, group_visits

META = torch.device("meta")
CPU = torch.device("cpu")


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def operator() -> Iterator[None]:
    with operator_on_the_cpu():
        yield


@pytest.fixture
def gpu_branches(operator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branches of a GPU, on the CPU."""
    monkeypatch.setattr(attention, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(attention, "kernel_works", lambda *args, **named: True)
    monkeypatch.setattr(
        experts, "apply_experts", lambda x, segments, routing, total, threads: add_experts(x, segments, routing, total)
    )


# Attention


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("lengths", [(7, 1, 12, 1), (5,), (4, 4, 4)])
def test_prompts_of_any_length_side_by_side_equal_each_alone(
    operator: None, heads: tuple[int, int], window: int | None, lengths: Sequence[int]
) -> None:
    tokens, width = sum(lengths), 8
    q, k, v = (draw(tokens, count, width, seed=i) for i, count in enumerate((heads[0], heads[1], heads[1])))
    found = attend_prompts_ragged(q, k, v, lengths, scale=0.3, window=window)
    torch.testing.assert_close(found, attend_prompts(q, k, v, lengths, scale=0.3, window=window), rtol=1e-5, atol=1e-6)


FIRST, LENGTHS = torch.tensor([2, 9, 30, 31]), torch.tensor([7, 1, 1, 20])  # gaps, and rows after the last


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("window", [None, 1, 5, 50])
def test_a_new_token_over_a_cache_with_gaps_equals_the_cpu_kernel(
    gpu_branches: None, heads: tuple[int, int], window: int | None
) -> None:
    q, keys, values = draw(4, heads[0], 8), draw(60, heads[1], 8, seed=1), draw(60, heads[1], 8, seed=2)
    found, wanted = torch.empty_like(q), torch.empty_like(q)
    named: dict[str, Any] = {"scale": 0.3, "window": window, "threads": 1}
    attend_cache(q, keys, values, FIRST, LENGTHS, found, longest=20, **named)
    attend_decode(q, keys, values, FIRST, LENGTHS, wanted, **named)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_plain_attention_equals_the_cpu_kernel_in_parts_too_and_never_uses_what_is_not_a_requests_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_attention, "PLAIN_BYTES", 8 * 20 * 2 * 8 * 3)  # three requests at a time
    q, keys, values = draw(4, 8, 8), draw(60, 2, 8, seed=1), draw(60, 2, 8, seed=2)
    own = torch.cat([torch.arange(f, f + n) for f, n in zip(FIRST.tolist(), LENGTHS.tolist(), strict=True)])
    for pool in (keys, values):
        pool[[row for row in range(60) if row not in own.tolist()]] = float("nan")
    found, wanted = torch.empty_like(q), torch.empty_like(q)
    attend_cache_plainly(q, keys, values, FIRST, LENGTHS, found, scale=0.3, longest=20)
    attend_decode(q, keys, values, FIRST, LENGTHS, wanted, scale=0.3, window=None, threads=1)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_where_the_kernel_fails_its_check_plain_products_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(attention, "kernel_works", lambda *args, **named: False)
    q, keys, values = draw(4, 8, 8), draw(60, 2, 8, seed=1), draw(60, 2, 8, seed=2)
    found, wanted = torch.empty_like(q), torch.empty_like(q)
    attend_cache(q, keys, values, FIRST, LENGTHS, found, scale=0.3, window=5, longest=20, threads=1)
    attend_decode(q, keys, values, FIRST, LENGTHS, wanted, scale=0.3, window=5, threads=1)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 128])
def test_torch_takes_the_arguments_and_gives_the_shapes(dtype: torch.dtype, width: int) -> None:
    lengths, heads, groups = (76, 418, 1), 32, 8
    tokens = sum(lengths)
    q, k, v = (torch.empty(tokens, count, width, dtype=dtype, device=META) for count in (heads, groups, groups))
    with Calls() as calls:
        prompts = attend_prompts_ragged(q, k, v, lengths, scale=0.1, window=64)
        pool = torch.empty(2, 9000, groups, width, dtype=dtype, device=META)
        first = torch.empty(36, dtype=torch.int64, device=META)
        out = torch.empty(36, heads, width, dtype=torch.bfloat16, device=META)
        new = torch.empty(36, heads, width, dtype=torch.bfloat16, device=META)  # another type than the cache's
        attend_cache_ragged(new, pool[0], pool[1], first, first, out, scale=0.1, longest=500)
    assert prompts.shape == (tokens, heads * width) and prompts.dtype == dtype
    assert len(calls.seen) == heads // groups + 1  # one call per head that shares keys; in decode one
    args, named = calls.seen[0]
    assert args[0].shape == (1, tokens, groups, width) and args[6:10] == (418, 418, 0.0, 1)
    assert named["window_size"] == 64 and "seqlen_k" not in named
    args, named = calls.seen[-1]
    assert args[0].shape == (1, 36 * 4, groups, width) and args[1].shape == (1, 9000, groups, width)
    assert args[4].shape == args[5].shape == (37,) and args[6:10] == (4, 500, 0.0, 0)
    assert named["seqlen_k"].shape == (36,) and named.get("window_size") is None


def test_the_check_passes_the_kernel_and_refuses_one_with_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    kernel_works.cache_clear()
    with operator_on_the_cpu():
        assert kernel_works(CPU, torch.float32, 8, windowed=True)
    assert capsys.readouterr().err == ""

    def without_gaps(*args: Any, **named: Any) -> Any:
        return attend(*args, **named | {"seqlen_k": None})

    def without_window(*args: Any, **named: Any) -> Any:
        return attend(*args, **named | {"window_size": None})

    def refused(*args: Any, **named: Any) -> Any:
        raise RuntimeError("no kernel found to launch!\nhere")

    for fault, said in (
        (without_gaps, "differs by"),
        (without_window, "differs by"),
        (refused, "fails: no kernel found"),
    ):
        kernel_works.cache_clear()
        with operator_on_the_cpu(fault):
            assert not kernel_works(CPU, torch.float32, 8, windowed=True)
            assert not kernel_works(CPU, torch.float32, 8, windowed=True)
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and said in told and "plain products" in told
    kernel_works.cache_clear()


# Experts


def packed_experts(count: int, rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (draw(count * rows, 3, width, seed=5) * width**-0.5).to(dtype)


def cut(packed: Tensor, rows: Sequence[int], first: int = 0) -> list[tuple[int, Tensor]]:
    parts, start = [], 0
    for number, count in enumerate(rows):
        if count:
            parts.append((first + number, packed[start : start + count]))
        start += count
    return parts


def route_all(tokens: int, count: int, top_k: int) -> Routing:
    generator = torch.Generator().manual_seed(3)
    chosen = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)])
    return group_visits(chosen, torch.rand(chosen.shape, generator=generator), count)


def test_runs_are_experts_in_a_row_as_large_as_each_other_and_next_in_memory() -> None:
    packed, other = packed_experts(6, 4, 16), packed_experts(2, 4, 16)
    whole = cut(packed, [4] * 6)
    assert [[e for e, _ in run] for run in find_runs(whole)] == [[0, 1, 2, 3, 4, 5]]
    partial = cut(packed, [4, 4, 2, 0, 4, 4])  # a part of expert 2, none of 3
    assert [[e for e, _ in run] for run in find_runs(partial)] == [[0, 1], [2], [4, 5]]
    tiers = whole[:3] + cut(other, [4, 4], first=3)  # those from disk lie elsewhere
    assert [[e for e, _ in run] for run in find_runs(tiers)] == [[0, 1, 2], [3, 4]]
    assert find_runs([]) == []


@pytest.mark.parametrize("top_k", [1, 3])
def test_grouped_products_equal_products_one_by_one(top_k: int) -> None:
    count, rows, width, tokens = 6, 16, 32, 11
    segments = cut(packed_experts(count, rows, width), [rows] * count)
    x, routing = draw(tokens, width, dtype=torch.bfloat16), route_all(tokens, count, top_k)
    starts = [int(start) for start in routing.starts]
    found, wanted = torch.ones(tokens, width), torch.ones(tokens, width)
    for run in (segments[:2], segments[2:]):  # a token may have no visits in one of them
        add_grouped(x, run, starts, routing, found)
    for segment in segments:
        add_one(x, segment, starts, routing, wanted)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    again = torch.ones(tokens, width)
    for run in (segments[:2], segments[2:]):
        add_grouped(x, run, starts, routing, again)
    assert torch.equal(found, again)


def test_grouped_products_take_the_weights_where_they_lie() -> None:
    """Torch's own rules for strides, on the shapes of Qwen3-30B-A3B, without memory."""
    count, rows, width, tokens = 128, 768, 2048, 64
    packed = torch.empty(count * rows, 3, width, dtype=torch.bfloat16, device=META)
    starts = list(range(0, 8 * tokens + 1, 4))
    routing = Routing(
        order=torch.empty(8 * tokens, dtype=torch.int64, device=META),
        starts=starts,
        weights=torch.empty(8 * tokens, device=META),
    )
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._grouped_mm.default:
                seen.append((tuple(args[0].shape), tuple(args[1].shape), args[1].stride()))
            return func(*args, **kwargs or {})

    total = torch.empty(tokens, width, device=META)
    x = torch.empty(tokens, width, dtype=torch.bfloat16, device=META)
    with Watch():
        add_grouped(x, cut(packed, [rows] * count), starts, routing, total)
    gate = ((512, width), (count, width, rows), (rows * 3 * width, 1, 3 * width))
    assert seen == [gate, gate, ((512, rows), (count, rows, width), (rows * 3 * width, 3 * width, 1))]


def test_the_check_of_grouped_products_passes_torch_and_refuses_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grouped_product_works.cache_clear()
    assert grouped_product_works(CPU) and capsys.readouterr().err == ""
    right = torch.nn.functional.grouped_mm

    def shifted(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        return right(a, b.roll(1, dims=0), offs=offs)

    monkeypatch.setattr(cuda_experts.F, "grouped_mm", shifted)
    grouped_product_works.cache_clear()
    assert not grouped_product_works(CPU)
    assert "one by one" in capsys.readouterr().err
    grouped_product_works.cache_clear()


# Whole models


CASES = (
    Case("cgopipe", policy_of(kv_on_gpu=0.5, weights_on_gpu=0.3)),
    Case("s4", policy_of("s4", kv_on_gpu=0.5, weights_on_gpu=0.5, weights_on_disk=0.2)),
    Case("streaming", policy_of("streaming")),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.schedule)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "llama"])
def test_a_model_through_the_branches_of_a_gpu_gives_the_tokens_of_transformers(
    gpu_branches: None, family: str, case: Case
) -> None:
    folder = model_folder(family)
    ran = run_case(folder, case)
    assert ran.tokens == reference(folder).tokens
    assert largest_error(ran, reference(folder)) < 1e-4
