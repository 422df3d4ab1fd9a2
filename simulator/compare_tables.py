"""A comparison of schedules as tables, as one JSON document, and as timelines below each other (Figure 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hrm.errors import InputError
from hrm.gantt import draw_timelines
from hrm.policy import Policy
from hrm.prediction import MemoryUse
from hrm.units import GIB
from simulator.compare import BEST, Comparison, Entry
from simulator.replay_tables import bare_table
from simulator.summary import workload_in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

__all__ = ["comparison_document", "comparison_figure", "policy_in_words", "print_comparison", "winner_in_words"]

SYMBOLS: Mapping[str, str] = {
    "batch_size": "N",
    "num_micro_batches": "n_ub",
    "micro_batch_size": "mu",
    "attention_on_gpu": "A_g",
    "ffn_on_gpu": "F_g",
    "weights_on_gpu": "r_w",
    "weights_on_disk": "weights on disk",
    "kv_on_gpu": "r_c",
    "kv_on_disk": "KV on disk",
    "weight_slots": "weight slots",
}
"""Of the fields of a policy that a line of words has; others only in the JSON document."""

ALWAYS = ("batch_size", "num_micro_batches", "micro_batch_size", "attention_on_gpu", "ffn_on_gpu", "weights_on_gpu")

LEVEL_WORDS = {"gpu": "GPU memory", "cpu": "CPU memory", "disk": "the disk"}

EQUAL = 5e-4
"""Rates that differ by less are equal: a fast replay is no more accurate."""

LONGEST = 2.5
"""Times the shortest panel, where a figure of several is cut: the worst case would leave little room for the others."""


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """The comparison as one JSON document.

    Returns
    -------
    dict
        See docs/cli.md.
    """
    scenario, plan = comparison.scenario, comparison.plan
    return {
        "model": scenario.model.name,
        "hardware": scenario.profile.name,
        "workload": workload_in_words(scenario),
        "padded": scenario.workload.padded,
        "contention": comparison.contention,
        "policy": plan.policy.to_dict(),
        "schedule": plan.policy.schedule,
        "same_policy": [_row(entry, scenario.model.n_layers) for entry in comparison.same],
        "own_plan": [_row(entry, scenario.model.n_layers) for entry in comparison.own],
        "best": {
            "same_policy": _best_name(comparison.same),
            "own_plan": _best_name(comparison.own),
        },
    }


def _row(entry: Entry, num_layers: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "schedule": entry.schedule,
        "reason": entry.reason or None,
        "policy": None if entry.policy is None else entry.policy.to_dict(),
        "overrides": dict(entry.overrides),
        "fits": entry.fits,
        "over_bytes": entry.over_bytes,
        "memory": {},
        "predicted": None,
        "simulated": None,
    }
    prediction, replay = entry.prediction, entry.replay
    if prediction is None or replay is None:
        return row
    row["memory"] = {
        level: {"peak_bytes": use.peak_bytes, "limit_bytes": use.limit_bytes}
        for level, use in prediction.memory.items()
    }
    if entry.is_priced:
        row["predicted"] = {
            "throughput_tokens_per_s": prediction.throughput_tokens_per_s,
            "prefill_s": prediction.prefill_s,
            "decode_s": prediction.decode_s,
            "step_latency_s": prediction.decode.seconds,
            "layer_latency_s": prediction.layer_latency_s,
        }
    row["simulated"] = {
        "throughput_tokens_per_s": replay.throughput_tokens_per_s,
        "prefill_s": replay.prefill_s,
        "decode_s": replay.decode_s,
        "step_latency_s": replay.layer_latency_s * num_layers,
        "layer_latency_s": replay.layer_latency_s,
        "bubble_s": (replay.layer_latency_s - replay.bound_layer_latency_s) * num_layers,
        "bubble_share": entry.bubble_share or 0.0,
    }
    return row


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print both tables, what does not run and why, and which schedule is fastest."""
    from rich.markup import escape

    scenario, base = comparison.scenario, comparison.plan.policy
    shared = "with contention" if comparison.contention else "without contention"
    padding = "padded prompts" if scenario.workload.padded else "unpadded prompts"
    about = f"{scenario.model.name} on {scenario.profile.name}, {workload_in_words(scenario)}; simulated {shared}"
    console.print(escape(about))
    heads = (
        f"Same policy, the best plan's ({policy_in_words(base)}; schedule {base.schedule}), {padding}",
        f"Each schedule under the best plan of its own, {padding}",
    )
    for head, entries, own in zip(heads, (comparison.same, comparison.own), (False, True), strict=True):
        console.print()
        console.print(escape(head))
        shown = [entry for entry in entries if entry.replay is not None]
        if shown:
            console.print(_table(shown, own=own))
        for entry in entries:
            if entry.reason:
                console.print(escape(f"{entry.schedule}: no plan: {entry.reason}"))
        for line in winner_in_words(entries):
            console.print(escape(line))


