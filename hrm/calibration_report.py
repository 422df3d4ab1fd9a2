"""What a calibration found, printed: the quantities of the profile, what lanes lose to each other, what looks wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_calibration"]

HEADS = ("quantity", "value", "spread", "how")
LEFT_OUT = ("gpu.usable_memory", "gpu.context", "gpu.count", "cpu.reserved")
"""Rows that say nothing new on a screen; the file has them."""


def print_calibration(document: Mapping[str, Any], console: Console) -> None:
    """Print the document of `hrm calibrate`."""
    from rich.markup import escape
    from rich.table import Table

    machine = document["machine"]
    limit = machine["container_limit_bytes"]
    console.print(f"[bold]{escape(document['title'])}[/]")
    console.print(
        f"{machine['cores']} cores, {machine['memory_bytes'] / 2**30:.2f} GiB"
        f"{'' if limit is None else ' (the limit of the container)'}, {machine['numa_nodes']} NUMA node"
        f"{'s' * (machine['numa_nodes'] > 1)}; measured in {document['seconds']:.0f} s"
    )
    for number, link in enumerate(document["links"]):
        console.print(f"link of GPU {number}: PCIe {link['generation']} x{link['width']} under load")
    if document["emulated"]:
        console.print("There is no GPU here: the accelerator is a core and memory of its own, and copies are real.")
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in HEADS:
        table.add_column(head, justify="right" if head in ("value", "spread") else "left", overflow="fold")
    for row in _rows(document):
        table.add_row(*(escape(word) for word in row))
    console.print(table)
    console.print()
    together = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("beside other work", "alone", "beside", "while"):
        together.add_column(head, justify="right" if head in ("alone", "beside") else "left", overflow="fold")
    for row in _together(document["measurements"]):
        together.add_row(*(escape(word) for word in row))
    console.print(together)
    console.print()
    for line in document["looks_wrong"]:
        console.print(f"! {escape(line)}.")
    for what, why in document["not_measured"].items():
        console.print(f"- {escape(what)} not measured: {escape(why)}.")
    console.print(f"- {len(document['measurements'])} measurements stand as comments in the file, and in --json.")
    console.print("next: hrm plan --hw auto --model MODEL")


def _rows(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    spreads = {each["name"]: each["spread"] for each in document["measurements"]}
    for key, quantity in document["quantities"].items():
        if key in LEFT_OUT:
            continue
        names = quantity["measurements"]
        spread = f"{100 * spreads[names[0]]:.0f} %" if len(names) == 1 else ""
        note = quantity["note"]
        how = names[0] if len(names) == 1 else note
        yield key, quantity["text"], spread, how


def _together(measurements: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    """Measurements beside other work, with what they are alone."""
    alone = {each["name"]: each for each in measurements if " while " not in each["name"]}
    for each in measurements:
        name, separator, words = each["name"].partition(" while ")
        if separator and name in alone:
            yield name, _value(alone[name]), _value(each), words


def _value(measurement: Mapping[str, Any]) -> str:
    scale, unit = {"byte/s": (1e-9, "GB/s"), "FLOP/s": (1e-9, "GFLOP/s"), "s": (1e3, "ms")}[measurement["unit"]]
    return f"{measurement['median'] * scale:.3g} {unit}"
