"""One quantity of a profile in the making: its text with unit, its source, how it was found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hrm.profile import Source
from hrm.units import GIB
from runtime.calibration.bench import Bench
from runtime.calibration.samples import Sample

__all__ = [
    "Datasheet",
    "Item",
    "default",
    "derived",
    "fastest_products",
    "flops_text",
    "measured",
    "rate_text",
    "read_out",
    "seconds_text",
    "share_text",
    "size_text",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One quantity of the profile.

    Attributes
    ----------
    text : str
        Value and unit.
    source : Source
    note : str
        How it was found.
    samples : tuple of str
        Names of the measurements it comes from; none for what was read from the system or is a default.
    """

    text: str
    source: Source
    note: str
    samples: tuple[str, ...] = ()


Datasheet = Mapping[str, tuple[str, float]]
"""Of a bundled GPU model: text and value in SI of ``gpu.bandwidth`` and ``gpu.peak.*``; empty for an unknown one."""


LEAST_SHARE = 1e-3
"""The least that a profile takes as an efficiency."""


def rate_text(value: float) -> str:
    return f"{value / 1e9:.4g} GB/s"


def size_text(value: float) -> str:
    return f"{math.floor(value / GIB * 100) / 100:g} GiB"


def flops_text(value: float) -> str:
    return f"{value / 1e12:.4g} TFLOP/s"


def share_text(value: float) -> str:
    """A share: a fit may find that two things do not overlap at all, which a profile does not take."""
    return f"{100 * max(value, LEAST_SHARE):.4g} %"


def seconds_text(value: float) -> str:
    return f"{value * 1e6:.4g} us"


def measured(text: str, sample: Sample, more: str = "") -> Item:
    note = f"{sample.name}: median of {len(sample.values)}, spread {100 * sample.spread:.1f} %"
    return Item(text=text, source="measured", note=f"{note}; {more}" if more else note, samples=(sample.name,))


def derived(text: str, what: str, samples: Sequence[str]) -> Item:
    return Item(text=text, source="measured", note=what, samples=tuple(samples))


def read_out(text: str, note: str) -> Item:
    return Item(text=text, source="measured", note=f"read from {note}")


def default(text: str, note: str) -> Item:
    return Item(text=text, source="estimated", note=f"default: {note}")


def fastest_products(bench: Bench, level: str) -> dict[str, Sample]:
    """The fastest product of every format, on a level."""
    found: dict[str, Sample] = {}
    for sample in bench.samples.starting(f"{level} product "):
        dtype = sample.name.split()[2]
        if dtype not in found or sample.median > found[dtype].median:
            found[dtype] = sample
    return found
