"""What README.md and docs/ say is so: commands, options, keys, files, links, names and the screen."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from hrm.cli import app
from hrm.profile_schema import FIELDS, TEXTS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
CLI = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
HELP = {"-h", "--help"}  # every command has them, and no parameter says so
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)


def run_hrm(*arguments: str) -> str:
    """Standard output of `hrm`, which must succeed; as wide as the README shows it."""
    environment = os.environ | {"COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-m", "hrm", *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def options_of(command: str) -> frozenset[str]:
    """Options of a command, without the negative half of a switch."""
    found = typer.main.get_command(app)
    for name in command.split():
        found = found.commands[name]  # type: ignore[attr-defined]
    return frozenset(option for parameter in found.params for option in parameter.opts if option.startswith("-"))


def negations_of(command: str) -> set[str]:
    """The negative halves of its switches."""
    found: Any = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {option for parameter in found.params for option in parameter.secondary_opts}


def tables(text: str) -> dict[str, list[list[str]]]:
    """Rows of every table by its head; tables with the same head are joined."""
    found: dict[str, list[list[str]]] = {}
    head = None
    for line in text.splitlines():
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = line.strip("| ")
            found.setdefault(head, [])
        elif not set(line) <= set("|-: "):
            found[head].append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def code_words(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


# The two commands and CI


def setup_commands() -> list[str]:
    """The shell blocks of the README, which are its set-up commands."""
    return [block.strip() for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)]


def test_two_commands_of_one_line_do_all_the_set_up() -> None:
    plan, test = setup_commands()
    assert all("\n" not in command and command.startswith("python3 -m venv .venv && ") for command in (plan, test))
    assert plan.endswith("pip install . && .venv/bin/hrm plan --hw t4.yaml --model dbrx")
    assert test.endswith("pip install '.[dev]' && .venv/bin/pytest -n 2")


def test_ci_runs_the_second_command_word_for_word() -> None:
    assert f"    {setup_commands()[1]}\n" in CI


def test_ci_runs_every_check() -> None:
    for part in ("ruff check .", ".venv/bin/mypy", "pip wheel", "plan --hw t4.yaml --model dbrx", "-m json.tool"):
        assert part in CI


def test_ci_is_an_executable_script_that_bash_can_read() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    bash = shutil.which("bash")
    assert bash is not None
    assert subprocess.run([bash, "-n", str(script)], check=False).returncode == 0


# The screen


def shown_screen() -> list[str]:
    found = re.search(r"<!-- screen -->\n```text\n(.*?)```\n<!-- end of screen -->", README, flags=re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def labels(screen: list[str]) -> list[str]:
    """First words of every line that has something at its start."""
    return [re.split(r"\s{2,}", line.strip())[0] for line in screen if line.strip() and not line.startswith("   ")]


def test_screen_in_the_readme_is_what_the_command_prints() -> None:
    shown, printed = shown_screen(), run_hrm("plan", "--hw", "t4.yaml", "--model", "dbrx").splitlines()
    refresh = "run python docs/refresh_screen.py"
    assert [line.rstrip() for line in shown[:2]] == [line.rstrip() for line in printed[:2]], refresh
    shortened = [[label[:20] for label in labels(screen)] for screen in (shown, printed)]
    assert shortened[0] == shortened[1], refresh
    rates = [
        float(re.search(r"^throughput +([\d,.]+) token/s", "\n".join(screen), re.MULTILINE)[1].replace(",", ""))  # type: ignore[index]
        for screen in (shown, printed)
    ]
    assert rates[0] == pytest.approx(rates[1], rel=0.005), refresh


# Files, links, names


def test_files_of_the_tree_exist_and_no_folder_is_left_out() -> None:
    tree = re.search(r"## Files\n\n```text\n(.*?)```", README, flags=re.DOTALL)
    assert tree is not None
    parent, listed = ROOT, set()
    for line in tree[1].splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            parent = ROOT / name if name.endswith("/") else ROOT
            listed.add(name.split("/")[0])
            assert (ROOT / name).exists(), name
        else:
            assert list(parent.glob(name)), name
        for other in re.findall(r"\b\w+\.(?:py|ipynb|yaml)\b", line):
            folder = parent if line.startswith(" ") or name.endswith("/") else ROOT
            assert (folder / other).exists() or (ROOT / other).exists(), other
    folders = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    present = {path.split("/")[0] for path in folders.splitlines() if "/" in path}
    assert present <= listed


def test_every_module_of_the_planner_has_its_place_in_the_tree() -> None:
    part = re.search(r"^hrm/ .*?^hardware_profiles/", README, flags=re.DOTALL | re.MULTILINE)
    assert part is not None
    parts = re.findall(r"; (.*?): its parts", part[0])
    patterns = re.findall(r"\b(\w+\*?)\.py", part[0]) + [name for each in parts for name in re.findall(r"\w+", each)]
    named = {path.stem for pattern in patterns for path in (ROOT / "hrm").glob(f"{pattern}.py")}
    assert {path.stem for path in (ROOT / "hrm").glob("*.py")} - named == {"__init__", "__main__"}


def test_every_module_of_the_runtime_has_its_place_in_the_tree() -> None:
    part = re.search(r"^runtime/ .*?^notebooks/", README, flags=re.DOTALL | re.MULTILINE)
    assert part is not None
    named = set(re.findall(r"\b(\w+)\.py", part[0]))
    assert named == {path.stem for path in (ROOT / "runtime").rglob("*.py")} - {"__init__"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        name, _, place = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if place and file.suffix == ".md":
            assert place in places_of(file), target


def places_of(page: Path) -> set[str]:
    """Where a link may lead in a page: its headings, as GitHub names them, and its labels."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]
    return {*words, *re.findall(r"^\(([\w-]+)\)=$", text, flags=re.MULTILINE)}


