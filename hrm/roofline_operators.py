"""Intensities of operators for the hierarchical roofline, by either cost model, and what a batch changes about them.

Decode, one layer. `full` takes the operators of `hrm.cost`. `paper` counts as the authors do in Figures 4 and 5:
attention scores only, every expert read, and a storage format that divides *all* bytes, queries and activations too
(the figure's int4 has exactly 4 times the intensity of fp16; scales of groups are not counted).

Legend: d head width, q and kv query and KV heads, h1, h2 model and expert width, E experts, k top-k, v bytes per value.
"""

from __future__ import annotations

from collections.abc import Callable

from hrm import cost
from hrm.cost import Formats, Work
from hrm.dtypes import DTYPES
from hrm.errors import InputError
from hrm.model import ModelSpec
from hrm.rates import DEQUANTISATION_FLOPS
from hrm.roofline import CostModel, Places, Stack, attainable_local, compare_places, link_bandwidth

__all__ = [
    "attention_intensity",
    "attention_places",
    "attention_work",
    "batch_at_intensity",
    "break_even_batch",
    "expert_bytes_moved",
    "ffn_intensity",
    "ffn_link_intensity",
    "ffn_places",
    "ffn_work",
    "linear_places",
]

MOST_TOKENS = 10_000_000
"""Largest batch looked at for a crossing."""

LINEAR_OPERATORS: dict[str, Callable[[ModelSpec, Formats, float], Work]] = {
    "QKV projection": cost.qkv_projection,
    "output projection": cost.output_projection,
    "router": cost.router,
    "shared expert": cost.shared_expert,
    "dense MLP": cost.dense_mlp,
    "routed experts": cost.routed_experts,
    "lm_head": cost.lm_head,
}
"""Operators that stream weights, by the name a report gives them."""


def attention_work(model: ModelSpec, formats: Formats, context: float, cost_model: CostModel) -> Work:
    """Attention of one new token over its cached context, one full-attention layer.

    Parameters
    ----------
    model : ModelSpec
    formats : Formats
    context : float
        Cached tokens [tokens].
    cost_model : {"paper", "full"}
        ``"paper"``: ``q*(2d+2)`` FLOPs per cached token, scores only; ``v*(2*q*d + 2*context*kv*d)`` bytes: query,
        result, keys and values. Mixtral 8x7B at context 512: 2.000 FLOP/byte in fp16, 8.000 in int4. ``"full"``: scores
        and values over the KV cache with its scales; queries and results count as copies, so the context cancels.

    Returns
    -------
    Work

    Raises
    ------
    InputError
        The authors' count does not describe the model.
    """
    if cost_model == "full":
        kv_bytes = float(model.kv_bytes_per_token_per_layer(formats.kv)) * context
        return cost.attention_decode_per_kv_byte(model, formats) * kv_bytes
    if model.mla is not None or any(window is not None for window in model.layer_windows):
        kind = "latent attention" if model.mla is not None else "sliding-window layers"
        raise _outside(model, kind)
    value = DTYPES[formats.kv].value_bits / 8
    flops = context * model.n_heads * (2.0 * model.head_dim + 2.0)
    cached = 2.0 * context * model.n_kv_heads * model.head_dim
    return Work(flops, value * (2.0 * model.n_heads * model.head_dim + cached))


def ffn_work(model: ModelSpec, formats: Formats, tokens: float, cost_model: CostModel) -> Work:
    """Routed experts of one layer over `tokens` tokens.

    Parameters
    ----------
    model : ModelSpec
    formats : Formats
    tokens : float
        Tokens computed at once [tokens].
    cost_model : {"paper", "full"}
        ``"paper"``: ``2*tokens*3*h1*h2*k`` FLOPs, ``v*(3*h1*h2*E + tokens*(h1 + h2))`` bytes: every expert is read.
        Mixtral 8x7B at 128 tokens: 31.947 FLOP/byte. ``"full"``: only the experts that tokens reach, and the
        activations of every product.

    Returns
    -------
    Work

    Raises
    ------
    InputError
        The authors' count does not describe the model.
    """
    if cost_model == "full":
        return cost.routed_experts(model, formats, tokens)
    widths = float(model.hidden_size) * model.expert_ffn
    flops = 2.0 * tokens * 3.0 * widths * model.top_k
    value = DTYPES[formats.experts(model)].value_bits / 8
    activations = value * tokens * (model.hidden_size + model.expert_ffn)
    return Work(flops, expert_bytes_moved(model, formats, tokens, cost_model) + activations)


def expert_bytes_moved(model: ModelSpec, formats: Formats, tokens: float, cost_model: CostModel) -> float:
    """Weights of one layer's experts that `tokens` tokens need where they are computed [byte].

    ``"paper"``: all E. ``"full"``: those the tokens reach under uniform routing.
    """
    if cost_model == "full":
        return float(cost.experts_touched(model, tokens)) * model.expert_bytes(formats.weights)
    if not model.is_moe:
        raise _outside(model, "no experts")
    value = DTYPES[formats.experts(model)].value_bits / 8
    return value * 3.0 * model.hidden_size * model.expert_ffn * model.n_experts


def attention_intensity(model: ModelSpec, formats: Formats, context: float, cost_model: CostModel) -> float:
    """I of decode attention [FLOP/byte]; the same at every level, and for any batch: each request has its own cache."""
    return float(attention_work(model, formats, context, cost_model).intensity)


