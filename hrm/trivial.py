"""The plans anyone would try first: all in GPU memory, CPU only, one micro-batch.

They are evaluated beside the program and returned when they win, so a plan is never worse than them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hrm import cost
from hrm.affine import Affine, Number, total
from hrm.full_cost import Batch
from hrm.memory import Terms, limit_bytes, pinned_terms
from hrm.pins import Pins
from hrm.points import Grid
from hrm.policy import Policy
from hrm.prediction import MemoryUse, Phase, Prediction, compose_prediction, memory_use, predict, startup_seconds
from hrm.rates import Rates
from hrm.scenario import Scenario, Sizes, kv_capacity_bytes, kv_replicas, worst_prompt_tokens
from hrm.units import GIB

__all__ = ["Trivial", "cpu_only_memory", "cpu_only_prediction", "predict_policy", "trivial_plans"]

BATCHES_ON_GPU = 16
"""Batches all in GPU memory that are priced, the largest that fit."""

LANDING_LAYERS = 2
"""Layers of experts from disk in CPU memory at a time: one in use while the next is read."""

EXPERT_VISITS = 1024
"""Visits of an expert that are computed at a time on the CPU."""

WIDENED_VALUES = 2.0**20
"""Values of an expert in fp16 that are in float32 at a time."""

ROWS_SIDE_BY_SIDE = 1024
"""Rows of an expert in bf16 whose products with many visits are computed at a time on the CPU."""

ROUTED_VISIT_BYTES = 12.0
"""Of a visit to an expert: its token, int64, and its weight, float32 [byte]."""

CPU_PREFILL = 64.0
"""Requests of a prefill micro-batch on the CPU: enough for its products to be bound by FLOPs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trivial:
    """One trivial plan.

    Attributes
    ----------
    name : str
    policy, prediction
        None where it does not fit.
    reason : str
        Why it does not fit, else empty.
    """

    name: str
    policy: Policy | None = None
    prediction: Prediction | None = None
    reason: str = ""


def predict_policy(scenario: Scenario, sizes: Sizes, rates: Rates, policy: Policy) -> Prediction:
    """Prediction of any policy, trivial ones included."""
    if policy.everything_on_cpu:
        return cpu_only_prediction(scenario, sizes, rates, policy)
    return predict(scenario, sizes, rates, policy)


def trivial_plans(
    scenario: Scenario, sizes: Sizes, rates: Rates, grid: Grid, pins: Pins, max_seconds: float
) -> tuple[Trivial, ...]:
    """The trivial plans that the pins allow, each at its best batch size.

    `one micro-batch` is a policy of the program itself (n_ub = 1), so it is not repeated here.
    """
    plans: list[Trivial] = []
    free = pins.given.keys() <= {"batch_size", "micro_batch_size", "num_micro_batches", "prefill_micro_batch_size"}
    if free:
        plans.append(_all_on_gpu(scenario, sizes, rates, grid, pins, max_seconds))
        if pins.prefill_micro_batch_size is None:
            plans.append(_cpu_only(scenario, sizes, rates, grid, max_seconds))
    return tuple(plans)


def _all_on_gpu(scenario: Scenario, sizes: Sizes, rates: Rates, grid: Grid, pins: Pins, max_seconds: float) -> Trivial:
    """All weights and the whole KV cache in GPU memory, in one micro-batch, at the best batch.

    More micro-batches would read the weights more often for nothing; the search has them all the same.
    """
    name = "all in GPU memory"
    limit = limit_bytes(scenario.profile)["gpu"]
    if sizes.weight_bytes > limit:
        return Trivial(name=name, reason=f"weights are {sizes.weight_bytes / limit:.1f}x the GPU memory")
    cache = np.asarray(kv_capacity_bytes(scenario, sizes, grid.size)) * kv_replicas(scenario)
    whole = (grid.micro_batches == 1) | (pins.micro_batch_size is not None) | (pins.num_micro_batches is not None)
    indices = np.flatnonzero(whole & (sizes.weight_bytes + cache <= limit))
    best: tuple[float, Policy, Prediction] | None = None
    tried = 0
    # Larger batches first: decode reads the weights once for more requests.
    for index in indices[np.argsort(-grid.size[indices], kind="stable")]:
        found = _fullest_on_gpu(scenario, sizes, rates, grid, pins, int(index))
        if found is None:
            continue
        tried += 1
        seconds = found[1].num_batches * found[1].batch_s
        if found[1].batch_s <= max_seconds and (best is None or seconds < best[0]):
            best = (seconds, *found)
        if tried == BATCHES_ON_GPU:
            break
    if best is None:
        why = "within the time for a batch" if tried else "with the KV cache and activations of one request"
        return Trivial(name=name, reason=f"weights fit, but not {why}")
    return Trivial(name=name, policy=best[1], prediction=best[2])


