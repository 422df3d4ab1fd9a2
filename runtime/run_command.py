"""`hrm run`: a saved plan with real tensors, and what it took beside what was predicted, as one JSON document."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hrm.errors import InputError
from hrm.model_files import read_config_file
from hrm.units import GIB
from runtime.batches import cut_batches, predict_batch
from runtime.memory_watch import MemoryWatch
from runtime.model_match import check_same_model
from runtime.numerics import Numerics, read_numerics
from runtime.pace import PACED_KINDS, pace_links
from runtime.prompts import Prompt, random_prompts, read_prompts
from runtime.random_weights import RandomWeights
from runtime.requests import make_requests
from runtime.run_document import Ran, describe_run
from runtime.run_job import Job, check_files, choose_machine, choose_window, read_job
from runtime.run_trace import save_trace
from runtime.run_watch import RunWatch
from runtime.session import Session, open_session, torch_dtype
from runtime.weight_source import WeightSource

__all__ = ["check_model", "open_weights", "run_saved_plan"]


def run_saved_plan(
    plan_file: Path,
    *,
    model_dir: Path | None = None,
    random_weights: bool = False,
    layers: int | None = None,
    prompt_ids: Path | None = None,
    requests: int | None = None,
    device: str | None = None,
    schedule: str | None = None,
    disk_dir: Path | None = None,
    paced: bool = False,
    trace: Path | None = None,
    steps: int | None = None,
    full: bool = False,
    output: Path | None = None,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run a saved plan; write its tokens and its trace where asked.

    Parameters
    ----------
    plan_file : Path
        Written by `hrm plan -o`.
    model_dir : Path, optional
        Folder of the checkpoint.
    random_weights : bool
        Weights of the real shapes without a checkpoint; one of the two must be given.
    layers : int, optional
        Only the first so many layers of the model.
    prompt_ids : Path, optional
        Prompts (`runtime.prompts`); random ones with the lengths of the plan's workload if not given.
    requests : int, optional
        How many; one batch of the plan, or all of `prompt_ids`, if not given.
    device : {"cuda", "cpu"}, optional
        What fits the plan if not given.
    schedule : str, optional
        The policy's own by default.
    disk_dir : Path, optional
        Where the disk tier lies; the system's temporary folder if not given.
    paced : bool
        Emulated, copies over link and disk last at least as long as the profile says.
    trace, output : Path, optional
        Files to write: a trace of the first batch, tokens of all requests.
    steps : int, optional
        Decode steps in the trace, from the middle of the batch, one if not given; their neighbours are in it too.
    full : bool
        The trace has prefill and every step, or, with `steps`, what that says.
    seed : int
        Of random weights and prompts.
    on_progress : callable, optional
        Called with a line of text now and then.

    Returns
    -------
    dict
        See docs/cli.md.

    Raises
    ------
    InputError
        The plan cannot be run, or not here, with the nearest that can; the model is another one, a prompt does not fit,
        memory or disk run out, or a file cannot be read or written.
    """
    tell = on_progress or (lambda _: None)
    tell("reading the plan")
    check_files(plan_file, trace=trace, output=output, disk_dir=disk_dir)
    job = read_job(plan_file, layers, schedule)
    window = choose_window(job, trace, steps, full)
    machine = choose_machine(job, device, disk_dir, paced)
    prompts = _find_prompts(job, prompt_ids, requests, seed)
    numerics = check_model(job, model_dir, random_weights)
    asked = make_requests([prompt.tokens for prompt in prompts], job.scenario)
    batches = list(cut_batches(asked, job.policy, job.scenario))
    predictions = [predict_batch(job.scenario, batch) for batch in batches]
    watch = RunWatch(job.scenario, [(len(b.requests), p) for b, p in zip(batches, predictions, strict=True)], window)
    watch.tell = on_progress
    memory = MemoryWatch(machine)
    began = time.perf_counter()
    try:
        source, notes = open_weights(job, model_dir, numerics, seed)
        session = open_session(
            job.scenario,
            job.policy,
            job.schedule,
            source,
            numerics,
            machine,
            disk_dir=disk_dir,
            pace=pace_links(job.scenario) if paced else None,
            on_progress=lambda done, count: tell(f"loading layers: {done} of {count}"),
        )
        del source
        load_s, loading = time.perf_counter() - began, memory.take()
        tell(f"prefill of {len(batches[0].requests):,} requests")
        runs = session.generate(
            [prompt.tokens for prompt in prompts],
            on_experts=watch.on_experts,
            window=window,
            on_piece=watch.on_piece,
        )
        running = memory.take()
        notes += _unused_staging(session)
        if session.disk is not None and session.disk.remark:
            notes += (f"{session.disk.remark}.",)
    except (RuntimeError, MemoryError) as error:
        raise _explain(error, job) from error
    finally:
        memory.close()
    if trace is not None and runs[0].policy != job.policy:
        notes += (
            f"the traced batch has {runs[0].policy.batch_size:,} requests, the plan's {job.policy.batch_size:,}: "
            "hrm diff finds other tasks in the trace of hrm simulate.",
        )
    ran = Ran(
        whole=job.whole,
        scenario=job.scenario,
        policy=job.policy,
        schedule=job.schedule,
        saved=job.document,
        weights="random" if model_dir is None else model_dir.absolute().name,
        prompts="random" if prompt_ids is None else prompt_ids.name,
        seed=seed,
        device=machine,
        paced=tuple(lane for _, lane in watch.busy_s if paced and lane.kind in PACED_KINDS),
        requests=len(prompts),
        prompt_tokens=sum(len(prompt.tokens) for prompt in prompts),
        runs=runs,
        predictions=predictions,
        watch=watch,
        load_s=load_s,
        loading=loading,
        running=running,
        on_disk=session.disk.size if session.disk is not None else 0,
        notes=notes,
    )
    document = describe_run(ran)
    try:
        if output is not None:
            tokens = {index: found for run in runs for index, found in run.tokens.items()}
            _write_tokens(output, prompts, tokens)
    finally:
        if trace is not None:
            save_trace(ran, trace)
    return document


