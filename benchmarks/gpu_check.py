"""Does it all hold on a GPU: gradients through Triton, then speed, memory and compile time at the sizes of real models?

    python -m benchmarks.gpu_check                            # at most 8 minutes on one GPU of 80 GB or more
    python -m benchmarks.gpu_check --quick --device cpu       # the same checks, tiny

Correctness first: gradients and values of rewritten functions against the eager reference, on both sides of the guard's
threshold, in bfloat16, with LoRA, with two streams of calls. Then each size in a fresh process with an empty cache: first two
updates, forward, backward, update and peak memory of exact and of jagg_fx. (Only exact's first updates are those of a cold cache:
the others find some of its kernels; `compile_time` measures that.) What no longer fits into the time is left out, and the table
says so; `--blocks` makes the models shallower. Exit code 1 if anything failed, 2 if a gradient was not checked.
"""

import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import jagg_fx
from benchmarks import harness
from benchmarks.sizes import SAMPLER, SIZES, Conditions, LogProbs, Problem, add_blocks_argument, make_problem
from benchmarks.step_time import BASE, PARTS, Variant, make_variants, update
from jagg_fx.demo import measure as meter
from jagg_fx.models.digits_dit import NULL_CLASS
from jagg_fx.models.samplers import replay

K, STEPS = 4, 9
SHARE, MEMORY = 0.9, 0.75  # goals: of the ideal speed-up of the backward, and of the exact run's memory
VARIANTS = (BASE, f"knots={K}, no guard", f"knots={K}, velocities", "W=4", "before the paper, W=4")


@dataclass(frozen=True)
class Check:
    """One rewrite that must agree with the reference.

    Attributes:
        make: the problem, on a device.
        options: of `transform`.
        tolerance: largest relative error of the gradient and of the values.
        exact: whether the gradient must be that of the function itself.
        function: another replay than the problem's own.
    """

    name: str
    make: Callable[[str], Problem]
    options: dict[str, Any]
    tolerance: float = 1e-4
    exact: bool = False
    function: Callable[[Problem], LogProbs] = lambda problem: problem.replay(problem.model)


def _dit(device: str) -> Problem:
    return make_problem("digits", device, STEPS, quick=True)


def _half(device: str) -> Problem:
    problem = _dit(device)
    return replace(problem, model=problem.model.bfloat16(), velocities=problem.velocities.bfloat16())


def _lora(device: str) -> Problem:
    from peft import LoraConfig

    problem = make_problem("sd3", device, STEPS, quick=True)
    problem.model.requires_grad_(False)
    layers = ["to_q", "to_k", "to_v", "to_out.0"]
    problem.model.add_adapter(LoraConfig(r=4, target_modules=layers, init_lora_weights=False))  # type: ignore[operator]
    conditions = {name: value.float() for name, value in problem.conditions.items()}
    return replace(problem, model=problem.model.float(), velocities=problem.velocities.float(), conditions=conditions)


def _guided(problem: Problem) -> LogProbs:
    """Guidance by two calls per step, which are two streams."""

    def log_probs(latents: Tensor, sigmas: Tensor, conditions: Conditions) -> Tensor:
        null = {"labels": torch.full_like(conditions["labels"], NULL_CLASS)}

        def denoiser(x: Tensor, t: Tensor) -> Tensor:
            without = problem.call(problem.model, x, t, null)
            return without + 2 * (problem.call(problem.model, x, t, conditions) - without)

        return replay(denoiser, SAMPLER, latents, sigmas).log_probs

    return log_probs


