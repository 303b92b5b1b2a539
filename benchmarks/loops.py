"""Loops with a backward per step: what `wrap` and the rollout's velocities save, and what they cost.

    python -m benchmarks.loops [training] [capture] [memory] [values]

training  Flow-GRPO's loop (a backward per step, a rollout per update) on the digits DiT: exact, `wrap`, and `wrap` with the
          rollout's velocities, an update of each in turn; final rewards beside three seeds of the exact loop.
capture   update time of `transform(capture="denoiser")` against whole capture, on a function that both can take.
memory    peak memory of an update, for the loop as it is and wrapped.
values    how far velocities of an older rollout are off after some updates, as they are and with `extrapolate=True`.

Prints tables and writes the numbers as JSON.
"""

import argparse
import functools
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import jagg_fx
from jagg_fx.demo import measure
from jagg_fx.demo.task import DigitsTask, prompts
from jagg_fx.models.digits_dit import IMAGE_SIZE, NUM_CLASSES, load_digits_dit
from jagg_fx.models.grpo import group_advantages, grpo_loss
from jagg_fx.models.samplers import FlowSDE, replay, rollout, schedule

SAMPLER, LEARNING_RATE, STEPS, GROUP_SIZE = FlowSDE(0.7), 3e-4, 10, 12
TRAINED = STEPS - 1
SIGMAS = schedule(STEPS)
PARTS = ("training", "capture", "memory", "values")


@dataclass(frozen=True)
class Batch:
    """A rollout: states `[N + 1, B, *]`, log-probs `[B, N]`, the denoiser's velocities `[N, B, *]`, labels, advantages `[B]`."""

    latents: Tensor
    log_probs: Tensor
    velocities: Tensor
    labels: Tensor
    advantages: Tensor


