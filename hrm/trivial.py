"""The plans anyone would try first: all in GPU memory, CPU only, one micro-batch.

They are evaluated beside the program and returned when they win, so a plan is never worse than them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hrm import cost
from hrm.points import Grid
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.prediction import MemoryUse, Phase, Prediction, compose_prediction, memory_use, predict, startup_seconds
from hrm.rates import Rates
from hrm.scenario import Scenario, Sizes, kv_capacity_bytes

__all__ = ["Trivial", "cpu_only_prediction", "predict_policy", "trivial_plans"]


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


def _all_on_gpu(
    scenario: Scenario, sizes: Sizes, rates: Rates, grid: Grid, pins: Pins, max_seconds: float
) -> Trivial:
    """All weights and the whole KV cache in GPU memory, at the best batch."""
    name = "all in GPU memory"
    profile = scenario.profile
    limit = profile.gpu.count * profile.gpu.usable_memory_bytes
    if sizes.weight_bytes > limit:
        return Trivial(name=name, reason=f"weights are {sizes.weight_bytes / limit:.1f}x the GPU memory")
    best: tuple[float, Policy, Prediction] | None = None
    indices = np.flatnonzero(grid.micro_batches <= 64)
    # Larger batches first: decode reads the weights once for more requests.
    for index in indices[np.argsort(-grid.size[indices], kind="stable")]:
        n, mu, n_ub = int(grid.size[index]), int(grid.micro_batch[index]), int(grid.micro_batches[index])
        capacity = float(kv_capacity_bytes(scenario, sizes, float(n)))
        if sizes.weight_bytes + capacity > limit:
            continue
        for prefill in sorted({min(n, m) for m in (4, 16, 64, 256, n)}):
            if pins.prefill_micro_batch_size not in (None, prefill):
                continue
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
            if not memory_use(scenario, sizes, policy)["gpu"].fits:
                continue
            prediction = predict(scenario, sizes, rates, policy)
            if prediction.batch_s > max_seconds:
                continue
            seconds = prediction.num_batches * prediction.batch_s
            if best is None or seconds < best[0]:
                best = (seconds, policy, prediction)
        if best is not None and n < best[1].batch_size / 2:
            break
    if best is None:
        return Trivial(name=name, reason="weights fit, but not with the KV cache and activations of one request")
    return Trivial(name=name, policy=best[1], prediction=best[2])


def _cpu_only(scenario: Scenario, sizes: Sizes, rates: Rates, grid: Grid, max_seconds: float) -> Trivial:
    """Everything on the CPU, experts on disk where they do not fit, one micro-batch, at the best batch."""
    best: tuple[float, Policy, Prediction] | None = None
    reason = ""
    for index in np.flatnonzero(grid.micro_batches == 1):
        n = int(grid.size[index])
        policy = Policy(
            batch_size=n,
            micro_batch_size=n,
            num_micro_batches=1,
            prefill_micro_batch_size=min(n, 64),
            attention_on_gpu=False,
            ffn_on_gpu=False,
            dense_weights_on_gpu=False,
            embedding_on_gpu=False,
            lm_head_on_gpu=False,
            pin_weights=False,
            everything_on_cpu=True,
            micro_batch_token_budget=int(scenario.workload.micro_batch_token_bound(n, 1, n)),
        )
        use = _cpu_only_memory(scenario, sizes, policy)
        missing = use["cpu"].peak_bytes - use["cpu"].limit_bytes
        if missing > 0:
            row = scenario.model.hidden_size * sizes.expert_bytes / scenario.model.streamed_expert_parameters
            share = (np.ceil(missing / sizes.streamed_layers / row) + 1) * row / sizes.layer_expert_bytes
            if share > 1 or share * sizes.streamed_bytes > use["disk"].limit_bytes:
                reason = f"{missing / 2**30:.1f} GiB over CPU memory at a batch of {n}"
                continue
            policy = replace(policy, weights_on_disk=float(share))
        prediction = cpu_only_prediction(scenario, sizes, rates, policy)
        if prediction.batch_s > max_seconds:
            reason = f"a batch of {n} takes {prediction.batch_s / 3600:.0f} hours"
            continue
        seconds = prediction.num_batches * prediction.batch_s
        if best is None or seconds < best[0]:
            best = (seconds, policy, prediction)
    if best is None:
        return Trivial(name="CPU only", reason=reason or "does not fit CPU memory and disk")
    return Trivial(name="CPU only", policy=best[1], prediction=best[2])


def _cpu_only_memory(scenario: Scenario, sizes: Sizes, policy: Policy) -> dict[str, MemoryUse]:
    """CPU bytes when nothing is on the GPU."""
    model, value = scenario.model, scenario.formats.activation_bytes
    n = float(policy.batch_size)
    prompts = float(scenario.workload.batch_tokens(policy.batch_size))
    micro = policy.prefill_micro_batch_size * float(scenario.workload.max_prompt_tokens)
    width = 2 * model.hidden_size + model.streamed_top_k * (2 * model.hidden_size + model.mlp_matrices * model.streamed_ffn)
    on_disk = policy.weights_on_disk * sizes.streamed_bytes
    terms = {
        "expert weights": sizes.streamed_bytes - on_disk,
        "non-expert weights": sizes.dense_bytes,
        "embedding": sizes.embedding_bytes,
        "lm_head": 0.0 if sizes.tied else sizes.lm_head_bytes,
        "KV cache": float(kv_capacity_bytes(scenario, sizes, n)),
        "hidden states of all prompts": prompts * model.hidden_size * value,
        "activations": max(micro * width * value, n * (width * value + 8.0 * model.vocab_size)),
    }
    cpu = scenario.profile.cpu
    disk = scenario.profile.disk
    return {
        "gpu": MemoryUse(
            peak_bytes=0.0,
            limit_bytes=scenario.profile.gpu.count * scenario.profile.gpu.usable_memory_bytes,
            terms={},
            phase="always",
        ),
        "cpu": MemoryUse(
            peak_bytes=sum(terms.values()),
            limit_bytes=cpu.memory_bytes - cpu.reserved_bytes,
            terms=terms,
            phase="prefill",
        ),
        "disk": MemoryUse(
            peak_bytes=on_disk,
            limit_bytes=disk.size_bytes if disk else 0.0,
            terms={"expert weights": on_disk} if on_disk else {},
            phase="always",
        ),
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
        prefill=prefill,
        startup_s=startup_seconds(scenario, sizes, rates, policy),
        memory=_cpu_only_memory(scenario, sizes, policy),
    )


def _cpu_pass(scenario: Scenario, sizes: Sizes, rates: Rates, policy: Policy, *, prefill: bool) -> Phase:
    model, formats = scenario.model, scenario.formats
    n = float(policy.batch_size)
    parts = float(-(-policy.batch_size // policy.prefill_micro_batch_size)) if prefill else 1.0
    tokens = n * sizes.prompt_tokens / parts if prefill else n

    def seconds(work: cost.Work) -> float:
        return float(rates.cpu_seconds(work))

    busy = sum(layers * seconds(work) for _, layers, work in cost.layer_operators(model, formats, tokens))
    if prefill:
        for kind in model.layer_kinds:
            pairs = n / parts * sizes.prompt_pairs_by_window[kind.window]
            busy += kind.count * seconds(cost.attention_prefill(model, formats, tokens, pairs))
        busy += seconds(cost.lm_head(model, formats, n / parts))
    else:
        read = n * sizes.kv_read_bytes_per_request
        per_byte = cost.attention_decode_per_kv_byte(model, formats, sizes.kv_read_bytes_per_request)
        busy += read * float(rates.cpu_attention_seconds(per_byte))
        busy += seconds(cost.lm_head(model, formats, n))
    busy *= parts
    disk_bytes = policy.weights_on_disk * sizes.streamed_bytes
    disk = disk_bytes / rates.disk_read_bytes_per_s if disk_bytes else 0.0
    lanes = {"cpu": busy, "disk": disk}
    bottleneck = max(lanes, key=lambda lane: lanes[lane])
    return Phase(seconds=lanes[bottleneck], lanes=lanes, bytes_moved={"disk": disk_bytes}, bottleneck=bottleneck)
