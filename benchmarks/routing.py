"""From which agreement of velocities on is interpolation good?

    python -m benchmarks.routing

The trajectories of `benchmarks/trajectories.py` at several noise levels, all steps but the last replayed. For every segment of a
trajectory, that is for every pair of steps with 1 to 6 others between them, two numbers:
    score            the guard's: cosine between each step's velocity and its interpolation, mean over samples, worst step
    gradient cosine  between the steps' exact share of the gradient, `sum_i J_i^T g_i`, and its interpolation,
                     `sum_i sum_k w_ik J_k^T g_i`, with the sampler's own step weights
The default threshold is chosen by this rule: the smallest multiple of .05 such that of the segments whose score lies within .05
above it, nine in ten have a gradient cosine of at least .8. It looks at the segments the threshold just lets through, because
those far above it are good under any threshold. A gradient cosine of .8 is a relative error of .6 at the most favourable length;
a segment that is skipped altogether, which is what training fewer steps does, has error 1.

The second table shows what a threshold costs and brings with the paper's groups of four: the share of intermediate steps that
are interpolated (`jagg_frac`), the backward passes saved, and the whole gradient with the other segments exact.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from benchmarks.trajectories import Case, Trajectory, coordinates, record
from jagg_fx import guard, interpolation
from jagg_fx.demo.task import DigitsTask
from jagg_fx.models.digits_dit import load_digits_dit
from jagg_fx.plan import Plan, Rule, explicit, paper

LONGEST = 6  # intermediate steps
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
BINS = (-1.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)
GOOD, OFTEN, WIDTH = 0.8, 0.9, 0.05


@dataclass(frozen=True)
class Observation:
    """A segment of one trajectory: its score and how well its share of the gradient is interpolated."""

    steps: int
    noise: float
    seed: int
    a: int
    b: int
    score: float
    gradient_cosine: float


@dataclass(frozen=True)
class Routed:
    """The paper's groups under one threshold, on one trajectory."""

    steps: int
    noise: float
    seed: int
    threshold: float
    jagg_frac: float
    saved: int
    error: float
    cosine: float


def scores(trajectory: Trajectory, plan: Plan) -> Tensor:
    """The guard's score of each segment `[S]`."""
    middle, knots = list(plan.intermediate), list(plan.knots)
    weights = interpolation.knot_weights(trajectory.times[middle], trajectory.times[knots])
    agreement = interpolation.agreement([trajectory.values[middle]], [trajectory.values[knots]], weights)
    return guard.segment_scores(agreement, plan)


def observe(trajectory: Trajectory, case: Case, seed: int) -> Iterator[Observation]:
    """All segments with up to `LONGEST` intermediate steps."""
    N = len(trajectory.times)
    for a in range(N):
        for b in range(a + 2, min(a + LONGEST + 2, N)):
            plan = explicit(sorted({0, *range(a + 1), *range(b, N)})).place(N, Rule())  # one segment, all else exact
            inside = torch.zeros(N, dtype=torch.float64)
            inside[a + 1 : b] = trajectory.gains[a + 1 : b].double()
            exact, twin = torch.diag(inside), coordinates(plan, trajectory.times) * inside
            size = (trajectory.product(exact, exact) * trajectory.product(twin, twin)).sqrt()
            cosine = float(trajectory.product(exact, twin) / size)
            yield Observation(case.steps, case.noise, seed, a, b, float(scores(trajectory, plan)[0]), cosine)


def route(trajectory: Trajectory, case: Case, seed: int) -> Iterator[Routed]:
    """The paper's groups of four under every threshold."""
    plan = paper(4).place(case.replayed, Rule())
    scored = scores(trajectory, plan)
    for threshold in THRESHOLDS:
        keep = guard.keep_segments(scored, plan, guard.Guard(threshold))
        interpolated = [
            i for segment, kept in zip(plan.segments, keep, strict=True) if kept for i in segment.intermediate
        ]
        coefficients = torch.eye(case.replayed, dtype=torch.float64)
        coefficients[:, interpolated] = coordinates(plan, trajectory.times)[:, interpolated]
        error, cosine = trajectory.compare(coefficients[None], "own")
        share, saved = len(interpolated) / len(plan.intermediate), len(interpolated)
        yield Routed(case.steps, case.noise, seed, threshold, share, saved, error, cosine)


