"""How much memory does an update take at its peak, against the number of steps and of knots?

    python -m benchmarks.peak_memory --size small

The forward and backward of a replay, each case in a fresh process: exact by torch.compile, the paper's W=4 and knots=K placed by
the schedule, both without a guard, with and without gradient checkpointing in the denoiser's blocks. "activations" is the peak
above what lies there between updates (weights, gradients, stored latents); the ratio of "with weights" adds weights and gradients
to both sides. A case that fails says why, and the others go on.
"""

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from benchmarks import harness
from benchmarks.sizes import Problem, add_size_arguments, checkpoint_blocks, make_problem
from benchmarks.step_time import Variant, exact, transformed
from jagg_fx.demo import measure as meter

PAPER = "W=4, no guard"


@dataclass(frozen=True)
class Case:
    """One measurement; `variant` is "exact", "W=4, no guard" or "knots=K"."""

    variant: str
    steps: int
    checkpointing: bool

    @property
    def knots(self) -> int | None:
        return int(self.variant.removeprefix("knots=")) if self.variant.startswith("knots=") else None


def measure(size: str, device: str, batch: int | None, quick: bool, **case: Any) -> dict[str, float]:
    """Peak of the activations, and weights and gradients, in MiB; in a process of its own."""
    one = Case(**case)
    problem = make_problem(size, device, one.steps, batch, quick)
    if one.checkpointing:
        checkpoint_blocks(problem.model)
    variant = _variant(problem, one, quick)
    for _ in range(2):
        variant.train(meter.Clock())
    tensors = [t for p in problem.model.parameters() for t in (p, p.grad) if t is not None]
    resting = sum(t.numel() * t.element_size() for t in tensors) / meter.MIB
    return {"peak": meter.peak_memory(lambda: variant.train(meter.Clock()), device), "resting": resting}


def _variant(problem: Problem, case: Case, quick: bool) -> Variant:
    if case.variant == "exact":
        return exact(problem, quick)
    chosen = {"W": 4} if case.knots is None else {"plan": problem.plan(case.knots)}
    return transformed(problem, quick, **chosen, cos_threshold=None)


def cases(steps: list[int], knots: list[int]) -> list[Case]:
    """All numbers of steps for exact, W=4 and the middle number of knots; all numbers of knots for the last number of steps."""
    against_steps = itertools.product(["exact", PAPER, f"knots={knots[len(knots) // 2]}"], steps)
    against_knots = [(f"knots={K}", steps[-1]) for K in knots]
    chosen = dict.fromkeys([*against_steps, *against_knots])
    return [Case(variant, N, checkpointing) for checkpointing in (False, True) for variant, N in chosen]


def main() -> None:
    options = harness.parser(__doc__)
    add_size_arguments(options, "small", steps=[5, 9])
    options.add_argument(
        "--knots", type=harness.positive, nargs="+", default=[2, 4, 6], help="numbers of knots (default 2 4 6)"
    )
    args = options.parse_args()
    if args.quick:
        args.steps, args.knots = [5], [3]
    common = {"size": args.size, "device": args.device, "batch": args.batch, "quick": args.quick}
    chosen = cases(args.steps, args.knots)
    for case in chosen:
        if case.knots and not 2 <= case.knots <= case.steps:
            options.error(f"{case.variant} of {case.steps} steps: there are 2 knots or more, and no more than steps.")
    found: dict[Case, dict[str, float]] = {}
    failed: dict[Case, str] = {}
    for case in (bar := tqdm(chosen, unit="process")):
        bar.set_postfix_str(str(tuple(asdict(case).values())))
        try:
            found[case] = harness.in_fresh_process("benchmarks.peak_memory", "measure", **common, **asdict(case))
        except RuntimeError as error:
            failed[case] = harness.cause(error)
    rows = []
    for case in chosen:
        row = [case.variant, str(case.steps), "yes" if case.checkpointing else "no"]
        if case in failed:
            rows.append([*row, f"failed: {failed[case]}"])
            continue
        own, base = found[case], found.get(Case("exact", case.steps, case.checkpointing))
        if base is None:
            rows.append([*row, f"{own['peak']:.0f}", "-", f"{own['resting']:.0f}", "-"])
            continue
        whole = (own["peak"] + own["resting"]) / (base["peak"] + base["resting"])
        rows.append(
            [*row, f"{own['peak']:.0f}", f"{own['peak'] / base['peak']:.2f}", f"{own['resting']:.0f}", f"{whole:.2f}"]
        )
    headers = [
        "",
        "steps",
        "checkpointing",
        "activations, MiB",
        "to exact",
        "weights and gradients, MiB",
        "with weights",
    ]
    note = f"Peak of a forward and backward, size {args.size}; {harness.caption(args.device)}"
    settings = {"size": args.size, "batch": args.batch}
    results = [asdict(case) | own for case, own in found.items()]
    results += [asdict(case) | {"error": why} for case, why in failed.items()]
    harness.publish(
        f"peak_memory_{args.size}", args, {"settings": settings, "cases": results}, harness.table(rows, headers), note
    )


if __name__ == "__main__":
    main()
