"""`hrm fit`: constants recovered from rows made with others, what rows do not identify, files written and installed."""

from __future__ import annotations

import csv
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from command import refused, run

from hrm.errors import InputError
from hrm.published import settings
from hrm.published.comparisons import Fold, fold_rows
from hrm.published.constants import CONSTANTS, Values
from hrm.published.fit import Fitted, FittedConstant, certain_policy, cross_validate, fit_constants, usable_rows
from hrm.published.fit_report import (
    FitReport,
    choose_constants,
    fit_command,
    format_constant,
    format_interval,
    sort_rows,
)
from hrm.published.installation import install_constants
from hrm.published.model import full_row
from hrm.published.rows import Row, bundled_rows
from hrm.published.systems import fitted_values

ROOT = Path(__file__).resolve().parents[2]
ROWS = {row.id: row for row in bundled_rows()}
OURS = ("MoE-Lightning", "MoE-Lightning(p)")

TRUTH = {"t4.gpu_flops": 0.2, "FlexGen.copies": 6e9}
"""Other than the public values, and than those shipped."""


def made_with(rows: list[Row], values: Values, noise: Any = None) -> list[Row]:
    """Rows as they would have been measured if these were the constants."""
    factors = np.ones(len(rows)) if noise is None else np.exp(noise)
    return [
        replace(row, throughput_tokens_per_s=factor * full_row(row, values).tokens_per_s, total_time_s=None)
        for row, factor in zip(rows, factors, strict=True)
    ]


def some(setting: str, *systems: str) -> list[Row]:
    return [row for row in usable_rows(tuple(ROWS.values())) if row.setting == setting and row.system in systems]


S1 = [*some("S1", *OURS)[:3], *some("S1", "FlexGen")[:3]]


# What a fit finds


def test_constants_that_made_noise_free_rows_are_recovered() -> None:
    found = fit_constants(made_with(S1, TRUTH), tuple(TRUTH))
    for name, value in TRUTH.items():
        assert found.values[name] == pytest.approx(value, rel=0.01)
    assert {each.constant.name for each in found.constants if each.status == "fitted"} == set(TRUTH)


def test_with_five_per_cent_of_noise_most_intervals_hold_the_truth() -> None:
    """Of 16 intervals of 90 % at least 13 do, on eleven rows; the noise of a seed is the same wherever this runs."""
    all_of_s1 = [*some("S1", *OURS), *some("S1", "FlexGen")]
    inside = 0
    for seed in range(8):
        rows = made_with(all_of_s1, TRUTH, np.random.default_rng(seed).normal(0.0, 0.05, len(all_of_s1)))
        for each in fit_constants(rows, tuple(TRUTH)).constants:
            if each.constant.name in TRUTH:
                assert each.status == "fitted"
                inside += each.low <= TRUTH[each.constant.name] <= each.high
    assert inside >= 13


def test_of_two_constants_that_one_row_cannot_tell_apart_one_is_dropped_to_its_public_value() -> None:
    found = fit_constants(made_with(S1[-1:], TRUTH), tuple(TRUTH))
    status = {each.constant.name: each for each in found.constants if each.constant.name in TRUTH}
    dropped = [each for each in status.values() if each.status == "dropped"]
    assert len(dropped) == 1
    assert dropped[0].value == dropped[0].constant.public
    assert dropped[0].high / dropped[0].low > 3.0
    assert found.correlation.shape == (1, 1)


def test_as_many_constants_as_rows_are_not_taken_for_exactly_known() -> None:
    each = next(
        each for each in fit_constants(made_with(S1[:1], TRUTH), ["t4.gpu_flops"]).constants if each.status == "fitted"
    )
    assert each.value == pytest.approx(0.2, rel=0.01)
    assert each.high / each.low > 1.3


def test_a_constant_that_no_row_touches_takes_its_public_value() -> None:
    found = fit_constants(made_with(S1, TRUTH), (*TRUTH, "l4.gpu_flops", "DeepSpeed.gpu_flops"))
    for name in ("l4.gpu_flops", "DeepSpeed.gpu_flops"):
        each = next(each for each in found.constants if each.constant.name == name)
        assert each.status == "untouched" and math.isnan(each.low) and math.isnan(each.high)
        assert each.value == math.sqrt(each.constant.low * each.constant.high)


def test_constants_that_may_not_move_keep_their_public_values() -> None:
    found = fit_constants(made_with(S1, TRUTH), ("t4.gpu_flops",)).values
    assert all(found[name] == constant.public for name, constant in CONSTANTS.items() if name != "t4.gpu_flops")


