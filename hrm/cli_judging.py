"""Commands of `hrm` that judge predictions by measurements, and fit constants to them: validate, fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hrm.cli_options import (
    ComputeDtype,
    DeviceHere,
    DeviceOfPlan,
    DiskDirectory,
    DocumentFile,
    FirstLayers,
    GenerationLength,
    HtmlPage,
    Json,
    KvDtype,
    MaxHours,
    ModelDirectory,
    Overrides,
    Padded,
    PromptFile,
    PromptLength,
    RandomWeights,
    RebuildFrom,
    Requests,
    ScheduleOfPlan,
    WeightsDtype,
    WorkloadName,
    check_hours,
    complete_hardware,
    complete_model,
    load_scenario,
    load_workload_options,
)
from hrm.cli_running import runtime_for
from hrm.errors import InputError
from hrm.terminal import Progress, print_json, print_screen, say

if TYPE_CHECKING:
    from hrm.scenario import Scenario

__all__ = ["fit_constants", "validate_app"]

validate_app = typer.Typer(help="Predictions beside measurements: published, layer, run, memory.", no_args_is_help=True)


@validate_app.command("published")
def validate_published(
    data: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Rows to predict and judge; the published ones if not given.")
    ] = None,
    kernels: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Kernel latencies; the published ones if not given.")
    ] = None,
    report: HtmlPage = None,
    max_median_error: Annotated[
        float, typer.Option(help="Exit 4 where the full model's median error is above this.")
    ] = 0.15,
    no_simulation: Annotated[bool, typer.Option("--no-simulation", help="Leave out the simulation.")] = False,
    json_: Json = False,
) -> None:
    """Set Eq. 12, the cost model and the simulation beside published measurements."""
    from hrm.published.validation import check_bar, validate_command
    from simulator.published import replay_row

    with Progress(json_) as tell:
        document = validate_command(
            data,
            kernels,
            simulate=None if no_simulation else replay_row,
            report=report,
            max_median_error=max_median_error,
            tell=tell,
        )
    if json_:
        print_json(document)
    else:
        from hrm.published.screen import print_validation

        print_screen(lambda console: print_validation(document, console))
    if report is not None:
        say(f"saved to {report}")
    check_bar(document)


@validate_app.command("layer")
def validate_layer(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan saved by hrm plan -o.")],
    device: DeviceHere = None,
    schedule: ScheduleOfPlan = None,
    repeats: Annotated[int, typer.Option(help="Layers to measure, at least.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the random weights, KV cache and tokens.")] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write simulated.json and measured.json there: hrm diff, Perfetto."),
    ] = None,
    json_: Json = False,
) -> None:
    """Run one layer of a plan, random weights at real shapes: does it take max(link, CPU, GPU)?"""
    from hrm.layer_report import check_trace_folder, layer_document, print_layer, save_layer_traces
    from simulator.layer_price import price_steps

    with Progress(json_, "starting torch"), runtime_for("hrm validate layer"):
        from runtime.layer_command import measure_layer

    if trace is not None:
        check_trace_folder(trace)
    with Progress(json_, "reading the plan") as tell:
        found = measure_layer(plan_file, schedule=schedule, device=device, repeats=repeats, seed=seed, tell=tell)
        run = found.run
        graph, predicted, simulated = price_steps(run.scenario, found.policy, found.schedule, run.steps)
    document = layer_document(
        graph,
        predicted,
        simulated,
        run.traces,
        counted=run.counted,
        touched=run.touched,
        model=run.scenario.model,
        facts=found.facts,
    )
    if trace is not None:
        save_layer_traces(
            trace,
            graph,
            predicted,
            simulated,
            run.traces[-1],
            scenario=run.scenario,
            plan=found.document,
            facts=found.facts,
        )
    print_json(document) if json_ else print_screen(lambda console: print_layer(document, console))
    if trace is not None:
        say(f"saved to {trace / 'simulated.json'} and {trace / 'measured.json'}")


@validate_app.command("run")
def validate_run(
    plan_file: Annotated[
        Path | None, typer.Argument(metavar="[PLAN]", help="A plan saved by hrm plan -o; none with --from or --preset.")
    ] = None,
    model_dir: ModelDirectory = None,
    random_weights: RandomWeights = False,
    layers: FirstLayers = None,
    repeats: Annotated[
        int | None, typer.Option(help="Timed runs of every policy, in turns of random order; default: 5.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="reviewers-s1 or colab-t4: plans of its own, on a GPU.")] = None,
    device: DeviceOfPlan = None,
    schedule: ScheduleOfPlan = None,
    disk_dir: DiskDirectory = None,
    records: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where predictions and raw spans go; default: beside the plan, -validation."),
    ] = None,
    rebuild_from: RebuildFrom = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure nothing: policies, predictions, how long it would take.")
    ] = False,
    report: HtmlPage = None,
    output: DocumentFile = None,
    seed: Annotated[int, typer.Option(help="Of policies, order, random weights and prompts.")] = 0,
    json_: Json = False,
) -> None:
    """Measure a plan and policies around it, hashed predictions first: is the model right here, is the plan best?"""
    from hrm.validation.run import Options, run_validation

    options = Options(
        plan_file=plan_file,
        model_dir=model_dir,
        random_weights=random_weights,
        layers=layers,
        repeats=repeats,
        preset=preset,
        device=device,
        schedule=schedule,
        disk_dir=disk_dir,
        records=records,
        rebuild_from=rebuild_from,
        dry_run=dry_run,
        report=report,
        output=output,
        seed=seed,
    )
    with Progress(json_, "reading the plan") as tell:
        from simulator.validation_price import forecaster

        def bench(*arguments: Any, **named: Any) -> Any:
            with runtime_for("hrm validate run"):
                from runtime.validation.command import open_bench
            return open_bench(*arguments, **named)

        found = run_validation(options, forecaster(), bench, tell or (lambda _: None))
    print_json(found.document) if json_ else print_screen(found.show)
    found.say_saved(say)
    found.check()


@validate_app.command("memory")
def validate_memory(
    hw: Annotated[
        str | None,
        typer.Option(help="Hardware profile, as of hrm plan; none with --from.", autocompletion=complete_hardware),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="As of hrm plan; default: that of --model-dir.", autocompletion=complete_model)
    ] = None,
    model_dir: ModelDirectory = None,
    random_weights: RandomWeights = False,
    layers: Annotated[int | None, typer.Option(metavar="K", help="Plan and run only the first K layers.")] = None,
    caps: Annotated[
        str | None, typer.Option(metavar="SIZES", help="CPU memory of the process, with commas: 1GiB,1.5GiB,...")
    ] = None,
    points: Annotated[
        int | None, typer.Option(help="So many caps, from the least to the most that a plan takes; default: 6.")
    ] = None,
    workload: WorkloadName = None,
    prompt_len: PromptLength = None,
    gen_len: GenerationLength = None,
    prompts: PromptFile = None,
    padded: Padded = False,
    requests: Requests = 10_000,
    max_hours: MaxHours = 24.0,
    weights_dtype: WeightsDtype = None,
    kv_dtype: KvDtype = None,
    compute_dtype: ComputeDtype = None,
    repeats: Annotated[
        int | None, typer.Option(help="Runs of each schedule under each cap, in random order; default: 3.")
    ] = None,
    device: DeviceHere = None,
    disk_dir: DiskDirectory = None,
    records: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where plans, predictions and raw spans go; default: memory-validation."),
    ] = None,
    rebuild_from: RebuildFrom = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure nothing: plans, predictions, how long it would take.")
    ] = False,
    report: HtmlPage = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure: a PNG or SVG file.")] = None,
    output: DocumentFile = None,
    seed: Annotated[int, typer.Option(help="Of the order, random weights and prompts.")] = 0,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Measure cgopipe and s4, each at its best plan, under caps of CPU memory: how much less does one need?"""
    from hrm.model_files import find_config
    from hrm.validation.caps_run import MemoryOptions, run_memory_validation

    options = MemoryOptions(
        model_dir=model_dir,
        random_weights=random_weights,
        layers=layers,
        caps=caps,
        points=points,
        max_hours=max_hours,
        repeats=repeats,
        device=device,
        disk_dir=disk_dir,
        records=records,
        rebuild_from=rebuild_from,
        dry_run=dry_run,
        report=report,
        plot=plot,
        output=output,
        seed=seed,
    )
    scenario: Scenario | None = None
    document: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    named = model or (None if model_dir is None else str(model_dir))
    if hw is not None and named is not None:
        check_hours(max_hours)
        config = find_config(named)
        work, notes = load_workload_options(workload, prompt_len, gen_len, prompts, padded, requests)
        scenario = load_scenario(hw, set_, config, work, weights_dtype, kv_dtype, compute_dtype)
        document = {"name": scenario.model.name, "config": config["values"]}
    with Progress(json_, "planning") as tell:
        from simulator.cap_plans import cap_theory

        def bench(*arguments: Any, **named: Any) -> Any:
            with runtime_for("hrm validate memory"):
                from runtime.validation.capped_bench import open_capped_bench
            return open_capped_bench(*arguments, **named)

        found = run_memory_validation(options, scenario, document, notes, cap_theory(), bench, tell or (lambda _: None))
    print_json(found.document) if json_ else print_screen(found.show)
    found.say_saved(say)
    found.check()


