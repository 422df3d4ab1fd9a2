"""Number formats of a run and the byte counts of a scenario."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import FP16, tiny_model, tiny_profile, tiny_scenario

from hrm.cost import Formats
from hrm.errors import InputError
from hrm.model_files import load_model, model_names
from hrm.profile_files import load_profile
from hrm.scenario import choose_formats, kv_capacity_bytes, kv_replicas, measure_sizes, worst_prompt_tokens


def test_sizes_of_the_tiny_scenario() -> None:
    sizes = measure_sizes(tiny_scenario())
    assert (sizes.expert_bytes, sizes.layer_expert_bytes, sizes.streamed_bytes) == (192, 768, 1536)
    assert sizes.dense_bytes == 2 * 480 + 16  # per layer QKV 256, output 128, router 64, norms 32; final norm once
    assert sizes.largest_dense_layer_bytes == 480
    assert (sizes.embedding_bytes, sizes.lm_head_bytes) == (256, 256)
    assert sizes.weight_bytes == 1536 + 976 + 512
    assert sizes.kv_bytes_per_request == 10 * 32
    assert sizes.kv_read_bytes_per_request == 8 * 32  # mean context of steps 1..3: 7, 8, 9
    assert sizes.kv_prompt_bytes_per_request == 6 * 32
    assert sizes.kv_new_bytes_per_token == 32
    assert sizes.prompt_pairs_by_window == {None: 18.0}
    assert sizes.decode_steps == 3


def test_tied_head_is_stored_once_and_still_read() -> None:
    sizes = measure_sizes(tiny_scenario(model=tiny_model(tie_embeddings=True)))
    assert sizes.lm_head_bytes == 256
    assert sizes.weight_bytes == 1536 + 976 + 256


@pytest.mark.parametrize("name", model_names())
def test_parts_add_up_to_all_weights(name: str) -> None:
    model = load_model(name)
    formats = choose_formats(load_profile("t4"), model)
    sizes = measure_sizes(tiny_scenario(model=model, formats=formats))
    assert sizes.weight_bytes == model.weight_bytes()


def test_sliding_window_limits_what_is_kept_read_and_paired() -> None:
    sizes = measure_sizes(tiny_scenario(model=tiny_model(layer_windows=(4, None))))
    assert sizes.kv_bytes_per_request == (4 + 10) * 16
    assert sizes.kv_read_bytes_per_request == (4 + 8) * 16
    assert sizes.prompt_pairs_by_window == {4: 6 * 4 - 4 * 4 / 2, None: 18.0}


def test_capacity_is_that_of_the_longest_window_of_requests() -> None:
    scenario = tiny_scenario(prompts=(1, 9, 9, 1), generated=1)
    sizes = measure_sizes(scenario)
    assert worst_prompt_tokens(scenario, 2.0) == 18
    assert kv_capacity_bytes(scenario, sizes, 2.0) == (18 + 2) * 32


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=8).map(tuple)
windows = st.tuples(st.sampled_from([None, 1, 4, 16]), st.sampled_from([None, 2, 8]))


@given(lengths, windows, st.integers(1, 10), st.integers(1, 20))
def test_capacity_holds_any_consecutive_requests(
    prompts: tuple[int, ...], windows: tuple[int | None, int | None], generated: int, size: int
) -> None:
    model = tiny_model(layer_windows=windows)
    scenario = tiny_scenario(model=model, prompts=prompts, generated=generated, requests=50)
    capacity = kv_capacity_bytes(scenario, measure_sizes(scenario), float(size))
    stored = [model.kv_bytes_stored(prompt + generated, "fp16") for prompt in prompts]
    for start in range(len(prompts)):
        batch = itertools.islice(itertools.cycle(stored), start, start + size)
        assert sum(batch) <= capacity


@given(lengths, st.integers(1, 20))
def test_capacity_without_windows_is_exact(prompts: tuple[int, ...], size: int) -> None:
    scenario = tiny_scenario(prompts=prompts, requests=50)
    worst = max(sum(itertools.islice(itertools.cycle(prompts), start, start + size)) for start in range(len(prompts)))
    assert kv_capacity_bytes(scenario, measure_sizes(scenario), float(size)) == (worst + 4 * size) * 32


def test_padding_runs_every_prompt_at_the_longest() -> None:
    sizes = measure_sizes(tiny_scenario(prompts=(2, 6), padded=True))
    assert sizes.prompt_tokens == 6
    assert sizes.kv_prompt_bytes_per_request == 6 * 32


def test_request_longer_than_the_model_allows_is_refused() -> None:
    with pytest.raises(InputError, match="longest request has 10 tokens"):
        tiny_scenario(model=tiny_model(max_positions=9))


def test_bf16_checkpoint_computes_in_fp16_on_a_t4_and_in_bf16_on_an_l4() -> None:
    model = load_model("mixtral-8x7b")
    assert model.checkpoint_dtype == "bf16"
    assert choose_formats(load_profile("t4"), model) == Formats(weights=None, kv="fp16", compute="fp16")
    assert choose_formats(load_profile("l4"), model) == Formats(weights=None, kv="bf16", compute="bf16")


def test_fp32_checkpoint_computes_and_caches_in_fp32() -> None:
    model = tiny_model(checkpoint_dtype="fp32", expert_dtype="fp32", linear_dtype="fp32")
    formats = choose_formats(tiny_profile(), model)
    assert formats == Formats(weights=None, kv="fp32", compute="fp32")
    assert measure_sizes(tiny_scenario(model=model, formats=formats)).expert_bytes == 384


def test_quantised_weights_change_bytes_only() -> None:
    plain = choose_formats(tiny_profile(), tiny_model())
    small = choose_formats(tiny_profile(), tiny_model(), weights="int4", kv="int8")
    assert plain.compute == small.compute == "fp16"
    sizes, base = measure_sizes(tiny_scenario(formats=small)), measure_sizes(tiny_scenario(formats=FP16))
    assert sizes.streamed_bytes < base.streamed_bytes
    assert sizes.embedding_bytes == base.embedding_bytes  # tables stay
    assert sizes.kv_new_bytes_per_token == 2 * (8 + 2)  # 8 values and one scale per layer


def test_fp8_arithmetic_needs_fp8_weights_everywhere() -> None:
    profile = tiny_profile(peaks={"fp16": 1.0, "fp8": 2.0, "fp32": 1.0})
    with pytest.raises(InputError, match=r"--compute-dtype: fp8 arithmetic needs fp8 weights, these are fp16"):
        choose_formats(profile, tiny_model(), compute="fp8")
    mixed = tiny_model(linear_dtype="fp8", expert_dtype="mxfp4")
    with pytest.raises(InputError, match="these are fp8, mxfp4"):
        choose_formats(profile, mixed, compute="fp8")
    formats = choose_formats(profile, tiny_model(), weights="fp8", compute="fp8")
    assert formats == Formats(weights="fp8", kv="fp16", compute="fp8")


def test_format_the_gpu_does_not_compute_in_is_refused() -> None:
    with pytest.raises(InputError, match="does not compute in bf16"):
        choose_formats(load_profile("t4"), tiny_model(), compute="bf16")


def test_latent_cache_is_on_every_gpu_and_heads_are_split() -> None:
    profile = load_profile("t4x2")
    for name, replicas in (("mixtral-8x7b", 1.0), ("deepseek-v2-lite", 2.0)):
        assert kv_replicas(tiny_scenario(model=load_model(name), profile=profile)) == replicas
