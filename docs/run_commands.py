"""Runs what the pages tell people to type: `python docs/run_commands.py [PAGE ...]`; tutorial and how-tos by default.

Every block of a page marked `sh` is run by bash, in the order of the page, all in one empty folder with an empty home,
and must succeed. A comment on the line before a block changes that:

    <!-- not executed: WHY -->      passed over, and said so
    <!-- exit code: 0 or 4 -->      other exit codes are fine
    <!-- output -->                 before a block of text: these lines stand in the output of the last block, in this
                                    order; spaces count as one, and ... stands for anything

Fails at the first block that does not do what its page says. The seconds of every block are printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(
    r"(?:^<!-- (?P<comment>[^\n]*?) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(slots=True)
class Step:
    """One block to run.

    Attributes
    ----------
    line : int
        Where it stands in its page.
    script : str
        For bash.
    skipped : str
        Why it is not run; empty: it is.
    codes : tuple of int
        Exit codes that are fine.
    expected : list of str
        Lines that its output has.
    """

    line: int
    script: str
    skipped: str = ""
    codes: tuple[int, ...] = (0,)
    expected: list[str] = field(default_factory=list)


def default_pages() -> list[Path]:
    """The tutorial and the how-tos."""
    return [DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md"))]


def read_steps(text: str) -> list[Step]:
    """The blocks of a page.

    Raises
    ------
    SystemExit
        A comment that is none of those above, or lines of output before any block.
    """
    steps: list[Step] = []
    for block in BLOCK.finditer(text):
        line, comment = text.count("\n", 0, block.start("text")), block["comment"] or ""
        if block["kind"] == "text" and comment == "output":
            if not steps or steps[-1].skipped:
                raise SystemExit(f"line {line}: output of nothing that is run")
            steps[-1].expected += [each for each in block["text"].splitlines() if each.strip()]
        elif block["kind"] == "sh":
            steps.append(_step(line, block["text"], comment))
    return steps


def _step(line: int, script: str, comment: str) -> Step:
    if not comment:
        return Step(line, script)
    name, _, rest = (part.strip() for part in comment.partition(":"))
    if name == "not executed" and rest:
        return Step(line, script, skipped=rest)
    if name == "exit code" and re.fullmatch(r"\d+( or \d+)*", rest):
        return Step(line, script, codes=tuple(int(code) for code in rest.split(" or ")))
    raise SystemExit(f"line {line}: <!-- {comment} --> says nothing about a block")


def first_missing(expected: list[str], output: str) -> str | None:
    """The first line that is not in the output after those before it."""
    printed = iter([" ".join(line.split()) for line in output.splitlines()])
    for line in expected:
        pattern = re.compile(".*".join(re.escape(part) for part in " ".join(line.split()).split("...")))
        if not any(pattern.fullmatch(each) for each in printed):
            return line
    return None


def environment(folder: Path) -> dict[str, str]:
    """Of the commands: a home of their own, this Python's `hrm`; compiled kernels stay where they are."""
    kept = os.environ.get("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "torch_extensions"))
    home = folder / "home"
    home.mkdir(exist_ok=True)
    return os.environ | {
        "HOME": str(home),
        "XDG_DATA_HOME": str(home / "data"),
        "TORCH_EXTENSIONS_DIR": kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }


def run_page(page: Path, folder: Path) -> Iterator[str]:
    """Run a page; yields a line for every block.

    Raises
    ------
    SystemExit
        A block did something else than its page says.
    """
    work = folder / "work"
    work.mkdir()
    variables = environment(folder)
    for step in read_steps(page.read_text(encoding="utf-8")):
        where = f"{page.name}:{step.line}"
        if step.skipped:
            yield f"{where}: not executed: {step.skipped}"
            continue
        began = time.perf_counter()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", step.script],
            cwd=work,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        took = time.perf_counter() - began
        if done.returncode not in step.codes:
            raise SystemExit(f"{where}: exit code {done.returncode}\n{step.script}\n{done.stdout}")
        missing = first_missing(step.expected, done.stdout)
        if missing is not None:
            raise SystemExit(f"{where}: not in the output, or not there: {missing}\n{step.script}\n{done.stdout}")
        yield f"{where}: {took:.1f} s: {step.script.splitlines()[-1][:80]}"


def main() -> None:
    """Run the pages."""
    for page in [Path(name) for name in sys.argv[1:]] or default_pages():
        with tempfile.TemporaryDirectory() as folder:
            for line in run_page(page, Path(folder)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
