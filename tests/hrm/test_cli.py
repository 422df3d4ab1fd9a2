"""The command: exit codes, error texts, what goes to which stream, and that no traceback ever reaches a person."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import PAPER, SMALL, WIDE, Outcome, refused, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hrm.model_files import find_config
from hrm.profile_files import load_profile, profile_document

QUICK = (*PAPER, "--prompt-len", "77", "--micro-batch", "324", "--num-micro-batches", "14")
FUZZ = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40
)


def spawn(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 120} | options
    options["env"] = os.environ | WIDE | options.get("env", {})
    return subprocess.run([sys.executable, "-m", "hrm", *map(str, arguments)], check=False, **options)


def assert_speaks(outcome: Outcome) -> None:
    """Exit code 0, 2 or 3; on failure a message on standard error only; never a traceback."""
    assert outcome.code in (0, 2, 3), outcome
    assert "Traceback" not in outcome.err and "should not have happened" not in outcome.err, outcome.err
    if outcome.code == 0:
        assert outcome.err == ""
    else:
        assert outcome.out == ""
        assert outcome.err.startswith(("hrm: ", "Usage: hrm ", "Error: ")), outcome.err


# Streams and exit codes


def test_json_is_exactly_one_document_on_stdout_and_nothing_on_stderr() -> None:
    """In a process of its own, where the solver's banner would show."""
    done = spawn("plan", "--hw", "t4.yaml", "--model", "granite-3.1-1b-a400m", "--requests", 64, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["policy"]["batch_size"] >= 1
    assert done.stdout.startswith("{") and done.stdout.endswith("}\n")


def test_the_screen_is_all_there_is_on_stdout() -> None:
    done = spawn(*SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("granite-3.1-1b-a400m (1.3B parameters, 2.7 GB) on t4: ")
    assert "\nfull cost model; HiGHS" in done.stdout
    assert "\x1b" not in done.stdout
    assert all(line == line.rstrip() and len(line) <= 118 for line in done.stdout.splitlines())


def test_it_runs_in_an_empty_folder(tmp_path: Path) -> None:
    done = spawn(*QUICK, "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_no_failure() -> None:
    command = " ".join([sys.executable, "-m", "hrm", *SMALL])
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [(*QUICK, "--json"), ("models",), ("--version",)])
def test_a_full_disk_is_said_in_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = spawn(*arguments, stdout=full)
    assert done.returncode == 2
    assert done.stderr == "hrm: standard output: cannot be written: No space left on device\n"


def test_a_closed_stdout_is_said_in_one_line() -> None:
    command = " ".join([sys.executable, "-m", "hrm", *QUICK])
    done = subprocess.run(["bash", "-c", f"{command} >&-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hrm: standard output: is closed (a terminal, a file or a pipe)\n"


def test_a_name_that_the_terminal_cannot_show_does_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "модель"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(find_config("mixtral")["values"]), encoding="utf-8")
    done = spawn(*QUICK, "--model", folder, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("?????? (46.7B parameters")


def test_version_and_help_are_exit_code_0() -> None:
    from hrm import __version__

    assert run("--version") == Outcome(code=0, out=f"hrm {__version__}\n", err="")
    for arguments in (("--help",), ("plan", "--help"), ("hardware", "--help"), ("models", "show", "-h")):
        outcome = run(*arguments)
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith("Usage: hrm ")


def test_every_pinnable_variable_has_an_option() -> None:
    from dataclasses import fields

    from hrm.pins import Pins, option_name

    text = run("plan", "--help").out
    for field in fields(Pins):
        assert f"{option_name(field.name)} " in text


@pytest.mark.parametrize(("shell", "words"), [("bash", "complete -o default -F"), ("zsh", "#compdef hrm")])
def test_shells_get_completion(shell: str, words: str) -> None:
    done = spawn(env={"_HRM_COMPLETE": f"source_{shell}"})
    assert (done.returncode, done.stderr) == (0, "") and words in done.stdout


@pytest.mark.parametrize(
    ("line", "suggestions"),
    [
        ("hrm plan --hw t4", ["t4", "t4-paper", "t4x2", "t4x4"]),
        ("hrm plan --model mix", ["mixtral-8x7b", "mixtral-8x22b"]),
        ("hrm hardware show h", ["h100", "h200"]),
    ],
)
def test_names_of_machines_and_models_complete(line: str, suggestions: list[str]) -> None:
    asked = {"_HRM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    assert spawn(env=asked).stdout.split() == suggestions


# Wrong input: exact texts


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--requests", 0), "workload mtbench: number of requests is 0 (a whole number from 1 to 1,000,000,000)"),
        (("--gen-len", -1), "workload mtbench: generation length is -1 (a whole number from 1 to 10,000,000)"),
        (("--prompt-len", 0), "workload: prompt length is 0 (a whole number from 1 to 10,000,000)"),
        (
            ("--prompt-len", 4000, "--gen-len", 200_000),
            "workload: the longest request has 204000 tokens (prompt + generation), granite-3.1-1b-a400m allows 131072 "
            "(shorter prompts or --gen-len, or another model)",
        ),
        (("--max-hours", "nan"), "--max-hours: nan is no bound (hours, above 0 and at most a million)"),
        (("--max-hours", 0), "--max-hours: 0.0 is no bound (hours, above 0 and at most a million)"),
        (
            ("--workload", "mtbnech"),
            "no workload is called 'mtbnech' (did you mean mtbench? "
            "known: mtbench, synthetic-reasoning, summarization)",
        ),
        (
            ("--workload", "mtbench", "--prompt-len", 5),
            "workload: --workload and --prompt-len describe the prompts twice (give one of them)",
        ),
        (("--set", "cpu.memory"), "--set: 'cpu.memory' is no KEY=VALUE (e.g. --set cpu.memory='416 GB')"),
        (("--set", "cpu.memory=416"), "override: cpu.memory: '416' has no unit (try '416 GB' or '416 GiB')"),
        (("--set", "cpu.memroy=416 GB"), "t4: override: unknown key 'cpu.memroy' (did you mean 'cpu.memory'?)"),
        (
            ("--set", "link=1 GB/s"),
            "t4: override: unknown key 'link' (it has link.copy_latency, link.device_to_host.pageable, "
            "link.device_to_host.pinned, link.device_to_host.with_opposite, link.host_to_device.pageable, "
            "link.host_to_device.pinned, link.host_to_device.with_opposite)",
        ),
        (
            ("--compute-dtype", "fp8", "--weights-dtype", "fp8"),
            "--compute-dtype: NVIDIA T4 does not compute in fp8 (one of fp16, int8, fp32)",
        ),
        (
            ("--compute-dtype", "int8"),
            "--compute-dtype: int8 arithmetic needs int8 weights, these are bf16 (--weights-dtype int8)",
        ),
        (
            ("--kv-dtype", "int3"),
            "--kv-dtype: unknown number format 'int3' "
            "(did you mean int8? one of fp32, fp16, bf16, fp8, int8, int4, mxfp4)",
        ),
        (("--prompts", "nosuch.csv"), "nosuch.csv: no such file (a CSV or JSONL file of prompt lengths)"),
        (("--model", ""), "model: the name of the model is empty (see `hrm models`)"),
        (("--hw", ""), "the name of the hardware profile is empty (see: hrm hardware)"),
        (("--hw", "no-such.yaml"), None),
        (("-o", "no/such/folder/plan.json"), "--output: no/such/folder/plan.json: its folder does not exist"),
    ],
)
def test_wrong_input_is_refused_with_what_would_be_accepted(options: tuple[object, ...], text: str | None) -> None:
    base = SMALL if options[0] not in ("--gen-len", "--requests") else (*SMALL[:5],)
    said = refused(*base, *options)
    if text is not None:
        assert said == text
    else:
        assert said.startswith("there is no file and no bundled hardware profile of the name 'no-such.yaml' (known: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan",), "Missing option '--hw'"),
        (("plan", "--hw", "t4"), "Missing option '--model'"),
        ((*SMALL, "--requests", "1e6"), "'1e6' is not a valid int"),
        ((*SMALL, "--attention", "tpu"), "'tpu' is not one of 'cpu', 'gpu'"),
        ((*SMALL, "--weight-slots", "3"), "'3' is not one of '1', '2', 'experts'"),
        ((*SMALL, "--no-such-option"), "No such option: --no-such-option"),
        ((*SMALL, "extra"), "unexpected extra argument"),
        ((*SMALL, "--set"), "Option '--set' requires an argument"),
        (("nosuch",), "No such command 'nosuch'"),
    ],
)
def test_usage_errors_are_exit_code_2_with_the_option(arguments: tuple[str, ...], words: str) -> None:
    outcome = run(*arguments)
    assert_speaks(outcome)
    assert outcome.code == 2 and words in outcome.err


