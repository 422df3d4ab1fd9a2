"""Jobs that are killed, told to stop, or run out of disk: nothing lost, nothing twice, every token as undisturbed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import model_folder
from command import run
from tiny_models import VOCABULARY

KILLS = 36
REQUESTS = 24
ENDS = [5, 6, 7]


class Server:
    """Starts jobs (`job_server.py`)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("job_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, options: dict[str, Any], **end: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        given = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
        self._process.stdin.write(json.dumps({"options": given} | end) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends texts, a plan, and requests of all lengths."""
    place = tmp_path_factory.mktemp("job")
    shutil.copytree(model_folder("mixtral"), place / "model")
    (place / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    source = random.Random(3)
    with (place / "prompts.jsonl").open("w") as file:
        for number in range(REQUESTS):
            tokens = [source.randrange(VOCABULARY) for _ in range(source.randrange(1, 12))]
            name = f"r{number} {'x' * 200}"  # so that results take more than a block of a disk
            request = {"id": name, "prompt_token_ids": tokens, "max_new_tokens": source.randrange(1, 13)}
            file.write(json.dumps(request) + "\n")
    pins = ("--micro-batch", 3, "--num-micro-batches", 3, "--attention", "cpu", "--weights-on-gpu", 0.3)
    lengths = ("--prompt-len", 12, "--gen-len", 12, "--requests", REQUESTS)
    every = ("--hw", "l4", "--model", place / "model" / "config.json", "--compute-dtype", "fp32", *lengths, *pins)
    done = run("plan", *every, "-o", place / "plan.json")
    assert done.code == 0, done.err
    return place


def options_of(folder: Path, output: Path, **more: Any) -> dict[str, Any]:
    return {
        "plan_file": folder / "plan.json",
        "model_dir": folder / "model",
        "source": folder / "prompts.jsonl",
        "output": output,
        "device": "cpu",
        "steps": 2,
    } | more


def results_in(output: Path) -> dict[str, dict[str, Any]]:
    """Results by id; every line is whole, and no id is there twice."""
    text = output.read_text(encoding="utf-8")
    assert text.endswith("\n") or not text
    rows = [json.loads(line) for line in text.splitlines()]
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture(scope="module")
def undisturbed(server: Server, folder: Path) -> tuple[dict[str, dict[str, Any]], float]:
    """Results of a run that nothing disturbs, and how long it takes."""
    server.start(options_of(folder, folder / "first.jsonl"))  # kernels are compiled once per machine
    done = server.start(options_of(folder, folder / "whole.jsonl"))
    assert done["code"] == 0, done
    found = results_in(folder / "whole.jsonl")
    assert len(found) == REQUESTS
    reasons = {row["finish_reason"] for row in found.values()}
    assert reasons == {"stop", "length"}
    return found, done["seconds"]


def test_killed_at_random_instants_the_union_is_that_of_an_undisturbed_run(
    server: Server, folder: Path, undisturbed: tuple[dict[str, dict[str, Any]], float], tmp_path: Path
) -> None:
    wanted, seconds = undisturbed
    source = random.Random(11)
    kills = jobs = with_half = 0
    while kills < KILLS:
        output, seen = tmp_path / f"out{jobs}.jsonl", 0
        jobs += 1
        while True:
            last = kills >= KILLS  # the last job is brought to its end
            how: dict[str, Any] = {"kill_after_s": source.uniform(0.1, 0.9) * seconds}
            if source.random() < 0.3:
                how = {"half_line": source.randrange(1, REQUESTS)}
            done = server.start(options_of(folder, output), **({} if last else how))
            if done["code"] == 0:
                break
            assert done["code"] == -signal.SIGKILL, done
            kills += 1
            held = output.read_bytes() if output.exists() else b""
            with_half += bool(held) and not held.endswith(b"\n")
            whole = held[: held.rfind(b"\n") + 1].splitlines()
            assert len(whole) >= seen  # what was there stays
            seen = len(whole)
        assert results_in(output) == wanted
    assert kills >= KILLS and with_half >= 3


def test_told_to_stop_it_finishes_the_step_and_goes_on_later(
    server: Server, folder: Path, undisturbed: tuple[dict[str, dict[str, Any]], float], tmp_path: Path
) -> None:
    wanted, seconds = undisturbed
    output, codes = tmp_path / "out.jsonl", []
    for share in (0.3, 0.5, 0.7):
        done = server.start(options_of(folder, output), kill_after_s=share * seconds, signal=signal.SIGTERM)
        codes.append(done["code"])
    assert set(codes) <= {130, 0} and codes[0] == 130
    assert server.start(options_of(folder, output))["code"] == 0
    assert results_in(output) == wanted


@pytest.mark.parametrize("share", [0.0, 0.3, 0.61, 0.95])
def test_a_file_that_cannot_grow_loses_nothing(
    share: float, server: Server, folder: Path, undisturbed: tuple[dict[str, dict[str, Any]], float], tmp_path: Path
) -> None:
    wanted, _ = undisturbed
    room = int(share * (folder / "whole.jsonl").stat().st_size)
    output = tmp_path / "out.jsonl"
    done = server.start(options_of(folder, output), file_bytes=room)
    assert done["code"] == 2 and "cannot be written any more" in done["said"]
    before = results_in(output)
    assert f"it has {len(before):,} results, whole" in done["said"]
    assert len(before) >= int(share * REQUESTS) - 2
    assert server.start(options_of(folder, output))["code"] == 0
    assert results_in(output) == wanted


def test_a_full_disk_loses_nothing(
    server: Server, folder: Path, undisturbed: tuple[dict[str, dict[str, Any]], float], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root; the test of a file that cannot grow stands in")
    try:
        output, ballast = disk / "out.jsonl", disk / "ballast"
        done = server.start(options_of(folder, output), fill_line=9, ballast=str(ballast))
        assert done["code"] == 2 and "No space left on device" in done["said"], done
        there = results_in(output)
        assert 8 <= len(there) < REQUESTS and f"it has {len(there)} results, whole" in done["said"]
        done = server.start(options_of(folder, output))  # said before anything runs
        assert done["code"] == 2 and "are free there" in done["said"], done
        assert results_in(output) == there
        ballast.unlink()
        assert server.start(options_of(folder, output))["code"] == 0
        assert results_in(output) == undisturbed[0]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_truncated_shard_is_named_and_what_is_done_stays(
    server: Server, folder: Path, undisturbed: tuple[dict[str, dict[str, Any]], float], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    assert server.start(options_of(folder, output), half_line=12)["code"] == -signal.SIGKILL
    shutil.copytree(folder / "model", tmp_path / "model")
    shard = sorted((tmp_path / "model").glob("*.safetensors"))[3]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    done = server.start(options_of(folder, output, model_dir=tmp_path / "model"))
    assert done["code"] == 2 and f"{shard.name}: is truncated" in done["said"]
    assert len(results_in(output)) == 11
    shard.write_bytes(whole)
    assert server.start(options_of(folder, output, model_dir=tmp_path / "model"))["code"] == 0
    assert results_in(output) == undisturbed[0]
