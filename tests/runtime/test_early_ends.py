"""Requests that end early: tokens of those that go on, what is handed over when, whichever schedule runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from cases import Case, cases, make_prompts, model_folder, open_tiny, policy_of, reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES
from torch import Tensor

from hrm.layout import Layout
from runtime.batches import cut_batches
from runtime.early_ends import EarlyEnds, Ended, Stopped, finish_batch
from runtime.jobs.sampling import Sampling, make_score
from runtime.placement import place_batch
from runtime.requests import make_requests
from runtime.session import Session
from runtime.shrinking import repack

GENERATED = 12
FOLDER = model_folder("mixtral")


def expected(tokens: Sequence[int], limit: int, ends: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """What is left of a whole generation: up to the first end token, at most so many."""
    for place, token in enumerate(tokens[:limit]):
        if token in ends:
            return tuple(tokens[: place + 1]), "stop"
    return tuple(tokens[:limit]), "length"


def finish(session: Session, limits: Sequence[int], how: EarlyEnds) -> None:
    prompts = make_prompts()
    asked = [
        replace(request, generation_tokens=limit)
        for request, limit in zip(make_requests(prompts, session.scenario), limits, strict=True)
    ]
    for batch in cut_batches(asked, session.policy, session.scenario):
        finish_batch(session, batch, prompts, how)


def results(case: Case, limits: Sequence[int], ends: Sequence[int], steps: int, family: str = "mixtral") -> list[Ended]:
    found: list[Ended] = []
    policy = replace(case.policy, micro_batch_token_budget=case.policy.micro_batch_token_budget + 8 * 7)
    session = open_tiny(model_folder(family), Case(case.schedule, policy), generated=GENERATED)
    try:
        finish(session, limits, EarlyEnds(ends=ends, deliver=found.extend, steps=steps))
    finally:
        if session.disk is not None:
            session.disk.close()
    return found


def check(case: Case, limits: Sequence[int], ends: Sequence[int], steps: int, family: str = "mixtral") -> None:
    found = results(case, limits, ends, steps, family)
    wanted = reference(model_folder(family), GENERATED).tokens
    assert sorted(each.index for each in found) == list(range(len(limits)))
    for each in found:
        assert (each.tokens, each.reason) == expected(wanted[each.index], limits[each.index], ends), each.index


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=cases(),
    limits=st.lists(st.integers(1, GENERATED), min_size=10, max_size=10),
    ends=st.lists(st.integers(0, 95), max_size=6),
    steps=st.integers(1, 5),
    family=st.sampled_from(FAMILIES),
)
def test_whatever_ends_when_the_others_go_on_as_transformers_has_them(
    case: Case, limits: list[int], ends: list[int], steps: int, family: str
) -> None:
    check(case, limits, ends, steps, family)


LIMITS = (3, 12, 1, 7, 2, 12, 5, 4, 9, 12)
WIDE = {"micro_batch_size": 4, "num_micro_batches": 3, "batch_size": 10}
STREAMED = {"dense_weights_on_gpu": False, "embedding_on_gpu": False, "lm_head_on_gpu": False, "pin_weights": False}
BY_HAND: dict[str, tuple[str, dict[str, Any]]] = {
    "cache in CPU memory, attention there": ("cgopipe", WIDE),
    "cache on all levels, attention on the CPU": ("cgopipe", WIDE | {"kv_on_gpu": 0.3, "kv_on_disk": 0.4}),
    "cache on all levels, attention on the GPU": ("s4", WIDE | {"kv_on_gpu": 0.3, "kv_on_disk": 0.4}),
    "cache on disk, everything streamed": ("s4", WIDE | STREAMED | {"kv_on_disk": 1.0}),
    "a ring of experts": ("cgopipe", WIDE | STREAMED | {"weight_slots": "experts", "ring_experts": 2}),
    "experts on both": ("s3", WIDE | {"ffn_on_gpu": False, "weights_on_gpu": 0.5}),
    "one micro-batch": ("streaming", {"micro_batch_size": 10}),
    "experts where they lie": ("static_experts", WIDE),
    "all on the CPU": ("cpu_only", WIDE | {"weights_on_disk": 0.5}),
}


@pytest.mark.parametrize("steps", [1, 3, 12])
@pytest.mark.parametrize("name", BY_HAND)
def test_every_place_of_the_cache_survives_the_requests_that_leave(name: str, steps: int) -> None:
    schedule, changes = BY_HAND[name]
    check(Case(schedule, policy_of(schedule, **changes)), LIMITS, (), steps)


def test_requests_leave_after_the_graph_in_which_they_end() -> None:
    told: list[list[int]] = []
    sizes: list[tuple[int, int]] = []
    how = EarlyEnds(
        ends=(),
        deliver=lambda ended: told.append(sorted(each.index for each in ended)),
        steps=4,
        on_piece=lambda piece, state, _: sizes.append((state.placement.size, piece.steps.last)),
    )
    session = open_tiny(FOLDER, wide_case(), generated=GENERATED)
    finish(session, (1, 2, 2, 6, 9, 9, 9, 9, 9, 12), how)
    # Prefill gives each its first token. No graph runs beyond the next limit, where capacity ends too.
    assert told == [[0], [1, 2], [3], [4, 5, 6, 7, 8], [9]]
    assert sizes == [(10, 0), (9, 1), (7, 5), (6, 8), (1, 11)]
    assert not how.decoding and how.phases["prefill"] > 0.0 < how.phases["decode"]
    assert sum(arena.reserved.get("KV cache", 0) for arena in session.arenas.levels.values()) == 0


def wide_case() -> Case:
    return Case("cgopipe", policy_of(**WIDE, micro_batch_token_budget=200))


def test_a_cache_has_room_for_the_prompt_and_its_own_limit() -> None:
    session, tokens = open_tiny(FOLDER, wide_case(), generated=GENERATED), []
    prepare = Session.prepare

    def watched(*given: Any) -> Any:
        state = prepare(*given)
        tokens.append(state.cache.pools["cpu"].tokens)
        return state

    with mock.patch.object(Session, "prepare", watched):
        finish(session, LIMITS, EarlyEnds(ends=(), deliver=lambda _: None, steps=12))
    assert tokens == [sum(map(len, make_prompts())) + sum(LIMITS)]


def test_fewer_rows_make_fewer_micro_batches_but_enough_to_overlap() -> None:
    session = open_tiny(
        FOLDER,
        Case("cgopipe", policy_of(micro_batch_size=2, num_micro_batches=5, micro_batch_token_budget=200)),
        generated=GENERATED,
    )
    (batch,) = cut_batches(make_requests(make_prompts(), session.scenario), session.policy, session.scenario)
    layout = Layout(session.scenario, batch.policy)
    state = session.prepare(layout, place_batch(batch.micro_batches, batch.policy), make_prompts())
    found = {}
    for count in range(10, 0, -1):
        parts, policy = repack(range(count), state.cache, batch.policy, 2)
        sizes = [sum(map(len, part)) for part in parts]
        assert sum(sizes) == count == policy.batch_size and max(sizes) <= policy.micro_batch_size
        found[count] = len(parts)
    assert found == {10: 5, 9: 5, 8: 4, 7: 4, 6: 3, 5: 3, 4: 4, 3: 3, 2: 2, 1: 1}


def test_asked_to_stop_it_hands_over_what_has_ended_and_gives_its_memory_back() -> None:
    found: list[Ended] = []
    session = open_tiny(FOLDER, wide_case(), generated=GENERATED)
    with pytest.raises(Stopped):
        finish(session, LIMITS, EarlyEnds(ends=(), deliver=found.extend, steps=2, stop=lambda: len(found) > 1))
    assert {each.index for each in found} == {2, 4}  # of one token, and of two
    assert sum(arena.reserved.get("KV cache", 0) for arena in session.arenas.levels.values()) == 0


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_what_is_drawn_is_the_same_in_any_batch_and_with_the_head_in_pieces(top_p: float) -> None:
    """Each case has other batches; two have a streamed lm_head, in several pieces."""
    sampling = Sampling(temperature=1.0, top_p=top_p, seed=9)
    score = make_score(sampling, range(10))
    assert score is not None
    drawn, looked = [], set()

    def watched(logits: Tensor, requests: Sequence[int], column: int, first: int) -> Tensor:
        looked.add((streamed, first, logits.shape[1]))
        return score(logits, requests, column, first)

    for schedule, changes in (
        ("cpu_only", {}),
        ("cgopipe", WIDE),
        ("cgopipe", STREAMED | {"micro_batch_size": 1}),
        ("s4", STREAMED | {"kv_on_gpu": 0.5}),
    ):
        streamed, found = "lm_head_on_gpu" in changes, list[Ended]()
        policy = policy_of(schedule, **changes)
        policy = replace(policy, micro_batch_token_budget=policy.micro_batch_token_budget + 56)
        with mock.patch("hrm.layout.HEAD_BUFFER_BYTES", 4096):  # a head of 96 * 32 * 4 in three pieces
            session = open_tiny(FOLDER, Case(schedule, policy), generated=GENERATED)
            how = EarlyEnds(ends=(), deliver=found.extend, steps=3, score=watched, whole=sampling.whole_vocabulary)
            finish(session, LIMITS, how)
        drawn.append({each.index: each.tokens for each in found})
    pieces = {(True, 0, 32), (True, 32, 32), (True, 64, 32)} if top_p == 1.0 else {(True, 0, 96)}
    assert looked == pieces | {(False, 0, 96)}
    assert all(each == drawn[0] for each in drawn)
    assert drawn[0] != {each.index: each.tokens for each in results(wide_case(), LIMITS, (), 3)}
