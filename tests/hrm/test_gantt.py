"""Timelines: which bars are drawn where, in what, and what is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrm.errors import InputError
from hrm.gantt import OP_COLOURS, Panel, draw_timelines, lane_in_words, layer_panel, op_in_words
from hrm.graph import Lane, LaneKind, Op, TaskId
from hrm.plots import save_figure
from hrm.trace import Span, Trace

GPU, H2D, DISK = Lane(LaneKind.GPU, 0), Lane(LaneKind.H2D, 0), Lane(LaneKind.DISK)


def spans_of_layer(layer: int, start: float) -> list[Span]:
    """Post-attention of two micro-batches, 1 s each, while the next layer's two pages are copied."""
    posts = [TaskId(Op.POST_ATTENTION, "decode", 0, layer, j, None, 0, None) for j in (0, 1)]
    pages = [TaskId(Op.LOAD_WEIGHTS, "decode", 0, layer + 1, None, page, 0, None) for page in (0, 1)]
    return [
        Span(task, lane, start + number, start + number + 1.0)
        for lane, tasks in ((GPU, posts), (H2D, pages))
        for number, task in enumerate(tasks)
    ]


SPANS = tuple(span for layer in range(6) for span in spans_of_layer(layer, 10.0 + 2.0 * layer))
TRACE = Trace(SPANS, "simulated")


def test_two_layers_of_the_middle_are_shown_from_the_end_of_the_one_before() -> None:
    panel = layer_panel(TRACE, 0, title="")
    assert (panel.start_s, panel.end_s) == (14.0, 18.0)
    assert panel.marks == ((16.0, "layer 2"), (18.0, "layer 3"))
    assert {(span.task.op, span.task.layer) for span in panel.spans} == {
        (Op.POST_ATTENTION, 2),
        (Op.POST_ATTENTION, 3),
        (Op.LOAD_WEIGHTS, 3),
        (Op.LOAD_WEIGHTS, 4),
    }


def test_a_stack_of_fewer_layers_is_shown_whole() -> None:
    panel = layer_panel(Trace(tuple(spans_of_layer(0, 3.0)), "simulated"), 0, title="")
    assert (panel.start_s, panel.end_s, len(panel.marks)) == (3.0, 5.0, 1)


def test_a_step_that_the_trace_does_not_have_is_wrong_input() -> None:
    with pytest.raises(InputError, match="no decode step 7"):
        layer_panel(TRACE, 7, title="")


def test_rows_are_lanes_with_the_gpu_on_top() -> None:
    panel = Panel(title="", trace=Trace((*SPANS, Span(SPANS[0].task, DISK, 14.0, 15.0)), "x"), start_s=14.0, end_s=18.0)
    assert panel.lanes == (GPU, H2D, DISK)
    axes = draw_timelines([panel], title="t").axes[0]
    heights = {label.get_text(): label.get_position()[1] for label in axes.get_yticklabels()}
    assert heights["GPU"] > heights["host to GPU"] > heights["disk"]


def test_only_where_there_are_several_gpus_lanes_are_numbered() -> None:
    assert lane_in_words(GPU, several=False) == "GPU"
    assert lane_in_words(Lane(LaneKind.H2D, 1), several=True) == "host to GPU 1"
    assert lane_in_words(DISK, several=True) == "disk"


def bars(axes: object) -> list[tuple[float, float]]:
    """Start and end of every bar, sorted."""
    found = []
    for collection in axes.collections:  # type: ignore[attr-defined]
        for path in collection.get_paths():
            xs = path.vertices[:, 0]
            found.append((float(xs.min()), float(xs.max())))
    return sorted(found)


def test_bars_lie_where_their_tasks_ran_counted_from_the_start_of_the_window() -> None:
    axes = draw_timelines([layer_panel(TRACE, 0, title="")], title="t").axes[0]
    assert bars(axes) == [(t, t + 1.0) for t in (0.0, 1.0, 2.0, 3.0) for _ in ("GPU", "link")]
    assert axes.get_xlabel() == "time [s]"


def test_short_times_are_in_milliseconds() -> None:
    short = Trace(tuple(Span(s.task, s.lane, s.start_s / 1e3, s.end_s / 1e3) for s in SPANS), "simulated")
    axes = draw_timelines([layer_panel(short, 0, title="")], title="t").axes[0]
    assert axes.get_xlabel() == "time [ms]"
    assert bars(axes)[-1] == pytest.approx((3.0, 4.0))


def test_numbers_of_micro_batches_stand_on_their_bars() -> None:
    axes = draw_timelines([layer_panel(TRACE, 0, title="")], title="t").axes[0]
    numbers = {text.get_text(): text.get_position()[0] for text in axes.texts if text.get_text().isdecimal()}
    assert numbers == {"0": 2.5, "1": 3.5}  # of the last layer: keys are overwritten from left to right


def test_bars_too_short_for_a_number_have_none() -> None:
    panel = Panel(title="", trace=TRACE, start_s=0.0, end_s=1000.0)
    assert [text for text in draw_timelines([panel], title="t").axes[0].texts if text.get_text().isdecimal()] == []


def test_pages_of_two_layers_are_told_apart_by_hatching_and_named() -> None:
    figure = draw_timelines([layer_panel(TRACE, 0, title="")], title="t")
    hatches = {collection.get_hatch() for collection in figure.axes[0].collections} - {None}
    assert len(hatches) == 2
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == [
        "after attention (output, router, experts)",
        "D3: weights to the GPU, layer 4",
        "D3: weights to the GPU, layer 3",
    ]


def test_panels_share_their_time_axis_and_a_long_one_is_cut_and_says_so() -> None:
    short, long = layer_panel(TRACE, 0, title="a"), Panel(title="b", trace=TRACE, start_s=10.0, end_s=22.0)
    first, second = draw_timelines([short, long], title="t", longest_s=8.0).axes
    assert first.get_xlim() == second.get_xlim() == (0.0, 8.0)
    assert (bars(first)[-1][1], bars(second)[-1][1]) == (4.0, 8.0)
    assert any(text.get_text().startswith("goes on to 12 s") for text in second.texts)
    assert not any("goes on" in text.get_text() for text in first.texts)


def test_every_kind_of_task_has_a_colour_of_its_own_and_words() -> None:
    assert set(OP_COLOURS) == set(Op)
    assert len(set(OP_COLOURS.values())) == len(Op)
    assert op_in_words(Op.LOAD_KV) == "D4: KV cache to the GPU"
    assert op_in_words(Op.LM_HEAD) == "lm head"


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_figure_gives_the_same_bytes(tmp_path: Path, kind: str) -> None:
    for name in ("first", "second"):
        save_figure(draw_timelines([layer_panel(TRACE, 0, title="a")], title="t"), tmp_path / f"{name}.{kind}")
    assert (tmp_path / f"first.{kind}").read_bytes() == (tmp_path / f"second.{kind}").read_bytes()
