"""Products on a CPU in another dtype than their operands: against float64, with little memory, by the processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime import attention, cpu_experts, cpu_linear, cpu_products
from runtime.attention import attend_prompts
from runtime.cpu_experts import Routing, apply_experts
from runtime.cpu_products import processor_has, product_dtype, through_float32


def test_instructions_are_read_from_the_flags_of_x86_and_of_arm(tmp_path: Path) -> None:
    x86, arm, none = (tmp_path / name for name in ("x86", "arm", "none"))
    x86.write_text("processor : 0\nflags\t\t: fpu avx2 avx512_bf16\n")
    arm.write_text("Features\t: fp asimd BF16\n")
    assert processor_has("amx_bf16", "avx512_bf16", cpuinfo=x86)
    assert processor_has("bf16", cpuinfo=arm)
    assert not processor_has("avx512", cpuinfo=x86), "a part of a word is not the word"
    assert not processor_has("avx2", cpuinfo=none), "what cannot be read has nothing"


@pytest.mark.parametrize("native", [True, False])
def test_products_are_in_bf16_only_where_all_operands_and_the_processor_are(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "multiplies_bf16", lambda: native)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    assert product_dtype(bf16, bf16) == (bf16 if native else fp32)
    assert [product_dtype(*each) for each in ((bf16, fp32), (fp16,), (fp16, bf16), (fp32,))] == [fp32] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("values", [7, 24, 100, 1 << 22])
def test_blocks_of_tokens_and_rows_give_the_product_of_the_whole(
    dtype: torch.dtype, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "WIDE_VALUES", values)
    generator = torch.Generator().manual_seed(values)
    x, w, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((13, 8), (11, 8), (11,)))
    wanted = x.double() @ w.double().t() + bias.double()
    found = through_float32(x, w, bias)
    assert found.dtype == dtype
    assert torch.equal(found, wanted.to(dtype)) or (found.double() - wanted).abs().max() <= 2e-6 * wanted.abs().max()
    assert torch.equal(through_float32(x, w, None), through_float32(x, w, torch.zeros(11)))


def test_a_linear_layer_in_bf16_goes_through_float32_where_the_processor_has_no_such_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_products, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(cpu_linear, "MOST_TOKENS", {torch.bfloat16: 0})
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: pytest.fail("multiplied in bf16"))
    x = torch.tensor([[1.0, 2.0**-8]]).to(torch.bfloat16)
    w = torch.tensor([[1.0, 1.0], [-1.0, 0.0]]).to(torch.bfloat16)
    assert cpu_linear.linear(x, w, None, 1).tolist() == [[1.0, -1.0]]  # 1 + 2^-8 rounds to even


def test_experts_in_bf16_are_multiplied_in_float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(cpu_experts, "MOST_VISITS", {torch.bfloat16: 0})
    monkeypatch.setattr(cpu_experts, "takes_many", lambda *_: False)
    monkeypatch.setattr(cpu_experts, "WIDE_VALUES", 5 * 3 * 16)  # blocks of five rows
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 3, 16, generator=generator).to(torch.bfloat16)
    x = torch.randn(9, 16, generator=generator).to(torch.bfloat16)
    routing = Routing(order=torch.arange(9), starts=[0, 9], weights=torch.ones(9))
    out = torch.zeros(9, 16)
    apply_experts(x, [(0, rows)], routing, out, threads=1)
    gate, up, down = (rows[:, i].double() for i in range(3))
    inner = torch.nn.functional.silu(x.double() @ gate.t()) * (x.double() @ up.t())
    wanted = inner @ down
    assert (out.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max(), "bf16 inside would be off by 1e-2"


@pytest.mark.parametrize("values", [1, 5 * 2 * 8, 2 * 5 * 4 * 8, 1 << 22])
def test_prompts_in_bf16_are_widened_a_few_or_some_heads_of_one_at_a_time(
    values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(attention, "WIDE_VALUES", values)
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 5, 5, 3]
    q, k, v = (torch.randn(18, heads, 8, generator=generator).to(torch.bfloat16) for heads in (4, 2, 2))
    found = attend_prompts(q, k, v, lengths, scale=0.5)
    wanted = attend_prompts(q.float(), k.float(), v.float(), lengths, scale=0.5)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted.to(torch.bfloat16))
