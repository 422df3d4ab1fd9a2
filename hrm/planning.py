"""From a scenario to a plan: search, what the answer is worth, and what a person should know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hrm.diverse import Refinement
from hrm.errors import HrmError, InfeasibleError, InputError
from hrm.pins import Pins, option_name
from hrm.plans import Alternative, CostModel, Plan, PlanInputs, TurningPoints
from hrm.points import RING_EXPERTS_LEAST
from hrm.policy import Policy
from hrm.profile import Efficiency, HardwareProfile
from hrm.profile_files import with_overrides
from hrm.rates import derive_rates
from hrm.roofline import balance_point, stack_of, turning_point_1, turning_point_2
from hrm.roofline_operators import break_even_batch, ffn_intensity
from hrm.scenario import Scenario, measure_sizes
from hrm.search import SearchResult, SolverReport, find_policy
from hrm.sensitivity import marginal_values
from hrm.units import GB, GIB

__all__ = ["make_plan"]

HOPELESS_DAYS = 30.0
MAX_FREE_REQUESTS = 10_000_000
"""The points of the search grow with the requests; this many take a minute and gigabytes."""
POINTLESS_GAIN = 1.1
"""Offloading that wins less over a plan all in GPU memory is called pointless: predictions are not that good."""
LARGE_HOST = "416 GB"
ALTERNATIVE_GAP = 0.005
"""Relative gap of the alternatives: what they would give, not a plan to run."""
LIMIT_WORDS = {
    "gpu": "GPU memory",
    "cpu": "CPU memory",
    "disk": "disk space",
    "lock": "the limit of page-locked memory",
}


def make_plan(
    scenario: Scenario,
    *,
    hardware: dict[str, object],
    model: dict[str, object],
    pins: Pins | None = None,
    cost_model: CostModel = "full",
    max_hours: float = 24.0,
    explain: bool = False,
    notes: tuple[str, ...] = (),
    refine: Callable[[Pins, SearchResult], tuple[SearchResult, Refinement]] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Plan:
    """Find the best policy of a scenario and everything the screen says about it.

    Parameters
    ----------
    scenario : Scenario
    hardware, model : dict
        Name and self-contained document of each, saved with the plan.
    pins : Pins, optional
        Variables that are given.
    cost_model : {"full", "paper"}
    max_hours : float
        Bound on one batch [h]; not in the paper's model.
    explain : bool
        Solve the alternatives in any case.
    notes : tuple of str
        What was assumed on the way here.
    refine : callable, optional
        From the pins and what the search found to the plan to return in its place (`simulator.refine`).

    Raises
    ------
    InfeasibleError
        No plan fits.
    InputError
        The inputs contradict each other.
    """
    pins = pins or Pins()
    inputs = PlanInputs(hardware=hardware, model=model, cost_model=cost_model, max_hours=max_hours, pins=pins)
    if pins.weights_on_gpu:  # experts computed on the CPU keep no weights on the GPU (F_g = 0: r_w = 0)
        if pins.ffn_on_gpu is False:
            raise InputError(
                f"{pins.weights_on_gpu}, but experts computed on the CPU keep no weights on the GPU",
                where="--weights-on-gpu",
                way_out="0, or --ffn gpu",
            )
        pins = replace(pins, ffn_on_gpu=True)
    if cost_model == "paper":
        return _paper_plan(scenario, inputs, pins, notes)
    requests = scenario.workload.num_requests
    pins.check_counts(requests)
    if requests > MAX_FREE_REQUESTS and pins.batch_size is None:
        raise InputError(
            f"{requests:,} requests make more batch sizes than are searched",
            where="--requests",
            way_out=f"at most {MAX_FREE_REQUESTS:,}, which give the same throughput, or --batch",
        )
    try:
        result = find_policy(scenario, pins, max_hours=max_hours, on_progress=on_progress)
    except InfeasibleError as error:
        if pins.given:
            raise
        raise _with_alternatives(error, scenario, max_hours) from None
    refinement: Refinement | None = None
    if refine is not None:
        result, refinement = refine(pins, result)
    policy, prediction = result.policy, result.prediction
    ring = policy.weight_slots == "experts" and policy.ffn_on_gpu  # each expert then serves the whole batch at once
    experts_at_once = policy.batch_size if ring else policy.micro_batch_size
    sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, scenario.formats)
    marginal: dict[str, float] = {}
    if result.solved is not None:
        marginal = marginal_values(
            scenario, sizes, rates, pins, result.solved, prediction.throughput_tokens_per_s, max_hours * 3600.0
        )
    if on_progress is not None and (explain or policy.weights_on_disk or policy.kv_on_disk):
        on_progress("solving alternatives")
    return Plan(
        scenario=scenario,
        inputs=inputs,
        policy=policy,
        prediction=prediction,
        solver=result.solver,
        trivial=result.trivial,
        alternatives=_alternatives(scenario, result, pins, max_hours, explain=explain),
        marginal_values=marginal,
        turning_points=_turning_points(scenario, experts_at_once, cost_model),
        warnings=_warnings(scenario, result),
        notes=(
            *notes,
            *_calibration(scenario.profile),
            *_rounded_pins(inputs.pins, policy),
            *(_left_out(scenario, result, pins) if refinement is None or refinement.chosen == 0 else ()),
            *scenario.model.assumptions,
        ),
        refinement=refinement,
    )


def _calibration(profile: HardwareProfile) -> tuple[str, ...]:
    """Where the rates of the GPU come from, unless they are its peaks or a person's own."""
    shares = [profile.quantities.get(f"efficiency.gpu_flops_{phase}") for phase in ("prefill", "decode")]
    if any(share is None or share.source in ("user", "measured") for share in shares):
        return ()
    first = shares[0]
    assert first is not None
    return (
        f"GPU rates are {first.source}, not measured here: {first.text} of its peak ({first.note}); how well they "
        "predict: hrm validate published.",
    )