def _table(entries: Sequence[Entry], *, own: bool) -> Table:
    heads = ["schedule", "predicted\ntoken/s", "simulated\ntoken/s", "s/layer", "bubble", "GPU\nGiB", "CPU\nGiB"]
    table = bare_table(*heads, *(("N", "n_ub x mu", "F_g", "r_w", "r_c", "KV on\ndisk") if own else ("fits",)))
    for column in table.columns:
        column.no_wrap = True
    if own:
        table.padding = (0, 0, 0, 1)  # closer together, so that all of them stand in a line
    else:
        table.add_column("instead", justify="left", ratio=1)
    for entry in entries:
        prediction, policy, replay, bubble = entry.prediction, entry.policy, entry.replay, entry.bubble_share
        assert prediction is not None and policy is not None and replay is not None  # it was simulated
        of_the_plan = (
            f"{policy.batch_size:,}",
            f"{policy.num_micro_batches:,} x {policy.micro_batch_size:,}",
            f"{policy.ffn_on_gpu:d}",
            _value(policy.weights_on_gpu),
            _value(policy.kv_on_gpu),
            _value(policy.kv_on_disk),
        )
        table.add_row(
            entry.schedule,
            f"{prediction.throughput_tokens_per_s:,.1f}" if entry.is_priced else "-",
            f"{entry.rate:,.1f}",
            "-" if bubble is None else f"{replay.layer_latency_s:.4g}",
            "-" if bubble is None else f"{bubble:.1%}",
            _gib(prediction.memory["gpu"]),
            _gib(prediction.memory["cpu"]),
            *(of_the_plan if own else ("yes" if entry.fits else "no", _instead(entry))),
        )
    return table


def _instead(entry: Entry) -> str:
    words = [overrides_in_words(entry.overrides).replace(" = ", "=") or "as it is"]  # short, so that lines break well
    words += [f"{size / GIB:,.2f} GiB over {LEVEL_WORDS[level]}" for level, size in entry.over_bytes.items()]
    return "; ".join(words)


def policy_in_words(policy: Policy) -> str:
    """The variables of Table 1 in one line, those on disk only where they are not zero."""
    if policy.everything_on_cpu:
        return f"N = {policy.batch_size:,}, everything on the CPU"
    parts = []
    for key, symbol in SYMBOLS.items():
        value = getattr(policy, key)
        if key in ALWAYS or (key == "weight_slots" and value != 2) or (key != "weight_slots" and value):
            parts.append(f"{symbol} = {_value(value)}")
    return ", ".join(parts)


def overrides_in_words(overrides: Mapping[str, Any]) -> str:
    """What of the policy a schedule needs otherwise; empty where nothing."""
    if overrides.get("everything_on_cpu"):
        return "everything on the CPU"
    return ", ".join(f"{SYMBOLS[key]} = {_value(value)}" for key, value in overrides.items() if key in SYMBOLS)


def _value(value: object) -> str:
    if isinstance(value, float):
        return "<0.001" if 0.0 < value < 0.0005 else f"{value:.3g}"
    return f"{int(value)}" if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)


def _gib(use: MemoryUse) -> str:
    return f"{use.peak_bytes / GIB:,.2f}"


def _best_name(entries: Sequence[Entry]) -> str | None:
    best = _best(entries)
    return None if best is None else best.schedule


def _best(entries: Sequence[Entry]) -> Entry | None:
    """The fastest in simulation of those that fit; of equals the first."""
    return max((entry for entry in entries if entry.fits), key=lambda entry: entry.rate, default=None)


def winner_in_words(entries: Sequence[Entry]) -> list[str]:
    """Which schedule is fastest of those that fit, and by how much; said plainly where it is not the paper's."""
    best = _best(entries)
    if best is None:
        return ["none of them fits the machine"]
    lines = []
    others = sorted((entry for entry in entries if entry.fits and entry is not best), key=lambda each: -each.rate)
    rate = f"fastest: {best.schedule}, {best.rate:,.1f} token/s"
    if others:
        rate += f", {_times(best, others[0])} {others[0].schedule}"
    lines.append(rate)
    paper = next((entry for entry in entries if entry.schedule == BEST), None)
    if paper is None or paper is best:
        pass
    elif paper.replay is None:
        lines.append(f"{BEST} is not the best here: it has no plan")
    elif not paper.fits:
        lines.append(f"{BEST} is not the best here: it does not fit")
    elif best.rate / paper.rate >= 1.0 + EQUAL:
        lines.append(f"{BEST} is not the best here: {best.schedule} is {best.rate / paper.rate:.3f}x as fast")
    faster = [entry for entry in entries if entry.replay is not None and not entry.fits and entry.rate > best.rate]
    lines += [f"{entry.schedule} would be faster, {entry.rate:,.1f} token/s, but does not fit" for entry in faster]
    return lines


def _times(best: Entry, other: Entry) -> str:
    ratio = best.rate / other.rate
    return f"{ratio:.3f}x" if ratio >= 1.0 + EQUAL else "as fast as"


def comparison_figure(comparison: Comparison) -> Figure:
    """Timelines of two layers under the same policy, one panel per schedule (Figure 6 of the paper).

    Raises
    ------
    InputError
        No schedule has a decode step to show.
    """
    scenario, panels, missing = comparison.scenario, [], []
    for entry in comparison.same:
        if entry.panel is None:
            missing.append(entry.schedule)
            continue
        words = f"{entry.schedule}: {entry.rate:,.4g} token/s, bubble {entry.bubble_share:.1%}"
        instead = overrides_in_words(entry.overrides)
        words += f"; {instead}" if instead else ""
        words += "" if entry.fits else "; does not fit"
        panels.append(replace(entry.panel, title=words))
    if not panels:
        raise InputError("no schedule has a decode step to draw", where="--plot", way_out="leave it out")
    shortest = min(panel.end_s - panel.start_s for panel in panels)
    base = comparison.plan.policy
    shared = "with contention" if comparison.contention else "without contention"
    note = f"Same policy: {policy_in_words(base)}. Two layers from the middle of the stack, simulated {shared}."
    if missing:
        note += f" Not shown, without a plan: {', '.join(missing)}."
    title = f"{scenario.model.name} on {scenario.profile.name}, {workload_in_words(scenario)}"
    return draw_timelines(panels, title=title, note=note, longest_s=LONGEST * shortest)
