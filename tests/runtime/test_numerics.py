"""How each family computes, as its released config.json says, and what is refused because there is no kernel for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import FAMILIES, build_tiny, tiny_config

from hrm.errors import InputError
from hrm.executable import RUNTIME_FAMILIES, kernels_lacking_for_model
from hrm.families import READERS, read_spec
from hrm.model_files import find_config, load_model, model_names
from hrm.profile_files import load_profile
from hrm.scenario import Scenario, choose_formats
from hrm.workload import uniform_workload
from runtime.numerics import Numerics, Rope, inverse_frequencies, read_numerics

PLAIN = Numerics(
    family="",
    norm="rms",
    norm_eps=1e-5,
    qkv_bias=False,
    output_bias=False,
    qk_norm="none",
    clip_qkv=None,
    rope=Rope(theta=1e6),
    rotary_width=128,
    activation="silu",
    router_norm=None,
    shared_expert_gate=False,
    attention_scale=128**-0.5,
)
LLAMA3 = Rope(theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192)
MIXTRAL = replace(PLAIN, family="mixtral", router_norm=1.0)
QWEN2 = replace(PLAIN, family="qwen2_moe", norm_eps=1e-6, qkv_bias=True, shared_expert_gate=True)
QWEN3 = replace(PLAIN, family="qwen3_moe", norm_eps=1e-6, qk_norm="head", router_norm=1.0)
LLAMA = replace(PLAIN, family="llama", rope=LLAMA3)
RELEASED = {
    "mixtral-8x7b": MIXTRAL,
    "mixtral-8x22b": MIXTRAL,
    "dbrx": replace(PLAIN, family="dbrx", norm="layer", clip_qkv=8.0, rope=Rope(theta=5e5), router_norm=1.0),
    "qwen1.5-moe-a2.7b": QWEN2,
    "qwen2-57b-a14b": QWEN2,
    "qwen3-30b-a3b": QWEN3,
    "qwen3-235b-a22b": QWEN3,
    "olmoe-1b-7b": replace(PLAIN, family="olmoe", qk_norm="full", rope=Rope(theta=1e4)),
    "llama-3.1-8b": LLAMA,
    "llama-3.1-70b": LLAMA,
}


def read(family: str, **overrides: Any) -> Numerics:
    return read_numerics(tiny_config(family, **overrides), where="config.json")


def refusal(family: str, **overrides: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(family, **overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_compute_as_their_files_say(name: str) -> None:
    assert read_numerics(find_config(name)["values"], where=name) == RELEASED[name]


def test_every_bundled_model_of_a_family_with_kernels_is_read_and_the_others_are_refused_by_name() -> None:
    for name in model_names():
        family = load_model(name).family
        if family in RUNTIME_FAMILIES:
            assert name in RELEASED
            continue
        with pytest.raises(InputError) as caught:
            read_numerics(find_config(name)["values"], where=name)
        assert str(caught.value) == (
            f"{name}: model_type: the runtime has no kernels for {family!r} models"
            " (it runs mixtral, dbrx, qwen2_moe, qwen3_moe, olmoe, llama)"
        )


def test_every_family_with_kernels_can_be_planned() -> None:
    assert set(RUNTIME_FAMILIES) == set(FAMILIES) <= set(READERS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_transformers_5_wrote_reads_the_same(family: str, tmp_path: Path) -> None:
    released = tiny_config(family)
    build_tiny(family, seed=0).config.save_pretrained(tmp_path)
    rewritten = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in rewritten and "rope_theta" not in rewritten
    assert read_numerics(rewritten, where="") == read_numerics(released, where="")
    specs = [read_spec(values, file="", name="") for values in (released, rewritten)]
    assert replace(specs[0], assumptions=()) == replace(specs[1], assumptions=())


@pytest.mark.parametrize(
    ("family", "overrides", "change"),
    [
        ("qwen2_moe", {"norm_topk_prob": True}, {"router_norm": 1.0}),
        ("qwen2_moe", {"qkv_bias": False}, {"qkv_bias": False}),
        ("qwen3_moe", {"norm_topk_prob": False}, {"router_norm": None}),
        ("qwen3_moe", {"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
        ("qwen3_moe", {"head_dim": 64}, {"rotary_width": 64, "attention_scale": 0.125}),
        ("olmoe", {"norm_topk_prob": True}, {"router_norm": 1.0}),
        ("olmoe", {"clip_qkv": None}, {"clip_qkv": None}),
        ("llama", {"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
        ("llama", {"rms_norm_eps": 1e-6}, {"norm_eps": 1e-6}),
        ("llama", {"hidden_act": "swish"}, {}),
        ("dbrx", {"attn_config": {"clip_qkv": None}}, {"clip_qkv": None}),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2}}, {"router_norm": 2.0}),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": None}}, {"router_norm": None}),
    ],
)
def test_each_key_changes_what_it_names_and_nothing_else(
    family: str, overrides: dict[str, Any], change: dict[str, Any]
) -> None:
    assert read(family, **overrides) == replace(read(family), **change)


# Rotation


@pytest.mark.parametrize(
    ("overrides", "rope"),
    [
        ({"rope_scaling": None}, Rope(theta=1e4)),
        ({"rope_scaling": None, "rope_theta": 5e5}, Rope(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(theta=1e4, kind="linear", factor=2.0)),
        ({"rope_scaling": None, "rope_parameters": {"rope_theta": 7.0}}, Rope(theta=7.0)),
        ({"rope_scaling": {"rope_type": "default"}}, Rope(theta=1e4)),
        (
            {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 4.0}},
            Rope(theta=7.0, kind="linear", factor=4.0),
        ),
    ],
)
def test_old_and_new_keys_of_the_rotation_are_read(overrides: dict[str, Any], rope: Rope) -> None:
    config = tiny_config("llama") | overrides
    assert read_numerics(config, where="").rope == rope


@pytest.mark.parametrize(("family", "theta"), [("llama", 1e4), ("mixtral", 1e6)])
def test_files_older_than_rope_theta_have_the_default_of_transformers(family: str, theta: float) -> None:
    config = tiny_config(family) | {"rope_scaling": None}
    del config["rope_theta"]
    assert read_numerics(config, where="").rope == Rope(theta=theta)
    assert transformers.AutoConfig.for_model(**config).rope_parameters["rope_theta"] == theta


def test_dbrx_rotates_with_attn_config_also_where_transformers_5_wrote_its_own_default_beside_it() -> None:
    assert read("dbrx", rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}).rope == Rope(theta=5e5)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_frequencies_are_those_of_transformers_to_the_last_bit(scaling: dict[str, Any]) -> None:
    config = tiny_config("llama") | {"rope_scaling": scaling, "rope_theta": 500000.0, "head_dim": 128}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    numerics = read_numerics(config, where="")
    assert torch.equal(inverse_frequencies(numerics.rope, numerics.rotary_width), model.model.rotary_emb.inv_freq)


def test_llama3_leaves_short_waves_and_divides_long_ones() -> None:
    """Theta 10,000 and heads of 8: waves of 6.28, 62.8, 628 and 6,283 tokens; 64 positions: 16 and below stay, 64 and
    above are divided by 8, and 62.8 lies between: 64 / 62.83 = 1.0186 turns, a share of 0.0186 / 3 unscaled."""
    rope = Rope(theta=1e4, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=64)
    share = 0.0062
    expected = torch.tensor([1.0, 0.1 * share + 0.1 / 8 * (1 - share), 0.01 / 8, 0.001 / 8])
    torch.testing.assert_close(inverse_frequencies(rope, 8), expected, rtol=1e-4, atol=0)


# No kernel


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", "mrope"])
def test_rope_scalings_without_a_kernel_are_named(kind: str) -> None:
    assert refusal("llama", rope_scaling={"rope_type": kind}) == (
        f"config.json: rope_scaling.rope_type: the runtime has no kernel for the rope scaling '{kind}'"
        " (one of default, linear, llama3)"
    )


@pytest.mark.parametrize(
    ("family", "overrides", "said"),
    [
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act: the runtime has no kernel for the activation 'gelu' (silu)"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_config.ffn_act_fn.name: the runtime has no"),
        ("dbrx", {"ffn_config": {"uniform_expert_assignment": True}}, "uniform_expert_assignment: the runtime has no"),
        ("llama", {"mlp_bias": True}, "mlp_bias: the runtime has no kernel for an MLP with biases (false)"),
        (
            "llama",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor: the runtime has no kernel for a rotation of part of a head (1)",
        ),
        ("mixtral", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "a rope of its own for each kind"),
        ("llama", {"rope_parameters": {"rope_theta": 1.0}}, "rope_scaling: rope_parameters is there too"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling: 'linear' is not an object"),
        ("llama", {"rope_scaling": {"high_freq_factor": 1.0}}, "high_freq_factor: 1 is not above low_freq_factor 1"),
        ("llama", {"rope_scaling": {"factor": 0}}, "rope_scaling.factor: 0 is not a number above 0"),
        ("llama", {"rope_scaling": {"factor": None}}, "rope_scaling.factor: this key is missing"),
        ("mixtral", {"rope_theta": "1e6"}, "rope_theta: '1e6' is not a number above 0"),
        ("mixtral", {"rms_norm_eps": True}, "rms_norm_eps: True is not a number above 0"),
        ("mixtral", {"rms_norm_eps": None}, "rms_norm_eps: this key is missing"),
        ("olmoe", {"clip_qkv": -1.0}, "clip_qkv: -1.0 is not a number above 0"),
        ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob: None is not a flag"),
    ],
)
def test_what_has_no_kernel_or_makes_no_sense_is_refused(family: str, overrides: dict[str, Any], said: str) -> None:
    assert said in refusal(family, **overrides)


# The planner says the same


ANY = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "llama")
MUTATIONS: list[tuple[tuple[str, ...], dict[str, Any], bool]] = [
    (FAMILIES, {}, True),
    (ANY, {"hidden_act": "SiLU"}, True),
    (ANY, {"hidden_act": "gelu"}, False),
    (ANY, {"hidden_act": None}, True),
    (FAMILIES, {"partial_rotary_factor": 0.5}, False),
    (FAMILIES, {"partial_rotary_factor": 1.0}, True),
    (ANY, {"rope_theta": "1e6"}, False),
    (ANY, {"rms_norm_eps": True}, False),
    (("mixtral", "dbrx"), {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, False),
    (("mixtral", "qwen2_moe"), {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, True),
    (("qwen3_moe", "olmoe"), {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, False),
    (("qwen2_moe", "qwen3_moe", "olmoe"), {"norm_topk_prob": None}, False),
    (("qwen2_moe", "qwen3_moe", "olmoe"), {"norm_topk_prob": True}, True),
    (("dbrx",), {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, False),
    (("dbrx",), {"ffn_config": {"uniform_expert_assignment": True}}, False),
    (("dbrx",), {"ffn_config": {"uniform_expert_assignment": False}}, True),
    (("llama",), {"mlp_bias": True}, False),
    (("llama",), {"rope_parameters": {"rope_theta": 1.0}}, False),
]


@pytest.mark.parametrize(
    ("family", "overrides", "runs"),
    [(family, overrides, runs) for families, overrides, runs in MUTATIONS for family in families],
)
def test_planner_and_runtime_refuse_the_same_configs(family: str, overrides: dict[str, Any], runs: bool) -> None:
    config = tiny_config(family, **overrides)
    profile, spec = load_profile("l4"), read_spec(config, file="", name="")
    scenario = Scenario(
        profile=profile, model=spec, workload=uniform_workload(8, 4), formats=choose_formats(profile, spec)
    )
    assert (kernels_lacking_for_model(scenario, config) == []) == runs
    if runs:
        read_numerics(config, where="")
    else:
        refusal(family, **overrides)
