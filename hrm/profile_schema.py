"""The keys of a profile file: which exist, what each measures, and what is wrong with a document that has others.

A profile, a component (GPU model, host, link) and an override all use the same dotted keys (``gpu.bandwidth``), so one
table describes every file.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, get_args

import fastjsonschema

from hrm.errors import InputError
from hrm.profile import Source
from hrm.units import Kind

__all__ = ["COMPONENTS", "DTYPES", "FIELDS", "TEXTS", "Field", "find_structure_problems", "suggest", "unknown_key"]

DTYPES: Final = ("fp16", "bf16", "fp8", "int8", "fp32")
SOURCES: Final[tuple[str, ...]] = get_args(Source)

TEXTS: Final = ("title", "description", "gpu.name", "cpu.name", "disk.name", "link.name")
"""Keys that hold words."""

COMPONENTS: Final[Mapping[str, tuple[str, frozenset[str]]]] = {
    "gpu": ("gpus", frozenset({"gpu", "gpu_link", "efficiency"})),
    "host": (
        "hosts",
        frozenset({"cpu", "disk", "staging", "pinning", "launch_latency", "host_totals", "efficiency"}),
    ),
    "link": ("links", frozenset({"link", "efficiency"})),
}
"""Key in a profile -> (folder of its components, sections such a component may hold)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One quantity of a profile.

    Attributes
    ----------
    kind : Kind
        What it measures.
    default : tuple[str, Source, str] or None
        Text, source and note where a file may leave it out.
    optional : bool
        May be missing or null, and is then None.
    zero : bool
        Zero means something.
    share_of : str
        Key of the quantity that a percentage refers to; empty: no percentages.
    """

    kind: Kind
    default: tuple[str, Source, str] | None = None
    optional: bool = False
    zero: bool = False
    share_of: str = ""


def _direction(way: str) -> dict[str, Field]:
    pinned = f"link.{way}.pinned"
    return {
        pinned: Field(kind="bandwidth"),
        f"link.{way}.pageable": Field(kind="bandwidth", share_of=pinned),
        f"link.{way}.with_opposite": Field(kind="bandwidth", share_of=pinned),
    }


def _efficiency(name: str) -> dict[str, Field]:
    return {f"efficiency.{name}": Field(kind="share", optional=True)}


FIELDS: Final[Mapping[str, Field]] = {
    "gpu.count": Field(kind="count", default=("1", "user", "default: one GPU")),
    "gpu.host_cores": Field(kind="count", optional=True),
    "gpu.memory": Field(kind="size"),
    "gpu.usable_memory": Field(kind="size", share_of="gpu.memory"),
    "gpu.context": Field(
        kind="size",
        zero=True,
        default=("0.5 GiB", "estimated", "default: CUDA context, libraries; no public source"),
    ),
    "gpu.bandwidth": Field(kind="bandwidth"),
    **{f"gpu.peak.{dtype}": Field(kind="compute", optional=True) for dtype in DTYPES},
    "gpu_link": Field(kind="bandwidth", optional=True),
    "cpu.memory": Field(kind="size"),
    "cpu.reserved": Field(
        kind="size", zero=True, default=("2 GiB", "estimated", "default: operating system and the process itself")
    ),
    "cpu.bandwidth": Field(kind="bandwidth"),
    **{f"cpu.peak.{dtype}": Field(kind="compute", optional=dtype != "fp32") for dtype in DTYPES},
    "cpu.cores": Field(kind="count"),
    "cpu.lockable": Field(kind="size", optional=True),
    "disk.size": Field(kind="size"),
    "disk.read": Field(kind="bandwidth"),
    "disk.write": Field(kind="bandwidth"),
    **_direction("host_to_device"),
    **_direction("device_to_host"),
    "link.copy_latency": Field(
        kind="time",
        zero=True,
        default=(
            "3 us",
            "estimated",
            "default: one asynchronous copy, fit of T4 and V100 copy-size curves",
        ),
    ),
    "staging": Field(kind="bandwidth"),
    "pinning": Field(
        kind="bandwidth",
        default=("1.8 GB/s", "measured", "default: cudaMallocHost of 104 GiB takes about 60 s (llama.cpp PR 28223)"),
    ),
    "launch_latency": Field(
        kind="time", zero=True, default=("5 us", "estimated", "default: one kernel launch, no public source")
    ),
    "host_totals.host_to_device": Field(kind="bandwidth", optional=True),
    "host_totals.device_to_host": Field(kind="bandwidth", optional=True),
    "host_totals.memory": Field(kind="bandwidth", optional=True),
    **_efficiency("gpu_bandwidth"),
    **_efficiency("gpu_attention"),
    **_efficiency("gpu_flops_prefill"),
    **_efficiency("gpu_flops_decode"),
    "efficiency.gpu_overlap": Field(kind="share", optional=True, zero=True),
    **_efficiency("link"),
    **_efficiency("staging"),
    **_efficiency("cpu_attention"),
    **_efficiency("cpu_flops"),
    "efficiency.cpu_overlap": Field(kind="share", optional=True, zero=True),
    "efficiency.overhead_per_micro_batch": Field(kind="time", optional=True, zero=True),
}
"""Every quantity by its dotted key."""


def suggest(name: str, known: Iterable[str]) -> str:
    """``"did you mean 'bandwidth'?"``, the keys of a section, or everything known when nothing is near."""
    names = sorted(known)
    inside = [other for other in names if other.startswith(f"{name}.")]
    if inside:
        return f"it has {', '.join(inside)}"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names)}"


def unknown_key(key: str, known: Iterable[str], *, where: str) -> InputError:
    """The error for a key that no profile has."""
    shown = key if len(key) <= 60 else f"{key[:57]}..."
    return InputError(f"unknown key '{shown}'", where=where, way_out=suggest(key, known))


def find_structure_problems(document: dict[str, Any], *, origin: str) -> list[InputError]:
    """Unknown keys and values of the wrong shape; removes them from `document`, so that checks can go on."""
    problems: list[InputError] = []
    detailed = False
    while True:
        try:
            _validator(detailed)(document)
            return problems
        except fastjsonschema.JsonSchemaValueException as error:
            if not detailed:
                detailed = True
                continue
            path = list(error.path)[1:]
            problems += _explain(error, document, path, origin)


def _explain(
    error: fastjsonschema.JsonSchemaValueException, document: dict[str, Any], path: list[str], origin: str
) -> list[InputError]:
    """One schema error in words; removes its cause."""
    where = f"{origin}: {'.'.join(path)}" if path else origin
    if error.rule == "additionalProperties":
        known = error.definition["properties"]
        unknown = [key for key in error.value if key not in known]
        for key in unknown:
            del error.value[key]
        return [unknown_key(key, known, where=where) for key in unknown]
    if error.rule == "required":
        fact, way_out = "there is no value", 'e.g. {value: "300 GB/s", source: datasheet, note: "..."}'
    elif error.rule == "enum":
        shown = str(error.value)[:60]
        fact, way_out = f"'{shown}' is not accepted", f"accepted: {', '.join(error.rule_definition)}"
    else:
        accepted = error.rule_definition if isinstance(error.rule_definition, list) else [error.rule_definition]
        words = {"object": "a mapping", "string": "a text", "array": "a list", "number": "a number", "null": "null"}
        shapes = {dict: "a mapping", str: "a text", list: "a list", int: "a number", float: "a number", bool: "yes/no"}
        given = "null" if error.value is None else shapes.get(type(error.value), f"a {type(error.value).__name__}")
        fact = f"{given} is not accepted"
        way_out = f"accepted: {', '.join(words[name] for name in accepted)}"
    holder: Any = document
    for step in path[:-1]:
        holder = holder[int(step)] if isinstance(holder, list) else holder[step]
    del holder[int(path[-1]) if isinstance(holder, list) else path[-1]]
    return [InputError(fact, where=where, way_out=way_out)]


@lru_cache(maxsize=2)
def _validator(detailed: bool) -> Callable[[Any], Any]:
    """The compiled schema: shapes and known keys only; units and missing keys are checked after composition.

    The detailed one knows which rule failed where; it takes 20 ms more to compile, so only files with errors meet it.
    """
    root = _section()
    for key in FIELDS:
        _put(root, key, {"$ref": "#/definitions/quantity"})
    for key in TEXTS:
        _put(root, key, {"type": "string"})
    _put(root, "gpu.dtypes", {"type": "array", "items": {"enum": list(DTYPES)}})
    root["properties"]["host"] = {"type": "string"}
    root["properties"]["disk"]["type"] = ["object", "null"]
    for key in ("gpu", "link"):
        _put(root, f"{key}.component", {"type": "string"})
        root["properties"][key]["type"] = ["object", "string"]
    root["definitions"] = {
        "quantity": {
            "type": ["string", "number", "null", "object"],
            "required": ["value"],
            "additionalProperties": False,
            "properties": {
                "value": {"type": ["string", "number", "null"]},
                "source": {"enum": list(SOURCES)},
                "note": {"type": "string"},
            },
        }
    }
    compiled: Callable[[Any], Any] = fastjsonschema.compile(
        root, use_default=False, use_formats=False, detailed_exceptions=detailed
    )
    return compiled


def _section() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _put(root: dict[str, Any], key: str, leaf: dict[str, Any]) -> None:
    """Adds a leaf under its dotted key, making the sections on the way."""
    *sections, last = key.split(".")
    for section in sections:
        root = root["properties"].setdefault(section, _section())
    root["properties"][last] = leaf
