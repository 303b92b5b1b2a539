"""Write the knots' weights for every intermediate step into the graph. Changes nothing by itself."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from jagg_fx import interpolation
from jagg_fx.passes.emit import emit, value
from jagg_fx.passes.find_steps import Step
from jagg_fx.plan import Plan, Weights

PASS = "weigh_steps"


@dataclass(frozen=True)
class Weighing:
    """Nodes of the weights.

    Attributes:
        all: `[M, K, *]`, intermediate steps by knots.
        at: for each knot its own column `[M, *]`.
    """

    all: fx.Node
    at: dict[int, fx.Node]


def weigh_steps(steps: Sequence[Step], plan: Plan) -> Weighing:
    before = steps[-1].backward  # the first backward call: its arguments stand before it, but for cotangents
    device = value(steps[0].cotangents[0]).device
    rule = plan.rule

    def weights(*times: Tensor) -> Tensor:
        if rule.weights is Weights.INDEX:
            times = tuple(torch.full((), float(i), device=device) for i in range(plan.num_steps))
        t, t_knots = (torch.stack([times[i] for i in indices]) for indices in (plan.intermediate, plan.knots))
        return interpolation.knot_weights(t, t_knots, rule.degree).to(device)

    origin = {"pass": PASS}
    times = [step.time for step in steps]
    node = emit(before, weights, times, name="weights", origin=origin, tag=None)
    columns = {}
    for column, k in enumerate(plan.knots):
        select = functools.partial(torch.select, dim=1, index=column)
        here = {**origin, "step": k}
        columns[k] = emit(before, select, (node,), name=f"weights_at_{k}", origin=here, tag=None)
    return Weighing(node, columns)
