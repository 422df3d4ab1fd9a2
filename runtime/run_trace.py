"""The measured trace of a run: of the window that was run as one graph, joined by task to that of `hrm simulate`."""

from __future__ import annotations

from pathlib import Path

import torch

from hrm.errors import InputError
from hrm.trace_files import facts_of_plan, write_trace
from runtime.run_document import Ran

__all__ = ["clock_error_s", "save_trace"]

FLOAT_STEP = 2.0**-23
"""CUDA gives the time between two events in float32: one part in 2^23 of it is lost."""

EVENT_ERROR_S = 20e-6
"""How far host clock and GPU clock may be apart when they are first read together (estimated) [s]."""


def clock_error_s(makespan_s: float, *, cuda: bool) -> float:
    """How far two readings of one trace may be apart [s]: on CUDA its events and the host's clock, else nothing."""
    return makespan_s * FLOAT_STEP + EVENT_ERROR_S if cuda else 0.0


def save_trace(ran: Ran, path: Path) -> None:
    """Write the trace of the window of the first batch.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    pieces = ran.runs[0].pieces
    if len(pieces) != 1:
        raise InputError(f"{len(pieces)} graphs were kept", where=f"--trace: {path}")
    piece = pieces[0]
    origin = {
        "device": ran.device_name,
        "weights": ran.weights,
        "requests": f"{ran.runs[0].policy.batch_size:,}",
        "torch": str(torch.__version__),
    }
    facts = facts_of_plan(
        ran.scenario,
        ran.saved,
        schedule=ran.schedule,
        paced=[lane for lane in piece.graph.lanes if lane in ran.paced],
        clock_error_s=clock_error_s(piece.trace.makespan_s, cuda=ran.device.cuda),
        origin=origin,
    )
    write_trace(piece.graph, piece.trace, path, plan_facts=facts)
