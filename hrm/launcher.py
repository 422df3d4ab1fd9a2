"""The launcher: issues the tasks of a schedule one after the other, as Algorithm 1 of the paper does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hrm.attention_tasks import AttentionTasks
from hrm.graph import Hold, Op, Operator
from hrm.holds import ACTIVATIONS, WAITING, held
from hrm.issuing import CPU, D2H, DISK, GPU, H2D, Issued, Stage
from hrm.layout import POST_KERNELS
from hrm.memory import KV_LANDINGS, PIPELINE_DEPTH
from hrm.weight_copies import HEAD_BUFFERS

__all__ = ["Launcher"]

LOOKAHEAD = 2
"""Micro-batches whose attention is issued ahead of the one that finishes (Algorithm 1)."""


@dataclass(slots=True)
class Launcher(AttentionTasks):
    """Issues whole passes."""

    rows_out: list[Issued] = field(default_factory=list)  # stores of hidden states of prefill, in order
    back: list[Issued] = field(default_factory=list)  # results of experts on the CPU, in order

    def issue(self, stages: list[Stage]) -> Iterator[bool]:
        """Issue stages of one phase; yields after every position, True where it ends a pass over the layers."""
        if not stages:
            return
        phase = stages[0].phase
        self._pages(stages[0], 0, 1)  # prologue: the first stage's weights, before anything overlaps
        self._read_experts(stages[0])
        layers = self.layout.num_layers
        if phase == "decode" and stages[0].layer == 0:
            for j in self.members(stages[0]):
                self._embed(stages[0], j)
        computed = [(stage, j) for stage in stages if stage.layer < layers for j in self.members(stage)]
        ahead = min(self.schedule.lookahead, len(self.members(stages[0]))) if phase == "decode" else 0
        issued = passed = 0
        for number, stage in enumerate(stages):
            following = stages[number + 1] if number + 1 < len(stages) else None
            if following is not None:
                self._read_experts(following)
            if stage.layer == layers:
                for _ in self._head(stage, following):
                    while ahead and issued < min(passed + ahead, len(computed)) and self._ready(*computed[issued]):
                        self._before(*computed[issued])
                        issued += 1
                yield True
                continue
            members = self.members(stage)
            for place, j in enumerate(members):
                passed += 1
                while issued < min(passed if ahead == 0 else passed + ahead - 1, len(computed)) and (
                    self._ready(*computed[issued])
                ):
                    self._before(*computed[issued])
                    issued += 1
                if phase == "prefill" and passed < len(computed):
                    self._row(*computed[passed], self.pres[-1:])
                self._copies(stage, following, place, j)
                self._after(stage, j)
                if self._ends_pass(stage) and stage.layer == layers - 1 and self.layout.policy.lm_head_on_gpu:
                    self._finish(stage, j)
                if following is not None and self.layout.policy.weight_slots == 1 and place == len(members) - 1:
                    self._pages(following, 0, 1)
                while ahead and issued < min(passed + ahead, len(computed)) and self._ready(*computed[issued]):
                    self._before(*computed[issued])
                    issued += 1
                yield place == len(members) - 1 and self._ends_pass(stage)

    def finish(self) -> None:
        """Issue what was put off."""
        self._write_all_kv()

    def _ready(self, stage: Stage, j: int) -> bool:
        """Whether what a position starts from has been issued, and its layer's first weights."""
        if len(self.pages.get(stage, ())) < self._dense_loads(stage):
            return False
        if stage.phase == "prefill" and stage.layer == 0:
            return True
        if stage.layer == 0:
            if (stage.phase, stage.step, j) in self.shared.embedded:
                return True
            before = (stage.phase, stage.step - 1)
            return self.layout.pipelined and (before not in self.shared.passes or (*before, j) in self.shared.sampled)
        return (stage._replace(layer=stage.layer - 1), j) in self.shared.done

    def _copies(self, stage: Stage, following: Stage | None, place: int, j: int) -> None:
        """Copies of a position towards the GPU: hidden states first, then a page of the next stage."""
        layout, policy, schedule = self.layout, self.layout.policy, self.schedule
        ahead = following if policy.weight_slots != 1 else None  # one slot: free only when this stage is done
        first = ahead is not None and not schedule.paged and place == 0
        if first and schedule.block_first and ahead is not None:
            self._pages(ahead, 0, 1)
        if (stage, j) in self.results:
            size = layout.tokens(stage.phase) * (1.0 - policy.kv_on_gpu) * layout.result_bytes
            loaded = self.add(
                Op.LOAD_HIDDEN,
                H2D,
                stage,
                (self.results[(stage, j)],),
                micro_batch=j,
                part=1,
                bytes_moved=size,
                acquires=held("gpu", ACTIVATIONS, self.sizes.decode.result),
            )
            self.before_post[(stage, j)].append(loaded)
        if ahead is None:
            return
        if schedule.paged:
            self._pages(ahead, place, len(self.members(stage)))
        elif first and not schedule.block_first:
            self._pages(ahead, 0, 1)

    # The rest of a position

    def _after(self, stage: Stage, j: int) -> None:
        """The rest of a layer once attention is there: output projection, router, experts."""
        layout, phase = self.layout, stage.phase
        operators = layout.operators(phase, stage.layer)
        on_gpu = self._experts_on_gpu(stage) or not operators["experts"]
        alive = self.sizes.pieces(phase)
        last = j == self.members(stage)[-1]
        releases = held("gpu", ACTIVATIONS, alive.compute)
        takes = releases if phase == "decode" else self._outgoing_holds(stage)
        if (stage, j) in self.results:
            releases += held("gpu", ACTIVATIONS, alive.result)
        post = self._project(
            stage,
            j,
            (*self.before_post[(stage, j)], *self._weights(stage), *(self.rows_out[-1:] if phase == "prefill" else ())),
            operators["post"] + (operators["experts"] if on_gpu else ()),
            acquires=takes,
            releases=releases,
            slot_free=last,
        )
        ends: tuple[Issued, ...] = (post,)
        if not on_gpu:
            ends = self._experts_on_cpu(stage, j, post, operators["experts"])
            if last:
                self.cpu_experts.append(ends)
        self.shared.done[(stage, j)] = ends
        if phase == "prefill":
            self._offload_prompts(stage, j, post)
        elif layout.pipelined and stage.layer < layout.num_layers - 1 and self._ends_pass(stage):
            row = layout.tokens(phase) * layout.row_bytes
            self.shared.stored_rows[(stage, j)] = self.add(
                Op.STORE_HIDDEN, D2H, stage, ends, micro_batch=j, part=3, bytes_moved=row
            )

    def _project(
        self,
        stage: Stage,
        j: int,
        after: tuple[Issued, ...],
        operators: tuple[Operator, ...],
        *,
        acquires: tuple[Hold, ...],
        releases: tuple[Hold, ...],
        slot_free: bool,
    ) -> Issued:
        """Post-attention; on a tensor-parallel group its two halves, each with the sum of the GPUs' parts."""
        if self.layout.group_size == 1:
            post = self.add(
                Op.POST_ATTENTION,
                GPU,
                stage,
                after,
                micro_batch=j,
                operators=operators,
                launches=POST_KERNELS,
                acquires=acquires,
                releases=releases + (self._free(stage, ()) if slot_free else ()),
            )
            if slot_free:
                self.freed[stage] = (post,)
            return post
        first, rest = self.layout.halves(operators)
        half = self.add(
            Op.POST_ATTENTION,
            GPU,
            stage,
            after,
            micro_batch=j,
            part=0,
            operators=first,
            launches=1,
            acquires=acquires,
        )
        half = self._all_reduce(stage, j, half, 0)
        post = self.add(
            Op.POST_ATTENTION,
            GPU,
            stage,
            (half,),
            micro_batch=j,
            part=1,
            operators=rest,
            launches=POST_KERNELS - 1,
            releases=releases + (self._free(stage, ()) if slot_free else ()),
        )
        if slot_free:
            self.freed[stage] = (post,)
        return self._all_reduce(stage, j, post, 1)

    def _all_reduce(self, stage: Stage, j: int, after: Issued, part: int) -> Issued:
        size = self.layout.all_reduce_bytes(stage.phase)
        return self.add(
            Op.ALL_REDUCE, GPU, stage, (after,), micro_batch=j, part=part, bytes_moved=size, each=True, launches=1
        )

    def _experts_on_cpu(
        self, stage: Stage, j: int, post: Issued, operators: tuple[Operator, ...]
    ) -> tuple[Issued, ...]:
        """Experts where they lie: those in CPU memory there, those on the GPU, if any, beside them."""
        layout, here = self.layout, self.layout.policy.weights_on_gpu
        row = layout.tokens(stage.phase) * layout.row_bytes
        # As many buffers for what goes in and comes out as micro-batches in flight: the oldest must be back.
        free = (self.back[-PIPELINE_DEPTH],) if len(self.back) >= PIPELINE_DEPTH else ()
        stored = self.add(Op.STORE_HIDDEN, D2H, stage, (post, *free), micro_batch=j, bytes_moved=row)
        ends: list[Issued] = []
        if here > 0:
            resident = layout.experts_of(here, operators)
            ends.append(self.add(Op.EXPERTS, GPU, stage, (post,), micro_batch=j, operators=resident, launches=1))
        ready = (stored, *((self.disk_experts[stage],) if stage in self.disk_experts else ()))
        work = layout.experts_of(1.0 - here, operators)
        experts = self.add(Op.EXPERTS, CPU, stage, ready, micro_batch=j, operators=work)
        back = self.add(Op.LOAD_HIDDEN, H2D, stage, (experts,), micro_batch=j, part=2, bytes_moved=row, each=True)
        self.back.append(back)
        return (*ends, back)

    def _outgoing_holds(self, stage: Stage) -> tuple[Hold, ...]:
        return held("gpu", ACTIVATIONS, self.sizes.prefill.row) if self._goes_out(stage) else ()

    def _goes_out(self, stage: Stage) -> bool:
        """Whether hidden states of prefill leave the GPU between two layers."""
        layout = self.layout
        if stage.layer >= layout.num_layers - 1:
            return False
        return layout.every_micro_batch("prefill") > 1 or (layout.pipelined and self._ends_pass(stage))

    def _offload_prompts(self, stage: Stage, j: int, post: Issued) -> None:
        """KV cache of the prompts to where it lies; hidden states to CPU memory where several micro-batches wait."""
        layout, policy = self.layout, self.layout.policy
        off_gpu = 1.0 - policy.kv_on_gpu
        if off_gpu > 0:
            after: tuple[Issued, ...] = (self.before_post[(stage, j)][0],)
            if policy.kv_on_disk > 0:  # two buffers in CPU memory for what waits to be written
                after += tuple(self.shared.kv_written[-KV_LANDINGS : 1 - KV_LANDINGS])
            size = layout.kv_prompt_bytes()
            stored = self.add(
                Op.STORE_KV,
                D2H,
                stage,
                after,
                micro_batch=j,
                bytes_moved=size * off_gpu,
                releases=held("gpu", ACTIVATIONS, self.sizes.prefill.new_kv),
            )
            self.kv_out.append(stored)
            for other in range(layout.micro_batches("decode")):
                self.shared.kv_stored[(stage.layer, other)] = stored  # decode's are others: it waits for the last
            if policy.kv_on_disk > 0:
                written = size * policy.kv_on_disk
                self.shared.kv_written.append(
                    self.add(Op.WRITE_DISK, DISK, stage, (stored,), micro_batch=j, bytes_moved=written)
                )
        if self._goes_out(stage):
            kept = self.add(
                Op.STORE_HIDDEN,
                D2H,
                stage,
                (post,),
                micro_batch=j,
                bytes_moved=layout.tokens("prefill") * layout.row_bytes,
                acquires=held("cpu", WAITING, self._waiting()),
                releases=held("gpu", ACTIVATIONS, self.sizes.prefill.row),
            )
            self.shared.stored_rows[(stage, j)] = kept
            self.rows_out.append(kept)

    # The end of a pass

    def _head(self, stage: Stage, following: Stage | None) -> Iterator[None]:
        """A streamed lm_head, piece by piece, each for all micro-batches; yields after every next token."""
        pieces, members = self._num_pages(stage), self.members(stage)
        for piece in range(pieces):
            final = piece == pieces - 1
            for place, j in enumerate(members):
                if final and following is not None and self.layout.policy.weight_slots != 1:
                    if self.schedule.paged:
                        self._pages(following, place, len(members))
                    elif place == 0:
                        self._pages(following, 0, 1)
                head = self._logits(stage, j, piece, pieces)
                if final:
                    self._sample(stage, j, head)
                    yield
            self.heads.append(head)
            if piece + HEAD_BUFFERS < pieces:
                self._bring(stage, piece + HEAD_BUFFERS)
        if following is not None and self.layout.policy.weight_slots == 1:
            self._pages(following, 0, 1)

    def _finish(self, stage: Stage, j: int) -> None:
        """Logits with a resident lm_head and the next token of a micro-batch."""
        at = stage._replace(layer=self.layout.num_layers)
        self._sample(at, j, self._logits(at, j, None, 1))

    def _logits(self, stage: Stage, j: int, piece: int | None, pieces: int) -> Issued:
        layers = self.layout.num_layers
        after = [*self.shared.done[(stage._replace(layer=layers - 1), j)]]
        if piece is not None:
            after.append(self.pieces[(stage, piece)])
        # Of all pieces but the last only the best token so far is kept.
        logits = held("gpu", ACTIVATIONS, self.sizes.pieces(stage.phase).logits)
        return self.add(
            Op.LM_HEAD,
            GPU,
            stage,
            tuple(after),
            micro_batch=j,
            page=piece if pieces > 1 else None,
            operators=self.layout.head(stage.phase, pieces),
            launches=1,
            acquires=logits,
            releases=logits if piece is not None and piece < pieces - 1 else (),
        )

    def _sample(self, stage: Stage, j: int, head: Issued) -> None:
        """The next token of a micro-batch, and its embedding for the next step."""
        sample = self.add(
            Op.SAMPLE,
            GPU,
            stage,
            (head,),
            micro_batch=j,
            launches=1,
            releases=held("gpu", ACTIVATIONS, self.sizes.pieces(stage.phase).logits),
        )
        self.shared.done[(stage, j)] = (head,)
        self.shared.sampled[(stage.phase, stage.step, j)] = sample
        if stage.phase == "prefill":
            self.shared.prefilled = sample
        elif (stage.phase, stage.step + 1) in self.shared.passes and not self.layout.pipelined:
            self._embed(Stage("decode", stage.step + 1, 0, stage.group), j)
