"""Decode attention on the CPU against sums written out in float64, compiled and by torch."""

from __future__ import annotations

import itertools
import math
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.cpu_attention import attend_decode
from runtime.native_library import DTYPES, FOLDER, open_library

LENGTHS = [1, 5, 33, 16, 700, 64]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Error of one rounding to a dtype, relative to numbers of about 1; of float32, what a sum of a few hundred adds up."""


def attend_in_float64(
    q: Tensor, keys: Tensor, values: Tensor, first: list[int], lengths: list[int], scale: float, window: int | None
) -> Tensor:
    """One query head of one request after the other, as the definition says."""
    out = torch.empty(q.shape, dtype=torch.float64)
    shared = q.shape[1] // keys.shape[1]
    for request, head in itertools.product(range(q.shape[0]), range(q.shape[1])):
        end = first[request] + lengths[request]
        rows = range(max(first[request], end - (window or lengths[request])), end)
        k, v = (pool[list(rows), head // shared].double() for pool in (keys, values))
        chances = torch.exp(k @ q[request, head].double() * scale)
        out[request, head] = chances @ v / chances.sum()
    return out


def draw_pools(lengths: list[int], groups: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[int]]:
    """Pools in which the requests lie apart, NaN in every row that belongs to none, and their first rows."""
    generator = torch.Generator().manual_seed(len(lengths) + groups * width)
    gap = 3
    first = [gap + sum(lengths[:i]) + gap * i for i in range(len(lengths))]
    pools = torch.full((2, first[-1] + lengths[-1] + gap, groups, width), math.nan)
    for start, length in zip(first, lengths, strict=True):
        pools[:, start : start + length] = torch.randn(2, length, groups, width, generator=generator)
    return pools[0].to(dtype), pools[1].to(dtype), first


def check(
    lengths: list[int], heads: int, groups: int, width: int, dtypes: tuple[torch.dtype, ...], **named: Any
) -> None:
    keys, values, first = draw_pools(lengths, groups, width, dtypes[1])
    q = torch.randn(len(lengths), heads, width, generator=torch.Generator().manual_seed(7)).to(dtypes[0])
    out = torch.full(q.shape, math.nan, dtype=dtypes[2])
    scale, window = width**-0.5, named.get("window")
    attend_decode(
        q,
        keys,
        values,
        torch.tensor(first),
        torch.tensor(lengths),
        out,
        scale=scale,
        window=window,
        threads=named.get("threads", 2),
    )
    wanted = attend_in_float64(q, keys, values, first, lengths, scale, window)
    assert (out.double() - wanted).abs().max().item() <= 2 * ROUNDING[dtypes[2]] * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (4, 2, 8), (6, 6, 16), (7, 1, 96), (14, 2, 80), (3, 1, 13), (8, 2, 256)]
)
def test_every_head_layout_gives_the_sums_of_the_definition(
    way: str, heads: tuple[int, int, int], threads: int
) -> None:
    check(LENGTHS, *heads, (torch.float32, torch.float32, torch.float32), threads=threads)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("asked", DTYPES)
@pytest.mark.parametrize("answered", DTYPES)
def test_sums_are_float32_whatever_is_stored_asked_and_answered(
    way: str, stored: torch.dtype, asked: torch.dtype, answered: torch.dtype
) -> None:
    check(LENGTHS, 8, 2, 64, (asked, stored, answered))


@pytest.mark.parametrize("window", [1, 4, 31, 32, 33, 699, 700, 5000])
def test_a_window_leaves_out_all_but_the_last_rows(way: str, window: int) -> None:
    check(LENGTHS, 8, 2, 32, (torch.float32, torch.bfloat16, torch.float32), window=window)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    groups=st.integers(1, 4),
    shared=st.integers(1, 9),
    width=st.sampled_from([1, 7, 8, 24, 32, 64, 100]),
    dtype=st.sampled_from(sorted(DTYPES, key=str)),
    window=st.none() | st.integers(1, 400),
)
def test_any_shape_gives_the_sums_of_the_definition(
    way: str, lengths: list[int], groups: int, shared: int, width: int, dtype: torch.dtype, window: int | None
) -> None:
    check(lengths, groups * shared, groups, width, (dtype, dtype, dtype), window=window)


def test_equal_keys_give_the_mean_of_the_values_exactly(way: str) -> None:
    keys, values = torch.ones(4, 1, 8), torch.arange(4.0).view(4, 1, 1).expand(4, 1, 8).contiguous()
    out = torch.empty(1, 2, 8)
    attend_decode(
        torch.ones(1, 2, 8), keys, values, torch.tensor([0]), torch.tensor([4]), out, scale=1.0, window=None, threads=1
    )
    assert out.unique().tolist() == [1.5]


def test_scores_far_beyond_the_range_of_exp_neither_overflow_nor_vanish(way: str) -> None:
    """Scores rise by 1000 from token to token: all weight is on the last."""
    keys = torch.arange(100.0).mul(1000).view(100, 1, 1).expand(100, 1, 16).contiguous()
    values = torch.arange(100.0).view(100, 1, 1).expand(100, 1, 16).contiguous()
    for sign, wanted in ((1.0, 99.0), (-1.0, 0.0)):
        out = torch.empty(1, 1, 16)
        q = torch.full((1, 1, 16), sign / 16)
        attend_decode(q, keys, values, torch.tensor([0]), torch.tensor([100]), out, scale=1.0, window=None, threads=2)
        assert out.unique().tolist() == [wanted]


def test_results_repeat_bit_by_bit(way: str) -> None:
    keys, values, first = draw_pools([900, 30, 400], 2, 64, torch.bfloat16)
    q = torch.randn(3, 8, 64).bfloat16()
    found = []
    for _ in range(10):
        out = torch.empty(3, 8, 64)
        lengths = torch.tensor([900, 30, 400])
        attend_decode(q, keys, values, torch.tensor(first), lengths, out, scale=0.1, window=None, threads=2)
        found.append(out)
    assert all(torch.equal(each, found[0]) for each in found)


def test_pools_may_be_layers_of_a_larger_tensor_and_out_the_query_itself(way: str) -> None:
    pool = torch.randn(3, 2, 50, 2, 16)
    q = torch.randn(2, 4, 16)
    wanted = attend_in_float64(q, pool[1, 0], pool[1, 1], [0, 20], [20, 30], 0.25, None)
    first, lengths = torch.tensor([0, 20]), torch.tensor([20, 30])
    attend_decode(q, pool[1, 0], pool[1, 1], first, lengths, q, scale=0.25, window=None, threads=2)
    assert (q.double() - wanted).abs().max().item() < 4e-6


@pytest.mark.parametrize(
    ("first", "lengths"), [([0, 9], [5, 2]), ([-1, 0], [5, 5]), ([0, 0], [5, 0]), ([0, 2**62], [1, 2**62])]
)
def test_rows_outside_the_pools_are_an_error(way: str, first: list[int], lengths: list[int]) -> None:
    pool, q = torch.zeros(10, 1, 8), torch.zeros(2, 1, 8)
    with pytest.raises(ValueError, match=r"^request [01]: .* not in a pool of 10$"):
        attend_decode(q, pool, pool, torch.tensor(first), torch.tensor(lengths), q, scale=1.0, window=None, threads=1)


@pytest.mark.parametrize(
    ("q", "keys"),
    [
        (torch.zeros(2, 3, 8), torch.zeros(10, 2, 8)),
        (torch.zeros(2, 2, 8), torch.zeros(10, 2, 4)),
        (torch.zeros(2, 2, 8), torch.zeros(10, 2, 8, dtype=torch.float64)),
        (torch.zeros(2, 2, 8), torch.zeros(10, 8, 2).transpose(1, 2)),
    ],
)
def test_what_does_not_go_together_is_an_error(way: str, q: Tensor, keys: Tensor) -> None:
    rows = torch.tensor([0, 0]), torch.tensor([1, 1])
    with pytest.raises(ValueError, match=r"no attention|wanted are|must follow"):
        attend_decode(q, keys, keys, *rows, torch.zeros_like(q), scale=1.0, window=None, threads=1)


@pytest.mark.parametrize("which", ["first", "lengths"])
@pytest.mark.parametrize(
    "wrong", [torch.tensor([0]), torch.tensor([1, 1, 1]), torch.tensor([[1, 1]]), torch.tensor([1, 1]).int()]
)
def test_first_and_lengths_are_each_checked_alone(way: str, which: str, wrong: Tensor) -> None:
    rows = {"first": torch.tensor([0, 0]), "lengths": torch.tensor([1, 1])} | {which: wrong}
    q, keys = torch.zeros(2, 2, 8), torch.zeros(10, 2, 8)
    with pytest.raises(ValueError, match=r"^first and lengths must be int64 \[2\]$"):
        attend_decode(q, keys, keys, rows["first"], rows["lengths"], q, scale=1.0, window=None, threads=1)


# The library


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
    )


TWICE = """
import torch
from runtime.cpu_linear import linear
from runtime.native_library import open_library
for _ in range(2):
    assert open_library() is None
    assert torch.equal(linear(torch.ones(2, 4), torch.ones(3, 4), None, 1), torch.full((2, 3), 4.0))
