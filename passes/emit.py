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
    before: fx.Node, fn: Callable[..., Tensor], operands: Sequence[fx.Node], *, name: str, origin: dict[str, Any]
) -> fx.Node:
    """Insert `fn(*operands)` before a node, as part of the backward, and return the node of its result.

    Args:
        before: where to insert. Operands may stand later in the graph; the pass sorts it when it is done.
        fn: takes one tensor per operand and returns a tensor; traced to ATen operators.
        name: readable name of the result.
        origin: provenance of the new nodes (pass, step), kept in `meta["custom"]["jagg_fx"]`.
    """
    graph = before.graph
    values = [value(operand) for operand in operands]
    mode = next(v.fake_mode for v in values if hasattr(v, "fake_mode"))
    with mode, torch.no_grad():
        traced = make_fx(fn, decomposition_table=decompositions())(*values)
    placeholders = traced.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, fx.Node] = dict(zip(placeholders, operands, strict=True))
    (result,) = traced.graph.find_nodes(op="output")
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
                hint = name if node is result.args[0] else f"{name}_{node.name}"
                copy = graph.create_node("call_function", node.target, args, kwargs, name=hint)
                copy.meta = {
                    "val": node.meta["val"],
                    "partitioner_tag": BACKWARD,
                    "custom": {"jagg_fx": dict(origin)},
                }
                copies[node] = copy
    return copies[result.args[0]]
