"""Tables of bundled hardware and models, and the itemised account of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from hrm.model import ModelSpec
from hrm.units import GIB

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["hardware_rows", "model_document", "model_rows", "print_model", "print_rows"]


HEADS = {
    "gpu": "GPU",
    "gpu_gib": "GPU GiB",
    "cpu_gib": "CPU GiB",
    "disk_tb": "disk TB",
    "link_gb_per_s": "link GB/s",
    "parameters_b": "params B",
    "active_b": "active B",
    "weights_gb": "weights GB",
    "hub_id": "Hugging Face id",
}
"""Heads of the columns of a table, by key."""

LAST_COLUMN = 12
"""Width down to which the last column may be cut."""


def hardware_rows() -> list[dict[str, Any]]:
    """One row per bundled profile; the unit is in the key."""
    from hrm.profile_files import load_profile, profile_names

    rows = []
    for name in profile_names():
        profile = load_profile(name)
        rows.append(
            {
                "name": name,
                "gpu": f"{profile.gpu.count} x {profile.gpu.name}",
                "gpu_gib": round(profile.gpu.usable_memory_bytes / GIB, 2),
                "cpu_gib": round(profile.cpu.memory_bytes / GIB, 2),
                "disk_tb": round(profile.disk.size_bytes / 1e12, 2) if profile.disk else 0.0,
                "link_gb_per_s": round(profile.link.host_to_device.pinned_bytes_per_s / 1e9, 1),
                "title": profile.title,
            }
        )
    return rows


def model_rows() -> list[dict[str, Any]]:
    """One row per bundled model; the unit is in the key."""
    from hrm.model_files import load_model, model_names

    rows = []
    for name in model_names():
        model = load_model(name)
        rows.append(
            {
                "name": name,
                "parameters_b": round(model.total_parameters / 1e9, 2),
                "active_b": round(model.active_parameters / 1e9, 2),
                "weights_gb": round(model.weight_bytes() / 1e9, 2),
                "experts": f"{model.n_experts} (top {model.top_k})" if model.is_moe else "dense",
                "layers": model.n_layers,
                "format": model.expert_dtype if model.is_moe else model.linear_dtype,
                "family": model.family,
                "hub_id": model.hub_id,
            }
        )
    return rows


def print_rows(rows: list[dict[str, Any]], console: Console) -> None:
    """Print rows of one kind as a table, one line each; a narrow screen leaves out the last columns."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    cells = {key: [_cell(row[key]) for row in rows] for key in rows[0]}
    room, last = console.width, list(cells)[-1]
    shown: list[list[str]] = []
    for key, texts in cells.items():
        head = HEADS.get(key, key)
        width = max(len(text) for text in (head, *texts))
        if shown and (min(width, LAST_COLUMN) if key == last else width) > room:
            break
        justify: Literal["left", "right"] = "right" if isinstance(rows[0][key], int | float) else "left"
        table.add_column(head, justify=justify, no_wrap=True, width=min(width, room))
        shown.append(texts)
        room -= width + 2
    for row_of_texts in zip(*shown, strict=True):
        table.add_row(*[escape(text) for text in row_of_texts])
    console.print(table)


def _cell(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def model_document(model: ModelSpec, weights_dtype: str | None) -> dict[str, Any]:
    """Parameters and bytes of a model, itemised; items add up to the totals.

    Parameters
    ----------
    weights_dtype : str or None
        Storage of the linear layers; None = as in the checkpoint.
    """
    counts = model.parameters
    dense_layers = sum(kind.count * model.layer_dense_bytes(kind.is_moe, weights_dtype) for kind in model.layer_kinds)
    kv_dtype = "bf16" if model.checkpoint_dtype == "bf16" else "fp16"
    items = {
        "routed experts": (counts.routed_experts, model.layer_expert_bytes(weights_dtype) * model.n_moe_layers),
        "shared experts": (counts.shared_experts, model.shared_bytes(weights_dtype) * model.n_moe_layers),
        "dense MLP": (
            counts.dense_mlp,
            model.dense_mlp_bytes(weights_dtype) * model.n_dense_layers
            if model.is_moe
            else model.layer_expert_bytes(weights_dtype) * model.n_layers,
        ),
        "attention": (counts.attention, model.attention_bytes(weights_dtype) * model.n_layers),
        "router": (counts.router, model.router_bytes(weights_dtype) * model.n_moe_layers),
        "norms": (
            counts.norms,
            model.norm_bytes(weights_dtype) * model.n_layers + model.final_norm_bytes(weights_dtype),
        ),
        "embedding": (counts.embedding + counts.position, model.embedding_bytes(weights_dtype)),
        "lm_head": (counts.lm_head, model.lm_head_bytes(weights_dtype)),
    }
    return {
        "name": model.name,
        "hub_id": model.hub_id,
        "family": model.family,
        "weights_dtype": weights_dtype or "as in the checkpoint",
        "parameters": counts.total,
        "active_parameters": model.active_parameters,
        "weight_bytes": model.weight_bytes(weights_dtype),
        "items": {name: {"parameters": n, "bytes": size} for name, (n, size) in items.items() if n},
        "layers": model.n_layers,
        "moe_layers": model.n_moe_layers,
        "experts": model.n_experts,
        "top_k": model.top_k,
        "bytes_per_expert": model.expert_bytes(weights_dtype),
        "non_expert_bytes": dense_layers,
        "kv_bytes_per_token": model.kv_bytes_stored(1, kv_dtype),
        "kv_dtype": kv_dtype,
        "sliding_window_layers": sum(window is not None for window in model.layer_windows),
        "max_positions": model.max_positions,
        "assumptions": list(model.assumptions),
    }


def print_model(document: dict[str, Any], console: Console) -> None:
    """Print the account of a model."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    title = [f"[bold]{escape(document['name'])}[/]", escape(document["hub_id"]), f"({escape(document['family'])})"]
    console.print(" ".join(part for part in title if part))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head, justify in (("item", "left"), ("parameters", "right"), ("GB", "right"), ("share", "right")):
        table.add_column(head, justify=justify)  # type: ignore[arg-type]
    whole = document["weight_bytes"]
    for name, item in document["items"].items():
        table.add_row(name, f"{item['parameters']:,}", f"{item['bytes'] / 1e9:,.3f}", f"{item['bytes'] / whole:.1%}")
    table.add_row("total", f"{document['parameters']:,}", f"{whole / 1e9:,.3f}", "100.0%", style="bold")
    console.print(table)
    layers = f"{document['layers']} layers"
    if document["moe_layers"]:
        layers += (
            f", {document['moe_layers']} with {document['experts']} experts (top {document['top_k']}), one expert "
        )
        layers += f"{document['bytes_per_expert'] / 1e6:,.1f} MB"
    console.print(
        f"{document['active_parameters'] / 1e9:.2f}B parameters active per token; {layers}; weights "
        f"{document['weights_dtype']}"
    )
    windows = document["sliding_window_layers"]
    console.print(
        f"KV cache {document['kv_bytes_per_token'] / 1e3:,.1f} kB per token in {document['kv_dtype']}"
        + (f", {windows} layers with a sliding window" if windows else "")
        + f"; at most {document['max_positions']:,} positions"
    )
    for text in document["assumptions"]:
        console.print(f"[dim]- {escape(text)}[/]")