def test_every_name_of_the_nomenclature_exists() -> None:
    text = (ROOT / "docs" / "nomenclature.md").read_text(encoding="utf-8")
    names = [word for rows in tables(text).values() for row in rows for word in code_words(row[-1])]
    assert len(names) > 40
    for name in names:
        _, module, *attributes = name.split(".")
        found: Any = importlib.import_module(f"hrm.{module}")
        for attribute in attributes:
            assert hasattr(found, attribute) or attribute in getattr(found, "__annotations__", {}), name
            found = getattr(found, attribute, None)


# The command


def test_every_option_that_a_page_mentions_exists() -> None:
    commands = (
        "",
        "plan",
        "simulate",
        "run",
        "calibrate",
        "diff",
        "compare",
        "sweep",
        "roofline",
        "hardware",
        "hardware show",
        "hardware check",
        "models",
        "models show",
        "validate published",
        "validate layer",
        "validate run",
        "validate memory",
        "fit",
    )
    negations = negations_of("plan") | negations_of("simulate")
    known = {option for command in commands for option in options_of(command)} | negations | HELP
    others = {"--runs", "--pair", "--query-gpu", "--format"}  # of benchmarks/speed.py and nvidia-smi
    others |= {"--out", "--minutes"}  # of scripts/gpu_check.py
    others |= {"--check", "--short"}  # of ruff and git
    for page in PAGES:
        text = re.sub(
            r"<!-- screen -->.*?<!-- end of screen -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
        )
        mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
        assert mentioned <= known | others, page.name


def test_documented_options_are_those_of_plan() -> None:
    documented = {word for row in tables(CLI)["option | meaning"] for word in code_words(row[0])}
    documented |= {word for row in tables(CLI)["option | variable"] for word in code_words(row[0])}
    assert documented == options_of("plan") | HELP


def test_simulate_options_are_documented() -> None:
    documented = {word for row in tables(CLI)["option | what it does"] for word in code_words(row[0])}
    assert documented == options_of("simulate") | negations_of("simulate")


def test_run_options_are_documented() -> None:
    assert options_of("run") == {word for row in tables(CLI)["option | in a run"] for word in code_words(row[0])}


def test_calibrate_options_are_documented() -> None:
    documented = {word for row in tables(CLI)["option | in a calibration"] for word in code_words(row[0])}
    assert options_of("calibrate") == documented


def test_diff_options_are_documented() -> None:
    assert options_of("diff") == {word for row in tables(CLI)["option | in a diff"] for word in code_words(row[0])}


def test_compare_options_are_documented() -> None:
    rows = tables(CLI)
    heads = ("option | in a comparison", "option | meaning", "option | variable")
    documented = {word for head in heads for row in rows[head] for word in code_words(row[0])}
    assert options_of("compare") <= documented


