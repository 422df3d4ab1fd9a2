"""The screen: every promised item is on it, in numbers that agree with the plan, and it fits one screen."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from command import AT_PEAKS, paper_plan, plan_of, screen_of

from hrm.pins import Pins
from hrm.plans import Plan
from hrm.report import _lane_name, _lanes_of, bottleneck_in_words, policy_lines, seconds_in_words
from hrm.workload import Workload, uniform_workload

GIB = 2**30


def line_of(screen: str, what: str) -> str:
    """The rest of the row that begins with `what`, wrapped lines joined."""
    lines = screen.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"{what}  "))
    row = [lines[start].removeprefix(what).strip()]
    for line in lines[start + 1 :]:
        if not line.startswith(" " * 16):
            break
        row.append(line.strip())
    return " ".join(row)


@pytest.fixture(scope="module")
def dbrx() -> Plan:
    return plan_of("t4", "dbrx")


@pytest.fixture(scope="module")
def screen(dbrx: Plan) -> str:
    return screen_of(dbrx)


@pytest.fixture(scope="module")
def at_peaks() -> str:
    """The same without calibration: prefill waits for GPU and link in turn, decode for the disk."""
    return screen_of(plan_of("t4", "dbrx", overrides=AT_PEAKS))


@pytest.fixture(scope="module")
def paper() -> str:
    return screen_of(paper_plan(micro_batch_size=324, num_micro_batches=14))


def test_the_screen_says_what_is_planned_on_what(screen: str) -> None:
    first, second = (line.rstrip() for line in screen.splitlines()[:2])
    assert first == "dbrx (131.6B parameters, 263.2 GB) on t4: One NVIDIA T4, 24-core Xeon host with 184 GiB"
    assert second == (
        "10,000 requests of mtbench: prompts of 76 tokens on average, 418 at most, unpadded; "
        "128 tokens generated for each"
    )


@pytest.mark.parametrize(
    ("workload", "line"),
    [
        (uniform_workload(77, 1, num_requests=1), "1 request: prompts of 77 tokens; 1 token generated for each"),
        (uniform_workload(1, 2, num_requests=2), "2 requests: prompts of 1 token; 2 tokens generated for each"),
        (
            Workload(name="mine", prompt_lengths=(10, 20), generation_length=4, num_requests=8, padded=True),
            "8 requests of mine: prompts padded to the longest, 20 tokens; 4 tokens generated for each",
        ),
    ],
)
def test_the_workload_is_said_in_a_sentence_with_the_right_plurals(workload: Workload, line: str) -> None:
    plan = plan_of("t4", "granite-3.1-1b-a400m", workload=workload)
    assert screen_of(plan).splitlines()[1] == line


def test_the_policy_is_given_in_words_and_symbols(dbrx: Plan, screen: str) -> None:
    policy = dbrx.policy
    rows = ("batch", "compute", "experts", "the rest", "KV cache", "formats")
    text = " ".join(line_of(screen, what) for what in rows)
    for part in (
        f"N = {policy.batch_size:,} requests",
        f"n_ub = {policy.num_micro_batches:,} micro-batch",
        f"mu = {policy.micro_batch_size:,}, {policy.micro_batch_token_budget:,} tokens",
        f"prefill {policy.prefill_micro_batch_size:,} at a time",
        f"attention on the {'GPU' if policy.attention_on_gpu else 'CPU'} (A_g = {int(policy.attention_on_gpu)})",
        f"experts on the {'GPU' if policy.ffn_on_gpu else 'CPU'} (F_g = {int(policy.ffn_on_gpu)})",
        f"schedule {policy.schedule}",
        f"{policy.weights_on_gpu:.2%} on the GPU (r_w = {policy.weights_on_gpu:.4g})",
        f"{policy.weights_on_disk:.2%} on disk",
        f"on the GPU (r_c = {policy.kv_on_gpu:.4g})",
        "weights bf16, KV cache fp16, arithmetic fp16",
    ):
        assert part in text, part


def test_one_of_something_is_singular() -> None:
    plan = plan_of("rtx4090", "llama-3.1-8b", requests=1)
    lines = dict(policy_lines(plan))
    assert lines["batch"].startswith("N = 1 request in n_ub = 1 micro-batch of up to mu = 1, ")
    assert " for 1 request in 1 batch, " in screen_of(plan)


def test_a_dense_model_has_no_experts_on_its_screen() -> None:
    screen = screen_of(plan_of("rtx4090", "llama-3.1-8b", requests=1))
    assert "expert" not in screen
    assert line_of(screen, "MLP") == "100% on the GPU (r_w = 1)"


def test_the_prediction_names_rates_seconds_and_the_bottleneck(dbrx: Plan, screen: str) -> None:
    prediction = dbrx.prediction
    assert line_of(screen, "throughput").startswith(f"{prediction.throughput_tokens_per_s:,.2f} token/s (end to end")
    batch = line_of(screen, "one batch")
    assert batch.startswith(f"prefill {prediction.prefill_s:,.0f} s (")
    assert f"decode {prediction.decode_s:,.0f} s (" in batch
    assert f"{prediction.decode_throughput_tokens_per_s:,.2f} token/s" in batch
    assert f"{seconds_in_words(prediction.layer_latency_s)} per layer and step" in batch
    completion = line_of(screen, "completion")
    assert completion.startswith(f"{prediction.completion_s:,.0f} s (")
    assert f"start-up (load and pin) of {seconds_in_words(prediction.startup_s)} included" in completion
    assert line_of(screen, "bottleneck") == bottleneck_in_words(dbrx) == "GPU, in decode"


def test_every_busy_resource_has_a_row_with_seconds_share_bytes_and_flops(dbrx: Plan, screen: str) -> None:
    step, layers = dbrx.prediction.decode, dbrx.scenario.model.n_layers
    rows = {
        "GPU": "gpu",
        "link, host to device": "host_to_device",
        "link, device to host": "device_to_host",
        "staging copy": "staging",
        "disk": "disk",
        "CPU memory": "cpu_memory",
    }
    for name, lane in rows.items():
        row = next(line for line in screen.splitlines() if re.match(rf"{name}\s+\d\.\d+\s+(<1|\d+)%", line))
        seconds, share, size, flops, prefill = row.removeprefix(name).split()[:5]
        assert float(seconds) == pytest.approx(step.lanes[lane] / layers, abs=5.1e-4)
        busy = step.lanes[lane] / step.seconds
        assert share == ("<1%" if busy < 5e-3 else f"{busy:.0%}")
        assert float(size.replace(",", "")) > 0
        assert (flops == "-") == (lane != "gpu")
        busy = dbrx.prediction.prefill.lanes[lane] / dbrx.prediction.prefill.seconds
        assert prefill == ("<1%" if 5e-4 <= busy < 5e-3 else f"{busy:.0%}")


@pytest.mark.parametrize(
    ("lane", "words", "rows"),
    [
        ("one_slot_gpu", "weight copies and GPU in turn, through one weight slot", {"host_to_device", "gpu"}),
        ("one_slot_reads_gpu", "disk reads of weights and GPU in turn, through one weight slot", {"disk", "gpu"}),
        ("one_slot_staging_cpu", "staging copies and CPU in turn, through one weight slot", {"staging", "cpu"}),
        (
            "ring_chain_then_staging",
            "attention (GPU, copies and CPU one after the other, as one micro-batch needs them), then experts through "
            "the ring (staging copy)",
            {"gpu", "cpu", "host_to_device", "device_to_host", "staging"},
        ),
    ],
)
def test_a_sum_of_lanes_is_named_by_what_takes_turns(lane: str, words: str, rows: set[str]) -> None:
    assert _lane_name(lane) == words
    assert set(_lanes_of(lane)) == rows


def binding(screen: str) -> dict[str, str]:
    return {found[1].strip(): found[2] for found in re.finditer(r"^([^\d\n]+)\d.*%[ ]+(\w+) *$", screen, re.MULTILINE)}


def test_the_rows_that_bind_say_which_phase(screen: str, at_peaks: str, paper: str) -> None:
    assert binding(screen) == {"GPU": "both"}
    assert binding(at_peaks) == {"GPU": "prefill", "link, host to device": "prefill", "disk": "decode"}
    rows = [line.rstrip() for line in paper.splitlines() if re.match(r"(GPU|CPU|link)\D+\d\.\d+ ", line)]
    assert [row.endswith("decode") for row in rows] == [False, False, True]


def test_memory_is_itemised_and_the_items_add_up_to_the_peak(dbrx: Plan, screen: str) -> None:
    for level, name in (("gpu", "GPU memory"), ("cpu", "CPU memory"), ("disk", "disk")):
        use = dbrx.prediction.memory[level]
        head, _, items = line_of(screen[screen.index("GPU memory ") :], name).partition(": ")
        assert head.startswith(f"{use.peak_bytes / GIB:,.2f} of {use.limit_bytes / GIB:,.2f} GiB")
        sizes = [float(item.rsplit(" ", 1)[1].replace(",", "")) for item in items.split(", ")]
        assert len(sizes) == sum(size >= 1 for size in use.terms.values())
        assert sum(sizes) == pytest.approx(use.peak_bytes / GIB, abs=0.006 * len(sizes))


def test_only_phases_are_named_as_the_time_of_a_peak(screen: str, paper: str) -> None:
    assert "always" not in screen + paper
    assert "GiB at the peak, in prefill: " in screen


def test_a_disk_that_is_not_used_is_not_itemised() -> None:
    screen = screen_of(plan_of("t4", "granite-3.1-1b-a400m", requests=8))
    assert line_of(screen, "disk") == "not used, 1,396.98 GiB there"


def test_turning_points_and_break_even_batch_are_named(dbrx: Plan, screen: str) -> None:
    points = dbrx.turning_points
    assert points is not None and points.break_even_tokens is not None
    text = line_of(screen, "turning points")
    assert f"P1 = {points.p1_flop_per_byte:.0f}, P2 = " in text
    assert "balance point" in text and text.endswith("FLOP/byte of the experts, theoretical intensity")
    assert f"on the CPU below {points.break_even_tokens:,} tokens a step" in line_of(screen, "break-even")


def test_what_one_more_of_each_resource_buys_is_named(dbrx: Plan, screen: str) -> None:
    text = line_of(screen, "one more")
    for what in ("1 GiB GPU memory", "1 GiB CPU memory", "1 GB/s link", "1 GB/s CPU memory bandwidth", "1 GB/s disk"):
        assert text.count(what) == 1
    gain = dbrx.marginal_values["disk_read_gb_per_s"]
    assert gain > 1
    assert f"1 GB/s disk +{gain:.3g} " in text


def test_alternatives_stand_beside_the_plan_with_their_options(dbrx: Plan, screen: str) -> None:
    instead = line_of(screen, "instead")
    for each in dbrx.alternatives:
        if each.throughput_tokens_per_s is not None:
            gain = each.throughput_tokens_per_s / dbrx.prediction.throughput_tokens_per_s
            assert f"{each.name}: {each.throughput_tokens_per_s:,.2f} token/s, {gain:.2f}x ({each.note})" in instead
        else:
            assert f"{each.name}: no, {each.note}" in instead
    assert "--weights-dtype int4" in instead and "--set cpu.memory='416 GB'" in instead


def test_trivial_plans_stand_beside_the_plan(screen: str) -> None:
    text = line_of(screen, "trivial plans")
    assert text.startswith("all in GPU memory: no, weights are 16.6x the GPU memory; CPU only: ")


def test_warnings_and_assumptions_are_on_the_screen(dbrx: Plan, screen: str) -> None:
    said = re.sub(r"\s+", " ", screen)
    assert dbrx.warnings and dbrx.notes
    for text in dbrx.warnings:
        assert f"! {text}" in said
    for text in dbrx.notes:
        assert f"- {text}" in said


def test_the_plan_fits_one_screen(screen: str, at_peaks: str, paper: str) -> None:
    """The longest is one that uses GPU, CPU and disk in decode, with the note on where its rates come from."""
    assert len(screen.splitlines()) <= 53
    assert len(at_peaks.splitlines()) <= 50
    assert len(paper.splitlines()) <= 45
    assert max(len(line.rstrip()) for line in (screen + at_peaks + paper).splitlines()) <= 118


@pytest.mark.parametrize("width", [80, 200])
def test_no_line_is_wider_than_the_terminal_and_no_head_is_cut(dbrx: Plan, width: int) -> None:
    text = screen_of(dbrx, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    assert "s/layer  busy  GB/layer  GFLOP/layer" in text


def test_what_the_papers_model_leaves_out_is_left_out_of_its_screen(paper: str) -> None:
    assert "decode only, as the paper's objective" in line_of(paper, "throughput")
    assert line_of(paper, "one batch") == "decode 154 s (2.56 min): 944.66 token/s, 155 ms per layer and step"
    assert line_of(paper, "bottleneck") == "link, host to device, in decode"
    assert "embedding and lm_head are not in this model" in line_of(paper, "the rest")
    assert "nan" not in paper and "start-up" not in paper and "one more" not in paper
    assert paper.splitlines()[1] == "requests: prompts of 77 tokens; 32 tokens generated for each"


def test_a_single_token_has_no_decode() -> None:
    plan = plan_of("t4", "granite-3.1-1b-a400m", workload=uniform_workload(77, 1, num_requests=1))
    assert line_of(screen_of(plan), "one batch").endswith("no decode, as prefill gives the only token")


def test_no_interval_is_claimed_where_the_accelerator_is_emulated() -> None:
    """The published runs were on T4s and L4s: their errors say nothing of two cores of a CPU."""
    plan = plan_of("emulated-cpu", "granite-3.1-1b-a400m", workload=uniform_workload(77, 4, num_requests=8))
    assert plan.interval is None
    assert line_of(screen_of(plan), "80 % interval").startswith("not known where the accelerator is emulated")


def test_a_plan_without_the_gpu_says_so() -> None:
    plan = plan_of("t4", "mixtral-8x7b", requests=1, overrides=(("gpu.usable_memory", "0.6 GB"),))
    lines = dict(policy_lines(plan))
    assert plan.policy.everything_on_cpu
    assert lines["compute"] == "everything on the CPU (A_g = 0, F_g = 0); the GPU is not used"
    assert "! the CPU alone is faster than any use of this GPU here." in screen_of(plan)
    assert line_of(screen_of(plan), "one more").startswith("not priced")


def test_names_with_brackets_are_printed_as_they_are() -> None:
    plan = plan_of("t4", "granite-3.1-1b-a400m", requests=8)
    odd = "[bold]mine[/] [/red] [link=x]"
    scenario = plan.scenario
    changed = replace(
        plan,
        scenario=replace(
            scenario,
            profile=replace(scenario.profile, title=odd, name=odd),
            workload=replace(scenario.workload, name=odd),
        ),
        warnings=(odd,),
        notes=(odd,),
    )
    assert screen_of(changed, 200).count(odd) == 5


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (4.2e-6, "4.2 us"),
        (0.155, "155 ms"),
        (3.514, "3.51 s"),
        (66.43, "66.4 s"),
        (834.0, "834 s (13.9 min)"),
        (12729.0, "12,729 s (3.54 h)"),
        (864000.0, "864,000 s (10.0 days)"),
        (float("nan"), "not in this model"),
    ],
)
def test_seconds_are_said_as_a_person_would(seconds: float, words: str) -> None:
    assert seconds_in_words(seconds) == words


def test_no_share_is_rounded_to_none_or_all_of_it() -> None:
    plan = plan_of("t4", "mixtral-8x7b", requests=16, pins=Pins(weights_on_gpu=0.00002))
    assert 0 < plan.policy.weights_on_gpu < 1e-4
    lines = dict(policy_lines(plan))
    assert lines["experts"].startswith("under 0.01% on the GPU (r_w = ")
    assert "over 99.99% in CPU memory" in lines["experts"]
