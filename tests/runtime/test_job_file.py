"""A job that is gone on with is the same job: what tokens depend on may not change under the results that are there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import model_folder
from command import run
from test_jobs import prompts_of, rows_of, write
from test_requests_file import save_words

from hrm.errors import InputError
from runtime.jobs.runner import JobOptions, run_prompts
from runtime.jobs.sampling import Sampling

DRAWN = Sampling(temperature=1.0, top_p=0.9, seed=4)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two plans for it, five requests and fourteen."""
    found = tmp_path_factory.mktemp("job-file")
    shutil.copytree(model_folder("mixtral"), found / "model")
    save_words(found / "model")
    lengths = ("--prompt-len", 12, "--gen-len", 8, "--requests", 12)
    given = ("--hw", "l4", "--model", found / "model" / "config.json", "--compute-dtype", "fp32", *lengths)
    for name, pins in (("plan", (3, "--num-micro-batches", 2)), ("other", (2, "--num-micro-batches", 4))):
        done = run("plan", *given, "--micro-batch", *pins, "--attention", "cpu", "-o", found / f"{name}.json")
        assert done.code == 0, done.err
    prompts = prompts_of(14)
    write(found / "few.jsonl", dict(list(prompts.items())[:5]))
    write(found / "all.jsonl", prompts)
    start(found, found / "drawn.jsonl", "all.jsonl")
    start(found, found / "greedy.jsonl", "all.jsonl", sampling=Sampling())
    return found


def start(place: Path, output: Path, source: str | Path, **more: Any) -> list[str]:
    """Run a job; what it says."""
    said: list[str] = []
    given: dict[str, Any] = {"plan_file": place / "plan.json", "model_dir": place / "model", "sampling": DRAWN}
    options = JobOptions(**(given | {"source": place / source, "output": output, "device": "cpu"} | more))
    assert run_prompts(options, say=said.append).exit_code == 0
    return said


def changed_model(place: Path, tmp_path: Path, change: Callable[[Path], object]) -> Path:
    shutil.copytree(place / "model", tmp_path / "changed")
    change(tmp_path / "changed")
    return tmp_path / "changed"


def flip_a_value(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (Sampling(temperature=1.0, top_p=0.9, seed=5), r"--seed is 5, of its 5 results it was 4 \(--seed 4; or"),
        (Sampling(temperature=0.5, top_p=0.9, seed=4), "--temperature is 0.5, of its 5 results it was 1 "),
        (Sampling(temperature=1.0, seed=4), "--top-p is 1, of its 5 results it was 0.9"),
        (Sampling(), "--temperature is 0, of its 5 results it was 1"),
        (Sampling(temperature=1.0, top_p=0.9, seed=1234567), r"--seed is 1234567, of its 5 results it was 4 "),
        (Sampling(temperature=0.1234567, top_p=0.9, seed=4), "--temperature is 0.1234567, of its 5 results it was 1 "),
    ],
)
def test_another_way_of_sampling_is_refused(place: Path, tmp_path: Path, sampling: Sampling, said: str) -> None:
    start(place, tmp_path / "out.jsonl", "few.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(InputError, match=said):
        start(place, tmp_path / "out.jsonl", "all.jsonl", sampling=sampling)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    start(place, tmp_path / "out.jsonl", "all.jsonl")
    assert rows_of(tmp_path / "out.jsonl") == rows_of(place / "drawn.jsonl")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (flip_a_value, r"safetensors: has other weights than those of its 5 results"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "its 5 results are of another tokenizer.json"),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [5, 9]}'),
            r"end tokens are \[5, 9\], of its 5 results \[",
        ),
        (
            lambda folder: (folder / "config.json").write_text(
                json.dumps(json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 0.5})
            ),
            r"rms_norm_eps is 0.5, there 1e-0",
        ),
    ],
)
def test_another_model_is_refused(place: Path, tmp_path: Path, change: Callable[[Path], object], said: str) -> None:
    start(place, tmp_path / "out.jsonl", "few.jsonl")
    with pytest.raises(InputError, match=said):
        start(place, tmp_path / "out.jsonl", "all.jsonl", model_dir=changed_model(place, tmp_path, change))


