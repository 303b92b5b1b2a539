"""Run the passes on a joint graph, as one Inductor custom pass with an honest cache key."""

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import fx

import jagg_fx
from jagg_fx._compat import CustomGraphPass
from jagg_fx.config import Config
from jagg_fx.denoiser import TIME
from jagg_fx.errors import NoStepsError
from jagg_fx.inspect import step_lines
from jagg_fx.passes.check_eligibility import check_eligibility
from jagg_fx.passes.clean_up import clean_up
from jagg_fx.passes.drop_saved import drop_saved
from jagg_fx.passes.emit import value
from jagg_fx.passes.find_steps import Step, find_steps, marked_calls
from jagg_fx.passes.interpolate_vjps import interpolate_vjps
from jagg_fx.passes.record_statistics import record_statistics
from jagg_fx.passes.route_segments import route_segments
from jagg_fx.passes.score_segments import score_segments
from jagg_fx.passes.weigh_steps import weigh_steps
from jagg_fx.plan import Plan
from jagg_fx.report import Rewrite

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
    if not gm.graph.find_nodes(op="call_function", target=TIME):
        return None
    calls, steps = len(marked_calls(gm.graph)), find_steps(gm.graph)
    if not steps:
        if any(node.name.startswith("tangents") for node in gm.graph.find_nodes(op="placeholder")):
            raise NoStepsError("fn", "the denoiser", f"no output depends on any of its {calls} calls with a gradient")
        clean_up(gm)  # a graph without a backward, compiled for no_grad
        return None
    check_eligibility(gm, steps)
    _log_steps("before", gm, steps)
    plan = config.plan(len(steps))
    record = _record(steps, plan, calls)
    if plan.segments:
        weighing = weigh_steps(steps, plan)
        decision = score_segments(steps, plan, weighing, config.guard, config.debias)
        record_statistics(gm.graph, steps, decision)
        interpolate_vjps(steps, plan, weighing, decision)
        route_segments(gm, steps, plan, decision)
        drop_saved(gm, steps, plan)
    clean_up(gm)
    _log_steps("after", gm, steps)
    log.info("%d steps, backward passes through the denoiser %d -> %d", plan.num_steps, plan.num_steps, len(plan.knots))
    return record


def _record(steps: list[Step], plan: Plan, calls: int) -> Rewrite:
    covered = sorted({position for step in steps for position in step.gradients})
    tensors = [value(steps[0].operands[position]) for position in covered]
    return Rewrite(
        plan=plan,
        arguments=steps[0].arguments,
        covered=len(tensors),
        covered_elements=sum(int(t.numel()) for t in tensors if isinstance(t, torch.Tensor)),
        calls_without_gradient=calls - len(steps),
    )


def _log_steps(when: str, gm: fx.GraphModule, steps: list[Step]) -> None:
    if log.isEnabledFor(logging.DEBUG):
        log.debug("steps %s the rewrite:\n%s", when, "\n".join(step_lines(gm.graph, steps)))


@cache
def sources_hash() -> str:
    """Hash of every source file that shapes the rewritten graph."""
    package = Path(jagg_fx.__file__).parent
    files = sorted([*package.glob("*.py"), *(package / "passes").glob("*.py")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
