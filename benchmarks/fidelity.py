"""How far is each approximate gradient from the exact one, per number of backward passes?

    python -m benchmarks.fidelity

Rollouts of the trained digits DiT by Flow-SDE, 16 samples in two groups with the demo's reward and group advantages. All
steps but the last are replayed, as in the demo. On-policy, the cotangent of step i is `g_i = A gain_i eps_i`: advantage, the
sampler's gain `|c_i / S_i|` and the rollout's own noise (checked against autograd). Two regimes: "own" keeps the gains, which
grow 17-fold over 19 steps; "equalised" divides each step's loss by its gain. Noise 0 stands for its limit: the gains' ratios
have one, and the states are then those of the ODE.

Every gradient compared here is a sum of `c_ki J_k^T g_i`, where step k's VJP takes step i's cotangent: the exact one has c = 1,
a plan's composites give c through `interpolation.composite` applied to unit vectors, a random subset has a diagonal c. So one
trajectory needs its N^2 VJPs and their scalar products once (1.8 GB for a moment at 19 steps), and no error costs another pass.

Variants, all on the same trajectories:
    paper W           groups of W consecutive steps; for one number of passes the best W counts in tables
    even, budget      K knots; budget is placed on another batch, as in training, where one plan serves all later batches
    budget, same      placed on the very batch it is used on
    budget by VJP     as budget, with two things that velocities do not show. A step counts by the size of its VJP,
                      |g_i| |J_i|, where |J| is measured as |J_k^T G_k| / |G_k| at K even knots (the measuring call runs
                      their backward passes in any case) and interpolated. And Jacobians move with time where velocities
                      stand still, by an amount fitted on this model: the velocity's squared relative residual
                      grows by DRIFT^2 (t_i - t_a) (t_b - t_i)
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
import math
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

from jagg_fx import guard, interpolation
from jagg_fx.budget import JACOBIAN_OVER_VELOCITY, Measurements, Schedule
from jagg_fx.demo.task import DigitsTask, prompts
from jagg_fx.models.digits_dit import IMAGE_SIZE, DigitsDiT, load_digits_dit
from jagg_fx.models.grpo import group_advantages
from jagg_fx.models.samplers import FlowSDE, gains, replay, rollout, schedule
from jagg_fx.plan import Budget, Plan, Rule, Weights, budget, even, paper

GROUPS, GROUP_SIZE = 2, 8
VANISHING = 1e-3  # stands for noise 0, where a log-prob has no meaning
DRAWS = 32
DRIFT = 1.5  # relative change of the digits DiT's Jacobian per unit of time, beyond what its velocity shows
REGIMES = ("own", "equalised")


@dataclass(frozen=True)
class Case:
    """One setting: sampling steps, how many of them are replayed, noise level and shift of the schedule."""

    steps: int
    noise: float
    replayed: int
    shift: float = 1.0

    def __str__(self) -> str:
        return f"{self.steps} steps, {self.replayed} replayed, noise {self.noise}, shift {self.shift:g}"


@dataclass(frozen=True)
class Trajectory:
    """A replayed rollout and all that gradients over it are made of.

    Attributes:
        times, gains: `[N]`.
        values, cotangents: `[N, B, *]`, the cotangents at equal step weights, `A eps_i`.
        products: `[N, N, N, N]`, scalar product of `J_k^T g_i` and `J_l^T g_j`.
    """

    times: Tensor
    gains: Tensor
    values: Tensor
    cotangents: Tensor
    products: Tensor

    def scales(self, regime: str) -> Tensor:
        """Step weights `[N]`."""
        return self.gains / self.gains.mean() if regime == "own" else torch.ones_like(self.gains)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Scalar products `[...]` of gradients with coefficients `[..., N, N]`."""
        size = len(self.times) ** 2
        dots: Tensor = ((a.flatten(-2) @ self.products.view(size, size)) * b.flatten(-2)).sum(-1)
        return dots

    def compare(self, coefficients: Tensor, regime: str) -> tuple[float, float]:
        """Relative error and cosine to the exact gradient, means over the draws `[draws, N, N]`."""
        scales = self.scales(regime).double()
        exact, other = torch.diag(scales), coefficients * scales
        size = self.product(exact, exact).sqrt()
        error = self.product(other - exact, other - exact).clamp(min=0).sqrt() / size
        cosine = self.product(other, exact) / (self.product(other, other).sqrt() * size)
        return float(error.mean()), float(cosine.mean())

    def shares(self, regime: str) -> Tensor:
        """`|J_i^T g_i|` of every step `[N]`."""
        squares = torch.einsum("iiii->i", self.products)
        return squares.sqrt() * self.scales(regime)

    def jacobian_sizes(self, regime: str, K: int) -> Tensor:
        """`|J_k^T G_k| / |G_k|` at `K` even knots, and between them by interpolation: `[N]`."""
        plan = even(K).place(len(self.times), Rule())
        knots = list(plan.knots)
        rows = (coordinates(plan, self.times) * self.scales(regime))[knots]
        vjps = torch.stack([row @ self.products[k, :, k, :] @ row for k, row in zip(knots, rows, strict=True)]).sqrt()
        composites = (rows.float() @ self.cotangents.flatten(1)).norm(dim=1)
        sizes: Tensor = interpolation.knot_weights(self.times, self.times[knots]) @ (vjps.float() / composites)
        return sizes


