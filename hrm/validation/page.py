"""The report of a validation: one HTML page that needs nothing else."""

from __future__ import annotations

import html
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.errors import InputError
from hrm.html_pages import Column, figure_svg, html_page, html_table, note_line
from hrm.published.page_tables import number_text, percent_text
from hrm.validation.figures import draw_contexts, draw_layers, draw_memory, draw_ratios, draw_scatter
from hrm.validation.forecasts import PREDICTORS
from hrm.validation.records import Records, read_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["render_page", "save_page"]

GIB = 2.0**30


def save_page(documents: Mapping[str, Mapping[str, Any]], folders: Mapping[str, Path], path: Path) -> None:
    """Write the page of one validation, or of several under their names.

    Raises
    ------
    InputError
        It cannot be written.
    """
    text = render_page(documents, {name: read_records(folder) for name, folder in folders.items()})
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=f"--report: {path}") from None


def render_page(documents: Mapping[str, Mapping[str, Any]], records: Mapping[str, Records]) -> str:
    """The whole page as HTML text; the same records give the same text."""
    title = next(iter(documents.values()))["title"]
    return html_page(title, [_part(name, document, records[name]) for name, document in documents.items()])


def _part(name: str, document: Mapping[str, Any], records: Records) -> str:
    parts = [] if not name else [f"<h1>{html.escape(name)}</h1>"]
    parts += [
        f'<p class="verdict">{html.escape(document["verdict"]["sentence"])}</p>',
        _head("Bars"),
        _bars(document),
        _noise_table(document),
        _head("Machine, plan and command"),
        _facts(document),
        _head("Predicted, simulated, measured"),
        note_line(
            "Ratios are predicted / measured. Bars beside the simulator's marks, and ± in the table, are the 95 % "
            "interval of the median of the repeats. Shaded: neighbourhood of the plan. Open marks count in no figure."
        ),
        figure_svg(draw_ratios(document)),
        _policies(document),
        *_missing(document),
        _head("Simulated against measured"),
        figure_svg(draw_scatter(document)),
        _head("Spread, order, inversions"),
        note_line(
            "The spread is max / min − 1 of predicted / measured: what a common factor does not change. Pairs are "
            "those that differ by more than noise."
        ),
        _scores(document),
        _regimes(document),
        *_inversions(document),
        _head("By kind of task and copy, decode"),
        note_line(
            "Seconds of all tasks of a kind in a layer: as the rates give them for each alone, and as simulated beside "
            "what else runs, over measured; medians over all policies that count. D1 to D4 are the copies of Figure 6 "
            "of the paper: QKV and hidden states to and from the CPU, weights, KV cache."
        ),
        _kinds("copy", document["copies"]),
        _kinds("task", document["ops"]),
    ]
    parts += _figure("Latency over the context", draw_contexts(document))
    parts += _figure("Two layers, simulated and measured", draw_layers(records))
    memory = draw_memory(document)
    if memory is not None:
        parts += [
            _head("Memory"),
            note_line(
                "Planned, less staging buffers of a fixed size that a run makes only as large as its pieces are, and "
                "the most that the kernel saw taken, from the first weight to the last token of the first batch."
            ),
            figure_svg(memory),
            _memory(document),
        ]
    parts += _routing(document)
    return "\n".join(parts)


