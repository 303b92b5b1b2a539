"""What does the transform cost when it changes nothing?

    python -m benchmarks.overhead --size small
    python -m benchmarks.overhead --size sd3 --blocks 1 --steps 4 --rounds 5      # one block as wide as SD3-medium's

Updates of a replay by plain torch.compile ("exact", see `step_time`), and by jagg_fx where every step stays exact:

    W=2                    every step is a knot: the same graph, through all passes
    jagg_frac=0            W=4, and the guard finds that every segment is exact: their steps run again in its branch
    cos_threshold=1        the same by the threshold
    exact, again           exact compiled a second time: how much two runs of one thing differ

The branch runs the forward of intermediate steps again, because nothing of them was saved, so the guard's rows cost at least
those forwards: "forwards run again" counts them, and "without them" is what is left when that many exact forwards are taken off.
"""

import functools
import statistics
from dataclasses import asdict

from benchmarks import harness
from benchmarks.harness import Spread, Times
from benchmarks.sizes import Problem, add_blocks_argument, add_size_arguments, make_problem, named_size
from benchmarks.step_time import BASE, PARTS, Variant, exact, measure, transformed
from jagg_fx.plan import Rule, paper

ROUTED = ("jagg_frac=0", "cos_threshold=1")  # their branches run intermediate steps' forwards again


def make_variants(problem: Problem, quick: bool) -> dict[str, Variant]:
    ours = functools.partial(transformed, problem, quick)
    return {
        BASE: exact(problem, quick),
        "exact, again": exact(problem, quick),
        "W=2": ours(W=2),
        "jagg_frac=0": ours(W=4, jagg_frac=0.0),
        "cos_threshold=1": ours(W=4, cos_threshold=1.0),
    }


def cost(own: Times, base: Times, part: str) -> Spread:
    """Of a part, in the base's, within each round: 0 is none."""
    return Spread.of([mine / theirs - 1 for mine, theirs in zip(own.rounds[part], base.rounds[part], strict=True)])


def without_forwards(own: Times, base: Times, share: float) -> float:
    """The cost of an update with a share of the exact forwards taken off, median of the rounds."""
    rounds = zip(own.rounds["update"], base.rounds["forward"], base.rounds["update"], strict=True)
    return statistics.median((mine - share * forward) / theirs - 1 for mine, forward, theirs in rounds)


def main() -> None:
    options = harness.parser(__doc__)
    add_size_arguments(options, "small")
    add_blocks_argument(options)
    options.add_argument(
        "--rounds", type=harness.positive, default=30, help="measured updates of each variant (default 30)"
    )
    args = options.parse_args()
    problem = make_problem(args.size, args.device, args.steps, args.batch, args.quick, args.blocks)
    variants = make_variants(problem, args.quick)
    times = measure(problem, variants, 3 if args.quick else args.rounds)
    middle = len(paper(4).place(args.steps, Rule()).intermediate)
    rows, results = [], {}
    for name, own in times.items():
        again = middle if name in ROUTED else 0
        left = without_forwards(own, times[BASE], again / args.steps)
        costs = {part: cost(own, times[BASE], part) for part in PARTS}
        cells = [f"{c.median:+.1%} ({c.low:+.1%} to {c.high:+.1%})" for c in costs.values()]
        passes = variants[name].passes()
        rows.append([name, f"{passes:g}", f"{own.spread('update').median:.3f}", *cells, str(again), f"{left:+.1%}"])
        results[name] = {
            "passes": passes,
            "forwards_again": again,
            "cost": {part: asdict(value) for part, value in costs.items()},
            "cost_without_forwards": left,
            "seconds": own.rounds,
        }
    headers = ["", "passes", "update, s", *PARTS, "forwards run again", "without them"]
    batch = len(problem.advantages)
    note = (
        f"Cost over exact within a round, medians of {len(times[BASE].rounds['update'])} and quartiles; size {named_size(args)}, "
        f"batch {batch}, {args.steps} steps; {harness.caption(args.device)}"
    )
    settings = {"size": args.size, "batch": batch, "steps": args.steps, "blocks": args.blocks}
    harness.publish(
        f"overhead_{args.size}", args, {"settings": settings, "variants": results}, harness.table(rows, headers), note
    )


if __name__ == "__main__":
    main()