def _left_out(scenario: Scenario, result: SearchResult, pins: Pins) -> tuple[str, ...]:
    """What the gap does not cover."""
    if pins.weight_slots is not None or result.solved is None or result.policy.weight_slots == "experts":
        return ()
    if scenario.model.streamed_experts < RING_EXPERTS_LEAST or result.policy.weights_on_gpu >= 1.0:
        return ()
    return ("the gap is among plans with one or two slots of a layer; a ring of experts: --weight-slots experts.",)


def _rounded_pins(pins: Pins, policy: Policy) -> tuple[str, ...]:
    """Shares and micro-batches that come out otherwise than pinned."""
    notes = []
    for key in ("micro_batch_size", "prefill_micro_batch_size"):
        given, realised = getattr(pins, key), getattr(policy, key)
        if given is not None and given > realised:
            notes.append(f"{option_name(key)} {given:,} comes out as {realised:,}, all the requests of a batch.")
    for key, why in (
        ("weights_on_gpu", "rows of an expert"),
        ("weights_on_disk", "rows of an expert"),
        ("kv_on_gpu", "requests of a micro-batch"),
        ("kv_on_disk", "requests of a micro-batch"),
    ):
        given, realised = getattr(pins, key), getattr(policy, key)
        if given is not None and abs(given - realised) > 0.005:
            notes.append(f"{option_name(key)} {given:g} comes out as {realised:.4g}: only whole {why} move.")
    return tuple(notes)


def _paper_plan(scenario: Scenario, inputs: PlanInputs, pins: Pins, notes: tuple[str, ...]) -> Plan:
    from hrm.paper_search import find_paper_policy  # not on the way of most commands

    _check_paper_pins(pins)
    try:
        result = find_paper_policy(scenario, pins)
    except InfeasibleError as error:
        if error.missing_bytes > 0 or not pins.given:
            raise
        given = ", ".join(sorted(inputs.pins.given))
        raise InfeasibleError(f"no policy of the paper's model agrees with all pinned variables: {given}") from None
    return Plan(
        scenario=scenario,
        inputs=inputs,
        policy=result.policy,
        prediction=result.prediction,
        solver=SolverReport(
            name="HiGHS (PuLP), Dinkelbach",
            status="optimal",
            gap=result.gap,
            seconds=result.seconds,
            points_bounded=result.points_bounded,
            programs_solved=result.programs_solved,
        ),
        marginal_values={},
        turning_points=_turning_points(scenario, result.policy.micro_batch_size, "paper"),
        warnings=(
            "Eqs. 12-14 leave out prefill, embedding, lm_head, launches and contention; with its authors' constants "
            "the model is 2-6x too fast on their own logs.",
        ),
        notes=(*notes, "one batch, decode only: --requests and --max-hours play no part in this model."),
    )


def _check_paper_pins(pins: Pins) -> None:
    """Refuse what Eqs. 12-14 cannot express: N is mu * n_ub exactly, KV cache stays on the GPU only where A_g = 1."""
    for key, value in (("--micro-batch", pins.micro_batch_size), ("--num-micro-batches", pins.num_micro_batches)):
        if pins.batch_size is not None and value is not None and pins.batch_size % value:
            raise InputError(
                f"{pins.batch_size} is no multiple of {key} {value}",
                where="--batch",
                way_out=f"a multiple, as N = mu * n_ub in the paper, e.g. {-(-pins.batch_size // value) * value}",
            )
    if pins.attention_on_gpu is False and pins.kv_on_gpu:
        raise InputError(
            "with attention on the CPU the paper's model keeps no KV cache on the GPU",
            where="--kv-on-gpu",
            way_out="--attention gpu, or --cost-model full",
        )


