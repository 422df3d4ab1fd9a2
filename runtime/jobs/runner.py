"""`hrm run --input`: a file of prompts to a file of results, in as many batches as it takes, safe to stop."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hrm.batching import Request
from hrm.errors import InputError
from hrm.host_facts import read_host_facts
from hrm.model_files import read_config_file
from hrm.plans import save_plan
from hrm.rates import derive_rates
from hrm.scenario import Scenario, measure_sizes
from hrm.trivial import predict_policy
from hrm.workload import Workload
from runtime.batches import SizedBatch
from runtime.checkpoint import Checkpoint, open_checkpoint
from runtime.device import Device
from runtime.device_names import device_name
from runtime.early_ends import EarlyEnds, Ended, Stopped, finish_batch
from runtime.jobs.auto_plan import describe_choice, plan_here
from runtime.jobs.batch_room import cut_to_room, longest_prompt
from runtime.jobs.output_file import OutputFile, Result, open_output
from runtime.jobs.preflight import check_end_tokens, check_output_room, check_paths, lock_warning
from runtime.jobs.progress import JobProgress
from runtime.jobs.requests_file import Fault, JobRequest, Limits, read_requests
from runtime.jobs.sampling import Sampling, make_score
from runtime.jobs.stopping import Stopper, stop_on_sigterm
from runtime.jobs.text import Tokenizer, find_end_tokens, open_tokenizer
from runtime.memory_watch import MemoryWatch
from runtime.model_match import check_same_model
from runtime.numerics import read_numerics
from runtime.run_job import Job, choose_machine, read_job
from runtime.session import Session, open_session

__all__ = ["JobOptions", "JobOutcome", "run_prompts"]

FAULTS_TOLD = 50
"""Lines that cannot be run and are told one by one."""

PLAN_ENDING = ".plan.json"
"""Of the file beside the results that keeps a plan which was made for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What to run.

    Attributes
    ----------
    plan_file : Path or None
        Written by `hrm plan -o`; one is made for `hardware` if None.
    hardware : str or None
        "auto" for this machine, or a profile.
    source, output : Path
        Requests (`runtime.jobs.requests_file`), and results.
    max_new_tokens : int or None
        For lines that do not say; the plan's generation length if None.
    steps : int or None
        Decode steps between two looks at which requests are done; by the time they take if None.
    """

    plan_file: Path | None = None
    hardware: str | None = None
    model_dir: Path
    source: Path
    output: Path
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    device: str | None = None
    schedule: str | None = None
    disk_dir: Path | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job went: its document, and what the command returns (0 all is done, 2 some lines cannot, 130 stopped)."""

    document: dict[str, Any]
    exit_code: int


@dataclass(slots=True)
class _Work:
    """A job that is ready to run."""

    job: Job
    requests: list[JobRequest]
    faults: list[Fault]
    batches: list[SizedBatch]
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    ends: frozenset[int]
    machine: Device


def run_prompts(
    options: JobOptions,
    *,
    say: Callable[[str], None] = lambda _: None,
    tell: Callable[[str], None] | None = None,
) -> JobOutcome:
    """Run every request that has no result yet.

    Parameters
    ----------
    options : JobOptions
    say : callable
        Called with what a person should see: what was chosen, what cannot be run and why.
    tell : callable, optional
        Called with a line of progress now and then.

    Raises
    ------
    InputError
        Something that would fail later was found out before; or a disk is full, a shard cannot be read, memory is taken
        by others. Results that were written stay, and the same command goes on from there.
    InfeasibleError
        No plan fits this machine.
    KeyboardInterrupt
        Stopped where waiting was no use.
    """
    check_paths(options.source, options.output)
    if not options.source.is_file():
        raise InputError("no such file", where=f"--input: {options.source}")
    with open_output(options.output) as output, stop_on_sigterm() as stopper:
        if output.cut:
            say(f"{options.output}: {output.cut} bytes of half a result were cut off")
        began = time.perf_counter()
        before = dict(output.finished)
        try:
            work = _prepare(options, output, say, tell)
        except BaseException:
            output.drop_if_new()
            raise
        for fault in work.faults[:FAULTS_TOLD]:
            say(f"{options.source}: line {fault.line}: {fault.fact}")
        if len(work.faults) > FAULTS_TOLD:
            say(f"{options.source}: {len(work.faults) - FAULTS_TOLD} more lines cannot be run")
        if before:
            say(f"{options.output}: {len(before):,} results are there, {len(work.requests):,} requests are left")
        document = _describe(options, work, before)
        document["prepared_s"] = time.perf_counter() - began
        stopped = False
        if work.requests:
            stopped = _run(options, work, output, stopper, document, tell)
        document["stopped"] = stopped
        return JobOutcome(document, 130 if stopped else 2 if work.faults else 0)


