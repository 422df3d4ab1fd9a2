"""`hrm hardware` and `hrm models`: lists, itemised accounts, checks of a person's own profile."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from command import refused, run

from hrm.listings import hardware_rows, model_document, model_rows, print_rows
from hrm.model_files import load_model, model_names
from hrm.profile_files import load_profile, profile_from_document, profile_names


def table_of(rows: list[dict[str, object]], width: int) -> list[str]:
    from rich.console import Console

    file = io.StringIO()
    print_rows(rows, Console(file=file, width=width, highlight=False))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_every_bundled_profile_is_listed_with_its_size() -> None:
    document = run("hardware", "--json").document
    assert [row["name"] for row in document["hardware"]] == list(profile_names())
    t4 = next(row for row in document["hardware"] if row["name"] == "t4")
    assert t4 == {
        "name": "t4",
        "gpu": "1 x NVIDIA T4",
        "gpu_gib": 14.74,
        "cpu_gib": 184.29,
        "disk_tb": 1.5,
        "link_gb_per_s": 12.2,
        "title": "One NVIDIA T4, 24-core Xeon host with 184 GiB",
    }


def test_every_bundled_model_is_listed_with_its_size() -> None:
    document = run("models", "--json").document
    assert [row["name"] for row in document["models"]] == list(model_names())
    dbrx = next(row for row in document["models"] if row["name"] == "dbrx")
    assert (dbrx["parameters_b"], dbrx["active_b"], dbrx["weights_gb"]) == (131.6, 36.47, 263.19)
    assert (dbrx["experts"], dbrx["layers"], dbrx["format"], dbrx["hub_id"]) == (
        "16 (top 4)",
        40,
        "bf16",
        "databricks/dbrx-instruct",
    )


@pytest.mark.parametrize("width", [20, 40, 80, 118, 200])
@pytest.mark.parametrize("rows", [hardware_rows, model_rows])
def test_a_list_has_one_line_each_and_cuts_no_name_or_number(rows: object, width: int) -> None:
    data = rows()  # type: ignore[operator]
    lines = table_of(data, width)
    assert len(lines) == len(data) + 1
    assert max(map(len, lines)) <= width
    for line, row in zip(lines[1:], data, strict=True):
        assert line.split()[0] == row["name"]
        assert "…" not in line[:-1]  # at most the end of the last column


def test_a_wide_list_cuts_nothing() -> None:
    assert not any("…" in line for line in table_of(model_rows(), 200) + table_of(hardware_rows(), 200))


def test_units_stand_in_the_heads() -> None:
    assert table_of(hardware_rows(), 200)[0].split("  ")[0] == "name"
    for head in ("GPU GiB", "CPU GiB", "disk TB", "link GB/s"):
        assert head in table_of(hardware_rows(), 200)[0]
    for head in ("params B", "active B", "weights GB", "Hugging Face id"):
        assert head in table_of(model_rows(), 200)[0]


@pytest.mark.parametrize("name", ["t4", "t4.yaml", "kaggle-t4x2", "l4-paper"])
def test_a_shown_profile_is_one_file_that_reads_back_as_the_same_machine(name: str, tmp_path: Path) -> None:
    outcome = run("hardware", "show", name)
    assert (outcome.code, outcome.err) == (0, "")
    file = tmp_path / f"{name.removesuffix('.yaml')}.yaml"
    file.write_text(outcome.out, encoding="utf-8")
    mine, theirs = load_profile(file), load_profile(name)
    assert (mine.gpu, mine.cpu, mine.disk, mine.link, mine.quantities) == (
        theirs.gpu,
        theirs.cpu,
        theirs.disk,
        theirs.link,
        theirs.quantities,
    )
    assert run("hardware", "check", file).out == f"{file}: fine\n"


def test_a_shown_profile_is_the_same_in_json() -> None:
    document = run("hardware", "show", "t4", "--json").document
    assert document.pop("name") == "t4"
    assert profile_from_document(document, name="t4", origin="t4.yaml") == load_profile("t4")


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", ["is empty (start from the output of: hrm hardware show t4)"]),
        ("- 1\n", ["holds a list (a profile is a mapping, gpu: ...)"]),
        (
            "gpu: {component: t4, memory: 16 GBs}\nhost: n1-48\nlink: gen3-x16\n",
            ["gpu.memory: '16 GBs' is not a size (try '16 GB' or '16 GiB')"],
        ),
        (
            "gpu: {component: t4, bandwith: 300 GB/s}\nhost: n1-48\nlink: gen3-x16\n",
            ["gpu: unknown key 'bandwith' (did you mean 'bandwidth'?)"],
        ),
        (
            "gpu: {component: t4, bandwidth: -1 GB/s}\nhost: n1-48\nlink: gen3-x16\ncpu: {memory: .nan}\n",
            [
                "gpu.bandwidth: '-1 GB/s' is negative (accepted: between 1 kB/s and 1 PB/s)",
                "cpu.memory: 'nan' is not finite (try e.g. '16 GB')",
            ],
        ),
        (
            "gpu: t44\nhost: n1-48\nlink: gen3-x16\n",
            ["gpu: there is no gpu component 't44' (did you mean 't4'?)"],
        ),
    ],
)
def test_a_checked_profile_names_file_key_value_and_what_is_accepted(
    text: str, problems: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    outcome = run("hardware", "check", file)
    assert (outcome.code, outcome.out) == (2, "")
    said = outcome.err.splitlines()
    expected = [f"hrm: {file}: {problem}" for problem in problems]
    assert [line for line in said if line in expected] == expected
    document = run("hardware", "check", file, "--json")
    assert document.code == 2
    assert document.document == {"file": str(file), "problems": [line.removeprefix("hrm: ") for line in said]}


def test_a_profile_with_problems_is_refused_by_plan_with_the_first_of_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("gpu: {component: t4, memory: 16 GBs}\nhost: n1-48\nlink: gen3-x16\n", encoding="utf-8")
    text = refused("plan", "--hw", file, "--model", "dbrx")
    assert text == f"{file}: gpu.memory: '16 GBs' is not a size (try '16 GB' or '16 GiB')"


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("dtype", [None, "int4"])
def test_the_items_of_a_model_add_up_to_its_totals(name: str, dtype: str | None) -> None:
    document = model_document(load_model(name), dtype)
    assert sum(item["parameters"] for item in document["items"].values()) == document["parameters"]
    assert sum(item["bytes"] for item in document["items"].values()) == pytest.approx(
        document["weight_bytes"], rel=1e-12
    )


def test_the_account_of_dbrx_names_experts_formats_and_kv_bytes() -> None:
    document = run("models", "show", "databricks/dbrx-instruct", "--json").document
    assert document["parameters"] == 131_596_523_520
    assert document["kv_bytes_per_token"] == 2 * 40 * 8 * 128 * 2
    assert document["bytes_per_expert"] == 3 * 6144 * 10752 * 2
    text = run("models", "show", "dbrx").out
    assert text.splitlines()[0] == "dbrx databricks/dbrx-instruct (dbrx)"
    assert "40 layers, 40 with 16 experts (top 4), one expert 396.4 MB" in text
    assert "KV cache 163.8 kB per token in bf16; at most 32,768 positions" in text


def test_the_account_of_a_dense_model_has_no_experts() -> None:
    assert "expert" not in run("models", "show", "llama-3.1-8b").out


def test_quantised_weights_shrink_the_account() -> None:
    whole = run("models", "show", "mixtral", "--json").document["weight_bytes"]
    small = run("models", "show", "mixtral", "--weights-dtype", "int4", "--json").document["weight_bytes"]
    assert whole / small == pytest.approx(16 / 4.125, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("models", "show", "mixtrall"),
            "model 'mixtrall': unknown model (did you mean mixtral-8x7b, mixtral-8x22b? "
            "Or give the path of a config.json)",
        ),
        (
            ("models", "show", "jamba"),
            "model 'jamba': not supported: 28 of its 32 layers keep a Mamba state instead of a KV cache, which is not "
            "modelled (see `hrm models` for those that are)",
        ),
        (
            ("hardware", "show", "t44"),
            "there is no file and no bundled hardware profile of the name 't44' (did you mean 't4x4'?)",
        ),
        (("hardware", "show", ""), "the name of the hardware profile is empty (see: hrm hardware)"),
        (
            ("models", "show", "dbrx", "--weights-dtype", "int3"),
            "--weights-dtype: unknown number format 'int3' "
            "(did you mean int8? one of fp32, fp16, bf16, fp8, int8, int4, mxfp4)",
        ),
    ],
)
def test_an_unknown_name_suggests_the_nearest(arguments: tuple[str, ...], text: str) -> None:
    assert refused(*arguments) == text
