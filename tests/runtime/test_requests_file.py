"""Requests of a job: what a line may say, and that a bad one is named and the others run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hrm.errors import InputError
from runtime.jobs.requests_file import Fault, JobRequest, Limits, read_requests
from runtime.jobs.text import find_end_tokens, open_tokenizer

LIMITS = Limits(vocabulary=96, positions=64, new_tokens=8)


def spelled(texts: Sequence[str]) -> list[list[int]]:
    """A letter is its place in the alphabet, and the first token is always 1; spaces are nothing."""
    return [[1] + [ord(letter) - 96 for letter in text if letter != " "] for text in texts]


def write(folder: Path, *lines: str | bytes) -> Path:
    file = folder / "prompts.jsonl"
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return file


def test_texts_and_tokens_become_requests_in_file_order(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        '{"id": "a", "prompt": "cab", "max_new_tokens": 3}',
        "",
        '{"id": 7, "prompt_token_ids": [5, 6]}',
        '{"id": "7", "prompt": "b", "prompt_token_ids": null}',
    )
    assert read_requests(file, LIMITS, encode=spelled) == (
        [
            JobRequest(1, "a", (1, 3, 1, 2), 3),
            JobRequest(3, 7, (5, 6), 8),
            JobRequest(4, "7", (1, 2), 8),
        ],
        [],
    )


BAD = {
    "{": "'{' is not JSON",
    "[1, 2]": "'[1, 2]' is no object with an id and a prompt",
    '{"prompt": "a"}': "has no id",
    '{"id": true, "prompt": "a"}': "True is no id: a text or a whole number",
    '{"id": "\\ud800", "prompt": "a"}': "has an id that is no text in UTF-8",
    '{"id": "x"}': "has neither prompt nor prompt_token_ids: one of them is needed",
    '{"id": "x", "prompt": "a", "prompt_token_ids": [1]}': "has both prompt and prompt_token_ids: one of them is needed",  # noqa: E501
    '{"id": "x", "prompt": ""}': "prompt: '' is no text",
    '{"id": "x", "prompt": "a\\ud800"}': "prompt: 'a\\ud800' is no text",
    '{"id": "x", "prompt_token_ids": [1, -1]}': "prompt_token_ids: -1 is no token id",
    '{"id": "x", "prompt_token_ids": [96]}': "has the token 96, the model has 96",
    '{"id": "x", "prompt": "a", "max_tokens": 3}': (
        "unknown key 'max_tokens', known are id, prompt, prompt_token_ids, max_new_tokens"
    ),
    '{"id": "x", "prompt": "a", "max_new_tokens": 0}': "max_new_tokens: 0 is no whole number from 1 on",
    '{"id": "x", "prompt": "a", "max_new_tokens": 9}': "max_new_tokens: 9 is more than the 8 of the plan",
    '{"id": "first", "prompt": "a"}': "the id 'first' is that of line 1",
    json.dumps({"id": "x", "prompt_token_ids": [1] * 57}): (
        "has 57 tokens, 65 with what is generated, the model has 64 positions"
    ),
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named_and_the_others_run(line: str, tmp_path: Path) -> None:
    file = write(tmp_path, '{"id": "first", "prompt": "a"}', line, '{"id": "last", "prompt": "b"}')
    found, faults = read_requests(file, LIMITS, encode=spelled)
    assert [request.id for request in found] == ["first", "last"]
    assert faults == [Fault(2, BAD[line])]


def test_bytes_that_are_no_text_are_a_fault_of_their_line(tmp_path: Path) -> None:
    file = write(tmp_path, b'{"id": "\xff"}', '{"id": 1, "prompt": "a"}')
    found, faults = read_requests(file, LIMITS, encode=spelled)
    assert [request.id for request in found] == [1] and faults == [Fault(1, "is no text in UTF-8")]


def test_room_of_the_plan_is_kept(tmp_path: Path) -> None:
    file = write(tmp_path, '{"id": 1, "prompt_token_ids": [1, 2, 3]}', '{"id": 2, "prompt_token_ids": [1, 2]}')
    tight = Limits(vocabulary=96, new_tokens=8, request_tokens=10)
    assert read_requests(file, tight, encode=None)[1] == [
        Fault(1, "has 3 tokens, 11 with what is generated, the plan has room for 10")
    ]
    short = Limits(vocabulary=96, new_tokens=8, prompt_tokens=2)
    assert read_requests(file, short, encode=None)[1] == [Fault(1, "has 3 tokens, the plan has prompts of 2 at most")]


def test_without_a_tokenizer_only_token_ids_run(tmp_path: Path) -> None:
    file = write(tmp_path, '{"id": 1, "prompt_token_ids": [1]}', '{"id": 2, "prompt": "a"}')
    found, (fault,) = read_requests(file, LIMITS, encode=None)
    assert len(found) == 1 and "no tokenizer.json" in fault.fact


def test_a_file_without_lines_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no requests"):
        read_requests(write(tmp_path, "", " "), LIMITS, encode=None)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_requests(tmp_path / "none", LIMITS, encode=None)


def save_words(folder: Path) -> None:
    """A tokenizer of whole words, which puts <s> first."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    words = {"<s>": 0, "</s>": 1, "?": 2, "once": 3, "upon": 4, "a": 5, "time": 6}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.save(str(folder / "tokenizer.json"))


def test_the_tokenizer_of_the_folder_encodes_and_decodes(tmp_path: Path) -> None:
    assert open_tokenizer(tmp_path) is None
    save_words(tmp_path)
    found = open_tokenizer(tmp_path)
    assert found is not None
    assert found.encode(["once upon a time", "a"]) == [[0, 3, 4, 5, 6], [0, 5]]
    assert found.decode([0, 3, 6, 1]) == "once time"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="is no tokenizer that can be read"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "found"),
    [
        (None, {}, set()),
        (None, {"eos_token_id": 2}, {2}),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 2}, {3, 4}),
        ({"eos_token_id": 5}, {}, {5}),
        ({}, {"eos_token_id": [2]}, {2}),
    ],
)
def test_end_tokens_are_those_of_generation_config_or_else_of_config(
    generation: dict[str, object] | None, config: dict[str, object], found: set[int], tmp_path: Path
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert find_end_tokens(tmp_path, config) == found


def test_an_end_token_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config.json: eos_token_id: 'x' is no token"):
        find_end_tokens(tmp_path, {"eos_token_id": "x"})
