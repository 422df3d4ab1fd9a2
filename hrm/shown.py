"""Results that a terminal and a notebook show as the command prints them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

__all__ = ["Shown"]

WIDTH = 118
"""Columns, as the command prints without a terminal."""

HTML = "<pre style=\"font-family:Menlo,'DejaVu Sans Mono',monospace;font-size:12px;line-height:1.3\">{code}</pre>"


class Shown(ABC):
    """A result with its own screen: `print`, `rich.print` and a notebook's cell show it, `repr` its first line."""

    __slots__ = ()

    @abstractmethod
    def print_to(self, console: Console) -> None:
        """Print the result on a console of rich."""

    def __str__(self) -> str:
        return self._text(WIDTH)

    def __repr__(self) -> str:
        first = next((line for line in self._text(WIDTH).splitlines() if line.strip()), "")
        return f"<{type(self).__name__}: {first.strip()}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        yield Text.from_ansi(self._text(options.max_width, colours=console.is_terminal))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What Jupyter asks for; the parameters are its own."""
        import io

        from rich.console import Console

        console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, force_jupyter=False)
        self.print_to(console)
        html = console.export_html(inline_styles=True, code_format=HTML)
        return {"text/plain": self._text(WIDTH), "text/html": html}

    def _text(self, width: int, *, colours: bool = False) -> str:
        import io

        from rich.console import Console

        console = Console(width=width, file=io.StringIO(), highlight=False, force_terminal=colours, force_jupyter=False)
        with console.capture() as captured:
            self.print_to(console)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())
