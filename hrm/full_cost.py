"""The `full` cost model: seconds per lane of one decode step and of the prefill of one batch.

Every lane's seconds are `Affine` in the unknowns of the search (bytes on each level, binary choices), for fixed
batch, micro-batches and places of computation. A step takes as long as its busiest lane (the extension of Eq. 12 to
all lanes), or the sum of copy and computation where a single weight buffer forbids overlap. What no lane shows: waits
between lanes, which the simulator prices.

Legend: N batch, n_ub micro-batches, n_p prefill micro-batches, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hrm import cost
from hrm.affine import Affine, Number, total
from hrm.policy import WeightSlots
from hrm.rates import Phase, Rates
from hrm.scenario import Scenario, Sizes, kv_capacity_bytes, kv_replicas
from hrm.units import MIB

__all__ = ["Batch", "Lanes", "decode_lanes", "prefill_lanes"]

KERNELS_PER_LAYER = 12
"""Kernel launches of a layer and micro-batch: norms, projections, rotary, attention, router, experts (by hand)."""

STAGING_BUFFER_BYTES = 4 * 128 * MIB
"""Pinned ring through which pageable weights and disk reads reach the link: four pieces of 128 MiB."""

WIDE_OPERATORS = ("router", "norms")
"""Operators of a layer whose weights are never quantised, so that fp8 and int8 peaks are not theirs."""

# Names of the unknowns; bytes unless said otherwise.
EXPERTS_ON_GPU = "experts_on_gpu"
EXPERTS_ON_DISK = "experts_on_disk"
KV_ON_GPU = "kv_on_gpu"
KV_ON_DISK = "kv_on_disk"
RING = "ring"  # bytes of expert ring, per layer
DENSE = "dense_on_gpu"  # binary
HEAD = "lm_head_on_gpu"  # binary
EMBEDDING = "embedding_on_gpu"  # binary
RING_SLOTS = "ring_slots"  # binary: weight_slots = "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What is fixed before the program: batch, micro-batches, where decode computes. Counts may be arrays.

    Attributes
    ----------
    size, micro_batches : float or ndarray
        N and n_ub.
    attention_on_gpu, ffn_on_gpu : bool
        A_g and F_g.
    pipeline : bool
        Over several GPUs each has layers of its own, and as many parts of the batch go through them; else every layer
        is split over all GPUs.
    """

    size: Number
    micro_batches: Number
    attention_on_gpu: bool
    ffn_on_gpu: bool
    pipeline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Seconds per lane of one pass over the layers [s].

    Attributes
    ----------
    always : dict of str to Affine
        gpu, cpu, host_to_device, device_to_host, disk, cpu_memory.
    when_staged : dict of str to Affine
        Lanes that count only where weights are not pinned: staging, and CPU memory with the staging copies in it.
    weight_copies : Affine
        Part of host_to_device that moves weights.
    chain : Affine or None
        What one micro-batch does one after the other, however many there are: QKV, copy, CPU attention, copy, the rest.
        None where everything but copies of weights and KV cache is on the GPU.
    attention_phase, expert_phase : dict of str to Affine
        With a ring of experts the whole batch passes attention before the first expert, so a pass is the longest of
        one plus the longest of the other. Copies of the KV cache belong to the first, less what its buffers hold
        before; copies of weights to the second, less what the ring holds.
    bytes_moved : dict of str to Affine
        Bytes per lane, for the report [byte].
    ring_fills : float or ndarray
        With a ring of experts, attention phases of one layer in a pass, each of which the ring fills in: 1 in decode,
        n_p in prefill.
    """

    always: dict[str, Affine]
    when_staged: dict[str, Affine]
    weight_copies: Affine
    chain: Affine | None
    attention_phase: dict[str, Affine]
    expert_phase: dict[str, Affine]
    bytes_moved: dict[str, Affine]
    ring_fills: Number = 1.0

    def serial_sums(self, *, slots: WeightSlots, layers: int, rates: Rates) -> dict[str, Affine]:
        """Sums of lanes that cannot overlap for want of buffers; a pass takes at least each of them [s].

        Parameters
        ----------
        slots : {1, 2, "experts"}
            With two slots of a layer everything overlaps.
        layers : int
            Layers whose experts are streamed.
        """
        if slots == 1:  # the next layer's weights come when this layer is done
            after = {"gpu": self.always["gpu"], "cpu": self.always["cpu"]}
            if self.chain is not None:
                after["chain"] = self.chain
            if "disk" in self.attention_phase:
                after["disk"] = self.attention_phase["disk"]
            sums = {f"one_slot_{name}": self.weight_copies + seconds for name, seconds in after.items()}
            reads = self._weight_reads(layers, rates)
            if reads is not None:
                after.pop("disk", None)  # the disk lane has both
                sums.update({f"one_slot_reads_{name}": reads + seconds for name, seconds in after.items()})
            return sums
        if slots == 2:
            return {}
        late = dict(self.expert_phase)
        if "host_to_device" in late:
            fills = layers * self.ring_fills
            late["host_to_device"] = late["host_to_device"] - Affine.of(RING, fills / rates.h2d_bytes_per_s)
            reads = self._weight_reads(layers, rates)
            if reads is not None:
                late["disk"] = reads - Affine.of(RING, fills / rates.disk_read_bytes_per_s)
        return {
            f"ring_{first}_then_{second}": attention + experts
            for first, attention in self.attention_phase.items()
            for second, experts in late.items()
        }

    def staged_sums(self, *, slots: WeightSlots, layers: int, rates: Rates) -> dict[str, Affine]:
        """The same sums where weights are staged: the pinned ring runs no further ahead than it is long [s].

        While the slot is in use, or the ring of experts full, only `STAGING_BUFFER_BYTES` per layer can be staged.
        """
        if slots == 2 or "staging" not in self.when_staged:
            return {}
        fills = layers * self.ring_fills
        waits = self.when_staged["staging"] - STAGING_BUFFER_BYTES * fills / rates.staging_bytes_per_s
        if slots == 1:
            after = {"gpu": self.always["gpu"], "cpu": self.always["cpu"]}
            if self.chain is not None:
                after["chain"] = self.chain
            return {f"one_slot_staging_{name}": waits + seconds for name, seconds in after.items()}
        held = Affine.of(RING, fills / rates.staging_bytes_per_s)
        return {f"ring_{name}_then_staging": seconds + waits - held for name, seconds in self.attention_phase.items()}

    def _weight_reads(self, layers: int, rates: Rates) -> Affine | None:
        """Seconds of disk reads of experts that wait for a slot: all but what the pinned ring takes per layer."""
        per_byte = self.always["disk"].coefficient(EXPERTS_ON_DISK)
        if not np.any(per_byte) or not np.any(self.weight_copies.coefficient(EXPERTS_ON_GPU)):
            return None  # no disk, or the experts stay on the CPU side
        waits: Affine = Affine.of(EXPERTS_ON_DISK, per_byte) - STAGING_BUFFER_BYTES * per_byte * layers
        return waits


def _layer_seconds(
    scenario: Scenario, rates: Rates, tokens: Number, phase: Phase, *, experts: bool, pipeline: bool
) -> tuple[Number, Number]:
    """GPU seconds of one micro-batch over all layers, without attention: (everything but experts, experts) [s]."""
    model = scenario.model
    launching = rates.gpus if pipeline else 1  # of a pipeline each GPU launches for its own layers, beside the others
    rest: Number = model.n_layers / launching * (KERNELS_PER_LAYER * rates.launch_s + rates.overhead_s)
    expert: Number = 0.0
    for name, layers, work in cost.layer_operators(model, scenario.formats, tokens):
        if name == "routed experts":
            expert = layers * rates.gpu_seconds(work, phase) if experts else 0.0
        else:
            rest = rest + layers * rates.gpu_seconds(work, phase, wide=name in WIDE_OPERATORS)
    return rest, expert


def _embedding(scenario: Scenario, rates: Rates, tokens: Number, phase: Phase) -> tuple[Affine, Affine, Affine]:
    """Look-up of `tokens` rows where the table lies: (GPU seconds, CPU seconds, bytes in CPU memory)."""
    work = cost.embedding(scenario.model, scenario.formats, tokens)
    seconds, touched = rates.cpu_seconds(work), work.bytes_touched
    return (
        Affine.of(EMBEDDING, rates.gpu_seconds(work, phase)),
        seconds - Affine.of(EMBEDDING, seconds),
        touched - Affine.of(EMBEDDING, touched),
    )


def _all_reduce(scenario: Scenario, rates: Rates, tokens: Number, *, pipeline: bool) -> tuple[Number, Number]:
    """Two all-reduces per layer of the hidden states: (GPU seconds, bytes through each direction of the host)."""
    gpus = rates.gpus
    if gpus == 1 or pipeline:
        return 0.0, 0.0
    values = 2.0 * scenario.model.n_layers * tokens * scenario.model.hidden_size
    volume = 2.0 * (gpus - 1) / gpus * values * scenario.formats.activation_bytes  # per GPU, each way
    if rates.all_reduce_bytes_per_s is not None:
        return volume / rates.all_reduce_bytes_per_s, 0.0
    through_host = volume * gpus
    return through_host / min(rates.h2d_bytes_per_s, rates.d2h_bytes_per_s), through_host


def _copy_lanes(
    rates: Rates, h2d_bytes: Affine, d2h_bytes: Affine, h2d_copies: Number, d2h_copies: Number
) -> tuple[Affine, Affine]:
    """Seconds of both directions: each loses part of its rate while the other is busy, and pays per copy."""
    h2d = h2d_bytes / rates.h2d_bytes_per_s + h2d_copies * rates.copy_s
    d2h = d2h_bytes / rates.d2h_bytes_per_s + d2h_copies * rates.copy_s
    return h2d + d2h * rates.h2d_loss, d2h + h2d * rates.d2h_loss


def _streamed_weights(sizes: Sizes, *, experts: bool) -> tuple[Affine, Affine]:
    """Bytes a pass copies to the GPU: (expert weights, everything else that is streamed)."""
    expert = sizes.streamed_bytes - Affine.of(EXPERTS_ON_GPU) if experts else Affine()
    other = total(
        [
            sizes.dense_bytes - Affine.of(DENSE, sizes.dense_bytes),
            sizes.lm_head_bytes - Affine.of(HEAD, sizes.lm_head_bytes),
        ]
    )
    return expert, other


def decode_lanes(scenario: Scenario, sizes: Sizes, rates: Rates, batch: Batch) -> Lanes:
    """Lanes of one decode step of the whole batch at its mean context.

    Parameters
    ----------
    scenario, sizes, rates
        Inputs and what was derived from them.
    batch : Batch
        N, n_ub, A_g, F_g; arrays for many at once.

    Returns
    -------
    Lanes
        Seconds per step [s], affine in the unknowns.
    """
    model, formats = scenario.model, scenario.formats
    n, n_ub, layers = batch.size, batch.micro_batches, model.n_layers
    tokens = n / n_ub
    activation = formats.activation_bytes
    capacity = kv_capacity_bytes(scenario, sizes, n)
    read_per_byte = n * sizes.kv_read_bytes_per_request / capacity  # a step reads less than the cache may grow to
    off_gpu = 1.0 - Affine.of(KV_ON_GPU, 1.0 / capacity)  # share of the KV cache, hence of the requests
    kv_read_off_gpu = (capacity - Affine.of(KV_ON_GPU)) * read_per_byte
    per_byte = cost.attention_decode_per_kv_byte(model, formats, sizes.kv_read_bytes_per_request)
    on_each = replace(per_byte, bytes_touched=per_byte.bytes_touched * kv_replicas(scenario))
    gpu_per_byte = rates.gpu_attention_seconds(on_each)

    # GPU
    pipeline = batch.pipeline
    rest, expert = _layer_seconds(scenario, rates, tokens, "decode", experts=batch.ffn_on_gpu, pipeline=pipeline)
    head = n_ub * rates.gpu_seconds(cost.lm_head(model, formats, tokens), "decode", wide=True)
    gather, cpu_gather, gather_bytes = _embedding(scenario, rates, n, "decode")
    reduce_s, reduce_bytes = _all_reduce(scenario, rates, n, pipeline=pipeline)
    if batch.attention_on_gpu:
        attention = Affine(capacity * read_per_byte * gpu_per_byte)
    else:
        attention = Affine.of(KV_ON_GPU, read_per_byte * gpu_per_byte)
    gpu_rest = attention + gather + (n_ub * rest + head + reduce_s)
    gpu = gpu_rest + n_ub * expert
    at_once: Number = 0.0
    if batch.ffn_on_gpu:
        # A ring of experts applies each expert to the whole batch at once: it reads its weights once, not n_ub times.
        at_once = model.streamed_layers * rates.gpu_seconds(cost.routed_experts(model, formats, n), "decode")
        gpu = gpu + Affine.of(RING_SLOTS, at_once - n_ub * expert)

    # CPU
    cpu = cpu_gather
    if not batch.attention_on_gpu:
        cpu = cpu + kv_read_off_gpu * rates.cpu_attention_seconds(per_byte)
    expert_dram: Number = 0.0
    if not batch.ffn_on_gpu:
        work = cost.routed_experts(model, formats, tokens)
        cpu = cpu + n_ub * model.streamed_layers * rates.cpu_seconds(work)
        expert_dram = n_ub * model.streamed_layers * work.bytes_touched

    # Copies: weights, D1 (QKV up to the CPU), D2 (hidden states back), D4 (KV), hidden states around CPU experts
    expert_weights, other_weights = _streamed_weights(sizes, experts=batch.ffn_on_gpu)
    times = np.minimum(rates.gpus, n_ub) if pipeline else 1.0  # each part of the batch loads every layer anew
    weights = (expert_weights + other_weights) * times
    row = n * model.hidden_size * activation
    copied = row * (1 if pipeline else rates.gpus)  # every GPU of a tensor-parallel group has the whole hidden state
    hidden_down, hidden_up = Affine(), Affine()  # copies that computation waits for, each way
    if not batch.attention_on_gpu:
        hidden_down = hidden_down + off_gpu * (n * layers * cost.attention_result_values(model) * activation)
        hidden_up = hidden_up + off_gpu * (n * layers * cost.qkv_values(model) * activation)
    if not batch.ffn_on_gpu:
        hidden_down, hidden_up = hidden_down + copied * model.streamed_layers, hidden_up + row * model.streamed_layers
    h2d_bytes = weights + (copied - Affine.of(EMBEDDING, copied)) + reduce_bytes + hidden_down
    d2h_bytes = reduce_bytes + hidden_up
    if batch.attention_on_gpu:
        h2d_bytes = h2d_bytes + kv_read_off_gpu * kv_replicas(scenario)
        d2h_bytes = d2h_bytes + off_gpu * (n * sizes.kv_new_bytes_per_token)
    h2d, d2h = _copy_lanes(rates, h2d_bytes, d2h_bytes, 2.0 * n_ub * layers, n_ub * layers * 1.0)

    disk, disk_bytes = Affine(), Affine()
    if rates.disk_read_bytes_per_s:
        reads = Affine.of(EXPERTS_ON_DISK) + Affine.of(KV_ON_DISK, read_per_byte)
        writes = Affine.of(KV_ON_DISK, n * sizes.kv_new_bytes_per_token / capacity)
        disk = reads / rates.disk_read_bytes_per_s + writes / rates.disk_write_bytes_per_s
        disk_bytes = reads + writes

    attention_dram = kv_read_off_gpu if not batch.attention_on_gpu else Affine()
    dram = h2d_bytes + d2h_bytes + disk_bytes + gather_bytes + attention_dram + expert_dram
    staged = (expert_weights - Affine.of(EXPERTS_ON_DISK, 1.0 if batch.ffn_on_gpu else 0.0) + other_weights) * times

    waits = hidden_down / rates.h2d_bytes_per_s + hidden_up / rates.d2h_bytes_per_s
    chain = None
    attention_phase: dict[str, Affine] = {}
    expert_phase: dict[str, Affine] = {}
    if not (batch.attention_on_gpu and batch.ffn_on_gpu):
        chain = (gpu + cpu + waits) / n_ub
    if batch.ffn_on_gpu:
        attention_phase = {"gpu": gpu_rest}
        if batch.attention_on_gpu:  # two micro-batches' KV cache waits in its slots
            late = np.maximum(0.0, 1.0 - 2.0 / n_ub) * kv_replicas(scenario) / rates.h2d_bytes_per_s
            attention_phase["host_to_device"] = kv_read_off_gpu * late
        if rates.disk_read_bytes_per_s:
            kv_reads = Affine.of(KV_ON_DISK, read_per_byte) - STAGING_BUFFER_BYTES * layers
            attention_phase["disk"] = kv_reads / rates.disk_read_bytes_per_s
        if not batch.attention_on_gpu:
            # Attention of a layer starts with nothing in flight: one micro-batch goes through alone, the rest follow at
            # the pace of the slower side.
            alone = (gpu_rest + cpu + waits) / n_ub
            others = 1.0 - 1.0 / n_ub
            attention_phase["gpu"] = gpu_rest * others + alone
            attention_phase["cpu"] = cpu * others + alone
        expert_phase = {"gpu": Affine(at_once), "host_to_device": weights / rates.h2d_bytes_per_s}
    return Lanes(
        always={
            "gpu": gpu,
            "cpu": cpu,
            "host_to_device": h2d,
            "device_to_host": d2h,
            "disk": disk,
            "cpu_memory": dram / rates.memory_bytes_per_s,
        },
        when_staged={
            "staging": staged / rates.staging_bytes_per_s,
            "cpu_memory": (dram + 2.0 * staged) / rates.memory_bytes_per_s,
        },
        weight_copies=weights / rates.h2d_bytes_per_s,
        chain=chain,
        attention_phase=attention_phase,
        expert_phase=expert_phase,
        bytes_moved={
            "host_to_device": h2d_bytes,
            "device_to_host": d2h_bytes,
            "disk": disk_bytes,
            "cpu_memory": dram,
            "staging": staged,
        },
    )


def prefill_lanes(
    scenario: Scenario, sizes: Sizes, rates: Rates, batch: Batch, prefill_micro_batches: Number, *, ring: bool
) -> Lanes:
    """Lanes of the prefill of one batch: all computation on the GPU, micro-batch by micro-batch, KV offloaded.

    Weights are copied once for all micro-batches (zigzag order), the hidden states of all prompts waiting in CPU
    memory; with a ring of experts every micro-batch copies them again, and nothing waits.

    Parameters
    ----------
    prefill_micro_batches : float or ndarray
        n_p.
    ring : bool
        Weights come through a ring of experts.

    Returns
    -------
    Lanes
        Seconds per batch [s].
    """
    model, formats = scenario.model, scenario.formats
    n, n_p, layers = batch.size, prefill_micro_batches, model.n_layers
    tokens = n * sizes.prompt_tokens / n_p
    activation = formats.activation_bytes
    capacity = kv_capacity_bytes(scenario, sizes, n)
    off_gpu = 1.0 - Affine.of(KV_ON_GPU, 1.0 / capacity)
    prompt_kv = n * sizes.kv_prompt_bytes_per_request

    pipeline = batch.pipeline
    rest, expert = _layer_seconds(scenario, rates, tokens, "prefill", experts=True, pipeline=pipeline)
    attention: Number = 0.0
    for kind in model.layer_kinds:
        pairs = n / n_p * sizes.prompt_pairs_by_window[kind.window]
        work = cost.attention_prefill(model, formats, tokens, pairs)
        attention = attention + kind.count * rates.gpu_seconds(work, "prefill", wide=True)
    head = rates.gpu_seconds(cost.lm_head(model, formats, n / n_p), "prefill", wide=True)
    gather, cpu_gather, gather_bytes = _embedding(scenario, rates, n * sizes.prompt_tokens, "prefill")
    reduce_s, reduce_bytes = _all_reduce(scenario, rates, n * sizes.prompt_tokens, pipeline=pipeline)
    gpu_rest = gather + (n_p * (rest + attention + head) + reduce_s)
    gpu = gpu_rest + n_p * expert

    passes = n_p if ring else np.minimum(rates.gpus, n_p) if pipeline else 1.0
    expert_weights, other_weights = _streamed_weights(sizes, experts=True)
    weights = (expert_weights + other_weights) * passes
    row = n * sizes.prompt_tokens * model.hidden_size * activation
    waiting = 0.0 * row if ring else np.where(np.asarray(n_p) > 1, row * (layers - 1.0), 0.0)
    copies = 1 if pipeline else rates.gpus  # every GPU of a tensor-parallel group has the whole hidden state
    copied = row * copies
    h2d_bytes = weights + waiting * copies + (copied - Affine.of(EMBEDDING, copied)) + reduce_bytes
    d2h_bytes = off_gpu * prompt_kv + waiting + reduce_bytes
    h2d, d2h = _copy_lanes(rates, h2d_bytes, d2h_bytes, 2.0 * n_p * layers, 2.0 * n_p * layers)
    disk, disk_bytes = Affine(), Affine()
    if rates.disk_read_bytes_per_s:
        reads, writes = Affine.of(EXPERTS_ON_DISK) * passes, Affine.of(KV_ON_DISK, prompt_kv / capacity)
        disk = reads / rates.disk_read_bytes_per_s + writes / rates.disk_write_bytes_per_s
        disk_bytes = reads + writes
    dram = h2d_bytes + d2h_bytes + disk_bytes + gather_bytes
    staged = weights - Affine.of(EXPERTS_ON_DISK) * passes
    return Lanes(
        always={
            "gpu": gpu,
            "cpu": cpu_gather,
            "host_to_device": h2d,
            "device_to_host": d2h,
            "disk": disk,
            "cpu_memory": dram / rates.memory_bytes_per_s,
        },
        when_staged={
            "staging": staged / rates.staging_bytes_per_s,
            "cpu_memory": (dram + 2.0 * staged) / rates.memory_bytes_per_s,
        },
        weight_copies=weights / rates.h2d_bytes_per_s,
        chain=None,
        attention_phase={"gpu": gpu_rest} if ring else {},
        expert_phase={"gpu": Affine(n_p * expert), "host_to_device": weights / rates.h2d_bytes_per_s} if ring else {},
        bytes_moved={
            "host_to_device": h2d_bytes,
            "device_to_host": d2h_bytes,
            "disk": disk_bytes,
            "cpu_memory": dram,
            "staging": staged,
        },
        ring_fills=passes,
    )
