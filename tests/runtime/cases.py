"""Runs of tiny models under any schedule and policy: requests, references of transformers, corners for hypothesis."""

from __future__ import annotations

import atexit
import itertools
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from tiny_models import VOCABULARY, reference_generate, save_tiny
from tiny_policies import EVERYTHING_ON_CPU
from torch import Tensor

from hrm.cost import Formats
from hrm.errors import InputError
from hrm.families import read_spec
from hrm.layout import Layout
from hrm.policy import Policy
from hrm.profile_files import load_profile
from hrm.scenario import Scenario
from hrm.schedules import SCHEDULES, check_schedule
from hrm.workload import Workload
from runtime.checkpoint import open_checkpoint
from runtime.device import choose_device
from runtime.executor import Pace
from runtime.numerics import read_numerics
from runtime.session import BatchRun, Session, open_session

GENERATED = 5
LENGTHS = (5, 1, 12, 3, 7, 2, 9, 4, 1, 6)
LONGEST = max(LENGTHS) + GENERATED

DEFAULTS: dict[str, dict[str, Any]] = {
    "s4": {"attention_on_gpu": True},
    "streaming": {"attention_on_gpu": True, "kv_on_gpu": 1.0, "num_micro_batches": 1, "micro_batch_size": 4},
    "static_experts": {"attention_on_gpu": True, "kv_on_gpu": 1.0, "ffn_on_gpu": False, "weights_on_gpu": 0.5},
    "cpu_only": EVERYTHING_ON_CPU,
}
"""What a schedule needs a policy to be, beside `policy_of` (everything streamed, attention on the CPU)."""


class Case(NamedTuple):
    """A schedule and a policy that it can run."""

    schedule: str
    policy: Policy


def policy_of(schedule: str = "cgopipe", **changes: Any) -> Policy:
    """Three micro-batches of two requests, all weights streamed from pinned memory, all KV cache in CPU memory."""
    values: dict[str, Any] = {
        "micro_batch_size": 2,
        "num_micro_batches": 3,
        "prefill_micro_batch_size": 3,
        "attention_on_gpu": False,
        "ffn_on_gpu": True,
    }
    values |= DEFAULTS.get(schedule, {}) | changes
    values.setdefault("batch_size", values["micro_batch_size"] * values["num_micro_batches"])
    values.setdefault("micro_batch_token_budget", values["micro_batch_size"] * LONGEST)
    return Policy(**values)


