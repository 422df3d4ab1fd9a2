"""Checkpoint: a released model folder as a WeightSource, checked when it is opened and read tensor by tensor."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hrm.dtypes import is_quantised
from hrm.errors import InputError
from hrm.families import read_spec
from hrm.model import ModelSpec
from hrm.model_files import read_config_file
from runtime.key_maps import KeyMap, Part, is_harmless, map_keys
from runtime.numerics import Numerics, read_numerics
from runtime.shards import StoredTensor, find_tensors

__all__ = ["Checkpoint", "open_checkpoint"]

_DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_OPEN_FILES = 4  # an expert may lie in two files and its layer in a third


class Checkpoint:
    """The weights of a model folder. Made by `open_checkpoint`; may be read from several threads.

    Tensors are views of the mapped files: nothing is copied, nothing is read from disk before it is used, and what was
    read stays only as page cache. So copy them to where they are to lie, and do not write to them.

    Attributes
    ----------
    folder : Path
        Where it is.
    spec, numerics : ModelSpec, Numerics
        What its config.json says.
    warnings : tuple of str
        What a person should know of it: tensors that are not used, number formats other than config.json says.
    """

    def __init__(
        self,
        *,
        folder: Path,
        spec: ModelSpec,
        numerics: Numerics,
        keys: KeyMap,
        tensors: Mapping[str, StoredTensor],
        warnings: tuple[str, ...],
    ) -> None:
        self.folder = folder
        self.spec = spec
        self.numerics = numerics
        self.warnings = warnings
        self._keys = keys
        self._tensors = tensors
        self._files: OrderedDict[Path, Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files that hold it."""
        return tuple(sorted({tensor.file for tensor in self._tensors.values()}))

    def top(self, name: str) -> Tensor:
        """`embedding` [V, h], `final_norm` [h] or `lm_head` [V, h]."""
        return self._read(self._keys.top[name])

    def dense(self, layer: int) -> dict[str, Tensor]:
        """Every tensor of a layer but the streamed experts, by neutral name."""
        return {name: self._read(part) for name, part in self._keys.dense[layer].items()}

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gate w1, up w3 and down transposed w2^T of one expert, each [f, h]."""
        gate, up, down = self._keys.experts[layer][expert]
        return self._read(gate), self._read(up), self._read(down)

    def _read(self, part: Part) -> Tensor:
        file = self._tensors[part.key].file
        try:
            with self._lock:
                opened = self._open(file)
                if part.expert is None and part.rows is None:
                    tensor: Tensor = opened.get_tensor(part.key)
                else:
                    rows = slice(None) if part.rows is None else slice(*part.rows)
                    stored = opened.get_slice(part.key)
                    tensor = stored[rows] if part.expert is None else stored[part.expert, rows]
        except (SafetensorError, OSError) as error:
            raise InputError(f"cannot be read: {error}", where=str(file), way_out="download it again") from error
        return tensor.t() if part.transposed else tensor

    def _open(self, file: Path) -> Any:
        # A view keeps its file mapped, also after the file left this list.
        opened = self._files.pop(file, None)
        if opened is None:
            opened = safe_open(str(file), framework="pt")
        self._files[file] = opened
        while len(self._files) > _OPEN_FILES:
            self._files.popitem(last=False)
        return opened


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a model folder and check all of it but the values.

    Parameters
    ----------
    folder : str or Path
        With config.json, and model.safetensors or its index and shards. No code in it is run.

    Returns
    -------
    Checkpoint
        With every tensor present in the shape that config.json needs, and every file of the right length.

    Raises
    ------
    InputError
        The folder or its config.json is missing or cannot be read; a family, a variant or a number format (quantised)
        that the runtime has no kernel for; pickle files only; a file that is missing, truncated or damaged; a tensor
        that is missing or has another shape.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise InputError("no such folder", where=str(folder), way_out="the folder of a released checkpoint")
    config_file = folder / "config.json"
    config = read_config_file(config_file)
    numerics = read_numerics(config, where=str(config_file))
    spec = read_spec(config, file=str(config_file), name=folder.absolute().name)
    if is_quantised(spec.expert_dtype) or is_quantised(spec.linear_dtype):
        raise _refuse_format(spec.expert_dtype, where=str(config_file))
    tensors = find_tensors(folder)
    packed = any(key.endswith(".mlp.experts.gate_up_proj") for key in tensors)
    keys = map_keys(spec, numerics, packed=packed)
    needed = {part.key: part for part in keys.parts()}
    _check_tensors(needed, tensors, folder)
    return Checkpoint(
        folder=folder,
        spec=spec,
        numerics=numerics,
        keys=keys,
        tensors=tensors,
        warnings=tuple(_list_warnings(needed, tensors, spec)),
    )


def _check_tensors(needed: Mapping[str, Part], tensors: Mapping[str, StoredTensor], folder: Path) -> None:
    missing = [key for key in needed if key not in tensors]
    if missing:
        more = f", nor {len(missing) - 1} more" if len(missing) > 1 else ""
        fact = f"holds no tensor {missing[0]}{more}, of {len(needed)} that config.json needs"
        raise InputError(fact, where=str(folder), way_out="the config.json and all files of one checkpoint")
    for key, part in needed.items():
        stored = tensors[key]
        if stored.dtype not in _DTYPES:
            raise _refuse_format(stored.dtype, where=f"{stored.file}: {key}")
        if stored.shape != part.shape:
            fact = f"has the shape {list(stored.shape)}, and config.json needs {list(part.shape)}"
            way_out = "the config.json that was released with these files"
            raise InputError(fact, where=f"{stored.file}: {key}", way_out=way_out)


def _list_warnings(needed: Mapping[str, Part], tensors: Mapping[str, StoredTensor], spec: ModelSpec) -> list[str]:
    warnings = []
    unused = sorted(key for key in tensors if key not in needed and not is_harmless(key, spec))
    if unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        warnings.append(f"tensors that the runtime does not use: {', '.join(unused[:3])}{more}")
    found = {_DTYPES[tensors[key].dtype] for key in needed}
    if found != {spec.checkpoint_dtype}:
        warnings.append(f"config.json says {spec.checkpoint_dtype}, the tensors are {', '.join(sorted(found))}")
    return warnings


def _refuse_format(dtype: str, *, where: str) -> InputError:
    fact = f"the runtime computes with fp32, fp16 and bf16 weights, not with {dtype}"
    return InputError(fact, where=where, way_out="the checkpoint of this model that is not quantised")