def test_sweep_options_are_documented() -> None:
    rows = tables(CLI)
    documented = {word for row in rows["option | in a sweep"] for word in code_words(row[0])}
    documented |= {
        word for head in ("option | meaning", "option | variable") for row in rows[head] for word in code_words(row[0])
    }
    assert options_of("sweep") <= documented
    columns = {word for row in rows["column | what it holds"] for word in code_words(row[0])}
    assert columns == set(importlib.import_module("simulator.sweep_table").COLUMNS)


def test_validate_options_are_documented() -> None:
    documented = {word for row in tables(CLI)["option | in a validation"] for word in code_words(row[0])}
    assert options_of("validate published") == documented


def test_layer_options_are_documented() -> None:
    documented = {word for row in tables(CLI)["option | in a layer check"] for word in code_words(row[0])}
    assert options_of("validate layer") == documented


def test_options_of_a_measured_validation_are_documented() -> None:
    documented = {word for row in tables(CLI)["option | in a measured validation"] for word in code_words(row[0])}
    assert options_of("validate run") == documented


def test_options_of_a_memory_validation_are_documented() -> None:
    documented = {word for row in tables(CLI)["option | in a memory validation"] for word in code_words(row[0])}
    assert options_of("validate memory") == documented


def test_fit_options_and_keys_are_documented() -> None:
    rows = tables(CLI)
    assert options_of("fit") == {word for row in rows["option | in a fit"] for word in code_words(row[0])}
    keys = {word for row in rows["key of `hrm fit` | what it is"] for word in code_words(row[0])}
    found = json.loads(run_hrm("fit", "--components", "t4", "--json"))
    assert keys == set(found)
    constant = next(code_words(row[1]) for row in rows["key of `hrm fit` | what it is"] if row[0] == "`constants`")
    assert set(constant) == set(found["constants"]["t4.gpu_flops"])


def test_roofline_options_are_documented() -> None:
    section = CLI.split("## `hrm roofline`")[1]
    assert {option for option in options_of("roofline") if option != "--output"} <= set(code_words(section))


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A small plan as JSON."""
    found: dict[str, Any] = json.loads(
        run_hrm(
            "plan",
            "--hw",
            "t4",
            "--model",
            "olmoe",
            "--prompt-len",
            "32",
            "--gen-len",
            "4",
            "--requests",
            "8",
            "--json",
        )
    )
    return found


def documented_keys(head: str) -> set[str]:
    return {word for row in tables(CLI)[head] for word in code_words(row[0])}


def test_documented_keys_are_those_of_the_json_document(document: dict[str, Any]) -> None:
    assert documented_keys("key | what it is") == set(document)
    assert documented_keys("key of `policy` | what it is") == set(document["policy"])
    assert documented_keys("key of `predicted` | what it is") == set(document["predicted"])


def test_keys_of_the_smaller_objects_are_documented_too(document: dict[str, Any]) -> None:
    rows = {code_words(row[0])[0]: set(code_words(row[1])) for row in tables(CLI)["key | what it is"]}
    for key in ("parallelism", "solver", "turning_points", "inputs", "executable"):
        assert set(document[key]) <= rows[key], key
    assert set(document["memory"]) | set(document["memory"]["gpu"]) <= rows["memory"]
    assert set(document["trivial_plans"][0]) <= rows["trivial_plans"]


def test_exit_codes_of_readme_are_those_of_the_command_page() -> None:
    codes = {row[0]: row[1] for row in tables(CLI)["code | meaning"]}
    assert set(codes) == {"0", "1", "2", "3", "4", "130"}
    for row in tables(README)["code | meaning"]:
        assert codes[row[0]].startswith(row[1].split(":")[0].split(",")[0])


# Profiles


def profile_rows() -> dict[str, list[str]]:
    text = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
    return {code_words(row[0])[0]: row for row in tables(text)["key | kind | | what it is"]}


def test_every_key_of_a_profile_is_documented_and_no_other() -> None:
    extra = {"gpu.dtypes", "gpu.component", "host", "link", "link.component", "disk"}
    assert set(profile_rows()) == set(FIELDS) | set(TEXTS) | extra


@pytest.mark.parametrize("key", FIELDS)
def test_kind_and_default_of_a_key_are_as_documented(key: str) -> None:
    _, kind, need, _ = profile_rows()[key]
    field = FIELDS[key]
    assert kind.split()[0] == field.kind
    assert (" % of " in f" {kind} ") == bool(field.share_of)
    if field.default is not None:
        assert need == f"default {field.default[0]}"
    elif not field.optional:
        assert need in ("required", "required with a disk")
    else:
        assert not need.startswith("required")