@st.composite
def cases(draw: st.DrawFn, most_micro_batches: int = 4) -> Case:
    """Any schedule with any policy it accepts, shares at the ends and in the middle."""
    schedule = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    alone = schedule.one_micro_batch
    count = 1 if alone else draw(st.integers(1, most_micro_batches))
    size = draw(st.integers(1, 8 // count))
    batch = draw(st.integers(size * (count - 1) + 1, size * count))
    shares = st.sampled_from((0.0, 0.5, 1.0))
    attention = draw(st.booleans()) if schedule.attention_on_gpu is None else schedule.attention_on_gpu
    weights = draw(st.sampled_from((0.3, 0.5, 1.0)) if schedule.static_experts else shares)
    cache = 1.0 if alone or schedule.static_experts else draw(shares)
    rings = schedule.paged
    slots = draw(st.sampled_from((1, 2, "experts") if rings else (1, 2)))
    changes: dict[str, Any] = {
        "batch_size": batch,
        "micro_batch_size": size,
        "num_micro_batches": count,
        "micro_batch_token_budget": draw(st.sampled_from((size * LONGEST, LONGEST + 6 * (size - 1)))),
        "prefill_micro_batch_size": draw(st.integers(1, batch)),
        "attention_on_gpu": attention,
        "ffn_on_gpu": not schedule.static_experts and draw(st.booleans()),
        "weights_on_gpu": weights,
        "weights_on_disk": draw(st.sampled_from((0.0, 0.5, 1.0))) * (1.0 - weights),
        "kv_on_gpu": cache,
        "kv_on_disk": draw(st.sampled_from((0.0, 0.5, 1.0))) * (1.0 - cache),
        "weight_slots": slots,
        "ring_experts": draw(st.integers(2, 3)) if slots == "experts" else 0,
        "dense_weights_on_gpu": draw(st.booleans()),
        "embedding_on_gpu": draw(st.booleans()),
        "lm_head_on_gpu": draw(st.booleans()),
        "pin_weights": draw(st.booleans()),
    }
    if schedule.on_cpu or (schedule.serial and draw(st.integers(0, 5)) == 0):
        changes |= EVERYTHING_ON_CPU | {"weights_on_disk": draw(shares)}
    found = Case(schedule.name, Policy(**changes))
    check_schedule(*found)
    return found


def corners() -> Iterator[Case]:
    """Every corner of schedule, places and slots that is accepted, with four micro-batches of one request."""
    places = itertools.product(
        SCHEDULES,
        (False, True),
        (False, True),
        (0.0, 0.5, 1.0),
        (0.0, 0.5, 1.0),
        (0.0, 0.5, 1.0),
        (0.0, 0.5, 1.0),
        (1, 2, "experts"),
        (False, True),
        (False, True),
        (False, True),
    )
    for schedule, attention, ffn, gpu, disk, kv_gpu, kv_disk, slots, dense, ends, pinned in places:
        count, size = (1, 2) if SCHEDULES[schedule].one_micro_batch else (4, 1)
        changes: dict[str, Any] = {
            "batch_size": count * size,
            "micro_batch_size": size,
            "num_micro_batches": count,
            "prefill_micro_batch_size": 1,
            "micro_batch_token_budget": size * LONGEST,
            "attention_on_gpu": attention,
            "ffn_on_gpu": ffn,
            "weights_on_gpu": gpu,
            "weights_on_disk": disk,
            "kv_on_gpu": kv_gpu,
            "kv_on_disk": kv_disk,
            "weight_slots": slots,
            "ring_experts": 3 if slots == "experts" else 0,
            "dense_weights_on_gpu": dense,
            "embedding_on_gpu": ends,
            "lm_head_on_gpu": ends,
            "pin_weights": pinned,
            "everything_on_cpu": SCHEDULES[schedule].on_cpu,
        }
        try:
            found = Case(schedule, Policy(**changes))
            check_schedule(*found)
        except InputError:
            continue
        yield found


# Models and what transformers says of them

_FOLDERS = tempfile.TemporaryDirectory(prefix="tiny-models-")
atexit.register(_FOLDERS.cleanup)


@cache
def _saved(family: str, dtype: torch.dtype, overrides: str) -> Path:
    folder = Path(tempfile.mkdtemp(dir=_FOLDERS.name))
    return save_tiny(family, folder, seed=3, dtype=dtype, **json.loads(overrides))


def model_folder(family: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A tiny model, written once per process."""
    return _saved(family, dtype, json.dumps(overrides, sort_keys=True))


@cache
def make_prompts(lengths: tuple[int, ...] = LENGTHS) -> tuple[tuple[int, ...], ...]:
    """Random prompts of these lengths."""
    source = random.Random(7)
    return tuple(tuple(source.randrange(VOCABULARY) for _ in range(length)) for length in lengths)


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens and logits of every request: [requests][n], [requests][n, V]."""

    tokens: list[list[int]]
    logits: list[Tensor]


@cache
def reference(folder: Path, generated: int = GENERATED) -> Generated:
    """What transformers generates for `make_prompts()`, in fp32, each prompt alone."""
    return Generated(*reference_generate(folder, make_prompts(), generated))


# Runs


def scenario_of(
    folder: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    generated: int = GENERATED,
    compute: str = "fp32",
    kv: str = "",
) -> Scenario:
    """A model folder on an L4, whose memory is larger than anything here."""
    config = json.loads((folder / "config.json").read_text())
    return Scenario(
        profile=load_profile("l4"),
        model=read_spec(config, file=str(folder), name="tiny"),
        workload=Workload(
            name="tiny", prompt_lengths=tuple(lengths), generation_length=generated, num_requests=len(lengths)
        ),
        formats=Formats(weights=compute, kv=kv or compute, compute=compute),
    )


def open_tiny(folder: Path, case: Case, *, pace: Pace | None = None, **formats: Any) -> Session:
    """A session on the CPU, the accelerator emulated."""
    config = json.loads((folder / "config.json").read_text())
    return open_session(
        scenario_of(folder, **formats),
        case.policy,
        case.schedule,
        open_checkpoint(folder),
        read_numerics(config, where=str(folder)),
        choose_device("cpu", cpu_only=case.policy.everything_on_cpu),
        pace=pace,
    )


@dataclass(slots=True)
class Ran:
    """What a run gave: tokens and logits by request, batches as they ran."""

    batches: list[BatchRun]
    logits: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    @property
    def tokens(self) -> list[list[int]]:
        """Generated tokens of every request, in the order of the prompts."""
        found = {index: tokens for batch in self.batches for index, tokens in batch.tokens.items()}
        assert sorted(found) == list(range(sum(len(batch.tokens) for batch in self.batches)))
        return [found[index] for index in sorted(found)]

    def logits_of(self, request: int) -> Tensor:
        """Logits of one request [n, V]."""
        return torch.stack([row for _, row in sorted(self.logits[request].items())])


def run_session(session: Session, prompts: Sequence[Sequence[int]] | None = None) -> Ran:
    """Generate for all prompts."""
    logits: dict[int, dict[int, Tensor]] = {}

    def keep(request: int, column: int, row: Tensor) -> None:
        logits.setdefault(request, {})[column] = row.clone()

    return Ran(session.generate(prompts or make_prompts(), keep_logits=keep), logits)


def run_case(folder: Path, case: Case, *, pace: Pace | None = None, **formats: Any) -> Ran:
    """Generate for `make_prompts()` under a schedule and policy."""
    session = open_tiny(folder, case, pace=pace, **formats)
    try:
        return run_session(session)
    finally:
        if session.disk is not None:
            session.disk.close()


def layout_of(folder: Path, case: Case, **formats: Any) -> Layout:
    """The layout that a session of this case has."""
    return Layout(scenario_of(folder, **formats), case.policy)


def largest_error(ran: Ran, wanted: Generated) -> float:
    """Largest difference of two logits of one token, relative to the largest logit of it."""
    worst = 0.0
    for request, logits in enumerate(wanted.logits):
        difference = (ran.logits_of(request) - logits).abs().amax(dim=-1) / logits.abs().amax(dim=-1)
        worst = max(worst, float(difference.max()))
    return worst
