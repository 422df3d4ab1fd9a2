"""What every task of a run really reads and writes: a batch run task by task while all its memory is watched.

Tensors are watched byte by byte (every operator of torch, and the CPU kernels and the disk file, which torch does not
see), what kernels pass on through the state of a run by name. So two tasks that touch one thing, one of them writing,
are found whether or not anyone thought of it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import runtime.attention
import runtime.experts
import runtime.run_state
import runtime.session
from hrm.graph import Task, TaskGraph
from hrm.trace import Span, Trace
from runtime.disk_file import DiskFile
from runtime.kv_cache import KvCache
from runtime.run_state import RunState

__all__ = ["Accesses", "watch_runs"]

Ranges = tuple[tuple[int, int], ...]

INDEXED = {"aten::index_copy_": 2, "aten::index_add_": 2, "aten::index_put_": 1}
"""Operators that write some rows only, and which argument says which."""

PLAIN = ("indices",)
"""Mappings of a run that are caches: whoever comes first fills them, all with the same."""


@cache
def _ranges(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> Ranges:
    """Bytes of a tensor in its storage."""
    places = np.array([offset], dtype=np.int64)
    for side, stride in zip(shape, strides, strict=True):
        places = (places[:, None] + np.arange(side) * stride).ravel()
    places = np.unique(places)
    if not len(places):
        return ()
    ends = np.flatnonzero(np.diff(places) > 1)
    first = places[np.concatenate(([0], ends + 1))]
    last = places[np.concatenate((ends, [len(places) - 1]))]
    return tuple((int(low) * width, int(high + 1) * width) for low, high in zip(first, last, strict=True))


class Accesses(TorchDispatchMode):
    """Accesses of the tasks of one graph: by thing, (task, first byte, last byte, whether it writes)."""

    def __init__(self) -> None:
        super().__init__()
        self.task = -1
        self.found: dict[Any, set[tuple[int, int, int, bool]]] = defaultdict(set)
        self._kept: list[Any] = []  # so that no two storages have one address
        self._known: set[int] = set()

    def touch(self, tensor: Tensor, *, writes: bool) -> None:
        """A tensor is read or written."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._kept.append(storage)
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        for low, high in _ranges(tensor.storage_offset(), shape, strides, tensor.element_size()):
            self.found[storage._cdata].add((self.task, low, high, writes))

    def name(self, what: Any, *, writes: bool) -> None:
        """Something with a name is read or written."""
        self.found[what].add((self.task, 0, 1, writes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Watch one operator."""
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
            return out  # a view
        rows = INDEXED.get(schema.name)
        for number, (argument, value) in enumerate(zip(schema.arguments, args, strict=False)):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor):
                    if writes and rows is not None:
                        index = args[rows][0] if isinstance(args[rows], list | tuple) else args[rows]
                        with self.pause():
                            for row in index.tolist():
                                self.touch(tensor[row], writes=True)
                    else:
                        self.touch(tensor, writes=writes)
                        if writes and number == 0 and not schema.name.endswith("copy_"):
                            self.touch(tensor, writes=False)
        made = out if isinstance(out, list | tuple) else (out,)
        for tensor, result in zip(made, schema.returns, strict=False):
            if isinstance(tensor, Tensor) and result.alias_info is None:
                self.touch(tensor, writes=True)
        return out

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Watch nothing."""
        with torch.utils._python_dispatch._disable_current_modes():
            yield

    def conflicts(self) -> Iterator[tuple[Any, int, int]]:
        """(thing, earlier task, later task): one of the two writes what the other uses."""
        for thing, uses in self.found.items():
            written = [use for use in uses if use[3]]
            pairs = set()
            for task, low, high, _ in written:
                for other, first, last, _ in uses:
                    if task != other and low < last and first < high:
                        pairs.add((min(task, other), max(task, other)))
            for earlier, later in sorted(pairs):
                yield thing, earlier, later


class _Activations(runtime.run_state.Activations):
    """Activations that tell which of their fields is used."""

    __slots__ = ("number",)
    watching: Accesses | None = None
    numbers = itertools.count()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = object.__new__(cls)
        object.__setattr__(made, "number", next(cls.numbers))  # addresses are used again
        return made

    def __getattribute__(self, name: str) -> Any:
        if _Activations.watching is not None and not name.startswith("_"):
            number = object.__getattribute__(self, "number")
            _Activations.watching.name(("activations", number, name), writes=False)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if _Activations.watching is not None:
            number = object.__getattribute__(self, "number")
            _Activations.watching.name(("activations", number, name), writes=True)
        object.__setattr__(self, name, value)


class _Watched(dict[Any, Any]):
    """A mapping that tells which of its keys is used."""

    def __init__(self, name: str, watching: Accesses, values: Any) -> None:
        super().__init__(values)
        self.name, self.watching = name, watching

    def __getitem__(self, key: Any) -> Any:
        self.watching.name((self.name, key), writes=False)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.watching.name((self.name, key), writes=False)
        return super().get(key, default)

    def __contains__(self, key: Any) -> bool:
        self.watching.name((self.name, key), writes=False)
        return super().__contains__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.watching.name((self.name, key), writes=True)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self.watching.name((self.name, key), writes=True)
        super().__delitem__(key)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self.watching.name((self.name, key), writes=not super().__contains__(key))
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self.watching.name((self.name, key), writes=True)
        return super().pop(key, *default)


@contextlib.contextmanager
def watch_runs() -> Iterator[list[tuple[TaskGraph, Accesses]]]:
    """Within it sessions run their graphs in order of issue, watched; gives graphs and accesses as they come."""
    ran: list[tuple[TaskGraph, Accesses]] = []
    state: list[RunState] = []
    current: list[Accesses] = []
    prepare, attend = runtime.session.Session.prepare, runtime.attention.attend_decode
    apply, read, write = runtime.experts.apply_experts, DiskFile.read, DiskFile.write

    def prepared(self: Any, *args: Any, **kwargs: Any) -> RunState:
        state.append(prepare(self, *args, **kwargs))
        return state[-1]

    def attended(
        q: Tensor, keys: Tensor, values: Tensor, first: Tensor, lengths: Tensor, out: Tensor, **how: Any
    ) -> None:
        watching = current[-1]
        with watching.pause():
            attend(q, keys, values, first, lengths, out, **how)
            for low, count in zip(first.tolist(), lengths.tolist(), strict=True):
                for side in (keys, values):
                    watching.touch(side[low : low + count], writes=False)
        watching.touch(q, writes=False)
        watching.touch(out, writes=True)

    def applied(x: Tensor, segments: Any, routing: Any, out: Tensor, **how: Any) -> None:
        watching = current[-1]
        with watching.pause():
            apply(x, segments, routing, out, **how)
        for expert, rows in segments:
            if routing.starts[expert + 1] > routing.starts[expert]:
                watching.touch(rows, writes=False)
        for tensor in (x, routing.order, routing.weights, out):
            watching.touch(tensor, writes=False)
        watching.touch(out, writes=True)

    def kept(action: Callable[..., None], writes: bool) -> Callable[..., None]:
        def disk(self: DiskFile, offset: int, memory: Tensor) -> None:
            if current:
                watching = current[-1]
                watching.touch(memory, writes=not writes)
                watching.found["disk"].add((watching.task, offset, offset + memory.numel(), writes))
                with watching.pause():
                    action(self, offset, memory)
            else:
                action(self, offset, memory)

        return disk

    def execute(graph: TaskGraph, run: Callable[[Task], Any], device: Any, **kwargs: Any) -> Trace:
        watching = Accesses()
        for field in fields(state[-1]):
            held = getattr(state[-1], field.name)
            if isinstance(held, dict) and field.name not in PLAIN:
                setattr(state[-1], field.name, _Watched(field.name, watching, held))
        _Activations.watching = watching
        current.append(watching)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.no_grad(), watching:
                for number, task in enumerate(graph.tasks):
                    watching.task = number
                    finish = run(task)
                    if finish is not None:
                        finish()
        finally:
            torch.set_num_threads(threads)
            _Activations.watching = None
            current.pop()
        ran.append((graph, watching))
        return Trace(tuple(Span(task.id, task.lane, 0.0, 0.0) for task in graph.tasks), device.trace_kind)

    with (
        mock.patch.object(runtime.session, "execute", execute),
        mock.patch.object(runtime.session.Session, "prepare", prepared),
        mock.patch.object(runtime.run_state, "Activations", _Activations),
        mock.patch.object(runtime.attention, "attend_decode", attended),
        mock.patch.object(runtime.experts, "apply_experts", applied),
        mock.patch.object(KvCache, "give_landing", lambda *_: None),  # who gets which depends on timing: each its own
        mock.patch.object(DiskFile, "read", kept(read, False)),
        mock.patch.object(DiskFile, "write", kept(write, True)),
    ):
        yield ran
