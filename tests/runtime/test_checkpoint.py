"""A released folder is read as it is, tensor for tensor, or refused with what is wrong and what to do."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_forward import plain_logits
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, build_tiny, load_reference, reference_generate, save_tiny, tiny_config
from torch import Tensor

from hrm.errors import InputError
from hrm.families import read_spec
from runtime.checkpoint import open_checkpoint
from runtime.numerics import Rope, read_numerics
from runtime.weight_source import dense_shapes, expert_shape, top_shapes

LAYER = "model.layers.1."
ATTENTION = [f"self_attn.{name}_proj.weight" for name in "kqvo"]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
QK_NORMS = ["self_attn.k_norm.weight", "self_attn.q_norm.weight"]
MLP = ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]
EXPERTS = [f"mlp.experts.{expert}.{name}" for expert in range(6) for name in MLP]

# As the index files of the released checkpoints have them, layer 1.
RELEASED = {
    "mixtral": [
        *ATTENTION,
        *NORMS,
        "block_sparse_moe.gate.weight",
        *(f"block_sparse_moe.experts.{expert}.w{number}.weight" for expert in range(6) for number in (1, 2, 3)),
    ],
    "qwen2_moe": [
        *ATTENTION,
        *(f"self_attn.{name}_proj.bias" for name in "kqv"),
        *NORMS,
        *EXPERTS,
        "mlp.gate.weight",
        *(f"mlp.shared_expert.{name}" for name in MLP),
        "mlp.shared_expert_gate.weight",
    ],
    "qwen3_moe": [*ATTENTION, *QK_NORMS, *NORMS, *EXPERTS, "mlp.gate.weight"],
    "olmoe": [*ATTENTION, *QK_NORMS, *NORMS, *EXPERTS, "mlp.gate.weight"],
    "llama": [*ATTENTION, *NORMS, *(f"mlp.{name}" for name in MLP)],
    "dbrx": [
        "ffn.experts.mlp.v1",
        "ffn.experts.mlp.w1",
        "ffn.experts.mlp.w2",
        "ffn.router.layer.weight",
        "norm_attn_norm.attn.Wqkv.weight",
        "norm_attn_norm.attn.out_proj.weight",
        "norm_attn_norm.norm_1.weight",
        "norm_attn_norm.norm_2.weight",
    ],
}


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return save_tiny("mixtral", tmp_path / "tiny", seed=3)


def stored(folder: Path) -> dict[str, Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def store(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """All tensors in one file, instead of what was there."""
    for file in folder.glob("model*"):
        file.unlink()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")


def shard_of(folder: Path, key: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][key]


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


# The builders


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_have_the_keys_of_the_released_checkpoints_in_several_shards(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path, seed=0)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 3
    prefix = "transformer.blocks.1." if family == "dbrx" else LAYER
    found = [key.removeprefix(prefix) for key in stored(folder) if key.startswith(prefix)]
    assert sorted(found) == sorted(RELEASED[family])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_was_written_to_identical_logits(family: str, packed: bool, tmp_path: Path) -> None:
    built, loaded = build_tiny(family, seed=5), load_reference(save_tiny(family, tmp_path, seed=5, packed=packed))
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        assert torch.equal(built(input_ids=tokens).logits, loaded(input_ids=tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_generates_different_tokens_for_different_prompts(family: str, tmp_path: Path) -> None:
    prompts = [[1, 2, 3, 4, 5], [90, 3, 44, 5, 60, 7, 8], [*range(50)]]
    tokens, logits = reference_generate(save_tiny(family, tmp_path, seed=1), prompts, 8)
    assert [row.shape for row in logits] == [(8, 96)] * 3
    assert len({tuple(each) for each in tokens}) == 3
    assert len({token for each in tokens for token in each}) > 8


# Tensors


def expected_layer(model: Any, family: str, layer: int) -> tuple[dict[str, Tensor], list[tuple[Tensor, ...]]]:
    """Dense tensors and experts of a layer as the modules of transformers hold them."""
    if family == "dbrx":
        block = model.transformer.blocks[layer]
        attention, mlp = block.norm_attn_norm.attn, block.ffn.experts.mlp
        q, k, v = attention.Wqkv.weight.split([32, 16, 16])
        dense = {"q": q, "k": k, "v": v, "o": attention.out_proj.weight, "router": block.ffn.router.layer.weight}
        dense |= {"input_norm": block.norm_attn_norm.norm_1.weight, "post_norm": block.norm_attn_norm.norm_2.weight}
        return dense, list(zip(*(each.view(6, 24, 32) for each in (mlp.w1, mlp.v1, mlp.w2)), strict=True))
    block = model.model.layers[layer]
    attention, mlp = block.self_attn, block.mlp
    dense = {"input_norm": block.input_layernorm.weight, "post_norm": block.post_attention_layernorm.weight}
    for name in "qkvo":
        projection = getattr(attention, f"{name}_proj")
        dense[name] = projection.weight
        if projection.bias is not None:
            dense[f"{name}_bias"] = projection.bias
    if hasattr(attention, "q_norm"):
        dense |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}
    if not hasattr(mlp, "experts"):
        three = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
        if family == "llama":
            return dense, [(three[0], three[1], three[2].t())]
        return dense | dict(zip(("dense_w1", "dense_w3", "dense_w2"), three, strict=True)), []
    dense["router"] = mlp.gate.weight
    if hasattr(mlp, "shared_expert"):
        shared = mlp.shared_expert
        dense |= {"shared_w1": shared.gate_proj.weight, "shared_w3": shared.up_proj.weight}
        dense |= {"shared_w2": shared.down_proj.weight, "shared_gate": mlp.shared_expert_gate.weight}
    gates, ups = mlp.experts.gate_up_proj.chunk(2, dim=1)
    return dense, list(zip(gates, ups, mlp.experts.down_proj.transpose(1, 2), strict=True))


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    *((family, {"packed": True}) for family in FAMILIES if family not in ("llama", "dbrx")),
    ("mixtral", {"dtype": torch.bfloat16}),
    ("dbrx", {"dtype": torch.float16}),
    ("llama", {"tie_word_embeddings": False, "attention_bias": True}),
    ("qwen3_moe", {"attention_bias": True, "decoder_sparse_step": 2}),
    ("qwen2_moe", {"qkv_bias": False, "mlp_only_layers": [1]}),
]


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_every_tensor_equals_the_models(family: str, variant: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny(family, tmp_path, seed=2, **variant))
    model = build_tiny(family, seed=2, **{key: value for key, value in variant.items() if key != "packed"})
    spec, numerics = checkpoint.spec, checkpoint.numerics
    assert checkpoint.warnings == ()
    for layer in range(3):
        dense, experts = expected_layer(model, family, layer)
        found = checkpoint.dense(layer)
        assert found.keys() == dense.keys()
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == dense_shapes(spec, numerics, layer)
        for name, tensor in dense.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), f"layer {layer}: {name}"
        for number, three in enumerate(experts):
            for one, other in zip(checkpoint.expert(layer, number), three, strict=True):
                assert tuple(one.shape) == expert_shape(spec) == (24, 32)
                assert one.dtype == other.dtype and torch.equal(one, other)
        with pytest.raises(IndexError):
            checkpoint.expert(layer, len(experts))
    base = model.transformer if family == "dbrx" else model.model
    norm = base.norm_f if family == "dbrx" else base.norm
    assert torch.equal(checkpoint.top("embedding"), model.get_input_embeddings().weight)
    assert torch.equal(checkpoint.top("lm_head"), model.get_output_embeddings().weight)
    assert torch.equal(checkpoint.top("final_norm"), norm.weight)
    assert {name: tuple(checkpoint.top(name).shape) for name in top_shapes(spec)} == top_shapes(spec)


FORWARD: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("mixtral", {"sliding_window": 8}),
    ("mixtral", {"head_dim": 16}),
    ("dbrx", {"attn_config": {"clip_qkv": 0.25}}),
    ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}),
    ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": None}}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    ("olmoe", {"clip_qkv": None, "norm_topk_prob": True}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "attention_bias": True}),
]


@pytest.mark.parametrize(("family", "overrides"), FORWARD)
def test_tensors_and_numerics_together_give_the_logits_of_transformers(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path, seed=4, **overrides)
    checkpoint = open_checkpoint(folder)
    tokens = torch.randint(96, (48,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = load_reference(folder)(input_ids=tokens[None]).logits[0]
    found = plain_logits(checkpoint, checkpoint.spec, checkpoint.numerics, tokens.tolist())
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)  # logits are of the order of 6
    assert torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mixtral", {"norm_eps": 0.1}),
        ("mixtral", {"rope": Rope(theta=1e4)}),
        ("mixtral", {"router_norm": None}),
        ("mixtral", {"attention_scale": 1.0}),
        ("dbrx", {"norm": "rms"}),
        ("dbrx", {"clip_qkv": None}),
        ("dbrx", {"rope": Rope(theta=1e4)}),
        ("dbrx", {"router_norm": 2.0}),
        ("qwen2_moe", {"router_norm": 1.0}),
        ("qwen2_moe", {"shared_expert_gate": False}),
        ("qwen3_moe", {"qk_norm": "none"}),
        ("olmoe", {"qk_norm": "none"}),
        ("olmoe", {"clip_qkv": None}),
        ("llama", {"rope": Rope(theta=1e4)}),
    ],
)
def test_the_tiny_models_show_when_a_number_is_wrong(family: str, change: dict[str, Any], tmp_path: Path) -> None:
    """With one thing of Numerics changed the same tensors give other logits, by far more than rounding."""
    checkpoint = open_checkpoint(save_tiny(family, tmp_path, seed=4))
    tokens = torch.randint(96, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    right, wrong = (
        plain_logits(checkpoint, checkpoint.spec, numerics, tokens)
        for numerics in (checkpoint.numerics, replace(checkpoint.numerics, **change))
    )
    assert (right - wrong).abs().max() > 0.5


def test_many_threads_read_what_one_reads(mixtral: Path) -> None:
    checkpoint = open_checkpoint(mixtral)
    every = [(layer, expert) for layer in range(3) for expert in range(6)] * 4
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda which: checkpoint.expert(*which), every))
    for which, three in zip(every, found, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(three, checkpoint.expert(*which), strict=True))


def test_a_checkpoint_of_a_gib_is_opened_and_one_row_read_without_its_bytes(tmp_path: Path) -> None:
    vocabulary = 2**23
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama", vocab_size=vocabulary)))
    shapes = {key: list(value.shape) for key, value in build_tiny("llama", seed=0).state_dict().items()}
    shapes["model.embed_tokens.weight"] = [vocabulary, 32]
    shapes.pop("lm_head.weight")  # tied
    header, end = {}, 0
    for key, shape in shapes.items():
        size = 4 * torch.Size(shape).numel()
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as stream:  # a hole: takes no space on disk
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
    before = anonymous_bytes()
    embedding = open_checkpoint(tmp_path).top("embedding")
    assert embedding.nbytes == 2**30 and embedding[7_654_321].sum() == 0
    assert anonymous_bytes() - before < 2**25


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind [byte]."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


# What is not used


def test_one_file_is_read_without_an_index(mixtral: Path) -> None:
    expected = open_checkpoint(mixtral).expert(2, 5)[0].clone()
    store(mixtral, stored(mixtral))
    assert torch.equal(open_checkpoint(mixtral).expert(2, 5)[0], expected)


def test_old_rotary_tables_and_a_second_copy_of_a_tied_embedding_are_passed_over(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, seed=1)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(96, 32)}
    store(folder, stored(folder) | extra)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.warnings == ()
    assert torch.equal(checkpoint.top("lm_head"), checkpoint.top("embedding"))
    assert not torch.equal(checkpoint.top("lm_head"), extra["lm_head.weight"])


def test_tensors_nobody_needs_are_named(mixtral: Path) -> None:
    store(mixtral, stored(mixtral) | {f"value_head.{number}": torch.ones(1) for number in range(5)})
    said = "tensors that the runtime does not use: value_head.0, value_head.1, value_head.2 and 2 more"
    assert open_checkpoint(mixtral).warnings == (said,)


def test_another_format_than_the_config_says_is_said(mixtral: Path) -> None:
    edit_json(mixtral / "config.json", lambda config: config.update(torch_dtype="bfloat16"))
    assert open_checkpoint(mixtral).warnings == ("config.json says bf16, the tensors are fp32",)


# What is wrong


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_checkpoint(folder)
    return str(caught.value).replace(str(folder), "DIR")


def test_a_missing_folder_and_a_missing_config_are_named(tmp_path: Path) -> None:
    assert "no such folder (the folder of a released checkpoint)" in refusal(tmp_path / "nowhere")
    assert refusal(tmp_path).startswith("DIR/config.json: cannot be read: No such file or directory")


def test_a_missing_shard_is_named_with_how_many_tensors_it_holds(mixtral: Path) -> None:
    weight_map = json.loads((mixtral / "model.safetensors.index.json").read_text())["weight_map"]
    file = shard_of(mixtral, "model.norm.weight")
    held = sum(name == file.name for name in weight_map.values())
    file.unlink()
    assert refusal(mixtral) == (
        f"DIR: {file.name} is missing, which holds {held} of 78 tensors (download the rest of the checkpoint)"
    )


def test_all_missing_shards_are_counted(mixtral: Path) -> None:
    files = sorted(mixtral.glob("model-*"))
    for file in files[1:]:
        file.unlink()
    assert f"; so are {len(files) - 2} more of the {len(files)} files" in refusal(mixtral)


def test_a_truncated_shard_is_named_with_the_bytes_that_are_missing(mixtral: Path) -> None:
    file = shard_of(mixtral, "lm_head.weight")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-100])
    assert refusal(mixtral) == (
        f"DIR/{file.name}: is truncated: {size - 100:,} bytes, 100 fewer than the {size:,} its header says"
        " (download it again)"
    )


@pytest.mark.parametrize("kept", [0, 7, 8, 50])
def test_a_shard_that_ends_in_its_header_is_named(mixtral: Path, kept: int) -> None:
    file = shard_of(mixtral, "lm_head.weight")
    file.write_bytes(file.read_bytes()[:kept])
    assert refusal(mixtral) == f"DIR/{file.name}: ends within its header, after {kept} bytes (download it again)"


def test_a_shard_that_is_too_long_is_named(mixtral: Path) -> None:
    file = shard_of(mixtral, "lm_head.weight")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"<html>")
    assert f"DIR/{file.name}: has 6 bytes more than the {size:,} its header says" in refusal(mixtral)


def test_a_git_lfs_pointer_is_called_so(mixtral: Path) -> None:
    file = shard_of(mixtral, "lm_head.weight")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
    assert refusal(mixtral) == f"DIR/{file.name}: is a git-lfs pointer, not the file (git lfs pull)"


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"not json", "has a header that cannot be read"),
        (b"[1]", "has a header that cannot be read"),
        (b'{"a": 1}', "has a header in which 'a' makes no sense"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "has a header in which 'a' makes no sense"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "in which 'a' makes no sense"),
    ],
)
def test_a_damaged_header_is_named(mixtral: Path, header: bytes, said: str) -> None:
    file = shard_of(mixtral, "lm_head.weight")
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    assert said in refusal(mixtral)


def test_pickle_files_alone_are_refused_with_the_way_out(mixtral: Path) -> None:
    for file in mixtral.glob("model*"):
        file.unlink()
    (mixtral / "pytorch_model.bin").write_bytes(b"")
    assert refusal(mixtral) == (
        "DIR: holds its weights in pickle files only (pytorch_model.bin), and reading one can run code that is in it"
        " (take the safetensors files of this model, or load it with transformers and save_pretrained it again)"
    )


def test_a_folder_without_weights_is_refused(mixtral: Path) -> None:
    for file in mixtral.glob("model*"):
        file.unlink()
    assert refusal(mixtral).startswith("DIR: holds no weights (model.safetensors, or")
    (mixtral / "tiny.gguf").touch()
    assert refusal(mixtral).startswith("DIR: holds tiny.gguf, which is not a format this runtime reads")


@pytest.mark.parametrize("name", ["../model-00001-of-00002.safetensors", "model.bin", 7])
def test_an_index_does_not_lead_out_of_its_folder(mixtral: Path, name: object) -> None:
    index = mixtral / "model.safetensors.index.json"
    edit_json(index, lambda values: values["weight_map"].update({"lm_head.weight": name}))
    assert f"weight_map: lm_head.weight: {name!r} is not the name of a safetensors file" in refusal(mixtral)


def test_a_tensor_that_the_index_promises_must_be_in_its_file(mixtral: Path) -> None:
    other = shard_of(mixtral, "model.layers.0.block_sparse_moe.gate.weight").name
    index = mixtral / "model.safetensors.index.json"
    edit_json(index, lambda values: values["weight_map"].update({"lm_head.weight": other}))
    said = f"DIR/{other}: does not hold lm_head.weight, as model.safetensors.index.json says (download it again)"
    assert refusal(mixtral) == said


def test_a_missing_tensor_is_named(mixtral: Path) -> None:
    tensors = stored(mixtral)
    key = "model.layers.2.block_sparse_moe.experts.4.w2.weight"
    store(mixtral, {name: tensor for name, tensor in tensors.items() if name != key})
    assert refusal(mixtral) == (
        f"DIR: holds no tensor {key}, of 78 that config.json needs (the config.json and all files of one checkpoint)"
    )


def test_a_config_of_a_deeper_model_misses_the_tensors_of_a_layer(mixtral: Path) -> None:
    edit_json(mixtral / "config.json", lambda config: config.update(num_hidden_layers=4))
    assert "holds no tensor model.layers.3.input_layernorm.weight, nor 24 more, of 103" in refusal(mixtral)


def test_a_wrong_shape_is_named_with_both_shapes(mixtral: Path) -> None:
    key = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    store(mixtral, stored(mixtral) | {key: torch.zeros(32, 24)})
    assert refusal(mixtral) == (
        f"DIR/model.safetensors: {key}: has the shape [32, 24], and config.json needs [24, 32]"
        " (the config.json that was released with these files)"
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_tensors_in_other_formats_are_refused(mixtral: Path, dtype: torch.dtype) -> None:
    tensors = stored(mixtral)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(dtype)
    store(mixtral, tensors)
    name = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.float64: "F64"}[dtype]
    assert refusal(mixtral) == (
        "DIR/model.safetensors: lm_head.weight: the runtime computes with fp32, fp16 and bf16 weights,"
        f" not with {name} (the checkpoint of this model that is not quantised)"
    )


def test_an_fp8_checkpoint_is_refused_by_its_config(mixtral: Path) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_json(mixtral / "config.json", lambda config: config.update(quantization_config=fp8))
    assert "the runtime computes with fp32, fp16 and bf16 weights, not with fp8" in refusal(mixtral)


def test_other_quantisation_is_refused_by_its_config(mixtral: Path) -> None:
    edit_json(mixtral / "config.json", lambda config: config.update(quantization_config={"quant_method": "gptq"}))
    assert "quantization_config.quant_method: 'gptq' is not supported" in refusal(mixtral)


def test_a_family_without_kernels_is_named_with_those_that_have(mixtral: Path) -> None:
    edit_json(mixtral / "config.json", lambda config: config.update(model_type="deepseek_v3"))
    assert refusal(mixtral) == (
        "DIR/config.json: model_type: the runtime has no kernels for 'deepseek_v3' models"
        " (it runs mixtral, dbrx, qwen2_moe, qwen3_moe, olmoe, llama)"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_released_and_packed_folders_have_one_spec(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    released = open_checkpoint(save_tiny(family, tmp_path / "a", seed=0))
    packed = open_checkpoint(save_tiny(family, tmp_path / "b", seed=0, packed=True))
    assert released.numerics == packed.numerics == read_numerics(config, where="tiny")
    spec = read_spec(config, file="tiny", name="tiny")
    assert (released.spec.parameters, packed.spec.parameters) == (spec.parameters, spec.parameters)
