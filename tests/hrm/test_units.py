"""Quantities with units."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrm.errors import InputError
from hrm.units import GB, GIB, format_bandwidth, format_compute, format_size, format_time, parse_quantity


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("16 GB", "size", 16e9),
        ("14.74 GiB", "size", 14.74 * 2**30),
        ("197880360960 B", "size", 197880360960.0),
        ("24260 MiB", "size", 24260 * 2**20),
        ("0 B", "size", 0.0),
        ("285 GiB/s", "bandwidth", 285 * 2.0**30),
        ("300GB/s", "bandwidth", 300e9),
        ("1.8e0 GB/s", "bandwidth", 1.8e9),
        ("65 TFLOP/s", "compute", 65e12),
        ("130 TOP/s", "compute", 130e12),
        ("65 TFLOPS", "compute", 65e12),
        ("3 us", "time", 3e-6),
        ("3 µs", "time", 3e-6),
        ("0 s", "time", 0.0),
        ("24 h", "duration", 86400.0),
        ("90 min", "duration", 5400.0),
        ("0.8", "share", 0.8),
        (0.8, "share", 0.8),
        ("80 %", "share", 0.8),
        ("80%", "share", 0.8),
        ("4", "count", 4),
        (4, "count", 4),
    ],
)
def test_quantities_become_si_floats(text, kind, value):
    assert parse_quantity(text, kind, where="t4.yaml: key") == value


def test_gigabytes_are_decimal_and_gibibytes_binary():
    assert (GB, GIB) == (10**9, 2**30)


def test_a_count_is_an_int():
    assert isinstance(parse_quantity("14", "count", where=""), int)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("16 GBs", "size", "t4.yaml: gpu.memory: '16 GBs' is not a size (try '16 GB' or '16 GiB')"),
        ("16 gb", "size", "t4.yaml: gpu.memory: '16 gb' is not a size (try '16 GB' or '16 GiB')"),
        ("16", "size", "t4.yaml: gpu.memory: '16' has no unit (try '16 GB' or '16 GiB')"),
        (16, "size", "t4.yaml: gpu.memory: '16' has no unit (try '16 GB' or '16 GiB')"),
        ("16 GB", "bandwidth", "t4.yaml: gpu.memory: '16 GB' is not a bandwidth (try '16 GB/s' or '16 GiB/s')"),
        (
            "100 Gbps",
            "bandwidth",
            "t4.yaml: gpu.memory: '100 Gbps' is not a bandwidth ('Gbps' counts bits; write bytes, e.g. '300 GB/s')",
        ),
        ("-1 GB", "size", "t4.yaml: gpu.memory: '-1 GB' is negative (accepted: between 1 B and 1 EB)"),
        ("2000000 TB", "size", "t4.yaml: gpu.memory: '2000000 TB' is out of range (accepted: between 1 B and 1 EB)"),
        ("0 GB/s", "bandwidth", "t4.yaml: gpu.memory: '0 GB/s' is zero (accepted: between 1 kB/s and 1 PB/s)"),
        ("2 PB/s", "bandwidth", "t4.yaml: gpu.memory: '2 PB/s' is out of range (accepted: between 1 kB/s and 1 PB/s)"),
        (
            "2000 PFLOP/s",
            "compute",
            "t4.yaml: gpu.memory: '2000 PFLOP/s' is out of range (accepted: between 1 MFLOP/s and 1 EFLOP/s)",
        ),
        (
            "110 %",
            "share",
            "t4.yaml: gpu.memory: '110 %' is out of range (accepted: between 0 and 1, or between 0 % and 100 %)",
        ),
        (math.nan, "share", "t4.yaml: gpu.memory: 'nan' is not finite (try e.g. '0.8')"),
        ("nan GB", "size", "t4.yaml: gpu.memory: 'nan GB' is not a size (try e.g. '16 GB')"),
        (True, "count", "t4.yaml: gpu.memory: 'True' is not a count (try e.g. '4')"),
        ("2.5", "count", "t4.yaml: gpu.memory: '2.5' is not a whole number (try e.g. '4')"),
        (0, "count", "t4.yaml: gpu.memory: '0' is zero (accepted: between 1 and 10^12)"),
        (None, "size", "t4.yaml: gpu.memory: NoneType is not a size (try e.g. '16 GB')"),
    ],
)
def test_a_wrong_quantity_is_named_with_what_would_be_accepted(text, kind, message):
    with pytest.raises(InputError) as caught:
        parse_quantity(text, kind, where="t4.yaml: gpu.memory")
    assert str(caught.value) == message


@given(
    st.one_of(
        st.text(),
        st.from_regex(r"[-+]?[0-9]{0,400}(\.[0-9]{0,3})?(e[0-9]{1,4})? ?[GMTk]?i?[Bb]?(/s)?", fullmatch=True),
        st.floats(),
        st.integers(),
        st.just(10**6000),
        st.booleans(),
        st.none(),
        st.lists(st.integers()),
    ),
    st.sampled_from(["size", "bandwidth", "compute", "time", "duration", "share", "count"]),
)
def test_any_input_is_a_finite_quantity_or_an_input_error_of_one_readable_line(text, kind):
    try:
        value = parse_quantity(text, kind, where="f: k")
    except InputError as error:
        assert str(error).startswith("f: k: ")
        assert len(error.fact) < 120
    else:
        assert math.isfinite(value)
        assert value >= 0


@given(st.floats(min_value=1e7, max_value=1e15))
def test_formatted_sizes_and_bandwidths_read_back_to_their_digits(number):
    assert parse_quantity(format_size(number), "size", where="") == pytest.approx(number, rel=0.05)
    assert parse_quantity(format_bandwidth(number), "bandwidth", where="") == pytest.approx(number, rel=0.001)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3e-6, "3 us"),
        (0.1549, "154.9 ms"),
        (12.5, "12.5 s"),
        (119.96, "2 min"),
        (320, "5 min 20 s"),
        (7199.9, "2 h"),
        (11520, "3 h 12 min"),
        (183600, "2 d 3 h"),
    ],
)
def test_times_are_written_in_the_unit_a_person_uses(seconds, text):
    assert format_time(seconds) == text


def test_sizes_and_rates_carry_their_unit():
    assert format_size(14.74 * GIB) == "14.74 GiB"
    assert format_size(5 * 2**20) == "5.00 MiB"
    assert format_size(16e9, "GB") == "16.00 GB"
    assert format_bandwidth(12.2e9) == "12.2 GB/s"
    assert format_bandwidth(5e6) == "5 MB/s"
    assert format_compute(1.7664e12) == "1.766 TFLOP/s"
    assert format_compute(70.4e9) == "70.4 GFLOP/s"
