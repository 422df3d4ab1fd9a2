"""Layout: what the tasks of a policy are made of; the numbers a schedule lays out.

Work per operator comes from `hrm.cost` and shares from the policy as realised, so the seconds of a lane over a step add
up to what `hrm.full_cost` says, and the roofline bound of a graph is the prediction's busiest lane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hrm import cost
from hrm.full_cost import KERNELS_PER_LAYER
from hrm.graph import Operator, Phase
from hrm.memory import HEAD_BUFFER_BYTES
from hrm.model import LayerKind
from hrm.policy import Policy
from hrm.rates import derive_rates
from hrm.scenario import Scenario, Sizes, kv_replicas, measure_sizes

__all__ = ["Layout", "PageBytes"]

PRE_KERNELS = 4
ATTENTION_KERNELS = 1
POST_KERNELS = KERNELS_PER_LAYER - PRE_KERNELS - ATTENTION_KERNELS

BEFORE_ATTENTION = ("norms", "QKV projection")


@dataclass(frozen=True, slots=True)
class PageBytes:
    """A piece of a stage's streamed weights [byte]: experts from CPU memory and disk, the rest from CPU memory."""

    experts: float
    disk: float
    dense: float

    @property
    def total(self) -> float:
        """Bytes that pass the link."""
        return self.experts + self.disk + self.dense

    @property
    def cpu(self) -> float:
        """Bytes that come from CPU memory."""
        return self.experts + self.dense

    def cut(self, count: int) -> PageBytes:
        """The mean of so many pieces."""
        return PageBytes(self.experts / count, self.disk / count, self.dense / count)

    def before(self, number: int, count: int) -> PageBytes:
        """What comes before piece `number` of `count` equal ones: dense weights first, as a layer starts with them."""
        cpu = self.cpu * number / count
        dense = self.dense if number == count else min(self.dense, cpu)
        return PageBytes(max(0.0, cpu - dense), self.disk * number / count, dense)

    def piece(self, number: int, count: int) -> PageBytes:
        """Piece `number` of `count` equal ones."""
        low, high = self.before(number, count), self.before(number + 1, count)
        return PageBytes(high.experts - low.experts, high.disk - low.disk, high.dense - low.dense)

    def dense_pieces(self, count: int) -> int:
        """Of `count` equal pieces the first so many have all dense weights."""
        return math.ceil(self.dense * count / self.cpu - 1e-9) if self.dense > 0 else 0


