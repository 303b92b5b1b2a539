"""Make regions of the denoiser's calls in a graph where Dynamo inlined them.

`transform` marks the denoiser before Dynamo sees it, so that it is traced once. `backend="jagg"` comes too late for that,
and some models cannot be captured as nested regions. Dynamo notes on every node which call of which module it came from,
though, so the calls can be put back together; what follows (AOTAutograd, Inductor) still happens once for all steps.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from jagg_fx._compat import invoke_subgraph, sets_grad_mode
from jagg_fx.ancestry import with_sources
from jagg_fx.errors import DenoiserNotFoundError, SeveralDenoisersError, TimeArgumentError
from jagg_fx.layouts import example
from jagg_fx.region import TIME, CallNote


@dataclass(frozen=True)
class _Call:
    """One call of the denoiser: its nodes, and the nodes outside that it reads, in the order of first use."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]

    @property
    def outputs(self) -> list[fx.Node]:
        own = set(self.nodes)
        return [node for node in self.nodes if any(user not in own for user in node.users)]


def outline(gm: fx.GraphModule, denoiser: nn.Module | None) -> tuple[int, str]:
    """Turn the denoiser's calls under grad mode into regions with marked times, in place.

    Returns how many, and the denoiser's class.

    Args:
        gm: a graph from Dynamo.
        denoiser: the module called once per step; by default the one outermost module with trainable parameters.

    Raises:
        SeveralDenoisersError: no module was named and several qualify.
        DenoiserNotFoundError: the named module is not called in this graph.
        TimeArgumentError: which input is the time cannot be told from the graph.
    """
    module = _denoiser_key(gm, denoiser)
    calls = _calls(gm, module) if module is not None else []
    if not calls:
        return 0, ""
    position = _time_position([call.inputs for call in calls])
    bodies: dict[str, str] = {}
    name = next(
        kind.__name__ for key, (_, kind) in _stack(calls[0].nodes[0]).items() if key.partition("@")[0] == module
    )
    for call in calls:
        _replace(gm, call, position, bodies)
    gm.graph.lint()
    gm.recompile()
    return len(calls), name


def _stack(node: fx.Node) -> dict[str, tuple[str, type]]:
    return node.meta.get("nn_module_stack") or {}


def _denoiser_key(gm: fx.GraphModule, denoiser: nn.Module | None) -> str | None:
    """Key of the denoiser in `nn_module_stack`: its identity, to which Dynamo adds "@n" for repeated calls."""
    called = {key.partition("@")[0]: place for node in gm.graph.nodes for key, place in _stack(node).items()}
    if denoiser is not None:
        if str(id(denoiser)) not in called:
            raise DenoiserNotFoundError.not_in_graph(type(denoiser).__name__)
        return str(id(denoiser))
    outermost = {
        next(iter(_stack(parameter))).partition("@")[0]
        for parameter in gm.graph.find_nodes(op="placeholder")
        if _stack(parameter) and example(parameter).requires_grad
    }
    if len(outermost) > 1:
        raise SeveralDenoisersError.in_graph([f"{called[key][0]}: {called[key][1].__name__}" for key in outermost])
    return next(iter(outermost), None)


def _calls(gm: fx.GraphModule, module: str) -> list[_Call]:
    # Dynamo counts the calls of a module by the name it reached it by: key and name together are one call.
    nodes: dict[tuple[str, str], list[fx.Node]] = {}
    grad = torch.is_grad_enabled()
    for node in gm.graph.nodes:
        if sets_grad_mode(node):
            grad = bool(node.args[0])
        if node.op not in ("call_function", "call_method", "call_module") or not grad:
            continue
        for key, (name, _) in _stack(node).items():
            if key.partition("@")[0] == module:
                nodes.setdefault((key, name), []).append(node)
    calls = []
    for own in nodes.values():
        inside = set(own) - _marker_and_sources(own)
        own = [node for node in own if node in inside]
        inputs = {source: None for node in own for source in node.all_input_nodes if source not in inside}
        calls.append(_Call(own, list(inputs)))
    return calls


def _marker_and_sources(own: Sequence[fx.Node]) -> set[fx.Node]:
    """A marked time was marked within the call, but it belongs to the call's arguments."""
    return with_sources(node for node in own if node.target is TIME)


def _time_position(inputs: Sequence[Sequence[fx.Node]]) -> int:
    """The marked input, or the one that changes from call to call and holds a number per sample, or one number."""
    found = [position for position, node in enumerate(inputs[0]) if node.target is TIME] or [
        position
        for position, column in enumerate(zip(*inputs, strict=False))
        if (len(inputs) == 1 or len(set(column)) > 1) and _holds_times(example(column[0]))
    ]
    if len(found) != 1:
        raise TimeArgumentError.not_in_graph(len(found))
    return found[0]


def _holds_times(example: Any) -> bool:
    return isinstance(example, Tensor) and not example.requires_grad and all(size == 1 for size in example.shape[1:])


def _replace(gm: fx.GraphModule, call: _Call, time_position: int, bodies: dict[str, str]) -> None:
    graph, outputs = gm.graph, call.outputs
    body = _body(gm, call, outputs)
    key = _fingerprint(body, call.inputs)
    if key not in bodies:
        bodies[key] = f"jagg_fx_step_{len(bodies)}"
        gm.add_submodule(bodies[key], body)
    with graph.inserting_after(call.nodes[-1]):
        region = graph.get_attr(bodies[key])
    time = marked = call.inputs[time_position]
    if time.target is not TIME:
        with graph.inserting_before(region):
            marked = graph.call_function(TIME, (time, CallNote().encode()))
        marked.meta["example_value"] = example(time).clone()
    with graph.inserting_after(region):
        operands = [marked if node is time else node for node in call.inputs]
        result = graph.call_function(invoke_subgraph, (region, bodies[key], *operands))
        result.meta["example_value"] = tuple(example(output) for output in outputs)

    inside = set(call.nodes)

    def outside(user: fx.Node) -> bool:
        return user not in inside

    for index, output in reversed(list(enumerate(outputs))):
        with graph.inserting_after(result):
            value = graph.call_function(operator.getitem, (result, index))
        value.meta["example_value"] = example(output)
        output.replace_all_uses_with(value, delete_user_cb=outside)
    for node in reversed(call.nodes):
        graph.erase_node(node)


def _body(gm: fx.GraphModule, call: _Call, outputs: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for position, source in enumerate(call.inputs):
        copies[source] = graph.placeholder(f"arg_{position}")
        copies[source].meta = dict(source.meta)
    for node in call.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[output] for output in outputs))
    return fx.GraphModule(gm, graph)


def _fingerprint(body: fx.GraphModule, inputs: Sequence[fx.Node]) -> str:
    """Equal for calls that run the same operators on inputs of the same kind."""
    order = {node: position for position, node in enumerate(body.graph.nodes)}
    lines = [
        repr((node.op, str(node.target), fx.map_arg((node.args, node.kwargs), lambda n: ("node", order[n]))))
        for node in body.graph.nodes
    ]
    kinds = [
        (str(e.dtype), tuple(e.shape), e.requires_grad) if isinstance(e, Tensor) else e for e in map(example, inputs)
    ]
    return "\n".join([*lines, repr(kinds)])
