"""How far is each approximate gradient from the exact one, per number of backward passes?

    python -m benchmarks.fidelity

The trajectories of `benchmarks/trajectories.py`, replayed in full and, as in the demo, without the last step. Two regimes: "own"
keeps the sampler's gains, which at noise .7 grow 17-fold over the first 19 of 20 steps and 24-fold over all 20; "equalised"
divides each step's loss by its gain. Noise 0 stands for its limit: the gains' ratios have one, and the states are then those of
the ODE.

Variants, all on the same trajectories:
    paper W           groups of W consecutive steps; for one number of passes the best W counts in tables
    even, budget      K knots; budget is placed as the library does it, by what a call with K even knots measures, but on
                      another batch, as in training, where one plan serves all later batches
    budget, same      placed on the very batch it is used on
    schedule          placed by times and gains alone
    degree 2          quadratic weights on the knots of budget, or on even knots
    index             the paper's groups with weights by position (differs from time only where the schedule is shifted)
    debias p          budget with the unbiased correction; its passes are expected ones
    subset            K random steps, scaled by N / K
    last, largest     only the last K steps, or those with the largest |J_i^T g_i|
The error of a random variant is the mean over 32 draws; "mean of 32" is the error of the mean of its draws.
"""

import argparse
import dataclasses
import itertools
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from benchmarks.trajectories import REGIMES, Case, Trajectory, coordinates, record
from jagg_fx import guard
from jagg_fx.budget import Measurements, Schedule
from jagg_fx.demo.task import DigitsTask
from jagg_fx.models.digits_dit import load_digits_dit
from jagg_fx.plan import Budget, Plan, Rule, Weights, budget, even, paper

DRAWS = 32


@dataclass(frozen=True)
class Tabulated(Measurements):
    """Measurements that compute each segment's errors once, for many numbers of knots."""

    table: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, trajectory: Trajectory, regime: str) -> "Tabulated":
        sizes = trajectory.cotangents.flatten(2).norm(dim=2) * trajectory.scales(regime)[:, None]
        measured = Measurements(trajectory.times, (trajectory.values,), sizes)
        pairs = itertools.combinations(range(len(sizes)), 2)
        table = {(a, b): torch.tensor(measured.errors(a, b)) for a, b in pairs}
        return cls(measured.times, measured.values, sizes, table)

    def scaled(self, jacobian_sizes: Tensor) -> "Tabulated":
        """With each step counted by its cotangent times its Jacobian `[N]`; its errors grow in proportion."""
        table = {(a, b): jacobian_sizes[a + 1 : b] * errors for (a, b), errors in self.table.items()}
        return dataclasses.replace(self, norms=self.norms * jacobian_sizes[:, None], table=table)

    def errors(self, a: int, b: int) -> list[float]:
        errors: list[float] = self.table[a, b].tolist()
        return errors


@dataclass(frozen=True)
class Gradient:
    """An approximate gradient: coefficients `[draws, N, N]` of the VJPs, by the number `K` of knots or of chosen steps.

    `passes` is the expected number of backward passes, `predicted` the plan's own prediction of the relative error.
    """

    variant: str
    K: int
    passes: float
    coefficients: Tensor
    predicted: float | None = None


def gradients(here: Trajectory, previous: Trajectory, regime: str) -> Iterator[Gradient]:
    """All variants over one trajectory; plans come from the previous one."""
    N, rule = len(here.times), Rule()
    shifted = float(here.times.diff().diff().abs().max()) > 1e-3  # else both kinds of weights are the same

    def of(variant: str, plan: Plan) -> Gradient:
        K = len(plan.knots)
        return Gradient(variant, K, K, coordinates(plan, here.times)[None], plan.predicted_error)

    for W in range(2, N + 1):
        yield of(f"paper W={W}", paper(W).place(N, rule))
        if shifted:
            yield of(f"index W={W}", paper(W).place(N, Rule(Weights.INDEX)))
    before, now = Tabulated.of(previous, regime), Tabulated.of(here, regime)
    known = Schedule.create(here.times, here.scales(regime))
    largest = here.shares(regime).argsort(descending=True)
    for K in range(2, N + 1):
        spread = even(K).place(N, rule)
        placed, placed_same = (
            Budget(K).place_measured(measured.scaled(trajectory.jacobian_sizes(regime, K)), rule)
            for trajectory, measured in ((previous, before), (here, now))
        )
        yield of("even", spread)
        yield of("budget", placed)
        yield of("budget, same", placed_same)
        yield of("schedule", budget(K, known).place(N, rule))
        yield of("degree 2", dataclasses.replace(placed, rule=Rule(degree=2), predicted_error=None))
        yield of("degree 2, even", dataclasses.replace(spread, rule=Rule(degree=2)))
        yield Gradient("last", K, K, only(range(N - K, N), N))
        yield Gradient("largest", K, K, only(largest[:K].tolist(), N))
        subsets = torch.stack([only(torch.randperm(N)[:K].tolist(), N)[0] for _ in range(DRAWS)])
        yield from averaged(Gradient("subset", K, K, N / K * subsets))
        for p in (1.0, 0.5):
            yield from averaged(debiased(placed, here.times, p))


