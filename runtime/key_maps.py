"""Key maps: under which key of a released checkpoint, and in which part of it, each neutral tensor lies.

========== ======================================= ===========================================================
family     attention, norms                        experts
========== ======================================= ===========================================================
mixtral    model.layers.N.self_attn.q_proj, ...    block_sparse_moe.experts.E.w1, w3, w2; router: gate
qwen2_moe  the same, with biases                   mlp.experts.E.gate_proj, ...; shared_expert, shared_expert_gate
qwen3_moe  the same, with q_norm and k_norm        mlp.experts.E.gate_proj, ...
olmoe      the same, with q_norm and k_norm        mlp.experts.E.gate_proj, ...
llama      the same                                mlp.gate_proj, ...: one expert
dbrx       transformer.blocks.N.norm_attn_norm     ffn.experts.mlp.w1, v1, w2, the experts of a layer in each:
           .attn.Wqkv, ...: one matrix             rows E * f; w2 lies transposed
========== ======================================= ===========================================================

transformers 5 can also write what it holds in memory, all experts of a layer in `mlp.experts.gate_up_proj` [E, 2f, h]
and `mlp.experts.down_proj` [E, h, f] (`save_pretrained(..., save_original_format=False)`): "packed" here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hrm.model import ModelSpec
from runtime.numerics import Numerics
from runtime.weight_source import Shape, dense_shapes, expert_shape, top_shapes

__all__ = ["KeyMap", "Part", "is_harmless", "map_keys"]

# Names of the Llama family, which all families here but DBRX share.
_ATTENTION = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "o_bias": "self_attn.o_proj.bias",
    "post_norm": "post_attention_layernorm.weight",
    "dense_w1": "mlp.gate_proj.weight",
    "dense_w3": "mlp.up_proj.weight",
    "dense_w2": "mlp.down_proj.weight",
    "shared_gate": "mlp.shared_expert_gate.weight",
    "shared_w1": "mlp.shared_expert.gate_proj.weight",
    "shared_w3": "mlp.shared_expert.up_proj.weight",
    "shared_w2": "mlp.shared_expert.down_proj.weight",
    "router": "mlp.gate.weight",
}
_TOP = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}
_DBRX = {
    "input_norm": "norm_attn_norm.norm_1.weight",
    "o": "norm_attn_norm.attn.out_proj.weight",
    "post_norm": "norm_attn_norm.norm_2.weight",
    "router": "ffn.router.layer.weight",
}
_DBRX_TOP = {"embedding": "transformer.wte.weight", "final_norm": "transformer.norm_f.weight"}
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Where one neutral tensor lies.

    Attributes
    ----------
    key : str
        The stored tensor.
    shape : tuple of int
        The shape of the whole stored tensor.
    expert : int or None
        Index on its first axis where it has three, one for each expert.
    rows : tuple of int or None
        First row, and the row after the last, where the tensor is not all rows.
    transposed : bool
        Whether the neutral tensor is the transpose of that.
    """

    key: str
    shape: Shape
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMap:
    """Parts of every neutral tensor of a model: `top`, `dense[layer]`, and `experts[layer]` of the streamed layers."""

    top: Mapping[str, Part]
    dense: tuple[Mapping[str, Part], ...]
    experts: tuple[tuple[tuple[Part, Part, Part], ...], ...]

    def parts(self) -> Iterator[Part]:
        """All of them."""
        yield from self.top.values()
        for layer in self.dense:
            yield from layer.values()
        for experts in self.experts:
            for expert in experts:
                yield from expert


def map_keys(spec: ModelSpec, numerics: Numerics, *, packed: bool = False) -> KeyMap:
    """The key map of a model.

    Parameters
    ----------
    spec, numerics : ModelSpec, Numerics
        The model, of a family the runtime has kernels for.
    packed : bool
        Whether the experts are as transformers 5 holds them; DBRX's are the same either way.

    Returns
    -------
    KeyMap
        Where everything is.
    """
    if spec.family == "dbrx":
        return _map_dbrx(spec, numerics)
    names = dict(_ATTENTION)
    if spec.family == "mixtral" and not packed:
        names["router"] = "block_sparse_moe.gate.weight"
    top = {name: Part(key=_TOP[name], shape=shape) for name, shape in top_shapes(spec).items()}
    if spec.tie_embeddings:
        top["lm_head"] = top["embedding"]
    layers = range(spec.n_layers)
    dense = tuple(
        {
            name: Part(key=f"model.layers.{layer}.{names[name]}", shape=shape)
            for name, shape in dense_shapes(spec, numerics, layer).items()
        }
        for layer in layers
    )
    return KeyMap(top=top, dense=dense, experts=tuple(_map_experts(spec, layer, packed) for layer in layers))


