"""Does training with fewer backward passes reach the same reward, and how soon?

    python -m benchmarks.reward
    python -m benchmarks.reward --reward class --seeds 5 --resume

GRPO of the digits DiT as in the demo (Flow-SDE rollouts of 10 steps, 9 of them trained, 8 prompts x 12 samples, AdamW), under
several seeds. Rewards:

    ink      the demo's: fatter strokes that still read as the digit, which late steps decide
    class    unconditional samples drawn towards one class by a classifier's log-probability, which early steps decide

Variants:

    exact                  torch.compile, all steps
    W=4                    the paper's groups, with the guard
    knots=4                placed by one measurement on a batch of its own, before training
    knots=4, velocities    the same, with the rollout's velocities in place of intermediate forwards
    last 4 steps           trains the last 4 steps alone; the others' forwards are saved too
    window of 4 steps      trains 4 consecutive steps, a random window in every update

Within a seed the variants take turns, an update of each, so that they meet the same machine; one compile serves all seeds.
Seconds are those of rollouts and updates, without compiles and evaluations. Every few updates the reward of fresh samples is
measured, the same prompts and noise for all. The numbers are stored after every seed, and `--resume` runs only seeds that
lack one. Draws a figure.
"""

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import jagg_fx
from benchmarks import harness, rivals
from benchmarks.harness import Spread
from benchmarks.loops import GROUP_SIZE, LEARNING_RATE, SAMPLER, SIGMAS, STEPS, TRAINED, Batch, sample
from benchmarks.sizes import SIZES, LogProbs, Problem
from jagg_fx.demo.measure import Clock
from jagg_fx.demo.task import DigitsTask, prompts
from jagg_fx.models.digits_dit import IMAGE_SIZE, NULL_CLASS, NUM_CLASSES, DigitsDiT, load_digits_dit
from jagg_fx.models.grpo import grpo_loss
from jagg_fx.models.samplers import rollout
from jagg_fx.plan import Plan

K = 4
REWARDS = ("ink", "class")
TARGET = 3  # the class of the second reward
NEARLY = 0.95  # share of the exact run's gain that is asked for besides all of it


