"""Let forward calls return only what is read: intermediate steps save nothing, and knots do not hand back their inputs.

Exact: a pruned copy of the region holds the operators of what it still returns, unchanged. AOTAutograd lets a region
return every parameter that its backward reads; the backward can read the parameter itself, and the compiler has half as
many values to carry from one call to the other.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from jagg_fx.passes.emit import value
from jagg_fx.passes.find_steps import Step, handed_back, output_index
from jagg_fx.plan import Plan

PASS = "drop_saved"


def drop_saved(gm: fx.GraphModule, streams: Sequence[Sequence[Step]], plans: Sequence[Plan]) -> None:
    """Run after `interpolate_vjps`, when nothing reads what intermediate steps saved."""
    pruned: dict[tuple[str, tuple[int, ...]], str] = {}
    for steps, plan in zip(streams, plans, strict=True):
        for step in steps if plan.segments else ():
            is_intermediate = step.index in plan.intermediate
            _read_inputs_directly(gm, step)
            for output in [output for output in step.forward.users if not output.users]:
                gm.graph.erase_node(output)
            kept = tuple(sorted({output_index(output) for output in step.forward.users}))
            if (step.region, kept) not in pruned:
                kind = "value_only" if is_intermediate else "returns_less"
                pruned[step.region, kept] = name = f"{step.region}_{kind}_{len(pruned)}"
                gm.add_submodule(name, _returning(getattr(gm, step.region), kept))
            _call(gm, step, pruned[step.region, kept], kept, "value_only" if is_intermediate else "forward")


def _read_inputs_directly(gm: fx.GraphModule, step: Step) -> None:
    operands = handed_back(gm, step.forward)
    for output in list(step.forward.users):
        if output_index(output) in operands:
            output.replace_all_uses_with(operands[output_index(output)])


def _call(gm: fx.GraphModule, step: Step, name: str, kept: Sequence[int], label: str) -> None:
    """Call another body in place of the step's own, which returns the outputs `kept`."""
    with gm.graph.inserting_before(step.forward):
        body = gm.graph.get_attr(name)
        call = gm.graph.create_node(
            "call_function", step.forward.target, (body, name, *step.operands), name=f"{step.name}_{label}"
        )
    call.meta = dict(step.forward.meta)
    call.meta["val"] = tuple(value(step.forward)[k] for k in kept)
    call.meta["custom"] = {"jagg_fx": step.origin(PASS)}
    for output in list(step.forward.users):
        output.args = (call, kept.index(output_index(output)))
    gm.graph.erase_node(step.forward)


def _returning(region: fx.GraphModule, kept: Sequence[int]) -> fx.GraphModule:
    """The region with only some of its outputs, and without the operators that computed the others."""
    graph = fx.Graph()
    outputs: Any = graph.graph_copy(region.graph, {})
    graph.output(tuple(outputs[k] for k in kept))
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(region, graph)
