"""One run of a plan under a cap of its memory, in this process: `python -m runtime.validation.capped_process REQUEST`.

The request is a JSON file; so is the answer, which is written once the cap is lifted. Everything that is imported, and
the CUDA context, are there before the cap is set: it is on what the run takes beside them.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from hrm.errors import HrmError
from hrm.validation.candidates import Candidate
from runtime.device import choose_device
from runtime.memory_watch import MemoryWatch
from runtime.native_library import open_library
from runtime.run_command import check_model, open_weights
from runtime.run_job import read_job
from runtime.validation.cap import ENFORCED_BY, capped, read_status_bytes
from runtime.validation.measurer import RuntimeMeasurer

__all__ = ["STACK_BYTES", "run_request"]

STACK_BYTES = 2 * 2**20
"""Of a thread: the kernel counts all of a stack as data, whether it is touched or not [byte]."""

NO_MEMORY = ("allocate memory", "bad_alloc", "the system does not give", "out of memory", "start new thread")
"""What messages of memory that ran out have in them."""


def run_request(request: dict[str, Any]) -> dict[str, Any]:
    """Run it: what held, what broke its cap, or why it failed."""
    threading.stack_size(STACK_BYTES)
    model_dir = None if request["model_dir"] is None else Path(request["model_dir"])
    job = read_job(Path(request["plan"]), request["layers"], request["schedule"])
    numerics = check_model(job, model_dir, model_dir is None, where="hrm validate memory")
    source, _ = open_weights(job, model_dir, numerics, request["seed"])
    device = choose_device(request["device"], cpu_only=False)
    open_library()  # compiling would be under the cap too
    measurer = RuntimeMeasurer(
        scenario=job.scenario,
        source=source,
        numerics=numerics,
        device=device,
        cpu_device=choose_device("cpu", cpu_only=True),
        room=float("inf"),
        disk_dir=None if request["disk_dir"] is None else Path(request["disk_dir"]),
        seed=request["seed"],
    )
    candidate = Candidate(name=request["name"], kinds=("memory",), policy=job.policy, schedule=job.schedule)
    watch = MemoryWatch(device)
    answer: dict[str, Any] = {"status": "held", "reason": "", "memory": None}
    runs: list[dict[str, Any]] = []
    try:
        with capped(request["limit_bytes"]) as held:
            try:
                runs = measurer.measure(candidate)
            except (RuntimeError, MemoryError, HrmError) as error:
                if not _is_memory(error):
                    raise
                answer |= {"status": "broken", "reason": _line(error)}
            peaks = watch.take()
    finally:
        watch.close()
    answer["memory"] = {
        "enforced_by": ENFORCED_BY,
        "limit_bytes": request["limit_bytes"],
        "held_before_bytes": held,
        "peak_bytes": peaks.get("cpu"),
        "shared_peak_bytes": peaks.get("gpu", 0),
        "high_water_bytes": read_status_bytes("VmHWM"),
        "terms": runs[0]["memory"]["terms"] if runs else None,
    }
    if answer["status"] == "held":
        if peaks["cpu"] > request["limit_bytes"]:  # the kernel would not have let it
            answer |= {"status": "broken", "reason": f"took {peaks['cpu'] / 2**30:.3f} GiB"}
        answer = {**runs[-1], **answer, "load_s": runs[0]["load_s"], "routing": runs[0]["routing"]}
    return answer


def _is_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, by the error or what caused it."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if any(words in str(error).lower() for words in NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:300]


def main(file: Path) -> None:
    """Read a request, run it, write the answer."""
    request = json.loads(file.read_text(encoding="utf-8"))
    try:
        answer = run_request(request)
    except Exception as error:  # one run that fails is reported, and the others go on
        answer = {"status": "failed", "reason": f"{type(error).__name__}: {_line(error)}", "memory": None}
    Path(request["answer"]).write_text(json.dumps(answer, allow_nan=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
