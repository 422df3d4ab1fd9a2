"""From the options of `hrm sweep` to a study, and from its outcome to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hrm.cli_options import load_hardware
from hrm.errors import InfeasibleError, InputError
from hrm.model_files import find_config
from hrm.sweep_labels import has_plan
from hrm.sweep_plot import check_drawable, draw_sweep
from hrm.workload import Workload
from simulator.sweep import run_sweep
from simulator.sweep_points import Study
from simulator.sweep_values import parse_axes

__all__ = ["check_something_fits", "make_study", "sweep_command"]


def make_study(
    vary: list[str],
    *,
    hw: str,
    model: str,
    overrides: list[str] | None,
    schedules: str,
    workload: Workload,
    **settings: Any,
) -> Study:
    """The study that the options describe, with every file it needs read.

    Parameters
    ----------
    vary, overrides : list of str
        `--vary` and `--set`.
    hw, model, schedules : str
        As typed; not looked at where they are varied.
    workload : Workload
    **settings
        Other fields of `Study`.

    Raises
    ------
    InputError
        Something in them is wrong.
    """
    axes = parse_axes(vary)
    names = {"hw": [hw], "model": [model]}
    for axis in axes:
        if axis.keys[0] in names:
            names[axis.keys[0]] = [str(value) for value in axis.values]
    return Study(
        axes=axes,
        hw=hw,
        model=model,
        profiles={name: load_hardware(name, overrides) for name in names["hw"]},
        configs={name: find_config(name) for name in names["model"]},
        workload=workload,
        schedules=tuple(name.strip() for name in schedules.split(",") if name.strip()),
        **settings,
    )


def sweep_command(
    study: Study,
    *,
    output: Path | None,
    overwrite: bool,
    plot: Path | None,
    jobs: int | None,
) -> dict[str, Any]:
    """Check where the results go, run the sweep, draw it.

    Raises
    ------
    InputError
        A file cannot be written, or the sweep cannot be drawn.
    """
    if jobs is not None and jobs < 1:
        raise InputError(f"{jobs} processes are none", where="--jobs", way_out="1 or more")
    for path, option in ((output, "--output"), (plot, "--plot")):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError("its folder does not exist", where=f"{option}: {path}")
    if plot is not None:
        from hrm.plots import check_figure_path

        check_figure_path(plot, where="--plot")
        check_drawable([{"name": axis.name, "kind": axis.kind, "values": axis.values} for axis in study.axes])
    document = run_sweep(study, output=output, overwrite=overwrite, jobs=jobs)
    if plot is not None:
        from hrm.plots import save_figure

        save_figure(draw_sweep(document), plot, where="--plot")
    return document


def check_something_fits(document: dict[str, Any]) -> None:
    """Say so where no row has a plan, after the rows themselves were shown.

    Raises
    ------
    InfeasibleError
        Every row has a reason in place of numbers.
    """
    if not any(has_plan(row) for row in document["rows"]):
        raise InfeasibleError(f"no point has a plan; the first: {document['rows'][0]['reason']}")
