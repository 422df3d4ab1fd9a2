"""The page of a check on a GPU: what was measured beside what was simulated, and what was not done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_check_steps import GIB, LAYERS, PASS, Result

WANTED = 1.10
"""Measured over simulated, at most, where the profile is that of this GPU."""

CAPS = {"t4": ("16 GiB", "T4"), "l4": ("24 GiB", "L4")}
"""Memory of the cards whose plans are run."""


def find_title(machine: dict[str, Any]) -> str:
    """What this was: a larger GPU held to less memory is not the smaller GPU."""
    gpu = machine.get("gpu")
    if not gpu:
        return "No CUDA GPU: nothing was measured"
    others = [name for _, name in CAPS.values() if name.lower() not in gpu.lower().split()]
    if len(others) < len(CAPS):
        return f"{gpu}, Mixtral 8x7B shapes"
    return f"{gpu} capped at {' and '.join(cap for cap, _ in CAPS.values())}: not a {' and not an '.join(others)}"


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """What the documents of the steps say, in one place."""
    found: dict[str, Any] = {"layers": {}, "runs": {}, "tests": None}
    reserves: dict[str, float] = {}
    for result in results:
        kind, _, label = result.step.name.partition(" ")
        document = result.document
        if kind == "tests" and result.seconds:
            lines = [line for line in result.stdout.splitlines() if line.strip()]
            found["tests"] = lines[-1].strip("= ") if lines else result.why
        elif kind == "plan" and document is not None and result.status == PASS:
            reserves[label] = document["memory"]["gpu"]["terms"].get("reserve", 0.0)
        elif kind == "layer" and document is not None and result.status == PASS:
            found["layers"][label] = _layer(document)
        elif kind == "run" and document is not None and result.status == PASS:
            found["runs"][label] = _run(document, reserves[label])
    return found


def _layer(document: dict[str, Any]) -> dict[str, Any]:
    latency = document["latency"]
    ratio = latency["measured_over_simulated"]
    same = bool(document["same_machine"])
    return {
        "hardware": document["hardware"],
        "same_gpu": same,
        "layers_measured": document["layers_measured"],
        **{key: latency[key] for key in ("measured_s", "measured_p10_s", "measured_p90_s", "bound_s", "simulated_s")},
        "busiest_lane": latency["busiest_lane"],
        "measured_over_bound": latency["measured_over_bound"],
        "measured_over_simulated": ratio,
        "as_wanted": (ratio is not None and ratio <= WANTED) if same else None,
        "copies": {row["copy"]: row.get("measured_bytes_per_s") for row in document["copies"]},
        "lanes": {row["lane"]: [row["predicted_s"], row["measured_s"]] for row in document["lanes"]},
    }


def _run(document: dict[str, Any], reserve: float) -> dict[str, Any]:
    gpu = document["memory"].get("gpu", {})
    planned, taken = gpu.get("plan_bytes"), gpu.get("running_bytes")
    if planned is not None:
        planned += reserve  # for what libraries take and what lies idle between two tensors
    return {
        "hardware": document["hardware"],
        "same_gpu": bool(document["same_gpu"]),
        "requests": document["requests"],
        "layers": document["layers"],
        "prefill_s": document["prefill_s"],
        "decode_s": document["decode_s"],
        "layer_latency_s": document["layer_latency_s"],
        "predicted_layer_latency_s": document["predicted"]["layer_latency_s"],
        "throughput_tokens_per_s": document["throughput_tokens_per_s"],
        "load_s": document["load_s"],
        "gpu_planned_bytes": planned,
        "gpu_reserved_bytes": taken,
        "within_plan": None if planned is None or taken is None else taken <= planned,
    }


def write_page(machine: dict[str, Any], results: Sequence[Result], *, minutes: float) -> str:
    """The whole page, in Markdown."""
    found = summarise(results)
    lines = [f"# {find_title(machine)}", "", *_machine(machine), ""]
    if not machine.get("cuda"):
        lines += [
            "Torch sees no CUDA device here, so none of the checks was run. On a machine with one:",
            "",
            "```sh",
            "python scripts/gpu_check.py --out check --minutes 8",
            "```",
            "",
        ]
        return "\n".join(lines)
    lines += ["## Tests", "", found["tests"] or "Not run.", ""]
    lines += ["## One layer in decode, measured and simulated", "", *_layer_table(found["layers"]), ""]
    lines += [f"## {LAYERS} layers, prefill and decode", "", *_run_table(found["runs"]), ""]
    lines += [f"## Steps ({minutes:g} minutes)", "", *_step_table(results), ""]
    return "\n".join(lines)


def _machine(machine: dict[str, Any]) -> list[str]:
    said = [f"Python {machine.get('python', '?')}, torch {machine.get('torch', 'not installed')}"]
    if machine.get("gpu"):
        capability = ".".join(str(part) for part in machine["capability"])
        said.insert(
            0, f"{machine['gpu']} ({machine['gpu_memory_bytes'] / GIB:.1f} GiB, compute capability {capability})"
        )
        if machine.get("driver_and_link"):
            said.append(f"driver, PCIe generation and lanes: {machine['driver_and_link']}")
    if "cpu_cores" in machine:
        said.append(f"{machine['cpu_cores']} CPU cores, {machine['cpu_memory_bytes'] / GIB:.0f} GiB of CPU memory")
    if machine.get("missing"):
        said.append(f"not installed: {', '.join(machine['missing'])}")
    return [f"{'; '.join(said)}."]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def _layer_table(layers: dict[str, dict[str, Any]]) -> list[str]:
    if not layers:
        return ["Not measured."]
    lines = [
        f"Wanted: measured at most {WANTED:.2f} x simulated, where the profile is that of this GPU. With the profile of"
        " another GPU the ratio compares two machines and says nothing of the model.",
        "",
        "| plan | measured (10th to 90th percentile) [ms] | max(link, CPU, GPU) [ms] | simulated [ms] | measured / "
        "simulated | as wanted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for label, row in layers.items():
        verdict = {True: "yes", False: "**no**", None: "another GPU's rates"}[row["as_wanted"]]
        ratio = row["measured_over_simulated"]
        lines.append(
            f"| {label} | {_ms(row['measured_s'])} ({_ms(row['measured_p10_s'])} to {_ms(row['measured_p90_s'])}) | "
            f"{_ms(row['bound_s'])} ({row['busiest_lane']}) | {_ms(row['simulated_s'])} | "
            f"{'-' if ratio is None else f'{ratio:.3f}'} | {verdict} |"
        )
    lines += ["", "| plan | copy | measured [GB/s] |", "| --- | --- | --- |"]
    for label, row in layers.items():
        for copy, rate in row["copies"].items():
            lines.append(f"| {label} | {copy} | {'-' if rate is None else f'{rate / 1e9:.2f}'} |")
    return lines


def _run_table(runs: dict[str, dict[str, Any]]) -> list[str]:
    if not runs:
        return ["Not run."]
    lines = [
        "| plan | requests | prefill [s] | decode [s] | layer [ms] | predicted layer [ms] | GPU memory reserved, of "
        "planned and its reserve [GiB] | within the plan |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for label, row in runs.items():
        planned, taken = row["gpu_planned_bytes"], row["gpu_reserved_bytes"]
        memory = "-" if planned is None or taken is None else f"{taken / GIB:.2f} of {planned / GIB:.2f}"
        within = {True: "yes", False: "**no**", None: "-"}[row["within_plan"]]
        lines.append(
            f"| {label} | {row['requests']:,} | {row['prefill_s']:.2f} | {row['decode_s']:.2f} | "
            f"{_ms(row['layer_latency_s'])} | {_ms(row['predicted_layer_latency_s'])} | {memory} | {within} |"
        )
    return lines


def _step_table(results: Sequence[Result]) -> list[str]:
    lines = ["| step | what it shows | result | took [s] |", "| --- | --- | --- | --- |"]
    for result in results:
        said = result.status if not result.why else f"{result.status}: {result.why.replace('|', '/')}"
        took = f"{result.seconds:.1f}" if result.seconds else "-"
        lines.append(f"| {result.step.name} | {result.step.about} | {said} | {took} |")
    return lines
