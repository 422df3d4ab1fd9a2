"""`hrm run --input`: a file of prompts to a file of results, in as many batches as it takes, safe to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hrm.errors import InputError
from runtime.early_ends import EarlyEnds, Ended, Stopped, finish_batch
from runtime.jobs.job_document import Measured, describe_job, describe_measured
from runtime.jobs.job_watch import JobWatch
from runtime.jobs.options import JobOptions
from runtime.jobs.output_file import OutputFile, Result, open_output
from runtime.jobs.page import save_page
from runtime.jobs.preflight import check_options
from runtime.jobs.preparation import Work, prepare_job
from runtime.jobs.prices import predicted_rate
from runtime.jobs.progress import JobProgress
from runtime.jobs.sampling import make_score
from runtime.jobs.stopping import Stopper, stop_on_sigterm
from runtime.memory_watch import MemoryWatch
from runtime.numerics import read_numerics
from runtime.run_job import Job
from runtime.run_state import RunState
from runtime.session import Piece, Session, open_session

__all__ = ["JobOptions", "JobOutcome", "run_prompts"]

FAULTS_TOLD = 50
"""Lines that cannot be run and are told one by one."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job went: its document, and what the command returns (0 all is done, 2 some lines cannot, 130 stopped)."""

    document: dict[str, Any]
    exit_code: int


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
    check_options(options)
    with open_output(options.output) as output, stop_on_sigterm() as stopper:
        if output.cut:
            say(f"{options.output}: {output.cut} bytes of half a result were cut off")
        began = time.perf_counter()
        try:
            work = prepare_job(options, output, say, tell)
        except BaseException:
            output.drop_if_new()
            raise
        for fault in work.faults[:FAULTS_TOLD]:
            say(f"{options.source}: line {fault.line}: {fault.fact}")
        if len(work.faults) > FAULTS_TOLD:
            say(f"{options.source}: {len(work.faults) - FAULTS_TOLD} more lines cannot be run")
        if any("the plan" in fault.fact for fault in work.faults):
            say(
                f"{work.job.file}: a plan with room for all: hrm plan with more --prompt-len or --gen-len, or --hw auto"
            )
        document = describe_job(options, work) | {"prepared_s": time.perf_counter() - began}
        if work.requests:
            _run_and_describe(options, work, output, stopper, document, tell, say)
        elif options.report is not None:
            say(f"nothing was left to run: {options.report} is as it was")
        return JobOutcome(document, 130 if document["stopped"] else 2 if work.faults else 0)


def _run_and_describe(
    options: JobOptions,
    work: Work,
    output: OutputFile,
    stopper: Stopper,
    document: dict[str, Any],
    tell: Callable[[str], None] | None,
    say: Callable[[str], None],
) -> None:
    """Run, and put into the document what was measured; the page is written also where something ended the job."""
    rates = [predicted_rate(work.job.scenario, batch) for batch in work.batches]
    measured = Measured(watch=JobWatch())
    ended_by: BaseException | None = None
    try:
        document["stopped"] = _run(options, work, output, stopper, measured, rates, tell)
    except (InputError, KeyboardInterrupt) as error:
        ended_by = error
        document["stopped"] = True
        document["ended_by"] = str(error) if isinstance(error, InputError) else "interrupted"
    if ended_by is None or options.report is not None:
        document |= describe_measured(work, measured, rates)
    if options.report is not None and measured.watch.stretches:
        try:
            save_page(document, options.report)
            say(f"saved to {options.report}")
        except InputError as error:
            if ended_by is None:
                raise
            say(f"hrm: {error}")
    if ended_by is not None:
        raise ended_by


def _run(
    options: JobOptions,
    work: Work,
    output: OutputFile,
    stopper: Stopper,
    measured: Measured,
    rates: Sequence[float],
    tell: Callable[[str], None] | None,
) -> bool:
    """Load the model and run all batches; returns whether it was stopped."""
    job, scenario, watch = work.job, work.job.scenario, measured.watch
    memory = MemoryWatch(work.machine)
    began = time.perf_counter()
    session: Session | None = None
    names = [request.id for request in work.requests]
    prompts = [request.tokens for request in work.requests]
    ran = began
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
        measured.load_s, measured.loading = time.perf_counter() - began, memory.take()
        progress = JobProgress(
            requests=len(work.requests),
            limits={index: each.max_new_tokens for index, each in enumerate(work.requests)},
            batches=[(len(each.requests), rate) for each, rate in zip(work.batches, rates, strict=True)],
            layers=scenario.model.n_layers,
            tell=tell,
            memory=memory.take,
            held=measured.running,
        )

        def deliver(ended: Sequence[Ended]) -> None:
            at = time.perf_counter()
            output.add(_results(ended, work))
            watch.on_ended(ended)
            progress.on_ended(ended)
            measured.bookkeeping_s += time.perf_counter() - at

        def on_piece(piece: Piece, state: RunState, took_s: float) -> None:
            at = time.perf_counter()
            watch.on_piece(piece, state, took_s)
            progress.on_steps(state.placement.size, piece.steps.last + 1)
            measured.bookkeeping_s += time.perf_counter() - at

        how = EarlyEnds(
            ends=work.ends,
            deliver=deliver,
            steps=options.steps,
            score=make_score(options.sampling, names),
            whole=options.sampling.whole_vocabulary,
            stop=lambda: stopper.asked,
            on_piece=on_piece,
            on_experts=progress.on_experts,
        )
        measured.phases = how.phases
        stopper.may_wait = lambda: how.decoding
        ran = time.perf_counter()
        watch.start()
        for batch in work.batches:
            if stopper.asked:
                raise Stopped
            finish_batch(session, batch, prompts, how)
            watch.on_batch()
            progress.on_batch()
        return False
    except Stopped:
        return True
    except (RuntimeError, MemoryError) as error:
        raise _explain(error, job, output) from error
    finally:
        measured.run_s = time.perf_counter() - ran
        stopper.may_wait = lambda: False
        memory.close()
        if session is not None and session.disk is not None:
            measured.on_disk = session.disk.size
            session.disk.close()


def _results(ended: Sequence[Ended], work: Work) -> list[Result]:
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
