"""The eager twin: the same approximation by plain autograd, value for value. It is the oracle of every test.

    v~_i = v_i.detach() + (1 - c_i) sum_k w_ik (v_k - v_k.detach()) + c_i (v_i - v_i.detach())    for an intermediate step
    v~_k = v_k                                                                                     for a knot

with `c_i` = 0 where the step is interpolated, 1 where its segment is exact, and the factor of the unbiased option where it
was drawn (`guard.Correction`). The value of every step is unchanged, and autograd then computes `sum_k J_k^T G_k` by itself.
An intermediate step needs the values of a later knot, so the function runs twice: once without gradients through the denoiser,
to record its calls and to see which of them the outputs depend on; then again with `v~` in place of `v`. The function must
compute the same thing both times; torch's global random state is put back in between.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jagg_fx import guard, interpolation
from jagg_fx.budget import Measurements
from jagg_fx.config import Config
from jagg_fx.denoiser import TimeArgument, describe_function, replaced_forward
from jagg_fx.errors import ChainedStatesError, DropoutError, NoStepsError
from jagg_fx.plan import Calibration, Plan, Weights
from jagg_fx.report import Rewrite
from jagg_fx.statistics import FIELDS_PER_STEP, pack


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
    on_statistics: Callable[[Plan, Tensor], None],
) -> tuple[Any, Rewrite | None, "Measuring | None"]:
    """Call `fn(*args, **kwargs)` with interpolated VJPs.

    Returns:
        Its outputs, a record, and what the backward will measure (both None under no_grad).

    Raises:
        NoStepsError: no call of the denoiser reaches the outputs with a gradient.
        ChainedStatesError: a step's argument depends on the value of an earlier step.
        DropoutError: the denoiser draws random numbers.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs), None, None
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
    measuring = Measuring(plan, steps, needed, on_statistics)
    surrogates = _surrogates(denoiser, steps, plan, config, measuring)
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
        return fn(*args, **kwargs), record, measuring


class Measuring:
    """Collects the sizes of cotangents, and of the knots' Jacobians, while one run's backward goes by.

    Args:
        plan: the run's plan.
        steps: its calls, whose values are kept.
        needed: identities of the leaves that the outputs depend on.
        on_statistics: receives the packed statistics once every cotangent has come.
    """

    def __init__(
        self, plan: Plan, steps: Sequence[_Call], needed: set[int], on_statistics: Callable[[Plan, Tensor], None]
    ) -> None:
        self.plan = plan
        self._steps = steps
        self.slots = [
            slot
            for slot in range(len(steps[0].leaves))
            if all(slot < len(step.leaves) and id(step.leaves[slot]) in needed for step in steps)
        ]
        self._on_statistics = on_statistics
        self._scores = self._keep = torch.zeros(0)
        self._squares: dict[tuple[int, int], Tensor] = {}  # by slot and step: squared norms per sample
        self._composites: dict[int, Tensor] = {}  # by knot: squared norm of `G_k`
        self._vjps: dict[int, Tensor] = {}  # by knot: squared norm of `J_k^T G_k`
        self._arrived = 0

    @property
    def is_useful(self) -> bool:
        """Whether a backward came by, and its numbers are finite and not all zero (as where all rewards are alike)."""
        if not self._squares:
            return False
        size = float(self._norms().sum())
        return 0 < size < float("inf")

    @property
    def _expected(self) -> int:
        return len(self.slots) * len(self._steps)

    def decided(self, scores: Tensor, keep: Tensor) -> None:
        self._scores, self._keep = scores, keep

    def watch(self, index: int, output: Any) -> Any:
        """What the denoiser returns at a step, with hooks that note its cotangents."""
        slots = itertools.count()

        def watched(value: Tensor) -> Tensor:
            value, slot = value.view_as(value), next(slots)
            if slot in self.slots and value.requires_grad:
                value.register_hook(functools.partial(self._note, slot, index))
            return value

        return _map_values(watched, output)

    def run_knot(self, denoiser: nn.Module, k: int) -> Any:
        """The denoiser's output at a knot, with hooks that note how large its own VJP is.

        The knots share their parameters; views of them, one set per knot, tell their gradients apart.
        """
        step = self._steps[k]
        views = {name: p.view_as(p) for name, p in denoiser.named_parameters() if p.requires_grad}
        for view in views.values():
            view.register_hook(functools.partial(_add_square, self._vjps, k))
        output = torch.func.functional_call(denoiser, views, step.args, step.kwargs)
        for value in _values(output):
            if value.requires_grad:
                value.register_hook(functools.partial(_add_square, self._composites, k))
        return output

    def measurements(self) -> Measurements:
        """What a budget is placed by. Call when `is_useful`."""
        values = [torch.stack([step.leaves[slot].detach() for step in self._steps]) for slot in self.slots]
        times = torch.stack([step.time for step in self._steps]).to(values[0].device)
        return Measurements(
            times=times,
            values=tuple(value for value in values if value.shape[1:2] == values[0].shape[1:2]),
            norms=self._norms() * self._jacobian_sizes(times),
        )

    def _jacobian_sizes(self, times: Tensor) -> Tensor:
        """`|J_i|` of every step `[N, B or 1]`: `|J_k^T G_k| / |G_k|` at the knots, interpolated between them.

        Where the backward did not pass the hooks at some knot (gradient checkpointing runs the denoiser anew, on the
        parameters themselves), all count alike.
        """
        knots = list(self.plan.knots)
        if not all(self._composites.get(k) and k in self._vjps for k in knots):
            return torch.ones_like(self._norms())
        sizes = torch.stack([(self._vjps[k] / self._composites[k]).sqrt() for k in knots])
        weights = interpolation.knot_weights(times, times[knots]).to(sizes.device)
        return (
            (weights * sizes.to(weights.dtype).reshape(1, -1, *[1] * (weights.dim() - 2)))
            .sum(1)
            .reshape(len(times), -1)
        )

    def _norms(self) -> Tensor:
        """`|g_i|` per sample `[N, B]`; a step that the backward did not reach has none."""
        first = next(iter(self._squares.values()))
        alike = {key: square for key, square in self._squares.items() if square.shape == first.shape}
        zero = torch.zeros_like(first)
        by_step = [sum((alike.get((slot, i), zero) for slot in self.slots), zero) for i in range(len(self._steps))]
        return torch.stack(by_step).sqrt()

    def _note(self, slot: int, index: int, cotangent: Tensor) -> None:
        self._squares[slot, index] = interpolation.squared_norms(cotangent[None])[0]
        self._arrived += 1
        if self._arrived % self._expected == 0 and self.plan.segments:
            norms = self._norms().square().sum(1).sqrt()
            packed = pack(norms, self._scores, self._keep, FIELDS_PER_STEP * self.plan.num_steps)
            self._on_statistics(self.plan, packed)


