"""Memory terms of the tiny model, by mental arithmetic: 4 requests in 2 micro-batches of 2 (see `tiny`)."""

from typing import Any

import pytest
from tiny import FP16, tiny_mla, tiny_model, tiny_profile, tiny_scenario

from hrm import full_cost as fc
from hrm import memory
from hrm.affine import Affine
from hrm.cost import Formats
from hrm.full_cost import Batch
from hrm.memory import Terms
from hrm.scenario import Scenario, measure_sizes
from hrm.units import MIB

RESIDENT = {fc.DENSE: 1.0, fc.HEAD: 1.0, fc.EMBEDDING: 1.0}


def batch_of(attention: bool = True, ffn: bool = True) -> Batch:
    return Batch(size=4.0, micro_batches=2.0, attention_on_gpu=attention, ffn_on_gpu=ffn)


def gpu(
    scenario: Scenario | None = None,
    phase: str = "decode",
    tokens: float = 20.0,
    ring: bool = False,
    attention: bool = True,
    ffn: bool = True,
    **values: Any,
) -> dict[str, float]:
    scenario = scenario or tiny_scenario()
    terms = memory.gpu_terms(
        scenario,
        measure_sizes(scenario),
        batch_of(attention, ffn),
        phase=phase,
        requests=2.0,
        tokens=tokens,
        ring=ring,
    )
    return at(terms, values)


def at(terms: Terms, values: dict[str, float]) -> dict[str, float]:
    return {name: float(term.at(RESIDENT | values)) for name, term in terms.items()}


def cpu(  # type: ignore[no-untyped-def]
    scenario: Scenario | None = None,
    parts: float = 2.0,
    tokens: float = 12.0,
    attention: bool = True,
    ffn: bool = True,
    **values: Any,
):
    scenario = scenario or tiny_scenario()
    terms = memory.cpu_terms(
        scenario,
        measure_sizes(scenario),
        batch_of(attention, ffn),
        requests=2.0,
        prefill_micro_batches=parts,
        prefill_tokens=tokens,
    )
    return at(terms, values)


def test_gpu_in_decode_with_attention_on_the_gpu() -> None:
    assert gpu() == {
        "resident expert weights": 0.0,
        "non-expert weights": 976.0,
        "embedding": 256.0,
        "lm_head": 256.0,
        "lm_head buffers": 0.0,
        "non-expert weight slots": 0.0,
        "expert weight slots": 0.0,
        "KV cache": 0.0,
        # two micro-batches of 20 tokens, 16 byte per token and layer
        "KV slots": 2 * 20 * 16,
        # per request: residual and normalised 2 x 8, experts 2 visits x (8 + 8 + 3 x 4), 2 byte
        "activations": 2 * (16 + 56) * 2,
        "hidden states of the batch": 4 * 8 * 2,
        "dequantisation scratch": 0.0,
        "CUDA context": 1000.0,
        "reserve": 0.03 * 1e6,
    }


def test_unknowns_take_what_they_say() -> None:
    found = gpu(
        **{
            fc.EXPERTS_ON_GPU: 768.0,
            memory.EXPERT_SLOTS: 100.0,
            memory.DENSE_SLOTS: 50.0,
            fc.KV_ON_GPU: 320.0,
            fc.DENSE: 0.0,
            fc.HEAD: 0.0,
            fc.EMBEDDING: 0.0,
        }
    )
    assert found["resident expert weights"] == 768.0
    assert found["expert weight slots"] == 100.0
    assert found["non-expert weight slots"] == 50.0
    assert found["KV cache"] == 320.0
    assert found["KV slots"] == pytest.approx(640 * 0.75)  # a quarter of the requests needs none
    assert found["non-expert weights"] == found["embedding"] == found["lm_head"] == 0.0
    assert found["lm_head buffers"] == 256.0  # smaller than two pieces of 256 MiB


def test_streamed_head_takes_at_most_two_pieces() -> None:
    model = tiny_model(vocab_size=2**26)
    assert gpu(tiny_scenario(model=model), **{fc.HEAD: 0.0})["lm_head buffers"] == 512 * MIB


def test_qkv_in_flight_where_attention_is_on_the_cpu() -> None:
    found = gpu(attention=False)
    assert "KV slots" not in found
    assert found["activations"] == 2 * (144 + 3 * (16 + 8) * 2)  # three micro-batches' QKV and results


