"""Read what a region returns of its own operands from the operands themselves. Exact.

A forward may save an operand, or a view of it, by returning it; a backward may return a cotangent as a gradient. Inductor does
not know that such an output lies in the operand's memory: where the operand is made within the graph, it gives that memory to
another one, and who reads the output reads that (torch 2.13). Always runs, also where nothing is interpolated.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from jagg_fx.passes.emit import BACKWARD, emit
from jagg_fx.passes.find_steps import Step, inside, output_index

PASS = "reread_operands"


def reread_operands(gm: fx.GraphModule, streams: Sequence[Sequence[Step]]) -> None:
    """Run after `route_segments`, which reads what forwards saved as autograd wrote it down."""
    for steps in streams:
        for step in steps:
            for call in (step.forward, step.backward):
                if call.users:  # intermediate steps have lost their backward
                    _reread(gm, call, step.origin(PASS))


def _reread(gm: fx.GraphModule, call: fx.Node, origin: dict[str, Any]) -> None:
    given, returned = inside(gm, call)
    for output in list(call.users):
        views = _views(returned[output_index(output)])
        if output.users and views is not None and given[views[0]].op != "placeholder":
            # (memory of the whole graph's inputs is not given away)
            output.replace_all_uses_with(_replayed(call, views, given, {**origin, "read": output.name}))


def _views(node: Any) -> list[fx.Node] | None:
    """From an operand of a region to an output that lies in its memory: the operand, and one view after the other."""
    chain = [node]
    while isinstance(chain[0], fx.Node) and chain[0].op != "placeholder":
        target = chain[0].target
        if not isinstance(target, torch._ops.OpOverload) or not target.is_view:
            return None
        chain.insert(0, chain[0].args[0])
    return chain if isinstance(chain[0], fx.Node) else None


def _replayed(
    call: fx.Node, views: Sequence[fx.Node], given: dict[fx.Node, fx.Node], origin: dict[str, Any]
) -> fx.Node:
    """The same views of the operand itself."""
    operand = given[views[0]]
    if len(views) == 1:
        return operand
    sizes = [n for view in views[1:] for n in view.all_input_nodes if n in given and n is not views[0]]

    def viewed(x: Tensor, *numbers: Any) -> Tensor:
        known: dict[Any, Any] = dict(zip(sizes, numbers, strict=True))
        for view in views[1:]:
            known[view.args[0]] = x
            args, kwargs = fx.map_arg((view.args, view.kwargs), known.__getitem__)
            target: Any = view.target
            x = target(*args, **kwargs)
        return x

    tag = BACKWARD if call.meta.get("partitioner_tag") == BACKWARD else None
    operands = (operand, *(given[n] for n in sizes))
    return emit(call.next, viewed, operands, name=f"operand_of_{call.name}", origin=origin, tag=tag)
