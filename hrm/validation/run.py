"""`hrm validate run` from its options: which of its ways is asked for, and the files it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.errors import InputError
from hrm.validation.choice import RANDOM
from hrm.validation.command import (
    Ready,
    check_outputs,
    check_verdict,
    dry_run,
    read_dry,
    rebuild,
    save_document,
    validate,
)
from hrm.validation.procedure import Forecaster
from hrm.validation.screen import print_dry_run, print_validation

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Found", "Options", "run_validation"]

Bench = Callable[..., Any]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """As the command line gives them (docs/cli.md)."""

    plan_file: Path | None
    model_dir: Path | None = None
    random_weights: bool = False
    layers: int | None = None
    repeats: int | None = None
    preset: str | None = None
    device: str | None = None
    schedule: str | None = None
    disk_dir: Path | None = None
    records: Path | None = None
    rebuild_from: Path | None = None
    dry_run: bool = False
    report: Path | None = None
    output: Path | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it: the document, and the files that were written."""

    document: dict[str, Any]
    saved: tuple[Path, ...] = ()

    @property
    def parts(self) -> Mapping[str, dict[str, Any]]:
        """Validations by name: one without a name, or those of a preset."""
        found: Mapping[str, dict[str, Any]] = self.document.get("parts") or {"": self.document}
        return found

    def show(self, console: Console) -> None:
        """Print it for a person."""
        for number, (name, part) in enumerate(self.parts.items()):
            if number:
                console.print()
            if name:
                console.print(f"{self.document['preset']}: {name}", markup=False, highlight=False)
            (print_dry_run if part.get("dry_run") else print_validation)(part, console)

    def say_saved(self, say: Tell) -> None:
        """Name the files."""
        for path in self.saved:
            say(f"saved to {path}")

    def check(self) -> None:
        """Exit with 4 where a bar was missed.

        Raises
        ------
        BarMissedError
            Names the bars.
        """
        for part in self.parts.values():
            if not part.get("dry_run"):
                check_verdict(part)


def run_validation(options: Options, forecaster: Forecaster, bench: Bench, tell: Tell) -> Found:
    """Measure, predict only, or build a report again.

    Parameters
    ----------
    options : Options
    forecaster : Forecaster
        The simulator.
    bench : callable
        `runtime.validation.command.open_bench`.
    tell : callable
        Takes a line of progress.

    Raises
    ------
    InputError
        The options contradict each other, or something cannot be read, run or written.
    """
    _check(options)
    if options.rebuild_from is not None:
        check_outputs(None, options.report, options.output)
        return _finish(options, {"": rebuild(options.rebuild_from)}, {"": options.rebuild_from})
    if options.preset is not None:
        return _preset(options, forecaster, bench, tell)
    assert options.plan_file is not None
    if options.dry_run:
        check_outputs(None, None, options.output)
        ready = read_dry(options.plan_file, options.layers, options.schedule)
        document = dry_run(ready, forecaster, repeats=options.repeats or REPEATS, seed=options.seed, tell=tell)
        return _finish(options, {"": document}, {})
    folder = options.records or options.plan_file.with_name(f"{options.plan_file.stem}-validation")
    check_outputs(folder, options.report, options.output)
    return _finish(options, {"": _measure(options, folder, forecaster, bench, tell)}, {"": folder}, new=True)


def _check(options: Options) -> None:
    ways = {"PLAN": options.plan_file, "--from": options.rebuild_from, "--preset": options.preset}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        fact = f"{' and '.join(given)} are given" if given else "nothing to validate is given"
        raise InputError(fact, where="hrm validate run", way_out="a PLAN, --preset NAME, or --from DIR")
    if options.repeats is not None and options.repeats < 2:
        raise InputError(f"{options.repeats}", where="--repeats", way_out="2 or more: one run says nothing of noise")
    if options.rebuild_from is not None and options.dry_run:
        raise InputError("nothing is measured with --from either", where="--dry-run", way_out="one of the two")
    if options.dry_run and options.report is not None:
        raise InputError("there is no report of what was not measured", where="--report", way_out="-o FILE")


REPEATS = 5
"""Timed runs of every policy, unless said or a preset's."""

ON_A_GPU = 2
"""Timed runs of a policy at a time on a GPU, which holds one model: loading one takes longer than a run."""


def _measure(
    options: Options, folder: Path, forecaster: Forecaster, bench: Bench, tell: Tell, *, randoms: int = RANDOM
) -> dict[str, Any]:
    found = bench(
        options.plan_file,
        model_dir=options.model_dir,
        random_weights=options.random_weights,
        layers=options.layers,
        device=options.device,
        schedule=options.schedule,
        disk_dir=options.disk_dir,
        seed=options.seed,
        tell=tell,
    )
    job = found.job
    ready = Ready(
        job.scenario,
        job.whole.model.n_layers,
        job.policy,
        job.schedule,
        job.document,
        found.host,
        found.measurer,
        found.facts,
        randoms,
        ON_A_GPU if found.facts["device"] == "cuda" else 1,
    )
    return validate(ready, forecaster, folder, repeats=options.repeats or REPEATS, seed=options.seed, tell=tell)


def _preset(options: Options, forecaster: Forecaster, bench: Bench, tell: Tell) -> Found:
    """Plans of its own, each validated; on a machine without a GPU only predicted."""
    from hrm.validation.presets import find_preset

    preset = find_preset(str(options.preset))
    base = options.records or Path(f"{preset.name}-validation")
    check_outputs(None, options.report, options.output)
    documents: dict[str, dict[str, Any]] = {}
    folders: dict[str, Path] = {}
    if not options.dry_run:
        preset.check_machine()
    for name, write_plan in preset.plans.items():
        folder = base / name
        plan = folder.with_name(f"{name}.json")
        if options.dry_run:
            ready = replace(preset.ready(name, options.layers), randoms=preset.randoms, per_turn=ON_A_GPU)
            documents[name] = dry_run(
                ready, forecaster, repeats=options.repeats or preset.repeats, seed=options.seed, tell=tell
            )
            continue
        check_outputs(folder, None, None)
        tell(f"planning {name}")
        plan.parent.mkdir(parents=True, exist_ok=True)
        write_plan(plan)
        own = replace(
            options,
            plan_file=plan,
            random_weights=options.model_dir is None,
            repeats=options.repeats or preset.repeats,
            layers=options.layers or preset.layers,
        )
        documents[name] = _measure(own, folder, forecaster, bench, tell, randoms=preset.randoms)
        folders[name] = folder
    return _finish(options, documents, folders, new=True)


def _finish(
    options: Options, documents: Mapping[str, dict[str, Any]], folders: Mapping[str, Path], *, new: bool = False
) -> Found:
    """Write document and report."""
    saved = list(folders.values()) if new else []
    document = documents[""] if "" in documents else {"preset": options.preset, "parts": dict(documents)}
    if options.output is not None:
        save_document(document, options.output)
        saved.append(options.output)
    if options.report is not None:
        from hrm.validation.page import save_page

        save_page(documents, folders, options.report)
        saved.append(options.report)
    return Found(document, tuple(saved))