@dataclass(frozen=True)
class Reward:
    """What is asked for.

    Attributes:
        task: the classifiers.
        target: the class of unconditional samples, or None for the demo's reward.
        groups: prompts of an update.
        evaluated: fresh samples of an evaluation.
    """

    task: DigitsTask
    target: int | None
    groups: int = 8
    evaluated: int = 200

    def prompts(self, generator: torch.Generator) -> Tensor:
        """Labels `[B]` of an update."""
        labels = prompts(self.groups, GROUP_SIZE, generator)
        return labels if self.target is None else torch.full_like(labels, NULL_CLASS)

    def fresh_prompts(self) -> Tensor:
        labels = torch.arange(NUM_CLASSES).repeat(self.evaluated // NUM_CLASSES)
        return labels if self.target is None else torch.full_like(labels, NULL_CLASS)

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """`[B]`."""
        if self.target is None:
            return self.task.reward(images, labels)
        return self.task.log_probs(images, self._wanted(labels))

    def quality(self, images: Tensor, labels: Tensor) -> dict[str, float]:
        """Of samples, by a classifier that no reward saw: accuracy, distance to real digits, and how much the samples differ.

        "entropy" is that of the predicted classes in nats, "feature_distance" the mean distance between two samples' features.
        """
        classes, features = self.task.look_at(images)
        shares = np.bincount(classes, minlength=NUM_CLASSES) / len(classes)
        present = shares[shares > 0]
        pairs = np.linalg.norm(features[:, None] - features[None], axis=-1)
        return asdict(self.task.quality(images, self._wanted(labels))) | {
            "entropy": float(-(present * np.log(present)).sum()),
            "feature_distance": float(pairs.sum() / (len(pairs) * (len(pairs) - 1))),
        }

    def _wanted(self, labels: Tensor) -> Tensor:
        return labels if self.target is None else torch.full_like(labels, self.target)


def draw(model: nn.Module, reward: Reward, generator: torch.Generator) -> Batch:
    """A rollout of an update."""
    return sample(model, reward.prompts(generator), reward, generator)


Window = Callable[[torch.Generator], range]


def all_steps(generator: torch.Generator) -> range:
    return range(TRAINED)


def last_steps(generator: torch.Generator) -> range:
    return range(TRAINED - K, TRAINED)


def random_window(generator: torch.Generator) -> range:
    first = int(torch.randint(TRAINED - K + 1, (), generator=generator))
    return range(first, first + K)


@dataclass(frozen=True)
class Variant:
    """A model, how its log-probs are computed, and which steps an update trains.

    Attributes:
        window: draws the steps.
        reuse: the block in which velocities `[N, B, *]` replace intermediate forwards, if they do.
    """

    model: DigitsDiT
    log_probs: LogProbs
    window: Window = all_steps
    reuse: Callable[[Tensor], Any] | None = None

    def backward(self, batch: Batch, steps: range) -> None:
        a, b = steps[0], steps[-1] + 1
        with self.reuse(batch.velocities) if self.reuse else nullcontext():
            latents, sigmas = batch.latents[a : b + 1].clone(), SIGMAS[a : b + 1].clone()  # no offset to compile for
            values = self.log_probs(latents, sigmas, {"labels": batch.labels})
            grpo_loss(values, batch.log_probs[:, a:b], batch.advantages).backward()


@dataclass
class Run:
    """What one variant did under one seed.

    Attributes:
        seconds: of every update with its rollout.
        updates, rewards: number of updates and mean reward of fresh samples, as it was evaluated.
        quality: held-out quality of the last samples.
    """

    seconds: list[float] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    quality: dict[str, float] = field(default_factory=dict)


def make_variants(plan: Plan, quick: bool) -> dict[str, Callable[[], Variant]]:
    """All variants by name, each with a model of its own; made when asked for."""
    backend, lowering = ("aot_eager", "eager") if quick else ("inductor", "inductor")

    def exactly(window: Window) -> Variant:
        problem = replayed()
        return Variant(problem.model, rivals.compiled(problem, backend), window)  # type: ignore[arg-type]

    def ours(reuses: bool = False, **options: Any) -> Variant:
        problem = replayed()
        fast = jagg_fx.transform(problem.replay(problem.model), denoiser=problem.model, lowering=lowering, **options)
        return Variant(problem.model, fast, reuse=fast.reuse if reuses else None)  # type: ignore[arg-type]

    return {
        "exact": lambda: exactly(all_steps),
        "W=4": lambda: ours(W=4),
        f"knots={K}": lambda: ours(plan=plan),
        f"knots={K}, velocities": lambda: ours(reuses=True, plan=plan),
        f"last {K} steps": lambda: exactly(last_steps),
        f"window of {K} steps": lambda: exactly(random_window),
    }


def replayed() -> Problem:
    """The trained model and its replay; the batches come later."""
    empty = torch.empty(0)
    return Problem(SIZES["digits"], load_digits_dit(), empty, SIGMAS, {}, empty, empty, empty)


def measured_plan(reward: Reward) -> Plan:
    """`K` knots by one measurement, on a batch that no run trains on."""
    problem = replayed()
    fast = jagg_fx.transform(problem.replay(problem.model), denoiser=problem.model, knots=K, lowering="eager")
    batch = draw(problem.model, reward, torch.Generator().manual_seed(10_000))
    Variant(problem.model, fast).backward(batch, range(TRAINED))  # type: ignore[arg-type]
    assert fast.plan is not None
    return fast.plan


def evaluate(model: DigitsDiT, reward: Reward) -> tuple[Tensor, Tensor]:
    """Fresh samples and their labels, the same noise for every model."""
    generator = torch.Generator().manual_seed(2000)
    labels = reward.fresh_prompts()
    noise = torch.randn(len(labels), 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return rollout(model, SAMPLER, noise, SIGMAS, labels, generator=generator).latents[-1], labels


def train(
    variants: dict[str, Variant], reward: Reward, seed: int, updates: int, every: int, bar: "tqdm[Any]"
) -> dict[str, Run]:
    """One run of each variant under one seed, an update of each in turn, from the pretrained weights."""
    runs = {name: Run() for name in variants}
    start = load_digits_dit().state_dict()
    generators = {name: torch.Generator().manual_seed(seed) for name in variants}
    windows = {
        name: torch.Generator().manual_seed(seed + 1000) for name in variants
    }  # so that all see the same rollouts
    optimizers = {name: torch.optim.AdamW(v.model.parameters(), lr=LEARNING_RATE) for name, v in variants.items()}
    for variant in variants.values():
        variant.model.load_state_dict(start)
        variant.model.zero_grad(set_to_none=True)
    for update in range(updates + 1):
        for name, variant in variants.items():
            run = runs[name]
            if update % every == 0 or update == updates:
                images, labels = evaluate(variant.model, reward)
                run.updates.append(update)
                run.rewards.append(float(reward(images, labels).mean()))
                run.quality = reward.quality(images, labels)
            if update < updates:
                watch = Clock()
                with watch.measure("update"):
                    step(variant, reward, optimizers[name], generators[name], windows[name], 1 - update / updates)
                run.seconds += watch.seconds["update"]
                bar.update()
        bar.set_postfix({name: f"{run.rewards[-1]:.2f}" for name, run in runs.items()})
    return runs


def step(
    variant: Variant,
    reward: Reward,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    windows: torch.Generator,
    decay: float,
) -> None:
    """A rollout and an update on it; the learning rate falls linearly to zero."""
    batch = draw(variant.model, reward, generator)
    variant.backward(batch, variant.window(windows))
    torch.nn.utils.clip_grad_norm_(variant.model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * decay
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def reached(run: Run, goal: float) -> tuple[float, float]:
    """Updates and seconds until the reward of fresh samples reached the goal, by linear interpolation; infinite if never."""
    elapsed = np.concatenate([[0.0], np.cumsum(run.seconds)])
    for n, value in enumerate(run.rewards):
        if value >= goal:
            before = run.rewards[n - 1] if n else value
            share = (goal - before) / (value - before) if n and value > before else 1.0
            a, b = run.updates[max(n - 1, 0)], run.updates[n]
            update = a + share * (b - a)
            return update, float(np.interp(update, range(len(elapsed)), elapsed))
    return float("inf"), float("inf")


def goals(exact: Run) -> tuple[float, float]:
    """The exact run's final reward, and most of its gain."""
    first, last = exact.rewards[0], exact.rewards[-1]
    return last, first + NEARLY * (last - first)


def numbers(settings: dict[str, Any], plan: Plan, runs: dict[str, dict[str, Run]]) -> dict[str, Any]:
    """What is stored."""
    kept = {name: {seed: asdict(run) for seed, run in by_seed.items()} for name, by_seed in runs.items()}
    return {"settings": settings, "plan": json.loads(plan.to_json()), "runs": kept}


def table(runs: dict[str, dict[str, Run]]) -> str:
    """A line per variant; `runs` by variant and seed."""
    rows = []
    for name, by_seed in runs.items():
        seeds = [seed for seed in by_seed if seed in runs["exact"]]
        row = [name, _median([run.rewards[-1] for run in by_seed.values()])]
        row.append(_median([sum(run.seconds) for run in by_seed.values()]))
        for n in range(2):
            found = [reached(by_seed[seed], goals(runs["exact"][seed])[n]) for seed in seeds]
            row += [_median([values[i] for values in found]) for i in range(2)]
        rows.append(row + [_median([run.quality[key] for run in by_seed.values()]) for key in QUALITIES])
    headers = [
        "",
        "final reward",
        "seconds",
        "updates to exact's final",
        "seconds",
        f"updates to {NEARLY:.0%} of its gain",
    ]
    return harness.table(rows, [*headers, "seconds", *QUALITIES.values()])


QUALITIES = {
    "accuracy": "held-out accuracy",
    "distance": "distance to real digits",
    "entropy": "class entropy",
    "feature_distance": "feature distance",
}


def _median(values: Sequence[float]) -> str:
    """Median and range; a run that never got there counts as infinite."""
    if not values:
        return "-"
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2] if ordered[-1] == float("inf") else Spread.of(ordered).median
    shown = [f"{value:.3g}" if value != float("inf") else "never" for value in (middle, ordered[0], ordered[-1])]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def figure(runs: dict[str, dict[str, Run]], path: Path) -> None:
    """Reward of fresh samples against updates and against seconds: median over seeds, band from the least to the largest."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 4.5), layout="constrained")
    by_update, by_second = picture.subplots(1, 2, sharey=True)
    for name, by_seed in runs.items():
        done = list(by_seed.values())
        rewards = np.array([run.rewards for run in done])
        updates = done[0].updates
        elapsed = np.array([[sum(run.seconds[:update]) for update in updates] for run in done])
        for axes, x in ((by_update, updates), (by_second, np.median(elapsed, axis=0))):
            (line,) = axes.plot(x, np.median(rewards, axis=0), label=name)
            axes.fill_between(x, rewards.min(axis=0), rewards.max(axis=0), color=line.get_color(), alpha=0.12)
    by_update.set(xlabel="update", ylabel="mean reward of fresh samples")
    by_second.set(xlabel="seconds of training (rollouts and updates, without compiles)")
    for axes in (by_update, by_second):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=120)
    print(f"wrote {path}")


def main() -> None:
    options = harness.parser(__doc__)
    options.set_defaults(device="cpu")  # scikit-learn's rewards
    options.add_argument(
        "--reward", choices=REWARDS, nargs="+", default=REWARDS, help="which rewards (default: both, in turn)"
    )
    options.add_argument("--seeds", type=harness.positive, default=5, help="seeds (default 5)")
    options.add_argument("--updates", type=harness.positive, default=60, help="updates of a run (default 60)")
    options.add_argument("--every", type=harness.positive, default=4, help="updates between evaluations (default 4)")
    options.add_argument("--variants", nargs="+", metavar="NAME", help="only these, besides exact")
    options.add_argument("--resume", action="store_true", help="keep the runs stored earlier, and run what they lack")
    args = options.parse_args()
    if args.device != "cpu":
        options.error("the digits DiT trains on the CPU: the rewards are scikit-learn's.")
    if args.out and len(args.reward) > 1:
        options.error(f"--out {args.out} is one file: name one --reward.")
    if args.quick:
        args.seeds, args.updates, args.every = min(args.seeds, 2), min(args.updates, 3), 2
    for which in args.reward:
        measure(which, args, options)


def measure(which: str, args: argparse.Namespace, options: argparse.ArgumentParser) -> None:
    """All runs of one reward, their table and their figure."""
    name = f"reward_{which}"
    out: Path = args.out or harness.RESULTS / f"{name}_cpu.json"
    settings = {"reward": which, "updates": args.updates, "every": args.every}
    runs: dict[str, dict[str, Run]] = {}
    plan = None
    if args.resume and out.exists():
        stored = json.loads(out.read_text())
        if stored["settings"] != settings:
            options.error(f"{out} holds runs of {stored['settings']}, not of {settings}: leave --resume out.")
        runs = {name: {seed: Run(**run) for seed, run in kept.items()} for name, kept in stored["runs"].items()}
        plan = Plan.from_json(json.dumps(stored["plan"]))
    target = TARGET if which == "class" else None
    reward = Reward(DigitsTask(), target, groups=1, evaluated=20) if args.quick else Reward(DigitsTask(), target)
    plan = plan or measured_plan(reward)
    makers = make_variants(plan, args.quick)
    if unknown := sorted(set(args.variants or ()) - set(makers)):
        options.error(f"no variant {unknown[0]!r}: choose from {', '.join(map(repr, makers))}")
    wanted = [each for each in makers if not args.variants or each in ("exact", *args.variants)]
    lacking = [seed for seed in range(args.seeds) if any(str(seed) not in runs.get(each, {}) for each in wanted)]
    made = functools.cache(lambda each: compiled_once(makers[each](), reward))
    with tqdm(total=args.updates * len(lacking) * len(wanted), unit="update") as bar:
        for seed in lacking:
            done = train({each: made(each) for each in wanted}, reward, seed, args.updates, args.every, bar)
            for each, run in done.items():
                runs.setdefault(each, {})[str(seed)] = run
            harness.save(name, args, numbers(settings, plan, runs))
    runs = {each: runs[each] for each in makers if each in runs}
    note = (
        f"Median over seeds, and from the least to the largest of them; reward {which}, {args.updates} updates of "
        f"{reward.groups} x {GROUP_SIZE} samples, {TRAINED} of {STEPS} steps trained. knots={K}: "
        f"{', '.join(map(str, plan.knots))}.\n{harness.caption('cpu')}"
    )
    harness.publish(name, args, numbers(settings, plan, runs), table(runs), note)
    if args.out or not args.quick:
        figure(runs, out.with_suffix(".png"))


def compiled_once(variant: Variant, reward: Reward) -> Variant:
    """The variant after two backwards, in which everything is compiled."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        variant.backward(draw(variant.model, reward, generator), variant.window(generator))
    return variant


if __name__ == "__main__":
    main()
