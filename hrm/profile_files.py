"""Hardware profiles from YAML files: finding, reading, composing, checking, overriding and writing them.

A profile file may name components (GPU model, host, link) and overrides what it likes of them:

    title: One T4 in a 48-vCPU host
    gpu: {component: t4, count: 1}
    host: n1-48
    link: gen3-x16
    cpu: {memory: {value: "416 GB", source: user, note: "what I would rent"}}

Later parts win: GPU model, host, link, the file itself, overrides. Components hold the same sections as a profile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hrm.calibrated_profile import AUTO, find_calibrated
from hrm.errors import InputError
from hrm.profile import HardwareProfile
from hrm.profile_assembly import Entry, assemble
from hrm.profile_schema import COMPONENTS, FIELDS, TEXTS, find_structure_problems, suggest, unknown_key

__all__ = [
    "bundled_directory",
    "check_profile",
    "dump_profile",
    "load_profile",
    "profile_document",
    "profile_from_document",
    "profile_names",
    "with_overrides",
]

_MAX_FILE_BYTES: Final = 1_000_000  # a profile has about 5 kB; more is some other file
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_NULLABLE: Final = frozenset({"disk", *(key for key, field in FIELDS.items() if field.optional)})


def bundled_directory() -> Path:
    """Folder of the profiles that come with the package, with ``components/`` in it."""
    package = Path(__file__).resolve().parent
    for folder in (package / "data" / "hardware_profiles", package.parent / "hardware_profiles"):
        if (folder / "components").is_dir():
            return folder
    raise InputError("the bundled hardware profiles are missing", way_out="install the package again")


def profile_names() -> tuple[str, ...]:
    """Names of the bundled profiles, sorted."""
    return tuple(sorted(path.stem for path in bundled_directory().glob("*.yaml")))


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """Read a profile.

    Parameters
    ----------
    name_or_path : str or Path
        A YAML file if there is one of that name, else a bundled profile, with or without ``.yaml``; ``auto`` for what
        `hrm calibrate` found of this machine.

    Raises
    ------
    InputError
        No such profile (suggests the nearest), or something wrong in it: names file, key, value and what is accepted.
    """
    path, origin = _find_profile(str(name_or_path))
    profile, problems = _read_profile(path, origin)
    if profile is not None and not problems:
        return profile
    first = problems[0]
    if len(problems) == 1:
        raise first
    more = f"{len(problems) - 1} more: hrm hardware check {name_or_path}"
    raise InputError(first.fact, where=first.where, way_out=f"{first.way_out}; {more}" if first.way_out else more)


def profile_from_document(document: Mapping[str, Any], *, name: str, origin: str) -> HardwareProfile:
    """The profile that `profile_document` wrote, for instance into a plan.

    Raises
    ------
    InputError
        Something is wrong in it: names origin, key, value and what is accepted.
    """
    profile, problems = _compose(dict(document), origin=origin, beside=bundled_directory(), name=name)
    if profile is None or problems:
        raise problems[0]
    return profile


def check_profile(name_or_path: str | Path) -> list[str]:
    """Everything that is wrong with a profile, one line each: file, key, value, what would be accepted. Empty: fine."""
    try:
        path, origin = _find_profile(str(name_or_path))
    except InputError as error:
        return [str(error)]
    return [str(problem) for problem in _read_profile(path, origin)[1]]


def with_overrides(profile: HardwareProfile, overrides: Mapping[str, object]) -> HardwareProfile:
    """The profile with some quantities replaced.

    Parameters
    ----------
    profile : HardwareProfile
        What to start from.
    overrides : Mapping[str, object]
        Dotted key to a text with its unit, e.g. ``{"cpu.memory": "416 GB"}``. ``None`` or ``"none"`` removes what may
        be missing (``disk``, ``gpu_link``, ``host_totals.*``, ...). What a file gives as a percentage of another
        quantity (pageable copies of pinned ones) follows it.

    Raises
    ------
    InputError
        An unknown key (suggests the nearest), or a value that a file could not hold either.
    """
    entries = _entries(profile)
    for key, value in overrides.items():
        if key not in FIELDS and key not in _NULLABLE:
            raise unknown_key(key, FIELDS, where=f"{profile.name}: override")
        if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
            if key not in _NULLABLE:
                raise InputError(f"{key} cannot be none", where=f"{profile.name}: override")
            for known in [name for name in entries if name == key or name.startswith(f"{key}.")]:
                del entries[known]
            continue
        if key == "disk":
            raise InputError(
                f"'{value}' is not accepted", where="override: disk", way_out="none, or set disk.size etc."
            )
        before = profile.quantities.get(key)
        note = f"set by hand; was {before.text} ({before.source})" if before else "set by hand"
        entries[key] = Entry(raw={"value": value, "source": "user", "note": note}, origin="override")
    texts = _texts(profile)
    if any(key.startswith("disk.") for key in overrides):
        texts.setdefault("disk.name", "disk")
    changed, problems = assemble(entries, texts, profile.gpu.dtypes, name=profile.name, origin=profile.origin)
    if changed is None or problems:
        raise problems[0]
    return changed


def profile_document(profile: HardwareProfile) -> dict[str, Any]:
    """The profile as one self-contained document, components resolved; reading it back gives an equal profile."""
    document: dict[str, Any] = {"title": profile.title, "description": profile.description}
    for key, text in _texts(profile).items():
        _put(document, key, text)
    _put(document, "gpu.dtypes", list(profile.gpu.dtypes))
    for key, entry in _entries(profile).items():
        _put(document, key, entry.raw)
    return document


def dump_profile(profile: HardwareProfile) -> str:
    """`profile_document` as YAML text."""
    import yaml

    text: str = yaml.safe_dump(profile_document(profile), sort_keys=False, allow_unicode=True, width=120)
    return text


def _entries(profile: HardwareProfile) -> dict[str, Entry]:
    return {
        key: Entry(
            raw={"value": quantity.text, "source": quantity.source, "note": quantity.note}, origin=profile.origin
        )
        for key, quantity in profile.quantities.items()
    }


def _texts(profile: HardwareProfile) -> dict[str, str]:
    texts = {
        "title": profile.title,
        "description": profile.description,
        "gpu.name": profile.gpu.name,
        "cpu.name": profile.cpu.name,
        "link.name": profile.link.name,
    }
    return texts | ({"disk.name": profile.disk.name} if profile.disk else {})


def _put(document: dict[str, Any], key: str, value: object) -> None:
    *sections, last = key.split(".")
    for section in sections:
        document = document.setdefault(section, {})
    document[last] = value


def _find_profile(name: str) -> tuple[Path, str]:
    """Path of a profile, and the name errors give it."""
    if not name.strip():
        raise InputError("the name of the hardware profile is empty", way_out="see: hrm hardware")
    if name == AUTO:
        found = find_calibrated()
        return found, str(found)
    path = Path(name)
    is_path = "\0" not in name and len(name) < 1000
    if path.suffix in (".yaml", ".yml") and is_path and path.is_file():
        return path, name
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    if stem in profile_names():
        return bundled_directory() / f"{stem}.yaml", f"{stem}.yaml"
    if is_path and path.exists():
        return path, name
    shown = name if len(name) <= 80 else f"{name[:77]}..."
    raise InputError(
        f"there is no file and no bundled hardware profile of the name '{shown}'",
        way_out=suggest(stem, profile_names()),
    )


def _find_component(name: str, kind: str, beside: Path, where: str) -> tuple[Path, str]:
    """Path of a component: a ``.yaml`` file relative to the profile, ``components/`` next to it, or a bundled one."""
    folder = COMPONENTS[kind][0]
    relative = f"components/{folder}/{name}.yaml"
    if "\0" not in name and len(name) < 1000:
        if name.endswith((".yaml", ".yml")) and (beside / name).is_file():
            return beside / name, name
        if _NAME.fullmatch(name):
            for root in (beside, bundled_directory()):
                if (root / relative).is_file():
                    return root / relative, relative
    known = [path.stem for path in (bundled_directory() / "components" / folder).glob("*.yaml")]
    shown = name if len(name) <= 80 else f"{name[:77]}..."
    raise InputError(f"there is no {kind} component '{shown}'", where=where, way_out=suggest(name, known))


def _read_profile(path: Path, origin: str) -> tuple[HardwareProfile | None, list[InputError]]:
    """The profile in a file, or None, and everything wrong with it."""
    try:
        document = _read_document(path, origin)
    except InputError as error:
        return None, [error]
    return _compose(document, origin=origin, beside=path.parent, name=path.stem)


def _compose(
    document: dict[str, Any], *, origin: str, beside: Path, name: str
) -> tuple[HardwareProfile | None, list[InputError]]:
    """The profile of a document whose components lie `beside` it or are bundled, or None, and all that is wrong."""
    problems = find_structure_problems(document, origin=origin)
    entries: dict[str, Entry] = {}
    texts: dict[str, str] = {}
    dtypes: list[str] = []
    for kind, component_name in _component_names(document):
        where = f"{origin}: {kind}"
        try:
            found, component_origin = _find_component(component_name, kind, beside, where)
            component = _read_document(found, component_origin)
        except InputError as error:
            problems.append(error)
            continue
        sections = COMPONENTS[kind][1]
        for key in [key for key in component if key not in sections]:
            del component[key]
            problems.append(unknown_key(key, sections, where=f"{component_origin} ({kind} component)"))
        problems += find_structure_problems(component, origin=component_origin)
        for nested, _ in _component_names(component):
            way_out = "only a profile names components"
            problems.append(
                InputError("a component names another", where=f"{component_origin}: {nested}", way_out=way_out)
            )
        _merge(component, component_origin, entries, texts, dtypes)
    _merge(document, origin, entries, texts, dtypes)
    if problems:
        # With parts missing, "there is no gpu.memory" would only repeat the same problem; wrong values are still named.
        return None, problems + assemble(entries, texts, tuple(dtypes), name="", origin=origin, complete=False)[1]
    return assemble(entries, texts, tuple(dtypes), name=name, origin=origin)


def _component_names(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The components a document names, weakest first."""
    for kind in COMPONENTS:
        section = document.get(kind)
        name = section.get("component") if isinstance(section, dict) else section
        if isinstance(name, str):
            yield kind, name


