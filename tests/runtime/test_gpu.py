"""The runtime on a real GPU: `pytest -m gpu`. Skipped where torch sees no CUDA device.

Token for token what transformers generates in fp32; within rounding in fp16 and bf16; and nothing that depends on how
streams happen to overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    Case,
    Generated,
    Ran,
    largest_error,
    make_prompts,
    model_folder,
    policy_of,
    reference,
    run_session,
    scenario_of,
)
from tiny_models import FAMILIES

from hrm.errors import InputError
from hrm.trace_order import find_violation
from hrm.units import GIB, MIB
from runtime.checkpoint import open_checkpoint
from runtime.cuda_attention import kernel_works
from runtime.cuda_experts import ONE_KERNEL, grouped_product_works
from runtime.device import choose_device
from runtime.numerics import read_numerics
from runtime.session import Session, open_session

DEVICE = "cuda"
THERE = torch.cuda.is_available()
BF16 = THERE and torch.cuda.get_device_capability() >= (8, 0)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not THERE, reason="torch sees no CUDA device here")]
needs_bf16 = pytest.mark.skipif(not BF16, reason="this GPU does not compute in bf16")

CASES = {
    "attention on the CPU": Case("cgopipe", policy_of(kv_on_gpu=0.5, weights_on_gpu=0.3)),
    "staged and from disk": Case(
        "cgopipe",
        policy_of(
            pin_weights=False, weights_on_gpu=0.25, weights_on_disk=0.5, kv_on_disk=0.5, dense_weights_on_gpu=False
        ),
    ),
    "one slot, ends streamed": Case(
        "cgopipe",
        policy_of(weight_slots=1, dense_weights_on_gpu=False, embedding_on_gpu=False, lm_head_on_gpu=False),
    ),
    "ring of experts": Case("cgopipe", policy_of(weight_slots="experts", ring_experts=2, weights_on_gpu=0.5)),
    "experts on the CPU": Case("cgopipe", policy_of(ffn_on_gpu=False)),
    "attention on the GPU": Case("s4", policy_of("s4", kv_on_gpu=0.5, kv_on_disk=0.25)),
    "everything on the GPU": Case("streaming", policy_of("streaming", weights_on_gpu=1.0)),
    "resident experts": Case("static_experts", policy_of("static_experts")),
}
ROUNDED = ("attention on the CPU", "attention on the GPU", "ring of experts")


def open_on_gpu(folder: Path, case: Case, **formats: Any) -> Session:
    config = json.loads((folder / "config.json").read_text())
    return open_session(
        scenario_of(folder, **formats),
        case.policy,
        case.schedule,
        open_checkpoint(folder),
        read_numerics(config, where=str(folder)),
        choose_device(DEVICE, cpu_only=False),
    )


def run_on_gpu(folder: Path, case: Case, **formats: Any) -> Ran:
    session = open_on_gpu(folder, case, **formats)
    try:
        ran = run_session(session)
    finally:
        if session.disk is not None:
            session.disk.close()
    for by_column in ran.logits.values():
        for column, logits in by_column.items():
            by_column[column] = logits.cpu()
    return ran


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str, name: str) -> None:
    folder = model_folder(family)
    ran = run_on_gpu(folder, CASES[name])
    assert ran.tokens == reference(folder).tokens
    assert largest_error(ran, reference(folder)) < 1e-3


def common_tokens(ran: Ran, wanted: Generated) -> tuple[int, float]:
    """Tokens up to the first other one of each request; and how far off nine tenths of their logits are at most."""
    errors = []
    for request, tokens in enumerate(ran.tokens):
        for column, token in enumerate(tokens):
            right = wanted.logits[request][column]
            difference = (ran.logits[request][column].float() - right).abs().max() / right.abs().max()
            errors.append(float(difference))
            if token != wanted.tokens[request][column]:
                break  # from here on the two answer other texts
    return len(errors), sorted(errors)[int(0.9 * len(errors))]


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("compute", "tolerance"), [("fp16", 0.02), pytest.param("bf16", 0.15, marks=needs_bf16)], ids=["fp16", "bf16"]
)
def test_rounded_arithmetic_gives_the_same_logits_within_its_rounding(
    family: str, name: str, compute: str, tolerance: float
) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[compute]
    folder = model_folder(family, dtype=dtype)
    wanted = reference(folder)
    count, most = common_tokens(run_on_gpu(folder, CASES[name], compute=compute), wanted)
    every = sum(len(tokens) for tokens in wanted.tokens)
    assert most < tolerance  # the tenth that may be further off are tokens that chose another of two like experts
    assert count >= 0.7 * every  # a text parts from the other where two tokens are about as likely


@pytest.mark.parametrize("name", ["attention on the CPU", "staged and from disk", "attention on the GPU"])
def test_nothing_depends_on_how_streams_overlap(name: str) -> None:
    """Wider, so that copies and products take long enough to meet what they should have waited for."""
    widths = {"hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2}
    folder = model_folder("mixtral", dtype=torch.float16, **widths)
    session = open_on_gpu(folder, CASES[name], compute="fp16")
    first = run_session(session)
    for _ in range(5):
        again = run_session(session)
        assert again.tokens == first.tokens
        for request in range(len(make_prompts())):
            assert torch.equal(again.logits_of(request), first.logits_of(request))


@pytest.mark.parametrize("name", CASES)
def test_the_trace_is_measured_and_keeps_the_rule_of_its_graph(name: str) -> None:
    ran = run_on_gpu(model_folder("mixtral"), CASES[name])
    for batch in ran.batches:
        for piece in batch.pieces:
            assert piece.trace.kind == "measured"
            assert find_violation(piece.trace.spans, piece.graph.before, clock_error_s=2e-4) is None
            assert all(span.end_s >= span.start_s >= -2e-4 for span in piece.trace.spans)


# Memory


@pytest.fixture
def limit() -> Iterator[None]:
    yield
    choose_device(DEVICE, cpu_only=False).limit_gpu_memory(float("inf"))


def test_torch_takes_no_more_than_the_plans_gpu_has(limit: None) -> None:
    """A profile of 1 GiB: that, less the CUDA context, is all torch may reserve, however large the GPU."""
    folder, case = model_folder("mixtral", dtype=torch.float16), CASES["attention on the GPU"]
    scenario = scenario_of(folder, compute="fp16")
    gpu = replace(scenario.profile.gpu, usable_memory_bytes=1.0 * GIB, context_bytes=0.4 * GIB)
    scenario = replace(scenario, profile=replace(scenario.profile, gpu=gpu))
    device = choose_device(DEVICE, cpu_only=False)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free_before, _ = torch.cuda.mem_get_info()
    session = open_session(
        scenario,
        case.policy,
        case.schedule,
        open_checkpoint(folder),
        read_numerics(json.loads((folder / "config.json").read_text()), where=str(folder)),
        device,
    )
    run_session(session)
    free_after, _ = torch.cuda.mem_get_info()
    assert torch.cuda.max_memory_reserved() <= 0.6 * GIB
    assert free_before - free_after <= 1.0 * GIB  # what the driver says, kernels that were loaded among it
    with pytest.raises(InputError, match=r"GPU memory: .*out of memory"):
        device.gpu_bytes(int(0.7 * GIB))


def test_page_locked_memory_goes_back_with_its_session() -> None:
    """The driver refuses to lock what is locked already, and addresses come again."""
    folder, case = model_folder("olmoe"), CASES["one slot, ends streamed"]
    for _ in range(6):
        run_session(open_on_gpu(folder, case))
    device = choose_device(DEVICE, cpu_only=False)
    for _ in range(20):
        memory = device.pinned_bytes(8 * MIB)
        memory.fill_(1)
        there = memory.to("cuda", non_blocking=True)
        assert int(there.sum(dtype=torch.int64)) == 8 * MIB
        del memory


# Kernels


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("width", [8, 16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=needs_bf16)], ids=str
)
def test_the_memory_efficient_kernel_is_used_here(dtype: torch.dtype, width: int, windowed: bool) -> None:
    assert kernel_works(torch.device("cuda", 0), dtype, width, windowed=windowed)


@pytest.mark.skipif(
    not THERE or torch.cuda.get_device_capability() < ONE_KERNEL, reason="no single kernel for grouped products here"
)
def test_grouped_products_are_used_here() -> None:
    assert grouped_product_works(torch.device("cuda", 0))
