"""Runs jobs in processes of their own and kills them: `python job_server.py`, then a line of JSON for every start.

Everything is imported once; a start is a fork of a process that has not computed anything yet. A line says what to run
(`options`: of `JobOptions`) and how it ends: `kill_after_s`; `half_line`, within the n-th line that is written;
`fill_line`, before which the disk of the file `ballast` is filled; `file_bytes`, beyond which no file grows. The answer
is a line with the exit code, negative for a signal, and what was said.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hrm.errors import HrmError
from runtime.jobs import runner
from runtime.jobs.runner import JobOptions, run_prompts
from runtime.jobs.sampling import Sampling
from runtime.session import Session


def before_line(number: int, act: Callable[[int, Any], None]) -> None:
    """Do something before the n-th result is written, with the file and the line."""
    write, count = os.write, 0

    def counted(handle: int, data: Any) -> int:
        nonlocal count
        if bytes(data).startswith(b'{"id": '):
            count += 1
            if count == number:
                os.write = write
                act(handle, data)
        return write(handle, data)

    os.write = counted


def die_within(handle: int, data: Any) -> None:
    """Write half of a line, and die."""
    os.write(handle, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk(ballast: Path) -> None:
    """Leave no room on a disk."""
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def limit_files(size: int) -> None:
    """No file grows beyond, once the model is loaded: what compiles the kernels has files of its own."""
    opened = runner.open_session

    def open_then_limit(*given: Any, **named: Any) -> Session:
        session = opened(*given, **named)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        return session

    runner.open_session = open_then_limit


def run(order: dict[str, Any]) -> int:
    """A job, in this process."""
    given = order["options"]
    for key in ("plan_file", "model_dir", "source", "output"):
        given[key] = Path(given[key])
    given["sampling"] = Sampling(**given.get("sampling", {}))
    if "half_line" in order:
        before_line(order["half_line"], die_within)
    if "fill_line" in order:
        before_line(order["fill_line"], lambda *_: fill_disk(Path(order["ballast"])))
    if "file_bytes" in order:
        limit_files(order["file_bytes"])
    try:
        return run_prompts(JobOptions(**given), say=print).exit_code
    except HrmError as error:
        print(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def start(order: dict[str, Any]) -> dict[str, Any]:
    """Fork, run, kill."""
    reader, writer = os.pipe()  # not a file, which a limit of files would concern too
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            code = run(order)
            sys.stdout.flush()
        finally:
            os._exit(code)
    os.close(writer)
    killed_at = order.get("kill_after_s")
    if killed_at is not None:
        while time.monotonic() - began < killed_at:
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                break
            time.sleep(min(0.002, max(0.0, killed_at - (time.monotonic() - began))))
        os.kill(child, order.get("signal", signal.SIGKILL))
    with os.fdopen(reader) as said:
        text = said.read()
    _, status = os.waitpid(child, 0)
    return {"code": os.waitstatus_to_exitcode(status), "said": text, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(start(json.loads(line))), flush=True)
