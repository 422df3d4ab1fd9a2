"""torch's memory-efficient attention as its CUDA code states it, for the CPU, and what that code refuses.

Written from the public sources of PyTorch, ATen/native/transformers/cuda/attention.cu (`_efficient_attention_forward`)
and mem_eff_attention/kernel_forward.h (`advance_to_block`, `attention_kernel`, `check_supported`): one request, head
and query at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CAUSAL_FROM_TOP_LEFT, CAUSAL_FROM_BOTTOM_RIGHT = 1, 2


def check_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: Tensor | None = None,
    window_size: int | None = None,
) -> None:
    """Every TORCH_CHECK on the way to the kernel, for requests of any length side by side."""
    sides = (query, key, value)
    assert all(side.dim() == 4 and side.size(0) == 1 for side in sides), "cu_seqlens only supports one batch"
    assert key.size(1) == value.size(1)
    assert query.size(2) == key.size(2) == value.size(2), "as many heads of keys as of queries"
    assert query.size(3) == key.size(3)
    assert query.dtype == key.dtype == value.dtype
    assert all(side.stride(-1) == 1 for side in sides)
    aligned = 16 // query.element_size()  # of the kernels that load 128 bits at a time
    assert all(side.stride(i) % aligned == 0 for side in sides for i in (1, 2))
    assert all(side.storage_offset() % aligned == 0 for side in sides)
    assert bias is None and dropout_p == 0.0 and not compute_log_sumexp
    assert cu_seqlens_q is not None and cu_seqlens_k is not None and max_seqlen_q is not None
    for each in (cu_seqlens_q, cu_seqlens_k, *([] if seqlen_k is None else [seqlen_k])):
        assert each.dtype == torch.int32 and each.dim() == 1 and each.is_contiguous()
        assert each.device == query.device
    assert cu_seqlens_q.size(0) == cu_seqlens_k.size(0)
    assert seqlen_k is None or seqlen_k.size(0) == cu_seqlens_q.size(0) - 1
    assert custom_mask_type in (0, CAUSAL_FROM_TOP_LEFT, CAUSAL_FROM_BOTTOM_RIGHT)
    assert not window_size or custom_mask_type, "custom_mask_type not supported"


def attend(*args: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """The operator on the CPU."""
    check_arguments(*args, **named)
    query, key, value, _, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, _, mask = args[:10]
    window, scale, seqlen_k = named.get("window_size") or 0, named["scale"], named.get("seqlen_k")
    out = torch.full(query.shape, float("nan"), dtype=query.dtype)
    for batch in range(cu_seqlens_q.numel() - 1):
        q_start, q_end = cu_seqlens_q[batch].item(), cu_seqlens_q[batch + 1].item()
        k_start, k_end = cu_seqlens_k[batch].item(), cu_seqlens_k[batch + 1].item()
        if seqlen_k is not None:
            k_end = k_start + seqlen_k[batch].item()
        assert q_end - q_start <= max_seqlen_q, "the grid has no block for the queries beyond"
        diagonal = (k_end - k_start) - (q_end - q_start) if mask == CAUSAL_FROM_BOTTOM_RIGHT else 0
        for head in range(query.size(2)):
            keys, values = key[0, k_start:k_end, head].double(), value[0, k_start:k_end, head].double()
            for place in range(q_end - q_start):
                scores = keys @ query[0, q_start + place, head].double() * scale
                column = torch.arange(k_end - k_start)
                unseen = torch.zeros(k_end - k_start, dtype=torch.bool)
                if mask:
                    unseen |= column > place + diagonal
                if window:
                    unseen |= column <= place + diagonal - window
                weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
                out[0, q_start + place, head] = (weights @ values).to(query.dtype)
    none = torch.empty(0)
    return out, none, none, none, max_seqlen_q, max_seqlen_k


@contextlib.contextmanager
def operator_on_the_cpu(function: Any = attend) -> Iterator[None]:
    """Within it torch has the operator on the CPU, behind its own schema."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_efficient_attention_forward", function, "CPU")
    try:
        yield
    finally:
        library._destroy()


class Calls(TorchDispatchMode):
    """Notes the arguments of every call of the operator, and checks them; runs on tensors without memory too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._efficient_attention_forward.default:
            check_arguments(*args, **kwargs)
            self.seen.append((args, kwargs))
        return func(*args, **kwargs)
