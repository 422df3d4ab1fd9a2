"""Commands of `hrm` that run a plan or the machine, simulated or with real tensors: simulate, run, calibrate, diff."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from hrm.cli_options import (
    Contention,
    DeviceHere,
    DeviceOfPlan,
    DiskDirectory,
    FirstLayers,
    Json,
    ModelDirectory,
    RandomWeights,
    ScheduleOfPlan,
)
from hrm.errors import InputError
from hrm.terminal import Progress, print_json, print_screen, say

__all__ = ["calibrate_machine", "diff_traces", "run_plan", "runtime_for", "simulate_plan"]

validate_app = typer.Typer(
    help="Predictions beside measurements: published, and one layer on this machine.", no_args_is_help=True
)


def simulate_plan(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan saved by hrm plan -o.")],
    schedule: ScheduleOfPlan = None,
    layers: Annotated[int | None, typer.Option(metavar="K", help="Replay only the first K layers.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Whole decode steps in trace and plot; default: 1, two layers of it in the plot.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Replay every task of every step.")] = False,
    contention: Contention = True,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Perfetto trace of the decode steps and their neighbours.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline of every lane: a PNG or SVG file.")] = None,
    jitter: Annotated[float, typer.Option(help="Spread of every task's seconds [share].")] = 0.0,
    routing_skew: Annotated[float, typer.Option(help="Zipf exponent of the experts' popularity; 0 = uniform.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of jitter and routing skew.")] = 0,
    json_: Json = False,
) -> None:
    """Replay a plan event by event and set it beside its prediction."""
    from simulator.replay_tables import print_replay
    from simulator.summary import simulate_command

    with Progress(json_) as tell:
        document = simulate_command(
            plan_file,
            schedule=schedule,
            layers=layers,
            steps=steps,
            full=full,
            contention=contention,
            trace=trace,
            plot=plot,
            jitter=jitter,
            routing_skew=routing_skew,
            seed=seed,
            on_progress=tell,
        )
    if json_:
        print_json(document)
    else:
        print_screen(lambda console: print_replay(document, console))
    if trace is not None:
        say(f"saved to {trace}; open it in Perfetto")
    if plot is not None:
        say(f"saved to {plot}")


@contextmanager
def runtime_for(command: str) -> Iterator[None]:
    """What a command imports of the runtime: without torch it says what installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        fact = f"{error.name} is not installed"
        raise InputError(fact, where=command, way_out="pip install '.[runtime]'") from None


