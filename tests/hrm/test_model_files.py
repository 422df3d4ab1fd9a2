"""Reading models: names people type, keys that are missing, values that make no sense, files that are broken."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrm.errors import InputError
from hrm.families import READERS, read_spec
from hrm.model import ModelSpec
from hrm.model_files import bundled_models, load_model, model_names

FOLDER = Path(sys.modules["hrm.model_files"].__file__ or "").parent / "data" / "models"
CONFIGS: dict[str, dict[str, Any]] = {
    name: json.loads((FOLDER / f"{name}.json").read_text("utf-8")) for name in model_names()
}


def read(values: dict[str, Any]) -> ModelSpec:
    return read_spec(values, file="some/config.json", name="some")


def write(folder: Path, text: str) -> Path:
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder / "config.json"


def leaves(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Every key of a config, nested ones with a dot."""
    keys: list[str] = []
    for key, value in values.items():
        keys.append(prefix + key)
        if isinstance(value, dict):
            keys += leaves(value, f"{prefix}{key}.")
    return keys


def changed(values: dict[str, Any], key: str, value: Any = None, *, delete: bool = False) -> dict[str, Any]:
    result = copy.deepcopy(values)
    *sections, last = key.split(".")
    section = result
    for part in sections:
        section = section[part]
    if delete:
        del section[last]
    else:
        section[last] = value
    return result


# Names


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("mixtral", "mixtral-8x7b"),
        ("Mixtral-8x7B", "mixtral-8x7b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("mistralai/mixtral-8x7b-instruct-v0.1", "mixtral-8x7b"),
        ("Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mixtral_8x22b", "mixtral-8x22b"),
        ("DBRX", "dbrx"),
        ("databricks/dbrx-instruct", "dbrx"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("facebook/opt-30b", "opt-30b"),
    ],
)
def test_names_people_type_find_the_checkpoint(typed: str, name: str) -> None:
    assert load_model(typed).name == name


def test_every_name_alias_and_hub_id_finds_its_own_checkpoint() -> None:
    for model in bundled_models().values():
        for spelling in (model.name, *model.aliases, *model.hub_ids, model.hub_ids[0].split("/")[-1]):
            loaded = load_model(spelling.upper())
            assert (loaded.name, loaded.hub_id) == (model.name, model.hub_ids[0])


def test_no_two_checkpoints_share_a_spelling() -> None:
    spellings = [
        spelling.lower() for model in bundled_models().values() for spelling in (*model.aliases, *model.hub_ids)
    ]
    assert len(set(spellings)) == len(spellings)


def test_every_bundled_file_says_where_it_is_from() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} - {"index"} == set(bundled_models())
    for model in bundled_models().values():
        assert model.source and model.status and model.hub_ids


def test_bundled_models_cover_every_family() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(READERS)


@pytest.mark.parametrize(
    ("typed", "near"),
    [("mixtrl", "mixtral-8x7b"), ("dbxr", "dbrx"), ("qwen3-30b-a3", "qwen3-30b-a3b"), ("deepseek-v4", "deepseek-v")],
)
def test_unknown_name_suggests_the_nearest(typed: str, near: str) -> None:
    with pytest.raises(InputError, match=f"model '{typed}': unknown model .did you mean .*{near}"):
        load_model(typed)


def test_larger_sibling_is_not_taken_for_the_base_model() -> None:
    with pytest.raises(InputError, match=r"unknown model \(did you mean mixtral-8x22b,"):
        load_model("mistralai/Mixtral-8x22B-Instruct-v0.1")


@pytest.mark.parametrize(
    ("typed", "reason"),
    [("jamba", "Mamba state"), ("ai21labs/AI21-Jamba-1.5-Mini", "Mamba state"),
     ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "vision tower"), ("llama4", "chunked attention")],
)  # fmt: skip
def test_models_that_are_not_modelled_are_refused_with_the_reason(typed: str, reason: str) -> None:
    with pytest.raises(InputError, match=f"not supported: .*{reason}"):
        load_model(typed)


@pytest.mark.parametrize("model_type", ["jamba", "llama4", "llama4_text"])
def test_their_config_files_are_refused_too(model_type: str) -> None:
    with pytest.raises(InputError, match=r"some/config.json: model_type: .* not supported: .*supported: mixtral, dbrx"):
        read({"model_type": model_type, "text_config": {}})


