"""From the entries of the files, dotted key by dotted key, to a checked HardwareProfile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hrm.errors import InputError
from hrm.profile import (
    CpuLevel,
    DiskLevel,
    Efficiency,
    GpuLevel,
    HardwareProfile,
    HostTotals,
    Link,
    LinkDirection,
    Quantity,
)
from hrm.profile_schema import DTYPES, FIELDS
from hrm.units import EXAMPLES, parse_quantity

__all__ = ["Entry", "assemble"]

_LEAST_SHARE: Final = 0.001  # an efficiency below is a slipped decimal point, and would make times overflow
_NOT_ABOVE: Final = (
    ("gpu.usable_memory", "gpu.memory"),
    ("gpu.context", "gpu.usable_memory"),
    ("cpu.reserved", "cpu.memory"),
    ("link.host_to_device.pageable", "link.host_to_device.pinned"),
    ("link.host_to_device.with_opposite", "link.host_to_device.pinned"),
    ("link.device_to_host.pageable", "link.device_to_host.pinned"),
    ("link.device_to_host.with_opposite", "link.device_to_host.pinned"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One quantity as it stands in a file (`raw`: a text, a number, null, or a mapping), and which file that is."""

    raw: Any
    origin: str


def assemble(
    entries: Mapping[str, Entry],
    texts: Mapping[str, str],
    dtypes: tuple[str, ...],
    *,
    name: str,
    origin: str,
    complete: bool = True,
) -> tuple[HardwareProfile | None, list[InputError]]:
    """Read and check every quantity.

    Parameters
    ----------
    entries, texts, dtypes
        What the files say: quantities and words by dotted key, activation dtypes (empty: all that have a peak).
    name, origin : str
        Of the profile.
    complete : bool
        Whether missing keys are problems.

    Returns
    -------
    profile : HardwareProfile or None
        None when something is wrong.
    problems : list[InputError]
        All of them.
    """
    problems: list[InputError] = []
    quantities: dict[str, Quantity] = {}
    for key in FIELDS:
        try:
            quantity = _read_entry(key, entries, quantities, origin)
        except InputError as error:
            problems.append(error)
            continue
        if quantity is not None:
            quantities[key] = quantity
        elif complete and _is_required(key, entries):
            problems.append(
                InputError("is missing", where=f"{origin}: {key}", way_out=f"e.g. '{EXAMPLES[FIELDS[key].kind]}'")
            )
    problems += _contradictions(quantities, entries, dtypes, origin, complete)
    if problems or not complete:
        return None, problems
    return _build(quantities, texts, dtypes, name, origin), []


def _is_required(key: str, entries: Mapping[str, Entry]) -> bool:
    if key.startswith("disk."):
        return any(other.startswith("disk.") for other in entries)
    return not FIELDS[key].optional


def _read_entry(
    key: str, entries: Mapping[str, Entry], quantities: Mapping[str, Quantity], origin: str
) -> Quantity | None:
    """One quantity; None where it is absent or null."""
    field = FIELDS[key]
    entry = entries.get(key)
    if entry is None:
        if field.default is None:
            return None
        text, source, note = field.default
        return Quantity(value=parse_quantity(text, field.kind, where=key), text=text, source=source, note=note)
    where = f"{entry.origin}: {key}"
    raw = entry.raw if isinstance(entry.raw, dict) else {"value": entry.raw}
    value = raw["value"]
    if value is None:
        if field.optional:
            return None
        raise InputError("null is not accepted", where=where, way_out=f"e.g. '{EXAMPLES[field.kind]}'")
    if field.share_of and isinstance(value, str) and value.rstrip().endswith("%"):
        share = parse_quantity(value, "share", where=where)
        whole = quantities.get(field.share_of)
        if share < _LEAST_SHARE:
            raise InputError(f"'{value}' is out of range", where=where, way_out="accepted: 0.1 % to 100 %")
        number = share * (whole.value if whole else 1.0)  # a missing pinned rate is a problem of its own
    else:
        number = parse_quantity(value, field.kind, where=where)
    if number == 0 and not field.zero:
        raise InputError(f"'{value}' is zero", where=where, way_out=f"e.g. '{EXAMPLES[field.kind]}'")
    if field.kind == "share" and 0 < number < _LEAST_SHARE:
        raise InputError(f"'{value}' is out of range", where=where, way_out=f"accepted: {_LEAST_SHARE} to 1")
    return Quantity(value=number, text=str(value), source=raw.get("source", "user"), note=raw.get("note", ""))


