"""A machine and a model small enough for mental arithmetic: every byte and second can be redone by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hrm.cost import Formats
from hrm.model import MlaShape, ModelSpec
from hrm.profile import (
    CpuLevel,
    DiskLevel,
    Efficiency,
    GpuLevel,
    HardwareProfile,
    HostTotals,
    Link,
    LinkDirection,
)
from hrm.scenario import Scenario
from hrm.workload import Workload

FP16 = Formats(weights=None, kv="fp16", compute="fp16")


def tiny_model(**changes: Any) -> ModelSpec:
    """Hidden 8, 2 layers, 2 query heads and 1 KV head of width 4, 4 experts of width 4, top 2, vocabulary 16, fp16.

    Per layer: QKV 128 parameters, output 64, router 32, norms 16, an expert 96 (192 byte); a table 128 (256 byte).
    """
    shape: dict[str, Any] = {
        "name": "tiny",
        "family": "tiny",
        "hidden_size": 8,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": 4,
        "value_head_dim": 4,
        "vocab_size": 16,
        "max_positions": 1000,
        "tie_embeddings": False,
        "n_experts": 4,
        "top_k": 2,
        "expert_ffn": 4,
        "moe_layers": (True, True),
        "layer_windows": (None, None),
        "checkpoint_dtype": "fp16",
        "expert_dtype": "fp16",
        "linear_dtype": "fp16",
        "router_parameters_per_layer": 32,
        "norm_parameters_per_layer": 16,
        "final_norm_parameters": 8,
    }
    return ModelSpec(**(shape | changes))


def tiny_mla(**changes: Any) -> ModelSpec:
    """The tiny model with latent attention: rank 6, rope 2, nope 4, values 4, 2 heads."""
    mla = MlaShape(q_lora_rank=None, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
    return tiny_model(mla=mla, n_kv_heads=2, **changes)


def tiny_profile(
    *,
    gpus: int = 1,
    usable: float = 1e6,
    cpu_memory: float = 1e9,
    disk: bool = False,
    gpu_link: float | None = None,
    h2d_with_opposite: float = 100.0,
    d2h_with_opposite: float = 50.0,
    host_total: float | None = None,
    launch_s: float = 0.0,
    copy_s: float = 0.0,
    peaks: dict[str, float] | None = None,
    efficiency: Efficiency | None = None,
    lockable: float | None = None,
) -> HardwareProfile:
    """GPU 400 FLOP/s, 200 byte/s; CPU 100 FLOP/s, 250 byte/s; link 100 up, 50 down; staging 40; disk 10 and 5."""
    peaks = peaks or {"fp16": 400.0, "fp32": 400.0}
    return HardwareProfile(
        name="tiny",
        title="tiny",
        description="",
        gpu=GpuLevel(
            name="tiny GPU",
            count=gpus,
            memory_bytes=usable,
            usable_memory_bytes=usable,
            context_bytes=1000.0,
            bandwidth_bytes_per_s=200.0,
            peak_flops_per_s=peaks,
            dtypes=tuple(peaks),
        ),
        cpu=CpuLevel(
            name="tiny CPU",
            memory_bytes=cpu_memory,
            reserved_bytes=100.0,
            bandwidth_bytes_per_s=250.0,
            peak_flops_per_s={"fp32": 100.0},
            cores=1,
            lockable_bytes=lockable,
        ),
        disk=DiskLevel(name="disk", size_bytes=1e4, read_bytes_per_s=10.0, write_bytes_per_s=5.0) if disk else None,
        link=Link(
            name="link",
            host_to_device=LinkDirection(
                pinned_bytes_per_s=100.0, pageable_bytes_per_s=40.0, with_opposite_bytes_per_s=h2d_with_opposite
            ),
            device_to_host=LinkDirection(
                pinned_bytes_per_s=50.0, pageable_bytes_per_s=20.0, with_opposite_bytes_per_s=d2h_with_opposite
            ),
            copy_latency_s=copy_s,
        ),
        staging_bytes_per_s=40.0,
        pinning_bytes_per_s=20.0,
        launch_latency_s=launch_s,
        gpu_link_bytes_per_s=gpu_link,
        host_totals=HostTotals(host_to_device_bytes_per_s=host_total, device_to_host_bytes_per_s=host_total),
        efficiency=efficiency or Efficiency(),
        quantities={},
        origin="tiny.yaml",
    )


def tiny_scenario(
    *,
    model: ModelSpec | None = None,
    profile: HardwareProfile | None = None,
    formats: Formats = FP16,
    prompts: tuple[int, ...] = (6,),
    generated: int = 4,
    requests: int = 8,
    padded: bool = False,
) -> Scenario:
    """Prompts of 6 tokens, 4 generated, 8 requests; the mean context of a decode step is 8."""
    workload = Workload(
        name="tiny", prompt_lengths=prompts, generation_length=generated, num_requests=requests, padded=padded
    )
    return Scenario(profile=profile or tiny_profile(), model=model or tiny_model(), workload=workload, formats=formats)


def with_model(scenario: Scenario, model: ModelSpec) -> Scenario:
    """The same scenario with another model."""
    return replace(scenario, model=model)