def fit_constants(
    data: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Rows to fit to; the published ones if not given.")
    ] = None,
    components: Annotated[
        str | None, typer.Option(help="Whose constants may move, with commas between them; all if not given.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="YAML file: constants, intervals, correlation, rows.")
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Rewrite the constants in the files of this source tree.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instead: the efficiencies of a profile, from a trace of hrm run."),
    ] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="The plan of that trace.")] = None,
    judge: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Records of hrm validate run: errors there before and after.")
    ] = None,
    json_: Json = False,
) -> None:
    """Fit the constants of machines and systems to measured rows, and say how well they are known."""
    if trace is None and (plan_file is not None or judge is not None):
        raise InputError("belong to --trace", where="--plan, --judge", way_out="--trace FILE")
    if trace is not None:
        if data is not None or components is not None or install:
            raise InputError("are for published rows", where="--data, --components, --install", way_out="no --trace")
        _fit_to_trace(trace, plan_file, judge, output, json_)
        return
    from hrm.published.fit_report import constants_document, fit_command, print_fit, write_constants

    if output is not None and data is not None and output.resolve() == data.resolve():
        raise InputError("is also --data", where=f"--output: {output}", way_out="another file")
    from hrm.published.installation import install_constants, source_tree

    if output is not None and not output.absolute().parent.is_dir():
        raise InputError("its folder does not exist", where=f"--output: {output}")
    root = source_tree() if install else None
    with Progress(json_) as tell:
        found = fit_command(data=data, components=components, on_progress=tell)
    try:
        if output is not None:
            write_constants(found, output)
            say(f"saved to {output}")
        if root is not None:
            changed = install_constants(found, root)
            names = ", ".join(str(path.relative_to(root)) for path in changed)
            say(f"rewritten: {names or 'nothing, all is as it was'}")
    finally:  # what was found is shown even where it cannot be written
        if json_:
            print_json(constants_document(found))
        else:
            print_screen(lambda console: print_fit(found, console))


def _fit_to_trace(trace: Path, plan_file: Path | None, judge: Path | None, output: Path | None, json_: bool) -> None:
    """`hrm fit --trace`: a measured run into the efficiencies of the profile it was planned for."""
    from hrm.validation.fitting import fit_trace, print_trace_fit
    from simulator.validation_price import trace_simulator

    with Progress(json_, "reading the trace") as tell:
        document = fit_trace(trace, plan_file, judge, output, trace_simulator(), tell=tell or (lambda _: None))
    print_json(document) if json_ else print_screen(lambda console: print_trace_fit(document, console))
    if output is not None:
        say(f"saved to {output}")
