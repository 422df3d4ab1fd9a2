"""Schedules against the bound of their tasks, the accelerator emulated: part "schedules" of `benchmarks/runtime.py`.

All run one plan (the same N, mu and r_w, with what a schedule needs otherwise, printed) at a random Mixtral of medium
size. The bound of a layer is what its busiest lane takes: seconds of tasks are those under `serial`, where each runs
alone, in the same run; copies count by their bytes, other tasks by their kind. What a schedule takes above it is
waiting, or lanes that disturb each other: emulated lanes are threads, and share cores and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks.bars import Line, Section, Settings, median, spread, tell
from hrm.batching import assign_batch
from hrm.cost import Formats
from hrm.families import read_spec
from hrm.graph import Lane, Op, Task
from hrm.layout import Layout
from hrm.policy import Policy
from hrm.profile_files import load_profile
from hrm.scenario import Scenario
from hrm.schedules import SCHEDULES, Steps
from hrm.workload import Workload
from runtime.device import choose_device
from runtime.numerics import read_numerics
from runtime.placement import place_batch
from runtime.random_weights import RandomWeights
from runtime.requests import make_requests
from runtime.run_state import RunState
from runtime.session import Piece, Session, open_session
from simulator.own_plans import overrides_for, same_policy

__all__ = ["measure"]

NAMES = ("cgopipe", "s2", "s3", "s4")
CONFIG = {
    "model_type": "mixtral",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 1792,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
REQUESTS, MICRO_BATCH, PROMPT, GENERATED = 64, 16, 512, 7
RESIDENT = 0.25
"""r_w."""

WARM_UP = 1
"""Decode steps that are not counted."""

COPIES = (Op.LOAD_WEIGHTS, Op.STAGE_WEIGHTS, Op.LOAD_KV, Op.STORE_KV, Op.LOAD_HIDDEN, Op.OFFLOAD_QKV)
Kind = tuple[Lane, Op, int | None]


def make_scenario() -> Scenario:
    """Model and requests; the profile sets the limits of memory, none of its rates is used."""
    workload = Workload(name="benchmark", prompt_lengths=(PROMPT,), generation_length=GENERATED, num_requests=REQUESTS)
    spec = read_spec(CONFIG, file="benchmarks/runtime_schedules.py", name="medium mixtral")
    formats = Formats(weights=None, kv="bf16", compute="bf16")
    return Scenario(profile=load_profile("l4"), model=spec, workload=workload, formats=formats)


def make_policy() -> Policy:
    """The plan that all schedules run."""
    return Policy(
        batch_size=REQUESTS,
        micro_batch_size=MICRO_BATCH,
        num_micro_batches=REQUESTS // MICRO_BATCH,
        prefill_micro_batch_size=MICRO_BATCH,
        attention_on_gpu=False,
        ffn_on_gpu=True,
        weights_on_gpu=RESIDENT,
        micro_batch_token_budget=MICRO_BATCH * (PROMPT + GENERATED),
    )


def start(scenario: Scenario, policy: Policy, name: str, source: RandomWeights) -> Session:
    """A session whose accelerator is emulated."""
    numerics = read_numerics(CONFIG, where="benchmarks/runtime_schedules.py")
    device = choose_device("cpu", cpu_only=False)
    return open_session(scenario, policy, name, source, numerics, device)


def make_state(session: Session, prompts: Sequence[Sequence[int]]) -> RunState:
    """A batch after its prefill, its KV cache and last tokens random."""
    scenario, policy = session.scenario, session.policy
    batch, _, _ = assign_batch(
        make_requests(prompts, scenario),
        num_micro_batches=policy.num_micro_batches,
        micro_batch_size=policy.micro_batch_size,
        token_budget=policy.micro_batch_token_budget,
    )
    state = session.prepare(Layout(scenario, policy), place_batch(batch.micro_batches, policy), prompts)
    generator = torch.Generator().manual_seed(0)
    for pool in state.cache.pools.values():
        if pool.memory is not None:  # one random block over and over: drawing every value takes long
            flat = pool.memory.view(-1)
            block = torch.randn(2**20, generator=generator).to(flat.dtype)
            for part in flat.split(len(block)):
                part.copy_(block[: len(part)])
    state.generated.random_(scenario.model.vocab_size, generator=generator)
    return state


def kind_of(task: Task) -> Kind:
    """What tasks are alike."""
    return task.lane, task.id.op, task.id.part


def alone(pieces: Sequence[Piece]) -> Callable[[Task], float]:
    """Seconds of a task where nothing else runs, from runs under `serial` [s]."""
    seconds: dict[Kind, list[float]] = {}
    for piece in pieces:
        for task, span in zip(piece.graph.tasks, piece.trace.spans, strict=True):
            if task.id.step < piece.steps.first + WARM_UP:
                continue
            took = span.end_s - span.start_s
            per = took / task.bytes_moved if task.id.op in COPIES and task.bytes_moved else took
            seconds.setdefault(kind_of(task), []).append(per)
    found = {kind: median(each) for kind, each in seconds.items()}

    def of(task: Task) -> float:
        per = found[kind_of(task)]
        return per * task.bytes_moved if task.id.op in COPIES and task.bytes_moved else per

    return of


def layer_bound(piece: Piece, seconds: Callable[[Task], float], layers: int) -> tuple[float, dict[str, float]]:
    """Seconds of the busiest lane per layer, and those of all lanes [s]."""
    lanes: dict[str, float] = {}
    for task in piece.graph.tasks:
        lanes[str(task.lane)] = lanes.get(str(task.lane), 0.0) + seconds(task)
    passes = (piece.steps.last - piece.steps.first) * layers
    shares = {lane: each / passes for lane, each in lanes.items()}
    return max(shares.values()), shares


def layer_measured(piece: Piece, layers: int) -> float:
    """Seconds per layer between the last token of the first steps and the last token of all [s]."""
    ends: dict[int, float] = {}
    for span in piece.trace.spans:
        if span.task.op is Op.SAMPLE:
            ends[span.task.step] = max(ends.get(span.task.step, 0.0), span.end_s)
    first, last = piece.steps.first + WARM_UP - 1, piece.steps.last - 1
    return (ends[last] - ends[first]) / ((last - first) * layers)


def measure(settings: Settings) -> Section:
    """Run the part."""
    scenario, base = make_scenario(), make_policy()
    layers = scenario.model.n_layers
    numerics = read_numerics(CONFIG, where="benchmarks/runtime_schedules.py")
    source = RandomWeights(scenario.model, numerics, dtype=torch.bfloat16, one_layer=True)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, scenario.model.vocab_size, (REQUESTS, PROMPT), generator=generator).tolist()
    policies = {name: same_policy(SCHEDULES[name], base, scenario) for name in NAMES}
    on_cpu, on_gpu = base, replace(base, attention_on_gpu=True)
    every = [("serial", on_cpu), ("serial", on_gpu), *policies.items()]
    tell("schedules: loading the model six times")
    sessions = {(name, policy.attention_on_gpu): start(scenario, policy, name, source) for name, policy in every}
    steps = Steps(first=0, last=GENERATED - 1)
    tell("schedules: filling KV caches")
    states = {key: make_state(session, prompts) for key, session in sessions.items()}
    for key, session in sessions.items():
        session.run_steps(states[key], steps)  # warms up
    pieces: dict[tuple[str, bool], list[Piece]] = {key: [] for key in sessions}
    for number in range(settings.rounds):
        tell(f"schedules, round {number + 1} of {settings.rounds}")
        for key, session in sessions.items():
            pieces[key].append(session.run_steps(states[key], steps))
    lines, notes = [], []
    samples: dict[str, object] = {}
    for side in (False, True):
        seconds = alone(pieces[("serial", side)])
        for name, on in sessions:
            if on != side:
                continue
            took = [layer_measured(piece, layers) for piece in pieces[(name, on)]]
            bound, lanes = layer_bound(pieces[(name, on)][0], seconds, layers)
            label = f"serial, attention on the {'GPU' if on else 'CPU'}" if name == "serial" else name
            lines.append(Line(what=f"{label}: a layer", value=1e3 * median(took), unit="ms"))
            lines.append(Line(what=f"{label}: bound / measured", value=bound / median(took)))
            busiest = ", ".join(f"{lane} {1e3 * each:.2f}" for lane, each in sorted(lanes.items()))
            notes.append(f"{label}: measured {spread([1e3 * each for each in took])} ms; lanes alone {busiest} ms")
            samples[label] = {"layer_s": took, "bound_s": bound, "lanes_s": lanes}
    changes = {name: overrides_for(SCHEDULES[name], base, scenario) for name in NAMES}
    replaced = "; ".join(f"{name}: {found}" for name, found in changes.items() if found) or "nothing replaced"
    head = (
        f"N = {REQUESTS}, mu = {MICRO_BATCH}, r_w = {RESIDENT:g}, prompts of {PROMPT}; overrides: {replaced}. "
        f"Emulated on {torch.get_num_threads()} cores: an order of schedules here is none of a GPU's"
    )
    title = "schedules: a random Mixtral of medium size, accelerator emulated"
    return Section(title=title, lines=lines, notes=[head, *notes], samples=samples)
