"""What a plan did not foresee is refused, in the plan's own terms; what it did is there, and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from cases import (
    GENERATED,
    LENGTHS,
    LONGEST,
    Case,
    cases,
    layout_of,
    make_prompts,
    model_folder,
    open_tiny,
    policy_of,
    run_session,
    scenario_of,
)
from hypothesis import HealthCheck, given, settings

from hrm.errors import InputError
from hrm.graph import Hold
from hrm.units import GIB
from runtime.arena import SLACK_BYTES, Arena, Arenas
from runtime.arena_terms import make_arenas

FOLDER = model_folder("mixtral")

# One level


def test_a_buffer_counts_against_its_term() -> None:
    arena = Arena("GPU", {"KV cache": 10e6, "activations": 1e6}, 12e6)
    arena.reserve("KV cache", 4_000_000)
    arena.reserve("KV cache", 6_000_000)
    arena.reserve("activations", 0)
    assert (arena.reserved, arena.buffers) == ({"KV cache": 10_000_000}, {"KV cache": 2})
    with pytest.raises(InputError) as raised:
        arena.reserve("KV cache", 3 * SLACK_BYTES + 1)
    assert str(raised.value) == (
        "GPU arena: KV cache would take 0.0095 GiB of GPU memory, the plan foresees 0.0093 GiB (a plan for these "
        "requests (their number and lengths): hrm plan --prompts FILE)"
    )
    arena.release("KV cache", 4_000_000)
    arena.reserve("KV cache", 4_000_000)


def test_alignment_of_each_buffer_is_not_held_against_it() -> None:
    arena = Arena("CPU", {"expert weights": 1000.0}, 1000.0)
    arena.reserve("expert weights", 1000 + SLACK_BYTES)
    arena.reserve("expert weights", SLACK_BYTES)
    with pytest.raises(InputError, match="expert weights"):
        arena.reserve("expert weights", SLACK_BYTES + 1)


@pytest.mark.parametrize(
    ("term", "way_out"),
    [
        ("KV cache", "a plan for these requests"),
        ("activations", "a plan for these requests"),
        ("expert weights", "the plan was made for other formats or layers: hrm plan for this checkpoint"),
        ("non-expert weights", "the plan was made for other formats or layers"),
        ("embedding", "the plan was made for other formats or layers"),
    ],
)
def test_the_way_out_is_that_of_the_term(term: str, way_out: str) -> None:
    with pytest.raises(InputError) as raised:
        Arena("GPU", {term: 1e6}, 1e12).reserve(term, 2_000_000)
    assert raised.value.way_out.startswith(way_out)


def test_a_term_the_plan_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match=r"KV slots would take .* the plan foresees 0\.0000 GiB"):
        Arena("GPU", {}, 1e12).reserve("KV slots", SLACK_BYTES + 1)


def test_what_tasks_hold_is_counted_against_the_peak_of_the_level() -> None:
    arenas = Arenas({"gpu": Arena("GPU", {}, 3.0 * GIB)}, {"gpu": 1.0 * GIB})
    arenas.acquire([Hold("gpu", "activations", 2.0 * GIB)], "first")
    arenas.give_back([Hold("gpu", "activations", 1.0 * GIB)])
    arenas.acquire([Hold("gpu", "KV slots", 0.5 * GIB)], "second")
    assert (arenas.held, arenas.highest) == ({"gpu": 2.5 * GIB}, {"gpu": 3.0 * GIB})
    with pytest.raises(InputError) as raised:
        arenas.acquire([Hold("gpu", "KV slots", 0.75 * GIB)], "third")
    assert str(raised.value) == (
        "gpu arena: third takes 0.7500 GiB for KV slots: 3.2500 GiB would be held, the plan's peak is 3.0000 GiB"
    )


# Plans and what does not fit them


def longer(case: Case) -> Callable[[], object]:
    """Run prompts of 200 tokens under a plan for prompts of 1 to 12."""
    session = open_tiny(FOLDER, case)
    return lambda: run_session(session, make_prompts((200,) * 10))


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"kv_on_gpu": 0.0}, "cpu arena"),
        ({"kv_on_gpu": 1.0}, "gpu arena"),
        ({"kv_on_disk": 1.0}, "KV cache"),
    ],
)
def test_longer_prompts_than_planned_do_not_fit_the_cache(changes: dict[str, Any], where: str) -> None:
    """Without a budget of tokens that would refuse them first."""
    policy = policy_of(micro_batch_token_budget=0, **changes)
    with pytest.raises(InputError) as raised:
        longer(Case("cgopipe", policy))()
    assert "KV cache would take" in str(raised.value) and where in str(raised.value)
    assert "hrm plan --prompts FILE" in str(raised.value)


def test_longer_prompts_than_planned_do_not_fit_a_micro_batch() -> None:
    with pytest.raises(InputError, match=r"request 0 has 205 tokens .* a micro-batch of the plan holds 34"):
        longer(Case("cgopipe", policy_of()))()


def test_a_session_that_refused_runs_what_fits_afterwards() -> None:
    session = open_tiny(FOLDER, Case("cgopipe", policy_of(micro_batch_token_budget=0)))
    wanted = run_session(session).tokens
    with pytest.raises(InputError, match="KV cache"):
        run_session(session, make_prompts((200,) * 10))
    assert run_session(session).tokens == wanted


def test_shares_that_are_not_those_of_the_plan_do_not_fit() -> None:
    """More of the experts in memory than the level has in the plan: refused while loading, before anything runs."""
    arena = make_arenas(
        scenario_of(FOLDER), policy_of(weights_on_gpu=0.5), layout_of(FOLDER, Case("cgopipe", policy_of()))
    )["gpu"]
    planned = arena.planned["resident expert weights"]
    assert planned == 3 * (6 * 24 // 2) * (3 * 32 * 4)  # layers, rows, bytes of a row
    for _ in range(3):
        arena.reserve("resident expert weights", int(planned / 3))
    with pytest.raises(InputError, match="resident expert weights"):
        arena.reserve("resident expert weights", 4 * SLACK_BYTES + 1)


# What is reserved is what the plan counts

EXACT = (
    "KV cache",
    "KV slots",
    "KV landing buffers",
    "hidden states of all prompts",
    "hidden states of the batch",
    "QKV and hidden-state buffers",
    "expert input and output buffers",
)
"""Terms of requests, which hold what is reserved without any slack."""


KEPT = ("weight staging buffers", "QKV and hidden-state buffers", "expert input and output buffers")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_every_buffer_is_one_of_the_plans_and_the_cache_is_given_back(case: Case) -> None:
    session = open_tiny(FOLDER, case)
    loaded = {level: dict(arena.reserved) for level, arena in session.arenas.levels.items()}
    reserve = Arena.reserve

    def reserved(self: Arena, term: str, size: int) -> None:
        reserve(self, term, size)
        if term in EXACT:
            foreseen = self.planned.get(term, 0.0) + self.rounding.get(term, 0.0)
            assert self.reserved.get(term, 0) <= foreseen * (1 + 1e-9), (self.level, term)

    with mock.patch.object(Arena, "reserve", reserved):
        run_session(session)
    for level, arena in session.arenas.levels.items():
        known = {term for term, size in arena.planned.items() if size > 0}
        assert {term for term, size in arena.reserved.items() if size > 200} <= known  # the last norm is 128 byte
        for term in ("KV cache", "KV slots", "KV landing buffers"):
            assert arena.reserved.get(term, 0) == 0
        assert arena.buffers == {} or min(arena.buffers.values()) >= 0
        left = {term: size for term, size in arena.reserved.items() if size}
        for term in KEPT:  # made for the first batch
            left.pop(term, None)
        assert left == loaded[level]
    if session.disk is not None:
        session.disk.close()


def test_every_weight_is_somewhere_once() -> None:
    """All bytes of the model, whatever is where: resident and streamed, on GPU, CPU and disk."""
    layout = layout_of(FOLDER, Case("cgopipe", policy_of()))
    model = layout.scenario.model
    every = sum(model.layer_expert_bytes("fp32") for _ in range(3))
    for gpu, disk in ((0.0, 0.0), (0.5, 0.25), (1.0, 0.0), (0.0, 1.0), (0.1, 0.7)):
        store = open_tiny(FOLDER, Case("cgopipe", policy_of(weights_on_gpu=gpu, weights_on_disk=disk))).store
        found = 0
        for layer in range(3):
            for part in (store.resident[layer], store.host[layer]):
                found += 0 if part is None else part.numel() * part.element_size()
            found += store.cut.total("disk") * store.row_bytes
        assert found == every


def test_the_cache_has_room_for_every_token_of_a_batch() -> None:
    """Of six requests at a time the worst are the six with the most tokens in a row."""
    case = Case("cgopipe", policy_of())
    arena = make_arenas(scenario_of(FOLDER), case.policy, layout_of(FOLDER, case))["cpu"]
    worst = max(sum((LENGTHS * 2)[first : first + 6]) for first in range(len(LENGTHS))) + 6 * GENERATED
    token = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, fp32
    assert (arena.planned["KV cache"], arena.rounding) == (worst * token, {})
    shared = Case("cgopipe", policy_of(kv_on_gpu=0.25, kv_on_disk=0.5))
    levels = make_arenas(scenario_of(FOLDER), shared.policy, layout_of(FOLDER, shared)).levels
    planned = {level: levels[level].planned["KV cache"] for level in levels}
    assert planned == {"gpu": worst * token / 4, "cpu": worst * token / 4, "disk": worst * token / 2}
    whole, blocks = 3 * LONGEST * token, 3 * 3 * 2 * 4096  # a request of each micro-batch: the longest; ends of blocks
    assert "KV cache" not in levels["gpu"].rounding  # whole requests, rounded down
    assert levels["cpu"].rounding["KV cache"] == 2.5 * whole
    assert levels["disk"].rounding["KV cache"] == 2.5 * whole + blocks


def test_buffers_that_fit_one_by_one_are_refused_where_they_do_not_together() -> None:
    """Terms of two phases: each is in the plan, both at once are not."""
    arena = Arena("gpu", {"expert weight slots": 6e9, "KV slots": 6e9}, 8e9, {"KV slots": 1e9})
    arena.reserve("expert weight slots", 6_000_000_000)
    arena.reserve("KV slots", 3_000_000_000)
    with pytest.raises(InputError) as raised:
        arena.reserve("KV slots", 10**6)
    assert str(raised.value).startswith(
        "gpu arena: with 0.0009 GiB for KV slots, buffers would take 8.3828 GiB of gpu memory, the plan's peak is "
        "7.4506 GiB"
    )
    assert arena.reserved["KV slots"] == 3_000_000_000


@pytest.mark.parametrize(
    ("changes", "terms"),
    [
        ({}, {"hidden states of all prompts": 1000, "QKV and hidden-state buffers": 1}),
        ({"ffn_on_gpu": False}, {"expert input and output buffers": 1}),
        ({"kv_on_disk": 1.0}, {"KV landing buffers": 1}),
    ],
)
def test_every_buffer_in_cpu_memory_is_refused_where_the_plan_lacks_it(
    changes: dict[str, Any], terms: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.arena.SLACK_BYTES", 0)
    session = open_tiny(FOLDER, Case("cgopipe", policy_of(**changes)))
    arena = session.arenas["cpu"]
    for term in terms:
        planned = arena.planned
        arena.planned = planned | {term: planned[term] / 1e3}
        arena.rounding, kept = {}, arena.rounding
        with pytest.raises(InputError, match=f"{term} would take"):
            run_session(session)
        arena.planned, arena.rounding = planned, kept
    assert run_session(session).tokens


def test_a_later_batch_may_have_more_on_disk_than_the_first() -> None:
    """Its region of the scratch file grows; the weights before it stay as they are."""
    lengths = (1,) * 6 + (12,) * 6
    said = []
    for changes in ({}, {"kv_on_disk": 1.0, "weights_on_disk": 1.0}):
        session = open_tiny(FOLDER, Case("s4", policy_of("s4", **changes)), lengths=lengths)
        said.append([run_session(session, make_prompts(lengths)).tokens for _ in range(2)])
    assert said[0] == said[1] and said[0][0] == said[0][1]
