"""Run the passes on a joint graph, as one Inductor custom pass with an honest cache key."""

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

import jagg_fx
from jagg_fx._compat import CustomGraphPass, observed, trace_artifact
from jagg_fx.config import Config, Pass
from jagg_fx.costs import cost_of
from jagg_fx.errors import NoStepsError
from jagg_fx.inspect import Frozen, name_ranges, step_graph
from jagg_fx.passes.check_eligibility import check_eligibility, check_independent
from jagg_fx.passes.clean_up import clean_up
from jagg_fx.passes.drop_saved import drop_saved
from jagg_fx.passes.emit import value
from jagg_fx.passes.find_steps import Step, find_steps, marked_calls, region_name
from jagg_fx.passes.group_streams import group_streams
from jagg_fx.passes.interpolate_vjps import interpolate_vjps
from jagg_fx.passes.materialise_conjugates import materialise_conjugates
from jagg_fx.passes.record_statistics import record_statistics
from jagg_fx.passes.reread_operands import reread_operands
from jagg_fx.passes.route_segments import route_segments
from jagg_fx.passes.score_segments import Decision, score_segments
from jagg_fx.passes.value_numbers import value_numbers
from jagg_fx.passes.weigh_steps import Weighing, weigh_steps
from jagg_fx.plan import Plan
from jagg_fx.region import TIME
from jagg_fx.report import Rewrite, Stream

log = logging.getLogger(__name__)


class JaggPass(CustomGraphPass):
    """The pass manager. Inductor calls it for the joint graph and for each region's inner graphs, which have no steps.

    Args:
        config: what the user asked for.
        on_rewrite: receives the record of every joint graph that was rewritten.
    """

    def __init__(self, config: Config, on_rewrite: Callable[[Rewrite], None]) -> None:
        self.config = config
        self.on_rewrite = on_rewrite

    def uuid(self) -> str:
        """A new value for any change of the sources that shape the rewrite or of the configuration."""
        return hashlib.sha256(f"{sources_hash()}{self.config.cache_key()}".encode()).hexdigest()

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        assert gm is not None
        rewrite = rewrite_joint_graph(gm, self.config)
        if rewrite is not None:
            self.on_rewrite(rewrite)


def rewrite_joint_graph(gm: fx.GraphModule, config: Config) -> Rewrite | None:
    """Rewrite in place; None for a graph without steps, from which only the markers are erased."""
    materialise_conjugates(gm)
    if not gm.graph.find_nodes(op="call_function", target=TIME):
        return None
    calls, steps = len(marked_calls(gm.graph)), find_steps(gm.graph)
    if not steps:
        if any(node.name.startswith("tangents") for node in gm.graph.find_nodes(op="placeholder")):
            raise NoStepsError("fn", "the denoiser", f"no output depends on any of its {calls} calls with a gradient")
        clean_up(gm)  # a graph without a backward, compiled for no_grad
        return None
    check_independent(steps)
    numbers = value_numbers(gm.graph)
    streams = group_streams(steps, numbers)
    for stream in streams:
        check_eligibility(gm, stream, numbers)
    stages = {"before": step_graph(gm.graph, streams)}
    code = {"before": Frozen.of(gm).code}
    costs = []
    for s, steps in enumerate(streams):
        of = f"stream {s}, " if len(streams) > 1 else ""
        forward, backward = _regions(gm, steps)
        code |= {f"{of}denoiser, forward": forward.code, f"{of}denoiser, backward": backward.code}
        costs.append(cost_of(gm, steps[0], forward.graph, backward.graph))
    plans = [config.plan(len(stream), s, len(streams)) for s, stream in enumerate(streams)]
    covered = _covered(streams)
    planned = [(stream, plan) for stream, plan in zip(streams, plans, strict=True) if plan.segments]
    decisions = _decide(gm, planned, config)
    with observed(gm, Pass.INTERPOLATE_VJPS):
        for (steps, plan), (weighing, decision) in zip(planned, decisions, strict=True):
            interpolate_vjps(steps, plan, weighing, decision)
    stages["interpolate_vjps"] = step_graph(gm.graph, streams)
    with observed(gm, Pass.ROUTE_SEGMENTS):
        for (steps, plan), (_, decision) in zip(planned, decisions, strict=True):
            route_segments(gm, steps, plan, decision)
    stages["route_segments"] = step_graph(gm.graph, streams)
    with observed(gm, "reread_operands"):
        reread_operands(gm, streams)
    if Pass.DROP_SAVED not in config.disabled:
        with observed(gm, Pass.DROP_SAVED):
            drop_saved(gm, streams, plans)
        stages["drop_saved"] = step_graph(gm.graph, streams)
    with observed(gm, "clean_up"):
        clean_up(gm)
    name_ranges(gm.graph, streams)
    stages["after"] = step_graph(gm.graph, streams)
    code["after"] = Frozen.of(gm).code
    for when in ("before", "after"):
        log.debug("steps %s the rewrite:\n%s", when, stages[when])
        trace_artifact(f"jagg_fx_steps_{when}", functools.partial(str, stages[when]))
        trace_artifact(f"jagg_fx_joint_graph_{when}", code[when])
    for plan in plans:
        log.info(
            "%d steps, backward passes through the denoiser %d -> %d", plan.num_steps, plan.num_steps, len(plan.knots)
        )
    return replace(_record(streams, plans, covered, calls), stages=stages, code=code, costs=tuple(costs))


def _decide(
    gm: fx.GraphModule, planned: Sequence[tuple[list[Step], Plan]], config: Config
) -> list[tuple[Weighing, Decision]]:
    """Weights and decisions of each stream, and the statistics that are made of them."""
    with observed(gm, "weigh_steps"):
        weighings = [weigh_steps(steps, plan) for steps, plan in planned]
    with observed(gm, "score_segments"):
        decisions = [
            score_segments(steps, plan, weighing, config.guard, config.debias)
            for (steps, plan), weighing in zip(planned, weighings, strict=True)
        ]
    if Pass.RECORD_STATISTICS not in config.disabled:
        with observed(gm, Pass.RECORD_STATISTICS):
            scored = [(steps, decision) for (steps, _), decision in zip(planned, decisions, strict=True)]
            record_statistics(gm.graph, scored)
    return list(zip(weighings, decisions, strict=True))


def _covered(streams: list[list[Step]]) -> list[torch.Tensor]:
    covered = {step.operands[position] for steps in streams for step in steps for position in step.gradients}
    return [tensor for operand in covered if isinstance(tensor := value(operand), torch.Tensor)]


def _regions(gm: fx.GraphModule, steps: list[Step]) -> tuple[Frozen, Frozen]:
    """What a stream's denoiser computes, forward and backward."""
    forward, backward = (Frozen.of(getattr(gm, region_name(call))) for call in (steps[0].forward, steps[0].backward))
    return forward, backward


def _record(
    streams: list[list[Step]],
    plans: list[Plan],
    covered: list[torch.Tensor],
    calls: int,
) -> Rewrite:
    return Rewrite(
        streams=tuple(
            Stream.of(plan, [step.note for step in steps]) for steps, plan in zip(streams, plans, strict=True)
        ),
        covered=len(covered),
        covered_elements=sum(int(tensor.numel()) for tensor in covered),
        calls_without_gradient=calls - sum(map(len, streams)),
    )


@functools.cache
def sources_hash() -> str:
    """Hash of every source file that shapes the rewritten graph."""
    package = Path(jagg_fx.__file__).parent
    files = sorted([*package.glob("*.py"), *(package / "passes").glob("*.py")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
