"""Layout: what the tasks of a policy are made of; the numbers a schedule lays out.

Work per operator comes from `hrm.cost` and shares from the policy as realised, so the seconds of a lane over a step add
up to what `hrm.full_cost` says, and the roofline bound of a graph is the prediction's busiest lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hrm import cost
from hrm.errors import InputError
from hrm.full_cost import KERNELS_PER_LAYER
from hrm.graph import Operator, Phase
from hrm.model import LayerKind
from hrm.policy import Policy
from hrm.scenario import Scenario, Sizes, measure_sizes

__all__ = ["Layout", "PageBytes"]

PRE_KERNELS = 4
ATTENTION_KERNELS = 1
POST_KERNELS = KERNELS_PER_LAYER - PRE_KERNELS - ATTENTION_KERNELS

BEFORE_ATTENTION = ("norms", "QKV projection")


@dataclass(frozen=True, slots=True)
class PageBytes:
    """One piece of a layer's streamed weights [byte]: from CPU memory, from disk, and all of it."""

    cpu: float
    disk: float

    @property
    def total(self) -> float:
        """Bytes that pass the link."""
        return self.cpu + self.disk


@dataclass(frozen=True)
class Layout:
    """Numbers of one policy for one scenario.

    Attributes
    ----------
    scenario : Scenario
    policy : Policy
    only_layers : int or None
        Lay out no more than the first so many layers; None = all.
    """

    scenario: Scenario
    policy: Policy
    only_layers: int | None = None

    def __post_init__(self) -> None:
        if self.scenario.profile.gpu.count > 1:
            raise InputError(
                f"{self.scenario.profile.name} has {self.scenario.profile.gpu.count} GPUs",
                where="task graph",
                way_out="a profile with one GPU: graphs of several are not laid out yet",
            )

    @cached_property
    def sizes(self) -> Sizes:
        """Byte counts of the scenario."""
        return measure_sizes(self.scenario)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of every layer, in order."""
        model = self.scenario.model
        return tuple(
            LayerKind(count=1, is_moe=is_moe, window=window)
            for is_moe, window in zip(model.moe_layers, model.layer_windows, strict=True)
        )

    @property
    def num_layers(self) -> int:
        """Decoder layers that are laid out."""
        every = self.scenario.model.n_layers
        return every if self.only_layers is None else min(every, self.only_layers)

    @property
    def row_bytes(self) -> float:
        """Hidden state of one token [byte]."""
        return self.scenario.model.hidden_size * self.scenario.formats.activation_bytes

    @property
    def qkv_bytes(self) -> float:
        """What attention on the CPU needs of one token (D1) [byte]."""
        return cost.qkv_values(self.scenario.model) * self.scenario.formats.activation_bytes

    @property
    def result_bytes(self) -> float:
        """What attention on the CPU gives back for one token (D2) [byte]."""
        return cost.attention_result_values(self.scenario.model) * self.scenario.formats.activation_bytes

    @property
    def kv_new_bytes(self) -> float:
        """KV cache one token adds to one layer [byte]."""
        return self.sizes.kv_new_bytes_per_token / self.scenario.model.n_layers

    def micro_batches(self, phase: Phase) -> int:
        """Micro-batches of a phase."""
        if phase == "prefill":
            return -(-self.policy.batch_size // self.policy.prefill_micro_batch_size)
        return self.policy.num_micro_batches

    def requests(self, phase: Phase) -> float:
        """Requests of one micro-batch, the same for all [mean]."""
        return self.policy.batch_size / self.micro_batches(phase)

    def tokens(self, phase: Phase) -> float:
        """Tokens one micro-batch computes in a pass."""
        return self.requests(phase) * (self.sizes.prompt_tokens if phase == "prefill" else 1.0)

    def streams_experts(self, layer: int) -> bool:
        """Whether the layer has expert weights that the planner places."""
        return self.layer_kinds[layer].is_moe or not self.scenario.model.is_moe

    def operators(self, phase: Phase, layer: int) -> dict[str, tuple[Operator, ...]]:
        """Operators of a layer for one micro-batch, in groups: "pre", "post" (without experts), "experts"."""
        key = (phase, self.layer_kinds[layer].is_moe)
        found = self._operators.get(key)
        if found is None:
            found = self._operators[key] = self._group_operators(phase, layer)
        return found

    @cached_property
    def _operators(self) -> dict[tuple[Phase, bool], dict[str, tuple[Operator, ...]]]:
        return {}

    @cached_property
    def _kv_read(self) -> dict[tuple[int | None, int], float]:
        return {}

    def _group_operators(self, phase: Phase, layer: int) -> dict[str, tuple[Operator, ...]]:
        kind, model = self.layer_kinds[layer], self.scenario.model
        wanted = {"norms", "QKV projection", "output projection"}
        wanted |= {"router", "shared expert"} if kind.is_moe else ({"dense MLP"} if model.is_moe else set())
        if self.streams_experts(layer):
            wanted.add("routed experts")
        groups: dict[str, list[Operator]] = {"pre": [], "post": [], "experts": []}
        for name, _, work in cost.layer_operators(model, self.scenario.formats, self.tokens(phase)):
            if name in wanted:
                group = "pre" if name in BEFORE_ATTENTION else "experts" if name == "routed experts" else "post"
                groups[group].append(Operator(name, work))
        return {group: tuple(found) for group, found in groups.items()}

    def attention_decode(self, layer: int, step: int, share: float) -> tuple[Operator, ...]:
        """Attention of a micro-batch's `share` of requests at decode step `step` (0 = after the prompt)."""
        read = self.kv_read_bytes(layer, step) * share
        per_byte = cost.attention_decode_per_kv_byte(
            self.scenario.model, self.scenario.formats, self.sizes.kv_read_bytes_per_request
        )
        return (Operator("attention", read * per_byte),)

    def attention_prefill(self, layer: int) -> tuple[Operator, ...]:
        """Attention over the prompts of one prefill micro-batch."""
        pairs = self.requests("prefill") * self.sizes.prompt_pairs_by_window[self.layer_kinds[layer].window]
        model, formats = self.scenario.model, self.scenario.formats
        return (Operator("attention", cost.attention_prefill(model, formats, self.tokens("prefill"), pairs)),)

    def kv_read_bytes(self, layer: int, step: int) -> float:
        """KV cache one micro-batch reads in a layer at a decode step [byte]."""
        window = self.layer_kinds[layer].window
        found = self._kv_read.get((window, step))
        if found is None:
            found = self._kv_read[(window, step)] = self._mean_kv_read(window, step)
        return found

    def _mean_kv_read(self, window: int | None, step: int) -> float:
        prompts = np.asarray(self.scenario.workload.padded_prompt_lengths, dtype=np.float64)
        context = prompts + (step + 1.0)
        read = self.scenario.model.kv_bytes_read(context, self.scenario.formats.kv, window)
        return self.requests("decode") * float(np.mean(read))

    def kv_prompt_bytes(self) -> float:
        """KV cache one prefill micro-batch adds to one layer, mean over the layers [byte]."""
        return self.requests("prefill") * self.sizes.kv_prompt_bytes_per_request / self.scenario.model.n_layers

    def head(self, phase: Phase) -> tuple[Operator, ...]:
        """Logits of one micro-batch."""
        model, formats = self.scenario.model, self.scenario.formats
        return (Operator("lm_head", cost.lm_head(model, formats, self.requests(phase))),)

    def embedding(self, phase: Phase) -> tuple[Operator, ...]:
        """Look-up of one micro-batch's tokens."""
        return (Operator("embedding", cost.embedding(self.scenario.model, self.scenario.formats, self.tokens(phase))),)

    def streamed(self, layer: int, *, experts: bool) -> PageBytes:
        """Weights that one pass copies to the GPU for a layer; layer L is the lm_head [byte]."""
        policy, sizes = self.policy, self.sizes
        if layer == self.num_layers:
            return PageBytes(0.0 if policy.lm_head_on_gpu else sizes.lm_head_bytes, 0.0)
        cpu = disk = 0.0
        if not policy.dense_weights_on_gpu:
            kind = self.layer_kinds[layer]
            cpu += float(self.scenario.model.layer_dense_bytes(kind.is_moe, self.scenario.formats.weights))
        if experts and self.streams_experts(layer):
            disk = policy.weights_on_disk * sizes.layer_expert_bytes
            cpu += (1.0 - policy.weights_on_gpu - policy.weights_on_disk) * sizes.layer_expert_bytes
        return PageBytes(max(0.0, cpu), disk)

    def expert_share(self, tokens: float, experts: int) -> tuple[Operator, ...]:
        """One of `experts` experts of a layer, for its part of `tokens` tokens under uniform routing."""
        work = cost.routed_experts(self.scenario.model, self.scenario.formats, tokens)
        return (Operator("routed experts", (1.0 / experts) * work),)

    def period(self) -> tuple[int, int]:
        """Layers before the pattern of layers repeats, and layers of one repetition."""
        kinds = [(kind.is_moe, kind.window) for kind in self.layer_kinds]
        for prefix in range(len(kinds)):
            rest = kinds[prefix:]
            for length in range(1, len(rest) // 2 + 1):
                if all(rest[i] == rest[i % length] for i in range(len(rest))):
                    return prefix, length
        return len(kinds), 0
