"""Kernels of the GPU lane and of the CPU lane: what each (op, lane) computes with real tensors.

A kernel takes the state of the batch and a task. The same arithmetic serves both lanes; what differs is where tensors
lie, how many threads a lane has, and how results go on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hrm.graph import Op, Task
from runtime.attention import attend_cache, attend_prompts
from runtime.bindings import StageKey
from runtime.experts import Routing, apply_segments, join_routings
from runtime.kv_cache import Pool
from runtime.layers import find_best, linear, mlp, normalise, project_qkv, put_rows, route, shared_expert
from runtime.run_state import Position, RunState, greedy
from runtime.threads import lane_threads

__all__ = [
    "attend_on_cpu",
    "attend_on_gpu",
    "compute_experts_on_cpu",
    "compute_experts_on_gpu",
    "embed_on_cpu",
    "embed_on_gpu",
    "finish_layer",
    "give_logits",
    "sample_tokens",
    "start_layer",
]


def position_of(task: Task) -> Position:
    """Phase and micro-batch of a task."""
    assert task.id.micro_batch is not None
    return task.id.phase, task.id.micro_batch


def _token_ids(run: RunState, task: Task) -> Tensor:
    position = position_of(task)
    rows = run.rows(position)
    if task.id.phase == "prefill":
        return torch.cat([run.prompts[row] for row in rows])
    return run.generated[rows[0] : rows[-1] + 1, task.id.step]


def embed_on_gpu(run: RunState, task: Task) -> None:
    """Look up tokens where the table is on the GPU."""
    ids = _token_ids(run, task).to(run.device.torch_device, non_blocking=True)
    run.put_hidden(position_of(task), run.store.top["embedding"][ids])


def embed_on_cpu(run: RunState, task: Task) -> None:
    """Look up tokens in CPU memory; a copy takes them on unless everything is there."""
    ids, table = _token_ids(run, task).cpu(), run.store.top["embedding"]
    # Page-locked where it is copied on from; torch keeps such memory until the copy has left it.
    found = torch.empty((ids.numel(), table.shape[1]), dtype=table.dtype, pin_memory=run.device.cuda)
    torch.index_select(table, 0, ids, out=found)
    if run.layout.policy.everything_on_cpu:
        run.put_hidden(position_of(task), found)
    else:
        run.embedded[position_of(task)] = found


def _positions(run: RunState, task: Task) -> Tensor:
    """Place of every token of a task's micro-batch in its sequence [T]."""
    position = position_of(task)
    found = run.positions.get(position)
    if found is None:
        lengths = run.lengths(position)
        if task.id.phase == "prefill":
            found = torch.cat([torch.arange(length) for length in lengths])
        else:
            found = torch.tensor(lengths)
        found = run.positions[position] = found.to(run.device.torch_device, non_blocking=True)
    return found if task.id.phase == "prefill" else found + task.id.step


def start_layer(run: RunState, task: Task) -> None:
    """Norm and projections of queries, keys and values."""
    position, stage = position_of(task), run.stage(task.id)
    run.add_pending(position)
    weights = run.store.dense(stage.layer, run.slot(stage))
    x = normalise(run.hidden_of(position), weights["input_norm"], run.numerics)
    found = run.at(position)
    found.qkv = project_qkv(x, weights, run.heads, run.numerics, run.rotary, _positions(run, task))
    if task.id.phase == "decode" and run.layout.policy.attention_on_gpu and run.layout.policy.kv_on_gpu < 1.0:
        k, v = found.qkv[1:]
        run.new_kv[("decode", task.id.step, stage.layer, position[1])] = k.contiguous(), v.contiguous()
    if task.id.phase == "decode":
        found.attended = torch.empty(
            (x.shape[0], run.heads.query * run.heads.width), dtype=x.dtype, device=run.device.torch_device
        )


