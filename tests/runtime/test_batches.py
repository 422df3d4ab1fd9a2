"""Requests into batches that a plan has room for: nobody lost, nobody twice, nothing larger than planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import GENERATED, LONGEST, model_folder, policy_of, scenario_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hrm.batching import Request
from hrm.errors import InputError
from hrm.points import prefill_choice
from hrm.policy import Policy
from hrm.scenario import Scenario
from runtime.batches import SizedBatch, cut_batches
from runtime.requests import make_requests

FOLDER = model_folder("mixtral")


def requests_of(*lengths: int) -> list[Request]:
    return [
        Request(index=index, prompt_tokens=length, generation_tokens=GENERATED) for index, length in enumerate(lengths)
    ]


def cut(lengths: tuple[int, ...], policy: Policy) -> list[SizedBatch]:
    return list(cut_batches(requests_of(*lengths), policy, scenario_of(FOLDER, lengths=lengths)))


def sizes(batch: SizedBatch) -> list[int]:
    return [part.size for part in batch.micro_batches]


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Any division of any batch, with room for many requests or for few."""
    micro, count = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    batch = draw(st.integers(micro * (count - 1) + 1, micro * count))
    return policy_of(
        batch_size=batch,
        micro_batch_size=micro,
        num_micro_batches=count,
        prefill_micro_batch_size=draw(st.integers(1, batch)),
        micro_batch_token_budget=draw(st.sampled_from((0, micro * LONGEST, LONGEST))),
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), policies())
def test_every_request_is_in_one_batch_and_no_batch_is_larger_than_planned(lengths: list[int], policy: Policy) -> None:
    batches = cut(tuple(lengths), policy)
    assert sorted(request.index for batch in batches for request in batch.requests) == list(range(len(lengths)))
    scenario = scenario_of(FOLDER, lengths=lengths)
    for batch in batches:
        mine = batch.policy
        assert (mine.batch_size, mine.num_micro_batches) == (len(batch.requests), len(batch.micro_batches))
        assert mine.batch_size <= policy.batch_size and mine.num_micro_batches <= policy.num_micro_batches
        assert max(sizes(batch)) <= policy.micro_batch_size and mine.micro_batch_size <= policy.micro_batch_size
        assert prefill_tokens(scenario, mine) <= prefill_tokens(scenario, policy)
        if policy.micro_batch_token_budget:
            assert all(part.tokens <= policy.micro_batch_token_budget for part in batch.micro_batches)
        places = ("batch_size", "micro_batch_size", "num_micro_batches", "prefill_micro_batch_size")
        assert replace(mine, **{place: getattr(policy, place) for place in places}) == policy


def prefill_tokens(scenario: Scenario, policy: Policy) -> float:
    choice = prefill_choice(scenario, float(policy.batch_size), float(policy.prefill_micro_batch_size))
    return float(choice.tokens)


def test_full_batches_keep_the_policy_and_the_last_has_one_of_its_size() -> None:
    """Ten requests of three, for six at a time: six in three micro-batches, then four in two."""
    policy = policy_of()
    first, last = cut((3,) * 10, policy)
    assert (sizes(first), first.policy) == ([2, 2, 2], policy)
    assert (sizes(last), last.policy) == (
        [2, 2],
        replace(policy, batch_size=4, num_micro_batches=2, prefill_micro_batch_size=3),
    )


def test_a_single_request_left_is_a_batch_of_its_own() -> None:
    last = cut((3,) * 7, policy_of())[-1]
    assert (sizes(last), last.policy.num_micro_batches, last.policy.prefill_micro_batch_size) == ([1], 1, 1)


def test_what_does_not_fit_beside_the_others_waits_and_comes_first() -> None:
    """Two micro-batches of 20 tokens: 12 + 5 and 9 + 5 leave no room for 8 + 5 and 7 + 5."""
    policy = policy_of(micro_batch_size=2, num_micro_batches=2, micro_batch_token_budget=20)
    first, second = cut((7, 12, 9, 8, 1), policy)
    assert [request.index for request in first.requests] == [1, 2]
    assert sorted(request.index for request in second.requests) == [0, 3, 4]


def test_fewer_requests_have_no_larger_prefill_micro_batches() -> None:
    """Of six, five at a time, are two micro-batches of three; the five that are left would be one of five."""
    lengths = (12,) * 11
    policy = policy_of(batch_size=6, micro_batch_size=6, num_micro_batches=1, prefill_micro_batch_size=5)
    full, rest = cut(lengths, policy)
    assert (full.policy.prefill_micro_batch_size, rest.policy.batch_size) == (5, 5)
    assert rest.policy.prefill_micro_batch_size == 4  # 12 * 4 = 48 tokens, as planned at worst: 72 / 2 + 12


def test_a_request_that_fits_no_empty_micro_batch_is_refused() -> None:
    with pytest.raises(InputError, match=r"request 1 has 17 tokens with what is generated, .* holds 16") as raised:
        cut((3, 12, 3), policy_of(micro_batch_token_budget=16))
    assert "hrm plan --prompts" in str(raised.value)


# Prompts into requests


def test_prompts_are_requests_in_their_order() -> None:
    scenario = scenario_of(FOLDER)
    assert make_requests([[1, 2], [3], [4, 5, 6]], scenario) == requests_of(2, 1, 3)


@pytest.mark.parametrize(
    ("prompts", "fact"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1, 96]], "prompt 0 has the token 96, tiny has 96"),
        ([[5], [4, -1]], "prompt 1 has the token -1"),
        ([[0] * 252], "prompt 0 has 252 tokens; with 5 generated ones that is more than the 256 positions of tiny"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_named(prompts: list[list[int]], fact: str) -> None:
    with pytest.raises(InputError) as raised:
        make_requests(prompts, scenario_of(FOLDER))
    assert fact in str(raised.value)
    assert make_requests([[0] * 251], scenario_of(FOLDER))  # 256 positions are enough for it
