"""How long do the forward, the backward and the whole update take, against torch.compile with exact gradients?

    python -m benchmarks.step_time --size small
    python -m benchmarks.step_time --size sd3 --blocks 1 --steps 4 --knots 2 --rounds 5 --variants W=4 "W=4, no guard"

A GRPO loss is replayed over the stored latents of N steps, and the optimizer steps at a learning rate of 0, so that every round
does the same work on the same weights. Variants, an update of each in turn:

    exact                 torch.compile of the replay, the denoiser a nested region; what all others are compared with
    exact, eager          the same function uncompiled
    exact, by blocks      every block compiled by itself, as diffusers' compile_repeated_blocks does
    before the paper      the scheme published before it: W forwards without gradients per group, then two forwards and backwards
                          one after the other at its ends, index weights; the denoiser compiled. Its "backward" holds those
                          second forwards
    K random steps        gradients of K random steps only; the others are not run at all
    W=4, knots=K          jagg_fx, with the guard (cos_threshold=0.8) or without; knots are placed by the schedule
    ..., velocities       without a guard, with the rollout's velocities in place of intermediate forwards

"passes" counts backward passes as they ran: the guard may run steps exactly. "ideal" is N / passes, what the backward would gain
if it were made of passes alone, and "share of ideal" how much of that it reached.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import jagg_fx
from benchmarks import harness, rivals
from benchmarks.harness import Spread, Times
from benchmarks.sizes import LogProbs, Problem, add_blocks_argument, add_size_arguments, make_problem, named_size
from jagg_fx.demo.measure import Clock
from jagg_fx.models.grpo import grpo_loss
from jagg_fx.plan import Rule, paper

BASE = "exact"
PARTS = ("forward", "backward", "update")


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        train: forward and backward, measured.
        passes: backward passes of the last update.
    """

    train: Callable[[Clock], object]
    passes: Callable[[], float]


def _function(problem: Problem, function: LogProbs, passes: Callable[[], float], reuse: Any = None) -> Variant:
    def train(watch: Clock) -> None:
        with reuse() if reuse else contextlib.nullcontext():
            with watch.measure("forward"):
                loss = problem.loss(function)
            with watch.measure("backward"):
                loss.backward()

    return Variant(train, passes)


def backend_of(quick: bool) -> str:
    return "aot_eager" if quick else "inductor"


def exact(problem: Problem, quick: bool) -> Variant:
    """Plain torch.compile."""
    return _function(problem, rivals.compiled(problem, backend_of(quick)), lambda: problem.num_steps)


def transformed(problem: Problem, quick: bool, reuses: bool = False, **options: Any) -> Variant:
    """By jagg_fx with these options; `reuses`: with the rollout's velocities."""
    lowering = "eager" if quick else "inductor"
    fast = jagg_fx.transform(problem.replay(problem.model), denoiser=problem.model, lowering=lowering, **options)

    def passes() -> float:
        assert fast.plan is not None
        exact = 1 - fast.stats.last.jagg_frac if fast.stats else 0.0
        return len(fast.plan.knots) + exact * len(fast.plan.intermediate)

    return _function(problem, fast, passes, functools.partial(fast.reuse, problem.velocities) if reuses else None)


def _before_paper(problem: Problem, backend: str) -> Variant:
    scheme = rivals.BeforePaper(
        problem, 4, torch.compile(problem.model, fullgraph=True, dynamic=False, backend=backend)
    )

    def train(watch: Clock) -> None:
        with watch.measure("forward"):
            cotangents = scheme.cotangents(scheme.values())
        with watch.measure("backward"):
            scheme.backward(cotangents)

    return Variant(train, lambda: scheme.passes)


def _random_steps(problem: Problem, K: int, backend: str) -> Variant:
    log_probs, generator = rivals.steps_only(problem, backend), torch.Generator().manual_seed(0)

    def train(watch: Clock) -> None:
        chosen = torch.randperm(problem.num_steps, generator=generator)[:K].sort().values.to(problem.sigmas.device)
        with watch.measure("forward"):
            loss = grpo_loss(log_probs(chosen), problem.log_probs[:, chosen], problem.advantages)
        with watch.measure("backward"):
            loss.backward()

    return Variant(train, lambda: K)


