"""Rows of measurements: end-to-end runs and kernel latencies, from CSV files with the columns of the bundled ones.

The bundled rows (`hrm/data/published`) are published facts; anyone's own measurements have the same columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hrm.published.csv_tables import (
    read_count,
    read_flag,
    read_length,
    read_percent,
    read_positive,
    read_table,
    read_text,
)

__all__ = ["KernelRow", "Row", "bundled_kernels", "bundled_rows", "read_kernels", "read_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One end-to-end run; None where the file has a blank.

    Attributes
    ----------
    id, setting, system, workload : str
        Key of the row; where and with what it ran.
    prompt_len : float
        Padded length where `padded`, else the mean [tokens].
    padded : bool
        Every prompt was run at the length of the longest.
    gen_len : int
        Generated tokens per request [tokens].
    micro_batch_size, num_micro_batches, batch_size : int or None
        mu, n_ub and N as run.
    weights_on_gpu : float or None
        Share of the weights on the GPU where the run fixed it (0 to 1; the file has per cent).
    throughput_tokens_per_s : float or None
        Generated tokens / (prefill + decode), as written [token/s].
    total_time_s : float or None
        Prefill + decode, as written [s].
    source : str
        Where it was published.
    """

    id: str
    setting: str
    system: str
    workload: str
    prompt_len: float
    padded: bool
    gen_len: int
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    batch_size: int | None = None
    weights_on_gpu: float | None = None
    throughput_tokens_per_s: float | None = None
    total_time_s: float | None = None
    source: str = ""

    @property
    def measured_tokens_per_s(self) -> float | None:
        """Throughput as written, else N * gen_len / total time; None where neither is known [token/s]."""
        if self.throughput_tokens_per_s is not None:
            return self.throughput_tokens_per_s
        if self.batch_size is None or self.total_time_s is None:
            return None
        return self.batch_size * self.gen_len / self.total_time_s

    @property
    def measured_total_s(self) -> float | None:
        """Prefill + decode as written, else N * gen_len / throughput; None where neither is known [s]."""
        if self.total_time_s is not None:
            return self.total_time_s
        if self.batch_size is None or self.throughput_tokens_per_s is None:
            return None
        return self.batch_size * self.gen_len / self.throughput_tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """Latency of one kernel in one layer.

    Attributes
    ----------
    kernel : str
    micro_batch_size : int
        mu.
    context_len : int or None
        Cached tokens per request [tokens]; None for kernels that have none.
    latency_s : float
        [s]
    """

    kernel: str
    micro_batch_size: int
    context_len: int | None
    latency_s: float


def bundled_rows() -> tuple[Row, ...]:
    """The published end-to-end runs that come with the package."""
    return read_rows(_bundled("throughput.csv"))


def bundled_kernels() -> tuple[KernelRow, ...]:
    """The published kernel latencies that come with the package."""
    return read_kernels(_bundled("l4_kernels.csv"))


def _bundled(name: str) -> Path:
    return Path(__file__).resolve().parent.parent / "data" / "published" / name


ROW_COLUMNS = ("id", "setting", "system", "workload", "prompt_len", "padded", "gen_len")
"""Columns every row fills in."""

BLANK_COLUMNS = ("mu", "n_ub", "N", "weights_gpu_pct", "throughput_tok_s", "total_time_s", "source")
"""Columns that may be blank, or missing altogether."""


def read_rows(path: str | Path) -> tuple[Row, ...]:
    """Read end-to-end runs, in file order.

    Parameters
    ----------
    path : str or Path
        CSV with a header. `ROW_COLUMNS` must be there, `BLANK_COLUMNS` may be blank or missing; others are ignored, and
        so are blank lines and lines that start with ``#``.

    Returns
    -------
    tuple of Row
        At least one.

    Raises
    ------
    InputError
        Names file, line, column and value: a cell that is not what its column holds, an id given twice, a column that
        is missing, or no rows at all.
    """
    rows: list[Row] = []
    lines: dict[str, int] = {}
    for cells in read_table(path, ROW_COLUMNS, BLANK_COLUMNS):
        key = cells.need("id", read_text)
        if key in lines:
            raise cells.error("id", f"{key!r} is already the id of line {lines[key]}", "another id")
        lines[key] = cells.line
        padded = cells.need("padded", read_flag)
        percent = cells.have("weights_gpu_pct", read_percent)
        rows.append(
            Row(
                id=key,
                setting=cells.need("setting", read_text),
                system=cells.need("system", read_text),
                workload=cells.need("workload", read_text),
                prompt_len=float(cells.need("prompt_len", read_count))
                if padded
                else cells.need("prompt_len", read_length),
                padded=padded,
                gen_len=cells.need("gen_len", read_count),
                micro_batch_size=cells.have("mu", read_count),
                num_micro_batches=cells.have("n_ub", read_count),
                batch_size=cells.have("N", read_count),
                weights_on_gpu=None if percent is None else percent / 100.0,
                throughput_tokens_per_s=cells.have("throughput_tok_s", read_positive),
                total_time_s=cells.have("total_time_s", read_positive),
                source=cells.have("source", read_text) or "",
            )
        )
    return tuple(rows)


def read_kernels(path: str | Path) -> tuple[KernelRow, ...]:
    """Read kernel latencies, in file order; `context_len` may be blank.

    Raises
    ------
    InputError
        As `read_rows`.
    """
    return tuple(
        KernelRow(
            kernel=cells.need("kernel", read_text),
            micro_batch_size=cells.need("mu", read_count),
            context_len=cells.have("context_len", read_count),
            latency_s=cells.need("latency_s", read_positive),
        )
        for cells in read_table(path, ("kernel", "mu", "latency_s"), ("context_len",))
    )
