"""Roofline figures: what is drawn, not its pixels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hrm.errors import InputError
from hrm.model_files import load_model
from hrm.plots import check_figure_path, draw_roofline, render_png, save_figure
from hrm.profile_files import load_profile
from hrm.roofline_view import PlanPoint, RooflineView, build_view

CASES = [
    ("l4-figures", "mixtral-8x7b", "attention", "paper"),
    ("l4-figures", "mixtral-8x7b", "ffn", "paper"),
    ("t4", "dbrx", "attention", "full"),
    ("t4", "dbrx", "ffn", "full"),
    ("kaggle-t4x2", "deepseek-v2-lite", "attention", "full"),
    ("h200", "gpt-oss-20b", "ffn", "full"),
]


def view_of(hardware: str, model: str, operator: Any, cost_model: Any, **options: Any) -> RooflineView:
    return build_view(load_profile(hardware), load_model(model), operator=operator, cost_model=cost_model, **options)


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def view(request: pytest.FixtureRequest) -> RooflineView:
    return view_of(*request.param)


def lines_of(figure: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in figure.axes[0].lines if not line.get_label().startswith("_")}


def texts_of(figure: Any) -> list[str]:
    legend = figure.axes[0].get_legend()
    return [text.get_text() for text in figure.texts] + [text.get_text() for text in legend.get_texts()]


def one(lines: dict[str, Any], start: str) -> Any:
    found = [line for label, line in lines.items() if label.startswith(start)]
    assert len(found) == 1, (start, list(lines))
    return found[0]


def test_figure_4_draws_roofs_attention_and_p1():
    figure = draw_roofline(view_of("l4-figures", "mixtral-8x7b", "attention", "paper"))
    lines = lines_of(figure)
    gpu, cpu, link = (lines[f"{name} roof"] for name in ("GPU", "CPU", "CPU to GPU"))
    assert list(gpu.get_ydata()) == pytest.approx([0.1 * 300, 242_000, 242_000])
    assert list(cpu.get_ydata()) == pytest.approx([0.1 * 100, 1300, 1300])
    assert list(link.get_ydata()) == pytest.approx([0.1 * 16, 242_000, 242_000])
    assert list(gpu.get_xdata())[1] == pytest.approx(242_000 / 300)
    half, quarter = one(lines, "KV cache in bf16"), one(lines, "KV cache in int4")
    assert (half.get_xdata()[0], half.get_ydata()[0]) == (2.0, 200.0)
    assert (quarter.get_xdata()[0], quarter.get_ydata()[0]) == (8.0, 800.0)
    assert half.get_label().startswith("KV cache in bf16: 2.000 FLOP/byte\n")
    assert quarter.get_label().startswith("KV cache in int4: 8.000 FLOP/byte\n")
    p1 = one(lines, "P1 = 81.25 FLOP/byte")
    assert (p1.get_xdata()[0], p1.get_ydata()[0]) == (81.25, 1300.0)


def test_figure_5_draws_micro_batches_p2_and_the_batch():
    figure = draw_roofline(view_of("l4-figures", "mixtral-8x7b", "ffn", "paper"))
    lines = lines_of(figure)
    chosen = one(lines, "µ = 128: 31.947 FLOP/byte")
    assert list(chosen.get_ydata()) == pytest.approx([9584, 9584], abs=0.5)
    p2 = one(lines, "P2 = balance point: 599.0 FLOP/byte")
    assert (p2.get_xdata()[0], p2.get_ydata()[0]) == pytest.approx((599.0, 9584), rel=1e-4)
    assert one(lines, "N = 2,396").get_xdata()[0] == pytest.approx(599.0)
    assert {label.split(":")[0] for label in lines if label.startswith("µ")} == {"µ = 32", "µ = 128", "µ = 512"}


def test_every_figure_says_theoretical_and_has_units_on_both_axes(view):
    for legend in (True, False):
        figure = draw_roofline(view, legend=legend)
        axes = figure.axes[0]
        assert axes.get_xlabel() == "Operational intensity, theoretical [FLOP/byte]"
        assert axes.get_ylabel() == "Attainable performance [GFLOP/s]"
        assert any(text.get_text().startswith("Theoretical intensity") for text in figure.texts)
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_everything_drawn_lies_within_the_axes(view):
    figure = draw_roofline(view)
    low_x, high_x = figure.axes[0].get_xlim()
    low_y, high_y = figure.axes[0].get_ylim()
    for label, line in lines_of(figure).items():
        assert all(low_x <= x <= high_x for x in line.get_xdata()), label
        assert max(line.get_ydata()) <= high_y, label
        if line.get_linestyle() == "None":
            assert low_y < min(line.get_ydata()), label


def test_roofs_differ_in_style_not_only_in_colour(view):
    roofs = [line for label, line in lines_of(draw_roofline(view)).items() if label.endswith("roof")]
    assert len({line.get_linestyle() for line in roofs}) == len(roofs)
    assert len({line.get_color() for line in roofs}) == len(roofs)


def corners(text: Any, renderer: Any) -> list[tuple[float, float]]:
    """What a text covers, turned as it is."""
    angle = math.radians(text.get_rotation())
    upright = text.get_rotation()
    text.set_rotation(0)
    box = text.get_window_extent(renderer)
    text.set_rotation(upright)
    x, y = text.get_transform().transform(text.get_unitless_position())
    cos, sin = math.cos(angle), math.sin(angle)
    return [
        (x + cos * (px - x) - sin * (py - y), y + sin * (px - x) + cos * (py - y))
        for px, py in ((box.x0, box.y0), (box.x1, box.y0), (box.x1, box.y1), (box.x0, box.y1))
    ]


def apart(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    """Whether some side of one of two convex shapes has all of the other on its far side."""
    for shape in (one, other):
        for (x0, y0), (x1, y1) in zip(shape, [*shape[1:], shape[0]], strict=True):
            first = [(y1 - y0) * x + (x0 - x1) * y for x, y in one]
            second = [(y1 - y0) * x + (x0 - x1) * y for x, y in other]
            if max(first) <= min(second) or max(second) <= min(first):
                return True
    return False


@pytest.mark.parametrize("legend", [True, False])
def test_no_label_covers_another_and_none_is_cut_off(view, legend):
    figure = draw_roofline(view, legend=legend)
    figure.canvas.draw()  # places the names of the axes
    renderer = figure.canvas.get_renderer()
    shapes = [(text.get_text(), corners(text, renderer)) for text in figure.texts]
    for index, (name, shape) in enumerate(shapes):
        assert all(0 <= x <= figure.bbox.width and 0 <= y <= figure.bbox.height for x, y in shape), name
        for other, covered in shapes[:index]:
            assert apart(shape, covered), (name, other)
    axes = figure.axes[0]
    outside = [axes.xaxis.label, axes.yaxis.label]
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        outside += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = [text.get_window_extent(renderer) for text in outside]
    if legend:
        boxes.append(axes.get_legend().get_window_extent(renderer))
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height


def test_p1_p2_and_balance_are_marked_and_labelled():
    figure = draw_roofline(view_of("h200", "gpt-oss-20b", "ffn", "full", micro_batch=2048))
    assert {"P1", "P2", "balance"} <= {text.get_text() for text in figure.texts}
    lines = lines_of(figure)
    p2, balance = one(lines, "P2 = "), one(lines, "balance point: ")
    assert balance.get_xdata()[0] > p2.get_xdata()[0]
    none = draw_roofline(view_of("kaggle-t4x2", "mixtral-8x7b", "ffn", "full"))
    assert not any(label.startswith("P1") for label in lines_of(none))


def test_the_plan_is_drawn_where_the_view_has_one(view):
    assert "plan" not in {text.get_text() for text in draw_roofline(view).texts}
    point = PlanPoint(intensity=50.0, flops_per_s=1e12, text="the plan is here")
    figure = draw_roofline(replace(view, plan=point))
    star = one(lines_of(figure), "the plan: 50.00 FLOP/byte")
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (50.0, 1000.0)
    assert "plan" in {text.get_text() for text in figure.texts}


def test_a_disk_adds_its_roof_and_two_gpus_are_named():
    figure = draw_roofline(view_of("t4x2", "mixtral-8x7b", "ffn", "full"))
    assert "disk to GPU roof" in lines_of(figure)
    assert any("2x NVIDIA T4" in text for text in texts_of(figure))


def test_redrawing_on_the_same_figure_leaves_nothing_behind(view):
    figure = draw_roofline(view)
    again = draw_roofline(view, figure)
    assert again is figure
    assert len(figure.axes) == 1
    assert texts_of(figure) == texts_of(draw_roofline(view))


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("b.SVG", b"<?xml"), ("c.svg", b"<?xml")])
def test_the_ending_decides_the_format_and_the_bytes_repeat(tmp_path, name, start):
    view = view_of("t4", "dbrx", "ffn", "full")
    first, second = tmp_path / name, tmp_path / f"again-{name}"
    save_figure(draw_roofline(view), first)
    save_figure(draw_roofline(view), second)
    assert first.read_bytes().startswith(start)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", ["figure.pdf", "figure", "figure.png.txt", ".png"])
def test_other_endings_are_refused(name):
    with pytest.raises(InputError, match=r"a name that ends in \.png or \.svg"):
        check_figure_path(name)


def test_a_folder_or_a_missing_folder_is_refused(tmp_path):
    figure = draw_roofline(view_of("t4", "dbrx", "attention", "full"))
    folder = tmp_path / "folder.png"
    folder.mkdir()
    for path in (folder, tmp_path / "missing" / "figure.png"):
        with pytest.raises(InputError, match="cannot write"):
            save_figure(figure, path)


def test_the_notebook_picture_is_a_png():
    assert render_png(draw_roofline(view_of("t4", "dbrx", "ffn", "full"), legend=False)).startswith(b"\x89PNG")
