"""Number formats: how many bytes weights and KV cache take in each, scales included.

A quantised format changes bytes only. Scales are counted the way checkpoints store them:

========  =========================================  ========================  ===================
format    value                                      scale (weights)           bits per weight
========  =========================================  ========================  ===================
fp8       e4m3, 8 bit                                fp32 per 128 x 128 block  8.002
int8      symmetric, 8 bit                           fp16 per 128 in a row     8.125
int4      symmetric, 4 bit                           fp16 per 128 in a row     4.125
mxfp4     e2m1, 4 bit                                8 bit per 32 in a row     4.25
========  =========================================  ========================  ===================

In the KV cache fp8 has one scale per tensor (not counted), int8 and int4 one fp16 scale per 64 values, and mxfp4 one
8-bit scale per 32 values.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hrm.errors import InputError

__all__ = [
    "DTYPES",
    "KV_DTYPES",
    "WEIGHT_DTYPES",
    "DType",
    "bytes_per_value",
    "is_quantised",
    "kv_bytes",
    "kv_bytes_per_value",
    "matrix_bytes",
    "parse_dtype",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One number format.

    Attributes
    ----------
    name : str
        As written on the command line.
    value_bits : int
        Bits of one value without its scale.
    scale_bytes : int
        Bytes of one scale of a weight matrix, 0 where there is none.
    block_rows, block_columns : int
        The values of a weight matrix that share one scale; columns are the input side, a row is one output.
    kv_scale_bytes, kv_group : int
        Bytes of one scale in the KV cache and how many values share it.
    native_compute : bool
        Whether some GPU multiplies in this format, so that a peak for it can exist. fp4 tensor cores exist too, but no
        profile here states a peak for them: int4 and mxfp4 are dequantised first.
    """

    name: str
    value_bits: int
    scale_bytes: int = 0
    block_rows: int = 1
    block_columns: int = 1
    kv_scale_bytes: int = 0
    kv_group: int = 1
    native_compute: bool = True

    @property
    def bits_per_value(self) -> float:
        """Bits per weight [bit], scales included, as if every block were full."""
        return self.value_bits + 8 * self.scale_bytes / (self.block_rows * self.block_columns)

    @property
    def is_quantised(self) -> bool:
        """Whether weights of this format carry scales."""
        return self.scale_bytes > 0


DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        dtype.name: dtype
        for dtype in (
            DType(name="fp32", value_bits=32),
            DType(name="fp16", value_bits=16),
            DType(name="bf16", value_bits=16),
            DType(name="fp8", value_bits=8, scale_bytes=4, block_rows=128, block_columns=128),
            DType(name="int8", value_bits=8, scale_bytes=2, block_columns=128, kv_scale_bytes=2, kv_group=64),
            DType(
                name="int4",
                value_bits=4,
                scale_bytes=2,
                block_columns=128,
                kv_scale_bytes=2,
                kv_group=64,
                native_compute=False,
            ),
            DType(
                name="mxfp4",
                value_bits=4,
                scale_bytes=1,
                block_columns=32,
                kv_scale_bytes=1,
                kv_group=32,
                native_compute=False,
            ),
        )
    }
)
WEIGHT_DTYPES: tuple[str, ...] = tuple(DTYPES)
KV_DTYPES: tuple[str, ...] = tuple(DTYPES)

_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "float32": "fp32",
        "float": "fp32",
        "f32": "fp32",
        "float16": "fp16",
        "half": "fp16",
        "f16": "fp16",
        "bfloat16": "bf16",
        "float8_e4m3fn": "fp8",
        "float8_e4m3": "fp8",
        "fp8_e4m3": "fp8",
        "e4m3": "fp8",
        "float8": "fp8",
        "i8": "int8",
        "i4": "int4",
        "mx4": "mxfp4",
    }
)


def bytes_per_value(dtype: str) -> float:
    """Bytes one weight takes [bytes], its share of the scales included.

    Parameters
    ----------
    dtype : str
        A key of `DTYPES`.

    Returns
    -------
    float
        Bytes per weight; `matrix_bytes` is exact where blocks are not full.
    """
    return DTYPES[dtype].bits_per_value / 8


def kv_bytes_per_value(dtype: str) -> float:
    """Bytes one cached value takes [bytes], its share of the scales included.

    Parameters
    ----------
    dtype : str
        A key of `DTYPES`.

    Returns
    -------
    float
        fp32 4, fp16 and bf16 2, fp8 1, int8 1.03125, int4 0.53125, mxfp4 0.53125.
    """
    entry = DTYPES[dtype]
    return entry.value_bits / 8 + entry.kv_scale_bytes / entry.kv_group


def kv_bytes(values: int, dtype: str) -> int:
    """Bytes that `values` cached values of one token take [bytes], with a scale for a group that is not full.

    Parameters
    ----------
    values : int
        Values one token leaves in one layer.
    dtype : str
        A key of `DTYPES`.

    Returns
    -------
    int
        Bytes.
    """
    entry = DTYPES[dtype]
    return math.ceil(values * entry.value_bits / 8) + -(-values // entry.kv_group) * entry.kv_scale_bytes


def matrix_bytes(rows: int, columns: int, dtype: str) -> int:
    """Bytes a weight matrix takes [bytes], scales included, blocks at the edge counted whole.

    Parameters
    ----------
    rows, columns : int
        Output and input width; a scale group lies along a row.
    dtype : str
        A key of `DTYPES`.

    Returns
    -------
    int
        Bytes.

    Examples
    --------
    >>> matrix_bytes(2048, 7168, "fp8") - 2048 * 7168  # 16 x 56 blocks of one fp32 scale
    3584
    """
    entry = DTYPES[dtype]
    values = rows * -(-columns * entry.value_bits // 8)
    if not entry.scale_bytes:
        return values
    return values + -(-rows // entry.block_rows) * -(-columns // entry.block_columns) * entry.scale_bytes


def is_quantised(dtype: str) -> bool:
    """Whether weights in this format carry scales and must be scaled back (fp8, int8, int4, mxfp4)."""
    return DTYPES[dtype].is_quantised


def parse_dtype(text: object, *, where: str, allowed: Iterable[str] = WEIGHT_DTYPES) -> str:
    """Read the name of a number format as people and checkpoints write it.

    Parameters
    ----------
    text : object
        What was given, e.g. ``"bfloat16"``, ``"half"``, ``"torch.float16"``, ``"e4m3"``; case does not matter.
    where : str
        The file and key, or the option, for the message.
    allowed : iterable of str
        The formats that make sense there.

    Returns
    -------
    str
        A key of `DTYPES`.

    Raises
    ------
    InputError
        Not a text, not a format, or one that is not allowed there.
    """
    choices = tuple(allowed)
    way_out = f"one of {', '.join(choices)}"
    if not isinstance(text, str):
        raise InputError(f"{text!r:.80} is not the name of a number format", where=where, way_out=way_out)
    word = text.strip().lower().removeprefix("torch.")
    name = _ALIASES.get(word, word)
    if name in choices:
        return name
    if name in DTYPES:
        raise InputError(f"{text!r} is not accepted here", where=where, way_out=way_out)
    near = difflib.get_close_matches(word, [*choices, *_ALIASES], n=1)
    suggestion = f"did you mean {near[0]}? " if near else ""
    raise InputError(f"unknown number format {text!r:.80}", where=where, way_out=suggestion + way_out)
