"""Which steps keep their VJP. A placement says how knots are chosen; placed on a number of steps it gives a plan.

    paper(W)     groups of W consecutive steps, each keeping its first and last step (arXiv 2607.17572)
    even(K)      K knots at equal distances
    explicit(..) the knots themselves
    budget(K)    K knots where they are worth most, by measured numbers or by the schedule alone
    [.., ..]     one of these for each stream of calls

A `Plan` is its own placement: a saved one is used as it is.
"""

import dataclasses
import enum
import functools
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from jagg_fx.budget import Errors, Measurements, best_knots
from jagg_fx.budget import Schedule as Schedule
from jagg_fx.errors import NotCalibratedError, OptionError, PlanError

FORMAT = 1


class Weights(enum.StrEnum):
    """How an intermediate step is placed between the knots."""

    TIME = "time"
    INDEX = "index"


@dataclass(frozen=True)
class Rule:
    """How an intermediate step's weights at the knots are computed.

    Attributes:
        weights: by the steps' times or by their position in the loop.
        degree: 1 interpolates linearly between the two nearest knots, 2 quadratically between the three nearest.
    """

    weights: Weights = Weights.TIME
    degree: int = 1


@dataclass(frozen=True)
class Segment:
    """Intermediate steps `a < i < b` between the neighbouring knots `a` and `b` of a stream of steps."""

    a: int
    b: int
    stream: int = 0

    @property
    def intermediate(self) -> range:
        """The steps between the two knots."""
        return range(self.a + 1, self.b)


class Placement(Protocol):
    """A way to choose knots."""

    def place(self, num_steps: int, rule: Rule) -> "Plan":
        """The plan for a function of `num_steps` steps. Raises `PlanError` if there is none."""
        ...


@dataclass(frozen=True)
class Plan:
    """Which of `num_steps` steps keep their VJP, and how the others are interpolated.

    Attributes:
        num_steps: steps of the function.
        knots: sorted indices of the steps whose VJP is kept; the first and the last step are among them.
        groups: first and last step of each group, as the plan was made; groups of placed knots share their ends.
        rule: how weights are computed.
        origin: how the knots were chosen, for people.
        predicted_error: expected relative error of the gradient, where numbers were there to tell it.
        step_errors: expected error of each step's share of the gradient, in one unit for all (0 at knots), or None.
    """

    num_steps: int
    knots: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]
    rule: Rule = Rule()
    origin: str = ""
    predicted_error: float | None = None
    step_errors: tuple[float, ...] | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Pairs of neighbouring knots with at least one intermediate step between them."""
        return tuple(Segment(a, b) for a, b in itertools.pairwise(self.knots) if b - a > 1)

    @property
    def intermediate(self) -> tuple[int, ...]:
        """The steps of all segments, in order."""
        return tuple(i for segment in self.segments for i in segment.intermediate)

    def place(self, num_steps: int, rule: Rule) -> "Plan":
        """The plan itself. Raises `PlanError` if it was made for another number of steps."""
        if num_steps != self.num_steps:
            raise PlanError(
                f"jagg_fx.transform(fn, plan=<{self.origin or 'plan'} of {self.num_steps} steps>): the function has {num_steps} "
                f"steps. Leave plan= out to make a new one, or load the plan that was saved for {num_steps} steps."
            )
        return self

    def to_json(self) -> str:
        """The plan as JSON text; `Plan.from_json` gives an equal plan back."""
        return json.dumps({"jagg_fx_plan": FORMAT} | dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what `to_json` wrote. Raises `PlanError` if it is not that."""
        call = f"jagg_fx.plan.Plan.from_json({text[:60]!r}{'...' if len(text) > 60 else ''})"
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("jagg_fx_plan") != FORMAT:
                raise PlanError(f"{call}: written by another version of jagg_fx. Make the plan again.")
            fields["rule"] = Rule(Weights(fields["rule"]["weights"]), int(fields["rule"]["degree"]))
            if fields["rule"].degree not in (1, 2):
                raise ValueError(f"degree {fields['rule'].degree}")
            fields["groups"] = tuple((int(a), int(b)) for a, b in fields["groups"])
            fields["knots"] = tuple(map(int, fields["knots"]))
            fields["num_steps"], fields["origin"] = int(fields["num_steps"]), str(fields["origin"])
            if fields["predicted_error"] is not None:
                fields["predicted_error"] = float(fields["predicted_error"])
            if fields["step_errors"] is not None:
                fields["step_errors"] = tuple(map(float, fields["step_errors"]))
                if len(fields["step_errors"]) != fields["num_steps"]:
                    raise ValueError(f"{len(fields['step_errors'])} step_errors for {fields['num_steps']} steps")
            plan = cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"{call}: not a saved plan ({type(error).__name__}: {error}).") from error
        _check_cover(plan.num_steps, plan.knots, call)
        return plan


