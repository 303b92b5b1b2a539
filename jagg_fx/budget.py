"""Where K knots are worth most: placement by dynamic programming over segments, from measured numbers or the schedule.

The error of step `i` between the knots `a` and `b` is taken to be

    e_i = |g_i| |J_i| sqrt( |v_i - interpolated v_i|^2 / |v_i|^2 + DRIFT^2 |(t_i - t_a)(t_b - t_i)| / max |t|^2 )

the size of what the step adds to the gradient (its cotangent's, times its Jacobian's) and how badly its Jacobian is
interpolated: as badly as its velocity, which stands for it, and a part more that grows with the time between the knots, since
the Jacobian moves where the velocity stands still. Cotangents of different steps are not alike (on-policy they are white
noise), so errors add up as squares, and so do those of samples:

    cost(a, b) = sum over a < i < b of e_i^2          knots = the path 0 -> N-1 of K-1 segments with the least total cost

Both the form and `DRIFT` were found on the digits DiT, where `benchmarks/fidelity.py` shows what they are worth.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jagg_fx import interpolation
from jagg_fx.errors import PlanError

DRIFT = 1.5

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
        """`e_i` for a Jacobian that wanders like a Brownian path: `gain_i sqrt((t_i - t_a)(t_b - t_i) / (t_b - t_a))`."""
        t = self.times

        def bridge(i: int) -> float:
            return abs((t[i] - t[a]) * (t[b] - t[i]) / (t[b] - t[a])) if t[a] != t[b] else 0.0

        return [abs(self.gains[i]) * math.sqrt(bridge(i)) for i in range(a + 1, b)]


@dataclass(frozen=True)
class Measurements:
    """What one exact forward and one backward tell about the steps.

    Attributes:
        times: time of every step `[N, *]`.
        values: velocities `[N, B, *]`, one tensor per differentiable value of the denoiser.
        norms: size of what each step and sample adds to the gradient, `|g_i| |J_i|` `[N, B]`, in any unit.
    """

    times: Tensor
    values: tuple[Tensor, ...]
    norms: Tensor

    def errors(self, a: int, b: int) -> list[float]:
        """`e_i` of the steps between the knots `a` and `b`, root of the sum of squares over samples."""
        if b - a < 2:
            return []
        middle = slice(a + 1, b)
        w = interpolation.knot_weights(self.times[middle], self.times[[a, b]])
        missed, size = torch.zeros_like(self.norms[middle]), torch.zeros_like(self.norms[middle])
        for value in self.values:
            v = value.to(interpolation.working_dtype(value.dtype))
            w_a, w_b = (interpolation.per_sample(w[:, k], v.shape[1:]) for k in range(2))
            missed += interpolation.squared_norms(v[middle] - w_a * v[a] - w_b * v[b])
            size += interpolation.squared_norms(v[middle])
        relative = missed / size.clamp(min=torch.finfo(size.dtype).tiny)
        t = self.times.to(interpolation.working_dtype(self.times.dtype))
        between = ((t[middle] - t[a]) * (t[b] - t[middle])).abs() / t.abs().amax().square().clamp(min=1e-30)
        drift = DRIFT**2 * between.reshape(b - a - 1, -1)
        errors: list[float] = (self.norms[middle].square() * (relative + drift)).sum(1).sqrt().tolist()
        return errors


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
