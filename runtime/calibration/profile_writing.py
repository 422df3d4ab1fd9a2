"""The profile as a file: one YAML mapping that any command takes, with every measurement behind it as comments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hrm.errors import InputError
from hrm.profile import HardwareProfile
from hrm.profile_files import profile_from_document
from hrm.profile_yaml import read_yaml
from runtime.calibration.quantities import Item
from runtime.calibration.samples import Sample, Samples

__all__ = ["profile_text", "sample_line", "write_profile"]


def profile_text(
    items: Mapping[str, Item],
    words: Mapping[str, str],
    dtypes: Sequence[str],
    samples: Samples,
    remarks: Sequence[str],
    *,
    name: str,
) -> tuple[str, HardwareProfile]:
    """The text of the file, and the profile that is read from it.

    Parameters
    ----------
    items : mapping
        Quantities by dotted key.
    words : mapping
        Texts by dotted key: title, description, names.
    dtypes : sequence of str
        Formats the GPU computes in.
    samples : Samples
        All measurements, which become comments.
    remarks : sequence of str
        Lines of comments before them.

    Raises
    ------
    InputError
        The loader refuses the profile.
    """
    document: dict[str, Any] = {}
    for key, text in words.items():
        _put(document, key, text)
    _put(document, "gpu.dtypes", list(dtypes))
    for key, item in items.items():
        _put(document, key, {"value": item.text, "source": item.source, "note": item.note})
    body = "\n".join(_lines(document, 0)) + "\n"
    profile = profile_from_document(read_yaml(body, name), name=name, origin=f"{name}.yaml")
    comments = [*remarks, "", "All measurements: median, spread (distance of the quartiles over the median), repeats"]
    comments += [f"  {sample_line(sample)}" for sample in samples.by_name.values()]
    comments += [f"Not measured: {what}: {why}" for what, why in samples.skipped.items()]
    return body + "\n" + "\n".join(f"# {line}".rstrip() for line in comments) + "\n", profile


def _lines(section: Mapping[str, Any], depth: int) -> Iterator[str]:
    """YAML, a quantity in a line, as in the bundled profiles; JSON strings are YAML's too."""
    for key, value in section.items():
        start = f"{'  ' * depth}{key}:"
        if isinstance(value, dict) and "value" not in value:
            yield start
            yield from _lines(value, depth + 1)
        elif isinstance(value, dict):
            words = {each: json.dumps(text, ensure_ascii=False) for each, text in value.items()}
            yield f"{start} {{value: {words['value']}, source: {value['source']}, note: {words['note']}}}"
        else:
            yield f"{start} {json.dumps(value, ensure_ascii=False)}"


def sample_line(sample: Sample) -> str:
    """One measurement in a line."""
    scale, unit = {"byte/s": (1e-9, "GB/s"), "FLOP/s": (1e-9, "GFLOP/s"), "s": (1e6, "us"), "byte": (1e-6, "MB")}[
        sample.unit
    ]
    value = f"{sample.median * scale:,.4g}" if sample.median * scale < 1e4 else f"{sample.median * scale:,.0f}"
    return f"{sample.name}: {value} {unit}, {100 * sample.spread:.1f} %, {len(sample.values)}"


def write_profile(path: Path, text: str) -> None:
    """Write the file, whole or not at all.

    Raises
    ------
    InputError
        It cannot be written.
    """
    path = path.resolve()
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
            path.write_text(text, encoding="utf-8")
            return
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None


def _put(document: dict[str, Any], key: str, value: object) -> None:
    *sections, last = key.split(".")
    for section in sections:
        document = document.setdefault(section, {})
    document[last] = value