def _fullest_on_gpu(
    scenario: Scenario, sizes: Sizes, rates: Rates, grid: Grid, pins: Pins, index: int
) -> tuple[Policy, Prediction] | None:
    """The plan all in GPU memory at one batch, with the largest prefill micro-batch that fits; None where none does."""
    n, mu, n_ub = int(grid.size[index]), int(grid.micro_batch[index]), int(grid.micro_batches[index])
    batch = Batch(size=float(n), micro_batches=float(n_ub), attention_on_gpu=True, ffn_on_gpu=True)
    locked = float(total(pinned_terms(scenario, batch, float(mu)).values()).at({}))
    lockable = scenario.profile.cpu.lockable_bytes
    if lockable is not None and locked > lockable:
        return None
    given = pins.prefill_micro_batch_size
    for prefill in [min(n, given)] if given else sorted({min(n, m) for m in (1, 4, 16, 64, 256, n)}, reverse=True):
        policy = Policy(
            batch_size=n,
            micro_batch_size=mu,
            num_micro_batches=n_ub,
            prefill_micro_batch_size=prefill,
            attention_on_gpu=True,
            ffn_on_gpu=True,
            weights_on_gpu=1.0,
            kv_on_gpu=1.0,
            pin_weights=False,
            micro_batch_token_budget=int(scenario.workload.micro_batch_token_bound(n, n_ub, mu)),
        )
        if all(use.fits for use in memory_use(scenario, sizes, policy).values()):
            return policy, predict(scenario, sizes, rates, policy)
    return None


def _cpu_only(scenario: Scenario, sizes: Sizes, rates: Rates, grid: Grid, max_seconds: float) -> Trivial:
    """Everything on the CPU, experts on disk where they do not fit, one micro-batch, at the best batch."""
    name = "CPU only"
    sizes_tried = grid.size[grid.micro_batches == 1]
    if sizes_tried.size == 0:
        return Trivial(name=name, reason="it has one micro-batch")
    micro = np.minimum(sizes_tried, CPU_PREFILL)
    limits = limit_bytes(scenario.profile)
    missing = total(_cpu_only_terms(scenario, sizes, sizes_tried, micro, 0.0).values()).at({}) - limits["cpu"]
    row = scenario.model.hidden_size * sizes.expert_bytes / scenario.model.streamed_expert_parameters
    # Of what goes to disk two layers are in memory at a time. Whole rows, of the three matrices together.
    freed = sizes.streamed_layers - LANDING_LAYERS
    rows = np.ceil(missing / max(freed, 1) / row) + 3.0
    needed = rows * row / sizes.layer_expert_bytes if freed > 0 else 2.0  # more than there is
    share = np.where(missing > 0, needed, 0.0)
    on_disk = share * sizes.streamed_bytes
    fits = (share <= 1.0) & (on_disk <= limits["disk"])
    decode = _cpu_lanes(scenario, sizes, rates, sizes_tried, 1.0, on_disk, prefill=False)
    prefill = _cpu_lanes(scenario, sizes, rates, sizes_tried, np.ceil(sizes_tried / micro), on_disk, prefill=True)
    seconds = sizes.decode_steps * np.maximum(decode["cpu"], decode["disk"])
    seconds = seconds + np.maximum(prefill["cpu"], prefill["disk"])
    batches = np.ceil(scenario.workload.num_requests / sizes_tried)
    every = np.where(fits & (seconds <= max_seconds), batches * seconds, np.inf)
    best = int(np.argmin(every))
    if not np.isfinite(every[best]):
        least = int(np.argmin(sizes_tried))
        n = int(sizes_tried[least])
        if not fits[least]:
            return Trivial(name=name, reason=f"{missing[least] / GIB:.1f} GiB over CPU memory at a batch of {n}")
        return Trivial(name=name, reason=f"a batch of {n} takes {seconds[least] / 3600:.0f} hours")
    n = int(sizes_tried[best])
    policy = Policy(
        batch_size=n,
        micro_batch_size=n,
        num_micro_batches=1,
        prefill_micro_batch_size=int(micro[best]),
        attention_on_gpu=False,
        ffn_on_gpu=False,
        weights_on_disk=float(share[best]),
        dense_weights_on_gpu=False,
        embedding_on_gpu=False,
        lm_head_on_gpu=False,
        pin_weights=False,
        everything_on_cpu=True,
        micro_batch_token_budget=int(scenario.workload.micro_batch_token_bound(n, 1, n)),
    )
    return Trivial(name=name, policy=policy, prediction=cpu_only_prediction(scenario, sizes, rates, policy))


