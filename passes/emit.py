"""Write plain torch code into a graph: trace a function over the fake values of existing nodes and copy its nodes in."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from jagg_fx._compat import decompositions

BACKWARD = "is_backward"


def value(node: fx.Node) -> Any:
    """What a node stands for: a fake tensor, a symbolic number, or a tuple of them."""
    return node.meta["val"]


def emit(
    before: fx.Node,
    fn: Callable[..., Tensor],
    operands: Sequence[fx.Node],
    *,
    name: str,
    origin: dict[str, Any],
    tag: str | None = BACKWARD,
) -> fx.Node:
    """Insert `fn(*operands)` before a node and return the node of its result.

    Args:
        before: where to insert. Operands may stand later in the graph; the pass sorts it when it is done.
        fn: takes one tensor per operand and returns a tensor; traced to ATen operators.
        name: readable name of the result.
        origin: provenance of the new nodes (pass, step), kept in `meta["custom"]["jagg_fx"]`.
        tag: the partitioner's: part of the backward, or None where the partitioner may choose.
    """
    graph = before.graph
    # Detached: nodes may share one fake tensor, and tracing would take them for one input.
    values = [v.detach() if isinstance(v := value(operand), Tensor) else v for operand in operands]
    mode = next(v.fake_mode for v in values if hasattr(v, "fake_mode"))
    with mode, torch.no_grad():
        # `make_fx` would take a function's defaults and a partial's keywords for inputs.
        traced = make_fx(lambda *values: fn(*values), decomposition_table=decompositions())(*values)
    placeholders = traced.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, fx.Node] = dict(zip(placeholders, operands, strict=True))
    (result,) = traced.graph.find_nodes(op="output")
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
                hint = name if node is result.args[0] else f"{name}_{node.name}"
                copy = graph.create_node("call_function", node.target, args, kwargs, name=hint)
                copy.meta = {"val": node.meta["val"], "custom": {"jagg_fx": dict(origin)}}
                if tag is not None:
                    copy.meta["partitioner_tag"] = tag
                copies[node] = copy
    return copies[result.args[0]]


def drop_summand(gradient: fx.Node, zeros_like: fx.Node, origin: dict[str, Any]) -> None:
    """Leave a gradient out of the sums over steps that read it: what computed it is about to be removed."""
    for user in list(gradient.users):
        if user.target is torch.ops.aten.add.Tensor and len(set(user.args)) == 2 and not user.kwargs:
            other: Any = next(summand for summand in user.args if summand is not gradient)
            user.replace_all_uses_with(other)
            user.graph.erase_node(user)
        else:  # read by something else than a sum: still zero
            zero = emit(user, torch.zeros_like, (zeros_like,), name=f"zero_{gradient.name}", origin=origin)
            user.replace_input_with(gradient, zero)
