"""The bars of a validation, and its verdict in one sentence.

A bar is met, missed, or not tested: where there is too little to judge it by, or where the value lies above the bar but
no higher than noise alone would take a perfect predictor. The tightest bar that the noise allows is said beside it; no
bar is moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hrm.validation.noise import tightest_regret, tightest_spread
from hrm.validation.scores import FEWEST_PAIRS

__all__ = ["BARS", "MEMORY_SLACK_BYTES", "judge_bars", "verdict_of"]

BARS: Mapping[str, float] = {"spread": 0.15, "order": 0.90, "regret": 0.03, "memory": 0.05}

MEMORY_SLACK_BYTES = 2**20
"""Of alignment and whole pages, up to 64 KiB for each buffer; so much beyond a plan is within it [byte]."""

ROUNDING = 1e-9
"""Of a share that is computed from two sizes."""

WORDS = {
    "spread of the simulator, decode latency": "layer_latency_s",
    "spread of the simulator, throughput": "throughput_tokens_per_s",
}


def judge_bars(
    simulated: Mapping[str, Any] | None,
    regret: Mapping[str, Any],
    policies: Sequence[Mapping[str, Any]],
    *,
    noise: Mapping[str, float],
    repeats: int,
    near: int,
    alike: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Every bar with what was found.

    Parameters
    ----------
    simulated : mapping or None
        Scores of the simulator.
    regret : mapping
    policies : sequence of mapping
        Those that count, as in the document.
    noise : mapping of str to float
        Of latency and throughput [share].
    repeats, near, alike : int
        Runs of each policy, policies of the neighbourhood, policies about as fast as the plan.
    """
    bars = []
    for name, metric in WORDS.items():
        found = None if simulated is None else simulated[metric]["neighbourhood"]
        tightest = tightest_spread(noise[metric], repeats, near, seed=seed)
        bars.append(_at_most(name, None if found is None else found["spread"], BARS["spread"], tightest))
    for name, metric in (("throughput", "throughput_tokens_per_s"), ("decode latency", "layer_latency_s")):
        order = None if simulated is None else simulated[metric]["order"]
        bars.append(_order(f"pairs in order by the simulator, {name}", order))
    tightest = tightest_regret(noise["throughput_tokens_per_s"], repeats, alike, seed=seed)
    bars.append(_at_most("regret of the plan", regret["share"], BARS["regret"], tightest))
    return [*bars, *_memory(policies)]


def _bar(
    name: str, value: float | None, bar: float, *, at_most: bool, status: str, tightest: float | None, words: str
) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "bar": bar,
        "at_most": at_most,
        "status": status,
        "tightest": tightest,
        "words": words,
    }


def _at_most(name: str, value: float | None, bar: float, tightest: float) -> dict[str, Any]:
    said = f"noise alone makes up to {tightest:.1%}"
    if value is None:
        return _bar(name, None, bar, at_most=True, status="not tested", tightest=tightest, words="nothing to compare")
    if value <= bar + ROUNDING:
        status = "met"
    elif value <= tightest:
        status, said = "not tested", f"{said}: the tightest bar that can be tested here"
    else:
        status = "missed"
    return _bar(name, value, bar, at_most=True, status=status, tightest=tightest, words=said)


def _order(name: str, order: Mapping[str, Any] | None) -> dict[str, Any]:
    bar = BARS["order"]
    pairs = 0 if order is None else order["pairs"]
    if order is None or pairs < FEWEST_PAIRS:
        words = f"{pairs} pairs differ beyond noise, at least {FEWEST_PAIRS} would be needed"
        share = None if order is None else order["share"]
        return _bar(name, share, bar, at_most=False, status="not tested", tightest=None, words=words)
    words = f"{order['ordered']} of {pairs} pairs that differ beyond noise"
    status = "met" if order["share"] >= bar - ROUNDING else "missed"
    return _bar(name, order["share"], bar, at_most=False, status=status, tightest=None, words=words)


def _memory(policies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each level: the most that a plan says too much, and how far one was exceeded."""
    bars = []
    for level in ("gpu", "cpu"):
        rows = [(row["name"], row["memory"][level]) for row in policies if row["memory"] and level in row["memory"]]
        name = f"memory of the plans, {level.upper()}"
        if not rows:
            bars.append(
                _bar(name, None, BARS["memory"], at_most=True, status="not tested", tightest=None, words="not measured")
            )
            continue
        above = {label: _above(use) for label, use in rows}
        below = {label: _below(use) for label, use in rows}
        worst_above, worst_below = max(above, key=above.__getitem__), max(below, key=below.__getitem__)
        value = max(above[worst_above], below[worst_below])
        if above[worst_above] > 0.0:
            words = f"{worst_above} takes {above[worst_above]:.1%} more than planned"
        else:
            words = f"never above; {worst_below} takes {below[worst_below]:.1%} less than planned"
        met = above[worst_above] <= 0.0 and below[worst_below] <= BARS["memory"] + ROUNDING
        bars.append(
            _bar(
                name,
                value,
                BARS["memory"],
                at_most=True,
                status="met" if met else "missed",
                tightest=None,
                words=words,
            )
        )
    return bars


def _allowed(use: Mapping[str, float]) -> float:
    return use["planned_bytes"] - use["not_made_bytes"]


def _above(use: Mapping[str, float]) -> float:
    """By what share of the plan, or of the reserve where all else of it is never made, a run took more than both."""
    over = use["taken_bytes"] - _allowed(use) - use["reserve_bytes"] - MEMORY_SLACK_BYTES
    return max(0.0, over / (_allowed(use) or use["reserve_bytes"] or MEMORY_SLACK_BYTES))


def _below(use: Mapping[str, float]) -> float:
    """By what share a run took less than planned; where nothing was to be taken it cannot."""
    return max(0.0, 1.0 - use["taken_bytes"] / _allowed(use)) if _allowed(use) else 0.0


def verdict_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Whether anything was missed, and one sentence that says what was found."""
    bars = document["bars"]
    missed = [bar["name"] for bar in bars if bar["status"] == "missed"]
    untested = [bar["name"] for bar in bars if bar["status"] == "not tested"]
    tested = document["same_machine"] is True and not document["paced"]
    simulated = document["scores"]["simulated"]
    parts = []
    if simulated is not None and simulated["layer_latency_s"]["neighbourhood"] is not None:
        spread = simulated["layer_latency_s"]["neighbourhood"]["spread"]
        parts.append(f"the simulator's ratio to measured decode latency spreads by {spread:.1%} over the neighbourhood")
    order = None if simulated is None else simulated["throughput_tokens_per_s"]["order"]
    if order is not None and order["share"] is not None:
        parts.append(f"{order['ordered']} of {order['pairs']} distinguishable pairs of throughput are ordered right")
    regret = document["regret"]
    parts.append(f"the plan gives away {regret['share']:.1%} against the best measured ({regret['best']})")
    said = "; ".join(parts)
    if not tested:
        why = (
            "lanes were paced"
            if document["paced"]
            else f"the rates are those of {document['hardware']}, not known to be of this machine"
        )
        sentence = f"Not tested, as {why}: {said}."
    elif missed:
        sentence = f"Missed ({', '.join(missed)}): {said}."
    elif untested:
        sentence = f"Every bar that could be tested is met, not tested: {', '.join(untested)}; {said}."
    else:
        sentence = f"Every bar is met: {said}."
    return {"tested": tested, "missed": missed if tested else [], "not_tested": untested, "sentence": sentence}
