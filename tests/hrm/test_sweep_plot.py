"""Figures of a sweep: what is drawn, not its pixels."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hrm.errors import InputError
from hrm.sweep_labels import title_of, value_text
from hrm.sweep_maps import best_rows
from hrm.sweep_plot import check_drawable, draw_sweep

GIB = 2.0**30
INPUTS: dict[str, Any] = {
    "hardware": "t4",
    "model": "mixtral-8x7b",
    "workload": "mtbench",
    "generation_length": 128,
    "num_requests": 10_000,
    "padded": False,
    "pins": {"kv_on_disk": 0.0, "weights_on_disk": 0.0},
    "schedules": ["cgopipe", "s4"],
    "cost_model": "full",
    "simulated": True,
    "contention": True,
    "max_hours": 24.0,
}
MEMORY = {
    "name": "cpu.memory",
    "kind": "size",
    "unit": "GiB",
    "unit_size": GIB,
    "times": False,
    "values": [64 * GIB, 128 * GIB, 192 * GIB],
}


def row(varied: dict[str, Any], schedule: str, simulated: float | None, **changes: Any) -> dict[str, Any]:
    """A row whose prediction is 10 % above its simulation."""
    made = {
        **varied,
        "schedule": schedule,
        "simulated_tokens_per_s": simulated,
        "predicted_tokens_per_s": None if simulated is None else 1.1 * simulated,
        "bound_tokens_per_s": 1000.0,
        "bound_limits": "",
        "limits": "",
        "weights_on_cpu": 0.5,
        "kv_on_cpu": 1.0,
        "attention_on_gpu": int(schedule == "s4"),
        "ffn_on_gpu": 1,
        "reason": "" if simulated else "does not fit",
    }
    return made | changes


def line_document(**changes: Any) -> dict[str, Any]:
    rates = {"cgopipe": [None, 600.0, 960.0], "s4": [None, 300.0, 400.0]}
    rows = [
        row({"cpu.memory": value}, schedule, rates[schedule][index])
        for index, value in enumerate(MEMORY["values"])
        for schedule in rates
    ]
    made = {
        "rows": rows,
        "varied": [MEMORY],
        "first_at_95_percent": {"cgopipe": 192 * GIB, "s4": None},
        "inputs": INPUTS,
        "notes": [],
    }
    return made | changes


def lines_of(panel: Any) -> dict[str, Any]:
    return {str(line.get_label()).replace("\n", " "): line for line in panel.lines}


def one(panel: Any, start: str) -> Any:
    found = [line for label, line in lines_of(panel).items() if label.startswith(start)]
    assert len(found) == 1, (start, list(lines_of(panel)))
    return found[0]


def texts_of(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.texts)


def test_lines_carry_the_values_of_the_rows() -> None:
    panel = draw_sweep(line_document()).axes[0]
    for schedule, rates in (("cgopipe", [600.0, 960.0]), ("s4", [300.0, 400.0])):
        solid, dashed = one(panel, f"{schedule}, simulated"), one(panel, f"{schedule}, predicted")
        assert list(solid.get_xdata()) == [64, 128, 192]
        assert math.isnan(solid.get_ydata()[0]) and list(solid.get_ydata()[1:]) == rates
        assert list(dashed.get_ydata()[1:]) == [1.1 * rate for rate in rates]
        assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
    assert list(one(panel, "bound: CPU memory no limit").get_ydata()) == [1000.0] * 3
    assert list(one(panel, "95 % of the bound").get_ydata()) == [950.0] * 3


def test_a_ring_stands_where_95_percent_are_first_reached() -> None:
    panel = draw_sweep(line_document()).axes[0]
    ring = one(panel, "cgopipe: 95 % of the bound from 192 GiB (simulated)")
    assert (list(ring.get_xdata()), list(ring.get_ydata())) == ([192], [960.0])
    assert len(one(panel, "s4: never 95 % of the bound here").get_xdata()) == 0


def test_what_does_not_fit_is_marked() -> None:
    panel = draw_sweep(line_document()).axes[0]
    for schedule in ("cgopipe", "s4"):
        assert list(one(panel, f"{schedule} does not fit").get_xdata()) == [64]


def test_limits_other_than_memory_are_said_on_the_figure() -> None:
    document = line_document()
    assert "requests" not in texts_of(draw_sweep(document)).replace("10,000 requests", "")
    for each in document["rows"][2:]:
        each["limits"] = "requests"
        each["bound_limits"] = "requests"
    document["rows"][-1]["limits"] = "hours"
    figure = draw_sweep(document)
    said = texts_of(figure)
    assert "the batch holds all requests from 128 GiB (cgopipe)" in said
    assert "the batch holds all requests at 128 GiB (s4)" in said
    assert "--max-hours bounds the batch at 192 GiB (s4)" in said
    assert one(figure.axes[0], "bound: CPU memory no limit").get_label().endswith("(its batch holds all requests)")


def test_without_simulation_the_prediction_is_the_solid_line() -> None:
    panel = draw_sweep(line_document(inputs=INPUTS | {"simulated": False})).axes[0]
    assert not [label for label in lines_of(panel) if "simulated" in label]
    assert list(one(panel, "cgopipe, predicted").get_ydata()[1:]) == [1.1 * 600.0, 1.1 * 960.0]


HARDWARE = {"name": "hw", "kind": "text", "unit": "", "unit_size": 1.0, "times": False, "values": ["t4", "l4"]}


def test_few_values_of_a_second_key_get_a_panel_each() -> None:
    rows = [
        row({"cpu.memory": value, "hw": hw}, "s4", factor * value / GIB)
        for value in MEMORY["values"]
        for hw, factor in (("t4", 1.0), ("l4", 2.0))
    ]
    reached = {"s4": [{"at": {"hw": "t4"}, "value": None}, {"at": {"hw": "l4"}, "value": 192 * GIB}]}
    inputs = INPUTS | {"schedules": ["s4"]}
    figure = draw_sweep(line_document(rows=rows, varied=[MEMORY, HARDWARE], first_at_95_percent=reached, inputs=inputs))
    first, second = figure.axes
    assert (first.get_title(loc="left"), second.get_title(loc="left")) == ("hw: t4", "hw: l4")
    assert list(one(first, "s4, simulated").get_ydata()) == [64, 128, 192]
    assert list(one(second, "s4, simulated").get_ydata()) == [128, 256, 384]
    assert list(one(second, "s4: first at 95 % (simulated)").get_ydata()) == [384]


def test_names_stand_side_by_side_with_no_line_between_them() -> None:
    rows = [row({"hw": "t4"}, "s4", 10.0), row({"hw": "l4"}, "s4", 20.0)]
    inputs = INPUTS | {"schedules": ["s4"]}
    panel = draw_sweep(line_document(rows=rows, varied=[HARDWARE], first_at_95_percent={}, inputs=inputs)).axes[0]
    marks = one(panel, "s4, simulated")
    assert (list(marks.get_xdata()), list(marks.get_ydata())) == ([0, 1], [10.0, 20.0])
    assert marks.get_linestyle() == "None"
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["t4", "l4"]


FACTOR = {"name": "cpu.memory*cpu.bandwidth", "kind": "factor", "unit": "", "unit_size": 1.0, "times": True}
FACTOR |= {"values": [1.0, 2.0, 3.0, 4.0, 5.0]}


def map_document() -> dict[str, Any]:
    """On the CPU at 1x GPU attention is faster, from 2x on CPU attention; at 64 GiB and 1x nothing fits."""
    rows = []
    for value in MEMORY["values"]:
        for factor in FACTOR["values"]:
            nothing = value == 64 * GIB and factor == 1.0
            at = {"cpu.memory": value, FACTOR["name"]: factor}
            rows.append(row(at, "cgopipe", None if nothing else 100.0 * factor, weights_on_cpu=factor / 10))
            rows.append(row(at, "s4", None if nothing else 150.0, weights_on_cpu=0.0))
    return line_document(rows=rows, varied=[MEMORY, FACTOR], first_at_95_percent={})


def test_many_values_of_a_second_key_make_maps_of_the_fastest_schedule() -> None:
    figure = draw_sweep(map_document())
    throughput, experts, computed, _ = figure.axes
    cells = {panel: [text.get_text() for text in panel.texts] for panel in figure.axes}
    assert cells[throughput][:3] == ["no fit", "150", "150"]  # from the bottom row, 1x
    assert cells[throughput][3:6] == ["200", "200", "200"]
    assert cells[experts][:6] == ["no fit", "0%", "0%", "20%", "20%", "20%"]
    assert cells[computed][:4] == ["no fit", "nothing", "nothing", "attention"]
    assert [tick.get_text() for tick in throughput.get_yticklabels()] == ["1x", "2x", "3x", "4x", "5x"]
    assert computed.get_xlabel() == "CPU memory [GiB]"
    assert "at each point the fastest of cgopipe, s4" in texts_of(figure)


def test_the_fastest_row_of_a_point_is_found_by_what_was_simulated() -> None:
    rows = [row({"hw": "t4"}, "cgopipe", 10.0, predicted_tokens_per_s=99.0), row({"hw": "t4"}, "s4", 20.0)]
    document = line_document(rows=rows, varied=[HARDWARE])
    assert best_rows(document)[("t4",)]["schedule"] == "s4"
    assert best_rows(document | {"inputs": INPUTS | {"simulated": False}})[("t4",)]["schedule"] == "cgopipe"


def test_values_and_titles_are_in_the_words_they_were_given_in() -> None:
    assert value_text(MEMORY, 288 * GIB) == "288 GiB"
    assert (value_text(FACTOR, 2.0), value_text(HARDWARE, "l4")) == ("2x", "l4")
    first, second = title_of(line_document())
    assert first == "mixtral-8x7b on t4"
    assert second == "10,000 requests of mtbench, 128 tokens generated, no disk, simulated with contention"


def test_what_has_no_figure_is_refused() -> None:
    with pytest.raises(InputError, match="3 keys are varied"):
        check_drawable([MEMORY, HARDWARE, FACTOR])
    with pytest.raises(InputError, match="hw has no numbers for the horizontal axis"):
        check_drawable([HARDWARE, FACTOR])
