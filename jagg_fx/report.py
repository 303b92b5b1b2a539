"""What was found, what was rewritten, what was left exact and why."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from tabulate import tabulate
from torch import nn

from jagg_fx.config import Config, Pass
from jagg_fx.graphs import GraphView, SegmentDecision, StepGraph
from jagg_fx.plan import Plan
from jagg_fx.statistics import Numbers, Statistics

if TYPE_CHECKING:
    from jagg_fx.costs import StepCost
    from jagg_fx.region import CallNote

Rows = tuple[tuple[str, object], ...]  # lines of a table: what, and the answer


@dataclass(frozen=True)
class Stream:
    """Calls that follow one path.

    Attributes:
        denoiser: which of the function's denoisers they call.
        plan: steps and knots.
        arguments: names of what the denoiser is called with at each step; empty where not known.
        cut: steps whose state's gradient `chain="stop"` cut.
    """

    denoiser: int
    plan: Plan
    arguments: tuple[str, ...]
    cut: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: Plan, notes: "Sequence[CallNote]") -> "Stream":
        """From what is noted of each of its steps."""
        cut = tuple(i for i, note in enumerate(notes) if note.is_cut)
        return cls(notes[0].denoiser, plan, notes[0].arguments, cut)


@dataclass(frozen=True)
class Rewrite:
    """The record of one rewritten joint graph (or of one run of the eager twin).

    Attributes:
        streams: steps and knots, by stream.
        covered: tensors (parameters, mostly) whose gradients are summed over the steps.
        covered_elements: their elements in total.
        calls_without_gradient: calls of the denoiser on which no output depends with a gradient.
        stages: the graph at the level of steps, before, after each pass, and after; see `jagg_fx.graphs`.
        code: makes readable code of the graphs, by name.
        costs: counts what one step of each stream costs.
    """

    streams: tuple[Stream, ...]
    covered: int
    covered_elements: int
    calls_without_gradient: int
    stages: dict[str, StepGraph] = field(default_factory=dict, compare=False, repr=False)
    code: dict[str, Callable[[], str]] = field(default_factory=dict, compare=False, repr=False)
    costs: "tuple[Callable[[], StepCost], ...]" = field(default=(), compare=False, repr=False)

    @classmethod
    def of_modules(
        cls, streams: Sequence[Stream], denoisers: Sequence[nn.Module], calls_without_gradient: int
    ) -> "Rewrite":
        """Of a rewrite without a joint graph: it covers the denoisers' trained parameters."""
        trained = {id(p): p for denoiser in denoisers for p in denoiser.parameters() if p.requires_grad}
        elements = sum(p.numel() for p in trained.values())
        return cls(tuple(streams), len(trained), elements, calls_without_gradient)

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(stream.plan for stream in self.streams)


