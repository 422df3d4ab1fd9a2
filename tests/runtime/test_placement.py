"""Every request has one place in decode, one in prefill, and its KV cache on one level, within the plan's shares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import GENERATED, Case, cases, make_prompts, model_folder, open_tiny, policy_of, scenario_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hrm.batching import Request
from hrm.layout import Layout
from hrm.policy import Policy
from runtime.batches import cut_batches
from runtime.placement import Placement, most_on_disk, place_batch, rounding_requests
from runtime.run_state import RunState

FOLDER = model_folder("mixtral")
TIERS = ("gpu", "cpu", "disk")
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=20)


def placements(lengths: list[int], policy: Policy) -> list[tuple[Placement, Policy]]:
    requests = [
        Request(index=index, prompt_tokens=length, generation_tokens=GENERATED) for index, length in enumerate(lengths)
    ]
    scenario = scenario_of(FOLDER, lengths=lengths)
    found = cut_batches(requests, replace(policy, micro_batch_token_budget=0), scenario)
    return [(place_batch(batch.micro_batches, batch.policy), batch.policy) for batch in found]


@settings(max_examples=150, deadline=None)
@given(LENGTHS, cases())
def test_every_request_is_once_in_decode_once_in_prefill_and_on_one_level(lengths: list[int], case: Case) -> None:
    seen = []
    for placement, policy in placements(lengths, case.policy):
        seen += [request.index for request in placement.requests]
        rows = list(range(placement.size))
        assert [row for j in range(len(placement.decode)) for row in placement.rows("decode", j)] == rows
        assert sorted(row for part in placement.prefill for row in part) == rows
        assert [row for part in placement.decode for tier in TIERS for row in part.tier_rows(tier)] == rows
        for part in placement.decode:
            for tier in TIERS:
                assert all(placement.tier(row) == tier for row in part.tier_rows(tier))
        assert len(placement.prefill) == -(-placement.size // policy.prefill_micro_batch_size)
        assert all(0 < len(part) <= policy.prefill_micro_batch_size for part in placement.prefill)
    assert sorted(seen) == list(range(len(lengths)))


@settings(max_examples=150, deadline=None)
@given(LENGTHS, cases())
def test_shares_of_the_cache_are_whole_requests_the_gpus_rounded_down(lengths: list[int], case: Case) -> None:
    for placement, policy in placements(lengths, case.policy):
        for part in placement.decode:
            mean = policy.batch_size / policy.num_micro_batches
            assert part.on_gpu == int(policy.kv_on_gpu * min(mean, part.size) + 1e-6) or policy.kv_on_gpu >= 1
            assert part.on_gpu == part.size or policy.kv_on_gpu < 1
            if policy.kv_on_disk > 0 and policy.kv_on_gpu + policy.kv_on_disk >= 1:
                assert part.on_cpu == 0
            if policy.kv_on_disk == 0 or policy.everything_on_cpu:
                assert part.on_disk == 0
            assert abs(part.on_disk - policy.kv_on_disk * part.size) <= 0.5 or part.on_cpu == 0
            assert part.on_disk <= most_on_disk(policy)


SHARES = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda six: (six[0] / 6, min(six[1], 6 - six[0]) / 6))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 240), min_size=1, max_size=18), st.integers(1, 7), SHARES)
def test_a_level_holds_no_more_tokens_than_its_share_and_rounding_adds(
    lengths: list[int], size: int, shares: tuple[float, float]
) -> None:
    """On the GPU nothing is added, wherever long and short requests are."""
    (gpu, disk), count = shares, len(lengths)
    sizes = {"micro_batch_size": min(size, count), "num_micro_batches": -(-count // min(size, count))}
    asked = policy_of(**sizes, batch_size=count, kv_on_gpu=gpu, kv_on_disk=disk)
    for placement, policy in placements(lengths, asked):
        tokens = dict.fromkeys(TIERS, 0)
        for row, request in enumerate(placement.requests):
            tokens[placement.tier(row)] += request.tokens
        every, longest = sum(tokens.values()), max(request.tokens for request in placement.requests)
        added = rounding_requests(policy)
        assert added["gpu"] == 0.0
        for part in placement.decode:
            whole = [placement.requests[row].tokens for row in range(part.first, part.last)]
            off = sum(whole[part.on_gpu :])
            assert off <= (1.0 - gpu) * sum(whole) + added["slot"] * max(whole) + 1e-6
        for tier, share in (("gpu", gpu), ("disk", disk), ("cpu", 1.0 - gpu - disk)):
            assert tokens[tier] <= share * every + added[tier] * policy.num_micro_batches * longest + 1e-6, tier


def test_with_one_level_off_the_gpu_nothing_is_rounded() -> None:
    assert rounding_requests(policy_of()) == {"gpu": 0.0, "slot": 0.0, "cpu": 0.0, "disk": 0.0}
    assert rounding_requests(policy_of(kv_on_disk=1.0)) == {"gpu": 0.0, "slot": 0.0, "cpu": 0.0, "disk": 0.0}


def test_a_micro_batch_by_hand() -> None:
    """Six requests, longest first 9 8 7 6 5 4: of three pairs the shorter on the GPU; of 9 7 5 two on disk."""
    policy = policy_of(micro_batch_size=6, num_micro_batches=1, kv_on_gpu=0.5, kv_on_disk=0.25)
    ((placement, _),) = placements([4, 9, 6, 7, 8, 5], policy)
    lengths = {
        tier: [placement.requests[row].prompt_tokens for row in placement.decode[0].tier_rows(tier)] for tier in TIERS
    }
    assert lengths == {"gpu": [8, 6, 4], "cpu": [5], "disk": [9, 7]}
    assert placement.prefill == ((1, 3, 4), (0, 2, 5))  # prompts of 6 5 9 and 8 4 7: 20 and 19 tokens


# The pools that hold it


def prepared(case: Case) -> RunState:
    session = open_tiny(FOLDER, case)
    scenario = session.scenario
    prompts = make_prompts()
    requests = [
        Request(index=index, prompt_tokens=len(prompt), generation_tokens=GENERATED)
        for index, prompt in enumerate(prompts)
    ]
    batch = next(iter(cut_batches(requests, case.policy, scenario)))
    return session.prepare(Layout(scenario, batch.policy), place_batch(batch.micro_batches, batch.policy), prompts)


@settings(max_examples=25, deadline=None)
@given(cases())
def test_every_token_of_a_request_has_rows_of_its_own_in_one_pool(case: Case) -> None:
    state = prepared(case)
    for tier, pool in state.cache.pools.items():
        taken: list[int] = []
        for row in pool.rows:
            assert state.placement.tier(row) == tier
            tokens = state.placement.requests[row].tokens
            if tier == "disk":  # whole blocks of 4096 byte, of 64 byte a row
                assert pool.capacity[row] % 64 == 0 <= pool.capacity[row] - tokens < 64
            else:
                assert pool.capacity[row] == tokens
            taken += range(pool.first[row], pool.first[row] + pool.capacity[row])
        assert taken == list(range(pool.tokens))
        if pool.memory is not None:
            assert pool.memory.shape == (3, 2, pool.tokens, 2, 8)
    assert sorted(row for pool in state.cache.pools.values() for row in pool.rows) == list(range(state.placement.size))


@pytest.mark.parametrize("tier", TIERS)
def test_an_index_says_where_a_micro_batch_lies_on_a_level(tier: str) -> None:
    state = prepared(
        Case("cgopipe", policy_of(micro_batch_size=4, num_micro_batches=2, kv_on_gpu=0.25, kv_on_disk=0.5))
    )
    for j, part in enumerate(state.placement.decode):
        index, rows = state.index(j, tier), part.tier_rows(tier)
        assert (len(index), index.part) == (len(rows), slice(rows.start - part.first, rows.stop - part.first))
        assert index.first.tolist() == [state.cache.pools[tier].first[row] for row in rows]
        lengths = [state.placement.requests[row].prompt_tokens for row in rows]
        assert (index.prompts.tolist(), index.longest) == (lengths, max(lengths, default=0))
        assert torch.equal(index.first, index.first_gpu) and torch.equal(index.prompts, index.prompts_gpu)