def _cpu_only_terms(scenario: Scenario, sizes: Sizes, size: Number, micro: Number, on_disk: Number) -> Terms:
    """CPU bytes when nothing is on the GPU [byte].

    Parameters
    ----------
    size, micro : float or ndarray
        N, and requests of a prefill micro-batch.
    on_disk : float or ndarray
        Bytes of experts on disk.
    """
    model, value = scenario.model, scenario.formats.activation_bytes
    prompts = worst_prompt_tokens(scenario, size)
    tokens = micro * float(scenario.workload.max_prompt_tokens)
    logits = 8.0 * model.vocab_size  # float32, plus a copy for sampling
    terms: dict[str, Number] = {
        "expert weights": sizes.streamed_bytes - on_disk,
        "disk landing buffers": on_disk * (LANDING_LAYERS / sizes.streamed_layers),
        "non-expert weights": sizes.dense_bytes,
        "embedding": sizes.embedding_bytes,
        "lm_head": 0.0 if sizes.tied else sizes.lm_head_bytes,
        "KV cache": kv_capacity_bytes(scenario, sizes, size),
        "hidden states of all prompts": prompts * (model.hidden_size * value),
        "activations": np.maximum(_cpu_activations(scenario, tokens), _cpu_activations(scenario, size) + size * logits),
    }
    return {term: Affine(amount) for term, amount in terms.items()}


def _cpu_activations(scenario: Scenario, tokens: Number) -> Number:
    """Bytes alive beside the hidden states while tokens pass the widest point of a layer on the CPU [byte].

    Experts run one after the other and add to a float32 sum, so they need scratch for some of the visits of one expert,
    and not for those of all k. The CPU has no products in fp16: what goes through them is there in float32 besides.
    """
    model, formats = scenario.model, scenario.formats
    value, hidden = formats.activation_bytes, model.hidden_size
    widened = 4.0 if formats.compute == "fp16" else 0.0
    qkv, result = cost.qkv_values(model), cost.attention_result_values(model)
    mlp = max(model.shared_ffn, model.dense_ffn if model.is_moe and model.n_dense_layers else 0)
    widest = max(
        (hidden + qkv) * value + hidden * widened,  # normalised copy, and what is made of it
        (qkv + 2 * result) * value + (qkv + 2 * result) * widened,  # results by request and head, and by token
        (hidden + model.mlp_matrices * mlp) * value + max(hidden, mlp) * widened,
        hidden * (value + 4.0) + model.streamed_top_k * ROUTED_VISIT_BYTES,  # input and sum of the experts
    )
    row = (2 * hidden + model.mlp_matrices * model.streamed_ffn) * max(value, widened)
    visits = np.minimum(tokens, EXPERT_VISITS)
    scratch = visits * row
    if formats.compute == "bf16":  # the visits and what the down rows are multiplied with in bf16, sums in float32
        side_by_side = visits * (6.0 * hidden + 2.0 * ROWS_SIDE_BY_SIDE) + ROWS_SIDE_BY_SIDE * 2.0 * hidden
        scratch = np.maximum(scratch, side_by_side)
    if widened:
        scratch = scratch + WIDENED_VALUES * widened
    return tokens * widest + scratch


