"""Where the time of a row goes: seconds of the lane that sets each pass, or of all where they take turns.

The GPU's seconds are divided further, into what FLOPs, memory and launches take, by pricing the row with one of them
free. Where FLOPs and bytes overlap, memory is what is left of the lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hrm.published.constants import Values
from hrm.published.model import FullRow, Run, price_run, run_of_row
from hrm.published.rows import Row

__all__ = ["PARTS", "time_shares"]

PARTS = (
    "GPU FLOPs",
    "GPU memory",
    "launches and overhead",
    "CPU",
    "link, to the GPU",
    "link, from the GPU",
    "staging copy",
    "waits",
)
"""What the time of a phase is made of, in the order it is shown; prefill first, then decode."""

LANES = {
    "cpu": "CPU",
    "host_to_device": "link, to the GPU",
    "device_to_host": "link, from the GPU",
    "staging": "staging copy",
}

FREE = 1e9
"""A share of peak that makes what it belongs to take no time."""


def time_shares(row: Row, values: Values) -> dict[str, float]:
    """Share of each part in the time of a row, ``phase: part``; they add up to 1.

    Raises
    ------
    InputError, InfeasibleError
        The row cannot be predicted; the message says why.
    """
    run = run_of_row(row, values)
    found = price_run(run)
    free = {"GPU FLOPs": price_run(_without_flops(run)), "launches and overhead": price_run(_without_launches(run))}
    whole = found.prefill_s + found.decode_s
    shares: dict[str, float] = {}
    for phase in ("prefill", "decode"):
        seconds = _parts(found, free, phase, overlaps=run.behaviour.overlaps)
        shares |= {f"{phase}: {part}": seconds[part] / whole for part in PARTS if seconds.get(part, 0.0) > 0.0}
    return shares


def _parts(found: FullRow, free: Mapping[str, FullRow], phase: str, *, overlaps: bool) -> dict[str, float]:
    """Seconds of a phase by part."""
    lanes, total = _phase(found, phase)
    shown = lanes if not overlaps else {lane: lanes[lane] for lane in [max(lanes, key=lambda each: lanes[each])]}
    parts: dict[str, float] = {}
    for lane, seconds in shown.items():
        if lane != "gpu":
            parts[LANES.get(lane, lane)] = seconds
            continue
        rest = seconds
        for part, without in free.items():
            saved = max(0.0, min(rest, seconds - _phase(without, phase)[0]["gpu"]))
            parts[part], rest = saved, rest - saved
        parts["GPU memory"] = rest
    waits = total - sum(parts.values())
    if waits > 1e-9 * total:
        parts["waits"] = waits
    return parts


def _phase(found: FullRow, phase: str) -> tuple[Mapping[str, float], float]:
    if phase == "prefill":
        return found.prefill_lanes, found.prefill_s
    return found.decode_lanes, found.decode_s


def _without_flops(run: Run) -> Run:
    profile = run.scenario.profile
    shares = replace(profile.efficiency, gpu_flops_prefill=FREE, gpu_flops_decode=FREE)
    return replace(run, scenario=replace(run.scenario, profile=replace(profile, efficiency=shares)))


def _without_launches(run: Run) -> Run:
    profile = run.scenario.profile
    shares = replace(profile.efficiency, overhead_per_micro_batch_s=0.0)
    changed = replace(profile, efficiency=shares, launch_latency_s=0.0)
    return replace(run, scenario=replace(run.scenario, profile=changed))
