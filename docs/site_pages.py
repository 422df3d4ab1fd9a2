"""Pages that are made of the code when the site is built: the command, the keys of a profile, the API.

A page has a line `<!-- generated: NAME -->`, where NAME is a key of `GENERATED`; Sphinx puts the text there as it reads
the page (`setup`). Nothing here imports Sphinx, so the tests can call it without.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import typer.main

from hrm.cli import app
from hrm.profile_schema import COMPONENTS, FIELDS, TEXTS

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"<!-- generated: ([a-z -]+) -->")

UNITS: Mapping[str, str] = {
    "size": "B, kB, MB, GB, TB, PB; KiB, MiB, GiB, TiB, PiB",
    "bandwidth": "a size per second",
    "compute": "FLOP/s or OP/s with M, G, T, P",
    "time": "ns, us, ms, s, min, h",
    "share": "0 to 1, or %",
    "count": "a whole number",
}

PLANNER: Mapping[str, tuple[str, ...]] = {
    "inputs": (
        "profile*",
        "calibrated_profile",
        "model*",
        "families*",
        "workload*",
        "batching",
        "scenario",
        "dtypes",
        "units",
        "host_facts",
        "numerics",
        "errors",
    ),
    "costs": ("cost", "rates", "roofline*", "full_cost", "paper_cost", "memory", "affine", "account", "explorer"),
    "search": (
        "policy",
        "pins",
        "search",
        "branch_and_bound",
        "bounds",
        "points",
        "rows",
        "program",
        "full_program",
        "trivial",
        "infeasibility",
        "diverse",
        "paper_search",
        "prediction",
        "executable*",
        "planning",
        "plans",
        "sensitivity",
    ),
    "schedules": (
        "graph",
        "schedules",
        "layout",
        "holds",
        "launcher",
        "issuing",
        "weight_copies",
        "attention_tasks",
        "ring_launcher",
        "cpu_launcher",
        "trace*",
        "gantt",
        "diff",
    ),
    "judging": ("published*", "validation*"),
}
"""Page of the planner's API -> modules of `hrm` on it; `command` has all others."""


# The command


def commands(command: Any = None, words: tuple[str, ...] = ("hrm",)) -> Iterator[tuple[str, Any]]:
    """Every command that can be typed, with what it parses."""
    found = typer.main.get_command(app) if command is None else command
    children: Mapping[str, Any] = getattr(found, "commands", {})
    if not children or getattr(found, "invoke_without_command", False):
        yield " ".join(words), found
    for name, child in children.items():
        yield from commands(child, (*words, name))


def command_page() -> str:
    """Usage, arguments and options of every command, as its parser has them."""
    return "\n".join(_one_command(name, command) for name, command in commands())


def _one_command(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join([name, *(_argument(each) for each in arguments), *(["[OPTIONS]"] if options else [])])
    lines = [f"## `{name}`", "", _plain(command.help or command.short_help or ""), "", "```text", usage, "```", ""]
    if options:
        lines += ["| option | value | default | |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(_option_cells(option))} |" for option in options]
    return "\n".join([*lines, ""])


def _argument(argument: Any) -> str:
    name = argument.human_readable_name.upper()
    return name if argument.required else f"[{name}]"


def _option_cells(option: Any) -> list[str]:
    flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    choices = getattr(option.type, "choices", None)
    if option.is_flag:
        value = ""
    elif choices:
        value = ", ".join(f"`{getattr(choice, 'value', choice)}`" for choice in choices)
    else:
        value = str(option.metavar or option.type.name).lower()
    default = option.default
    if option.required:
        default = "must be given"
    elif default is None or default is False or default == () or "UNSET" in repr(default).upper():
        default = ""
    else:
        default = f"`{getattr(default, 'value', default)}`"
    return [flags, value, default, _plain(option.help or "")]


def _plain(text: str) -> str:
    """Text of a help that Markdown must not read as markup."""
    return re.sub(r"([|*_<\[\]`\\])", r"\\\1", " ".join(text.split()))


# Keys of a profile


def profile_keys_page() -> str:
    """Every quantity of a profile file, from the schema that checks them."""
    lines = ["| key | kind | units | may stand in | where it is missing |", "|---|---|---|---|---|"]
    for key, field in FIELDS.items():
        kind = field.kind + (f", or % of `{field.share_of}`" if field.share_of else "")
        if field.default is not None:
            text, source, note = field.default
            missing = f"{text} ({source}: {_plain(note.removeprefix('default: '))})"
        elif field.optional:
            missing = "left out"
        else:
            missing = "an error, where there is a disk" if key.startswith("disk.") else "an error"
        lines.append(f"| `{key}` | {kind} | {UNITS[field.kind]} | {_components(key)} | {missing} |")
    words = ", ".join(f"`{key}`" for key in TEXTS)
    return "\n".join([*lines, "", f"Words: {words}.", ""])


def _components(key: str) -> str:
    section = key.split(".")[0]
    return ", ".join(["profile", *(folder for folder, sections in COMPONENTS.values() if section in sections)])


# The API


def module_names(package: str) -> list[str]:
    """All modules of a package that document something, in order of their names."""
    found = import_module(package)
    names = [package, *(each.name for each in pkgutil.walk_packages(found.__path__, f"{package}."))]
    return sorted(name for name in names if not name.endswith("__main__"))


def page_of(module: str) -> str:
    """The API page that a module is on."""
    package, _, rest = module.partition(".")
    if package != "hrm":
        return package
    for page, patterns in PLANNER.items():
        if any(fnmatch(rest, pattern) or rest.startswith(f"{pattern.rstrip('*')}.") for pattern in patterns):
            return page
    return "command"


def api_page(page: str) -> str:
    """Directives for every module of a page, which autodoc fills from docstrings."""
    package = page if page in ("simulator", "runtime") else "hrm"
    modules = [name for name in module_names(package) if page_of(name) == page]
    return "\n".join(f"## `{name}`\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```\n" for name in modules)


GENERATED: Mapping[str, Callable[[], str]] = {
    "command": command_page,
    "profile keys": profile_keys_page,
    **{f"api {page}": (lambda page=page: api_page(page)) for page in (*PLANNER, "command", "simulator", "runtime")},
}
"""What a page may ask for."""


def fill(text: str) -> str:
    """The text of a page with what it asks for in place."""
    return MARK.sub(lambda found: GENERATED[found[1]](), text)


# Sphinx


def _on_read(_: Any, __: str, source: list[str]) -> None:
    source[0] = fill(source[0])


def _on_docstring(_: Any, __: str, ___: str, ____: Any, _____: Any, lines: list[str]) -> None:
    # Docstrings write |x| for an absolute value, which reStructuredText takes for a substitution.
    lines[:] = [line if "``" in line else line.replace("|", "\\|") for line in lines]


def setup(sphinx: Any) -> dict[str, bool]:
    """What Sphinx calls."""
    sphinx.connect("source-read", _on_read)
    sphinx.connect("autodoc-process-docstring", _on_docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
