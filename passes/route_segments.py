"""What becomes of the intermediate steps' own backward calls, now that the knots carry their cotangents.

They are removed. With a guard, each segment gets a `torch.cond` in their place that takes the gradients summed so far:
interpolated, it hands copies of them on; exact, it runs the steps' forward again and adds their VJPs. The conds stand at the
end of the backward, where the activations of all knots are gone, so that the copies and the exact steps find room there; their
branches are shared by all segments of the same length, to be compiled once. Inductor reads each predicate on the host: one
synchronisation per segment and backward, and no CUDA graphs. No autograd runs through cond: the graph is already joint.

With the unbiased option a second cond per segment runs the one step that was drawn.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from jagg_fx._compat import cond, invoke_subgraph
from jagg_fx.passes.emit import BACKWARD, drop_summand, emit, value
from jagg_fx.passes.find_steps import Step, handed_back, output_index
from jagg_fx.passes.score_segments import Choice, Decision
from jagg_fx.plan import Plan

PASS = "route_segments"


@dataclass(frozen=True)
class _Exact:
    """One step to run exactly: its operands that other steps do not share, and its cotangents."""

    operands: Sequence[fx.Node]
    cotangents: Sequence[fx.Node]


def route_segments(gm: fx.GraphModule, steps: Sequence[Step], plan: Plan, decision: Decision) -> None:
    """Remove the intermediate steps' backward calls of one stream, and put its branches at the end of the graph."""
    cotangents = {i: steps[i].cotangents for i in plan.intermediate}
    for i in plan.intermediate:
        _remove_backward(steps[i])
    if not decision.is_guarded and not decision.choices:
        return
    branches = _Branches(gm, steps)
    end = gm.graph.output_node()
    for s, segment in enumerate(plan.segments):
        origin = {"pass": PASS, "stream": steps[0].stream, "segment": (segment.a, segment.b)}
        exact = [_Exact(branches.own_operands(steps[i]), cotangents[i]) for i in segment.intermediate]
        if decision.is_guarded:
            is_exact = functools.partial(_is_exact, segment=s)
            runs = emit(end, is_exact, (decision.keep,), name=f"exact_{segment.a}_{segment.b}", origin=origin)
            branches.call(runs, exact, f"segment_{segment.a}_{segment.b}", origin)
        if decision.choices:
            drawn = _drawn_step(end, exact, decision.choices[s], origin)
            branches.call(decision.choices[s].fires, [drawn], f"correction_{segment.a}_{segment.b}", origin)


def _is_exact(keep: Tensor, *, segment: int) -> Tensor:
    return keep[segment].logical_not()


def _drawn_step(end: fx.Node, candidates: Sequence[_Exact], choice: Choice, origin: dict[str, Any]) -> _Exact:
    """The step that was drawn, its cotangent times its factor `c_i`: both picked from those of the segment."""

    def pick(chosen: Tensor, *candidates: Tensor) -> Tensor:
        return torch.stack(candidates).index_select(0, chosen.reshape(1)).squeeze(0)

    def scaled(chosen: Tensor, factors: Tensor, *cotangents: Tensor) -> Tensor:
        return (pick(chosen, *cotangents) * factors.sum()).to(cotangents[0].dtype)

    return _Exact(
        operands=[
            emit(end, pick, (choice.chosen, *alike), name="drawn_operand", origin=origin)
            for alike in zip(*(step.operands for step in candidates), strict=True)
        ],
        cotangents=[
            emit(end, scaled, (choice.chosen, choice.factors, *alike), name="drawn_cotangent", origin=origin)
            for alike in zip(*(step.cotangents for step in candidates), strict=True)
        ],
    )


