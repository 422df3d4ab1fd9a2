"""A process that the disk part of `benchmarks/runtime.py` measures: the runtime, or accelerate, with experts on disk.

`python -m benchmarks.disk_process NAME MODEL FOLDER GENERATED [CGROUP FILE]`; then every line on stdin is a wish and is
answered by one line of JSON: `run TOKENS EXPERTS` generates (the runtime as many as it was started for; accelerate with
an implementation of the experts in transformers), `disk THREADS` reads a file as large as the experts from end to end.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__: list[str] = []

CHUNK = 8 * 2**20
Answer = dict[str, Any]


def storage_bytes() -> int:
    """Bytes that this process has fetched from storage so far, whichever way [byte]; -1 where it cannot be told."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    except OSError:
        return -1
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def resident_bytes() -> int:
    """Memory of this process that is no file's [byte]."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def serve_runtime(model: Path, folder: Path, generated: int) -> Callable[[str], Answer]:
    """The CPU-only plan, all routed experts on disk."""
    from benchmarks.random_mixtral import cpu_session, draw_prompts
    from hrm.graph import Op

    session = cpu_session(model, generated, on_disk=1.0, disk_dir=folder)
    prompts = draw_prompts().tolist()
    file = folder / "sequential"
    size = int(session.scenario.model.layer_expert_bytes()) * session.scenario.model.n_layers
    write_file(file, size)

    def answer(wish: str) -> Answer:
        if wish.startswith("disk"):
            return {"bytes_per_s": read_file(file, size, int(wish.split()[1]))}
        fetched, began = storage_bytes(), time.perf_counter()
        run = session.generate(prompts)[0]
        seconds = time.perf_counter() - began
        decode = [task for piece in run.pieces if not piece.steps.prefill for task in piece.graph.tasks]
        return {
            "seconds": seconds,
            "decode_s": run.decode_s,
            "decode_disk_bytes": sum(task.bytes_moved for task in decode if task.id.op is Op.READ_DISK),
            "fetched_bytes": storage_bytes() - fetched,
            "past_the_cache": session.disk is not None and session.disk.past_the_cache,
            "resident_bytes": resident_bytes(),
        }

    return answer


def serve_accelerate(model: Path, folder: Path, *, experts_only: bool) -> Callable[[str], Answer]:
    """`disk_offload` of accelerate, of the whole model or of its experts, which runs transformers as it is."""
    from accelerate import disk_offload

    from benchmarks.random_mixtral import draw_prompts, load_reference
    from benchmarks.runtime_hf import generate

    reference, ids = load_reference(model), draw_prompts()
    offloaded = folder / "offloaded"
    if experts_only:
        for number, layer in enumerate(reference.model.layers):
            disk_offload(layer.mlp.experts, str(offloaded / str(number)))
    else:
        disk_offload(reference, str(offloaded))
    handles = [os.open(file, os.O_RDONLY) for file in sorted(offloaded.rglob("*.dat"))]
    for handle in handles:
        os.fsync(handle)
    dropping = 0.0

    def drop(*_: Any) -> None:
        """Forget the files in the page cache before every pass over the layers; its seconds are not theirs."""
        nonlocal dropping
        began = time.perf_counter()
        for handle in handles:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        dropping += time.perf_counter() - began

    reference.model.register_forward_pre_hook(drop)

    def answer(wish: str) -> Answer:
        nonlocal dropping
        _, tokens, implementation = wish.split()
        reference.set_experts_implementation(implementation)
        dropping = 0.0
        fetched, began = storage_bytes(), time.perf_counter()
        generate(reference, ids, int(tokens))
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds - dropping,
            "dropping_s": dropping,
            "fetched_bytes": storage_bytes() - fetched,
            "resident_bytes": resident_bytes(),
        }

    return answer


def write_file(file: Path, size: int) -> None:
    """A file of random bytes, on the disk and not in the page cache."""
    block = os.urandom(64 * 2**20)
    with file.open("wb") as handle:
        for start in range(0, size, len(block)):
            handle.write(block[: size - start])
        handle.flush()
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_file(file: Path, size: int, threads: int) -> float:
    """Read it from end to end past the page cache, in pieces of 8 MiB that threads take in turn [byte/s]."""
    handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
    positions, lock = iter(range(0, size - size % CHUNK, CHUNK)), threading.Lock()
    buffers = [mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(threads)]
    for buffer in buffers:
        if hasattr(mmap, "MADV_HUGEPAGE"):  # without, some disks give a third of their rate
            buffer.madvise(mmap.MADV_HUGEPAGE)
        buffer.write(bytes(CHUNK))  # its pages are there before the clock starts

    def work(buffer: mmap.mmap) -> None:
        while True:
            with lock:
                position = next(positions, None)
            if position is None:
                return
            os.preadv(handle, [buffer], position)

    workers = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    os.close(handle)
    return (size - size % CHUNK) / seconds


def main(name: str, model: str, folder: str, generated: str, cgroup: str = "") -> None:
    """Answer wishes until there are no more."""
    if cgroup:  # before anything takes memory, so that all of it counts
        Path(cgroup).write_text(str(os.getpid()), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to stderr
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    if name == "runtime":
        answer = serve_runtime(Path(model), where, int(generated))
    else:
        answer = serve_accelerate(Path(model), where, experts_only=name == "experts")
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for wish in sys.stdin:
        print(json.dumps(answer(wish.strip())), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
