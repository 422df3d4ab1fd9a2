"""The `hrm` command. Thin: parse, load, call one function, print.

Exit codes: 0 done, 2 wrong input, 3 no plan fits, 4 a bar was missed, 130 interrupted. Results go to standard output
(`--json`: exactly one document), progress and errors to standard error.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from hrm.cli_options import (
    AttentionPin,
    BatchPin,
    ComputeDtype,
    Contention,
    Costs,
    DenseWeightsPin,
    EmbeddingPin,
    FfnPin,
    GenerationLength,
    Hardware,
    Json,
    KvDtype,
    KvOnDiskPin,
    KvOnGpuPin,
    LmHeadPin,
    MaxHours,
    MicroBatchPin,
    Model,
    NumMicroBatchesPin,
    Overrides,
    Padded,
    PinWeights,
    PrefillMicroBatchPin,
    PromptFile,
    PromptLength,
    Requests,
    RooflineOperator,
    WeightsDtype,
    WeightSlotsPin,
    WeightsOnDiskPin,
    WeightsOnGpuPin,
    WorkloadName,
    check_hours,
    complete_hardware,
    complete_model,
    load_hardware,
    load_scenario,
    load_workload_options,
    read_pins,
)
from hrm.errors import HrmError, InputError
from hrm.terminal import Progress, ReaderGone, forget_unwritten, print_json, print_screen, say, write

__all__ = ["app", "main"]

INTERRUPTED = 130

app = typer.Typer(
    name="hrm",
    help="Find the best way to run batch generation of a mixture-of-experts model that does not fit the GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
hardware_app = typer.Typer(help="Hardware profiles: list, show, check.", invoke_without_command=True)
models_app = typer.Typer(help="Models: list, show.", invoke_without_command=True)
validate_app = typer.Typer(help="Predictions beside measurements: published, layer, run.", no_args_is_help=True)
app.add_typer(hardware_app, name="hardware")
app.add_typer(models_app, name="models")
app.add_typer(validate_app, name="validate")


@app.command()
def plan(
    hw: Hardware,
    model: Model,
    workload: WorkloadName = None,
    prompt_len: PromptLength = None,
    gen_len: GenerationLength = None,
    prompts: PromptFile = None,
    padded: Padded = False,
    requests: Requests = 10_000,
    max_hours: MaxHours = 24.0,
    cost_model: Annotated[Costs, typer.Option(help="full, or the paper's own terms (Eqs. 12-14).")] = Costs.full,
    weights_dtype: WeightsDtype = None,
    kv_dtype: KvDtype = None,
    compute_dtype: ComputeDtype = None,
    batch: BatchPin = None,
    micro_batch: MicroBatchPin = None,
    num_micro_batches: NumMicroBatchesPin = None,
    prefill_micro_batch: PrefillMicroBatchPin = None,
    attention: AttentionPin = None,
    ffn: FfnPin = None,
    weights_on_gpu: WeightsOnGpuPin = None,
    weights_on_disk: WeightsOnDiskPin = None,
    kv_on_gpu: KvOnGpuPin = None,
    kv_on_disk: KvOnDiskPin = None,
    weight_slots: WeightSlotsPin = None,
    dense_weights: DenseWeightsPin = None,
    embedding: EmbeddingPin = None,
    lm_head: LmHeadPin = None,
    pin_weights: PinWeights = None,
    explain: Annotated[bool, typer.Option(help="Solve the alternatives too.")] = False,
    refine: Annotated[
        int | None, typer.Option(metavar="K", help="Replay the K best plans in the simulator, take its best.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Save the plan with its inputs.")] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Find the best offloading plan of a model on a machine."""
    from hrm.executable_plans import with_executable_plan
    from hrm.model_files import find_config
    from hrm.planning import make_plan
    from hrm.plans import save_plan
    from hrm.profile_files import profile_document

    check_hours(max_hours)
    if output is not None and not output.absolute().parent.is_dir():
        raise InputError("its folder does not exist", where=f"--output: {output}")
    if refine is not None:
        from hrm.diverse import check_count

        check_count(refine)
        if cost_model is Costs.paper:
            raise InputError("the paper's terms have no plan to replay", where="--refine", way_out="--cost-model full")
    pins = read_pins(locals())
    config = find_config(model)
    work, notes = load_workload_options(workload, prompt_len, gen_len, prompts, padded, requests)
    scenario = load_scenario(hw, set_, config, work, weights_dtype, kv_dtype, compute_dtype)
    with Progress(json_) as tell:
        judge = None
        if refine is not None:
            from functools import partial

            from simulator.refine import refine_search

            judge = partial(refine_search, scenario, count=refine, max_hours=max_hours, on_progress=tell)
        found = make_plan(
            scenario,
            hardware={"name": scenario.profile.name, "document": profile_document(scenario.profile)},
            model={"name": scenario.model.name, "config": config["values"]},
            pins=pins,
            cost_model=cost_model.value,
            max_hours=max_hours,
            explain=explain,
            notes=notes,
            refine=judge,
            on_progress=tell,
        )
        found = with_executable_plan(found, sys.argv[1:], on_progress=tell)
    try:
        if output is not None:
            save_plan(found, output)
            say(f"saved to {output}")
    finally:  # what took a while to find is shown even where it cannot be saved
        if json_:
            print_json(found.to_dict())
        else:
            from hrm.report import print_plan

            print_screen(lambda console: print_plan(found, console))


