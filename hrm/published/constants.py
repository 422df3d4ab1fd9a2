"""The constants that end-to-end runs may fit: where each belongs, its public range, and the bounds physics gives it.

The public ranges come from sources independent of the end-to-end rows; a constant that no training row touches takes
the geometric middle of its range. Kernel measurements and public figures have fixed everything else first
(`hardware_profiles/components`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["CONSTANTS", "Constant", "Values"]

Values: TypeAlias = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One constant.

    Attributes
    ----------
    name : str
        ``component.what``.
    kind : {"gpu", "host", "system"}
        What it belongs to.
    low, high : float
        Public range.
    least, most : float
        Bounds of the fit.
    unit : str
        Empty for a share.
    source : str
        Of the public range.
    words : str
        What it is.
    """

    name: str
    kind: Literal["gpu", "host", "system"]
    low: float
    high: float
    least: float
    most: float
    unit: str
    source: str
    words: str

    @property
    def public(self) -> float:
        """Geometric middle of the public range."""
        return math.sqrt(self.low * self.high)

    @property
    def component(self) -> str:
        """What it belongs to, by name."""
        return self.name.rpartition(".")[0]


CONSTANTS: dict[str, Constant] = {
    each.name: each
    for each in (
        Constant(
            name="t4.gpu_flops",
            kind="gpu",
            low=0.125,
            high=0.65,
            least=0.01,
            most=1.0,
            unit="",
            source="from the vector units, 8.1 of 65 TFLOP/s, to sustained matmul, 42 of 65 (NVIDIA T4 datasheet; "
            "zzc0721/torch-performance-test-data)",
            words="share of the fp16 peak that whole layers reach on a T4",
        ),
        Constant(
            name="l4.gpu_flops",
            kind="gpu",
            low=0.25,
            high=0.59,
            least=0.01,
            most=1.0,
            unit="",
            source="from the vector units, 30.3 of 121 TFLOP/s, to sustained matmul, 71 of 121 (aiconfigurator "
            "l4.yaml; zzc0721, chsasank)",
            words="share of the fp16 peak that whole layers reach on an L4",
        ),
        Constant(
            name="n1-416.link",
            kind="host",
            low=0.59,
            high=1.0,
            least=0.1,
            most=1.0,
            unit="",
            source="of 18.5 GB/s for two GPUs: from 5-6 GB/s each, as on a crowded host (NVIDIA/nvbandwidth issue 11), "
            "to all of it",
            words="share of the PCIe rates that two T4s behind one host get",
        ),
        Constant(
            name="FlexGen.copies",
            kind="system",
            low=9.7e9,
            high=13.84e9,
            least=1e9,
            most=13.84e9,
            unit="byte/s",
            source="a cloud T4's 9.7 GB/s (router-gao/cuda-demo) to the 12.89 GiB/s of FlexGen's own cost model "
            "(FMInference/FlexLLMGen)",
            words="rate at which FlexGen copies weights and KV cache to one GPU",
        ),
        Constant(
            name="FlexGen(c).cpu_attention",
            kind="system",
            low=1.5e9,
            high=6.2e9,
            least=0.2e9,
            most=50e9,
            unit="byte/s",
            source="the 0.0123 TFLOP/s of FlexGen's own cost model (FMInference/FlexLLMGen) is 3.1 GB/s at 4 FLOP per "
            "KV byte; half to twice that",
            words="KV bytes per second of FlexGen's attention on the CPU",
        ),
        Constant(
            name="DeepSpeed.gpu_flops",
            kind="system",
            low=0.125,
            high=0.65,
            least=0.02,
            most=1.0,
            unit="",
            source="one torch product per expert: vector units to sustained matmul, as for the T4",
            words="share of the fp16 peak that DeepSpeed's plain model code reaches",
        ),
        Constant(
            name="MoE-Lightning.overhead",
            kind="system",
            low=0.0003,
            high=0.003,
            least=1e-5,
            most=0.05,
            unit="s",
            source="12 launches at 5 us are priced one by one; 25-250 us of Python for each (torch eager dispatch)",
            words="seconds per micro-batch and layer besides kernels and launches",
        ),
    )
}
"""By name."""
