"""The `hrm` command. Thin: parse, load, call one function, print.

Exit codes: 0 done, 2 wrong input, 3 no plan fits, 4 a bar was missed, 130 interrupted. Results go to standard output
(`--json`: exactly one document), progress and errors to standard error.
"""

from __future__ import annotations

import errno
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hrm.errors import HrmError, InputError
from hrm.terminal import Progress, ReaderGone, forget_unwritten, print_json, print_screen, say, write

if TYPE_CHECKING:
    from rich.console import Console

    from hrm.pins import Pins
    from hrm.policy import WeightSlots
    from hrm.scenario import Scenario
    from hrm.workload import Workload

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


class Place(StrEnum):
    """Where something is computed or kept."""

    cpu = "cpu"
    gpu = "gpu"


class Costs(StrEnum):
    """Cost models."""

    full = "full"
    paper = "paper"


class Slots(StrEnum):
    """Weight slots."""

    one = "1"
    two = "2"
    experts = "experts"


class Residence(StrEnum):
    """Resident on the GPU, or streamed with the layers."""

    resident = "resident"
    streamed = "streamed"


class RooflineOperator(StrEnum):
    """Operators of `hrm roofline`."""

    attention = "attention"
    ffn = "ffn"


def _complete_hardware(incomplete: str) -> list[str]:
    from hrm.profile_files import profile_names

    return [name for name in profile_names() if name.startswith(incomplete)]


def _complete_model(incomplete: str) -> list[str]:
    from hrm.model_files import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


