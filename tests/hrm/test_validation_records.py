"""Records of a validation: what a run took from its spans, and a hash that must be that of the predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hrm.errors import InputError
from hrm.schedules import Steps
from hrm.trace import Span
from hrm.trace_names import parse_lane, parse_task
from hrm.validation.command import check_outputs
from hrm.validation.forecasts import write_forecasts
from hrm.validation.measures import measure_run
from hrm.validation.records import (
    HASH_FILE,
    PREDICTIONS_FILE,
    SETUP_FILE,
    holds_records,
    piece_document,
    pieces_of,
    read_records,
    remove_records,
    write_json,
    write_run,
)


def spans(*rows: tuple[str, str, float, float]) -> list[Span]:
    return [Span(parse_task(task), parse_lane(lane), start, end) for task, lane, start, end in rows]


PREFILL = (
    ("pre_attention/prefill/s0/l0/b0/g0", "gpu0", 0.0, 1.5),
    ("sample/prefill/s0/l2/b0/g0", "gpu0", 1.5, 2.0),
    ("store_kv/prefill/s0/l1/b0/g0", "device_to_host0", 1.5, 2.25),  # drains while decode begins
)
DECODE = (
    ("load_weights/decode/s0/l0/p0/g0", "host_to_device0", 1.0, 2.5),
    ("sample/decode/s0/l2/b0/g0", "gpu0", 3.0, 4.0),
    ("load_hidden/decode/s1/l0/b0/g0/part1", "host_to_device0", 4.0, 4.5),
    ("load_hidden/decode/s1/l0/b0/g0/part2", "host_to_device0", 4.5, 4.75),
    ("sample/decode/s1/l2/b0/g0", "gpu0", 5.0, 7.0),
    ("sample/decode/s2/l2/b0/g0", "gpu0", 7.0, 8.0),
)


def shifted(rows: tuple[tuple[str, str, float, float], ...], by: float) -> list[Span]:
    return spans(*((task, lane, max(0.0, start - by), end - by) for task, lane, start, end in rows))


def test_prefill_and_every_step_end_with_their_last_token() -> None:
    run = {"pieces": [piece_document(Steps(True, 0, 3), spans(*PREFILL, *DECODE), "measured")]}
    found = measure_run(run, layers=2, requests=3, generated=4)
    assert (found.prefill_s, found.decode_s) == (2.0, 6.0)
    assert found.throughput_tokens_per_s == 3 * 4 / 8.0
    assert (found.layer_latency_s, found.prefill_layer_s) == (1.0, 1.0)
    assert found.steps_s == (1.0, 1.5, 0.5)


def test_graphs_add_up_where_a_run_was_cut_into_several() -> None:
    pieces = [
        piece_document(Steps(prefill=True), spans(*PREFILL), "measured"),  # with what drains: 2.25 s
        piece_document(Steps(first=0, last=2), shifted(DECODE[:5], 2.0), "measured"),  # 5 s
        piece_document(Steps(first=2, last=3), shifted(DECODE[5:], 7.0), "measured"),  # 1 s
    ]
    found = measure_run({"pieces": pieces}, layers=2, requests=3, generated=4)
    assert (found.prefill_s, found.decode_s) == (2.25, 6.0)
    assert found.steps_s == (1.0, 1.5, 0.5)


def test_kinds_of_tasks_are_a_layer_of_the_steps_between_first_and_last() -> None:
    run = {"pieces": [piece_document(Steps(True, 0, 3), spans(*PREFILL, *DECODE), "measured")]}
    found = measure_run(run, layers=2, requests=3, generated=4)  # of step 1 alone
    assert found.ops_s == {"load_hidden": 0.375, "sample": 1.0}
    assert found.copies_s == {"D2": 0.25}  # the second part brings what the CPU made of the experts


def test_spans_come_back_to_a_nanosecond() -> None:
    written = spans(*PREFILL, *DECODE)
    (piece,) = pieces_of({"pieces": [piece_document(Steps(True, 0, 3), written, "emulated")]})
    assert (piece.steps, piece.trace.kind) == (Steps(True, 0, 3), "emulated")
    assert list(piece.trace.spans) == written


def folder_of(folder: Path, **run: Any) -> Path:
    write_json(folder / SETUP_FILE, {"format": 1})
    noted = write_forecasts({"candidates": []}, folder / PREDICTIONS_FILE)
    (folder / HASH_FILE).write_text(f"{noted}  {PREDICTIONS_FILE}\n", encoding="utf-8")
    write_run(folder, "aa-00", {"order": 0, "predictions_sha256": None})
    for order in (1, 0):
        write_run(folder, f"{order:03d}-any", {"order": order, "predictions_sha256": noted} | run)
    return folder


def test_runs_come_back_in_the_order_they_ran_apart_from_the_first_ones(tmp_path: Path) -> None:
    found = read_records(folder_of(tmp_path))
    assert len(found.first) == 1
    assert [run["order"] for run in found.runs] == [0, 1]


def test_predictions_that_were_changed_afterwards_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    with (folder / PREDICTIONS_FILE).open("a", encoding="utf-8") as file:
        file.write(" ")
    with pytest.raises(InputError, match="not those that were hashed before anything was measured"):
        read_records(folder)


def test_a_run_of_other_predictions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="after other predictions"):
        read_records(folder_of(tmp_path, predictions_sha256="0" * 64))


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a folder that hrm validate wrote"):
        read_records(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        read_records(tmp_path / "none")


def test_a_run_that_is_no_json_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "runs" / "001-any.json.gz").write_bytes(b"\x1f\x8bnothing")
    with pytest.raises(InputError, match=r"001-any\.json\.gz"):
        read_records(folder)


def test_only_what_a_validation_wrote_is_removed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "runs" / "mine.txt").write_text("mine", encoding="utf-8")
    (folder / "thesis").mkdir()
    remove_records(folder)
    left = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    assert left == ["runs", "runs/mine.txt", "thesis"]


def test_the_setup_of_another_program_is_no_record(tmp_path: Path) -> None:
    (tmp_path / SETUP_FILE).write_text('{"format": 1, "name": "mine"}', encoding="utf-8")
    assert not holds_records(tmp_path)
    with pytest.raises(InputError, match="holds something else"):
        check_outputs(tmp_path, None, None)
    write_json(tmp_path / SETUP_FILE, {"format": 1, "layers_of_model": 2, "plan": {}})
    assert holds_records(tmp_path)
    check_outputs(tmp_path, None, None)