def ffn_intensity(model: ModelSpec, formats: Formats, tokens: float, cost_model: CostModel) -> float:
    """I^i of the routed experts at the level that computes `tokens` tokens at once [FLOP/byte]."""
    return float(ffn_work(model, formats, tokens, cost_model).intensity)


def ffn_link_intensity(model: ModelSpec, formats: Formats, batch: float, cost_model: CostModel) -> float:
    """I^j of the routed experts on the link: FLOPs of the whole batch over the weights, which are copied once for it.

    Hidden states stay where the computation is, so only weights count.

    Returns
    -------
    float
        [FLOP/byte]
    """
    flops = float(ffn_work(model, formats, batch, cost_model).flops)
    return flops / expert_bytes_moved(model, formats, batch, cost_model)


def attention_places(
    stack: Stack, model: ModelSpec, formats: Formats, context: float, cost_model: CostModel, *, i: int = 0, j: int = 1
) -> Places:
    """Attention at level i with its KV cache at level j, and at level j."""
    work = attention_work(model, formats, context, cost_model)
    return compare_places(stack, i, j, at_i=work, at_j=work, bytes_moved=float(work.bytes_touched))


def ffn_places(
    stack: Stack,
    model: ModelSpec,
    formats: Formats,
    micro_batch: float,
    batch: float,
    cost_model: CostModel,
    *,
    i: int = 0,
    j: int = 1,
) -> Places:
    """Routed experts at level i in micro-batches, weights copied from j once per batch; and the batch at level j."""
    return compare_places(
        stack,
        i,
        j,
        at_i=ffn_work(model, formats, micro_batch, cost_model),
        at_j=ffn_work(model, formats, batch, cost_model),
        bytes_moved=expert_bytes_moved(model, formats, batch, cost_model),
    )


def linear_places(
    stack: Stack, model: ModelSpec, formats: Formats, micro_batch: float, batch: float, *, i: int = 0, j: int = 1
) -> dict[str, Places]:
    """Every operator of a decode step that streams weights, by name, on two levels (`full` cost model).

    Those a model does not have are left out.
    """
    places = {}
    for name, operator in LINEAR_OPERATORS.items():
        if name == "dense MLP" and not (model.is_moe and model.n_dense_layers):
            continue  # a dense model's MLP is its one "routed expert"
        if not float(operator(model, formats, 1.0).flops):
            continue
        moved = float(operator(model, formats, 0.0).bytes_touched)
        if name == "routed experts":
            moved = expert_bytes_moved(model, formats, batch, "full")
        at_i, at_j = operator(model, formats, micro_batch), operator(model, formats, batch)
        places[name] = compare_places(stack, i, j, at_i=at_i, at_j=at_j, bytes_moved=moved)
    return places


def batch_at_intensity(model: ModelSpec, formats: Formats, intensity: float, cost_model: CostModel) -> int | None:
    """Smallest batch whose experts reach an intensity on the link [tokens]; None above ten million.

    Turns P1, P2 and the balance point into batches.
    """
    return _first(lambda batch: ffn_link_intensity(model, formats, batch, cost_model) >= intensity * (1 - 1e-12))


def break_even_batch(
    stack: Stack, model: ModelSpec, formats: Formats, cost_model: CostModel = "full", *, i: int = 0, j: int = 1
) -> int | None:
    """Smallest batch from which the experts of a layer are computed faster at level i than where they lie.

    Turning point P1 in tokens per layer and step: copying the experts that the tokens reach from j to i and computing
    there at once, against computing at j. Copy and computation overlap at i (Eqs. 4-7), and the batch is one
    micro-batch. Quantised weights are expanded by the processor of j, as in `hrm.rates`; at i that is left out, the
    link being slower by far. Found by bisection, since the ratio of the two times falls with the batch.

    Parameters
    ----------
    stack : Stack
    model : ModelSpec
    formats : Formats
    cost_model : {"paper", "full"}
    i, j : int
        Level that may fetch, level that holds the experts.

    Returns
    -------
    int or None
        Tokens; 1 where level j has no processor; None where computing at j stays faster up to ten million tokens.
    """
    source = stack.levels[j]
    link = link_bandwidth(stack, j, i)

    def fetching_wins(tokens: float) -> bool:
        work = ffn_work(model, formats, tokens, cost_model)
        copy = expert_bytes_moved(model, formats, tokens, cost_model) / link
        there = max(copy, float(work.flops) / attainable_local(stack, i, float(work.intensity)))
        flops = float(work.flops) + DEQUANTISATION_FLOPS * float(work.dequantised)
        here = max(flops / source.peak_flops_per_s, float(work.bytes_touched) / source.bytes_per_s)
        return there <= here * (1 + 1e-12)

    if stack.levels[i].peak_flops_per_s == 0:
        return None
    return 1 if source.peak_flops_per_s == 0 else _first(fetching_wins)


def _first(holds: Callable[[float], bool]) -> int | None:
    """Smallest whole number from 1 for which a condition that never turns back holds."""
    high = 1
    while not holds(float(high)):
        high *= 2
        if high > MOST_TOKENS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(float(middle)) else (middle, high)
    return high


def _outside(model: ModelSpec, kind: str) -> InputError:
    return InputError(
        f"the paper's formulas do not describe {model.name}: it has {kind}",
        where="--cost-model paper",
        way_out="--cost-model full",
    )
