"""Samplers of rectified-flow models (and DDIM) as the public RL trainers write them, a rollout, and its replay.

Notation: `s` is the noise level (sigma) of the current state `x`, `s' < s` that of the next one, `dt = s' - s < 0`,
`v` the velocity, `a` or `eta` the noise level of the sampler, `D` the elements per sample. Every stochastic step is
Gaussian, `x' ~ N(mean, S^2)` with a mean that is affine in `v`; log-probs are the MEAN over the `D` elements, as in all
the trainers below. `tests/test_samplers.py` checks the formulas against each other and by finite differences.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Velocity = Callable[..., Tensor]


class Sampler(Protocol):
    """One step of a sampler."""

    def step(self, v: Tensor, x: Tensor, s: Tensor, s_next: Tensor, s_max: Tensor) -> tuple[Tensor, Tensor]:
        """Mean `[B, *]` and standard deviation (shaped as `s`) of the next state.

        Args:
            v, x: velocity and state `[B, *]`.
            s, s_next: noise levels of this state and the next, in [0, 1]: `[]`, or `[B, 1, ...]` for every sample its own.
            s_max: the level that stands in for `s = 1` where a formula divides by `1 - s` (the schedule's second level).
        """
        ...

    def log_prob(self, x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Log-probability `[B]` of the next state, averaged over its elements."""
        ...


def gaussian_log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """`-(x' - mean)^2 / (2 S^2) - log S - log sqrt(2 pi)`, averaged over all dimensions but the first: `[B]`."""
    density = -(x_next - mean).square() / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(1)


@dataclass(frozen=True)
class FlowSDE:
    """The SDE of Flow-GRPO (arXiv 2505.05470; repository yifan123/flow_grpo, sd3_sde_with_logprob).

    `std = a sqrt(s / (1 - s))`, `mean = x (1 + std^2 / (2 s) dt) + v (1 + std^2 (1 - s) / (2 s)) dt`,
    `S = std sqrt(-dt)`; in `std` alone, `s = 1` is replaced by the schedule's second level.
    """

    noise_level: float = 0.7

    def step(self, v: Tensor, x: Tensor, s: Tensor, s_next: Tensor, s_max: Tensor) -> tuple[Tensor, Tensor]:
        dt = s_next - s
        std = self.noise_level * torch.sqrt(s / (1 - torch.where(s == 1, s_max, s)))
        mean = x * (1 + std**2 / (2 * s) * dt) + v * (1 + std**2 * (1 - s) / (2 * s)) * dt
        return mean, std * torch.sqrt(-dt)

    def log_prob(self, x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return gaussian_log_prob(x_next, mean, std)


@dataclass(frozen=True)
class DanceSDE:
    """The SDE of DanceGRPO (arXiv 2505.07818; repository XueZeyue/DanceGRPO, flux_step).

    `x0 = x - s v`, `score = -(x - (1 - s) x0) / s^2`, `mean = x + dt v - (eta^2 / 2) score dt`, `S = eta sqrt(-dt)`.
    """

    eta: float = 0.3

    def step(self, v: Tensor, x: Tensor, s: Tensor, s_next: Tensor, s_max: Tensor) -> tuple[Tensor, Tensor]:
        dt = s_next - s
        x0 = x - s * v
        score = -(x - (1 - s) * x0) / s**2
        return x + dt * v - 0.5 * self.eta**2 * score * dt, self.eta * torch.sqrt(-dt)

    def log_prob(self, x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return gaussian_log_prob(x_next, mean, std)


@dataclass(frozen=True)
class CPS:
    """Coefficients-preserving sampling (arXiv 2509.05952; flow_grpo's sde_type="cps").

    `S = s' sin(a pi / 2)`, `x0 = x - s v`, `x1 = x + (1 - s) v`, `mean = (1 - s') x0 + sqrt(s'^2 - S^2) x1`; its
    log-prob is `-(x' - mean)^2` without the normaliser.
    """

    noise_level: float = 0.8

    def step(self, v: Tensor, x: Tensor, s: Tensor, s_next: Tensor, s_max: Tensor) -> tuple[Tensor, Tensor]:
        std = s_next * math.sin(self.noise_level * math.pi / 2)
        x0, x1 = x - s * v, x + (1 - s) * v
        return (1 - s_next) * x0 + torch.sqrt(s_next**2 - std**2) * x1, std

    def log_prob(self, x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return -(x_next - mean).square().flatten(1).mean(1)


@dataclass(frozen=True)
class Euler:
    """The deterministic sampler of rectified flow (arXiv 2209.03003): `mean = x + v dt`, `S = 0`. It has no log-prob."""

    def step(self, v: Tensor, x: Tensor, s: Tensor, s_next: Tensor, s_max: Tensor) -> tuple[Tensor, Tensor]:
        return x + v * (s_next - s), torch.zeros_like(s)

    def log_prob(self, x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        raise NotImplementedError("Euler steps are deterministic; use FlowSDE, DanceSDE or CPS for log-probs.")


@functools.cache
def _cumulative_alphas() -> Tensor:
    """Stable Diffusion's `abar_t` `[1000]`: betas from .00085 to .012, evenly spaced in their square roots."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return (1 - betas).cumprod(0)


@dataclass(frozen=True)
class DDIM:
    """DDIM with noise (arXiv 2010.02502, eq. 12 and 16) for epsilon-prediction, as DDPO uses it (kvablack/ddpo-pytorch).

    `S = eta sqrt((1 - a') / (1 - a) (1 - a / a'))`, `x0 = (x - sqrt(1 - a) e) / sqrt(a)`, `mean = sqrt(a') x0 + sqrt(1 - a' -
    S^2) e`, where `a` and `a'` are Stable Diffusion's cumulative alphas at the timesteps `1000 s` and `1000 s'`, and the
    "velocity" is `e`.
    """

    eta: float = 1.0

    def step(self, v: Tensor, x: Tensor, s: Tensor, s_next: Tensor, s_max: Tensor) -> tuple[Tensor, Tensor]:
        alphas = _cumulative_alphas().to(x)
        timesteps = (1000 * torch.stack([s, s_next])).round().long().clamp(max=999)
        a, a_next = alphas.gather(0, timesteps.flatten()).view_as(timesteps)
        std = self.eta * ((1 - a_next) / (1 - a) * (1 - a / a_next)).sqrt()
        x0 = (x - (1 - a).sqrt() * v) / a.sqrt()
        return a_next.sqrt() * x0 + (1 - a_next - std.square()).sqrt() * v, std

    def log_prob(self, x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return gaussian_log_prob(x_next, mean, std)


def schedule(num_steps: int, shift: float = 1.0) -> Tensor:
    """Noise levels `[num_steps + 1]` from 1 to 0, `shift s / (1 + (shift - 1) s)` of equal steps (SD3, arXiv 2403.03206)."""
    s = torch.linspace(1, 0, num_steps + 1)
    return shift * s / (1 + (shift - 1) * s)


def gains(sampler: Sampler, sigmas: Tensor) -> Tensor:
    """`|c_i / S_i|` of each step `[N]`, where the step's mean is `c_i v + ...` and its standard deviation `S_i`.

    On-policy, the gradient of a step's log-prob with respect to its velocity is `c_i / S_i` times standard normal noise.

    Args:
        sampler: a stochastic sampler (Euler's steps have no log-prob, and no finite gain).
        sigmas: noise levels `[N + 1]`.
    """
    zero, one = torch.zeros(1), torch.ones(1)
    found = []
    for i in range(len(sigmas) - 1):
        levels = (sigmas[i], sigmas[i + 1], sigmas[1])
        base, std = sampler.step(zero, zero, *levels)
        found.append(((sampler.step(one, zero, *levels)[0] - base) / std).abs().squeeze())
    return torch.stack(found)


class Rollout(NamedTuple):
    """States `[N + 1, B, *]` from noise to image, and the log-probs `[B, N]` of their steps (zero for Euler)."""

    latents: Tensor
    log_probs: Tensor


@torch.no_grad()
def rollout(
    denoiser: Velocity,
    sampler: Sampler,
    noise: Tensor,
    sigmas: Tensor,
    *conditions: Tensor,
    generator: torch.Generator | None = None,
) -> Rollout:
    """Sample from noise `[B, *]` along `sigmas` `[N + 1]`, calling `denoiser(x, t [B], *conditions)` once per step."""
    latents, log_probs = [noise], []
    for i in range(len(sigmas) - 1):
        x = latents[-1]
        v = denoiser(x, sigmas[i].expand(len(x)), *conditions)
        mean, std = sampler.step(v, x, sigmas[i], sigmas[i + 1], sigmas[1])
        x_next = mean + std * torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        latents.append(x_next)
        # The last Flow-SDE and Dance-SDE steps have no meaning as log-probs for some schedules; trainers drop them.
        deterministic = isinstance(sampler, Euler)
        log_probs.append(x.new_zeros(len(x)) if deterministic else sampler.log_prob(x_next, mean, std))
    return Rollout(torch.stack(latents), torch.stack(log_probs, dim=1))


class Replay(NamedTuple):
    """Log-probs `[B, S]`, step means `[B, S, *]` and standard deviations `[S]` of replayed steps."""

    log_probs: Tensor
    means: Tensor
    stds: Tensor


def replay(denoiser: Velocity, sampler: Sampler, latents: Tensor, sigmas: Tensor, *conditions: Tensor) -> Replay:
    """Recompute the steps of a rollout under the current weights; what Flow-GRPO and its kin differentiate.

    Args:
        denoiser: called as `denoiser(x, t [B], *conditions)` once per step.
        sampler: the sampler of the rollout.
        latents: stored states `[S + 1, B, *]`; no gradient flows from step to step.
        sigmas: noise levels `[S + 1]` of the states.
        conditions: what the denoiser takes besides state and time, the same at every step.
    """
    log_probs, means, stds = [], [], []
    for i in range(len(sigmas) - 1):
        v = denoiser(latents[i], sigmas[i].expand(latents.shape[1]), *conditions)
        mean, std = sampler.step(v, latents[i], sigmas[i], sigmas[i + 1], sigmas[1])
        log_probs.append(sampler.log_prob(latents[i + 1], mean, std))
        means.append(mean)
        stds.append(std)
    return Replay(torch.stack(log_probs, dim=1), torch.stack(means, dim=1), torch.stack(stds))
