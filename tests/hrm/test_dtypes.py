"""Number formats: storage to the byte, and the names people write."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrm.dtypes import (
    DTYPES,
    bytes_per_value,
    is_quantised,
    kv_bytes,
    kv_bytes_per_value,
    matrix_bytes,
    parse_dtype,
)
from hrm.errors import InputError


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("fp32", 4), ("fp16", 2), ("bf16", 2), ("fp8", 1 + 4 / 16384), ("int8", 8.125 / 8), ("int4", 4.125 / 8),
     ("mxfp4", 4.25 / 8)],
)  # fmt: skip
def test_weight_bytes_include_the_scales(dtype: str, expected: float) -> None:
    assert bytes_per_value(dtype) == expected
    assert matrix_bytes(256, 1024, dtype) == 256 * 1024 * expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("fp32", 4), ("fp16", 2), ("bf16", 2), ("fp8", 1), ("int8", 1.03125), ("int4", 0.53125), ("mxfp4", 0.53125)],
)
def test_kv_bytes_have_scales_of_their_own(dtype: str, expected: float) -> None:
    assert kv_bytes_per_value(dtype) == expected
    assert kv_bytes(576, dtype) == 576 * expected


def test_a_block_at_the_edge_has_a_whole_scale() -> None:
    # kv_a_proj of DeepSeek-V3: 576 rows are 4.5 blocks of 128, so 5 x 56 scales of 4 bytes.
    assert matrix_bytes(576, 7168, "fp8") == 576 * 7168 + 5 * 56 * 4
    # 130 columns: 65 bytes of 4-bit values and two fp16 scales in each row.
    assert matrix_bytes(3, 130, "int4") == 3 * (65 + 2 * 2)
    assert matrix_bytes(3, 33, "mxfp4") == 3 * (17 + 2)
    assert kv_bytes(65, "int4") == 33 + 2 * 2


@given(rows=st.integers(1, 500), columns=st.integers(1, 500), dtype=st.sampled_from(sorted(DTYPES)))
def test_storage_is_never_below_the_nominal_bits(rows: int, columns: int, dtype: str) -> None:
    assert matrix_bytes(rows, columns, dtype) >= rows * columns * bytes_per_value(dtype) - 1e-9


def test_quantised_are_the_formats_with_scales() -> None:
    assert {name for name in DTYPES if is_quantised(name)} == {"fp8", "int8", "int4", "mxfp4"}


@pytest.mark.parametrize(
    ("text", "name"),
    [("bfloat16", "bf16"), ("torch.bfloat16", "bf16"), ("half", "fp16"), ("FLOAT16", "fp16"), ("float8_e4m3fn", "fp8"),
     ("e4m3", "fp8"), (" int4 ", "int4"), ("float32", "fp32"), ("mxfp4", "mxfp4")],
)  # fmt: skip
def test_spellings_of_frameworks_are_understood(text: str, name: str) -> None:
    assert parse_dtype(text, where="--weights-dtype") == name


def test_a_misspelt_format_gets_the_nearest_and_all_that_are_accepted() -> None:
    with pytest.raises(InputError, match=r"--kv-dtype: unknown number format 'bfloat17' \(did you mean bfloat16\?"):
        parse_dtype("bfloat17", where="--kv-dtype")


def test_a_format_that_makes_no_sense_there_is_refused() -> None:
    with pytest.raises(InputError, match=r"a.json: torch_dtype: 'int4' is not accepted here \(one of bf16, fp16\)"):
        parse_dtype("int4", where="a.json: torch_dtype", allowed=("bf16", "fp16"))


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text(max_size=3))))
def test_anything_else_is_an_input_error(value: object) -> None:
    try:
        assert parse_dtype(value, where="--weights-dtype") in DTYPES
    except InputError as error:
        assert "--weights-dtype" in str(error)
