"""Figures 4, 5, 7, 9 and Tables 4, 5 of the paper: exact where shapes and constants give them, else as published."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hrm.errors import InputError
from hrm.notebook_size import SIZE_VARIABLE, at_size
from hrm.paper.kernels import kernel_latencies
from hrm.paper.rooflines import attention_roofline, experts_roofline
from hrm.paper.throughputs import compare_rows, figure_7_rows, table_4_rows, table_5_rows
from hrm.published.rows import bundled_kernels


def test_attention_lies_left_of_p1_in_both_formats_so_it_is_faster_on_the_cpu():
    frame = attention_roofline().to_frame()
    assert list(frame["P1 [FLOP/byte]"]) == [1300 / 16] * 2
    assert list(frame["on the link [FLOP/byte]"]) == pytest.approx([2.0, 8.0], rel=1e-3)
    assert list(frame["on the CPU [GFLOP/s]"]) == pytest.approx([200.0, 800.0], rel=1e-3)
    assert list(frame["on the GPU, through the link [GFLOP/s]"]) == pytest.approx([32.0, 128.0], rel=1e-3)
    assert list(frame["faster on"]) == ["CPU", "CPU"]


def test_p2_of_the_experts_is_what_the_gpu_attains_at_that_micro_batch_over_the_link():
    frame = experts_roofline().to_frame()
    assert list(frame.index) == ["µ = 32", "µ = 128", "µ = 512"]
    attained = frame["on the GPU, data there [GFLOP/s]"]
    assert list(frame["P2 [FLOP/byte]"]) == pytest.approx([each / 16 for each in attained])
    assert attained["µ = 128"] == pytest.approx(9584, rel=1e-4)
    assert set(frame["faster on"]) == {"GPU"}


def test_kernel_latencies_are_the_published_ones_and_the_copy_takes_three_to_four_times_the_attention():
    frame = kernel_latencies().to_frame()
    assert len(frame) == 10
    for row in bundled_kernels():
        if row.kernel == "cpu_attention":
            shown = frame.loc[(row.micro_batch_size, row.context_len), "attention on the CPU, measured [ms]"]
            assert shown == pytest.approx(row.latency_s * 1e3)
    for key in ("measured", "predicted"):
        assert frame[f"copy / attention, {key}"].between(3.1, 4.1).all()


def test_attention_outgrows_the_experts_only_with_many_requests_and_long_contexts():
    frame = kernel_latencies().to_frame()
    for key in ("measured", "predicted"):
        longer = frame[f"attention on the CPU, {key} [ms]"] > frame[f"experts on the GPU, {key} [ms]"]
        assert list(longer[longer].index) == [(128, 2048)]


def test_rows_of_the_figure_and_the_tables_are_those_of_their_sources():
    assert [row.id for row in table_5_rows()] == ["P014", "P100", "P050"]
    assert len(table_4_rows()) == 8
    assert {(row.setting, row.workload) for row in table_4_rows()} == {
        ("S1", "synthetic_reasoning"),
        ("S1", "summarization"),
    }
    shown = figure_7_rows()
    assert len(shown) == 30 and "P100" not in {row.id for row in shown}
    assert {row.gen_len for row in shown} == {32, 128}


def test_table_5_gives_the_published_gains_and_the_model_keeps_their_order():
    frame = compare_rows(table_5_rows()).to_frame()
    assert list(frame["over FlexGen, published"]) == pytest.approx([1.0, 16.816 / 9.5, 30.12236 / 9.5])
    for column in ("over FlexGen, full model", "full model"):
        assert frame[column].is_monotonic_increasing
    assert frame["simulated"].isna().all()


def test_a_simulator_is_asked_about_every_row_and_a_row_without_flexgen_has_no_gain():
    rows = table_5_rows()[2:]
    frame = compare_rows(rows, lambda row, values: SimpleNamespace(throughput_tokens_per_s=2.5)).to_frame()
    assert list(frame["simulated"]) == [2.5]
    assert frame["over FlexGen, published"].isna().all()


def test_runs_are_drawn_as_published_and_a_repeat_is_joined_to_the_first():
    rows = [row for row in figure_7_rows() if row.id in ("P070", "P073", "P002")]
    results = compare_rows(rows)
    drawn = [list(line.get_ydata()) for line in results.draw().axes[0].lines]
    full = {result.row.id: result.prediction.predicted["full"] for result in results.results}
    assert drawn == [[217.54136, 285.95638], [full["P070"]], [37.2], [full["P002"]]]


def test_a_row_of_an_unknown_setting_is_refused_by_name():
    with pytest.raises(InputError, match="S99"):
        compare_rows([replace(table_5_rows()[0], setting="S99")]).to_frame()


def test_figures_are_saved_and_shown_as_png(tmp_path):
    figure = kernel_latencies()
    figure.save(tmp_path / "figure.png")
    for png in ((tmp_path / "figure.png").read_bytes(), figure._repr_png_()):
        assert png.startswith(b"\x89PNG")
    with pytest.raises(InputError, match="ends in"):
        figure.save(tmp_path / "figure.doc")


def test_notebooks_have_two_sizes(monkeypatch):
    monkeypatch.delenv(SIZE_VARIABLE, raising=False)
    assert at_size(full=2, small=1) == 2
    monkeypatch.setenv(SIZE_VARIABLE, "small")
    assert at_size(full=2, small=1) == 1
    monkeypatch.setenv(SIZE_VARIABLE, "tiny")
    with pytest.raises(InputError, match="full or small"):
        at_size(full=2, small=1)