@dataclass(frozen=True)
class Paper:
    """Groups of `W` consecutive steps, each keeping its first and last step; the last group may be shorter.

    9 steps at W=4 are the groups 0-3, 4-7 and 8, and the knots 0, 3, 4, 7, 8 (arXiv 2607.17572).
    """

    W: int

    def place(self, num_steps: int, rule: Rule) -> Plan:
        groups = tuple((first, min(first + self.W, num_steps) - 1) for first in range(0, num_steps, self.W))
        knots = tuple(sorted({step for group in groups for step in group}))
        return Plan(num_steps, knots, groups, rule, f"paper(W={self.W})")


@dataclass(frozen=True)
class Even:
    """`K` knots at equal distances (rounded to steps)."""

    K: int

    def place(self, num_steps: int, rule: Rule) -> Plan:
        check_fits(self.K, num_steps)
        last = num_steps - 1
        knots = tuple(sorted({round(last * k / (self.K - 1)) for k in range(self.K)}))
        return shared_knots(num_steps, knots, rule, f"even(K={self.K})")


@dataclass(frozen=True)
class Explicit:
    """The given knots."""

    knots: tuple[int, ...]

    def place(self, num_steps: int, rule: Rule) -> Plan:
        _check_cover(num_steps, self.knots, f"jagg_fx.transform(fn, knots={self.knots})")
        return shared_knots(num_steps, self.knots, rule, "explicit")


@dataclass(frozen=True)
class Budget:
    """`K` knots placed by what they are worth, or as few as keep the predicted error small.

    Attributes:
        K: number of knots, or None to choose it by `max_rel_error`.
        max_rel_error: largest predicted relative error of the gradient.
        schedule: numbers known beforehand; without them the first backward is measured.
    """

    K: int | None
    max_rel_error: float | None = None
    schedule: Schedule | None = None

    def place(self, num_steps: int, rule: Rule) -> Plan:
        """The plan by the schedule. Raises `NotCalibratedError` without one, `PlanError` if it does not fit."""
        if self.schedule is None:
            raise NotCalibratedError(num_steps, str(self))
        if len(self.schedule.times) != num_steps:
            raise PlanError(
                f"jagg_fx.plan.budget({self.K}, schedule=<{len(self.schedule.times)} steps>): the function has {num_steps} "
                f"steps. Give the times and gains of its {num_steps} steps."
            )
        assert self.K is not None
        check_fits(self.K, num_steps)
        knots = next(knots for knots in best_knots(num_steps, self.schedule.errors) if len(knots) == self.K)
        return _with_errors(shared_knots(num_steps, knots, rule, f"{self}, by the schedule"), self.schedule.errors)

    def place_measured(self, measured: Measurements, rule: Rule) -> Plan:
        """The plan by measured numbers, with its predicted relative error. Raises `PlanError` if `K` does not fit."""
        num_steps = len(measured.times)
        if self.K is not None:
            check_fits(self.K, num_steps)
        if num_steps == 1:
            return replace(shared_knots(1, (0,), rule, f"{self}, measured"), predicted_error=0.0)
        if rule.weights is Weights.INDEX:
            measured = replace(measured, times=torch.arange(num_steps, device=measured.norms.device))
        size = float(measured.norms.square().sum().sqrt())
        errors = functools.cache(measured.errors)  # each number of knots asks for the same segments
        for knots in best_knots(num_steps, errors):
            plan = _with_errors(shared_knots(num_steps, knots, rule, f"{self}, measured"), errors)
            missed = math.hypot(*plan.step_errors or ())
            predicted = missed / size if size else 0.0
            if len(knots) == self.K or (self.max_rel_error is not None and predicted <= self.max_rel_error):
                break
        # With every step a knot the error is 0, so one always fits. The errors are those of linear interpolation.
        return replace(plan, predicted_error=predicted if rule.degree == 1 else None)

    def within(self, num_steps: int, streams: int) -> "Budget":
        """The budget of one of several streams that share the function's steps: a short one may have fewer steps than knots."""
        return self if self.K is None or streams == 1 else replace(self, K=min(self.K, max(2, num_steps)))

    def calibration(self) -> "Calibration":
        """The placement of the call that measures: even knots, so that memory is that of `K` steps and not of all."""
        return Calibration(self.K)

    def __str__(self) -> str:
        return f"budget(K={self.K})" if self.K is not None else f"budget(max_rel_error={self.max_rel_error})"