def only(steps: Sequence[int], N: int) -> Tensor:
    """Coefficients of a sum over some steps, each with its own VJP."""
    diagonal = torch.zeros(N, dtype=torch.float64)
    diagonal[list(steps)] = 1
    return torch.diag(diagonal)[None]


def debiased(plan: Plan, times: Tensor, p: float) -> Gradient:
    """Independent draws of the unbiased option."""
    coefficients = coordinates(plan, times).repeat(DRAWS, 1, 1)
    for segment, correction in zip(plan.segments, guard.Correction.of_segments(plan, p), strict=True):
        fires, uniform = torch.rand(2, DRAWS)
        factors = correction.factors(fires < p, correction.choose(uniform)).double()
        for i, factor in zip(segment.intermediate, factors, strict=True):
            coefficients[:, :, i] *= 1 - factor[:, None]
            coefficients[:, i, i] += factor
    K = len(plan.knots)
    return Gradient(f"debias {p:g}", K, K + p * len(plan.segments), coefficients)


def averaged(drawn: Gradient) -> Iterator[Gradient]:
    """A random gradient, and the mean of its draws (which costs as many times the passes)."""
    yield drawn
    mean = drawn.coefficients.mean(0, keepdim=True)
    yield dataclasses.replace(drawn, variant=f"{drawn.variant}, mean of {DRAWS}", coefficients=mean)


@dataclass
class Point:
    """Results of one variant with `K` knots or chosen steps, one entry per seed."""

    case: Case
    regime: str
    variant: str
    K: int
    passes: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        return float(np.mean(self.errors))

    def __str__(self) -> str:
        cost = "" if set(self.passes) == {self.K} else f" ({np.mean(self.passes):.1f})"
        return f"{self.error:.3f} ± {np.std(self.errors):.3f}{cost}"


class Results:
    """All points of a run."""

    def __init__(self) -> None:
        self.points: dict[tuple[Case, str, str, int], Point] = {}

    def add(self, case: Case, trajectories: Sequence[Trajectory]) -> None:
        """All variants over every trajectory of a case, one per seed; plans come from the seed before."""
        for (seed, here), regime in itertools.product(enumerate(trajectories), REGIMES):
            for gradient in gradients(here, trajectories[seed - 1], regime):
                key = (case, regime, gradient.variant, gradient.K)
                error, cosine = here.compare(gradient.coefficients, regime)
                point = self.points.setdefault(key, Point(*key))
                point.passes.append(gradient.passes)
                point.errors.append(error)
                point.cosines.append(cosine)
                point.predicted += [] if gradient.predicted is None else [gradient.predicted]

    def curve(self, case: Case, regime: str, variant: str) -> dict[int, Point]:
        """The points of a variant by K; of all the paper's W with equally many knots, the best."""
        best: dict[int, Point] = {}
        for (c, r, name, K), point in self.points.items():
            matches = name == variant or (variant in ("paper", "index") and name.startswith(f"{variant} W="))
            if (c, r) == (case, regime) and matches and (K not in best or point.error < best[K].error):
                best[K] = point
        return dict(sorted(best.items()))


COLUMNS = ("paper", "even", "schedule", "budget", "degree 2", "subset", "last", "largest")
MORE_COLUMNS = ("index", "budget, same", "degree 2, even", "debias 1", "debias 0.5", f"debias 0.5, mean of {DRAWS}")


def table(results: Results, case: Case, regime: str, variants: Sequence[str]) -> str:
    curves = {variant: curve for variant in variants if (curve := results.curve(case, regime, variant))}
    rows = [[f"{K}", *(str(curve.get(K, "")) for curve in curves.values())] for K in range(2, case.replayed)]
    title = f"{case}; {regime} step weights: relative error, mean ± std over seeds (passes, where they are not K)"
    text: str = tabulate(rows, headers=["K", *curves], tablefmt="github", disable_numparse=True)
    return f"\n{title}\n\n{text}"


