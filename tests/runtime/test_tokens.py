"""Tokens and logits are those of transformers, whatever the schedule and policy.

Ten prompts of 1 to 12 tokens, several batches, the last of them smaller. In fp32 every token must be the same, and
every logit within 1e-4 of the largest of its row: sums of a few dozen terms in another order differ by some 1e-6.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import pytest
import torch
from cases import (
    GENERATED,
    LENGTHS,
    Case,
    Generated,
    Ran,
    cases,
    largest_error,
    model_folder,
    open_tiny,
    policy_of,
    reference,
    run_case,
    run_session,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES

from hrm.graph import LaneKind, Op, Task
from hrm.schedules import SCHEDULES
from runtime.kernels import KERNELS
from runtime.layers import linear

CLOSE = 1e-4
MANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="session")
def said() -> Iterator[dict[str, Generated]]:
    """What transformers says of every family, once."""
    yield {family: reference(model_folder(family)) for family in FAMILIES}


def check(ran: Ran, wanted: Generated) -> None:
    assert ran.tokens == wanted.tokens
    assert largest_error(ran, wanted) < CLOSE


# Every schedule and family once


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_what_transformers_gives(schedule: str, family: str, said: dict[str, Generated]) -> None:
    ran = run_case(model_folder(family), Case(schedule, policy_of(schedule)))
    check(ran, said[family])
    sizes = [batch.policy.batch_size for batch in ran.batches]
    assert sum(sizes) == len(LENGTHS) and len(sizes) > 1 and sizes[-1] < sizes[0]


STREAMED = {"dense_weights_on_gpu": False, "embedding_on_gpu": False, "lm_head_on_gpu": False, "pin_weights": False}
DISK = {"weights_on_disk": 0.5, "kv_on_disk": 0.5}
RING = {"weight_slots": "experts", "ring_experts": 2}
BY_HAND: dict[str, tuple[str, dict[str, Any]]] = {
    "everything streamed and staged": ("cgopipe", STREAMED),
    "half of everything on the GPU": ("cgopipe", {"weights_on_gpu": 0.5, "kv_on_gpu": 0.5}),
    "half on disk": ("cgopipe", DISK),
    "all on disk": ("cgopipe", {"weights_on_disk": 1.0, "kv_on_disk": 1.0} | STREAMED),
    "thirds everywhere": ("s2", {"weights_on_gpu": 0.3, "weights_on_disk": 0.3, "kv_on_gpu": 0.4, "kv_on_disk": 0.3}),
    "one slot": ("s3", {"weight_slots": 1} | STREAMED),
    "a ring of experts": ("cgopipe", RING | STREAMED | DISK),
    "a ring of experts with parts on the GPU": ("s4", RING | {"weights_on_gpu": 0.4, "weights_on_disk": 0.3}),
    "attention on the GPU, cache on disk": ("s4", {"kv_on_disk": 1.0} | STREAMED),
    "attention on the GPU, cache everywhere": ("s4", {"kv_on_gpu": 0.5, "kv_on_disk": 0.25, "micro_batch_size": 4}),
    "experts on the CPU": ("cgopipe", {"ffn_on_gpu": False, "num_micro_batches": 4}),
    "experts on the CPU from disk": ("s4", {"ffn_on_gpu": False, "weights_on_disk": 1.0} | STREAMED),
    "experts on both": ("cgopipe", {"ffn_on_gpu": False, "weights_on_gpu": 0.5, "weights_on_disk": 0.25}),
    "all on the GPU": ("streaming", {"weights_on_gpu": 1.0}),
    "all on the CPU, experts from disk": ("cpu_only", {"weights_on_disk": 0.5}),
    "nothing overlapped": ("serial", STREAMED | DISK),
    "one request at a time": ("cgopipe", {"micro_batch_size": 1, "num_micro_batches": 1}),
    "four micro-batches of one": ("s2", {"micro_batch_size": 1, "num_micro_batches": 4}),
    "one prompt of prefill at a time": ("cgopipe", {"prefill_micro_batch_size": 1, "kv_on_gpu": 0.5}),
    "one batch": ("s3", {"micro_batch_size": 5, "num_micro_batches": 2, "prefill_micro_batch_size": 10}),
}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "llama"])
def test_places_by_hand_give_what_transformers_gives(name: str, family: str, said: dict[str, Generated]) -> None:
    schedule, changes = BY_HAND[name]
    check(run_case(model_folder(family), Case(schedule, policy_of(schedule, **changes))), said[family])


def test_the_places_by_hand_run_every_kernel() -> None:
    run = set()
    for schedule, changes in BY_HAND.values():
        for batch in run_case(model_folder("mixtral"), Case(schedule, policy_of(schedule, **changes))).batches:
            run |= {(task.id.op, task.lane.kind) for piece in batch.pieces for task in piece.graph.tasks}
    assert run == set(KERNELS)


def test_small_pieces_give_what_transformers_gives(monkeypatch: pytest.MonkeyPatch, said: dict[str, Generated]) -> None:
    """Weights in several pieces through the pinned ring, and the lm_head in three."""
    monkeypatch.setattr("hrm.weight_copies.PIECE_BYTES", 3000.0)
    for module in ("hrm.layout", "hrm.memory"):
        monkeypatch.setattr(f"{module}.HEAD_BUFFER_BYTES", 5000.0)
    for schedule in ("cgopipe", "s3", "serial"):
        for changes in (STREAMED, STREAMED | DISK, DISK | {"lm_head_on_gpu": False}, RING | STREAMED | DISK):
            if schedule == "s3" and "ring_experts" in changes:
                continue
            ran = run_case(model_folder("qwen2_moe"), Case(schedule, policy_of(schedule, **changes)))
            pieces = [task for task in ran.batches[0].pieces[1].graph.tasks if task.id.op is Op.LM_HEAD]
            assert {task.id.page for task in pieces} == {0, 1, 2}
            check(ran, said["qwen2_moe"])


# Any


@pytest.mark.parametrize("family", FAMILIES)
def test_any_schedule_and_policy_gives_what_transformers_gives(family: str, said: dict[str, Generated]) -> None:
    @settings(MANY, max_examples=20)
    @given(cases())
    def check_one(case: Case) -> None:
        check(run_case(model_folder(family), case), said[family])

    check_one()


BESIDE = {"ffn_on_gpu": False, "weights_on_gpu": 0.5, "kv_on_gpu": 0.5, "num_micro_batches": 4}
TIMED = [
    Case("cgopipe", policy_of(**BESIDE)),
    Case("s4", policy_of("s4", **BESIDE | {"kv_on_disk": 0.5})),
    Case("static_experts", policy_of("static_experts", num_micro_batches=4)),
    Case("cgopipe", policy_of(**STREAMED | DISK)),
    Case("cgopipe", policy_of(**STREAMED | RING)),
]


@pytest.mark.parametrize("case", TIMED, ids=lambda case: case.schedule)
def test_timing_changes_not_a_bit(case: Case) -> None:
    """Each lane slow in turn, so that what comes from two sides comes in either order."""
    folder = model_folder("mixtral")
    plain = run_case(folder, case)
    check(plain, reference(folder))
    for slow in (LaneKind.GPU, LaneKind.H2D, LaneKind.CPU, LaneKind.D2H):
        ran = run_case(folder, case, pace=lambda task, slow=slow: 1e-3 * (task.lane.kind is slow))
        assert all(torch.equal(ran.logits_of(each), plain.logits_of(each)) for each in range(len(LENGTHS)))


@settings(MANY, max_examples=8)
@given(cases(), st.integers(1, 100))
def test_any_timing_gives_what_transformers_gives(case: Case, seed: int) -> None:
    """Tasks slowed at random."""

    def pace(task: Task) -> float:
        return 1e-3 * (crc32(f"{seed} {task.id}".encode()) % 4 == 0)

    check(run_case(model_folder("mixtral"), case, pace=pace), reference(model_folder("mixtral")))


# Other models of the families

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense layers first and last": ("qwen2_moe", {"mlp_only_layers": [0, 2]}),
    "every other layer dense": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "no dense layer, renormalised weights": ("qwen2_moe", {"mlp_only_layers": [], "norm_topk_prob": True}),
    "weights not renormalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "renormalised weights, no clip": ("olmoe", {"norm_topk_prob": True, "clip_qkv": None}),
    "weights divided by the 2-norm": ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}),
    "an untied head": ("llama", {"tie_word_embeddings": False}),
    "a tied head of a MoE model": ("mixtral", {"tie_word_embeddings": True}),
    "plain rotary positions, biases": ("llama", {"rope_scaling": None, "attention_bias": True}),
    "a window of four tokens": ("mixtral", {"sliding_window": 4}),
    "one key and value head": ("mixtral", {"num_key_value_heads": 1}),
    "as many key and value heads as queries": ("olmoe", {"num_key_value_heads": 4}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_the_families_give_what_transformers_gives(name: str) -> None:
    family, overrides = VARIANTS[name]
    folder = model_folder(family, **overrides)
    for schedule, changes in (
        ("cgopipe", STREAMED | {"kv_on_gpu": 0.5}),
        ("s4", {"weights_on_gpu": 0.5}),
        ("cpu_only", {}),
    ):
        check(run_case(folder, Case(schedule, policy_of(schedule, **changes))), reference(folder))


def test_a_tied_head_has_one_home_where_both_are_on_one_level_and_two_where_not() -> None:
    folder = model_folder("llama")
    for ends in ((True, True), (True, False), (False, True), (False, False)):
        case = Case("cgopipe", policy_of(embedding_on_gpu=ends[0], lm_head_on_gpu=ends[1]))
        session = open_tiny(folder, case)
        assert (session.store.top["lm_head"] is session.store.top["embedding"]) == (ends[0] == ends[1])
        check(run_session(session), reference(folder))


def test_one_generated_token_takes_no_decode_step() -> None:
    folder = model_folder("mixtral")
    ran = run_case(folder, Case("cgopipe", policy_of()), generated=1)
    assert [len(batch.pieces) for batch in ran.batches] == [1, 1]
    assert ran.tokens == [tokens[:1] for tokens in reference(folder).tokens]


def test_requests_of_an_uneven_batch_come_back_in_the_order_of_the_prompts() -> None:
    """A tight budget defers long prompts to later batches."""
    folder = model_folder("mixtral")
    case = Case("cgopipe", policy_of(micro_batch_size=3, num_micro_batches=2, micro_batch_token_budget=21))
    ran = run_case(folder, case)
    order = [index for batch in ran.batches for index in sorted(batch.tokens)]
    assert order != sorted(order)
    check(ran, reference(folder))


# Narrow formats

ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of rounding one value."""