def _find_prompts(job: Job, file: Path | None, requests: int | None, seed: int) -> list[Prompt]:
    if requests is not None and requests < 1:
        raise InputError(f"{requests} requests", where="--requests", way_out="1 or more")
    if file is None:
        count = job.policy.batch_size if requests is None else requests
        return random_prompts(job.scenario.workload, count, job.scenario.model.vocab_size, seed=seed)
    found = read_prompts(file)
    if requests is not None and requests > len(found):
        raise InputError(f"{requests:,} of {len(found):,} prompts", where="--requests", way_out=f"up to {len(found):,}")
    return found[:requests]


def check_model(job: Job, model_dir: Path | None, random_weights: bool, *, where: str = "hrm run") -> Numerics:
    """How the model computes; refuses a folder that holds another one."""
    if (model_dir is None) != random_weights:
        fact = "which weights is not said" if model_dir is None else "weights are given twice"
        raise InputError(fact, where=where, way_out="--model-dir DIR, or --random-weights")
    if model_dir is not None:
        file = model_dir.expanduser() / "config.json"
        check_same_model(job.config, read_config_file(file), where=str(file))
    return read_numerics(job.config, where=f"{job.file}: inputs.model.config")


def open_weights(
    job: Job, model_dir: Path | None, numerics: Numerics, seed: int
) -> tuple[WeightSource, tuple[str, ...]]:
    """The weights, and what a person should know of them."""
    if model_dir is None:
        dtype = torch_dtype(job.scenario.formats.compute)
        return RandomWeights(job.scenario.model, numerics, dtype=dtype, seed=seed), ()
    from runtime.checkpoint import open_checkpoint  # needs safetensors

    checkpoint = open_checkpoint(model_dir)
    return checkpoint, tuple(f"{model_dir}: {warning}" for warning in checkpoint.warnings)


def _explain(error: BaseException, job: Job) -> BaseException:
    """Memory that ran out, in one line; anything else is a fault of this program."""
    every: BaseException | None = error
    while every is not None:
        if isinstance(every, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(every):
            level = "GPU memory" if isinstance(every, torch.OutOfMemoryError) else "CPU memory"
            return InputError(
                f"{level} ran out: {str(error).splitlines()[0]:.200}",
                where=str(job.file),
                way_out="close what else uses it, or plan for less, e.g. --set gpu.usable_memory=...",
            )
        every = every.__cause__
    return error


def _write_tokens(path: Path, prompts: Sequence[Prompt], tokens: Mapping[int, list[int]]) -> None:
    lines = (json.dumps({"id": prompt.id, "token_ids": tokens[index]}) + "\n" for index, prompt in enumerate(prompts))
    text = "".join(lines)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fact, way_out = f"cannot be written any more: {error.strerror or error}", ""
        try:  # what took long to generate is not lost for a disk that is full
            with tempfile.NamedTemporaryFile("w", prefix="tokens-", suffix=".jsonl", delete=False) as kept:
                kept.write(text)
            way_out = f"the tokens are in {kept.name}"
        except OSError:
            way_out = "nor is there room in the system's temporary folder"
        raise InputError(fact, where=f"--output: {path}", way_out=way_out) from None


def _unused_staging(session: Session) -> tuple[str, ...]:
    """Why a run takes less CPU memory than its plan: pieces that weights pass are made only where some do."""
    planned = session.arenas["cpu"].planned.get("weight staging buffers", 0.0)
    if session.store.ring or planned == 0.0:
        return ()
    return (
        f"{planned / GIB:.2f} GiB of the plan's CPU memory are staging buffers of weights: none pass them under this "
        "plan, and the run has not made them.",
    )