def _prepare(
    options: JobOptions, output: OutputFile, say: Callable[[str], None], tell: Callable[[str], None] | None
) -> _Work:
    """Everything that can be found out before weights are loaded."""
    progress = tell or (lambda _: None)
    folder = options.model_dir.expanduser()
    progress("checking the checkpoint")
    checkpoint = open_checkpoint(folder)
    config = read_config_file(folder / "config.json")
    tokenizer, ends = open_tokenizer(folder), find_end_tokens(folder, config)
    model = checkpoint.spec
    check_end_tokens(ends, model.vocab_size, str(folder))
    limits = Limits(vocabulary=model.vocab_size, positions=model.max_positions or None)
    encode = tokenizer.encode if tokenizer is not None else None
    plan_file = options.plan_file
    if plan_file is None:
        plan_file = _make_plan(options, limits, encode, say, tell)
    job = read_job(plan_file, None, options.schedule)
    check_same_model(job.config, config, where=str(folder / "config.json"))
    policy, workload = job.policy, job.scenario.workload
    limits = replace(
        limits,
        new_tokens=workload.generation_length,
        request_tokens=policy.micro_batch_token_budget or None,
        prompt_tokens=longest_prompt(job.scenario, policy),
    )
    progress("reading the requests")
    found, faults = read_requests(options.source, limits, encode=encode, default_new_tokens=options.max_new_tokens)
    left = [request for request in found if request.id not in output.finished]
    if not found and faults:
        first = faults[0]
        raise InputError(
            f"none of its {len(faults):,} requests can be run; line {first.line}: {first.fact}",
            where=f"--input: {options.source}",
        )
    check_output_room(options.output, left)
    requests = [
        Request(index=index, prompt_tokens=len(each.tokens), generation_tokens=each.max_new_tokens)
        for index, each in enumerate(left)
    ]
    batches = cut_to_room(requests, policy, job.scenario)
    machine = choose_machine(job, options.device, options.disk_dir, False)
    if machine.cuda and policy.pin_weights:
        host = read_host_facts(options.disk_dir or Path(tempfile.gettempdir()))
        pinned = predict_policy(
            job.scenario, measure_sizes(job.scenario), derive_rates(job.scenario.profile, job.scenario.formats), policy
        ).memory["cpu"]
        warning = lock_warning(job.scenario, pinned.peak_bytes, host)
        if warning is not None:
            say(warning)
    for warning in checkpoint.warnings:
        say(f"{folder}: {warning}")
    return _Work(job, left, faults, batches, checkpoint, tokenizer, ends, machine)


def _make_plan(
    options: JobOptions,
    limits: Limits,
    encode: Callable[[Sequence[str]], list[list[int]]] | None,
    say: Callable[[str], None],
    tell: Callable[[str], None] | None,
) -> Path:
    """Plan for the requests of the file; the plan is kept beside the results."""
    if options.hardware is None:
        raise InputError("which plan is not said", where="hrm run", way_out="PLAN, or --hw auto to make one here")
    found, faults = read_requests(options.source, limits, encode=encode, default_new_tokens=options.max_new_tokens)
    if not found:
        first = faults[0]
        raise InputError(
            f"none of its {len(faults):,} requests can be run; line {first.line}: {first.fact}",
            where=f"--input: {options.source}",
            way_out="--max-new-tokens N, where lines do not say" if "max_new_tokens" in first.fact else "",
        )
    workload = Workload(
        name=options.source.stem,
        prompt_lengths=tuple(len(request.tokens) for request in found),
        generation_length=max(request.max_new_tokens for request in found),
        num_requests=len(found),
        origin=str(options.source),
    )
    host = read_host_facts(options.disk_dir or Path(tempfile.gettempdir()))
    if options.device == "cpu":
        host = replace(host, gpus=())
    assert options.hardware is not None
    plan, assumed = plan_here(options.model_dir, workload, host, hardware=options.hardware, on_progress=tell)
    file = options.output.with_name(options.output.name + PLAN_ENDING)
    save_plan(plan, file)
    say(f"{describe_choice(plan, assumed)}; the plan is {file}")
    return file


def _predicted_rate(scenario: Scenario, batch: SizedBatch) -> float:
    """Token/s that the cost model says of a batch, all its requests run to the plan's length [token/s]."""
    lengths = tuple(request.prompt_tokens for request in batch.requests)
    workload = replace(scenario.workload, prompt_lengths=lengths, num_requests=len(lengths), padded=False)
    as_run = replace(scenario, workload=workload)
    rates = derive_rates(scenario.profile, scenario.formats)
    found = predict_policy(as_run, measure_sizes(as_run), rates, batch.policy)
    return len(lengths) * workload.generation_length / (found.prefill_s + found.decode_s)