def test_nested_text_config_is_refused() -> None:
    with pytest.raises(InputError, match=r"some/config.json: text_config"):
        read({"model_type": "mixtral", "text_config": CONFIGS["mixtral-8x7b"]})


def test_unknown_model_type_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"model_type: 'mixtrall' is not supported \(did you mean mixtral\?"):
        read(changed(CONFIGS["mixtral-8x7b"], "model_type", "mixtrall"))


# Paths


def test_file_and_folder_give_what_the_bundled_name_gives(tmp_path: Path) -> None:
    folder = tmp_path / "my-dbrx"
    folder.mkdir()
    file = write(folder, json.dumps(CONFIGS["dbrx"]))
    for path in (file, folder, str(folder)):
        model = load_model(path)
        assert (model.name, model.origin, model.hub_id) == ("my-dbrx", str(file), "")
        assert replace(model, name="dbrx", origin="", hub_id="") == replace(load_model("dbrx"), origin="", hub_id="")


def test_what_is_on_disk_comes_before_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dbrx").mkdir()
    assert load_model("dbrx").n_layers == 40
    write(tmp_path / "dbrx", json.dumps(changed(CONFIGS["dbrx"], "n_layers", 2)))
    assert load_model("dbrx").n_layers == 2


@pytest.mark.parametrize("typed", ["nothing/config.json", "./nothing", "/nothing/here.json"])
def test_path_that_is_not_there_is_named(typed: str) -> None:
    with pytest.raises(InputError, match=f"'{typed}': no such file"):
        load_model(typed)


def test_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{tmp_path}: this folder holds no config.json"):
        load_model(tmp_path)


@pytest.mark.parametrize("typed", ["", "  ", "x" * 5000, "a\0b", "~no-such-user/x", "\ud800", os.devnull])
def test_strange_names_are_input_errors(typed: str) -> None:
    with pytest.raises(InputError):
        load_model(typed)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "is empty"),
        ("[1]", "holds a list, not an object"),
        ("null", "holds a NoneType, not an object"),
        ('{"a": NaN}', "holds NaN"),
        ('{"a": -Infinity}', "holds -Infinity"),
        ('{"a": 1, "a": 2}', "'a': this key is there twice"),
        ('{"a": 1', "is not valid JSON: .* line 1, column"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON that can be read"),
        ("[" * 100_000, "is not JSON that can be read"),
    ],
)
def test_broken_files_are_named_with_what_is_wrong(tmp_path: Path, text: str, fact: str) -> None:
    with pytest.raises(InputError, match=f"config.json: {fact}"):
        load_model(write(tmp_path, text))


def test_binary_huge_and_unreadable_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InputError, match=r"model.safetensors: is not a text file in UTF-8"):
        load_model(file)
    with file.open("wb") as stream:
        stream.truncate(9_000_000)
    with pytest.raises(InputError, match="9000000 bytes are too many"):
        load_model(file)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InputError, match=r"config.json: cannot be read"):
        load_model(tmp_path)


def test_byte_order_mark_is_harmless(tmp_path: Path) -> None:
    assert load_model(write(tmp_path, "\ufeff" + json.dumps(CONFIGS["dbrx"]))).n_experts == 16


# Keys


@pytest.mark.parametrize("name", CONFIGS)
def test_deleting_a_key_is_an_error_or_a_stated_assumption_or_changes_nothing(name: str) -> None:
    config = CONFIGS[name]
    whole = read(config)
    for key in leaves(config):
        if key == "quantization_config":  # without it a checkpoint is not quantised, which is what it says
            continue
        try:
            model = read(changed(config, key, delete=True))
        except InputError as error:
            assert f"some/config.json: {key}" in str(error)
        else:
            added = set(model.assumptions) - set(whole.assumptions)
            assert replace(model, assumptions=()) == replace(whole, assumptions=())
            assert all(line.startswith(f"{key} is not in the file") for line in added)


def required(name: str) -> set[str]:
    config, keys = CONFIGS[name], set()
    for key in leaves(config):
        try:
            read(changed(config, key, delete=True))
        except InputError:
            keys.add(key)
    return keys


