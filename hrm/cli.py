"""The `hrm` command. Thin: parse, load, call one function, print. Commands that run plans are in `hrm/cli_running.py`.

Exit codes: 0 done, 2 wrong input, 3 no plan fits, 4 a bar was missed, 130 interrupted. Results go to standard output
(`--json`: exactly one document), progress and errors to standard error.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hrm.cli_judging import fit_constants, validate_app
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
from hrm.cli_running import calibrate_machine, diff_traces, run_plan, simulate_plan
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


# Between the others, as `hrm --help` lists them.
app.command("simulate")(simulate_plan)
app.command("run")(run_plan)
app.command("calibrate")(calibrate_machine)
app.command("diff")(diff_traces)


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


app.command("fit")(fit_constants)


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
    if isinstance(error, OSError) and error.filename is not None:  # too long a name, a folder that is not open to all
        say(f"hrm: {error.filename}: cannot be used: {error.strerror}")
        return 2
    say(f"hrm: this should not have happened: {type(error).__name__}: {error} (please report it, with HRM_TRACEBACK=1)")
    return 1