def test_slots_of_a_model_with_windows_hold_its_fullest_layer() -> None:
    assert gpu(tiny_scenario(model=tiny_model(layer_windows=(4, None))))["KV slots"] == 640
    assert gpu(tiny_scenario(model=tiny_model(layer_windows=(4, 3))))["KV slots"] == 2 * (2 * 4) * 16


def test_slots_of_experts_stay_in_decode_on_the_cpu() -> None:
    slots = {memory.EXPERT_SLOTS: 100.0}
    assert gpu(ffn=False, **slots)["expert weight slots"] == 100.0
    assert gpu(phase="prefill", ffn=False, **slots)["expert weight slots"] == 100.0


def test_gpu_in_prefill() -> None:
    found = gpu(phase="prefill", tokens=12.0)
    # 12 tokens x 144 byte, hidden states in and out 2 x 12 x 16, new KV of two layers 2 x 12 x 16
    assert found["activations"] == 12 * 144 + 384 + 384
    # a quarter of the KV cache stays on the GPU, where it lies already; nothing is on its way out where all of it does
    assert gpu(phase="prefill", tokens=12.0, **{fc.KV_ON_GPU: 320.0})["activations"] == 12 * 144 + 384 + 288
    assert gpu(phase="prefill", tokens=12.0, **{fc.KV_ON_GPU: 1280.0})["activations"] == 12 * 144 + 384
    assert "KV slots" not in found


def test_logits_of_a_large_vocabulary_are_the_peak() -> None:
    assert gpu(tiny_scenario(model=tiny_model(vocab_size=1000)))["activations"] == 2 * 1000 * 8


def test_ring_holds_the_whole_batch_between_attention_and_experts() -> None:
    found = gpu(tiny_scenario(model=tiny_model(n_experts=16)), ring=True, **{fc.RING_SLOTS: 1.0})
    assert found["hidden states of the batch"] == 4 * 16 + 4 * 8 * (2 + 4)
    assert found["activations"] == 2 * 16 * 8  # logits; attention 2 x (16 + 24) x 2 is less


def test_expert_of_a_ring_serves_the_whole_batch_at_once() -> None:
    # Wide experts: of 4 requests' tokens each serves at most 2 x 2/4 = all, 2 x 8 + 3 x 400 values each.
    found = gpu(tiny_scenario(model=tiny_model(expert_ffn=400)), ring=True, **{fc.RING_SLOTS: 1.0})
    assert found["activations"] == 4 * (16 + 1200) * 2
    few = gpu(tiny_scenario(model=tiny_model(expert_ffn=400, n_experts=16)), ring=True, **{fc.RING_SLOTS: 1.0})
    assert few["activations"] == 4 * 0.25 * (16 + 1200) * 2


def test_two_gpus_replicate_activations_and_context_but_not_weights() -> None:
    found = gpu(tiny_scenario(profile=tiny_profile(gpus=2)), **{fc.KV_ON_GPU: 320.0})
    assert found["non-expert weights"] == 976.0
    assert found["KV cache"] == 320.0
    assert found["CUDA context"] == 2000.0
    assert found["reserve"] == 0.06 * 1e6
    # residual, normalised copy and the rows in and out of two visits are whole on both; 3 x 4 wide is split
    assert found["activations"] == 2 * (2 * 16 + 2 * (2 * 16 + 12)) * 2
    assert found["hidden states of the batch"] == 2 * 4 * 16
    assert memory.limit_bytes(tiny_profile(gpus=2))["gpu"] == 2e6


def test_latent_cache_is_on_every_gpu() -> None:
    found = gpu(tiny_scenario(model=tiny_mla(), profile=tiny_profile(gpus=2)), **{fc.KV_ON_GPU: 320.0})
    assert found["KV cache"] == 640.0
    assert found["KV slots"] == pytest.approx(2 * 640 * 0.75)


def test_quantised_weights_need_room_to_expand_one_matrix() -> None:
    int4 = Formats(weights="int4", kv="fp16", compute="fp16")
    assert gpu(tiny_scenario(formats=int4))["dequantisation scratch"] == 8 * 8 * 2
    fp8 = Formats(weights="fp8", kv="fp16", compute="fp8")
    assert gpu(tiny_scenario(formats=fp8))["dequantisation scratch"] == 0.0
    experts_only = tiny_model(expert_dtype="mxfp4")
    assert gpu(tiny_scenario(model=experts_only))["dequantisation scratch"] == 8 * 4 * 2


