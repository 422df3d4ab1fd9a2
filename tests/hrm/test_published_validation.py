"""The judge: what is said of a row, the bars, terms, shares, chosen policies, and that the README is current."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command import run

from hrm.prediction import predict
from hrm.published.accuracy import in_sample
from hrm.published.accuracy_tables import readme_tables
from hrm.published.comparisons import Fold
from hrm.published.cross_validation import GATE_FOLDS, cross_predict, predict_fold
from hrm.published.document import MODELS
from hrm.published.gates import GROUPS, Gate, error_gates, figures_of
from hrm.published.intervals import accuracy_document
from hrm.published.model import full_row, policy_of_row, price_run, run_of_row
from hrm.published.page import render_page
from hrm.published.phases import phase_errors, phase_pairs
from hrm.published.predictions import judge_row, judge_rows
from hrm.published.rows import Row, bundled_rows
from hrm.published.shares import time_shares
from hrm.published.systems import fitted_values
from hrm.published.terms import ALL_TERMS, priced_without, term_errors
from hrm.published.validation import validate_rows
from hrm.rates import derive_rates
from hrm.scenario import measure_sizes

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = {row.id: row for row in bundled_rows()}
VALUES = fitted_values()
HEAD = (
    "id,setting,system,workload,prompt_len,padded,gen_len,"
    "mu,n_ub,N,weights_gpu_pct,throughput_tok_s,total_time_s,source"
)


# One row


def test_a_row_has_all_eight_predictions_but_the_simulated_one() -> None:
    found = judge_row(ROWS["P048"], VALUES).prediction
    assert set(found.predicted) == set(MODELS) - {"simulated"}
    assert found.interval is not None and found.interval[0] < found.predicted["full"] < found.interval[1]
    assert found.bottleneck.startswith(("prefill: ", "decode: "))


def test_fitted_eq12_has_the_rates_of_the_rows_own_system() -> None:
    faster = {**VALUES, "FlexGen.copies": 2 * VALUES["FlexGen.copies"]}
    before, after = (
        {name: judge_row(ROWS[name], values).prediction.predicted["eq12_fitted"] for name in ("P000", "P052")}
        for values in (VALUES, faster)
    )
    assert after["P000"] > before["P000"]  # FlexGen, whose copies set the time
    assert after["P052"] == before["P052"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"setting": "S3"}, "setting 'S3' is not known"),
        ({"system": "vLLM"}, "system 'vLLM' is not known"),
        ({"prompt_len": 40_000.0}, "40032 tokens"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(change: dict[str, Any], said: str) -> None:
    found = judge_row(replace(ROWS["P000"], **change), VALUES).prediction
    assert found.predicted == {} and found.interval is None
    assert said in found.note


# Policies that were not published


@pytest.mark.parametrize("name", ["P048", "P050", "P054", "P066", "P068", "P070"])
def test_without_a_policy_the_authors_planner_finds_the_one_that_ran(name: str) -> None:
    row = ROWS[name]
    policy, note = policy_of_row(replace(row, micro_batch_size=None, num_micro_batches=None, batch_size=None))
    assert (policy.micro_batch_size, policy.num_micro_batches) == (row.micro_batch_size, row.num_micro_batches)
    assert "authors' planner" in note


@pytest.mark.parametrize(("name", "n_ub"), [("P076", 39), ("P078", 33)])
def test_s8_rows_run_micro_batches_of_68(name: str, n_ub: int) -> None:
    policy, note = policy_of_row(ROWS[name])
    assert (policy.micro_batch_size, policy.num_micro_batches) == (68, n_ub)
    assert "this planner's plan for its N" in note


@pytest.mark.parametrize("setting", ["S7", "S9"])
@pytest.mark.parametrize("system", ["MoE-Lightning", "FlexGen", "FlexGen(c)"])
def test_other_settings_and_lengths_are_predicted_without_any_policy(setting: str, system: str) -> None:
    row = Row(
        id="x", setting=setting, system=system, workload="mtbench", prompt_len=417, padded=True, gen_len=64
    )  # fmt: skip
    found = judge_row(row, VALUES).prediction
    assert found.predicted["full"] > 0
    assert "was not published" in found.note


def test_an_n_that_no_grid_value_divides_leaves_the_last_micro_batch_part_filled() -> None:
    row = replace(ROWS["P076"], batch_size=2651)  # 11 x 241
    policy, _ = policy_of_row(row)
    assert policy.micro_batch_size > 4
    assert policy.batch_size % policy.micro_batch_size > 0


# Bars


def test_a_bar_is_met_at_its_value_and_missed_rows_meet_none() -> None:
    assert Gate(name="", model="", value=0.12, bar=0.12).passes
    assert not Gate(name="", model="", value=0.1201, bar=0.12).passes
    assert Gate(name="", model="", value=0.9, bar=0.9, at_most=False).passes
    assert not Gate(name="", model="", value=math.inf, bar=0.12).passes
    assert not Gate(name="", model="", value=math.nan, bar=0.12).passes
    assert Gate(name="", model="", value=math.inf, bar=0.12).entry()["value"] is None


def test_rows_that_are_judged_together() -> None:
    counts = {name: sum(belongs(row) for row in ROWS.values()) for name, belongs in GROUPS.items()}
    assert counts == {"MoE-Lightning, certain policy": 13, "S1 and S2": 31, "all rows": 41}
    uncertain = {row.id for row in ROWS.values() if row.system.startswith("MoE") and not _certain(row)}
    assert uncertain == {"P075", "P076", "P078"}


def _certain(row: Row) -> bool:
    return GROUPS["MoE-Lightning, certain policy"](row)


def test_perfect_predictions_meet_every_bar_and_ten_times_too_fast_meets_those_on_order_only() -> None:
    rows = list(ROWS.values())
    for factor, errors_pass in ((1.0, True), (10.0, False)):
        found = figures_of(rows, {row.id: factor * (row.measured_tokens_per_s or 0) for row in rows})
        assert found["all rows"]["median_error"] == pytest.approx(factor - 1.0)
        gates = error_gates("full", {GATE_FOLDS: found, "leave one setting out": found})
        assert {gate.passes for gate in gates if "error" in gate.name} == {errors_pass}
        assert {gate.passes for gate in gates if "order" in gate.name} == {True}


def test_a_fold_takes_the_public_value_of_what_its_rest_does_not_touch() -> None:
    rows = list(ROWS.values())
    l4 = [row.id for row in rows if row.setting == "S2"]
    rest = tuple(row.id for row in rows if row.setting == "S1" and row.system == "DeepSpeed")
    fold = Fold(name="", train_ids=rest, test_ids=(l4[-1],))  # P075: no constant but those of the L4 and its system
    assert predict_fold(rows, fold)["full"] == {"P075": full_row(ROWS["P075"], {}).tokens_per_s}


# Phases


def test_phases_are_the_models_own_and_no_difference_of_totals() -> None:
    pairs = {
        (*pair["short_ids"], *pair["long_ids"]): pair for pair in phase_pairs(judge_rows([*ROWS.values()], VALUES))
    }
    assert set(pairs) == {("P032", "P034"), ("P048", "P050"), ("P056", "P058")}
    pair = pairs["P048", "P050"]
    assert pair["full"]["layer_s"] == pytest.approx(full_row(ROWS["P050"], VALUES).layer_s)
    assert pair["full"]["prefill_s"] == pytest.approx(full_row(ROWS["P048"], VALUES).prefill_s)
    assert "simulated" not in pair


def test_phase_errors_are_medians_over_pairs() -> None:
    pairs = [
        {"measured": {"layer_s": 1.0, "prefill_s": 10.0}, "full": {"layer_s": layer, "prefill_s": 10.0 * layer}}
        for layer in (1.1, 0.7, 1.2)
    ]
    assert phase_errors(pairs, "full") == pytest.approx({"layer_s": 0.2, "prefill_s": 0.2})
    assert math.isnan(phase_errors(pairs, "simulated")["layer_s"])


# Terms and shares


def test_without_prefill_a_row_is_its_decode_alone() -> None:
    row = ROWS["P050"]
    found = full_row(row, VALUES)
    assert priced_without(row, VALUES, frozenset(["prefill"])) == pytest.approx(504 * 128 / found.decode_s)
    assert priced_without(row, VALUES, frozenset()) == found.tokens_per_s


@pytest.mark.parametrize(
    ("term", "touched", "untouched"),
    [
        ("staging", "P050", "P000"),
        ("sums", "P000", "P050"),
        ("copies", "P000", "P008"),
        ("gathering", "P032", "P020"),
        ("host", "P058", "P050"),
        ("pipeline", "P024", "P012"),
        ("cpu_attention", "P004", "P000"),
    ],
)
def test_a_term_touches_the_rows_it_is_about(term: str, touched: str, untouched: str) -> None:
    assert (
        priced_without(ROWS[touched], VALUES, frozenset([term])) > 1.01 * full_row(ROWS[touched], VALUES).tokens_per_s
    )
    assert priced_without(ROWS[untouched], VALUES, frozenset([term])) == full_row(ROWS[untouched], VALUES).tokens_per_s


def test_terms_switched_on_in_turn_lead_to_the_full_model() -> None:
    rows = list(ROWS.values())
    entries = term_errors(rows, VALUES)
    assert {entry["key"] for entry in entries} == ALL_TERMS
    assert [entry["error_without"] for entry in entries[1:]] == [entry["error_with"] for entry in entries[:-1]]
    full = figures_of(rows, {row.id: full_row(row, VALUES).tokens_per_s for row in rows})
    assert entries[-1]["error_with"] == pytest.approx(full["all rows"]["median_error"])


def test_shares_of_a_sum_are_its_lanes_and_all_shares_add_up() -> None:
    for row in ROWS.values():
        assert sum(time_shares(row, VALUES).values()) == pytest.approx(1.0), row.id
    found, shares = price_run(run_of_row(ROWS["P000"], VALUES)), time_shares(ROWS["P000"], VALUES)
    whole = found.prefill_s + found.decode_s
    assert shares["decode: link, to the GPU"] == pytest.approx(found.decode_lanes["host_to_device"] / whole)
    gpu = [shares[f"decode: {part}"] for part in ("GPU FLOPs", "GPU memory", "launches and overhead")]
    assert sum(gpu) == pytest.approx(found.decode_lanes["gpu"] / whole)


# The command


def table(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([HEAD, *lines]) + "\n", encoding="utf-8")
    return path


def test_rows_without_measurements_are_only_predicted(tmp_path: Path) -> None:
    path = table(tmp_path, "a,S7,DeepSpeed,mtbench,417,1,64,,,,,,,", "b,S1,MoE-Lightning,mtbench,77,0,64,164,16,,,,,")
    outcome = run("validate", "published", "--data", path, "--no-simulation", "--json")
    document = outcome.document
    assert outcome.code == 0
    assert [row["id"] for row in document["rows"]] == ["a", "b"]
    for row in document["rows"]:
        assert row["measured"] is None and row["predicted"]["full"] > 0 and row["predicted"]["simulated"] is None
        assert set(row["predicted"]) == set(MODELS) and len(row["interval"]) == 2
    assert document["terms"] == [] and len(document["shares"]) == 2
    assert document["summary"]["cross_validation"] == accuracy_document()["cross_validation"]


def test_a_bar_that_is_missed_gives_exit_code_4_after_the_document(tmp_path: Path) -> None:
    path = table(tmp_path, "a,S2,DeepSpeed,mtbench,418,1,32,,,,,100,,", "b,S3,DeepSpeed,mtbench,418,1,32,,,,,1,,")
    outcome = run("validate", "published", "--data", path, "--no-simulation", "--json")
    assert outcome.code == 4
    missed = outcome.document["rows"][1]
    assert missed["predicted"]["full"] is None and "S3" in missed["note"]
    assert outcome.err.startswith("hrm: median error of the full model, over the 2 measured rows given: ")
    outcome = run("validate", "published", "--data", path, "--no-simulation", "--max-median-error", "0.001")
    assert outcome.code == 4
    assert "cross-validated by setting x workload, over 41 bundled rows" in outcome.err
    assert "not predicted: b" in outcome.out


def test_own_rows_that_are_close_pass_and_give_a_report(tmp_path: Path) -> None:
    path, page = table(tmp_path, "a,S2,DeepSpeed,mtbench,418,1,32,,,,,12.7,,"), tmp_path / "out.html"
    outcome = run("validate", "published", "--data", path, "--no-simulation", "--report", page)
    assert outcome.code == 0, outcome.err
    assert "DeepSpeed, S2" in outcome.out
    text = page.read_text(encoding="utf-8")
    for heading in ("Bars", "What Eq. 12 leaves out, by how much", "Where the time of each row goes", "Kernels"):
        assert f"<h2>{heading}</h2>" in text
    assert "http://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--data", "nowhere.csv"),
        ("--kernels", "nowhere.csv"),
        ("--report", "no/where.html"),
        ("--max-median-error", "0"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_computed(arguments: tuple[str, str]) -> None:
    outcome = run("validate", "published", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert arguments[0] in outcome.err or arguments[1] in outcome.err


def test_a_document_of_rows_that_none_can_predict_is_whole() -> None:
    document = validate_rows([replace(ROWS["P000"], setting="S3"), replace(ROWS["P002"], setting="S3")], bundled=False)
    json.dumps(document, allow_nan=False)
    assert document["summary"]["differences"] == [] and document["shares"] == []
    render_page(document)


# What is shipped and shown is current


def test_accuracy_is_of_the_shipped_constants() -> None:
    assert accuracy_document()["constants"] == pytest.approx(VALUES, rel=1e-4), "run python docs/refresh_accuracy.py"


@cache
def live_figures() -> dict[str, Any]:
    """What the tables of the README are made of, computed here: all but the simulation and the refitted Eq. 12."""
    rows = bundled_rows()
    found = cross_predict(rows, by=(GATE_FOLDS,), jobs=1)
    accuracy = json.loads(json.dumps(accuracy_document()))
    accuracy["in_sample"] |= in_sample(judge_rows(rows, VALUES))
    accuracy["cross_validation"][GATE_FOLDS]["full"] |= figures_of(rows, found[GATE_FOLDS].predicted["full"])
    accuracy["terms"] = term_errors(rows, VALUES)
    return dict(accuracy)


def test_figures_of_the_readme_have_not_moved_by_more_than_a_point() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- accuracy -->\n(.*?)<!-- end of accuracy -->", readme, re.DOTALL)
    assert shown is not None
    refresh = "run python docs/refresh_accuracy.py"
    pairs = list(zip(shown[1].splitlines(), readme_tables(live_figures()).splitlines(), strict=True))
    assert len(pairs) > 20
    for was, now in pairs:
        figure = r"([\d.]+) %"
        assert re.sub(figure, "", was) == re.sub(figure, "", now), refresh
        assert [float(each) for each in re.findall(figure, was)] == pytest.approx(
            [float(each) for each in re.findall(figure, now)], abs=1.0
        ), f"{refresh}: {was}"


def test_a_row_of_overlapping_lanes_is_priced_as_a_plan_is_also_where_lanes_cross() -> None:
    """P070's policy with 2,048 tokens: CPU attention takes over from the copies on the way."""
    row = replace(ROWS["P070"], gen_len=2048)
    run = run_of_row(row, VALUES)
    sizes = measure_sizes(run.scenario)
    rates = derive_rates(run.scenario.profile, run.scenario.formats)
    planned = predict(run.scenario, sizes, rates, run.policy)
    assert price_run(run).decode_s == planned.decode_s > 1.05 * planned.decode.seconds * sizes.decode_steps


def test_a_row_of_one_generated_token_is_judged_without_a_decode_rate() -> None:
    row = replace(ROWS["P012"], id="one", gen_len=1, total_time_s=None)
    document = validate_rows([row], None, bundled=False)
    predicted = document["rows"][0]["predicted"]
    assert predicted["full"] > 0.0 and predicted["eq12_authors"] > 0.0
    assert predicted["eq12_authors_decode_only"] is None