@app.command("simulate")
def simulate_plan(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan saved by hrm plan -o.")],
    schedule: Annotated[
        str | None, typer.Option(help="One that the plan can run under; default: the plan's own.")
    ] = None,
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
def _runtime_for(command: str) -> Iterator[None]:
    """What a command imports of the runtime: without torch it says what installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        fact = f"{error.name} is not installed"
        raise InputError(fact, where=command, way_out="pip install '.[runtime]'") from None


@app.command("run")
def run_plan(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan saved by hrm plan -o.")],
    model_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the checkpoint: config.json and safetensors.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Run without a checkpoint: weights of the real shapes.")
    ] = False,
    layers: Annotated[int | None, typer.Option(metavar="K", help="Run only the first K layers.")] = None,
    prompt_ids: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSONL of token ids; default: random, as long as planned.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="How many; default: one batch, or all of --prompt-ids.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, or cpu: the accelerator emulated; default: what fits the plan.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="One that the plan can run under; default: the plan's own.")
    ] = None,
    disk_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where what the plan has on disk lies; default: /tmp.")
    ] = None,
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
    seed: Annotated[int, typer.Option(help="Of random weights and prompts.")] = 0,
    json_: Json = False,
) -> None:
    """Run a plan with real tensors, on a CUDA GPU or emulated, and set it beside its prediction."""
    with Progress(json_, "starting torch"), _runtime_for("hrm run"):
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


@app.command("diff")
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


@app.command("sweep")
def sweep_values(
    hw: Hardware,
    model: Model,
    vary: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUES", help="Vary this, e.g. cpu.memory=64GiB:512GiB:64GiB; twice makes a grid."),
    ],
    schedules: Annotated[
        str, typer.Option(help="best, cgopipe, s2, s3, s4, streaming, static_experts, cpu_only, serial.")
    ] = "cgopipe,s4",
    predict_only: Annotated[bool, typer.Option("--predict-only", help="Do not simulate.")] = False,
    contention: Contention = True,
    workload: WorkloadName = None,
    prompt_len: PromptLength = None,
    gen_len: GenerationLength = None,
    prompts: PromptFile = None,
    padded: Padded = False,
    requests: Requests = 10_000,
    max_hours: MaxHours = 24.0,
    cost_model: Annotated[Costs, typer.Option(help="full, or the paper's own terms (Eqs. 12-14).")] = Costs.full,
    weights_dtype: WeightsDtype = None,
    kv_dtype: KvDtype = None,
    compute_dtype: ComputeDtype = None,
    batch: BatchPin = None,
    micro_batch: MicroBatchPin = None,
    num_micro_batches: NumMicroBatchesPin = None,
    prefill_micro_batch: PrefillMicroBatchPin = None,
    attention: AttentionPin = None,
    ffn: FfnPin = None,
    weights_on_gpu: WeightsOnGpuPin = None,
    weights_on_disk: WeightsOnDiskPin = None,
    kv_on_gpu: KvOnGpuPin = None,
    kv_on_disk: KvOnDiskPin = None,
    weight_slots: WeightSlotsPin = None,
    dense_weights: DenseWeightsPin = None,
    embedding: EmbeddingPin = None,
    lm_head: LmHeadPin = None,
    pin_weights: PinWeights = None,
    jobs: Annotated[int | None, typer.Option(help="Processes; one per core if not given.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="CSV file, filled as rows are found; a stopped sweep goes on.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew whatever the CSV file holds.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the sweep: a PNG or SVG file.")] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Find and simulate the best plan of every schedule over a range of machines, models or workloads."""
    from simulator.sweep_study import check_something_fits, make_study, sweep_command
    from simulator.sweep_summary import print_sweep

    check_hours(max_hours)
    work, notes = load_workload_options(workload, prompt_len, gen_len, prompts, padded, requests)
    study = make_study(
        vary,
        hw=hw,
        model=model,
        overrides=set_,
        schedules=schedules,
        workload=work,
        generation_length=gen_len,
        weights_dtype=weights_dtype,
        kv_dtype=kv_dtype,
        compute_dtype=compute_dtype,
        pins=read_pins(locals()),
        cost_model=cost_model.value,
        max_hours=max_hours,
        simulate=not predict_only,
        contention=contention,
        notes=notes,
    )
    document = sweep_command(study, output=output, overwrite=overwrite, plot=plot, jobs=jobs)
    print_json(document) if json_ else print_screen(lambda console: print_sweep(document, console))
    for path in (output, plot):
        if path is not None:
            say(f"saved to {path}")
    check_something_fits(document)


@app.command("compare")
def compare(
    hw: Hardware,
    model: Model,
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
    batch: BatchPin = None,
    micro_batch: MicroBatchPin = None,
    num_micro_batches: NumMicroBatchesPin = None,
    prefill_micro_batch: PrefillMicroBatchPin = None,
    attention: AttentionPin = None,
    ffn: FfnPin = None,
    weights_on_gpu: WeightsOnGpuPin = None,
    weights_on_disk: WeightsOnDiskPin = None,
    kv_on_gpu: KvOnGpuPin = None,
    kv_on_disk: KvOnDiskPin = None,
    weight_slots: WeightSlotsPin = None,
    dense_weights: DenseWeightsPin = None,
    embedding: EmbeddingPin = None,
    lm_head: LmHeadPin = None,
    pin_weights: PinWeights = None,
    schedules: Annotated[str | None, typer.Option(help="Which ones, with commas between them; all by default.")] = None,
    contention: Contention = True,
    plot: Annotated[Path | None, typer.Option(help="Draw their timelines below each other: a PNG or SVG file.")] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Simulate every schedule under the best plan, and under the best plan of its own."""
    from hrm.model_files import find_config
    from hrm.planning import make_plan
    from hrm.plots import save_figure
    from hrm.profile_files import profile_document
    from simulator.compare import compare_schedules, read_schedules
    from simulator.compare_tables import comparison_document, comparison_figure, print_comparison
    from simulator.summary import check_output

    check_hours(max_hours)
    check_output(plot, "--plot", figure=True)
    names = read_schedules(schedules)
    pins = read_pins(locals())
    config = find_config(model)
    work, notes = load_workload_options(workload, prompt_len, gen_len, prompts, padded, requests)
    scenario = load_scenario(hw, set_, config, work, weights_dtype, kv_dtype, compute_dtype)
    if plot is not None and work.generation_length == 1:
        raise InputError(
            "one token is generated, and prefill gives it: there is no decode step to draw",
            where=f"--plot: {plot}",
            way_out="--gen-len 2 or more",
        )
    with Progress(json_) as tell:
        found = make_plan(
            scenario,
            hardware={"name": scenario.profile.name, "document": profile_document(scenario.profile)},
            model={"name": scenario.model.name, "config": config["values"]},
            pins=pins,
            max_hours=max_hours,
            notes=notes,
            on_progress=tell,
        )
        compared = compare_schedules(found, names, contention=contention, panels=plot is not None, on_progress=tell)
    try:
        if plot is not None:
            save_figure(comparison_figure(compared), plot, where="--plot")
            say(f"saved to {plot}")
    finally:  # what took a while to find is shown even where it cannot be saved
        if json_:
            print_json(comparison_document(compared))
        else:
            print_screen(lambda console: print_comparison(compared, console))


@app.command("roofline")
def draw_roofline(
    hw: Hardware,
    model: Model,
    op: Annotated[RooflineOperator, typer.Option("--op", help="Operator to draw.")] = RooflineOperator.ffn,
    cost_model: Annotated[Costs, typer.Option(help="How intensities are counted.")] = Costs.full,
    context: Annotated[int, typer.Option(help="Context length of attention [tokens].")] = 512,
    micro_batch: Annotated[int, typer.Option(help="Tokens computed at once.")] = 128,
    batch: Annotated[int | None, typer.Option(help="Tokens per copy of the weights.")] = None,
    weights_dtype: Annotated[str | None, typer.Option(help="Storage of the weights.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Storage of the KV cache.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="PNG or SVG file.")] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Draw the hierarchical roofline of an operator (Figures 4 and 5 of the paper)."""
    from hrm.model_files import load_model
    from hrm.roofline_report import print_roofline, roofline_command

    document = roofline_command(
        load_hardware(hw, set_),
        load_model(model),
        operator=op.value,
        cost_model=cost_model.value,
        context=context,
        micro_batch=micro_batch,
        batch=batch,
        weights_dtype=weights_dtype,
        kv_dtype=kv_dtype,
        output=output,
    )
    if json_:
        print_json(document)
    else:
        print_screen(lambda console: print_roofline(document, console))


@hardware_app.callback(invoke_without_command=True)
def list_hardware(context: typer.Context, json_: Json = False) -> None:
    """List the bundled hardware profiles."""
    if context.invoked_subcommand is None:
        from hrm.listings import hardware_rows, print_rows

        rows = hardware_rows()
        print_json({"hardware": rows}) if json_ else print_screen(lambda console: print_rows(rows, console))


@hardware_app.command("show")
def show_hardware(name: Annotated[str, typer.Argument(autocompletion=complete_hardware)], json_: Json = False) -> None:
    """Print a profile as one self-contained YAML file, every number with its source."""
    from hrm.profile_files import dump_profile, load_profile, profile_document

    profile = load_profile(name)
    if json_:
        print_json({"name": profile.name, **profile_document(profile)})
    else:
        write(dump_profile(profile))


@hardware_app.command("check")
def check_hardware(file: Annotated[str, typer.Argument(help="A YAML file.")], json_: Json = False) -> None:
    """Check a profile: names file, key, value and what would be accepted."""
    from hrm.profile_files import check_profile

    problems = check_profile(file)
    if json_:
        print_json({"file": file, "problems": problems})
    else:
        for problem in problems:
            say(f"hrm: {problem}")
        if not problems:
            write(f"{file}: fine\n")
    if problems:
        raise typer.Exit(2)


@models_app.callback(invoke_without_command=True)
def list_models(context: typer.Context, json_: Json = False) -> None:
    """List the bundled models."""
    if context.invoked_subcommand is None:
        from hrm.listings import model_rows, print_rows

        rows = model_rows()
        print_json({"models": rows}) if json_ else print_screen(lambda console: print_rows(rows, console))


@models_app.command("show")
def show_model(
    name: Annotated[str, typer.Argument(autocompletion=complete_model)],
    weights_dtype: Annotated[str | None, typer.Option(help="Storage of the weights.")] = None,
    json_: Json = False,
) -> None:
    """Itemise the parameters and bytes of a model."""
    from hrm.dtypes import WEIGHT_DTYPES, parse_dtype
    from hrm.listings import model_document, print_model
    from hrm.model_files import load_model

    dtype = (
        None if weights_dtype is None else parse_dtype(weights_dtype, where="--weights-dtype", allowed=WEIGHT_DTYPES)
    )
    document = model_document(load_model(name), dtype)
    print_json(document) if json_ else print_screen(lambda console: print_model(document, console))


@validate_app.command("published")
def validate_published(
    data: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Rows to predict and judge; the published ones if not given.")
    ] = None,
    kernels: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Kernel latencies; the published ones if not given.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="HTML", help="Write one self-contained page.")] = None,
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
    device: Annotated[
        str | None, typer.Option(help="cuda, or cpu: the accelerator emulated; default: what there is.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="One that the plan can run under; default: the plan's own.")
    ] = None,
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

    with Progress(json_, "starting torch"), _runtime_for("hrm validate layer"):
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
    model_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the checkpoint: config.json and safetensors.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Run without a checkpoint: weights of the real shapes.")
    ] = False,
    layers: Annotated[int | None, typer.Option(metavar="K", help="Run only the first K layers.")] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Timed runs of every policy, in turns of random order; default: 5.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="reviewers-s1 or colab-t4: plans of its own, on a GPU.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, or cpu: the accelerator emulated; default: what fits the plan.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="One that the plan can run under; default: the plan's own.")
    ] = None,
    disk_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where what a plan has on disk lies; default: /tmp.")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where predictions and raw spans go; default: beside the plan, -validation."),
    ] = None,
    rebuild_from: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Measure nothing: the report again from its records.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure nothing: policies, predictions, how long it would take.")
    ] = False,
    report: Annotated[Path | None, typer.Option(metavar="HTML", help="Write one self-contained page.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the JSON document.")
    ] = None,
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
            with _runtime_for("hrm validate run"):
                from runtime.validation.command import open_bench
            return open_bench(*arguments, **named)

        found = run_validation(options, forecaster(), bench, tell or (lambda _: None))
    print_json(found.document) if json_ else print_screen(found.show)
    found.say_saved(say)
    found.check()


