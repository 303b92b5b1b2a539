"""Intermediate steps save nothing: their forward call becomes a value-only copy of the region.

Exact: the copy holds the operators that compute the value, unchanged, and drops only what the backward would have read.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from jagg_fx.passes.emit import value
from jagg_fx.passes.find_steps import Step, output_index
from jagg_fx.plan import Plan


def drop_saved(gm: fx.GraphModule, steps: Sequence[Step], plan: Plan) -> None:
    """Run after `interpolate_vjps`, when nothing reads what intermediate steps saved."""
    for i in plan.intermediate:
        step = steps[i]
        for output in [output for output in step.forward.users if not output.users]:
            gm.graph.erase_node(output)
        kept = sorted({output_index(output) for output in step.forward.users})
        name = f"{step.region}_value_only_{'_'.join(map(str, kept))}"
        if not hasattr(gm, name):
            gm.add_submodule(name, _value_only(getattr(gm, step.region), kept))
        with gm.graph.inserting_before(step.forward):
            body = gm.graph.get_attr(name)
            call = gm.graph.create_node(
                "call_function", step.forward.target, (body, name, *step.operands), name=f"step_{i}_value_only"
            )
        call.meta = dict(step.forward.meta)
        call.meta["val"] = tuple(value(step.forward)[k] for k in kept)
        call.meta["custom"] = {"jagg_fx": {"pass": "drop_saved", "step": i}}
        for output in list(step.forward.users):
            output.args = (call, kept.index(output_index(output)))
        gm.graph.erase_node(step.forward)


def _value_only(saving: fx.GraphModule, kept: Sequence[int]) -> fx.GraphModule:
    """The region with only some of its outputs, and without the operators that computed the others."""
    graph = fx.Graph()
    outputs: Any = graph.graph_copy(saving.graph, {})
    graph.output(tuple(outputs[k] for k in kept))
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(saving, graph)