Hardware = Annotated[
    str,
    typer.Option(
        "--hw",
        help="Hardware profile: a YAML file, or a bundled name (hrm hardware).",
        autocompletion=_complete_hardware,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", help="A config.json, a model folder, or a bundled name (hrm models).", autocompletion=_complete_model
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the screen.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a number of the profile, e.g. cpu.memory='416 GB'."),
]


@app.command()
def plan(
    hw: Hardware,
    model: Model,
    workload: Annotated[
        str | None, typer.Option(help="mtbench (default), synthetic-reasoning or summarization.")
    ] = None,
    prompt_len: Annotated[int | None, typer.Option(help="Every prompt has this many tokens.")] = None,
    gen_len: Annotated[int | None, typer.Option(help="Tokens generated per request.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="CSV or JSONL file of prompt lengths.")] = None,
    padded: Annotated[bool, typer.Option(help="Pad every prompt to the longest.")] = False,
    requests: Annotated[int, typer.Option(help="Requests in all; batches are equal.")] = 10_000,
    max_hours: Annotated[float, typer.Option(help="Bound on the time of one batch [h].")] = 24.0,
    cost_model: Annotated[Costs, typer.Option(help="full, or the paper's own terms (Eqs. 12-14).")] = Costs.full,
    weights_dtype: Annotated[
        str | None, typer.Option(help="fp16, bf16, fp8, int8, int4, mxfp4; default: checkpoint's.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="fp16, bf16, fp8, int8, int4, mxfp4.")] = None,
    compute_dtype: Annotated[str | None, typer.Option(help="Arithmetic: fp16, bf16, fp32, fp8, int8.")] = None,
    batch: Annotated[int | None, typer.Option(help="Pin N, the requests in flight.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Pin mu.")] = None,
    num_micro_batches: Annotated[int | None, typer.Option(help="Pin n_ub.")] = None,
    prefill_micro_batch: Annotated[int | None, typer.Option(help="Pin the micro-batch of prefill.")] = None,
    attention: Annotated[Place | None, typer.Option(help="Pin A_g.")] = None,
    ffn: Annotated[Place | None, typer.Option(help="Pin F_g.")] = None,
    weights_on_gpu: Annotated[float | None, typer.Option(help="Pin r_w, a share of the expert weights.")] = None,
    weights_on_disk: Annotated[float | None, typer.Option(help="Pin the share of the expert weights on disk.")] = None,
    kv_on_gpu: Annotated[float | None, typer.Option(help="Pin r_c, a share of the KV cache.")] = None,
    kv_on_disk: Annotated[float | None, typer.Option(help="Pin the share of the KV cache on disk.")] = None,
    weight_slots: Annotated[Slots | None, typer.Option(help="Pin the GPU buffers for streamed weights.")] = None,
    dense_weights: Annotated[Residence | None, typer.Option(help="Pin the non-expert weights.")] = None,
    embedding: Annotated[Place | None, typer.Option(help="Pin the place of the embedding.")] = None,
    lm_head: Annotated[Residence | None, typer.Option(help="Pin the lm_head.")] = None,
    pin_weights: Annotated[
        bool | None,
        typer.Option("--pin-weights/--no-pin-weights", help="Page-lock CPU weights once, or stage each copy."),
    ] = None,
    explain: Annotated[bool, typer.Option(help="Solve the alternatives too.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Save the plan with its inputs.")] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Find the best offloading plan of a model on a machine."""
    from hrm.model_files import find_config
    from hrm.planning import make_plan
    from hrm.plans import save_plan
    from hrm.profile_files import profile_document

    if not 0 < max_hours <= 1e6:
        raise InputError(
            f"{max_hours} is no bound", where="--max-hours", way_out="hours, above 0 and at most a million"
        )
    if output is not None and not output.absolute().parent.is_dir():
        raise InputError("its folder does not exist", where=f"--output: {output}")
    pins = _read_pins(locals())
    config = find_config(model)
    work, notes = _load_workload(workload, prompt_len, gen_len, prompts, padded, requests)
    scenario = _load_scenario(hw, set_, config, work, weights_dtype, kv_dtype, compute_dtype)
    with Progress(json_) as tell:
        found = make_plan(
            scenario,
            hardware={"name": scenario.profile.name, "document": profile_document(scenario.profile)},
            model={"name": scenario.model.name, "config": config["values"]},
            pins=pins,
            cost_model=cost_model.value,
            max_hours=max_hours,
            explain=explain,
            notes=notes,
            on_progress=tell,
        )
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


_SLOTS: dict[Slots, WeightSlots] = {Slots.one: 1, Slots.two: 2, Slots.experts: "experts"}


def _read_pins(given: dict[str, Any]) -> Pins:
    from hrm.pins import Pins

    def on_gpu(value: Place | Residence | None) -> bool | None:
        return None if value is None else value in (Place.gpu, Residence.resident)

    slots = given["weight_slots"]
    return Pins(
        batch_size=given["batch"],
        micro_batch_size=given["micro_batch"],
        num_micro_batches=given["num_micro_batches"],
        prefill_micro_batch_size=given["prefill_micro_batch"],
        attention_on_gpu=on_gpu(given["attention"]),
        ffn_on_gpu=on_gpu(given["ffn"]),
        weights_on_gpu=given["weights_on_gpu"],
        weights_on_disk=given["weights_on_disk"],
        kv_on_gpu=given["kv_on_gpu"],
        kv_on_disk=given["kv_on_disk"],
        weight_slots=_SLOTS[slots] if slots is not None else None,
        dense_weights_on_gpu=on_gpu(given["dense_weights"]),
        embedding_on_gpu=on_gpu(given["embedding"]),
        lm_head_on_gpu=on_gpu(given["lm_head"]),
        pin_weights=given["pin_weights"],
    )


def _load_workload(
    name: str | None, prompt_len: int | None, gen_len: int | None, prompts: Path | None, padded: bool, requests: int
) -> tuple[Workload, tuple[str, ...]]:
    """The workload that the options describe, and what was assumed."""
    from dataclasses import replace

    from hrm.workload import load_workload, prompts_workload, uniform_workload

    sources = [("--workload", name), ("--prompt-len", prompt_len), ("--prompts", prompts)]
    given = [option for option, value in sources if value is not None]
    if len(given) > 1:
        raise InputError(
            f"{' and '.join(given)} describe the prompts twice", where="workload", way_out="give one of them"
        )
    if prompt_len is not None or prompts is not None:
        notes = () if gen_len is not None else ("generation length not given: 128 tokens.",)
        generated = 128 if gen_len is None else gen_len
        if prompt_len is not None:
            made = uniform_workload(prompt_len, generated, num_requests=requests)
            return replace(made, padded=padded), notes
        assert prompts is not None  # one of the two is given
        return prompts_workload(prompts, generation_length=generated, num_requests=requests, padded=padded), notes
    made = load_workload(name or "mtbench", generation_length=gen_len, num_requests=requests, padded=padded)
    said = f"no workload given: {made.name}, generation length {made.generation_length}."
    return made, ((said,) if name is None else ()) + ((made.note,) if made.note and name is not None else ())


def _load_scenario(
    hw: str,
    overrides: list[str] | None,
    config: dict[str, Any],
    workload: Workload,
    weights_dtype: str | None,
    kv_dtype: str | None,
    compute_dtype: str | None,
) -> Scenario:
    from hrm.dtypes import KV_DTYPES, WEIGHT_DTYPES, parse_dtype
    from hrm.families import read_spec
    from hrm.scenario import COMPUTE_DTYPES, Scenario, choose_formats

    profile = _load_hardware(hw, overrides)
    spec = read_spec(**config)

    def parsed(text: str | None, option: str, allowed: Any) -> str | None:
        return None if text is None else parse_dtype(text, where=option, allowed=allowed)

    formats = choose_formats(
        profile,
        spec,
        weights=parsed(weights_dtype, "--weights-dtype", WEIGHT_DTYPES),
        kv=parsed(kv_dtype, "--kv-dtype", KV_DTYPES),
        compute=parsed(compute_dtype, "--compute-dtype", COMPUTE_DTYPES),
    )
    return Scenario(profile=profile, model=spec, workload=workload, formats=formats)


def _load_hardware(hw: str, overrides: list[str] | None) -> Any:
    from hrm.profile_files import load_profile, with_overrides

    profile = load_profile(hw)
    if not overrides:
        return profile
    changes: dict[str, object] = {}
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip() or not value.strip():
            raise InputError(f"{text!r} is no KEY=VALUE", where="--set", way_out="e.g. --set cpu.memory='416 GB'")
        changes[key.strip()] = value.strip().strip("'\"")
    return with_overrides(profile, changes)


@app.command("simulate")
def simulate_plan(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan saved by hrm plan -o.")],
    schedule: Annotated[
        str | None, typer.Option(help="cgopipe, s2, s3, s4, streaming or serial; default: the plan's own.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Replay every task of every step.")] = False,
    contention: Annotated[
        bool, typer.Option("--contention/--no-contention", help="Let lanes share memory, link and cores.")
    ] = True,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Perfetto trace of a decode step and its neighbours.")
    ] = None,
    json_: Json = False,
) -> None:
    """Replay a plan event by event and set it beside its prediction."""
    from hrm.plans import read_plan_document
    from hrm.rates import derive_rates
    from hrm.scenario import measure_sizes
    from hrm.trivial import predict_policy
    from simulator.replay import replay_plan, step_trace
    from simulator.summary import replay_document, replay_tables, save_trace

    scenario, policy, _ = read_plan_document(plan_file)
    name = schedule or policy.schedule
    rates = derive_rates(scenario.profile, scenario.formats)
    prediction = predict_policy(scenario, measure_sizes(scenario), rates, policy)
    with Progress(json_) as tell:
        if tell is not None:
            tell(f"replaying {name}")
        replay = replay_plan(scenario, policy, name, contention=contention, full=full)
    document = replay_document(replay, prediction, name, contention=contention)
    if trace is not None:
        middle = max(0, (scenario.workload.generation_length - 1) // 2)
        save_trace(*step_trace(scenario, policy, name, step=middle, contention=contention), trace)
    if json_:
        print_json(document)
        return

    def show(console: Console) -> None:
        shared = "with contention" if contention else "without contention"
        console.print(
            f"{scenario.model.name} on {scenario.profile.name}, schedule {name}, {shared}: {document['tasks']:,} tasks "
            f"replayed in {document['simulate_seconds']:.2f} s"
        )
        for table in replay_tables(document):
            console.print(table)
        bubble = document["bubble_s"]
        console.print(
            f"bound by the busiest lane: {document['bound_layer_latency_s']:.4g} s per layer; left idle: "
            f"{max(0.0, bubble):.4g} s ({max(0.0, bubble) / document['layer_latency_s']:.1%})"
            if document["layer_latency_s"]
            else "one generated token: no decode step"
        )

    print_screen(show)
    if trace is not None:
        say(f"saved to {trace}; open it in Perfetto")


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
        _load_hardware(hw, set_),
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
def show_hardware(name: Annotated[str, typer.Argument(autocompletion=_complete_hardware)], json_: Json = False) -> None:
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
    name: Annotated[str, typer.Argument(autocompletion=_complete_model)],
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
