"""The page of a job: what was predicted and what was measured, in one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hrm.errors import InputError
from hrm.gantt import lane_in_words, op_in_words
from hrm.graph import Op
from hrm.html_pages import Column, figure_svg, heading, html_page, html_table, note_line
from hrm.trace_names import parse_lane
from runtime.jobs.figures import LEVELS, draw_lanes, draw_memory, draw_throughput
from runtime.jobs.progress import duration, rate_text, size_text

__all__ = ["render_job", "save_page"]

RATES = {
    "throughput_tokens_per_s": "throughput [token/s]",
    "prefill_s": "prefill [s]",
    "decode_s": "decode [s]",
}
LEAST_SHARE = 0.002
"""Of the run, below which a kind of task is not listed."""


def save_page(document: Mapping[str, Any], path: Path) -> None:
    """Write the page.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    text = render_job(document)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fact = f"cannot be written: {error.strerror or error}"
        raise InputError(fact, where=f"--report: {path}", way_out="make room, or another file") from None


def render_job(document: Mapping[str, Any]) -> str:
    """The page as HTML text.

    Parameters
    ----------
    document : mapping
        Of `runtime.jobs.runner.run_prompts`, of a job in which something ran.
    """
    parts = [note_line(text) for text in _head(document)]
    parts += [heading("Throughput over time"), figure_svg(draw_throughput(document))]
    parts.append(
        note_line(
            "Predicted is the cost model's account of the same graphs: the batches as they were cut, and after each "
            "graph the requests that were left, at the context they had."
        )
    )
    parts += [heading("Predicted and measured"), _rates(document), *map(note_line, _remarks(document))]
    parts += [heading("Where the time went"), figure_svg(draw_lanes(document)), _lanes(document)]
    parts.append(
        note_line(
            "Lanes work at the same time, so their seconds add up to more than the job took. The grey bar below a lane "
            "is what the cost model says that it would be busy."
        )
    )
    parts += [heading("Peaks of memory"), figure_svg(draw_memory(document)), _memory(document)]
    parts += [heading("Requests"), _requests(document)]
    parts += [heading("Machine and versions"), _machine(document)]
    return html_page(f"A job of {document['model']}, predicted and measured", parts)


def _head(document: Mapping[str, Any]) -> Iterator[str]:
    sizes = document["batches"]
    yield (
        f"{document['input']} to {document['output']}: {document['finished']:,} of {document['requests']:,} requests "
        f"finished in {duration(document['run_s'])}, in {len(sizes):,} batches of up to {max(sizes):,}; plan "
        f"{document['plan']} for {document['hardware']}, schedule {document['schedule']}."
    )
    if document["finished_before"]:
        yield f"{document['finished_before']:,} results were there before; this page is of the last start alone."
    if document.get("ended_by"):
        yield f"Ended by: {document['ended_by']}"
    elif document["stopped"]:
        yield "Stopped by a signal; the same command goes on from there."


def _rates(document: Mapping[str, Any]) -> str:
    rows = []
    for key, words in RATES.items():
        ratio = document["predicted_over_measured"][key]
        cells = [rate_text(document["predicted"][key]), rate_text(document[key])]
        rows.append([words, *cells, "" if ratio is None else f"{ratio:.3f}"])
    heads: list[Column] = [("", False), ("predicted", True), ("measured", True), ("predicted / measured", True)]
    return html_table(heads, rows)


def _remarks(document: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Were all requests to run to the plan's generation length, "
        f"{rate_text(document['predicted_throughput_tokens_per_s'])} token/s are predicted for these batches."
    )
    hardware = document["hardware"]
    if document["emulated"]:
        yield (
            f"The accelerator was emulated on a CPU core: what is measured, and its ratio to what is predicted for "
            f"{hardware}, says nothing about {hardware}."
        )
    elif document["device"] == "cpu":
        yield f"Everything ran on the CPU of this machine: the ratio means something if it is that of {hardware}."
    elif not document["same_gpu"]:
        yield f"This GPU is not the one of {hardware}, or that is not known: the ratio says how the two differ."
    run = document["run_s"]
    rest = max(0.0, run - document["prefill_s"] - document["decode_s"])
    yield (
        f"Weights were loaded in {duration(document['load_s'])}, which does not count. Of prefill and decode, "
        f"{document['laid_out_s'] / run:.2%} of the job was laying out graphs; {rest / run:.2%} was outside both: "
        f"{document['bookkeeping_s'] / run:.2%} for writing results and counting, the rest for making batches."
    )


