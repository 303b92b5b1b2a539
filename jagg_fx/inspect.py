"""Read a joint graph at the level of steps: a node per call of the denoiser, not thousands of operators."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from jagg_fx._compat import RANGE, cond, invoke_subgraph
from jagg_fx.graphs import Kind, StepGraph, StepNode
from jagg_fx.passes.find_steps import Step


def step_graph(graph: fx.Graph, streams: Sequence[Sequence[Step]]) -> StepGraph:
    """The calls of the steps' forwards and backwards and the branches, in the order of the graph, before or after."""
    return StepGraph(tuple(found for _, found in _located(graph, streams)))


def name_ranges(graph: fx.Graph, streams: Sequence[Sequence[Step]]) -> None:
    """Let each step's forward and backward and each branch have a name in a profiler's trace."""
    for node, found in _located(graph, streams):
        node.meta["custom"] = {**node.meta.get("custom", {}), RANGE: found.name(len(streams) > 1)}


def _located(graph: fx.Graph, streams: Sequence[Sequence[Step]]) -> Iterator[tuple[fx.Node, StepNode]]:
    forwards = {step.forward: step for steps in streams for step in steps}
    backwards = {step.backward: step for steps in streams for step in steps}
    for node in graph.nodes:
        origin = _origin(node)
        if node.target is cond and "segment" in origin:
            a, b = origin["segment"]
            is_drawn = node.name.startswith("correction")
            yield node, StepNode(Kind.BRANCH, origin["stream"], a, routes=tuple(range(a + 1, b)), is_drawn=is_drawn)
        if node.target is not invoke_subgraph:
            continue
        if node in backwards:
            step = backwards[node]
            carried = {i for cotangent in step.cotangents for i in _origin(cotangent).get("from", ())}
            yield node, StepNode(Kind.BACKWARD, step.stream, step.index, carries=tuple(sorted(carried)))
            continue
        is_new = origin.get("pass") == "drop_saved"
        forward = streams[origin["stream"]][origin["step"]] if is_new else forwards.get(node)
        if forward is not None:
            saved = max(0, len(node.meta["val"]) - len(forward.cotangent_positions))
            yield node, StepNode(Kind.FORWARD, forward.stream, forward.index, saves=saved)


@dataclass(frozen=True)
class Frozen:
    """A graph as it was at one moment: later passes change the original.

    Attributes:
        graph: a copy of its nodes.
        held: the modules and constants that they name.
    """

    graph: fx.Graph
    held: dict[str, Any]

    @classmethod
    def of(cls, gm: fx.GraphModule) -> "Frozen":
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        names = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
        return cls(graph, {name: getattr(gm, name) for name in names})

    def code(self) -> str:
        """Readable code; printing it takes its time."""
        return str(fx.GraphModule(self.held, self.graph).print_readable(print_output=False, include_stride=False))


def _origin(node: fx.Node) -> dict[str, Any]:
    origin: dict[str, Any] = node.meta.get("custom", {}).get("jagg_fx", {})
    return origin