def sample(
    denoiser: nn.Module, labels: Tensor, reward: Callable[[Tensor, Tensor], Tensor], generator: torch.Generator
) -> Batch:
    """A rollout, with advantages by `reward(images, labels)`."""
    velocities: list[Tensor] = []

    def keep(*args: Tensor) -> Tensor:
        velocities.append(denoiser(*args))
        return velocities[-1]

    noise = torch.randn(len(labels), 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    latents, log_probs = rollout(keep, SAMPLER, noise, SIGMAS, labels, generator=generator)
    advantages = group_advantages(reward(latents[-1], labels), GROUP_SIZE)
    return Batch(latents, log_probs, torch.stack(velocities[:TRAINED]), labels, advantages)


def train_on(denoiser: nn.Module, batch: Batch) -> None:
    """The loop: a forward and a backward per step."""
    for j in range(TRAINED):
        x = batch.latents[j]
        v = denoiser(x, SIGMAS[j].expand(len(x)), batch.labels)
        mean, std = SAMPLER.step(v, x, SIGMAS[j], SIGMAS[j + 1], SIGMAS[1])
        log_prob = SAMPLER.log_prob(batch.latents[j + 1], mean, std)
        loss = grpo_loss(log_prob[:, None], batch.log_probs[:, j : j + 1], batch.advantages)
        (loss / TRAINED).backward()


@dataclass
class Variant:
    """One run of the loop, and what was measured."""

    name: str
    denoiser: nn.Module
    reuses: bool = False
    rollouts: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    reward: float = float("nan")

    def step(self, task: DigitsTask, groups: int, generator: torch.Generator, optimizer: torch.optim.Optimizer) -> None:
        began = time.perf_counter()
        batch = sample(self.denoiser, prompts(groups, GROUP_SIZE, generator), task.reward, generator)
        sampled = time.perf_counter()
        if self.reuses:
            with self.denoiser.reuse(velocities=batch.velocities):  # type: ignore[operator]
                train_on(self.denoiser, batch)
        else:
            train_on(self.denoiser, batch)
        torch.nn.utils.clip_grad_norm_(self.denoiser.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.rollouts.append(sampled - began)
        self.updates.append(time.perf_counter() - sampled)


def variants() -> list[Variant]:
    wrap = functools.partial(jagg_fx.wrap, num_steps=TRAINED)
    return [
        Variant("exact", load_digits_dit()),
        Variant("wrap, W=4", wrap(load_digits_dit(), W=4)),
        Variant("wrap, knots=4", wrap(load_digits_dit(), knots=4)),
        Variant("wrap, W=4, velocities", wrap(load_digits_dit(), W=4), reuses=True),
        Variant("wrap, knots=4, velocities", wrap(load_digits_dit(), knots=4), reuses=True),
    ]


def final_reward(model: nn.Module, task: DigitsTask) -> float:
    generator = torch.Generator().manual_seed(2000)
    labels = torch.arange(NUM_CLASSES).repeat(40)
    noise = torch.randn(len(labels), 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    images = rollout(model, SAMPLER, noise, SIGMAS, labels, generator=generator).latents[-1]
    return float(task.reward(images, labels).mean())


def run_training(updates: int, groups: int, seeds: int) -> dict[str, Any]:
    task, runs = DigitsTask(), variants()
    others = [Variant(f"exact, seed {seed}", load_digits_dit()) for seed in range(1, seeds)]
    seeded = [(run, 0) for run in runs] + [(run, seed) for seed, run in enumerate(others, 1)]
    generators = [torch.Generator().manual_seed(seed) for _, seed in seeded]
    optimizers = [torch.optim.AdamW(run.denoiser.parameters(), lr=LEARNING_RATE) for run, _ in seeded]
    before = final_reward(runs[0].denoiser, task)
    with tqdm(total=updates * len(seeded), unit="update") as bar:
        for update in range(updates):
            for (run, _), generator, optimizer in zip(seeded, generators, optimizers, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = LEARNING_RATE * (1 - update / updates)
                run.step(task, groups, generator, optimizer)
                bar.update()
    for run, _ in seeded:
        run.reward = final_reward(run.denoiser, task)
    rows = []
    exact = runs[0]
    for run in runs:
        first = 1 if "knots" in run.name else 0  # which measures
        seconds = statistics.median(run.updates[first:])
        both = statistics.median(a + b for a, b in zip(run.rollouts[first:], run.updates[first:], strict=True))
        ratio, whole = (
            statistics.median(own / base for own, base in zip(total(run)[first:], total(exact)[first:], strict=True))
            for total in (lambda r: r.updates, lambda r: [a + b for a, b in zip(r.rollouts, r.updates, strict=True)])
        )
        rows.append([run.name, f"{seconds:.3f}", f"{ratio:.2f}", f"{both:.3f}", f"{whole:.2f}", f"{run.reward:.3f}"])
    headers = ["", "update, s", "to exact", "with rollout, s", "to exact", f"final reward (before: {before:.3f})"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    spread = [exact.reward, *(run.reward for run in others)]
    print(
        f"\n{updates} updates of {groups} x {GROUP_SIZE} samples, {TRAINED} of {STEPS} steps trained, a backward per step."
    )
    print(f"Final reward of the exact loop under {seeds} seeds: {', '.join(f'{r:.3f}' for r in spread)}.")
    plans = {run.name: run.denoiser.plans[0].knots for run in runs[1:]}  # type: ignore[index,union-attr]
    print("; ".join(f"{name}: knots {', '.join(map(str, knots))}" for name, knots in plans.items()))
    return {
        "rows": [
            dict(zip(["name", "update", "ratio", "with_rollout", "ratio_with_rollout", "reward"], row, strict=True))
            for row in rows
        ],
        "updates": {run.name: run.updates for run, _ in seeded},
        "exact_rewards": spread,
        "reward_before": before,
    }


def run_capture(repeats: int, groups: int, lowering: str) -> dict[str, Any]:
    """Forward and backward of one replay function, captured whole and by its denoiser, in turn."""
    model = load_digits_dit()
    generator = torch.Generator().manual_seed(0)
    batch = sample(model, prompts(groups, GROUP_SIZE, generator), DigitsTask().reward, generator)

    def log_probs(latents: Tensor, sigmas: Tensor, labels: Tensor) -> Tensor:
        return replay(model, SAMPLER, latents, sigmas, labels).log_probs

    runs = {
        capture: jagg_fx.transform(log_probs, capture=capture, lowering=lowering) for capture in ("whole", "denoiser")
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}

    def update(fast: Callable[..., Tensor]) -> float:
        began = time.perf_counter()
        values = fast(batch.latents[: TRAINED + 1], SIGMAS[: TRAINED + 1], batch.labels)
        grpo_loss(values, batch.log_probs[:, :TRAINED], batch.advantages).backward()
        return time.perf_counter() - began

    for fast in runs.values():
        for _ in range(2):
            update(fast)
    for _ in tqdm(range(repeats), unit="pair"):
        for name, fast in runs.items():
            seconds[name].append(update(fast))
    ratio = statistics.median(b / a for a, b in zip(seconds["whole"], seconds["denoiser"], strict=True))
    rows = [[name, f"{statistics.median(values):.3f}"] for name, values in seconds.items()]
    print(tabulate(rows, headers=["capture", "forward and backward, s"], tablefmt="github", disable_numparse=True))
    print(
        f"\nMedians of {repeats} pairs in turn; ratio denoiser : whole {ratio:.2f} (median of the pairs), lowering={lowering}."
    )
    return {"seconds": seconds, "ratio": ratio}


def run_memory(groups: int) -> dict[str, Any]:
    task = DigitsTask()
    made: dict[str, Callable[[nn.Module], nn.Module]] = {
        "exact": lambda model: model,
        "W=4": functools.partial(jagg_fx.wrap, num_steps=TRAINED, W=4, cos_threshold=None),
        "knots=(0, 5, 7, 8)": functools.partial(
            jagg_fx.wrap, num_steps=TRAINED, knots=(0, 5, 7, 8), cos_threshold=None
        ),
        "W=4, every segment exact": functools.partial(jagg_fx.wrap, num_steps=TRAINED, W=4, cos_threshold=1.0),
        "W=4, shuffled=True": functools.partial(
            jagg_fx.wrap, num_steps=TRAINED, W=4, cos_threshold=None, shuffled=True
        ),
    }
    peaks: dict[str, float] = {}
    for name, make in tqdm(made.items(), unit="variant"):
        model = load_digits_dit()
        generator = torch.Generator().manual_seed(0)
        batch = sample(model, prompts(groups, GROUP_SIZE, generator), task.reward, generator)
        peaks[name] = measure.peak_memory(functools.partial(train_on, make(model), batch))
    base = peaks["exact"]
    rows = [[name, f"{mib:.0f}", f"{mib / base:.2f}"] for name, mib in peaks.items()]
    print(
        tabulate(rows, headers=["loop", "peak of an update, MiB", "to exact"], tablefmt="github", disable_numparse=True)
    )
    return {"peak_mib": peaks}


def run_values(groups: int, ages: tuple[int, ...] = (1, 2, 4)) -> dict[str, Any]:
    """Relative errors of intermediate velocities and of the gradient, with a rollout that is some updates old."""
    task, rows = DigitsTask(), []
    for age in tqdm(ages, unit="age"):
        model = load_digits_dit()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        generator = torch.Generator().manual_seed(0)
        old = sample(model, prompts(groups, GROUP_SIZE, generator), task.reward, generator)
        for _ in range(age):
            train_on(model, old)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        parameters = list(model.parameters())

        def gradient(denoiser: nn.Module, old: Batch = old, parameters: Any = parameters) -> tuple[Tensor, Tensor]:
            values: list[Tensor] = []

            def keep(*args: Tensor) -> Tensor:
                values.append(denoiser(*args))
                return values[-1]

            for p in parameters:
                p.grad = None
            train_on(keep, old)  # type: ignore[arg-type]
            return torch.stack([v.detach() for v in values]), measure.flat_gradient(parameters)

        exact_values, exact = gradient(model)
        wrapped = jagg_fx.wrap(model, num_steps=TRAINED, W=4, cos_threshold=None)
        row = [str(age)]
        _, fresh = gradient(wrapped)
        for options in ({"tolerance": float("inf")}, {"extrapolate": True}):
            with wrapped.reuse(velocities=old.velocities, **options):  # type: ignore[arg-type]
                values, own = gradient(wrapped)
            middle = list(wrapped.plans[0].intermediate)
            off = (values[middle] - exact_values[middle]).norm() / exact_values[middle].norm()
            row += [f"{off:.1e}", f"{measure.relative_error(own, exact):.2f}"]
        rows.append([*row, f"{measure.relative_error(fresh, exact):.2f}"])
    headers = [
        "updates since the rollout",
        "velocities, as they are",
        "gradient",
        "velocities, extrapolate=True",
        "gradient",
        "gradient, fresh velocities",
    ]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    print("\nRelative errors: of the intermediate velocities, and of the gradient to the exact one; W=4.")
    return {"headers": headers, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"which of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--updates", type=int, default=60, help="updates of each variant (default 60)")
    parser.add_argument(
        "--groups", type=int, default=8, help=f"prompts per update, {GROUP_SIZE} samples each (default 8)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the exact loop (default 3)")
    parser.add_argument("--quick", action="store_true", help="3 updates, 2 prompts, no compiler")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/loops.json"), help="where the numbers go")
    args = parser.parse_args()
    if unknown := sorted(set(args.parts) - set(PARTS)):
        parser.error(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    updates, groups = (3, 2) if args.quick else (args.updates, args.groups)
    torch.manual_seed(0)
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "training": lambda: run_training(updates, groups, args.seeds),
        "capture": lambda: run_capture(4 if args.quick else 30, groups, "eager" if args.quick else "inductor"),
        "memory": lambda: run_memory(groups),
        "values": lambda: run_values(groups, (1,) if args.quick else (1, 2, 4)),
    }
    for part in args.parts or PARTS:
        print(f"\n{part}\n")
        results[part] = parts[part]() | {
            "command": f"python -m benchmarks.loops {shlex.join(sys.argv[1:])}".strip(),
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(results), parse_float=lambda text: round(float(text), 4))
    args.out.write_text(json.dumps(rounded, indent=1) + "\n")


if __name__ == "__main__":
    main()
