"""Sampling: the distribution that was asked for, and the same token whatever batch a request is in."""

from __future__ import annotations

import math

import pytest
import torch

from hrm.errors import InputError
from runtime.jobs.sampling import Sampling, make_score, uniform

DRAWS = 20_000
PROBABILITIES = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])


def drawn(sampling: Sampling, logits: torch.Tensor = PROBABILITIES.log()) -> torch.Tensor:
    """How often each token is taken."""
    score = make_score(sampling, range(DRAWS))
    assert score is not None
    taken = score(logits.expand(DRAWS, -1), range(DRAWS), 3, 0).argmax(dim=-1)
    return torch.bincount(taken, minlength=logits.numel()) / DRAWS


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference in standard errors."""
    error = (wanted * (1 - wanted) / DRAWS).sqrt().clamp(min=1e-12)
    return float(((found - wanted).abs() / error).max())


def test_numbers_are_those_of_splitmix64() -> None:
    # The first outputs of the reference implementation for the seed 1234567 (https://prng.di.unimi.it/splitmix64.c)
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    found = uniform(torch.tensor([1234567]), 0, 5)[0].tolist()
    assert found == [((number >> 12) + 0.5) / 2**52 for number in known]


def test_a_piece_of_the_numbers_is_that_piece_of_all() -> None:
    keys = torch.tensor([5, -9])
    assert torch.equal(uniform(keys, 3, 4), uniform(keys, 0, 10)[:, 3:7])


def test_at_temperature_one_tokens_come_as_often_as_the_model_says() -> None:
    assert apart(drawn(Sampling(temperature=1.0)), PROBABILITIES) < 4


def test_at_half_the_temperature_probabilities_are_squared() -> None:
    wanted = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    assert apart(drawn(Sampling(temperature=0.5)), wanted) < 4


@pytest.mark.parametrize(("top_p", "kept"), [(0.45, 1), (0.5, 1), (0.51, 2), (0.84, 3), (0.86, 4), (1.0, 5)])
def test_a_nucleus_is_the_fewest_tokens_that_reach_it(top_p: float, kept: int) -> None:
    order = torch.tensor([3, 0, 4, 1, 2])  # not sorted by chance
    wanted = torch.zeros(5)
    wanted[:kept] = PROBABILITIES[:kept] / PROBABILITIES[:kept].sum()
    found = drawn(Sampling(temperature=1.0, top_p=top_p), PROBABILITIES[order].log())
    assert (found > 0).sum() == kept and apart(found, wanted[order]) < 4


def test_a_draw_depends_on_seed_id_and_place_only() -> None:
    logits = torch.randn((6, 50), generator=torch.Generator().manual_seed(1))
    score = make_score(Sampling(temperature=1.0, seed=4), ["a", "b", "c", 1, 2, 3])
    assert score is not None
    whole = score(logits, [0, 1, 2, 3, 4, 5], 2, 0)
    some = score(logits[[4, 1]], [4, 1], 2, 0)
    assert torch.equal(some, whole[[4, 1]])
    pieces = [score(logits[:, :20], range(6), 2, 0), score(logits[:, 20:], range(6), 2, 20)]
    assert torch.equal(torch.cat(pieces, dim=-1), whole)
    assert not torch.equal(score(logits, range(6), 3, 0), whole)
    other = make_score(Sampling(temperature=1.0, seed=5), ["a", "b", "c", 1, 2, 3])
    assert other is not None and not torch.equal(other(logits, range(6), 2, 0), whole)


def test_many_rows_are_looked_at_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn((5, 30), generator=torch.Generator().manual_seed(2))
    score = make_score(Sampling(temperature=0.7, top_p=0.9), range(5))
    assert score is not None
    whole = score(logits, range(5), 0, 0)
    monkeypatch.setattr("runtime.jobs.sampling.CHUNK_VALUES", 40)
    assert torch.equal(score(logits, range(5), 0, 0), whole)


def test_greedy_needs_no_score() -> None:
    assert make_score(Sampling(), ["a"]) is None


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": math.nan}, "--temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "--top-p"),
        ({"temperature": 1.0, "top_p": 1.1}, "--top-p"),
        ({"top_p": 0.9}, "--top-p"),
    ],
)
def test_numbers_out_of_range_are_refused(values: dict[str, float], where: str) -> None:
    with pytest.raises(InputError, match=where):
        Sampling(**values)  # type: ignore[arg-type]
