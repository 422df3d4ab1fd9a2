"""Weights on their levels: what is resident on the GPU, what lies in CPU memory in page order, what lies on disk.

Every streamed byte of a layer has one home. A page is a range of bytes of the packed experts in CPU memory, of those on
disk, and of the layer's other weights, each cut into the same number of equal pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hrm.errors import InputError
from hrm.layout import Layout
from runtime.arena import Arenas
from runtime.bindings import ring_places
from runtime.device import Device
from runtime.disk_file import DiskFile
from runtime.expert_cut import ExpertCut, Tier, cut_experts
from runtime.weight_source import WeightSource

__all__ = ["DenseShape", "Segment", "WeightStore", "load_weights"]

ALIGNMENT = 16
"""Bytes the matrices of a layer start at multiples of, as GPU kernels need."""

Segment = tuple[int, Tensor]
"""An expert, and rows of it [n, 3, h]."""


@dataclass(frozen=True, slots=True)
class DenseShape:
    """Where each of a layer's other weights lies in one flat buffer: name -> (first byte, shape)."""

    places: dict[str, tuple[int, tuple[int, ...]]]
    size: int

    def views(self, flat: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The matrices in a flat buffer, uint8 [size]."""
        width = torch.empty(0, dtype=dtype).element_size()
        found = {}
        for name, (first, shape) in self.places.items():
            count = math.prod(shape)
            found[name] = flat[first : first + count * width].view(dtype).view(shape)
        for suffix in ("", "_bias"):  # one product for the three, where they lie one after the other
            parts = [f"{name}{suffix}" for name in ("q", "k", "v")]
            if all(name in self.places for name in parts) and self._adjoin(parts, width):
                rows = sum(self.places[name][1][0] for name in parts)
                first, shape = self.places[parts[0]]
                size = rows * (shape[1] if len(shape) > 1 else 1) * width
                found[f"qkv{suffix}"] = flat[first : first + size].view(dtype).view(rows, *shape[1:])
        return found

    def _adjoin(self, names: list[str], width: int) -> bool:
        """Whether these lie one after the other without a gap."""
        ends = [first + math.prod(shape) * width for first, shape in (self.places[name] for name in names)]
        return [self.places[name][0] for name in names[1:]] == ends[:-1]


@dataclass(slots=True)
class WeightStore:
    """All weights of a model under one policy. Mutable only while it is loaded.

    Attributes
    ----------
    dtype : torch.dtype
        As stored and computed with.
    cut : ExpertCut
        Of the routed experts of every layer that has them.
    resident, host : list of Tensor or None
        Packed rows of the experts of a layer on the GPU and in CPU memory, [rows, 3, h].
    on_disk : list of int or None
        Where a layer's rows on disk begin in the file [byte].
    dense_gpu, dense_host : list of Tensor or None
        A layer's other weights, flat uint8, where they live.
    slots, dense_slots : list of Tensor
        GPU buffers for what is streamed; of a ring of experts one place each.
    head_buffers, ring, landings : list of Tensor
        GPU buffers of a streamed lm_head; pinned pieces; CPU buffers of experts read from disk.
    """

    layout: Layout
    dtype: torch.dtype
    cut: ExpertCut
    shapes: list[DenseShape]
    resident: list[Tensor | None]
    host: list[Tensor | None]
    on_disk: list[int | None]
    dense_gpu: list[Tensor | None]
    dense_host: list[Tensor | None]
    top: dict[str, Tensor]
    disk: DiskFile | None = None
    slots: list[Tensor] = field(default_factory=list)
    dense_slots: list[Tensor] = field(default_factory=list)
    head_buffers: list[Tensor] = field(default_factory=list)
    ring: list[Tensor] = field(default_factory=list)
    landings: list[Tensor] = field(default_factory=list)
    _dense: dict[tuple[int, int | None], dict[str, Tensor]] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        """One row of f of an expert: three rows of h [byte]."""
        return 3 * self.layout.scenario.model.hidden_size * torch.empty(0, dtype=self.dtype).element_size()

    @property
    def rings(self) -> bool:
        """Whether streamed experts go through a ring."""
        return self.layout.policy.weight_slots == "experts"

    def rows(self, flat: Tensor) -> Tensor:
        """A flat buffer of whole rows as [rows, 3, h]."""
        return flat.view(self.dtype).view(-1, 3, self.layout.scenario.model.hidden_size)

    def dense(self, layer: int, slot: int | None) -> dict[str, Tensor]:
        """A layer's other weights where they are computed with."""
        found = self._dense.get((layer, slot))
        if found is None:
            flat = self.dense_gpu[layer]
            if flat is None:
                flat = self.dense_host[layer] if slot is None else self.dense_slots[slot]
            assert flat is not None
            found = self._dense[(layer, slot)] = self.shapes[layer].views(flat, self.dtype)
        return found

    def segments(self, layer: int, tier: Tier, packed: Tensor | None) -> list[Segment]:
        """Experts of a level, each with its rows [n, 3, h], in a buffer that holds all of that level's."""
        if packed is None:
            return []
        starts, rows = self.cut.starts(tier), self.cut.rows(tier)
        return [(e, packed[starts[e] : starts[e] + rows[e]]) for e in range(len(rows)) if rows[e]]

    def streamed(self, slot: int) -> tuple[Tensor, Tensor]:
        """Rows from CPU memory and from disk in a slot that holds a layer's."""
        packed = self.rows(self.slots[slot])
        from_cpu = self.cut.total("cpu")
        return packed[:from_cpu], packed[from_cpu : from_cpu + self.cut.total("disk")]

    def on_gpu(self, layer: int, slot: int | None) -> list[Segment]:
        """All parts of a layer's experts that the GPU sees: resident ones, and with a slot the streamed ones."""
        found = self.segments(layer, "gpu", self.resident[layer])
        if slot is not None and self.slots:
            for tier, packed in zip(("cpu", "disk"), self.streamed(slot), strict=True):
                found += self.segments(layer, tier, packed)  # type: ignore[arg-type]
        return found

    def of_ring(self, layer: int, expert: int, place: int | None) -> list[Segment]:
        """All parts of one expert: the resident one, and what its place of the ring holds."""
        found: list[Segment] = []
        resident, rows = self.resident[layer], self.cut.gpu[expert]
        if resident is not None and rows:
            start = rows * expert  # a ring cuts every expert alike
            found.append((expert, resident[start : start + rows]))
        if place is not None:
            packed = self.rows(self.slots[place])
            rows = self.cut.cpu[expert] + self.cut.disk[expert]
            found.append((expert, packed[:rows]))
        return found

    def on_cpu(self, layer: int, landing: int | None) -> list[Segment]:
        """All parts of a layer's experts that the CPU computes with."""
        found = self.segments(layer, "cpu", self.host[layer])
        if landing is not None:
            found += self.segments(layer, "disk", self.rows(self.landings[landing]))
        return found


def load_weights(
    layout: Layout,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: Device,
    arenas: Arenas,
    disk: DiskFile | None,
    one_layer: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> WeightStore:
    """Put every weight where the policy has it.

    Parameters
    ----------
    one_layer : bool
        All layers are the first one: what a check of one layer needs.
    on_progress : callable, optional
        Told the layers done and their number.

    Raises
    ------
    InputError
        A level does not hold what the plan says, or the source lacks a tensor.
    """
    policy, model, layers = layout.policy, layout.scenario.model, layout.num_layers
    cut = cut_experts(
        model.streamed_experts,
        model.streamed_ffn,
        policy.weights_on_gpu,
        policy.weights_on_disk,
        each=policy.weight_slots == "experts",
    )
    none: list[None] = [None] * layers
    store = WeightStore(layout, dtype, cut, [], [*none], [*none], [*none], [*none], [*none], {}, disk)
    for layer in range(layers):
        if one_layer and layer > 0:
            for kept in (store.resident, store.host, store.dense_gpu, store.dense_host):
                kept[layer] = kept[0]
            store.on_disk[layer] = store.on_disk[0]
            store.shapes.append(store.shapes[0])
        else:
            _load_dense(store, source, layer, device, arenas)
            if layout.streams_experts(layer):
                _load_experts(store, source, layer, device, arenas)
        if on_progress is not None:
            on_progress(layer + 1, layers)
    _load_top(store, source, device, arenas)
    _make_buffers(store, device, arenas)
    return store


def _store(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor in the type of the arithmetic.

    Raises
    ------
    InputError
        A value of it is too large for that type.
    """
    found = tensor.to(dtype).contiguous()
    if dtype == torch.float16 and tensor.dtype != dtype and not torch.isfinite(found).all():
        raise InputError(
            f"{name} has values beyond 65,504, the largest that fp16 holds",
            where="weights",
            way_out="arithmetic in bf16 or fp32: hrm plan --compute-dtype",
        )
    return found


def _load_dense(store: WeightStore, source: WeightSource, layer: int, device: Device, arenas: Arenas) -> None:
    policy = store.layout.policy
    of = f"of layer {layer}"
    tensors = {name: _store(tensor, store.dtype, f"{name} {of}") for name, tensor in source.dense(layer).items()}
    places, size = {}, 0
    for name, tensor in tensors.items():
        places[name] = (size, tuple(tensor.shape))
        size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    shape = DenseShape(places, size)
    store.shapes.append(shape)
    on_gpu = policy.dense_weights_on_gpu and not policy.everything_on_cpu
    arenas["gpu" if on_gpu else "cpu"].reserve("non-expert weights", size)
    flat = device.gpu_bytes(size) if on_gpu else device.host_bytes(size)
    views = shape.views(flat, store.dtype)
    for name, tensor in tensors.items():
        views[name].copy_(tensor)
    if on_gpu:
        store.dense_gpu[layer] = flat
    else:
        store.dense_host[layer] = flat
        if policy.pin_weights:
            device.lock_pages(flat)


def _load_experts(store: WeightStore, source: WeightSource, layer: int, device: Device, arenas: Arenas) -> None:
    cut, policy, size = store.cut, store.layout.policy, store.row_bytes
    gpu, cpu, disk = (cut.total("gpu") * size, cut.total("cpu") * size, cut.total("disk") * size)
    arenas["gpu"].reserve("resident expert weights", gpu)
    arenas["cpu"].reserve("expert weights", cpu)
    arenas["disk"].reserve("expert weights", disk)
    resident = store.rows(device.gpu_bytes(gpu)) if gpu else None
    host = store.rows(device.host_bytes(cpu)) if cpu else None
    if disk:
        assert store.disk is not None
        store.on_disk[layer] = store.disk.extend(disk)
    written = store.on_disk[layer] or 0
    for expert in range(len(cut.gpu)):
        name = f"expert {expert} of layer {layer}"
        matrices = [_store(matrix, store.dtype, name) for matrix in source.expert(layer, expert)]
        tiers: tuple[tuple[Tier, Tensor | None], ...] = (("gpu", resident), ("cpu", host))
        for tier, packed in tiers:
            rows, start, first = cut.rows(tier)[expert], cut.starts(tier)[expert], cut.first(tier, expert)
            if rows and packed is not None:
                for place, matrix in enumerate(matrices):
                    packed[start : start + rows, place].copy_(matrix[first : first + rows])
        rows, first = cut.disk[expert], cut.first("disk", expert)
        if rows:
            assert store.disk is not None
            packed = torch.stack([matrix[first : first + rows] for matrix in matrices], dim=1)
            store.disk.write(written, packed.view(-1).view(torch.uint8))
            written += rows * size
    store.resident[layer], store.host[layer] = resident, host
    if host is not None and policy.pin_weights:
        device.lock_pages(host)


def _load_top(store: WeightStore, source: WeightSource, device: Device, arenas: Arenas) -> None:
    """Embedding, final norm and lm_head; where they are tied the table has one home, and a head on the other level."""
    policy, model = store.layout.policy, store.layout.scenario.model
    on_cpu = policy.everything_on_cpu

    def place(name: str, term: str, on_gpu: bool) -> Tensor:
        tensor = _store(source.top(name), store.dtype, name)
        size = tensor.numel() * tensor.element_size()
        arenas["gpu" if on_gpu else "cpu"].reserve(term, size)
        flat = device.gpu_bytes(size) if on_gpu else device.host_bytes(size)
        home = flat.view(store.dtype).view(tensor.shape)
        home.copy_(tensor)
        return home

    store.top["final_norm"] = place("final_norm", "non-expert weights", not on_cpu)
    store.top["embedding"] = place("embedding", "embedding", policy.embedding_on_gpu)
    if model.tie_embeddings and policy.embedding_on_gpu == policy.lm_head_on_gpu:
        store.top["lm_head"] = store.top["embedding"]
    else:
        store.top["lm_head"] = place("lm_head", "lm_head", policy.lm_head_on_gpu)
    for name, streamed in (("lm_head", not policy.lm_head_on_gpu), ("embedding", False)):
        if streamed and policy.pin_weights and not on_cpu:
            device.lock_pages(store.top[name])


def _make_buffers(store: WeightStore, device: Device, arenas: Arenas) -> None:
    """Slots on the GPU, pinned pieces, and buffers for experts that are read for the CPU."""
    layout, policy, cut = store.layout, store.layout.policy, store.cut
    streamed = (cut.total("cpu") + cut.total("disk")) * store.row_bytes
    on_disk = cut.total("disk") * store.row_bytes
    if not policy.everything_on_cpu:
        count = 1 if policy.weight_slots == 1 else 2
        if store.rings:
            place = (cut.cpu[0] + cut.disk[0]) * store.row_bytes
            store.slots = [device.gpu_bytes(place) for _ in range(ring_places(layout))] if place else []
        elif streamed:
            store.slots = [device.gpu_bytes(streamed) for _ in range(count)]
        for slot in store.slots:
            arenas["gpu"].reserve("expert weight slots", slot.numel())
        if not policy.dense_weights_on_gpu:
            size = max(shape.size for shape in store.shapes)
            store.dense_slots = [device.gpu_bytes(size) for _ in range(count)]
            for slot in store.dense_slots:
                arenas["gpu"].reserve("non-expert weight slots", slot.numel())
        if not policy.lm_head_on_gpu:
            head = store.top["lm_head"]
            rows = -(-head.shape[0] // layout.head_pieces())
            size = rows * head.shape[1] * head.element_size()
            store.head_buffers = [device.gpu_bytes(size) for _ in range(min(2, layout.head_pieces()))]
            for buffer in store.head_buffers:
                arenas["gpu"].reserve("lm_head buffers", buffer.numel())
    if on_disk and (policy.everything_on_cpu or not policy.ffn_on_gpu):
        store.landings = [device.host_bytes(on_disk) for _ in range(2)]
        for landing in store.landings:
            arenas["cpu"].reserve("disk landing buffers", landing.numel())
