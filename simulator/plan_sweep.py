"""A sweep as one result: the best plans over a range of machines, models or workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.pictures import Picture
from hrm.pins import Pins
from hrm.shown import Shown
from hrm.sweep_plot import draw_sweep as draw_document
from hrm.workload import Workload, load_workload
from simulator.sweep import run_sweep
from simulator.sweep_study import make_study

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

__all__ = ["Sweep", "draw_sweep", "sweep_plans"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sweep(Shown):
    """A sweep.

    Attributes
    ----------
    document : dict
        As `hrm sweep --json` prints it (docs/cli.md).
    """

    document: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The document."""
        return dict(self.document)

    def to_frame(self) -> pd.DataFrame:
        """A row per point and schedule, in SI units; columns are those of the CSV file."""
        import pandas as pd

        return pd.DataFrame(self.document["rows"])

    def print_to(self, console: Console) -> None:
        """The screen of `hrm sweep`."""
        from simulator.sweep_summary import print_sweep

        print_sweep(self.document, console)


def sweep_plans(
    vary: str | Sequence[str],
    *,
    hardware: str = "",
    model: str = "",
    workload: str | Workload = "mtbench",
    generation_length: int | None = None,
    num_requests: int = 10_000,
    overrides: Sequence[str] = (),
    schedules: Sequence[str] = ("cgopipe", "s4"),
    pins: Pins | None = None,
    cost_model: str = "full",
    simulate: bool = True,
    jobs: int | None = None,
    output: Path | None = None,
) -> Sweep:
    """Find, and simulate, the best plan of every schedule at every point of a grid.

    Parameters
    ----------
    vary : str or sequence of str
        ``"KEY=VALUES"``, as `hrm sweep --vary` takes it; two make a grid.
    hardware, model : str
        Name or file; not needed where it is varied.
    workload : str or Workload
    generation_length, num_requests : int, optional
        Of a workload by name [tokens], [requests].
    overrides : sequence of str
        ``"KEY=VALUE"``, as `--set` takes it.
    schedules : sequence of str
        Each with its own best plan; "best" is the plan that `find_plan` would make.
    pins : Pins, optional
    cost_model : {"full", "paper"}
    simulate : bool
        Replay every plan, else it is only predicted.
    jobs : int, optional
        Processes; one per core by default. A script that lets there be more than one needs the usual
        ``if __name__ == "__main__":``, since each imports it again; a notebook does not.
    output : Path, optional
        CSV file, filled as rows are found; a stopped sweep goes on from it.

    Raises
    ------
    InputError
        Something in these is wrong, or no point makes sense.
    """
    work = (
        workload
        if isinstance(workload, Workload)
        else load_workload(workload, generation_length=generation_length, num_requests=num_requests)
    )
    study = make_study(
        [vary] if isinstance(vary, str) else list(vary),
        hw=hardware,
        model=model,
        overrides=list(overrides) or None,
        schedules=",".join(schedules),
        workload=work,
        generation_length=generation_length,
        pins=pins or Pins(),
        cost_model=cost_model,
        simulate=simulate,
    )
    return Sweep(document=run_sweep(study, jobs=jobs, output=output))


def draw_sweep(sweep: Sweep, path: str | Path | None = None) -> Picture:
    """Draw a sweep: throughput against one value beside the bound, or maps over two.

    Raises
    ------
    InputError
        More than two keys were varied.
    """
    picture = Picture(draw_document(sweep.document))
    if path is not None:
        picture.save(path)
    return picture