def test_the_same_model_elsewhere_another_plan_and_a_seed_that_is_not_used_change_nothing(
    place: Path, tmp_path: Path
) -> None:
    start(place, tmp_path / "out.jsonl", "few.jsonl", sampling=Sampling())
    moved = changed_model(place, tmp_path, lambda folder: (folder / "README.md").write_text("moved"))
    more = {"plan_file": place / "other.json", "model_dir": moved, "sampling": Sampling(seed=7)}
    said = start(place, tmp_path / "out.jsonl", "all.jsonl", **more)
    assert said == [f"{tmp_path / 'out.jsonl'}: 5 results are there, 9 requests are left"]
    assert rows_of(tmp_path / "out.jsonl") == rows_of(place / "greedy.jsonl")


def test_other_formats_are_said(place: Path, tmp_path: Path) -> None:
    start(place, tmp_path / "out.jsonl", "few.jsonl")
    file = tmp_path / "out.jsonl.job.json"
    kept = json.loads(file.read_text())
    assert kept["formats"] == {"compute": "fp32", "kv": "fp32"}
    file.write_text(json.dumps(kept | {"formats": {"compute": "fp16", "kv": "fp16"}}))
    said = start(place, tmp_path / "out.jsonl", "all.jsonl")
    assert "computed in fp16 (KV cache fp16), those to come in fp32 (fp32)" in said[-1]


def lines_of(place: Path, number: int, **more: Any) -> str:
    """All requests, one of them changed."""
    lines = [json.loads(line) for line in (place / "all.jsonl").read_text().splitlines()]
    lines[number] |= more
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_another_prompt_or_another_limit_under_the_same_id_is_refused(place: Path, tmp_path: Path) -> None:
    start(place, tmp_path / "out.jsonl", "few.jsonl", sampling=Sampling())
    tokens = prompts_of(14)["r3"]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"prompt_token_ids": [*tokens[:-1], tokens[-1] ^ 1]}, "result of 'r3' is of another prompt than line 4 has"),
        ({"prompt_token_ids": [*tokens, 1]}, "result of 'r3' is of another prompt than line 4 has"),
        ({"max_new_tokens": 7}, "result of 'r3' ends after 8 tokens, and line 4 now asks for 7"),
    ]
    for change, said in changes:
        (tmp_path / "in.jsonl").write_text(lines_of(place, 3, **change))
        with pytest.raises(InputError, match=said):
            start(place, tmp_path / "out.jsonl", tmp_path / "in.jsonl", sampling=Sampling())
    # what has no result yet may change
    (tmp_path / "in.jsonl").write_text(lines_of(place, 9, max_new_tokens=2))
    start(place, tmp_path / "out.jsonl", tmp_path / "in.jsonl", sampling=Sampling())
    assert rows_of(tmp_path / "out.jsonl")["r9"]["generated_tokens"] == 2


def test_without_the_file_it_goes_on_and_says_what_is_not_known(place: Path, tmp_path: Path) -> None:
    start(place, tmp_path / "out.jsonl", "few.jsonl")
    (tmp_path / "out.jsonl.job.json").unlink()
    said = start(place, tmp_path / "out.jsonl", "all.jsonl")
    assert "job.json is not beside it" in said[-1]
    assert rows_of(tmp_path / "out.jsonl") == rows_of(place / "drawn.jsonl")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"config": 1}'])
def test_a_file_that_is_none_is_refused(place: Path, tmp_path: Path, text: str) -> None:
    start(place, tmp_path / "out.jsonl", "few.jsonl")
    (tmp_path / "out.jsonl.job.json").write_text(text)
    with pytest.raises(InputError, match=r"out\.jsonl\.job\.json.*remove it"):
        start(place, tmp_path / "out.jsonl", "all.jsonl")


def test_results_that_were_removed_bind_nobody(place: Path, tmp_path: Path) -> None:
    start(place, tmp_path / "out.jsonl", "few.jsonl")
    (tmp_path / "out.jsonl").unlink()
    start(place, tmp_path / "out.jsonl", "all.jsonl", sampling=Sampling())
    assert rows_of(tmp_path / "out.jsonl") == rows_of(place / "greedy.jsonl")
