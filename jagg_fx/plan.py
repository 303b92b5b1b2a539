"""Which steps keep their VJP. A plan is a sorted set of knots; every other step lies between two of them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jagg_fx.errors import PlanError


@dataclass(frozen=True)
class Segment:
    """Intermediate steps `a < i < b` whose VJPs are interpolated from those of the knots `a` and `b`."""

    a: int
    b: int

    @property
    def intermediate(self) -> range:
        return range(self.a + 1, self.b)


@dataclass(frozen=True)
class Plan:
    """Which of `num_steps` steps keep their VJP.

    Attributes:
        num_steps: steps of the function.
        knots: sorted indices of the steps whose VJP is kept; the first and the last step are among them.
        groups: first and last step of each group, as the plan was made.
    """

    num_steps: int
    knots: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Pairs of neighbouring knots with at least one intermediate step between them."""
        return tuple(Segment(a, b) for a, b in itertools.pairwise(self.knots) if b - a > 1)

    @property
    def intermediate(self) -> tuple[int, ...]:
        return tuple(i for segment in self.segments for i in segment.intermediate)


def check_group_size(W: object) -> int:
    if isinstance(W, bool) or not isinstance(W, int) or W < 2:
        raise PlanError(
            f"jagg_fx.transform(fn, W={W!r}): W is the number of consecutive steps in a group, an integer of at least 2. "
            "W=4 is the paper's choice; W=2 keeps every step exact."
        )
    return W


def check_knots(knots: Sequence[int]) -> tuple[int, ...]:
    """Validate what can be validated before the number of steps is known."""
    call = f"jagg_fx.transform(fn, knots={knots!r})"
    if isinstance(knots, (str, bytes)) or not isinstance(knots, Sequence) or not knots:
        raise PlanError(f"{call}: knots is a sequence of step indices such as (0, 3, 6, 8).")
    if any(isinstance(k, bool) or not isinstance(k, int) for k in knots):
        raise PlanError(f"{call}: every knot is an integer index of a step.")
    if any(k < 0 for k in knots):
        raise PlanError(f"{call}: knots count from the first step, 0; negative indices are not steps.")
    if len(set(knots)) != len(knots):
        raise PlanError(f"{call}: a knot is named twice.")
    return tuple(sorted(knots))


def paper(num_steps: int, W: int) -> Plan:
    """Groups of `W` consecutive steps, each keeping its first and last step (arXiv 2607.17572, the grouping of JAGG).

    The last group may be shorter: 9 steps at W=4 are the groups 0-3, 4-7 and 8, and the knots 0, 3, 4, 7, 8.
    """
    groups = tuple((first, min(first + W, num_steps) - 1) for first in range(0, num_steps, W))
    return Plan(num_steps, tuple(sorted({step for group in groups for step in group})), groups)


def explicit(num_steps: int, knots: Sequence[int]) -> Plan:
    """The given knots. Raises `PlanError` unless they lie in the range and hold the first and the last step."""
    call = f"jagg_fx.transform(fn, knots={tuple(knots)})"
    if knots[-1] >= num_steps:
        raise PlanError(
            f"{call}: the function has {num_steps} steps, so knots lie in 0..{num_steps - 1}; {knots[-1]} does not."
        )
    missing = {0, num_steps - 1} - set(knots)
    if missing:
        whole = tuple(sorted(set(knots) | missing))
        raise PlanError(
            f"{call}: the function has {num_steps} steps, and the first and the last must be knots (steps outside the "
            f"knots could only be extrapolated). Write knots={whole}."
        )
    return Plan(num_steps, tuple(knots), tuple(itertools.pairwise(knots)) or ((0, 0),))