def _turning_points(scenario: Scenario, tokens: int, cost_model: CostModel) -> TurningPoints | None:
    """P1, P2 and the balance point of experts that compute this many tokens at once, and the break-even batch."""
    model, formats = scenario.model, scenario.formats
    try:
        stack = stack_of(scenario.profile, formats.compute, operator="ffn", cost_model=cost_model)
        on_gpu = ffn_intensity(model, formats, float(tokens), cost_model)
        return TurningPoints(
            p1_flop_per_byte=turning_point_1(stack, 0, 1),
            p2_flop_per_byte=turning_point_2(stack, 0, 1, on_gpu),
            balance_flop_per_byte=balance_point(stack, 0, 1, on_gpu),
            break_even_tokens=break_even_batch(stack, model, formats, cost_model),
        )
    except HrmError:
        return None


def _alternatives(
    scenario: Scenario, result: SearchResult, pins: Pins, max_hours: float, *, explain: bool
) -> tuple[Alternative, ...]:
    """What something else would give: solved when disk is used, or when asked for."""
    policy = result.policy
    found: list[Alternative] = []
    if explain or policy.weights_on_disk > 0:
        if not _is_small(scenario):
            found.append(_try("int4 weights", "--weights-dtype int4", _with_int4(scenario), pins, max_hours))
        larger = _with_large_host(scenario)
        if larger is not None:
            found.append(_try(f"a {LARGE_HOST} host", f"--set cpu.memory='{LARGE_HOST}'", larger, pins, max_hours))
    if (explain or policy.kv_on_disk > 0 or policy.weights_on_disk > 0) and scenario.profile.disk is not None:
        same = replace(pins, attention_on_gpu=policy.attention_on_gpu, ffn_on_gpu=policy.ffn_on_gpu)
        without = replace(same if not explain else pins, kv_on_disk=0.0, weights_on_disk=0.0)
        options = "--weights-on-disk 0 --kv-on-disk 0"
        if pins.kv_on_disk is None and pins.weights_on_disk is None and not policy.everything_on_cpu:
            found.append(_try("without the disk", options, scenario, without, max_hours))
    if explain and _left_out(scenario, result, pins):
        ringed = replace(pins, weight_slots="experts")
        found.append(_try("a ring of experts", "--weight-slots experts", scenario, ringed, max_hours))
    if explain and not policy.everything_on_cpu:
        flips = {
            "attention on the " + ("CPU" if policy.attention_on_gpu else "GPU"): (
                f"--attention {'cpu' if policy.attention_on_gpu else 'gpu'}",
                replace(pins, attention_on_gpu=not policy.attention_on_gpu),
                pins.attention_on_gpu,
            ),
            "experts on the " + ("CPU" if policy.ffn_on_gpu else "GPU"): (
                f"--ffn {'cpu' if policy.ffn_on_gpu else 'gpu'}",
                replace(pins, ffn_on_gpu=not policy.ffn_on_gpu, weights_on_gpu=None),
                pins.ffn_on_gpu,
            ),
            "weights " + ("not " if policy.pin_weights else "") + "page-locked": (
                "--no-pin-weights" if policy.pin_weights else "--pin-weights",
                replace(pins, pin_weights=not policy.pin_weights),
                pins.pin_weights,
            ),
        }
        for name, (options, flipped, pinned) in flips.items():
            if pinned is None:
                found.append(_try(name, options, scenario, flipped, max_hours))
        now = result.prediction.throughput_tokens_per_s  # what is there now still fits the larger machine
        link = "link.host_to_device.pinned"
        for name, key, amount in (
            ("1 GiB more GPU memory", "gpu.usable_memory", GIB),
            ("1 GiB more CPU memory", "cpu.memory", GIB),
            ("1 GB/s more link", link, GB),
        ):
            grown = _grown(scenario, key, amount)
            if grown is not None:
                larger, options = grown
                found.append(_try(name, options, larger, pins, max_hours, least=now))
    return tuple(found)


def _try(
    name: str,
    options: str,
    scenario: Scenario,
    pins: Pins,
    max_hours: float,
    *,
    least: float = 0.0,
    explain: bool = True,
) -> Alternative:
    """What the search finds, to `ALTERNATIVE_GAP`; `least` is a rate [token/s] that is known to be reached."""
    try:
        result = find_policy(scenario, pins, max_hours=max_hours, gap=ALTERNATIVE_GAP, explain=explain)
    except InfeasibleError as error:
        where = LIMIT_WORDS.get(error.limit)
        short = (
            f"{error.missing_bytes / GIB:,.2f} GiB over {where}"
            if where and error.missing_bytes > 0
            else "does not fit"
        )
        return Alternative(name=name, throughput_tokens_per_s=None, note=short)
    except HrmError as error:
        return Alternative(name=name, throughput_tokens_per_s=None, note=str(error))
    rate = max(least, result.prediction.throughput_tokens_per_s)
    return Alternative(name=name, throughput_tokens_per_s=rate, note=options)


