"""What `hrm validate published` prints: errors of every model, the bars, kernels, phases, speed-ups, the worst rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hrm.published.cross_validation import GATE_FOLDS
from hrm.published.figures import shown_models
from hrm.published.page_sections import bar_text
from hrm.published.scores import quantile

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_validation"]

SHORT = {
    "eq12_authors": "Eq. 12, authors' constants",
    "eq12_datasheet": "Eq. 12, datasheet peaks",
    "eq12_fitted": "Eq. 12, fitted rates",
    "full": "full",
    "simulated": "simulated",
}
GROUPS = ("MoE-Lightning, certain policy", "S1 and S2", "all rows")
WORST = 5


def print_validation(document: Mapping[str, Any], console: Console) -> None:
    """Print a validation, compactly; everything is in the document and the report."""
    rows, summary = document["rows"], document["summary"]
    bundled = document["data"]["rows"] == "bundled"
    measured = [row for row in rows if row["measured"] is not None]
    where = "published rows, T4 and L4" if bundled else document["data"]["rows"]
    console.print(
        f"{len(rows)} rows ({where}), {len(measured)} measured; error: |predicted / measured - 1|", markup=False
    )
    if measured:
        console.print()
        console.print(_models_table(document, bundled))
        if bundled:
            for line in _fold_lines(summary):
                console.print(line, markup=False)
        for line in _split_lines(rows):
            console.print(line, markup=False)
        console.print()
        console.print(_groups_table(document))
    else:
        console.print()
        console.print(_predictions_table(rows))
    _print_rest(document, measured, bundled, console)


def _print_rest(
    document: Mapping[str, Any], measured: Sequence[Mapping[str, Any]], bundled: bool, console: Console
) -> None:
    summary = document["summary"]
    console.print()
    console.print(_gates_table(summary["gates"]))
    if not bundled:
        said = (
            "bars, but those of kernels: of the bundled rows, as shipped; the rows given are predicted by the shipped"
        )
        console.print(f"{said} constants as they are", markup=False, soft_wrap=True)
    console.print()
    lines = [*_phase_lines(summary["phases"]), *_speed_up_lines(summary["speed_ups"]), *_interval_lines(summary)]
    for line in [*lines, *_worst_lines(measured), *_missed_lines(document["rows"])]:
        console.print(line, markup=False, soft_wrap=True)
    console.print(
        "every row, terms, shares, constants and their correlation: --report out.html, or --json", markup=False
    )


def _models_table(document: Mapping[str, Any], bundled: bool) -> Table:
    summary = document["summary"]
    table = _table("median error [%]")
    for head in ("\nMoE-L.*", "\nS1+S2", "\nall", "\np90", "\nbias", "pairs in\norder"):
        table.add_column(head, justify="right", no_wrap=True)
    if bundled:
        for head in ("cross-val.\nMoE-L.*", "\nS1+S2", "\nall", "\np90"):
            table.add_column(head, justify="right", no_wrap=True)
    crossed = summary["cross_validation"][GATE_FOLDS] if bundled else {}
    lines = [(SHORT[key], summary["in_sample"][key], crossed.get(key)) for key in shown_models(document)]
    if bundled:
        own = summary["eq12_refitted"]
        place = sum(name.startswith("Eq. 12") for name, *_ in lines)
        lines.insert(place, ("Eq. 12, rates fitted by it", own["in_sample"], own["cross_validated"]))
    for name, found, across in lines:
        cells = [_cell(found[group]["median_error"]) if found[group]["n"] else "-" for group in GROUPS]
        cells += [_cell(found["all rows"]["p90_error"]), _cell(found["all rows"]["bias"], signed=True)]
        cells.append(_cell(found["order"]["share"]) if found["order"]["pairs"] else "-")
        if bundled:
            cells += [""] * 4 if across is None else _crossed_cells(across)
        table.add_row(name, *cells)
    return table


def _crossed_cells(across: Mapping[str, Any]) -> list[str]:
    return [*(_cell(across[group]["median_error"]) for group in GROUPS), _cell(across["all rows"]["p90_error"])]


def _fold_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """What the columns are of, and the folds that are not judged beside those that are."""
    yield f"* rows of a certain policy; cross-validated by {GATE_FOLDS}, as the bars below. The other folds, all rows:"
    for name, entry in summary["cross_validation"].items():
        if name != GATE_FOLDS:
            found = {model: each["all rows"] for model, each in entry.items()}
            words = ", ".join(
                f"{model} {_percent(each['median_error'])} (p90 {_percent(each['p90_error'])})"
                for model, each in found.items()
            )
            yield f"  {name}: {words}"


def _split_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What constants do to Eq. 12, and what is left to its form: medians of factors."""
    found = [row for row in rows if {"eq12_authors", "eq12_fitted"} <= set(row["ratio"])]
    if found:
        constants = quantile([row["ratio"]["eq12_authors"] / row["ratio"]["eq12_fitted"] for row in found], 0.5)
        form = quantile([row["ratio"]["eq12_fitted"] for row in found], 0.5)
        yield f"Eq. 12, medians: {constants:.2f}x too fast by its constants, {form:.2f}x with fitted rates: its form"


