"""Algorithm 2, corrected: nothing lost, nothing over its limit, balanced, and nobody waits for ever."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrm.batching import Batch, Request, assign_batch, batch_requests, fill_micro_batches
from hrm.errors import InputError


def make_requests(*lengths: int, generation: int = 0) -> list[Request]:
    return [
        Request(index=index, prompt_tokens=length, generation_tokens=generation) for index, length in enumerate(lengths)
    ]


def lengths_of(batch: Batch) -> list[list[int]]:
    return [[request.prompt_tokens for request in micro_batch.requests] for micro_batch in batch.micro_batches]


def smallest_largest_sum(tokens: list[int], num_micro_batches: int, micro_batch_size: int) -> int:
    """Try every assignment."""
    best = sum(tokens)
    for slots in itertools.product(range(num_micro_batches), repeat=len(tokens)):
        if max((slots.count(slot) for slot in slots), default=0) > micro_batch_size:
            continue
        loads = [0] * num_micro_batches
        for size, slot in zip(tokens, slots, strict=True):
            loads[slot] += size
        best = min(best, max(loads))
    return best


ragged = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), max_size=40).map(
    lambda pairs: [
        Request(index=index, prompt_tokens=prompt, generation_tokens=generation)
        for index, (prompt, generation) in enumerate(pairs)
    ]
)
few = ragged.map(lambda requests: requests[:7])


def test_longest_goes_first_and_each_to_the_emptiest_micro_batch() -> None:
    batch, deferred, rejected = assign_batch(
        make_requests(2, 9, 4, 7, 1, 3), num_micro_batches=2, micro_batch_size=3, token_budget=100
    )
    # 9 | 7, 7+4 = 11, 9+3 = 12, 11+2 = 13 (closed at three requests), 12+1 = 13
    assert lengths_of(batch) == [[9, 3, 1], [7, 4, 2]]
    assert (deferred, rejected) == ((), ())


def test_generated_tokens_count_in_balance_and_budget() -> None:
    requests = [
        Request(index=0, prompt_tokens=10, generation_tokens=1),
        Request(index=1, prompt_tokens=5, generation_tokens=20),
        Request(index=2, prompt_tokens=9, generation_tokens=1),
        Request(index=3, prompt_tokens=8, generation_tokens=18),
    ]
    batch, deferred, rejected = assign_batch(requests, num_micro_batches=2, micro_batch_size=4, token_budget=25)
    assert [[request.index for request in micro.requests] for micro in batch.micro_batches] == [[1], [0, 2]]
    assert [micro.tokens for micro in batch.micro_batches] == [25, 21]
    assert [micro.prompt_tokens for micro in batch.micro_batches] == [5, 19]
    assert deferred == ()
    assert rejected == (requests[3],)


def test_part_filled_micro_batches_run_and_empty_ones_do_not_exist() -> None:
    batch, _, _ = assign_batch(make_requests(5, 5, 5), num_micro_batches=4, micro_batch_size=10, token_budget=100)
    assert lengths_of(batch) == [[5], [5], [5]]


def test_requests_left_when_all_micro_batches_are_closed_are_deferred() -> None:
    requests = make_requests(1, 2, 3, 4, 5)
    batch, deferred, rejected = assign_batch(requests, num_micro_batches=2, micro_batch_size=2, token_budget=100)
    assert lengths_of(batch) == [[5, 2], [4, 3]]
    assert (deferred, rejected) == ((requests[0],), ())


def test_shorter_requests_still_fit_after_a_longer_one_was_deferred() -> None:
    requests = make_requests(6, 5, 4)
    batch, deferred, _ = assign_batch(requests, num_micro_batches=1, micro_batch_size=3, token_budget=10)
    assert lengths_of(batch) == [[6, 4]]
    assert deferred == (requests[1],)


def test_batches_follow_the_input_order() -> None:
    batching = batch_requests(
        make_requests(1, 2, 3, 40, 50, 60, 7),
        batch_size=3,
        num_micro_batches=3,
        micro_batch_size=1,
        token_budget=100,
    )
    assert [lengths_of(batch) for batch in batching.batches] == [[[3], [2], [1]], [[60], [50], [40]], [[7]]]


def test_a_deferred_request_runs_before_longer_newcomers() -> None:
    batching = batch_requests(
        make_requests(8, 3, 8, 8, 8), batch_size=2, num_micro_batches=1, micro_batch_size=2, token_budget=10
    )
    assert [lengths_of(batch) for batch in batching.batches] == [[[8]], [[3]], [[8]], [[8]], [[8]]]


def test_a_request_over_the_budget_is_reported_and_takes_no_place() -> None:
    requests = make_requests(5, 11, 6)
    batching = batch_requests(requests, batch_size=2, num_micro_batches=2, micro_batch_size=1, token_budget=10)
    assert [lengths_of(batch) for batch in batching.batches] == [[[6], [5]]]
    assert batching.rejected == (requests[1],)


def test_no_requests_make_no_batches() -> None:
    batching = batch_requests([], batch_size=1, num_micro_batches=1, micro_batch_size=1, token_budget=1)
    assert (batching.batches, batching.rejected) == ((), ())


def test_exchanges_restore_the_balance_that_waiting_requests_upset() -> None:
    # In placing order alone, the second would close at five requests of 1 and the first would take all of 10.
    requests = make_requests(10, 1, 1, 1, 1, 1, 10, 10, 10, 10)
    batch, deferred, _ = assign_batch(
        requests, num_micro_batches=2, micro_batch_size=5, token_budget=100, num_waiting=6
    )
    sums = sorted(micro.tokens for micro in batch.micro_batches)
    assert sums == [23, 32]
    assert deferred == ()


@given(ragged, st.integers(1, 45), st.integers(1, 5), st.integers(1, 9), st.integers(1, 300))
def test_every_request_runs_once_or_is_rejected_and_no_limit_is_passed(
    requests: list[Request], batch_size: int, num_micro_batches: int, micro_batch_size: int, token_budget: int
) -> None:
    batching = batch_requests(
        requests,
        batch_size=batch_size,
        num_micro_batches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        token_budget=token_budget,
    )
    run = [request.index for batch in batching.batches for micro in batch.micro_batches for request in micro.requests]
    assert sorted(run + [request.index for request in batching.rejected]) == list(range(len(requests)))
    assert batching.rejected == tuple(request for request in requests if request.tokens > token_budget)
    for batch in batching.batches:
        assert 1 <= len(batch.micro_batches) <= num_micro_batches
        assert batch.size <= batch_size
        assert all(1 <= micro.size <= micro_batch_size for micro in batch.micro_batches)
        assert all(micro.tokens <= token_budget for micro in batch.micro_batches)


@given(ragged, st.integers(1, 4), st.integers(1, 9), st.integers(1, 200), st.integers(0, 40))
def test_micro_batches_differ_by_at_most_the_longest_request_whatever_waited(
    requests: list[Request], num_micro_batches: int, micro_batch_size: int, token_budget: int, num_waiting: int
) -> None:
    batch, _, _ = assign_batch(
        requests,
        num_micro_batches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        token_budget=token_budget,
        num_waiting=num_waiting,
    )
    sums = [micro.tokens for micro in batch.micro_batches] + [0] * (num_micro_batches - len(batch.micro_batches))
    longest = max((request.tokens for micro in batch.micro_batches for request in micro.requests), default=0)
    assert max(sums) - min(sums) <= longest


@given(few, st.integers(1, 3), st.integers(1, 7), st.integers(1, 200), st.integers(0, 7))
def test_the_largest_sum_is_within_one_request_of_the_smallest_possible(
    requests: list[Request], num_micro_batches: int, micro_batch_size: int, token_budget: int, num_waiting: int
) -> None:
    batch, _, _ = assign_batch(
        requests,
        num_micro_batches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        token_budget=token_budget,
        num_waiting=num_waiting,
    )
    tokens = [request.tokens for micro in batch.micro_batches for request in micro.requests]
    best = smallest_largest_sum(tokens, num_micro_batches, micro_batch_size)
    largest = max((micro.tokens for micro in batch.micro_batches), default=0)
    assert largest <= best + max(tokens, default=0)


@given(ragged, st.integers(1, 5), st.integers(1, 9))
def test_placing_longest_first_alone_is_balanced(
    requests: list[Request], num_micro_batches: int, micro_batch_size: int
) -> None:
    tokens = sorted((request.tokens for request in requests), reverse=True)
    slots = fill_micro_batches(tokens, num_micro_batches=num_micro_batches, micro_batch_size=micro_batch_size)
    sums = [sum(tokens[position] for position in slot) for slot in slots]
    assert max(sums) - min(sums) <= max(tokens, default=0)


@given(few, st.integers(1, 3), st.integers(1, 4))
def test_nothing_is_deferred_where_places_and_budget_suffice(
    requests: list[Request], num_micro_batches: int, spare: int
) -> None:
    _, deferred, rejected = assign_batch(
        requests,
        num_micro_batches=num_micro_batches,
        micro_batch_size=len(requests) // num_micro_batches + spare,
        token_budget=1 + sum(request.tokens for request in requests),
    )
    assert (deferred, rejected) == ((), ())


@given(ragged.filter(bool), st.integers(1, 4), st.integers(1, 9), st.integers(0, 60), st.integers(1, 40))
def test_the_request_that_waited_longest_always_runs(
    requests: list[Request], num_micro_batches: int, micro_batch_size: int, spare: int, num_waiting: int
) -> None:
    batch, deferred, _ = assign_batch(
        requests,
        num_micro_batches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        token_budget=max(request.tokens for request in requests) + spare,
        num_waiting=num_waiting,
    )
    assert requests[0] in [request for micro in batch.micro_batches for request in micro.requests]
    assert list(deferred) == sorted(deferred, key=lambda request: request.index)


@pytest.mark.parametrize("name", ["batch_size", "num_micro_batches", "micro_batch_size", "token_budget"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, float("nan")])
def test_a_count_that_is_no_positive_whole_number_is_named(name: str, value: object) -> None:
    counts = {"batch_size": 1, "num_micro_batches": 1, "micro_batch_size": 1, "token_budget": 1, name: value}
    with pytest.raises(InputError, match=name):
        batch_requests(make_requests(1), **counts)  # type: ignore[arg-type]
