"""What the user asked for, as one frozen object."""

import dataclasses
import enum
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jagg_fx._compat import disabled_passes, options_of_mode
from jagg_fx.errors import OptionError
from jagg_fx.guard import DEFAULT_COS_THRESHOLD, Guard, check_debias
from jagg_fx.plan import (
    Budget,
    Calibrated,
    Calibration,
    PerStream,
    Placement,
    Plan,
    Rule,
    Weights,
    budget,
    explicit,
    paper,
    within_error,
)


class Chain(enum.StrEnum):
    """What happens where a gradient flows into a step's state."""

    ERROR = "error"
    STOP = "stop"


class Capture(enum.StrEnum):
    """What torch.compile captures."""

    AUTO = "auto"
    WHOLE = "whole"
    DENOISER = "denoiser"


class Pass(enum.StrEnum):
    """A pass on the joint graph that can be left out."""

    INTERPOLATE_VJPS = "interpolate_vjps"
    ROUTE_SEGMENTS = "route_segments"
    RECORD_STATISTICS = "record_statistics"
    DROP_SAVED = "drop_saved"


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
        chain: refuse or cut gradients that flow into a step's state.
        options: Inductor's own options, as `torch.compile(options=...)` takes them.
        disabled: passes that are left out. Without `interpolate_vjps` every step is a knot, and without `route_segments` there
            is no guard; the placement and the guard here are what is left.
    """

    placement: Placement | PerStream | Calibrated | Calibration
    rule: Rule
    guard: Guard
    debias: float | None
    lowering: Lowering
    chain: Chain
    options: tuple[tuple[str, Any], ...]
    disabled: frozenset[Pass] = frozenset()

    @classmethod
    def create(
        cls,
        W: int = 4,
        knots: int | Sequence[int] | None = None,
        weights: str | None = None,
        degree: int | None = None,
        plan: Placement | Sequence[Placement] | None = None,
        max_rel_error: float | None = None,
        cos_threshold: float | Literal["auto"] | None = "auto",
        jagg_frac: float | None = None,
        debias: float | None = None,
        lowering: str = "inductor",
        chain: str = "error",
        options: Mapping[str, Any] | None = None,
        disable_passes: Sequence[str] = (),
        mode: str | None = None,
    ) -> "Config":
        """Validate the user's arguments. Raises `PlanError` or `OptionError`."""
        placement = _placement(W, knots, plan, max_rel_error)
        options = _options(mode, options or {})
        config = cls(
            placement=placement,
            rule=_rule(weights, degree, plan, max_rel_error),
            guard=Guard.create(_default_threshold(placement) if cos_threshold == "auto" else cos_threshold, jagg_frac),
            debias=check_debias(debias),
            lowering=choice(Lowering, "lowering", lowering),
            chain=choice(Chain, "chain", chain),
            options=tuple(sorted(options.items())),
            disabled=_disabled(disable_passes, options.get("disabled_passes", "")),
        )
        if Pass.INTERPOLATE_VJPS in config.disabled:
            config = dataclasses.replace(config, placement=paper(2), rule=Rule())
        if Pass.ROUTE_SEGMENTS in config.disabled:
            config = dataclasses.replace(config, guard=Guard(cos_threshold=None), debias=None)
        is_routed = config.guard.is_active or config.debias is not None
        if is_routed and options.get("triton.cudagraphs") and config.placement != paper(2):
            raise OptionError(
                f"jagg_fx.transform(fn, mode={mode!r}, cos_threshold={config.guard.cos_threshold!r}): these options ask for "
                "CUDA graphs, and whether a segment runs exactly is read on the host during the backward, which a graph cannot "
                "do. Write cos_threshold=None (with jagg_frac and debias left out), or mode='max-autotune-no-cudagraphs'."
            )
        return config

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

    def plan(self, num_steps: int, stream: int = 0, streams: int = 1) -> Plan:
        """The plan for one of several streams, of `num_steps` steps. Raises `PlanError` if there is none."""
        if isinstance(self.placement, Calibration) and streams > 1 and self.placement.K is not None:
            short = dataclasses.replace(self.placement, K=min(self.placement.K, num_steps))
            return short.place(num_steps, self.rule)
        if isinstance(self.placement, Calibrated):
            return self.placement.place(num_steps, stream)
        if isinstance(self.placement, PerStream):
            return self.placement.for_stream(stream, streams).place(num_steps, self.rule)
        return self.placement.place(num_steps, self.rule)

    def plans(self, lengths: Sequence[int]) -> list[Plan]:
        """A plan for each stream of so many steps. Raises `PlanError` if there is none."""
        return [self.plan(num_steps, stream, len(lengths)) for stream, num_steps in enumerate(lengths)]

    def with_memory(self) -> "Config":
        """The same, but that it can remember the knots that a measurement places."""
        if isinstance(self.placement, Budget) and self.placement.schedule is None:
            return dataclasses.replace(self, placement=Calibrated(self.placement))
        return self

    def calibration(self) -> "Config":
        """The configuration of a run that measures, where knots are placed by measurements."""
        assert isinstance(self.placement, Calibrated)
        return dataclasses.replace(self, placement=self.placement.budget.calibration())

    def cache_key(self) -> str:
        """Everything here that changes the rewritten graph. Inductor's options are in Inductor's own key."""
        shaping = (self.placement, self.rule, self.guard, self.debias, self.lowering, self.chain)
        return repr((*shaping, sorted(self.disabled)))


