"""Which token comes next: the likeliest, or one drawn at a temperature, from a nucleus.

What is drawn depends on the seed, on the id of the request and on the place of the token, and on nothing else: not on
the batch a request is in, nor on how often a job was started. A draw is the Gumbel-max trick (the largest of
logit/T - log E with E exponential is a sample of the softmax, https://arxiv.org/abs/1611.01144), with random numbers
from a counter (SplitMix64, https://doi.org/10.1145/2714064.2660195) that every device computes alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hrm.errors import InputError

__all__ = ["Sampling", "make_score", "uniform"]

CHUNK_VALUES = 2**20
"""Logits that are looked at together: what is made of them on the way takes some 50 byte each."""

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
SECOND = -7723592293110705685  # 0x94D049BB133111EB


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen: greedily at temperature 0, else from the smallest set of tokens that has `top_p`.

    Raises
    ------
    InputError
        A number out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise InputError(
                f"{self.temperature} is no temperature", where="--temperature", way_out="0 (greedy) to 100"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"{self.top_p} is no probability", where="--top-p", way_out="above 0, at most 1")
        if self.top_p < 1.0 and self.temperature == 0.0:
            raise InputError(
                "the likeliest token is in every nucleus", where="--top-p", way_out="a --temperature above 0, e.g. 1"
            )

    @property
    def whole_vocabulary(self) -> bool:
        """Whether a choice needs the logits of all tokens together."""
        return self.top_p < 1.0


def _key(seed: int, name: str | int, column: int) -> int:
    """Where the numbers of one token of one request begin, a signed 64-bit number."""
    text = json.dumps([seed, name, column]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _shifted(values: Tensor, count: int) -> Tensor:
    """Shifted to the right, zeros coming in."""
    return (values >> count) & ((1 << (64 - count)) - 1)


def uniform(keys: Tensor, first: int, count: int) -> Tensor:
    """Numbers `first` to `first + count` of every key, float64 [B, count], above 0 and below 1.

    Parameters
    ----------
    keys : Tensor
        int64 [B].
    """
    place = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=keys.device)
    mixed = keys.unsqueeze(1) + place * GOLDEN  # products wrap around, as they should
    mixed = (mixed ^ _shifted(mixed, 30)) * FIRST
    mixed = (mixed ^ _shifted(mixed, 27)) * SECOND
    mixed = mixed ^ _shifted(mixed, 31)
    return (_shifted(mixed, 12).double() + 0.5) * 2.0**-52


def make_score(
    sampling: Sampling, names: Sequence[str | int]
) -> Callable[[Tensor, Sequence[int], int, int], Tensor] | None:
    """The score whose largest value is the token to take; None where that is the logit itself.

    Parameters
    ----------
    names : sequence of str or int
        Id of every request, by index.
    """
    if sampling.temperature == 0.0:
        return None

    def score(logits: Tensor, requests: Sequence[int], column: int, first: int) -> Tensor:
        found = torch.empty_like(logits)
        wide = logits.shape[1]
        rows = max(1, CHUNK_VALUES // wide)
        every = [_key(sampling.seed, names[index], column) for index in requests]
        keys = torch.tensor(every, dtype=torch.int64).to(logits.device)
        for start in range(0, logits.shape[0], rows):
            some = slice(start, start + rows)
            scaled = logits[some].double() / sampling.temperature
            if sampling.top_p < 1.0:
                scaled = _nucleus(scaled, sampling.top_p)
            found[some] = scaled - torch.log(-torch.log(uniform(keys[some], first, wide)))
        return found

    return score


def _nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """Minus infinity for what is not among the likeliest tokens that have `top_p` together."""
    ordered, places = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    beyond = ordered.cumsum(dim=-1) - ordered >= top_p  # the first token of all is always in
    return scaled.masked_fill(beyond.gather(-1, places.argsort(dim=-1)), -torch.inf)
