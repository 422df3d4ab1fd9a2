"""What a run was and what it took beside what was predicted, as one JSON document (docs/cli.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hrm.gantt import LANE_WORDS
from hrm.graph import Lane
from hrm.policy import Policy
from hrm.prediction import Prediction
from hrm.scenario import Scenario
from hrm.validation.memory import HOST_RESERVE_BYTES, planned_bytes
from runtime.device import Device
from runtime.device_names import device_name, same_gpu
from runtime.run_watch import RunWatch
from runtime.session import BatchRun

__all__ = ["Ran", "describe_run", "memory_rows", "planned_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run, for those who report it.

    Attributes
    ----------
    whole, scenario : Scenario
        With all layers of the model, and with those that were run.
    policy : Policy
        Of the plan.
    saved : mapping
        The plan's document.
    weights, prompts : str
        "random", or the name of folder or file.
    paced : tuple of Lane
    runs : sequence of BatchRun
    predictions : sequence of Prediction
        Of every batch as it was run.
    load_s : float
        Until all weights were where the plan has them [s].
    loading, running : mapping of str to int
        Peaks of memory by level, as the kernel counts them [byte].
    on_disk : int
        Size of the file that is the disk tier [byte].
    notes : tuple of str
    """

    whole: Scenario
    scenario: Scenario
    policy: Policy
    schedule: str
    saved: Mapping[str, Any]
    weights: str
    prompts: str
    seed: int
    device: Device
    paced: tuple[Lane, ...]
    requests: int
    prompt_tokens: int
    runs: Sequence[BatchRun]
    predictions: Sequence[Prediction]
    watch: RunWatch
    load_s: float
    loading: Mapping[str, int]
    running: Mapping[str, int]
    on_disk: int
    notes: tuple[str, ...] = ()

    @property
    def device_name(self) -> str:
        """What it ran on, in words."""
        return device_name(self.device)


def describe_run(ran: Ran) -> dict[str, Any]:
    """The document of a run; ratios are predicted over measured."""
    scenario, workload = ran.scenario, ran.scenario.workload
    steps, layers = workload.generation_length - 1, scenario.model.n_layers
    tokens = ran.requests * workload.generation_length
    measured = _rates(
        tokens,
        sum(run.prefill_s for run in ran.runs),
        sum(run.decode_s for run in ran.runs),
        steps * layers * len(ran.runs),
    )
    predicted = _rates(
        tokens,
        sum(each.prefill_s for each in ran.predictions),
        sum(each.decode_s for each in ran.predictions),
        steps * layers * len(ran.runs),
    )
    return {
        "model": scenario.model.name,
        "hardware": scenario.profile.name,
        "workload": workload.name,
        "schedule": ran.schedule,
        "device": ran.device.kind,
        "device_name": ran.device_name,
        "emulated": ran.device.emulated,
        "formats": {"kv": scenario.formats.kv, "compute": scenario.formats.compute},
        "same_gpu": same_gpu(scenario.profile.gpu.name, ran.device),
        "paced": [str(lane) for lane in dict.fromkeys(ran.paced)],
        "weights": ran.weights,
        "prompts": ran.prompts,
        "seed": ran.seed,
        "layers": layers,
        "layers_of_model": ran.whole.model.n_layers,
        "requests": ran.requests,
        "prompt_tokens": ran.prompt_tokens,
        "generated_tokens": tokens,
        "batches": [run.policy.batch_size for run in ran.runs],
        "load_s": ran.load_s,
        "laid_out_s": sum(run.laid_out_s for run in ran.runs),
        **measured,
        "predicted": predicted,
        "predicted_over_measured": {
            key: predicted[key] / value if value > 0.0 else None for key, value in measured.items()
        },
        "plan": {
            "throughput_tokens_per_s": ran.saved["predicted"]["throughput_tokens_per_s"],
            "batch_size": ran.policy.batch_size,
        },
        "lanes": _lanes(ran, steps, measured["prefill_s"], measured["decode_s"]),
        "memory": memory_rows(
            ran.scenario,
            ran.policy,
            emulated=ran.device.emulated,
            loading=ran.loading,
            running=ran.running,
            on_disk=ran.on_disk,
        ),
        "experts": {
            phase: {
                "touched": found.experts / found.layers,
                "uniform": found.uniform / found.layers,
                "of": scenario.model.n_experts,
            }
            for phase, found in ran.watch.touched.items()
        },
        "notes": list(ran.notes),
    }


def _rates(tokens: int, prefill_s: float, decode_s: float, layers: int) -> dict[str, float]:
    return {
        "throughput_tokens_per_s": tokens / (prefill_s + decode_s),
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "layer_latency_s": decode_s / layers if layers else 0.0,
    }


def _lanes(ran: Ran, steps: int, prefill_s: float, decode_s: float) -> dict[str, dict[str, Any]]:
    """Seconds that every lane was busy, beside the cost model's."""
    order, busy = list(LANE_WORDS), ran.watch.busy_s
    lanes = sorted({lane for _, lane in busy}, key=lambda lane: (order.index(lane.kind), lane.device or 0))
    found = {}
    for lane in lanes:
        kind = lane.kind.value
        prefill, decode = busy.get(("prefill", lane), 0.0), busy.get(("decode", lane), 0.0)
        found[str(lane)] = {
            "prefill_s": prefill,
            "decode_s": decode,
            "predicted_prefill_s": sum(each.prefill.lanes.get(kind, 0.0) for each in ran.predictions),
            "predicted_decode_s": steps * sum(each.decode.lanes.get(kind, 0.0) for each in ran.predictions),
            "utilisation": (prefill + decode) / (prefill_s + decode_s),
            "paced": lane in ran.paced,
        }
    return found


def memory_rows(
    scenario: Scenario,
    policy: Policy,
    *,
    emulated: bool,
    loading: Mapping[str, int],
    running: Mapping[str, int],
    on_disk: int,
) -> dict[str, dict[str, Any]]:
    """Peaks of every level beside what the plan states [byte]."""
    planned = planned_bytes(scenario, policy, emulated=emulated)
    found: dict[str, dict[str, Any]] = {
        level: {
            "plan_bytes": planned[level],
            "reserve_bytes": HOST_RESERVE_BYTES if level == "cpu" else 0,
            "loading_bytes": loading.get(level),
            "running_bytes": running.get(level),
        }
        for level in ("gpu", "cpu")
        if planned[level] > 0.0 or running.get(level)
    }
    if on_disk:
        none = {"reserve_bytes": 0, "loading_bytes": None}
        found["disk"] = {"plan_bytes": planned["disk"], **none, "running_bytes": on_disk}
    return found