def calibration(results: Results) -> str:
    """Measured over predicted error of the placed plans."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for point in results.points.values():
        if point.variant == "budget" and all(point.predicted):  # 0: exact
            found = [error / predicted for error, predicted in zip(point.errors, point.predicted, strict=True)]
            for key in ((point.regime, str(point.case.noise)), ("own and equalised", "all")):
                ratios.setdefault(key, []).extend(found)
    rows = [[*key, *np.quantile(found, (0.25, 0.5, 0.75)), len(found)] for key, found in sorted(ratios.items())]
    headers = ["step weights", "noise", "25%", "median", "75%", "plans"]
    text: str = tabulate(rows, headers=headers, tablefmt="github", floatfmt=".2f")
    return f"\nMeasured over predicted relative error of budget\n\n{text}"


def judged(results: Results, case: Case) -> dict[str, str]:
    """What placement is expected to achieve, and whether it does."""
    verdicts = {}

    def judge(claim: str, left: float, right: float, passes: str = "") -> None:
        verdicts[claim] = f"{passes}{left:.3f} <= {right:.3f}: {'yes' if left <= right else 'no'}"

    for regime in REGIMES:
        placed = results.curve(case, regime, "budget")
        kept = {W: len(paper(W).place(case.replayed, Rule()).knots) for W in range(3, case.replayed)}
        papers = {W: results.points[case, regime, f"paper W={W}", K] for W, K in kept.items()}
        four = papers[4]
        if regime == "own":
            judge(f"own: budget(5) <= paper W=4 ({four.K} passes)", placed[5].error, four.error)
            judge("own: budget(10) <= 0.4 of paper W=4", placed[10].error, 0.4 * four.error)
            continue
        judge(f"equalised: budget(9) <= paper W=4 ({four.K} passes)", placed[9].error, four.error)
        for W, point in papers.items():
            judge(f"equalised: budget(K) <= paper W={W}", placed[point.K].error, point.error, f"K={point.K}, ")
    return verdicts


def statements(results: Results, cases: Sequence[Case]) -> str:
    columns = [judged(results, case) for case in cases]
    rows = [[claim, *(column.get(claim, "") for column in columns)] for claim in columns[0]]
    text: str = tabulate(rows, headers=["relative error", *map(str, cases)], tablefmt="github", disable_numparse=True)
    return text


def draw(results: Results, cases: Sequence[Case], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (12, 3.8 * len(cases))
    figure, axes = plt.subplots(len(cases), 2, figsize=size, sharex=True, sharey=True, squeeze=False)
    for row, case in zip(axes, cases, strict=True):
        for axis, regime in zip(row, REGIMES, strict=True):
            for n, variant in enumerate(v for v in COLUMNS if v != "schedule"):
                curve = results.curve(case, regime, variant)
                points = [curve[K] for K in range(2, case.replayed) if K in curve]
                y, spread = [p.error for p in points], [np.std(p.errors) for p in points]
                style = {"color": f"C{n}", "marker": "osD^vxP*"[n], "markersize": 4, "capsize": 2}
                axis.errorbar([p.K for p in points], y, spread, label=variant, **style)
            axis.set(yscale="log", title=f"noise {case.noise}, {regime} step weights", ylim=(0.005, 3))
            axis.grid(alpha=0.3, which="both")
    for axis in axes[-1]:
        axis.set_xlabel(f"backward passes (of {cases[0].replayed})")
    for axis in axes[:, 0]:
        axis.set_ylabel("relative error of the gradient")
    axes[0, 1].legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def save(results: Results, path: Path) -> None:
    lines = []
    for p in results.points.values():
        numbers = [[float(f"{x:.4g}") for x in seeds] for seeds in (p.errors, p.cosines, p.predicted)]
        lines.append(json.dumps([str(p.case), p.regime, p.variant, p.K, round(float(np.mean(p.passes)), 1), *numbers]))
    head = {
        "command": f"python -m benchmarks.fidelity {shlex.join(sys.argv[1:])}".strip(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "columns": ["case", "step weights", "variant", "K", "passes", "errors", "cosines", "predicted errors"],
    }
    # A point a line, with one number per seed: long, but legible and easy to compare.
    path.write_text(json.dumps(head)[:-1] + ', "points": [\n' + ",\n".join(lines) + "\n]}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 20], help="sampling steps (default 10 20)")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.3, 0.7], help="levels (default 0 .3 .7)")
    parser.add_argument("--seeds", type=int, default=5, help="batches, at least 2 (default 5)")
    parser.add_argument("--quick", action="store_true", help="2 seeds, 10 steps, noise .7")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for fidelity.*")
    args = parser.parse_args()
    steps, noises, seeds = ([10], [0.7], 2) if args.quick else (args.steps, args.noise, args.seeds)
    if seeds < 2:
        parser.error("--seeds must be at least 2: plans are made on one batch and used on another.")
    torch.manual_seed(0)
    whole = [Case(n, noise, n) for n in steps for noise in noises]
    goals = [Case(20, 0.7, 20), Case(20, 0.7, 19), Case(20, 0.7, 19, shift=3.0)]  # the last: steps of unequal length
    has_goals = goals[0] in whole
    model, task, results = load_digits_dit(), DigitsTask(), Results()
    recorded = [*whole, goals[2]] if has_goals else whole
    with tqdm(total=len(recorded) * seeds, unit="batch") as bar:
        for case in recorded:
            bar.set_postfix_str(str(case))
            batches = []
            for seed in range(seeds):
                batches.append(record(model, task, case, seed, check=seed == 0 and case.noise == 0.7))
                bar.update()
            for replayed in sorted({case.replayed, case.steps - 1}, reverse=True):
                results.add(dataclasses.replace(case, replayed=replayed), [batch.first(replayed) for batch in batches])
    if has_goals:
        print(f"\n{statements(results, goals)}")
    for case in goals if has_goals else whole[-1:]:
        for regime in REGIMES:
            print(table(results, case, regime, COLUMNS), table(results, case, regime, MORE_COLUMNS), sep="\n")
    print(calibration(results))
    args.out.mkdir(parents=True, exist_ok=True)
    save(results, args.out / "fidelity.json")
    draw(results, [case for case in whole if case.steps == max(steps)], args.out / "fidelity.png")


if __name__ == "__main__":
    main()
