"""What a job costs beside its batches: `python -m benchmarks.jobs`, on an idle machine.

A job of ten batches, as `hrm run --input` runs it, with ten single batches as `hrm run` has them: before or after each
batch of the job the same requests run once more by `Session.generate`, in the same process and on the same buffers, so
that both see the same machine. Bars: the job keeps 0.95 of the throughput of single batches; tokenising, writing and
counting leave 0.98 of the time to the rest. The accelerator is emulated. Exits with 4 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bars import Line, Section, median, print_section, section_json, spread, tell
from runtime.batches import SizedBatch
from runtime.early_ends import EarlyEnds, finish_batch
from runtime.jobs import runner
from runtime.jobs.runner import JobOptions, run_prompts
from runtime.jobs.text import Tokenizer
from runtime.session import Session

BATCHES, BATCH, PROMPT, GENERATED = 10, 32, 64, 32
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "eos_token_id": None,
}
PLAN = ("--hw", "l4", "--compute-dtype", "fp32", "--micro-batch", "8", "--num-micro-batches", "4", "--attention", "cpu")
KEPT, LEFT = 0.95, 0.98
LOAD = 0.5
"""Above it a machine is not idle."""


def save_inputs(folder: Path) -> None:
    """A random Mixtral with a tokenizer of words, prompts of one length, and a plan."""
    import torch
    from tokenizers import Tokenizer as Words
    from tokenizers import models, pre_tokenizers
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**SHAPE, dtype="float32")).save_pretrained(folder / "model")
    (folder / "model" / "generation_config.json").unlink(missing_ok=True)
    words = Words(models.WordLevel({f"w{number}": number for number in range(4096)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "model" / "tokenizer.json"))
    source = random.Random(0)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for number in range(BATCHES * BATCH):
            text = " ".join(f"w{source.randrange(1, 4096)}" for _ in range(PROMPT))
            file.write(json.dumps({"id": number, "prompt": text}) + "\n")
    lengths = ("--prompt-len", str(PROMPT), "--gen-len", str(GENERATED), "--requests", str(BATCHES * BATCH))
    plan = ("plan", "--model", str(folder / "model"), *PLAN, "--weights-on-gpu", "0.3", *lengths)
    command = [sys.executable, "-m", "hrm", *plan, "-o", str(folder / "plan.json")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@dataclass(slots=True)
class Single:
    """Runs every batch of a job once more by itself, in turn before and after it."""

    seconds: list[float] = field(default_factory=list)
    job_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    job_cpu_s: float = 0.0

    def finish(self, session: Session, batch: SizedBatch, prompts: Sequence[Sequence[int]], how: EarlyEnds) -> None:
        """In place of `finish_batch`."""
        first = len(self.seconds) % 2 == 0
        mine = [prompts[request.index] for request in sorted(batch.requests, key=lambda each: each.index)]
        if first:
            self.run(session, mine)
        began, busy = time.perf_counter(), time.process_time()
        finish_batch(session, batch, prompts, how)
        self.job_s.append(time.perf_counter() - began)
        self.job_cpu_s += time.process_time() - busy
        if not first:
            self.run(session, mine)

    def run(self, session: Session, prompts: Sequence[Sequence[int]]) -> None:
        """The batch alone."""
        began, busy = time.perf_counter(), time.process_time()
        session.generate(prompts)
        self.seconds.append(time.perf_counter() - began)
        self.cpu_s += time.process_time() - busy


def measure(folder: Path, number: int) -> dict[str, float]:
    """One job, with a single batch beside each of its own [s]."""
    single, encode, tokenising = Single(), Tokenizer.encode, [0.0]

    def timed_encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        began = time.perf_counter()
        found = encode(tokenizer, texts)
        tokenising[0] += time.perf_counter() - began
        return found

    options = JobOptions(
        plan_file=folder / "plan.json",
        model_dir=folder / "model",
        source=folder / "prompts.jsonl",
        output=folder / f"results{number}.jsonl",
        device="cpu",
    )
    runner.finish_batch, Tokenizer.encode = single.finish, timed_encode  # type: ignore[method-assign]
    try:
        document: dict[str, Any] = run_prompts(options).document
    finally:
        runner.finish_batch, Tokenizer.encode = finish_batch, encode  # type: ignore[method-assign]
    assert document["batches"] == [BATCH] * BATCHES and document["finish_reasons"] == {"length": BATCHES * BATCH}
    job = document["run_s"] - sum(single.seconds)
    kept = tokenising[0] + document["bookkeeping_s"]
    return {
        "single_s": sum(single.seconds),
        "job_s": job,
        "kept": sum(single.seconds) / job,
        "kept_by_batch": median([a / b for a, b in zip(single.seconds, single.job_s, strict=True)]),
        "cpu_kept": single.cpu_s / single.job_cpu_s,
        "tokenising_s": tokenising[0],
        "bookkeeping_s": document["bookkeeping_s"],
        "left": 1.0 - kept / (job + tokenising[0]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jobs", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="jobs, of which medians count; 3 if not given")
    parser.add_argument("--json", type=Path, help="keep every measurement in this file")
    given = parser.parse_args(arguments)
    if os.getloadavg()[0] > LOAD:
        tell(f"the load is {os.getloadavg()[0]:.2f}: measure on an idle machine")
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        tell("saving a model, prompts and a plan")
        save_inputs(Path(name))
        for number in range(given.rounds):
            tell(f"job {number + 1} of {given.rounds}")
            rounds.append(measure(Path(name), number))
    values = {key: [each[key] for each in rounds] for key in rounds[0]}
    section = Section(
        title=f"a job of {BATCHES} batches of {BATCH} requests, {PROMPT} + {GENERATED} tokens",
        lines=[
            Line(what="ten single batches", value=median(values["single_s"]), unit="s"),
            Line(what="the job, loading left out", value=median(values["job_s"]), unit="s"),
            Line(what="single batches / job", value=median(values["kept"]), bar=KEPT, digits=3),
            Line(what="the same, median of the batches", value=median(values["kept_by_batch"]), digits=3),
            Line(
                what="the same in seconds of CPU, which others take none of", value=median(values["cpu_kept"]), digits=3
            ),
            Line(what="tokenising", value=median(values["tokenising_s"]), unit="s", digits=3),
            Line(what="writing results and counting", value=median(values["bookkeeping_s"]), unit="s", digits=3),
            Line(what="share of the time left to the rest", value=median(values["left"]), bar=LEFT, digits=4),
        ],
        notes=[f"single batches / job: {spread(values['kept'])}", f"left to the rest: {spread(values['left'])}"],
        samples=values,
    )
    print_section(section)
    if given.json is not None:
        given.json.write_text(json.dumps(section_json(section), indent=1), encoding="utf-8")
    return 0 if section.met else 4


if __name__ == "__main__":
    sys.exit(main())
