"""Results that show themselves: on a terminal, in `repr`, in a notebook."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
from rich.console import Console

from hrm.shown import WIDTH, Shown


@dataclass(frozen=True, slots=True, repr=False)
class Two(Shown):
    first: str

    def print_to(self, console: Console) -> None:
        console.print()
        console.print(f"[bold]{self.first}[/bold]   ")
        console.print("a < b")


def test_str_is_the_screen_without_colours_and_trailing_blanks() -> None:
    assert str(Two("one")) == "\none\na < b"


def test_colours_that_a_kernel_of_jupyter_forces_stay_out_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(Two("one")) == "\none\na < b"


def test_repr_is_the_class_and_the_first_line_that_says_something() -> None:
    assert repr(Two("one")) == "<Two: one>"


def test_lines_wrap_at_the_width_of_the_command() -> None:
    assert [len(line) for line in str(Two("x" * 200)).splitlines()] == [0, WIDTH, 200 - WIDTH, 5]


def test_a_notebook_gets_text_and_html_that_is_escaped() -> None:
    found = Two("one")._repr_mimebundle_()
    assert found["text/plain"] == "\none\na < b"
    assert found["text/html"].startswith("<pre ") and found["text/html"].endswith("</pre>")
    assert "a &lt; b" in found["text/html"] and "font-weight: bold" in found["text/html"]


def test_rich_prints_it_as_wide_as_its_console() -> None:
    console = Console(file=io.StringIO(), width=20)
    console.print(Two("x" * 30))
    assert console.file.getvalue().splitlines() == ["", "x" * 20, "x" * 10, "a < b"]  # type: ignore[attr-defined]
