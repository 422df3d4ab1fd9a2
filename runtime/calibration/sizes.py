"""How much is measured: sizes of tensors and numbers of repeats. None is the size of a released model's layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from hrm.units import MIB

__all__ = ["FULL", "QUICK", "Sizes", "calibration_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one calibration measures.

    Attributes
    ----------
    hidden, ffn, experts, top_k, heads, groups, head_dim : int
        Of the layer whose GPU and CPU work is timed.
    decode_tokens : tuple of int
        Micro-batches of the layer in decode.
    prefill : tuple of (int, int)
        Prompts of a micro-batch, and tokens of each.
    attention : tuple of (int, int)
        Requests, and their context.
    pool_bytes : int
        KV cache that attention goes round in: more than the caches of a processor hold.
    copies : tuple of int
        Sizes of copies; the last one gives the rates of the profile [byte].
    span_bytes : int
        Buffer that copies and reads go round in [byte].
    products : tuple of (int, int, int)
        Rows, inputs and outputs of matrix products.
    staging_threads : tuple of int
    disk_bytes, disk_piece, pin_bytes : int
        [byte]
    repeats : int
    least_s, most_s : float
        See `Stopwatch` [s].
    hurry_after_s : float
        Seconds after which everything is repeated three times and no more [s].
    """

    hidden: int = 1536
    ffn: int = 2560
    experts: int = 8
    top_k: int = 2
    heads: int = 12
    groups: int = 3
    head_dim: int = 128
    decode_tokens: tuple[int, ...] = (4, 12, 24, 48, 96, 192, 384)
    prefill: tuple[tuple[int, int], ...] = ((6, 96), (6, 160), (6, 320))
    attention: tuple[tuple[int, int], ...] = ((6, 192), (24, 192), (24, 768), (6, 2304), (48, 448))
    pool_bytes: int = int(192 * MIB)
    copies: tuple[int, ...] = (int(MIB) // 4, int(4 * MIB), int(24 * MIB), int(96 * MIB))
    span_bytes: int = int(288 * MIB)
    products: tuple[tuple[int, int, int], ...] = (
        (24, 1536, 1536),
        (96, 1536, 2560),
        (384, 1536, 2560),
        (768, 2560, 1536),
        (1536, 1536, 2560),
    )
    staging_threads: tuple[int, ...] = (1, 2, 4)
    disk_bytes: int = int(768 * MIB)
    disk_piece: int = int(96 * MIB)
    pin_bytes: int = int(192 * MIB)
    repeats: int = 9
    least_s: float = 0.006
    most_s: float = 1.2
    hurry_after_s: float = 80.0

    @property
    def weight_sets(self) -> int:
        """Copies of the small weights that are gone round in, so that they come from memory as in a model."""
        return 4


FULL: Final = Sizes()

QUICK: Final = Sizes(
    decode_tokens=(6, 24, 96, 288),
    prefill=((6, 96), (6, 224)),
    attention=((12, 192), (24, 768)),
    copies=(int(MIB), int(48 * MIB)),
    span_bytes=int(192 * MIB),
    products=((96, 1536, 2560), (768, 2560, 1536)),
    staging_threads=(1, 2),
    disk_bytes=int(192 * MIB),
    pin_bytes=int(96 * MIB),
    repeats=5,
    least_s=0.004,
    most_s=0.5,
    hurry_after_s=16.0,
)


def calibration_config(sizes: Sizes, dtype: str) -> dict[str, Any]:
    """The config.json of a model of one Mixtral-like layer of these sizes."""
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    return {
        "model_type": "mixtral",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups,
        "head_dim": sizes.head_dim,
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "vocab_size": 4096,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "hidden_act": "silu",
        "torch_dtype": names[dtype],
        "tie_word_embeddings": False,
    }
