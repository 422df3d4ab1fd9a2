"""What every predictor says of a candidate, written down and hashed before any of them but the plan is measured.

Four predictors: Eq. 12 with the peaks of the profile, Eq. 12 with its calibrated rates, the full cost model, and the
simulator. None of them sees a trace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hrm.errors import HrmError, InputError
from hrm.graph import Op
from hrm.paper_cost import paper_terms
from hrm.policy import Policy
from hrm.prediction import startup_seconds
from hrm.published.eq12 import eq12_prediction, eq12_rates, fitted_rates
from hrm.published.policies import RowPolicy
from hrm.rates import derive_rates
from hrm.scenario import Scenario, measure_sizes
from hrm.trivial import predict_policy

__all__ = [
    "COPIES",
    "PREDICTORS",
    "Forecast",
    "SimulateCandidate",
    "analytic_forecasts",
    "file_hash",
    "forecast_of",
    "write_forecasts",
]

PREDICTORS: Mapping[str, str] = {
    "eq12_peaks": "Eq. 12, peaks",
    "eq12_rates": "Eq. 12, calibrated rates",
    "full": "full cost model",
    "simulated": "simulator",
}
"""By key, in the order of the report, with the words for them."""

COPIES: Mapping[str, tuple[Op, int | None]] = {
    "D1": (Op.OFFLOAD_QKV, None),
    "D2": (Op.LOAD_HIDDEN, 1),
    "D3": (Op.LOAD_WEIGHTS, None),
    "D4": (Op.LOAD_KV, None),
}
"""The four kinds of copies of the paper (Figure 6), by kind of task and part."""

Forecast = dict[str, Any]
"""``throughput_tokens_per_s``, ``prefill_s``, ``decode_s``, ``layer_latency_s``, ``prefill_layer_s`` of a batch, and
``note`` where something was left out; of the simulator also ``ops`` and ``copies`` of a layer in the middle of decode:
by name seconds ``alone_s`` and ``simulated_s``, and ``bytes``."""

SimulateCandidate = Callable[[Scenario, Policy, str], Forecast]


def forecast_of(scenario: Scenario, policy: Policy, prefill_s: float, decode_s: float, **more: Any) -> Forecast:
    """The five numbers of a batch from the seconds of its two phases."""
    layers, generated = scenario.model.n_layers, scenario.workload.generation_length
    passes = layers * max(1, generated - 1)
    return {
        "throughput_tokens_per_s": policy.batch_size * generated / (prefill_s + decode_s),
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "layer_latency_s": decode_s / passes,
        "prefill_layer_s": prefill_s / layers,
        **more,
    }


def analytic_forecasts(scenario: Scenario, policy: Policy) -> dict[str, Forecast | None]:
    """The two forms of Eq. 12 and the full cost model, for a batch of exactly the scenario's requests.

    Eq. 12 is None where the paper's formulas do not describe the model or the plan: all on the CPU.
    """
    rates = derive_rates(scenario.profile, scenario.formats)
    full = predict_policy(scenario, measure_sizes(scenario), rates, policy)
    found: dict[str, Forecast | None] = {"eq12_peaks": None, "eq12_rates": None}
    found["full"] = forecast_of(
        scenario,
        policy,
        full.prefill_s,
        full.decode_s,
        lanes_s={lane: seconds / scenario.model.n_layers for lane, seconds in full.decode.lanes.items()},
        bottleneck=full.bottleneck,
        loading_s=_loading_seconds(scenario, policy),
    )
    if policy.everything_on_cpu:
        return found
    try:
        terms = paper_terms(scenario)
    except HrmError:
        return found
    row = RowPolicy(
        batch_size=policy.batch_size,
        micro_batch_size=policy.micro_batch_size,
        num_micro_batches=policy.num_micro_batches,
        attention_on_gpu=policy.attention_on_gpu,
        weights_on_gpu=policy.weights_on_gpu,
        kv_on_gpu=policy.kv_on_gpu,
    )
    squared = scenario.workload.mean_squared_prompt_tokens
    for name, numbers in (("eq12_peaks", eq12_rates(terms)), ("eq12_rates", fitted_rates(rates))):
        eq12 = eq12_prediction(terms, numbers, row, mean_squared_prompt_tokens=squared, ffn_on_gpu=policy.ffn_on_gpu)
        found[name] = forecast_of(scenario, policy, eq12.prefill_s, eq12.decode_s, bottleneck=eq12.bottleneck)
    return found


def _loading_seconds(scenario: Scenario, policy: Policy) -> float:
    """Seconds to place weights that are in memory already, and to page-lock what is locked [s]."""
    here = scenario if policy.weights_on_disk else replace(scenario, profile=replace(scenario.profile, disk=None))
    rates = derive_rates(here.profile, here.formats)
    return startup_seconds(here, measure_sizes(here), rates, policy)


def write_forecasts(document: Mapping[str, Any], path: Path) -> str:
    """Write what is predicted; returns the SHA-256 of the file.

    Raises
    ------
    InputError
        It cannot be written.
    """
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None
    return file_hash(path)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits.

    Raises
    ------
    InputError
        It cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path)) from None
