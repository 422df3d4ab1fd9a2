"""Kernels of the copy lanes: host to device, device to host, staging into pinned memory, disk.

On CUDA a copy is issued on its lane's stream; what has to happen in CPU memory once it is there comes back as a
function that the lane calls then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hrm.graph import Op, Task
from runtime.bindings import StageKey, WeightPiece, as_load
from runtime.compute_kernels import position_of
from runtime.disk_file import BLOCK
from runtime.experts import to_host
from runtime.run_state import RunState

__all__ = [
    "load_hidden",
    "load_kv",
    "load_weights",
    "offload_qkv",
    "read_disk",
    "stage_weights",
    "store_hidden",
    "store_kv",
    "write_disk",
]

Finish = Callable[[], None]


def piece_range(total: int, low: float, high: float, align: int) -> tuple[int, int]:
    """Bytes between two shares of so many; inner ends are multiples of `align`."""
    first, last = (total if share >= 1.0 else int(share * total) // align * align for share in (low, high))
    return first, last


def _shares(run: RunState, piece: WeightPiece, kind: str) -> tuple[float, float]:
    """Which shares of one kind of a stage's weights a piece begins and ends with, as the schedule cuts them."""
    if run.store.rings:  # experts and the rest come apart from each other
        return piece.number / piece.parts, (piece.number + 1) / piece.parts
    stage = piece.stage
    goes = stage.phase == "prefill" or run.experts_on_gpu
    whole = run.layout.streamed(stage.layer, stage.phase, experts=goes)
    every = getattr(whole, kind)
    if every <= 0:
        return 0.0, 0.0
    low, high = (getattr(whole.before(number, piece.parts), kind) for number in (piece.number, piece.number + 1))
    return low / every, 1.0 if piece.number + 1 == piece.parts else min(1.0, high / every + 1e-9)


def _flat(rows: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.uint8) if rows is None else rows.view(-1).view(torch.uint8)


def _parts(run: RunState, piece: WeightPiece) -> tuple[tuple[Tensor, Tensor], tuple[int, int, Tensor]]:
    """Of a piece: (bytes in CPU memory, where they go), and (first byte in the disk file, bytes, where they go)."""
    store, layer = run.store, piece.stage.layer
    none = torch.empty(0, dtype=torch.uint8)
    size, from_cpu = store.row_bytes, store.cut.total("cpu") * store.row_bytes
    host, on_disk = _flat(store.host[layer]), store.on_disk[layer]
    cpu, disk = none, (0, 0, none)
    into = none
    if piece.expert is not None:
        start, count = store.cut.starts("cpu")[piece.expert] * size, store.cut.cpu[piece.expert] * size
        low, high = piece_range(count, *_shares(run, piece, "experts"), 64)
        slot = store.slots[piece.slot]
        cpu, into = host[start + low : start + high], slot[low:high]
        if on_disk is not None and store.cut.disk[piece.expert]:
            start, rows = store.cut.starts("disk")[piece.expert] * size, store.cut.disk[piece.expert] * size
            low, high = piece_range(rows, *_shares(run, piece, "disk"), BLOCK)
            disk = (on_disk + start + low, high - low, slot[count + low : count + high])
        return (cpu, into), disk
    goes = piece.stage.phase == "prefill" or run.experts_on_gpu
    if goes and run.layout.streams_experts(layer) and store.slots and not store.rings:
        low, high = piece_range(from_cpu, *_shares(run, piece, "experts"), 64)
        cpu, into = host[low:high], store.slots[piece.slot][low:high]
        if on_disk is not None:
            low, high = piece_range(store.cut.total("disk") * size, *_shares(run, piece, "disk"), BLOCK)
            disk = (on_disk + low, high - low, store.slots[piece.slot][from_cpu + low : from_cpu + high])
    return (cpu, into), disk


def _dense_part(run: RunState, piece: WeightPiece) -> tuple[Tensor, Tensor]:
    none = torch.empty(0, dtype=torch.uint8)
    flat = run.store.dense_host[piece.stage.layer] if piece.expert is None else None
    if flat is None:
        return none, none
    low, high = piece_range(run.store.shapes[piece.stage.layer].size, *_shares(run, piece, "dense"), 64)
    return flat[low:high], run.store.dense_slots[piece.slot][low:high]


def _head_part(run: RunState, piece: WeightPiece) -> tuple[Tensor, Tensor]:
    head = run.store.top["lm_head"]
    assert piece.head is not None
    first, last = run.head_rows(piece.head)
    flat = _flat(head[first:last])
    low, high = piece_range(flat.numel(), piece.number / piece.parts, (piece.number + 1) / piece.parts, 64)
    return flat[low:high], run.store.head_buffers[piece.slot][low:high]


