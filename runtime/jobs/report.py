"""What a person sees of a job: lines of a log on the way, a few at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from runtime.jobs.figures import LEVELS
from runtime.jobs.progress import duration, rate_text, size_text

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
    total, before, output = document["requests"], document["finished_before"], document["output"]
    if total == 0:
        yield f"nothing is left to run: {before:,} results are in {output}"
    else:
        done = f"{document['finished']:,} of {total:,} requests" + (f", {before:,} were done before" if before else "")
        yield f"{document['model']} on {document['device_name']}: {done}; results in {output}"
    if document["generated_tokens"]:
        rates = [rate_text(each["throughput_tokens_per_s"]) for each in (document, document["predicted"])]
        yield (
            f"{document['generated_tokens']:,} tokens in {duration(document['run_s'])}: {rates[0]} token/s, {rates[1]} "
            f"predicted for {document['hardware']}" + " (emulated: says nothing about it)" * document["emulated"]
        )
        peaks = {level: row["running_bytes"] for level, row in document["memory"].items() if row["running_bytes"]}
        held = ", ".join(f"{LEVELS[level]} {size_text(size)}" for level, size in peaks.items())
        share = document["bookkeeping_s"] / document["run_s"]
        yield f"peaks: {held}; writing results and counting took {share:.2%} of the time"
    refused = len(document["refused"])
    if refused:
        yield f"{refused:,} line{'s' * (refused > 1)} of {document['input']} cannot be run, see above"
    if document["stopped"]:
        yield "stopped: the same command goes on from here"
