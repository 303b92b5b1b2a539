"""What is done to a graph from Dynamo before AOTAutograd sees it: stacked inputs, layouts, outlined calls."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from jagg_fx import _compat
from jagg_fx.denoiser import find_time
from jagg_fx.layouts import contiguous_cotangent, example, unify_layouts
from jagg_fx.outline import outline
from jagg_fx.region import TIME, Region
from jagg_fx.unstack import unstack_inputs
from tests.problems import BATCH, MLP, PROBLEMS, STEPS, Problem, path, per_sample_times, squared


class CapturedError(Exception):
    """Stops torch.compile once the graph is there."""


def capture(problem: Problem, nested: bool = True) -> tuple[fx.GraphModule, list[Any]]:
    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((gm, inputs))
        raise CapturedError

    region = Region(problem.model, find_time(problem.model, None), failure=None if nested else "tried")
    with region.installed(), _compat.dynamo_settings(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(problem.fn, backend=backend, fullgraph=True)(*problem.args)
    return graphs[0]


def calls(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=_compat.invoke_subgraph))


def test_stacked_inputs_become_their_items() -> None:
    problem = per_sample_times(torch.float32)
    gm, inputs = capture(problem)
    unstacked, examples, unstack = unstack_inputs(gm, inputs)
    names = [node.name for node in unstacked.graph.find_nodes(op="placeholder")]
    assert len(names) == len(examples) == len(inputs) - 2 + 2 * (STEPS + 1)
    values = [torch.full(x.shape, float(k)) if isinstance(x, Tensor) else x for k, x in enumerate(inputs)]
    items = unstack(values)
    assert len(items) == len(names)
    for item, given in zip(items, examples, strict=True):
        assert item.shape == given.shape
    assert len(gm.graph.find_nodes(op="placeholder")) == len(inputs), "Dynamo goes on using its own graph"


def test_an_input_that_is_read_otherwise_or_written_to_stays_whole() -> None:
    model = MLP()

    def reads_it_whole(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH))) for i in range(STEPS)], 1) * z.sum()

    def writes(z: Tensor, t: Tensor) -> Tensor:
        z[0].add_(1)
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH))) for i in range(STEPS)], 1)

    z, t = path(torch.float32)
    for fn, extra in ((reads_it_whole, STEPS), (writes, 0)):
        gm, inputs = capture(Problem(model, fn, (z.clone(), t), []))
        assert len(unstack_inputs(gm, inputs)[1]) == len(inputs) + extra, fn


def test_operands_and_cotangents_get_one_layout() -> None:
    gm, _ = capture(per_sample_times(torch.float32))
    assert any(example(operand).storage_offset() for call in calls(gm) for operand in call.all_input_nodes[1:])
    unify_layouts(gm)
    for call in calls(gm):
        for operand in call.all_input_nodes[1:]:
            assert operand.target is TIME or example(operand).storage_offset() == 0
        (value,) = call.users
        assert [user.target for user in value.users] == [contiguous_cotangent]


@pytest.mark.parametrize("name", ["per_sample_times", "digits_dit", "python_numbers", "reference_model", "two_outputs"])
def test_outlined_calls_are_those_that_nested_regions_make(name: str) -> None:
    problem = PROBLEMS[name](torch.float32)
    gm, _ = capture(problem, nested=False)
    assert not calls(gm)
    assert outline(gm, problem.model) == (STEPS, type(problem.model).__name__)
    assert len(calls(gm)) == STEPS
    assert len({call.args[1] for call in calls(gm)}) == 1, "all steps share one region"
    for call in calls(gm):
        assert [operand.target for operand in call.all_input_nodes].count(TIME) == 1
        assert all(user.target is operator.getitem for user in call.users)


def test_outlining_finds_the_denoiser_and_the_time_by_itself() -> None:
    problem = per_sample_times(torch.float32)
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        raise CapturedError

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(problem.fn, backend=backend, fullgraph=True)(*problem.args)
    assert outline(graphs[0], None) == (STEPS, "MLP")
    (shape,) = {tuple(example(node).shape) for node in graphs[0].graph.find_nodes(op="call_function", target=TIME)}
    assert shape == (BATCH,)
