"""The C++ kernels of `runtime/native`: compiled at first use, for the machine at hand, and called through ctypes.

Torch's own extension builder compiles them and keeps the result under `~/.cache/torch_extensions` (or
`TORCH_EXTENSIONS_DIR`), one folder for each content of the sources. One process builds at a time, and one that is
killed meanwhile leaves nothing that another would wait for or load. The kernels know nothing of torch: they take
addresses and numbers, and ctypes lets other Python threads run meanwhile. Their OpenMP is the one that torch has
loaded, so there is one pool of threads per calling thread, not two; ask for as many threads as
`torch.get_num_threads()`, since a pool is torn down and made anew where two neighbouring regions differ.

Without a compiler or ninja, or with the environment variable `HRM_NATIVE=0`, everything still works through torch,
slower.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hrm.terminal import say

__all__ = ["DTYPES", "open_library"]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the dtypes that the kernels read and write, the same in `native/vector.h`."""

FOLDER = Path(__file__).with_name("native")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fopenmp", "-Wno-psabi")
TYPES: dict[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}
SIGNATURES = {
    "hrm_attend_decode": ("l", "pippilllpppiliiifli"),
    "hrm_apply_experts": (None, "pipppplippplli"),
    "hrm_expert_scratch": ("l", "ll"),
    "hrm_multiply_expert": (None, "ppplpplplpi"),
    "hrm_multiply": (None, "pipippillli"),
    "hrm_normalise": (None, "pilpipllllfii"),
    "hrm_turn": ("l", "pllpllppilplli"),
    "hrm_route": (None, "pillifpppi"),
    "hrm_find_best": (None, "pilllppi"),
    "hrm_put_rows": ("l", "plplilppillpplli"),
    "hrm_read": ("l", "pli"),
    "hrm_multiply_add": ("f", "liip"),
    "hrm_instructions": ("i", ""),
}
"""Result and arguments of each kernel: pointer, int, int64, float."""

_lock = threading.Lock()
_opened: list[ctypes.CDLL | None] = []


def open_library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had; why is said once, on standard error.

    `HRM_NATIVE=0` is looked at each time; else the first call compiles what is not compiled yet, some ten seconds.
    """
    if os.environ.get("HRM_NATIVE") == "0":
        return None
    if not _opened:
        with _lock:
            if not _opened:
                _opened.append(_build_or_say_why())
    return _opened[0]


def _build_or_say_why() -> ctypes.CDLL | None:
    try:
        return _build()
    except Exception as error:  # whatever a compiler, a file system or a loader may object to
        say(f"no compiled CPU kernels, torch does their work, slower: {_reason(error)}")
        return None


def _build() -> ctypes.CDLL:
    from torch.utils import cpp_extension

    sources = sorted(FOLDER.glob("*.cpp"))
    name = f"hrm_kernels_{_machine()}_{_contents()}"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder = Path(root) / name
    folder.mkdir(parents=True, exist_ok=True)
    built, complete = folder / f"{name}.so", folder / "complete"
    with _alone(folder / "building"):
        if not (complete.exists() and built.exists()):
            if shutil.which(os.environ.get("CXX", "c++")) is None:
                raise RuntimeError("no C++ compiler found (c++, or the one that CXX names)")
            say("compiling the CPU kernels, once on this machine")
            # Torch waits for ever for a lock that a killed process left behind; here no one else can be building.
            (folder / "lock").unlink(missing_ok=True)
            with _ninja_in_path():
                cpp_extension.load(
                    name=name,
                    sources=[str(path) for path in sources],
                    extra_cflags=list(FLAGS),
                    extra_ldflags=["-fopenmp"],
                    build_directory=str(folder),
                    is_python_module=False,
                    verbose=False,
                )
            complete.touch()  # a library that a killed process has half written is built anew
    library = ctypes.CDLL(str(built))
    for symbol, (result, arguments) in SIGNATURES.items():
        function = getattr(library, symbol)
        function.restype = None if result is None else TYPES[result]
        function.argtypes = [TYPES[letter] for letter in arguments]
    return library


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; a lock of the kernel, which goes with the process that holds it, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _ninja_in_path() -> Iterator[None]:
    """PATH with the folder of this Python's commands behind it: there pip puts ninja, active environment or not."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join(filter(None, [before, sysconfig.get_path("scripts")]))
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _contents() -> str:
    """A name for the sources and flags: checkouts of different versions share the folder of builds."""
    found = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(FOLDER.iterdir()):
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _machine() -> str:
    """A name for the instructions of this machine: a home folder may be shared by machines that differ."""
    features = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            features += next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        pass
    return hashlib.sha256(features.encode()).hexdigest()[:12]


def _reason(error: Exception) -> str:
    """The line of a message that says most: the first that a compiler calls an error, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return next((line for line in lines if "error:" in line), lines[0])[:300]
