"""Every row of every expert lies on one level, and no memory has more than its share."""

from __future__ import annotations

import math

import torch
from cases import Case, model_folder, open_tiny, policy_of
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint import open_checkpoint
from runtime.disk_file import DiskFile
from runtime.expert_cut import ExpertCut, Tier, cut_experts
from runtime.weights import WeightStore

TIERS: tuple[Tier, ...] = ("gpu", "cpu", "disk")
SHARES = st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)).map(lambda each: (each[0], (1.0 - each[0]) * each[1]))
SIZES = st.tuples(st.integers(1, 12), st.integers(1, 40))


def rows_of(cut: ExpertCut, tier: Tier, expert: int) -> range:
    first = cut.first(tier, expert)
    return range(first, first + cut.rows(tier)[expert])


@given(SIZES, SHARES, st.booleans())
def test_every_row_of_every_expert_is_on_exactly_one_level(
    size: tuple[int, int], shares: tuple[float, float], each: bool
) -> None:
    count, width = size
    cut = cut_experts(count, width, *shares, each=each)
    for expert in range(count):
        assert [row for tier in TIERS for row in rows_of(cut, tier, expert)] == list(range(width))
    assert sum(cut.total(tier) for tier in TIERS) == count * width


@given(SIZES, SHARES, st.booleans())
def test_neither_memory_gets_more_than_its_share(
    size: tuple[int, int], shares: tuple[float, float], each: bool
) -> None:
    """The GPU's share is rounded down to whole rows and the disk's up (of each expert, where each is cut)."""
    (count, width), (gpu, disk) = size, shares
    cut = cut_experts(count, width, gpu, disk, each=each)
    parts, rows = (count, width) if each else (1, count * width)
    assert cut.total("gpu") <= gpu * count * width + 1e-6 * count
    assert cut.total("gpu") > (gpu * rows - 1) * parts - 1e-6
    assert cut.total("disk") <= (disk * rows + 1) * parts
    assert cut.total("disk") >= min(disk * rows - 1e-5, rows - math.floor(gpu * rows + 1e-6)) * parts
    assert cut.total("cpu") <= ((1.0 - gpu - disk) * rows + 1) * parts + 1e-5


@given(SIZES, SHARES)
def test_packed_rows_are_cut_once_so_at_most_two_experts_are_in_parts(
    size: tuple[int, int], shares: tuple[float, float]
) -> None:
    count, width = size
    cut = cut_experts(count, width, *shares, each=False)
    assert sum(max(cut.gpu[e], cut.cpu[e], cut.disk[e]) < width for e in range(count)) <= 2
    for tier in TIERS:
        there = [expert for expert in range(count) if cut.rows(tier)[expert]]
        assert there == list(range(min(there, default=0), max(there, default=-1) + 1))


@given(SIZES, SHARES)
def test_a_ring_cuts_every_expert_alike(size: tuple[int, int], shares: tuple[float, float]) -> None:
    count, width = size
    cut = cut_experts(count, width, *shares, each=True)
    assert all(len(set(cut.rows(tier))) == 1 for tier in TIERS)


def test_a_cut_by_hand() -> None:
    """Three experts of four rows, 5 of 12 rows on the GPU and 2 on disk; cut each, of 4 rows 1 and 1."""
    cut = cut_experts(3, 4, 5 / 12, 2 / 12, each=False)
    assert (cut.gpu, cut.cpu, cut.disk) == ((4, 1, 0), (0, 3, 2), (0, 0, 2))
    assert (cut.starts("cpu"), cut.first("cpu", 1), cut.first("disk", 2)) == ((0, 0, 3, 5), 1, 2)
    cut = cut_experts(3, 4, 5 / 12, 2 / 12, each=True)
    assert (cut.gpu, cut.cpu, cut.disk) == ((1,) * 3, (2,) * 3, (1,) * 3)


def on_disk(store: WeightStore, layer: int) -> torch.Tensor:
    first, disk = store.on_disk[layer], store.disk
    assert first is not None and isinstance(disk, DiskFile)
    found = torch.empty(store.cut.total("disk") * store.row_bytes, dtype=torch.uint8)
    disk.read(first, found)
    return store.rows(found)


def test_the_parts_of_an_expert_on_all_levels_make_the_expert() -> None:
    """As it is in the checkpoint, bit by bit; rows of the gate, of the up and of the transposed down matrix."""
    folder = model_folder("mixtral")
    source = open_checkpoint(folder)
    for slots in ({"weight_slots": 2}, {"weight_slots": "experts", "ring_experts": 2}):
        case = Case("cgopipe", policy_of(weights_on_gpu=0.4, weights_on_disk=0.3, **slots))
        store = open_tiny(folder, case).store
        for layer in range(3):
            resident, host = store.resident[layer], store.host[layer]
            assert resident is not None and host is not None
            packed = {"gpu": resident, "cpu": host, "disk": on_disk(store, layer)}
            for expert in range(6):
                parts = [
                    packed[tier][store.cut.starts(tier)[expert] : store.cut.starts(tier)[expert + 1]] for tier in TIERS
                ]
                assert torch.equal(torch.cat(parts), torch.stack(source.expert(layer, expert), dim=1))
