"""`hrm validate memory` from its options: measure, predict only, or build a report again; and the files it leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.errors import InputError
from hrm.host_facts import read_host_facts
from hrm.plots import check_figure_path, save_figure
from hrm.scenario import Scenario
from hrm.validation.caps_document import build_memory_document, check_caps
from hrm.validation.caps_figure import draw_caps
from hrm.validation.caps_page import print_caps, print_caps_dry_run, save_caps_page
from hrm.validation.caps_procedure import estimate_seconds, measure_study, predict_study
from hrm.validation.caps_study import Study, Theory, choose_caps, read_caps
from hrm.validation.command import check_outputs, save_document
from hrm.validation.records import read_records

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MemoryFound", "MemoryOptions", "run_memory_validation"]

Tell = Callable[[str], None]

POINTS = 6
REPEATS = 3
RECORDS = Path("memory-validation")

ROOM = 0.9
"""Of what is free, the most that a cap chosen here may be [share]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """As the command line gives them (docs/cli.md)."""

    model_dir: Path | None = None
    random_weights: bool = False
    layers: int | None = None
    caps: str | None = None
    points: int | None = None
    max_hours: float = 24.0
    repeats: int | None = None
    device: str | None = None
    disk_dir: Path | None = None
    records: Path | None = None
    rebuild_from: Path | None = None
    dry_run: bool = False
    report: Path | None = None
    plot: Path | None = None
    output: Path | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class MemoryFound:
    """What came of it: the document, and the files that were written."""

    document: dict[str, Any]
    saved: tuple[Path, ...] = ()

    def show(self, console: Console) -> None:
        """Print it for a person."""
        (print_caps_dry_run if self.document.get("dry_run") else print_caps)(self.document, console)

    def say_saved(self, say: Tell) -> None:
        """Name the files."""
        for path in self.saved:
            say(f"saved to {path}")

    def check(self) -> None:
        """Exit with 4 where a run broke its cap or failed.

        Raises
        ------
        BarMissedError
            Names the points.
        """
        if not self.document.get("dry_run"):
            check_caps(self.document)


def run_memory_validation(
    options: MemoryOptions,
    scenario: Scenario | None,
    model: Mapping[str, Any] | None,
    notes: tuple[str, ...],
    theory: Theory,
    bench: Callable[..., Any],
    tell: Tell,
) -> MemoryFound:
    """Measure, predict only, or build a report again.

    Parameters
    ----------
    options : MemoryOptions
    scenario : Scenario or None
        Machine, model, workload; None with `--from`.
    model : mapping or None
        ``name`` and ``config`` of the model.
    notes : tuple of str
        What was assumed of the workload.
    theory : Theory
        The simulator.
    bench : callable
        `runtime.validation.capped_bench.open_capped_bench`.
    tell : callable
        Takes a line of progress.

    Raises
    ------
    HrmError
        The options contradict each other, nothing fits, or something cannot be read, run or written.
    """
    _check(options, scenario)
    if options.rebuild_from is not None:
        check_outputs(None, options.report, options.output)
        return _finish(options, build_memory_document(read_records(options.rebuild_from, "memory")))
    assert scenario is not None and model is not None
    study = Study(whole=scenario, model=model, layers=options.layers, max_hours=options.max_hours, emulated=False)
    study.scenario  # noqa: B018  (refuses a number of layers the model has not)
    repeats = options.repeats or REPEATS
    if options.dry_run:
        check_outputs(None, None, options.output)
        host = replace(read_host_facts(options.disk_dir), gpus=()) if options.device == "cpu" else read_host_facts()
        study = replace(study, emulated=not host.gpus)
        caps = _caps(options, study, host.cpu_bytes, tell)
        found = predict_study(study, caps, theory, host, None, repeats=repeats, seed=options.seed, tell=tell)
        document = {**_title(study), "dry_run": True, "estimated_seconds": estimate_seconds(found), **found}
        return _finish(options, document)
    folder = options.records or RECORDS
    check_outputs(folder, options.report, options.output)
    opened = bench(
        scenario,
        model["config"],
        model_dir=options.model_dir,
        layers=options.layers,
        device=options.device,
        disk_dir=options.disk_dir,
        seed=options.seed,
    )
    study = replace(study, emulated=bool(opened.facts["emulated"]))
    caps = _caps(options, study, opened.host.cpu_bytes, tell)
    setup = {
        "format": 1,
        "kind": "memory",
        **_title(study),
        **opened.facts,
        "notes": [*opened.facts["notes"], *notes],
        "command": ["hrm", *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    measure_study(
        study,
        caps,
        theory,
        opened.host,
        opened.measurer,
        folder,
        setup=setup,
        repeats=repeats,
        seed=options.seed,
        tell=tell,
    )
    return _finish(options, build_memory_document(read_records(folder, "memory")), folder)


def _check(options: MemoryOptions, scenario: Scenario | None) -> None:
    where = "hrm validate memory"
    if options.plot is not None:
        check_figure_path(options.plot, where="--plot")
        if not options.plot.absolute().parent.is_dir():
            raise InputError("its folder does not exist", where=f"--plot: {options.plot}")
    if options.rebuild_from is not None:
        if scenario is not None or options.dry_run:
            raise InputError("nothing is measured with --from", where=where, way_out="--from DIR alone")
        return
    if scenario is None:
        raise InputError("what to measure is not given", where=where, way_out="--hw and --model, or --from DIR")
    if options.caps is not None and options.points is not None:
        raise InputError("caps are given twice", where="--caps, --points", way_out="one of the two")
    if options.repeats is not None and options.repeats < 2:
        raise InputError(f"{options.repeats}", where="--repeats", way_out="2 or more: one run says nothing of noise")
    if options.dry_run:
        if options.report is not None or options.plot is not None:
            raise InputError("there is none of what was not measured", where="--report, --plot", way_out="-o FILE")
        return
    if (options.model_dir is None) != options.random_weights:
        fact = "which weights is not said" if options.model_dir is None else "weights are given twice"
        raise InputError(fact, where=where, way_out="--model-dir DIR, or --random-weights")


def _caps(options: MemoryOptions, study: Study, free_bytes: float, tell: Tell) -> tuple[float, ...]:
    if options.caps is not None:
        return read_caps(options.caps)
    return choose_caps(study, options.points or POINTS, most_bytes=ROOM * free_bytes, tell=tell)


def _title(study: Study) -> dict[str, Any]:
    scenario = study.scenario
    workload = scenario.workload
    return {
        "title": f"{scenario.model.name} on {scenario.profile.name}: throughput under caps of CPU memory",
        "hardware": scenario.profile.name,
        "model": scenario.model.name,
        "layers": scenario.model.n_layers,
        "layers_of_model": study.whole.model.n_layers,
        "workload": {
            "name": workload.name,
            "generation_length": workload.generation_length,
            "mean_prompt_tokens": workload.mean_prompt_tokens,
            "padded": workload.padded,
            "num_requests": workload.num_requests,
        },
        "disk": scenario.profile.disk is not None,
    }


def _finish(options: MemoryOptions, document: dict[str, Any], folder: Path | None = None) -> MemoryFound:
    """Write document, figure and report."""
    saved = [] if folder is None else [folder]
    if options.output is not None:
        save_document(document, options.output)
        saved.append(options.output)
    if options.plot is not None:
        save_figure(draw_caps(document), options.plot, where="--plot")
        saved.append(options.plot)
    if options.report is not None:
        save_caps_page(document, options.report)
        saved.append(options.report)
    return MemoryFound(document, tuple(saved))
