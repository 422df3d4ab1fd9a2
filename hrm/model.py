"""ModelSpec: the shape of a checkpoint, and the parameters, weight bytes and KV bytes that follow from it.

What a number format applies to stands here, once, and everything else asks these methods:

- `weights_dtype=None` is the checkpoint as released: routed experts in `expert_dtype`, the other linear matrices
  (attention, shared expert, dense MLP) in `linear_dtype`, all the rest in `checkpoint_dtype`. So fp8 checkpoints
  (DeepSeek-V3, Kimi-K2) keep embedding, lm_head, router and norms in 16 bit, and gpt-oss has its expert matrices in
  mxfp4 and everything else, expert biases included, in bf16.
- A quantised `weights_dtype` (fp8, int8, int4, mxfp4) replaces the format of all linear matrices and of nothing else:
  embedding, positions, lm_head, router, norms and every vector (bias, q/k norm, attention sink) stay as they are.
- `weights_dtype` fp32, fp16 or bf16 means the whole model in that format: an fp8 or mxfp4 checkpoint is dequantised.

"Streamed" parameters are those a plan moves layer by layer: the routed experts or, in a dense model, the MLP of each
layer, taken as the one expert of a layer that every token visits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from hrm.dtypes import DTYPES, is_quantised, kv_bytes, matrix_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LayerKind", "Matrix", "MlaShape", "ModelSpec", "ParameterCounts"]

Matrix = tuple[int, int]
"""Rows (output width) and columns (input width) of a weight matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    """Widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes
    ----------
    q_lora_rank : int or None
        Width of the compressed query; None where the query comes from one plain projection (V2-Lite).
    kv_lora_rank : int
        Width of the compressed keys and values, which is what the cache holds.
    qk_nope_head_dim, qk_rope_head_dim : int
        The parts of a query/key head without and with rotary position; the second is shared by all heads and cached.
    v_head_dim : int
        Width of a value head.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Parameters of the whole model by part; `attention` includes its biases, sinks and q/k norms."""

    embedding: int
    position: int
    lm_head: int
    attention: int
    router: int
    routed_experts: int
    shared_experts: int
    dense_mlp: int
    norms: int

    @property
    def total(self) -> int:
        """All parameters. Multi-token-prediction layers are not counted: no engine runs them in plain generation."""
        return (
            self.embedding
            + self.position
            + self.lm_head
            + self.attention
            + self.router
            + self.routed_experts
            + self.shared_experts
            + self.dense_mlp
            + self.norms
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers that cost the same: how many, whether they route to experts, and their attention window [tokens]."""

    count: int
    is_moe: bool
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of one checkpoint.

    Attributes
    ----------
    name, family, hub_id, origin : str
        Short name; `model_type` of the config; Hugging Face id ("" if unknown); file it was read from, for messages.
    hidden_size, n_layers, n_heads, n_kv_heads, vocab_size, max_positions : int
        With MLA `n_kv_heads` equals `n_heads` and says nothing about the cache.
    head_dim, value_head_dim : int
        Widths of a query/key head and of a value head.
    tie_embeddings : bool
        Whether the lm_head is the embedding table.
    mla : MlaShape or None
        None for ordinary multi-head or grouped-query attention.
    n_experts, top_k, expert_ffn : int
        Routed experts of one MoE layer, how many a token visits, their width; 0 in a dense model.
    shared_ffn, dense_ffn : int
        Width of all shared experts together and of the MLP of a dense layer; 0 where there is none.
    mlp_matrices : int
        3 for a gated MLP (gate, up, down), 2 for a plain one.
    moe_layers : tuple of bool
        For each layer, whether it routes to experts.
    layer_windows : tuple of (int or None)
        For each layer, the attention window [tokens], None for full attention.
    checkpoint_dtype, expert_dtype, linear_dtype : str
        Formats of the checkpoint: activations, tables and vectors; routed-expert matrices; other linear matrices.
    router_parameters_per_layer, norm_parameters_per_layer : int
        Of one MoE layer (with its biases); of any layer (the norms before attention and MLP).
    qkv_vector_parameters, output_vector_parameters : int
        Per layer: biases, q/k norms and sinks on the side of Q, K, V; bias of the output projection.
    expert_vector_parameters, shared_vector_parameters, dense_vector_parameters : int
        Biases of one routed expert; the gate of the shared expert (one MoE layer); biases of one dense MLP.
    final_norm_parameters, position_parameters, lm_head_vector_parameters : int
        Norm after the last layer; learned position table; bias of the lm_head.
    assumptions : tuple of str
        What the reader took for granted because files of this family do not say it; shown to the person.
    """

    name: str
    family: str
    hub_id: str = ""
    origin: str = ""
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_head_dim: int
    vocab_size: int
    max_positions: int
    tie_embeddings: bool
    mla: MlaShape | None = None
    n_experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_ffn: int = 0
    mlp_matrices: int = 3
    moe_layers: tuple[bool, ...]
    layer_windows: tuple[int | None, ...]
    checkpoint_dtype: str
    expert_dtype: str
    linear_dtype: str
    router_parameters_per_layer: int = 0
    norm_parameters_per_layer: int = 0
    qkv_vector_parameters: int = 0
    output_vector_parameters: int = 0
    expert_vector_parameters: int = 0
    shared_vector_parameters: int = 0
    dense_vector_parameters: int = 0
    final_norm_parameters: int = 0
    position_parameters: int = 0
    lm_head_vector_parameters: int = 0
    assumptions: tuple[str, ...] = ()

    # Layers

    @property
    def is_moe(self) -> bool:
        """Whether the model has routed experts."""
        return self.n_experts > 0

    @property
    def n_moe_layers(self) -> int:
        """Layers with routed experts."""
        return sum(self.moe_layers)

    @property
    def n_dense_layers(self) -> int:
        """Layers with an ordinary MLP."""
        return self.n_layers - self.n_moe_layers

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Layers grouped by (is_moe, window), in order of first appearance."""
        counts = Counter(zip(self.moe_layers, self.layer_windows, strict=True))
        return tuple(LayerKind(count=n, is_moe=is_moe, window=window) for (is_moe, window), n in counts.items())

    # Matrices, as (rows, columns)

    @property
    def qkv_matrices(self) -> tuple[Matrix, ...]:
        """The projections that run before attention, of one layer; with MLA the down and up projections of q and kv."""
        hidden = self.hidden_size
        if self.mla is None:
            kv_rows = self.n_kv_heads * self.head_dim
            value_rows = self.n_kv_heads * self.value_head_dim
            return (self.n_heads * self.head_dim, hidden), (kv_rows, hidden), (value_rows, hidden)
        mla = self.mla
        query_rows = self.n_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        down = (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)
        up = (self.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
        if mla.q_lora_rank is None:
            return (query_rows, hidden), down, up
        return (mla.q_lora_rank, hidden), (query_rows, mla.q_lora_rank), down, up

    @property
    def output_matrices(self) -> tuple[Matrix, ...]:
        """The output projection of attention, of one layer."""
        return ((self.hidden_size, self.n_heads * self.value_head_dim),)

    @property
    def expert_matrices(self) -> tuple[Matrix, ...]:
        """The matrices of one routed expert."""
        return self._mlp_matrices(self.expert_ffn)

    @property
    def shared_matrices(self) -> tuple[Matrix, ...]:
        """The matrices of the shared experts of one MoE layer."""
        return self._mlp_matrices(self.shared_ffn)

    @property
    def dense_matrices(self) -> tuple[Matrix, ...]:
        """The matrices of the MLP of one dense layer."""
        return self._mlp_matrices(self.dense_ffn)

    def _mlp_matrices(self, width: int) -> tuple[Matrix, ...]:
        if width == 0:
            return ()
        return ((width, self.hidden_size),) * (self.mlp_matrices - 1) + ((self.hidden_size, width),)

    # Parameters

    @property
    def qkv_parameters_per_layer(self) -> int:
        """Parameters of attention before the scores, with biases, q/k norms and sinks."""
        return _count(self.qkv_matrices) + self.qkv_vector_parameters

    @property
    def output_parameters_per_layer(self) -> int:
        """Parameters of the output projection, with its bias."""
        return _count(self.output_matrices) + self.output_vector_parameters

    @property
    def attention_parameters_per_layer(self) -> int:
        """All parameters of attention in one layer."""
        return self.qkv_parameters_per_layer + self.output_parameters_per_layer

    @property
    def parameters_per_expert(self) -> int:
        """Parameters of one routed expert, biases included; 0 in a dense model."""
        return _count(self.expert_matrices) + self.expert_vector_parameters

    @property
    def shared_parameters_per_layer(self) -> int:
        """Parameters of the shared experts of one MoE layer, with their gate."""
        return _count(self.shared_matrices) + self.shared_vector_parameters

    @property
    def dense_parameters_per_layer(self) -> int:
        """Parameters of the MLP of one dense layer, biases included."""
        return _count(self.dense_matrices) + self.dense_vector_parameters

    @property
    def parameters(self) -> ParameterCounts:
        """Parameters of the whole model by part."""
        table = self.vocab_size * self.hidden_size
        return ParameterCounts(
            embedding=table,
            position=self.position_parameters,
            lm_head=(0 if self.tie_embeddings else table) + self.lm_head_vector_parameters,
            attention=self.n_layers * self.attention_parameters_per_layer,
            router=self.n_moe_layers * self.router_parameters_per_layer,
            routed_experts=self.n_moe_layers * self.n_experts * self.parameters_per_expert,
            shared_experts=self.n_moe_layers * self.shared_parameters_per_layer,
            dense_mlp=self.n_dense_layers * self.dense_parameters_per_layer,
            norms=self.n_layers * self.norm_parameters_per_layer + self.final_norm_parameters,
        )

    @property
    def total_parameters(self) -> int:
        """All parameters."""
        return self.parameters.total

    @property
    def active_parameters(self) -> int:
        """Parameters one token uses, with embedding AND lm_head. Vendors differ: gpt-oss leaves the embedding out."""
        idle = self.n_moe_layers * (self.n_experts - self.top_k) * self.parameters_per_expert
        return self.total_parameters - idle

    # What a plan streams: routed experts or, in a dense model, the MLP as one expert

    @property
    def streamed_experts(self) -> int:
        """Experts of one streamed layer; 1 in a dense model."""
        return self.n_experts or 1

    @property
    def streamed_top_k(self) -> int:
        """Experts a token visits in one streamed layer; 1 in a dense model."""
        return self.top_k or 1

    @property
    def streamed_ffn(self) -> int:
        """Width of one streamed expert."""
        return self.expert_ffn or self.dense_ffn

    @property
    def streamed_layers(self) -> int:
        """Layers whose experts are streamed: the MoE layers, or all layers of a dense model."""
        return self.n_moe_layers if self.is_moe else self.n_layers

    @property
    def streamed_expert_parameters(self) -> int:
        """Parameters of one streamed expert, biases included."""
        return self.parameters_per_expert if self.is_moe else self.dense_parameters_per_layer

    @property
    def streamed_expert_matrices(self) -> tuple[Matrix, ...]:
        """The matrices of one streamed expert."""
        return self.expert_matrices if self.is_moe else self.dense_matrices

    # Weight bytes

    def expert_matrix_dtype(self, weights_dtype: str | None) -> str:
        """Format of the streamed experts' matrices under `weights_dtype`."""
        return weights_dtype or (self.expert_dtype if self.is_moe else self.linear_dtype)

    def linear_matrix_dtype(self, weights_dtype: str | None) -> str:
        """Format of the other linear matrices (attention, shared experts, dense MLP) under `weights_dtype`."""
        return weights_dtype or self.linear_dtype

    def table_dtype(self, weights_dtype: str | None) -> str:
        """Format of embedding, lm_head, router, norms and vectors under `weights_dtype`: never a quantised one."""
        if weights_dtype is None or is_quantised(weights_dtype):
            return self.checkpoint_dtype
        return weights_dtype

    def expert_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes of one streamed expert [bytes]: matrices with scales, and biases.

        Parameters
        ----------
        weights_dtype : str or None
            A key of `hrm.dtypes.DTYPES`; None is the checkpoint's own format.

        Returns
        -------
        int
            Bytes.
        """
        vectors = self.expert_vector_parameters if self.is_moe else self.dense_vector_parameters
        dtype = self.expert_matrix_dtype(weights_dtype)
        return _matrices_bytes(self.streamed_expert_matrices, dtype) + self._table_bytes(vectors, weights_dtype)

    def layer_expert_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes of all streamed experts of one streamed layer [bytes]."""
        return self.streamed_experts * self.expert_bytes(weights_dtype)

    def attention_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes of the attention weights of one layer [bytes]."""
        return self.qkv_bytes(weights_dtype) + self.output_bytes(weights_dtype)

    def qkv_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes of the weights of one layer that run before attention [bytes]."""
        dtype = self.linear_matrix_dtype(weights_dtype)
        return _matrices_bytes(self.qkv_matrices, dtype) + self._table_bytes(self.qkv_vector_parameters, weights_dtype)

    def output_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes of the output projection of one layer [bytes]."""
        dtype = self.linear_matrix_dtype(weights_dtype)
        vectors = self._table_bytes(self.output_vector_parameters, weights_dtype)
        return _matrices_bytes(self.output_matrices, dtype) + vectors

    def router_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes of the router of one MoE layer [bytes]."""
        return self._table_bytes(self.router_parameters_per_layer, weights_dtype)

    def shared_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes of the shared experts of one MoE layer, gate included [bytes]."""
        dtype = self.linear_matrix_dtype(weights_dtype)
        vectors = self._table_bytes(self.shared_vector_parameters, weights_dtype)
        return _matrices_bytes(self.shared_matrices, dtype) + vectors

    def dense_mlp_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes of the MLP of one dense layer [bytes]."""
        dtype = self.linear_matrix_dtype(weights_dtype)
        vectors = self._table_bytes(self.dense_vector_parameters, weights_dtype)
        return _matrices_bytes(self.dense_matrices, dtype) + vectors

    def norm_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes of the two norms of one layer [bytes]."""
        return self._table_bytes(self.norm_parameters_per_layer, weights_dtype)

    def layer_dense_bytes(self, is_moe: bool, weights_dtype: str | None = None) -> int:
        """Bytes of everything in one layer that is not streamed [bytes].

        Parameters
        ----------
        is_moe : bool
            Whether the layer routes to experts.
        weights_dtype : str or None
            As in `expert_bytes`.

        Returns
        -------
        int
            Attention and norms; plus router and shared experts in an MoE layer; plus the MLP in a dense layer of an
            MoE model. In a dense model the MLP is what is streamed, so it is not in here.
        """
        common = self.attention_bytes(weights_dtype) + self.norm_bytes(weights_dtype)
        if is_moe:
            return common + self.router_bytes(weights_dtype) + self.shared_bytes(weights_dtype)
        return common + (self.dense_mlp_bytes(weights_dtype) if self.is_moe else 0)

    def embedding_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes of the token table and, where there is one, the position table [bytes]."""
        return self._table_bytes(self.vocab_size * self.hidden_size + self.position_parameters, weights_dtype)

    @property
    def lm_head_shares_embedding(self) -> bool:
        """Whether the lm_head is the embedding table, so that storing it takes no bytes of its own."""
        return self.tie_embeddings

    def lm_head_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes the lm_head adds to the model [bytes]: 0 where it is tied to the embedding."""
        return self._table_bytes(self.parameters.lm_head, weights_dtype)

    def lm_head_read_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes the lm_head operator reads [bytes]: the whole matrix, tied or not."""
        return self._table_bytes(self.vocab_size * self.hidden_size + self.lm_head_vector_parameters, weights_dtype)

    def final_norm_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes of the norm after the last layer [bytes]."""
        return self._table_bytes(self.final_norm_parameters, weights_dtype)

    def weight_bytes(self, weights_dtype: str | None = None) -> int:
        """Bytes of all weights [bytes]: tables, final norm, and per layer the dense and the streamed part."""
        layers = sum(kind.count * self.layer_dense_bytes(kind.is_moe, weights_dtype) for kind in self.layer_kinds)
        tables = self.embedding_bytes(weights_dtype) + self.lm_head_bytes(weights_dtype)
        streamed = self.streamed_layers * self.layer_expert_bytes(weights_dtype)
        return tables + self.final_norm_bytes(weights_dtype) + layers + streamed

    def _table_bytes(self, values: int, weights_dtype: str | None) -> int:
        return values * DTYPES[self.table_dtype(weights_dtype)].value_bits // 8

    # KV cache

    @property
    def kv_values_per_token_per_layer(self) -> int:
        """Values one token leaves in the cache of one layer: a key and a value per KV head.

        With MLA it is the compressed latent and the shared rotary key, kv_lora_rank + qk_rope_head_dim (arXiv
        2405.04434, section 2.1.3): 576 in DeepSeek-V3, where 2 x 128 heads x 64 would say 28 times that.
        """
        if self.mla is not None:
            return self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        return self.n_kv_heads * (self.head_dim + self.value_head_dim)

    def kv_bytes_per_token_per_layer(self, kv_dtype: str) -> int:
        """Bytes one token leaves in the cache of one layer [bytes], scales included."""
        return kv_bytes(self.kv_values_per_token_per_layer, kv_dtype)

    @overload
    def kv_bytes_stored(self, tokens: int, kv_dtype: str) -> int: ...
    @overload
    def kv_bytes_stored(self, tokens: float, kv_dtype: str) -> float: ...
    @overload
    def kv_bytes_stored(self, tokens: NDArray[Any], kv_dtype: str) -> NDArray[Any]: ...
    def kv_bytes_stored(self, tokens: float | NDArray[Any], kv_dtype: str) -> float | NDArray[Any]:
        """Bytes the cache of one request holds over ALL layers [bytes].

        Parameters
        ----------
        tokens : int, float or array of any shape
            Tokens the request holds, prompt and generated so far.
        kv_dtype : str
            A key of `hrm.dtypes.DTYPES`.

        Returns
        -------
        int, float or array
            A sliding-window layer holds at most its window.
        """
        tokens_kept = sum(count * _clip(tokens, window) for window, count in Counter(self.layer_windows).items())
        stored: float | NDArray[Any] = self.kv_bytes_per_token_per_layer(kv_dtype) * tokens_kept
        return stored

    @overload
    def kv_bytes_read(self, context: int, kv_dtype: str, window: int | None) -> int: ...
    @overload
    def kv_bytes_read(self, context: float, kv_dtype: str, window: int | None) -> float: ...
    @overload
    def kv_bytes_read(self, context: NDArray[Any], kv_dtype: str, window: int | None) -> NDArray[Any]: ...
    def kv_bytes_read(self, context: float | NDArray[Any], kv_dtype: str, window: int | None) -> float | NDArray[Any]:
        """Bytes one decode step of one request reads from the cache in ONE layer [bytes].

        Not the same as bytes stored. Storage is what has to fit: all layers, at the end of the generation, for every
        request of the batch. Reading is what one step of one layer costs at the context it has then, and an MLA layer
        reads its latent once for all heads. Two plans that store the same may read very differently.

        Parameters
        ----------
        context : int, float or array of any shape
            Tokens the new token attends to.
        kv_dtype : str
            A key of `hrm.dtypes.DTYPES`.
        window : int or None
            The layer's attention window [tokens].

        Returns
        -------
        int, float or array
            Bytes for min(context, window) tokens.
        """
        read: float | NDArray[Any] = self.kv_bytes_per_token_per_layer(kv_dtype) * _clip(context, window)
        return read


def _count(matrices: tuple[Matrix, ...]) -> int:
    return sum(rows * columns for rows, columns in matrices)


def _matrices_bytes(matrices: tuple[Matrix, ...], dtype: str) -> int:
    return sum(matrix_bytes(rows, columns, dtype) for rows, columns in matrices)


def _clip(tokens: Any, window: int | None) -> Any:
    if window is None:
        return tokens
    if isinstance(tokens, int | float):
        return min(tokens, window)
    # The array's own method keeps numpy out of the import.
    return tokens.clip(max=window)
