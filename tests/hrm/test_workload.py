"""Workloads: the published ones exactly, a person's file or a clear message, and budgets that keep their promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hrm.batching import Request, batch_requests
from hrm.errors import InputError
from hrm.workload import Workload, load_workload, prompts_workload, uniform_workload, workload_names
from hrm.workload_files import read_prompt_lengths

workloads = st.builds(
    Workload,
    name=st.just("drawn"),
    prompt_lengths=st.lists(st.integers(1, 500), min_size=1, max_size=20).map(tuple),
    generation_length=st.integers(1, 200),
    num_requests=st.integers(1, 150),
    padded=st.booleans(),
)


def requests_of(workload: Workload) -> list[Request]:
    lengths = workload.padded_prompt_lengths
    return [
        Request(
            index=index,
            prompt_tokens=lengths[index % len(lengths)],
            generation_tokens=workload.generation_length,
        )
        for index in range(workload.num_requests)
    ]


def test_mtbench_is_the_80_published_lengths() -> None:
    workload = load_workload("mtbench")
    assert len(workload.prompt_lengths) == 80
    assert sum(workload.prompt_lengths) == 6089
    assert (min(workload.prompt_lengths), workload.max_prompt_tokens) == (15, 418)
    assert workload.mean_prompt_tokens == 76.1125
    assert (workload.generation_length, workload.num_requests, workload.padded) == (128, 10_000, False)
    assert workload.max_request_tokens == 546
    assert workload.generated_tokens == 1_280_000


@pytest.mark.parametrize(
    ("name", "mean", "longest", "generation"),
    [("synthetic-reasoning", 242, 256, 50), ("summarization", 1693, 1984, 64)],
)
def test_helm_workloads_have_the_published_mean_and_maximum_and_say_the_shape_is_assumed(
    name: str, mean: int, longest: int, generation: int
) -> None:
    workload = load_workload(name)
    assert (workload.mean_prompt_tokens, workload.max_prompt_tokens) == (mean, longest)
    assert workload.generation_length == generation
    assert "assumed" in workload.note
    # Any few consecutive requests come near the mean.
    assert workload.batch_tokens(2) <= 1.07 * 2 * mean


def test_padding_runs_every_prompt_at_the_longest() -> None:
    workload = load_workload("mtbench", padded=True, generation_length=32)
    assert set(workload.padded_prompt_lengths) == {418}
    assert (workload.mean_prompt_tokens, workload.mean_squared_prompt_tokens) == (418, 418**2)
    assert workload.batch_tokens(504) == 504 * 418
    assert workload.micro_batch_token_budget(504, 14, 36) == 36 * 450
    assert workload.micro_batch_token_budget(491, 14, 40) == 36 * 450
    assert load_workload("mtbench").mean_squared_prompt_tokens == 13_074.3625


def test_names_are_known_whatever_their_case_and_dashes() -> None:
    assert workload_names() == ("mtbench", "synthetic-reasoning", "summarization")
    assert load_workload("MT-Bench") == load_workload("mtbench")
    assert load_workload("synthetic_reasoning").name == "synthetic-reasoning"


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no workload is called 'sumarization' \(did you mean summarization\?"):
        load_workload("sumarization")
    with pytest.raises(InputError, match="known: mtbench, synthetic-reasoning, summarization"):
        load_workload("zzz")


def test_a_uniform_workload_has_one_length() -> None:
    workload = uniform_workload(77, 32, num_requests=5)
    assert (workload.prompt_lengths, workload.generation_length, workload.num_requests) == ((77,), 32, 5)
    assert (workload.mean_prompt_tokens, workload.max_request_tokens) == (77, 109)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, float("nan"), float("inf"), "8", None, 10**12])
def test_a_length_or_count_out_of_range_is_refused_with_its_value(value: object) -> None:
    for make in (
        lambda: uniform_workload(value, 32),  # type: ignore[arg-type]
        lambda: uniform_workload(77, value),  # type: ignore[arg-type]
        lambda: uniform_workload(77, 32, num_requests=value),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError) as caught:
            make()
        assert repr(value) in str(caught.value)


def test_the_worst_batch_is_the_largest_window() -> None:
    workload = Workload(name="w", prompt_lengths=(5, 1, 9, 2), generation_length=1, num_requests=9)
    assert [workload.batch_tokens(size) for size in range(6)] == [0, 9, 11, 16, 17, 26]  # 3: 2 + 5 + 9 is no window


@given(workloads, st.lists(st.integers(0, 90), min_size=1, max_size=8))
def test_batch_tokens_equals_trying_every_window(workload: Workload, sizes: list[int]) -> None:
    lengths = workload.padded_prompt_lengths
    stream = lengths * (90 // len(lengths) + 2)
    expected = [max(sum(stream[start : start + size]) for start in range(len(lengths))) for size in sizes]
    assert workload.batch_tokens(np.array(sizes)).tolist() == expected
    assert [workload.batch_tokens(size) for size in sizes] == expected
    assert workload.mean_batch_tokens(np.array(sizes)).max() <= max(expected) + 1e-6


def test_a_very_long_period_is_bounded_closely_from_above() -> None:
    lengths = tuple(np.random.default_rng(0).integers(1, 1000, size=20_000).tolist())
    workload = Workload(name="long", prompt_lengths=lengths, generation_length=1)
    prefix = np.concatenate(([0], np.cumsum(lengths * 2)))
    for size in (1, 1001, 19_999):
        exact = int((prefix[size : size + 20_000] - prefix[:20_000]).max())
        assert exact <= workload.batch_tokens(size) <= exact + 8 * 1000
    assert workload.batch_tokens(20_000) == sum(lengths)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(workloads, st.integers(1, 60), st.integers(1, 9), st.integers(0, 3))
def test_with_its_token_budget_nothing_is_deferred_and_with_one_token_less_something_is(
    workload: Workload, batch_size: int, num_micro_batches: int, spare: int
) -> None:
    micro_batch_size = -(-batch_size // num_micro_batches) + spare
    budget = workload.micro_batch_token_budget(batch_size, num_micro_batches, micro_batch_size)
    requests = requests_of(workload)

    def batch_sizes(token_budget: int) -> list[int]:
        batching = batch_requests(
            requests,
            batch_size=batch_size,
            num_micro_batches=num_micro_batches,
            micro_batch_size=micro_batch_size,
            token_budget=token_budget,
        )
        return [batch.size for batch in batching.batches]

    whole, rest = divmod(workload.num_requests, batch_size)
    undisturbed = [batch_size] * whole + ([rest] if rest else [])
    assert batch_sizes(budget) == undisturbed
    assert batch_sizes(budget - 1) != undisturbed
    assert budget <= workload.micro_batch_token_bound(batch_size, num_micro_batches, micro_batch_size)


@given(workloads, st.integers(1, 60), st.integers(1, 9), st.integers(0, 3), st.integers(0, 19))
def test_the_token_bound_holds_for_a_batch_that_starts_anywhere(
    workload: Workload, batch_size: int, num_micro_batches: int, spare: int, start: int
) -> None:
    micro_batch_size = -(-batch_size // num_micro_batches) + spare
    bound = workload.micro_batch_token_bound(
        np.array([batch_size]), np.array([num_micro_batches]), np.array([micro_batch_size])
    )
    lengths = workload.padded_prompt_lengths
    requests = [
        Request(index=i, prompt_tokens=lengths[i % len(lengths)], generation_tokens=workload.generation_length)
        for i in range(start, start + batch_size)
    ]
    batching = batch_requests(
        requests,
        batch_size=batch_size,
        num_micro_batches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        token_budget=int(np.asarray(bound)[0]),
    )
    assert [batch.size for batch in batching.batches] == [batch_size]


def test_the_token_bound_is_at_most_mu_of_the_longest_requests() -> None:
    workload = load_workload("mtbench", generation_length=32)
    # 8 consecutive requests meet each of the 80 prompts at most once: the two longest are 418 and 373.
    assert workload.micro_batch_token_bound(8, 4, 2) == 418 + 373 + 2 * 32
    assert uniform_workload(77, 32).micro_batch_token_bound(4536, 14, 324) == 324 * 109


def test_mtbench_micro_batches_are_almost_perfectly_balanced() -> None:
    workload = load_workload("mtbench")
    assert workload.micro_batch_token_budget(504, 14, 36) == 7516
    # 504 consecutive requests hold at most 105,212 tokens in all: 7,515.1 per micro-batch.
    assert workload.batch_tokens(504) + 504 * 128 == 105_212
    assert workload.micro_batch_token_bound(504, 14, 36) == 8022


def test_a_job_too_long_to_place_uses_the_bound() -> None:
    workload = load_workload("mtbench", num_requests=10**9)
    assert workload.micro_batch_token_budget(4537, 15, 324) == workload.micro_batch_token_bound(4537, 15, 324)


def test_a_batch_larger_than_its_micro_batches_is_refused() -> None:
    with pytest.raises(InputError, match=r"9 requests in 2 micro-batches of 4 \(at most 8\)"):
        load_workload("mtbench").micro_batch_token_budget(9, 2, 4)
    # 5 requests in all are never a batch of 9.
    assert uniform_workload(7, 1, num_requests=5).micro_batch_token_budget(9, 2, 4) == 3 * 8


@pytest.mark.parametrize(
    ("name", "text", "lengths"),
    [
        ("a.csv", "tokens\n15\n16\n", (15, 16)),
        ("a.csv", "length\r\n15\r\n16", (15, 16)),
        ("a.csv", "\ufeffPrompt_Len\n7\n", (7,)),
        ("a.csv", '# a source\n\n"prompt_tokens"\n"15"\n 16 \n', (15, 16)),
        ("a.txt", "15\n16\n", (15, 16)),
        ("a.jsonl", "15\n16\n", (15, 16)),
        ("a.jsonl", '{"prompt_tokens": 15}\n\n{"length": 16}\n{"prompt_token_ids": [1, 2, 3]}\n', (15, 16, 3)),
        ("a.json", '{"tokens": 15}\n', (15,)),
    ],
)
def test_lengths_are_read_from_csv_and_json_lines(
    tmp_path: Path, name: str, text: str, lengths: tuple[int, ...]
) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert read_prompt_lengths(tmp_path / name) == lengths


def test_a_file_of_lengths_makes_a_workload(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("3\n5\n")
    workload = prompts_workload(file, generation_length=8)
    assert (workload.name, workload.prompt_lengths, workload.num_requests) == ("mine", (3, 5), 10_000)
    assert prompts_workload(file, generation_length=8, num_requests=None).num_requests == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "a.csv: holds no prompt lengths"),
        ("a.csv", "tokens\n", "a.csv: holds no prompt lengths"),
        ("a.jsonl", "\n\n", "a.jsonl: holds no prompt lengths"),
        ("a.csv", "tokens\n15\nnan\n", "line 3: 'nan' is not a prompt length"),
        ("a.csv", "nan\n15\n", "line 1: 'nan' is not a prompt length"),
        ("a.csv", "-3\n", "line 1: '-3' is not a prompt length"),
        ("a.csv", "15\n0\n", "line 2: 0 is not a prompt length"),
        ("a.csv", "15\n1.5\n", "line 2: '1.5' is not a prompt length"),
        ("a.csv", "15\n1e3\n", "line 2: '1e3' is not a prompt length"),
        ("a.csv", "15\n1_000\n", "line 2: '1_000' is not a prompt length"),
        ("a.csv", "15\n٣\n", "line 2: '٣' is not a prompt length"),
        ("a.csv", "15\n10000001\n", "line 2: 10000001 is not a prompt length"),
        ("a.csv", "15\n" + "9" * 9000 + "\n", "is not a prompt length"),
        ("a.csv", "tokens\nabc\n", "line 2: 'abc' is not a prompt length"),
        ("a.csv", "prompt\n15\n", "line 1: 'prompt' is not a known column"),
        ("a.csv", "tokens,generation\n15,8\n", "line 1: 'generation' is not a known column"),
        ("a.csv", "15,8\n", "line 1: has 2 columns"),
        ("a.csv", "tokens,length\n15,8\n", "line 1: has 2 columns"),
        ("a.jsonl", "NaN\n", "line 1: nan is not a prompt length"),
        ("a.jsonl", "15\ntrue\n", "line 2: true is not a prompt length"),
        ("a.jsonl", "15\nnull\n", "line 2: null is not a prompt length"),
        ("a.jsonl", "[77]\n", "is not a prompt length"),
        ("a.jsonl", '{"prompt_tokens": 1.0}\n', "line 1: prompt_tokens: 1.0 is not a prompt length"),
        ("a.jsonl", '{"prompt_tokens": "8"}\n', "line 1: prompt_tokens: '8' is not a prompt length"),
        ("a.jsonl", '{"prompt_tokens": 8, "prompt_tokens": 9}\n', "line 1: 2 lengths in one line"),
        ("a.jsonl", '{"prompt": "hello"}\n', "line 1: unknown key 'prompt'"),
        ("a.jsonl", '{"tokens": 8, "generation": 9}\n', "line 1: unknown key 'generation'"),
        ("a.jsonl", "{}\n", "line 1: 0 lengths in one line"),
        ("a.jsonl", '{"prompt_token_ids": []}\n', "line 1: prompt_token_ids: 0 is not a prompt length"),
        ("a.jsonl", '{"prompt_token_ids": 8}\n', "line 1: prompt_token_ids: 8 is not a list"),
        ("a.jsonl", '{"prompt_token_ids": {}}\n', "line 1: prompt_token_ids: an object is not a list"),
        ("a.jsonl", '{"prompt_token_ids": [1, -2]}\n', "line 1: prompt_token_ids: -2 is not a token id"),
        ("a.jsonl", '{"tokens": 8\n', "is not JSON"),
        ("a.jsonl", "[" * 100_000 + "\n", "is not JSON"),
        ("a.jsonl", "9" * 9000 + "\n", "is not JSON"),
        ("a.jsonl", "9" * 4000 + "\n", "a number of more than 40 digits is not a prompt length"),
        ("a.csv", "15\0\n", "is a binary file"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line_and_value(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_bytes(text.encode())
    with pytest.raises(InputError) as caught:
        read_prompt_lengths(tmp_path / name)
    assert message in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 300


def test_what_is_no_readable_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x89PNG\xff\xfe")
    for path, message in [
        (tmp_path / "binary", "is not text in UTF-8"),
        (tmp_path, "is a folder"),
        (tmp_path / "missing.csv", "no such file"),
        ("", "is a folder"),
        ("a\0b", "no such file"),
        ("a" * 5000, "cannot be read"),
    ]:
        with pytest.raises(InputError, match=message):
            read_prompt_lengths(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=60)
    | st.text(alphabet='0123456789-.,eE"{}[]:# \nNantokesxl', max_size=40).map(str.encode)
    | st.lists(st.sampled_from(["15", "0", "nan", "tokens", '{"tokens": 3}', "[1]", ""]))
    .map("\n".join)
    .map(str.encode),
    suffix=st.sampled_from([".csv", ".jsonl"]),
)
def test_any_file_gives_lengths_or_an_input_error(tmp_path: Path, data: bytes, suffix: str) -> None:
    file = tmp_path / f"any{suffix}"
    file.write_bytes(data)
    try:
        lengths = read_prompt_lengths(file)
    except InputError as error:
        assert str(file) in str(error)
    else:
        assert lengths
        assert all(type(length) is int and 1 <= length <= 10_000_000 for length in lengths)
