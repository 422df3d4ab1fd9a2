"""Requests that end early: tokens of those that go on, what is handed over when, whichever schedule runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from cases import Case, cases, make_prompts, model_folder, open_tiny, policy_of, reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.batches import cut_batches
from runtime.early_ends import EarlyEnds, Ended, Stopped, finish_batch
from runtime.requests import make_requests
from runtime.session import Session

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


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    case=cases(),
    limits=st.lists(st.integers(1, GENERATED), min_size=10, max_size=10),
    ends=st.lists(st.integers(0, 95), max_size=6),
    steps=st.integers(1, 5),
)
def test_whatever_ends_when_the_others_go_on_as_transformers_has_them(
    case: Case, limits: list[int], ends: list[int], steps: int
) -> None:
    check(case, limits, ends, steps)
