"""Where a plan runs: a CUDA GPU, or the CPU alone with the accelerator emulated in an arena of its own.

Emulated, "GPU memory" is shared anonymous memory (it shows as RssShmem, apart from the CPU tier's RssAnon) and the GPU
lane computes on a core of its own, so that copies between the two are real copies and the lanes really overlap.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hrm.errors import InputError
from hrm.graph import LaneKind

__all__ = ["Device", "choose_device", "no_room"]

HUGE_PAGE = getattr(mmap, "MADV_HUGEPAGE", None)


class _Mapping(mmap.mmap):
    """Memory of the system; page-locked, it is unlocked before it goes back: the driver keeps books by address."""

    locked_at = 0

    def unlock(self) -> None:
        if self.locked_at:
            torch.cuda.cudart().cudaHostUnregister(self.locked_at)  # type: ignore[no-untyped-call]
            self.locked_at = 0

    def __del__(self) -> None:
        try:
            self.unlock()
        except Exception:  # the interpreter ends, and the process's memory with it
            return


_mappings: weakref.WeakValueDictionary[int, _Mapping] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Device:
    """The machine's compute device.

    Attributes
    ----------
    kind : {"cuda", "cpu"}
    cpu_only : bool
        Nothing is emulated: the plan computes everything on the CPU.
    cores : tuple of int
        Cores this process may use.
    """

    kind: Literal["cuda", "cpu"]
    cpu_only: bool
    cores: tuple[int, ...]

    @property
    def cuda(self) -> bool:
        """Whether there is a real GPU."""
        return self.kind == "cuda"

    @property
    def emulated(self) -> bool:
        """Whether the accelerator is emulated."""
        return not self.cuda and not self.cpu_only

    @property
    def trace_kind(self) -> str:
        """What a trace of it is called."""
        return "emulated" if self.emulated else "measured"

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of the GPU level live."""
        return torch.device("cuda" if self.cuda else "cpu")

    @property
    def gpu_cores(self) -> tuple[int, ...]:
        """Cores of the emulated GPU lane: the last one, or none of its own on a machine with one."""
        return self.cores[-1:]

    @property
    def cpu_cores(self) -> tuple[int, ...]:
        """Cores of the CPU lane."""
        return self.cores[:-1] or self.cores if self.emulated else self.cores

    def lane_cores(self, kind: LaneKind) -> tuple[tuple[int, ...], int]:
        """Cores that a lane is held to (none: any), and with how many threads it computes."""
        if kind is LaneKind.GPU and self.emulated:
            return self.gpu_cores, 1
        if kind is LaneKind.CPU:
            return self.cpu_cores, len(self.cpu_cores)
        return (), 1

    def gpu_bytes(self, size: int) -> Tensor:
        """Memory of the GPU level, uint8 [size].

        Raises
        ------
        InputError
            There is no room, or not under the limit that was set.
        """
        if self.cuda:
            try:
                return torch.empty(size, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError as error:
                raise no_room(error) from None
        return _mapped(size, shared=True)

    def host_bytes(self, size: int) -> Tensor:
        """Memory of the CPU level, uint8 [size]; pages come with the first write."""
        return _mapped(size, shared=False)

    def pinned_bytes(self, size: int) -> Tensor:
        """Page-locked memory for copies, uint8 [size]; plain memory where nothing has to be page-locked.

        Exactly so much: torch's own allocator rounds up to powers of two.
        """
        memory = _mapped(size, shared=False)
        self.lock_pages(memory)
        return memory

    def lock_pages(self, memory: Tensor) -> None:
        """Page-lock memory in place, so that copies from it run at full rate beside kernels.

        Raises
        ------
        InputError
            The driver refuses; says how much was asked for.
        """
        if not self.cuda or memory.numel() == 0:
            return
        size = memory.numel() * memory.element_size()
        status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)  # type: ignore[no-untyped-call]
        if int(status) != 0:
            raise InputError(
                f"the driver does not page-lock {size / 2**30:.2f} GiB (CUDA error {int(status)})",
                where="page-locked memory",
                way_out="hrm plan --no-pin-weights, or a higher lock limit (ulimit -l)",
            )
        mapping = _mappings.get(memory.data_ptr())
        if mapping is not None:
            mapping.locked_at = memory.data_ptr()

    def unlock_pages(self, memory: Tensor) -> None:
        """Undo `lock_pages`."""
        mapping = _mappings.get(memory.data_ptr())
        if self.cuda and mapping is not None:
            mapping.unlock()

    def limit_gpu_memory(self, size: float) -> None:
        """Let torch have no more of the GPU than this [byte], also of a larger one; the CUDA context is not counted."""
        if self.cuda:
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, size / total)))


def _mapped(size: int, *, shared: bool) -> Tensor:
    if size <= 0:
        return torch.empty(0, dtype=torch.uint8)
    flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
    try:
        memory = _Mapping(-1, size, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise InputError(
            f"the system does not give {size / 2**30:.2f} GiB ({error})",
            where="memory",
            way_out="a plan for the memory this machine has: hrm plan --set cpu.memory=...",
        ) from None
    if HUGE_PAGE is not None and size >= 2**22 and not shared:
        memory.madvise(HUGE_PAGE)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    _mappings[found.data_ptr()] = memory
    return found


def no_room(error: torch.OutOfMemoryError, *, task: str = "") -> InputError:
    """What a person is told where the GPU has no room: what was asked for, and how much torch held of what it may."""
    said = str(error).splitlines()[0].partition(". GPU ")[0]
    held, most = torch.cuda.memory_reserved() / 2**30, torch.cuda.max_memory_allocated() / 2**30
    return InputError(
        f"{task + ': ' if task else ''}{said}; torch holds {held:.2f} GiB, of which {most:.2f} GiB were in use at most",
        where="GPU memory",
        way_out="a plan for less: hrm plan --set gpu.usable_memory=..., or a GPU that nobody else uses",
    )


def choose_device(name: str | None, *, cpu_only: bool) -> Device:
    """The device of that name, or the best there is.

    Parameters
    ----------
    name : {"cuda", "cpu"} or None
    cpu_only : bool
        The plan computes everything on the CPU.

    Raises
    ------
    InputError
        There is no CUDA device, or no such name.
    """
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (0,)
    if name not in (None, "cuda", "cpu"):
        raise InputError(f"{name!r} is no device", where="--device", way_out="cuda or cpu")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise InputError(
            "torch sees no CUDA device here",
            where="--device cuda",
            way_out="--device cpu emulates the accelerator, or a torch built for CUDA and a GPU",
        )
    # Tensors of all sizes come and go on three streams; segments that grow keep them from being strewn over many. Read
    # when CUDA starts, so that what the user has set wins.
    if there and name != "cpu" and "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    kind: Literal["cuda", "cpu"] = "cuda" if there and name != "cpu" and not cpu_only else "cpu"
    return Device(kind, cpu_only, cores)
