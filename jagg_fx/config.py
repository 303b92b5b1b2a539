"""What the user asked for, as one frozen object."""

import dataclasses
import enum
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jagg_fx.errors import OptionError
from jagg_fx.guard import DEFAULT_COS_THRESHOLD, Guard, check_debias
from jagg_fx.plan import Budget, Placement, Plan, Rule, Weights, budget, explicit, paper, within_error


class Lowering(enum.StrEnum):
    """What runs the rewritten graphs."""

    INDUCTOR = "inductor"
    EAGER = "eager"
    REFERENCE = "reference"


@dataclasses.dataclass(frozen=True)
class Config:
    """The options of `transform` that shape the rewrite.

    Attributes:
        placement: how knots are chosen.
        rule: how the other steps' weights are computed.
        guard: which segments are interpolated.
        debias: probability of the unbiased correction per segment, or None.
        lowering: Inductor, interpreted graphs, or the eager reference.
        options: Inductor's own options, as `torch.compile(options=...)` takes them.
    """

    placement: Placement
    rule: Rule
    guard: Guard
    debias: float | None
    lowering: Lowering
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def create(
        cls,
        W: int = 4,
        knots: int | Sequence[int] | None = None,
        weights: str | None = None,
        degree: int | None = None,
        plan: Placement | None = None,
        max_rel_error: float | None = None,
        cos_threshold: float | Literal["auto"] | None = "auto",
        jagg_frac: float | None = None,
        debias: float | None = None,
        lowering: str = "inductor",
        options: Mapping[str, Any] | None = None,
    ) -> "Config":
        """Validate the user's arguments. Raises `PlanError` or `OptionError`."""
        placement = _placement(W, knots, plan, max_rel_error)
        return cls(
            placement=placement,
            rule=_rule(weights, degree, plan, max_rel_error),
            guard=Guard.create(_default_threshold(placement) if cos_threshold == "auto" else cos_threshold, jagg_frac),
            debias=check_debias(debias),
            lowering=_choice(Lowering, "lowering", lowering),
            options=tuple(sorted((options or {}).items())),
        )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "Config":
        """The same from `torch.compile(fn, backend="jagg", options=...)`. Raises `OptionError` for an unknown key."""
        names = inspect.signature(cls.create).parameters
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise OptionError(
                f"torch.compile(fn, backend='jagg', options={{{unknown[0]!r}: ...}}): unknown option; "
                f"there are {', '.join(map(repr, names))} and 'denoiser'. Inductor's own go into 'options'."
            )
        return cls.create(**options)

    def plan(self, num_steps: int) -> Plan:
        """The plan for a function of `num_steps` steps. Raises `PlanError` if there is none."""
        return self.placement.place(num_steps, self.rule)

    def cache_key(self) -> str:
        """Everything here that changes the rewritten graph. Inductor's options are in Inductor's own key."""
        return repr((self.placement, self.rule, self.guard, self.debias, self.lowering))


def _placement(W: int, knots: object, plan: Placement | None, max_rel_error: float | None) -> Placement:
    given = {"knots": knots, "plan": plan, "max_rel_error": max_rel_error}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise OptionError(
            f"jagg_fx.transform(fn, {', '.join(f'{name}={given[name]!r}' for name in named)}): each of these chooses the knots. "
            "Give one of them."
        )
    grouping = paper(W)  # checked even where it is not used
    if plan is not None:
        if not callable(getattr(plan, "place", None)):
            raise OptionError(
                f"jagg_fx.transform(fn, plan={plan!r}): a plan is made by jagg_fx.plan (paper, even, explicit, budget), by "
                "Plan.from_json, or taken from another function's transformed.plan."
            )
        return plan
    if max_rel_error is not None:
        return within_error(max_rel_error)
    if isinstance(knots, int) and not isinstance(knots, bool):
        return budget(knots)
    return grouping if knots is None else explicit(knots)  # type: ignore[arg-type]


def _default_threshold(placement: Placement) -> float | None:
    """No threshold for knots placed by a measurement: it has weighed already what the cosine only guesses."""
    is_measured = isinstance(placement, Budget) and placement.schedule is None
    is_saved = isinstance(placement, Plan) and placement.predicted_error is not None
    return None if is_measured or is_saved else DEFAULT_COS_THRESHOLD


def _rule(weights: str | None, degree: int | None, plan: Placement | None, max_rel_error: float | None) -> Rule:
    if isinstance(plan, Plan):
        asked = Rule(plan.rule.weights if weights is None else _weights(weights), degree or plan.rule.degree)
        if asked != plan.rule:
            raise OptionError(
                f"jagg_fx.transform(fn, plan=..., weights={weights!r}, degree={degree!r}): the plan was made for "
                f"weights={plan.rule.weights.value!r}, degree={plan.rule.degree}. Leave them out, or make a new plan."
            )
        return asked
    if degree not in (None, 1, 2):
        raise OptionError(f"jagg_fx.transform(fn, degree={degree!r}): weights are linear (1) or quadratic (2) in time.")
    if degree == 2 and max_rel_error is not None:
        raise OptionError(
            f"jagg_fx.transform(fn, degree=2, max_rel_error={max_rel_error!r}): errors are predicted for degree=1 only. Leave "
            "degree out, or give the number of knots."
        )
    return Rule(Weights.TIME if weights is None else _weights(weights), degree or 1)


def _weights(weights: str) -> Weights:
    chosen: Weights = _choice(Weights, "weights", weights)
    return chosen


def _choice(kind: type[Any], name: str, value: object) -> Any:
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(str(member)) for member in kind)
        raise OptionError(f"jagg_fx.transform(fn, {name}={value!r}): {name} is one of {names}.") from None
