"""What the results of a job depend on, in a file beside them: whoever goes on with a job goes on with the same one.

Weights, tokenizer, end tokens and sampling decide about tokens; so does a prompt. They are kept as OUTPUT.job.json, and
a start that would mix results of two kinds in one file is refused. A plan, a device or a schedule may change: tokens
are the same but for rounding, and where the number formats change, that is said.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hrm.errors import InputError
from runtime.checkpoint import Checkpoint
from runtime.jobs.options import JOB_ENDING
from runtime.jobs.output_file import OutputFile, sync_folder
from runtime.jobs.requests_file import JobRequest
from runtime.jobs.sampling import Sampling
from runtime.model_match import check_same_model

__all__ = ["JobFile", "describe_source", "job_file_bytes", "open_job_file"]

SAMPLES, SAMPLE_BYTES = 16, 4096
"""Of every shard, so many pieces are looked at: all of it would take as long as loading the model."""

ENTRY_BYTES = 24
"""Of a request in the file, without its id, about [byte]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """The file of a job: where it is, and what it held when it was opened (None where there was none).

    Without results there is nothing to be mixed with, so what it held does not count then.
    """

    path: Path
    before: Mapping[str, Any] | None

    def check_source(self, source: Mapping[str, Any], output: OutputFile) -> None:
        """Refuse another model, tokenizer or way of sampling than that of the results.

        Raises
        ------
        InputError
            Says what differs, with both values.
        """
        if self.before is None:
            return
        where, many = str(output.path), f"its {len(output.finished):,} results"
        way_out = f"another --output; or remove {self.path}, to go on all the same"
        before = self.before
        check_same_model(
            before["config"],
            source["config"],
            where=f"{source['folder']}/config.json",
            whose=f"the results in {output.path}",
            there="there",
            way_out=way_out,
        )
        for name, digest in before["weights"].items():
            if source["weights"].get(name) != digest:
                fact = "has other weights than" if name in source["weights"] else f"has no {name}, as had"
                told = name if name in source["weights"] else ""
                raise InputError(f"{fact} those of {many}", where=str(Path(source["folder"]) / told), way_out=way_out)
        if source["tokenizer"] != before["tokenizer"]:
            raise InputError(f"{many} are of another tokenizer.json", where=where, way_out=way_out)
        if source["end_tokens"] != before["end_tokens"]:
            fact = f"end tokens are {source['end_tokens']}, of {many} {before['end_tokens']}"
            raise InputError(fact, where=where, way_out=way_out)
        for key, option in (("temperature", "--temperature"), ("top_p", "--top-p"), ("seed", "--seed")):
            mine, other = source["sampling"][key], before["sampling"][key]
            greedy = source["sampling"]["temperature"] == before["sampling"]["temperature"] == 0.0
            if mine != other and not (key == "seed" and greedy):  # no seed matters to the likeliest token
                raise InputError(
                    f"{option} is {_number(mine)}, of {many} it was {_number(other)}",
                    where=where,
                    way_out=f"{option} {_number(other)}; or another --output",
                )

    def check_requests(self, requests: Sequence[JobRequest], output: OutputFile) -> None:
        """Refuse results of other prompts under the same ids, or with other limits.

        Raises
        ------
        InputError
            Names the first one, and how many there are.
        """
        known = {} if self.before is None else self.before["prompts"]
        wrong = []
        for each in requests:
            done = output.finished.get(each.id)
            if done is None:
                continue
            digest = known.get(_key(each.id))
            if done.prompt_tokens != len(each.tokens) or digest not in (None, digest_tokens(each.tokens)):
                wrong.append((each, f"is of another prompt than line {each.line} has"))
            elif done.generated_tokens > each.max_new_tokens or (
                done.finish_reason == "length" and done.generated_tokens != each.max_new_tokens
            ):
                fact = f"ends after {done.generated_tokens:,} tokens, and line {each.line} now asks for "
                wrong.append((each, f"{fact}{each.max_new_tokens:,}"))
        if wrong:
            each, fact = wrong[0]
            more = f"; so it is with {len(wrong) - 1:,} more" if len(wrong) > 1 else ""
            raise InputError(
                f"the result of {each.id!r:.60} {fact}{more}",
                where=str(output.path),
                way_out="another --output, or the lines as they were",
            )

    def save(self, source: Mapping[str, Any], requests: Sequence[JobRequest], output: OutputFile) -> None:
        """Write what holds from now on, whole or not at all, before there are results of it.

        Raises
        ------
        InputError
            The disk is full, or the like.
        """
        before = self.before or {"prompts": {}, "formats": source["formats"]}
        done = {_key(name) for name in output.finished}
        prompts = {name: digest for name, digest in before["prompts"].items() if name in done}
        prompts |= {_key(each.id): digest_tokens(each.tokens) for each in requests if each.id not in output.finished}
        document = {**source, "formats": before["formats"], "prompts": prompts}
        if document == self.before:
            return
        new = self.path.with_name(self.path.name + ".new")
        try:
            with new.open("w", encoding="utf-8") as file:
                json.dump(document, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
        except OSError as error:
            new.unlink(missing_ok=True)
            fact = f"cannot be written: {error.strerror or error}"
            raise InputError(fact, where=str(self.path), way_out="make room, or another --output") from None
        sync_folder(self.path)


def open_job_file(output: OutputFile) -> JobFile:
    """The file beside some results.

    Raises
    ------
    InputError
        It is there and cannot be read, or is none.
    """
    path = output.path.with_name(output.path.name + JOB_ENDING)
    if not output.finished or not path.exists():
        return JobFile(path=path, before=None)
    way_out = "remove it: nothing is checked against what it says then"
    try:
        before = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path), way_out=way_out) from None
    except (ValueError, RecursionError):
        raise InputError("is not JSON", where=str(path), way_out=way_out) from None
    if not isinstance(before, dict):
        raise InputError("is not what a job has written", where=str(path), way_out=way_out)
    wanted = {"config": dict, "weights": dict, "end_tokens": list, "sampling": dict, "formats": dict, "prompts": dict}
    for key, kind in wanted.items():
        if not isinstance(before.get(key), kind):
            raise InputError("is missing, or no such thing", where=f"{path}: {key}", way_out=way_out)
    if not {"temperature", "top_p", "seed"} <= before["sampling"].keys() or "tokenizer" not in before:
        raise InputError("is not what a job has written", where=str(path), way_out=way_out)
    return JobFile(path=path, before=before)


