"""The demo's training loop: three variants of one GRPO run, an update of each in turn."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from jagg_fx import transform
from jagg_fx.demo import measure
from jagg_fx.demo.task import DigitsTask, Quality, prompts
from jagg_fx.models.digits_dit import IMAGE_SIZE, NUM_CLASSES, DigitsDiT, load_digits_dit
from jagg_fx.models.grpo import group_advantages, grpo_loss
from jagg_fx.models.samplers import Euler, FlowSDE, Replay, Rollout, replay, rollout, schedule
from jagg_fx.plan import Rule, paper

SAMPLER = FlowSDE(noise_level=0.7)
LEARNING_RATE = 3e-4
HELD_OUT_SAMPLES = 400


@dataclass(frozen=True)
class Settings:
    """One run of the demo.

    Attributes:
        updates: optimizer steps of every variant.
        steps: sampling steps; all but the last are replayed and trained, as Flow-GRPO does.
        seed: of the prompts, the noise and the task; the same for every variant.
        more_seeds: further runs of the exact variant, to show the spread of its final reward.
        quick: interpret the graphs instead of compiling them.
        groups, group_size: prompts per update and samples per prompt.
    """

    updates: int
    steps: int
    seed: int
    more_seeds: int
    quick: bool
    groups: int
    group_size: int = 12

    @property
    def trained_steps(self) -> int:
        return self.steps - 1

    @property
    def probes(self) -> set[int]:
        """Updates at which gradients are compared: the first, the middle and the last."""
        return {0, self.updates // 2, self.updates - 1}


class Batch(NamedTuple):
    """What one update trains on."""

    rollout: Rollout
    labels: Tensor
    advantages: Tensor
    reward: float


@dataclass
class Variant:
    """One run: its model, how it replays (`measures`: the first call places the knots), and what was measured."""

    name: str
    model: DigitsDiT
    replay: Callable[..., Replay]
    passes: int
    measures: bool = False
    compile_seconds: float = float("nan")
    peak_mib: float = float("nan")
    clock: measure.Clock = field(default_factory=measure.Clock)
    rewards: list[float] = field(default_factory=list)
    final_reward: float = float("nan")
    cosines: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    samples: Tensor | None = None
    quality: Quality | None = None


def exact_replay(model: DigitsDiT, quick: bool) -> Callable[..., Replay]:
    """Plain torch.compile, as good as it gets for a loop: the denoiser is a nested region, compiled once."""

    @torch.compiler.nested_compile_region
    def denoiser(x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        velocity: Tensor = model(x, t, labels)
        return velocity

    def exact(latents: Tensor, sigmas: Tensor, labels: Tensor) -> Replay:
        return replay(denoiser, SAMPLER, latents, sigmas, labels)

    compiled: Callable[..., Replay] = torch.compile(exact, fullgraph=True, backend="aot_eager" if quick else "inductor")
    return compiled


def make_variants(settings: Settings) -> list[Variant]:
    """Exact, the paper's groups of four, and as many knots as are placed by a measurement; each with its own model."""
    lowering = "eager" if settings.quick else "inductor"
    steps = settings.trained_steps
    models = [load_digits_dit() for _ in range(3)]
    functions = [functools.partial(replay, model, SAMPLER) for model in models]
    paper_passes, knots = len(paper(4).place(steps, Rule()).knots), min(4, steps)
    return [
        Variant("exact", models[0], exact_replay(models[0], settings.quick), steps),
        Variant("W=4", models[1], transform(functions[1], W=4, lowering=lowering), paper_passes),
        Variant(
            f"knots={knots}", models[2], transform(functions[2], knots=knots, lowering=lowering), knots, measures=True
        ),
    ]


