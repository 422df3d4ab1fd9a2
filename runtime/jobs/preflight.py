"""What would fail at three in the morning, found out before anything runs.

That weights, KV cache and buffers fit what is free now, of GPU memory, CPU memory (within the container's limit) and
disk, and that the GPU computes in the formats of the plan, `runtime.run_job.choose_machine` has found out; that every
shard of the checkpoint is there, whole and readable, `runtime.checkpoint.open_checkpoint` has.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from hrm.errors import InputError
from hrm.host_facts import HostFacts
from hrm.output_files import check_file
from hrm.scenario import Scenario
from hrm.units import GIB
from runtime.jobs.options import JOB_ENDING, PLAN_ENDING, JobOptions
from runtime.jobs.progress import size_text
from runtime.jobs.requests_file import JobRequest

__all__ = ["check_end_tokens", "check_options", "check_output_room", "lock_warning", "output_bytes"]

LINE_BYTES = 150
"""Of a result without its tokens and its text, about [byte]."""

TOKEN_BYTES = 14
"""Of a token, as a number and as text: five digits and two signs, six letters and a space; about [byte]."""


def check_options(options: JobOptions) -> None:
    """Refuse files that are one, or that cannot be read or written, and the like, before anything takes long.

    Raises
    ------
    InputError
        Results would go where the requests are, a folder is missing, and the like.
    """
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise InputError(f"{options.max_new_tokens} tokens", where="--max-new-tokens", way_out="1 or more")
    if not options.source.is_file():
        fact = "is a folder" if options.source.is_dir() else "no such file"
        raise InputError(fact, where=f"--input: {options.source}", way_out="a file of JSON lines")
    if options.disk_dir is not None and not options.disk_dir.is_dir():
        raise InputError("no such folder", where=f"--disk-dir: {options.disk_dir}")
    if options.output.exists() and not options.output.is_file():
        fact = "is a folder" if options.output.is_dir() else "keeps no results"
        raise InputError(fact, where=f"--output: {options.output}", way_out="the name of a file")
    seen = {options.source.resolve(): "--input"}
    if options.plan_file is not None:
        seen.setdefault(options.plan_file.resolve(), "PLAN")
    made = [JOB_ENDING] if options.plan_file is not None else [JOB_ENDING, PLAN_ENDING]
    named = [("--output", options.output), ("--report", options.report)]
    named += [(f"{ending[1:]} of --output", options.output.with_name(options.output.name + ending)) for ending in made]
    for option, path in named:
        if path is None:
            continue
        other = seen.setdefault(path.resolve(), option)
        if other != option:
            raise InputError(f"is also {other}", where=f"{option}: {path}", way_out="another file")
    if not options.output.absolute().parent.is_dir():  # no more of it: to try to write it is for who has its lock
        raise InputError("its folder does not exist", where=f"--output: {options.output}")
    if options.report is not None:
        check_file(options.report, f"--report: {options.report}")


def output_bytes(requests: Sequence[JobRequest]) -> int:
    """What the results will take at most, about [byte]."""
    return sum(LINE_BYTES + len(str(each.id)) + TOKEN_BYTES * each.max_new_tokens for each in requests)


def check_output_room(output: Path, requests: Sequence[JobRequest], more: int = 0) -> None:
    """Refuse a disk that will be full before the job is done.

    Parameters
    ----------
    output : Path
    requests : sequence of JobRequest
        That are to be run.
    more : int
        Of files beside the output [byte].

    Raises
    ------
    InputError
        Says what is free, and what is needed.
    """
    try:
        stat = os.statvfs(output.absolute().parent)
    except OSError:  # a file system that does not say
        return
    free, needed = stat.f_bavail * stat.f_frsize, output_bytes(requests) + more
    if needed > free:
        raise InputError(
            f"{len(requests):,} results take up to {size_text(needed)}, {size_text(free)} are free there",
            where=f"--output: {output}",
            way_out="make room, or a file on another disk",
        )


def check_end_tokens(ends: Collection[int], vocabulary: int, where: str) -> None:
    """Refuse end tokens that the model cannot give.

    Raises
    ------
    InputError
        One is beyond the vocabulary.
    """
    beyond = [token for token in ends if token >= vocabulary]
    if beyond:
        raise InputError(
            f"{beyond[0]} is no token of a model of {vocabulary:,}", where=where, way_out="the files of one checkpoint"
        )


def lock_warning(scenario: Scenario, pinned_bytes: float, host: HostFacts) -> str | None:
    """What to know where more memory is to be page-locked than the system's limit for a process."""
    if pinned_bytes <= host.lockable_bytes:
        return None
    return (
        f"up to {pinned_bytes / GIB:.1f} GiB are page-locked for {scenario.model.name}, and the limit is "
        f"{host.lockable_bytes / GIB:.2f} GiB (ulimit -l): the driver of a GPU may go beyond, and says if not"
    )
