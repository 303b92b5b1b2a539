"""The eager twin: the same approximation by plain autograd, value for value. It is the oracle of every test.

    v~_i = v_i.detach() + (1 - c_i) sum_k w_ik (v_k - v_k.detach()) + c_i (v_i - v_i.detach())    for an intermediate step
    v~_k = v_k                                                                                     for a knot

with `c_i` = 0 where the step is interpolated, 1 where its segment is exact, and the factor of the unbiased option where it
was drawn (`guard.Correction`). The value of every step is unchanged, and autograd then computes `sum_k J_k^T G_k` by itself.

An intermediate step needs a later knot, so the function runs three times: to record what its calls return and which of them the
outputs depend on; to run the knots (and the exact steps) with gradients, each where the function itself calls it, with the
autocast and the adapters of that place; and with `v~` in place of `v`. Nothing else runs the denoiser. The function must compute
the same thing each time; torch's global random state is put back in between.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from jagg_fx import guard, interpolation, streams
from jagg_fx._compat import backward_id, version
from jagg_fx.adapters import active, adapted_layers
from jagg_fx.budget import Measurements
from jagg_fx.config import Chain, Config
from jagg_fx.decision import decide
from jagg_fx.denoiser import Arguments, TimeArgument, describe_function
from jagg_fx.errors import (
    AdapterError,
    ChainedStatesError,
    DropoutError,
    NoStepsError,
    NotARegionError,
    NotRepeatableError,
)
from jagg_fx.jacobian_sizes import JacobianSizes
from jagg_fx.plan import Calibration, Plan
from jagg_fx.region import CallNote, replaced_forward
from jagg_fx.report import Rewrite, Stream
from jagg_fx.statistics import Plans, pack
from jagg_fx.structure import Output, detached, leaves_below, tensors_in
from jagg_fx.surroundings import random_state

Denoisers = Sequence[tuple[nn.Module, TimeArgument]]


@dataclass
class _Call:
    """One recorded call of a denoiser.

    Attributes:
        note: which denoiser was called, with which arguments.
        output: what it returned; its values are, under grad mode, leaves of the glue's graph, else plain copies.
        with_gradients: whether it ran under grad mode.
        time: its time; None where no gradient can come of the call (no_grad, frozen parameters), as are the rest.
        given_time: the argument itself, of which `time` is a copy.
        kind: all of the arguments but the tensors' elements.
        operands: the tensors among the arguments, but for the time; kept, so that their memory is not given to others.
    """

    note: CallNote
    output: Output
    with_gradients: bool
    time: Tensor | None = None
    given_time: Tensor | None = None
    kind: Any = None
    operands: list[Tensor] = field(default_factory=list)

    @property
    def is_step(self) -> bool:
        return self.time is not None

    @property
    def values(self) -> list[Tensor]:
        return self.output.values


def run(
    fn: Callable[..., Any],
    denoisers: Denoisers,
    config: Config,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_statistics: Callable[[Plans, Tensor], None],
) -> tuple[Any, Rewrite | None, "list[_StreamRun]"]:
    """Call `fn(*args, **kwargs)` with interpolated VJPs.

    Returns:
        Its outputs, a record, and streams that the backward will measure (None and empty under no_grad).

    Raises:
        NoStepsError: no call of a denoiser reaches the outputs with a gradient.
        ChainedStatesError: a step's argument depends on the value of an earlier step.
        DropoutError: a denoiser draws random numbers.
        NotARegionError: a denoiser changes a buffer or an attribute.
        AdapterError: adapters are switched for a call with gradients, or left switched.
        StepMismatchError: steps run different computations, or which calls belong together cannot be told.
        NotRepeatableError: the function does something else when it runs again.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs), None, []
    function = describe_function(fn)
    with _random_state_kept():
        calls, recorded = _record(fn, denoisers, config.chain, args, kwargs)
    needed = leaves_below(recorded)
    steps = [call for call in calls if call.is_step and any(id(leaf) in needed for leaf in call.values)]
    if not steps:
        count = sum(call.is_step for call in calls)
        reason = f"{count} calls of the denoiser ran with gradients, and the outputs depend on none of them"
        raise NoStepsError(function, ", ".join(type(denoiser).__name__ for denoiser, _ in denoisers), reason)
    own = [[steps[n] for n in stream] for stream in streams.group_run(steps)]
    plans = [config.plan(len(stream), s, len(own)) for s, stream in enumerate(own)]
    measuring = _Measuring(own, plans, needed, on_statistics)
    with _random_state_kept():
        for part in measuring.streams:
            part.decide(config)

    is_calibration = isinstance(config.placement, Calibration)
    with _random_state_kept():
        with_gradients = _run_exact(fn, denoisers, calls, measuring, is_calibration, args, kwargs)
    returned = {id(call): values for part in measuring.streams for call, values in part.surrogates(with_gradients)}
    again = iter(calls)

    def substitute(forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _next(again, function, forward, args, kwargs)
        return call.output.rebuilt(returned.get(id(call)) or [value.clone() for value in call.values])

    with _replaced(denoisers, substitute):
        outputs = fn(*args, **kwargs)
    if not all(map(_same, tensors_in(recorded), tensors_in(outputs))):
        raise NotRepeatableError(function)
    if config.debias is not None:  # the draws above were put back for the function's own: the next call must draw anew
        for part in measuring.streams:
            guard.draw(part.plan, part.steps[0].values[0].device)
    record = Rewrite.of_modules(
        [part.record() for part in measuring.streams], [denoiser for denoiser, _ in denoisers], len(calls) - len(steps)
    )
    return outputs, record, measuring.streams


def _run_exact(
    fn: Callable[..., Any],
    denoisers: Denoisers,
    calls: Sequence[_Call],
    measuring: "_Measuring",
    is_calibration: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[int, list[Tensor]]:
    """Run the function again, and with gradients those calls that keep their VJPs. Returns their values, by identity."""
    streams_of = {id(call): part for part in measuring.streams for call in part.to_run()}
    values: dict[int, list[Tensor]] = {}
    order = iter(calls)

    def run_exact(forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _next(order, describe_function(fn), forward, args, kwargs)
        if call.note.is_cut:
            args, kwargs = _cut(forward, args, kwargs)
        if id(call) in streams_of:
            run = streams_of[id(call)].run_knot if is_calibration else _plainly
            values[id(call)] = Output.of(run(forward, call, args, kwargs), forward.time.denoiser).values
        return call.output.rebuilt([value.clone() for value in call.values])  # a leaf could not be changed in place

    with _replaced(denoisers, run_exact):
        fn(*args, **kwargs)
    return values


def _plainly(forward: "_Forward", call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward.own(*args, **kwargs)


@dataclass(frozen=True)
class _Forward:
    """A denoiser's own forward, for a call that has arrived at its replacement."""

    denoiser: nn.Module
    index: int
    time: TimeArgument
    own: Callable[..., Any]

    def with_parameters(self, parameters: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with replaced_forward(self.denoiser, self.own):
            return torch.func.functional_call(self.denoiser, parameters, args, kwargs)


@contextlib.contextmanager
def _replaced(
    denoisers: Denoisers, replacement: Callable[[_Forward, tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Calls of the denoisers go to `replacement(forward, args, kwargs)`."""

    def arrive(forward: _Forward, *args: Any, **kwargs: Any) -> Any:
        return replacement(forward, args, kwargs)

    with contextlib.ExitStack() as stack:
        for index, (denoiser, time) in enumerate(denoisers):
            forward = _Forward(denoiser, index, time, denoiser.forward)
            stack.enter_context(replaced_forward(denoiser, functools.partial(arrive, forward)))
        yield


def _cut(forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return forward.time.replace_state(args, kwargs, detached(forward.time.state(args, kwargs)))


def _next(
    calls: Iterator[_Call], function: str, forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Call:
    """The recorded call that this one repeats. Raises `NotRepeatableError` if it is another one."""
    call = next(calls, None)
    if call is None or call.note.denoiser != forward.index or call.with_gradients != torch.is_grad_enabled():
        raise NotRepeatableError(function)
    if call.time is not None and not torch.equal(call.time, forward.time.read(args, kwargs)):
        raise NotRepeatableError(function)
    return call


def _record(
    fn: Callable[..., Any], denoisers: Denoisers, chain: Chain, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[_Call], Any]:
    """The calls of the denoisers, and the function's outputs as they depend on what the calls return."""
    calls: list[_Call] = []
    known: set[int] = set()

    adapters = [active(adapted_layers(denoiser)) for denoiser, _ in denoisers]

    def record(forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = [*forward.denoiser.parameters(), *tensors_in([list(args), kwargs])]
        is_step = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        if is_step and active(adapted_layers(forward.denoiser)) != adapters[forward.index]:
            raise AdapterError.trained(forward.time.denoiser)
        step_time = forward.time.read(args, kwargs)  # raises if it is missing
        if is_step and step_time.requires_grad:
            raise ChainedStatesError(sum(call.is_step for call in calls), "time", chained=False)
        is_cut = is_step and chain is Chain.STOP and bool(known & leaves_below(forward.time.state(args, kwargs)))
        if is_cut:
            args, kwargs = _cut(forward, args, kwargs)
        if is_step and known & leaves_below((args, kwargs)):
            raise ChainedStatesError(sum(call.is_step for call in calls), "argument", chained=True)
        state = random_state()
        versions = {name: version(buffer) for name, buffer in forward.denoiser.named_buffers()}
        held = _held(forward.denoiser)
        with torch.no_grad():
            output = forward.own(*args, **kwargs)
        changed = [name for name, buffer in forward.denoiser.named_buffers() if version(buffer) != versions[name]]
        if changed and is_step:
            raise NotARegionError.mutation(changed)
        left = {name for _, name, _ in _held(forward.denoiser) ^ held}
        if left and is_step:
            raise NotARegionError.state(forward.time.denoiser, sorted(left))
        torch.clear_autocast_cache()  # it may hold weights that were cast under no_grad and would get no gradient
        if is_step and not all(map(torch.equal, state, random_state())):
            raise DropoutError(["torch's random state moved"])
        taken_apart = Output.of(output, forward.time.denoiser)
        values = [value.detach().clone().requires_grad_(is_step) for value in taken_apart.values]
        known.update(map(id, values))
        note = CallNote(forward.index, forward.time.given(args, kwargs), is_cut)
        call = _Call(note, taken_apart.with_values(values), torch.is_grad_enabled())
        if is_step:
            call.time, call.given_time = step_time.detach().clone(), step_time
            given = list(forward.time.replace(args, kwargs, step_time))
            call.operands = [value for value in tensors_in(given) if value is not step_time]
            call.kind = streams.kind_of(given, step_time)
        calls.append(call)
        return call.output.rebuilt([value.clone() for value in values])

    with _replaced(denoisers, record):
        outputs = fn(*args, **kwargs)
    for (denoiser, time), before in zip(denoisers, adapters, strict=True):
        if active(adapted_layers(denoiser)) != before:
            raise AdapterError.left(time.denoiser)
    return calls, outputs


def _held(denoiser: nn.Module) -> set[tuple[int, str, int]]:
    """The attributes of a denoiser's modules, by identity."""
    return {(id(module), name, id(value)) for module in denoiser.modules() for name, value in vars(module).items()}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield


class _Measuring:
    """Collects the sizes of cotangents, and of the knots' Jacobians, while one run's backward goes by.

    Args:
        own: the calls of each stream.
        plans: a plan for each stream.
        needed: identities of the leaves that the outputs depend on.
        on_statistics: receives the packed statistics once every cotangent has come.
    """

    def __init__(
        self,
        own: Sequence[Sequence[_Call]],
        plans: Sequence[Plan],
        needed: set[int],
        on_statistics: Callable[[Plans, Tensor], None],
    ) -> None:
        self.streams = [_StreamRun(plan, calls, needed, self) for calls, plan in zip(own, plans, strict=True)]
        self._plans = tuple(plans)
        self._on_statistics = on_statistics
        self._backward = -1

    def cotangent_arrives(self) -> None:
        """Forget those of an earlier backward, which may have stopped halfway."""
        backward = backward_id()
        if backward != self._backward:
            self._backward = backward
            for part in self.streams:
                part.squares.clear()

    def cotangent_arrived(self) -> None:
        complete = all(len(part.squares) == len(part.slots) * len(part.steps) for part in self.streams)
        if complete and any(plan.segments for plan in self._plans):
            packed = [part.packed() for part in self.streams if part.plan.segments]
            self._on_statistics(self._plans, torch.cat(packed))


class _StreamRun:
    """One stream in one run: what is exact, what stands in for the rest, and what its backward measures."""

    def __init__(self, plan: Plan, steps: Sequence[_Call], needed: set[int], measuring: _Measuring) -> None:
        self.plan = plan
        self.steps = steps
        self.slots = [
            slot
            for slot in range(len(steps[0].values))
            if all(slot < len(step.values) and id(step.values[slot]) in needed for step in steps)
        ]
        self._measuring = measuring
        self._weights = self._scores = self._keep = torch.zeros(0)
        self._factors: tuple[float, ...] = ()  # `c_i` of each intermediate step
        self.squares: dict[tuple[int, int], Tensor] = {}  # by slot and step: squared norms per sample
        self._sizes: JacobianSizes | None = None

    def record(self) -> Stream:
        return Stream.of(self.plan, [step.note for step in self.steps])

    def decide(self, config: Config) -> None:
        """Weights, scores and factors, by the values alone."""
        if not self.plan.segments:
            return
        decision = decide(
            self.plan,
            config,
            {i: step.time for i, step in enumerate(self.steps) if step.time is not None},
            [{i: step.values[slot].detach() for i, step in enumerate(self.steps)} for slot in self.slots],
        )
        self._weights, self._scores, self._keep = decision.weights, decision.scores, decision.keep
        self._factors = decision.factors

    def to_run(self) -> list[_Call]:
        """The calls that must be run with gradients."""
        exact = [i for i, factor in zip(self.plan.intermediate, self._factors, strict=True) if factor]
        return [self.steps[i] for i in sorted({*self.plan.knots, *exact})]

    def surrogates(self, outputs: dict[int, list[Tensor]]) -> Iterator[tuple[_Call, list[Tensor]]]:
        """What each call returns in the last run, with hooks that note its cotangents.

        Args:
            outputs: the values, with gradients, of the calls `to_run`, by identity.
        """
        knots = [outputs[id(self.steps[k])] for k in self.plan.knots]
        for i, step in enumerate(self.steps):
            if i in self.plan.knots:
                values = outputs[id(step)]
            else:
                m = self.plan.intermediate.index(i)
                values = [self._surrogate(m, slot, value.detach(), knots) for slot, value in enumerate(step.values)]
                if self._factors[m]:
                    pairs = zip(values, outputs[id(step)], strict=True)
                    values = [(v + self._factors[m] * (own - own.detach())).to(own.dtype) for v, own in pairs]
            yield step, [self._watched(slot, i, value) for slot, value in enumerate(values)]

    def _surrogate(self, m: int, slot: int, value: Tensor, knots: Sequence[list[Tensor]]) -> Tensor:
        twin = value
        for k, values in enumerate(knots):
            w = interpolation.per_sample(self._weights[m : m + 1, k], value.shape)[0]
            twin = twin + (1 - self._factors[m]) * w * (values[slot] - values[slot].detach())
        return twin.to(value.dtype)

    def _watched(self, slot: int, index: int, value: Tensor) -> Tensor:
        value = value.clone()  # the hook of a view would be lost where the loop changes it in place
        if slot in self.slots and value.requires_grad:
            value.register_hook(functools.partial(self._note, slot, index))
        return value

    def run_knot(self, forward: _Forward, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The denoiser's output at a knot, while the size of its Jacobian is measured."""
        k = next(i for i, step in enumerate(self.steps) if step is call)
        self._sizes = self._sizes or JacobianSizes(forward.denoiser, forward.with_parameters)
        return self._sizes.at(k)(*args, **kwargs)

    @property
    def is_useful(self) -> bool:
        return bool(self.squares) and 0 < float(self._norms().sum()) < float("inf")

    def measurements(self) -> Measurements:
        values = [torch.stack([step.values[slot].detach() for step in self.steps]) for slot in self.slots]
        times = torch.stack([step.time for step in self.steps]).to(values[0].device)  # type: ignore[misc]
        return Measurements(
            times=times,
            values=tuple(value for value in values if value.shape[1:2] == values[0].shape[1:2]),
            norms=self._norms() * (self._sizes.of_steps(times, list(self.plan.knots)) if self._sizes else 1),
        )

    def packed(self) -> Tensor:
        return pack(self._norms().square().sum(1).sqrt(), self._scores, self._keep)

    def _norms(self) -> Tensor:
        """`|g_i|` per sample `[N, B]`; a step that the backward did not reach has none."""
        first = next(iter(self.squares.values()))
        alike = {key: square for key, square in self.squares.items() if square.shape == first.shape}
        zero = torch.zeros_like(first)
        by_step = [sum((alike.get((slot, i), zero) for slot in self.slots), zero) for i in range(len(self.steps))]
        return torch.stack(by_step).sqrt()

    def _note(self, slot: int, index: int, cotangent: Tensor) -> None:
        self._measuring.cotangent_arrives()
        self.squares[slot, index] = interpolation.squared_norms(cotangent[None])[0]
        self._measuring.cotangent_arrived()