class Run:
    """State of one demo: the task, the schedule, the variants."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sigmas = schedule(settings.steps)
        self.task = DigitsTask(settings.seed)
        self.variants = make_variants(settings)
        self.spread: list[float] = []  # final rewards of the exact variant under further seeds
        self.before = self._samples(self.variants[0].model)
        self.quality_before = self.task.quality(*self.before)
        self.reward_before = self._reward(self.variants[0].model)

    def compile(self, variant: Variant) -> None:
        """The first forward and backward of a variant, where everything is compiled, and its peak memory afterwards."""
        batch = self._batch(variant.model, self._generator(self.settings.seed))
        began = time.perf_counter()
        if variant.measures:
            self._backward(variant, batch)
        self._backward(variant, batch)
        variant.compile_seconds = time.perf_counter() - began
        variant.peak_mib = measure.peak_memory(lambda: self._backward(variant, batch))

    def train(self, bar: "tqdm[Any]") -> None:
        """All updates, a variant after the other within each, so that all meet the same machine."""
        generators = [self._generator(self.settings.seed) for _ in self.variants]
        optimizers = [torch.optim.AdamW(variant.model.parameters(), lr=LEARNING_RATE) for variant in self.variants]
        for update in range(self.settings.updates):
            for variant, generator, optimizer in zip(self.variants, generators, optimizers, strict=True):
                self._set_learning_rate(optimizer, update)
                self._update(variant, generator, optimizer, probe=update in self.settings.probes)
                bar.update()
            bar.set_postfix({variant.name: f"{variant.rewards[-1]:.2f}" for variant in self.variants})

    def finish(self) -> None:
        """Samples and held-out quality of what was trained."""
        for variant in self.variants:
            variant.samples, labels = self._samples(variant.model)
            variant.quality = self.task.quality(variant.samples, labels)
            variant.final_reward = self._reward(variant.model)

    def train_more_seeds(self, bar: "tqdm[Any]") -> None:
        """The exact variant again under other seeds. It reuses the compiled function and overwrites its model."""
        exact = self.variants[0]
        for offset in range(1, self.settings.more_seeds + 1):
            exact.model.load_state_dict(load_digits_dit().state_dict())
            other = Variant(f"exact, seed {self.settings.seed + offset}", exact.model, exact.replay, exact.passes)
            optimizer = torch.optim.AdamW(exact.model.parameters(), lr=LEARNING_RATE)
            generator = self._generator(self.settings.seed + offset)
            for update in range(self.settings.updates):
                self._set_learning_rate(optimizer, update)
                self._update(other, generator, optimizer, probe=False)
                bar.update()
                bar.set_postfix({other.name: f"{other.rewards[-1]:.2f}"})
            self.spread.append(self._reward(other.model))

    def _set_learning_rate(self, optimizer: torch.optim.Optimizer, update: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - update / self.settings.updates)  # linear to zero

    def _update(
        self, variant: Variant, generator: torch.Generator, optimizer: torch.optim.Optimizer, probe: bool
    ) -> None:
        with variant.clock.measure("rollout"):
            batch = self._batch(variant.model, generator)
        variant.rewards.append(batch.reward)
        if probe:
            self._compare_gradients(variant, batch)
        optimizer.zero_grad(set_to_none=True)
        self._backward(variant, batch, variant.clock)
        with variant.clock.measure("optimizer"):
            torch.nn.utils.clip_grad_norm_(variant.model.parameters(), 1.0)
            optimizer.step()

    def _batch(self, model: DigitsDiT, generator: torch.Generator) -> Batch:
        labels = prompts(self.settings.groups, self.settings.group_size, generator)
        noise = torch.randn(len(labels), 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        result = rollout(model, SAMPLER, noise, self.sigmas, labels, generator=generator)
        rewards = self.task.reward(result.latents[-1], labels)
        return Batch(result, labels, group_advantages(rewards, self.settings.group_size), float(rewards.mean()))

    def _loss(self, replay: Callable[..., Replay], batch: Batch) -> Tensor:
        trained = self.settings.trained_steps
        latents = batch.rollout.latents[: trained + 1]
        log_probs = replay(latents, self.sigmas[: trained + 1], batch.labels).log_probs
        loss: Tensor = grpo_loss(log_probs, batch.rollout.log_probs[:, :trained], batch.advantages)
        return loss

    def _backward(self, variant: Variant, batch: Batch, clock: measure.Clock | None = None) -> None:
        clock = clock or measure.Clock()
        with clock.measure("forward"):
            loss = self._loss(variant.replay, batch)
        with clock.measure("backward"):
            loss.backward()

    def _compare_gradients(self, variant: Variant, batch: Batch) -> None:
        parameters = list(variant.model.parameters())

        def gradient(function: Callable[..., Replay]) -> Tensor:
            variant.model.zero_grad(set_to_none=True)
            self._loss(function, batch).backward()
            return measure.flat_gradient(parameters)

        exact = gradient(functools.partial(replay, variant.model, SAMPLER))
        own = gradient(variant.replay)
        variant.cosines.append(measure.cosine(own, exact))
        variant.errors.append(measure.relative_error(own, exact))

    def _reward(self, model: DigitsDiT) -> float:
        """Mean reward of fresh rollouts, the same prompts and noise for every model."""
        generator = self._generator(self.settings.seed + 2000)
        labels = torch.arange(NUM_CLASSES).repeat(HELD_OUT_SAMPLES // NUM_CLASSES)
        noise = torch.randn(len(labels), 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        images = rollout(model, SAMPLER, noise, self.sigmas, labels, generator=generator).latents[-1]
        return float(self.task.reward(images, labels).mean())

    def _samples(self, model: DigitsDiT) -> tuple[Tensor, Tensor]:
        """Deterministic (Euler) samples of every class in turn, from the same noise for every model."""
        labels = torch.arange(NUM_CLASSES).repeat(HELD_OUT_SAMPLES // NUM_CLASSES)
        noise = torch.randn(
            len(labels), 1, IMAGE_SIZE, IMAGE_SIZE, generator=self._generator(self.settings.seed + 1000)
        )
        return rollout(model, Euler(), noise, self.sigmas, labels).latents[-1], labels

    @staticmethod
    def _generator(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)
