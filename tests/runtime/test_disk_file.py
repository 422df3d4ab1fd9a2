"""What is written to the disk tier is read back, whole blocks past the page cache or not."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, model_folder, open_tiny, policy_of, run_session
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hrm.errors import InputError
from runtime import disk_file
from runtime.device import Device
from runtime.disk_file import BLOCK, DiskFile, file_system

SMALL = 8 * BLOCK
HERE = Device("cpu", False, (0,))


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["past the cache", "through it"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskFile]:
    made = DiskFile(tmp_path)
    if request.param == "through it":
        made._direct = None
    elif not made.past_the_cache:
        pytest.skip("this file system reads through the page cache only")
    yield made
    made.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writes=st.lists(st.tuples(st.integers(0, SMALL - 1), st.integers(1, SMALL)), min_size=1, max_size=4),
    offset=st.integers(0, 4).map(lambda block: block * BLOCK) | st.integers(0, SMALL - 1),
    size=st.integers(0, 4).map(lambda block: block * BLOCK) | st.integers(0, SMALL),
    aligned=st.booleans(),
)
def test_what_is_written_is_read_back_wherever_it_begins(
    file: DiskFile, writes: list[tuple[int, int]], offset: int, size: int, aligned: bool
) -> None:
    """A file that is an array of bytes: later writes over earlier ones, reads across them."""
    first = file.extend(2 * SMALL)
    file.write(first, torch.zeros(2 * SMALL, dtype=torch.uint8))
    wanted = torch.zeros(2 * SMALL, dtype=torch.uint8)
    for seed, (at, length) in enumerate(writes):
        data = noise(length, seed)
        file.write(first + at, data)
        wanted[at : at + length] = data
    memory = HERE.pinned_bytes(size + BLOCK)  # whole pages
    into = memory[:size] if aligned else memory[1 : 1 + size]
    into.fill_(7)
    file.read(first + offset, into)
    assert torch.equal(into, wanted[offset : offset + size])


def test_regions_are_whole_blocks_beside_each_other(file: DiskFile) -> None:
    assert [file.extend(size) for size in (1, BLOCK, BLOCK + 1, 10)] == [0, BLOCK, 2 * BLOCK, 4 * BLOCK]
    assert file.size == 5 * BLOCK


def test_a_read_of_many_pieces_is_as_one(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "LARGEST_PIECE", BLOCK)
    data = noise(9 * BLOCK + 5)
    first = file.extend(data.numel())
    file.write(first, data)
    into = HERE.pinned_bytes(data.numel())
    file.read(first, into)
    assert torch.equal(into, data)


def test_lanes_read_and_write_at_the_same_time(file: DiskFile) -> None:
    starts = [file.extend(SMALL) for _ in range(8)]

    def keep(number: int) -> bool:
        data = noise(SMALL, number)
        for _ in range(5):
            file.write(starts[number], data)
            into = HERE.pinned_bytes(SMALL)
            file.read(starts[number], into)
            if not torch.equal(into, data):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(keep, range(8)))


def test_after_flushing_it_is_all_there(file: DiskFile) -> None:
    data = noise(SMALL + 3)
    first = file.extend(data.numel())
    file.write(first, data)
    file.flush()
    into = HERE.pinned_bytes(data.numel())
    file.read(first, into)
    assert torch.equal(into, data)


def test_the_file_is_gone_from_its_folder_at_once_and_its_handles_when_closed(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    made = DiskFile(tmp_path)
    assert not list(tmp_path.iterdir())
    assert set(os.listdir("/proc/self/fd")) > before
    made.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none: no file can be made there: No such file") as raised:
        DiskFile(tmp_path / "none")
    assert "--disk-dir" in str(raised.value)


def test_a_disk_without_room_is_refused_with_what_was_wanted(tmp_path: Path) -> None:
    made = DiskFile(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(InputError, match=r"no room for 0\.50 GiB more") as raised:
            made.extend(2**29)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "--disk-dir" in str(raised.value)
    made.close()


def test_a_read_past_the_end_is_refused(file: DiskFile) -> None:
    first = file.extend(BLOCK)
    with pytest.raises(InputError, match="shorter than it was"):
        file.read(first, HERE.pinned_bytes(2 * BLOCK))


def test_a_block_that_grows_by_small_writes_is_read_past_the_cache_as_it_is(file: DiskFile) -> None:
    """As decode does: every step adds a token to the last block of a request, and reads all of its blocks."""
    first = file.extend(4 * BLOCK)
    wanted = noise(4 * BLOCK)
    start = HERE.pinned_bytes(2 * BLOCK)
    start.copy_(wanted[: 2 * BLOCK])
    file.write(first, start)
    into = HERE.pinned_bytes(4 * BLOCK)
    for end in range(BLOCK + 100, 4 * BLOCK, 1000):
        file.write(first + end - 1000, wanted[end - 1000 : end])
        whole = -(-end // BLOCK) * BLOCK
        into.fill_(0)
        file.read(first, into[:whole])
        assert torch.equal(into[:end], wanted[:end])


def cached(file: DiskFile, offset: int) -> bool:
    """Whether the page cache has a block; asked a second time it may have."""
    try:
        return os.preadv(file._plain, [bytearray(BLOCK)], offset, os.RWF_NOWAIT) == BLOCK
    except BlockingIOError:
        return False


def test_whole_blocks_leave_nothing_in_the_page_cache(tmp_path: Path) -> None:
    file = DiskFile(tmp_path)
    if not file.past_the_cache or file.remark or not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("this file system reads through the page cache")
    first, data = file.extend(SMALL), HERE.pinned_bytes(SMALL)
    data.copy_(noise(SMALL))
    file.write(first, data)
    file.read(first, data)
    assert not cached(file, first + 5 * BLOCK)  # one block: the look itself makes the kernel read ahead
    file.write(first + 7, data[: 2 * BLOCK])  # not at a block
    assert all(cached(file, first + block * BLOCK) for block in range(3))
    file.close()


def test_where_nothing_goes_past_the_cache_after_all_it_goes_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems open a file so and refuse to read it."""
    file = DiskFile(tmp_path)
    direct, read = file._direct, os.preadv
    if direct is None:
        pytest.skip("this file system reads through the page cache only")

    def refused(handle: int, *rest: Any) -> int:
        if handle == direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(handle, *rest)

    monkeypatch.setattr(os, "preadv", refused)
    first, data, into = file.extend(SMALL), noise(SMALL), HERE.pinned_bytes(SMALL)
    file.write(first, data)
    file.read(first, into)
    assert torch.equal(into, data) and not file.past_the_cache
    assert file.remark.startswith(f"the disk tier in {tmp_path} is read through the page cache: ")
    file.close()