def _head(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def _figure(title: str, figure: Figure | None) -> list[str]:
    return [] if figure is None else [_head(title), figure_svg(figure)]


def _bars(document: Mapping[str, Any]) -> str:
    rows = [
        [
            bar["name"],
            percent_text(bar["value"]),
            f"{'≤' if bar['at_most'] else '≥'} {100 * bar['bar']:.0f} %",
            "MISSED" if bar["status"] == "missed" else bar["status"],
            bar["words"],
        ]
        for bar in document["bars"]
    ]
    return html_table([("bar", False), ("found", True), ("bar is", True), ("", False), ("note", False)], rows)


def _noise_table(document: Mapping[str, Any]) -> str:
    noise = document["noise"]
    rows = []
    for metric, words in (("layer_latency_s", "decode latency"), ("throughput_tokens_per_s", "throughput")):
        found = noise[metric]
        twice = found["same_plan_twice"]
        rows.append(
            [
                words,
                percent_text(noise["before"]) if metric == "layer_latency_s" else "",
                percent_text(found["between"]),
                percent_text(found["of_a_median"]),
                f"{twice['ratio']:.3f} ({twice['interval'][0]:.3f} to {twice['interval'][1]:.3f})",
                percent_text(found["least_difference"]),
            ]
        )
    columns: list[Column] = [("noise", False), ("the plan, before anything else ran", True)]
    columns += [("between repeats of all", True), (f"of a median of {document['repeats']}", True)]
    columns += [("the plan against itself, A/A (95 %)", True), ("two are told apart from", True)]
    return html_table(columns, rows)


def _facts(document: Mapping[str, Any]) -> str:
    machine, policy, workload = document["machine"], document["policy"], document["workload"]
    layers = f"{document['layers']} of {document['layers_of_model']} layers"
    rows = [
        ["measured on", document["device_name"]],
        ["rates of", f"{document['hardware']} ({_same(document['same_machine'])})"],
        *([key.replace("_", " "), _plain(key, value)] for key, value in machine.items()),
        ["versions", ", ".join(f"{name} {version}" for name, version in document["versions"].items())],
        ["date", document["date"]],
        ["command", shlex.join(document["command"])],
        ["model", f"{document['model']}, {layers}, {document['weights']} weights"],
        [
            "workload",
            f"{workload['name']}: prompts of {workload['mean_prompt_tokens']:.4g} tokens on average"
            f"{', padded' if workload['padded'] else ''}, {workload['generation_length']} generated",
        ],
        [
            "plan",
            f"schedule {document['schedule']}, N {policy['batch_size']}, mu {policy['micro_batch_size']}, "
            f"n_ub {policy['num_micro_batches']}, A_g {int(policy['attention_on_gpu'])}, "
            f"F_g {int(policy['ffn_on_gpu'])}, r_w {policy['weights_on_gpu']:.4g}, r_c {policy['kv_on_gpu']:.4g}",
        ],
        ["SHA-256 of the predictions", document["predictions_sha256"]],
        ["repeats, seed", f"{document['repeats']}, {document['seed']}"],
        *(["remark", note] for note in document["notes"]),
    ]
    return html_table([("", False), ("note", False)], rows)


def _same(same: bool | None) -> str:
    return {True: "this machine", False: "another machine", None: "not known whether this machine"}[same]


def _plain(key: str, value: object) -> str:
    return f"{value / GIB:.1f} GiB" if key.endswith("_bytes") and isinstance(value, int | float) else str(value)


def _policies(document: Mapping[str, Any]) -> str:
    columns: list[Column] = [("policy", False), ("schedule", False), ("bound by", False)]
    columns += [(name, True) for name in ("N", "mu", "r_w", "ms per layer", "±")]
    columns += [(words, True) for words in PREDICTORS.values()]
    columns += [("prefill, ms per layer", True), ("full", True), ("simulated", True)]
    columns += [("token/s", True), ("full ", True), ("simulated ", True)]
    rows = []
    for row in document["policies"]:
        latency = row["measured"]["layer_latency_s"]
        half = (latency["high"] - latency["low"]) / 2.0 / latency["median"]
        policy, ratios = row["policy"], row["predicted_over_measured"]
        rows.append(
            [
                row["name"] + (f" ({', '.join(row['kinds'][1:])})" if len(row["kinds"]) > 1 else ""),
                row["schedule"],
                row["regime"],
                str(policy["batch_size"]),
                str(policy["micro_batch_size"]),
                f"{policy['weights_on_gpu']:.3f}",
                number_text(1e3 * latency["median"]),
                percent_text(half),
                *(_ratio(ratios[name], "layer_latency_s") for name in PREDICTORS),
                number_text(1e3 * row["measured"]["prefill_layer_s"]["median"]),
                *(_ratio(ratios[name], "prefill_layer_s") for name in ("full", "simulated")),
                number_text(row["measured"]["throughput_tokens_per_s"]["median"]),
                *(_ratio(ratios[name], "throughput_tokens_per_s") for name in ("full", "simulated")),
            ]
        )
    return html_table(columns, rows)


def _ratio(row: Mapping[str, float] | None, metric: str) -> str:
    return "" if row is None else f"{row[metric]:.2f}"


def _missing(document: Mapping[str, Any]) -> list[str]:
    rows = [[kind, why] for kind, why in document["lacking"].items()]
    rows += [[row["name"], f"counts in no figure: {row['reason']}"] for row in document["policies"] if row["reason"]]
    return [] if not rows else [html_table([("not measured, or not counted", False), ("note", False)], rows)]


def _scores(document: Mapping[str, Any]) -> str:
    heads = (
        "decode, neighbourhood",
        "95 %",
        "decode, all",
        "prefill, all",
        "throughput, neighbourhood",
        "median ratio",
    )
    more = ("pairs in order, throughput", "latency")
    rows = []
    for name, words in PREDICTORS.items():
        score = document["scores"][name]
        if score is None:
            rows.append([words, *[""] * 8])
            continue
        decode, prefill, rate = (
            score[key] for key in ("layer_latency_s", "prefill_layer_s", "throughput_tokens_per_s")
        )
        near = decode["neighbourhood"]
        rows.append(
            [
                words,
                _spread(near),
                "" if near is None else f"{percent_text(near['low'])} to {percent_text(near['high'])}",
                _spread(decode["all"]),
                _spread(prefill["all"]),
                _spread(rate["neighbourhood"]),
                "" if decode["all"] is None else f"{decode['all']['median_ratio']:.2f}",
                *(f"{each['order']['ordered']} of {each['order']['pairs']}" for each in (rate, decode)),
            ]
        )
    return html_table([("predictor", False), *((head, True) for head in heads + more)], rows)


def _spread(found: Mapping[str, Any] | None) -> str:
    return "" if found is None else percent_text(found["spread"])


def _regimes(document: Mapping[str, Any]) -> str:
    names = sorted(
        {name for score in document["scores"].values() if score for name in score["layer_latency_s"]["by_regime"]}
    )
    rows = []
    for name, words in PREDICTORS.items():
        score = document["scores"][name]
        if score is None:
            continue
        cells = []
        for regime in names:
            found = score["layer_latency_s"]["by_regime"].get(regime)
            cells.append(
                ""
                if found is None
                else f"{percent_text(found['spread'])}, ratio {found['median_ratio']:.2f} ({found['policies']})"
            )
        rows.append([words, *cells])
    return html_table(
        [("spread, and median ratio, by what binds decode (policies)", False), *((name, True) for name in names)], rows
    )


def _inversions(document: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, words in PREDICTORS.items():
        for each in (document["scores"][name] or {}).get("throughput_tokens_per_s", {}).get("inversions", []):
            rows.append(
                [
                    words,
                    f"{each['first']} over {each['second']}",
                    f"{each['predicted']:.2f}",
                    f"{each['measured']:.2f}",
                    percent_text(each["certainty"]),
                ]
            )
    columns: list[Column] = [("inversions of throughput beyond noise, by", False), ("pair", False)]
    columns += [("predicted ratio", True), ("measured ratio", True), ("resamples that agree", True)]
    return [html_table(columns, rows)] if rows else [note_line("No pair of throughputs is inverted beyond noise.")]


def _kinds(head: str, kinds: list[Mapping[str, Any]]) -> str:
    rows = [
        [
            row["name"].replace("_", " "),
            str(row["policies"]),
            number_text(1e3 * row["measured_s"]),
            f"{row['alone_over_measured']:.2f}",
            f"{row['simulated_over_measured']:.2f}",
            f"{row['simulated_low']:.2f} to {row['simulated_high']:.2f}",
        ]
        for row in kinds
    ]
    columns: list[Column] = [(head, False), ("policies", True), ("measured, ms per layer", True)]
    columns += [("alone / measured", True), ("simulated / measured", True), ("least to largest", True)]
    return html_table(columns, rows)


def _memory(document: Mapping[str, Any]) -> str:
    mib = 2.0**20
    columns: list[Column] = [("policy", False)]
    for level in ("GPU", "CPU"):
        columns += [(f"{level}: plan, MiB", True), ("taken", True), ("taken / plan", True)]
    columns += [("staging not made", True), ("reserve", True)]
    rows = []
    for row in document["policies"]:
        if not row["memory"]:
            continue
        cells = [row["name"]]
        for level in ("gpu", "cpu"):
            use = row["memory"].get(level)
            if use is None:
                cells += ["", "", ""]
                continue
            plan = use["planned_bytes"] - use["not_made_bytes"]
            share = f"{use['taken_bytes'] / plan:.3f}" if plan else ""
            cells += [f"{plan / mib:.1f}", f"{use['taken_bytes'] / mib:.1f}", share]
        host = row["memory"].get("cpu", {"not_made_bytes": 0.0, "reserve_bytes": 0.0})
        rows.append([*cells, f"{host['not_made_bytes'] / mib:.0f}", f"{host['reserve_bytes'] / mib:.0f}"])
    return html_table(columns, rows)


def _routing(document: Mapping[str, Any]) -> list[str]:
    rows = []
    for row in document["policies"]:
        for phase, found in (row["routing"] or {}).items():
            rows.append(
                [row["name"], phase, f"{found['touched']:.2f}", f"{found['uniform']:.2f}"],
            )
    if not rows:
        return []
    columns: list[Column] = [("policy", False), ("phase", False), ("experts touched", True), ("if uniform", True)]
    return [
        _head("Routing"),
        note_line("Experts that a micro-batch touched in a layer, and what routing without preferences would give."),
        html_table(columns, rows),
    ]
