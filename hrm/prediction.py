"""What the full cost model says of one policy: seconds, the lane that binds, and memory against its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hrm.affine import total
from hrm.full_cost import (
    DENSE,
    EMBEDDING,
    EXPERTS_ON_DISK,
    EXPERTS_ON_GPU,
    HEAD,
    KV_ON_DISK,
    KV_ON_GPU,
    RING,
    RING_SLOTS,
    Batch,
    Lanes,
    decode_lanes,
    prefill_lanes,
)
from hrm.memory import (
    DENSE_SLOTS,
    EXPERT_SLOTS,
    Terms,
    cpu_terms,
    disk_terms,
    gpu_terms,
    limit_bytes,
    pinned_terms,
)
from hrm.points import prefill_choice
from hrm.policy import Policy
from hrm.rates import Rates
from hrm.scenario import Scenario, Sizes, kv_capacity_bytes

__all__ = ["MemoryUse", "Phase", "Prediction", "memory_by_phase", "memory_use", "pass_seconds", "predict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Peak of one level against its limit.

    Attributes
    ----------
    peak_bytes, limit_bytes : float
        [byte]
    terms : dict of str to float
        What the peak is made of [byte]; they add up to it.
    phase : str
        When the peak occurs.
    """

    peak_bytes: float
    limit_bytes: float
    terms: dict[str, float]
    phase: str

    @property
    def fits(self) -> bool:
        """Within the limit, to a byte in 10^9."""
        return self.peak_bytes <= self.limit_bytes * (1 + 1e-9) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Seconds of one pass (a decode step, or the prefill of a batch).

    Attributes
    ----------
    seconds : float
        [s]
    lanes : dict of str to float
        Seconds each lane is busy [s].
    bytes_moved : dict of str to float
        Bytes per lane [byte].
    bottleneck : str
        Lane, or pair of lanes, that sets `seconds`.
    """

    seconds: float
    lanes: dict[str, float]
    bytes_moved: dict[str, float]
    bottleneck: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction for a policy by the full cost model.

    Attributes
    ----------
    prefill_s, decode_s : float
        Of one batch [s].
    startup_s, completion_s : float
        Loading and pinning; start-up and all batches [s].
    num_batches : int
    throughput_tokens_per_s, decode_throughput_tokens_per_s : float
        Generated tokens of a batch over prefill + decode; over decode alone (n - 1 steps) [token/s].
    layer_latency_s : float
        Seconds per layer and decode step [s].
    decode, prefill : Phase
        One decode step at the mean context; the prefill of one batch.
    memory : dict of str to MemoryUse
        By level.
    """

    prefill_s: float
    decode_s: float
    startup_s: float
    completion_s: float
    num_batches: int
    throughput_tokens_per_s: float
    decode_throughput_tokens_per_s: float
    layer_latency_s: float
    decode: Phase
    prefill: Phase
    memory: dict[str, MemoryUse]

    @property
    def bottleneck(self) -> str:
        """Lane that sets the larger part of the time."""
        if not self.prefill_s > self.decode_s:  # a prefill that is not in the model is not a number
            return f"decode: {self.decode.bottleneck}"
        return f"prefill: {self.prefill.bottleneck}"

    @property
    def batch_s(self) -> float:
        """Prefill and decode of one batch [s]."""
        return self.prefill_s + self.decode_s


def unknowns_of(policy: Policy, sizes: Sizes, capacity: float) -> dict[str, float]:
    """Values of the program's unknowns under a policy."""
    slots = 2.0 if policy.weight_slots == 2 else 1.0
    streamed_layer = sizes.layer_expert_bytes * (1.0 - policy.weights_on_gpu)
    ring = policy.weight_slots == "experts"
    ring_bytes = policy.ring_experts * sizes.expert_bytes
    dense_slots = 2.0 if policy.weight_slots in (2, "experts") else 1.0
    return {
        EXPERTS_ON_GPU: policy.weights_on_gpu * sizes.streamed_bytes,
        EXPERTS_ON_DISK: policy.weights_on_disk * sizes.streamed_bytes,
        KV_ON_GPU: policy.kv_on_gpu * capacity,
        KV_ON_DISK: policy.kv_on_disk * capacity,
        DENSE: float(policy.dense_weights_on_gpu),
        HEAD: float(policy.lm_head_on_gpu),
        EMBEDDING: float(policy.embedding_on_gpu),
        RING_SLOTS: float(ring),
        RING: ring_bytes if ring else 0.0,
        EXPERT_SLOTS: ring_bytes if ring else slots * streamed_layer,
        DENSE_SLOTS: 0.0 if policy.dense_weights_on_gpu else dense_slots * sizes.largest_dense_layer_bytes,
    }


