"""What a person can say of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from runtime.jobs.sampling import Sampling

__all__ = ["JOB_ENDING", "PLAN_ENDING", "JobOptions"]

PLAN_ENDING = ".plan.json"
"""Of the file beside the results that keeps a plan which was made for them."""

JOB_ENDING = ".job.json"
"""Of the file beside the results that says what they depend on."""


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
    report : Path or None
        A page of what was predicted and measured.
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
    report: Path | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    device: str | None = None
    schedule: str | None = None
    disk_dir: Path | None = None
    steps: int | None = None
