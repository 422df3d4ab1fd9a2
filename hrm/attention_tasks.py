"""The first half of a layer: where a position starts from, projections, and attention wherever the KV cache lies."""

from __future__ import annotations

from dataclasses import dataclass, field

from hrm.graph import Hold, Op
from hrm.holds import ACTIVATIONS, KV_CACHE, KV_SLOTS, OF_THE_BATCH, WAITING, held
from hrm.issuing import CPU, D2H, DISK, GPU, H2D, Issued, Stage
from hrm.layout import ATTENTION_KERNELS, PRE_KERNELS
from hrm.weight_copies import WeightCopies

__all__ = ["AttentionTasks"]

KV_BUFFERS = 2
"""Micro-batches' KV caches on the GPU where attention is there and the cache is not: in use, and the next."""


@dataclass(slots=True)
class AttentionTasks(WeightCopies):
    """Issues what comes before the output projection."""

    before_post: dict[tuple[Stage, int], list[Issued]] = field(default_factory=dict)
    results: dict[tuple[Stage, int], Issued] = field(default_factory=dict)  # attention on the CPU
    rows: dict[tuple[Stage, int], Issued] = field(default_factory=dict)  # hidden states that came in
    kv_loaded: dict[tuple[Stage, int], Issued] = field(default_factory=dict)
    kv_uses: list[Issued] = field(default_factory=list)  # attention with a KV slot, in order
    kv_reads: list[Issued] = field(default_factory=list)  # what consumes each read of KV cache, in order
    kv_reads_issued: int = 0
    pres: list[Issued] = field(default_factory=list)  # pre-attention of prefill, in order
    kv_writes: list[tuple[Stage, int, Issued]] = field(default_factory=list)  # not issued yet
    kv_out: list[Issued] = field(default_factory=list)  # stores of KV cache of prefill, in order

    def _embed(self, stage: Stage, j: int) -> None:
        """Look up the tokens of a micro-batch; in prefill its requests are admitted, and get their KV cache."""
        phase, step = stage.phase, stage.step
        key = (phase, step, j)
        if key in self.shared.embedded:
            return
        layout, first, sizes = self.layout, Stage(phase, step, 0, stage.group), self.sizes
        after: tuple[Issued, ...] = ()
        takes: tuple[Hold, ...] = ()
        if phase == "prefill":
            share = 1.0 / layout.every_micro_batch(phase)
            for level, size in sizes.kv_cache.items():
                takes += held(level, KV_CACHE, size * share)
        elif (phase, step - 1, j) in self.shared.sampled:
            after = (self.shared.sampled[(phase, step - 1, j)],)
        elif self.shared.prefilled is not None:
            after = (self.shared.prefilled,)
            takes = held("gpu", OF_THE_BATCH, sizes.of_the_batch / layout.every_micro_batch(phase))
        operators = layout.embedding(phase)
        if layout.policy.embedding_on_gpu:
            found = self.add(Op.EMBED, GPU, first, after, micro_batch=j, operators=operators, acquires=takes)
        else:
            looked_up = self.add(Op.EMBED, CPU, first, after, micro_batch=j, operators=operators, acquires=takes)
            comes = held("gpu", ACTIVATIONS, sizes.prefill.row) if phase == "prefill" else ()
            size = layout.tokens(phase) * layout.row_bytes
            waits = (looked_up, *(self.pres[-1:] if phase == "prefill" else ()))
            found = self.add(
                Op.LOAD_HIDDEN,
                H2D,
                first,
                waits,
                micro_batch=j,
                part=0,
                bytes_moved=size,
                each=True,
                acquires=comes,
            )
        self.shared.embedded[key] = found

    def _row(self, stage: Stage, j: int, free: list[Issued]) -> None:
        """Bring in the hidden states a position of prefill starts from, once the buffer is `free`."""
        if (stage, j) in self.rows:
            return
        if stage.layer == 0:
            if not self.layout.policy.embedding_on_gpu:
                self._embed(stage, j)
                self.rows[(stage, j)] = self.shared.embedded[(stage.phase, stage.step, j)]
            return
        stored = self.shared.stored_rows.get((stage._replace(layer=stage.layer - 1), j))
        if stored is None:  # they stayed on the GPU
            return
        self.rows[(stage, j)] = self.add(
            Op.LOAD_HIDDEN,
            H2D,
            stage,
            (stored, *free),
            micro_batch=j,
            part=0,
            bytes_moved=self.layout.tokens(stage.phase) * self.layout.row_bytes,
            each=True,
            acquires=held("gpu", ACTIVATIONS, self.sizes.prefill.row),
            releases=held("cpu", WAITING, self._waiting()),
        )

    def _waiting(self) -> float:
        """Hidden states of one micro-batch in CPU memory; a single one passes a pipeline without waiting there."""
        parts = self.layout.every_micro_batch("prefill")
        return self.sizes.waiting / parts if parts > 1 else 0.0

    def _starts_from(self, stage: Stage, j: int) -> tuple[Issued, ...]:
        """What a position waits for: its token's embedding, or the layer before, on whichever device that was."""
        phase, before = stage.phase, (stage._replace(layer=stage.layer - 1), j)
        if phase == "prefill":
            self._row(stage, j, [])
            if (stage, j) in self.rows:
                return (self.rows[(stage, j)],)
        if stage.layer == 0:
            self._embed(stage, j)
            return (self.shared.embedded[(phase, stage.step, j)],)
        sent = self.shared.stored_rows.get(before)
        if phase == "decode" and sent is not None:  # from the device before in the pipeline
            size = self.layout.tokens(phase) * self.layout.row_bytes
            return (self.add(Op.LOAD_HIDDEN, H2D, stage, (sent,), micro_batch=j, part=3, bytes_moved=size),)
        return self.shared.done[before]

    def _before(self, stage: Stage, j: int) -> None:
        """Everything of a position up to attention on the CPU, or to the projections."""
        layout, policy, phase = self.layout, self.layout.policy, stage.phase
        after = [*self._starts_from(stage, j)]
        after += self._dense_weights(stage)
        if phase == "prefill":
            after += self.kv_out[-2:-1]  # two buffers for the KV cache that goes out
        alive = self.sizes.pieces(phase)
        comes = held("gpu", ACTIVATIONS, alive.row) if (stage, j) in self.rows else ()
        takes, gives = held("gpu", ACTIVATIONS, alive.compute), comes
        if phase == "decode":
            gives += takes
            if not policy.attention_on_gpu and policy.kv_on_gpu < 1.0:
                takes += held("gpu", ACTIVATIONS, alive.qkv)
        pre = self.add(
            Op.PRE_ATTENTION,
            GPU,
            stage,
            tuple(after),
            micro_batch=j,
            operators=layout.operators(phase, stage.layer)["pre"],
            launches=PRE_KERNELS,
            acquires=takes,
            releases=gives,
        )
        if phase == "prefill":
            self.pres.append(pre)
            self.before_post[(stage, j)] = [self._attend_prompts(stage, j, pre)]
        elif policy.attention_on_gpu:
            self.before_post[(stage, j)] = [self._attention_on_gpu(stage, j, pre)]
        else:
            self.before_post[(stage, j)] = self._attention_on_cpu(stage, j, pre)

    def _attend_prompts(self, stage: Stage, j: int, pre: Issued) -> Issued:
        return self.add(
            Op.ATTENTION,
            GPU,
            stage,
            (pre,),
            micro_batch=j,
            operators=self.layout.attention_prefill(stage.layer),
            launches=ATTENTION_KERNELS,
            acquires=held("gpu", ACTIVATIONS, self.sizes.prefill.new_kv),
        )

    def _attention_on_cpu(self, stage: Stage, j: int, pre: Issued) -> list[Issued]:
        """Attention where the KV cache lies; gives what the projections wait for besides the CPU's result."""
        layout, policy = self.layout, self.layout.policy
        waits = []
        if policy.kv_on_gpu > 0:
            waits.append(
                self.add(
                    Op.ATTENTION,
                    GPU,
                    stage,
                    (pre,),
                    micro_batch=j,
                    part=1,
                    operators=layout.attention_decode(stage.layer, stage.step, policy.kv_on_gpu, on_gpu=True),
                    launches=ATTENTION_KERNELS,
                )
            )
        share = 1.0 - policy.kv_on_gpu
        if share > 0:
            copy = self.add(
                Op.OFFLOAD_QKV,
                D2H,
                stage,
                (pre,),
                micro_batch=j,
                bytes_moved=layout.tokens("decode") * share * layout.qkv_bytes,
                releases=held("gpu", ACTIVATIONS, self.sizes.decode.qkv),
            )
            ready = [copy, *self._read_kv(stage, j)]
            attention = self.add(
                Op.ATTENTION,
                CPU,
                stage,
                tuple(ready),
                micro_batch=j,
                operators=layout.attention_decode(stage.layer, stage.step, share, on_gpu=False),
            )
            self.results[(stage, j)] = attention
            if policy.kv_on_disk > 0:
                self.kv_reads.append(attention)
                self._write_kv(stage, j, attention)
        return waits

    def _attention_on_gpu(self, stage: Stage, j: int, pre: Issued) -> Issued:
        layout, policy = self.layout, self.layout.policy
        after = [pre]
        streamed = policy.kv_on_gpu < 1.0
        if streamed:
            after.append(self._load_kv(stage, j))
            if j + 1 in self.members(stage):
                self._load_kv(stage, j + 1)  # the next micro-batch's cache comes while this one computes
        attention = self.add(
            Op.ATTENTION,
            GPU,
            stage,
            tuple(after),
            micro_batch=j,
            operators=layout.attention_decode(stage.layer, stage.step, 1.0, on_gpu=True),
            launches=ATTENTION_KERNELS,
            releases=held("gpu", KV_SLOTS, self.sizes.kv_slot) if streamed else (),
        )
        if streamed:
            self.kv_uses.append(attention)
            size = layout.requests("decode") * layout.kv_new_bytes * (1.0 - policy.kv_on_gpu)
            stored = self.add(Op.STORE_KV, D2H, stage, (pre,), micro_batch=j, bytes_moved=size)
            self.shared.kv_stored[(stage.layer, j)] = stored
            if policy.kv_on_disk > 0:
                self._write_kv(stage, j, stored)
        return attention

    def _load_kv(self, stage: Stage, j: int) -> Issued:
        """Copy a micro-batch's cache into one of two slots (D4); each waits for the attention that used it."""
        key = (stage, j)
        if key in self.kv_loaded:
            return self.kv_loaded[key]
        layout, policy = self.layout, self.layout.policy
        after: list[Issued] = []
        number = len(self.kv_loaded) - KV_BUFFERS
        if number >= 0:
            after.append(self.kv_uses[number])
        elif self.shared.prefilled is not None:
            after.append(self.shared.prefilled)  # until then prefill's activations lie where the slots will
        if (stage.layer, j) in self.shared.kv_stored:
            after.append(self.shared.kv_stored[(stage.layer, j)])  # what the step before added, or prefill
        after += self._read_kv(stage, j)
        self.kv_loaded[key] = load = self.add(
            Op.LOAD_KV,
            H2D,
            stage,
            tuple(after),
            micro_batch=j,
            bytes_moved=layout.kv_copied_bytes(stage.layer, stage.step) * (1.0 - policy.kv_on_gpu),
            acquires=held("gpu", KV_SLOTS, self.sizes.kv_slot),
        )
        if policy.kv_on_disk > 0:
            self.kv_reads.append(load)
        return load

    def _read_kv(self, stage: Stage, j: int) -> list[Issued]:
        """Read the cache of the requests on disk."""
        return [self._read_cache(stage, j)] if self.layout.policy.kv_on_disk > 0 else []

    def _read_cache(self, stage: Stage, j: int) -> Issued:
        """Read a micro-batch's cache into a free buffer: behind what the step before added, ahead of the last write."""
        number = self.kv_reads_issued - self.sizes.kv_landings
        after = (self.kv_reads[number],) if number >= 0 else ()
        self.kv_reads_issued += 1
        if any(other.layer == stage.layer and each == j for other, each, _ in self.kv_writes):
            self._write_all_kv()
        size = self.layout.kv_read_bytes(stage.layer, stage.step) * self.layout.policy.kv_on_disk
        read = self.add(Op.READ_DISK, DISK, stage, after, micro_batch=j, bytes_moved=size)
        self._write_all_kv(but=1)
        return read

    def _write_kv(self, stage: Stage, j: int, after: Issued) -> None:
        """Write what a step added, behind the next read: the disk would otherwise wait for attention to end."""
        self.kv_writes.append((stage, j, after))
        if len(self.kv_writes) > 2:  # its reads came ahead: it would wait for all of the layer
            self._write_all_kv(but=1)

    def _write_all_kv(self, *, but: int = 0) -> None:
        """Issue the writes that are due, all but the latest `but`."""
        size = self.layout.requests("decode") * self.layout.kv_new_bytes * self.layout.policy.kv_on_disk
        while len(self.kv_writes) > but:
            stage, j, after = self.kv_writes.pop(0)
            self.add(Op.WRITE_DISK, DISK, stage, (after,), micro_batch=j, bytes_moved=size)
