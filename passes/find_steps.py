"""Recognise the steps: calls of the denoiser's region in the joint graph, each with its backward, time and cotangents.

Changes nothing. A step is its boundary; the passes never look inside the region, but for its random operators.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from jagg_fx._compat import invoke_subgraph
from jagg_fx.errors import NotARegionError
from jagg_fx.passes.emit import value
from jagg_fx.region import TIME, CallNote


@dataclass(frozen=True)
class Step:
    """One call of the denoiser that the outputs depend on.

    Attributes:
        index: position among the steps of its stream, in the order of the calls.
        stream: which stream it belongs to; `find_steps` numbers all calls through as one, `group_streams` sorts them.
        forward: the region's forward call; its outputs are the values and what it saves for the backward.
        backward: the region's backward call; its outputs are the gradients of the operands.
        operands: what the forward call reads: the denoiser's arguments and parameters.
        time: the operand that is the step's time, before its marker.
        note: what is known of the call: which denoiser, with which arguments.
        cotangent_positions: where the backward call takes its cotangents, one per differentiable value.
        gradients: for each operand whose gradient is used, the node of that gradient.
        values: the differentiable values `v_i` that the loss reads, by their place among the cotangents.
    """

    index: int
    forward: fx.Node
    backward: fx.Node
    operands: tuple[fx.Node, ...]
    time: fx.Node
    note: CallNote
    cotangent_positions: tuple[int, ...]
    gradients: dict[int, fx.Node]
    values: dict[int, fx.Node]
    stream: int = 0

    @property
    def name(self) -> str:
        """For nodes."""
        return f"step_{self.index}" if self.stream == 0 else f"stream_{self.stream}_step_{self.index}"

    def origin(self, name: str) -> dict[str, Any]:
        """Provenance of nodes that the pass of that name adds for this step."""
        return {"pass": name, "stream": self.stream, "step": self.index}

    @property
    def region(self) -> str:
        """Name of the forward subgraph; steps of one computation share it."""
        return region_name(self.forward)

    @property
    def cotangents(self) -> tuple[fx.Node, ...]:
        """`g_i` as the loss computes it, one per differentiable value of the denoiser."""
        arguments: Any = self.backward.args
        return tuple(arguments[position] for position in self.cotangent_positions)


def region_name(call: fx.Node) -> str:
    """Name of the subgraph that a call runs."""
    body: Any = call.args[0]
    name: str = body.target
    return name


def output_index(output: fx.Node) -> int:
    """Which output of a region's call a `getitem` node is."""
    index: Any = output.args[1]
    return int(index)


def inside(gm: fx.GraphModule, call: fx.Node) -> tuple[dict[fx.Node, fx.Node], Sequence[Any]]:
    """Of the region that a call runs: the call's operands by the region's inputs, and the region's outputs."""
    body = getattr(gm, region_name(call)).graph
    returned: Any = body.output_node().args[0]
    operands: Any = call.args[2:]
    return dict(zip(body.find_nodes(op="placeholder"), operands, strict=True)), returned


def handed_back(gm: fx.GraphModule, call: fx.Node) -> dict[int, fx.Node]:
    """Outputs of a region's call that are its own operands, as saved parameters are: the operand by output index."""
    given, returned = inside(gm, call)
    return {k: given[source] for k, source in enumerate(returned) if source in given}


def _marked_time(marker: fx.Node) -> fx.Node:
    time: Any = marker.args[0]
    node: fx.Node = time
    return node


def marked_calls(graph: fx.Graph) -> list[fx.Node]:
    """Forward calls of the denoiser, in order: the region calls that read a marked time.

    Raises:
        NotARegionError: a marked time is read by something else, so the denoiser's call did not become a region.
    """
    calls: dict[fx.Node, None] = {}
    for marker in graph.find_nodes(op="call_function", target=TIME):
        for user in marker.users:
            if user.target is not invoke_subgraph:
                raise NotARegionError.inlined()
            # A backward call reads the marker too when the step's time is among what its forward saved.
            if user.meta.get("partitioner_tag") != "is_backward":
                calls[user] = None
    return [node for node in graph.nodes if node in calls]


def find_steps(graph: fx.Graph) -> list[Step]:
    """Steps of a joint graph in call order; calls without a backward (under no_grad, or unused) are not steps."""
    backwards = [
        node
        for node in graph.find_nodes(op="call_function", target=invoke_subgraph)
        if node.meta.get("partitioner_tag") == "is_backward"
    ]
    steps: list[Step] = []
    for forward in marked_calls(graph):
        backward = _own_backward(forward, backwards)
        if backward is None:
            continue
        operands: Any = forward.args[2:]
        marker = next(operand for operand in operands if isinstance(operand, fx.Node) and operand.target is TIME)
        body = getattr(graph.owning_module, region_name(backward))
        placeholders = body.graph.find_nodes(op="placeholder")
        # With symbolic sizes the saved values come in another order than the forward returns them: go by the names of the
        # region's own arguments, which AOTAutograd's partitioner gives and relies on itself.
        positions = tuple(2 + i for i, node in enumerate(placeholders) if node.name.startswith("tangents"))
        steps.append(
            Step(
                index=len(steps),
                forward=forward,
                backward=backward,
                operands=tuple(operands),
                time=_marked_time(marker),
                note=CallNote.decode(str(marker.args[1])),
                cotangent_positions=positions,
                gradients={output_index(user): user for user in backward.users if user.users},
                values=_differentiable_values(forward, [backward.args[position] for position in positions]),
            )
        )
    return steps


def _differentiable_values(forward: fx.Node, cotangents: list[Any]) -> dict[int, fx.Node]:
    """Values come first among a forward's outputs, and each has the shape of its cotangent."""
    nodes = {output_index(user): user for user in forward.users if user.target is operator.getitem}
    floating = [
        k for k, output in enumerate(value(forward)) if isinstance(output, Tensor) and output.is_floating_point()
    ]
    return {
        slot: nodes[k]
        for slot, (k, cotangent) in enumerate(zip(floating, cotangents, strict=False))
        if k in nodes and nodes[k].users and value(nodes[k]).shape == value(cotangent).shape
    }


def _own_backward(forward: fx.Node, backwards: list[fx.Node]) -> fx.Node | None:
    call_id = forward.meta.get("custom", {}).get("call_id")
    if call_id is not None:
        return next((b for b in backwards if b.meta.get("custom", {}).get("call_id") == call_id), None)
    # Torch before 2.13 numbers no calls: a backward reads what its own forward saved.
    saved = {user for user in forward.users if user.target is operator.getitem}
    return next((b for b in backwards if saved & set(b.all_input_nodes)), None)
