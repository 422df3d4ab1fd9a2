"""All routed experts on disk, against accelerate and against the disk: part "disk" of `benchmarks/runtime.py`.

Each runs in a process of its own, loaded once, and in turn: the disk alone, the runtime, accelerate. The runtime reads
past the page cache. accelerate reads through it (memory-mapped files), so before every pass over the layers its files
are dropped from it, and the seconds this takes are taken off; what each fetched from storage is counted to show that it
did. With `--cgroup` the memory of each is capped too, page cache included.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.bars import Line, Section, Settings, median, spread, tell
from benchmarks.memory_cap import MemoryCap, make_cap
from benchmarks.random_mixtral import BATCH, PROMPT, save_model

__all__ = ["measure"]

ROOT = Path(__file__).resolve().parents[1]
GENERATED = 16
TRIED = 2
"""Tokens of the first runs of accelerate, which say what it does fastest: what is offloaded, and how experts run."""

THREADS = (1, 2, 4)
"""Of the sequential read; the fastest number counts."""

ROOM = 512 * 2**20
"""Above what the processes need, under a cap, for the page cache among other things [byte]."""

THEIRS, DISK = 3.0, 0.85
"""Bars: times faster than accelerate, and share of the disk's rate."""

IMPLEMENTATIONS = ("grouped_mm", "eager")
"""Of the experts in transformers; batched_mm takes many times the memory."""

WORDS = {"whole": "the whole model", "experts": "the experts alone"}


class Served:
    """A process that answers wishes (`benchmarks.disk_process`)."""

    def __init__(self, name: str, model: Path, folder: Path, cap: MemoryCap | None) -> None:
        self.name = name
        command = [sys.executable, "-m", "benchmarks.disk_process", name, str(model), str(folder), str(GENERATED)]
        if cap is not None:
            command.append(str(cap.members))
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )
        self.answer()

    def answer(self) -> dict[str, Any]:
        """Its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} ended with {self.process.wait()}; stderr says why")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, wish: str) -> dict[str, Any]:
        """Have it do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(wish + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def measure(settings: Settings) -> Section:
    """Run the part."""
    model = save_model(settings.folder)
    with ExitStack() as stack:
        cap = stack.enter_context(make_cap(settings.cgroup)) if settings.cgroup else None

        def start(name: str) -> Served:
            tell(f"disk: loading {name}")
            served = Served(name, model, settings.folder / name, cap)
            stack.callback(served.close)
            return served

        ours = start("runtime")
        tried: dict[tuple[str, str], dict[str, Any]] = {}
        processes = {name: start(name) for name in WORDS}
        for name, served in processes.items():
            for experts in IMPLEMENTATIONS:
                found = tried[name, experts] = served.ask(f"run {TRIED} {experts}")
                tell(f"disk: accelerate, {WORDS[name]}, {experts}: {found['seconds']:.2f} s for {TRIED} tokens")
        fastest = min(tried, key=lambda way: float(tried[way]["seconds"]))
        theirs = processes.pop(fastest[0])
        for name, served in processes.items():
            served.close()
            shutil.rmtree(settings.folder / name, ignore_errors=True)
        warm = ours.ask(f"run {GENERATED}")
        limit = None
        if cap is not None:
            limit = int(warm["resident_bytes"] + tried[fastest]["resident_bytes"] + ROOM)
            cap.limit(limit)
        runs: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        rates: dict[int, list[float]] = {threads: [] for threads in THREADS}
        for number in range(settings.rounds):
            tell(f"disk, round {number + 1} of {settings.rounds}")
            for threads in THREADS:
                rates[threads].append(ours.ask(f"disk {threads}")["bytes_per_s"])
            runs.append(ours.ask(f"run {GENERATED}"))
            others.append(theirs.ask(f"run {GENERATED} {fastest[1]}"))
            for threads in THREADS:
                rates[threads].append(ours.ask(f"disk {threads}")["bytes_per_s"])
    return _report(fastest, tried, runs, others, rates, limit)


def _report(
    fastest: tuple[str, str],
    tried: dict[tuple[str, str], dict[str, Any]],
    runs: list[dict[str, Any]],
    others: list[dict[str, Any]],
    rates: dict[int, list[float]],
    limit: int | None,
) -> Section:
    tokens = BATCH * GENERATED
    ours, theirs = (median([run["seconds"] for run in each]) for each in (runs, others))
    reached = [run["decode_disk_bytes"] / run["decode_s"] for run in runs]
    threads = max(rates, key=lambda count: median(rates[count]))
    disk = median(rates[threads])
    fetched = [median([run["fetched_bytes"] for run in each]) / GENERATED / 1e9 for each in (runs, others)]
    lines = [
        Line(
            what=f"accelerate disk_offload, {WORDS[fastest[0]]}, {fastest[1]}",
            value=tokens / theirs,
            unit="token/s",
            digits=1,
        ),
        Line(what="runtime, CPU-only plan, all routed experts on disk", value=tokens / ours, unit="token/s", digits=1),
        Line(what="end to end, times accelerate", value=theirs / ours, bar=THEIRS),
        Line(what=f"the disk alone, {threads} thread{'s' * (threads > 1)}", value=disk / 1e9, unit="GB/s"),
        Line(what="read in decode by the runtime", value=median(reached) / 1e9, unit="GB/s"),
        Line(what="share of the disk's rate", value=median(reached) / disk, bar=DISK),
        Line(what="fetched from storage per pass: runtime", value=fetched[0], unit="GB"),
        Line(what="fetched from storage per pass: accelerate", value=fetched[1], unit="GB"),
    ]
    firsts = ", ".join(f"{WORDS[way[0]]}, {way[1]} {float(run['seconds']):.2f} s" for way, run in tried.items())
    how = (
        "past the page cache (O_DIRECT)" if runs[-1]["past_the_cache"] else "THROUGH THE PAGE CACHE: no O_DIRECT there"
    )
    capped = "no cap on memory" if limit is None else f"both processes together capped at {limit / 2**30:.2f} GiB"
    notes = [
        f"{BATCH} prompts of {PROMPT} tokens, {GENERATED} generated, end to end",
        f"the runtime reads {how}; the files of accelerate are dropped from the page cache before every pass, "
        f"{median([run['dropping_s'] for run in others]):.2f} s a run that are taken off its time; {capped}",
        f"accelerate, {TRIED} tokens once each way: {firsts}",
        f"seconds, median (least to most): accelerate {spread([run['seconds'] for run in others])}, runtime "
        f"{spread([run['seconds'] for run in runs])}; disk [GB/s] "
        + ", ".join(f"{count}: {spread([rate / 1e9 for rate in each])}" for count, each in rates.items()),
    ]
    samples = {
        "runtime": runs,
        "accelerate": others,
        "disk_bytes_per_s": rates,
        "accelerate_tried": {" ".join(way): run for way, run in tried.items()},
    }
    title = "disk: the same model, its routed experts on disk"
    return Section(title=title, lines=lines, notes=notes, samples=samples)
