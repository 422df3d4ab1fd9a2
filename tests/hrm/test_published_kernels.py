"""Rooflines of single kernels: bytes by hand, fits of made-up latencies, and every bundled size left out in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hrm.published.kernels import (
    KERNELS,
    KernelFit,
    fit_kernel,
    kernel_bytes,
    kernel_document,
    kernel_flops,
    predict_kernel,
)
from hrm.published.rows import KernelRow, bundled_kernels


def kernel(name: str, mu: int, context: int | None, seconds: float = 1.0) -> KernelRow:
    return KernelRow(kernel=name, micro_batch_size=mu, context_len=context, latency_s=seconds)


def test_kv_bytes_are_two_values_of_eight_heads_of_128_in_16_bit() -> None:
    assert kernel_bytes(kernel("kv_transfer_htod", 32, 128)) == 32 * 128 * (2 * 8 * 128 * 2)
    assert kernel_bytes(kernel("cpu_attention", 1, 1)) == 4096


def test_experts_read_all_their_weights_and_compute_two_of_them_per_token() -> None:
    expert = 3 * 4096 * 14336
    row = kernel("moe_ffn_gpu", 32, None)
    assert kernel_flops(row) == pytest.approx(2 * 32 * 2 * expert, rel=1e-3)
    assert kernel_bytes(row) == pytest.approx(8 * expert * 2, rel=0.01)  # 32 tokens touch all 8
    assert kernel_flops(kernel("cpu_attention", 128, 128)) == 0


def test_fit_finds_rate_and_latency_again() -> None:
    truth = KernelFit(bytes_per_s=10e9, latency_s=1e-3)
    rows = [kernel("cpu_attention", 32, context) for context in (128, 512, 2048)]
    rows = [replace(row, latency_s=predict_kernel(row, truth)) for row in rows]
    found = fit_kernel(rows)
    assert (found.bytes_per_s, found.latency_s) == pytest.approx((10e9, 1e-3))


def test_latency_is_not_negative_and_experts_have_none() -> None:
    faster = [kernel("cpu_attention", 1, 1000, 0.5e-3), kernel("cpu_attention", 1, 2000, 1.5e-3)]
    assert fit_kernel(faster).latency_s == 0.0
    assert fit_kernel([kernel("moe_ffn_gpu", 32, None, 0.0122)]).latency_s == 0.0


def test_experts_take_the_longer_of_bytes_and_flops() -> None:
    few, many = kernel("moe_ffn_gpu", 128, None), kernel("moe_ffn_gpu", 10_000, None)
    fit = KernelFit(bytes_per_s=230e9)
    assert predict_kernel(few, fit) == kernel_bytes(few) / 230e9
    assert predict_kernel(many, fit) == kernel_flops(many) / 68e12


@pytest.mark.parametrize("place", [0, 1, 11])
def test_a_size_has_no_part_in_its_own_prediction(place: int) -> None:
    rows = list(bundled_kernels())
    before = kernel_document(rows)["rows"][place]["predicted"]
    rows[place] = replace(rows[place], latency_s=100 * rows[place].latency_s)
    assert kernel_document(rows)["rows"][place]["predicted"] == before


def test_every_bundled_kernel_is_within_eight_per_cent() -> None:
    summary = kernel_document(bundled_kernels())["summary"]
    assert {name: entry["n"] for name, entry in summary.items()} == {
        "kv_transfer_htod": 10,
        "cpu_attention": 10,
        "moe_ffn_gpu": 2,
    }
    assert all(entry["median_error"] <= 0.08 for entry in summary.values())


def test_the_profile_has_what_the_kernels_say() -> None:
    for name, entry in kernel_document(bundled_kernels())["summary"].items():
        assert entry["bytes_per_s"] == pytest.approx(entry["profile_bytes_per_s"], rel=0.02), name


def test_what_cannot_be_predicted_says_why_and_counts() -> None:
    found = kernel_document([kernel("softmax", 1, 1), kernel("cpu_attention", 1, None)])
    assert [entry["predicted"] for entry in found["rows"]] == [None, None]
    assert found["rows"][0]["note"] == f"kernel 'softmax' is not known: {', '.join(KERNELS)}"
    assert "context" in found["rows"][1]["note"]
    assert found["summary"]["cpu_attention"] == {
        "n": 1,
        "missed": 1,
        "median_error": None,
        "bytes_per_s": None,
        "latency_s": None,
        "profile": "efficiency.cpu_attention",
        "profile_bytes_per_s": pytest.approx(0.55 * 82.5e9),
    }


def test_a_single_size_is_predicted_by_the_shipped_rate() -> None:
    (entry,) = kernel_document([kernel("kv_transfer_htod", 1, 1)])["rows"]
    assert entry["predicted"] == 4096 / 12.2e9
    assert "shipped" in entry["note"]
