"""A job before weights are loaded: its files read and checked, its plan read or made, its requests cut into batches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hrm.batching import Request
from hrm.errors import InputError
from hrm.host_facts import read_host_facts
from hrm.model_files import read_config_file
from hrm.plans import save_plan
from hrm.rates import derive_rates
from hrm.scenario import measure_sizes
from hrm.trivial import predict_policy
from hrm.workload import Workload
from runtime.batches import SizedBatch
from runtime.checkpoint import Checkpoint, open_checkpoint
from runtime.device import Device
from runtime.jobs.auto_plan import describe_choice, plan_here
from runtime.jobs.batch_room import cut_to_room, longest_prompt
from runtime.jobs.job_file import JobFile, describe_source, job_file_bytes, open_job_file
from runtime.jobs.options import PLAN_ENDING, JobOptions
from runtime.jobs.output_file import OutputFile
from runtime.jobs.preflight import check_end_tokens, check_output_room, lock_warning
from runtime.jobs.requests_file import Encode, Fault, JobRequest, Limits, read_requests
from runtime.jobs.text import Tokenizer, find_end_tokens, open_tokenizer
from runtime.model_match import check_same_model
from runtime.run_job import Job, choose_machine, read_job

__all__ = ["Work", "prepare_job"]


@dataclass(slots=True)
class Work:
    """A job that is ready to run.

    Attributes
    ----------
    requests : list of JobRequest
        That have no result yet, in input order.
    faults : list of Fault
        Lines that cannot be run.
    before : int
        Results that were there.
    """

    job: Job
    requests: list[JobRequest]
    faults: list[Fault]
    batches: list[SizedBatch]
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    ends: frozenset[int]
    machine: Device
    before: int


def prepare_job(
    options: JobOptions, output: OutputFile, say: Callable[[str], None], tell: Callable[[str], None] | None
) -> Work:
    """Everything that can be found out before weights are loaded; then the results are bound to what they are of.

    Raises
    ------
    InputError
        Anything that would fail later, or a job that is not the one of the results that are there.
    InfeasibleError
        No plan fits this machine.
    """
    progress = tell or (lambda _: None)
    folder = options.model_dir.expanduser()
    progress("checking the checkpoint")
    checkpoint = open_checkpoint(folder)
    config = read_config_file(folder / "config.json")
    tokenizer, ends = open_tokenizer(folder), find_end_tokens(folder, config)
    model = checkpoint.spec
    check_end_tokens(ends, model.vocab_size, str(folder))
    source = describe_source(checkpoint, config, ends, options.sampling)
    kept = open_job_file(output)
    kept.check_source(source, output)
    limits = Limits(vocabulary=model.vocab_size, positions=model.max_positions or None)
    encode = tokenizer.encode if tokenizer is not None else None
    plan_file = options.plan_file
    if plan_file is None:
        plan_file = _make_plan(options, limits, encode, say, tell)
    job = read_job(plan_file, None, options.schedule)
    check_same_model(job.config, config, where=str(folder / "config.json"))
    progress("reading the requests")
    found, faults = _read(options, _limits_of_plan(limits, job), encode)
    kept.check_requests(found, output)
    left = [request for request in found if request.id not in output.finished]
    check_output_room(options.output, left, more=job_file_bytes(found))
    requests = [
        Request(index=index, prompt_tokens=len(each.tokens), generation_tokens=each.max_new_tokens)
        for index, each in enumerate(left)
    ]
    batches = cut_to_room(requests, job.policy, job.scenario)
    machine = choose_machine(job, options.device, options.disk_dir, False)
    _tell_of_locks(job, machine, options, say)
    for warning in checkpoint.warnings:
        say(f"{folder}: {warning}")
    if output.finished:
        _tell_of_results(kept, found, left, output, source | _formats(job), say)
    kept.save(source | _formats(job), found, output)
    return Work(job, left, faults, batches, checkpoint, tokenizer, ends, machine, len(output.finished))


def _limits_of_plan(limits: Limits, job: Job) -> Limits:
    return replace(
        limits,
        new_tokens=job.scenario.workload.generation_length,
        request_tokens=job.policy.micro_batch_token_budget or None,
        prompt_tokens=longest_prompt(job.scenario, job.policy),
    )


def _read(options: JobOptions, limits: Limits, encode: Encode | None) -> tuple[list[JobRequest], list[Fault]]:
    """Requests and faults, where there is any request at all."""
    found, faults = read_requests(options.source, limits, encode=encode, default_new_tokens=options.max_new_tokens)
    if not found:
        first = faults[0]
        raise InputError(
            f"none of its {len(faults):,} requests can be run; line {first.line}: {first.fact}",
            where=f"--input: {options.source}",
            way_out="--max-new-tokens N, where lines do not say" if "max_new_tokens" in first.fact else "",
        )
    return found, faults


def _make_plan(
    options: JobOptions,
    limits: Limits,
    encode: Encode | None,
    say: Callable[[str], None],
    tell: Callable[[str], None] | None,
) -> Path:
    """Plan for the requests of the file; the plan is kept beside the results."""
    if options.hardware is None:
        raise InputError("which plan is not said", where="hrm run", way_out="PLAN, or --hw auto to make one here")
    found, _ = _read(options, limits, encode)
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
    plan, assumed = plan_here(options.model_dir, workload, host, hardware=options.hardware, on_progress=tell)
    file = options.output.with_name(options.output.name + PLAN_ENDING)
    save_plan(plan, file)
    say(f"{describe_choice(plan, assumed)}; the plan is {file}")
    return file


def _tell_of_locks(job: Job, machine: Device, options: JobOptions, say: Callable[[str], None]) -> None:
    """Where page-locking may fail."""
    if not (machine.cuda and job.policy.pin_weights):
        return
    host = read_host_facts(options.disk_dir or Path(tempfile.gettempdir()))
    rates = derive_rates(job.scenario.profile, job.scenario.formats)
    pinned = predict_policy(job.scenario, measure_sizes(job.scenario), rates, job.policy).memory["cpu"]
    warning = lock_warning(job.scenario, pinned.peak_bytes, host)
    if warning is not None:
        say(warning)


def _formats(job: Job) -> dict[str, Any]:
    return {"formats": {"compute": job.scenario.formats.compute, "kv": job.scenario.formats.kv}}


def _tell_of_results(
    kept: JobFile,
    found: Sequence[JobRequest],
    left: Sequence[JobRequest],
    output: OutputFile,
    source: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """What to know of results that are there."""
    mine = len(found) - len(left)
    others = len(output.finished) - mine
    of_others = f" (and {others:,} of other requests)" if others else ""
    say(f"{output.path}: {mine:,} results are there{of_others}, {len(left):,} requests are left")
    if kept.before is None:
        say(
            f"{output.path}: {kept.path.name} is not beside it, so whether model and sampling are the same is not known"
        )
    elif kept.before["formats"] != source["formats"]:
        was, now = kept.before["formats"], source["formats"]
        say(
            f"{output.path}: results there were computed in {was['compute']} (KV cache {was['kv']}), those to come in "
            f"{now['compute']} ({now['kv']}): where two tokens are about as likely, that may decide"
        )
