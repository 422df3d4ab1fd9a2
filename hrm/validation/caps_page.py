"""`hrm validate memory` as a person sees it: on the screen, and as one HTML page that needs nothing else."""

from __future__ import annotations

import html
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.errors import InputError
from hrm.html_pages import Column, figure_svg, heading, html_page, html_table, note_line
from hrm.published.page_tables import number_text, percent_text
from hrm.units import GIB
from hrm.validation.caps_figure import draw_caps

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_caps", "print_caps_dry_run", "render_caps_page", "save_caps_page"]

POINT_COLUMNS: Sequence[Column] = (
    ("schedule", False),
    ("cap, GiB", True),
    ("N", True),
    ("mu", True),
    ("r_w", True),
    ("token/s", True),
    ("95 %", True),
    ("simulated", True),
    ("roofline", True),
    ("peak, GiB", True),
    ("limit, GiB", True),
    ("", False),
)


def _rows(points: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [_row(point) for point in sorted(points, key=lambda each: (each["schedule"], each["cap_bytes"]))]


def _row(point: Mapping[str, Any]) -> list[str]:
    start = [point["schedule"], f"{point['cap_bytes'] / GIB:.3f}"]
    if point["status"] == "infeasible":
        return [*start, *[""] * (len(POINT_COLUMNS) - 3), f"no plan: {point['reason']}"]
    policy, measured, predicted, memory = point["policy"], point["measured"], point["predicted"], point["memory"]
    return [
        *start,
        f"{policy['batch_size']:,}",
        f"{policy['micro_batch_size']:,}",
        f"{policy['weights_on_gpu']:.3f}",
        "" if measured is None else number_text(measured["median"]),
        "" if measured is None else f"{number_text(measured['low'])} to {number_text(measured['high'])}",
        number_text(predicted["simulated"]),
        number_text(predicted["full"]),
        "" if memory is None else f"{memory['peak_bytes'] / GIB:.3f}",
        f"{point['limit_bytes'] / GIB:.3f}",
        {"held": "held", "broken": "BROKE ITS CAP", "failed": "FAILED", "not run": "not run"}[point["status"]]
        + (f": {point['reason']}" if point["reason"] else ""),
    ]


def _ratios(matched: Mapping[str, Any], which: str) -> list[list[str]]:
    return [
        [
            which,
            number_text(row["tokens_per_s"]),
            f"{row['first_bytes'] / GIB:.3f}",
            f"{row['second_bytes'] / GIB:.3f}",
            f"{row['ratio']:.2f}",
            "" if row["low"] is None else f"{row['low']:.2f} to {row['high']:.2f}",
        ]
        for row in matched["rows"]
    ]


def _ratio_columns(document: Mapping[str, Any]) -> list[Column]:
    first, second = document["schedules"]
    return [
        ("at the same throughput", False),
        ("token/s", True),
        (f"{first}, GiB", True),
        (f"{second}, GiB", True),
        (f"{second} / {first}", True),
        ("95 %", True),
    ]


def _bound_words(document: Mapping[str, Any]) -> str:
    words = {"roofline": "roofline, CPU memory no limit", "all_on_gpu": "all in GPU memory, had it room"}
    parts = []
    for name, said in words.items():
        bound = document["bounds"][name]
        if bound["tokens_per_s"] is None:
            parts.append(f"{said}: none ({bound['why']})")
        else:
            parts.append(
                f"{said}: {number_text(bound['tokens_per_s'])} token/s (a batch of {bound['batch_size']:,}, "
                f"{bound['bottleneck']} binds)"
            )
    return "; ".join(parts)


def _cap_words(document: Mapping[str, Any]) -> str:
    said = (
        f"A cap is on the anonymous memory of the process beyond what it held after its imports, enforced by the "
        f"kernel ({document['enforced_by']}); a plan gets all of it but {document['reserve_bytes'] / 2**20:.0f} MiB."
    )
    if document["emulated"]:
        said += (
            " The activations of the emulated accelerator, which torch makes in CPU memory, are allowed on top: limit "
            "= cap + those that the plan counts on the GPU."
        )
    return f"{said} Peak: RssAnon, highest of all runs of a point."


def print_caps(document: Mapping[str, Any], console: Console) -> None:
    """Show a measurement to a person."""

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    line(document["title"])
    line(f"{document['layers']} layers, on {document['device_name']}, {document['date']}")
    line(_cap_words(document))
    if document["noise"] is not None:
        line(
            f"noise of a throughput: {document['noise']['of_a_run']:.1%} of a run, "
            f"{document['noise']['of_a_median']:.1%} of the median of {document['repeats']}"
        )
    console.print(_table(POINT_COLUMNS, _rows(document["points"])))
    rows = _ratios(document["matched"]["measured"], "measured") + _ratios(document["matched"]["simulated"], "simulated")
    if rows:
        console.print(_table(_ratio_columns(document), rows))
    for which in ("measured", "simulated"):
        if not document["matched"][which]["matched"]:
            line(f"- {which}: not matched, {document['matched'][which]['reason']}")
    line(f"bounds: {_bound_words(document)}")
    line(f"verdict: {document['verdict']['sentence']}")


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name, numbers in columns:
        table.add_column(name, justify="right" if numbers else "left", overflow="fold", no_wrap=numbers)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def print_caps_dry_run(document: Mapping[str, Any], console: Console) -> None:
    """Show what would be measured."""

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    line(document["title"])
    line(
        f"{sum(not point['infeasible'] for point in document['points'])} points, {document['repeats']} runs of each: "
        f"about {document['estimated_seconds'] / 60.0:,.1f} minutes as simulated"
    )
    columns = [("schedule", False), ("cap, GiB", True), ("N", True), ("mu", True), ("r_w", True), ("r_c", True)]
    columns += [("simulated token/s", True), ("roofline", True), ("", False)]
    rows = []
    for point in sorted(document["points"], key=lambda each: (each["schedule"], each["cap_bytes"])):
        start = [point["schedule"], f"{point['cap_bytes'] / GIB:.3f}"]
        if point["infeasible"]:
            rows.append([*start, *[""] * 6, f"no plan: {point['infeasible']}"])
            continue
        policy, forecasts = point["policy"], point["forecasts"]
        rows.append(
            [
                *start,
                f"{policy['batch_size']:,}",
                f"{policy['micro_batch_size']:,}",
                f"{policy['weights_on_gpu']:.3f}",
                f"{policy['kv_on_gpu']:.3f}",
                *(number_text(forecasts[name]["throughput_tokens_per_s"]) for name in ("simulated", "full")),
                "",
            ]
        )
    console.print(_table(columns, rows))
    line(f"bounds: {_bound_words(document)}")


def render_caps_page(document: Mapping[str, Any]) -> str:
    """The whole page as HTML text; the same document gives the same text."""
    columns = [*POINT_COLUMNS[:-1], ("note", False)]
    rows = _ratios(document["matched"]["measured"], "measured") + _ratios(document["matched"]["simulated"], "simulated")
    parts = [
        f'<p class="verdict">{html.escape(document["verdict"]["sentence"])}</p>',
        figure_svg(draw_caps(document)),
        note_line(f"{_cap_words(document)} Bounds: {_bound_words(document)}."),
        heading("Every schedule under every cap"),
        html_table(columns, _rows(document["points"])),
        heading("CPU memory at the same throughput"),
        note_line(
            "A curve is the best throughput with at most so much memory, with straight lines between the caps; it is "
            "compared from the lowest to the highest throughput that both schedules reach. The interval is of "
            "resampled repeats, each with throughputs of its own that both reach."
        ),
        *([html_table(_ratio_columns(document), rows)] if rows else []),
        *(
            note_line(f"{which}: not matched, {document['matched'][which]['reason']}.")
            for which in ("measured", "simulated")
            if not document["matched"][which]["matched"]
        ),
        heading("Every run"),
        html_table(
            [("schedule and cap", False), ("order", True), ("token/s", True), ("peak, GiB", True), ("note", False)],
            _runs(document),
        ),
        heading("Machine and command"),
        _facts(document),
    ]
    return html_page(document["title"], parts)


def _runs(document: Mapping[str, Any]) -> list[list[str]]:
    found = []
    for point in document["points"]:
        for run in point["runs"]:
            rate, memory = run["throughput_tokens_per_s"], run["memory"]
            found.append(
                [
                    point["name"],
                    str(run["order"]),
                    "" if rate is None else number_text(rate),
                    "" if memory is None else f"{memory['peak_bytes'] / GIB:.3f}",
                    run["status"] + (f": {run['reason']}" if run["reason"] else ""),
                ]
            )
    return found


def _facts(document: Mapping[str, Any]) -> str:
    workload, noise = document["workload"], document["noise"]
    rows = [
        ["measured on", document["device_name"]],
        ["rates of", document["hardware"]],
        *([key.replace("_", " "), _plain(key, value)] for key, value in document["machine"].items()),
        ["versions", ", ".join(f"{name} {version}" for name, version in document["versions"].items())],
        ["date", document["date"]],
        ["command", shlex.join(document["command"])],
        ["model", f"{document['model']}, {document['layers']} of {document['layers_of_model']} layers"],
        ["weights", document["weights"]],
        [
            "workload",
            f"{workload['name']}: prompts of {workload['mean_prompt_tokens']:.4g} tokens, "
            f"{workload['generation_length']} generated, {workload['num_requests']:,} requests in all",
        ],
        ["noise of a run", "" if noise is None else percent_text(noise["of_a_run"])],
        ["repeats, seed", f"{document['repeats']}, {document['seed']}"],
        ["SHA-256 of the predictions", document["predictions_sha256"]],
        *(["remark", note] for note in document["notes"]),
    ]
    return html_table([("", False), ("note", False)], rows)


def _plain(key: str, value: object) -> str:
    return f"{value / GIB:.1f} GiB" if key.endswith("_bytes") and isinstance(value, int | float) else str(value)


def save_caps_page(document: Mapping[str, Any], path: Path) -> None:
    """Write the page.

    Raises
    ------
    InputError
        It cannot be written.
    """
    text = render_caps_page(document)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=f"--report: {path}") from None
