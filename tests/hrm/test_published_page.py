"""The document of a validation, and the page that shows it: self-contained, and whole with or without its sections."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from hrm.published.document import MODELS, RowPrediction, build_document, scores_of_document
from hrm.published.figures import draw_scatter, shown_models
from hrm.published.page import figure_svg, render_page
from hrm.published.rows import Row


def row(key: str, **changes: object) -> Row:
    given = {
        "id": key,
        "setting": "S1",
        "system": "MoE-Lightning",
        "workload": "mtbench",
        "prompt_len": 10.0,
        "padded": True,
        "gen_len": 3,
        "micro_batch_size": 2,
        "num_micro_batches": 2,
        "batch_size": 4,
    }
    return Row(**(given | changes))  # type: ignore[arg-type]


ROWS = [
    row("A", total_time_s=14.0),
    row("B", gen_len=8, total_time_s=24.0),
    row("C", system="FlexGen", throughput_tokens_per_s=0.4),
    row("D", setting="S2", system="<b>&", throughput_tokens_per_s=5.0),
    row("E", setting="S2"),
]
PREDICTIONS = {
    "A": RowPrediction(
        predicted={"eq12_authors": 3.0, "eq12_fitted": 1.2, "full": 12 / 13},
        interval=(0.5, 1.0),
        bottleneck="decode: gpu",
    ),
    "B": RowPrediction(predicted={"eq12_authors": 3.0, "eq12_fitted": 1.5, "full": 32 / 28}, interval=(1.0, 1.2)),
    "C": RowPrediction(predicted={"eq12_authors": 1.0, "eq12_fitted": 0.8, "full": 0.3}, interval=(0.2, 0.3)),
    "D": RowPrediction(note="no such <system>"),
    "E": RowPrediction(predicted={"full": 2.0}),
}
SECTIONS: dict[str, Any] = {
    "terms": [{"term": "staging copy", "error_without": 0.5, "error_with": 0.25}],
    "shares": [{"id": "A", "terms": {"link": 0.75, "waits": 0.25}}, {"id": "B", "terms": {"link": 1.0}}],
    "constants": [
        {"component": "t4", "name": "gpu_flops_prefill", "value": 0.25, "low": 0.2, "high": 0.3, "unit": ""},
        {"component": "g2", "name": "staging", "value": 8.0, "public_low": 6.0, "public_high": 12.0, "unit": "GB/s"},
    ],
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build_document(ROWS, PREDICTIONS, layers_of=lambda _: 4)


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


# The document


def test_document_is_plain_json_and_has_every_key_of_every_prediction(document: dict[str, Any]) -> None:
    json.dumps(document, allow_nan=False)
    first = document["rows"][0]
    assert set(first["predicted"]) == set(MODELS)
    assert first["measured"] == pytest.approx(12 / 14)
    assert first["ratio"] == {
        "eq12_authors": pytest.approx(3.5),
        "eq12_fitted": pytest.approx(1.4),
        "full": pytest.approx(14 / 13),
    }
    assert (first["interval"], first["bottleneck"], first["predicted"]["simulated"]) == (
        [0.5, 1.0],
        "decode: gpu",
        None,
    )


def test_a_row_without_prediction_says_why_and_counts_as_missed(document: dict[str, Any]) -> None:
    assert document["rows"][3]["note"] == "no such <system>"
    summary = document["summary"]["models"]["full"]
    assert (summary["all"]["count"], summary["all"]["missed"], summary["all"]["worst_id"]) == (4, 1, "D")
    assert summary["all"]["p90_error"] is None  # infinite
    assert summary["by_setting"]["S2"]["median_error"] is None
    assert summary["by_system"]["FlexGen"]["median_error"] == pytest.approx(0.25)


def test_intervals_are_of_the_full_model_only(document: dict[str, Any]) -> None:
    models = document["summary"]["models"]
    assert models["full"]["interval"]["count"] == 4 and models["full"]["interval"]["coverage"] == 0.25  # A
    assert "interval" not in models["eq12_authors"]


def test_error_of_eq12_is_split_into_constants_and_form(document: dict[str, Any]) -> None:
    split = {entry["id"]: entry for entry in document["summary"]["eq12_error"]}
    assert set(split) == {"A", "B", "C"}
    assert split["C"]["constants"] == pytest.approx(0.2) and split["C"]["form"] == pytest.approx(0.4)


def test_differences_are_predicted_in_the_way_they_are_measured(document: dict[str, Any]) -> None:
    (difference,) = document["summary"]["differences"]
    assert (difference["short_ids"], difference["long_ids"]) == (["A"], ["B"])
    assert difference["measured"] == pytest.approx({"step_s": 2.0, "layer_s": 0.5, "prefill_s": 10.0})
    full = difference["predicted"]["full"]  # totals of 13 s and 28 s
    assert (full["step_s"], full["layer_s"], full["prefill_s"]) == pytest.approx((3.0, 0.75, 7.0))


def test_speed_ups_carry_every_prediction(document: dict[str, Any]) -> None:
    (speed_up,) = document["summary"]["speed_ups"]
    assert (speed_up["id"], speed_up["baseline_id"]) == ("A", "C")
    assert speed_up["measured"] == pytest.approx(12 / 14 / 0.4)
    assert speed_up["predicted"]["full"] == pytest.approx(12 / 13 / 0.3)


def test_scores_are_read_back_from_a_document(document: dict[str, Any]) -> None:
    scored = {each.id: each for each in scores_of_document(document, "full")}
    assert (scored["A"].low, scored["A"].high, scored["A"].system) == (0.5, 1.0, "MoE-Lightning")
    assert scores_of_document(document, "eq12_authors")[0].low is None
    assert shown_models(document) == ["eq12_authors", "eq12_fitted", "full"]


# The page


class Tags(HTMLParser):
    """Counts tags that open and close, and keeps every attribute that could fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.fetched: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)