def _sources(run: RunState, piece: WeightPiece) -> tuple[list[tuple[Tensor, Tensor]], tuple[int, int, Tensor]]:
    """All a piece brings: from CPU memory, and from disk."""
    if piece.head is not None:
        return [_head_part(run, piece)], (0, 0, torch.empty(0, dtype=torch.uint8))
    cpu, disk = _parts(run, piece)
    return [each for each in (cpu, _dense_part(run, piece)) if each[0].numel()], disk


def _ring_places(sources: list[tuple[Tensor, Tensor]], disk: int) -> list[int]:
    """Where in a pinned piece what comes from CPU memory lies: behind what comes from disk."""
    found, at = [], -(-disk // BLOCK) * BLOCK
    for source, _ in sources:
        found.append(at)
        at += source.numel()
    return found


def stage_weights(run: RunState, task: Task) -> None:
    """Copy a piece from pageable into pinned memory."""
    piece = run.bindings.pieces[as_load(task.id)]
    assert piece.pinned is not None
    buffer = run.store.ring[piece.pinned]
    sources, disk = _sources(run, piece)
    for (source, _), at in zip(sources, _ring_places(sources, disk[1]), strict=True):
        buffer[at : at + source.numel()].copy_(source)


def load_weights(run: RunState, task: Task) -> None:
    """Copy a piece to its slot, place or buffer on the GPU."""
    piece = run.bindings.pieces[task.id]
    sources, (_, length, into) = _sources(run, piece)
    pinned = run.layout.policy.pin_weights
    places = _ring_places(sources, length)
    for (source, target), at in zip(sources, places, strict=True):
        if not pinned:
            assert piece.pinned is not None
            source = run.store.ring[piece.pinned][at : at + source.numel()]
        target.copy_(source, non_blocking=True)
    if length:
        assert piece.pinned is not None
        into.copy_(run.store.ring[piece.pinned][:length], non_blocking=True)


def read_disk(run: RunState, task: Task) -> None:
    """Read a piece of weights for the GPU, the experts of a layer for the CPU, or a micro-batch's KV cache."""
    name = task.id
    if name.micro_batch is not None:
        j = name.micro_batch
        landing = run.cache.take_landing()
        lengths = [int(length) + name.step for length in run.index(j, "disk").prompts]
        run.cache.read_disk(name.layer, j, lengths, landing)
        run.landings[(name.step, name.layer, j)] = landing
        return
    store = run.store
    assert store.disk is not None
    number = run.bindings.landings.get(StageKey(name.phase, name.step, name.layer))
    if number is not None:
        first = store.on_disk[name.layer]
        assert first is not None
        store.disk.read(first, store.landings[number])
        return
    piece = run.bindings.pieces[as_load(name)]
    assert piece.pinned is not None
    _, (first, length, _) = _sources(run, piece)
    store.disk.read(first, store.ring[piece.pinned][:length])


def offload_qkv(run: RunState, task: Task) -> None:
    """Queries, keys and values of the requests that attention on the CPU serves (D1)."""
    position, name = position_of(task), task.id
    found, part = run.at(position).qkv, run.placement.decode[position[1]]
    assert found is not None
    number = run.bindings.numbers[(Op.OFFLOAD_QKV, "decode", name.step, name.layer, position[1])]
    targets = run.split_qkv(run.pinned_qkv[number], part.size - part.on_gpu)
    for source, target in zip(found, targets, strict=True):
        run.to_host(source[part.on_gpu :], target)


def load_hidden(run: RunState, task: Task) -> None:
    """Hidden states to the GPU (D2): embeddings, prompts that waited in CPU memory, results of attention or experts."""
    position, name = position_of(task), task.id
    j = position[1]
    if name.part == 1:
        part, found = run.placement.decode[j], run.at(position).attended
        assert found is not None
        number = run.bindings.numbers[(Op.OFFLOAD_QKV, "decode", name.step, name.layer, j)]
        count = part.size - part.on_gpu
        found[part.on_gpu :].copy_(run.pinned_results[number][:count], non_blocking=True)
        return
    if name.part == 2:
        number = run.bindings.numbers[(Op.STORE_HIDDEN, "decode", name.step, name.layer, j)]
        run.at(position).pending.append(run.to_gpu(run.pinned_expert_out[number][: run.placement.decode[j].size]))
        return
    source = run.embedded.pop(position) if name.layer == 0 else run.waiting[j]
    run.put_hidden(position, run.to_gpu(source))


def store_hidden(run: RunState, task: Task) -> Finish | None:
    """Hidden states to CPU memory: prompts that wait for the next layer, or what experts there compute with."""
    position, name = position_of(task), task.id
    if name.phase == "prefill":
        run.to_host(run.prefill_hidden.pop(position[1]), run.waiting[position[1]])
        return None
    found = run.at(position)
    assert found.normed is not None and found.routing is not None
    number = run.bindings.numbers[(Op.STORE_HIDDEN, "decode", name.step, name.layer, position[1])]
    run.to_host(found.normed, run.pinned_expert_in[number][: found.normed.shape[0]])
    run.host_routings[position] = to_host(found.routing)
    return None


def load_kv(run: RunState, task: Task) -> None:
    """The filled KV cache of a micro-batch into its slot (D4), what lies on disk from its landing buffer."""
    name = task.id
    j, layer = position_of(task)[1], name.layer
    number = run.bindings.numbers[(Op.LOAD_KV, "decode", name.step, layer, j)]
    slot = run.cache.slot(number)
    for tier in ("cpu", "disk"):
        there = run.index(j, tier)
        if not len(there):
            continue
        landing = tier == "disk"
        pool = run.landings[(name.step, layer, j)] if landing else run.cache.pools["cpu"].memory
        assert pool is not None
        source = pool if landing else pool[layer]
        begins = there.in_landing if landing else there.first
        rows = zip(begins.tolist(), there.prompts.tolist(), there.in_slot.tolist(), strict=True)
        for begin, prompt, place in rows:
            count = prompt + name.step
            for side in range(2):
                slot[side, place : place + count].copy_(source[side, begin : begin + count], non_blocking=True)
        if landing:
            _give_landing(run, task)


def _give_landing(run: RunState, task: Task) -> None:
    """The landing buffer is free once the copy has left it: whoever takes it next waits for that."""
    left = torch.cuda.current_stream().record_event() if run.device.cuda else None
    key = (task.id.step, task.id.layer, position_of(task)[1])
    run.cache.give_landing(run.landings.pop(key), left)


def store_kv(run: RunState, task: Task) -> Finish | None:
    """New keys and values to CPU memory; those of requests on disk wait there to be written."""
    name, position = task.id, position_of(task)
    j, layer = position[1], name.layer
    if name.phase == "decode":
        k, v = run.new_kv.pop(("decode", name.step, layer, j))
        part = run.placement.decode[j]
        for each in (k, v):
            run.hand_over(each)
        host = [run.to_host(each[part.on_gpu :].to(run.cache.dtype)) for each in (k, v)]
        return _keep_decoded(run, task, host[0], host[1])
    if ("prefill", 0, layer, j) not in run.new_kv:
        return None  # a micro-batch whose requests all stay on the GPU
    k, v = run.new_kv.pop(("prefill", 0, layer, j))
    for each in (k, v):
        run.hand_over(each)
    pool, disk, start = run.cache.pools["cpu"], run.cache.pools["disk"], 0
    landing, at = None, 0
    writes: list[tuple[int, int, int]] = []
    for row, length in zip(run.rows(position), run.lengths(position), strict=True):
        sides = [each[start : start + length].to(run.cache.dtype) for each in (k, v)]
        first = pool.first.get(row)
        if first is not None:
            assert pool.memory is not None
            for side in range(2):
                run.to_host(sides[side], pool.memory[layer, side, first : first + length])
        elif row in disk.first:
            if landing is None:
                landing = run.cache.take_landing()
            for side in range(2):
                run.to_host(sides[side], landing[side, at : at + length])
            writes.append((row, at, length))
            at += run.cache.rows_on_disk(length)
        start += length
    if landing is not None:
        run.prompt_writes[(layer, j)] = landing, writes
    return None


def _keep_decoded(run: RunState, task: Task, k: Tensor, v: Tensor) -> Finish:
    """Put new tokens [n, G, d] where the cache of their requests lies, once they are in CPU memory."""
    j, layer, step = position_of(task)[1], task.id.layer, task.id.step
    offset = run.placement.decode[j].on_gpu

    def finish() -> None:
        there = run.index(j, "cpu")
        if len(there):
            part = slice(there.part.start - offset, there.part.stop - offset)
            pool = run.cache.pools["cpu"].memory
            assert pool is not None
            place = there.first + there.prompts + step
            pool[layer, 0].index_copy_(0, place, k[part])
            pool[layer, 1].index_copy_(0, place, v[part])
        disk = run.index(j, "disk")
        if len(disk):
            part = slice(disk.part.start - offset, disk.part.stop - offset)
            run.keep_for_disk(task.id, k[part], v[part])

    return finish


def write_disk(run: RunState, task: Task) -> None:
    """Write what a step, or a prompt, added to the KV cache on disk."""
    if task.id.phase == "prefill":
        landing, writes = run.prompt_writes.pop((task.id.layer, position_of(task)[1]), (None, []))
        if landing is not None:
            for row, first, length in writes:
                run.cache.write_prompt(task.id.layer, row, landing, first, length)
            run.cache.give_landing(landing)
        return
    key = (task.id.phase, task.id.step, task.id.layer, position_of(task)[1])
    for row, position, k, v in run.disk_writes.pop(key, ()):
        run.cache.write_disk(task.id.layer, row, position, k, v)
