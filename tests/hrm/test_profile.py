"""Hardware profiles: bundled numbers, composition, overrides, and every way a file can be wrong."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hrm import profile_files
from hrm.errors import InputError
from hrm.profile import HardwareProfile
from hrm.profile_files import (
    bundled_directory,
    check_profile,
    dump_profile,
    load_profile,
    profile_document,
    profile_names,
    with_overrides,
)

NAMES = [
    *("a100-80g", "a100x2-paper", "a10g", "colab-t4", "emulated-cpu", "h100", "h200", "kaggle-t4x2", "l4"),
    *("l4-figures", "l4-paper", "l40s", "rtx3090", "rtx4090", "t4", "t4-paper", "t4x2", "t4x4"),
]
GPUS = [name for name in NAMES if name != "emulated-cpu"]
PAPER = ("a100x2-paper", "l4-figures", "l4-paper", "t4-paper")


def _write(folder: Path, text: str, name: str = "my.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def _error(name_or_path: str) -> str:
    with pytest.raises(InputError) as caught:
        load_profile(name_or_path)
    return str(caught.value)


# What is bundled


def test_the_bundled_profiles_are_those_promised():
    assert list(profile_names()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_bundled_number_says_where_it_comes_from(name):
    profile = load_profile(name)
    assert check_profile(name) == []
    assert len(profile.quantities) >= 22
    for key, quantity in profile.quantities.items():
        assert quantity.note, key
        assert quantity.source != "user" or key == "gpu.count", key


T4 = {"gpu_flops_prefill": "fitted", "gpu_flops_decode": "fitted", "gpu_bandwidth": "measured", "gpu_overlap": "fitted"}
TWO_OR_FOUR_T4 = {**T4, "link": "fitted"}
CALIBRATED = {
    "t4": T4,
    "colab-t4": T4,
    "kaggle-t4x2": T4,
    "t4x2": TWO_OR_FOUR_T4,
    "t4x4": TWO_OR_FOUR_T4,
    "l4": {**T4, "gpu_bandwidth": "published", "cpu_attention": "published"},
}
"""Efficiencies of a profile and where each comes from; every other profile works from peaks."""


@pytest.mark.parametrize("name", GPUS)
def test_profiles_with_a_t4_or_an_l4_are_calibrated_and_all_others_work_from_peaks(name):
    profile = load_profile(name)
    found = {
        key.removeprefix("efficiency."): quantity.source
        for key, quantity in profile.quantities.items()
        if key.startswith("efficiency.")
    }
    assert found == CALIBRATED.get(name, {})
    default = dataclasses.fields(profile.efficiency)
    assert all(getattr(profile.efficiency, f.name) == f.default for f in default if f.name not in found)
    assert all(getattr(profile.efficiency, f.name) < 1 for f in default if f.name in found)


@pytest.mark.parametrize("name", GPUS)
def test_prefill_and_decode_share_the_fitted_share_of_the_gpu_peak(name):
    shares = load_profile(name).efficiency
    assert shares.gpu_flops_prefill == shares.gpu_flops_decode


@pytest.mark.parametrize("name", NAMES)
def test_bundled_profiles_have_a_disk_unless_the_paper_has_none(name):
    profile = load_profile(name)
    assert (profile.disk is None) == (name in PAPER)
    assert profile.gpu.count == {"t4x2": 2, "kaggle-t4x2": 2, "a100x2-paper": 2, "t4x4": 4}.get(name, 1)


def test_only_the_emulated_profile_has_no_gpu_and_it_says_so():
    assert [name for name in NAMES if load_profile(name).gpu.host_cores] == ["emulated-cpu"]
    profile = load_profile("emulated-cpu")
    assert profile.title.startswith("No GPU: emulated on 2 cores")
    assert "There is no GPU here" in profile.description
    assert profile.gpu.name.startswith("emulated on a core of ")
    assert (profile.gpu.host_cores, profile.cpu.cores) == (1, 1)
    assert {quantity.source for quantity in profile.quantities.values()} == {"measured", "estimated"}


def test_the_t4_profile_has_its_numbers():
    t4 = load_profile("t4")
    assert t4.gpu.usable_memory_bytes == 14.74 * 2**30
    assert t4.gpu.memory_bytes == 16 * 2**30
    assert t4.gpu.context_bytes == 0.45 * 2**30
    assert t4.gpu.bandwidth_bytes_per_s == 320e9
    assert t4.gpu.peak_flops_per_s == {"fp16": 65e12, "int8": 130e12, "fp32": 8.1e12}
    assert t4.gpu.dtypes == ("fp16", "int8", "fp32")
    assert t4.cpu.memory_bytes == 184.29 * 2**30
    assert t4.cpu.cores == 24
    assert t4.cpu.bandwidth_bytes_per_s == 96e9
    assert t4.cpu.peak_flops_per_s == {"fp32": 1.77e12}
    assert t4.cpu.lockable_bytes is None
    assert t4.disk is not None
    assert (t4.disk.size_bytes, t4.disk.read_bytes_per_s, t4.disk.write_bytes_per_s) == (1.5e12, 2.95e9, 1.64e9)
    assert t4.link.host_to_device.pinned_bytes_per_s == 12.2e9
    assert t4.link.device_to_host.pinned_bytes_per_s == 13.15e9
    assert t4.link.host_to_device.with_opposite_bytes_per_s == pytest.approx(12.2e9 * 11.5 / 12.4, rel=1e-3)
    assert t4.link.device_to_host.with_opposite_bytes_per_s == pytest.approx(13.15e9 * 11.33 / 13.2, rel=1e-3)
    assert t4.link.copy_latency_s == pytest.approx(3e-6, rel=1e-12)
    assert (t4.staging_bytes_per_s, t4.pinning_bytes_per_s) == (8e9, 1.8e9)
    assert t4.gpu_link_bytes_per_s is None
    assert (t4.name, t4.origin) == ("t4", "t4.yaml")
    assert t4.quantities["gpu.usable_memory"].text == "14.74 GiB"


@pytest.mark.parametrize(
    ("name", "gpu_memory", "gpu_bandwidth", "peak", "cpu_peak", "cpu_bandwidth"),
    [("l4-paper", 24, 285, 104e12, 1.6e12, 76), ("t4-paper", 15, 300, 65e12, 0.8e12, 100)],
)
def test_paper_profiles_have_the_constants_of_the_authors_planner(
    name, gpu_memory, gpu_bandwidth, peak, cpu_peak, cpu_bandwidth
):
    profile = load_profile(name)
    assert profile.gpu.memory_bytes == profile.gpu.usable_memory_bytes == gpu_memory * 2**30
    assert profile.gpu.context_bytes == profile.cpu.reserved_bytes == 0
    assert profile.gpu.bandwidth_bytes_per_s == gpu_bandwidth * 2**30
    assert profile.gpu.peak("fp16") == peak
    assert profile.cpu.peak("fp16") == profile.cpu.peak("fp32") == cpu_peak
    assert profile.cpu.bandwidth_bytes_per_s == cpu_bandwidth * 2**30
    assert profile.cpu.memory_bytes == 197880360960
    for direction in (profile.link.host_to_device, profile.link.device_to_host):
        assert direction.pinned_bytes_per_s == direction.with_opposite_bytes_per_s == 16 * 2**30
    assert profile.link.copy_latency_s == profile.launch_latency_s == 0
    assert profile.quantities["gpu.bandwidth"].source == "published"


def test_the_figures_profile_has_the_case_study_and_admits_the_sparse_peak():
    profile = load_profile("l4-figures")
    assert profile.gpu.peak("fp16") == 242e12
    assert "SPARSE" in profile.quantities["gpu.peak.fp16"].note
    assert profile.gpu.bandwidth_bytes_per_s == 300e9
    assert profile.cpu.bandwidth_bytes_per_s == 100e9
    assert profile.cpu.peak("fp16") == 1.3e12
    assert profile.link.host_to_device.pinned_bytes_per_s == 16e9


def test_the_two_a100_of_section_6_3_add_up_to_the_totals_of_the_script():
    profile = load_profile("a100x2-paper")
    gpu = profile.gpu
    totals = [gpu.count * x for x in (gpu.usable_memory_bytes, gpu.bandwidth_bytes_per_s, gpu.peak("fp16"))]
    assert totals == [160e9, 4000e9, 600e12]
    assert profile.host_totals.host_to_device_bytes_per_s == profile.link.host_to_device.pinned_bytes_per_s == 100e9
    assert (profile.cpu.memory_bytes, profile.cpu.bandwidth_bytes_per_s) == (200e9, 100e9)
    assert profile.cpu.peak("fp32") == 1.6e12


@pytest.mark.parametrize(
    ("name", "fp16"),
    [
        ("l4", 121e12),
        ("a10g", 70e12),
        ("rtx3090", 71e12),
        ("rtx4090", 165.2e12),
        ("l40s", 362e12),
        ("a100-80g", 312e12),
        ("h100", 989e12),
        ("h200", 989e12),
    ],
)
def test_peaks_are_dense_with_fp32_accumulate(name, fp16):
    gpu = load_profile(name).gpu
    assert gpu.peak("fp16") == gpu.peak("bf16") == fp16
    assert "bf16" in gpu.dtypes


@pytest.mark.parametrize("name", [name for name in NAMES if "t4" in name])
def test_no_t4_computes_bf16_and_the_error_lists_what_it_has(name):
    gpu = load_profile(name).gpu
    assert "bf16" not in gpu.dtypes
    with pytest.raises(InputError, match=r"no bf16 peak \(it has fp16, (int8, )?fp32\)"):
        gpu.peak("bf16")


def test_more_gpus_on_one_host_move_more_but_less_than_in_proportion():
    one, two, four = (load_profile(name) for name in ("t4", "t4x2", "t4x4"))
    link = one.link.host_to_device.pinned_bytes_per_s
    assert one.host_totals.host_to_device_bytes_per_s is None
    assert link < two.host_totals.host_to_device_bytes_per_s < 2 * link
    assert two.host_totals.host_to_device_bytes_per_s < four.host_totals.host_to_device_bytes_per_s < 4 * link
    assert two.cpu == four.cpu
    assert (two.cpu.memory_bytes, two.cpu.cores) == (416e9, 32)
    assert dataclasses.replace(two.gpu, count=1) == dataclasses.replace(four.gpu, count=1) == one.gpu


# Finding


def test_a_file_wins_over_the_bundled_profile_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_profile("t4.yaml") == load_profile("t4")
    _write(tmp_path, "gpu: l4\nhost: g2\nlink: gen3-x16\n", "t4.yaml")
    assert load_profile("t4.yaml").gpu.name == "NVIDIA L4"
    assert load_profile("t4").gpu.name == "NVIDIA T4"


def test_an_unknown_name_suggests_the_nearest():
    assert _error("rtx490") == (
        "there is no file and no bundled hardware profile of the name 'rtx490' (did you mean 'rtx4090'?)"
    )


def test_profiles_are_found_inside_an_installed_wheel(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "hrm"
    shutil.copytree(bundled_directory(), package / "data" / "hardware_profiles")
    monkeypatch.setattr(profile_files, "__file__", str(package / "profile_files.py"))
    assert bundled_directory() == (package / "data" / "hardware_profiles").resolve()
    assert load_profile("t4").gpu.count == 1


# Composing and overriding


def test_a_profile_overrides_its_components_and_finds_those_next_to_it(tmp_path):
    (tmp_path / "components" / "hosts").mkdir(parents=True)
    text = yaml.safe_dump(
        {"cpu": {"memory": "64 GB", "bandwidth": "50 GB/s", "cores": 8, "peak": {"fp32": "1 TFLOP/s"}}}
    )
    _write(
        tmp_path / "components" / "hosts",
        text + "staging: 7 GB/s\nefficiency: {link: 0.5, staging: 0.25}\n",
        "box.yaml",
    )
    path = _write(
        tmp_path,
        "gpu: {component: t4, bandwidth: 250 GB/s}\nhost: box\nlink: gen3-x16\nefficiency: {link: 90 %}\n",
    )
    profile = load_profile(path)
    assert profile.gpu.bandwidth_bytes_per_s == 250e9
    assert profile.quantities["gpu.bandwidth"].source == "user"
    assert profile.gpu.peak("fp16") == 65e12
    assert (profile.cpu.memory_bytes, profile.staging_bytes_per_s) == (64e9, 7e9)
    assert (profile.efficiency.link, profile.efficiency.staging) == (0.9, 0.25)
    assert profile.disk is None
    assert profile.pinning_bytes_per_s == 1.8e9


def test_a_profile_can_take_the_hosts_disk_away(tmp_path):
    assert load_profile(_write(tmp_path, "gpu: t4\nhost: n1-48\nlink: gen3-x16\ndisk: null\n")).disk is None


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_written_out_is_self_contained_and_reads_back_equal(name, tmp_path):
    profile = load_profile(name)
    text = dump_profile(profile)
    assert "component" not in profile_document(profile)["gpu"]
    again = load_profile(_write(tmp_path, text, f"{name}.yaml"))
    assert dataclasses.replace(again, origin=profile.origin) == profile


def test_an_override_replaces_one_quantity_and_is_recorded():
    t4 = load_profile("t4")
    more = with_overrides(t4, {"cpu.memory": "416 GB", "gpu.count": 2})
    assert (more.cpu.memory_bytes, more.gpu.count) == (416e9, 2)
    assert more.quantities["cpu.memory"].text == "416 GB"
    assert more.quantities["cpu.memory"].source == "user"
    assert "184.29 GiB" in more.quantities["cpu.memory"].note
    back = dataclasses.replace(more, cpu=t4.cpu, gpu=t4.gpu, quantities=t4.quantities)
    assert back == t4


def test_shares_of_the_pinned_rate_follow_an_override_of_it():
    link = with_overrides(load_profile("t4"), {"link.host_to_device.pinned": "100 GB/s"}).link
    assert link.host_to_device.with_opposite_bytes_per_s == pytest.approx(92.7e9)
    assert link.host_to_device.pageable_bytes_per_s == pytest.approx(48e9)
    assert link.device_to_host == load_profile("t4").link.device_to_host


def test_the_disk_can_be_overridden_away_and_given_to_a_profile_without_one():
    assert with_overrides(load_profile("t4"), {"disk": "none"}).disk is None
    disk = {"disk.size": "1 TB", "disk.read": "3 GB/s", "disk.write": "1 GB/s"}
    added = with_overrides(load_profile("l4-paper"), disk).disk
    assert added is not None
    assert (added.size_bytes, added.read_bytes_per_s, added.write_bytes_per_s) == (1e12, 3e9, 1e9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"cpu.memry": "416 GB"}, "t4: override: unknown key 'cpu.memry' (did you mean 'cpu.memory'?)"),
        ({"cpu.memory": "416"}, "override: cpu.memory: '416' has no unit (try '416 GB' or '416 GiB')"),
        ({"cpu.memory": "none"}, "t4: override: cpu.memory cannot be none"),
        ({"cpu.memory": [1]}, "override: cpu.memory: list is not a size (try e.g. '16 GB')"),
        ({"disk": "1 TB"}, "override: disk: '1 TB' is not accepted (none, or set disk.size etc.)"),
    ],
)
def test_a_wrong_override_is_named(overrides, message):
    with pytest.raises(InputError) as caught:
        with_overrides(load_profile("t4"), overrides)
    assert str(caught.value) == message


def test_an_incomplete_disk_is_an_error():
    with pytest.raises(InputError, match=r"disk\.read: is missing"):
        with_overrides(load_profile("l4-paper"), {"disk.size": "1 TB"})


# Wrong files


ONE_MAPPING = " (a profile is one YAML mapping, each key once)"
T4 = "gpu: t4\nhost: n1-48\nlink: gen3-x16\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (T4 + "titel: x\n", "my.yaml: unknown key 'titel' (did you mean 'title'?)"),
        (
            "gpu: {component: t4, bandwith: 320 GB/s}\nhost: n1-48\nlink: gen3-x16\n",
            "my.yaml: gpu: unknown key 'bandwith' (did you mean 'bandwidth'?)",
        ),
        (
            "gpu: {component: t4, memory: 16 GBs}\nhost: n1-48\nlink: gen3-x16\n",
            "my.yaml: gpu.memory: '16 GBs' is not a size (try '16 GB' or '16 GiB')",
        ),
        (T4 + "staging: 8\n", "my.yaml: staging: '8' has no unit (try '8 GB/s' or '8 GiB/s')"),
        (T4 + "staging: .nan\n", "my.yaml: staging: 'nan' is not finite (try e.g. '300 GB/s')"),
        (T4 + "staging: .inf\n", "my.yaml: staging: 'inf' is not finite (try e.g. '300 GB/s')"),
        (T4 + "staging: -8 GB/s\n", "my.yaml: staging: '-8 GB/s' is negative (accepted: between 1 kB/s and 1 PB/s)"),
        (
            T4 + "cpu: {memory: 5000000 TB}\n",
            "my.yaml: cpu.memory: '5000000 TB' is out of range (accepted: between 1 B and 1 EB)",
        ),
        (T4 + "cpu: {memory: 0 GB}\n", "my.yaml: cpu.memory: '0 GB' is zero (e.g. '16 GB')"),
        (
            T4 + "staging: true\n",
            "my.yaml: staging: yes/no is not accepted (accepted: a text, a number, null, a mapping)",
        ),
        (T4 + "staging: null\n", "my.yaml: staging: null is not accepted (e.g. '300 GB/s')"),
        (
            T4 + "staging: {value: 8 GB/s, source: guessed}\n",
            "my.yaml: staging.source: 'guessed' is not accepted "
            "(accepted: datasheet, measured, fitted, estimated, published, user)",
        ),
        (
            T4 + "staging: {source: measured}\n",
            'my.yaml: staging: there is no value (e.g. {value: "300 GB/s", source: datasheet, note: "..."})',
        ),
        (T4 + "efficiency: {link: 0}\n", "my.yaml: efficiency.link: '0' is zero (e.g. '0.8')"),
        (
            T4 + "efficiency: {link: 1.2}\n",
            "my.yaml: efficiency.link: '1.2' is out of range (accepted: between 0 and 1, or between 0 % and 100 %)",
        ),
        (
            "gpu: {component: t4, dtypes: [fp16, bf16]}\nhost: n1-48\nlink: gen3-x16\n",
            "my.yaml: gpu.dtypes: 'bf16' has no peak (give gpu.peak.bf16, or leave bf16 out; peaks: fp16, int8, fp32)",
        ),
        (
            "gpu: {component: t4, memory: 8 GiB}\nhost: n1-48\nlink: gen3-x16\n",
            "components/gpus/t4.yaml: gpu.usable_memory: '14.74 GiB' is more than gpu.memory '8 GiB' "
            "(at most gpu.memory)",
        ),
        (
            "gpu: t44\nhost: n1-48\nlink: gen3-x16\n",
            "my.yaml: gpu: there is no gpu component 't44' (did you mean 't4'?)",
        ),
        ("gpu: t4\ngpu: l4\n", "my.yaml: the key 'gpu' appears twice in line 2, column 1" + ONE_MAPPING),
        ("1: x\n", "my.yaml: the key '1' is not a text (quote it) in line 1, column 1" + ONE_MAPPING),
        ("", "my.yaml: is empty (start from the output of: hrm hardware show t4)"),
        ("- t4\n", "my.yaml: holds a list (a profile is a mapping, gpu: ...)"),
        ("--- {}\n--- {}\n", "my.yaml: but found another document in line 2, column 1" + ONE_MAPPING),
    ],
)
def test_a_wrong_file_is_named_with_key_value_and_what_is_accepted(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, text)
    assert _error("my.yaml") == message
    assert check_profile("my.yaml") == [message]


def test_every_problem_of_a_file_is_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write(
        tmp_path,
        "gpu: {component: t4, bandwith: 1 GB/s, memory: 16 GBs}\nhost: n1-49\nlink: gen3-x16\n"
        "staging: -1 GB/s\nfoo: 1\n",
    )
    assert check_profile("my.yaml") == [
        "my.yaml: gpu: unknown key 'bandwith' (did you mean 'bandwidth'?)",
        "my.yaml: unknown key 'foo' (known: cpu, description, disk, efficiency, gpu, gpu_link, host, host_totals, "
        "launch_latency, link, pinning, staging, title)",
        "my.yaml: host: there is no host component 'n1-49' (did you mean 'n1-48'?)",
        "my.yaml: gpu.memory: '16 GBs' is not a size (try '16 GB' or '16 GiB')",
        "my.yaml: staging: '-1 GB/s' is negative (accepted: between 1 kB/s and 1 PB/s)",
    ]
    assert "4 more: hrm hardware check my.yaml" in _error("my.yaml")


def test_missing_keys_are_all_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, "gpu: t4\nlink: gen3-x16\n")
    assert [problem.split(" (")[0] for problem in check_profile("my.yaml")] == [
        f"my.yaml: {key}: is missing"
        for key in ("cpu.memory", "cpu.bandwidth", "cpu.peak.fp32", "cpu.cores", "staging")
    ]


def test_a_component_file_in_the_wrong_place_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, "gpu: {component: my.yaml}\nhost: n1-48\nlink: gen3-x16\n")
    assert (
        check_profile("my.yaml")[0] == "my.yaml (gpu component): unknown key 'host' (known: efficiency, gpu, gpu_link)"
    )


def test_folders_binary_files_and_huge_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01gpu")
    (tmp_path / "huge.yaml").write_bytes(b"#" * 1_000_001)
    assert _error("folder") == "folder: is a folder (give a YAML file)"
    assert _error("binary.yaml") == "binary.yaml: is not a text file (a hardware profile is YAML in UTF-8)"
    assert _error("huge.yaml") == "huge.yaml: has more than 1 MB (a hardware profile has a few kB)"
    for name in ("no\0name.yaml", "x" * 5000, "", "../../etc", "components"):
        assert check_profile(name)


@pytest.mark.parametrize(
    "text",
    [
        "gpu: !!int x\n",
        "gpu: !!python/object:os.system {}\n",
        "gpu: 2001-99-99\n",
        "gpu: !!timestamp x\n",
        "staging: " + "9" * 5000 + "\n",
        "gpu: " + "[" * 20000 + "\n",
        "gpu: &a {component: *a}\n",
        "gpu: &a [*a]\n",
        "? [1, 2]\n: 3\n",
        "<<: 3\n",
        "gpu: {<<: {component: t4}, count: 1\n",
        "gpu: !!set {t4}\n",
        "\t",
        "gpu: 'a\x00'",
    ],
)
def test_yaml_beyond_the_ordinary_is_an_input_error(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, text)
    assert "my.yaml" in _error("my.yaml")


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
    st.sampled_from(
        ["16 GB", "1e400 GB/s", "nan", "-3 us", "0 B", "300 %", "0 %", "5 TFLOP/s", "t4", "NaN GB", "100 %"]
    ),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["value", "source", "note", "component", "x"]), st.text(max_size=5), max_size=3),
)
DOCUMENTS = {name: yaml.safe_load((bundled_directory() / f"{name}.yaml").read_text()) for name in NAMES}
DOCUMENTS |= {f"{name}, written out": profile_document(load_profile(name)) for name in ("t4", "l4-paper")}


def _places(node: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(node, dict):
        return []
    return [p for key, child in node.items() for p in [(*path, key), *_places(child, (*path, key))]]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_profile_with_junk_in_it_loads_or_names_its_file(data, tmp_path):
    name = data.draw(st.sampled_from(sorted(DOCUMENTS)))
    document = yaml.safe_load(yaml.safe_dump(DOCUMENTS[name]))
    place = data.draw(st.sampled_from(_places(document)))
    node = document
    for step in place[:-1]:
        node = node[step]
    node[place[-1]] = data.draw(JUNK)
    path = _write(tmp_path, yaml.safe_dump(document, allow_unicode=True))
    problems = check_profile(path)
    try:
        profile = load_profile(path)
    except InputError as error:
        assert "my.yaml" in str(error) or "components/" in str(error)
        assert problems
        assert all("\n" not in problem for problem in problems)
    else:
        assert problems == []
        assert isinstance(profile, HardwareProfile)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 3000), noise=st.binary(max_size=6), name=st.sampled_from(["t4", "l4-paper"]))
def test_a_file_cut_and_scribbled_on_loads_or_names_its_file(cut, noise, name, tmp_path):
    content = (bundled_directory() / f"{name}.yaml").read_bytes()
    path = tmp_path / "my.yaml"
    path.write_bytes(content[:cut] + noise + content[cut + len(noise) :])
    try:
        load_profile(path)
    except InputError as error:
        assert "my.yaml" in str(error) or "components/" in str(error)
