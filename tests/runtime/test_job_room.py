"""Jobs whose prompts are not those that were planned for: they run in less than the plan's buffers, token for token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from cases import model_folder
from command import run
from tiny_models import VOCABULARY

from runtime.jobs.runner import JobOptions, run_prompts

REQUESTS, PLANNED, GENERATED = 30, 20, 12
SLACK_BYTES = 1024  # of a real arena 64 KiB, more than a tiny KV cache has


def save_requests(file: Path) -> Path:
    """Some shorter than planned, some three times as long, each with its own limit."""
    source = random.Random(1)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(REQUESTS):
            length = source.randrange(1, source.choice([12, 3 * PLANNED]))
            tokens = [source.randrange(VOCABULARY) for _ in range(length)]
            line = {"id": number, "prompt_token_ids": tokens, "max_new_tokens": source.randrange(1, GENERATED + 1)}
            lines.write(json.dumps(line) + "\n")
    return file


def finish(folder: Path, pins: tuple[object, ...], steps: int | None) -> tuple[dict[str, Any], dict[int, list[int]]]:
    model = model_folder("mixtral")
    lengths = ("--prompt-len", PLANNED, "--gen-len", GENERATED, "--requests", REQUESTS)
    given = ("--hw", "l4", "--model", model / "config.json", "--compute-dtype", "fp32", *lengths)
    done = run("plan", *given, *pins, "-o", folder / "plan.json")
    assert done.code == 0, done.err
    options = JobOptions(
        plan_file=folder / "plan.json",
        model_dir=model,
        source=folder / "in.jsonl",
        output=folder / "out.jsonl",
        device="cpu",
        steps=steps,
    )
    document = run_prompts(options).document
    rows = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    return document, {row["id"]: row["token_ids"] for row in rows}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """Tokens of all requests, in batches of whatever size, with all in GPU memory."""
    folder = tmp_path_factory.mktemp("wanted")
    save_requests(folder / "in.jsonl")
    document, found = finish(folder, ("--micro-batch", 10, "--num-micro-batches", 3, "--attention", "gpu"), None)
    assert document["finished"] == REQUESTS
    return found


@pytest.mark.parametrize(
    ("attention", "on_gpu", "on_disk", "micro_batch", "num_micro_batches", "steps"),
    [
        ("cpu", 0.0, 0.0, 4, 3, None),
        ("cpu", 0.3, 0.5, 4, 3, 1),
        ("cpu", 0.0, 1.0, 2, 3, 2),
        ("cpu", 0.3, 0.0, 2, 1, None),
        ("gpu", 0.3, 0.5, 4, 1, 2),
        ("gpu", 0.0, 0.5, 4, 3, 1),
        ("gpu", 0.3, 0.0, 4, 3, None),
        ("gpu", 0.0, 1.0, 4, 1, None),
    ],
)
def test_whatever_the_prompts_no_buffer_is_larger_than_planned(
    attention: str,
    on_gpu: float,
    on_disk: float,
    micro_batch: int,
    num_micro_batches: int,
    steps: int | None,
    wanted: dict[int, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runtime.arena.SLACK_BYTES", SLACK_BYTES)
    save_requests(tmp_path / "in.jsonl")
    pins = ("--micro-batch", micro_batch, "--num-micro-batches", num_micro_batches, "--attention", attention)
    places = ("--kv-on-gpu", on_gpu, "--kv-on-disk", on_disk, "--weights-on-gpu", 0.4)
    document, found = finish(tmp_path, (*pins, *places), steps)
    assert document["finished"] + len(document["refused"]) == REQUESTS and len(found) == document["finished"]
    assert found == {name: wanted[name] for name in found}
    assert all("the plan" in each["why"] for each in document["refused"])
