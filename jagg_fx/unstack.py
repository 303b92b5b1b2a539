"""Hand stacked inputs to a graph slice by slice.

Replay functions index one tensor of all states and one of all noise levels, `latents[i]` and `sigmas[i]`. In generated code
the index is a constant, so that the few operators between two steps are another kernel, and another C++ compile, for every
step. With the slices as inputs of their own, all steps share those kernels. No data is copied and no number changes.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from jagg_fx._compat import copy_source
from jagg_fx.layouts import example

Inputs = Sequence[Any]


def unstack_inputs(
    gm: fx.GraphModule, inputs: Inputs
) -> tuple[fx.GraphModule, list[Any], Callable[[Inputs], list[Any]]]:
    """A copy of a graph in which inputs that are only read as `input[i]` are replaced by those items.

    Args:
        gm: a graph from Dynamo, which Dynamo goes on using after the backend returns.
        inputs: its example inputs.

    Returns:
        The new graph, its example inputs, and the function that makes its inputs of the old ones at every call.
    """
    whole = _mutates(gm)
    items = [None if whole else _items(node) for node in gm.graph.find_nodes(op="placeholder")]

    def unstack(values: Inputs) -> list[Any]:
        unstacked: list[Any] = []
        for value, indices in zip(values, items, strict=True):
            unstacked += [value] if indices is None else [value[index] for index in indices]
        return unstacked

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    slices: dict[tuple[Any, ...], fx.Node] = {}
    arguments = iter(zip(items, inputs, strict=True))
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            indices, given = next(arguments)
            if indices is not None:
                slices.update({(node, index): _item_placeholder(graph, node, index, given) for index in indices})
                continue
        if node.target is operator.getitem and type(node.args[1]) is int and node.args in slices:
            copies[node] = slices[node.args]
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "placeholder":
            copy_source(node, copies[node])
    graph.lint()
    unstacked = fx.GraphModule(gm, graph)
    unstacked.meta = gm.meta
    return unstacked, unstack(inputs), unstack


def _item_placeholder(graph: fx.Graph, placeholder: fx.Node, index: int, given: Tensor) -> fx.Node:
    item = graph.placeholder(f"{placeholder.name}_{index}")
    item.meta["example_value"] = given[index]
    copy_source(placeholder, item, index)
    return item


def _items(placeholder: fx.Node) -> list[int] | None:
    """The constant indices by which an input is read, if it is read in no other way."""
    tensor = example(placeholder)
    if not isinstance(tensor, Tensor) or tensor.requires_grad or tensor.dim() == 0 or not placeholder.users:
        return None
    indices = set()
    for user in placeholder.users:
        if user.target is not operator.getitem or type(user.args[1]) is not int or user.args[1] < 0:
            return None
        indices.add(user.args[1])
    return sorted(indices)


def _mutates(gm: fx.GraphModule) -> bool:
    # Slices of one tensor that are written to are one input with aliases; leave them as they are.
    return any(
        node.target in (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv)
        or (node.op == "call_method" and str(node.target).endswith("_"))
        for node in gm.graph.nodes
    )