MOUNTS = """22 1 {device} / / rw,relatime shared:1 - ext4 /dev/root rw
24 22 0:23 / /dev/shm rw - tmpfs tmpfs rw
"""


def test_the_file_system_of_a_folder_is_that_of_its_device(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(device=f"{os.major(device)}:{os.minor(device)}"))
    assert file_system(tmp_path, mounts) == "ext4"
    mounts.write_text(MOUNTS.format(device="99:99"))
    assert file_system(tmp_path, mounts) == ""
    assert file_system(tmp_path, tmp_path / "none") == ""


def test_a_disk_tier_that_lies_in_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile(tmp_path)
    monkeypatch.setattr(disk_file, "file_system", lambda folder: "tmpfs")
    assert file.remark == f"the disk tier lies in {tmp_path}, which is CPU memory (tmpfs): --disk-dir DIR on a disk"
    monkeypatch.setattr(disk_file, "file_system", lambda folder: "ext4")
    assert (file.remark == "") == file.past_the_cache
    file.close()


@pytest.mark.parametrize("schedule", ["cgopipe", "s4"])
def test_kv_cache_goes_past_the_page_cache_all_but_the_token_of_a_step(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 1 to 12 tokens, 64 byte a token: every read and every prompt is whole blocks."""
    session = open_tiny(model_folder("mixtral"), Case(schedule, policy_of(schedule, kv_on_disk=1.0)))
    file = session.disk
    assert file is not None
    if not file.past_the_cache:
        pytest.skip("this file system reads through the page cache only")
    sizes: dict[tuple[str, bool], set[int]] = {}
    for name in ("preadv", "pwritev"):
        call = getattr(os, name)

        def counted(handle: int, views: Any, offset: int, *, name: str = name, call: Any = call) -> int:
            sizes.setdefault((name, handle == file._direct), set()).add(views[0].nbytes)
            return int(call(handle, views, offset))

        monkeypatch.setattr(os, name, counted)
    run_session(session)
    assert sizes == {("preadv", True): {BLOCK}, ("pwritev", True): {BLOCK}, ("pwritev", False): {64}}
    file.close()
