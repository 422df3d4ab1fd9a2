"""A validation on the screen: every policy, the scores, the bars, the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hrm.validation.forecasts import PREDICTORS

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_dry_run", "print_validation"]


def print_validation(document: Mapping[str, Any], console: Console) -> None:
    """Show a validation to a person."""

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    line(document["title"])
    layers = f"{document['layers']} of {document['layers_of_model']} layers, " * (
        document["layers"] != document["layers_of_model"]
    )
    line(f"{layers}schedule {document['schedule']}, on {document['device_name']}, {document['date']}")
    noise = document["noise"]["layer_latency_s"]
    line(
        f"noise of a decode latency: {noise['used']:.2%} of a run, {noise['of_a_median']:.2%} of the median of "
        f"{document['repeats']}; the same plan twice: ratio {noise['same_plan_twice']['ratio']:.3f}; two policies are "
        f"told apart from {noise['least_difference']:.1%} on"
    )
    _print_policies(document, console)
    _print_scores(document, console)
    table = _table("bar", "found", "bar is", "", "")
    for bar in document["bars"]:
        sign = "<=" if bar["at_most"] else ">="
        table.add_row(bar["name"], _percent(bar["value"]), f"{sign} {bar['bar']:.0%}", bar["status"], bar["words"])
    console.print(table)
    for kind, why in document["lacking"].items():
        line(f"- no {kind}: {why}")
    for row in document["policies"]:
        if row["reason"]:
            line(f"- {row['name']} counts in no figure: {row['reason']}")
    line(f"verdict: {document['verdict']['sentence']}")


def _table(*heads: str, title: str = "") -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left")
    for number, head in enumerate(heads):
        numbers = number > 0 and head not in ("", "schedule", "regime", "worst pair")
        table.add_column(head, justify="right" if numbers else "left", overflow="fold")
    return table


def _print_policies(document: Mapping[str, Any], console: Console) -> None:
    table = _table(
        "policy",
        "schedule",
        "regime",
        "measured ms",
        "+-",
        *(f"{short}" for short in ("Eq. 12 peaks", "Eq. 12 rates", "full", "simulated")),
        "token/s",
        "simulated",
        title="milliseconds per layer of decode, and ratios predicted / measured; throughput",
    )
    for row in document["policies"]:
        latency, rate = row["measured"]["layer_latency_s"], row["measured"]["throughput_tokens_per_s"]
        half = (latency["high"] - latency["low"]) / 2.0 / latency["median"]
        ratios = row["predicted_over_measured"]
        table.add_row(
            row["name"] + ("" if row["counted"] else " *"),
            row["schedule"],
            row["regime"],
            f"{latency['median'] * 1e3:.3f}",
            f"{half:.1%}",
            *(_ratio(ratios[name], "layer_latency_s") for name in PREDICTORS),
            f"{rate['median']:,.4g}",
            _ratio(ratios["simulated"], "throughput_tokens_per_s"),
        )
    console.print(table)


def _print_scores(document: Mapping[str, Any], console: Console) -> None:
    table = _table(
        "predictor",
        "spread nearby",
        "95 %",
        "spread, all",
        "prefill, all",
        "median ratio",
        "pairs in order: rate",
        "latency",
        "inversions",
        title="spread of predicted / measured in decode latency (max / min - 1), and order of pairs beyond noise",
    )
    for name, words in PREDICTORS.items():
        score = document["scores"][name]
        if score is None:
            table.add_row(words, *["-"] * 8)
            continue
        latency = score["layer_latency_s"]
        near, every = latency["neighbourhood"], latency["all"]
        orders = [score[metric]["order"] for metric in ("throughput_tokens_per_s", "layer_latency_s")]
        table.add_row(
            words,
            _percent(near and near["spread"]),
            f"{near['low']:.0%} to {near['high']:.0%}" if near else "-",
            _percent(every and every["spread"]),
            _percent(score["prefill_layer_s"]["all"] and score["prefill_layer_s"]["all"]["spread"]),
            f"{every['median_ratio']:.2f}" if every else "-",
            *(f"{order['ordered']} of {order['pairs']}" for order in orders),
            str(len(score["throughput_tokens_per_s"]["inversions"])),
        )
    console.print(table)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ratio(row: Mapping[str, float] | None, metric: str) -> str:
    return "-" if row is None else f"{row[metric]:.2f}"


def print_dry_run(document: Mapping[str, Any], console: Console) -> None:
    """Show what would be measured."""

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    line(document["title"])
    line(
        f"{len(document['candidates'])} policies, {document['repeats']} runs of each: about "
        f"{document['estimated_seconds'] / 60.0:,.1f} minutes as simulated"
    )
    table = _table(
        "policy", "schedule", "regime", "N", "mu", "r_w", "ms/layer", "full", "token/s", "full", title="as simulated"
    )
    for row in document["candidates"]:
        simulated, full, policy = row["forecasts"]["simulated"], row["forecasts"]["full"], row["policy"]
        table.add_row(
            row["name"],
            row["schedule"],
            row["regime"],
            f"{policy['batch_size']:,}",
            f"{policy['micro_batch_size']:,}",
            f"{policy['weights_on_gpu']:.3f}",
            f"{simulated['layer_latency_s'] * 1e3:,.4g}",
            f"{full['layer_latency_s'] * 1e3:,.4g}",
            f"{simulated['throughput_tokens_per_s']:,.4g}",
            f"{full['throughput_tokens_per_s']:,.4g}",
        )
    console.print(table)
    for kind, why in document["lacking"].items():
        line(f"- no {kind}: {why}")
