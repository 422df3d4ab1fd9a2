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
from hrm.published.rows import Row
from hrm.published.settings import find_setting, find_system, scenario_of
from hrm.scenario import Scenario, measure_sizes
from hrm.units import GIB

__all__ = [
    "PolicyOf",
    "RowPolicy",
    "largest_streaming_batch",
    "published_policy",
    "room_for_weights",
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
    share = room_for_weights(terms, float(micro_batch_size), float(batch_size))
    if share < 0:
        return 0.0, "r_w = 0: the policy breaks the GPU memory limit of the authors' planner"
    return share, f"r_w = {share:.4g} by the authors' planner"


def room_for_weights(terms: PaperTerms, mu: float, n: float) -> float:
    """Share of the expert weights that the authors' GPU memory limit leaves room for; below 0 the policy breaks it."""
    rows = [total(terms.gpu_memory(mu, n, phase=phase).values()) for phase in ("prefill", "decode")]
    room = [(terms.gpu_limit_bytes - float(each.constant)) / float(each.coefficient(WEIGHTS_ON_GPU)) for each in rows]
    return min(1.0, *room)


def largest_streaming_batch(scenario: Scenario) -> int:
    """Largest N that DeepSpeed's GPU memory holds, by what the plain model code keeps there.

    Two layers of weights, embedding and lm_head, the CUDA context; per request the KV cache when it ends, and in
    prefill either the logits of every position or the attention scores of one layer, whichever is more, each once in
    16 bit and once in 32. Every GPU of several computes its own part of the batch with the whole of each layer.

    Raises
    ------
    InfeasibleError
        Not even one request fits.
    """
    model, gpu = scenario.model, scenario.profile.gpu
    sizes = measure_sizes(scenario)
    tables = sizes.embedding_bytes + (0.0 if sizes.tied else sizes.lm_head_bytes)
    held = 2.0 * (sizes.layer_expert_bytes + sizes.largest_dense_layer_bytes) + tables + gpu.context_bytes
    prompt, longest = scenario.workload.max_prompt_tokens, scenario.workload.max_request_tokens
    wide = scenario.formats.activation_bytes + 4.0
    in_prefill = wide * prompt * max(model.vocab_size, model.n_heads * prompt)
    each = float(model.kv_bytes_stored(longest, scenario.formats.kv)) + in_prefill
    room = gpu.usable_memory_bytes - held
    if room < each:
        raise InfeasibleError(
            f"streaming {model.name} on {scenario.profile.name}: one request exceeds the GPU memory by "
            f"{(each - room) / GIB:.2f} GiB",
            limit="gpu_memory",
            missing_bytes=each - room,
        )
    return gpu.count * int(room / each)