def _is_small(scenario: Scenario) -> bool:
    """Whether the expert weights already take 4 bits or so."""
    return scenario.formats.experts(scenario.model) in ("int4", "mxfp4")


def _with_int4(scenario: Scenario) -> Scenario:
    formats = scenario.formats
    compute = "fp16" if formats.compute in ("fp8", "int8") else formats.compute
    return replace(scenario, formats=replace(formats, weights="int4", compute=compute))


def _with_large_host(scenario: Scenario) -> Scenario | None:
    """The same machine with 416 GB of CPU memory, where it has less."""
    if scenario.profile.cpu.memory_bytes >= 416e9 * 0.95:
        return None
    return replace(scenario, profile=with_overrides(scenario.profile, {"cpu.memory": LARGE_HOST}))


def _grown(scenario: Scenario, key: str, amount: float) -> tuple[Scenario, str] | None:
    """The scenario with one number of its profile larger by that amount, and the options that say so."""
    profile = scenario.profile
    value = (
        amount
        + {
            "gpu.usable_memory": profile.gpu.usable_memory_bytes,
            "cpu.memory": profile.cpu.memory_bytes,
            "link.host_to_device.pinned": profile.link.host_to_device.pinned_bytes_per_s,
        }[key]
    )
    text = f"{value / GB:.3f} GB/s" if key.startswith("link") else f"{value / GIB:.3f} GiB"
    changes: dict[str, object] = {key: text}
    if key == "gpu.usable_memory" and value > profile.gpu.memory_bytes:
        changes["gpu.memory"] = text
    try:
        larger = replace(scenario, profile=with_overrides(profile, changes))
    except HrmError:
        return None
    return larger, " ".join(f"--set {name}='{size}'" for name, size in changes.items())


def _with_alternatives(error: InfeasibleError, scenario: Scenario, max_hours: float) -> InfeasibleError:
    """The same error, with what int4 weights or a larger host would give."""
    tries: list[Alternative] = []
    if not _is_small(scenario):
        quantised = _with_int4(scenario)
        tries.append(_try("int4 weights", "--weights-dtype int4", quantised, Pins(), max_hours, explain=False))
    larger = _with_large_host(scenario)
    if larger is not None:
        options = f"--set cpu.memory='{LARGE_HOST}'"
        tries.append(_try(f"a {LARGE_HOST} host", options, larger, Pins(), max_hours, explain=False))
    fits = [
        f"{each.name} would give {each.throughput_tokens_per_s:,.2f} token/s ({each.note})"
        for each in tries
        if each.throughput_tokens_per_s is not None
    ]
    if not fits:
        return error
    return InfeasibleError(f"{error}; {'; '.join(fits)}", limit=error.limit, missing_bytes=error.missing_bytes)


def _warnings(scenario: Scenario, result: SearchResult) -> tuple[str, ...]:
    """What a person should know before trusting the plan."""
    found: list[str] = []
    policy, prediction, model = result.policy, result.prediction, scenario.model
    everything = next((plan for plan in result.trivial if plan.name == "all in GPU memory"), None)
    if everything is not None and everything.prediction is not None:
        in_memory = everything.prediction.throughput_tokens_per_s
        gain = prediction.throughput_tokens_per_s / in_memory
        if policy.weights_on_gpu >= 1 and policy.kv_on_gpu >= 1:
            found.append("it all fits the GPU: offloading is pointless, any in-memory runtime will do as well.")
        elif gain < POINTLESS_GAIN:
            found.append(
                f"it all fits the GPU, at {in_memory:,.0f} token/s: offloading is pointless, its larger batches win "
                f"{gain:.2f}x."
            )
        else:
            found.append(
                f"it all fits the GPU, at {in_memory:,.0f} token/s; offloading part of it wins {gain:.2f}x, by larger "
                "batches."
            )
    if policy.everything_on_cpu:
        found.append("the CPU alone is faster than any use of this GPU here.")
    days = prediction.completion_s / 86400.0
    if days > HOPELESS_DAYS:
        found.append(
            f"hopeless as asked: all requests take {days:,.0f} days. Fewer --requests, --weights-dtype int4 or a "
            "machine with more memory would help."
        )
    if model.checkpoint_dtype == "bf16" and scenario.formats.compute == "fp16":
        found.append(f"{scenario.profile.gpu.name} has no bf16: a bf16 checkpoint is computed in fp16.")
    if scenario.profile.efficiency == Efficiency():
        found.append(
            "rates are peaks, not measured here: public planners of this kind are 2-6x too fast against measurements."
        )
    return tuple(found)
