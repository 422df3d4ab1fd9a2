"""`hrm run --input --report`: what a job took beside what was predicted of it, as a document and as a page."""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import model_folder
from command import run
from test_jobs import prompts_of, rows_of, write

from hrm.errors import InputError
from hrm.plans import read_plan_document
from runtime.batches import predict_batch
from runtime.jobs import runner
from runtime.jobs.batch_room import cut_to_room
from runtime.jobs.figures import draw_throughput
from runtime.jobs.job_watch import Stretch
from runtime.jobs.page import render_job
from runtime.jobs.prices import price_stretches
from runtime.jobs.progress import rate_text, size_text
from runtime.jobs.requests_file import KEYS
from runtime.jobs.runner import JobOptions, run_prompts
from runtime.requests import make_requests

ROOT = Path(__file__).resolve().parents[2]
GENERATED = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("page")
    shutil.copytree(model_folder("mixtral"), found / "model")
    lengths = ("--prompt-len", 12, "--gen-len", GENERATED, "--requests", 12)
    given = ("--hw", "l4", "--model", found / "model" / "config.json", "--compute-dtype", "fp32", *lengths)
    pins = ("--micro-batch", 3, "--num-micro-batches", 2, "--attention", "cpu", "--weights-on-gpu", 0.3)
    done = run("plan", *given, *pins, "-o", found / "plan.json")
    assert done.code == 0, done.err
    return found


def options_of(place: Path, folder: Path, **more: Any) -> JobOptions:
    given: dict[str, Any] = {"plan_file": place / "plan.json", "model_dir": place / "model", "device": "cpu"}
    files = {"source": folder / "in.jsonl", "output": folder / "out.jsonl", "report": folder / "job.html"}
    return JobOptions(**(given | files | more))