def _merge(
    document: Mapping[str, Any], origin: str, entries: dict[str, Entry], texts: dict[str, str], dtypes: list[str]
) -> None:
    """Lays one document over what the earlier ones said."""
    if "disk" in document and document["disk"] is None:  # the profile takes the host's disk away
        for key in [key for key in entries if key.startswith("disk.")]:
            del entries[key]
        texts.pop("disk.name", None)
    for key in FIELDS:
        found, raw = _get(document, key)
        if found:
            entries[key] = Entry(raw=raw, origin=origin)
    for key in TEXTS:
        found, raw = _get(document, key)
        if found:
            texts[key] = raw
    found, raw = _get(document, "gpu.dtypes")
    if found:
        dtypes[:] = raw


def _get(document: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    node: Any = document
    for step in key.split("."):
        if not isinstance(node, dict) or step not in node:
            return False, None
        node = node[step]
    return True, node


def _read_document(path: Path, origin: str) -> dict[str, Any]:
    """One YAML mapping from a file; duplicate keys and keys that are no text are errors."""
    try:
        if path.is_dir():
            raise InputError("is a folder", where=origin, way_out="give a YAML file")
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=origin) from None
    if len(content) > _MAX_FILE_BYTES:
        raise InputError("has more than 1 MB", where=origin, way_out="a hardware profile has a few kB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError("is not a text file", where=origin, way_out="a hardware profile is YAML in UTF-8") from None
    from hrm.profile_yaml import read_yaml

    document = read_yaml(text, origin)
    if document is None:
        raise InputError("is empty", where=origin, way_out="start from the output of: hrm hardware show t4")
    if not isinstance(document, dict):
        raise InputError(f"holds a {type(document).__name__}", where=origin, way_out="a profile is a mapping, gpu: ...")
    return document
