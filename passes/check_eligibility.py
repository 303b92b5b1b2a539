"""Refuse what JAGG would get wrong. Changes nothing; every refusal is an error that says what to write instead."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from jagg_fx.ancestry import with_sources
from jagg_fx.errors import ChainedStatesError, DropoutError, StepMismatchError
from jagg_fx.passes.emit import value
from jagg_fx.passes.find_steps import Step
from jagg_fx.passes.value_numbers import Numbers


def check_independent(steps: Sequence[Step]) -> None:
    """Raise `ChainedStatesError` if a gradient flows from one of all the calls into another."""
    calls = {step.forward for step in steps}
    for step in steps:
        for position in step.gradients:
            if calls & with_sources([step.operands[position]]):
                raise ChainedStatesError(step.index, _describe(step.operands[position]), chained=True)


def check_eligibility(gm: fx.GraphModule, steps: Sequence[Step], numbers: Numbers) -> None:
    """Raise unless all steps of one stream run one deterministic computation on states that need no gradient.

    Raises:
        StepMismatchError: steps with different arguments, shapes or Python values.
        DropoutError: the denoiser draws random numbers.
        ChainedStatesError: a gradient flows into an operand that belongs to one step alone.
    """
    first = steps[0]
    for step in steps[1:]:
        _check_same_computation(first, step)
    _check_deterministic(getattr(gm, first.region))
    for step in steps:
        for position in step.gradients:
            if numbers[step.operands[position]] != numbers[first.operands[position]]:
                raise ChainedStatesError(step.index, _describe(step.operands[position]), chained=False)


def _check_same_computation(first: Step, step: Step) -> None:
    if step.region == first.region:
        return
    if step.note.arguments != first.note.arguments:
        raise StepMismatchError.arguments(step.index, step.note.arguments, first.note.arguments)
    differences = [
        f"{_describe(b)} where step 0 has {_describe(a)}"
        for a, b in zip(first.operands, step.operands, strict=False)
        if _describe(a) != _describe(b)
    ]
    raise StepMismatchError.shapes(step.index, differences or ["a Python value or a setting of the model differs"])


def _describe(operand: fx.Node) -> str:
    v = value(operand)
    return f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" if isinstance(v, torch.Tensor) else str(v)


def _check_deterministic(body: fx.GraphModule) -> None:
    random = sorted(
        {
            str(node.target)
            for module in body.modules()
            if isinstance(module, fx.GraphModule)
            for node in module.graph.nodes
            if isinstance(node.target, torch._ops.OpOverload) and _draws_random_numbers(node, node.target)
        }
    )
    if random:
        raise DropoutError(random)


def _draws_random_numbers(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Attention and dropout operators carry the tag even where their dropout probability is zero.
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in ("dropout_p", "p"):
            given: Any = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) != 0)
    return True
