"""The hierarchical roofline model (section 3.2 of the paper), n levels deep: one equation, one function.

Legend: level i runs the computation, level j holds its data; P peak [FLOP/s], B memory bandwidth [byte/s], B_ji link
from j to i [byte/s], I^i FLOPs over the bytes touched at level i, I^j FLOPs over the bytes that come from level j
[FLOP/byte]. Levels are numbered from the fastest memory down: 0 GPU, 1 CPU, 2 disk. Every function works for any two.

References
----------
Cao et al., MoE-Lightning, ASPLOS 2025, arXiv 2411.11217, section 3.2, Eqs. 4-11. `hrm.roofline_operators` gives the
intensities of operators, `hrm.roofline_report` the figures and the numbers behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hrm.cost import Formats, Work
from hrm.errors import InputError
from hrm.profile import Efficiency, HardwareProfile, HostTotals
from hrm.rates import derive_rates

__all__ = [
    "CostModel",
    "Hop",
    "Level",
    "Operator",
    "Places",
    "Stack",
    "attainable_from",
    "attainable_local",
    "balance_point",
    "compare_places",
    "link_bandwidth",
    "ridge_point",
    "stack_of",
    "turning_point_1",
    "turning_point_2",
]

Operator = Literal["attention", "ffn"]
"""What the paper's case study looks at: decode attention (Figure 4), routed experts (Figure 5)."""