def _run(
    options: JobOptions,
    work: _Work,
    output: OutputFile,
    stopper: Stopper,
    document: dict[str, Any],
    tell: Callable[[str], None] | None,
) -> bool:
    """Load the model and run all batches; returns whether it was stopped."""
    job, scenario = work.job, work.job.scenario
    memory = MemoryWatch(work.machine)
    began = time.perf_counter()
    session: Session | None = None
    stopped, books = False, 0.0
    names = [request.id for request in work.requests]
    prompts = [request.tokens for request in work.requests]
    try:
        session = open_session(
            scenario,
            job.policy,
            job.schedule,
            work.checkpoint,
            read_numerics(job.config, where=f"{job.file}: inputs.model.config"),
            work.machine,
            disk_dir=options.disk_dir,
            on_progress=None if tell is None else (lambda done, count: tell(f"loading layers: {done} of {count}")),
        )
        document["load_s"] = time.perf_counter() - began
        memory.take()
        progress = JobProgress(
            requests=len(work.requests),
            limits={index: each.max_new_tokens for index, each in enumerate(work.requests)},
            batches=[(len(each.requests), _predicted_rate(scenario, each)) for each in work.batches],
            layers=scenario.model.n_layers,
            tell=tell,
            memory=memory.take,
        )

        def deliver(ended: Sequence[Ended]) -> None:
            nonlocal books
            at = time.perf_counter()
            output.add(_results(ended, work))
            progress.on_ended(ended)
            books += time.perf_counter() - at

        how = EarlyEnds(
            ends=work.ends,
            deliver=deliver,
            steps=options.steps,
            score=make_score(options.sampling, names),
            whole=options.sampling.whole_vocabulary,
            stop=lambda: stopper.asked,
            on_piece=lambda piece, requests: progress.on_steps(requests, piece.steps.last + 1),
            on_experts=progress.on_experts,
        )
        stopper.may_wait = lambda: how.decoding
        ran = time.perf_counter()
        for batch in work.batches:
            if stopper.asked:
                raise Stopped
            finish_batch(session, batch, prompts, how)
            progress.on_batch()
    except Stopped:
        stopped = True
    except (RuntimeError, MemoryError) as error:
        raise _explain(error, job, output) from error
    finally:
        stopper.may_wait = lambda: False
        memory.close()
        if session is not None and session.disk is not None:
            session.disk.close()
    seconds = time.perf_counter() - ran
    rates = [rate for _, rate in progress.batches]
    sizes = [size for size, _ in progress.batches]
    document |= {
        "finished": progress.done,
        "generated_tokens": progress.tokens,
        "run_s": seconds,
        "prefill_s": how.phases["prefill"],
        "decode_s": how.phases["decode"],
        "bookkeeping_s": books,
        "throughput_tokens_per_s": progress.tokens / seconds,
        "predicted_throughput_tokens_per_s": sum(sizes)
        / math.fsum(n / rate for n, rate in zip(sizes, rates, strict=True)),
        "memory": dict(progress.held.items()),
    }
    return stopped


def _results(ended: Sequence[Ended], work: _Work) -> list[Result]:
    found = []
    for each in ended:
        request = work.requests[each.index]
        text = None if work.tokenizer is None else work.tokenizer.decode(each.tokens)
        found.append(
            Result(
                id=request.id,
                token_ids=each.tokens,
                text=text,
                finish_reason=each.reason,
                prompt_tokens=len(request.tokens),
            )
        )
    return found


def _explain(error: BaseException, job: Job, output: OutputFile) -> BaseException:
    """Memory that ran out, in one line; anything else is a fault of this program."""
    every: BaseException | None = error
    while every is not None:
        if isinstance(every, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(every):
            level = "GPU memory" if isinstance(every, torch.OutOfMemoryError) else "CPU memory"
            return InputError(
                f"{level} ran out, which something else may have taken: {str(error).splitlines()[0]:.160}; "
                f"{len(output.finished):,} results are in {output.path}",
                where=str(job.file),
                way_out="close what else uses it and start the same command again, or plan for less",
            )
        every = every.__cause__
    return error


def _describe(options: JobOptions, work: _Work, before: dict[str | int, int]) -> dict[str, Any]:
    scenario = work.job.scenario
    return {
        "model": scenario.model.name,
        "hardware": scenario.profile.name,
        "plan": str(work.job.file),
        "schedule": work.job.schedule,
        "device": work.machine.kind,
        "device_name": device_name(work.machine),
        "emulated": work.machine.emulated,
        "input": str(options.source),
        "output": str(options.output),
        "temperature": options.sampling.temperature,
        "top_p": options.sampling.top_p,
        "seed": options.sampling.seed,
        "requests": len(work.requests),
        "finished_before": len(before),
        "refused": [{"line": fault.line, "why": fault.fact} for fault in work.faults],
        "batches": [len(batch.requests) for batch in work.batches],
        "finished": 0,
        "generated_tokens": 0,
    }
