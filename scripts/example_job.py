"""A job from nothing to results, in less than a minute and without a download: plan, run, kill it, go on, check.

    python scripts/example_job.py FOLDER

Makes, in FOLDER, a tiny Mixtral with random weights in the released layout, a tokenizer of bytes and prompts; then does
what anybody would with a real model: `hrm plan`, `hrm run`, which is killed with SIGKILL once some results are there,
the same `hrm run` again, with a page of what was predicted and measured. At the end no result is missing, none is there
twice, and all are those of a run that nothing disturbed. Needs what `pip install '.[runtime]'` installs.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "torch_dtype": "float32",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "eos_token_id": 256,
}
WORDS = ("the", "link", "is", "slow", "and", "memory", "small", "so", "weights", "wait", "for", "their", "turn")
REQUESTS, LONGEST, GENERATED = 48, 90, 24
KILLED_AT = 7
"""Results that are there when it is killed."""


def save_model(folder: Path) -> None:
    """Weights, config.json and tokenizer.json, as a released checkpoint has them."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    width, inner, vocabulary = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    keys = width // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    shapes = {"model.embed_tokens": (vocabulary, width), "lm_head": (vocabulary, width), "model.norm": (width,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{norm}_layernorm": (width,) for norm in ("input", "post_attention")}
        rows = {"q": width, "k": keys, "v": keys, "o": width}
        shapes |= {f"{name}.self_attn.{part}_proj": (count, width) for part, count in rows.items()}
        shapes[f"{name}.block_sparse_moe.gate"] = (CONFIG["num_local_experts"], width)
        for expert in range(CONFIG["num_local_experts"]):
            where = f"{name}.block_sparse_moe.experts.{expert}"
            shapes |= {f"{where}.w1": (inner, width), f"{where}.w2": (width, inner), f"{where}.w3": (inner, width)}
    tensors = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def save_prompts(file: Path) -> None:
    """Prompts of all lengths, each with its own limit."""
    source = random.Random(0)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(REQUESTS):
            text = " ".join(source.choices(WORDS, k=40))[: source.randrange(8, LONGEST)]
            line = {"id": f"r{number}", "prompt": text, "max_new_tokens": source.randrange(4, GENERATED + 1)}
            lines.write(json.dumps(line) + "\n")


def hrm(*arguments: object) -> list[str]:
    """The command as `hrm` would be typed."""
    return [sys.executable, "-m", "hrm", *map(str, arguments)]


def run(*arguments: object) -> None:
    """Run a command that must succeed; what it says is shown."""
    print(f"\n$ hrm {' '.join(map(str, arguments))}", flush=True)
    code = subprocess.run(hrm(*arguments), check=False).returncode
    if code:
        raise SystemExit(f"exit code {code}")


def kill_when_some_are_done(output: Path, *arguments: object) -> int:
    """Start a job, and kill it once some results are there; returns how many."""
    print(f"\n$ hrm {' '.join(map(str, arguments))}   # and kill -9 after {KILLED_AT} results", flush=True)
    job = subprocess.Popen(hrm(*arguments))
    while job.poll() is None:
        if output.exists() and output.read_bytes().count(b"\n") >= KILLED_AT:
            job.kill()
            break
        time.sleep(0.002)
    if job.wait() == 0:
        raise SystemExit("the job was done before it could be killed")
    return output.read_bytes().count(b"\n")


def read_results(output: Path) -> dict[str, dict[str, object]]:
    """Results by id; every line is whole, and no id is there twice."""
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    found = {row["id"]: row for row in rows}
    if len(found) != len(rows):
        raise SystemExit(f"{output} has an id twice")
    return found


def main(folder: Path) -> None:
    """The whole example."""
    began = time.perf_counter()
    model, prompts, plan = folder / "model", folder / "prompts.jsonl", folder / "plan.json"
    save_model(model)
    save_prompts(prompts)
    # A machine with a GPU; without one it is emulated. A real plan needs none of the options after --requests.
    lengths = ("--prompt-len", LONGEST, "--gen-len", GENERATED, "--requests", REQUESTS)
    pins = ("--compute-dtype", "fp32", "--micro-batch", 4, "--num-micro-batches", 3, "--attention", "cpu")
    run("plan", "--hw", "l4", "--model", model, *lengths, *pins, "--weights-on-gpu", 0.3, "-o", plan)
    given = ("run", plan, "--model-dir", model, "--device", "cpu", "--input", prompts)
    output = folder / "results.jsonl"
    there = kill_when_some_are_done(output, *given, "--output", output)
    if there >= REQUESTS:
        raise SystemExit("all results were there before it was killed")
    run(*given, "--output", output, "--report", folder / "job.html")
    run(*given, "--output", folder / "undisturbed.jsonl")
    found = read_results(output)
    if found != read_results(folder / "undisturbed.jsonl") or len(found) != REQUESTS:
        raise SystemExit("results are not those of an undisturbed run")
    print(f"\n{REQUESTS} results, none lost, none twice; {there} of them from before it was killed")
    print(f"{time.perf_counter() - began:.0f} s in all; the page is {folder / 'job.html'}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("which folder? python scripts/example_job.py FOLDER")
    main(Path(sys.argv[1]))
