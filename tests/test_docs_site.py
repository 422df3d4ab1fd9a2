"""The documentation's own machinery: commands that are run, pages that are made of the code, links, measurements."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from hrm.profile_schema import FIELDS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROW_KEYS = {"title", "gpu", "machine", "date", "commit", "commands", "notes"}


def load(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


commands, pages, site = load("run_commands"), load("site_pages"), load("check_site")


# Commands


def run(text: str, folder: Path) -> list[str]:
    """Run a page with this text."""
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return list(commands.run_page(page, folder))


def test_blocks_run_in_order_in_one_folder(tmp_path: Path) -> None:
    said = run(
        "```sh\necho one > file\n```\n\ntext\n\n```sh\ncat file\n```\n\n<!-- output -->\n```text\none\n```\n", tmp_path
    )
    assert [line.split(":")[0] for line in said] == ["page.md", "page.md"]


def test_a_command_that_fails_fails_the_page(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"page\.md:1: exit code 3"):
        run("```sh\nexit 3\n```\n", tmp_path)


def test_a_failure_in_the_middle_of_a_block_fails_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exit code 1"):
        run("```sh\nfalse\ntrue\n```\n", tmp_path)
    with pytest.raises(SystemExit, match="exit code 1"):
        run("```sh\nfalse | cat\n```\n", fresh(tmp_path))


def fresh(folder: Path) -> Path:
    """Another empty folder."""
    other = folder / "other"
    other.mkdir()
    return other


def test_an_exit_code_that_the_page_names_is_fine_and_no_other(tmp_path: Path) -> None:
    page = "<!-- exit code: 0 or 4 -->\n```sh\nexit {}\n```\n"
    assert run(page.format(4), tmp_path)
    with pytest.raises(SystemExit, match="exit code 2"):
        run(page.format(2), fresh(tmp_path))


def test_a_block_that_is_not_executed_is_not_and_says_why(tmp_path: Path) -> None:
    said = run("<!-- not executed: needs a T4 -->\n```sh\ntouch ran\n```\n", tmp_path)
    assert said == ["page.md:2: not executed: needs a T4"]
    assert not (tmp_path / "work" / "ran").exists()


@pytest.mark.parametrize(
    ("expected", "missing"),
    [
        (["one two"], None),
        (["one ...", "three"], None),
        (["... two", "... three ..."], "... three ..."),
        (["three", "one two"], "one two"),
        (["one"], "one"),
    ],
)
def test_expected_lines_are_whole_lines_in_order(expected: list[str], missing: str | None) -> None:
    assert commands.first_missing(expected, "one    two\n\nthree\n") == missing


def test_output_that_is_not_there_fails_the_page(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not in the output, or not there: two"):
        run("```sh\necho one\n```\n<!-- output -->\n```text\ntwo\n```\n", tmp_path)


@pytest.mark.parametrize("comment", ["not executed", "not executed:", "exit code: four", "skipped: slow"])
def test_a_comment_that_says_nothing_is_refused(comment: str) -> None:
    with pytest.raises(SystemExit, match="says nothing about a block"):
        commands.read_steps(f"<!-- {comment} -->\n```sh\ntrue\n```\n")


def test_output_without_a_command_is_refused() -> None:
    with pytest.raises(SystemExit, match="line 2: output of nothing that is run"):
        commands.read_steps("<!-- output -->\n```text\none\n```\n")


@pytest.mark.parametrize("page", commands.default_pages(), ids=lambda page: page.stem)
def test_every_page_that_is_run_runs_something(page: Path) -> None:
    steps = commands.read_steps(page.read_text(encoding="utf-8"))
    assert any(not step.skipped for step in steps)
    assert len(steps) == page.read_text(encoding="utf-8").count("```sh\n")


def test_ci_builds_the_site_and_runs_its_commands() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "sphinx-build -W" in script and "docs/check_site.py" in script and "docs/run_commands.py" in script


# Pages of the code


def test_command_page_has_every_command_and_option() -> None:
    page, found = pages.command_page(), list(pages.commands())
    assert {"hrm plan", "hrm hardware", "hrm hardware show", "hrm validate run", "hrm fit"} <= {
        name for name, _ in found
    }
    for name, command in found:
        section = page.split(f"## `{name}`\n")[1].split("\n## ")[0]
        assert set(re.findall(r"`(--?[a-z][a-z-]*)`", section)) >= {
            flag for each in command.params if each.param_type_name == "option" for flag in each.opts
        }


def test_page_of_profile_keys_has_every_key_once() -> None:
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \|", pages.profile_keys_page(), flags=re.MULTILINE)
    assert rows == list(FIELDS)


def test_every_module_is_on_one_page_of_the_api() -> None:
    listed = [
        name
        for key in pages.GENERATED
        if key.startswith("api ")
        for name in re.findall(r"automodule:: (\S+)", pages.api_page(key.removeprefix("api ")))
    ]
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in ("hrm", "simulator", "runtime")
        for path in (ROOT / package).rglob("*.py")
    }
    assert Counter(listed) == Counter(files - {"hrm.__main__"})


def test_every_generated_page_is_asked_for_once() -> None:
    asked = [name for page in DOCS.rglob("*.md") for name in pages.MARK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(asked) == sorted(pages.GENERATED)


def test_every_page_is_in_the_contents() -> None:
    contents = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = {line for block in re.findall(r"```\{toctree\}(.*?)```", contents, re.DOTALL) for line in block.split()}
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix("").as_posix()
        assert name == "index" or name in listed, name


# Links


def test_a_dead_file_and_a_dead_place_are_found(tmp_path: Path) -> None:
    (tmp_path / "one.html").write_text(
        '<a href="two.html#here">1</a><a href="two.html#there">2</a><a href="three.html">3</a>'
        '<a href="https://example.org/x">4</a><img src="four.png"><a href="#own">5</a>'
    )
    (tmp_path / "two.html").write_text('<p id="here">')
    assert site.dead_links(tmp_path) == [
        "one.html: two.html#there",
        "one.html: three.html",
        "one.html: four.png",
        "one.html: #own",
    ]


# Measurements


def count_measured(folder: Path) -> Counter[str]:
    """Folders of measurements by the GPU they are of.

    Raises
    ------
    ValueError
        One lacks a key or its files, or its title does not name its GPU.
    """
    found: Counter[str] = Counter()
    for row in sorted(path for path in folder.iterdir() if path.is_dir()):
        said = yaml.safe_load((row / "row.yaml").read_text(encoding="utf-8"))
        if set(said) != ROW_KEYS or not all((row / name).is_file() for name in ("profile.yaml", "validation.json")):
            raise ValueError(f"{row.name}: not what docs/measured/README.md asks for")
        if said["gpu"].lower() not in said["title"].lower():
            raise ValueError(f"{row.name}: the title does not say which GPU")
        found[said["gpu"]] += 1
    return found


def test_readme_states_the_measurements_that_are_there() -> None:
    found = count_measured(DOCS / "measured")
    page = (DOCS / "measured" / "README.md").read_text(encoding="utf-8")
    assert f"{found['t4']} rows on a T4, {found['l4']} rows on an L4" in README
    assert f"**So far: {found['t4']} on a T4, {found['l4']} on an L4.**" in page


def test_a_measurement_is_counted_and_a_part_of_one_is_refused(tmp_path: Path) -> None:
    row = tmp_path / "2026-12-24-colab-t4"
    row.mkdir()
    said = dict.fromkeys(ROW_KEYS, "x") | {"title": "One Colab T4", "gpu": "t4"}
    (row / "row.yaml").write_text(yaml.safe_dump(said))
    with pytest.raises(ValueError, match="not what"):
        count_measured(tmp_path)
    (row / "profile.yaml").touch()
    (row / "validation.json").touch()
    assert count_measured(tmp_path) == {"t4": 1}
    (row / "row.yaml").write_text(yaml.safe_dump(said | {"title": "A large GPU"}))
    with pytest.raises(ValueError, match="which GPU"):
        count_measured(tmp_path)


def test_the_example_of_a_row_has_all_keys() -> None:
    page = (DOCS / "measured" / "README.md").read_text(encoding="utf-8")
    example = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert example is not None
    assert set(yaml.safe_load(example[1])) == ROW_KEYS
