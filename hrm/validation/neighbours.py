"""One step away from a policy: the smallest change of one variable that would be seen above the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hrm.policy import Policy

__all__ = ["MOST_STEPS", "NOISES", "VARIABLES", "one_step", "steps_of"]

NOISES = 2.0
"""A step moves the predicted latency by at least so many times the noise."""

MOST_STEPS = 256
"""Values of a variable that are looked at in a direction: of more, every so many-th."""

VARIABLES = ("mu", "N", "r_w")

LARGEST = 2
"""A batch grows at most so many times."""


def steps_of(policy: Policy, variable: str, direction: int, *, rows: int) -> Iterator[Policy]:
    """The policy with other values of one variable, the nearest first.

    Parameters
    ----------
    policy : Policy
    variable : {"mu", "N", "r_w"}
        With mu the batch stays and the number of micro-batches follows; with N mu stays.
    direction : {1, -1}
    rows : int
        Rows of an expert: r_w changes by whole ones.
    """
    n, mu = policy.batch_size, policy.micro_batch_size
    if variable == "mu":
        # Of all sizes that make as many micro-batches only the smallest fills them.
        sizes = {-(-n // -(-n // size)) for size in range(1, n + 1)}
        yield from (_with_batch(policy, n, size) for size in _beyond(sorted(sizes), mu, direction))
    elif variable == "N":
        yield from (_with_batch(policy, size, mu) for size in _beyond(range(1, LARGEST * n + 1), n, direction))
    elif policy.ffn_on_gpu:
        at = round(policy.weights_on_gpu * rows)
        most = math.floor((1.0 - policy.weights_on_disk) * rows + 1e-9)
        for number in _beyond(range(most + 1), at, direction):
            yield replace(policy, weights_on_gpu=number / rows)


def _beyond(values: Sequence[int], start: int, direction: int) -> list[int]:
    """Values on one side of one, the nearest first, thinned out to `MOST_STEPS`."""
    found = [value for value in values if (value - start) * direction > 0]
    found.sort(key=lambda value: abs(value - start))
    every = -(-len(found) // MOST_STEPS) or 1
    return found[::every]


def _with_batch(policy: Policy, size: int, micro: int) -> Policy:
    micro = min(micro, size)
    return replace(
        policy,
        batch_size=size,
        micro_batch_size=micro,
        num_micro_batches=-(-size // micro),
        prefill_micro_batch_size=min(policy.prefill_micro_batch_size, size),
    )


def one_step(
    policy: Policy,
    variable: str,
    direction: int,
    *,
    rows: int,
    noise: float,
    latency: Callable[[Policy], float],
    why_not: Callable[[Policy], str],
) -> tuple[Policy | None, str]:
    """The nearest policy in a direction whose predicted latency differs by at least twice the noise.

    Parameters
    ----------
    noise : float
        Of a measured latency [share].
    latency : callable
        Predicted seconds per layer [s].
    why_not : callable
        Why a policy cannot be run, else empty.

    Returns
    -------
    policy : Policy or None
    why : str
        Why there is none.
    """
    base = latency(policy)
    moved, seen, refused = 0.0, 0, ""
    for step in steps_of(policy, variable, direction, rows=rows):
        seen += 1
        change = abs(latency(step) / base - 1.0)
        if change < NOISES * noise:
            moved = max(moved, change)
            continue
        why = why_not(step)
        if not why:
            return step, ""
        refused = why
    side = "larger" if direction > 0 else "smaller"
    if not seen:
        return None, f"there is no {side} {variable}"
    if refused:
        return None, f"every {side} {variable} that would be seen above the noise: {refused}"
    return None, (
        f"no {side} {variable} is predicted to move the latency by {NOISES * noise:.1%}, twice the noise "
        f"({moved:.1%} at most)"
    )
