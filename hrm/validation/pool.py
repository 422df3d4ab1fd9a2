"""Random policies that can be run: those far from the plan, and those that a given term binds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from hrm.errors import InputError
from hrm.model import ModelSpec
from hrm.points import RING_EXPERTS_LEAST
from hrm.policy import Policy

__all__ = ["draw_policies"]

SMALLEST, LARGEST = 0.125, 1.5
"""Batches that are drawn, in those of the plan."""


def draw_policies(
    chosen: Policy,
    model: ModelSpec,
    *,
    rows: int,
    seed: int,
    count: int,
    usable: Callable[[Policy], bool],
) -> Iterator[Policy]:
    """Draw so many policies and give those that are usable, in the order drawn.

    Parameters
    ----------
    chosen : Policy
        What batches and numbers of micro-batches are drawn around.
    model : ModelSpec
    rows : int
        Rows of an expert: r_w is a whole number of them.
    seed : int
        Same seed, same policies.
    count : int
        Policies drawn.
    usable : callable
        Whether one can be run; it may raise InputError for one that no schedule runs.
    """
    draw = random.Random(f"policies/{seed}")
    for _ in range(count):
        policy = _draw(chosen, model, rows, draw)
        try:
            if usable(policy):
                yield policy
        except InputError:
            continue


def _draw(chosen: Policy, model: ModelSpec, rows: int, draw: random.Random) -> Policy:
    n = max(1, round(chosen.batch_size * SMALLEST * (LARGEST / SMALLEST) ** draw.random()))
    most = min(n, 4 * chosen.num_micro_batches + 4)
    mu = -(-n // max(1, round(most ** draw.random())))
    n_ub = -(-n // mu)
    attention, ffn = draw.random() < 0.5, draw.random() < 0.8
    on_gpu = draw.choice((0.0, draw.random(), draw.random(), 1.0)) if ffn else 0.0
    whole = draw.choice((0, draw.randint(0, n // n_ub), n // n_ub)) if attention else 0
    rings = model.streamed_experts >= RING_EXPERTS_LEAST
    slots = draw.choice((1, 2, 2, "experts") if rings else (1, 2))
    policy = Policy(
        batch_size=n,
        micro_batch_size=mu,
        num_micro_batches=n_ub,
        prefill_micro_batch_size=max(1, n // draw.choice((1, 2, 4))),
        attention_on_gpu=attention,
        ffn_on_gpu=ffn,
        weights_on_gpu=round(on_gpu * rows) / rows,
        kv_on_gpu=whole * n_ub / n if whole else 0.0,
        weight_slots=slots,  # type: ignore[arg-type]
        ring_experts=draw.randint(2, model.streamed_experts) if slots == "experts" else 0,
        dense_weights_on_gpu=draw.random() < 0.7,
        embedding_on_gpu=draw.random() < 0.7,
        lm_head_on_gpu=draw.random() < 0.7,
        pin_weights=draw.random() < 0.5,
    )
    if model.tie_embeddings:  # one matrix, in one place
        policy = replace(policy, lm_head_on_gpu=policy.embedding_on_gpu)
    return policy
