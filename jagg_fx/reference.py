"""The eager twin: the same approximation by plain autograd, value for value. It is the oracle of every test.

    v~_i = v_i.detach() + sum_k w_ik (v_k - v_k.detach())     for an intermediate step,     v~_k = v_k for a knot

The value of every step is unchanged, and autograd then computes `sum_k J_k^T G_k` by itself. An intermediate step
needs the values of a later knot, so the function runs twice: once without gradients through the denoiser, to record
its calls and to see which of them the outputs depend on; then again with `v~` in place of `v`. The function must
compute the same thing both times; torch's global random state is put back in between.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jagg_fx import interpolation
from jagg_fx.config import Config, Weights
from jagg_fx.denoiser import TimeArgument, describe_function, replaced_forward
from jagg_fx.errors import ChainedStatesError, DropoutError, NoStepsError
from jagg_fx.plan import Plan, Segment
from jagg_fx.report import Rewrite


@dataclass
class _Call:
    """One recorded call of the denoiser under grad mode."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    time: Tensor
    leaves: list[Tensor]  # the values, as leaves of the glue's graph
    output: Any


def run(
    fn: Callable[..., Any],
    denoiser: nn.Module,
    time: TimeArgument,
    config: Config,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Rewrite | None]:
    """Call `fn(*args, **kwargs)` with interpolated VJPs. Returns its outputs and a record (None under no_grad).

    Raises:
        NoStepsError: no call of the denoiser reaches the outputs with a gradient.
        ChainedStatesError: a step's argument depends on the value of an earlier step.
        DropoutError: the denoiser draws random numbers.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs), None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        calls, without_gradient, outputs = _record(fn, denoiser, time, args, kwargs)
    torch.clear_autocast_cache()  # it may hold weights that were cast under no_grad and would get no gradient
    needed = _leaves_below(outputs)
    steps = [call for call in calls if any(id(leaf) in needed for leaf in call.leaves)]
    if not steps:
        reason = f"{len(calls)} calls of the denoiser ran with gradients, and the outputs depend on none of them"
        raise NoStepsError(describe_function(fn), type(denoiser).__name__, reason)
    plan = config.plan(len(steps))
    surrogates = _surrogates(denoiser, steps, plan, config.weights)
    original, order = denoiser.forward, iter(calls)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        call = next(order)
        return surrogates.get(id(call), call.output)

    parameters = [p for p in denoiser.parameters() if p.requires_grad]
    record = Rewrite(
        plan=plan,
        arguments=time.arguments(steps[0].args, steps[0].kwargs),
        covered=len(parameters),
        covered_elements=sum(p.numel() for p in parameters),
        calls_without_gradient=len(calls) - len(steps) + without_gradient,
    )
    with replaced_forward(denoiser, forward):
        return fn(*args, **kwargs), record


def _record(
    fn: Callable[..., Any], denoiser: nn.Module, time: TimeArgument, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[_Call], int, Any]:
    """The calls under grad mode, the number of those under no_grad, and the function's outputs."""
    calls: list[_Call] = []
    without_gradient = 0
    known: set[int] = set()
    original = denoiser.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal without_gradient
        if not torch.is_grad_enabled():
            without_gradient += 1
            return original(*args, **kwargs)
        if known & _leaves_below((args, kwargs)):
            raise ChainedStatesError(len(calls), "argument", chained=True)
        step_time = time.read(args, kwargs)
        leaves: list[Tensor] = []

        def leaf(value: Tensor) -> Tensor:
            leaves.append(value.detach().requires_grad_())
            known.add(id(leaves[-1]))
            return leaves[-1]

        state = _random_state()
        with torch.no_grad():
            output = original(*args, **kwargs)
        if not all(map(torch.equal, state, _random_state())):
            raise DropoutError(["torch's random state moved"])
        output = _map_values(leaf, output)
        # Copies: the loop may reuse its buffers, and the knots run after it.
        args = tuple(map(_snapshot, args))
        kwargs = {name: _snapshot(value) for name, value in kwargs.items()}
        calls.append(_Call(args, kwargs, step_time.clone(), leaves, output))
        return output

    with replaced_forward(denoiser, forward):
        outputs = fn(*args, **kwargs)
    return calls, without_gradient, outputs


def _random_state() -> list[Tensor]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_gpus]


def _snapshot(argument: Any) -> Any:
    return argument.clone() if isinstance(argument, Tensor) and not argument.requires_grad else argument


def _surrogates(denoiser: nn.Module, steps: list[_Call], plan: Plan, rule: Weights) -> dict[int, Any]:
    """For each step's call, by identity, what the denoiser returns in the second run."""
    outputs: dict[int, Any] = {}
    knots: dict[int, list[Tensor]] = {}
    for k in plan.knots:
        output = outputs[id(steps[k])] = denoiser(*steps[k].args, **steps[k].kwargs)
        knots[k] = _values(output)
    for segment in plan.segments:
        for i in segment.intermediate:
            slots = iter(zip(knots[segment.a], knots[segment.b], strict=True))

            def surrogate(value: Tensor, i: int = i, segment: Segment = segment, slots: Any = slots) -> Tensor:
                v_a, v_b = next(slots)
                w = _weight(steps, segment, i, rule, value)
                twin: Tensor = value.detach() + (1 - w) * (v_a - v_a.detach()) + w * (v_b - v_b.detach())
                return twin.to(value.dtype)

            outputs[id(steps[i])] = _map_values(surrogate, steps[i].output)
    return outputs


def _map_values(fn: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Apply `fn` to the floating-point tensors of a denoiser's output: a tensor, or a tuple or list of them."""
    if isinstance(output, Tensor):
        return fn(output) if output.is_floating_point() else output
    if isinstance(output, (tuple, list)):
        return type(output)([_map_values(fn, value) for value in output])
    return output


def _values(output: Any) -> list[Tensor]:
    """The floating-point tensors of a denoiser's output, in the order of `_map_values`."""
    values: list[Tensor] = []

    def collect(value: Tensor) -> Tensor:
        values.append(value)
        return value

    _map_values(collect, output)
    return values


def _weight(steps: list[_Call], segment: Segment, i: int, rule: Weights, value: Tensor) -> Tensor | float:
    if rule is Weights.INDEX:
        return interpolation.index_weight(segment.a, i, segment.b)
    weight = interpolation.time_weight(steps[segment.a].time, steps[i].time, steps[segment.b].time)
    return interpolation.per_sample(weight, value.shape)


def _leaves_below(outputs: Any) -> set[int]:
    """Identities of the leaf tensors that `outputs` depend on with a gradient."""
    pending, leaves, seen = [outputs], set(), set()
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            if item.requires_grad and item.grad_fn is None:
                leaves.add(id(item))
            item = item.grad_fn
        if isinstance(item, (list, tuple, set)):
            pending += item
        elif isinstance(item, dict):
            pending += item.values()
        elif hasattr(item, "next_functions") and item not in seen:
            seen.add(item)
            if hasattr(item, "variable"):
                leaves.add(id(item.variable))
            pending += [parent for parent, _ in item.next_functions]
        elif hasattr(item, "__dataclass_fields__"):
            pending += vars(item).values()
    return leaves
