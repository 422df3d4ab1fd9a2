"""How a model computes, as `hrm.numerics` reads it, and the frequencies of its rotation as a tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hrm.numerics import Numerics, Rope, read_numerics

__all__ = ["Numerics", "Rope", "inverse_frequencies", "read_numerics"]


def inverse_frequencies(rope: Rope, width: int) -> Tensor:
    """Angle by which each pair of a head turns per position [radian], float32 [width / 2], the fastest first.

    The arithmetic is float32, operation by operation that of transformers 5.24.0: an error in the last place is turned
    once per position, and in the thousandth token it is no longer in the last place.

    Parameters
    ----------
    rope : Rope
        The rotation.
    width : int
        Values that are rotated, `Numerics.rotary_width`.
    """
    plain = 1.0 / (rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    if rope.kind != "llama3":
        return plain / rope.factor
    wavelength = 2 * math.pi / plain  # [token]
    turns = rope.original_positions / wavelength  # over all positions of the training
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    scaled = torch.where(wavelength > rope.original_positions / rope.low_freq_factor, plain / rope.factor, plain)
    between = ~(wavelength < rope.original_positions / rope.high_freq_factor) & (
        wavelength <= rope.original_positions / rope.low_freq_factor
    )
    return torch.where(between, (1 - share) * scaled / rope.factor + share * scaled, scaled)
