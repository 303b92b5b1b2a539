"""Decide in the graph which segments are interpolated: scores from the velocities, thresholds, ranks. Changes nothing yet.

The decision needs no synchronisation in the forward and no further run of the denoiser: every velocity is there already.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from jagg_fx import guard, interpolation
from jagg_fx.guard import Correction, Guard
from jagg_fx.passes.emit import emit
from jagg_fx.passes.find_steps import Step
from jagg_fx.passes.weigh_steps import Weighing
from jagg_fx.plan import Plan

PASS = "score_segments"


@dataclass(frozen=True)
class Decision:
    """Nodes that say what happens to each segment.

    Attributes:
        scores: `[S]`.
        keep: `[S]`, bool: interpolated, not exact.
        is_guarded: whether `keep` can be False.
        choices: with the unbiased option, one per segment.
    """

    scores: fx.Node
    keep: fx.Node
    is_guarded: bool
    choices: "tuple[Choice, ...]"


@dataclass(frozen=True)
class Choice:
    """Nodes of one segment's correction: whether it happens `[]` (bool), which step `[]`, and the factors `c_i` `[n]`."""

    fires: fx.Node
    chosen: fx.Node
    factors: fx.Node


def score_segments(
    steps: Sequence[Step], plan: Plan, weighing: Weighing, rule: Guard, debias: float | None
) -> Decision:
    before = steps[-1].backward
    origin = {"pass": PASS}
    slots = sorted(set.intersection(*(set(step.values) for step in steps)))
    values = [steps[i].values[slot] for slot in slots for i in range(plan.num_steps)]

    def scores(weights: Tensor, *flat: Tensor) -> Tensor:
        if not slots:  # no velocity is known at every step: a guard then keeps all of them exact
            return torch.full((len(plan.segments),), torch.nan, device=weights.device)
        by_slot = [flat[n : n + plan.num_steps] for n in range(0, len(flat), plan.num_steps)]
        middle, at_knots = (
            [torch.stack([slot[i] for i in indices]) for slot in by_slot] for indices in (plan.intermediate, plan.knots)
        )
        return guard.segment_scores(interpolation.agreement(middle, at_knots, weights), plan)

    score = emit(before, scores, (weighing.all, *values), name="scores", origin=origin, tag=None)
    keep = emit(before, lambda s: guard.keep_segments(s, plan, rule), (score,), name="keep", origin=origin, tag=None)
    choices = () if debias is None else _choose(before, plan, keep, steps[-1].cotangents, debias)
    return Decision(score, keep, rule.is_active, choices)


def _choose(before: fx.Node, plan: Plan, keep: fx.Node, cotangents: Sequence[fx.Node], p: float) -> tuple[Choice, ...]:

    def drawn(*cotangents: Tensor) -> Tensor:
        # Numbers that no cotangent reaches could be drawn in the forward and drawn again, differently, in the backward: the
        # partitioner recomputes what it can. This ties them to the backward; for a cotangent that is NaN they do not matter.
        uniform = guard.draw(plan, cotangents[0].device)
        is_nan = torch.stack([cotangent.flatten()[0].isnan() for cotangent in cotangents]).any()
        return torch.where(is_nan, torch.zeros_like(uniform), uniform)

    numbers = emit(before, drawn, cotangents, name="drawn", origin={"pass": PASS})
    corrections = Correction.of_segments(plan, p)
    return tuple(_choice(before, s, plan, corrections[s], numbers, keep) for s in range(len(plan.segments)))


def _choice(before: fx.Node, s: int, plan: Plan, correction: Correction, drawn: fx.Node, keep: fx.Node) -> Choice:
    segment = plan.segments[s]
    origin = {"pass": PASS, "segment": (segment.a, segment.b)}
    name = f"{segment.a}_{segment.b}"

    def fires(drawn: Tensor, keep: Tensor) -> Tensor:
        return (drawn[0, s] < correction.p) & keep[s]

    def chosen(drawn: Tensor) -> Tensor:
        return correction.choose(drawn[1, s])

    when = emit(before, fires, (drawn, keep), name=f"fires_{name}", origin=origin)
    which = emit(before, chosen, (drawn,), name=f"chosen_{name}", origin=origin)
    factors = emit(before, correction.factors, (when, which), name=f"factors_{name}", origin=origin)
    return Choice(when, which, factors)