def _add_square(totals: dict[int, Tensor], k: int, gradient: Tensor) -> None:
    wide = gradient.detach().to(interpolation.working_dtype(gradient.dtype))
    totals[k] = totals.get(k, 0) + wide.square().sum()


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


def _surrogates(
    denoiser: nn.Module, steps: list[_Call], plan: Plan, config: Config, measuring: Measuring
) -> dict[int, Any]:
    """For each step's call, by identity, what the denoiser returns in the second run."""

    def with_gradient(i: int) -> Any:
        return denoiser(*steps[i].args, **steps[i].kwargs)

    measures = isinstance(config.placement, Calibration)
    outputs = {k: measuring.run_knot(denoiser, k) if measures else with_gradient(k) for k in plan.knots}
    if plan.segments:
        weights = _weights(steps, plan)
        scores, keep = _decide(steps, plan, config, weights, measuring.slots)
        measuring.decided(scores, keep)
        factors = _exact_factors(plan, config, keep)
        knots = [_values(outputs[k]) for k in plan.knots]
        for m, i in enumerate(plan.intermediate):
            own = iter(_values(with_gradient(i))) if factors[m] else None
            slots = itertools.count()

            def surrogate(value: Tensor, m: int = m, own: Any = own, slots: Any = slots) -> Tensor:
                slot = next(slots)
                twin = value.detach()
                for k, values in enumerate(knots):
                    w = interpolation.per_sample(weights[m : m + 1, k], value.shape)[0]
                    twin = twin + (1 - factors[m]) * w * (values[slot] - values[slot].detach())
                if own is not None:
                    exact = next(own)
                    twin = twin + factors[m] * (exact - exact.detach())
                return twin.to(value.dtype)

            outputs[i] = _map_values(surrogate, steps[i].output)
    return {id(steps[i]): measuring.watch(i, output) for i, output in outputs.items()}


def _weights(steps: list[_Call], plan: Plan) -> Tensor:
    """Weights `[M, K, *]` on the device of the values."""
    device = steps[0].leaves[0].device
    if plan.rule.weights is Weights.INDEX:
        times = torch.arange(plan.num_steps, device=device)
    else:
        times = torch.stack([step.time for step in steps])
    t, t_knots = times[list(plan.intermediate)], times[list(plan.knots)]
    return interpolation.knot_weights(t, t_knots, plan.rule.degree).to(device)


def _decide(steps: list[_Call], plan: Plan, config: Config, weights: Tensor, slots: list[int]) -> tuple[Tensor, Tensor]:
    """Score of each segment `[S]`, by the values that the outputs depend on, and whether it is interpolated `[S]`."""
    middle, at_knots = (
        [torch.stack([steps[i].leaves[slot].detach() for i in indices]) for slot in slots]
        for indices in (plan.intermediate, plan.knots)
    )
    scores = guard.segment_scores(interpolation.agreement(middle, at_knots, weights), plan)
    return scores, guard.keep_segments(scores, plan, config.guard)


def _exact_factors(plan: Plan, config: Config, keep: Tensor) -> list[float]:
    """`c_i` of each intermediate step."""
    corrections = [] if config.debias is None else guard.Correction.of_segments(plan, config.debias)
    drawn = guard.draw(plan, keep.device) if corrections else keep
    factors: list[float] = []
    for s, segment in enumerate(plan.segments):
        if not keep[s]:
            factors += [1.0] * len(segment.intermediate)
        elif corrections:
            fires = drawn[0, s] < corrections[s].p
            factors += corrections[s].factors(fires, corrections[s].choose(drawn[1, s])).tolist()
        else:
            factors += [0.0] * len(segment.intermediate)
    return factors


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