def coordinates(plan: Plan, times: Tensor) -> Tensor:
    """Composite cotangents in terms of the steps' own: `[N, N]`, row k holds the coefficients of `G_k` (0 unless a knot)."""
    unit = torch.eye(plan.num_steps, dtype=torch.float64)
    if not plan.segments:
        return unit
    steps = torch.arange(plan.num_steps) if plan.rule.weights is Weights.INDEX else times
    middle, knots = list(plan.intermediate), list(plan.knots)
    weights = interpolation.knot_weights(steps[middle], steps[knots], plan.rule.degree)
    rows = torch.zeros_like(unit)
    for k, knot in enumerate(knots):
        rows[knot] = interpolation.composite(unit[knot], unit[middle], weights[:, k])
    return rows


def record(model: DigitsDiT, task: DigitsTask, case: Case, seed: int, check: bool = False) -> Trajectory:
    """Sample, replay and differentiate one batch; with `check`, assert what this file takes for granted."""
    generator = torch.Generator().manual_seed(seed)
    sampler, sigmas, N = FlowSDE(max(case.noise, VANISHING)), schedule(case.steps, case.shift), case.replayed
    labels = prompts(GROUPS, GROUP_SIZE, generator)
    noise = torch.randn(len(labels), 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    latents = rollout(model, sampler, noise, sigmas, labels, generator=generator).latents
    advantages = group_advantages(task.reward(latents[-1], labels), GROUP_SIZE)
    values: list[Tensor] = []

    def denoiser(x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        values.append(model(x, t, labels))
        return values[-1]

    log_probs, means, stds = replay(denoiser, sampler, latents[: N + 1], sigmas[: N + 1], labels)
    drawn = (latents[1 : N + 1] - means.detach().transpose(0, 1)) / stds.view(-1, 1, 1, 1, 1)
    cotangents = advantages.view(1, -1, 1, 1, 1) * drawn
    parameters = list(model.parameters())
    vjps = torch.empty(N, N, sum(p.numel() for p in parameters))
    for k, i in itertools.product(range(N), repeat=2):
        gradients = torch.autograd.grad(values[k], parameters, cotangents[i], retain_graph=True)
        vjps[k, i] = torch.cat([g.flatten() for g in gradients])
    products = torch.zeros(N * N, N * N, dtype=torch.float64)
    for chunk in vjps.view(N * N, -1).split(2**16, dim=1):
        products += (chunk @ chunk.T).double()
    found = torch.stack(values).detach()
    trajectory = Trajectory(sigmas[:N], gains(sampler, sigmas)[:N], found, cotangents, products.view(N, N, N, N))
    if check:
        own = cotangents * trajectory.gains.view(-1, 1, 1, 1, 1)
        loss = -(advantages[:, None] * log_probs).sum() * cotangents[0, 0].numel()
        torch.testing.assert_close(torch.stack(torch.autograd.grad(loss, values, retain_graph=True)), own)
        plan = paper(4).place(N, Rule())
        weights = interpolation.knot_weights(sigmas[list(plan.intermediate)], sigmas[list(plan.knots)])
        others = own[list(plan.intermediate)]
        composites = [interpolation.composite(own[k], others, weights[:, n]) for n, k in enumerate(plan.knots)]
        flat = [
            torch.cat([g.flatten() for g in torch.autograd.grad(outputs, parameters, given, retain_graph=True)])
            for outputs, given in (([values[k] for k in plan.knots], composites), (values, list(own)))
        ]
        error = float((flat[0] - flat[1]).norm() / flat[1].norm())
        assert math.isclose(error, trajectory.compare(coordinates(plan, sigmas[:N]), "own")[0], rel_tol=1e-3)
    return trajectory


@dataclass(frozen=True)
class Tabulated(Measurements):
    """Measurements that compute each segment's errors once, for many numbers of knots."""

    table: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, trajectory: Trajectory, regime: str) -> "Tabulated":
        sizes = trajectory.cotangents.flatten(2).norm(dim=2) * trajectory.scales(regime)[:, None]
        measured = Measurements(trajectory.times, (trajectory.values,), sizes)
        pairs = itertools.combinations(range(len(sizes)), 2)
        return cls(measured.times, measured.values, sizes, table={(a, b): measured.errors(a, b) for a, b in pairs})

    def by_vjp(self, jacobian_sizes: Tensor) -> "Tabulated":
        """With cotangents counted by the size of their VJPs `[N]`, and Jacobians that drift with time."""
        sizes, times = jacobian_sizes.tolist(), self.times.tolist()
        norms = self.norms.norm(dim=1).tolist()

        def error(a: int, i: int, b: int, by_velocity: float) -> float:
            hat = abs((times[i] - times[a]) * (times[b] - times[i]))
            return float(sizes[i] * math.hypot(by_velocity, norms[i] * DRIFT * math.sqrt(hat)))

        table = {(a, b): [error(a, i, b, e) for i, e in enumerate(es, a + 1)] for (a, b), es in self.table.items()}
        return dataclasses.replace(self, norms=self.norms * jacobian_sizes[:, None], table=table)

    def errors(self, a: int, b: int) -> list[float]:
        return self.table[a, b]


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
    measured, same = Tabulated.of(previous, regime), Tabulated.of(here, regime)
    known = Schedule.create(here.times, here.scales(regime))
    largest = here.shares(regime).argsort(descending=True)
    for K in range(2, N + 1):
        placed, spread = Budget(K).place_measured(measured, rule), even(K).place(N, rule)
        yield of("budget", placed)
        yield of("even", spread)
        yield of("budget, same", Budget(K).place_measured(same, rule))
        sizes = previous.jacobian_sizes(regime, K)
        yield of("budget by VJP", Budget(K).place_measured(measured.by_vjp(sizes), rule))
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

    def add(self, case: Case, regime: str, here: Trajectory, gradient: Gradient) -> None:
        key = (case, regime, gradient.variant, gradient.K)
        error, cosine = here.compare(gradient.coefficients, regime)
        point = self.points.setdefault(key, Point(*key))
        point.passes.append(gradient.passes)
        point.errors.append(error)
        point.cosines.append(cosine)
        if gradient.predicted is not None:
            point.predicted.append(gradient.predicted)

    def curve(self, case: Case, regime: str, variant: str) -> dict[int, Point]:
        """The points of a variant by K; of all the paper's W with equally many knots, the best."""
        best: dict[int, Point] = {}
        for (c, r, name, K), point in self.points.items():
            matches = name == variant or (variant in ("paper", "index") and name.startswith(f"{variant} W="))
            if (c, r) == (case, regime) and matches and (K not in best or point.error < best[K].error):
                best[K] = point
        return dict(sorted(best.items()))


COLUMNS = ("paper", "even", "schedule", "budget", "budget by VJP", "degree 2", "subset", "last", "largest")
MORE_COLUMNS = ("index", "budget, same", "degree 2, even", "debias 1", "debias 0.5", f"debias 0.5, mean of {DRAWS}")


def table(results: Results, case: Case, regime: str, variants: Sequence[str]) -> str:
    curves = {variant: curve for variant in variants if (curve := results.curve(case, regime, variant))}
    rows = [[f"{K}", *(str(curve.get(K, "")) for curve in curves.values())] for K in range(2, case.replayed)]
    title = f"{case}; {regime} step weights: relative error, mean ± std over seeds (passes, where they are not K)"
    text: str = tabulate(rows, headers=["K", *curves], tablefmt="github", disable_numparse=True)
    return f"\n{title}\n\n{text}"


def calibration(results: Results) -> str:
    """Measured over predicted error of the placed plans, and what it says about the constant of the prediction."""
    rows, everything = [], dict[str, list[float]]()
    for variant in ("budget", "budget by VJP"):
        points = [p for p in results.points.values() if p.variant == variant and all(p.predicted)]  # 0: exact
        for regime, noise in sorted({(p.regime, p.case.noise) for p in points}):
            matching = [p for p in points if (p.regime, p.case.noise) == (regime, noise)]
            ratios = [e / q for p in matching for e, q in zip(p.errors, p.predicted, strict=True)]
            everything.setdefault(variant, []).extend(ratios)
            rows.append([variant, regime, noise, *np.quantile(ratios, (0.25, 0.5, 0.75)), len(ratios)])
        rows.append(
            [variant, "all", "all", *np.quantile(everything[variant], (0.25, 0.5, 0.75)), len(everything[variant])]
        )
    headers = ["placement", "step weights", "noise", "25%", "median", "75%", "plans"]
    now = JACOBIAN_OVER_VELOCITY
    advice = [f"{now * np.median(ratios):.2f} ({variant})" for variant, ratios in everything.items()]
    text: str = tabulate(rows, headers=headers, tablefmt="github", floatfmt=".2f")
    conclusion = f"JACOBIAN_OVER_VELOCITY is {now:g}; these runs would have it {' or '.join(advice)}."
    return f"\nMeasured over predicted relative error\n\n{text}\n\n{conclusion}"


def statements(results: Results, case: Case) -> list[str]:
    """What placement is expected to achieve, and whether it does."""
    lines = []

    def say(regime: str, claim: str, left: float, right: float) -> None:
        lines.append(f"{regime}: {claim}: {left:.3f} against {right:.3f}: {'yes' if left <= right else 'no'}")

    for variant in ("budget", "budget by VJP"):
        for regime in REGIMES:
            placed = results.curve(case, regime, variant)
            papers = {
                W: results.points[case, regime, f"paper W={W}", len(paper(W).place(case.replayed, Rule()).knots)]
                for W in range(3, case.replayed)
            }
            four = papers[4]
            if regime == "own":
                say(regime, f"{variant}(5) <= paper W=4 ({four.K} passes)", placed[5].error, four.error)
                say(regime, f"{variant}(10) <= 0.4 of paper W=4", placed[10].error, 0.4 * four.error)
                continue
            say(regime, f"{variant}(9) <= paper W=4 ({four.K} passes)", placed[9].error, four.error)
            for W, point in papers.items():
                say(regime, f"{variant}({point.K}) <= paper W={W}", placed[point.K].error, point.error)
    return lines


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
    def short(values: Sequence[float], digits: int) -> list[float]:
        return [float(f"{x:.{digits}g}") for x in values]

    lines = []
    for point in results.points.values():
        passes = round(float(np.mean(point.passes)), 1)
        numbers = [short(point.errors, 3), short(point.cosines, 4), short(point.predicted, 3)]
        lines.append(json.dumps([str(point.case), point.regime, point.variant, point.K, passes, *numbers]))
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
    parser.add_argument(
        "--noise", type=float, nargs="+", default=[0.0, 0.3, 0.7], help="noise levels (default 0 .3 .7)"
    )
    parser.add_argument("--seeds", type=int, default=5, help="batches, at least 2 (default 5)")
    parser.add_argument("--quick", action="store_true", help="2 seeds, 10 steps, noise .7")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="folder for fidelity.json and .png"
    )
    args = parser.parse_args()
    steps, noises, seeds = ([10], [0.7], 2) if args.quick else (args.steps, args.noise, args.seeds)
    if seeds < 2:
        parser.error("--seeds must be at least 2: plans are made on one batch and used on another.")
    torch.set_num_threads(1)  # the model is small: more threads only wait for each other
    torch.manual_seed(0)
    cases = [Case(n, noise, n - 1) for n in steps for noise in noises]
    goal = Case(20, 0.7, 19)
    # How far the comparisons hang on the last step, and on a schedule whose steps are unequal.
    others = [Case(20, 0.7, 20), Case(20, 0.7, 19, shift=3.0)] if goal in cases else []
    model, task, results = load_digits_dit(), DigitsTask(), Results()
    with tqdm(total=len(cases + others) * seeds, unit="batch") as bar:
        for case in cases + others:
            bar.set_postfix_str(str(case))
            trajectories = []
            for seed in range(seeds):
                trajectories.append(record(model, task, case, seed, check=seed == 0 and case.noise == 0.7))
                bar.update()
            for seed, here in enumerate(trajectories):
                for regime in REGIMES:
                    for gradient in gradients(here, trajectories[seed - 1], regime):
                        results.add(case, regime, here, gradient)
    shown = [goal, *others] if goal in cases else [cases[-1]]
    for case in shown:
        for regime in REGIMES:
            print(table(results, case, regime, COLUMNS))
            print(table(results, case, regime, MORE_COLUMNS))
    print(calibration(results))
    args.out.mkdir(parents=True, exist_ok=True)
    save(results, args.out / "fidelity.json")
    draw(results, [c for c in cases if c.steps == max(steps)], args.out / "fidelity.png")
    for case in [goal, *others] if goal in cases else []:
        print(f"\n{case}, relative error:", *statements(results, case), sep="\n  ")


if __name__ == "__main__":
    main()
