"""What a calibration points out: each rule with a machine that has just that wrong, and one that has nothing wrong."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.calibration.datasheet import find_datasheet
from runtime.calibration.machine import (
    GpuFact,
    LinkState,
    MachineFacts,
    busy_seconds,
    read_link_states,
    read_numa_nodes,
)
from runtime.calibration.samples import Samples
from runtime.calibration.suspicions import find_suspicions

FACTS = MachineFacts(
    gpus=(GpuFact(name="Tesla T4", memory_bytes=15 * 2**30, compute_capability=(7, 5)),),
    cpu="Xeon",
    cores=24,
    lane_cores=24,
    numa_nodes=1,
    memory_bytes=192e9,
    free_bytes=180e9,
    container_limit_bytes=None,
    lockable_bytes=None,
    disk_folder="/tmp",
    disk_file_system="ext4",
    disk_free_bytes=1e12,
    kernels="AVX-512",
    versions={},
)
FINE = {
    "copy host_to_device pinned 96 MiB": 12.3e9,
    "copy host_to_device pinned 96 MiB while the CPU attends": 10e9,
    "copy device_to_host pinned 96 MiB": 13e9,
    "gpu memory": 240e9,
    "gpu product fp16 1536 x 1536 x 2560": 40e12,
    "all cores read": 96e9,
    "disk read": 2.9e9,
    "disk write": 1.6e9,
}
LINK = LinkState(generation=3, width=16, most_generation=3, most_width=16)
T4 = find_datasheet("Tesla T4")


def said(
    changes: dict[str, float] | None = None, facts: MachineFacts = FACTS, link: LinkState = LINK, others: float = 0.1
) -> list[str]:
    samples = Samples()
    for name, value in (FINE | (changes or {})).items():
        samples.add(name, "byte/s", [value])
    return find_suspicions(facts, samples, [link], T4, others)


def test_a_machine_as_it_should_be_raises_none() -> None:
    assert said() == []


def test_the_datasheet_of_a_bundled_gpu_is_found_by_its_drivers_name() -> None:
    assert T4["gpu.bandwidth"] == ("320 GB/s", 320e9)
    assert T4["gpu.peak.fp16"] == ("65 TFLOP/s", 65e12)
    assert find_datasheet("Tesla T40") == {}


@pytest.mark.parametrize(
    ("changes", "facts", "link", "words"),
    [
        ({}, {}, {"width": 8}, "8 of 16 PCIe lanes"),
        ({}, {}, {"generation": 1}, "PCIe 1 where the card can do 3"),
        ({"copy host_to_device pinned 96 MiB": 9e9}, {}, {}, "host to device copies reach 9 GB/s"),
        ({"copy host_to_device pinned 96 MiB while the CPU attends": 7e9}, {}, {}, "fall from 12.3 to 7 GB/s"),
        ({"gpu memory": 150e9}, {}, {}, "GPU memory reaches 150 GB/s, its datasheet says 320 GB/s"),
        ({"gpu product fp16 1536 x 1536 x 2560": 20e12}, {}, {}, "fp16 products reach 20 TFLOP/s"),
        ({"all cores read": 20e9}, {}, {}, "one memory channel"),
        ({"disk write": 5e9}, {}, {}, "a cache of the drive"),
        ({}, {"numa_nodes": 2}, {}, "2 NUMA nodes"),
        ({}, {"lockable_bytes": 8 * 2.0**20}, {}, "only 0.01 GiB may be page-locked"),
        ({}, {"free_bytes": 140e9}, {}, "48.4 of 178.8 GiB of memory are in use"),
        ({}, {"kernels": ""}, {}, "no compiled CPU kernels"),
    ],
)
def test_each_rule_finds_its_own_fault_and_no_other(
    changes: dict[str, float], facts: dict[str, object], link: dict[str, int], words: str
) -> None:
    found = said(changes, replace(FACTS, **facts), replace(LINK, **link))  # type: ignore[arg-type]
    assert len(found) == 1
    assert words in found[0]


def test_a_narrow_link_is_held_against_its_own_width() -> None:
    """6.2 GB/s are 79 % of eight lanes: the width is what is wrong, not the copies."""
    changes = {name: 6.2e9 for name in FINE if name.startswith("copy")}
    assert len(said(changes, link=replace(LINK, width=8))) == 1


def test_few_cores_say_nothing_of_memory_channels() -> None:
    assert said({"all cores read": 20e9}, replace(FACTS, cores=2)) == []


def test_measurements_that_spread_are_pointed_out_with_the_worst() -> None:
    samples = Samples()
    samples.add("gpu memory", "byte/s", [200e9, 240e9, 300e9])
    samples.add("gpu launch", "s", [1e-6, 1e-6, 1e-6])
    (found,) = find_suspicions(replace(FACTS, gpus=()), samples, [], {}, math.nan)
    assert "1 of 2 measurements" in found and "'gpu memory' (21 %)" in found


def test_other_processes_are_pointed_out_from_a_twentieth_of_the_cores_on() -> None:
    assert said(others=1.1) == []
    assert "other processes had 1.3 of the 24 cores" in said(others=1.3)[0]


def test_busy_seconds_are_those_of_the_process_s_own_cores_without_idling(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 9 9 9 9\ncpu0 100 20 30 1000 500 4 6 40 7 7\ncpu1 100 0 0 0\ncpu10 5 5 5 5\nintr 1\n")
    tick = os.sysconf("SC_CLK_TCK")
    assert busy_seconds([0], stat) == 200 / tick
    assert busy_seconds([0, 1], stat) == 300 / tick
    assert math.isnan(busy_seconds([5], stat))
    assert math.isnan(busy_seconds([0], tmp_path / "missing"))


def test_link_states_are_read_from_the_drivers_command(tmp_path: Path) -> None:
    script = "print('3, 8, 3, 16'); print('[N/A], 8, 3, 16')"
    assert read_link_states([sys.executable, "-c", script]) == (
        LinkState(generation=3, width=8, most_generation=3, most_width=16),
    )
    assert read_link_states([str(tmp_path / "missing")]) == ()


def test_numa_nodes_are_counted(tmp_path: Path) -> None:
    for name in ("node0", "node1", "has_cpu"):
        (tmp_path / name).mkdir()
    assert read_numa_nodes(tmp_path) == 2
    assert read_numa_nodes(tmp_path / "missing") == 1
