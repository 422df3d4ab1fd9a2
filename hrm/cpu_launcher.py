"""The launcher where the CPU computes everything: what there is without using the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hrm.graph import Hold, Op, Phase
from hrm.holds import ACTIVATIONS, KV_CACHE, WAITING, held
from hrm.issuing import CPU, DISK, Issued, Stage
from hrm.launcher import Launcher

__all__ = ["CpuLauncher"]


@dataclass(slots=True)
class CpuLauncher(Launcher):
    """One lane computes; experts on disk are read a layer ahead into one of two buffers."""

    def members(self, stage: Stage) -> range:
        """All micro-batches of a phase."""
        return range(self.layout.micro_batches(stage.phase))

    def num_groups(self, phase: Phase) -> int:
        """Parts of the batch that pass the layers apart from each other."""
        return 1

    def issue(self, stages: list[Stage]) -> Iterator[bool]:
        """Issue stages of one phase; yields at the end of every pass over the layers."""
        layers = self.layout.num_layers
        self._read(stages[0])
        for number, stage in enumerate(stages):
            if number + 1 < len(stages):
                self._read(stages[number + 1])
            members = self.members(stage)
            for j in members:
                if stage.layer < layers:
                    self._layer(stage, j, last=j == members[-1])
                else:
                    self._next_token(stage, j)
            if stage.layer == layers:
                yield True

    def _previous(self, stage: Stage) -> Stage:
        return stage._replace(layer=stage.layer - 1)

    def _read(self, stage: Stage) -> None:
        if stage.layer >= self.layout.num_layers or not self.layout.streams_experts(stage.layer):
            return
        part = self.layout.narrowed(stage.phase)
        size = part * self.layout.policy.weights_on_disk * self.layout.sizes.layer_expert_bytes
        if size <= 0:
            return
        number = len(self.disk_experts) - 2
        after = self.cpu_experts[number] if number >= 0 else ()
        self.disk_experts[stage] = self.add(Op.READ_DISK, DISK, stage, after, page=0, bytes_moved=size)

    def _layer(self, stage: Stage, j: int, *, last: bool) -> None:
        """One micro-batch's layer: projections, attention, projections, experts."""
        layout, phase = self.layout, stage.phase
        operators = layout.operators(phase, stage.layer)
        if stage.layer == 0:
            after: tuple[Issued, ...] = (self._look_up(stage, j),)
        else:
            after = self.shared.done[(self._previous(stage), j)]
        alive = held("cpu", ACTIVATIONS, self.sizes.on_cpu)
        pre = self.add(Op.PRE_ATTENTION, CPU, stage, after, micro_batch=j, operators=operators["pre"], acquires=alive)
        if phase == "prefill":
            work = layout.attention_prefill(stage.layer)
        else:
            work = layout.attention_decode(stage.layer, stage.step, 1.0, on_gpu=False)
        attention = self.add(Op.ATTENTION, CPU, stage, (pre,), micro_batch=j, operators=work)
        ends = self.add(
            Op.POST_ATTENTION,
            CPU,
            stage,
            (attention,),
            micro_batch=j,
            operators=operators["post"],
            releases=() if operators["experts"] else alive,
        )
        if operators["experts"]:
            ready = (ends, *((self.disk_experts[stage],) if stage in self.disk_experts else ()))
            work = operators["experts"]
            ends = self.add(Op.EXPERTS, CPU, stage, ready, micro_batch=j, operators=work, releases=alive)
        if last and stage in self.disk_experts:
            self.cpu_experts.append((ends,))
        self.shared.done[(stage, j)] = (ends,)

    def _look_up(self, stage: Stage, j: int) -> Issued:
        """Embedding of a micro-batch; in prefill its requests are admitted, and get their KV cache."""
        phase = stage.phase
        after: tuple[Issued, ...] = ()
        takes: tuple[Hold, ...] = ()
        if phase == "prefill":
            share = 1.0 / self.layout.every_micro_batch(phase)
            takes = held("cpu", KV_CACHE, self.sizes.kv_cache["cpu"] * share)
            takes += held("cpu", WAITING, self.sizes.waiting * share)
        elif (phase, stage.step - 1, j) in self.shared.sampled:
            after = (self.shared.sampled[(phase, stage.step - 1, j)],)
        elif self.shared.prefilled is not None:
            after = (self.shared.prefilled,)
        return self.add(
            Op.EMBED, CPU, stage, after, micro_batch=j, operators=self.layout.embedding(phase), acquires=takes
        )

    def _next_token(self, stage: Stage, j: int) -> None:
        layout, phase = self.layout, stage.phase
        after = self.shared.done[(self._previous(stage), j)]
        head = self.add(Op.LM_HEAD, CPU, stage, after, micro_batch=j, operators=layout.head(phase))
        waited = self.sizes.waiting / layout.every_micro_batch(phase) if phase == "prefill" else 0.0
        sample = self.add(Op.SAMPLE, CPU, stage, (head,), micro_batch=j, releases=held("cpu", WAITING, waited))
        self.shared.sampled[(phase, stage.step, j)] = sample
        if phase == "prefill":
            self.shared.prefilled = sample
