"""What was found, what was rewritten, what was left exact and why."""

from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from jagg_fx.config import Config
from jagg_fx.plan import Plan


@dataclass(frozen=True)
class Rewrite:
    """The record of one rewritten joint graph (or of one run of the eager twin).

    Attributes:
        plan: steps and knots.
        arguments: names of what the denoiser is called with at each step; empty where not known.
        covered: tensors (parameters, mostly) whose gradients are summed over the steps.
        covered_elements: their elements in total.
        calls_without_gradient: calls of the denoiser on which no output depends with a gradient.
    """

    plan: Plan
    arguments: tuple[str, ...]
    covered: int
    covered_elements: int
    calls_without_gradient: int


@dataclass(frozen=True)
class Report:
    """Report of a transformed function; `str()` is a table, `to_dict()` is for programs.

    Attributes:
        function: name of the transformed function.
        denoiser: class of the denoiser, None until the first call.
        config: what was asked for.
        rewrite: the newest rewritten graph, None before the first one.
        graphs: how many joint graphs were rewritten so far (one per specialisation).
    """

    function: str
    denoiser: str | None
    config: Config
    rewrite: Rewrite | None
    graphs: int

    def exact(self) -> list[str]:
        """What keeps its exact gradient, each with its reason."""
        if self.rewrite is None:
            return []
        plan = self.rewrite.plan
        lines = [f"step {first}: alone in its group" for first, last in plan.groups if first == last]
        if not plan.segments:
            lines = ["every step: no group has an intermediate step"]
        if self.rewrite.calls_without_gradient:
            lines.append(f"{self.rewrite.calls_without_gradient} calls of the denoiser: no gradient reaches them")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values. Before the first backward graph only what was asked for is there."""
        asked = {
            "function": self.function,
            "denoiser": self.denoiser,
            "weights": self.config.rule.weights.value,
            "degree": self.config.rule.degree,
            "cos_threshold": self.config.guard.cos_threshold,
            "jagg_frac": self.config.guard.jagg_frac,
            "debias": self.config.debias,
            "lowering": self.config.lowering.value,
            "torch": torch.__version__,
            "rewritten_graphs": self.graphs,
        }
        if self.rewrite is None:
            return asked
        plan = self.rewrite.plan
        return asked | {
            "steps": plan.num_steps,
            "plan": plan.origin,
            "predicted_error": plan.predicted_error,
            "groups": [list(group) for group in plan.groups],
            "knots": list(plan.knots),
            "interpolated": list(plan.intermediate),
            "backward_passes_before": plan.num_steps,
            "backward_passes_after": len(plan.knots),
            "arguments": list(self.rewrite.arguments),
            "tensors_covered": self.rewrite.covered,
            "elements_covered": self.rewrite.covered_elements,
            "left_exact": self.exact(),
        }

    def _passes(self) -> str:
        assert self.rewrite is not None
        plan, config = self.rewrite.plan, self.config
        guarded = len(plan.intermediate) if config.guard.is_active else 0
        drawn = len(plan.segments) if config.debias is not None else 0
        most = len(plan.knots) + max(guarded, drawn)
        more = f", up to {most} (see stats)" if most > len(plan.knots) else ""
        return f"{plan.num_steps} -> {len(plan.knots)}{more}"

    def _guard(self) -> str:
        guard = self.config.guard
        limits = [] if guard.cos_threshold is None else [f"cosine >= {guard.cos_threshold:g}"]
        limits += (
            [] if guard.jagg_frac is None else [f"at most {guard.jagg_frac:.0%} of intermediate steps interpolated"]
        )
        return ", ".join(limits) or "none: interpolated always"

    def __str__(self) -> str:
        report = self.to_dict()
        rows: list[tuple[str, object]] = [("function", self.function), ("denoiser", self.denoiser or "not called yet")]
        if self.rewrite is None:
            rows.append(("steps", "nothing rewritten yet: no backward graph was compiled"))
        else:
            rows += [
                ("steps", report["steps"]),
                ("plan", report["plan"]),
                ("groups", ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in report["groups"])),
                ("knots", ", ".join(map(str, report["knots"]))),
                ("backward passes", self._passes()),
                ("gradients covered", f"{report['tensors_covered']} tensors, {report['elements_covered']:,} elements"),
                ("left exact", "\n".join(report["left_exact"]) or "nothing: every group has intermediate steps"),
                ("rewritten graphs", self.graphs),
            ]
            if plan_error := report["predicted_error"]:
                rows.append(("predicted error", f"{plan_error:.2f} of the gradient"))
        weights = report["weights"] + (", quadratic" if report["degree"] == 2 else "")
        rows += [("weights", weights), ("guard", self._guard())]
        if self.config.debias is not None:
            rows.append(("debias", f"each segment with probability {self.config.debias:g}"))
        rows += [("lowering", report["lowering"]), ("torch", report["torch"])]
        table: str = tabulate(rows, headers=["jagg_fx", "report"], tablefmt="simple", disable_numparse=True)
        return table
