"""Standard output and standard error: results whole or not at all, progress where somebody looks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hrm.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Progress", "ReaderGone", "forget_unwritten", "print_json", "print_screen", "say", "write"]


class ReaderGone(Exception):  # noqa: N818 (no error: `head` has read enough)
    """Nobody reads standard output any more."""


def write(text: str) -> None:
    """Write to standard output, whole: the one place where that may fail.

    Raises
    ------
    InputError
        Its disk is full, or the like.
    """
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where="standard output") from None


def print_screen(show: Callable[[Console], None]) -> None:
    """Write what `show` prints; without a terminal 118 columns wide, or as COLUMNS says."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    width = None if is_terminal or os.environ.get("COLUMNS", "").isdecimal() else 118
    console = Console(width=width, highlight=False, soft_wrap=False)
    with console.capture() as captured:
        show(console)
    text = captured.get()
    write(text if is_terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines()))


def say(text: str) -> None:
    """A line on standard error."""
    sys.stderr.write(f"{text}\n")


def print_json(document: dict[str, Any]) -> None:
    """Write one JSON document; a number that is none would be an error."""
    write(json.dumps(document, indent=1, allow_nan=False) + "\n")


def forget_unwritten() -> None:
    """Let go of what a broken standard output still holds: Python would complain about it on the way out."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """A line on stderr while something takes its time; nothing where stderr is no terminal.

    Parameters
    ----------
    quiet : bool
        Say nothing at all.
    text : str
        What is done until the one who does it says more.
    """

    def __init__(self, quiet: bool, text: str = "searching policies") -> None:
        self._status: Any = None
        self._quiet, self._text = quiet, text

    def __enter__(self) -> Any:
        if sys.stderr.isatty() and not self._quiet:
            from rich.console import Console

            self._status = Console(stderr=True).status(self._text)
            self._status.start()
            return self._status.update
        return None

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