def test_page_needs_nothing_but_itself_and_its_tags_balance(document: dict[str, Any]) -> None:
    page = render_page(document | SECTIONS)
    tags = Tags()
    tags.feed(page)
    assert (tags.open, tags.unbalanced) == ([], [])
    assert all(target.startswith("#") for target in tags.fetched) and tags.fetched
    assert not {"script", "link", "img", "iframe"} & tags.names
    addresses = set(re.findall(r"https?://[^\"\s<>]+", page))
    assert addresses == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, not places
    assert "@import" not in page and "url(http" not in page


def test_page_has_every_section_the_document_has(document: dict[str, Any]) -> None:
    assert headings(render_page(document | SECTIONS)) == [
        "Predicted against measured",
        "Error by system and setting",
        "What Eq. 12 leaves out, by how much",
        "Where the time of each row goes",
        "Constants, with their 90 % intervals",
        "Decode and prefill, by difference",
        "Speed-ups over FlexGen and DeepSpeed",
        "All rows",
    ]


def test_page_does_without_optional_sections_and_context() -> None:
    bare = {"rows": [{"id": "a", "measured": 2.0, "predicted": {"full": 3.0}}, {"id": "b", "measured": 1.0}]}
    assert headings(render_page(bare)) == ["Predicted against measured", "Error by system and setting", "All rows"]
    only_predicted = {"rows": [{"id": "a", "measured": None, "predicted": {"full": 3.0}}]}
    assert headings(render_page(only_predicted)) == ["All rows"]


def test_page_escapes_what_rows_say(document: dict[str, Any]) -> None:
    page = render_page(document, title="a < b")
    assert "<title>a &lt; b</title>" in page
    assert "no such &lt;system&gt;" in page and "&lt;b&gt;&amp;" in page and "<b>&" not in page


def test_table_has_measured_ratio_and_interval_of_a_row(document: dict[str, Any]) -> None:
    page = render_page(document)
    line = next(line for line in page.splitlines() if line.startswith("<tr><td>A</td>"))
    cells = re.findall(r"<td[^>]*>(.*?)</td>", line)
    assert cells == [
        "A", "S1", "MoE-Lightning", "mtbench", "10", "yes", "3", "2", "2", "4",
        "0.8571", "3 (3.50x)", "1.2 (1.40x)", "0.9231 (1.08x)", "0.5 to 1", "decode: gpu", "",
    ]  # fmt: skip


def test_the_same_document_gives_the_same_figure(document: dict[str, Any]) -> None:
    assert figure_svg(draw_scatter(document)) == figure_svg(draw_scatter(document))


def test_scatter_draws_every_prediction_with_its_lines_and_systems(document: dict[str, Any]) -> None:
    figure = draw_scatter(document)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == [MODELS[key] for key in shown_models(document)]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["1:1", "± 20 %", "MoE-Lightning", "FlexGen", "<b>&"]
    ratios = [list(line.get_ydata() / line.get_xdata()) for line in panels[0].lines[:3]]
    assert sorted(ratios) == [pytest.approx([share] * 2) for share in (0.8, 1.0, 1.2)]
