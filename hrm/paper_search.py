"""Policy search on the paper's own terms: every integer mu, n_ub as an integer unknown, Dinkelbach for the ratio.

The objective is N*n / ((n-1)*L*T) (decode only). For a given mu, A_g and F_g it is the ratio n_ub / T of two linear
functions; Dinkelbach's method maximises n_ub - lambda*T and raises lambda to the ratio found until nothing is gained,
which is then the optimum. A closed form of the inner problem (weights first, then KV cache: a byte of weights on the
GPU saves the link more, always) orders the micro-batches and discards those that cannot win.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from hrm.affine import Affine, total
from hrm.errors import InfeasibleError, InputError
from hrm.paper_cost import KV_ON_GPU, WEIGHTS_ON_GPU, PaperTerms, paper_terms
from hrm.pins import Pins, option_name
from hrm.policy import Policy
from hrm.prediction import MemoryUse, Phase, Prediction
from hrm.program import Program
from hrm.scenario import Scenario
from hrm.units import GIB

__all__ = ["PaperResult", "find_paper_policy"]

GAP = 1e-6
MICRO_BATCHES = "num_micro_batches"
LAYER_S = "layer_s"
Array = npt.NDArray[np.float64]
PINNABLE = {
    "batch_size",
    "micro_batch_size",
    "num_micro_batches",
    "attention_on_gpu",
    "ffn_on_gpu",
    "weights_on_gpu",
    "kv_on_gpu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperResult:
    """Best policy on the paper's terms.

    Attributes
    ----------
    policy : Policy
    prediction : Prediction
        Prefill, start-up and completion are NaN: they are not in the paper's model.
    gap, seconds : float
        Proven relative gap; time of the search [s].
    points_bounded, programs_solved : int
    """

    policy: Policy
    prediction: Prediction
    gap: float
    seconds: float
    points_bounded: int
    programs_solved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    attention_on_gpu: bool
    ffn_on_gpu: bool


def find_paper_policy(scenario: Scenario, pins: Pins | None = None) -> PaperResult:
    """Find the policy with the highest decode throughput by Eqs. 12-14.

    Raises
    ------
    InfeasibleError
        No policy keeps the planner's limits; the message says by how much the smallest one breaks them.
    InputError
        A variable that the paper's model does not have is pinned.
    """
    started = time.perf_counter()
    pins = pins or Pins()
    for key in pins.given:
        if key not in PINNABLE:
            raise InputError(
                "the paper's model has no such variable", where=option_name(key), way_out="--cost-model full"
            )
    if scenario.workload.generation_length < 2:
        raise InputError("the paper's objective needs at least 2 generated tokens", where="--gen-len")
    terms = paper_terms(scenario)
    if pins.ffn_on_gpu is False and pins.weights_on_gpu:
        raise InputError("with the FFN on the CPU no expert weights stay on the GPU", where="--weights-on-gpu")
    ranked: list[tuple[float, int, _Side]] = []
    points = 0
    for attention, ffn in product(_choices(pins.attention_on_gpu), _choices(pins.ffn_on_gpu)):
        side = _Side(attention_on_gpu=attention, ffn_on_gpu=ffn)
        found, tried = _rank(terms, side, pins)
        ranked += [(rate, mu, side) for mu, rate in found]
        points += tried
    ranked.sort(key=lambda entry: -entry[0])
    best_rate, best = 0.0, None
    solved = 0
    for bound, mu, side in ranked:
        if bound <= best_rate * (1.0 + GAP):
            break
        rate, values, count = _dinkelbach(terms, side, pins, mu, start=max(best_rate, bound * (1.0 - 1e-3)))
        solved += count
        if values is not None and rate > best_rate:
            best_rate, best = rate, (mu, side, values)
    if best is None:
        raise _infeasible(scenario, terms, pins)
    mu, side, values = best
    policy, prediction = _realise(scenario, terms, side, mu, values)
    return PaperResult(
        policy=policy,
        prediction=prediction,
        gap=2 * GAP,
        seconds=time.perf_counter() - started,
        points_bounded=points,
        programs_solved=solved,
    )


def _choices(pinned: bool | None) -> tuple[bool, ...]:
    return (True, False) if pinned is None else (pinned,)


def _most_micro_batch(terms: PaperTerms) -> int:
    """Largest micro-batch whose activations alone could fit the GPU."""
    least = total(terms.gpu_memory(1.0, 1.0, phase="prefill").values())
    base = total(terms.gpu_memory(0.0, 0.0, phase="prefill").values())
    each = float(least.at({})) - float(base.at({}))
    return max(1, int((terms.gpu_limit_bytes - float(base.constant) + 2.0 * terms.weights_layer) / each) + 1)


def _rank(terms: PaperTerms, side: _Side, pins: Pins) -> tuple[list[tuple[int, float]], int]:
    """Best N/T of each micro-batch by the closed form, and how many points were looked at."""
    if pins.micro_batch_size is not None:
        sizes = np.array([pins.micro_batch_size], dtype=np.float64)
    else:
        sizes = np.arange(1, _most_micro_batch(terms) + 1, dtype=np.float64)
    found: list[tuple[int, float]] = []
    points = 0
    for mu in sizes:
        if pins.num_micro_batches is not None:
            counts = np.array([pins.num_micro_batches], dtype=np.float64)
        elif pins.batch_size is not None:
            counts = np.array([pins.batch_size / mu])
            if counts[0] != int(counts[0]):
                continue
        else:
            counts = np.arange(1, _most_micro_batches(terms, mu) + 1, dtype=np.float64)
        if pins.batch_size is not None:
            counts = counts[counts * mu == pins.batch_size]
        points += counts.size
        if counts.size == 0:
            continue
        seconds = _closed_form(terms, side, pins, mu, counts)
        rate = float(np.max(np.where(np.isfinite(seconds), mu * counts / seconds, 0.0)))
        if rate > 0:
            found.append((int(mu), rate))
    return found, points


def _most_micro_batches(terms: PaperTerms, mu: float) -> int:
    """Largest n_ub that memory of both levels together could hold."""
    each = mu * terms.kv_request_bytes()
    both = terms.cpu_limit_bytes + terms.gpu_limit_bytes
    return max(1, int(both / each) + 1)


def _closed_form(terms: PaperTerms, side: _Side, pins: Pins, mu: float, counts: Array) -> Array:
    """Least T for each n_ub, infinite where nothing fits: as much of the weights on the GPU as fits, then KV cache."""
    requests = mu * counts
    r_w = np.ones_like(counts) if side.ffn_on_gpu else np.zeros_like(counts)
    rows = [total(terms.gpu_memory(mu, requests, phase=phase).values()) for phase in ("prefill", "decode")]
    if pins.weights_on_gpu is not None:
        r_w = np.full_like(counts, pins.weights_on_gpu)
    else:
        for row in rows:
            r_w = np.minimum(r_w, (terms.gpu_limit_bytes - row.constant) / row.coefficient(WEIGHTS_ON_GPU))
    feasible = r_w >= -1e-12
    r_w = np.maximum(r_w, 0.0)
    kv = requests if side.attention_on_gpu else np.zeros_like(counts)
    if pins.kv_on_gpu is not None:
        kv = pins.kv_on_gpu * requests
    else:
        for row in rows:
            left = terms.gpu_limit_bytes - row.constant - row.coefficient(WEIGHTS_ON_GPU) * r_w
            kv = np.minimum(kv, np.maximum(left, 0.0) / row.coefficient(KV_ON_GPU))
    for row in rows:
        used = row.constant + row.coefficient(WEIGHTS_ON_GPU) * r_w + row.coefficient(KV_ON_GPU) * kv
        feasible &= used <= terms.gpu_limit_bytes * (1 + 1e-9)
    host = total(terms.cpu_memory(requests).values())
    used = host.constant + host.coefficient(WEIGHTS_ON_GPU) * r_w + host.coefficient(KV_ON_GPU) * kv
    feasible &= used <= terms.cpu_limit_bytes * (1 + 1e-9)
    sides = {"attention_on_gpu": side.attention_on_gpu, "ffn_on_gpu": side.ffn_on_gpu}
    link = terms.link_seconds(requests, **sides)
    seconds = np.maximum(
        link.constant + link.coefficient(WEIGHTS_ON_GPU) * r_w + link.coefficient(KV_ON_GPU) * kv,
        counts
        * np.maximum(terms.gpu_seconds_per_micro_batch(mu, **sides), terms.cpu_seconds_per_micro_batch(mu, **sides)),
    )
    return np.where(feasible, seconds, np.inf)


def _dinkelbach(
    terms: PaperTerms, side: _Side, pins: Pins, mu: int, *, start: float
) -> tuple[float, dict[str, float] | None, int]:
    """Maximise N/T for one mu: (ratio [requests/s], values or None, programs solved)."""
    rate, values = start / mu, None
    for count in range(1, 51):
        program = _program(terms, side, pins, mu)
        solution = program.minimise(Affine.of(LAYER_S, rate) - Affine.of(MICRO_BATCHES))
        if solution.status == "infeasible":
            return 0.0, None, count
        ratio = solution.values[MICRO_BATCHES] / solution.values[LAYER_S]
        gained = -solution.objective
        if values is None or ratio * mu > rate * mu:
            values = solution.values
        if gained <= GAP * rate * solution.values[LAYER_S]:
            break
        rate = ratio
    assert values is not None
    return values[MICRO_BATCHES] / values[LAYER_S] * mu, values, count


def _program(terms: PaperTerms, side: _Side, pins: Pins, mu: int) -> Program:
    """The program for one mu, A_g, F_g: n_ub, r_w, KV requests on the GPU, T."""
    program = Program(f"paper, mu={mu}")
    most = float(_most_micro_batches(terms, mu))
    counts = (1.0, most) if pins.num_micro_batches is None else (float(pins.num_micro_batches),) * 2
    if pins.batch_size is not None:
        counts = (float(pins.batch_size // mu),) * 2
    program.add_unknown(MICRO_BATCHES, *counts, integer=True)
    shares = (0.0, 1.0 if side.ffn_on_gpu else 0.0) if pins.weights_on_gpu is None else (pins.weights_on_gpu,) * 2
    program.add_unknown(WEIGHTS_ON_GPU, *shares)
    program.add_unknown(KV_ON_GPU, 0.0, counts[1] * mu if side.attention_on_gpu else 0.0)
    program.add_unknown(LAYER_S)
    requests = Affine.of(MICRO_BATCHES, float(mu))
    program.at_most("kv_cache", Affine.of(KV_ON_GPU), requests)
    if pins.kv_on_gpu is not None:
        program.equal("kv_share", Affine.of(KV_ON_GPU) - requests * pins.kv_on_gpu, 0.0)
    for phase in ("prefill", "decode"):
        row = _in_requests(lambda n, p=phase: total(terms.gpu_memory(float(mu), n, phase=p).values()), mu)
        program.at_most(f"gpu_memory_{phase}", row, terms.gpu_limit_bytes, scale=1e9)
    row = _in_requests(lambda n: total(terms.cpu_memory(n).values()), mu)
    program.at_most("cpu_memory", row, terms.cpu_limit_bytes, scale=1e9)
    sides = {"attention_on_gpu": side.attention_on_gpu, "ffn_on_gpu": side.ffn_on_gpu}
    program.at_most("link", _in_requests(lambda n: terms.link_seconds(n, **sides), mu), Affine.of(LAYER_S))
    for name, seconds in (
        ("gpu", terms.gpu_seconds_per_micro_batch(float(mu), **sides)),
        ("cpu", terms.cpu_seconds_per_micro_batch(float(mu), **sides)),
    ):
        program.at_most(name, Affine.of(MICRO_BATCHES, float(seconds)), Affine.of(LAYER_S))
    return program


def _in_requests(formula: object, mu: int) -> Affine:
    """A formula that is affine in the number of requests N, with N = mu * n_ub as an unknown."""
    at_zero, at_one = formula(0.0), formula(1.0)  # type: ignore[operator]
    slope = float(at_one.constant) - float(at_zero.constant)
    return Affine(float(at_zero.constant), at_zero.coefficients) + Affine.of(MICRO_BATCHES, slope * mu)


def _realise(
    scenario: Scenario, terms: PaperTerms, side: _Side, mu: int, values: dict[str, float]
) -> tuple[Policy, Prediction]:
    """Policy and prediction of a solution; the least T its memory allows, as the closed form gives it."""
    count = int(values[MICRO_BATCHES])
    n = mu * count
    filled = Pins(micro_batch_size=mu, num_micro_batches=count)
    seconds, shares = _fill(terms, side, filled, mu, count, values)
    r_w, kv = shares
    sides = {"attention_on_gpu": side.attention_on_gpu, "ffn_on_gpu": side.ffn_on_gpu}
    point = {WEIGHTS_ON_GPU: r_w, KV_ON_GPU: kv}
    lanes = {
        "host_to_device": float(terms.link_seconds(float(n), **sides).at(point)),
        "gpu": count * float(terms.gpu_seconds_per_micro_batch(float(mu), **sides)),
        "cpu": count * float(terms.cpu_seconds_per_micro_batch(float(mu), **sides)),
    }
    bottleneck = max(lanes, key=lambda lane: lanes[lane])
    uses = {phase: terms.gpu_memory(float(mu), float(n), phase=phase) for phase in ("prefill", "decode")}
    by_phase = {phase: {name: float(t.at(point)) for name, t in use.items()} for phase, use in uses.items()}
    phase = max(by_phase, key=lambda p: sum(by_phase[p].values()))
    host = {name: float(t.at(point)) for name, t in terms.cpu_memory(float(n)).items()}
    steps, generated = terms.generated - 1.0, terms.generated
    step = Phase(
        seconds=seconds * terms.layers,
        lanes={lane: value * terms.layers for lane, value in lanes.items()},
        bytes_moved={"host_to_device": lanes["host_to_device"] * terms.link_bytes_per_s * terms.layers},
        bottleneck=bottleneck,
    )
    nan = float("nan")
    prediction = Prediction(
        prefill_s=nan,
        decode_s=steps * terms.layers * seconds,
        startup_s=nan,
        completion_s=nan,
        num_batches=1,
        throughput_tokens_per_s=n * generated / (steps * terms.layers * seconds),
        decode_throughput_tokens_per_s=n * generated / (steps * terms.layers * seconds),
        layer_latency_s=seconds,
        decode=step,
        prefill=Phase(seconds=nan, lanes={}, bytes_moved={}, bottleneck="not in the model"),
        memory={
            "gpu": MemoryUse(
                peak_bytes=sum(by_phase[phase].values()),
                limit_bytes=terms.gpu_limit_bytes,
                terms=by_phase[phase],
                phase=phase,
            ),
            "cpu": MemoryUse(
                peak_bytes=sum(host.values()), limit_bytes=terms.cpu_limit_bytes, terms=host, phase="always"
            ),
            "disk": MemoryUse(peak_bytes=0.0, limit_bytes=0.0, terms={}, phase="always"),
        },
    )
    policy = Policy(
        batch_size=n,
        micro_batch_size=mu,
        num_micro_batches=count,
        prefill_micro_batch_size=mu,
        attention_on_gpu=side.attention_on_gpu,
        ffn_on_gpu=side.ffn_on_gpu,
        weights_on_gpu=r_w,
        kv_on_gpu=min(1.0, kv / n),
        weight_slots=2,
        embedding_on_gpu=True,
        lm_head_on_gpu=True,
        dense_weights_on_gpu=True,
        pin_weights=False,
        micro_batch_token_budget=int(np.ceil(mu * (terms.prompt + terms.generated))),
    )
    return policy, prediction


def _fill(
    terms: PaperTerms, side: _Side, pins: Pins, mu: int, count: int, values: dict[str, float]
) -> tuple[float, tuple[float, float]]:
    """T and (r_w, KV requests) with GPU memory filled: the program may leave slack where another lane binds."""
    r_w, kv = values[WEIGHTS_ON_GPU], values[KV_ON_GPU]
    n = float(mu * count)
    rows = [total(terms.gpu_memory(float(mu), n, phase=phase).values()) for phase in ("prefill", "decode")]
    if side.ffn_on_gpu:
        room = min(
            (terms.gpu_limit_bytes - float(row.constant) - float(row.coefficient(KV_ON_GPU)) * kv)
            / float(row.coefficient(WEIGHTS_ON_GPU))
            for row in rows
        )
        r_w = max(0.0, min(1.0, room)) if r_w < room and r_w > 0 else r_w
    sides = {"attention_on_gpu": side.attention_on_gpu, "ffn_on_gpu": side.ffn_on_gpu}
    link = float(terms.link_seconds(n, **sides).at({WEIGHTS_ON_GPU: r_w, KV_ON_GPU: kv}))
    gpu = count * float(terms.gpu_seconds_per_micro_batch(float(mu), **sides))
    cpu = count * float(terms.cpu_seconds_per_micro_batch(float(mu), **sides))
    return max(link, gpu, cpu), (r_w, kv)


def _infeasible(scenario: Scenario, terms: PaperTerms, pins: Pins) -> InfeasibleError:
    """By how much the smallest policy that the pins allow breaks the limits."""
    mu = pins.micro_batch_size or 1
    count = pins.num_micro_batches or 1
    n = float(pins.batch_size or mu * count)
    r_w = 0.0
    rows = [total(terms.gpu_memory(float(mu), n, phase=phase).values()) for phase in ("prefill", "decode")]
    over = max(float(row.constant) for row in rows) - terms.gpu_limit_bytes
    where = f"mu = {mu}, n_ub = {count}, prompt {terms.prompt:.0f}, generation {terms.generated:.0f}"
    if pins.weights_on_gpu is not None:
        r_w = pins.weights_on_gpu
        over = max(float(row.at({WEIGHTS_ON_GPU: r_w})) for row in rows) - terms.gpu_limit_bytes
    if over > 0:
        return InfeasibleError(
            f"no policy fits the paper's limits: the GPU memory limit (0.86 of the card) is exceeded by "
            f"{over / GIB:.2f} GiB at {where}",
            limit="gpu_memory",
            missing_bytes=over,
        )
    if pins.weights_on_gpu is None and pins.ffn_on_gpu is not False:
        r_w = min(
            1.0, *((terms.gpu_limit_bytes - float(r.constant)) / float(r.coefficient(WEIGHTS_ON_GPU)) for r in rows)
        )
    host = float(total(terms.cpu_memory(n).values()).at({WEIGHTS_ON_GPU: r_w}))
    over = host - terms.cpu_limit_bytes
    return InfeasibleError(
        f"no policy fits the paper's limits: the CPU memory limit (0.8 of the host) is exceeded by "
        f"{over / GIB:.2f} GiB at {where}, with the largest share of the weights the GPU holds (r_w = {r_w:.4f}): "
        f"needs {host / GIB:.2f} of "
        f"{terms.cpu_limit_bytes / GIB:.2f} GiB",
        limit="cpu_memory",
        missing_bytes=over,
    )
