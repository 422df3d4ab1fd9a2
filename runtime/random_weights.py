"""RandomWeights: weights of a model's real shapes without its checkpoint, for timing and for tests of the machinery."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hrm.model import ModelSpec
from runtime.numerics import Numerics
from runtime.weight_source import Shape, dense_shapes, expert_shape, top_shapes

__all__ = ["RandomWeights"]

# Drawn once; everything else is copied or viewed from it. Prime, so that no two rows of a matrix come out alike: row i
# begins at value i * h modulo the period, and comes round again after that many rows.
_PERIOD = 4_194_301
_SPREAD = 1 << 20  # values by which the experts of a model may begin later than one another
_STEP = 64  # values between two beginnings: 128 bytes of bf16, so that no copy is slowed by its alignment
_STRIDE = 10_007  # coprime to the number of beginnings: neighbouring experts lie far apart


class RandomWeights:
    """Weights drawn from a normal distribution, the same for the same arguments.

    Values are drawn once, four million of them, and repeated with a prime period. The experts of all layers are views
    of two pools not much larger than one expert, each beginning at another place. So filling the 45 GB of a large model
    costs one copy, at the speed of memory and not of the generator, and the source itself holds three matrices. What
    this is not: independent values. Outputs mean nothing; times, shapes and routing (not uniform) are a model's.

    Matrices are scaled by their input width, and those that add to the residual stream by the number of layers too
    (Radford et al., *Language Models are Unsupervised Multitask Learners*, 2019, section 2.3), so that activations stay
    of the order of 1 in every format. Norms are 1, biases 0.

    Parameters
    ----------
    spec, numerics : ModelSpec, Numerics
        The model.
    dtype : torch.dtype
        Format of every tensor.
    seed : int
        Other seeds, other weights.
    layers : int, optional
        Keep only this many layers, the first ones; `spec` says so too. All where not given.
    one_layer : bool
        Whether all layers of a kind (MoE or dense) are the same tensors as the first of them, made once: for a caller
        that times many layers and does not copy what it gets.
    """

    def __init__(
        self,
        spec: ModelSpec,
        numerics: Numerics,
        *,
        dtype: torch.dtype,
        seed: int = 0,
        layers: int | None = None,
        one_layer: bool = False,
    ) -> None:
        if layers is not None:
            spec = replace(
                spec, n_layers=layers, moe_layers=spec.moe_layers[:layers], layer_windows=spec.layer_windows[:layers]
            )
        self.spec = spec
        self.numerics = numerics
        self._one_layer = one_layer
        self._seen: dict[int, dict[str, Tensor]] = {}
        self._residual = (2 * spec.n_layers) ** -0.5
        generator = torch.Generator().manual_seed(seed)
        self._values = torch.empty(_PERIOD, dtype=dtype).normal_(generator=generator)
        ffn, hidden = expert_shape(spec)
        values = ffn * hidden + _SPREAD
        self._gates = self._repeat(values, begin=0).mul_(hidden**-0.5)
        self._downs = self._repeat(values, begin=1).mul_(ffn**-0.5 * self._residual)

    def top(self, name: str) -> Tensor:
        """`embedding`, `final_norm` or `lm_head`, made anew at every call."""
        if name == "lm_head" and self.spec.tie_embeddings:
            name = "embedding"
        shape = top_shapes(self.spec)[name]
        # Final hidden states are of the order of 1, and so are logits of a head scaled by its input width. A tied
        # embedding serves as both.
        scale = 1.0 if name == "embedding" and not self.spec.tie_embeddings else self.spec.hidden_size**-0.5
        return self._draw(name, shape, scale, layer=-1)

    def dense(self, layer: int) -> dict[str, Tensor]:
        """Every tensor of a layer but the streamed experts."""
        layer = self._source_layer(layer)
        if layer in self._seen:
            return dict(self._seen[layer])
        tensors = {}
        for name, shape in dense_shapes(self.spec, self.numerics, layer).items():
            scale = shape[-1] ** -0.5
            if name == "o" or name.endswith("_w2"):
                scale *= self._residual
            tensors[name] = self._draw(name, shape, scale, layer=layer)
        if self._one_layer:
            self._seen[layer] = tensors
        return dict(tensors)

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gate w1, up w3 and down transposed w2^T of one expert: views, which share memory with those of others."""
        layer = self._source_layer(layer)
        if self.spec.is_moe and not self.spec.moe_layers[layer]:
            raise IndexError(f"layer {layer} has no experts")
        if not 0 <= expert < self.spec.streamed_experts:
            raise IndexError(f"expert {expert} of {self.spec.streamed_experts}")
        shape = expert_shape(self.spec)
        number = 3 * (layer * self.spec.streamed_experts + expert)
        return (
            _view(self._gates, shape, number),
            _view(self._gates, shape, number + 1),
            _view(self._downs, shape, number + 2),
        )

    def _source_layer(self, layer: int) -> int:
        kind = self.spec.moe_layers[layer]  # an IndexError where there is no such layer
        return self.spec.moe_layers.index(kind) if self._one_layer else layer

    def _draw(self, name: str, shape: Shape, scale: float, *, layer: int) -> Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=self._values.dtype)
        if name.endswith("_bias"):
            return torch.zeros(shape, dtype=self._values.dtype)
        # Where it begins depends on layer and name, so that no two tensors of a model are alike.
        begin = (layer + 1) * 7_919 + sum(ord(letter) * 131**place for place, letter in enumerate(name))
        values = 1
        for size in shape:
            values *= size
        return self._repeat(values, begin=begin % _PERIOD).mul_(scale).view(shape)

    def _repeat(self, values: int, *, begin: int) -> Tensor:
        """The drawn values from `begin` on, over and over."""
        tensor = torch.empty(values, dtype=self._values.dtype)
        filled = min(values, _PERIOD - begin)
        tensor[:filled] = self._values[begin : begin + filled]
        while filled < values:
            count = min(values - filled, _PERIOD)
            tensor[filled : filled + count] = self._values[:count]
            filled += count
        return tensor


def _view(pool: Tensor, shape: Shape, number: int) -> Tensor:
    begin = number * _STRIDE % (_SPREAD // _STEP) * _STEP
    return pool[begin : begin + shape[0] * shape[1]].view(shape)