def run_plan(
    plan_file: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="A plan saved by hrm plan -o; or --hw, to make one.")
    ] = None,
    model_dir: ModelDirectory = None,
    input_: Annotated[
        Path | None, typer.Option("--input", metavar="FILE", help="Run a job: JSONL of prompts, results in --output.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of a job: 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Of a job: tokens are drawn from the likeliest that have P.")] = 1.0,
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Of a job: for lines that do not say; default: the plan's.")
    ] = None,
    hw: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a job without PLAN: auto is this machine, or a profile.")
    ] = None,
    random_weights: RandomWeights = False,
    layers: FirstLayers = None,
    prompt_ids: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSONL of token ids; default: random, as long as planned.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="How many; default: one batch, or all of --prompt-ids.")] = None,
    device: DeviceOfPlan = None,
    schedule: ScheduleOfPlan = None,
    disk_dir: DiskDirectory = None,
    pace_links: Annotated[
        bool, typer.Option("--pace-links", help="Emulated: copies take as long as the plan's links would.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the trace of the first batch, for Perfetto and hrm diff.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Whole decode steps in the trace; default: 1.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Prefill and every decode step in the trace.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the tokens, JSONL.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="HTML", help="Of a job: write a page of what was predicted and measured.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random weights, random prompts and sampling.")] = 0,
    json_: Json = False,
) -> None:
    """Run a plan with real tensors, on a CUDA GPU or emulated: a job of prompts, or a batch beside its prediction."""
    if input_ is not None:
        _run_prompts(dict(locals()))
        return
    if plan_file is None:
        raise InputError("which plan is not said", where="hrm run", way_out="PLAN, or --hw auto and --input FILE")
    given = {"--temperature": temperature, "--max-new-tokens": max_new_tokens, "--hw": hw, "--report": report}
    for option, value in (given | {"--top-p": None if top_p == 1.0 else top_p}).items():
        if value:
            raise InputError("is of a job", where=option, way_out="with --input FILE")
    with Progress(json_, "starting torch"), runtime_for("hrm run"):
        from runtime.run_command import run_saved_plan
        from runtime.run_report import print_run

    with Progress(json_, "reading the plan") as tell:
        document = run_saved_plan(
            plan_file,
            model_dir=model_dir,
            random_weights=random_weights,
            layers=layers,
            prompt_ids=prompt_ids,
            requests=requests,
            device=device,
            schedule=schedule,
            disk_dir=disk_dir,
            paced=pace_links,
            trace=trace,
            steps=steps,
            full=full,
            output=output,
            seed=seed,
            on_progress=tell,
        )
    print_json(document) if json_ else print_screen(lambda console: print_run(document, console))
    for path in (trace, output):
        if path is not None:
            say(f"saved to {path}")


def _run_prompts(given: dict[str, Any]) -> None:
    """`hrm run --input`: a job."""
    for option in ("random_weights", "layers", "prompt_ids", "requests", "pace_links", "trace", "steps", "full"):
        if given[option]:
            name = f"--{option.replace('_', '-')}"
            raise InputError("is not of a job", where=name, way_out="without --input, for one batch")
    if given["plan_file"] is not None and given["hw"] is not None:
        raise InputError("PLAN is one already", where="--hw", way_out="one of the two")
    for option in ("model_dir", "output"):
        if given[option] is None:
            name = f"--{option.replace('_', '-')}"
            way_out = f"{name} {'DIR' if option == 'model_dir' else 'FILE'}"
            raise InputError("is missing, and a job needs it", where=name, way_out=way_out)
    with Progress(given["json_"], "starting torch"), runtime_for("hrm run"):
        from runtime.jobs.report import log_lines, print_job
        from runtime.jobs.runner import JobOptions, run_prompts
        from runtime.jobs.sampling import Sampling

    options = JobOptions(
        plan_file=given["plan_file"],
        hardware=given["hw"],
        model_dir=given["model_dir"],
        source=given["input_"],
        output=given["output"],
        report=given["report"],
        sampling=Sampling(temperature=given["temperature"], top_p=given["top_p"], seed=given["seed"]),
        max_new_tokens=given["max_new_tokens"],
        device=given["device"],
        schedule=given["schedule"],
        disk_dir=given["disk_dir"],
    )
    with Progress(given["json_"], "reading the plan") as tell:
        outcome = run_prompts(options, say=say, tell=tell or log_lines(say))
    document = outcome.document
    print_json(document) if given["json_"] else print_screen(lambda console: print_job(document, console))
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def calibrate_machine(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the profile there too, YAML.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats: 40 s at most.")] = False,
    device: DeviceHere = None,
    disk_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder whose disk is measured; default: /tmp.")
    ] = None,
    json_: Json = False,
) -> None:
    """Measure this machine and write a hardware profile of it, which --hw auto takes."""
    from hrm.calibration_report import print_calibration

    with Progress(json_, "starting torch"), runtime_for("hrm calibrate"):
        from runtime.calibration.command import calibrate

    with Progress(json_, "looking at the machine") as tell:
        document = calibrate(output, quick=quick, device=device, disk_dir=disk_dir, on_progress=tell)
    print_json(document) if json_ else print_screen(lambda console: print_calibration(document, console))
    for path in document["files"]:
        say(f"saved to {path}")


def diff_traces(
    first: Annotated[Path, typer.Argument(metavar="SIMULATED", help="A trace that hrm simulate --trace wrote.")],
    second: Annotated[Path, typer.Argument(metavar="MEASURED", help="A trace of the same tasks, run or simulated.")],
    top: Annotated[int, typer.Option(metavar="N", help="Show the N tasks that differ most.")] = 10,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Every task in a CSV file.")] = None,
    json_: Json = False,
) -> None:
    """Set a simulated trace beside a measured one: by kind of task, lane, layer and task."""
    from hrm.diff import check_kept, diff_files
    from hrm.diff_tables import print_diff

    document = diff_files(first, second, output=output, top=top)
    print_json(document) if json_ else print_screen(lambda console: print_diff(document, console))
    if output is not None:
        say(f"saved to {output}")
    check_kept(document)