def pass_seconds(
    rows: Lanes, values: Mapping[str, float], policy: Policy, sizes: Sizes, rates: Rates
) -> tuple[float, str, dict[str, float]]:
    """Seconds of one pass: its busiest lane, or copy plus computation where one buffer forbids overlap.

    Returns
    -------
    seconds : float
        [s]
    bottleneck : str
    lanes : dict of str to float
        [s]
    """
    lanes = {lane: float(seconds.at(values)) for lane, seconds in rows.always.items()}
    if not policy.pin_weights:
        lanes.update({lane: float(seconds.at(values)) for lane, seconds in rows.when_staged.items()})
    else:
        lanes["staging"] = 0.0
    candidates = dict(lanes)
    if rows.chain is not None:
        candidates["chain"] = float(rows.chain.at(values))
    sums = rows.serial_sums(slots=policy.weight_slots, layers=sizes.streamed_layers, rates=rates)
    if not policy.pin_weights:
        sums |= rows.staged_sums(slots=policy.weight_slots, layers=sizes.streamed_layers, rates=rates)
    candidates.update({name: float(seconds.at(values)) for name, seconds in sums.items()})
    bottleneck = max(candidates, key=lambda lane: candidates[lane])
    return candidates[bottleneck], bottleneck, _busy_seconds(lanes, bottleneck, rates)


def _busy_seconds(lanes: dict[str, float], bottleneck: str, rates: Rates) -> dict[str, float]:
    """Seconds each lane is busy [s]: a copy direction is slowed down only while it copies itself.

    The rows of the program let a direction lose for all of the other's time, which is linear and says too much for the
    shorter of the two, one that does not bind.
    """
    loss = {"host_to_device": rates.h2d_loss, "device_to_host": rates.d2h_loss}
    determinant = 1.0 - rates.h2d_loss * rates.d2h_loss
    if determinant <= 0.0:
        return lanes
    busy = dict(lanes)
    for lane, other in (("host_to_device", "device_to_host"), ("device_to_host", "host_to_device")):
        if lane != bottleneck and loss[lane] < 1.0:
            alone = (lanes[lane] - loss[lane] * lanes[other]) / determinant
            busy[lane] = min(lanes[lane], max(0.0, alone) / (1.0 - loss[lane]))
    return busy


def _use(terms: Terms, values: Mapping[str, float], limit: float, phase: str) -> MemoryUse:
    numbers = {name: float(term.at(values)) for name, term in terms.items()}
    numbers = {name: max(0.0, value) for name, value in numbers.items() if abs(value) >= 0.5}
    return MemoryUse(peak_bytes=sum(numbers.values()), limit_bytes=limit, terms=numbers, phase=phase)


def memory_use(scenario: Scenario, sizes: Sizes, policy: Policy) -> dict[str, MemoryUse]:
    """Peak bytes of every level under a policy, itemised; the phase with the higher peak is shown."""
    every = memory_by_phase(scenario, sizes, policy)
    return {level: max(uses, key=lambda use: use.peak_bytes) for level, uses in every.items()}


def memory_by_phase(scenario: Scenario, sizes: Sizes, policy: Policy) -> dict[str, list[MemoryUse]]:
    """Bytes of every level under a policy, itemised: of decode and prefill where they differ."""
    batch = _batch(policy)
    capacity = float(kv_capacity_bytes(scenario, sizes, batch.size))
    values = unknowns_of(policy, sizes, capacity)
    limits = limit_bytes(scenario.profile)
    requests, ring = float(policy.micro_batch_size), policy.weight_slots == "experts"
    prefill = prefill_choice(scenario, batch.size, float(policy.prefill_micro_batch_size))
    n_p = 1.0 if ring else prefill.parts
    phases = {
        "decode": gpu_terms(
            scenario,
            sizes,
            batch,
            phase="decode",
            requests=requests,
            tokens=float(policy.micro_batch_token_budget),
            ring=ring,
        ),
        "prefill": gpu_terms(
            scenario,
            sizes,
            batch,
            phase="prefill",
            requests=prefill.requests,
            tokens=prefill.tokens,
            ring=ring,
            prefill_micro_batches=n_p,
        ),
    }
    host = cpu_terms(
        scenario, sizes, batch, requests=requests, prefill_micro_batches=n_p, prefill_tokens=prefill.tokens
    )
    return {
        "gpu": [_use(terms, values, limits["gpu"], phase) for phase, terms in phases.items()],
        "cpu": [_use(host, values, limits["cpu"], "prefill")],
        "disk": [_use(disk_terms(), values, limits["disk"], "always")],
    }


def _batch(policy: Policy) -> Batch:
    return Batch(
        size=float(policy.batch_size),
        micro_batches=float(policy.num_micro_batches),
        attention_on_gpu=policy.attention_on_gpu,
        ffn_on_gpu=policy.ffn_on_gpu,
        pipeline=policy.parallelism == "pipeline",
    )


