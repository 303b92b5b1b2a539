"""THE pass that changes numbers: knots get composite cotangents, which carry those of the intermediate steps.

    before    grad = sum over all steps of  J_i^T g_i
    after     grad = sum over the knots of  J_k^T G_k        G_k = g_k + sum_i w_ik g_i

The mathematics is in `jagg_fx/interpolation.py`; this pass traces it into the graph. `route_segments` then takes the
intermediate steps' own backward calls away, or keeps them for segments that are not interpolated: those add nothing here.
Without intermediate steps neither pass runs, and the graph is unchanged to the bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from jagg_fx import interpolation
from jagg_fx.passes.emit import emit, value
from jagg_fx.passes.find_steps import Step
from jagg_fx.passes.score_segments import Decision
from jagg_fx.passes.weigh_steps import Weighing
from jagg_fx.plan import Plan

PASS = "interpolate_vjps"


def interpolate_vjps(steps: Sequence[Step], plan: Plan, weighing: Weighing, decision: Decision) -> None:
    """Give each knot its composite cotangent.

    Nodes may read later ones afterwards: the composite of a closing knot needs the cotangents of earlier steps, which
    autograd computes after it. `clean_up` sorts the graph.
    """
    first = steps[-1].backward
    gates = _gates(first, plan, decision)
    for slot in range(len(steps[0].cotangent_positions)):
        own = [steps[i].cotangents[slot] for i in plan.intermediate]
        origin = {"pass": PASS}
        others = emit(first, lambda *g: torch.stack(g), own, name=f"cotangents_{slot}", origin=origin)
        for k in plan.knots:
            _compose(steps[k], slot, plan, others, weighing.at[k], gates)


def _gates(before: fx.Node, plan: Plan, decision: Decision) -> fx.Node | None:
    """How much of each intermediate step `[M]` is carried to the knots: 0 in exact segments, `1 - c_i` where corrected."""
    if not decision.is_guarded and not decision.choices:
        return None

    def gates(keep: Tensor, *factors: Tensor) -> Tensor:
        carried = [keep[s].float().expand(len(segment.intermediate)) for s, segment in enumerate(plan.segments)]
        if factors:
            carried = [c * (1 - f) for c, f in zip(carried, factors, strict=True)]
        return torch.cat(carried)

    operands = (decision.keep, *(choice.factors for choice in decision.choices))
    return emit(before, gates, operands, name="gates", origin={"pass": PASS})


def _compose(knot: Step, slot: int, plan: Plan, others: fx.Node, weights: fx.Node, gates: fx.Node | None) -> None:
    """Put `G_k` in place of `g_k` among the arguments of a knot's backward call."""
    own = knot.cotangents[slot]
    per_sample_dims = len(value(weights).shape) - 1

    def composite(own: Tensor, others: Tensor, weights: Tensor, *gate: Tensor) -> Tensor:
        if gate:
            weights = weights * gate[0].reshape(-1, *[1] * per_sample_dims)
        return interpolation.composite(own, others, weights)

    origin = {**knot.origin(PASS), "from": list(plan.intermediate)}
    name = f"composite_{knot.name}" if slot == 0 else f"composite_{knot.name}_{slot}"
    operands = (own, others, weights) if gates is None else (own, others, weights, gates)
    node = emit(knot.backward, composite, operands, name=name, origin=origin)
    knot.backward.update_arg(knot.cotangent_positions[slot], node)
