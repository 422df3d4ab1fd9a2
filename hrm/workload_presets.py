"""The workloads of the MoE-Lightning paper: what is published of them, and what is assumed.

Reference: Cao et al., ASPLOS 2025, arXiv 2411.11217, Table 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hrm.workload_files import read_prompt_lengths

__all__ = ["PUBLISHED", "PublishedWorkload", "fold_name", "read_published_lengths"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWorkload:
    """What is published of a workload.

    Attributes
    ----------
    generation_length : int
        Tokens generated per request where nothing else is asked for [tokens].
    origin, note : str
        Source, and what is assumed.
    spread : tuple of int, optional
        Shortest and longest prompt [tokens] and how many lengths between them; None reads the bundled file.
    """

    generation_length: int
    origin: str
    note: str
    spread: tuple[int, int, int] | None = None


_ASSUMED_SHAPE = "Only mean and maximum are published: an even spread around that mean up to that maximum is assumed."

PUBLISHED = {
    "mtbench": PublishedWorkload(
        generation_length=128,
        origin="80 first turns of MTBench, Mixtral tokenizer: public artifact of MoE-Lightning (arXiv 2411.11217)",
        note="Mean 76.1 tokens (Table 3 prints 77), maximum 418. Listed shortest first, so the worst of all runs of "
        "consecutive requests, which the memory is sized for, is the longest prompts together.",
    ),
    "synthetic-reasoning": PublishedWorkload(
        generation_length=50,
        origin="HELM synthetic reasoning: mean 242, maximum 256 tokens (arXiv 2411.11217, Table 3)",
        note=_ASSUMED_SHAPE,
        spread=(228, 256, 15),
    ),
    "summarization": PublishedWorkload(
        generation_length=64,
        origin="HELM summarization: mean 1693, maximum 1984 tokens (arXiv 2411.11217, Table 3)",
        note=_ASSUMED_SHAPE,
        spread=(1402, 1984, 7),
    ),
}


@lru_cache
def read_published_lengths(name: str) -> tuple[int, ...]:
    """One period of prompt lengths of a published workload [tokens]."""
    spread = PUBLISHED[name].spread
    if spread is None:
        return read_prompt_lengths(Path(__file__).with_name("data") / "workloads" / f"{name}.csv")
    shortest, longest, count = spread
    rising = [shortest + index * (longest - shortest) // (count - 1) for index in range(count)]
    # Short and long in turn, so that every few consecutive requests come near the mean.
    return tuple(rising[index // 2] if index % 2 == 0 else rising[-1 - index // 2] for index in range(count))


def fold_name(name: str) -> str:
    """Drop case, ``-`` and ``_``, which do not tell workloads apart."""
    return name.lower().replace("-", "").replace("_", "")
