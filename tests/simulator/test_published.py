"""Published rows, replayed: beside the cost model, what takes turns adds up, and the README's figures are current."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hrm.errors import InputError
from hrm.published.accuracy import in_sample
from hrm.published.comparisons import Fold
from hrm.published.cross_validation import cross_predict, predict_fold
from hrm.published.intervals import accuracy_document
from hrm.published.model import full_row
from hrm.published.predictions import judge_row, judge_rows
from hrm.published.rows import Row, bundled_rows
from hrm.published.systems import fitted_values
from simulator.published import replay_row

ROWS = {row.id: row for row in bundled_rows()}
VALUES = fitted_values()


@pytest.mark.parametrize("name", ["P000", "P004", "P032", "P050", "P066", "P091"])
def test_simulation_is_near_the_cost_model(name: str) -> None:
    simulated = replay_row(ROWS[name], VALUES)
    full = full_row(ROWS[name], VALUES)
    assert simulated.throughput_tokens_per_s == pytest.approx(full.tokens_per_s, rel=0.05)
    assert simulated.prefill_s == pytest.approx(full.prefill_s, rel=0.05)
    row = ROWS[name]
    n = simulated.throughput_tokens_per_s * (simulated.prefill_s + simulated.decode_s) / row.gen_len
    assert n == pytest.approx(row.batch_size)


def test_copies_and_kernels_of_flexgen_take_turns() -> None:
    found = replay_row(ROWS["P012"], VALUES)
    assert sum(found.utilisation.values()) == pytest.approx(1.0, rel=0.01)
    overlapped = replay_row(replace(ROWS["P012"], system="MoE-Lightning", weights_on_gpu=0.0), VALUES)
    assert sum(overlapped.utilisation.values()) > 1.2


def test_constants_move_the_simulation_as_they_move_the_model() -> None:
    slower = {**VALUES, "FlexGen.copies": VALUES["FlexGen.copies"] / 2}
    row = ROWS["P000"]
    model = full_row(row, slower).tokens_per_s / full_row(row, VALUES).tokens_per_s
    simulated = replay_row(row, slower).throughput_tokens_per_s / replay_row(row, VALUES).throughput_tokens_per_s
    assert simulated == pytest.approx(model, rel=0.02) and model < 0.8


def test_a_row_that_cannot_be_simulated_says_why_and_keeps_its_other_predictions() -> None:
    def refuses(row: Row, _: object) -> None:
        raise InputError("no time for it", where=row.id)

    found = judge_row(ROWS["P000"], VALUES, refuses)  # type: ignore[arg-type]
    assert found.prediction.note == "not simulated: P000: no time for it"
    assert found.prediction.predicted["full"] > 0 and "simulated" not in found.prediction.predicted
    with pytest.raises(InputError, match="'S3' is not known"):
        replay_row(replace(ROWS["P000"], setting="S3"), VALUES)


def test_a_fold_predicts_both_models_with_the_same_constants() -> None:
    rows = [ROWS["P008"], ROWS["P088"], ROWS["P089"]]  # DeepSpeed on S2, then S1
    fold = Fold(name="S2", train_ids=("P088", "P089"), test_ids=("P008",))
    found = predict_fold(rows, fold, replay_row)
    assert found["simulated"]["P008"] == pytest.approx(found["full"]["P008"], rel=0.02)
    assert found["full"]["P008"] != full_row(ROWS["P008"], VALUES).tokens_per_s
    crossed = cross_predict(rows, replay_row, by=("leave one setting out",), jobs=1)
    assert crossed["leave one setting out"].predicted["simulated"]["P008"] == found["simulated"]["P008"]


def test_simulated_figures_have_not_moved_by_more_than_a_point() -> None:
    stored = accuracy_document()["in_sample"]["simulated"]
    live = in_sample(judge_rows(bundled_rows(), VALUES, replay_row))["simulated"]
    for group in ("MoE-Lightning, certain policy", "S1 and S2", "all rows"):
        for key in ("median_error", "p90_error"):
            assert live[group][key] == pytest.approx(stored[group][key], abs=0.01), (
                "run python docs/refresh_accuracy.py"
            )
    assert live["order"]["share"] == pytest.approx(stored["order"]["share"], abs=0.01)
