"""What a run of the demo leaves behind: a table, two pictures and a JSON file."""

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

from jagg_fx.demo.train import HELD_OUT_SAMPLES, Run, Variant
from jagg_fx.models.digits_dit import NUM_CLASSES


def table(run: Run) -> str:
    """One column per variant; before any update there is nothing but compile times to show."""
    exact = run.variants[0]
    rows: list[tuple[str, list[str]]] = [
        ("backward passes per update", [str(v.passes) for v in run.variants]),
        ("compile, seconds", [f"{v.compile_seconds:.1f}" for v in run.variants]),
        ("forward, median seconds", [_seconds(v, exact, "forward") for v in run.variants]),
        ("backward, median seconds", [_seconds(v, exact, "backward") for v in run.variants]),
        ("update, median seconds", [_seconds(v, exact, "update") for v in run.variants]),
        ("peak memory of an update, MiB", [f"{v.peak_mib:.0f}" for v in run.variants]),
        ("gradient cosine to exact: start, middle, end", [_list(v.cosines, "{:.3f}") for v in run.variants]),
        ("gradient relative error: start, middle, end", [_list(v.errors, "{:.1e}") for v in run.variants]),
        (
            f"reward of {HELD_OUT_SAMPLES} fresh samples (before: {run.reward_before:.3f})",
            [f"{v.final_reward:.3f}" for v in run.variants],
        ),
        (
            f"held-out accuracy (before: {run.quality_before.accuracy:.3f})",
            [f"{v.quality.accuracy:.3f}" if v.quality else "-" for v in run.variants],
        ),
        (
            f"feature distance to real digits (before: {run.quality_before.distance:.1f})",
            [f"{v.quality.distance:.1f}" if v.quality else "-" for v in run.variants],
        ),
    ]
    text = tabulate(
        [(name, *cells) for name, cells in rows],
        headers=["", *(variant.name for variant in run.variants)],
        tablefmt="github",
        disable_numparse=True,
    )
    return f"{text}\n\n{caption(run)}"


def caption(run: Run) -> str:
    settings = run.settings
    done = len(run.variants[-1].rewards)
    lines = [
        f"{done} of {settings.updates} updates, {settings.trained_steps} of {settings.steps} steps trained, "
        f"{settings.groups} prompts x {settings.group_size} samples, seed {settings.seed}; in brackets the ratio to exact."
    ]
    for variant in run.variants:
        plan = getattr(variant.replay, "plan", None)
        if variant.measures and plan is not None:
            lines.append(
                f"{variant.name}: placed by the first backward at steps {', '.join(map(str, plan.knots))}, with a predicted "
                f"relative error of {plan.predicted_error:.2f}; its compile time includes that measurement."
            )
    if settings.quick:
        lines.append(
            "Quick form: graphs are interpreted (lowering='eager'), so seconds say little about compiled runs."
        )
    if run.spread:
        finals = [run.variants[0].final_reward, *run.spread]
        lines.append(
            f"Final reward of the exact run under {len(finals)} seeds: {', '.join(f'{r:.3f}' for r in finals)} "
            f"(from {min(finals):.3f} to {max(finals):.3f})."
        )
    return "\n".join(lines)


def save(run: Run, directory: Path) -> list[Path]:
    """Write the pictures and the numbers; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / "demo.json"]
    files[0].write_text(json.dumps(numbers(run), indent=1) + "\n")
    if run.variants[-1].rewards:
        files += [_reward_picture(run, directory / "reward.png"), _sample_picture(run, directory / "samples.png")]
    return files


def _update_seconds(variant: Variant) -> list[float]:
    parts = [variant.clock.seconds.get(name, []) for name in ("rollout", "forward", "backward", "optimizer")]
    return [sum(times) for times in zip(*parts, strict=False)]


def _median(variant: Variant, name: str) -> float:
    times = _update_seconds(variant) if name == "update" else variant.clock.seconds.get(name, [])
    return float(np.median(times)) if times else float("nan")


def _seconds(variant: Variant, exact: Variant, name: str) -> str:
    mine, theirs = _median(variant, name), _median(exact, name)
    return f"{mine:.3f}" if variant is exact else f"{mine:.3f} ({theirs / mine:.2f}x)"


def _list(values: list[float], form: str) -> str:
    return ", ".join(form.format(value) for value in values) or "-"


def numbers(run: Run) -> dict[str, Any]:
    """What the table and the pictures show."""
    return {
        "settings": dataclasses.asdict(run.settings),
        "torch": torch.__version__,
        "machine": {
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.is_available(),
        },
        "before": {"reward": run.reward_before, **dataclasses.asdict(run.quality_before)},
        "exact_final_rewards_of_further_seeds": run.spread,
        "variants": [
            {
                "name": variant.name,
                "backward_passes": variant.passes,
                "compile_seconds": variant.compile_seconds,
                "peak_mib": variant.peak_mib,
                "seconds": variant.clock.seconds,
                "median_seconds": {name: _median(variant, name) for name in ("forward", "backward", "update")},
                "rewards": variant.rewards,
                "final_reward": variant.final_reward,
                "gradient_cosines": variant.cosines,
                "gradient_relative_errors": variant.errors,
                "quality": dataclasses.asdict(variant.quality) if variant.quality else None,
            }
            for variant in run.variants
        ],
    }


def _reward_picture(run: Run, path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    by_update, by_second = figure.subplots(1, 2, sharey=True)
    for variant in run.variants:
        seconds = np.cumsum(_update_seconds(variant))
        rewards = variant.rewards[: len(seconds)]
        by_update.plot(range(1, len(rewards) + 1), rewards, label=variant.name)
        by_second.plot(seconds, rewards, label=variant.name)
    by_update.set(xlabel="update", ylabel="mean reward of the update's rollouts", title="reward against updates")
    by_second.set(
        xlabel="seconds of training (rollout and update, without compilation)", title="reward against seconds"
    )
    for axes in (by_update, by_second):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    return path


def _sample_picture(run: Run, path: Path) -> Path:
    from matplotlib.figure import Figure

    rows: list[tuple[str, Tensor]] = [("before", run.before[0])]
    rows += [(variant.name, variant.samples) for variant in run.variants if variant.samples is not None]
    figure = Figure(figsize=(10, 0.62 * len(rows) + 0.4), layout="constrained")
    grid = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axes, (name, samples) in zip(grid, rows, strict=True):
        first = samples[: 2 * NUM_CLASSES, 0].clamp(-1, 1).numpy()  # two samples of each class
        order = [row * NUM_CLASSES + label for label in range(NUM_CLASSES) for row in range(2)]
        axes.imshow(np.hstack([np.pad(first[i], 1, constant_values=-1) for i in order]), cmap="gray", vmin=-1, vmax=1)
        axes.set(xticks=[], yticks=[], ylabel=name)
        axes.yaxis.label.set(rotation=0, ha="right", va="center")
    figure.suptitle(f"two samples of each digit, same noise ({HELD_OUT_SAMPLES} are scored)")
    figure.savefig(path, dpi=120)
    return path
