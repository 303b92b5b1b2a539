"""What one step costs: floating-point operations and saved activations, read off the graph of its region."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from jagg_fx.passes.find_steps import Step, handed_back


@dataclass(frozen=True)
class StepCost:
    """Of one step of a stream.

    Attributes:
        forward_flops, backward_flops: by torch's formulas for matrix products, convolutions and attention; a multiplication
            and an addition count as two.
        saved_bytes: activations that the forward keeps for the backward.
    """

    forward_flops: int
    backward_flops: int
    saved_bytes: int


def cost_of(gm: fx.GraphModule, step: Step, forward: fx.Graph, backward: fx.Graph) -> Callable[[], StepCost]:
    """What counts, when it is called, the cost of a step as it is now.

    Args:
        forward, backward: copies of what its region computes.
    """
    outputs = step.forward.meta["val"]
    parameters = set(handed_back(gm, step.forward))
    kept = [x for k, x in enumerate(outputs) if k >= len(step.cotangent_positions) and k not in parameters]

    def cost() -> StepCost:
        saved = sum(int(x.numel()) * x.element_size() for x in kept if isinstance(x, Tensor))
        return StepCost(_flops(forward), _flops(backward), saved)

    return cost


def _flops(graph: fx.Graph) -> int:
    total = 0
    for node in graph.nodes:
        packet: Any = getattr(node.target, "overloadpacket", None)
        if node.op == "call_function" and packet in flop_registry:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
            total += int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    return total
