"""WeightSource: the weights of a model under neutral names, whoever made them, and the shape each of them has.

h hidden width, V vocabulary, H query heads, G KV heads, d head width, E routed experts, f expert width, s width of the
shared expert, m width of the MLP of a dense layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from hrm.model import ModelSpec
    from runtime.numerics import Numerics

__all__ = ["Shape", "WeightSource", "dense_shapes", "expert_shape", "top_shapes"]

Shape = tuple[int, ...]


class WeightSource(Protocol):
    """Where the weights of a model come from: a checkpoint, or a random generator.

    Tensors lie in CPU memory, in the source's own number format, and must not be written to: they may be views of a
    file, or of memory that other tensors share.
    """

    def top(self, name: str) -> Tensor:
        """`embedding` [V, h], `final_norm` [h] or `lm_head` [V, h] (the embedding where the two are tied)."""
        ...

    def dense(self, layer: int) -> dict[str, Tensor]:
        """Every tensor of a layer but the streamed experts, by the names and with the shapes of `dense_shapes`."""
        ...

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gate w1, up w3 and down transposed w2^T of a streamed expert, each [f, h]; a dense MLP is expert 0."""
        ...


def top_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Shapes of the tensors outside the layers, by neutral name."""
    table = (spec.vocab_size, spec.hidden_size)
    return {"embedding": table, "final_norm": (spec.hidden_size,), "lm_head": table}


def dense_shapes(spec: ModelSpec, numerics: Numerics, layer: int) -> dict[str, Shape]:
    """Shapes of the tensors of one layer that are not streamed experts, by neutral name.

    Parameters
    ----------
    spec, numerics : ModelSpec, Numerics
        The model.
    layer : int
        Which layer: a MoE layer has a router and perhaps a shared expert, a dense layer of a MoE model its own MLP.

    Returns
    -------
    dict of str to tuple of int
        Rows are outputs and columns are inputs, as in a checkpoint.
    """
    hidden = spec.hidden_size
    query, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    shapes: dict[str, Shape] = {
        "input_norm": (hidden,),
        "q": (query, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, query),
        "post_norm": (hidden,),
    }
    if numerics.qkv_bias:
        shapes |= {"q_bias": (query,), "k_bias": (kv,), "v_bias": (kv,)}
    if numerics.output_bias:
        shapes["o_bias"] = (hidden,)
    if numerics.qk_norm == "head":
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    if numerics.qk_norm == "full":
        shapes |= {"q_norm": (query,), "k_norm": (kv,)}
    if spec.moe_layers[layer]:
        shapes["router"] = (spec.n_experts, hidden)
        if spec.shared_ffn:
            shapes |= _mlp_shapes("shared", spec.shared_ffn, hidden)
        if numerics.shared_expert_gate:
            shapes["shared_gate"] = (1, hidden)
    elif spec.is_moe:
        shapes |= _mlp_shapes("dense", spec.dense_ffn, hidden)
    return shapes


def expert_shape(spec: ModelSpec) -> Shape:
    """Shape of each of the three matrices of a streamed expert, [f, h]."""
    return spec.streamed_ffn, spec.hidden_size


def _mlp_shapes(name: str, width: int, hidden: int) -> dict[str, Shape]:
    return {f"{name}_w1": (width, hidden), f"{name}_w3": (width, hidden), f"{name}_w2": (hidden, width)}
