"""`explain`: what `transform` would do with a function, without running or compiling the denoiser."""

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jagg_fx.backend import PlannedError, plan_only
from jagg_fx.costs import StepCost
from jagg_fx.denoiser import describe_function
from jagg_fx.errors import JaggError, OptionError
from jagg_fx.graphs import GraphView
from jagg_fx.report import Report, table
from jagg_fx.saved import Saved
from jagg_fx.transform import transform


@dataclass(frozen=True)
class Explanation:
    """What would be done with a function; `str()` is a table.

    Attributes:
        report: what would be rewritten, what not and why.
        calls: calls of the denoisers with gradients that were found.
        problem: why nothing would be rewritten, or None.
        costs: of one step of each stream.
    """

    report: Report
    calls: int
    problem: str | None
    costs: tuple[StepCost, ...]

    @property
    def graphs(self) -> tuple[GraphView, ...]:
        """The graph that would run, at the level of steps."""
        return self.report.graphs_of([self.report.rewrite] if self.report.rewrite else [], None)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain Python values."""
        return {"calls": self.calls, "problem": self.problem, **self._totals(), "report": self.report.to_dict()}

    def _totals(self) -> dict[str, Any]:
        plans = self.report.rewrite.plans if self.report.rewrite else ()
        pairs = list(zip(plans, self.costs, strict=True))
        forward = sum(plan.num_steps * cost.forward_flops for plan, cost in pairs)
        again = [(len(plan.intermediate), cost) for plan, cost in pairs if self.report.config.guard.is_active]
        kept = sum(len(plan.knots) * cost.backward_flops for plan, cost in pairs)
        return {
            "flops_exact": forward + sum(plan.num_steps * cost.backward_flops for plan, cost in pairs),
            "flops": forward + kept,
            "flops_at_most": forward + kept + sum(m * (cost.forward_flops + cost.backward_flops) for m, cost in again),
            "activation_bytes_exact": sum(plan.num_steps * cost.saved_bytes for plan, cost in pairs),
            "activation_bytes": sum(len(plan.knots) * cost.saved_bytes for plan, cost in pairs),
            "predicted_errors": [plan.predicted_error for plan in plans],
        }

    def save_report(self, path: str | Path) -> None:
        """Write all of it as JSON for `jagg_fx.saved.load` and `jagg-fx report`. Raises `SavedReportError` if it cannot."""
        Saved("explain", self.to_dict(), tuple(self.rows()), self.graphs).save(path)

    def rows(self) -> list[tuple[str, object]]:
        """Lines of the table: what, and the answer."""
        rows = self.report.rows()
        if self.problem is not None:
            names = ", ".join(self.report.denoisers)
            rows = [*rows[:2], ("calls found", f"{self.calls} of {names or 'no denoiser'}"), ("problem", self.problem)]
        elif self.costs:
            t = self._totals()
            most = f", at most {t['flops_at_most']:.3g}" if t["flops_at_most"] > t["flops"] else ""
            rows += [
                (
                    "FLOPs",
                    f"{t['flops_exact']:.3g} -> {t['flops']:.3g} ({t['flops'] / max(t['flops_exact'], 1):.2f}){most}",
                ),
                (
                    "activations",
                    f"{t['activation_bytes_exact'] / 2**20:,.0f} MiB -> {t['activation_bytes'] / 2**20:,.0f} MiB",
                ),
            ]
        return rows

    def __str__(self) -> str:
        return table("explain", self.rows())


def explain(fn: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] | None = None, **options: Any) -> Explanation:
    """Capture and plan a call of `fn` without running or compiling anything: tensors may be on the meta device.

    Args:
        fn: the function, as `transform` takes it.
        args, kwargs: of one call. Models and tensors on the meta device need no memory: `with torch.device("meta"): ...`. There
            attention is not fused, so that more activations are counted than a GPU keeps.
        options: as in `transform`. Knots that a measurement would place are shown where it would measure: evenly.

    Returns:
        What would be rewritten, what not and why, with predicted operations and activation memory. Where nothing would be, the
        nearest miss is its `problem`.

    Raises:
        OptionError, PlanError: an option that cannot be used, or arguments that do not fit the function.
    """
    fast = transform(fn, **{**options, "lowering": "eager", "capture": "whole"})
    if misfit := misfit_of(fn, args, kwargs or {}):
        name = describe_function(fn)
        raise OptionError(
            f"jagg_fx.explain({name}, <{len(args)} arguments>): {name} cannot be called with them: {misfit}. Give all arguments "
            "of one call, keywords in kwargs={...}."
        )
    found: list[int] = []
    fast.dry_run(lambda gm, inputs, config, on_rewrite, _: plan_only(gm, inputs, config, on_rewrite, found.append))
    problem = None
    with _no_garbage_collection():
        try:
            fast(*args, **(kwargs or {}))
        except PlannedError:
            pass
        except JaggError as error:
            problem = str(error)
    rewrite = fast.report.rewrite
    if rewrite is None and problem is None:
        problem = "No call of the denoiser has a gradient: is the function, or all of this call, under torch.no_grad?"
    costs = tuple(cost() for cost in rewrite.costs) if rewrite else ()
    return Explanation(fast.report, sum(found), problem, costs)


def misfit_of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why a function cannot be called with some arguments; None if it can, as far as its signature tells."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a built-in has none; the call itself will tell
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Tracing makes millions of objects that live to its end; going through them again and again took a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