def test_an_output_that_cannot_be_written_still_shows_the_plan(tmp_path: Path) -> None:
    outcome = run(*QUICK, "--json", "-o", tmp_path)
    assert outcome.code == 2
    assert outcome.err == f"hrm: {tmp_path}: cannot be written: Is a directory\n"
    assert outcome.document["policy"]["micro_batch_size"] == 324


def test_an_interrupt_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hrm.planning.find_policy", interrupt)
    outcome = run(*SMALL)
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "hrm: interrupted\n")


def test_even_a_bug_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("hrm.planning.find_policy", fail)
    outcome = run(*SMALL)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "hrm: this should not have happened: ZeroDivisionError: division by zero "
        "(please report it, with HRM_TRACEBACK=1)\n"
    )


@pytest.mark.parametrize(
    "options",
    [
        ("plan", "--hw", f"{'a' * 300}.yaml", "--model", "dbrx"),
        ("plan", "--hw", "t4", "--model", "dbrx", "-o", f"{'a' * 300}.json"),
        ("hardware", "check", f"{'a' * 300}.yaml"),
    ],
)
def test_a_name_that_no_file_can_have_is_wrong_input(options: tuple[str, ...]) -> None:
    outcome = run(*options)
    assert (outcome.code, outcome.out) == (2, "")
    assert "aaa" in outcome.err
    assert outcome.err.count("\n") == 1


