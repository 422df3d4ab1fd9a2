"""Options of the `hrm` command and what they make: pins, a workload, a scenario. No command is in here."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hrm.errors import InputError

if TYPE_CHECKING:
    from hrm.pins import Pins
    from hrm.policy import WeightSlots
    from hrm.scenario import Scenario
    from hrm.workload import Workload

__all__ = [
    "AttentionPin",
    "BatchPin",
    "ComputeDtype",
    "Contention",
    "Costs",
    "DenseWeightsPin",
    "DeviceHere",
    "DeviceOfPlan",
    "DiskDirectory",
    "DocumentFile",
    "EmbeddingPin",
    "FfnPin",
    "FirstLayers",
    "GenerationLength",
    "Hardware",
    "HtmlPage",
    "Json",
    "KvDtype",
    "KvOnDiskPin",
    "KvOnGpuPin",
    "LmHeadPin",
    "MaxHours",
    "MicroBatchPin",
    "Model",
    "ModelDirectory",
    "NumMicroBatchesPin",
    "Overrides",
    "Padded",
    "PinWeights",
    "Place",
    "PrefillMicroBatchPin",
    "PromptFile",
    "PromptLength",
    "RandomWeights",
    "RebuildFrom",
    "Requests",
    "Residence",
    "RooflineOperator",
    "ScheduleOfPlan",
    "Slots",
    "WeightSlotsPin",
    "WeightsDtype",
    "WeightsOnDiskPin",
    "WeightsOnGpuPin",
    "WorkloadName",
    "check_hours",
    "complete_hardware",
    "complete_model",
    "load_hardware",
    "load_scenario",
    "load_workload_options",
    "read_pins",
]


class Place(StrEnum):
    """Where something is computed or kept."""

    cpu = "cpu"
    gpu = "gpu"


class Costs(StrEnum):
    """Cost models."""

    full = "full"
    paper = "paper"


class Slots(StrEnum):
    """Weight slots."""

    one = "1"
    two = "2"
    experts = "experts"


class Residence(StrEnum):
    """Resident on the GPU, or streamed with the layers."""

    resident = "resident"
    streamed = "streamed"


class RooflineOperator(StrEnum):
    """Operators of `hrm roofline`."""

    attention = "attention"
    ffn = "ffn"


def complete_hardware(incomplete: str) -> list[str]:
    from hrm.profile_files import profile_names

    return [name for name in profile_names() if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    from hrm.model_files import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


Hardware = Annotated[
    str,
    typer.Option(
        "--hw",
        help="Hardware profile: a YAML file, a bundled name (hrm hardware), or auto (hrm calibrate).",
        autocompletion=complete_hardware,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", help="A config.json, a model folder, or a bundled name (hrm models).", autocompletion=complete_model
    ),
]
ModelDirectory = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the checkpoint: config.json and safetensors.")
]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="Run without a checkpoint: weights of the real shapes.")
]
FirstLayers = Annotated[int | None, typer.Option(metavar="K", help="Run only the first K layers.")]
DeviceOfPlan = Annotated[
    str | None, typer.Option(help="cuda, or cpu: the accelerator emulated; default: what fits the plan.")
]
DeviceHere = Annotated[str | None, typer.Option(help="cuda, or cpu: the accelerator emulated; default: what there is.")]
ScheduleOfPlan = Annotated[str | None, typer.Option(help="One that the plan can run under; default: the plan's own.")]
DiskDirectory = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where what a plan has on disk lies; default: /tmp.")
]
RebuildFrom = Annotated[
    Path | None, typer.Option("--from", metavar="DIR", help="Measure nothing: the report again from its records.")
]
HtmlPage = Annotated[Path | None, typer.Option(metavar="HTML", help="Write one self-contained page.")]
DocumentFile = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the JSON document.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the screen.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a number of the profile, e.g. cpu.memory='416 GB'."),
]


WorkloadName = Annotated[str | None, typer.Option(help="mtbench (default), synthetic-reasoning or summarization.")]

PromptLength = Annotated[int | None, typer.Option(help="Every prompt has this many tokens.")]

GenerationLength = Annotated[int | None, typer.Option(help="Tokens generated per request.")]

PromptFile = Annotated[Path | None, typer.Option(help="CSV or JSONL file of prompt lengths.")]

Padded = Annotated[bool, typer.Option(help="Pad every prompt to the longest.")]

Requests = Annotated[int, typer.Option(help="Requests in all; batches are equal.")]

MaxHours = Annotated[float, typer.Option(help="Bound on the time of one batch [h].")]

WeightsDtype = Annotated[str | None, typer.Option(help="fp16, bf16, fp8, int8, int4, mxfp4; default: checkpoint's.")]

Contention = Annotated[
    bool, typer.Option("--contention/--no-contention", help="Let lanes share memory, link and cores.")
]

KvDtype = Annotated[str | None, typer.Option(help="fp16, bf16, fp8, int8, int4, mxfp4.")]

ComputeDtype = Annotated[str | None, typer.Option(help="Arithmetic: fp16, bf16, fp32, fp8, int8.")]

BatchPin = Annotated[int | None, typer.Option(help="Pin N, the requests in flight.")]

MicroBatchPin = Annotated[int | None, typer.Option(help="Pin mu.")]

NumMicroBatchesPin = Annotated[int | None, typer.Option(help="Pin n_ub.")]

PrefillMicroBatchPin = Annotated[int | None, typer.Option(help="Pin the micro-batch of prefill.")]

AttentionPin = Annotated[Place | None, typer.Option(help="Pin A_g.")]

FfnPin = Annotated[Place | None, typer.Option(help="Pin F_g.")]

WeightsOnGpuPin = Annotated[float | None, typer.Option(help="Pin r_w, a share of the expert weights.")]

WeightsOnDiskPin = Annotated[float | None, typer.Option(help="Pin the share of the expert weights on disk.")]

KvOnGpuPin = Annotated[float | None, typer.Option(help="Pin r_c, a share of the KV cache.")]

KvOnDiskPin = Annotated[float | None, typer.Option(help="Pin the share of the KV cache on disk.")]

WeightSlotsPin = Annotated[Slots | None, typer.Option(help="Pin the GPU buffers for streamed weights.")]

DenseWeightsPin = Annotated[Residence | None, typer.Option(help="Pin the non-expert weights.")]

EmbeddingPin = Annotated[Place | None, typer.Option(help="Pin the place of the embedding.")]

LmHeadPin = Annotated[Residence | None, typer.Option(help="Pin the lm_head.")]

PinWeights = Annotated[
    bool | None,
    typer.Option("--pin-weights/--no-pin-weights", help="Page-lock CPU weights once, or stage each copy."),
]


_SLOTS: dict[Slots, WeightSlots] = {Slots.one: 1, Slots.two: 2, Slots.experts: "experts"}


def read_pins(given: dict[str, Any]) -> Pins:
    from hrm.pins import Pins

    def on_gpu(value: Place | Residence | None) -> bool | None:
        return None if value is None else value in (Place.gpu, Residence.resident)

    slots = given["weight_slots"]
    return Pins(
        batch_size=given["batch"],
        micro_batch_size=given["micro_batch"],
        num_micro_batches=given["num_micro_batches"],
        prefill_micro_batch_size=given["prefill_micro_batch"],
        attention_on_gpu=on_gpu(given["attention"]),
        ffn_on_gpu=on_gpu(given["ffn"]),
        weights_on_gpu=given["weights_on_gpu"],
        weights_on_disk=given["weights_on_disk"],
        kv_on_gpu=given["kv_on_gpu"],
        kv_on_disk=given["kv_on_disk"],
        weight_slots=_SLOTS[slots] if slots is not None else None,
        dense_weights_on_gpu=on_gpu(given["dense_weights"]),
        embedding_on_gpu=on_gpu(given["embedding"]),
        lm_head_on_gpu=on_gpu(given["lm_head"]),
        pin_weights=given["pin_weights"],
    )


def check_hours(max_hours: float) -> None:
    """Refuse a bound on the time of a batch that is none."""
    if not 0 < max_hours <= 1e6:
        raise InputError(
            f"{max_hours} is no bound", where="--max-hours", way_out="hours, above 0 and at most a million"
        )


def load_workload_options(
    name: str | None, prompt_len: int | None, gen_len: int | None, prompts: Path | None, padded: bool, requests: int
) -> tuple[Workload, tuple[str, ...]]:
    """The workload that the options describe, and what was assumed."""
    from dataclasses import replace

    from hrm.workload import load_workload, prompts_workload, uniform_workload

    sources = [("--workload", name), ("--prompt-len", prompt_len), ("--prompts", prompts)]
    given = [option for option, value in sources if value is not None]
    if len(given) > 1:
        raise InputError(
            f"{' and '.join(given)} describe the prompts twice", where="workload", way_out="give one of them"
        )
    if prompt_len is not None or prompts is not None:
        notes = () if gen_len is not None else ("generation length not given: 128 tokens.",)
        generated = 128 if gen_len is None else gen_len
        if prompt_len is not None:
            made = uniform_workload(prompt_len, generated, num_requests=requests)
            return replace(made, padded=padded), notes
        assert prompts is not None  # one of the two is given
        return prompts_workload(prompts, generation_length=generated, num_requests=requests, padded=padded), notes
    made = load_workload(name or "mtbench", generation_length=gen_len, num_requests=requests, padded=padded)
    said = f"no workload given: {made.name}, generation length {made.generation_length}."
    return made, ((said,) if name is None else ()) + ((made.note,) if made.note and name is not None else ())


def load_scenario(
    hw: str,
    overrides: list[str] | None,
    config: dict[str, Any],
    workload: Workload,
    weights_dtype: str | None,
    kv_dtype: str | None,
    compute_dtype: str | None,
) -> Scenario:
    from hrm.dtypes import KV_DTYPES, WEIGHT_DTYPES, parse_dtype
    from hrm.families import read_spec
    from hrm.scenario import COMPUTE_DTYPES, Scenario, choose_formats

    profile = load_hardware(hw, overrides)
    spec = read_spec(**config)

    def parsed(text: str | None, option: str, allowed: Any) -> str | None:
        return None if text is None else parse_dtype(text, where=option, allowed=allowed)

    formats = choose_formats(
        profile,
        spec,
        weights=parsed(weights_dtype, "--weights-dtype", WEIGHT_DTYPES),
        kv=parsed(kv_dtype, "--kv-dtype", KV_DTYPES),
        compute=parsed(compute_dtype, "--compute-dtype", COMPUTE_DTYPES),
    )
    return Scenario(profile=profile, model=spec, workload=workload, formats=formats)


def load_hardware(hw: str, overrides: list[str] | None) -> Any:
    from hrm.profile_files import load_profile, with_overrides

    profile = load_profile(hw)
    if not overrides:
        return profile
    changes: dict[str, object] = {}
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip() or not value.strip():
            raise InputError(f"{text!r} is no KEY=VALUE", where="--set", way_out="e.g. --set cpu.memory='416 GB'")
        changes[key.strip()] = value.strip().strip("'\"")
    return with_overrides(profile, changes)