def _groups_table(document: Mapping[str, Any]) -> Table:
    """Median errors by system and setting, in sample."""
    table = _table("median error [%]")
    table.add_column("n", justify="right")
    models = shown_models(document)
    for model in models:
        table.add_column(SHORT[model].replace(", ", ",\n"), justify="right", no_wrap=True)
    table.add_column("worst of full", no_wrap=True)
    by_model = document["summary"]["models"]
    first = by_model[models[0]]["by_system_and_setting"] if models else {}
    for name in sorted(first):
        entries = [by_model[model]["by_system_and_setting"][name] for model in models]
        full = by_model.get("full", {}).get("by_system_and_setting", {}).get(name)
        if entries[0]["count"]:
            worst = "" if full is None else f"{full['worst_id']} {_percent(full['worst_error'])}"
            table.add_row(name, str(entries[0]["count"]), *(_cell(each["median_error"]) for each in entries), worst)
    return table


def _predictions_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows that were not measured: what is predicted of them."""
    table = _table("id")
    for head in ("setting", "system", "workload"):
        table.add_column(head, no_wrap=True)
    for head in ("generated", "full", "80 % interval", "simulated"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("bottleneck", no_wrap=True)
    for row in rows:
        interval = row["interval"]
        table.add_row(
            *(_escaped(row[key]) for key in ("id", "setting", "system", "workload")),
            str(row["gen_len"]),
            _number(row["predicted"]["full"]),
            "" if interval is None else f"{_number(interval[0])}-{_number(interval[1])}",
            _number(row["predicted"]["simulated"]),
            row["bottleneck"] or "",
        )
    return table


def _gates_table(gates: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("bar")
    table.add_column("is", justify="right", no_wrap=True)
    models = list(dict.fromkeys(gate["model"] for gate in gates))
    for model in models:
        table.add_column(model, justify="right", no_wrap=True)
    for name in dict.fromkeys(gate["name"] for gate in gates):
        found = {gate["model"]: gate for gate in gates if gate["name"] == name}
        cells = [
            ""
            if model not in found
            else _percent(found[model]["value"]) + ("" if found[model]["passes"] else " MISSED")
            for model in models
        ]
        table.add_row(name, bar_text(next(iter(found.values()))), *cells)
    return table


def _phase_lines(pairs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for pair in pairs:
        ids = " / ".join(", ".join(pair[key]) for key in ("short_ids", "long_ids"))
        words = []
        for phase, name in (("layer_s", "decode, s per layer"), ("prefill_s", "prefill, s")):
            measured = pair["measured"][phase]
            predicted = [f"{model} {pair[model][phase]:.4g}" for model in ("full", "simulated") if model in pair]
            words.append(f"{name}: measured {measured:.4g}, {', '.join(predicted)}")
        yield f"{ids}, by difference: {'; '.join(words)}"


def _speed_up_lines(speed_ups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Range of the speed-ups, measured and predicted, by how both sides ran their prompts."""
    words = {True: "padded", False: "unpadded"}
    groups: dict[tuple[bool, bool, str], list[tuple[float, float | None]]] = {}
    for each in speed_ups:
        key = (each["padded"], each["baseline_padded"], each["baseline_system"])
        groups.setdefault(key, []).append((each["measured"], each["predicted"].get("full")))
    for (ours, theirs, system), pairs in sorted(groups.items()):
        found = [predicted for _, predicted in pairs if predicted is not None]
        measured = [value for value, _ in pairs]
        yield (
            f"speed-up, {words[ours]} MoE-Lightning over {words[theirs]} {system} ({len(pairs)}): measured "
            f"{_span(measured)}, predicted {_span(found)}"
        )


def _span(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return f"{low}x" if low == high else f"{low}-{high}x"


def _interval_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    entry = summary["intervals"]["calibrated"]
    span = f"80 % interval: {entry['low']:.2f} to {entry['high']:.2f} of a prediction"
    yield f"{span}; {_percent(entry['coverage'])} of the {entry['n']} bundled rows lie in one their fold had no part in"


def _worst_lines(measured: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rated = sorted((row for row in measured if "full" in row["ratio"]), key=lambda row: -abs(row["ratio"]["full"] - 1))
    if rated:
        yield "worst rows of full:"
    for row in rated[:WORST]:
        what = " ".join(str(row[key]) for key in ("id", "setting", "system", "workload", "gen_len"))
        rates = f"measured {_number(row['measured'])}, full {_number(row['predicted']['full'])} token/s"
        note = f" ({row['note']})" if row["note"] else ""
        yield f"  {what}: {rates}, {row['bottleneck']}{note}"


def _missed_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        if row["predicted"]["full"] is None:
            yield f"not predicted: {row['id']}: {row['note']}"


def _table(first: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True, vertical="bottom")
    return table


def _escaped(value: object) -> str:
    from rich.markup import escape

    return escape(str(value))


def _percent(share: float | None, *, signed: bool = False) -> str:
    """Per cent with one digit, none above 100; `missed` where missed rows decide."""
    if share is None:
        return "missed"
    digits = 0 if abs(share) >= 1 else 1
    return f"{100 * share:+.{digits}f} %" if signed else f"{100 * share:.{digits}f} %"


def _cell(share: float | None, *, signed: bool = False) -> str:
    """The same without its unit."""
    return _percent(share, signed=signed).removesuffix(" %")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"
