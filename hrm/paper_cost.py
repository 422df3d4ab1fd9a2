"""Eqs. 12-14 with the terms and limits of the authors' public planner, so that results compare on the same terms.

Per layer, decode only: ``T = max(link, T_cpu, T_gpu)`` (Eq. 12), T_gpu and T_cpu being sums of max(bytes/bandwidth,
FLOPs/peak) per operator (Eqs. 13, 14). The planner counts attention scores only, takes every expert as touched, keeps
all non-expert weights on the GPU, leaves out embedding, lm_head, norms, prefill, launches and contention, and caps the
GPU at 0.86 and the host at 0.8 of their memory. Kept exactly, right or wrong; the `full` model is ours.

Legend (per layer, fp16 unless the storage format says otherwise): h1, h2 model and expert width, E experts, k top-k,
d head width, q and kv query and KV heads, s prompt, n generated tokens, L layers, W expert weights of a layer, W_o all
other weights of the model, mu micro-batch, n_ub micro-batches, N = mu*n_ub, tp GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hrm.affine import Affine, Number
from hrm.dtypes import bytes_per_value, kv_bytes_per_value
from hrm.errors import InputError
from hrm.scenario import Scenario

__all__ = ["PaperTerms", "paper_terms"]

GPU_SHARE = 0.86
CPU_SHARE = 0.8

WEIGHTS_ON_GPU = "weights_on_gpu"  # r_w, a share
KV_ON_GPU = "kv_on_gpu"  # r_c * N, in requests: the product of a share and N would not be linear


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTerms:
    """The planner's formulas for one scenario; shapes as numbers, rates in SI units.

    Attributes
    ----------
    weights_layer, weights_other : float
        W and W_o [byte].
    gpu_flops_per_s, gpu_bytes_per_s : float
        All GPUs.
    link_bytes_per_s, cpu_flops_per_s, cpu_bytes_per_s : float
        The link is not multiplied by the number of GPUs.
    gpu_limit_bytes, cpu_limit_bytes : float
        0.86 of the card(s) and 0.8 of the host [byte].
    """

    h1: float
    h2: float
    top_k: float
    head: float
    query_heads: float
    kv_heads: float
    layers: int
    prompt: float
    generated: float
    gpus: float
    value: float
    kv_value: float
    weights_layer: float
    weights_other: float
    gpu_flops_per_s: float
    gpu_bytes_per_s: float
    link_bytes_per_s: float
    cpu_flops_per_s: float
    cpu_bytes_per_s: float
    gpu_limit_bytes: float
    cpu_limit_bytes: float

    def kv_request_bytes(self) -> float:
        """KV cache of one request over all layers: 4*(s+n)*kv*d*L in fp16 [byte]."""
        return 2.0 * self.kv_value * (self.prompt + self.generated) * self.kv_heads * self.head * self.layers

    def link_seconds(self, requests: Number, *, attention_on_gpu: bool, ffn_on_gpu: bool) -> Affine:
        """Seconds of the link per layer: W*(1-r_w) and, with GPU attention, KV of the mean context [s] (Eq. 12)."""
        moved = Affine()
        if ffn_on_gpu:
            moved = moved + self.weights_layer - Affine.of(WEIGHTS_ON_GPU, self.weights_layer)
        if attention_on_gpu:
            context = self.prompt + self.generated / 2.0
            each = 2.0 * self.kv_value * self.kv_heads * self.head * context
            moved = moved + each * requests - Affine.of(KV_ON_GPU, each)
        return moved / self.link_bytes_per_s

    def attention_seconds(self, micro_batch: Number, *, on_gpu: bool) -> Number:
        """Attention of one micro-batch and layer: mu*(s+n)*q*(2d+2) FLOPs, scores only [s] (Eq. 13)."""
        peak, bandwidth = self._side(on_gpu)
        context = self.prompt + self.generated
        flops = micro_batch * context * self.query_heads * (2.0 * self.head + 2.0)
        queries = 2.0 * micro_batch * self.query_heads * self.head * self.value
        cached = 2.0 * micro_batch * context * self.kv_heads * self.head * self.kv_value
        return np.maximum(flops / peak, (queries + cached) / bandwidth)

    def ffn_seconds(self, micro_batch: Number, *, on_gpu: bool) -> Number:
        """Experts of one micro-batch and layer: all W read once, 2*mu*h1*h2*3*k FLOPs [s] (Eq. 14)."""
        peak, bandwidth = self._side(on_gpu)
        flops = 2.0 * micro_batch * self.h1 * self.h2 * 3.0 * self.top_k
        touched = self.weights_layer + self.value * micro_batch * (self.h1 + self.h2)
        return np.maximum(flops / peak, touched / bandwidth)

    def _side(self, on_gpu: bool) -> tuple[float, float]:
        if on_gpu:
            return self.gpu_flops_per_s, self.gpu_bytes_per_s
        return self.cpu_flops_per_s, self.cpu_bytes_per_s

    def gpu_seconds_per_micro_batch(self, micro_batch: Number, *, attention_on_gpu: bool, ffn_on_gpu: bool) -> Number:
        """T_gpu / n_ub [s] (Eq. 12)."""
        seconds: Number = 0.0 * np.asarray(micro_batch)
        if attention_on_gpu:
            seconds = seconds + self.attention_seconds(micro_batch, on_gpu=True)
        if ffn_on_gpu:
            seconds = seconds + self.ffn_seconds(micro_batch, on_gpu=True)
        return seconds

    def cpu_seconds_per_micro_batch(self, micro_batch: Number, *, attention_on_gpu: bool, ffn_on_gpu: bool) -> Number:
        """T_cpu / n_ub [s] (Eq. 12)."""
        seconds: Number = 0.0 * np.asarray(micro_batch)
        if not attention_on_gpu:
            seconds = seconds + self.attention_seconds(micro_batch, on_gpu=False)
        if not ffn_on_gpu:
            seconds = seconds + self.ffn_seconds(micro_batch, on_gpu=False)
        return seconds

    def gpu_memory(self, micro_batch: Number, requests: Number, *, phase: str) -> dict[str, Affine]:
        """GPU bytes by term, in prefill or decode [byte]; the residual of all N requests stays on the GPU."""
        tokens = micro_batch * self.prompt
        buffers = self.weights_layer * 2.0
        terms = {
            "non-expert weights": Affine(self.weights_other),
            "resident expert weights": Affine.of(WEIGHTS_ON_GPU, self.weights_layer * self.layers),
            "two-layer weight buffer": buffers - Affine.of(WEIGHTS_ON_GPU, buffers),
            "fused MoE scratch": Affine(2.4 * tokens * self.top_k * (self.h1 + 3.0 * self.h2)),
            "KV buffers of two micro-batches": Affine(4.0 * self.kv_value * tokens * self.kv_heads * self.head),
            "KV cache": Affine.of(KV_ON_GPU, self.kv_request_bytes()),
        }
        if phase == "prefill":
            terms["prefill activations"] = Affine(self.gpus * 2.0 * self.value * self.h1 * tokens)
            terms["residual of all requests"] = Affine(self.gpus * self.value * self.h1 * requests * self.prompt)
        else:
            terms["decode hidden states"] = Affine(self.gpus * 2.0 * self.value * self.h1 * requests)
        return terms

    def cpu_memory(self, requests: Number) -> dict[str, Affine]:
        """CPU bytes by term [byte]."""
        stored, staged = self.weights_layer * self.layers, 2.0 * self.weights_layer
        each = self.kv_request_bytes()
        return {
            "expert weights": stored - Affine.of(WEIGHTS_ON_GPU, stored),
            "KV cache": each * requests - Affine.of(KV_ON_GPU, each),
            "hidden states": Affine(self.value * self.h1 * requests * self.prompt * self.gpus),
            "pinned staging": staged - Affine.of(WEIGHTS_ON_GPU, staged),
        }


def paper_terms(scenario: Scenario) -> PaperTerms:
    """Numbers of the planner's formulas for a scenario.

    Raises
    ------
    InputError
        The model is outside what the formulas describe (latent attention, sliding windows, dense models, dense or
        shared layers are not in them).
    """
    model, profile, formats = scenario.model, scenario.profile, scenario.formats
    outside = ""
    if not model.is_moe:
        outside = "it has no experts"
    elif model.mla is not None:
        outside = "it has latent attention"
    elif any(window is not None for window in model.layer_windows):
        outside = "it has sliding-window layers"
    elif model.n_dense_layers or model.shared_ffn:
        outside = "it has dense layers or shared experts"
    if outside:
        raise InputError(
            f"the paper's formulas do not describe {model.name}: {outside}",
            where="--cost-model paper",
            way_out="--cost-model full",
        )
    value = bytes_per_value(formats.experts(model))
    gpus = float(profile.gpu.count)
    h1, h2, head = float(model.hidden_size), float(model.expert_ffn), float(model.head_dim)
    kv_heads = float(model.n_kv_heads)
    return PaperTerms(
        h1=h1,
        h2=h2,
        top_k=float(model.top_k),
        head=head,
        query_heads=float(model.n_heads),
        kv_heads=kv_heads,
        layers=model.n_layers,
        prompt=scenario.workload.mean_prompt_tokens,
        generated=float(scenario.workload.generation_length),
        gpus=gpus,
        value=formats.activation_bytes,
        kv_value=kv_bytes_per_value(formats.kv),
        weights_layer=3.0 * value * h1 * h2 * model.n_experts,
        weights_other=model.n_layers * (2.0 * value * h1 * h1 + 2.0 * value * h1 * kv_heads * head),
        gpu_flops_per_s=gpus * profile.gpu.peak(formats.compute),
        gpu_bytes_per_s=gpus * profile.gpu.bandwidth_bytes_per_s,
        link_bytes_per_s=profile.link.host_to_device.pinned_bytes_per_s,
        cpu_flops_per_s=profile.cpu.peak(formats.compute),
        cpu_bytes_per_s=profile.cpu.bandwidth_bytes_per_s,
        gpu_limit_bytes=GPU_SHARE * gpus * profile.gpu.memory_bytes,
        cpu_limit_bytes=CPU_SHARE * profile.cpu.memory_bytes,
    )
