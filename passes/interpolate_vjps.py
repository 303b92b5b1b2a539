"""THE pass that changes numbers: intermediate steps lose their VJP, knots get composite cotangents instead.

    before    grad = sum over all steps of  J_i^T g_i
    after     grad = sum over the knots of  J_k^T G_k        G_k = g_k + sum_i w_ik g_i

The mathematics is in `jagg_fx/interpolation.py`; this pass traces it into the graph. Without intermediate steps it
changes nothing, to the bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from jagg_fx import interpolation
from jagg_fx.config import Weights
from jagg_fx.passes.emit import emit, value
from jagg_fx.passes.find_steps import Step
from jagg_fx.plan import Plan, Segment

PASS = "interpolate_vjps"

Share = tuple[Step, fx.Node | float]  # an intermediate step and its weight at one knot


def interpolate_vjps(graph: fx.Graph, steps: Sequence[Step], plan: Plan, weights: Weights) -> None:
    """Give each knot its composite cotangent and remove the backward calls of intermediate steps.

    Nodes may read later ones afterwards: the composite of a closing knot needs the cotangents of earlier steps, which
    autograd computes after it. `clean_up` sorts the graph.
    """
    shares: dict[int, list[Share]] = {}
    for segment in plan.segments:
        for i in segment.intermediate:
            at_a, at_b = _weights(steps, segment, i, weights)
            shares.setdefault(segment.a, []).append((steps[i], at_a))
            shares.setdefault(segment.b, []).append((steps[i], at_b))
    for k, others in shares.items():
        for slot in range(len(steps[k].cotangent_positions)):
            _compose(steps[k], slot, others)
    for i in plan.intermediate:
        _remove_backward(graph, steps[i])


def _weights(steps: Sequence[Step], segment: Segment, i: int, rule: Weights) -> tuple[fx.Node | float, fx.Node | float]:
    a, b = steps[segment.a], steps[segment.b]
    if rule is Weights.INDEX:
        weight = interpolation.index_weight(segment.a, i, segment.b)
        return 1 - weight, weight
    origin = {"pass": PASS, "step": i, "segment": (segment.a, segment.b)}
    at = b.backward
    times = (a.time, steps[i].time, b.time)
    at_b = emit(at, interpolation.time_weight, times, name=f"weight_{i}_at_{segment.b}", origin=origin)
    at_a = emit(at, lambda weight: 1 - weight, (at_b,), name=f"weight_{i}_at_{segment.a}", origin=origin)
    return at_a, at_b


def _compose(knot: Step, slot: int, others: Sequence[Share]) -> None:
    """Put `G_k` in place of `g_k` among the arguments of a knot's backward call."""
    own = knot.cotangents[slot]
    cotangents = [step.cotangents[slot] for step, _ in others]
    weights = [weight for _, weight in others]
    weight_nodes = [weight for weight in weights if isinstance(weight, fx.Node)]
    shape = value(own).shape

    def composite(own: Tensor, *rest: Tensor) -> Tensor:
        tensors = iter(rest[len(cotangents) :])
        factors = [
            interpolation.per_sample(next(tensors), shape) if isinstance(weight, fx.Node) else weight
            for weight in weights
        ]
        return interpolation.composite(own, list(zip(rest[: len(cotangents)], factors, strict=True)))

    origin = {"pass": PASS, "step": knot.index, "from": [step.index for step, _ in others]}
    name = f"composite_{knot.index}" if slot == 0 else f"composite_{knot.index}_{slot}"
    node = emit(knot.backward, composite, (own, *cotangents, *weight_nodes), name=name, origin=origin)
    knot.backward.update_arg(knot.cotangent_positions[slot], node)


def _remove_backward(graph: fx.Graph, step: Step) -> None:
    for position, gradient in step.gradients.items():
        _drop_zero(graph, gradient, step.operands[position])
    for output in list(step.backward.users):
        graph.erase_node(output)
    graph.erase_node(step.backward)


def _drop_zero(graph: fx.Graph, gradient: fx.Node, operand: fx.Node) -> None:
    """A removed step contributes nothing: leave its gradient out of the sums over steps."""
    for user in list(gradient.users):
        if user.target is torch.ops.aten.add.Tensor and len(set(user.args)) == 2 and not user.kwargs:
            other: Any = next(summand for summand in user.args if summand is not gradient)
            user.replace_all_uses_with(other)
            graph.erase_node(user)
        else:  # read by something else than a sum: still zero
            origin = {"pass": PASS, "zero_gradient_of": gradient.name}
            zero = emit(user, torch.zeros_like, (operand,), name=f"zero_{gradient.name}", origin=origin)
            user.replace_input_with(gradient, zero)
