"""Which steps of one run are interpolated, with which weights: by the values of the steps alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jagg_fx import guard, interpolation
from jagg_fx.config import Config
from jagg_fx.distributed import from_rank_zero, smallest
from jagg_fx.plan import Plan, Weights


@dataclass(frozen=True)
class Decision:
    """What was decided for the intermediate steps of a plan.

    Attributes:
        weights: `w_ik` `[M, K, *]`, see `interpolation.knot_weights`.
        scores: of each segment `[S]`.
        keep: which segments are interpolated `[S]`.
        factors: `c_i` of each intermediate step: 0 where it is interpolated, 1 where it is exact, and the factor of the unbiased
            option (`guard.Correction`) where it was drawn.
    """

    weights: Tensor
    scores: Tensor
    keep: Tensor
    factors: tuple[float, ...]


def decide(
    plan: Plan,
    config: Config,
    times: Mapping[int, Tensor],
    values: Sequence[Mapping[int, Tensor]],
    together: bool = False,
) -> Decision:
    """Decide for the intermediate steps of `plan`; waits for the device.

    Args:
        plan: with at least one segment.
        config: the rule of the weights, the guard and the unbiased option.
        times: time of each step.
        values: value `[B, *]` of each step, one mapping per differentiable value of the denoiser.
        together: whether all ranks must run the same steps (FSDP): a segment is then interpolated where it is on every rank.
    """
    device = values[0][plan.knots[0]].device
    by_index = plan.rule.weights is Weights.INDEX
    t, t_knots = (
        torch.tensor(indices, device=device) if by_index else torch.stack([times[i] for i in indices])
        for indices in (plan.intermediate, plan.knots)
    )
    weights = interpolation.knot_weights(t, t_knots, plan.rule.degree).to(device)
    middle, at_knots = (
        [torch.stack([value[i] for i in indices]) for value in values] for indices in (plan.intermediate, plan.knots)
    )
    scores = guard.segment_scores(interpolation.agreement(middle, at_knots, weights), plan)
    keep = guard.keep_segments(scores, plan, config.guard)
    if together and config.guard.is_active:
        keep = smallest(keep)
    return Decision(weights, scores, keep, _factors(plan, config, keep, together))


def _factors(plan: Plan, config: Config, keep: Tensor, together: bool) -> tuple[float, ...]:
    corrections = [] if config.debias is None else guard.Correction.of_segments(plan, config.debias)
    drawn = guard.draw(plan, keep.device) if corrections else keep
    if corrections and together:
        drawn = from_rank_zero(drawn).to(keep.device)
    factors: list[float] = []
    for s, (segment, is_kept) in enumerate(zip(plan.segments, keep.tolist(), strict=True)):
        if not is_kept:
            factors += [1.0] * len(segment.intermediate)
        elif corrections:
            fires = drawn[0, s] < corrections[s].p
            factors += corrections[s].factors(fires, corrections[s].choose(drawn[1, s])).tolist()
        else:
            factors += [0.0] * len(segment.intermediate)
    return tuple(factors)