def cpu_only_memory(scenario: Scenario, sizes: Sizes, policy: Policy) -> dict[str, MemoryUse]:
    """Memory of the plan that does not use the GPU."""
    on_disk = policy.weights_on_disk * sizes.streamed_bytes
    terms = _cpu_only_terms(scenario, sizes, float(policy.batch_size), float(policy.prefill_micro_batch_size), on_disk)
    held = {
        "gpu": {},
        "cpu": {name: float(term.at({})) for name, term in terms.items()},
        "disk": {"expert weights": on_disk} if on_disk else {},
    }
    limits = limit_bytes(scenario.profile)
    return {
        level: MemoryUse(
            peak_bytes=sum(numbers.values()),
            limit_bytes=limits[level],
            terms=numbers,
            phase="prefill" if level == "cpu" else "always",
        )
        for level, numbers in held.items()
    }


def cpu_only_prediction(scenario: Scenario, sizes: Sizes, rates: Rates, policy: Policy) -> Prediction:
    """Seconds of a batch computed wholly on the CPU, experts on disk read once per pass."""
    decode = _cpu_pass(scenario, sizes, rates, policy, prefill=False)
    prefill = _cpu_pass(scenario, sizes, rates, policy, prefill=True)
    return compose_prediction(
        scenario,
        sizes,
        policy,
        decode=decode,
        decode_s=decode.seconds * sizes.decode_steps,
        prefill=prefill,
        startup_s=startup_seconds(scenario, sizes, rates, policy),
        memory=cpu_only_memory(scenario, sizes, policy),
    )


def _cpu_pass(scenario: Scenario, sizes: Sizes, rates: Rates, policy: Policy, *, prefill: bool) -> Phase:
    n, on_disk = float(policy.batch_size), policy.weights_on_disk * sizes.streamed_bytes
    parts = float(-(-policy.batch_size // policy.prefill_micro_batch_size)) if prefill else 1.0
    lanes = _cpu_lanes(scenario, sizes, rates, n, parts, on_disk, prefill=prefill)
    seconds = {lane: float(busy) for lane, busy in lanes.items()}
    bottleneck = max(seconds, key=lambda lane: seconds[lane])
    return Phase(seconds=seconds[bottleneck], lanes=seconds, bytes_moved={"disk": on_disk}, bottleneck=bottleneck)


def _cpu_lanes(
    scenario: Scenario, sizes: Sizes, rates: Rates, n: Number, parts: Number, on_disk: Number, *, prefill: bool
) -> dict[str, Number]:
    """Seconds of CPU and disk in one pass of N requests in that many micro-batches [s]."""
    model, formats = scenario.model, scenario.formats
    tokens = n * sizes.prompt_tokens / parts if prefill else n
    busy: Number = 0.0
    for _, layers, work in cost.layer_operators(model, formats, tokens):
        busy = busy + layers * rates.cpu_seconds(work)
    if prefill:
        for kind in model.layer_kinds:
            pairs = n / parts * sizes.prompt_pairs_by_window[kind.window]
            busy = busy + kind.count * rates.cpu_seconds(cost.attention_prefill(model, formats, tokens, pairs))
    else:
        per_byte = cost.attention_decode_per_kv_byte(model, formats, sizes.kv_read_bytes_per_request)
        busy = busy + n * sizes.kv_read_bytes_per_request * rates.cpu_attention_seconds(per_byte)
    busy = (busy + rates.cpu_seconds(cost.lm_head(model, formats, n / parts))) * parts
    disk = on_disk / rates.disk_read_bytes_per_s if rates.disk_read_bytes_per_s else 0.0 * busy
    return {"cpu": busy, "disk": disk}
