"""What this machine has: memory within the limits of containers, GPUs as NVML tells of them, torch unloaded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hrm.host_facts import (
    GpuFacts,
    container_limit_bytes,
    free_cpu_bytes,
    memory_bytes,
    read_gpus,
    read_host_facts,
)

GIB = 2**30
T4, L4 = (
    GpuFacts(name="Tesla T4", free_bytes=14.5 * GIB, compute_capability=(7, 5)),
    GpuFacts(name="NVIDIA L4", free_bytes=22.0 * GIB, compute_capability=(8, 9)),
)


def machine(root: Path, groups: str, files: dict[str, str], available_kib: int = 8 * 2**20) -> Path:
    """A machine's ``/proc`` and ``/sys`` with 8 GiB available, in these groups, with these files below the mount."""
    contents = {
        "proc/meminfo": f"MemTotal: 99999999 kB\nMemFree: 5 kB\nMemAvailable:    {available_kib} kB\n",
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_without_a_limit_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    assert free_cpu_bytes(machine(tmp_path, "0::/\n", {"memory.max": "max\n", "memory.current": "5\n"})) == 8 * GIB


def test_the_limit_of_a_container_is_the_tightest_whatever_is_in_use(tmp_path: Path) -> None:
    files = {"a/memory.max": f"{6 * GIB}\n", "a/b/memory.max": f"{2 * GIB}\n", "a/b/memory.current": f"{GIB}\n"}
    root = machine(tmp_path, "0::/a/b\n", files)
    assert container_limit_bytes(root) == 2 * GIB
    assert memory_bytes(root) == 99999999 * 1024


def test_a_group_without_a_limit_has_none(tmp_path: Path) -> None:
    assert container_limit_bytes(machine(tmp_path, "0::/\n", {"memory.max": "max\n"})) is None


def test_a_container_has_its_limit_less_its_use_without_file_cache(tmp_path: Path) -> None:
    """4 GiB of limit, 3 GiB used, 2 of them file cache: 3 GiB are left."""
    files = {
        "memory.max": f"{4 * GIB}\n",
        "memory.current": f"{3 * GIB}\n",
        "memory.stat": f"anon 7\ninactive_file {2 * GIB}\nactive_file 1\n",
    }
    assert free_cpu_bytes(machine(tmp_path, "0::/\n", files)) == 3 * GIB


def test_the_tightest_of_a_group_and_its_parents_counts(tmp_path: Path) -> None:
    files = {
        "a/memory.max": f"{2 * GIB}\n",
        "a/memory.current": f"{GIB}\n",
        "a/b/memory.max": f"{6 * GIB}\n",
        "a/b/memory.current": "0\n",
    }
    assert free_cpu_bytes(machine(tmp_path, "0::/a/b\n", files)) == GIB


def test_version_1_counts_too_and_its_no_limit_is_none(tmp_path: Path) -> None:
    groups = "5:cpu:/\n4:hugetlb,memory:/jobs/one\n0::/\n"
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "1\n",
        "memory/jobs/one/memory.limit_in_bytes": f"{3 * GIB}\n",
        "memory/jobs/one/memory.usage_in_bytes": f"{2 * GIB}\n",
        "memory/jobs/one/memory.stat": f"inactive_file 9\ntotal_inactive_file {GIB}\n",
    }
    assert free_cpu_bytes(machine(tmp_path, groups, files)) == 2 * GIB


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/../../outside"])
def test_a_container_that_sees_only_its_own_group_finds_it_on_top(path: str, tmp_path: Path) -> None:
    files = {"memory.max": f"{GIB}\n", "memory.current": "0\n"}
    assert free_cpu_bytes(machine(tmp_path, f"0::{path}\n", files)) == GIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}
    assert free_cpu_bytes(machine(tmp_path, "0::/\n", files)) == 0.0


class Nvml:
    """Answers like NVML on a machine with a T4 and an L4: ``nvmlInit_v2`` is `init_v2`, and so on."""

    def __init__(self, *, starts: int = 0, failing: str = "") -> None:
        self.starts, self.failing, self.open = starts, failing, 0

    def __getattr__(self, name: str) -> Any:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removeprefix("nvml").removeprefix("Device")).lower()
        return object.__getattribute__(self, words)

    def init_v2(self) -> int:
        self.open += self.starts == 0
        return self.starts

    def shutdown(self) -> int:
        self.open -= 1
        return 0

    def get_count_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def get_handle_by_index_v2(self, number: Any, handle: Any) -> int:
        handle._obj.value = number.value + 1  # a null pointer would come back as None
        return 0

    def get_memory_info(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free = 10**12, int((T4, L4)[handle.value - 1].free_bytes)
        return int(self.failing == "memory" and handle.value == 1)

    def get_cuda_compute_capability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = (T4, L4)[handle.value - 1].compute_capability
        return 0

    def get_name(self, handle: Any, name: Any, size: Any) -> int:
        name.value = (T4, L4)[handle.value - 1].name.encode()
        assert size.value == len(name)
        return 0

    def get_uuid(self, handle: Any, uuid: Any, size: Any) -> int:
        uuid.value = (b"GPU-1111-2222", b"GPU-3333-4444")[handle.value - 1]
        assert size.value == len(uuid)
        return 0


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("0,1", (T4, L4)),
        ("1,0", (L4, T4)),
        ("1", (L4,)),
        (" GPU-3333 , 0", (L4, T4)),
        ("", ()),
        ("-1", ()),
        ("-1,0", ()),
        ("0,7,1", (T4,)),
        ("MIG-1111", ()),
    ],
)
def test_visible_gpus_are_those_that_cuda_shows_in_its_order(visible: str, found: tuple[GpuFacts, ...]) -> None:
    assert read_gpus(Nvml(), visible) == found


def test_all_gpus_are_visible_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert read_gpus(Nvml()) == (T4, L4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert read_gpus(Nvml()) == (L4,)


def test_a_driver_that_does_not_start_has_no_gpus_and_one_that_does_is_closed_again() -> None:
    broken, sound = Nvml(starts=9), Nvml()
    assert read_gpus(broken, "0,1") == ()
    read_gpus(sound, "0,1")
    assert (broken.open, sound.open) == (0, 0)


def test_a_gpu_that_does_not_answer_is_left_out() -> None:
    assert read_gpus(Nvml(failing="memory"), "0,1") == (L4,)


def test_looking_at_the_machine_does_not_load_torch() -> None:
    code = (
        "import sys\n"
        "from hrm.host_facts import read_host_facts\n"
        "facts = read_host_facts()\n"
        "assert 'torch' not in sys.modules\n"
        "print(facts.torch)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    import torch

    assert done.stdout.strip() == ("cuda" if torch.version.cuda else "cpu")


def test_disk_of_a_folder_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert read_host_facts(tmp_path / "gone").disk_bytes == 0.0
    assert read_host_facts(tmp_path).disk_bytes > 0.0
