"""What Eq. 12 leaves out, by how much: pieces of the full cost model, each left out of a row, and what that costs.

Each term takes one piece of a `Run` back to what Eq. 12 has for it. With all of them left out a row is priced as Eq. 12
prices it, in this model's counting: decode alone, datasheet peaks, the busiest lane. Switched on in turn they lead to
the full model; and each is left out of the full model alone, since what a term does depends on those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hrm.errors import HrmError
from hrm.profile import Efficiency, HardwareProfile, HostTotals, LinkDirection
from hrm.published.constants import Values
from hrm.published.model import Run, price_run, run_of_row
from hrm.published.rows import Row
from hrm.published.scores import quantile

__all__ = ["ALL_TERMS", "TERMS", "Term", "at_peaks", "priced_without", "term_errors"]

MOVED = 0.01
"""A row that a term changes by more than this counts as one it touches."""

NOTHING_IN_THE_WAY = 1e18
"""A rate that never binds [byte/s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One piece of the model.

    Attributes
    ----------
    key, words : str
    leave_out : callable
        Takes a run back to what Eq. 12 has.
    """

    key: str
    words: str
    leave_out: Callable[[Run], Run]


def _with_profile(run: Run, change: Callable[[HardwareProfile], HardwareProfile]) -> Run:
    return replace(run, scenario=replace(run.scenario, profile=change(run.scenario.profile)))


def _with_efficiency(run: Run, **shares: float) -> Run:
    return _with_profile(run, lambda profile: replace(profile, efficiency=replace(profile.efficiency, **shares)))


def _same(run: Run) -> Run:
    return run


def _no_staging(run: Run) -> Run:
    return replace(run, policy=replace(run.policy, pin_weights=True))


def _peak_flops(run: Run) -> Run:
    return _with_efficiency(run, gpu_flops_prefill=1.0, gpu_flops_decode=1.0)


def _peak_bandwidth(run: Run) -> Run:
    return _with_efficiency(run, gpu_bandwidth=1.0)


def _flops_hide(run: Run) -> Run:
    return _with_efficiency(run, gpu_overlap=1.0)


def _all_of_dram(run: Run) -> Run:
    return _with_efficiency(run, cpu_attention=1.0)


def _own_copies_at_link(run: Run) -> Run:
    return _with_efficiency(run, link=1.0) if run.behaviour.own_copy_path else run


def _links_add_up(run: Run) -> Run:
    if run.behaviour.own_copy_path:
        return run
    return _with_profile(_with_efficiency(run, link=1.0), lambda profile: replace(profile, host_totals=HostTotals()))


def _lanes_overlap(run: Run) -> Run:
    return replace(run, behaviour=replace(run.behaviour, overlaps=True))


def _tensor_parallel(run: Run) -> Run:
    return replace(run, policy=replace(run.policy, parallelism="tensor"))


def _no_gathering(run: Run) -> Run:
    return replace(run, behaviour=replace(run.behaviour, gathers_weights=False))


def _no_overheads(run: Run) -> Run:
    run = _with_efficiency(run, overhead_per_micro_batch_s=0.0)
    return _with_profile(
        run, lambda profile: replace(profile, launch_latency_s=0.0, link=replace(profile.link, copy_latency_s=0.0))
    )


def _mean_prompts(run: Run) -> Run:
    workload = run.scenario.workload
    mean = max(1, round(workload.mean_prompt_tokens))
    return replace(run, scenario=replace(run.scenario, workload=replace(workload, prompt_lengths=(mean,))))


def _directions_apart(run: Run) -> Run:
    def alone(direction: LinkDirection) -> LinkDirection:
        return replace(direction, with_opposite_bytes_per_s=direction.pinned_bytes_per_s)

    def change(profile: HardwareProfile) -> HardwareProfile:
        link = profile.link
        h2d, d2h = alone(link.host_to_device), alone(link.device_to_host)
        return replace(profile, link=replace(link, host_to_device=h2d, device_to_host=d2h))

    return _with_profile(run, change)


def _free_all_reduce(run: Run) -> Run:
    return _with_profile(run, lambda profile: replace(profile, gpu_link_bytes_per_s=NOTHING_IN_THE_WAY))


TERMS = (
    Term(key="prefill", words="prefill", leave_out=_same),
    Term(key="staging", words="staging copy of pageable weights", leave_out=_no_staging),
    Term(key="flops", words="share of the GPU's peak that layers reach", leave_out=_peak_flops),
    Term(key="adding", words="FLOPs and bytes of a layer add up on the GPU", leave_out=_flops_hide),
    Term(key="bandwidth", words="share of GPU memory bandwidth", leave_out=_peak_bandwidth),
    Term(key="cpu_attention", words="CPU attention at its own rate", leave_out=_all_of_dram),
    Term(key="host", words="GPUs share their host's link", leave_out=_links_add_up),
    Term(key="all_reduce", words="all-reduce through the host", leave_out=_free_all_reduce),
    Term(key="directions", words="both directions of the link disturb each other", leave_out=_directions_apart),
    Term(key="overheads", words="launches, copy latency, overhead per micro-batch", leave_out=_no_overheads),
    Term(key="lengths", words="real prompt lengths, not their mean", leave_out=_mean_prompts),
    Term(key="copies", words="FlexGen: its own copy path", leave_out=_own_copies_at_link),
    Term(key="sums", words="FlexGen: copies and kernels take turns", leave_out=_lanes_overlap),
    Term(key="pipeline", words="FlexGen: layers split over GPUs, not each layer", leave_out=_tensor_parallel),
    Term(key="gathering", words="DeepSpeed: every GPU gathers all weights", leave_out=_no_gathering),
)
"""In the order in which they are switched on."""

ALL_TERMS = frozenset(term.key for term in TERMS)


def priced_without(row: Row, values: Values, left_out: frozenset[str]) -> float:
    """Throughput of a row by the full cost model without some of its terms [token/s].

    Raises
    ------
    InputError, InfeasibleError
        The row cannot be predicted; the message says why.
    """
    run = run_of_row(row, values)
    for term in TERMS:
        if term.key in left_out:
            run = term.leave_out(run)
    found = price_run(run)
    if "prefill" in left_out and found.decode_s > 0:
        return run.policy.batch_size * run.scenario.workload.generation_length / found.decode_s
    return found.tokens_per_s


def at_peaks(run: Run) -> Run:
    """The same policy on datasheet peaks, as a profile without efficiencies has them; nothing of the system's own."""
    behaviour = replace(run.behaviour, overlaps=True, gathers_weights=False)
    changed = _with_profile(run, lambda profile: replace(profile, efficiency=Efficiency()))
    return replace(changed, behaviour=behaviour)


def term_errors(rows: Sequence[Row], values: Values) -> list[dict[str, Any]]:
    """Median error with and without each term.

    Parameters
    ----------
    rows : sequence of Row
        Those that were measured and can be predicted are used.
    values : mapping of str to float
        Constants by name.

    Returns
    -------
    list of dict
        ``term``, ``key``; ``error_without`` and ``error_with``: medians over all rows, the terms before it switched on
        and those after it not; ``error_left_out``: of the full model without this term alone; ``rows``: how many the
        term touches, and over those ``touched_left_out`` and ``touched_full``.
    """
    usable = [row for row in rows if row.measured_tokens_per_s is not None and _can_be_priced(row, values)]
    if not usable:
        return []
    full = _ratios(usable, values, frozenset())
    left_out = set(ALL_TERMS)
    before = _ratios(usable, values, frozenset(left_out))
    entries = []
    for term in TERMS:
        left_out.discard(term.key)
        after = _ratios(usable, values, frozenset(left_out))
        alone = _ratios(usable, values, frozenset([term.key]))
        touched = [index for index, ratio in enumerate(alone) if abs(ratio / full[index] - 1.0) > MOVED]
        entries.append(
            {
                "key": term.key,
                "term": term.words,
                "error_without": _median_error(before),
                "error_with": _median_error(after),
                "error_left_out": _median_error(alone),
                "rows": len(touched),
                "touched_left_out": _median_error([alone[index] for index in touched]) if touched else None,
                "touched_full": _median_error([full[index] for index in touched]) if touched else None,
            }
        )
        before = after
    return entries


def _can_be_priced(row: Row, values: Values) -> bool:
    try:
        run_of_row(row, values)
    except HrmError:
        return False
    return True


def _ratios(rows: Sequence[Row], values: Values, left_out: frozenset[str]) -> list[float]:
    """Predicted over measured."""
    return [priced_without(row, values, left_out) / (row.measured_tokens_per_s or 1.0) for row in rows]


def _median_error(ratios: Sequence[float]) -> float:
    return quantile([abs(ratio - 1.0) for ratio in ratios], 0.5)