def test_mixtral_insists_on_every_key_it_reads() -> None:
    assert required("mixtral-8x7b") == {
        "hidden_size", "intermediate_size", "max_position_embeddings", "model_type", "num_attention_heads",
        "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "num_local_experts", "sliding_window",
        "tie_word_embeddings", "torch_dtype", "vocab_size",
    }  # fmt: skip


def test_dbrx_insists_on_every_key_it_reads() -> None:
    assert required("dbrx") == {
        "attn_config", "attn_config.kv_n_heads", "d_model", "ffn_config", "ffn_config.ffn_hidden_size",
        "ffn_config.moe_num_experts", "ffn_config.moe_top_k", "max_seq_len", "model_type", "n_heads", "n_layers",
        "tie_word_embeddings", "torch_dtype", "vocab_size",
    }  # fmt: skip


def test_what_files_of_a_family_never_carry_is_stated() -> None:
    assert load_model("qwen3-30b-a3b").assumptions == ()
    assert [line.split()[0] for line in load_model("opt-30b").assumptions] == ["head_dim", "tie_word_embeddings"]
    assert [line.split()[0] for line in load_model("gpt-oss-20b").assumptions] == ["torch_dtype"]


def test_dtype_is_read_under_its_new_name_too() -> None:
    config = changed(CONFIGS["mixtral-8x7b"], "torch_dtype", delete=True)
    assert read({**config, "dtype": "float16"}).checkpoint_dtype == "fp16"
    with pytest.raises(InputError, match="dtype: fp16 contradicts torch_dtype bf16"):
        read({**CONFIGS["mixtral-8x7b"], "dtype": "float16"})