def test_tied_head_has_no_bytes_of_its_own() -> None:
    scenario = tiny_scenario(model=tiny_model(tie_embeddings=True))
    assert gpu(scenario)["lm_head"] == 0.0
    assert cpu(scenario, **{fc.HEAD: 0.0, fc.EMBEDDING: 0.0})["lm_head"] == 0.0


def test_cpu_holds_what_is_not_elsewhere() -> None:
    found = cpu(**{fc.EXPERTS_ON_GPU: 500.0, fc.EXPERTS_ON_DISK: 36.0, fc.KV_ON_GPU: 200.0, fc.KV_ON_DISK: 80.0})
    assert found == {
        "expert weights": 1000.0,
        "non-expert weights": 0.0,
        "embedding": 0.0,
        "lm_head": 0.0,
        "KV cache": 1000.0,
        "hidden states of all prompts": 24 * 16.0,
        "weight staging buffers": 512.0 * MIB,
        "KV landing buffers": 40.0,  # 80 byte in 2 layers and 2 micro-batches: 20 each, two of them
    }
    streamed = cpu(**{fc.DENSE: 0.0, fc.HEAD: 0.0, fc.EMBEDDING: 0.0})
    assert (streamed["non-expert weights"], streamed["embedding"], streamed["lm_head"]) == (976.0, 256.0, 256.0)


def test_nothing_waits_in_cpu_memory_with_one_prefill_micro_batch() -> None:
    assert cpu(parts=1.0)["hidden states of all prompts"] == 0.0


def test_landing_buffers_hold_what_a_large_prefill_micro_batch_writes() -> None:
    """Half of 1280 byte on disk: two reads in decode are 2 x 640 / (2 x 2); 12 tokens of 16 byte are less, 24 more."""
    assert cpu(tokens=12.0, **{fc.KV_ON_DISK: 640.0})["KV landing buffers"] == 320.0
    assert cpu(tokens=24.0, **{fc.KV_ON_DISK: 640.0})["KV landing buffers"] == pytest.approx(2 * 24 * 16 / 2)
    assert cpu(tokens=24.0)["KV landing buffers"] == 0.0


def test_pinned_buffers_are_rounded_up_to_powers_of_two() -> None:
    # QKV 2 x 16 x 2 = 64 byte, results 2 x 8 x 2 = 32 byte, three of each
    assert cpu(attention=False)["QKV and hidden-state buffers"] == 3 * (64 + 32)
    wider = tiny_model(n_heads=3)  # QKV 2 x 20 x 2 = 80 -> 128, results 2 x 12 x 2 = 48 -> 64
    assert cpu(tiny_scenario(model=wider), attention=False)["QKV and hidden-state buffers"] == 3 * (128 + 64)
    assert cpu(ffn=False)["expert input and output buffers"] == 3 * 2 * 32


def test_experts_on_the_cpu_need_scratch_and_room_for_what_comes_from_disk() -> None:
    found = cpu(ffn=False, **{fc.EXPERTS_ON_DISK: 600.0})
    assert found["expert scratch"] == 2 * 2 * (16 + 12) * 2  # requests x visits x values x byte
    assert found["disk landing buffers"] == 600.0  # two layers of the model's two
    assert "disk landing buffers" not in cpu(**{fc.EXPERTS_ON_DISK: 600.0})


def test_disk_holds_experts_and_kv() -> None:
    found = at(memory.disk_terms(), {fc.EXPERTS_ON_DISK: 5.0, fc.KV_ON_DISK: 7.0})
    assert found == {"expert weights": 5.0, "KV cache": 7.0}


def test_limits_leave_out_what_the_host_reserves() -> None:
    assert memory.limit_bytes(tiny_profile(disk=True)) == {"gpu": 1e6, "cpu": 1e9 - 100, "disk": 1e4}
    assert memory.limit_bytes(tiny_profile())["disk"] == 0.0


def test_rounding_keeps_two_rows_of_every_layer_free() -> None:
    scenario = tiny_scenario()
    assert memory.rounding_bytes(scenario, measure_sizes(scenario)) == 2 * 16 * 2  # a row of 8 values, two layers


def test_every_term_is_affine() -> None:
    scenario = tiny_scenario(formats=FP16)
    sizes = measure_sizes(scenario)
    terms = memory.gpu_terms(scenario, sizes, batch_of(), phase="decode", requests=2.0, tokens=20.0, ring=False)
    assert all(isinstance(term, Affine) for term in terms.values())
