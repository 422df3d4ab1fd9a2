"""The sum rule: s3 against s4, seconds per layer in the steady state, without latencies, staging and sharing.

With W the copy of a layer's streamed weights, S = pre + D1 + attention on the CPU + D2 + post, and KV the copies of a
layer's cache, the rule says

    T_s3 = max(W, n_ub S)    T_s4 = max(W + KV, n_ub (pre + attention on the GPU + post))

The graph of s4 takes just that. The graph of s3 takes n_ub S + max(0, W - (pre + D1 + attention)): its block of weights
is issued first, and what the first micro-batch's attention gives queues behind it. So the rule is exact where the block
is there by then, and else the graph is slower by what is left of it, whichever of W and n_ub S is longer.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model, tiny_scenario
from tiny_policies import policy_of

from hrm.graph import Op
from hrm.layout import Layout
from hrm.schedules import Steps, schedule_graph
from simulator.durations import table_durations
from simulator.engine import simulate

LAYERS = 12
MODEL = tiny_model(n_layers=LAYERS, moe_layers=(True,) * LAYERS, layer_windows=(None,) * LAYERS)
SCENARIO = tiny_scenario(model=MODEL)


class Seconds(NamedTuple):
    """Seconds of the tasks; `weights` of a whole layer, the others of one micro-batch."""

    micro_batches: int
    weights: int
    kv: int
    pre: int
    attention: int  # on the CPU
    gpu_attention: int
    post: int
    offload: int  # D1
    load: int  # D2

    @property
    def until_attended(self) -> int:
        return self.pre + self.offload + self.attention

    @property
    def one_by_one(self) -> int:
        return self.micro_batches * (self.until_attended + self.load + self.post)

    @property
    def s3_by_the_rule(self) -> int:
        return max(self.weights, self.one_by_one)

    @property
    def s4_by_the_rule(self) -> int:
        n_ub = self.micro_batches
        return max(self.weights + n_ub * self.kv, n_ub * (self.pre + self.gpu_attention + self.post))


def layer_seconds(schedule: str, given: Seconds) -> int:
    """Seconds from the end of one layer to the end of the next, the same for six layers in the middle."""
    pages = given.micro_batches if schedule == "s4" else 1
    policy = policy_of(num_micro_batches=given.micro_batches, attention_on_gpu=schedule == "s4")
    graph = schedule_graph(Layout(SCENARIO, policy), schedule, Steps(first=0, last=1))
    table = dict.fromkeys((Op.EMBED, Op.LM_HEAD, Op.SAMPLE, Op.STORE_KV), 0.0) | {
        Op.LOAD_WEIGHTS: given.weights / pages,
        Op.LOAD_KV: given.kv,
        Op.PRE_ATTENTION: given.pre,
        Op.ATTENTION: given.gpu_attention if schedule == "s4" else given.attention,
        Op.POST_ATTENTION: given.post,
        Op.OFFLOAD_QKV: given.offload,
        Op.LOAD_HIDDEN: given.load,
    }
    ends: dict[int, float] = {}
    for span in simulate(graph, table_durations(table)).spans:
        if span.task.op is Op.POST_ATTENTION:
            ends[span.task.layer] = span.end_s  # of the last micro-batch, which is issued last
    lengths = {ends[layer + 1] - ends[layer] for layer in range(4, 10)}
    assert len(lengths) == 1, lengths
    return int(lengths.pop())


@st.composite
def any_seconds(draw: st.DrawFn, *, short_block: bool = False) -> Seconds:
    """Whole seconds, pages of whole seconds; a short block is there before the first attention is done."""
    n_ub = draw(st.integers(1, 5))
    few = st.integers(1, 8)
    found = Seconds(n_ub, 0, draw(st.integers(0, 12)), *(draw(few) for _ in range(6)))
    pages = found.until_attended // n_ub if short_block else 30
    return found._replace(weights=n_ub * draw(st.integers(0, pages)))


@given(case=any_seconds())
@settings(max_examples=60, deadline=None)
def test_s4_takes_the_longer_of_its_copies_and_its_computation(case: Seconds) -> None:
    assert layer_seconds("s4", case) == case.s4_by_the_rule


@given(case=any_seconds())
@settings(max_examples=60, deadline=None)
def test_s3_takes_one_micro_batch_after_the_other_and_what_is_left_of_the_block_by_then(case: Seconds) -> None:
    left = max(0, case.weights - case.until_attended)
    assert layer_seconds("s3", case) == case.one_by_one + left
    over = layer_seconds("s3", case) - case.s3_by_the_rule
    assert over == (min(case.weights, case.one_by_one) - case.until_attended if left else 0)


@given(case=any_seconds(short_block=True))
@settings(max_examples=60, deadline=None)
def test_the_sum_rule_decides_where_the_block_is_there_before_the_first_attention_is_done(case: Seconds) -> None:
    s3, s4 = layer_seconds("s3", case), layer_seconds("s4", case)
    assert (s3, s4) == (case.s3_by_the_rule, case.s4_by_the_rule)


BASE = Seconds(2, 4, 0, pre=1, attention=3, gpu_attention=1, post=2, offload=1, load=1)
"""S = 8, and the block has 5 seconds before it is in the way."""


@pytest.mark.parametrize(
    ("case", "s3", "s4"),
    [
        (BASE, 16, 8),  # GPU attention for nothing: it wins
        (BASE._replace(kv=6), 16, 16),  # as long
        (BASE._replace(kv=7), 16, 18),  # copies of the cache bind: CPU attention wins
        (BASE._replace(gpu_attention=6), 16, 18),  # a slow GPU
        (BASE._replace(micro_batches=3, weights=3, kv=7), 24, 24),
        (BASE._replace(micro_batches=3, weights=3, kv=8), 24, 27),
        (BASE._replace(weights=30), 41, 30),  # weights bind both: s3 is slower, where the rule has them level
        (BASE._replace(weights=30, kv=6), 41, 42),
    ],
)
def test_both_sides_of_the_rule_by_hand(case: Seconds, s3: int, s4: int) -> None:
    assert (layer_seconds("s3", case), layer_seconds("s4", case)) == (s3, s4)


def test_a_long_block_can_turn_the_order_of_the_rule_round() -> None:
    case = BASE._replace(weights=16, kv=4)
    assert (case.s3_by_the_rule, case.s4_by_the_rule) == (16, 24)
    assert (layer_seconds("s3", case), layer_seconds("s4", case)) == (27, 24)
