"""`hrm run --input`: tokens, texts, lines that cannot run, going on, planning on the spot, refusals."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cases import model_folder
from command import refused, run
from test_requests_file import save_words
from tiny_models import VOCABULARY, reference_generate

from hrm.batching import Request
from hrm.errors import InputError
from hrm.graph import Op, TaskId
from hrm.host_facts import GpuFacts, HostFacts
from hrm.plans import read_plan_document
from hrm.profile_files import load_profile, profile_document, with_overrides
from hrm.units import GIB
from runtime.early_ends import Ended
from runtime.jobs import runner
from runtime.jobs.auto_plan import guess_profile
from runtime.jobs.batch_room import cut_to_room, longest_prompt
from runtime.jobs.preflight import output_bytes
from runtime.jobs.progress import JobProgress, duration
from runtime.jobs.requests_file import JobRequest
from runtime.jobs.runner import JobOptions, run_prompts
from runtime.jobs.stopping import stop_on_sigterm
from runtime.placement import place_batch

GENERATED, PROMPT = 8, 12
ENDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("jobs")
    shutil.copytree(model_folder("mixtral"), place / "model")
    (place / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    save_words(place / "model")
    pins = ("--micro-batch", 3, "--num-micro-batches", 2, "--attention", "cpu", "--weights-on-gpu", 0.3)
    lengths = ("--prompt-len", PROMPT, "--gen-len", GENERATED, "--requests", 12)
    every = ("--hw", "l4", "--model", place / "model" / "config.json", "--compute-dtype", "fp32", *lengths, *pins)
    done = run("plan", *every, "-o", place / "plan.json")
    assert done.code == 0, done.err
    return place


def prompts_of(count: int, longest: int = PROMPT, seed: int = 1) -> dict[str, list[int]]:
    source = random.Random(seed)
    return {
        f"r{number}": [source.randrange(VOCABULARY) for _ in range(source.randrange(1, longest + 1))]
        for number in range(count)
    }


def write(file: Path, prompts: dict[str, list[int]], limits: Sequence[int | None] = (None,)) -> Path:
    lines = []
    for number, (name, tokens) in enumerate(prompts.items()):
        limit = limits[number % len(limits)]
        lines.append({"id": name, "prompt_token_ids": tokens} | ({} if limit is None else {"max_new_tokens": limit}))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def rows_of(file: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def job(folder: Path, source: Path, output: Path, *options: object) -> tuple[int, dict[str, Any], str]:
    given = ("run", folder / "plan.json", "--model-dir", folder / "model", "--device", "cpu")
    done = run(*given, "--input", source, "--output", output, *options, "--json")
    return done.code, done.document if done.out else {}, done.err


def test_every_request_ends_at_an_end_token_or_at_its_own_limit(folder: Path, tmp_path: Path) -> None:
    prompts, limits = prompts_of(15), (3, None, 8, 1, 5)
    source = write(tmp_path / "in.jsonl", prompts, limits)
    code, document, _ = job(folder, source, tmp_path / "out.jsonl")
    whole, _ = reference_generate(folder / "model", list(prompts.values()), GENERATED)
    found = rows_of(tmp_path / "out.jsonl")
    assert code == 0 and document["batches"] == [6, 6, 3] and document["finished"] == 15
    for number, (name, tokens) in enumerate(prompts.items()):
        expected = whole[number][: limits[number % 5] or GENERATED]
        end = next((place for place, token in enumerate(expected) if token in ENDS), None)
        if end is not None:
            expected = expected[: end + 1]
        row = found[name]
        assert (row["token_ids"], row["finish_reason"]) == (expected, "length" if end is None else "stop")
        assert (row["prompt_tokens"], row["generated_tokens"]) == (len(tokens), len(expected))
    assert document["generated_tokens"] == sum(row["generated_tokens"] for row in found.values())


def test_texts_go_in_and_come_out(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "t", "prompt": "once upon a time"}\n')
    assert job(folder, tmp_path / "in.jsonl", tmp_path / "text.jsonl")[0] == 0
    same = write(tmp_path / "ids.jsonl", {"t": [0, 3, 4, 5, 6]})
    assert job(folder, same, tmp_path / "out.jsonl")[0] == 0
    text, tokens = rows_of(tmp_path / "text.jsonl")["t"], rows_of(tmp_path / "out.jsonl")["t"]
    assert text == tokens and text["prompt_tokens"] == 5
    words = ["", "", "?", "once", "upon", "a", "time"]  # special tokens are no text, nor are those without a word
    spoken = [words[token] for token in text["token_ids"] if token < len(words)]
    assert text["text"] == " ".join(filter(None, spoken))


def test_bad_lines_are_told_with_their_numbers_and_the_others_run(folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", prompts_of(3) | {"long": [1] * 70, "longer": [1] * 250})
    source.write_text(source.read_text() + "oops\n" + '{"id": "r0", "prompt_token_ids": [1]}\n')
    code, document, err = job(folder, source, tmp_path / "out.jsonl")
    assert code == 2 and set(rows_of(tmp_path / "out.jsonl")) == {"r0", "r1", "r2"}
    assert [each["line"] for each in document["refused"]] == [4, 5, 6, 7]
    assert "line 6: 'oops' is not JSON" in err and "line 7: the id 'r0' is that of line 1" in err
    assert (
        "line 4: has 70 tokens, 78 with what is generated, the plan has room for 60" in err
        and "line 5: has 250 tokens, 258 with what is generated" in err
    )


def test_started_again_it_does_what_is_left(folder: Path, tmp_path: Path) -> None:
    prompts = prompts_of(14)
    few = write(tmp_path / "few.jsonl", dict(list(prompts.items())[:5]))
    assert job(folder, few, tmp_path / "out.jsonl")[0] == 0
    before = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text(before + '{"id": "r7", "token_i')
    every = write(tmp_path / "in.jsonl", prompts)
    code, document, err = job(folder, every, tmp_path / "out.jsonl")
    assert code == 0 and (document["finished_before"], document["requests"], document["finished"]) == (5, 9, 9)
    assert "21 bytes of half a result were cut off" in err
    assert (tmp_path / "out.jsonl").read_text().startswith(before)
    assert job(folder, every, tmp_path / "whole.jsonl")[0] == 0
    assert rows_of(tmp_path / "out.jsonl") == rows_of(tmp_path / "whole.jsonl")
    code, document, _ = job(folder, every, tmp_path / "out.jsonl")
    assert code == 0 and document["requests"] == 0


def test_what_is_drawn_does_not_depend_on_where_a_job_was_broken_off(folder: Path, tmp_path: Path) -> None:
    prompts, drawing = prompts_of(9), ("--temperature", 1, "--top-p", 0.9, "--seed", 4)
    every = write(tmp_path / "in.jsonl", prompts)
    assert job(folder, every, tmp_path / "whole.jsonl", *drawing)[0] == 0
    few = write(tmp_path / "few.jsonl", dict(list(prompts.items())[4:6]))
    for source in (few, every):
        assert job(folder, source, tmp_path / "parts.jsonl", *drawing)[0] == 0
    whole = rows_of(tmp_path / "whole.jsonl")
    assert rows_of(tmp_path / "parts.jsonl") == whole
    for name, options in (("other", (*drawing[:-1], 5)), ("greedy", ())):
        assert job(folder, every, tmp_path / name, *options)[0] == 0
        assert rows_of(tmp_path / name) != whole


def test_without_a_plan_one_is_made_said_and_kept(folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", prompts_of(9), (3, 4))
    given = ("run", "--hw", "auto", "--model-dir", folder / "model", "--device", "cpu", "--input", source)
    done = run(*given, "--output", tmp_path / "auto.jsonl")
    assert done.code == 0, done.err
    assert "planned for no CUDA GPU" in done.err and "everything on the CPU" in done.err
    scenario, policy, _ = read_plan_document(tmp_path / "auto.jsonl.plan.json")
    assert policy.everything_on_cpu and scenario.workload.generation_length == 4
    assert "9 of 9 requests" in done.out
    assert job(folder, source, tmp_path / "out.jsonl")[0] == 0
    assert rows_of(tmp_path / "auto.jsonl") == rows_of(tmp_path / "out.jsonl")


def test_without_a_plan_lines_must_say_how_much_or_an_option_does(folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", prompts_of(3))
    given = ("run", "--hw", "l4", "--model-dir", folder / "model", "--device", "cpu", "--input", source)
    said = refused(*given, "--output", tmp_path / "out.jsonl")
    assert "line 1: has no max_new_tokens" in said and "--max-new-tokens N" in said
    done = run(*given, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 2)
    assert done.code == 0, done.err
    assert {row["generated_tokens"] for row in rows_of(tmp_path / "out.jsonl").values()} <= {1, 2}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--layers", 2), "--layers: is not of a job"),
        (("--random-weights",), "--random-weights: is not of a job"),
        (("--hw", "auto"), "--hw: PLAN is one already"),
        (("--top-p", 0.5), "--top-p: the likeliest token is in every nucleus"),
        (("--temperature", -1), "--temperature: -1.0 is no temperature"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: tuple[object, ...], said: str, folder: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", prompts_of(1))
    given = ("run", folder / "plan.json", "--model-dir", folder / "model", "--input", source)
    assert refused(*given, "--output", tmp_path / "out.jsonl", *options).startswith(said)
    assert not (tmp_path / "out.jsonl").exists()


def test_options_of_a_job_without_one_are_refused(folder: Path) -> None:
    for options in (("--temperature", 1), ("--top-p", 0.5), ("--hw", "auto"), ("--max-new-tokens", 3)):
        assert refused("run", folder / "plan.json", *options).startswith(f"{options[0]}: is of a job")
    assert refused("run").startswith("hrm run: which plan is not said")


def test_files_that_would_destroy_something_are_refused(folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", prompts_of(2))
    held = source.read_text()
    given = ("run", folder / "plan.json", "--model-dir", folder / "model", "--device", "cpu", "--input", source)
    assert "is also --input" in refused(*given, "--output", source)
    other = tmp_path / "notes.txt"
    other.write_text("mine\n")
    assert "is not the result of a job" in refused(*given, "--output", other)
    source.write_text("oops\n")
    assert "line 1: 'oops' is not JSON" in refused(*given, "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    source.write_text(held)
    assert source.read_text() == held and other.read_text() == "mine\n"
    assert "no such file" in refused(*given[:-1], tmp_path / "none", "--output", tmp_path / "out")


# Room


def test_prompts_longer_than_planned_make_smaller_batches(folder: Path) -> None:
    scenario, policy, _ = read_plan_document(folder / "plan.json")
    room, most = scenario.workload.batch_tokens(policy.batch_size), longest_prompt(scenario, policy)
    requests = [Request(index=index, prompt_tokens=1 + index % 12, generation_tokens=8) for index in range(40)]
    batches = cut_to_room(requests, policy, scenario)
    assert sorted(each.index for batch in batches for each in batch.requests) == list(range(40))
    for batch in batches:
        assert sum(each.prompt_tokens for each in batch.requests) <= room
        for part in place_batch(batch.micro_batches, batch.policy).prefill:
            placed = place_batch(batch.micro_batches, batch.policy).requests
            assert sum(placed[row].prompt_tokens for row in part) <= most
    assert room == 6 * PROMPT  # as many tokens as six prompts of the plan


def test_a_result_takes_no_more_than_was_counted() -> None:
    request = JobRequest(1, "name", (1, 2), 100)
    # 100 tokens of five digits with comma and space, as many words of six letters with a space
    line = {
        "id": "name",
        "token_ids": [99999] * 100,
        "text": "abcdef " * 100,
        "finish_reason": "length",
        "prompt_tokens": 2,
        "generated_tokens": 100,
    }
    assert len(json.dumps(line)) <= output_bytes([request])


# Disturbances from outside (test_job_kills.py has the rest)


def test_memory_that_others_took_is_said_with_what_is_done(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = runner.finish_batch
    batches = []

    def second_fails(*given: Any) -> None:
        batches.append(given)
        if len(batches) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        real(*given)

    source = write(tmp_path / "in.jsonl", prompts_of(9))
    with monkeypatch.context() as patched:
        patched.setattr(runner, "finish_batch", second_fails)
        code, _, err = job(folder, source, tmp_path / "out.jsonl")
    assert code == 2 and "GPU memory ran out, which something else may have taken" in err
    assert "6 results are in" in err and "start the same command again" in err
    assert len(rows_of(tmp_path / "out.jsonl")) == 6
    assert job(folder, source, tmp_path / "out.jsonl")[0] == 0
    assert len(rows_of(tmp_path / "out.jsonl")) == 9


def test_the_first_sigterm_waits_for_the_step_and_the_second_for_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm() as stopper:
        stopper.may_wait = lambda: True
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
    with stop_on_sigterm() as stopper, pytest.raises(KeyboardInterrupt):  # nothing could end soon: at once
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_disk_without_room_for_the_results_is_said_before_anything_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", prompts_of(9))
    stat = os.statvfs(tmp_path)
    fields = list(stat)
    fields[4] = 0  # blocks that are free
    monkeypatch.setattr("os.statvfs", lambda _: os.statvfs_result(fields))
    code, _, err = job(folder, source, tmp_path / "out.jsonl")
    assert code == 2 and "9 results take up to" in err and "0.00 KiB are free there" in err
    assert not (tmp_path / "out.jsonl").exists()


# A machine that is guessed


def host_of(gpu: GpuFacts | None) -> HostFacts:
    return HostFacts(
        torch="cuda" if gpu else "cpu",
        gpus=(gpu,) if gpu else (),
        cpu_bytes=40 * GIB,
        lockable_bytes=0.0,
        disk_bytes=100 * GIB,
    )


@pytest.mark.parametrize("named", ["t4", "colab-t4"])
def test_a_guess_takes_nine_tenths_of_what_is_free_and_the_rates_of_the_most_similar_machine(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = load_profile(named).cpu.cores
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    profile, words = guess_profile(host_of(GpuFacts(name="Tesla T4", free_bytes=10 * GIB, compute_capability=(7, 5))))
    assert profile.gpu.name == "NVIDIA T4" and profile.gpu.count == 1 and profile.disk is None
    assert profile.gpu.usable_memory_bytes == pytest.approx(9 * GIB, rel=1e-3)
    assert profile.cpu.memory_bytes == pytest.approx(36 * GIB, rel=1e-3)
    assert words.startswith(f"Tesla T4, rates of {named};")
    assert profile.cpu.bandwidth_bytes_per_s == pytest.approx(load_profile(named).cpu.bandwidth_bytes_per_s, rel=1e-3)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    one, _ = guess_profile(host_of(None))
    whole = load_profile("l4").cpu
    assert one.cpu.cores == 1
    assert one.cpu.bandwidth_bytes_per_s == pytest.approx(whole.bandwidth_bytes_per_s / whole.cores, rel=1e-3)


def test_a_guess_takes_the_rates_that_were_measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = load_profile("t4")
    document = profile_document(with_overrides(measured, {"cpu.bandwidth": "12.5 GB/s"}))
    path = tmp_path / "this-machine.yaml"
    path.write_text(yaml.safe_dump(document))
    monkeypatch.setattr("runtime.jobs.auto_plan.calibrated_path", lambda: path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(measured.cpu.cores)))
    gpu = GpuFacts(name="Tesla T4", free_bytes=10 * GIB, compute_capability=(7, 5))
    profile, words = guess_profile(host_of(gpu))
    assert profile.cpu.bandwidth_bytes_per_s == 12.5e9
    assert words.startswith("Tesla T4, as hrm calibrate measured this machine;")
    emulated = with_overrides(measured, {"gpu.host_cores": "1"})  # its CPU is one core: not the machine without a GPU
    path.write_text(yaml.safe_dump(profile_document(emulated)))
    assert guess_profile(host_of(gpu))[1].startswith("Tesla T4, rates of")


def test_a_gpu_that_no_profile_has_is_refused() -> None:
    with pytest.raises(InputError, match="no bundled profile has a NVIDIA Odd"):
        guess_profile(host_of(GpuFacts(name="NVIDIA Odd", free_bytes=1e9, compute_capability=(9, 0))))


# Progress


def test_progress_counts_tokens_of_requests_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = JobProgress(
        requests=3, limits={0: 10, 1: 10, 2: 20}, batches=[(2, 5.0), (1, 7.0)], layers=4, memory=lambda: {"gpu": 2**29}
    )
    progress.on_steps(2, 4)
    progress.on_ended([Ended(0, (1, 2, 3, 4), "stop")])
    progress.on_steps(1, 6)
    task = TaskId(Op.POST_ATTENTION, "decode", 4, 1, 0, None, 0, None)
    # 4 tokens of the one that is done and 6 of the other in 2 s; 4 + 20 are left at most
    assert progress.line(task, 2.0) == (
        "batch 1 of 2, token 6, 1 of 3 done, 5 token/s (5 predicted), 4.8 s left at most, GPU 512.00 MiB"
    )


def test_durations_in_words() -> None:
    assert [duration(seconds) for seconds in (3.2, 59, 61, 3599, 3700, 90000)] == [
        "3.2 s",
        "59 s",
        "1 min",
        "1 h 0 min",
        "1 h 2 min",
        "25 h 0 min",
    ]


def test_progress_is_told_while_a_job_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.jobs.progress.TELL_EVERY_S", 0.0)
    told: list[str] = []
    options = JobOptions(
        plan_file=folder / "plan.json",
        model_dir=folder / "model",
        source=write(tmp_path / "in.jsonl", prompts_of(8)),
        output=tmp_path / "out.jsonl",
        device="cpu",
    )
    assert run_prompts(options, tell=told.append).exit_code == 0
    assert "loading layers: 3 of 3" in told
    assert any("batch 1 of 2, prefill of 6 requests, layer 2 of 3, 0 of 8 done" in line for line in told)
    assert any("batch 2 of 2, token " in line and "token/s (" in line and "left at most" in line for line in told)
