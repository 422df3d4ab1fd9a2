"""Prompts as requests, checked against the model and the plan."""

from __future__ import annotations

from collections.abc import Sequence

from hrm.batching import Request
from hrm.errors import InputError
from hrm.scenario import Scenario

__all__ = ["make_requests"]


def make_requests(prompts: Sequence[Sequence[int]], scenario: Scenario) -> list[Request]:
    """One request per prompt, in order.

    Raises
    ------
    InputError
        A prompt is empty, too long for the model, or has a token the model does not know.
    """
    model, length = scenario.model, scenario.workload.generation_length
    found = []
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(f"prompt {index} is empty", where="prompts", way_out="at least one token")
        if model.max_positions and len(prompt) + length > model.max_positions:
            raise InputError(
                f"prompt {index} has {len(prompt):,} tokens; with {length:,} generated ones that is more than the "
                f"{model.max_positions:,} positions of {model.name}",
                where="prompts",
                way_out="a shorter prompt, or fewer generated tokens",
            )
        worst = max(prompt), min(prompt)
        if worst[0] >= model.vocab_size or worst[1] < 0:
            bad = worst[0] if worst[0] >= model.vocab_size else worst[1]
            raise InputError(
                f"prompt {index} has the token {bad}, {model.name} has {model.vocab_size:,}", where="prompts"
            )
        found.append(Request(index=index, prompt_tokens=len(prompt), generation_tokens=length))
    return found