CHECKS = (
    Check("W=4", _dit, {"W": 4, "cos_threshold": None}),
    Check("W=2 is exact", _dit, {"W": 2}, exact=True),
    Check("knots=(0, 5, 7, 8)", _dit, {"knots": (0, 5, 7, 8), "cos_threshold": None}),
    Check("guard, every segment interpolated", _dit, {"W": 4, "cos_threshold": -1.0}),
    Check("guard, every segment exact", _dit, {"W": 4, "cos_threshold": 1.0}, exact=True),
    Check("bfloat16", _half, {"W": 4, "cos_threshold": None}, tolerance=3e-2),
    Check("LoRA on SD3", _lora, {"W": 4, "cos_threshold": None}),
    Check("two streams", _dit, {"W": 4, "cos_threshold": None}, function=_guided),
)


def errors(check: Check, device: str, lowering: str) -> tuple[float, float]:
    """Relative errors of the gradient and of the log-probs."""
    torch.manual_seed(0)
    problem = check.make(device)
    function = check.function(problem)
    transform = functools.partial(jagg_fx.transform, function, denoiser=problem.model, **check.options)
    want_of = function if check.exact else transform(lowering="reference")

    def run(log_probs: LogProbs) -> tuple[Tensor, Tensor]:
        problem.model.zero_grad(set_to_none=True)
        values = log_probs(problem.latents, problem.sigmas, problem.conditions)
        (values * problem.advantages[:, None]).mean().backward()
        trained = [parameter for parameter in problem.model.parameters() if parameter.requires_grad]
        return meter.flat_gradient(trained), values.detach().double().cpu()

    want, values = run(want_of)
    got, own = run(transform(lowering=lowering))
    return meter.relative_error(got, want), meter.relative_error(own, values)


def correctness(device: str, quick: bool, deadline: float) -> Iterator[list[str]]:
    """A row for each check."""
    # In TF32 the convolutions of two compilers would differ by more than is asked for.
    torch.backends.cudnn.allow_tf32 = False
    for check in tqdm(CHECKS, unit="check", file=sys.stderr):
        wanted = f"errors below {check.tolerance:.0e}"
        if time.monotonic() > deadline:
            yield ["gradient", check.name, "no time left", wanted, "left out"]
            continue
        torch.compiler.reset()
        try:
            gradient, value = errors(check, device, "eager" if quick else "inductor")
        except Exception as error:
            yield ["gradient", check.name, harness.cause(error), wanted, "FAILED"]
            continue
        verdict = "ok" if max(gradient, value) < check.tolerance else "FAILED"  # NaN fails
        yield ["gradient", check.name, f"gradient {gradient:.1e}, values {value:.1e}", wanted, verdict]


def measure(
    size: str, device: str, quick: bool, seconds: float, rounds: int, blocks: int | None = None
) -> dict[str, Any]:
    """Numbers by variant, in a process of its own; a variant that would not fit into so many seconds is left out."""
    began = time.monotonic()
    problem = make_problem(size, device, STEPS, quick=quick, blocks=blocks)
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=0.0)
    made = make_variants(problem, K, quick)
    variants: dict[str, Variant] = {}
    found: dict[str, Any] = {}
    longest = 0.0
    for name in timed(quick):
        if time.monotonic() - began + 1.5 * longest > seconds:
            break
        first = time.monotonic()
        try:
            variant = made[name]()
            for _ in range(2):  # the first of two compiles; a velocity's second may still
                update(variant, problem, optimizer, meter.Clock())
        except Exception as error:  # out of memory, most likely: the others may still fit
            found[name] = {"error": harness.cause(error)}
            optimizer.zero_grad(set_to_none=True)
            continue
        longest = max(longest, time.monotonic() - first)
        variants[name], found[name] = variant, {"first_updates": time.monotonic() - first}
    runs = {name: functools.partial(update, variant, problem, optimizer) for name, variant in variants.items()}
    times = harness.alternate(runs, rounds, warm_up=1)
    for name, own in times.items():
        peak = meter.peak_memory(lambda name=name: variants[name].train(meter.Clock()), device)  # type: ignore[misc]
        optimizer.zero_grad(set_to_none=True)
        passes = variants[name].passes()
        found[name] |= {part: own.spread(part).median for part in PARTS} | {
            "passes": passes,
            "ideal": STEPS / passes,
            "peak_mib": peak,
        }
        if BASE in times and name != BASE:
            found[name] |= {
                "speedup": own.speedup(times[BASE], "backward").median,
                "update_speedup": own.speedup(times[BASE], "update").median,
            }
    return found


