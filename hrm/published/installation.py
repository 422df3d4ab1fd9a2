"""Fitted constants into the files they are shipped in: components of hardware profiles, and one file per system.

Single lines are exchanged, so that order and comments of a file stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hrm.errors import InputError
from hrm.profile_files import bundled_directory
from hrm.published.constants import Constant
from hrm.published.fit import FittedConstant
from hrm.published.fit_report import FitReport, format_constant, format_interval
from hrm.published.rows import Row
from hrm.published.settings import SYSTEMS

__all__ = ["install_constants", "source_tree"]

PROFILE_KEYS: Mapping[str, tuple[str, ...]] = {"gpu_flops": ("gpu_flops_prefill", "gpu_flops_decode")}
"""Keys of `efficiency` that a constant of a GPU or a host is; its own name where it is not here."""


def source_tree() -> Path:
    """Root of the source tree this package runs from.

    Raises
    ------
    InputError
        It was installed from a wheel: there is no source to rewrite.
    """
    root = Path(__file__).resolve().parents[2]
    if bundled_directory() != root / "hardware_profiles":
        raise InputError(
            "this is no source tree, so there are no files to rewrite",
            where=f"--install: {root}",
            way_out="-o constants.yaml, or pip install -e in a checkout",
        )
    return root


def install_constants(report: FitReport, root: Path) -> tuple[Path, ...]:
    """Write what was fitted, or dropped, into the files of a source tree; what no row touches stays as it is.

    Parameters
    ----------
    report : FitReport
    root : Path
        With ``hardware_profiles/components`` and ``hrm/data/systems`` below it.

    Returns
    -------
    tuple of Path
        Files that changed.

    Raises
    ------
    InputError
        A file is not there, cannot be written, or has no line for a constant. Nothing was written then, unless the
        disk gave way between two files.
    """
    texts: dict[Path, str] = {}
    for each in report.fitted.constants:
        constant = each.constant
        if constant.name not in report.moved or each.status == "untouched":
            continue
        path = _file_of(constant, root)
        if path not in texts:
            texts[path] = _read(path)
        what = constant.name.rpartition(".")[2]
        keys = (constant.name,) if constant.kind == "system" else PROFILE_KEYS.get(what, (what,))
        note = note_of(each, report)
        for key in keys:
            said = note if key == keys[0] else "the same constant as in prefill"
            texts[path] = _with_line(path, texts[path], key, format_constant(constant, each.value), each.status, said)
    changed = tuple(path for path, text in texts.items() if text != _read(path))
    for path in changed:
        try:
            path.write_text(texts[path], encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None
    return changed


def note_of(each: FittedConstant, report: FitReport) -> str:
    """How a constant came about, in words."""
    constant = each.constant
    interval = f"90 % interval {format_interval(constant, each.low, each.high)}"
    ids = set(report.touching[constant.name])
    rows = f"rows of {Path(report.data).name}," if report.data else "published rows of"
    to = f"{len(ids)} {rows} {_settings([row for row in report.rows if row.id in ids])}"
    if each.status == "fitted":
        return f"{interval}; hrm fit, {to}"
    return f"geometric middle of the public range: hrm fit dropped it, {interval} by {to}"


def _settings(rows: Sequence[Row]) -> str:
    """``"S1, S6 and S8"``."""
    names = sorted({row.setting for row in rows})
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def _file_of(constant: Constant, root: Path) -> Path:
    if constant.kind == "system":
        family = next((each.family for each in SYSTEMS.values() if each.name == constant.component), constant.component)
        return root / "hrm" / "data" / "systems" / f"{family.lower()}.yaml"
    return root / "hardware_profiles" / "components" / f"{constant.kind}s" / f"{constant.component}.yaml"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path)) from None


def _with_line(path: Path, text: str, key: str, value: str, status: str, note: str) -> str:
    """The text with another value, source and note of a key; the last line of that key counts (sections end files)."""
    pattern = re.compile(rf"^(?P<head>[ ]+{re.escape(key)}: )\{{.*?\}}(?P<rest>[ ]*(?:#.*)?)$", re.MULTILINE)
    found = list(pattern.finditer(text))
    if not found:
        raise InputError(f"has no line for {key}", where=str(path), way_out=f'{key}: {{value: "{value}"}}')
    last = found[-1]
    source = "fitted" if status == "fitted" else "estimated"
    entry = f'{{value: "{value}", source: {source}, note: {json.dumps(note, ensure_ascii=False)}}}'
    return f"{text[: last.start()]}{last['head']}{entry}{last['rest']}{text[last.end() :]}"
