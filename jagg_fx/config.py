"""What the user asked for, as one frozen object."""

import dataclasses
import enum
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jagg_fx.errors import OptionError
from jagg_fx.plan import Plan, check_group_size, check_knots, explicit, paper


class Weights(enum.StrEnum):
    """How an intermediate step is placed between its two knots."""

    TIME = "time"
    INDEX = "index"


class Lowering(enum.StrEnum):
    """What runs the rewritten graphs."""

    INDUCTOR = "inductor"
    EAGER = "eager"
    REFERENCE = "reference"


@dataclasses.dataclass(frozen=True)
class Config:
    """The options of `transform` that shape the rewrite.

    Attributes:
        W: steps per group of the paper's grouping, at least 2; not used when `knots` is given.
        knots: indices of the steps whose VJP is kept, or None for the grouping by `W`.
        weights: interpolation by time or by index.
        lowering: Inductor, interpreted graphs, or the eager reference.
        options: Inductor's own options, as `torch.compile(options=...)` takes them.
    """

    W: int = 4
    knots: tuple[int, ...] | None = None
    weights: Weights = Weights.TIME
    lowering: Lowering = Lowering.INDUCTOR
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def create(
        cls,
        W: int = 4,
        knots: Sequence[int] | None = None,
        weights: str = "time",
        lowering: str = "inductor",
        options: Mapping[str, Any] | None = None,
    ) -> "Config":
        """Validate the user's arguments. Raises `PlanError` or `OptionError`."""
        return cls(
            W=check_group_size(W),
            knots=None if knots is None else check_knots(knots),
            weights=_choice(Weights, "weights", weights),
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
        """The plan for a function of `num_steps` steps. Raises `PlanError` if the knots do not fit."""
        return paper(num_steps, self.W) if self.knots is None else explicit(num_steps, self.knots)

    def cache_key(self) -> str:
        """Everything here that changes the rewritten graph. Inductor's options are in Inductor's own key."""
        return repr((self.W, self.knots, self.weights, self.lowering))


def _choice(kind: type[Any], name: str, value: object) -> Any:
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(str(member)) for member in kind)
        raise OptionError(f"jagg_fx.transform(fn, {name}={value!r}): {name} is one of {names}.") from None