class _Branches:
    """The calls of `cond(runs, sums + exact VJPs of some steps, sums)`. Bodies are built once per number of steps."""

    def __init__(self, gm: fx.GraphModule, steps: Sequence[Step]) -> None:
        self.gm, self.step = gm, steps[0]
        operands = [step.operands for step in steps]
        self.differ = [k for k in range(len(operands[0])) if len({own[k] for own in operands}) > 1]
        self.shared = [operands[0][k] for k in range(len(operands[0])) if k not in self.differ]
        self.positions = sorted(self.step.gradients)
        sums = [_sum_over_steps(steps, position) for position in self.positions]
        readers = [list(total.users) for total in sums]
        self.sums = [_pinned(total) for total in sums]
        _read_instead(readers, sums, self.sums)

    def own_operands(self, step: Step) -> list[fx.Node]:
        """The operands of a step that are not the same node at every step."""
        return [step.operands[k] for k in self.differ]

    def call(self, runs: fx.Node, exact: Sequence[_Exact], name: str, origin: dict[str, Any]) -> None:
        """Insert the call at the end of the graph and let all who read the sums read its results."""
        end = self.gm.graph.output_node()
        own = [_contiguous(node) for step in exact for node in (*step.operands, *step.cotangents)]
        inputs = (*self.sums, *self.shared, *own)
        size = f"{len(exact)}_of_stream_{self.step.stream}"
        bodies = self._body(f"exact_vjps_of_{size}", inputs), self._body(f"no_vjps_of_{size}", inputs)
        readers = [list(total.users) for total in self.sums]
        meta = {"partitioner_tag": BACKWARD, "custom": {"jagg_fx": origin}}
        with self.gm.graph.inserting_before(end):
            branches = [self.gm.graph.get_attr(body) for body in bodies]
            call = self.gm.graph.create_node("call_function", cond, (runs, *branches, inputs), name=name)
            call.meta = {"val": tuple(value(total) for total in self.sums), **meta}
            results = []
            for n, total in enumerate(self.sums):
                result = self.gm.graph.create_node("call_function", operator.getitem, (call, n), name=f"{name}_sum_{n}")
                results.append(result)
                results[n].meta = {"val": value(total), **meta}
        _read_instead(readers, self.sums, results)
        self.sums = results

    def _body(self, name: str, inputs: Sequence[fx.Node]) -> str:
        if not hasattr(self.gm, name):
            build = self._exact if name.startswith("exact") else self._unchanged
            self.gm.add_submodule(name, build(inputs))
        return name

    def _unchanged(self, inputs: Sequence[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        sums = _placeholders(graph, inputs)[: len(self.sums)]
        graph.output(tuple(_call(graph, torch.ops.aten.clone.default, (total,), value(total)) for total in sums))
        return fx.GraphModule(self.gm, graph)

    def _exact(self, inputs: Sequence[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        given = iter(_placeholders(graph, inputs))
        sums = [next(given) for _ in self.sums]
        shared = [next(given) for _ in self.shared]
        for own in _chunks(list(given), len(self.differ) + len(self.step.cotangent_positions)):
            per_step, rest = iter(own), iter(shared)
            operands = [next(per_step if k in self.differ else rest) for k in range(len(self.step.operands))]
            gradients = self._vjp(graph, operands, list(per_step))
            sums = [
                _call(graph, torch.ops.aten.add.Tensor, (total, gradient), value(total))
                for total, gradient in zip(sums, gradients, strict=True)
            ]
        graph.output(tuple(sums))
        return fx.GraphModule(self.gm, graph)

    def _vjp(self, graph: fx.Graph, operands: list[fx.Node], cotangents: Sequence[fx.Node]) -> list[fx.Node]:
        """The step's forward, saving what the backward needs, and its backward, as the joint graph calls them."""
        forward = _call_like(graph, self.step.forward, operands)
        given: dict[Any, fx.Node] = dict(zip(self.step.operands, operands, strict=True))
        slots = dict(zip(self.step.cotangent_positions, cotangents, strict=True))
        arguments: Any = self.step.backward.args
        own = handed_back(self.gm, self.step.forward)
        for position, argument in enumerate(arguments[2:], start=2):
            if position not in slots and argument not in given:  # saved by the forward
                index = output_index(argument)
                given[argument] = given[own[index]] if index in own else _getitem(graph, forward, index)
        read = [slots.get(p) or given[argument] for p, argument in enumerate(arguments[2:], start=2)]
        backward = _call_like(graph, self.step.backward, read)
        return [_getitem(graph, backward, output_index(self.step.gradients[p])) for p in self.positions]


# Inductor compiles a branch for the fake strides of its inputs, and hands it whatever layout it gave them; an `as_strided`
# reader holds it to those strides.


def _pinned(total: fx.Node) -> fx.Node:
    """A sum of gradients, in the layout of its fake tensor."""
    origin, name, end = {"pass": PASS, "pinned": total.name}, f"pinned_{total.name}", total.graph.output_node()
    size, stride = value(total).size(), value(total).stride()
    if any(isinstance(n, torch.SymInt) for n in (*size, *stride)):
        return emit(end, lambda x: x.as_strided(x.size(), x.stride()), (total,), name=name, origin=origin)
    # There is one for each parameter, and `emit` takes its time.
    with total.graph.inserting_before(end):
        pinned = total.graph.create_node(
            "call_function", torch.ops.aten.as_strided.default, (total, list(size), list(stride)), name=name
        )
    pinned.meta = {"val": value(total), "partitioner_tag": BACKWARD, "custom": {"jagg_fx": origin}}
    return pinned


def _contiguous(node: fx.Node) -> fx.Node:
    """A contiguous copy of what a step was called with (its time's marker need not have the layout of the time itself)."""
    if not isinstance(value(node), Tensor):
        return node

    def contiguous(x: Tensor) -> Tensor:
        copy = x.clone(memory_format=torch.contiguous_format)
        return copy.as_strided(copy.size(), copy.stride())

    origin = {"pass": PASS, "copied": node.name}
    return emit(node.graph.output_node(), contiguous, (node,), name=f"contiguous_{node.name}", origin=origin)


def _read_instead(readers: Sequence[Sequence[fx.Node]], old: Sequence[fx.Node], new: Sequence[fx.Node]) -> None:
    for users, before, after in zip(readers, old, new, strict=True):
        for user in users:
            user.replace_input_with(before, after)


def _placeholders(graph: fx.Graph, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    placeholders = []
    for n, node in enumerate(inputs):
        placeholders.append(graph.placeholder(f"input_{n}"))
        placeholders[n].meta["val"] = value(node)
    return placeholders


def _chunks(nodes: list[fx.Node], size: int) -> list[list[fx.Node]]:
    return [nodes[n : n + size] for n in range(0, len(nodes), size)]


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], val: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = val
    return node


def _call_like(graph: fx.Graph, call: fx.Node, operands: Sequence[fx.Node]) -> fx.Node:
    """A call of the same region on other operands. Its body is found by name in the module that holds the graph."""
    body, identifier = call.args[:2]
    assert isinstance(body, fx.Node)
    return _call(graph, invoke_subgraph, (graph.get_attr(str(body.target)), identifier, *operands), value(call))


def _getitem(graph: fx.Graph, call: fx.Node, index: int) -> fx.Node:
    return _call(graph, operator.getitem, (call, index), value(call)[index])


def _sum_over_steps(steps: Sequence[Step], position: int) -> fx.Node:
    """The sum of all steps' gradients of an operand, or the first step's gradient where they are not added up directly.

    Nothing else may be in the sum: it becomes an input of the branches, and must not depend on what reads their results.
    """
    sums = {step.gradients[position] for step in steps if position in step.gradients}
    pending = list(sums)
    while pending:
        for user in pending.pop().users:
            is_sum = user.target is torch.ops.aten.add.Tensor and len(user.all_input_nodes) == 2
            if is_sum and user not in sums and sums.issuperset(user.all_input_nodes):
                sums.add(user)
                pending.append(user)
    total = steps[0].gradients[position]
    while len(total.users) == 1 and (only := next(iter(total.users))) in sums:
        total = only
    return total


def _remove_backward(step: Step) -> None:
    origin = step.origin(PASS)
    for position, gradient in step.gradients.items():
        drop_summand(gradient, step.operands[position], origin)
    graph = step.backward.graph
    for output in list(step.backward.users):
        graph.erase_node(output)
    graph.erase_node(step.backward)
