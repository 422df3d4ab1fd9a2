"""Sections of the report that only a validation has: bars, cross-validation, phases, kernels, correlation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hrm.html_pages import Column, html_table, note_line
from hrm.published.cross_validation import GATE_FOLDS
from hrm.published.document import MODELS
from hrm.published.kernels import WITH_LATENCY
from hrm.published.page_tables import number_text, percent_text

__all__ = ["correlation_table", "folds_table", "gates_table", "kernel_tables", "phases_table"]


def gates_table(gates: Sequence[Mapping[str, Any]]) -> str:
    """Every bar, what was found, and whether it is met."""
    rows = [
        [
            gate["name"],
            gate["model"],
            percent_text(gate["value"]) or "missed",
            bar_text(gate),
            "met" if gate["passes"] else "MISSED",
        ]
        for gate in gates
    ]
    return html_table([("bar", False), ("model", False), ("found", True), ("bar is", True), ("", False)], rows)


def bar_text(gate: Mapping[str, Any]) -> str:
    """A bar in words."""
    if gate.get("bar_high") is not None:
        return f"{100 * gate['bar']:.0f}-{100 * gate['bar_high']:.0f} %"
    return f"{'≤' if gate['at_most'] else '≥'} {100 * gate['bar']:.0f} %"


def folds_table(summary: Mapping[str, Any]) -> str:
    """Errors of both models in sample and in every cross-validation, by group of rows."""
    ways = {"in sample": summary["in_sample"], **summary["cross_validation"]}
    rows = []
    for model in ("full", "simulated"):
        for way, found in ways.items():
            if model not in found:
                continue
            groups = {name: entry for name, entry in found[model].items() if "median_error" in entry}
            cells = [percent_text(entry[key]) for entry in groups.values() for key in ("median_error", "p90_error")]
            order = [percent_text(found[model][key]["share"]) for key in ("order", "order_within_system")]
            rows.append([MODELS[model], way, *cells, *order])
    judged = summary["cross_validation"][GATE_FOLDS]["full"]
    columns: list[Column] = [("model", False), ("folds", False)]
    for group in (name for name, entry in judged.items() if "median_error" in entry):
        columns += [(f"{group}: median", True), ("p90", True)]
    columns += [("pairs in order", True), ("of one system", True)]
    return html_table(columns, rows)


def phases_table(pairs: Sequence[Mapping[str, Any]]) -> str:
    """Decode and prefill of the differenced rows beside each phase as the models have it."""
    rows = []
    for pair in pairs:
        ids = " / ".join(", ".join(pair[key]) for key in ("short_ids", "long_ids"))
        for phase, words in (("layer_s", "decode, per layer and step"), ("prefill_s", "prefill")):
            measured = pair["measured"][phase]
            cells = [f"{number_text(measured)} s"]
            for model in ("full", "simulated"):
                value = (pair.get(model) or {}).get(phase)
                ratio = f" ({percent_text(value / measured - 1, signed=True)})" if value and measured > 0 else ""
                cells.append("" if value is None else f"{number_text(value)} s{ratio}")
            rows.append([ids, words, *cells])
    heads = [("measured", True), (MODELS["full"], True), (MODELS["simulated"], True)]
    return html_table([("rows", False), ("phase", False), *heads], rows)


def kernel_tables(kernels: Mapping[str, Any]) -> list[str]:
    """Error and constants of each kernel, then every size, predicted by the others."""
    summary = [
        [
            name,
            str(entry["n"]),
            percent_text(entry["median_error"]) or "missed",
            _rate(entry["bytes_per_s"]),
            _micro(entry["latency_s"]) if name in WITH_LATENCY else "",
            "" if entry["profile"] is None else f"{entry['profile']}: {_rate(entry['profile_bytes_per_s'])}",
        ]
        for name, entry in kernels["summary"].items()
    ]
    heads: list[Column] = [("kernel", False), ("n", True), ("median error", True), ("rate", True), ("latency", True)]
    rows = [
        [
            entry["kernel"],
            str(entry["mu"]),
            "" if entry["context_len"] is None else str(entry["context_len"]),
            f"{1e3 * entry['measured']:.2f} ms",
            "" if entry["predicted"] is None else f"{1e3 * entry['predicted']:.2f} ms",
            "" if entry["ratio"] is None else f"{entry['ratio']:.2f}x",
            entry["note"],
        ]
        for entry in kernels["rows"]
    ]
    columns: list[Column] = [("kernel", False), ("mu", True), ("context", True), ("measured", True)]
    columns += [("predicted", True), ("ratio", True), ("note", False)]
    return [
        note_line("Each size is predicted by constants that the other sizes give."),
        html_table([*heads, ("in the L4 profile", False)], summary),
        html_table(columns, rows),
    ]


def correlation_table(correlation: Mapping[str, Any]) -> str:
    """Correlation of the logarithms of the fitted constants."""
    names = correlation["names"]
    rows = [
        [name, *(f"{cell:+.2f}".replace("-", "−") for cell in line)]
        for name, line in zip(names, correlation["matrix"], strict=True)
    ]
    return html_table([("correlation", False), *((name, True) for name in names)], rows)


def _rate(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else f"{bytes_per_s / 1e9:.4g} GB/s"


def _micro(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:.0f} us"
