"""A random Mixtral, saved by transformers and loaded by everybody: the model of `benchmarks/runtime.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.bars import tell
from hrm.cost import Formats
from hrm.policy import Policy
from hrm.profile_files import load_profile
from hrm.scenario import Scenario
from hrm.workload import Workload
from runtime.checkpoint import Checkpoint, open_checkpoint
from runtime.device import choose_device
from runtime.session import Session, open_session

__all__ = ["BATCH", "PROMPT", "cpu_scenario", "cpu_session", "draw_prompts", "load_reference", "save_model"]

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "sliding_window": None,
}
BATCH, PROMPT = 32, 64
"""Requests, and tokens of each prompt."""


def save_model(folder: Path) -> Path:
    """Draw the model and save it, once; returns where it is."""
    where = folder / "mixtral"
    if where.exists():
        return where
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tell("drawing and saving the model")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = MixtralForCausalLM(MixtralConfig(**SHAPE, dtype="bfloat16")).eval()
        model.save_pretrained(where, max_shard_size="1GB")
    finally:
        torch.set_default_dtype(before)
    return where


def load_reference(folder: Path) -> Any:
    """The same model in transformers, in bf16."""
    from transformers import MixtralForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return MixtralForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def draw_prompts() -> torch.Tensor:
    """Token ids [BATCH, PROMPT]."""
    return torch.randint(0, SHAPE["vocab_size"] or 0, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))


def cpu_scenario(checkpoint: Checkpoint, generated: int) -> Scenario:
    """The prompts, so many tokens each. The profile sets the limits of memory; none of its rates is used."""
    workload = Workload(name="benchmark", prompt_lengths=(PROMPT,), generation_length=generated, num_requests=BATCH)
    formats = Formats(weights=None, kv="bf16", compute="bf16")
    return Scenario(profile=load_profile("l4"), model=checkpoint.spec, workload=workload, formats=formats)


def cpu_session(folder: Path, generated: int, *, on_disk: float = 0.0, disk_dir: Path | None = None) -> Session:
    """The model under the CPU-only plan: one micro-batch of all requests."""
    checkpoint = open_checkpoint(folder)
    policy = Policy(
        batch_size=BATCH,
        micro_batch_size=BATCH,
        num_micro_batches=1,
        prefill_micro_batch_size=BATCH,
        attention_on_gpu=False,
        ffn_on_gpu=False,
        weights_on_disk=on_disk,
        dense_weights_on_gpu=False,
        embedding_on_gpu=False,
        lm_head_on_gpu=False,
        pin_weights=False,
        micro_batch_token_budget=BATCH * (PROMPT + generated),
        everything_on_cpu=True,
    )
    device = choose_device("cpu", cpu_only=True)
    scenario = cpu_scenario(checkpoint, generated)
    return open_session(scenario, policy, "cpu_only", checkpoint, checkpoint.numerics, device, disk_dir=disk_dir)
