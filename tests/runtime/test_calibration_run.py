"""A whole calibration at tiny sizes: the profile it writes, where every number comes from, what the command says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import refused

from hrm.calibrated_profile import calibrated_path
from hrm.errors import InputError
from hrm.model_files import load_model
from hrm.planning import make_plan
from hrm.profile import HardwareProfile
from hrm.profile_files import check_profile, dump_profile, load_profile
from hrm.rates import derive_rates
from hrm.scenario import Scenario, choose_formats
from hrm.workload import uniform_workload
from runtime.calibration import command as measuring
from runtime.calibration.command import calibrate
from runtime.calibration.sizes import Sizes

TINY = Sizes(
    hidden=128,
    ffn=192,
    experts=4,
    top_k=2,
    heads=4,
    groups=2,
    head_dim=32,
    decode_tokens=(2, 8, 32, 64),
    prefill=((2, 16), (2, 48)),
    attention=((2, 32), (4, 64)),
    pool_bytes=2**20,
    copies=(2**16, 2**18),
    span_bytes=2**20,
    products=((16, 128, 192), (64, 192, 128)),
    staging_threads=(1, 2),
    disk_bytes=2**20,
    disk_piece=2**19,
    pin_bytes=2**20,
    repeats=3,
    least_s=0.0002,
    most_s=0.02,
)

Calibrated = tuple[dict[str, Any], Path, Path]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """Document, file and folder of one tiny calibration."""
    folder = tmp_path_factory.mktemp("calibration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        told: list[str] = []
        document = calibrate(folder / "mine.yaml", device="cpu", disk_dir=folder, sizes=TINY, on_progress=told.append)
        assert "cpu read" in told and "disk read" in told
        assert document["files"] == [str(folder / "mine.yaml"), str(calibrated_path())]
    return document, folder / "mine.yaml", folder


@pytest.fixture(scope="module")
def profile(calibrated: Calibrated) -> HardwareProfile:
    return load_profile(calibrated[1])


def test_the_file_is_a_profile_and_stays_the_same_through_the_loader(
    calibrated: Calibrated, profile: HardwareProfile, tmp_path: Path
) -> None:
    assert check_profile(str(calibrated[1])) == []
    again = tmp_path / "mine.yaml"
    again.write_text(dump_profile(profile))
    assert load_profile(again).quantities == profile.quantities


def test_auto_finds_it(calibrated: Calibrated, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(calibrated[2] / "data"))
    assert load_profile("auto").quantities == profile.quantities
    assert load_profile("auto").name == "this-machine"


def test_every_number_comes_from_a_measurement_the_system_or_a_named_default(
    calibrated: Calibrated, profile: HardwareProfile
) -> None:
    document = calibrated[0]
    measured = {each["name"] for each in document["measurements"]}
    assert set(document["quantities"]) == set(yaml_quantities(calibrated[1]))
    for key, quantity in document["quantities"].items():
        names = set(quantity["measurements"])
        assert names <= measured, key
        if not names:
            assert quantity["note"].startswith(("read from ", "default: ")), key
        assert (quantity["source"] == "estimated") == quantity["note"].startswith("default: "), key
    defaulted = set(profile.quantities) - set(document["quantities"])
    assert defaulted == set()


def yaml_quantities(path: Path) -> dict[str, Any]:
    """Quantities of a file by dotted key."""
    found: dict[str, Any] = {}

    def walk(section: dict[str, Any], prefix: str) -> None:
        for key, value in section.items():
            if isinstance(value, dict) and "value" in value:
                found[f"{prefix}{key}"] = value
            elif isinstance(value, dict):
                walk(value, f"{prefix}{key}.")

    walk(yaml.safe_load(path.read_text()), "")
    return found


def test_base_rates_are_the_medians_that_were_measured(calibrated: Calibrated, profile: HardwareProfile) -> None:
    medians = {each["name"]: each["median"] for each in calibrated[0]["measurements"]}
    for key, name in {
        "cpu.bandwidth": "cpu read",
        "link.host_to_device.pinned": "copy host_to_device pinned 0.25 MiB",
        "staging": "staging 1 thread",
        "disk.read": "disk read",
        "launch_latency": "gpu launch",
    }.items():
        assert profile.quantities[key].value == pytest.approx(medians[name], rel=1e-3), key
    assert profile.quantities["link.copy_latency"].value == pytest.approx(
        medians["copy of 4 KiB"] + medians["hand-over between threads"], rel=1e-3
    )


def test_the_cost_model_prices_with_the_measured_rates_and_discounts_none_twice(
    calibrated: Calibrated, profile: HardwareProfile
) -> None:
    medians = {each["name"]: each["median"] for each in calibrated[0]["measurements"]}
    spec = load_model("olmoe-1b-7b")
    rates = derive_rates(profile, choose_formats(profile, spec))
    attention = [value for name, value in medians.items() if name.startswith("cpu attention") and " while " not in name]
    mean = (attention[0] * attention[1]) ** 0.5
    assert len(attention) == 2
    wanted = min(mean, medians["cpu read"])
    assert rates.cpu_attention_bytes_per_s == pytest.approx(wanted, rel=2e-3)
    assert rates.h2d_bytes_per_s == pytest.approx(medians["copy host_to_device pinned 0.25 MiB"], rel=1e-3)
    assert rates.staging_bytes_per_s == pytest.approx(medians["staging 1 thread"], rel=1e-3)
    assert rates.cpu_bytes_per_s == pytest.approx(medians["cpu read"], rel=1e-3)
    products = [value for name, value in medians.items() if name.startswith("gpu product bf16")]
    assert rates.gpu_flops_per_s["decode"] <= max(products) * 1.001
    assert rates.gpu_bytes_per_s <= medians["gpu memory"] * 1.001


def test_the_emulated_accelerator_takes_a_core_and_memory_from_the_cpu(
    calibrated: Calibrated, profile: HardwareProfile
) -> None:
    machine = calibrated[0]["machine"]
    assert calibrated[0]["emulated"]
    assert profile.gpu.host_cores + profile.cpu.cores == max(machine["cores"], 1)
    assert profile.gpu.memory_bytes + profile.cpu.memory_bytes <= machine["memory_bytes"]
    assert profile.gpu.memory_bytes + profile.cpu.memory_bytes >= machine["memory_bytes"] - 2**25
    assert profile.gpu.context_bytes == 0


def test_what_was_not_measured_is_said_with_its_reason(calibrated: Calibrated) -> None:
    assert calibrated[0]["not_measured"] == {
        "PCIe generation and width": "there is no GPU: the accelerator is emulated",
        "page-locking": "nothing is page-locked where the accelerator is emulated",
        "all-reduce": "there is no GPU",
    }


def test_every_measurement_stands_in_the_file_with_its_spread_and_repeats(calibrated: Calibrated) -> None:
    comments = [line[1:].strip() for line in calibrated[1].read_text().splitlines() if line.startswith("#")]
    for each in calibrated[0]["measurements"]:
        pattern = re.compile(re.escape(each["name"]) + r": [\d.,e+-]+ (GB/s|GFLOP/s|us), [\d.]+ %, \d+")
        assert [line for line in comments if pattern.fullmatch(line)], each["name"]


def test_copies_and_attention_are_measured_beside_each_other(calibrated: Calibrated) -> None:
    names = {each["name"] for each in calibrated[0]["measurements"]}
    for way in ("host_to_device", "device_to_host"):
        for host in ("pinned", "pageable"):
            assert f"copy {way} {host} 0.0625 MiB" in names
            assert f"copy {way} {host} 0.25 MiB while the CPU attends" in names
        assert f"copy {way} pinned 0.25 MiB while the other direction copies and the CPU attends" in names
    assert "cpu attention bf16 4 requests of 64 while copies to the GPU run" in names
    assert "cpu attention bf16 4 requests of 64 while the other lane computes" in names


def test_a_plan_can_be_made_with_it(profile: HardwareProfile) -> None:
    spec = load_model("olmoe-1b-7b")
    work = uniform_workload(32, 4, num_requests=8)
    scenario = Scenario(profile=profile, model=spec, workload=work, formats=choose_formats(profile, spec))
    found = make_plan(scenario, hardware={}, model={})
    assert found.prediction.throughput_tokens_per_s > 0


def test_the_screen_has_every_quantity_and_the_document_is_json(calibrated: Calibrated) -> None:
    import io

    from rich.console import Console

    from hrm.calibration_report import LEFT_OUT, print_calibration

    document = json.loads(json.dumps(calibrated[0], allow_nan=False))
    file = io.StringIO()
    print_calibration(document, Console(file=file, width=118))
    for key in set(document["quantities"]) - set(LEFT_OUT):
        assert key in file.getvalue()
    for line in document["looks_wrong"]:
        assert line[:40] in file.getvalue()


def test_nothing_that_lays_out_or_runs_a_task_graph_is_imported() -> None:
    """Predictions are to be judged by runs that the profile has not seen."""
    sources = "".join(path.read_text() for path in Path(measuring.__file__).parent.glob("*.py"))
    assert "from runtime.calibration.layer_work " in sources
    for module in ("executor", "session", "run_state", "kernels", "layer_check"):
        assert f"runtime.{module} " not in sources, module
    for module in ("schedules", "launcher", "layout"):
        assert f"hrm.{module} " not in sources, module


def test_what_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its folder does not exist"):
        calibrate(tmp_path / "missing" / "mine.yaml", sizes=TINY)
    assert "its folder does not exist" in refused("calibrate", "-o", str(tmp_path / "missing" / "mine.yaml"))


def test_a_device_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "no device" in refused("calibrate", "--device", "tpu", "-o", str(tmp_path / "mine.yaml"))