def by_score(observations: Sequence[Observation]) -> str:
    rows = []
    for low, high in itertools.pairwise(BINS):
        found = [o.gradient_cosine for o in observations if low <= o.score < high]
        if found:
            median, tenth = np.quantile(found, (0.5, 0.1))
            rows.append([f"{low:g} to {high:g}", len(found), median, tenth, np.mean(np.array(found) >= GOOD)])
    headers = ["velocity cosine", "segments", "gradient cosine, median", "10% quantile", f"share >= {GOOD:g}"]
    text: str = tabulate(rows, headers=headers, tablefmt="github", floatfmt=".3f")
    return text


def by_threshold(routed: Sequence[Routed]) -> str:
    rows = []
    for steps, noise in sorted({(r.steps, r.noise) for r in routed}):
        for threshold in THRESHOLDS:
            found = [r for r in routed if (r.steps, r.noise, r.threshold) == (steps, noise, threshold)]
            means = np.mean([(r.jagg_frac, r.saved, r.error, r.cosine) for r in found], axis=0)
            rows.append([steps, noise, threshold, *means])
    headers = ["steps", "noise", "threshold", "jagg_frac", "passes saved", "relative error", "cosine"]
    floats = ("g", "g", "g", ".2f", ".1f", ".3f", ".3f")
    text: str = tabulate(rows, headers=headers, tablefmt="github", floatfmt=floats)
    return text


def suggest(observations: Sequence[Observation]) -> float | None:
    """The default threshold by the rule above; None if no threshold meets it."""
    for threshold in np.arange(0, 1, WIDTH).round(2):
        found = [o.gradient_cosine for o in observations if threshold <= o.score < threshold + WIDTH]
        if found and np.mean(np.array(found) >= GOOD) >= OFTEN:
            return float(threshold)
    return None


def draw(observations: Sequence[Observation], threshold: float | None, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 5))
    for n, noise in enumerate(sorted({o.noise for o in observations})):
        found = [o for o in observations if o.noise == noise]
        x, y = [o.score for o in found], [o.gradient_cosine for o in found]
        axis.scatter(x, y, s=7, alpha=0.5, color=f"C{n}", label=f"noise {noise}", linewidths=0)
    if threshold is not None:
        axis.axvline(threshold, color="black", linestyle="--", linewidth=1, label=f"threshold {threshold:g}")
    axis.axhline(GOOD, color="grey", linestyle=":", linewidth=1)
    axis.set(xlabel="score: velocity cosine of the segment's worst step", ylabel="cosine of its share of the gradient")
    axis.legend(loc="lower right")
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="batches per setting (default 3)")
    parser.add_argument("--quick", action="store_true", help="1 seed, 10 steps, noise 0 and .7")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for routing.json and .png")
    args = parser.parse_args()
    steps, noises, seeds = ([10], [0.0, 0.7], 1) if args.quick else ([10, 20], [0.0, 0.3, 0.7, 1.0], args.seeds)
    model, task = load_digits_dit(), DigitsTask()
    observations: list[Observation] = []
    routed: list[Routed] = []
    runs = [(Case(n, noise, n - 1), seed) for n in steps for noise in noises for seed in range(seeds)]
    for case, seed in tqdm(runs, unit="batch"):
        trajectory = record(model, task, case, seed)
        observations += observe(trajectory, case, seed)
        routed += route(trajectory, case, seed)
    threshold = suggest(observations)
    print(f"\n{by_score(observations)}\n\n{by_threshold(routed)}")
    rule = f"{OFTEN:.0%} of the segments within {WIDTH:g} above it have a gradient cosine >= {GOOD:g}"
    print(f"\nSuggested threshold: {threshold} (the smallest for which {rule}).")
    args.out.mkdir(parents=True, exist_ok=True)
    draw(observations, threshold, args.out / "routing.png")
    payload = {
        "command": f"python -m benchmarks.routing {shlex.join(sys.argv[1:])}".strip(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "rule": rule,
        "threshold": threshold,
        "routed": [dataclasses.asdict(r) for r in routed],
        "segments": [dataclasses.asdict(o) for o in observations],
    }
    rounded = json.loads(json.dumps(payload), parse_float=lambda text: round(float(text), 4))
    (args.out / "routing.json").write_text(json.dumps(rounded) + "\n")


if __name__ == "__main__":
    main()
