"""`hrm simulate`: a simulated run beside what the plan predicted, as one JSON document, with its trace and picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.errors import InputError
from hrm.gantt import Panel, draw_timelines, layer_panel
from hrm.layout import Layout
from hrm.plans import read_plan_document
from hrm.plots import check_figure_path, save_figure
from hrm.policy import Policy
from hrm.prediction import Prediction
from hrm.rates import derive_rates
from hrm.scenario import Scenario, measure_sizes, truncated
from hrm.schedules import Steps, check_schedule
from hrm.trace_files import facts_of_plan, write_trace
from hrm.trivial import predict_policy
from simulator.critical_path import step_window
from simulator.durations import Durations, roofline_durations
from simulator.replay import Replay, replay_plan, step_trace
from simulator.skew import wrap
from simulator.step_account import StepAccount, StepRun, account_for_step, account_in_short, run_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "check_apart",
    "check_output",
    "policy_document",
    "replay_document",
    "run_figure",
    "run_title",
    "simulate_command",
    "workload_in_words",
]


def simulate_command(
    plan_file: Path,
    *,
    schedule: str | None = None,
    layers: int | None = None,
    steps: int | None = None,
    full: bool = False,
    contention: bool = True,
    trace: Path | None = None,
    plot: Path | None = None,
    jitter: float = 0.0,
    routing_skew: float = 0.0,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Replay a saved plan; write its trace and picture where asked.

    Parameters
    ----------
    plan_file : Path
        Written by `hrm plan -o`.
    schedule : str, optional
        The policy's own by default.
    layers : int, optional
        Only the first so many layers of the model, as `hrm run --layers` runs it.
    steps : int, optional
        Decode steps that the trace and the picture show, whole; by default one, the picture two layers of it.
    full : bool
        Replay every task of every step; without `steps` the trace has them all, and prefill.
    contention : bool
        Let lanes share memory, link and cores.
    trace, plot : Path, optional
        Files to write.
    jitter : float
        Spread of every task's seconds [share].
    routing_skew : float
        Zipf exponent of the experts' popularity; 0 = uniform.
    seed : int
        Of both.
    on_progress : callable, optional
        Called with a line of text now and then.

    Returns
    -------
    dict
        See docs/cli.md.

    Raises
    ------
    InputError
        The file is no plan that can be replayed, the schedule cannot run it, or a file cannot be written.
    """
    tell = on_progress or (lambda _: None)
    check_output(trace, "--trace")
    check_output(plot, "--plot", figure=True)
    check_apart(PLAN=plan_file, trace=trace, plot=plot)
    whole, policy, saved = read_plan_document(plan_file)
    _check_plan_runs(saved, plan_file)
    scenario = whole if layers is None else truncated(whole, layers)
    name = schedule or policy.schedule
    check_schedule(name, policy)
    if scenario.workload.generation_length == 1 and (trace, plot, steps) != (None, None, None):
        raise InputError(
            "one token is generated, and prefill gives it: there is no decode step to show",
            where=str(plan_file),
            way_out="leave out --trace, --plot and --steps, or plan with --gen-len 2 or more",
        )
    tell(f"simulating decode steps of {name}")
    change = None if not (jitter or routing_skew) else wrap(Layout(scenario, policy), jitter, routing_skew, seed)
    run = None
    if full or (trace, plot, steps) != (None, None, None):
        count = 1 if steps is None else steps
        run = run_step(scenario, policy, name, steps=count, contention=contention, change=change)
    tell(f"replaying {name}")
    document = policy_document(
        scenario,
        policy,
        name,
        run,
        layers_of_model=whole.model.n_layers,
        contention=contention,
        full=full,
        change=change,
    )
    if run is not None and trace is not None:
        graph, shown = run.graph, run.trace
        if full and steps is None:
            tell("replaying every task for its trace")
            every = Steps(prefill=True, last=scenario.workload.generation_length - 1)
            graph, shown = step_trace(scenario, policy, name, step=0, contention=contention, wrap=change, steps=every)
        origin = {"contention": "on" if contention else "off"}
        if change is not None:
            origin |= {"jitter": f"{jitter:g}", "routing skew": f"{routing_skew:g}", "seed": str(seed)}
        alone = roofline_durations(derive_rates(scenario.profile, scenario.formats))
        write_trace(
            graph,
            shown,
            trace,
            plan_facts=facts_of_plan(scenario, saved, schedule=name, origin=origin),
            predicted_s=[alone(task) for task in graph.tasks],
        )
    if run is not None and plot is not None:
        tell("drawing")
        save_figure(run_figure(run, title=run_title(document), whole=steps is not None), plot, where="--plot")
    return document


def policy_document(
    scenario: Scenario,
    policy: Policy,
    name: str,
    run: StepRun | None,
    *,
    layers_of_model: int,
    contention: bool,
    full: bool = False,
    change: Callable[[Durations], Durations] | None = None,
) -> dict[str, Any]:
    """Replay a whole run under a schedule; what `hrm simulate --json` prints (docs/cli.md).

    Parameters
    ----------
    scenario : Scenario
    policy : Policy
    name : str
        Of a schedule that can run it.
    run : StepRun or None
        A decode step that was simulated already; without one a short account of it is made.
    layers_of_model : int
        Also where the scenario has only the first of them.
    contention, full : bool
        As `simulator.replay.replay_plan`.
    change : callable, optional
        Changes the seconds of tasks.
    """
    replay = replay_plan(scenario, policy, name, contention=contention, full=full, wrap=change)
    rates = derive_rates(scenario.profile, scenario.formats)
    prediction = predict_policy(scenario, measure_sizes(scenario), rates, policy)
    if run is None:
        account = account_in_short(scenario, policy, name, replay, contention=contention, change=change)
    else:
        account = account_for_step(run)
    count = scenario.model.n_layers
    return {
        "model": scenario.model.name,
        "layers": count,
        "layers_of_model": layers_of_model,
        "hardware": scenario.profile.name,
        "workload": workload_in_words(scenario),
        **replay_document(replay, prediction, account, num_layers=count, schedule=name, contention=contention),
    }


