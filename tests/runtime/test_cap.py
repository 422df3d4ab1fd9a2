"""A cap on a process: what the kernel refuses beyond it, and what is said of a process that ended without an answer."""

from __future__ import annotations

import mmap
import resource
import signal
from pathlib import Path

import pytest

from runtime.validation.cap import capped, read_status_bytes
from runtime.validation.capped_bench import without_answer

MIB = 2**20


def test_memory_beyond_the_cap_is_refused_and_within_it_given() -> None:
    with capped(64 * MIB):
        mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        with pytest.raises(OSError, match="allocate"):
            mmap.mmap(-1, 96 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mmap.mmap(-1, 96 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()


def test_memory_of_the_emulated_accelerator_is_shared_and_does_not_count() -> None:
    with capped(16 * MIB), mmap.mmap(-1, 96 * MIB, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as memory:
        assert len(memory) == 96 * MIB


def test_the_limit_is_what_it_was_afterwards() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with capped(64 * MIB) as held:
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == held + 64 * MIB
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_sizes_are_those_of_the_kernel(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    3 kB\nVmData:\t    5 kB\n", encoding="utf-8")
    assert (read_status_bytes("VmHWM", status), read_status_bytes("VmData", status)) == (3072, 5120)
    assert read_status_bytes("VmPeak", status) is None
    assert read_status_bytes("VmData", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("code", "said", "status"),
    [
        (-signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'", "broken"),
        (-signal.SIGKILL, "", "broken"),
        (1, "Traceback\nMemoryError", "broken"),
        (-signal.SIGSEGV, "", "failed"),
        (1, "Traceback\nValueError: no", "failed"),
    ],
)
def test_a_process_without_an_answer_broke_its_cap_where_memory_ran_out_else_it_failed(
    code: int, said: str, status: str
) -> None:
    found = without_answer(code, said)
    assert (found["status"], found["memory"]) == (status, None)
    assert found["reason"]
