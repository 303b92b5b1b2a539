"""Give the operands and cotangents of all calls of the denoiser one memory layout, in a graph from Dynamo.

Torch traces a region's backward once per layout of its cotangent (strides, and offset into its storage), and runs its body
symbolically once per layout of its operands, several times over. States are slices `latents[i]` of one tensor and
cotangents slices of one gradient, each at an offset of its own: without this, every step would get a backward of its own,
and about a second of compile time. The price is a copy of a state and of a cotangent per step. No number changes.

The same identity that makes cotangents contiguous carries the slot by which a backward hands out statistics.
"""

from typing import Any

import torch
from torch import Tensor, fx

from jagg_fx._compat import invoke_subgraph, without_source
from jagg_fx.region import TIME, CallNote
from jagg_fx.statistics import FIELDS_PER_STEP, SLOT, make_probe


class _ContiguousCotangent(torch.autograd.Function):
    """A copy, for a loop to change in place, whose cotangent is contiguous and has storage of its own, as composites have."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, probe: Tensor) -> Tensor:
        ctx.save_for_backward(probe)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        (probe,) = ctx.saved_tensors
        return cotangent.clone(memory_format=torch.contiguous_format), SLOT(probe)


def contiguous_cotangent(value: Tensor, probe: Tensor) -> Tensor:
    """A copy of the value; its cotangent arrives contiguous, and the probe's gradient is a slot for statistics."""
    same: Tensor = _ContiguousCotangent.apply(value, probe)  # type: ignore[no-untyped-call]
    return same


def example(node: fx.Node) -> Any:
    """What Dynamo knows of a node: a fake tensor, a symbolic number, or a tuple of them."""
    return node.meta.get("example_value")


def denoiser_calls(gm: fx.GraphModule) -> list[fx.Node]:
    """The region calls that read a marked time."""
    regions = gm.graph.find_nodes(op="call_function", target=invoke_subgraph)
    return [call for call in regions if any(operand.target is TIME for operand in call.all_input_nodes)]


def unify_layouts(gm: fx.GraphModule) -> Tensor:
    """Copy operands that have an offset or holes, and make cotangents contiguous, around every call of the denoiser.

    The graph gets a last input, the probe of `statistics.py`, on which no value depends. Returns its example.
    """
    calls = denoiser_calls(gm)
    probe = _add_probe(gm, calls)
    shared: dict[Any, set[fx.Node]] = {}  # by region: operands that all its calls read, in one layout already
    for call in calls:
        operands = set(call.all_input_nodes)
        shared[_region(call)] = shared.get(_region(call), operands) & operands
    for call in calls:
        for operand in call.all_input_nodes:
            if (
                isinstance(example(operand), Tensor)
                and operand not in shared[_region(call)]
                and not _lies_as_a_copy_would(example(operand))
            ):
                _copy_before(call, operand)
        for value in list(call.users):
            if isinstance(example(value), Tensor) and example(value).requires_grad:
                _make_cotangent_contiguous(value, probe)
    gm.graph.lint()
    gm.recompile()
    tensor: Tensor = example(probe)
    return tensor


def _add_probe(gm: fx.GraphModule, calls: list[fx.Node]) -> fx.Node:
    (*_, last) = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(last):
        probe = gm.graph.placeholder("jagg_fx_probe")
    value: Any = next(value for value in example(calls[0]) if isinstance(value, Tensor))
    probe.meta["example_value"] = value.fake_mode.from_tensor(
        make_probe(FIELDS_PER_STEP * len(calls), value.device), static_shapes=True
    )
    without_source(probe)
    return probe


def _region(call: fx.Node) -> Any:
    """The body of a call and which denoiser it is of; two denoisers of one class may share a body."""
    body: Any = call.args[0]
    marker = next(operand for operand in call.all_input_nodes if operand.target is TIME)
    return body.target, CallNote.decode(str(marker.args[1])).denoiser


def _lies_as_a_copy_would(tensor: Tensor) -> bool:
    """At the start of its storage and without holes. `latents[:, 0]` has no offset, but holes where its neighbours lie."""
    offset = tensor.storage_offset()
    return isinstance(offset, int) and offset == 0 and tensor.clone().stride() == tensor.stride()


def _copy_before(call: fx.Node, operand: fx.Node) -> None:
    with call.graph.inserting_before(call):
        copy = call.graph.call_function(torch.clone, (operand,))
    copy.meta["example_value"] = example(operand).clone()
    call.replace_input_with(operand, copy)


def _make_cotangent_contiguous(value: fx.Node, probe: fx.Node) -> None:
    with value.graph.inserting_after(value):
        same = value.graph.call_function(contiguous_cotangent, (value, probe))
    same.meta["example_value"] = example(value)
    value.replace_all_uses_with(same, delete_user_cb=lambda user: user is not same)