"""


def test_without_a_compiler_one_line_says_so_and_torch_does_the_work(tmp_path: Path) -> None:
    done = run_python(TWICE, CXX="no-such-compiler", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "no compiled CPU kernels, torch does their work, slower: "
        "no C++ compiler found (c++, or the one that CXX names)\n"
    )


def test_a_compiler_that_fails_is_quoted_with_its_error(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *version*) echo "broken 13.1.0"; exit 0;; esac\n'
        'echo "x.cpp:1: error: no" >&2; exit 1\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    done = run_python(TWICE, CXX=str(compiler), TORCH_EXTENSIONS_DIR=str(tmp_path / "built"))
    assert done.returncode == 0, done.stderr
    assert "slower: x.cpp:1: error: no\n" in done.stderr


def test_the_switch_is_silent(tmp_path: Path) -> None:
    done = run_python(TWICE, HRM_NATIVE="0", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, "", [])


def test_kernels_share_the_pool_of_threads_that_torch_has() -> None:
    if open_library() is None:
        pytest.skip("no compiler here")
    code = """
import os, torch
from runtime.native_library import open_library
library = open_library()
torch.set_num_threads(2)
ones = torch.ones(1 << 20)
(ones + ones).sum()
before = len(os.listdir("/proc/self/task"))
library.hrm_read(ones.data_ptr(), 1 << 22, 2)
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
print(len(os.listdir("/proc/self/task")) - before, len(loaded))
"""
    if not Path("/proc/self/task").exists():
        pytest.skip("no /proc here")
    done = run_python(code)
    assert done.stdout.split() == ["0", "1"], done.stderr


@pytest.mark.parametrize("machine", ["skylake-avx512", "haswell", "x86-64"])
def test_kernels_compile_for_older_machines_too(tmp_path: Path, machine: str) -> None:
    if open_library() is None or "x86" not in os.uname().machine:
        pytest.skip("no compiler here")
    for source in FOLDER.glob("*.cpp"):
        command = ["c++", "-fsyntax-only", f"-march={machine}", "-std=c++17", "-fopenmp", "-Wno-psabi", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
