"""The CPU-only plan against transformers, and against a floor: part "generate" of `benchmarks/runtime.py`.

transformers has several implementations of the experts; every one that runs here is timed once, and those that come
near the fastest are repeated in turn with the runtime. End to end is the time of the whole call for both. Decode is
what is left of it after a call for one token, for transformers; for the runtime it is what its clock says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.bars import Line, Section, Settings, median, spread, tell, timed
from benchmarks.machine_rates import MatrixRate, ReadRate
from benchmarks.random_mixtral import BATCH, PROMPT, cpu_session, draw_prompts, load_reference, save_model
from hrm import cost
from hrm.scenario import Scenario, measure_sizes

__all__ = ["measure"]

GENERATED = 16
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
NEAR = 1.15
"""An implementation whose first run took no more than this times the fastest's is repeated."""

END_TO_END, DECODE, FLOOR = 1.3, 2.0, 0.7
"""Bars: times faster than transformers, and share of the floor."""


def generate(model: Any, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """Greedy, all of them, whatever token ends a sequence [B, tokens]."""
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return found[:, ids.shape[1] :]


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 8 * 2**30


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Let what takes more than the free memory fail instead of being killed."""
    import resource

    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + int(0.8 * _available_bytes()), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def try_implementations(model: Any, ids: torch.Tensor) -> tuple[dict[str, tuple[float, float]], dict[str, str]]:
    """Seconds (all tokens, decode) of each that runs [s], and why others do not."""
    found, reasons = {}, {}
    for name in IMPLEMENTATIONS:
        seconds: list[float] = []
        try:
            model.set_experts_implementation(name)
            with _bounded_memory():
                generate(model, ids, 1)  # warms it up, or fails for want of memory
                for tokens in (1, GENERATED):
                    with timed(seconds):
                        generate(model, ids, tokens)
        except Exception as error:  # whatever it is, the others are tried
            reasons[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][-70:] if str(error) else ''}"
            tell(f"transformers, {name}: does not run here ({reasons[name]})")
            continue
        found[name] = (seconds[1], seconds[1] - seconds[0])
        tell(f"transformers, {name}: {BATCH * GENERATED / seconds[1]:.0f} token/s")
    return found, reasons


def floor_work(scenario: Scenario) -> tuple[float, float]:
    """FLOPs of prefill [FLOP], and bytes of weights and KV cache that all decode steps read [byte]."""
    model, formats, sizes = scenario.model, scenario.formats, measure_sizes(scenario)
    tokens = float(BATCH * PROMPT)
    flops = sum(layers * float(work.flops) for _, layers, work in cost.layer_operators(model, formats, tokens))
    pairs = BATCH * sizes.prompt_pairs_by_window[None]
    flops += model.n_layers * float(cost.attention_prefill(model, formats, tokens, pairs).flops)
    flops += float(cost.lm_head(model, formats, float(BATCH)).flops)
    step = sizes.streamed_layers * float(cost.experts_touched(model, float(BATCH))) * sizes.expert_bytes
    step += sizes.dense_bytes + sizes.lm_head_bytes + BATCH * sizes.kv_read_bytes_per_request
    return flops, step * sizes.decode_steps


def measure(settings: Settings) -> Section:
    """Run the part."""
    folder, ids = save_model(settings.folder), draw_prompts()
    model = load_reference(folder)
    tried, reasons = try_implementations(model, ids)
    if not tried:
        raise RuntimeError(f"no implementation of the experts in transformers runs here: {reasons}")
    best = [min(seconds[place] for seconds in tried.values()) for place in range(2)]
    repeated = [name for name, each in tried.items() if each[0] <= NEAR * best[0] or each[1] <= NEAR * best[1]]
    session = cpu_session(folder, GENERATED)
    spec = session.scenario.model
    matrices = MatrixRate(
        rows=BATCH * PROMPT * spec.top_k // spec.n_experts,
        hidden=spec.hidden_size,
        width=spec.expert_ffn,
        experts=spec.n_experts,
        dtype=torch.bfloat16,
    )
    reading = ReadRate()
    prompts = ids.tolist()
    ours: list[float] = []
    ours_decode: list[float] = []
    flop_rates: list[float] = []
    read_rates: list[float] = []
    whole: dict[str, list[float]] = {name: [] for name in repeated}
    first: dict[str, list[float]] = {name: [] for name in repeated}
    theirs = torch.empty(0)
    run = session.generate(prompts)[0]
    for number in range(settings.rounds):
        tell(f"generate, round {number + 1} of {settings.rounds}")
        flop_rates += [matrices.measure() for _ in range(3)]
        read_rates += [reading.measure() for _ in range(3)]
        for name in repeated:
            model.set_experts_implementation(name)
            with timed(first[name]):
                generate(model, ids, 1)
            with timed(whole[name]):
                theirs = generate(model, ids, GENERATED)
        with timed(ours):
            run = session.generate(prompts)[0]
        ours_decode.append(run.decode_s)
    return _report(
        session.scenario,
        reasons,
        whole=whole,
        decode={name: [a - b for a, b in zip(whole[name], first[name], strict=True)] for name in repeated},
        ours=ours,
        ours_decode=ours_decode,
        rates=(flop_rates, read_rates),
        same=_same_tokens(theirs, run.tokens),
    )


def _same_tokens(theirs: torch.Tensor, ours: dict[int, list[int]]) -> tuple[float, float]:
    """Share of prompts with the same first token, and of all tokens up to where a prompt's first differ."""
    mine = torch.tensor([ours[index] for index in range(len(ours))])
    same = mine == theirs
    return float(same[:, 0].float().mean()), float(same.long().cumprod(dim=1).float().mean())


def _report(
    scenario: Scenario,
    reasons: dict[str, str],
    *,
    whole: dict[str, list[float]],
    decode: dict[str, list[float]],
    ours: list[float],
    ours_decode: list[float],
    rates: tuple[list[float], list[float]],
    same: tuple[float, float],
) -> Section:
    flops, read = floor_work(scenario)
    steps = GENERATED - 1
    tokens = BATCH * GENERATED
    fastest = min(whole, key=lambda name: median(whole[name]))
    in_decode = min(decode, key=lambda name: median(decode[name]))
    floor = flops / median(rates[0]) + read / median(rates[1])
    mine, my_decode = median(ours), median(ours_decode)
    theirs, their_decode = median(whole[fastest]), median(decode[in_decode])
    lines = [
        Line(what=f"transformers, {fastest}: end to end", value=tokens / theirs, unit="token/s", digits=1),
        Line(what="runtime, CPU-only plan: end to end", value=tokens / mine, unit="token/s", digits=1),
        Line(what="end to end, times transformers", value=theirs / mine, bar=END_TO_END),
        Line(what=f"transformers, {in_decode}: a decode step", value=1e3 * their_decode / steps, unit="ms", digits=1),
        Line(what="runtime: a decode step", value=1e3 * my_decode / steps, unit="ms", digits=1),
        Line(what="decode, times transformers", value=their_decode / my_decode, bar=DECODE),
        Line(what="matrix products at the shapes of prefill", value=median(rates[0]) / 1e9, unit="GFLOP/s", digits=0),
        Line(what="reading memory", value=median(rates[1]) / 1e9, unit="GB/s", digits=1),
        Line(what="floor: FLOPs of prefill and bytes of decode at these rates", value=floor, unit="s"),
        Line(what="share of the floor: floor / measured", value=floor / mine, bar=FLOOR),
        Line(what="prefill alone", value=flops / median(rates[0]) / (mine - my_decode)),
        Line(what="decode alone", value=read / median(rates[1]) / my_decode),
        Line(what="prompts with the same first token", value=100 * same[0], unit="%", digits=0),
        Line(what="tokens until the two first differ", value=100 * same[1], unit="%", digits=0),
    ]
    notes = [
        f"{BATCH} prompts of {PROMPT} tokens, {GENERATED} generated, greedy, bf16; 8 layers, hidden 1024, 8 experts of "
        "3584, top 2; random weights, whose logits lie close together: after a token that differs all others do",
        f"seconds, median (least to most): transformers {spread(whole[fastest])}, runtime {spread(ours)}",
    ]
    notes += [f"transformers, {name}, does not run here: {reason}" for name, reason in reasons.items()]
    samples = {
        "transformers_s": whole,
        "transformers_decode_s": decode,
        "runtime_s": ours,
        "runtime_decode_s": ours_decode,
        "matrix_flops_per_s": rates[0],
        "read_bytes_per_s": rates[1],
        "prefill_flops": flops,
        "decode_bytes": read,
    }
    title = "generate: a random Mixtral, everything on the CPU"
    return Section(title=title, lines=lines, notes=notes, samples=samples)
