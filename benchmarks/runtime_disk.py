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
GENERATED = 8
THREADS = (1, 2, 4)
"""Of the sequential read; the fastest number counts."""

ROOM = 256 * 2**20
"""Above what the processes need, under a cap, for the page cache among other things [byte]."""

THEIRS, DISK = 3.0, 0.85
"""Bars: times faster than accelerate, and share of the disk's rate."""

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
        tried: dict[str, tuple[Served, dict[str, Any]]] = {}
        for name in WORDS:
            served = start(name)
            tried[name] = served, served.ask("run")
            tell(f"disk: accelerate, {WORDS[name]}: {BATCH * GENERATED / tried[name][1]['seconds']:.1f} token/s")
        fastest = min(tried, key=lambda name: float(tried[name][1]["seconds"]))
        theirs = tried[fastest][0]
        for name, (served, _) in tried.items():
            if name != fastest:
                served.close()
                shutil.rmtree(settings.folder / name, ignore_errors=True)
        warm = ours.ask("run")
        limit = None
        if cap is not None:
            limit = int(warm["resident_bytes"] + tried[fastest][1]["resident_bytes"] + ROOM)
            cap.limit(limit)
        runs: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        rates: dict[int, list[float]] = {threads: [] for threads in THREADS}
        for number in range(settings.rounds):
            tell(f"disk, round {number + 1} of {settings.rounds}")
            for threads in THREADS:
                rates[threads].append(ours.ask(f"disk {threads}")["bytes_per_s"])
            runs.append(ours.ask("run"))
            others.append(theirs.ask("run"))
            for threads in THREADS:
                rates[threads].append(ours.ask(f"disk {threads}")["bytes_per_s"])
    return _report(fastest, {name: each[1] for name, each in tried.items()}, runs, others, rates, limit)


def _report(
    fastest: str,
    tried: dict[str, dict[str, Any]],
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
        Line(what=f"accelerate disk_offload, {WORDS[fastest]}", value=tokens / theirs, unit="token/s", digits=1),
        Line(what="runtime, CPU-only plan, all routed experts on disk", value=tokens / ours, unit="token/s", digits=1),
        Line(what="end to end, times accelerate", value=theirs / ours, bar=THEIRS),
        Line(what=f"the disk alone, {threads} thread{'s' * (threads > 1)}", value=disk / 1e9, unit="GB/s"),
        Line(what="read in decode by the runtime", value=median(reached) / 1e9, unit="GB/s"),
        Line(what="share of the disk's rate", value=median(reached) / disk, bar=DISK),
        Line(what="fetched from storage per pass: runtime", value=fetched[0], unit="GB"),
        Line(what="fetched from storage per pass: accelerate", value=fetched[1], unit="GB"),
    ]
    others_tried = ", ".join(f"{WORDS[name]} {tokens / float(run['seconds']):.1f} token/s" for name, run in tried.items())
    how = "past the page cache (O_DIRECT)" if runs[-1]["past_the_cache"] else "THROUGH THE PAGE CACHE: no O_DIRECT there"
    capped = "no cap on memory" if limit is None else f"both processes together capped at {limit / 2**30:.2f} GiB"
    notes = [
        f"{BATCH} prompts of {PROMPT} tokens, {GENERATED} generated, end to end",
        f"the runtime reads {how}; the files of accelerate are dropped from the page cache before every pass, "
        f"{median([run['dropping_s'] for run in others]):.2f} s a run that are taken off its time; {capped}",
        f"accelerate, first run of each way: {others_tried}",
        f"seconds, median (least to most): accelerate {spread([run['seconds'] for run in others])}, runtime "
        f"{spread([run['seconds'] for run in runs])}; disk [GB/s] "
        + ", ".join(f"{count}: {spread([rate / 1e9 for rate in each])}" for count, each in rates.items()),
    ]
    samples = {"runtime": runs, "accelerate": others, "disk_bytes_per_s": rates, "accelerate_tried": tried}
    title = "disk: the same model, its routed experts on disk"
    return Section(title=title, lines=lines, notes=notes, samples=samples)
