"""Where K knots are worth most: placement by dynamic programming over segments, from measured numbers or the schedule.

The error of step `i` between the knots `a` and `b` is taken to be `e_i = |g_i| |v_i - interpolated v_i| / |v_i|`: the
size of the cotangent that reaches it times how badly its velocity, standing for its Jacobian, is interpolated. Cotangents of
different steps are not alike (on-policy they are white noise), so errors add up as squares, and so do those of samples:

    cost(a, b) = sum over a < i < b of e_i^2          knots = the path 0 -> N-1 of K-1 segments with the least total cost
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jagg_fx import interpolation
from jagg_fx.errors import PlanError

# Relative error of the gradient over sqrt(sum e_i^2 / sum |g_i|^2): Jacobians are interpolated less well than velocities.
# The median over the runs of `benchmarks/fidelity.py`, which prints predicted beside measured.
JACOBIAN_OVER_VELOCITY = 1.0

Errors = Callable[[int, int], Sequence[float]]  # e_i of the steps between two knots


@dataclass(frozen=True)
class Schedule:
    """What the sampler's schedule alone tells about the steps, before anything was measured.

    Attributes:
        times: time of every step.
        gains: how strongly a step's log-prob depends on its velocity, `|c_i / S_i|` where the step's mean is `c_i v_i + ...`
            and its standard deviation `S_i`; on-policy the cotangent's size is in proportion to it.
    """

    times: tuple[float, ...]
    gains: tuple[float, ...]

    @classmethod
    def create(cls, times: Sequence[float] | Tensor, gains: Sequence[float] | Tensor) -> "Schedule":
        """From numbers or tensors `[N]`. Raises `PlanError` if they do not match or are not finite."""
        numbers = [tuple(map(float, x.tolist() if isinstance(x, Tensor) else x)) for x in (times, gains)]
        if len(numbers[0]) != len(numbers[1]) or not all(map(math.isfinite, numbers[0] + numbers[1])):
            raise PlanError(
                f"jagg_fx.plan.Schedule.create(times=<{len(numbers[0])} numbers>, gains=<{len(numbers[1])} numbers>): one finite "
                "time and one finite gain per step."
            )
        return cls(*numbers)

    def errors(self, a: int, b: int) -> list[float]:
        """`e_i` with the interpolation error of a velocity of constant curvature, `(t_i - t_a)(t_b - t_i)`."""
        t = self.times
        return [abs(self.gains[i] * (t[i] - t[a]) * (t[b] - t[i])) for i in range(a + 1, b)]


@dataclass(frozen=True)
class Measurements:
    """What one exact forward and one backward tell about the steps.

    Attributes:
        times: time of every step `[N, *]`.
        values: velocities `[N, B, *]`, one tensor per differentiable value of the denoiser.
        norms: size `|g_i|` of each step's cotangents per sample `[N, B]`.
    """

    times: Tensor
    values: tuple[Tensor, ...]
    norms: Tensor

    def errors(self, a: int, b: int) -> list[float]:
        """`e_i` of the steps between the knots `a` and `b`, root of the sum of squares over samples."""
        if b - a < 2:
            return []
        w = interpolation.knot_weights(self.times[a + 1 : b], self.times[[a, b]])
        missed, size = torch.zeros_like(self.norms[a + 1 : b]), torch.zeros_like(self.norms[a + 1 : b])
        for value in self.values:
            v = value.to(interpolation.working_dtype(value.dtype))
            w_a, w_b = (interpolation.per_sample(w[:, k], v.shape[1:]) for k in range(2))
            middle = v[a + 1 : b]
            missed += _squares(middle - w_a * v[a] - w_b * v[b])
            size += _squares(middle)
        relative = (missed / size.clamp(min=torch.finfo(size.dtype).tiny)).sqrt()
        errors: list[float] = (self.norms[a + 1 : b] * relative).square().sum(1).sqrt().tolist()
        return errors


def _squares(x: Tensor) -> Tensor:
    return x.square().reshape(x.shape[0], x.shape[1] if x.dim() > 1 else 1, -1).sum(-1)


def best_knots(num_steps: int, errors: Errors) -> Iterator[tuple[int, ...]]:
    """For K = 2, 3, ..., N the `K` knots, first and last step among them, with the least `sum e_i^2`.

    By dynamic programming over the position of the last knot; O(N^2) for each K.
    """
    cost = {(a, b): sum(e * e for e in errors(a, b)) for b in range(num_steps) for a in range(b)}
    reached: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}  # last knot -> least cost, its knots
    for _ in range(num_steps - 1):
        reached = {
            b: min((total + cost[a, b], (*knots, b)) for a, (total, knots) in reached.items() if a < b)
            for b in range(min(reached) + 1, num_steps)
        }
        yield reached[num_steps - 1][1]
