"""How much memory does an update take at its peak, against the number of steps and of knots?

    python -m benchmarks.peak_memory --size small

The forward and backward of a replay, each case in a fresh process: exact by torch.compile, the paper's W=4, and knots=K placed by
the schedule, with and without gradient checkpointing in the denoiser's blocks. "activations" is the peak above what lies there
between updates (weights, gradients, stored latents); the ratio of "with weights" adds weights and gradients to both sides.
"""

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from benchmarks import harness
from benchmarks.sizes import add_size_arguments, checkpoint_blocks, make_problem
from benchmarks.step_time import Variant, exact, transformed
from jagg_fx.demo import measure as meter


@dataclass(frozen=True)
class Case:
    """One measurement; `variant` is "exact", "W=4" or "knots=K"."""

    variant: str
    steps: int
    checkpointing: bool


def measure(size: str, device: str, batch: int | None, quick: bool, **case: Any) -> dict[str, float]:
    """Peak of the activations, and weights and gradients, in MiB; in a process of its own."""
    one = Case(**case)
    problem = make_problem(size, device, one.steps, batch, quick)
    if one.checkpointing:
        checkpoint_blocks(problem.model)
    variant = _variant(problem, one.variant, quick)
    for _ in range(2):
        variant.train(meter.Clock())
    tensors = [t for p in problem.model.parameters() for t in (p, p.grad) if t is not None]
    resting = sum(t.numel() * t.element_size() for t in tensors) / meter.MIB
    return {"peak": meter.peak_memory(lambda: variant.train(meter.Clock())), "resting": resting}


def _variant(problem: Any, name: str, quick: bool) -> Variant:
    if name == "exact":
        return exact(problem, quick)
    if name == "W=4":
        return transformed(problem, quick, W=4, cos_threshold=None)
    K = int(name.removeprefix("knots="))
    return transformed(problem, quick, plan=problem.plan(K), cos_threshold=None)


def cases(steps: list[int], knots: list[int]) -> list[Case]:
    """All numbers of steps for exact, W=4 and the middle number of knots; all numbers of knots for the last number of steps."""
    against_steps = itertools.product(["exact", "W=4", f"knots={knots[len(knots) // 2]}"], steps)
    against_knots = [(f"knots={K}", steps[-1]) for K in knots]
    chosen = dict.fromkeys([*against_steps, *against_knots])
    return [Case(variant, N, checkpointing) for checkpointing in (False, True) for variant, N in chosen]


def main() -> None:
    options = harness.parser(__doc__)
    add_size_arguments(options, "small", steps=[5, 9])
    options.add_argument("--knots", type=int, nargs="+", default=[2, 4, 6], help="numbers of knots (default 2 4 6)")
    args = options.parse_args()
    if args.quick:
        args.steps, args.knots = [5], [3]
    common = {"size": args.size, "device": args.device, "batch": args.batch, "quick": args.quick}
    found: dict[Case, dict[str, float]] = {}
    for case in (bar := tqdm(cases(args.steps, args.knots), unit="process")):
        bar.set_postfix_str(str(tuple(asdict(case).values())))
        found[case] = harness.in_fresh_process("benchmarks.peak_memory", "measure", **common, **asdict(case))
    rows = []
    for case, own in found.items():
        base = found[Case("exact", case.steps, case.checkpointing)]
        whole = (own["peak"] + own["resting"]) / (base["peak"] + base["resting"])
        shown = [case.variant, case.steps, "yes" if case.checkpointing else "no", f"{own['peak']:.0f}"]
        rows.append([*shown, f"{own['peak'] / base['peak']:.2f}", f"{own['resting']:.0f}", f"{whole:.2f}"])
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
    harness.publish(
        f"peak_memory_{args.size}", args, {"settings": settings, "cases": results}, harness.table(rows, headers), note
    )


if __name__ == "__main__":
    main()