@dataclass(frozen=True)
class Report:
    """Report of a transformed function; `str()` is a table, `to_dict()` is for programs.

    Attributes:
        function: name of the transformed function.
        denoisers: their classes, empty until the first call.
        config: what was asked for.
        rewrite: the newest rewritten graph, None before the first one.
        graphs: how many joint graphs were rewritten so far (one per specialisation).
        capture: what was captured by torch.compile, and why not more.
        notes: what else was done or found that a user should know.
    """

    function: str
    denoisers: tuple[str, ...]
    config: Config
    rewrite: Rewrite | None
    graphs: int
    notes: tuple[str, ...] = ()
    capture: str = "whole"

    def exact(self) -> list[str]:
        """What keeps its exact gradient, each with its reason."""
        if self.rewrite is None:
            return []
        lines = []
        for s, plan in enumerate(self.rewrite.plans):
            of = f" of stream {s}" if len(self.rewrite.plans) > 1 else ""
            if plan.segments:
                lines += [f"step {first}{of}: alone in its group" for first, last in plan.groups if first == last]
            else:
                is_off = Pass.INTERPOLATE_VJPS in self.config.disabled
                reason = "interpolate_vjps is disabled" if is_off else "no group has an intermediate step"
                lines.append(f"every step{of}: {reason}")
        if self.rewrite.calls_without_gradient:
            lines.append(f"{self.rewrite.calls_without_gradient} calls of the denoiser: no gradient reaches them")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values. Before the first backward graph only what was asked for is there."""
        asked = {
            "function": self.function,
            "denoisers": list(self.denoisers),
            "weights": self.config.rule.weights.value,
            "degree": self.config.rule.degree,
            "cos_threshold": self.config.guard.cos_threshold,
            "jagg_frac": self.config.guard.jagg_frac,
            "debias": self.config.debias,
            "chain": self.config.chain.value,
            "lowering": self.config.lowering.value,
            "capture": self.capture,
            "disabled_passes": sorted(self.config.disabled),
            "torch": torch.__version__,
            "rewritten_graphs": self.graphs,
            "notes": list(self.notes),
        }
        if self.rewrite is None:
            return asked
        plans = self.rewrite.plans
        return asked | {
            "steps": sum(plan.num_steps for plan in plans),
            "backward_passes_before": sum(plan.num_steps for plan in plans),
            "backward_passes_after": sum(len(plan.knots) for plan in plans),
            "streams": [self._stream(stream) for stream in self.rewrite.streams],
            "tensors_covered": self.rewrite.covered,
            "elements_covered": self.rewrite.covered_elements,
            "left_exact": self.exact(),
        }

    def _stream(self, stream: Stream) -> dict[str, Any]:
        plan = stream.plan
        return {
            "denoiser": self.denoisers[stream.denoiser],
            "steps": plan.num_steps,
            "plan": plan.origin,
            "predicted_error": plan.predicted_error,
            "groups": [list(group) for group in plan.groups],
            "knots": list(plan.knots),
            "interpolated": list(plan.intermediate),
            "arguments": list(stream.arguments),
            "cut": list(stream.cut),
        }

    def _passes(self, plans: Sequence[Plan]) -> str:
        guarded = sum(len(plan.intermediate) for plan in plans) if self.config.guard.is_active else 0
        drawn = sum(len(plan.segments) for plan in plans) if self.config.debias is not None else 0
        kept = sum(len(plan.knots) for plan in plans)
        if self.config.guard.is_closed and guarded:
            return f"{sum(plan.num_steps for plan in plans)}, all exact: cos_threshold=1"
        more = f", up to {kept + max(guarded, drawn)} (see stats)" if guarded or drawn else ""
        return f"{sum(plan.num_steps for plan in plans)} -> {kept}{more}"

    def _guard(self) -> str:
        guard = self.config.guard
        if guard.is_closed:
            return "cos_threshold=1: every step exact"
        limits = [] if guard.cos_threshold is None else [f"cosine >= {guard.cos_threshold:g}"]
        limits += (
            [] if guard.jagg_frac is None else [f"at most {guard.jagg_frac:.0%} of intermediate steps interpolated"]
        )
        return ", ".join(limits) or "none: interpolated always"

    def _plan_rows(self, stream: Stream) -> list[tuple[str, object]]:
        plan = stream.plan
        groups = ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in plan.groups)
        rows: list[tuple[str, object]] = [("steps", plan.num_steps), ("plan", plan.origin), ("groups", groups)]
        rows.append(("knots", ", ".join(map(str, plan.knots))))
        if plan.predicted_error:
            rows.append(("predicted error", f"{plan.predicted_error:.2f} of the gradient"))
        if stream.cut:
            rows.append(("cut", f"no gradient through the state of steps {', '.join(map(str, stream.cut))}"))
        return rows

    def _stream_row(self, s: int, stream: Stream) -> tuple[str, object]:
        details = "; ".join(f"{name} {text}" for name, text in self._plan_rows(stream))
        return f"stream {s}", f"denoiser {stream.denoiser}, {self.denoisers[stream.denoiser]}: {details}"

    def graphs_of(self, rewrites: Sequence[Rewrite], statistics: Statistics | None) -> tuple[GraphView, ...]:
        """A view of each rewritten graph; where the rewrite happened in autograd, of what its plan makes of the steps."""
        views = [self._view(rewrite) for rewrite in rewrites]
        if statistics is not None:
            ran = [n for n, view in enumerate(views) if view.plans == statistics.plans]
            for n in ran[-1:]:  # none, where knots were placed anew since
                views[n] = replace(views[n], decisions=tuple(self._decisions(statistics.last)))
        return tuple(views)

    def _view(self, rewrite: Rewrite) -> GraphView:
        guarded, drawn = self.config.guard.is_active, self.config.debias is not None
        return GraphView(
            function=self.function,
            denoisers=tuple(self.denoisers[stream.denoiser] for stream in rewrite.streams),
            plans=rewrite.plans,
            stages=rewrite.stages
            or {
                "before": StepGraph.exact(rewrite.plans),
                "after": StepGraph.rewritten(rewrite.plans, guarded, drawn),
            },
            code=rewrite.code,
            facts=tuple(replace(self, rewrite=rewrite).rows()),
        )

    def _decisions(self, numbers: Numbers) -> Iterator[SegmentDecision]:
        threshold = self.config.guard.cos_threshold
        for segment, score in numbers.scores.items():
            if numbers.kept[segment]:
                outcome = "interpolated"
            elif self.config.guard.is_closed:
                outcome = "exact: cos_threshold=1 keeps every step exact"
            elif threshold is not None and not score >= threshold:
                outcome = f"exact: {score:.3f} is below cos_threshold={threshold:g}"
            else:
                outcome = "exact: other segments scored better, and jagg_frac allows no more"
            yield SegmentDecision(segment, score, outcome)

    def rows(self) -> list[tuple[str, object]]:
        """Lines of the table: what, and the answer."""
        names = ", ".join(self.denoisers) or "not called yet"
        rows: list[tuple[str, object]] = [("function", self.function), ("denoiser", names)]
        if self.rewrite is None:
            what = "backward graph was compiled" if self.capture == "whole" else "step with gradients ran"
            rows.append(("steps", f"nothing rewritten yet: no {what}"))
        else:
            streams = self.rewrite.streams
            if len(streams) == 1:
                rows += self._plan_rows(streams[0])
            else:
                rows += [self._stream_row(s, stream) for s, stream in enumerate(streams)]
            rows += [
                ("backward passes", self._passes(self.rewrite.plans)),
                ("gradients covered", f"{self.rewrite.covered} tensors, {self.rewrite.covered_elements:,} elements"),
                ("left exact", "\n".join(self.exact()) or "nothing: every group has intermediate steps"),
                ("rewritten graphs", self.graphs or "none: rewritten in autograd"),
            ]
        weights = self.config.rule.weights.value + (", quadratic" if self.config.rule.degree == 2 else "")
        rows += [("weights", weights), ("guard", self._guard())]
        if self.config.debias is not None:
            rows.append(("debias", f"each segment with probability {self.config.debias:g}"))
        if self.config.disabled:
            rows.append(("disabled passes", ", ".join(sorted(self.config.disabled))))
        if self.capture != "whole":
            rows.append(("capture", self.capture))
        rows += [("lowering", self.config.lowering.value), ("torch", torch.__version__)]
        if self.notes:
            rows.append(("notes", "\n".join(self.notes)))
        return rows

    def __str__(self) -> str:
        return table("report", self.rows())


def table(title: str, rows: Iterable[tuple[object, ...]]) -> str:
    """Lines of a report as text."""
    headers, widths = ["jagg_fx", title], [None, 100]
    text: str = tabulate(list(rows), headers=headers, tablefmt="simple", disable_numparse=True, maxcolwidths=widths)
    return text