# Files of a person's own


def test_a_file_in_the_folder_comes_before_a_bundled_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = profile_document(load_profile("t4"))
    document["title"] = "mine"
    (tmp_path / "t4.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run(*SMALL, "--hw", "t4.yaml").out.splitlines()[0].endswith(" on t4: mine")
    assert not run(*SMALL, "--hw", "t4").out.splitlines()[0].endswith(" on t4: mine")


def test_a_folder_named_like_a_model_is_that_model_only_with_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixtral").mkdir()
    assert run("models", "show", "mixtral", "--json").document["parameters"] == 46_702_792_704
    config = find_config("granite-3.1-1b-a400m")["values"]
    (tmp_path / "mixtral" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert run("models", "show", "mixtral", "--json").document["parameters"] < 2_000_000_000
    os.symlink("mixtral", tmp_path / "link é")
    assert run("models", "show", "link é", "--json").document["name"] == "link é"


@pytest.mark.parametrize("option", ["--hw", "--model", "--prompts"])
@pytest.mark.parametrize("content", ["folder", "empty", "binary"])
def test_a_folder_an_empty_or_a_binary_file_is_refused_by_name(option: str, content: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    if content == "folder":
        file.mkdir()
    else:
        file.write_bytes(b"" if content == "empty" else bytes(range(256)))
    assert refused(*SMALL, option, file).startswith(f"{file}: ")


def test_own_prompt_lengths_are_read_from_csv_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt_tokens\n10\n30\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"prompt_tokens": 10}\n30\n', encoding="utf-8")
    for name in ("a.csv", "b.jsonl"):
        workload = run(*SMALL, "--prompts", tmp_path / name, "--json").document["inputs"]["workload"]
        assert (workload["mean_prompt_tokens"], workload["max_prompt_tokens"]) == (20, 30)
        assert workload["name"] == name[0]


def test_given_no_workload_the_screen_says_which_one_was_taken() -> None:
    document = run("plan", "--hw", "t4", "--model", "granite-3.1-1b-a400m", "--requests", 2, "--json").document
    assert document["inputs"]["workload"]["name"] == "mtbench"
    assert document["notes"][0] == "no workload given: mtbench, generation length 128."
    assert document["inputs"]["workload"]["generation_length"] == 128


def test_set_replaces_a_number_of_the_profile() -> None:
    document = run(*SMALL, "--set", "cpu.memory='416 GB'", "--json").document
    assert document["memory"]["cpu"]["limit_bytes"] == pytest.approx(416e9 - 8 * 2**30)


# Anything at all, by hypothesis

NUMBERS = st.one_of(
    st.sampled_from(
        ["0", "-1", "1", "2", "nan", "inf", "-inf", "1e9", "1e999", "0.5", "99999999999999999999", "", "x"]
    ),
    st.integers(-3, 12).map(str),
    st.floats(width=16).map(str),
)
WORDS = st.one_of(
    st.sampled_from(["fp16", "bf16", "fp8", "int8", "int4", "mxfp4", "fp32", "FP16", "cpu", "gpu", "experts", "none"]),
    st.sampled_from(
        ["resident", "streamed", "mtbench", "summarization", "t4", "mixtral", "/", ".", "a=b", "cpu.memory=1 GB"]
    ),
    st.text(st.characters(blacklist_categories=("Cs",)), max_size=6),
)
VALUED = (
    *("--batch", "--micro-batch", "--num-micro-batches", "--prefill-micro-batch", "--weights-on-gpu"),
    *("--weights-on-disk", "--kv-on-gpu", "--kv-on-disk", "--gen-len", "--prompt-len", "--requests", "--max-hours"),
    *("--attention", "--ffn", "--weight-slots", "--dense-weights", "--embedding", "--lm-head", "--weights-dtype"),
    *("--kv-dtype", "--compute-dtype", "--workload", "--prompts", "--set", "--cost-model"),
)
FLAGS = ("--padded", "--no-padded", "--pin-weights", "--no-pin-weights", "--json")


@given(
    valued=st.lists(st.tuples(st.sampled_from(VALUED), st.one_of(NUMBERS, WORDS)), max_size=3),
    flags=st.lists(st.sampled_from(FLAGS), max_size=2),
)
@FUZZ
def test_no_arguments_whatever_show_a_traceback(valued: list[tuple[str, str]], flags: list[str]) -> None:
    arguments = [part for pair in valued for part in pair]
    outcome = run(*SMALL, *arguments, *flags)
    assert_speaks(outcome)
    if outcome.code == 0 and "--json" in flags:
        assert outcome.document["solver"]["status"] == "optimal"


@given(
    st.lists(st.one_of(WORDS, st.sampled_from(["plan", "models", "hardware", "show", "check", "roofline"])), max_size=3)
)
@FUZZ
def test_no_command_whatever_shows_a_traceback(arguments: list[str]) -> None:
    assert_speaks(run(*arguments))


T4 = profile_document(load_profile("t4"))
QUANTITIES = sorted(
    f"{section}.{key}"
    for section in ("gpu", "cpu", "disk")
    for key, value in T4[section].items()
    if isinstance(value, dict) and "value" in value
)
WRONG_QUANTITIES = (
    *(float("nan"), float("inf"), -1, True, [], "16 GBs", "-1 GB", "-3 GB/s", "nan GB", "1e999 GB", "1e30 GB/s", "GB"),
    *("16 Gb", 10**400, "１６ GB", "\U0001f600"),
)


def written(file: Path, document: object) -> Path:
    file.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
    return file


@given(key=st.sampled_from(QUANTITIES), value=st.sampled_from(WRONG_QUANTITIES), bare=st.booleans())
@FUZZ
def test_a_wrong_quantity_of_a_profile_is_named_with_file_and_key(
    key: str, value: object, bare: bool, tmp_path: Path
) -> None:
    document = copy.deepcopy(T4)
    section, name = key.split(".")
    document[section][name] = value if bare else {"value": value, "source": "user", "note": ""}
    file = written(tmp_path / "mine.yaml", document)
    said = refused(*SMALL, "--hw", file)
    assert said.startswith(f"{file}: {key}")


@given(key=st.sampled_from(QUANTITIES), typo=st.text("abcdefgh_", min_size=1, max_size=5))
@FUZZ
def test_a_mistyped_key_of_a_profile_is_named(key: str, typo: str, tmp_path: Path) -> None:
    document = copy.deepcopy(T4)
    section, name = key.split(".")
    document[section][name + typo] = document[section].pop(name)
    if name + typo in T4[section]:
        return
    file = written(tmp_path / "mine.yaml", document)
    assert refused(*SMALL, "--hw", file).startswith(f"{file}: {section}: unknown key '{name}{typo}'")


@given(data=st.data())
@FUZZ
def test_a_profile_cut_or_scribbled_on_is_fine_or_refused_by_name(data: st.DataObject, tmp_path: Path) -> None:
    text = yaml.safe_dump(T4)
    start = data.draw(st.integers(0, len(text)), label="start")
    length = data.draw(st.one_of(st.integers(0, 40), st.just(len(text))), label="length")
    scribble = data.draw(st.text(max_size=4), label="scribble")
    file = tmp_path / "mine.yaml"
    file.write_bytes((text[:start] + scribble + text[start + length :]).encode("utf-8", "surrogatepass"))
    outcome = run("hardware", "check", file)
    assert outcome.code in (0, 2)
    if outcome.code:
        assert outcome.out == ""
        assert all(line.startswith("hrm: ") for line in outcome.err.splitlines()) and f"{file}: " in outcome.err


MIXTRAL = find_config("mixtral-8x7b")["values"]
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"),
    *("max_position_embeddings", "num_local_experts", "num_experts_per_tok", "intermediate_size"),
)
WRONG_SIZES = (float("nan"), float("inf"), -1, 0, 1.5, True, None, [], {}, "x", "32", 10**30, -(10**30))


@given(key=st.sampled_from(SIZES), value=st.sampled_from(WRONG_SIZES))
@FUZZ
def test_a_wrong_size_of_a_config_is_named_with_file_and_key(key: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**MIXTRAL, key: value}), encoding="utf-8")
    said = refused(*SMALL, "--model", file)
    assert said.startswith(f"{file}: ") and key in said