@dataclass(frozen=True)
class Calibration:
    """Even knots of the measuring call: `K` of them, or half the steps if the number is still to be chosen."""

    K: int | None

    def place(self, num_steps: int, rule: Rule) -> Plan:
        if self.K is not None:
            check_fits(self.K, num_steps)
        if num_steps < 2:
            return shared_knots(num_steps, (0,), rule, "calibration")
        return replace(Even(self.K or max(2, (num_steps + 1) // 2)).place(num_steps, rule), origin="calibration")


@dataclass(frozen=True)
class PerStream:
    """A placement for each stream of calls (see `jagg_fx/streams.py`), in the order in which the function first calls them."""

    placements: tuple[Placement, ...]

    def for_stream(self, stream: int, streams: int) -> Placement:
        """Raises `PlanError` unless there is one for each of so many streams."""
        if streams != len(self.placements):
            raise PlanError(
                f"jagg_fx.transform(fn, plan=[<{len(self.placements)} placements>]): the function has {streams} streams of calls "
                "(one for each denoiser and each call per step, in the order of their first calls). Give a placement for each, "
                "or one for all without a list."
            )
        return self.placements[stream]


@dataclass(frozen=True)
class Calibrated:
    """A budget and the plans that were made by it so far: for each kind of call one plan for each stream.

    No two entries hold the same numbers of steps.
    """

    budget: Budget
    plans: tuple[tuple[Plan, ...], ...] = ()

    def place(self, num_steps: int, stream: int) -> Plan:
        """Raises `NotCalibratedError` if no plan was made for the stream at that number of steps."""
        for plans in self.plans:
            if stream < len(plans) and plans[stream].num_steps == num_steps:
                return plans[stream]
        raise NotCalibratedError(num_steps, str(self.budget))

    @property
    def latest(self) -> tuple[Plan, ...]:
        """The newest plans; empty before the first measurement."""
        return self.plans[-1] if self.plans else ()

    def with_plans(self, plans: tuple[Plan, ...]) -> "Calibrated":
        steps = [plan.num_steps for plan in plans]
        others = tuple(old for old in self.plans if [plan.num_steps for plan in old] != steps)
        return replace(self, plans=(*others, plans))


def paper(W: int = 4) -> Paper:
    """The paper's grouping. Raises `PlanError` unless `W` is an integer of at least 2."""
    if isinstance(W, bool) or not isinstance(W, int) or W < 2:
        raise PlanError(
            f"jagg_fx.transform(fn, W={W!r}): W is the number of consecutive steps in a group, an integer of at least 2. "
            "W=4 is the paper's choice; W=2 keeps every step exact."
        )
    return Paper(W)


def even(K: int) -> Even:
    """`K` evenly spread knots. Raises `PlanError` unless `K` is an integer of at least 2."""
    return Even(check_count(K, "jagg_fx.plan.even"))


def explicit(knots: Sequence[int]) -> Explicit:
    """The given knots, as indices of steps. Raises `PlanError` for what can never be a set of knots."""
    call = f"jagg_fx.transform(fn, knots={knots!r})"
    if isinstance(knots, (str, bytes)) or not isinstance(knots, Sequence) or not knots:
        raise PlanError(f"{call}: knots is a number of knots, or a sequence of step indices such as (0, 3, 6, 8).")
    if any(isinstance(k, bool) or not isinstance(k, int) for k in knots):
        raise PlanError(f"{call}: every knot is an integer index of a step.")
    if any(k < 0 for k in knots):
        raise PlanError(f"{call}: knots count from the first step, 0; negative indices are not steps.")
    if len(set(knots)) != len(knots):
        raise PlanError(f"{call}: a knot is named twice.")
    return Explicit(tuple(sorted(knots)))


def budget(K: int, schedule: Schedule | None = None) -> Budget:
    """`K` knots by the schedule, or by what the first backward measures. Raises `PlanError` unless `K >= 2`."""
    return Budget(check_count(K, "jagg_fx.plan.budget"), schedule=schedule)


def within_error(max_rel_error: float) -> Budget:
    """As few knots as keep the predicted relative error at or below `max_rel_error`. Raises `OptionError`."""
    valid = isinstance(max_rel_error, (int, float)) and not isinstance(max_rel_error, bool) and max_rel_error > 0
    if not valid:
        raise OptionError(
            f"jagg_fx.transform(fn, max_rel_error={max_rel_error!r}): the largest relative error of the gradient is a positive "
            "number, such as 0.2."
        )
    return Budget(None, max_rel_error=float(max_rel_error))


def shared_knots(num_steps: int, knots: tuple[int, ...], rule: Rule, origin: str) -> Plan:
    """A plan whose neighbouring groups share their knot."""
    return Plan(num_steps, knots, tuple(itertools.pairwise(knots)) or ((0, 0),), rule, origin)


def check_count(K: object, call: str) -> int:
    if isinstance(K, bool) or not isinstance(K, int) or K < 2:
        raise PlanError(
            f"{call}({K!r}): a number of knots is an integer of at least 2, the first and the last step. Each knot costs one "
            "backward pass through the denoiser; 4 to 6 are a good start for 10 to 20 steps."
        )
    return K


def check_fits(K: int, num_steps: int) -> None:
    if num_steps < K:
        raise PlanError(
            f"jagg_fx.transform(fn, knots={K}): the function has {num_steps} steps, fewer than knots. Write at most "
            f"knots={num_steps}, which keeps every step exact."
        )


def _check_cover(num_steps: int, knots: tuple[int, ...], call: str) -> None:
    """Raise `PlanError` unless the knots lie in the range and hold the first and the last step."""
    if not knots or knots[-1] >= num_steps or list(knots) != sorted(set(knots)) or knots[0] < 0:
        raise PlanError(
            f"{call}: the function has {num_steps} steps, so knots lie in 0..{num_steps - 1}; {knots[-1:] and knots[-1]} does "
            "not."
        )
    missing = {0, num_steps - 1} - set(knots)
    if missing:
        whole = tuple(sorted(set(knots) | missing))
        raise PlanError(
            f"{call}: the function has {num_steps} steps, and the first and the last must be knots (steps outside the "
            f"knots could only be extrapolated). Write knots={whole}."
        )


def _with_errors(plan: Plan, errors: Errors) -> Plan:
    by_step = [0.0] * plan.num_steps
    for segment in plan.segments:
        by_step[segment.a + 1 : segment.b] = errors(segment.a, segment.b)
    return replace(plan, step_errors=tuple(by_step))