def test_a_fold_never_sees_its_own_rows() -> None:
    """Rows of a fold ten times as fast change the predictions of the other folds, and none of its own."""
    rows = made_with(S1, TRUTH)
    folds = [Fold(name="a", train_ids=tuple(row.id for row in rows[::2]), test_ids=tuple(row.id for row in rows[1::2]))]
    folds.append(Fold(name="b", train_ids=folds[0].test_ids, test_ids=folds[0].train_ids))
    before = cross_validate(rows, folds, tuple(TRUTH))
    faster = [
        replace(row, throughput_tokens_per_s=10 * (row.throughput_tokens_per_s or 0))
        if row.id in folds[0].test_ids
        else row
        for row in rows
    ]
    after = cross_validate(faster, folds, tuple(TRUTH))
    assert all(after[name] == before[name] for name in folds[0].test_ids)
    assert any(abs(after[name] / before[name] - 1) > 0.01 for name in folds[1].test_ids)


def test_in_a_fold_of_its_own_setting_a_gpu_falls_back_to_its_public_value() -> None:
    rows = [*S1[:2], *some("S2", *OURS)[:2]]
    folds = fold_rows(rows, "leave one setting out")
    found = cross_validate(rows, folds, ("l4.gpu_flops",))
    for row in rows[2:]:
        assert found[row.id] == full_row(row, {}).tokens_per_s


# Which rows


def test_certain_policy_leaves_out_three_rows_of_moe_lightning_and_keeps_thirteen() -> None:
    ours = [row for row in ROWS.values() if row.system in OURS]
    assert {row.id for row in ours if not certain_policy(row)} == {"P075", "P076", "P078"}
    assert len(ours) - 3 == 13


def test_every_bundled_row_takes_part_or_has_a_reason() -> None:
    usable, left_out = sort_rows(bundled_rows())
    assert [row.id for row in usable] == [row.id for row in usable_rows(bundled_rows())]
    assert set(left_out) == {"P075", "P076", "P078"}
    assert all(reason.startswith("its policy is not certain") for reason in left_out.values())


def test_rows_that_cannot_be_used_say_why() -> None:
    row = ROWS["P000"]
    rows = [
        replace(row, id="a", setting="S12"),
        replace(row, id="b", system="vLLM"),
        replace(row, id="c", throughput_tokens_per_s=None, total_time_s=None),
        row,
    ]
    usable, left_out = sort_rows(rows)
    assert usable == (row,)
    assert left_out["a"] == "setting 'S12' is not known (S1, S2, S6, S7, S8, S9)"
    assert left_out["b"].startswith("system 'vLLM' is not known (MoE-Lightning, ")
    assert left_out["c"] == "it was not measured"


# The constants that are shipped


@pytest.fixture(scope="module")
def report() -> FitReport:
    """All constants on all bundled rows, as `hrm fit` does it."""
    return fit_command()


def test_the_constants_that_are_shipped_are_those_that_hrm_fit_finds(report: FitReport) -> None:
    shipped = fitted_values()
    assert set(shipped) == set(CONSTANTS)
    for each in report.fitted.constants:
        assert format_constant(each.constant, shipped[each.constant.name]) == format_constant(each.constant, each.value)