def attend_on_gpu(run: RunState, task: Task) -> None:
    """Attention on the GPU: over prompts, or over what of the KV cache is there or in a slot."""
    if task.id.phase == "prefill":
        _attend_prompts(run, task)
        return
    position, layer = position_of(task), task.id.layer
    found, j = run.at(position), position[1]
    assert found.qkv is not None and found.attended is not None
    here = run.index(j, "gpu")
    if len(here):
        pool = run.cache.pools["gpu"].memory
        assert pool is not None
        first, prompts = here.first_gpu, here.prompts_gpu
        _attend_rows(run, task, pool[layer], here.part, first, prompts, here.longest)
    if not run.layout.policy.attention_on_gpu:
        return
    for tier in ("cpu", "disk"):
        there = run.index(j, tier)
        if len(there):
            number = run.bindings.numbers[(Op.LOAD_KV, "decode", task.id.step, layer, j)]
            slot = run.cache.slot(number)
            _attend_rows(run, task, slot, there.part, there.in_slot_gpu, there.prompts_gpu, there.longest)


def _attend_rows(
    run: RunState, task: Task, memory: Tensor, part: slice, first: Tensor, prompts: Tensor, longest: int
) -> None:
    """Add the new token of some requests to memory [2, T, G, d] and attend over it."""
    found, step = run.at(position_of(task)), task.id.step
    assert found.qkv is not None and found.attended is not None
    q, k, v = (each[part] for each in found.qkv)
    place = first + prompts + step
    memory[0].index_copy_(0, place, k.to(memory.dtype))
    memory[1].index_copy_(0, place, v.to(memory.dtype))
    attend_cache(
        q,
        memory[0],
        memory[1],
        first,
        prompts + (step + 1),
        found.attended[part].view(-1, run.heads.query, run.heads.width),
        scale=run.numerics.attention_scale,
        window=run.window(task.id.layer),
        longest=longest + step + 1,
        threads=lane_threads(),
    )


def _attend_prompts(run: RunState, task: Task) -> None:
    """Attention over prompts; what stays on this level of their KV cache is put there."""
    position, layer = position_of(task), task.id.layer
    found, lengths = run.at(position), run.lengths(position)
    assert found.qkv is not None
    q, k, v = found.qkv
    pool = run.cache.pools["cpu" if run.layout.policy.everything_on_cpu else "gpu"]
    places, sources = _prompt_places(run, position, pool)
    if len(places):
        assert pool.memory is not None
        put_rows(k, v, pool.memory[layer], places, sources)
    if sources is not None:
        # Copies: parts of one tensor would keep the queries, and rows of tokens that lie apart are copied slowly.
        run.new_kv[("prefill", 0, layer, position[1])] = k.contiguous(), v.contiguous()
    found.attended = attend_prompts(q, k, v, lengths, scale=run.numerics.attention_scale, window=run.window(layer))


def _prompt_places(run: RunState, position: Position, pool: Pool) -> tuple[Tensor, Tensor | None]:
    """Rows of a pool where tokens of prompts belong, and which tokens these are; None: all of the micro-batch."""
    kept = run.prompt_places.get(position)
    if kept is None:
        places, sources, start = [], [], 0
        lengths = run.lengths(position)
        for row, length in zip(run.rows(position), lengths, strict=True):
            first = pool.first.get(row)
            if first is not None:
                places.append(torch.arange(first, first + length))
                sources.append(torch.arange(start, start + length))
            start += length
        rows, tokens = (torch.cat([torch.empty(0, dtype=torch.int64), *each]) for each in (places, sources))
        there = run.device.torch_device
        kept = rows.to(there), None if len(tokens) == start else tokens.to(there)
        run.prompt_places[position] = kept
    return kept