@dataclass(frozen=True)
class Layout:
    """Numbers of one policy for one scenario.

    Attributes
    ----------
    scenario : Scenario
    policy : Policy
    only_layers : int or None
        Lay out no more than the first so many layers; None = all.
    only_micro_batches : int or None
        Lay out no more than so many micro-batches of a pass, each as large as it is, with as many bytes of streamed
        weights as fall to them: a narrow batch of the same shape. None = all.
    folded : bool
        Lay out only the first GPU of a tensor-parallel group: the others do the same at the same time.
    gathers_weights : bool
        Every GPU of a group gets the whole of each layer, its own part and the others', through the host.
    """

    scenario: Scenario
    policy: Policy
    only_layers: int | None = None
    only_micro_batches: int | None = None
    folded: bool = False
    gathers_weights: bool = False

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

    @property
    def gpus(self) -> int:
        """GPUs of the machine."""
        return self.scenario.profile.gpu.count

    @property
    def pipelined(self) -> bool:
        """Whether the layers are split over several GPUs, else (or with one GPU) every layer is."""
        return self.gpus > 1 and self.policy.parallelism == "pipeline"

    @property
    def group_size(self) -> int:
        """GPUs that share each layer."""
        return 1 if self.pipelined else self.gpus

    def device_of(self, layer: int) -> int:
        """GPU that computes a layer of a pipeline; the lm_head is with the last layer."""
        return min(layer, self.num_layers - 1) * self.gpus // self.num_layers

    def every_micro_batch(self, phase: Phase) -> int:
        """Micro-batches of a phase, laid out or not."""
        if phase == "prefill":
            return -(-self.policy.batch_size // self.policy.prefill_micro_batch_size)
        return self.policy.num_micro_batches

    def micro_batches(self, phase: Phase) -> int:
        """Micro-batches of a phase that are laid out."""
        every = self.every_micro_batch(phase)
        return every if self.only_micro_batches is None else min(every, self.only_micro_batches)

    def narrowed(self, phase: Phase) -> float:
        """Share of the batch that is laid out."""
        return self.micro_batches(phase) / self.every_micro_batch(phase)

    def requests(self, phase: Phase) -> float:
        """Requests of one micro-batch, the same for all [mean]."""
        return self.policy.batch_size / self.every_micro_batch(phase)

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

    def attention_decode(self, layer: int, step: int, share: float, *, on_gpu: bool) -> tuple[Operator, ...]:
        """Attention of a micro-batch's `share` of requests at decode step `step` (0 = after the prompt)."""
        key = (self.layer_kinds[layer].window, step, share, on_gpu)
        found = self._attention.get(key)
        if found is None:
            work = self.kv_read_bytes(layer, step) * share * self._attention_per_byte
            if on_gpu and not self.pipelined:
                work = replace(work, bytes_touched=work.bytes_touched * kv_replicas(self.scenario))
            found = self._attention[key] = (Operator("attention", work),)
        return found

    @cached_property
    def _attention(self) -> dict[tuple[int | None, int, float, bool], tuple[Operator, ...]]:
        return {}

    @cached_property
    def _attention_per_byte(self) -> cost.Work:
        read = self.sizes.kv_read_bytes_per_request
        return cost.attention_decode_per_kv_byte(self.scenario.model, self.scenario.formats, read)

    def attention_prefill(self, layer: int) -> tuple[Operator, ...]:
        """Attention over the prompts of one prefill micro-batch."""
        window = self.layer_kinds[layer].window
        found = self._prompt_attention.get(window)
        if found is None:
            pairs = self.requests("prefill") * self.sizes.prompt_pairs_by_window[window]
            work = cost.attention_prefill(self.scenario.model, self.scenario.formats, self.tokens("prefill"), pairs)
            found = self._prompt_attention[window] = (Operator("attention", work),)
        return found

    @cached_property
    def _prompt_attention(self) -> dict[int | None, tuple[Operator, ...]]:
        return {}

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

    def kv_copied_bytes(self, layer: int, step: int) -> float:
        """The same as it is copied: a latent cache goes to each GPU of a tensor-parallel group [byte]."""
        return self.kv_read_bytes(layer, step) * (1.0 if self.pipelined else kv_replicas(self.scenario))

    def kv_prompt_bytes(self) -> float:
        """KV cache one prefill micro-batch adds to one layer, mean over the layers [byte]."""
        return self.requests("prefill") * self.sizes.kv_prompt_bytes_per_request / self.scenario.model.n_layers

    def head(self, phase: Phase, pieces: int = 1) -> tuple[Operator, ...]:
        """Logits of one micro-batch, from one of so many equal pieces of the lm_head."""
        found = self._tables.get((phase, pieces))
        if found is None:
            work = cost.lm_head(self.scenario.model, self.scenario.formats, self.requests(phase))
            found = self._tables[(phase, pieces)] = (Operator("lm_head", (1.0 / pieces) * work),)
        return found

    def embedding(self, phase: Phase) -> tuple[Operator, ...]:
        """Look-up of one micro-batch's tokens."""
        found = self._tables.get((phase, 0))
        if found is None:
            work = cost.embedding(self.scenario.model, self.scenario.formats, self.tokens(phase))
            found = self._tables[(phase, 0)] = (Operator("embedding", work),)
        return found

    @cached_property
    def _tables(self) -> dict[tuple[Phase, int], tuple[Operator, ...]]:
        return {}

    def halves(self, operators: tuple[Operator, ...]) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
        """Post-attention before and after the first sum over a tensor-parallel group: output projection, the rest."""
        key = tuple(id(operator) for operator in operators)
        found = self._halves.get(key)
        if found is None:
            first = tuple(operator for operator in operators if operator.name == "output projection")
            found = self._halves[key] = (first, tuple(each for each in operators if each.name != "output projection"))
        return found

    @cached_property
    def _halves(self) -> dict[tuple[int, ...], tuple[tuple[Operator, ...], tuple[Operator, ...]]]:
        return {}

    def all_reduce_bytes(self, phase: Phase) -> float:
        """Bytes each GPU of a group sends, and receives, to sum the hidden states of one micro-batch (ring) [byte]."""
        return 2.0 * (self.gpus - 1) / self.gpus * self.tokens(phase) * self.row_bytes

    @cached_property
    def copies_experts(self) -> bool:
        """Whether an expert that is not on the GPU is copied there in decode, else computed on the CPU.

        Left of the turning point P1 (Eq. 9) copying an expert takes longer than computing it where it lies, for the
        tokens of a step that reach it under uniform routing: one copy serves all micro-batches, the CPU computes each.
        """
        rates = derive_rates(self.scenario.profile, self.scenario.formats)
        work = cost.routed_experts(self.scenario.model, self.scenario.formats, self.tokens("decode"))
        copied = self.sizes.layer_expert_bytes / rates.h2d_bytes_per_s
        return self.every_micro_batch("decode") * float(rates.cpu_seconds(work)) > copied

    def head_pieces(self) -> int:
        """Pieces of a streamed lm_head; its two buffers hold one each."""
        return max(1, math.ceil(self.sizes.lm_head_bytes / HEAD_BUFFER_BYTES - 1e-9))

    def streamed(self, stage_layer: int, phase: Phase, *, experts: bool) -> PageBytes:
        """Weights that one pass copies to the GPU for a layer; layer L is the lm_head [byte].

        Of the batch that is laid out: where micro-batches are left out, so is their share of the bytes.
        """
        policy, sizes, part = self.policy, self.sizes, self.narrowed(phase)
        if stage_layer == self.num_layers:
            return PageBytes(0.0, 0.0, 0.0 if policy.lm_head_on_gpu else part * sizes.lm_head_bytes)
        cpu = disk = dense = 0.0
        if not policy.dense_weights_on_gpu:
            kind = self.layer_kinds[stage_layer]
            dense = float(self.scenario.model.layer_dense_bytes(kind.is_moe, self.scenario.formats.weights))
        if experts and self.streams_experts(stage_layer):
            disk = policy.weights_on_disk * sizes.layer_expert_bytes
            cpu = max(0.0, 1.0 - policy.weights_on_gpu - policy.weights_on_disk) * sizes.layer_expert_bytes
        return PageBytes(part * cpu, part * disk, part * dense)

    def read_for_cpu(self, layer: int) -> float:
        """Expert weights that a decode pass reads from disk for the CPU to compute with [byte]."""
        if self.policy.ffn_on_gpu or not self.streams_experts(layer):
            return 0.0
        return self.narrowed("decode") * self.policy.weights_on_disk * self.sizes.layer_expert_bytes

    def experts_of(self, share: float, operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        """The part of the experts' work that falls to `share` of them, routing being uniform."""
        key = (id(operators), share)
        found = self._shares.get(key)
        if found is None:
            found = self._shares[key] = tuple(Operator(name, share * work) for name, work in operators)
        return found

    @cached_property
    def _shares(self) -> dict[tuple[int, float], tuple[Operator, ...]]:
        return {}

    def expert_share(self, phase: Phase, micro_batches: int, experts: int) -> tuple[Operator, ...]:
        """One of `experts` experts of a layer, for its part of the tokens of so many micro-batches, routing uniform."""
        key = (phase, micro_batches, experts)
        found = self._visits.get(key)
        if found is None:
            # Of a batch of which only part is laid out: what that part costs of the whole, its weights read once.
            part = micro_batches * self.tokens(phase) / self._tokens_at_once(phase, micro_batches)
            work = cost.routed_experts(
                self.scenario.model, self.scenario.formats, self._tokens_at_once(phase, micro_batches)
            )
            found = self._visits[key] = (Operator("routed experts", (part / experts) * work),)
        return found

    def _tokens_at_once(self, phase: Phase, micro_batches: int) -> float:
        return micro_batches / (self.narrowed(phase) if phase == "decode" else 1.0) * self.tokens(phase)

    @cached_property
    def _visits(self) -> dict[tuple[Phase, int, int], tuple[Operator, ...]]:
        return {}

    def period(self) -> tuple[int, int]:
        """Layers before the pattern of layers repeats, and layers of one repetition."""
        kinds = [(kind.is_moe, kind.window) for kind in self.layer_kinds]
        for prefix in range(len(kinds)):
            rest = kinds[prefix:]
            for length in range(1, len(rest) // 2 + 1):
                if all(rest[i] == rest[i % length] for i in range(len(rest))):
                    return prefix, length
        return len(kinds), 0