def is_harmless(key: str, spec: ModelSpec) -> bool:
    """Whether a stored tensor that no part needs may be passed over without a word."""
    # Old files keep the rotary frequencies, which follow from the config; tied ones may hold the embedding twice.
    return key.endswith("rotary_emb.inv_freq") or (spec.tie_embeddings and key == _TOP["lm_head"])


def _map_experts(spec: ModelSpec, layer: int, packed: bool) -> tuple[tuple[Part, Part, Part], ...]:
    ffn, hidden = expert_shape(spec)
    block = f"model.layers.{layer}.mlp"
    if not spec.is_moe:
        return (_three([f"{block}.{name}.weight" for name in _MLP], ffn, hidden),)
    if not spec.moe_layers[layer]:
        return ()
    experts = range(spec.n_experts)
    if packed:
        gate_up = Part(key=f"{block}.experts.gate_up_proj", shape=(spec.n_experts, 2 * ffn, hidden))
        down = Part(key=f"{block}.experts.down_proj", shape=(spec.n_experts, hidden, ffn), transposed=True)
        return tuple(
            (
                replace(gate_up, expert=expert, rows=(0, ffn)),
                replace(gate_up, expert=expert, rows=(ffn, 2 * ffn)),
                replace(down, expert=expert),
            )
            for expert in experts
        )
    names = _MLP
    if spec.family == "mixtral":
        block, names = f"model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2")
    return tuple(_three([f"{block}.experts.{e}.{name}.weight" for name in names], ffn, hidden) for e in experts)


def _three(keys: list[str], ffn: int, hidden: int) -> tuple[Part, Part, Part]:
    gate, up, down = keys
    return (
        Part(key=gate, shape=(ffn, hidden)),
        Part(key=up, shape=(ffn, hidden)),
        Part(key=down, shape=(hidden, ffn), transposed=True),
    )


def _map_dbrx(spec: ModelSpec, numerics: Numerics) -> KeyMap:
    names = _TOP | _DBRX_TOP
    layers = range(spec.n_layers)
    top = {name: Part(key=names[name], shape=shape) for name, shape in top_shapes(spec).items()}
    if spec.tie_embeddings:
        top["lm_head"] = top["embedding"]
    return KeyMap(
        top=top,
        dense=tuple(_map_dbrx_layer(spec, numerics, layer) for layer in layers),
        experts=tuple(_map_dbrx_experts(spec, layer) for layer in layers),
    )


def _map_dbrx_layer(spec: ModelSpec, numerics: Numerics, layer: int) -> dict[str, Part]:
    block = f"transformer.blocks.{layer}"
    shapes = dense_shapes(spec, numerics, layer)
    query, kv = shapes["q"][0], shapes["k"][0]
    qkv = Part(key=f"{block}.norm_attn_norm.attn.Wqkv.weight", shape=(query + 2 * kv, spec.hidden_size))
    parts = {
        "q": replace(qkv, rows=(0, query)),
        "k": replace(qkv, rows=(query, query + kv)),
        "v": replace(qkv, rows=(query + kv, query + 2 * kv)),
    }
    return {
        name: parts[name] if name in parts else Part(key=f"{block}.{_DBRX[name]}", shape=shape)
        for name, shape in shapes.items()
    }


def _map_dbrx_experts(spec: ModelSpec, layer: int) -> tuple[tuple[Part, Part, Part], ...]:
    ffn, hidden = expert_shape(spec)
    gate, up, down = (
        Part(key=f"transformer.blocks.{layer}.ffn.experts.mlp.{name}", shape=(spec.n_experts * ffn, hidden))
        for name in ("w1", "v1", "w2")
    )
    spans = [(expert * ffn, (expert + 1) * ffn) for expert in range(spec.n_experts)]
    return tuple((replace(gate, rows=span), replace(up, rows=span), replace(down, rows=span)) for span in spans)