@app.command("fit")
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
    from hrm.validation.fit_command import fit_trace, print_trace_fit
    from simulator.validation_price import trace_simulator

    with Progress(json_, "reading the trace") as tell:
        document = fit_trace(trace, plan_file, judge, output, trace_simulator(), tell=tell or (lambda _: None))
    print_json(document) if json_ else print_screen(lambda console: print_trace_fit(document, console))
    if output is not None:
        say(f"saved to {output}")


def _version(value: bool) -> None:
    if value:
        from hrm import __version__

        write(f"hrm {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """See `hrm COMMAND --help`."""


def main() -> None:
    """Run the command; a person never meets a traceback."""
    if sys.stderr is None:  # started with 2>&-
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (kept open to the end)
    if sys.stdout is None:  # started with >&-: whatever is opened next would become standard output
        say("hrm: standard output: is closed (a terminal, a file or a pipe)")
        sys.exit(2)
    try:
        code = app(prog_name="hrm", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # how the parser passes Ctrl-C on
            say("hrm: interrupted")
    except HrmError as error:
        say(f"hrm: {error}")
        code = error.exit_code
    except (ReaderGone, BrokenPipeError):
        code = 0
    except (KeyboardInterrupt, typer.Abort):
        say("hrm: interrupted")
        code = INTERRUPTED
    except MemoryError:
        say("hrm: out of memory (fewer --requests, or pin --micro-batch or --batch)")
        code = 2
    except Exception as error:
        code = _report_unforeseen(error)
    forget_unwritten()
    sys.exit(code if isinstance(code, int) else 0)


def _report_unforeseen(error: Exception) -> int:
    """Usage errors of the parser as it words them; anything else in one line, with how to see more."""
    show = getattr(error, "show", None)
    if callable(show):
        show()
        return int(getattr(error, "exit_code", 2))
    if os.environ.get("HRM_TRACEBACK"):
        raise error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EDQUOT):
        say(f"hrm: standard output: cannot be written: {error.strerror}")
        return 2
    say(f"hrm: this should not have happened: {type(error).__name__}: {error} (please report it, with HRM_TRACEBACK=1)")
    return 1