def attend_on_cpu(run: RunState, task: Task) -> None:
    """Attention where the KV cache lies, in CPU memory or in a buffer it was read into; keeps the new token."""
    position, layer, step = position_of(task), task.id.layer, task.id.step
    j, everything = position[1], run.layout.policy.everything_on_cpu
    if task.id.phase == "prefill":
        _attend_prompts(run, task)
        return
    if everything:
        found = run.at(position)
        assert found.qkv is not None and found.attended is not None
        q, k, v = found.qkv
        out, offset = found.attended.view(-1, run.heads.query, run.heads.width), 0
    else:
        number = run.bindings.numbers[(Op.OFFLOAD_QKV, "decode", step, layer, j)]
        offset = run.placement.decode[j].on_gpu
        count = run.placement.decode[j].size - offset
        q, k, v = run.split_qkv(run.pinned_qkv[number], count)
        out = run.pinned_results[number][:count].view(-1, run.heads.query, run.heads.width)
    for tier in ("cpu", "disk"):
        there = run.index(j, tier)
        if not len(there):
            continue
        part = slice(there.part.start - offset, there.part.stop - offset)
        first = there.first
        if tier == "cpu":
            pool = run.cache.pools["cpu"].memory
            assert pool is not None
            memory = pool[layer]
        else:
            memory = run.landings[(step, layer, j)]
            first = there.in_landing
        place = first + there.prompts + step
        memory[0].index_copy_(0, place, k[part].to(memory.dtype))
        memory[1].index_copy_(0, place, v[part].to(memory.dtype))
        attend_cache(
            q[part],
            memory[0],
            memory[1],
            first,
            there.prompts + (step + 1),
            out[part],
            scale=run.numerics.attention_scale,
            window=run.window(layer),
            longest=there.longest + step + 1,
            threads=lane_threads(),
        )
        if tier == "disk":
            run.keep_for_disk(task.id, k[part], v[part])
            run.cache.give_landing(run.landings.pop((step, layer, j)))


def finish_layer(run: RunState, task: Task) -> None:
    """Output projection, router, shared expert; and the routed experts where they are on this level."""
    position, stage = position_of(task), run.stage(task.id)
    layer, found, policy = stage.layer, run.at(position), run.layout.policy
    slot = run.slot(stage)
    weights = run.store.dense(layer, slot)
    hidden = run.hidden_of(position)
    assert found.attended is not None
    hidden.add_(linear(found.attended, weights["o"], weights.get("o_bias")))
    found.attended = found.qkv = None
    x = normalise(hidden, weights["post_norm"], run.numerics)
    if "dense_w1" in weights:
        hidden.add_(mlp(x, weights["dense_w1"], weights["dense_w3"], weights["dense_w2"]))
        return
    shared = shared_expert(x, weights)
    if shared is not None:
        hidden.add_(shared)
    routing = _route(run, x, weights)
    if run.on_experts is not None:
        run.on_experts(task.id, routing)
    here = task.id.phase == "prefill" or run.experts_on_gpu
    if policy.everything_on_cpu or run.store.rings or not here:
        found.normed, found.routing = x, routing
        return
    apply_segments(x, run.store.on_gpu(layer, slot), routing, hidden, threads=lane_threads())


def _route(run: RunState, x: Tensor, weights: dict[str, Tensor]) -> Routing:
    model = run.layout.scenario.model
    if "router" not in weights:  # a dense model: its MLP is the one expert of all tokens
        return Routing(
            order=torch.arange(len(x), device=x.device),
            starts=[0, len(x)],
            weights=torch.ones(len(x), dtype=torch.float32, device=x.device),
        )
    return route(x, weights["router"], model.top_k, run.numerics)


def compute_experts_on_gpu(run: RunState, task: Task) -> None:
    """One expert of a ring for all tokens of its stage; or the resident experts beside those on the CPU."""
    name = task.id
    if name.page is None:
        position = position_of(task)
        found = run.at(position)
        assert found.normed is not None and found.routing is not None
        part = torch.zeros(found.normed.shape, dtype=torch.float32, device=found.normed.device)
        segments = run.store.on_gpu(name.layer, None)
        apply_segments(found.normed, segments, found.routing, part, threads=lane_threads())
        found.pending.insert(0, part)  # before what the CPU gives, whichever comes first: sums are then the same
        return
    count = run.layout.scenario.model.streamed_experts
    group, expert = divmod(name.page, count)
    stage = StageKey(name.phase, name.step, name.layer, group)
    members = [group] if name.phase == "prefill" else list(range(len(run.placement.decode)))
    if expert == 0:
        parts = [run.at((name.phase, j)) for j in members]
        x = torch.cat([part.normed for part in parts if part.normed is not None])
        routing = join_routings([part.routing for part in parts if part.routing is not None])
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        run.ring_inputs[stage] = x, routing, total
    x, routing, total = run.ring_inputs[stage]
    place = run.bindings.places.get((stage, expert))
    apply_segments(x, run.store.of_ring(name.layer, expert, place), routing, total, threads=lane_threads())
    if expert == count - 1:
        del run.ring_inputs[stage]
        start = 0
        for j in members:
            hidden = run.hidden_of((name.phase, j))
            hidden.add_(total[start : start + hidden.shape[0]])
            start += hidden.shape[0]
            found = run.at((name.phase, j))
            found.normed = found.routing = None