def startup_seconds(scenario: Scenario, sizes: Sizes, rates: Rates, policy: Policy) -> float:
    """Seconds to read the weights and to page-lock buffers, copied KV cache and, in a policy that pins, weights [s].

    Weights that stay on disk are not read. Without a disk in the profile they arrive at the host's copy rate.
    """
    on_disk = policy.weights_on_disk * sizes.streamed_bytes
    source = rates.disk_read_bytes_per_s or rates.staging_bytes_per_s
    seconds = (sizes.weight_bytes - on_disk) / min(source, rates.staging_bytes_per_s)
    if policy.everything_on_cpu:
        return seconds
    locked = total(pinned_terms(scenario, _batch(policy), float(policy.micro_batch_size)).values()).at({})
    if policy.pin_weights:
        in_cpu = sizes.streamed_bytes * (1.0 - policy.weights_on_gpu) - on_disk
        in_cpu += 0.0 if policy.dense_weights_on_gpu else sizes.dense_bytes
        in_cpu += 0.0 if policy.lm_head_on_gpu else sizes.lm_head_bytes
        locked += in_cpu
    if policy.attention_on_gpu:  # its KV cache is copied each step, so it is page-locked
        capacity = float(kv_capacity_bytes(scenario, sizes, float(policy.batch_size)))
        locked += capacity * (1.0 - policy.kv_on_gpu - policy.kv_on_disk)
    return float(seconds + locked / rates.pinning_bytes_per_s)


def predict(scenario: Scenario, sizes: Sizes, rates: Rates, policy: Policy) -> Prediction:
    """Seconds and memory of one policy.

    Parameters
    ----------
    scenario, sizes, rates
        Inputs and what was derived from them.
    policy : Policy
        Any policy of the program; it need not fit (`Prediction.memory` says).

    Returns
    -------
    Prediction
    """
    batch = _batch(policy)
    capacity = float(kv_capacity_bytes(scenario, sizes, batch.size))
    values = unknowns_of(policy, sizes, capacity)
    ring = policy.weight_slots == "experts"
    n_p = float(-(-policy.batch_size // policy.prefill_micro_batch_size))
    decode = _phase(decode_lanes(scenario, sizes, rates, batch), values, policy, sizes, rates)
    step_s = 0.0  # mean over the steps
    for number, (weight, _) in enumerate(sizes.contexts):
        at = decode_lanes(scenario, sizes.at_context(number), rates, batch)
        step_s += weight * pass_seconds(at, values, policy, sizes, rates)[0]
    prefill = _phase(prefill_lanes(scenario, sizes, rates, batch, n_p, ring=ring), values, policy, sizes, rates)
    return compose_prediction(
        scenario,
        sizes,
        policy,
        decode=decode,
        decode_s=step_s * sizes.decode_steps,
        prefill=prefill,
        startup_s=startup_seconds(scenario, sizes, rates, policy),
        memory=memory_use(scenario, sizes, policy),
    )


def _phase(rows: Lanes, values: Mapping[str, float], policy: Policy, sizes: Sizes, rates: Rates) -> Phase:
    seconds, bottleneck, lanes = pass_seconds(rows, values, policy, sizes, rates)
    moved: dict[str, Any] = {lane: float(amount.at(values)) for lane, amount in rows.bytes_moved.items()}
    if policy.pin_weights:
        moved["staging"] = 0.0
    else:
        moved["cpu_memory"] += 2.0 * moved["staging"]  # read and written once more, as in its seconds
    return Phase(seconds=seconds, lanes=lanes, bytes_moved=moved, bottleneck=bottleneck)


def compose_prediction(
    scenario: Scenario,
    sizes: Sizes,
    policy: Policy,
    *,
    decode: Phase,
    decode_s: float,
    prefill: Phase,
    startup_s: float,
    memory: dict[str, MemoryUse],
) -> Prediction:
    """Totals of a batch and of all requests from the two phases."""
    batch_s = prefill.seconds + decode_s
    batches = -(-scenario.workload.num_requests // policy.batch_size)
    tokens = policy.batch_size * sizes.generation_length
    return Prediction(
        prefill_s=prefill.seconds,
        decode_s=decode_s,
        startup_s=startup_s,
        completion_s=startup_s + batches * batch_s,
        num_batches=batches,
        throughput_tokens_per_s=tokens / batch_s,
        decode_throughput_tokens_per_s=tokens / decode_s if decode_s > 0 else 0.0,
        layer_latency_s=decode.seconds / scenario.model.n_layers,
        decode=decode,
        prefill=prefill,
        memory=memory,
    )
