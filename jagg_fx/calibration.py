"""Place knots by what one run measured."""

import logging
from collections.abc import Sequence
from typing import Protocol

from jagg_fx.budget import Measurements
from jagg_fx.distributed import from_rank_zero
from jagg_fx.plan import Budget, Plan, Rule

log = logging.getLogger(__name__)


class MeasuredStream(Protocol):
    """A stream of steps that ran under `plan` while its backward was measured."""

    plan: Plan

    @property
    def is_useful(self) -> bool:
        """Whether a backward came by, and its numbers are finite and not all zero (as where all rewards are alike)."""
        ...

    def measurements(self) -> Measurements:
        """Call when `is_useful`."""
        ...


def place_by_measurements(
    call: str, budget: Budget, rule: Rule, streams: Sequence[MeasuredStream]
) -> tuple[Plan, ...] | None:
    """The streams' plans by their measurements, the same on every rank (rank 0's); None, with a warning, if there are none."""
    plans = None
    if any(stream.is_useful for stream in streams):
        plans = tuple(
            budget.within(stream.plan.num_steps, len(streams)).place_measured(stream.measurements(), rule)
            if stream.is_useful
            else stream.plan  # no gradient reached this stream: it keeps even knots
            for stream in streams
        )
    plans = from_rank_zero(plans)
    if plans is None:
        log.warning(
            "%s could not place its knots: no backward followed the run that measured, or its gradients were zero or not finite. "
            "The next run with gradients measures again.",
            call,
        )
    else:
        log.info("knots of %s: %s", call, ", ".join(str(plan.knots) for plan in plans))
    return plans
