"""Rollouts of the trained digits DiT with every step's VJP of every step's cotangent, shared by `fidelity` and `routing`.

16 samples in two groups by Flow-SDE, with the demo's reward and group advantages. On-policy, the cotangent of step i is
`g_i = A gain_i eps_i`: advantage, the sampler's gain `|c_i / S_i|` and the rollout's own noise (checked against autograd).

Every gradient that is compared is a sum of `c_ki J_k^T g_i`, where step k's VJP takes step i's cotangent: the exact one has
c = 1 where k = i and 0 elsewhere, a plan's composites give c through `interpolation.composite` applied to unit vectors, and a
random subset has a diagonal c. So one trajectory needs its N^2 VJPs and their scalar products once (2 GB for a moment at 20
steps), and no error costs another pass.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jagg_fx import interpolation
from jagg_fx.demo.task import DigitsTask, prompts
from jagg_fx.models.digits_dit import IMAGE_SIZE, DigitsDiT
from jagg_fx.models.grpo import group_advantages
from jagg_fx.models.samplers import FlowSDE, gains, replay, rollout, schedule
from jagg_fx.plan import Plan, Rule, Weights, even, paper

GROUPS, GROUP_SIZE = 2, 8
VANISHING = 1e-3  # stands for noise 0, where a log-prob has no meaning
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

    def first(self, N: int) -> "Trajectory":
        """The same rollout with only its first `N` steps replayed."""
        products = self.products[:N, :N, :N, :N].contiguous()
        return Trajectory(self.times[:N], self.gains[:N], self.values[:N], self.cotangents[:N], products)

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