CostModel = Literal["paper", "full"]
"""The authors' terms, or everything this planner counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One memory and the processor beside it.

    Attributes
    ----------
    name : str
        ``"GPU"``, ``"CPU"``, ``"disk"``.
    peak_flops_per_s : float
        P [FLOP/s]; 0 for a level without a processor.
    bytes_per_s : float
        B, reads of its own memory [byte/s].
    bytes : float
        Capacity [byte].
    overlap : float
        Share of the shorter of computation and memory access that hides behind the longer: 1 is the roofline (Eq. 8), 0
        adds both up.
    """

    name: str
    peak_flops_per_s: float
    bytes_per_s: float
    bytes: float
    overlap: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """The link between two neighbours, each way [byte/s]: `up` is towards the faster memory."""

    up_bytes_per_s: float
    down_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A machine as the model sees it.

    Attributes
    ----------
    levels : tuple of Level
        From the fastest memory to the slowest.
    hops : tuple of Hop
        ``hops[k]`` joins levels k and k + 1.
    """

    levels: tuple[Level, ...]
    hops: tuple[Hop, ...]

    def __post_init__(self) -> None:
        if not self.levels or len(self.hops) != len(self.levels) - 1:
            raise InputError(
                f"{len(self.levels)} levels with {len(self.hops)} links",
                where="stack",
                way_out="one link less than levels",
            )
        rates = [level.bytes_per_s for level in self.levels]
        rates += [rate for hop in self.hops for rate in (hop.up_bytes_per_s, hop.down_bytes_per_s)]
        if not all(0 < rate < float("inf") for rate in rates):  # NaN fails too
            raise InputError(f"bandwidths are {rates}", where="stack", way_out="finite numbers above 0 [byte/s]")
        peaks = [level.peak_flops_per_s for level in self.levels]
        if not all(0 <= peak < float("inf") for peak in peaks):
            raise InputError(f"peaks are {peaks}", where="stack", way_out="finite numbers, 0 for no processor [FLOP/s]")
        overlaps = [level.overlap for level in self.levels]
        if not all(0 <= overlap <= 1 for overlap in overlaps):
            raise InputError(f"overlaps are {overlaps}", where="stack", way_out="shares from 0 to 1")

    def index(self, name: str) -> int:
        """Number of a level by its name, in any case.

        Raises
        ------
        InputError
            The stack has no such level.
        """
        names = [level.name.lower() for level in self.levels]
        if name.lower() not in names:
            raise InputError(f"no level is called {name!r}", way_out=f"one of {', '.join(names)}")
        return names.index(name.lower())


def stack_of(
    profile: HardwareProfile, dtype: str, *, operator: Operator = "ffn", cost_model: CostModel = "full"
) -> Stack:
    """The stack of a profile: GPU(s), CPU and, where there is one, the disk.

    The GPUs of a profile act as one tensor-parallel group: memory, bandwidth and peak add up, and so do their links, up
    to what the host gives all of them together. Calibrated efficiencies count, of the GPU those of decode; without
    them these are peaks.

    Parameters
    ----------
    profile : HardwareProfile
    dtype : str
        Arithmetic format, e.g. ``"fp16"``.
    operator : {"attention", "ffn"}
        CPU attention has a calibrated memory rate of its own.
    cost_model : {"paper", "full"}
        The authors' planner works from peaks and does not multiply the link by the number of GPUs.

    Returns
    -------
    Stack

    Raises
    ------
    InputError
        The GPU has no peak for that format.
    """
    if cost_model == "paper":
        profile = replace(profile, efficiency=Efficiency(), host_totals=HostTotals())
    rates = derive_rates(profile, Formats(weights=None, kv=dtype, compute=dtype))
    gpu = Level(
        name="GPU",
        peak_flops_per_s=rates.gpu_flops_per_s["decode"],
        bytes_per_s=rates.gpu_bytes_per_s,
        bytes=profile.gpu.count * profile.gpu.usable_memory_bytes,
        overlap=rates.gpu_overlap,
    )
    cpu = Level(
        name="CPU",
        peak_flops_per_s=rates.cpu_flops_per_s,
        bytes_per_s=rates.cpu_attention_bytes_per_s if operator == "attention" else rates.cpu_bytes_per_s,
        bytes=profile.cpu.memory_bytes - profile.cpu.reserved_bytes,
        overlap=1.0 if operator == "attention" else rates.cpu_overlap,
    )
    link = Hop(up_bytes_per_s=rates.h2d_bytes_per_s, down_bytes_per_s=rates.d2h_bytes_per_s)
    if cost_model == "paper":
        up, down = profile.link.host_to_device, profile.link.device_to_host
        link = Hop(up_bytes_per_s=up.pinned_bytes_per_s, down_bytes_per_s=down.pinned_bytes_per_s)
    if profile.disk is None:
        return Stack(levels=(gpu, cpu), hops=(link,))
    read, write = rates.disk_read_bytes_per_s, rates.disk_write_bytes_per_s
    disk = Level(name="disk", peak_flops_per_s=0.0, bytes_per_s=read, bytes=profile.disk.size_bytes)
    return Stack(levels=(gpu, cpu, disk), hops=(link, Hop(up_bytes_per_s=read, down_bytes_per_s=write)))


def link_bandwidth(stack: Stack, j: int, i: int) -> float:
    """B_ji, bandwidth from level j to level i: the slowest hop on the way, none faster than the memory it reads.

    Parameters
    ----------
    stack : Stack
    j, i : int
        Source and destination; i above or below j. From a level to itself it is the level's own bandwidth.

    Returns
    -------
    float
        [byte/s]
    """
    rates = [stack.levels[j].bytes_per_s]
    step = -1 if i < j else 1
    for here in range(j, i, step):
        hop = stack.hops[min(here, here + step)]
        rates.append(hop.up_bytes_per_s if step < 0 else hop.down_bytes_per_s)
        rates.append(stack.levels[here].bytes_per_s)
    return min(rates)


def attainable_local(stack: Stack, i: int, intensity_i: float) -> float:
    """P <= min(P_i, B_i * I^i): run on level i with all data at level i (Eq. 8).

    Where computation and memory access do not overlap in full, seconds per FLOP are the larger of 1 / P_i and
    1 / (B_i * I^i) and, of the smaller, what does not hide (`hrm.rates`): the roof bends below both lines.

    Parameters
    ----------
    stack : Stack
    i : int
        Level.
    intensity_i : float
        I^i [FLOP/byte].

    Returns
    -------
    float
        [FLOP/s]; 0 for a level without a processor.
    """
    level = stack.levels[i]
    low, high = sorted((level.peak_flops_per_s, level.bytes_per_s * intensity_i))
    return low / (1.0 + (1.0 - level.overlap) * low / high) if low > 0 else 0.0


def attainable_from(stack: Stack, i: int, j: int, intensity_i: float, intensity_j: float) -> float:
    """P <= min(P_i, B_i * I^i, B_ji * I^j): run on level i with data fetched from level j (Eqs. 4-7).

    Copy and computation overlap; the time the pipeline needs to fill is left out.

    Parameters
    ----------
    stack : Stack
    i, j : int
        Level that runs it, level that holds the data.
    intensity_i, intensity_j : float
        I^i and I^j [FLOP/byte].

    Returns
    -------
    float
        [FLOP/s]
    """
    return min(attainable_local(stack, i, intensity_i), link_bandwidth(stack, j, i) * intensity_j)


def ridge_point(stack: Stack, i: int) -> float:
    """P_i / B_i: intensity from which level i computes at its peak [FLOP/byte]."""
    return stack.levels[i].peak_flops_per_s / stack.levels[i].bytes_per_s


def turning_point_1(stack: Stack, i: int, j: int) -> float:
    """P1: the I^j that solves I^j = min(P_j, B_j * I^j) / B_ji (Eq. 9).

    Below it, moving the data from j to i is slower than computing where they lie. Where B_j > B_ji this is P_j / B_ji
    (less, where computation and memory access at j do not overlap in full). Where B_j <= B_ji there is no crossing and,
    as at a level without a processor, P1 is 0: moving is never slower.

    Parameters
    ----------
    stack : Stack
    i, j : int
        Level that would run it, level that holds the data.

    Returns
    -------
    float
        [FLOP/byte]
    """
    link, source = link_bandwidth(stack, j, i), stack.levels[j]
    share, exposed = link / source.bytes_per_s, 1.0 - source.overlap
    if share >= 1:
        return 0.0
    beyond_ridge = share * (1.0 + exposed) <= 1
    return source.peak_flops_per_s / link * (1.0 - exposed * share if beyond_ridge else (1.0 - share) / exposed)


def turning_point_2(stack: Stack, i: int, j: int, intensity_i: float) -> float:
    """P2: I^j = min(P_i, B_i * I^i) / B_ji (Eq. 10). Below it the link binds, above it level i.

    Parameters
    ----------
    stack : Stack
    i, j : int
        Level that runs it, level that holds the data.
    intensity_i : float
        I^i [FLOP/byte].

    Returns
    -------
    float
        [FLOP/byte]
    """
    return attainable_local(stack, i, intensity_i) / link_bandwidth(stack, j, i)


def balance_point(stack: Stack, i: int, j: int, intensity_i: float) -> float:
    """The I^j at which B_i * I^i = B_ji * I^j (Eq. 11): memory at i and link take equally long.

    Past it a larger batch no longer helps, only a larger micro-batch. It equals P2 up to the ridge of level i, where
    computation and memory access overlap there.

    Parameters
    ----------
    stack : Stack
    i, j : int
        Level that runs it, level that holds the data.
    intensity_i : float
        I^i [FLOP/byte].

    Returns
    -------
    float
        [FLOP/byte]
    """
    return stack.levels[i].bytes_per_s * intensity_i / link_bandwidth(stack, j, i)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """One computation on two levels, its data on the second of them.

    Attributes
    ----------
    intensity_i, intensity_j, intensity_moved : float
        I^i; FLOPs over the bytes touched at j when it runs there; FLOPs over the bytes moved from j to i [FLOP/byte].
    stay_flops_per_s, fetch_flops_per_s, resident_flops_per_s : float
        Run at j; run at i with data fetched from j; run at i with all data there [FLOP/s].
    turning_point_1, turning_point_2, balance_point : float
        [FLOP/byte], on the axis of `intensity_moved`.
    better : int
        Level that runs it faster (j where they are equal: nothing has to move).
    """

    intensity_i: float
    intensity_j: float
    intensity_moved: float
    stay_flops_per_s: float
    fetch_flops_per_s: float
    resident_flops_per_s: float
    turning_point_1: float
    turning_point_2: float
    balance_point: float
    better: int


def compare_places(stack: Stack, i: int, j: int, *, at_i: Work, at_j: Work, bytes_moved: float) -> Places:
    """Compare running any operator at level i with data from j, and at level j.

    Parameters
    ----------
    stack : Stack
    i, j : int
        Level that would run it, level that holds the data.
    at_i, at_j : Work
        The operator as each level would run it (several micro-batches at i may share what is moved once, so their
        FLOPs may differ from `at_j`: only intensities are compared).
    bytes_moved : float
        Bytes that come from j for the FLOPs of `at_j` [byte].

    Returns
    -------
    Places
    """
    intensity_i, intensity_j = float(at_i.intensity), float(at_j.intensity)
    moved = float(at_j.flops) / bytes_moved
    stay = attainable_local(stack, j, intensity_j)
    fetch = attainable_from(stack, i, j, intensity_i, moved)
    return Places(
        intensity_i=intensity_i,
        intensity_j=intensity_j,
        intensity_moved=moved,
        stay_flops_per_s=stay,
        fetch_flops_per_s=fetch,
        resident_flops_per_s=attainable_local(stack, i, intensity_i),
        turning_point_1=turning_point_1(stack, i, j),
        turning_point_2=turning_point_2(stack, i, j, intensity_i),
        balance_point=balance_point(stack, i, j, intensity_i),
        better=i if fetch > stay else j,
    )