def compute_experts_on_cpu(run: RunState, task: Task) -> None:
    """The experts in CPU memory, and those read from disk, for one micro-batch."""
    position, name = position_of(task), task.id
    stage = StageKey(name.phase, name.step, name.layer)
    segments = run.store.on_cpu(name.layer, run.bindings.landings.get(stage))
    if run.layout.policy.everything_on_cpu:
        found = run.at(position)
        assert found.normed is not None and found.routing is not None
        apply_segments(found.normed, segments, found.routing, run.hidden_of(position), threads=lane_threads())
        found.normed = found.routing = None
        return
    number = run.bindings.numbers[(Op.STORE_HIDDEN, "decode", name.step, name.layer, position[1])]
    count = run.placement.decode[position[1]].size
    out = run.pinned_expert_out[number][:count]
    total = torch.zeros(out.shape, dtype=torch.float32)
    x = run.pinned_expert_in[number][:count]
    apply_segments(x, segments, run.host_routings.pop(position), total, threads=lane_threads())
    out.copy_(total)


def give_logits(run: RunState, task: Task) -> None:
    """Logits of the last token of every request, from the whole lm_head or a piece of it."""
    position, name = position_of(task), task.id
    run.add_pending(position)
    x = run.hidden_of(position)
    if name.phase == "prefill":
        ends = torch.tensor(run.lengths(position)).cumsum(0) - 1
        x = x[ends.to(x.device, non_blocking=True)]
    x = normalise(x, run.store.top["final_norm"], run.numerics)
    policy, head = run.layout.policy, run.store.top["lm_head"]
    low, high = 0, head.shape[0]
    if not policy.lm_head_on_gpu and not policy.everything_on_cpu:
        piece = name.page or 0
        low, high = run.head_rows(piece)
        stage = StageKey(name.phase, name.step, name.layer, run.stage(name).group)
        flat = run.store.head_buffers[run.bindings.heads[(stage, piece)]]
        head = flat[: (high - low) * head.shape[1] * head.element_size()].view(head.dtype).view(high - low, -1)
    logits = linear(x, head)  # [B, rows of this piece]
    if run.keep_logits is not None or run.score is not greedy:
        logits = logits.float()
    column = 0 if name.phase == "prefill" else name.step + 1
    last = high == run.store.top["lm_head"].shape[0]
    if run.keep_logits is not None or (run.score_whole and not last) or position in run.kept:
        run.kept.setdefault(position, []).append(logits)
    if run.score_whole:
        if not last:
            return
        if low > 0:
            logits, low = torch.cat(run.kept[position], dim=-1), 0
            if run.keep_logits is None:
                del run.kept[position]
    value, token = find_best(run.score(logits, run.rows(position), column, low))
    token = token + low
    if low > 0:  # of all pieces but the last only the best token so far is kept
        before, earlier = run.best[position]
        better = value > before
        value, token = torch.where(better, value, before), torch.where(better, token, earlier)
    run.best[position] = value, token
    if name.phase == "prefill" and last:
        run.prefill_hidden.pop(position[1], None)
        run.active.pop(position, None)


def sample_tokens(run: RunState, task: Task) -> None:
    """The next token of every request."""
    position = position_of(task)
    rows, (_, token) = run.rows(position), run.best.pop(position)
    column = 0 if task.id.phase == "prefill" else task.id.step + 1
    if isinstance(rows, range):
        run.generated[rows.start : rows.stop, column] = token
    else:
        run.generated[torch.tensor(list(rows)).to(token.device, non_blocking=True), column] = token
    if run.keep_logits is not None:
        logits = torch.cat(run.kept.pop(position), dim=-1)
        for place, row in enumerate(rows):
            run.keep_logits(row, column, logits[place])
