"""Pins: variables of the search that a person gives a value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hrm.errors import InputError
from hrm.policy import WeightSlots

__all__ = ["Pins"]


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
            if value is not None and value < 1:
                raise InputError(f"{value} is below 1", where=option_name(key), way_out="a whole number from 1")
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

    @property
    def given(self) -> dict[str, Any]:
        """The pinned variables and their values."""
        return {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) is not None}


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
