"""Policy: what runs where, in which pieces (Table 1 of the paper, and what a usable plan needs beyond it).

Legend: N batch_size, mu micro_batch_size, n_ub num_micro_batches, A_g attention_on_gpu, F_g ffn_on_gpu,
r_w weights_on_gpu, r_c kv_on_gpu. `w` in the docstrings is the routed-expert weights (a dense model's MLP weights).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from hrm.errors import InputError

__all__ = ["Parallelism", "Policy", "WeightSlots"]

WeightSlots = Literal[1, 2, "experts"]
"""Buffers on the GPU for streamed expert weights: of one or two layers, or a ring of experts."""

Parallelism = Literal["tensor", "pipeline"]
"""How several GPUs share the work: every layer split over all of them, or each with layers of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One point of the search space. Shares are of routed-expert bytes and of KV bytes, as realised.

    Attributes
    ----------
    batch_size, micro_batch_size, num_micro_batches : int
        N requests in flight, cut into n_ub micro-batches of at most mu requests: mu*(n_ub-1) < N <= mu*n_ub.
    prefill_micro_batch_size : int
        Requests per micro-batch of the prefill phase.
    attention_on_gpu, ffn_on_gpu : bool
        A_g and F_g of decode: where attention and the routed experts are computed. Prefill computes on the GPU,
        unless `everything_on_cpu`.
    weights_on_gpu, weights_on_disk : float
        r_w, and the share on disk, of the routed-expert bytes; the rest is in CPU memory.
    kv_on_gpu, kv_on_disk : float
        r_c, and the share on disk, of the KV bytes; the rest is in CPU memory.
    weight_slots : {1, 2, "experts"}
        Buffers on the GPU for the streamed expert weights (of size zero where r_w = 1).
    ring_experts : int
        Number of experts in the ring where `weight_slots` is ``"experts"``, else 0.
    dense_weights_on_gpu : bool
        Attention, router, shared-expert and norm weights resident on the GPU, else streamed with their layer.
    embedding_on_gpu, lm_head_on_gpu : bool
        Else the embedding is looked up on the CPU, and the head is streamed like one more layer.
    pin_weights : bool
        CPU-resident weights page-locked once at load, else each copy goes through a pinned staging buffer.
    micro_batch_token_budget : int
        Prompt and generated tokens one micro-batch may hold.
    everything_on_cpu : bool
        The trivial plan that does not use the GPU.
    parallelism : {"tensor", "pipeline"}
        How several GPUs share the work.
    """

    batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    prefill_micro_batch_size: int
    attention_on_gpu: bool
    ffn_on_gpu: bool
    weights_on_gpu: float = 0.0
    weights_on_disk: float = 0.0
    kv_on_gpu: float = 0.0
    kv_on_disk: float = 0.0
    weight_slots: WeightSlots = 2
    ring_experts: int = 0
    dense_weights_on_gpu: bool = True
    embedding_on_gpu: bool = True
    lm_head_on_gpu: bool = True
    pin_weights: bool = True
    micro_batch_token_budget: int = 0
    everything_on_cpu: bool = False
    parallelism: Parallelism = "tensor"

    def __post_init__(self) -> None:
        for key in ("batch_size", "micro_batch_size", "num_micro_batches", "prefill_micro_batch_size"):
            if getattr(self, key) < 1:
                raise InputError(f"{getattr(self, key)} is below 1", where=f"policy.{key}")
        low, high = self.micro_batch_size * (self.num_micro_batches - 1), self.micro_batch_size * self.num_micro_batches
        if not low < self.batch_size <= high:
            raise InputError(
                f"{self.batch_size} requests do not make {self.num_micro_batches} micro-batches of "
                f"{self.micro_batch_size}",
                where="policy.batch_size",
                way_out=f"between {low + 1} and {high}",
            )
        for first, second in (("weights_on_gpu", "weights_on_disk"), ("kv_on_gpu", "kv_on_disk")):
            shares = (getattr(self, first), getattr(self, second))
            if min(shares) < 0 or sum(shares) > 1 + 1e-12:
                raise InputError(f"{shares} are not shares of one whole", where=f"policy.{first}, policy.{second}")
        if self.everything_on_cpu and self.uses_the_gpu:
            raise InputError(
                "everything is on the CPU, and something on the GPU",
                where="policy.everything_on_cpu",
                way_out="A_g, F_g, r_w, r_c and what else is on the GPU: false, or 0",
            )
        if (self.weight_slots == "experts") != (self.ring_experts > 0):
            raise InputError(
                f"{self.ring_experts} experts with slots {self.weight_slots!r}", where="policy.ring_experts"
            )

    @property
    def uses_the_gpu(self) -> bool:
        """Whether anything is computed or kept on the GPU."""
        places = (self.attention_on_gpu, self.ffn_on_gpu, self.dense_weights_on_gpu, self.embedding_on_gpu)
        return any((*places, self.lm_head_on_gpu, self.weights_on_gpu > 0, self.kv_on_gpu > 0))

    @property
    def schedule(self) -> str:
        """The schedule this policy runs under (method of section 4.1 and its baselines)."""
        if self.everything_on_cpu:
            return "cpu_only"
        if not self.attention_on_gpu:
            return "cgopipe"
        if self.kv_on_gpu >= 1 and self.weights_on_gpu > 0 and not self.ffn_on_gpu:
            return "static_experts"
        if self.num_micro_batches == 1 and self.kv_on_gpu >= 1:
            return "streaming"
        return "s4"

    @property
    def kv_requests_on_gpu(self) -> int:
        """Requests of one full micro-batch whose KV cache stays on the GPU, rounded down to whole requests."""
        return int(self.kv_on_gpu * self.batch_size / self.num_micro_batches + 1e-6)

    def to_dict(self) -> dict[str, Any]:
        """The policy as the JSON document names it."""
        return {
            "batch_size": self.batch_size,
            "micro_batch_size": self.micro_batch_size,
            "num_micro_batches": self.num_micro_batches,
            "prefill_micro_batch_size": self.prefill_micro_batch_size,
            "attention_on_gpu": self.attention_on_gpu,
            "ffn_on_gpu": self.ffn_on_gpu,
            "weights_on_gpu": self.weights_on_gpu,
            "weights_on_disk": self.weights_on_disk,
            "kv_on_gpu": self.kv_on_gpu,
            "kv_on_disk": self.kv_on_disk,
            "weight_slots": self.weight_slots,
            "ring_experts": self.ring_experts,
            "dense_weights_on_gpu": self.dense_weights_on_gpu,
            "embedding_on_gpu": self.embedding_on_gpu,
            "lm_head_on_gpu": self.lm_head_on_gpu,
            "pin_weights": self.pin_weights,
            "micro_batch_token_budget": self.micro_batch_token_budget,
            "everything_on_cpu": self.everything_on_cpu,
            "parallelism": self.parallelism,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any], *, where: str) -> Policy:
        """Rebuild a policy from `to_dict`; keys it does not know (such as `dtypes`) are left to the caller.

        Raises
        ------
        InputError
            A key is missing or has a value of the wrong kind.
        """
        values = {}
        for field in fields(Policy):
            place = f"{where}: policy.{field.name}"
            if field.name == "parallelism" and field.name not in data:
                continue  # plans of before there was a choice
            if field.name not in data:
                raise InputError("this key is missing", where=place)
            value = values[field.name] = data[field.name]
            kind = str(field.type)  # the annotation as it is written above
            fits, words = {
                "int": (type(value) is int, "a whole number"),
                "float": (type(value) in (int, float), "a number"),
                "bool": (type(value) is bool, "true or false"),
                "WeightSlots": (type(value) in (int, str) and value in (1, 2, "experts"), "1, 2 or 'experts'"),
                "Parallelism": (value in ("tensor", "pipeline"), "'tensor' or 'pipeline'"),
            }[kind]
            if not fits:
                raise InputError(f"{value!r:.60} is not accepted", where=place, way_out=words)
        return Policy(**values)
