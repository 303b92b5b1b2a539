"""Number the values of a graph so that equal expressions share a number. Changes nothing.

Loops rebuild the same operands at every step (`torch.cat([negative, positive])`, a time that is expanded twice for the two
halves of guidance). Which calls belong together, and which operands they share, must not depend on that.
"""

from typing import Any

import torch
from torch import fx

Numbers = dict[fx.Node, Any]


def value_numbers(graph: fx.Graph) -> Numbers:
    """A number per node that equal expressions share, of whatever node."""
    numbers: dict[fx.Node, Any] = {}
    known: dict[Any, int] = {}
    for node in graph.nodes:
        if node.op == "call_function" and not node.is_impure():
            expression = fx.map_arg((node.args, node.kwargs), lambda n: ("node", numbers[n]))
            key: Any = (node.target, repr(expression))
        elif node.op == "get_attr" and isinstance(
            constant := getattr(graph.owning_module, str(node.target)), torch.Tensor
        ):
            key = ("constant", constant.dtype, repr(constant.tolist()))  # a Python number that was made a tensor
        else:
            key = node
        numbers[node] = known.setdefault(key, len(known))
    return numbers