def _lanes(document: Mapping[str, Any]) -> str:
    rows, run = [], document["run_s"]
    for name, row in document["lanes"].items():
        busy = row["prefill_s"] + row["decode_s"]
        pairs = [rate_text(row[key]) for key in ("predicted_prefill_s", "prefill_s", "predicted_decode_s", "decode_s")]
        rows.append([lane_in_words(parse_lane(name), several=False), "all", *pairs, f"{busy / run:.1%}"])
        tasks = {**row["tasks"]["prefill"], **row["tasks"]["decode"]}
        for task in sorted(tasks, key=lambda task: -sum(row["tasks"][phase].get(task, 0.0) for phase in row["tasks"])):
            prefill, decode = (row["tasks"][phase].get(task, 0.0) for phase in ("prefill", "decode"))
            if prefill + decode >= LEAST_SHARE * run:
                cells = ["", rate_text(prefill), "", rate_text(decode), f"{(prefill + decode) / run:.1%}"]
                rows.append(["", op_in_words(Op(task)), *cells])
    heads: list[Column] = [("lane", False), ("task", False), ("prefill [s]: predicted", True), ("measured", True)]
    heads += [("decode [s]: predicted", True), ("measured", True), ("of the job", True)]
    return html_table(heads, rows)


def _memory(document: Mapping[str, Any]) -> str:
    rows, notes = [], ""
    for level, row in document["memory"].items():
        peak = max(row["loading_bytes"] or 0, row["running_bytes"] or 0)
        sizes = ("" if row[key] is None else size_text(row[key]) for key in ("loading_bytes", "running_bytes"))
        share = f"{peak / row['plan_bytes']:.1%}" if row["plan_bytes"] else ""
        rows.append([LEVELS[level], size_text(row["plan_bytes"]), *sizes, share])
        if row["reserve_bytes"]:
            fact = (
                f"What torch takes for itself, up to {size_text(row['reserve_bytes'])} of CPU memory, is not in a plan."
            )
            notes = note_line(fact)
    heads: list[Column] = [("", False), ("plan", True), ("while loading", True), ("while running", True)]
    return html_table([*heads, ("peak / plan", True)], rows) + notes


def _requests(document: Mapping[str, Any]) -> str:
    words = {"stop": "ended at an end token", "length": "ended at max_new_tokens"}
    rows = [[words.get(reason, reason), f"{count:,}"] for reason, count in sorted(document["finish_reasons"].items())]
    left = document["requests"] - document["finished"]
    rows += [["not finished", f"{left:,}"]] if left else []
    rows += [["lines that cannot be run", f"{len(document['refused']):,}"]] if document["refused"] else []
    rows += [["finished before this start", f"{document['finished_before']:,}"]] if document["finished_before"] else []
    rows.append(["tokens of prompts", f"{document['prompt_tokens']:,}"])
    rows.append(["tokens generated, of requests that finished", f"{document['generated_tokens']:,}"])
    how = f"temperature {document['temperature']:g}, top-p {document['top_p']:g}, seed {document['seed']}"
    rows.append(["sampling", how if document["temperature"] else "greedy"])
    return html_table([("", False), ("", True)], rows)


def _machine(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    rows = [
        ["device", machine["device"]],
        ["cores of this process", f"{machine['cores']:,}"],
        ["memory of the machine", size_text(machine["memory_bytes"])],
        ["system", machine["system"]],
        ["versions", f"hrm {machine['hrm']}, Python {machine['python']}, torch {machine['torch']}"],
        ["CUDA", machine["cuda"] or "none in this torch"],
    ]
    return html_table([("", False), ("", False)], rows)
