"""Pins: variables of the search that a person gives a value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hrm.errors import InputError
from hrm.policy import WeightSlots

__all__ = ["MAX_COUNT", "Pins", "option_name"]

MAX_COUNT = 10**9
"""A larger number of requests or micro-batches is taken for a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Every field is None where the search is free; names and meanings are those of `Policy`."""

    batch_size: int | None = None
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    prefill_micro_batch_size: int | None = None
    attention_on_gpu: bool | None = None
    ffn_on_gpu: bool | None = None
    weights_on_gpu: float | None = None
    weights_on_disk: float | None = None
    kv_on_gpu: float | None = None
    kv_on_disk: float | None = None
    weight_slots: WeightSlots | None = None
    dense_weights_on_gpu: bool | None = None
    embedding_on_gpu: bool | None = None
    lm_head_on_gpu: bool | None = None
    pin_weights: bool | None = None

    def __post_init__(self) -> None:
        for key in ("batch_size", "micro_batch_size", "num_micro_batches", "prefill_micro_batch_size"):
            value = getattr(self, key)
            if value is not None and not 1 <= value <= MAX_COUNT:
                accepted = f"a whole number from 1 to {MAX_COUNT:,}"
                raise InputError(f"{value} is out of range", where=option_name(key), way_out=accepted)
        for key in ("weights_on_gpu", "weights_on_disk", "kv_on_gpu", "kv_on_disk"):
            value = getattr(self, key)
            if value is not None and not 0.0 <= value <= 1.0:
                raise InputError(f"{value} is not a share", where=option_name(key), way_out="from 0 to 1")
        for level in ("weights", "kv"):
            shares = [getattr(self, f"{level}_on_{place}") for place in ("gpu", "disk")]
            if None not in shares and sum(shares) > 1.0:
                raise InputError(
                    f"{shares[0]} + {shares[1]} is more than the whole",
                    where=f"--{level}-on-gpu, --{level}-on-disk",
                    way_out="shares that add up to at most 1; the rest stays in CPU memory",
                )
        if self.batch_size and self.micro_batch_size and self.num_micro_batches:
            low = self.micro_batch_size * (self.num_micro_batches - 1)
            high = self.micro_batch_size * self.num_micro_batches
            if not low < self.batch_size <= high:
                raise InputError(
                    f"{self.batch_size} requests do not make {self.num_micro_batches} micro-batches of "
                    f"{self.micro_batch_size}",
                    where="--batch",
                    way_out=f"between {low + 1} and {high}",
                )

    def check_counts(self, requests: int) -> None:
        """Refuse counts that no batch of at most `requests` requests can have, rather than change them silently.

        Raises
        ------
        InputError
            A pinned count is more than the requests or than the batch, or does not divide it as asked.
        """
        for key in ("batch_size", "micro_batch_size", "num_micro_batches", "prefill_micro_batch_size"):
            value, batch = getattr(self, key), self.batch_size
            if value is not None and value > requests:
                way_out = "at most as many, or more --requests"
                raise InputError(
                    f"{value} is more than the {_requests(requests)}", where=option_name(key), way_out=way_out
                )
            if value is not None and batch is not None and value > batch:
                way_out = f"at most {batch}, or a larger --batch"
                raise InputError(f"{value} is more than the batch of {batch}", where=option_name(key), way_out=way_out)
        mu, n_ub = self.micro_batch_size, self.num_micro_batches
        if mu is not None and n_ub is not None and mu * (n_ub - 1) >= requests:
            raise InputError(
                f"{n_ub} micro-batches of {mu} are more than the {_requests(requests)}",
                where="--num-micro-batches",
                way_out=f"at most {-(-requests // mu)}, or more --requests",
            )
        if self.batch_size is not None and n_ub is not None and mu is None:
            made = -(-self.batch_size // -(-self.batch_size // n_ub))
            if made != n_ub:
                raise InputError(
                    f"{_requests(self.batch_size)} do not make {n_ub} micro-batches, all but the last of one size",
                    where="--num-micro-batches",
                    way_out=f"{made}, or another --batch",
                )

    @property
    def given(self) -> dict[str, Any]:
        """The pinned variables and their values."""
        return {
            field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) is not None
        }


def _requests(count: int) -> str:
    return f"{count:,} request{'s' if count != 1 else ''}"


def option_name(key: str) -> str:
    """Name of the command-line option that pins a variable."""
    special = {
        "batch_size": "--batch",
        "micro_batch_size": "--micro-batch",
        "num_micro_batches": "--num-micro-batches",
        "prefill_micro_batch_size": "--prefill-micro-batch",
        "attention_on_gpu": "--attention",
        "ffn_on_gpu": "--ffn",
        "dense_weights_on_gpu": "--dense-weights",
        "embedding_on_gpu": "--embedding",
        "lm_head_on_gpu": "--lm-head",
        "pin_weights": "--pin-weights",
    }
    return special.get(key, "--" + key.replace("_", "-"))