@pytest.fixture(scope="module")
def finished(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The document of a job of 15 requests with limits of their own, and its folder."""
    folder = tmp_path_factory.mktemp("finished")
    write(folder / "in.jsonl", prompts_of(15), (3, None, 8, 1, 5))
    outcome = run_prompts(options_of(place, folder, steps=2))
    assert outcome.exit_code == 0
    return outcome.document, folder


def test_tokens_and_requests_of_the_document_are_those_of_the_results(finished: tuple[dict[str, Any], Path]) -> None:
    document, folder = finished
    rows = rows_of(folder / "out.jsonl").values()
    assert (
        document["generated_tokens"] == document["timeline"][-1]["tokens"] == sum(r["generated_tokens"] for r in rows)
    )
    assert document["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows)
    assert document["finish_reasons"] == Counter(row["finish_reason"] for row in rows)
    assert document["finished"] == len(rows) == 15 and document["batches"] == [6, 6, 3]


def test_seconds_of_the_document_add_up(finished: tuple[dict[str, Any], Path]) -> None:
    document, _ = finished
    assert document["prefill_s"] + document["decode_s"] <= document["run_s"]
    assert 0.0 < document["bookkeeping_s"] < document["run_s"] and 0.0 < document["laid_out_s"] < document["run_s"]
    for phase in ("prefill", "decode"):
        for row in document["lanes"].values():
            assert row[f"{phase}_s"] == pytest.approx(math.fsum(row["tasks"][phase].values()))
            assert row[f"{phase}_s"] <= document[f"{phase}_s"]
    times = [point["at_s"] for point in document["timeline"]]
    assert times == sorted(times) and times[-1] <= document["run_s"]
    tokens = [point["tokens"] for point in document["timeline"]]
    assert tokens == sorted(tokens)
    assert document["throughput_tokens_per_s"] == pytest.approx(tokens[-1] / document["run_s"])
    last = document["timeline"][-1]["predicted_at_s"]
    assert last == pytest.approx(document["predicted"]["prefill_s"] + document["predicted"]["decode_s"])
    ratio = document["predicted_over_measured"]["decode_s"]
    assert ratio == pytest.approx(document["predicted"]["decode_s"] / document["decode_s"])


def test_graphs_of_a_whole_batch_cost_what_the_batch_does(place: Path) -> None:
    """Prompts of one length and a decode cut into graphs: their prices add up to that of the batch."""
    scenario, policy, _ = read_plan_document(place / "plan.json")
    (batch,) = cut_to_room(make_requests([[1] * 12] * 6, scenario), policy, scenario)
    whole = predict_batch(scenario, batch)

    def stretch(phase: Any, first: int, last: int) -> Stretch:
        return Stretch(0, phase, first, last, 6, 72, batch.policy, 0, 0.0, 0.0)

    pieces = [stretch("prefill", 0, 0), stretch("decode", 0, 3), stretch("decode", 3, 4), stretch("decode", 4, 7)]
    found = price_stretches(scenario, [batch], pieces)
    assert [price.seconds for price in found["prefill"]] == [whole.prefill_s]
    assert math.fsum(price.seconds for price in found["decode"]) == pytest.approx(whole.decode_s, rel=1e-3)
    for lane, seconds in whole.decode.lanes.items():
        assert math.fsum(price.lanes[lane] for price in found["decode"]) == pytest.approx(7 * seconds, rel=1e-3)


def test_the_page_needs_nothing_else_and_says_it_all(finished: tuple[dict[str, Any], Path]) -> None:
    document, folder = finished
    text = (folder / "job.html").read_text(encoding="utf-8")
    assert text == render_job(document)
    assert text.count("<svg") == 3 and not re.findall(r'(?:src|href)="(?!#)', text)
    for words in (
        "Throughput over time",
        "Where the time went",
        "Peaks of memory",
        "ended at max_new_tokens",
        f"torch {torch.__version__}",
        "15 of 15 requests finished",
        "says nothing about l4",
    ):
        assert words in text, words
    for reason in document["finish_reasons"]:
        assert {"stop": "ended at an end token", "length": "ended at max_new_tokens"}[reason] in text


def test_nothing_left_to_run_leaves_the_page_as_it_was(place: Path, finished: tuple[dict[str, Any], Path]) -> None:
    _, folder = finished
    before = (folder / "job.html").read_bytes()
    said: list[str] = []
    assert run_prompts(options_of(place, folder), say=said.append).document["requests"] == 0
    assert (folder / "job.html").read_bytes() == before
    assert said[-1] == f"nothing was left to run: {folder / 'job.html'} is as it was"


def test_a_job_that_ends_badly_leaves_a_page_too(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, batches = runner.finish_batch, []

    def second_fails(*given: Any) -> None:
        batches.append(given)
        if len(batches) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        real(*given)

    write(tmp_path / "in.jsonl", prompts_of(9))
    monkeypatch.setattr(runner, "finish_batch", second_fails)
    with pytest.raises(InputError, match="GPU memory ran out"):
        run_prompts(options_of(place, tmp_path))
    text = (tmp_path / "job.html").read_text(encoding="utf-8")
    assert "6 of 9 requests finished" in text and "Ended by: " in text and "GPU memory ran out" in text
    assert re.search(r"not finished</td><td[^>]*>3<", text)


@pytest.mark.parametrize("batches", [1, 3, 30])
def test_throughput_is_drawn_by_batch_where_there_are_many(batches: int) -> None:
    timeline = [
        {"batch": batch, "at_s": 10.0 * (4 * batch + part + 1), "predicted_at_s": 5.0 * (4 * batch + part + 1)}
        | {"tokens": 100 * (4 * batch + part + 1)}
        for batch in range(batches)
        for part in range(4)
    ]
    figure = draw_throughput({"timeline": timeline})
    measured, predicted = figure.axes[1].patches
    assert len(measured.get_data().values) == (batches if batches == 30 else 4 * batches)
    assert set(measured.get_data().values.round(9)) == {10.0} and set(predicted.get_data().values.round(9)) == {20.0}


def test_numbers_are_written_as_people_read_them() -> None:
    assert [rate_text(number) for number in (0.01234, 12.34, 999, 1234.5, 1e6)] == [
        "0.0123",
        "12.3",
        "999",
        "1,234",
        "1,000,000",
    ]
    assert [size_text(size) for size in (512, 3 * 2**20, 1.5 * 2**30)] == ["0.50 KiB", "3.00 MiB", "1.50 GiB"]


def test_documented_keys_are_those_of_document_request_and_result(finished: tuple[dict[str, Any], Path]) -> None:
    document, folder = finished
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    documented = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert documented == set(document) | set(next(iter(rows_of(folder / "out.jsonl").values()))) | set(KEYS)
