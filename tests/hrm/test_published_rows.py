"""Rows of measurements: what a file may hold, what follows from it, and what it is told when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrm.errors import InputError
from hrm.published.rows import KernelRow, Row, bundled_kernels, bundled_rows, read_kernels, read_rows

HEADER = (
    "id,setting,system,workload,prompt_len,padded,gen_len,mu,n_ub,N,"
    "weights_gpu_pct,throughput_tok_s,total_time_s,source"
)
LINE = "A1,S1,FlexGen,mtbench,418,1,32,4,5,20,7,8,,somewhere"


def rows_of(folder: Path, *lines: str, header: str = HEADER) -> tuple[Row, ...]:
    path = folder / "mine.csv"
    path.write_text("\n".join((header, *lines)), encoding="utf-8")
    return read_rows(path)


def message(folder: Path, *lines: str, header: str = HEADER) -> str:
    with pytest.raises(InputError) as caught:
        rows_of(folder, *lines, header=header)
    return str(caught.value).removeprefix(f"{folder / 'mine.csv'}: ")


def test_a_line_becomes_a_row_with_shares_for_per_cent(tmp_path: Path) -> None:
    assert rows_of(tmp_path, LINE) == (
        Row(
            id="A1",
            setting="S1",
            system="FlexGen",
            workload="mtbench",
            prompt_len=418.0,
            padded=True,
            gen_len=32,
            micro_batch_size=4,
            num_micro_batches=5,
            batch_size=20,
            weights_on_gpu=0.07,
            throughput_tokens_per_s=8.0,
            total_time_s=None,
            source="somewhere",
        ),
    )


def test_blank_cells_are_none(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, "A1,S1,DeepSpeed,mtbench,76.1,0,32,,,,,,,")
    policy = (row.micro_batch_size, row.num_micro_batches, row.batch_size, row.weights_on_gpu)
    assert policy == (None, None, None, None)
    assert (row.measured_tokens_per_s, row.measured_total_s, row.source) == (None, None, "")
    assert (row.prompt_len, row.padded) == (76.1, False)


def test_throughput_follows_from_total_time_and_n_and_the_other_way_round(tmp_path: Path) -> None:
    timed, rated, both, neither = rows_of(
        tmp_path,
        "timed,S1,X,w,10,1,32,,,20,,,64,",
        "rated,S1,X,w,10,1,32,,,20,,10,,",
        "both,S1,X,w,10,1,32,,,20,,11,60,",
        "neither,S1,X,w,10,1,32,4,5,,,,64,",  # N is not given: mu * n_ub need not have finished
    )
    assert (timed.measured_tokens_per_s, timed.measured_total_s) == (20 * 32 / 64, 64.0)
    assert (rated.measured_tokens_per_s, rated.measured_total_s) == (10.0, 20 * 32 / 10)
    assert (both.measured_tokens_per_s, both.measured_total_s) == (11.0, 60.0)
    assert (neither.measured_tokens_per_s, neither.measured_total_s) == (None, 64.0)


def test_extra_columns_comments_and_blank_lines_are_ignored_and_columns_come_in_any_order(tmp_path: Path) -> None:
    header = "note,gen_len,padded,id,setting,system,workload,prompt_len"
    lines = ("# a comment", "", 'hello,"32",1,A1,S1,FlexGen,mtbench,418', ",,,,,,,")
    (row,) = rows_of(tmp_path, *lines, header=header)
    assert (row.id, row.gen_len, row.batch_size, row.measured_tokens_per_s) == ("A1", 32, None, None)


@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        ("gen_len", "0", "line 2, gen_len: '0' is not accepted (a whole number from 1 on)"),
        ("gen_len", "3.5", "line 2, gen_len: '3.5' is not accepted (a whole number from 1 on)"),
        ("gen_len", "", "line 2, gen_len: is blank (every row needs it)"),
        ("padded", "yes", "line 2, padded: 'yes' is not accepted (1 or 0)"),
        ("mu", "nan", "line 2, mu: 'nan' is not accepted (a whole number from 1 on)"),
        ("N", "1_0", "line 2, N: '1_0' is not accepted (a whole number from 1 on)"),
        ("weights_gpu_pct", "101", "line 2, weights_gpu_pct: '101' is not accepted (per cent, 0 to 100)"),
        ("throughput_tok_s", "0", "line 2, throughput_tok_s: '0' is not accepted (a number above 0)"),
        ("total_time_s", "inf", "line 2, total_time_s: 'inf' is not accepted (a number above 0)"),
        ("prompt_len", "418.5", "line 2, prompt_len: '418.5' is not accepted (a whole number from 1 on)"),
    ],
)
def test_a_wrong_cell_is_named_with_line_column_and_value(tmp_path: Path, column: str, cell: str, said: str) -> None:
    cells = LINE.split(",")
    cells[HEADER.split(",").index(column)] = cell
    assert message(tmp_path, ",".join(cells)) == said


def test_an_id_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    assert message(tmp_path, LINE, "", LINE) == "line 4, id: 'A1' is already the id of line 2 (another id)"


def test_a_misspelt_column_is_refused_rather_than_dropped(tmp_path: Path) -> None:
    header = HEADER.replace("throughput_tok_s", "throughput_toks_s")
    assert message(tmp_path, LINE, header=header) == (
        "header: has no column 'throughput_tok_s' but 'throughput_toks_s' (throughput_tok_s)"
    )


def test_a_missing_column_a_column_twice_a_short_line_and_no_rows_are_refused(tmp_path: Path) -> None:
    assert message(tmp_path, LINE, header=HEADER.replace("setting,", "where_it_ran,")).startswith(
        "header: has no column 'setting'"
    )
    assert message(tmp_path, LINE, header=HEADER.replace("source", "id")) == "header: has the column 'id' twice"
    assert message(tmp_path, "A1,S1") == "line 2: has 2 cells (14, as the header)"
    assert message(tmp_path).startswith("holds no rows")


def test_files_that_are_no_text_or_not_there_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (binary, tmp_path / "none.csv", tmp_path, "a\0b"):
        with pytest.raises(InputError):
            read_rows(path)


def test_kernel_rows(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text("kernel,mu,context_len,latency_s\nmoe,32,,0.5\ncopy,4,128,0.25\n", encoding="utf-8")
    assert read_kernels(path) == (
        KernelRow(kernel="moe", micro_batch_size=32, context_len=None, latency_s=0.5),
        KernelRow(kernel="copy", micro_batch_size=4, context_len=128, latency_s=0.25),
    )


def test_bundled_rows_are_the_published_ones() -> None:
    rows = {row.id: row for row in bundled_rows()}
    assert len(rows) == 41
    assert {row.setting for row in rows.values()} == {"S1", "S2", "S6", "S8"}
    assert {row.system for row in rows.values()} == {
        "MoE-Lightning",
        "MoE-Lightning(p)",
        "FlexGen",
        "FlexGen(c)",
        "DeepSpeed",
    }
    assert all(row.measured_tokens_per_s for row in rows.values())
    logged = [row for row in rows.values() if row.total_time_s and row.batch_size]
    for row in logged:  # N was read off throughput and time, or counted: both agree
        assert row.throughput_tokens_per_s == pytest.approx(row.batch_size * row.gen_len / row.total_time_s, rel=1e-3)
    assert len(logged) == 14


def test_bundled_kernels_are_the_published_ones() -> None:
    kernels = bundled_kernels()
    counts = {name: sum(row.kernel == name for row in kernels) for name in {row.kernel for row in kernels}}
    assert counts == {"kv_transfer_htod": 10, "cpu_attention": 10, "moe_ffn_gpu": 2}
    copied = next(row for row in kernels if row.kernel == "kv_transfer_htod" and row.context_len == 2048)
    moved = copied.micro_batch_size * 2048 * 4096  # 2 (K, V) * 8 heads * 128 values * 2 bytes per token
    assert moved / copied.latency_s == pytest.approx(12.3e9, rel=0.005)