def make_variants(problem: Problem, K: int, quick: bool) -> dict[str, Callable[[], Variant]]:
    """All variants by name; each is made when it is asked for."""
    backend, N, plan = backend_of(quick), problem.num_steps, problem.plan(K)
    ours = functools.partial(transformed, problem, quick)
    return {
        BASE: lambda: exact(problem, quick),
        "exact, eager": lambda: _function(problem, problem.replay(problem.model), lambda: N),
        "exact, by blocks": lambda: _function(problem, rivals.compiled_blocks(problem, backend), lambda: N),
        "before the paper, W=4": lambda: _before_paper(problem, backend),
        f"{K} random steps": lambda: _random_steps(problem, K, backend),
        "W=4": lambda: ours(W=4),
        "W=4, no guard": lambda: ours(W=4, cos_threshold=None),
        "W=4, velocities": lambda: ours(reuses=True, W=4, cos_threshold=None),
        f"knots={K}": lambda: ours(plan=plan, cos_threshold=0.8),
        f"knots={K}, no guard": lambda: ours(plan=plan, cos_threshold=None),
        f"knots={K}, velocities": lambda: ours(reuses=True, plan=plan, cos_threshold=None),
    }


def update(variant: Variant, problem: Problem, optimizer: torch.optim.Optimizer, watch: Clock) -> None:
    variant.train(watch)
    with watch.measure("optimizer"):
        torch.nn.utils.clip_grad_norm_(problem.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def measure(problem: Problem, variants: dict[str, Variant], rounds: int) -> dict[str, Times]:
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=0.0)
    runs = {name: functools.partial(update, variant, problem, optimizer) for name, variant in variants.items()}
    return harness.alternate(runs, rounds)


def rows(times: dict[str, Times], passes: dict[str, float], N: int) -> list[list[str]]:
    found = []
    for name, own in times.items():
        ideal, backward = N / passes[name], own.speedup(times[BASE], "backward")
        cells = [f"{own.spread(part).median:.3f} ({_times(own.speedup(times[BASE], part))})" for part in PARTS]
        found.append([name, f"{passes[name]:g}", *cells, f"{ideal:.2f}x", f"{backward.median / ideal:.0%}"])
    return found


def _times(ratio: Spread) -> str:
    return f"{ratio.median:.2f}x, {ratio.low:.2f}-{ratio.high:.2f}"


def results(times: dict[str, Times], passes: dict[str, float], N: int) -> dict[str, Any]:
    return {
        name: {
            "passes": passes[name],
            "ideal": N / passes[name],
            "first_run_seconds": own.first,
            "speedup": {part: asdict(own.speedup(times[BASE], part)) for part in PARTS},
            "seconds": own.rounds,
        }
        for name, own in times.items()
    }


def main() -> None:
    options = harness.parser(__doc__)
    add_size_arguments(options, "small")
    add_blocks_argument(options)
    options.add_argument("--knots", type=harness.positive, default=4, help="knots K of the budget (default 4)")
    options.add_argument(
        "--rounds", type=harness.positive, default=20, help="measured updates of each variant (default 20)"
    )
    options.add_argument("--variants", nargs="+", metavar="NAME", help="only these, besides exact")
    args = options.parse_args()
    if not 2 <= args.knots <= args.steps:
        options.error(f"--knots {args.knots} --steps {args.steps}: there are 2 knots or more, and no more than steps.")
    problem = make_problem(args.size, args.device, args.steps, args.batch, args.quick, args.blocks)
    made = make_variants(problem, args.knots, args.quick)
    if unknown := sorted(set(args.variants or ()) - set(made)):
        options.error(f"no variant {unknown[0]!r}: choose from {', '.join(map(repr, made))}")
    variants = {name: make() for name, make in made.items() if not args.variants or name in (BASE, *args.variants)}
    times = measure(problem, variants, 3 if args.quick else args.rounds)
    passes = {name: variant.passes() for name, variant in variants.items()}
    headers = ["", "passes", *(f"{part}, s" for part in PARTS), "ideal", "share of ideal"]
    batch, plan = len(problem.advantages), problem.plan(args.knots)
    note = (
        f"Medians of {len(times[BASE].rounds['update'])} rounds; in brackets times as fast as {BASE} within a round, median "
        f"and quartiles.\nsize {named_size(args)}, batch {batch}, {args.steps} steps, {problem.velocities.dtype}; "
        f"knots={args.knots}: {', '.join(map(str, plan.knots))}; {harness.caption(args.device)}"
    )
    measured = results(times, passes, args.steps)
    settings = {
        "size": args.size,
        "batch": batch,
        "steps": args.steps,
        "blocks": args.blocks,
        "paper": paper(4).place(args.steps, Rule()).knots,
    }
    numbers = {"settings": settings | {"knots": plan.knots}, "variants": measured}
    harness.publish(
        f"step_time_{args.size}", args, numbers, harness.table(rows(times, passes, args.steps), headers), note
    )


if __name__ == "__main__":
    main()