@pytest.mark.parametrize(
    ("name", "key", "value", "fact"),
    [
        ("mixtral-8x7b", "hidden_size", "4096", "'4096' is not a whole number .a whole number from 1 to 131072"),
        ("mixtral-8x7b", "hidden_size", 4096.0, "4096.0 is not a whole number"),
        ("mixtral-8x7b", "hidden_size", True, "True is not a whole number"),
        ("mixtral-8x7b", "hidden_size", 0, "0 is out of range"),
        ("mixtral-8x7b", "num_hidden_layers", -32, "-32 is out of range"),
        ("mixtral-8x7b", "num_hidden_layers", 10**7, "10000000 is out of range .a whole number from 1 to 1000"),
        ("mixtral-8x7b", "num_local_experts", float("inf"), "inf is not a whole number"),
        ("mixtral-8x7b", "num_experts_per_tok", 9, "9 is more than the 8 experts"),
        ("mixtral-8x7b", "num_key_value_heads", 5, "5 does not divide the 32 attention heads"),
        ("mixtral-8x7b", "num_attention_heads", 24, "24 heads do not divide hidden_size 4096"),
        ("mixtral-8x7b", "tie_word_embeddings", 0, "0 is not a flag"),
        ("mixtral-8x7b", "torch_dtype", "int4", "'int4' is not accepted here"),
        ("mixtral-8x7b", "model_type", 3, "3 is not a text"),
        ("dbrx", "attn_config", [8], r"\[8\] is not an object"),
        ("dbrx", "ffn_config.moe_top_k", 17, "17 is more than the 16 experts"),
        ("gpt-oss-20b", "layer_types", ["full_attention"] * 23, "has 23 entries for 24 layers"),
        ("gpt-oss-20b", "layer_types", "full_attention", "'full_attention' is not a list"),
        ("gpt-oss-20b", "experts_per_token", 8, "8 contradicts num_experts_per_tok 4"),
        ("gpt-oss-20b", "sliding_window", None, "missing or null"),
        ("deepseek-v3", "first_k_dense_replace", 61, "61 is out of range"),
        ("qwen3-30b-a3b", "use_sliding_window", True, "true, but the file does not say which layers"),
        ("qwen3-30b-a3b", "mlp_only_layers", [48], "48 is out of range"),
        ("opt-30b", "word_embed_proj_dim", 512, "512 differs from hidden_size 7168"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_named(name: str, key: str, value: Any, fact: str) -> None:
    with pytest.raises(InputError, match=f"some/config.json: {key}[^ ]*: {fact}"):
        read(changed(CONFIGS[name], key, value))


def test_layer_types_of_another_kind_are_refused() -> None:
    types = ["full_attention"] * 23 + ["linear_attention"]
    with pytest.raises(InputError, match=r"layer_types\[23\]: 'linear_attention' is not supported"):
        read(changed(CONFIGS["gpt-oss-20b"], "layer_types", types))


def test_sizes_that_are_absurd_only_together_are_refused() -> None:
    config = {**CONFIGS["mixtral-8x7b"], "num_hidden_layers": 1000, "intermediate_size": 1_000_000}
    with pytest.raises(InputError, match=r"the sizes add up to 7.37e\+17 parameters"):
        read({**config, "num_local_experts": 60_000})


def test_window_of_mixtral_holds_in_every_layer() -> None:
    assert read(changed(CONFIGS["mixtral-8x7b"], "sliding_window", 4096)).layer_windows == (4096,) * 32


def test_qwen_window_counts_only_when_switched_on_and_located() -> None:
    types = ["sliding_attention"] * 4 + ["full_attention"] * 44
    config = {**CONFIGS["qwen3-30b-a3b"], "sliding_window": 1024, "layer_types": types}
    assert set(read(config).layer_windows) == {None}
    assert read({**config, "use_sliding_window": True}).layer_windows == (1024,) * 4 + (None,) * 44


def test_dense_layers_of_qwen_follow_step_and_list() -> None:
    config = {**CONFIGS["qwen3-30b-a3b"], "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    model = read(config)
    assert model.moe_layers[:6] == (False, False, False, True, False, True)
    assert (model.n_dense_layers, model.dense_ffn) == (25, 6144)
    with pytest.raises(InputError, match="intermediate_size: this key is missing"):
        read(changed(config, "intermediate_size", delete=True))


def test_plain_query_projection_is_null_or_zero() -> None:
    config = CONFIGS["deepseek-v2-lite"]
    assert read(config) == read(changed(config, "q_lora_rank", 0))


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4"])
def test_other_quantisations_are_refused_with_a_way_out(method: str) -> None:
    config = {**CONFIGS["mixtral-8x7b"], "quantization_config": {"quant_method": method, "bits": 4}}
    with pytest.raises(InputError, match=f"quantization_config.quant_method: '{method}' .*--weights-dtype"):
        read(config)


def test_fp8_needs_known_blocks_and_all_linear_matrices() -> None:
    config = CONFIGS["deepseek-v3"]
    with pytest.raises(InputError, match=r"weight_block_size: \[64, 64\] is not supported \(\[128, 128\]\)"):
        read(changed(config, "quantization_config.weight_block_size", [64, 64]))
    with pytest.raises(InputError, match=r"modules_to_not_convert: 'model.layers.0.self_attn' is kept out of fp8"):
        read(changed(config, "quantization_config.modules_to_not_convert", ["lm_head", "model.layers.0.self_attn"]))
    plain = read(changed(config, "quantization_config", None))
    assert plain.weight_bytes() == 2 * plain.total_parameters


# Anything at all

JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=6,
)


@settings(max_examples=300)
@given(name=st.sampled_from(sorted(CONFIGS)), data=st.data())
def test_junk_in_any_key_is_an_input_error_or_a_model(name: str, data: st.DataObject) -> None:
    config = CONFIGS[name]
    key = data.draw(st.sampled_from(leaves(config)))
    junk = changed(config, key, data.draw(JUNK))
    try:
        model = read(junk)
    except InputError as error:
        assert str(error).startswith("some/config.json: ")
    else:
        assert 0 < model.active_parameters <= model.total_parameters
        assert model.weight_bytes() > 0


@settings(max_examples=100)
@given(name=st.sampled_from(sorted(CONFIGS)), share=st.floats(0, 1, exclude_max=True))
def test_truncated_file_is_an_input_error(tmp_path_factory: pytest.TempPathFactory, name: str, share: float) -> None:
    text = json.dumps(CONFIGS[name])
    file = write(tmp_path_factory.getbasetemp(), text[: int(share * len(text))])
    with pytest.raises(InputError, match=r"config.json: is (not valid JSON|empty)"):
        load_model(file)


def test_reading_a_model_imports_nothing_heavy() -> None:
    code = "import sys; from hrm.model_files import load_model; load_model('dbrx'); print(sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'json'" in modules
    assert not any(f"'{name}'" in modules for name in ("numpy", "pandas", "scipy", "torch", "yaml", "matplotlib"))