def copy_of_the_source(tmp_path: Path) -> Path:
    for folder in ("hardware_profiles/components", "hrm/data/systems"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def all_texts(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.yaml"))}


def test_installing_what_was_fitted_regenerates_the_files_that_are_committed(report: FitReport, tmp_path: Path) -> None:
    root = copy_of_the_source(tmp_path)
    committed = all_texts(root)
    assert install_constants(report, root) == ()
    assert all_texts(root) == committed


def test_installing_exchanges_single_lines_and_leaves_comments_alone(report: FitReport, tmp_path: Path) -> None:
    root = copy_of_the_source(tmp_path)
    before = all_texts(root)
    other = with_constants(report, {name: 0.5 * value for name, value in report.fitted.values.items()})
    changed = {str(path.relative_to(root)) for path in install_constants(other, root)}
    after = all_texts(root)
    assert changed == {name for name in before if before[name] != after[name]}
    assert "hardware_profiles/components/gpus/t4.yaml" in changed and "hrm/data/systems/flexgen.yaml" in changed
    for name in changed:
        pairs = list(zip(before[name].splitlines(), after[name].splitlines(), strict=True))
        lines = [(old, new) for old, new in pairs if old != new]
        assert 1 <= len(lines) <= 2
        for old, new in lines:
            assert old.split(":")[0] == new.split(":")[0] and old.partition("  #")[1:] == new.partition("  #")[1:]
    shares = yaml.safe_load(after["hardware_profiles/components/gpus/t4.yaml"])["efficiency"]
    assert shares["gpu_flops_prefill"]["value"] == shares["gpu_flops_decode"]["value"] == "5.2 %"
    assert (
        shares["gpu_bandwidth"]
        == yaml.safe_load(before["hardware_profiles/components/gpus/t4.yaml"])["efficiency"]["gpu_bandwidth"]
    )


def with_constants(report: FitReport, values: Values, status: str = "") -> FitReport:
    constants = tuple(
        replace(each, value=values.get(each.constant.name, each.value), status=status or each.status)
        for each in report.fitted.constants
    )
    return replace(report, fitted=replace(report.fitted, constants=constants))


def test_what_no_row_touches_or_nobody_asked_for_is_not_installed(report: FitReport, tmp_path: Path) -> None:
    root = copy_of_the_source(tmp_path)
    halved = {name: 0.5 * value for name, value in report.fitted.values.items()}
    assert install_constants(with_constants(report, halved, "untouched"), root) == ()
    only = replace(with_constants(report, halved), moved=("l4.gpu_flops",))
    assert [path.name for path in install_constants(only, root)] == ["l4.yaml"]


def test_a_file_without_a_line_for_a_constant_is_named_and_nothing_is_written(
    report: FitReport, tmp_path: Path
) -> None:
    root = copy_of_the_source(tmp_path)
    path = root / "hrm" / "data" / "systems" / "flexgen.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("FlexGen.copies", "FlexGen.rate"), encoding="utf-8")
    before = all_texts(root)
    halved = with_constants(report, {name: 0.5 * value for name, value in report.fitted.values.items()})
    with pytest.raises(InputError, match=r"flexgen.yaml: has no line for FlexGen.copies"):
        install_constants(halved, root)
    assert all_texts(root) == before


def test_a_fit_finds_the_same_whatever_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the constants themselves are left out of what is installed: bandwidths and overlap are no part of a fit."""
    names = ("t4.gpu_flops", "n1-416.link", "FlexGen.copies", "FlexGen(c).cpu_attention", "DeepSpeed.gpu_flops")
    rows = [*S1, *some("S1", "FlexGen(c)")[:2], *some("S1", "DeepSpeed")[:2], *some("S6", *OURS)[:2]]
    before = fit_constants(rows, names).values

    def other(name: str) -> Any:
        found = settings.load_profile(name)
        shares = replace(
            found.efficiency,
            gpu_flops_prefill=0.9,
            gpu_flops_decode=0.8,
            link=0.7,
            staging=0.6,
            overhead_per_micro_batch_s=0.01,
        )
        return replace(found, efficiency=shares)

    monkeypatch.setattr(settings, "_profile", other)
    assert fit_constants(rows, names).values == before


# Numbers as they are written


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("t4.gpu_flops", 0.10376, "10.4 %"),
        ("t4.gpu_flops", 0.0074, "0.74 %"),
        ("FlexGen.copies", 8.3558e9, "8.36 GB/s"),
        ("FlexGen.copies", 13.84e9, "13.8 GB/s"),
        ("MoE-Lightning.overhead", 0.00094868, "0.95 ms"),
    ],
)
def test_constants_are_written_with_the_digits_they_have(name: str, value: float, text: str) -> None:
    assert format_constant(CONSTANTS[name], value) == text


def test_intervals_are_written_with_one_unit() -> None:
    assert format_interval(CONSTANTS["t4.gpu_flops"], 0.0931, 0.1157) == "9.3-11.6 %"
    assert format_interval(CONSTANTS["FlexGen.copies"], 6.931e9, 1.007e10) == "6.93-10.1 GB/s"
    assert format_interval(CONSTANTS["t4.gpu_flops"], math.nan, math.nan) == ""
    assert format_interval(CONSTANTS["t4.gpu_flops"], 1e-22, 1e20) == "nothing known"


# The command


COLUMNS = ["id", "setting", "system", "workload", "prompt_len", "padded", "gen_len", "mu", "n_ub", "N"]
COLUMNS += ["weights_gpu_pct", "throughput_tok_s"]


def write_rows(path: Path, rows: list[Row]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        for row in rows:
            share = "" if row.weights_on_gpu is None else 100.0 * row.weights_on_gpu
            cells = [row.id, row.setting, row.system, row.workload, row.prompt_len, int(row.padded), row.gen_len]
            cells += [row.micro_batch_size, row.num_micro_batches, row.batch_size, share, row.throughput_tokens_per_s]
            writer.writerow("" if cell is None else cell for cell in cells)
    return path


def test_own_rows_are_fitted_and_written_with_intervals_correlation_and_rows(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "mine.csv", [*made_with(S1, TRUTH), replace(ROWS["P000"], id="X1", setting="S12")])
    out = tmp_path / "constants.yaml"
    done = run("fit", "--data", data, "--components", "t4, n1-48, FlexGen", "-o", out, "--json")
    assert done.code == 0, done.err
    document = yaml.safe_load(out.read_text(encoding="utf-8"))
    assert done.document == document
    assert done.err == f"saved to {out}\n"
    assert document["rows"] == [row.id for row in S1]
    assert document["left_out"] == {"X1": "setting 'S12' is not known (S1, S2, S6, S7, S8, S9)"}
    assert document["median_error_in_sample"] < 0.01
    assert document["command"] == f"hrm fit --data {data} --components 't4, n1-48, FlexGen'"
    found = document["constants"]
    assert set(found) == set(CONSTANTS)
    for name, value in TRUTH.items():
        assert found[name]["value"] == pytest.approx(value, rel=0.01)
        assert found[name]["low"] <= found[name]["value"] <= found[name]["high"]
        assert found[name]["status"] == "fitted"
    assert found["l4.gpu_flops"]["status"] == "not asked for" and found["l4.gpu_flops"]["low"] is None
    assert found["FlexGen.copies"]["rows"] == 3 and found["t4.gpu_flops"]["rows"] == 6
    assert set(document["correlation"]) == set(TRUTH)
    assert document["correlation"]["t4.gpu_flops"]["t4.gpu_flops"] == pytest.approx(1.0)


def test_the_screen_has_every_constant_its_interval_and_what_was_left_out(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "mine.csv", [*made_with(S1, TRUTH), replace(ROWS["P000"], id="X1", setting="S12")])
    screen = run("fit", "--data", data, "--components", "t4,FlexGen,DeepSpeed").out
    lines = {line.split()[0]: line.split() for line in screen.splitlines() if line.startswith(" ") and len(line) > 20}
    assert lines["t4.gpu_flops"][1:3] == ["20.0", "%"] and lines["t4.gpu_flops"][-2:] == ["%", "inside"]
    assert lines["FlexGen.copies"][1:3] == ["6.00", "GB/s"] and lines["FlexGen.copies"][-1] == "below"
    assert "untouched" in lines["DeepSpeed.gpu_flops"]
    assert " ".join(lines["l4.gpu_flops"]).count("not asked for") == 1
    assert "left out: X1: setting 'S12' is not known" in screen
    assert max(len(line) for line in screen.splitlines()) <= 118


def test_wrong_components_are_named() -> None:
    known = "DeepSpeed, FlexGen, FlexGen(c), MoE-Lightning, MoE-Lightning(p), g2, l4, n1-416, n1-48, t4"
    assert refused("fit", "--components", "t4,a100") == f"--components: there is no component 'a100' ({known})"
    assert refused("fit", "--components", "n1-48").startswith("--components: n1-48 has no constant to fit (DeepSpeed, ")


def test_more_than_fourteen_constants_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first = CONSTANTS["t4.gpu_flops"]
    many = {f"t4.{number}": replace(first, name=f"t4.{number}") for number in range(15)}
    monkeypatch.setattr("hrm.published.fit_report.CONSTANTS", many)
    with pytest.raises(InputError, match="15 constants are too many"):
        choose_constants("t4")
    with pytest.raises(InputError, match="15 constants are too many"):
        choose_constants(None)


def test_a_file_of_rows_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "mine.csv", [replace(ROWS["P000"], setting="S12")])
    assert refused("fit", "--data", data) == (
        f"{data}: no row can be used: P000: setting 'S12' is not known (S1, S2, S6, S7, S8, S9)"
    )


def test_a_folder_that_is_not_there_is_named_before_anything_is_fitted(tmp_path: Path) -> None:
    path = tmp_path / "no" / "constants.yaml"
    assert refused("fit", "-o", path) == f"--output: {path}: its folder does not exist"


def test_an_installed_package_has_no_files_to_rewrite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hrm.published.installation.bundled_directory", lambda: tmp_path)
    assert "this is no source tree" in refused("fit", "--install")


def test_a_dropped_constant_is_written_as_an_estimate_with_the_reason(report: FitReport, tmp_path: Path) -> None:
    root = copy_of_the_source(tmp_path)
    constant = CONSTANTS["FlexGen.copies"]
    dropped = FittedConstant(constant=constant, value=constant.public, low=4e9, high=2e10, status="dropped")
    fitted = Fitted(constants=(dropped,), correlation=np.zeros((0, 0)), rows=())
    install_constants(replace(report, fitted=fitted, data="/tmp/mine.csv"), root)
    entry = yaml.safe_load((root / "hrm/data/systems/flexgen.yaml").read_text(encoding="utf-8"))["constants"]
    assert entry["FlexGen.copies"] == {
        "value": "11.6 GB/s",
        "source": "estimated",
        "note": "geometric middle of the public range: hrm fit dropped it, 90 % interval 4.00-20.0 GB/s by 17 rows of "
        "mine.csv, S1, S2 and S6",
    }