def _placement(
    W: int, knots: object, plan: Placement | Sequence[Placement] | None, max_rel_error: float | None
) -> Placement | PerStream:
    given = {
        "W": None if W == 4 else W,
        "knots": knots,
        "plan": plan,
        "max_rel_error": max_rel_error,
    }  # 4 is the default
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise OptionError(
            f"jagg_fx.transform(fn, {', '.join(f'{name}={given[name]!r}' for name in named)}): each of these chooses the knots. "
            "Give one of them."
        )
    grouping = paper(W)
    if isinstance(plan, Sequence) and not isinstance(plan, str):
        if any(isinstance(each, Budget) and each.schedule is None for each in plan):
            raise OptionError(
                "jagg_fx.transform(fn, plan=[budget(K), ...]): knots that a measurement places are placed for all streams "
                "alike. Write knots=K, or give each budget its schedule."
            )
        return PerStream(tuple(map(_checked, plan)))
    if plan is not None:
        return _checked(plan)
    if max_rel_error is not None:
        return within_error(max_rel_error)
    if isinstance(knots, int) and not isinstance(knots, bool):
        return budget(knots)
    return grouping if knots is None else explicit(knots)  # type: ignore[arg-type]


def _checked(plan: Placement) -> Placement:
    if not callable(getattr(plan, "place", None)):
        raise OptionError(
            f"jagg_fx.transform(fn, plan={plan!r}): a plan is made by jagg_fx.plan (paper, even, explicit, budget), by "
            "Plan.from_json, or taken from another function's transformed.plan; a list holds one for each stream."
        )
    return plan


def _default_threshold(placement: Placement | PerStream) -> float | None:
    """No threshold for knots placed by a measurement: it has weighed already what the cosine only guesses."""
    is_measured = isinstance(placement, Budget) and placement.schedule is None
    parts = placement.placements if isinstance(placement, PerStream) else (placement,)
    is_saved = all(isinstance(part, Plan) and part.predicted_error is not None for part in parts)
    return None if is_measured or is_saved else DEFAULT_COS_THRESHOLD


def _rule(weights: str | None, degree: int | None, plan: object, max_rel_error: float | None) -> Rule:
    if isinstance(plan, Sequence) and not isinstance(plan, str):
        rules = {_rule(weights, degree, each, None) for each in plan}
        if len(rules) != 1:
            raise OptionError(
                f"jagg_fx.transform(fn, plan=[<{len(plan)} plans>]): a list holds a plan for each stream of calls, all made for "
                "the same weights and degree. Make them anew, or leave plan= out."
            )
        return rules.pop()
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


def _options(mode: str | None, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inductor's options, as `torch.compile` takes them: of a mode, or by name."""
    if mode is None:
        return options
    if options:
        raise OptionError(
            f"jagg_fx.transform(fn, mode={mode!r}, options={dict(options)!r}): a mode stands for a set of options, as in "
            "torch.compile. Give one of the two."
        )
    try:
        return options_of_mode(mode)
    except KeyError as error:
        raise OptionError(f"jagg_fx.transform(fn, mode={mode!r}): mode is one of {error.args[0]}.") from None


def _disabled(passes: Sequence[str], of_inductor: str) -> frozenset[Pass]:
    """What `disable_passes` names, and Inductor's own `disabled_passes` (the variable TORCHINDUCTOR_DISABLED_PASSES, too)."""
    if isinstance(passes, str) or not isinstance(passes, Sequence):
        raise OptionError(
            f"jagg_fx.transform(fn, disable_passes={passes!r}): a list of names. Write disable_passes=['drop_saved'], of "
            f"{', '.join(map(repr, map(str, Pass)))}."
        )
    asked = {choice(Pass, "disable_passes", name) for name in passes}
    everywhere = f"{of_inductor},{disabled_passes()}".lower()
    return frozenset(asked | {each for each in Pass if each.value in everywhere})


def _weights(weights: str) -> Weights:
    chosen: Weights = choice(Weights, "weights", weights)
    return chosen


def choice(kind: type[Any], name: str, value: object) -> Any:
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(str(member)) for member in kind)
        raise OptionError(f"jagg_fx.transform(fn, {name}={value!r}): {name} is one of {names}.") from None
