"""Words of a sweep's figures and screen: values as they were typed, names of keys, what was held fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from hrm.plots import BROWN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SMALL", "axis_label", "axis_name", "has_plan", "title_of", "value_text", "write_head"]

Axis = Mapping[str, Any]

NAMES: Final = {
    "cpu.memory": "CPU memory",
    "cpu.bandwidth": "CPU memory bandwidth",
    "gpu.usable_memory": "usable GPU memory",
    "gpu.bandwidth": "GPU memory bandwidth",
    "link.host_to_device.pinned": "link, host to device",
    "link+host_totals": "link bandwidth, each way",
    "link": "link bandwidth",
    "disk.read": "disk read bandwidth",
    "cpu.memory*cpu.bandwidth*cpu.peak": "CPU memory, bandwidth and FLOP/s",
    "workload.prompt_len": "prompt length",
    "workload.gen_len": "generated tokens per request",
    "workload.requests": "requests",
    "policy.micro_batch": "micro-batch",
}
SMALL: Final = 8.5
"""Size of the small text [points]."""


def has_plan(row: Mapping[str, Any]) -> bool:
    """Whether a schedule has a plan at a point; one that the cost model does not have is simulated only."""
    return row.get("predicted_tokens_per_s") is not None or row.get("simulated_tokens_per_s") is not None


def value_text(axis: Axis, value: Any) -> str:
    """A value as it was typed: ``"288 GiB"``, ``"2x"``, ``"t4"``."""
    if axis["kind"] == "text":
        return str(value)
    number = f"{value / axis['unit_size']:.6g}"
    return f"{number}x" if axis["times"] else f"{number} {axis['unit']}".rstrip()


def title_of(document: Mapping[str, Any]) -> tuple[str, str]:
    """What was held fixed, in two lines."""
    inputs = document["inputs"]
    first = " on ".join(part for part in (inputs["model"], inputs["hardware"]) if part)
    parts = []
    if inputs["num_requests"] is not None and inputs["cost_model"] == "full":
        parts.append(f"{inputs['num_requests']:,} requests{' of ' + inputs['workload'] if inputs['workload'] else ''}")
    elif inputs["workload"]:
        parts.append(inputs["workload"])
    if inputs["padded"]:
        parts.append("padded")
    if inputs["generation_length"] is not None:
        parts.append(f"{inputs['generation_length']} tokens generated")
    pins = inputs["pins"]
    if pins.get("kv_on_disk") == 0 and pins.get("weights_on_disk") == 0:
        parts.append("no disk")
    rest = {key: value for key, value in pins.items() if key not in ("kv_on_disk", "weights_on_disk") or value}
    parts += [f"{key} = {value}" for key, value in rest.items()]
    if inputs["cost_model"] == "paper":
        parts.append("cost model of the paper (Eqs. 12-14)")
    if inputs["simulated"]:
        parts.append("simulated with contention" if inputs["contention"] else "simulated without contention")
    return first or "several machines and models", ", ".join(parts)


def axis_name(axis: Axis) -> str:
    """A key in words where it has some."""
    plain = str(axis["name"]).rstrip("*")
    return NAMES.get(plain, plain.replace("*", ", "))


def axis_label(axis: Axis) -> str:
    """A key in words with the unit it was typed in."""
    name = axis_name(axis)
    name = name[0].upper() + name[1:] if axis["name"].rstrip("*") in NAMES else name
    if axis["times"]:
        return f"{name} [x what the profile has]"
    return f"{name} [{axis['unit']}]" if axis["unit"] else name


def write_head(figure: Figure, document: Mapping[str, Any], left: float) -> None:
    """Title, what was held fixed, and which limits other than memory bind."""
    height = float(figure.get_size_inches()[1])
    first, second = title_of(document)
    figure.text(left, 1 - 0.2 / height, first, fontsize=11.5, weight="bold", va="top")
    figure.text(left, 1 - 0.43 / height, second, fontsize=SMALL, va="top")
    said = _limits_said(document)
    if said:
        figure.text(left, 1 - 0.62 / height, said, fontsize=SMALL, va="top", color=BROWN)


def _limits_said(document: Mapping[str, Any]) -> str:
    """Limits other than memory that bind somewhere, and where."""
    along = document["varied"][0]
    parts = []
    for limit, words in (("requests", "the batch holds all requests"), ("hours", "--max-hours bounds the batch")):
        places: dict[str, list[str]] = {}
        for schedule in document["inputs"]["schedules"]:
            hit = [row for row in document["rows"] if row["limits"] == limit and row["schedule"] == schedule]
            if not hit:
                continue
            where = f"at {len(hit)} points"
            if len(document["varied"]) == 1 and along["kind"] != "text":
                first = value_text(along, min(row[along["name"]] for row in hit))
                where = f"from {first}" if len(hit) > 1 else f"at {first}"
            places.setdefault(where, []).append(schedule)
        parts += [f"{words} {where} ({', '.join(names)})" for where, names in places.items()]
    return "; ".join(parts)