@pytest.mark.parametrize("key", [*SIZES, "model_type", "torch_dtype", "tie_word_embeddings", "sliding_window"])
def test_a_missing_key_of_a_config_is_named(key: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({name: value for name, value in MIXTRAL.items() if name != key}), encoding="utf-8")
    said = refused(*SMALL, "--model", file)
    assert said.startswith(f"{file}: ")
    assert ("dtype" if key == "torch_dtype" else key) in said


def test_a_config_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    text = json.dumps(MIXTRAL)
    file = tmp_path / "config.json"
    for length in range(0, len(text), 7):
        file.write_text(text[:length], encoding="utf-8")
        assert refused("models", "show", file).startswith(f"{file}: ")


@given(
    lines=st.lists(st.integers(1, 400).map(str), max_size=5),
    wrong=st.sampled_from(
        ["0", "-3", "nan", "1.5", "x", "1e3", "99999999999", "１２", "7,7", "[1]", '{"n": 3}', "1_000"]
    ),
    position=st.integers(0, 5),
)
@FUZZ
def test_a_wrong_line_of_a_prompt_file_is_named(lines: list[str], wrong: str, position: int, tmp_path: Path) -> None:
    position = min(position, len(lines))
    file = tmp_path / "prompts.csv"
    file.write_text("\n".join([*lines[:position], wrong, *lines[position:]]) + "\n", encoding="utf-8")
    said = refused(*SMALL, "--prompts", file)
    assert said.startswith(f"{file}: line ")
    is_json = position == 0 and wrong.startswith(("{", "["))
    assert said.startswith(f"{file}: line {position + 1}: ") or is_json


@given(content=st.binary(max_size=60))
@FUZZ
def test_any_bytes_as_a_prompt_file_are_lengths_or_refused_by_name(content: bytes, tmp_path: Path) -> None:
    from hrm.errors import InputError
    from hrm.workload_files import read_prompt_lengths

    file = tmp_path / "prompts"
    file.write_bytes(content)
    with contextlib.suppress(InputError):
        lengths = read_prompt_lengths(file)
        assert lengths and all(type(length) is int and length >= 1 for length in lengths)
        return
    assert refused(*SMALL, "--prompts", file).startswith(f"{file}: ")
