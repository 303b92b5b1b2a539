"""Which segments are interpolated in one call, and which random step corrects the others' bias.

Tensor functions without host synchronisation; the eager twin calls them and the pass `route_segments` traces them.

Our `jagg_frac` is the share of intermediate steps that were interpolated; as an option it caps that share. (The paper names
the number; its definition is not public.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jagg_fx.errors import OptionError
from jagg_fx.plan import Plan

# By `benchmarks/routing.py`, on the digits DiT: the smallest multiple of .05 such that of the segments that score up to .05
# above it, 90 % have a gradient whose cosine to the exact one is at least .8.
DEFAULT_COS_THRESHOLD = 0.8


@dataclass(frozen=True)
class Guard:
    """When a segment is interpolated.

    Attributes:
        cos_threshold: the least score (cosine between velocities and their interpolation, see `interpolation.agreement`;
            the worst step counts) of a segment that is interpolated. None: no limit. 1: no segment is, not even a perfect one.
        jagg_frac: the largest share of intermediate steps that are interpolated; segments with the best scores come first.
            None: no limit.
    """

    cos_threshold: float | None = DEFAULT_COS_THRESHOLD
    jagg_frac: float | None = None

    @classmethod
    def create(cls, cos_threshold: float | None, jagg_frac: float | None) -> "Guard":
        """Validate the user's arguments. Raises `OptionError`."""
        if cos_threshold is not None and not (_is_number(cos_threshold) and -1 <= cos_threshold <= 1):
            raise OptionError(
                f"jagg_fx.transform(fn, cos_threshold={cos_threshold!r}): a cosine lies in [-1, 1]. Write a number such as "
                f"{DEFAULT_COS_THRESHOLD}, or None to interpolate always."
            )
        if jagg_frac is not None and not (_is_number(jagg_frac) and 0 <= jagg_frac <= 1):
            raise OptionError(
                f"jagg_fx.transform(fn, jagg_frac={jagg_frac!r}): the share of intermediate steps that may be interpolated "
                "lies in [0, 1]. Write a number such as 0.5, or None for no limit."
            )
        return cls(cos_threshold, jagg_frac)

    @property
    def is_closed(self) -> bool:
        """Whether every segment runs exactly."""
        return self.cos_threshold == 1

    @property
    def is_active(self) -> bool:
        """Whether any segment may run exactly."""
        return self.cos_threshold is not None or (self.jagg_frac is not None and self.jagg_frac < 1)


def check_debias(debias: float | None) -> float | None:
    """Validate the user's argument. Raises `OptionError`."""
    if debias is not None and not (_is_number(debias) and 0 < debias <= 1):
        raise OptionError(
            f"jagg_fx.transform(fn, debias={debias!r}): the probability that a segment gets a correction lies in (0, 1]. "
            "Write a number such as 0.5, or None for no correction."
        )
    return debias


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def segment_scores(agreement: Tensor, plan: Plan) -> Tensor:
    """The worst agreement `[S]` within each segment, from that of all intermediate steps `[M]`."""
    sizes = [len(segment.intermediate) for segment in plan.segments]
    return torch.stack([part.amin() for part in agreement.split(sizes)])


def keep_segments(scores: Tensor, plan: Plan, guard: Guard) -> Tensor:
    """Which segments `[S]` (bool) are interpolated: all without a guard; with one, never a segment whose score is NaN."""
    if not guard.is_active:
        return torch.ones_like(scores, dtype=torch.bool)
    if guard.is_closed:
        return torch.zeros_like(scores, dtype=torch.bool)
    keep = ~scores.isnan() if guard.cos_threshold is None else scores >= guard.cos_threshold
    if guard.jagg_frac is not None and guard.jagg_frac < 1:
        sizes = [len(segment.intermediate) for segment in plan.segments]
        allowed = math.floor(guard.jagg_frac * len(plan.intermediate) + 1e-9)
        order = torch.where(keep, scores, torch.full_like(scores, -torch.inf))
        within = []
        for s, size in enumerate(sizes):  # the steps of all better segments, and of this one, must fit
            others = [r for r in range(len(sizes)) if r != s]
            better = [order[r] >= order[s] if r < s else order[r] > order[s] for r in others]
            used = sum((b * sizes[r] for b, r in zip(better, others, strict=True)), torch.zeros_like(order[s]))
            within.append(used + size <= allowed)
        keep = keep & torch.stack(within)
    return keep


@dataclass(frozen=True)
class Correction:
    """The unbiased option: with probability `p` a segment adds one of its steps' own error, divided by the chance of it.

    With `c_i = 1 / (p q_i)` for the chosen step `i` of a segment (chosen with probability `q_i`) and 0 for all others, the
    gradient `sum_k J_k^T g_k + sum_i ((1 - c_i) sum_k w_ik J_k + c_i J_i)^T g_i` has the exact gradient as its mean, because
    `c_i` has mean 1. The weights `q_i` follow the plan's own `step_errors` where it has them, else they are equal.

    Attributes:
        p: the probability.
        chances: `q_i` of the steps of one segment.
    """

    p: float
    chances: tuple[float, ...]

    @classmethod
    def of_segments(cls, plan: Plan, p: float) -> "list[Correction]":
        return [cls(p, _chances(plan, segment.intermediate)) for segment in plan.segments]

    def choose(self, uniform: Tensor) -> Tensor:
        """Index `[]` of the chosen step within the segment, from a number `[]` in [0, 1)."""
        thresholds = [sum(self.chances[: n + 1]) for n in range(len(self.chances) - 1)]
        return sum(((uniform >= x).long() for x in thresholds), torch.zeros_like(uniform, dtype=torch.long))

    def factors(self, fires: Tensor, chosen: Tensor) -> Tensor:
        """`c_i` `[n]` of the segment's steps: 0 but for the chosen one."""
        inverse = [torch.where(chosen == n, 1 / (self.p * chance), 0.0) for n, chance in enumerate(self.chances)]
        return torch.stack(inverse) * fires


def _chances(plan: Plan, steps: Sequence[int]) -> tuple[float, ...]:
    """In proportion to the expected errors, with a tenth spread evenly so that every step can be chosen."""
    even = 1 / len(steps)
    errors = [0.0 if plan.step_errors is None else plan.step_errors[i] for i in steps]
    total = sum(errors)
    if total <= 0:
        return tuple(even for _ in steps)
    return tuple(0.9 * error / total + 0.1 * even for error in errors)


def draw(plan: Plan, device: torch.device) -> Tensor:
    """Two random numbers per segment `[2, S]` in [0, 1): whether it is corrected, and which step is chosen."""
    return torch.rand(2, len(plan.segments), device=device)
