"""What a person sees of a job: lines of a log on the way, a few at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from runtime.jobs.figures import LEVELS, size_text
from runtime.jobs.progress import duration

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["log_lines", "print_job"]

LOG_EVERY_S = 60.0
"""Between two lines where standard error is no terminal [s]."""


def log_lines(say: Callable[[str], None]) -> Callable[[str], None]:
    """Progress for a log: a line a minute."""
    last = time.monotonic()

    def tell(text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LOG_EVERY_S:
            last = now
            say(text)

    return tell


def print_job(document: Mapping[str, Any], console: Console) -> None:
    """Print the document of `runtime.jobs.runner.run_prompts`."""
    for line in _lines(document):
        console.print(line, markup=False)


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    total, before = document["requests"], document["finished_before"]
    done = f"{document['finished']:,} of {total:,} requests" + (f", {before:,} were done before" if before else "")
    yield f"{document['model']} on {document['device_name']}: {done}; results in {document['output']}"
    if document["generated_tokens"]:
        predicted = document["predicted_throughput_tokens_per_s"]
        yield (
            f"{document['generated_tokens']:,} tokens in {duration(document['run_s'])}: "
            f"{document['throughput_tokens_per_s']:,.3g} token/s, {predicted:,.3g} predicted for {document['hardware']}"
            + (" (emulated: says nothing about it)" if document["emulated"] else "")
        )
        peaks = {level: row["running_bytes"] for level, row in document["memory"].items() if row["running_bytes"]}
        held = ", ".join(f"{LEVELS[level]} {size_text(size)}" for level, size in peaks.items())
        share = document["bookkeeping_s"] / document["run_s"]
        yield f"peaks: {held}; writing results took {share:.2%} of the time"
    if document["refused"]:
        yield f"{len(document['refused']):,} lines of {document['input']} cannot be run, see above"
    if document["stopped"]:
        yield "stopped: the same command goes on from here"