def _contradictions(
    quantities: Mapping[str, Quantity],
    entries: Mapping[str, Entry],
    dtypes: tuple[str, ...],
    origin: str,
    complete: bool,
) -> list[InputError]:
    """Numbers that are fine alone but not together."""
    problems = []
    for low, high in _NOT_ABOVE:
        if low in quantities and high in quantities and quantities[low].value > quantities[high].value:
            holder = entries[low].origin if low in entries else origin
            fact = f"'{quantities[low].text}' is more than {high} '{quantities[high].text}'"
            problems.append(InputError(fact, where=f"{holder}: {low}", way_out=f"at most {high}"))
    peaks = [dtype for dtype in DTYPES if f"gpu.peak.{dtype}" in quantities]
    if complete and not peaks:
        way_out = "at least one, e.g. gpu: {peak: {fp16: '65 TFLOP/s'}}"
        problems.append(InputError("no peak of any dtype", where=f"{origin}: gpu.peak", way_out=way_out))
    for dtype in dtypes:
        if complete and peaks and dtype not in peaks:
            way_out = f"give gpu.peak.{dtype}, or leave {dtype} out; peaks: {', '.join(peaks)}"
            problems.append(InputError(f"'{dtype}' has no peak", where=f"{origin}: gpu.dtypes", way_out=way_out))
    return problems


def _build(
    quantities: Mapping[str, Quantity], texts: Mapping[str, str], dtypes: tuple[str, ...], name: str, origin: str
) -> HardwareProfile:
    def value(key: str) -> float:
        return quantities[key].value

    def maybe(key: str) -> float | None:
        return quantities[key].value if key in quantities else None

    def peaks(level: str) -> dict[str, float]:
        return {dtype: value(f"{level}.peak.{dtype}") for dtype in DTYPES if f"{level}.peak.{dtype}" in quantities}

    def direction(way: str) -> LinkDirection:
        return LinkDirection(
            pinned_bytes_per_s=value(f"link.{way}.pinned"),
            pageable_bytes_per_s=value(f"link.{way}.pageable"),
            with_opposite_bytes_per_s=value(f"link.{way}.with_opposite"),
        )

    efficiency = {key.removeprefix("efficiency."): value(key) for key in quantities if key.startswith("efficiency.")}
    if "overhead_per_micro_batch" in efficiency:
        efficiency["overhead_per_micro_batch_s"] = efficiency.pop("overhead_per_micro_batch")
    gpu = GpuLevel(
        name=texts.get("gpu.name", "GPU"),
        count=int(value("gpu.count")),
        memory_bytes=value("gpu.memory"),
        usable_memory_bytes=value("gpu.usable_memory"),
        context_bytes=value("gpu.context"),
        bandwidth_bytes_per_s=value("gpu.bandwidth"),
        peak_flops_per_s=peaks("gpu"),
        dtypes=dtypes or tuple(peaks("gpu")),
        host_cores=int(maybe("gpu.host_cores") or 0),
    )
    cpu = CpuLevel(
        name=texts.get("cpu.name", "CPU"),
        memory_bytes=value("cpu.memory"),
        reserved_bytes=value("cpu.reserved"),
        bandwidth_bytes_per_s=value("cpu.bandwidth"),
        peak_flops_per_s=peaks("cpu"),
        cores=int(value("cpu.cores")),
        lockable_bytes=maybe("cpu.lockable"),
    )
    disk = None
    if "disk.size" in quantities:
        disk = DiskLevel(
            name=texts.get("disk.name", "disk"),
            size_bytes=value("disk.size"),
            read_bytes_per_s=value("disk.read"),
            write_bytes_per_s=value("disk.write"),
        )
    link = Link(
        name=texts.get("link.name", "host link"),
        host_to_device=direction("host_to_device"),
        device_to_host=direction("device_to_host"),
        copy_latency_s=value("link.copy_latency"),
    )
    return HardwareProfile(
        name=name,
        title=texts.get("title", name),
        description=texts.get("description", ""),
        gpu=gpu,
        cpu=cpu,
        disk=disk,
        link=link,
        staging_bytes_per_s=value("staging"),
        pinning_bytes_per_s=value("pinning"),
        launch_latency_s=value("launch_latency"),
        gpu_link_bytes_per_s=maybe("gpu_link"),
        host_totals=HostTotals(
            host_to_device_bytes_per_s=maybe("host_totals.host_to_device"),
            device_to_host_bytes_per_s=maybe("host_totals.device_to_host"),
            memory_bytes_per_s=maybe("host_totals.memory"),
        ),
        efficiency=Efficiency(**efficiency),
        quantities=quantities,
        origin=origin,
    )
