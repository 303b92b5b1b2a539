"""What a node of a graph is computed from."""

from collections.abc import Iterable

from torch import fx


def with_sources(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that they are computed from."""
    pending = list(nodes)
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found