def timed(quick: bool) -> tuple[str, ...]:
    """The variants, the most telling first."""
    return VARIANTS[:3] if quick else VARIANTS


def rows(size: str, found: dict[str, Any], quick: bool) -> list[list[str]]:
    result = []
    for name in timed(quick):
        if name not in found:
            result.append([size, name, "no time left", "", "left out"])
            continue
        own = found[name]
        if "error" in own:
            result.append([size, name, own["error"], "", "FAILED"])
            continue
        seconds = ", ".join(f"{part} {own[part]:.3f}" for part in PARTS)
        text = f"first two updates {own['first_updates']:.0f} s; {seconds} s; peak {own['peak_mib']:.0f} MiB"
        if "speedup" not in own:
            result.append([size, name, text, "", ""])
            continue
        memory, share = own["peak_mib"] / found[BASE]["peak_mib"], own["speedup"] / own["ideal"]
        text += f"; backward {own['speedup']:.2f}x, update {own['update_speedup']:.2f}x, memory {memory:.2f}"
        goal = f"backward {SHARE * own['ideal']:.2f}x, memory {MEMORY}"
        ours = name.startswith("knots")
        verdict = ("ok" if share >= SHARE and memory <= MEMORY else "missed") if ours else ""
        result.append([size, name, text, goal if ours else "", verdict])
    return result


def main(arguments: list[str] | None = None) -> int:
    options = harness.parser(__doc__)
    options.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=["sd3", "flux"], help="sizes to time (default sd3 flux)"
    )
    add_blocks_argument(options)
    options.add_argument("--minutes", type=float, default=8.0, help="for everything (default 8)")
    options.add_argument(
        "--rounds", type=harness.positive, default=5, help="measured updates of each variant (default 5)"
    )
    args = options.parse_args(arguments)
    if args.device == "cpu" and not args.quick:
        options.error("no CUDA device: `--quick --device cpu` does the same with tiny models.")
    began = time.monotonic()
    end = began + 60 * args.minutes
    share = (end - began) / (1 + len(args.sizes))
    table = list(correctness(args.device, args.quick, began + share))
    numbers: dict[str, Any] = {}
    for n, size in enumerate(args.sizes):
        seconds = (end - time.monotonic()) / (len(args.sizes) - n)
        if seconds <= 0:
            table.append([size, "all", "no time left", "", "left out"])
            continue
        common = {"size": size, "device": args.device, "quick": args.quick, "blocks": args.blocks}
        with tempfile.TemporaryDirectory() as cache:
            try:
                numbers[size] = harness.in_fresh_process(
                    "benchmarks.gpu_check",
                    "measure",
                    {"TORCHINDUCTOR_CACHE_DIR": cache},
                    timeout=seconds,
                    **common,
                    rounds=2 if args.quick else args.rounds,
                    seconds=0.8 * seconds,  # the rest is for the rounds
                )
                table += rows(size, numbers[size], args.quick)
            except RuntimeError as error:
                table.append([size, "all", harness.cause(error), "", "FAILED"])
    shown = harness.table(table, ["", "case", "found", "wanted", ""])
    note = f"{STEPS} steps, {time.monotonic() - began:.0f} s in all; {harness.caption(args.device)}"
    harness.publish("gpu_check", args, {"rows": table, "sizes": numbers}, shown, note)
    if any(row[-1] == "FAILED" for row in table):
        return 1
    return 2 if any(row[0] == "gradient" and row[-1] == "left out" for row in table) else 0


if __name__ == "__main__":
    sys.exit(main())
