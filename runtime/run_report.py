"""What a person sees of a run: one screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hrm.gantt import lane_in_words
from hrm.trace_names import parse_lane
from hrm.units import GIB, MIB

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_run"]

ROWS = {
    "throughput_tokens_per_s": "throughput, token/s",
    "prefill_s": "prefill, s",
    "decode_s": "decode, s",
    "layer_latency_s": "per layer of a decode step, s",
}
LEVELS = {"gpu": "GPU memory", "cpu": "CPU memory", "disk": "disk"}


def print_run(document: Mapping[str, Any], console: Console) -> None:
    """Print the document of `runtime.run_command.run_saved_plan`."""
    for line in _head(document):
        console.print(line, markup=False)
    console.print(f"weights loaded in {document['load_s']:,.3g} s", markup=False)
    for table in (_rates(document), _lanes(document), _memory(document)):
        console.print(table)
    for line in (*_experts(document), *_remarks(document)):
        console.print(line, markup=False)


def _head(document: Mapping[str, Any]) -> Iterator[str]:
    layers, every = document["layers"], document["layers_of_model"]
    part = f", {layers} of {every} layers" if layers < every else ""
    weights = "random weights" if document["weights"] == "random" else f"weights of {document['weights']}"
    planned = f"{document['model']}{part}, {weights}, as planned for {document['hardware']}"
    yield f"{planned}; run on {document['device_name']}"
    prompts = "random tokens" if document["prompts"] == "random" else f"prompts of {document['prompts']}"
    requests, batches = document["requests"], document["batches"]
    yield (
        f"{_count(requests, 'request')} ({prompts}, {document['prompt_tokens'] / requests:,.4g} on average), "
        f"{_count(document['generated_tokens'], 'token')} generated; {_count(len(batches), 'batch')} of "
        f"{_range(batches)}, schedule {document['schedule']}"
    )


def _range(batches: list[int]) -> str:
    low, high = min(batches), max(batches)
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"


def _rates(document: Mapping[str, Any]) -> Table:
    table = _table("", "predicted", "measured", "predicted / measured")
    for key, words in ROWS.items():
        ratio = document["predicted_over_measured"][key]
        table.add_row(
            words,
            _number(document["predicted"][key]),
            _number(document[key]),
            "-" if ratio is None else f"{ratio:.3f}",
        )
    return table


def _lanes(document: Mapping[str, Any]) -> Table:
    table = _table(
        "seconds busy", "prefill:\npredicted", "\nmeasured", "decode:\npredicted", "\nmeasured", "\nof the run"
    )
    for name, use in document["lanes"].items():
        words = lane_in_words(parse_lane(name), several=False) + (" *" if use["paced"] else "")
        keys = ("predicted_prefill_s", "prefill_s", "predicted_decode_s", "decode_s")
        table.add_row(words, *(_number(use[key]) for key in keys), _percent(use["utilisation"]))
    return table


def _memory(document: Mapping[str, Any]) -> Table:
    memory = document["memory"]
    small = max(use["plan_bytes"] for use in memory.values()) < GIB
    unit, name = (MIB, "MiB") if small else (GIB, "GiB")
    table = _table("peak of memory", f"plan, {name}", f"loading, {name}", f"running, {name}")
    for level, use in memory.items():
        shown = (use[key] for key in ("plan_bytes", "loading_bytes", "running_bytes"))
        table.add_row(LEVELS[level], *("-" if size is None else f"{size / unit:,.2f}" for size in shown))
    return table


def _experts(document: Mapping[str, Any]) -> Iterator[str]:
    said = [
        f"{found['touched']:.1f} in {phase} ({found['uniform']:.1f} if routing were uniform)"
        for phase, found in document["experts"].items()
    ]
    if said:
        of = next(iter(document["experts"].values()))["of"]
        yield f"experts touched by a micro-batch in a layer, of {of}: {', '.join(said)}"


def _remarks(document: Mapping[str, Any]) -> Iterator[str]:
    hardware, plan = document["hardware"], document["plan"]
    if document["emulated"]:
        yield (
            f"! the accelerator is emulated on a CPU core: what is measured, and its ratio to what is predicted for "
            f"{hardware}, says nothing about {hardware}."
        )
        yield "- emulated: activations of the GPU lie in CPU memory, and are counted there in plan and run."
    elif document["same_gpu"] is None and document["device"] == "cuda":
        yield f"! whether {document['device_name']} is the GPU of {hardware} is not known; the ratio may say little."
    elif document["same_gpu"] is None:
        yield f"! everything ran on the CPU of this machine: the ratio means something if it is that of {hardware}."
    elif not document["same_gpu"]:
        yield f"! predicted for {hardware}, run on another GPU: the ratio says how the two differ, not how right it is."
    if document["device"] == "cpu" and document["formats"]["compute"] == "fp16":
        yield "- fp16: a CPU computes products in fp32, and copies of what it multiplies count in its memory."
    if document["paced"]:
        words = ", ".join(lane_in_words(parse_lane(name), several=False) for name in document["paced"])
        yield f"* paced: tasks on {words} last at least as long as the profile of {hardware} says."
    if document["weights"] == "random":
        evenly = ", and experts are chosen nearly evenly" if document["prompts"] == "random" else ""
        yield f"- random weights: tokens mean nothing{evenly}."
    full = document["layers"] == document["layers_of_model"] and set(document["batches"]) == {plan["batch_size"]}
    if not full:
        yield (
            f"- predicted is what was run; the whole plan, {document['layers_of_model']} layers and batches of "
            f"{plan['batch_size']:,}: {plan['throughput_tokens_per_s']:,.4g} token/s predicted."
        )
    for note in document["notes"]:
        yield f"- {note}"


def _table(*heads: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    return table


def _percent(share: float) -> str:
    return "<0.1%" if 0.0 < share < 0.0005 else f"{share:.1%}"


def _number(value: float) -> str:
    return f"{value:,.4g}" if value else "-"


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"