def run_title(document: Mapping[str, Any]) -> str:
    """Title of the picture of a run."""
    rate = f"{document['throughput_tokens_per_s']:,.4g} token/s"
    shared = "with contention" if document["contention"] else "without contention"
    what = f"{document['model']} on {document['hardware']}, schedule {document['schedule']}"
    return f"{what}: {rate} (simulated, {shared})"


def check_apart(**files: Path | None) -> None:
    """Refuse to write over what is read, or one output over another.

    Raises
    ------
    InputError
        Two of the files are one.
    """
    seen: dict[Path, str] = {}
    for name, path in files.items():
        if path is None:
            continue
        option = name if name.isupper() else f"--{name}"
        other = seen.setdefault(path.resolve(), option)
        if other != option:
            raise InputError(f"is also {other}", where=f"{option}: {path}", way_out="another file")


def check_output(path: Path | None, option: str, *, figure: bool = False) -> None:
    """Refuse a file that could not be written, before anything takes long.

    Raises
    ------
    InputError
        Its folder does not exist, it is a folder itself, or it is to be a figure and ends in neither .png nor .svg.
    """
    if path is None:
        return
    if figure:
        check_figure_path(path, where=option)
    if not path.absolute().parent.is_dir():
        raise InputError("its folder does not exist", where=f"{option}: {path}")
    if path.is_dir():
        raise InputError("is a folder", where=f"{option}: {path}", way_out="the name of a file")


def workload_in_words(scenario: Scenario) -> str:
    """Name of the workload, generated tokens, and whether prompts are padded: no rate stands without that."""
    workload = scenario.workload
    padding = "padded" if workload.padded else "unpadded"
    return f"{workload.name}, {workload.generation_length} generated, {padding} prompts"


def _check_plan_runs(document: Mapping[str, Any], file: Path) -> None:
    """Refuse a plan that has no tasks to replay.

    Raises
    ------
    InputError
        It was found with the paper's cost model, which leaves out what a run needs.
    """
    if document.get("inputs", {}).get("cost_model") == "paper":
        raise InputError(
            "the paper's cost model has no prefill, embedding or lm_head, so its plan cannot be replayed",
            where=f"{file}: inputs.cost_model",
            way_out="hrm plan without --cost-model paper; pin what you want of it",
        )


def replay_document(
    replay: Replay,
    prediction: Prediction,
    step: StepAccount | None,
    *,
    num_layers: int,
    schedule: str,
    contention: bool,
) -> dict[str, Any]:
    """The run as one JSON document; ratios are predicted over simulated.

    Parameters
    ----------
    replay : Replay
        Of the whole run.
    prediction : Prediction
        What the full cost model says of the same policy.
    step : StepAccount or None
        The decode step in the middle of the run; None where one token is generated.
    num_layers : int
        Of the model.
    schedule : str
    contention : bool
    """
    seconds, bound = (0.0, 0.0) if step is None else (step.seconds, step.bound_s)
    simulated = {
        "throughput_tokens_per_s": replay.throughput_tokens_per_s,
        "prefill_s": replay.prefill_s,
        "decode_s": replay.decode_s,
        "step_latency_s": seconds,
        "layer_latency_s": seconds / num_layers,
    }
    predicted = {
        name: prediction.decode.seconds if name == "step_latency_s" else float(getattr(prediction, name))
        for name in simulated
    }
    busy = {} if step is None else step.busy_s
    peaks = {} if step is None else step.peak_bytes
    copies = {} if step is None else step.copies
    return {
        "schedule": schedule,
        "contention": contention,
        **simulated,
        "bound_layer_latency_s": bound / num_layers,
        "bubble_s": seconds - bound,
        "step": None if step is None else step.step,
        "lanes": {lane: {"busy_s": used, "utilisation": used / seconds} for lane, used in busy.items()},
        "critical_path": {} if step is None else dict(step.critical_path),
        "copies": {name: {"bytes": copied.bytes, "seconds": copied.seconds} for name, copied in copies.items()},
        "memory": {
            level: {"peak_bytes": peaks.get(level), "stated_peak_bytes": use.peak_bytes}
            for level, use in prediction.memory.items()
        },
        "predicted": predicted,
        "predicted_over_simulated": {
            name: predicted[name] / value if value else None for name, value in simulated.items()
        },
        "tasks": replay.tasks,
        "simulate_seconds": replay.simulate_seconds,
    }


def run_figure(run: StepRun, *, title: str, whole: bool = False) -> Figure:
    """Draw a run: two layers from the middle of the stack, or all of its steps.

    Parameters
    ----------
    run : StepRun
    title : str
    whole : bool
        All steps from end to end.
    """
    if not whole:
        words = f"decode step {run.first}, two layers from the middle of the stack; numbers are micro-batches"
        return draw_timelines([layer_panel(run.trace, run.first, title=words)], title=title)
    steps = range(run.first, run.last)
    ends = tuple((step_window(run.graph, run.trace, step).end_s, f"step {step}") for step in steps)
    words = f"decode step {run.first}" if len(steps) == 1 else f"decode steps {run.first} to {run.last - 1}"
    start, end = run.window
    return draw_timelines([Panel(title=words, trace=run.trace, start_s=start, end_s=end, marks=ends)], title=title)