def describe_source(
    checkpoint: Checkpoint, config: Mapping[str, Any], ends: frozenset[int], sampling: Sampling
) -> dict[str, Any]:
    """What tokens depend on beside the prompt: config, weights and tokenizer of a folder, end tokens, sampling."""
    tokenizer = checkpoint.folder / "tokenizer.json"
    try:
        return {
            "folder": str(checkpoint.folder.absolute()),
            "config": dict(config),
            "weights": {file.name: _sample(file) for file in checkpoint.files},
            "tokenizer": _digest(tokenizer.read_bytes()) if tokenizer.is_file() else None,
            "end_tokens": sorted(ends),
            "sampling": asdict(sampling),
        }
    except OSError as error:
        fact = f"cannot be read: {error.strerror or error}"
        raise InputError(fact, where=str(error.filename or checkpoint.folder), way_out="download it again") from None


def job_file_bytes(requests: Sequence[JobRequest]) -> int:
    """What the entries of some requests take, about [byte]."""
    return sum(ENTRY_BYTES + len(str(each.id)) for each in requests)


def digest_tokens(tokens: Sequence[int]) -> str:
    """A prompt in short."""
    return _digest(array("q", tokens).tobytes(), size=6)


def _digest(data: bytes, size: int = 16) -> str:
    return hashlib.blake2b(data, digest_size=size).hexdigest()


def _number(value: float) -> str:
    """So short that it is still the same number: it is to be typed again."""
    short = f"{value:g}"
    return short if isinstance(value, float) and float(short) == value else f"{value}"


def _key(name: str | int) -> str:
    """An id as a key of JSON: 1 and "1" are two."""
    return json.dumps(name, ensure_ascii=False)


def _sample(file: Path) -> str:
    """Size, header and pieces from all over a shard, in short: two fine-tunings of a model have the same headers."""
    size = file.stat().st_size
    found = hashlib.blake2b(str(size).encode(), digest_size=16)
    with file.open("rb") as stream:
        for piece in range(SAMPLES):
            stream.seek(piece * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            found.update(stream.read(SAMPLE_BYTES))
    return found.hexdigest()
