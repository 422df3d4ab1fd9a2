"""The policy a row ran under, as far as it was published; what was not is resolved here or by the caller.

The share of the weights on the GPU (r_w) is part of what ran. Where no script fixes it, it is what the authors'
planner fills in: as much as its own limit of GPU memory leaves (`hrm.paper_cost`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hrm.affine import total
from hrm.errors import InfeasibleError, InputError
from hrm.paper_cost import WEIGHTS_ON_GPU, PaperTerms, paper_terms
from hrm.policy import Policy
from hrm.prediction import memory_use
from hrm.published.rows import Row
from hrm.published.settings import find_setting, find_system, scenario_of
from hrm.scenario import Scenario, measure_sizes
from hrm.units import GIB

__all__ = [
    "PolicyOf",
    "RowPolicy",
    "largest_streaming_batch",
    "published_policy",
    "streaming_policy_of",
    "weights_share_of_planner",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPolicy:
    """What ran.

    Attributes
    ----------
    batch_size, micro_batch_size, num_micro_batches : int
        N, mu, n_ub, with mu*(n_ub-1) < N <= mu*n_ub.
    attention_on_gpu : bool
        A_g. The experts are on the GPU in every published run (F_g = 1).
    weights_on_gpu, kv_on_gpu : float
        r_w and r_c, shares.
    note : str
        What was resolved here and not published.
    """

    batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    attention_on_gpu: bool
    weights_on_gpu: float
    kv_on_gpu: float
    note: str = ""


PolicyOf = Callable[[Row], RowPolicy]
"""Resolver: the policy of a row. Raises InputError or InfeasibleError with the reason where it has none."""


def published_policy(row: Row) -> RowPolicy:
    """The policy of a row from what was published of it.

    mu and n_ub as given, N as given, else mu*n_ub. DeepSpeed has one micro-batch, no resident weights and its whole KV
    cache on the GPU; where its N is blank it is the largest that fits the modelled GPU memory, and the note says so.

    Raises
    ------
    InputError
        Unknown setting or system, or a micro-batch that was not published.
    InfeasibleError
        Not one request fits the GPU memory modelled for DeepSpeed.
    """
    system = find_system(row)
    find_setting(row)
    if system.schedule == "streaming":
        return _streaming_policy(row)
    mu, n_ub, n = row.micro_batch_size, row.num_micro_batches, row.batch_size
    notes = []
    if mu is None:
        raise InputError("its micro-batch was not published", where=row.id, way_out="let the planner choose for its N")
    if n_ub is None:
        if n is None:
            raise InputError("its batch was not published", where=row.id, way_out="let the planner choose")
        n_ub = -(-n // mu)
        notes.append(f"n_ub = {n_ub} from N and mu")
    if n is None:
        n = mu * n_ub
    if not mu * (n_ub - 1) < n <= mu * n_ub:
        n_ub = -(-n // mu)
        notes.append(f"{n} requests make {n_ub} micro-batches of {mu}, not {row.num_micro_batches}")
    share = row.weights_on_gpu
    if share is None:
        share, note = weights_share_of_planner(row, mu, n)
        notes.append(note)
    return RowPolicy(
        batch_size=n,
        micro_batch_size=mu,
        num_micro_batches=n_ub,
        attention_on_gpu=system.attention_on_gpu,
        weights_on_gpu=share,
        kv_on_gpu=0.0,
        note="; ".join(notes),
    )


def _streaming_policy(row: Row) -> RowPolicy:
    n, note = row.batch_size or row.micro_batch_size, ""
    if n is None:
        n = largest_streaming_batch(scenario_of(row))
        note = f"N = {n}, the largest that fits the modelled GPU memory"
    return RowPolicy(
        batch_size=n,
        micro_batch_size=n,
        num_micro_batches=1,
        attention_on_gpu=True,
        weights_on_gpu=row.weights_on_gpu or 0.0,
        kv_on_gpu=1.0,
        note=note,
    )


def weights_share_of_planner(row: Row, micro_batch_size: int, batch_size: int) -> tuple[float, str]:
    """r_w that fills the GPU memory the authors' planner allows (0.86 of the card), and a note that says so."""
    terms = paper_terms(scenario_of(row, profile=find_setting(row).authors_profile, num_requests=batch_size))
    share = _room_for_weights(terms, float(micro_batch_size), float(batch_size))
    if share < 0:
        return 0.0, "r_w = 0: the policy breaks the GPU memory limit of the authors' planner"
    return share, f"r_w = {share:.4g} by the authors' planner"


def _room_for_weights(terms: PaperTerms, mu: float, n: float) -> float:
    rows = [total(terms.gpu_memory(mu, n, phase=phase).values()) for phase in ("prefill", "decode")]
    room = [(terms.gpu_limit_bytes - float(each.constant)) / float(each.coefficient(WEIGHTS_ON_GPU)) for each in rows]
    return min(1.0, *room)


def streaming_policy_of(scenario: Scenario, batch_size: int) -> Policy:
    """DeepSpeed ZeRO-Inference: every weight streamed, one micro-batch in prefill and decode, KV cache on the GPU."""
    return Policy(
        batch_size=batch_size,
        micro_batch_size=batch_size,
        num_micro_batches=1,
        prefill_micro_batch_size=batch_size,
        attention_on_gpu=True,
        ffn_on_gpu=True,
        kv_on_gpu=1.0,
        weight_slots=2,
        dense_weights_on_gpu=False,
        embedding_on_gpu=False,
        lm_head_on_gpu=False,
        micro_batch_token_budget=batch_size * scenario.workload.max_request_tokens,
    )


def largest_streaming_batch(scenario: Scenario) -> int:
    """Largest N whose streaming policy fits the modelled GPU memory (`hrm.memory`).

    Raises
    ------
    InfeasibleError
        Not even one request fits.
    """
    sizes = measure_sizes(scenario)

    def missing(batch_size: int) -> float:
        use = memory_use(scenario, sizes, streaming_policy_of(scenario, batch_size))["gpu"]
        return 0.0 if use.fits else use.peak_bytes - use.limit_bytes

    if missing(1) > 0:
        raise InfeasibleError(
            f"streaming {scenario.model.name} on {scenario.profile.name}: one request exceeds the GPU memory by "
            f"{missing(1) / GIB:.2f} GiB",
            limit="gpu_memory",
            missing_bytes=missing(1),
        )
    fits, fails = 1, 2
    while missing(fails) == 0.0:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if missing(middle) == 0.0:
            fits = middle
        else:
            fails = middle
    return fits