def errors_of(ran: Ran, wanted: Generated) -> torch.Tensor:
    """Error of every row of logits up to where a request first says something else, relative to its largest logit."""
    found = []
    for request, tokens in enumerate(ran.tokens):
        logits, exact = ran.logits_of(request), wanted.logits[request]
        same = 1
        while same < GENERATED and tokens[:same] == wanted.tokens[request][:same]:
            same += 1
        found.append(((logits - exact).abs().amax(dim=-1) / exact.abs().amax(dim=-1))[:same])
    return torch.cat(found)


def agreeing(ran: Ran, wanted: Generated) -> float:
    """Share of the tokens that are the same."""
    pairs = [
        (a, b) for one, other in zip(ran.tokens, wanted.tokens, strict=True) for a, b in zip(one, other, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


PLACES: dict[str, dict[str, Any]] = {
    "cgopipe": {"kv_on_gpu": 0.5, "micro_batch_size": 4, "num_micro_batches": 2, "kv_on_disk": 0.25},
    "s4": {"num_micro_batches": 2},
    "cpu_only": {},
}


@pytest.mark.parametrize("kv", ["fp16", "bf16"])
@pytest.mark.parametrize("schedule", PLACES)
def test_a_narrow_cache_costs_one_rounding_of_keys_and_values(kv: str, schedule: str) -> None:
    """Logits are then wrong by about as much, in three layers by less than four times that; but for one row in ten at
    most, where a router stands between two experts and the rounding decides."""
    folder = model_folder("mixtral")
    ran, exact = run_case(folder, Case(schedule, policy_of(schedule, **PLACES[schedule])), kv=kv), reference(folder)
    errors = errors_of(ran, exact)
    assert errors.quantile(0.9) < 4 * ROUNDOFF[kv] and errors.median() > 0.1 * ROUNDOFF[kv]
    assert agreeing(ran, exact) >= 0.9
    # Prefill attends to what it has just computed, before it is rounded into the cache.
    firsts = [(ran.logits_of(request)[0], exact.logits[request][0]) for request in range(len(LENGTHS))]
    assert all((first - other).abs().max() < CLOSE * other.abs().max() for first, other in firsts)


@pytest.mark.parametrize(("compute", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "llama"])
def test_narrow_arithmetic_is_near_the_same_weights_in_fp32(family: str, compute: str, dtype: torch.dtype) -> None:
    """A layer rounds activations about ten times: the errors of thirty roundings add up like their root, to some six,
    and the largest of a row of 96 logits is two or three times that: 16 for nine rows of ten."""
    folder = model_folder(family, dtype=dtype)
    exact = reference(folder)  # in fp32, with the very weights of the checkpoint
    for schedule, changes in PLACES.items():
        ran = run_case(folder, Case(schedule, policy_of(schedule, **changes)), compute=compute)
        errors = errors_of(ran, exact)
        assert errors.quantile(0.9) < 16 * ROUNDOFF[compute] and errors.median() > ROUNDOFF[compute]
        assert agreeing(ran, exact) >= 0.8


def test_fp16_products_on_the_cpu_are_rounded_once() -> None:
    """Sums in fp32: a sum of 4096 terms in fp16 would be wrong by more than the last place."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator).half() for shape in ((5, 4096), (7, 4096)))
    exact = x.double() @ weight.double().t()
    found = linear(x, weight)
    assert found.dtype == torch.float16
    assert ((found.double() - exact).abs() <= exact.abs() * ROUNDOFF["fp16"] + 1e-3).all()
