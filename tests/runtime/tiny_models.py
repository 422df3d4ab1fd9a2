"""Tiny random models of every family, in the layout of the released checkpoints, and what transformers says of them.

Every config has the keys of the released one, and no two widths alike where the family allows it, so that a mix-up of
axes shows. Weights are drawn so that every one of them matters: norms are not 1, biases not 0, routers prefer some
experts, clips clip, and greedy decoding does not fall into repeating one token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

FAMILIES = ("mixtral", "dbrx", "qwen2_moe", "qwen3_moe", "olmoe", "llama")
VOCABULARY = 96

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

_DECODER: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": _DECODER
    | {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 24,
        "num_experts_per_tok": 2,
        "num_local_experts": 6,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "dbrx": {
        "architectures": ["DbrxForCausalLM"],
        "attn_config": {"clip_qkv": 1.0, "kv_n_heads": 2, "rope_theta": 500000},
        "d_model": 32,
        # The release has moe_normalize_expert_weights 1, and transformers 5.24 takes a float only.
        "ffn_config": {
            "ffn_act_fn": {"name": "silu"},
            "ffn_hidden_size": 24,
            "moe_jitter_eps": 0,
            "moe_normalize_expert_weights": 1.0,
            "moe_num_experts": 6,
            "moe_top_k": 2,
        },
        "max_seq_len": 256,
        "n_heads": 4,
        "n_layers": 3,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
    },
    "qwen2_moe": _DECODER
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "intermediate_size": 40,  # of the dense layer
        "max_window_layers": 3,
        "mlp_only_layers": [0],
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 20,
        "sliding_window": 256,
        "use_sliding_window": False,
    },
    "qwen3_moe": _DECODER
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 16,
        "intermediate_size": 40,
        "mlp_only_layers": [],
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "olmoe": _DECODER
    | {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "clip_qkv": 1.0,
        "eos_token_id": None,
        "intermediate_size": 24,
        "norm_topk_prob": False,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
        "rope_scaling": None,
    },
    "llama": _DECODER
    | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "intermediate_size": 24,
        "mlp_bias": False,
        # With heads of 8 and 64 trained positions one pair is left as it is, one is scaled in part, two wholly.
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": True,
    },
}


def tiny_config(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model; an override that is a mapping changes keys of that section."""
    config = {"model_type": family, "torch_dtype": str(dtype).removeprefix("torch.")} | CONFIGS[family]
    for key, value in overrides.items():
        section = config.get(key)
        config[key] = section | value if isinstance(section, dict) and isinstance(value, dict) else value
    return config


def save_tiny(
    family: str, folder: Path, *, seed: int, dtype: torch.dtype = torch.float32, packed: bool = False, **overrides: Any
) -> Path:
    """Write a tiny random model as it would be released, in several shards.

    Parameters
    ----------
    family : str
        One of `FAMILIES`.
    folder : Path
        Made if it is not there.
    seed : int
        Of the weights.
    dtype : torch.dtype
        Of the stored tensors.
    packed : bool
        Write the experts of a layer as transformers 5 holds them, in two tensors.
    **overrides
        Keys of config.json; of `CONFIGS` otherwise.

    Returns
    -------
    Path
        The folder.
    """
    model = build_tiny(family, seed=seed, dtype=dtype, **overrides)
    model.save_pretrained(folder, max_shard_size="16KB", save_original_format=not packed)
    (folder / "config.json").write_text(json.dumps(tiny_config(family, dtype, **overrides), indent=2))
    return folder


def build_tiny(family: str, *, seed: int, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """The model that `save_tiny` writes, as transformers holds it."""
    config = _reference_config(tiny_config(family, dtype, **overrides))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(_draw(name, parameter, config, generator))
    return model.to(dtype).eval()


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers reads it, with the plain attention."""
    config = _reference_config(json.loads((folder / "config.json").read_text()))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    model.generation_config.eos_token_id = None
    return model.eval()


def reference_generate(
    folder: Path, prompts: Sequence[Sequence[int]], gen: int
) -> tuple[list[list[int]], list[Tensor]]:
    """What transformers generates greedily in fp32, one prompt after the other, so that nothing is padded.

    Parameters
    ----------
    folder : Path
        A model folder.
    prompts : sequence of sequences of int
        Token ids.
    gen : int
        Tokens to generate for each; an end-of-sequence token does not end it.

    Returns
    -------
    tokens : list of lists of int
        The generated tokens of each prompt.
    logits : list of Tensor
        For each prompt [gen, V]: row i is what token i was chosen from.
    """
    model = load_reference(folder)
    tokens, logits = [], []
    for prompt in prompts:
        inputs = torch.tensor([list(prompt)])
        # With the cache, which is the default; by its keyword the forward pass has no name that all versions accept.
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=gen,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(output.sequences[0, len(prompt) :].tolist())
        logits.append(torch.cat(output.logits))
        assert tokens[-1] == logits[-1].argmax(dim=-1).tolist() and len(tokens[-1]) == gen
    return tokens, logits


def _reference_config(config: dict[str, Any]) -> Any:
    values = dict(config)
    if values["model_type"] == "dbrx":
        # transformers 5.24 rotates with rope_parameters, and does not fill it from attn_config as the release needs.
        values["rope_parameters"] = {"rope_theta": float(values["attn_config"]["rope_theta"]), "rope_type": "default"}
    return transformers.AutoConfig.for_model(**values)


def _draw(name: str, parameter: Tensor, config: Any, generator: torch.Generator) -> Tensor:
    if "norm" in name and parameter.ndim == 1:
        return torch.rand(parameter.shape, generator=generator) + 0.5
    values = torch.randn(parameter.shape, generator=generator)
    if name.endswith(("mlp.gate.weight", "router.layer.weight")):
        return values * 0.5
    if name.endswith("bias"):
        return values * 0.3
    if any(table in name for table in ("embed_tokens", "wte", "lm_head")):
        return values * (
            0.3 if config.tie_word_embeddings else 1.0
        )  # else a tied head favours the token that was put in
    return values * 1.5 * parameter.shape[-1] ** -0.5
