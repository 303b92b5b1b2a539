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
from jagg_fx.denoiser import Arguments, TimeArgument, describe_function
from jagg_fx.errors import (
    AdapterError,
    ChainedStatesError,
    DropoutError,
    NoStepsError,
    NotARegionError,
    NotRepeatableError,
    StepMismatchError,
)
from jagg_fx.plan import Calibration, Plan, Weights
from jagg_fx.region import CallNote, replaced_forward
from jagg_fx.report import Rewrite, Stream
from jagg_fx.statistics import Plans, pack
from jagg_fx.structure import Structure, detached, rebuild, structure_of, tensors_in

Denoisers = Sequence[tuple[nn.Module, TimeArgument]]


@dataclass
class _Call:
    """One recorded call of a denoiser.

    Attributes:
        note: which denoiser was called, with which arguments.
        structure: how its output is built.
        is_floating: which of its tensors are values.
        values: the floating-point tensors of the output: under grad mode leaves of the glue's graph, else plain copies.
        others: the other tensors of the output.
        with_gradients: whether it ran under grad mode.
        time: its time; None where no gradient can come of the call (no_grad, frozen parameters), as are the rest.
        kind: all of the arguments but the tensors' elements.
        operands: the tensors among the arguments, but for the time; kept, so that their memory is not given to others.
    """

    note: CallNote
    structure: Structure
    is_floating: list[bool]
    values: list[Tensor]
    others: list[Tensor]
    with_gradients: bool
    time: Tensor | None = None
    kind: Any = None
    operands: list[Tensor] = field(default_factory=list)

    @property
    def is_step(self) -> bool:
        return self.time is not None

    def output(self, values: Sequence[Tensor]) -> Any:
        """The denoiser's output with other values of the floating-point tensors."""
        floating, others = iter(values), iter(self.others)
        tensors = (next(floating) if is_floating else next(others) for is_floating in self.is_floating)
        return rebuild(self.structure, tensors)


def run(
    fn: Callable[..., Any],
    denoisers: Denoisers,
    config: Config,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_statistics: Callable[[Plans, Tensor], None],
) -> tuple[Any, Rewrite | None, "Measuring | None"]:
    """Call `fn(*args, **kwargs)` with interpolated VJPs.

    Returns:
        Its outputs, a record, and what the backward will measure (both None under no_grad).

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
        return fn(*args, **kwargs), None, None
    function = describe_function(fn)
    with _random_state_kept():
        calls, recorded = _record(fn, denoisers, config.chain, args, kwargs)
    needed = _leaves_below(recorded)
    steps = [call for call in calls if call.is_step and any(id(leaf) in needed for leaf in call.values)]
    if not steps:
        count = sum(call.is_step for call in calls)
        reason = f"{count} calls of the denoiser ran with gradients, and the outputs depend on none of them"
        raise NoStepsError(function, ", ".join(type(denoiser).__name__ for denoiser, _ in denoisers), reason)
    keys = _keys(steps)
    grouped = streams.group(keys)
    for stream in grouped:
        _check_stream([steps[n] for n in stream], [keys[n] for n in stream])
    own = [[steps[n] for n in stream] for stream in grouped]
    plans = [config.plan(len(stream), s, len(own)) for s, stream in enumerate(own)]
    measuring = Measuring(own, plans, needed, on_statistics)
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
        return call.output(returned.get(id(call)) or [value.clone() for value in call.values])

    with _replaced(denoisers, substitute):
        outputs = fn(*args, **kwargs)
    if not all(map(_same, tensors_in(recorded), tensors_in(outputs))):
        raise NotRepeatableError(function)
    if config.debias is not None:  # the draws above were put back for the function's own: the next call must draw anew
        for part in measuring.streams:
            guard.draw(part.plan, part.steps[0].values[0].device)
    parameters = {id(p): p for denoiser, _ in denoisers for p in denoiser.parameters() if p.requires_grad}
    record = Rewrite(
        streams=tuple(part.record() for part in measuring.streams),
        covered=len(parameters),
        covered_elements=sum(p.numel() for p in parameters.values()),
        calls_without_gradient=len(calls) - len(steps),
    )
    return outputs, record, measuring


def _run_exact(
    fn: Callable[..., Any],
    denoisers: Denoisers,
    calls: Sequence[_Call],
    measuring: "Measuring",
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
            values[id(call)] = _floating(run(forward, call, args, kwargs))
        return call.output([value.detach().clone().requires_grad_(value.requires_grad) for value in call.values])

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
        is_cut = is_step and chain is Chain.STOP and bool(known & _leaves_below(forward.time.state(args, kwargs)))
        if is_cut:
            args, kwargs = _cut(forward, args, kwargs)
        if is_step and known & _leaves_below((args, kwargs)):
            raise ChainedStatesError(sum(call.is_step for call in calls), "argument", chained=True)
        state = _random_state()
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
        if is_step and not all(map(torch.equal, state, _random_state())):
            raise DropoutError(["torch's random state moved"])
        tensors = tensors_in(output)
        values = [value.detach().clone().requires_grad_(is_step) for value in tensors if value.is_floating_point()]
        known.update(map(id, values))
        call = _Call(
            CallNote(forward.index, forward.time.given(args, kwargs), is_cut),
            structure_of(output, forward.time.denoiser),
            [value.is_floating_point() for value in tensors],
            values,
            [value for value in tensors if not value.is_floating_point()],
            torch.is_grad_enabled(),
        )
        if is_step:
            call.time = step_time.detach().clone()
            given = list(forward.time.replace(args, kwargs, step_time))
            call.operands = [value for value in tensors_in(given) if value is not step_time]
            call.kind = _kind(given, step_time)
        calls.append(call)
        return call.output([value.clone() for value in values])

    with _replaced(denoisers, record):
        outputs = fn(*args, **kwargs)
    for (denoiser, time), before in zip(denoisers, adapters, strict=True):
        if active(adapted_layers(denoiser)) != before:
            raise AdapterError.left(time.denoiser)
    return calls, outputs


def _keys(steps: Sequence[_Call]) -> list[streams.Call]:
    """What tells the steps of one stream from those of another.

    Times, and operands with a gradient (a trained prompt that every step rebuilds), are equal where their elements are. Other
    operands are equal where they are one piece of memory, as expressions are in a graph: equal elements can be chance.
    """
    known: list[Tensor] = []

    def by_elements(operand: Any) -> int:
        for n, other in enumerate(known):
            if other.dtype == operand.dtype and other.device == operand.device and torch.equal(other, operand):
                return n
        known.append(operand)
        return len(known) - 1

    def number(operand: Tensor) -> Any:
        if operand.requires_grad:
            return by_elements(operand)
        return operand.data_ptr(), operand.dtype, operand.shape, operand.stride()

    return [
        streams.Call(step.note.denoiser, repr(step.kind), by_elements(step.time), tuple(map(number, step.operands)))
        for step in steps
    ]


def _check_stream(steps: Sequence[_Call], keys: Sequence[streams.Call]) -> None:
    """Raise where the compiled path does: another computation, or a gradient into what belongs to one step alone."""
    for index, (step, key) in enumerate(zip(steps, keys, strict=True)):
        if step.note.arguments != steps[0].note.arguments:
            raise StepMismatchError.arguments(index, step.note.arguments, steps[0].note.arguments)
        if key.kind != keys[0].kind:
            raise StepMismatchError.shapes(index, [f"{key.kind} where step 0 has {keys[0].kind}"])
        for place, operand in enumerate(step.operands):
            if operand.requires_grad and key.operands[place] != keys[0].operands[place]:
                raise ChainedStatesError(index, f"{operand.dtype}{list(operand.shape)}", chained=False)


def _kind(value: Any, time: Tensor) -> Any:
    """Arguments without the elements of tensors and without the time."""
    if isinstance(value, Tensor):
        return "time" if value is time else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return {key: _kind(item, time) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_kind(item, time) for item in value]
    return value


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


def _random_state() -> list[Tensor]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_gpus]


class Measuring:
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

    @property
    def is_useful(self) -> bool:
        """Whether a backward came by, and its numbers are finite and not all zero (as where all rewards are alike)."""
        return any(part.is_useful for part in self.streams)

    def measurements(self) -> list[Measurements | None]:
        """What a budget is placed by, stream by stream; None where the backward did not come by. Call when `is_useful`."""
        return [part.measurements() if part.is_useful else None for part in self.streams]

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

    def __init__(self, plan: Plan, steps: Sequence[_Call], needed: set[int], measuring: Measuring) -> None:
        self.plan = plan
        self.steps = steps
        self.slots = [
            slot
            for slot in range(len(steps[0].values))
            if all(slot < len(step.values) and id(step.values[slot]) in needed for step in steps)
        ]
        self._measuring = measuring
        self._weights = self._scores = self._keep = torch.zeros(0)
        self._factors: list[float] = []  # `c_i` of each intermediate step
        self.squares: dict[tuple[int, int], Tensor] = {}  # by slot and step: squared norms per sample
        self._composites: dict[int, Tensor] = {}  # by knot: squared norm of `G_k`
        self._vjps: dict[int, Tensor] = {}  # by knot: squared norm of `J_k^T G_k`

    def record(self) -> Stream:
        first = self.steps[0].note
        cut = tuple(i for i, step in enumerate(self.steps) if step.note.is_cut)
        return Stream(first.denoiser, self.plan, first.arguments, cut)

    def decide(self, config: Config) -> None:
        """Weights, scores and factors, by the values alone."""
        if not self.plan.segments:
            return
        device = self.steps[0].values[0].device
        times = torch.stack([step.time for step in self.steps])  # type: ignore[misc]
        if self.plan.rule.weights is Weights.INDEX:
            times = torch.arange(self.plan.num_steps, device=device)
        t, t_knots = times[list(self.plan.intermediate)], times[list(self.plan.knots)]
        self._weights = interpolation.knot_weights(t, t_knots, self.plan.rule.degree).to(device)
        middle, at_knots = (
            [torch.stack([self.steps[i].values[slot].detach() for i in indices]) for slot in self.slots]
            for indices in (self.plan.intermediate, self.plan.knots)
        )
        self._scores = guard.segment_scores(interpolation.agreement(middle, at_knots, self._weights), self.plan)
        self._keep = guard.keep_segments(self._scores, self.plan, config.guard)
        self._factors = _exact_factors(self.plan, config, self._keep)

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
        value = value.view_as(value)
        if slot in self.slots and value.requires_grad:
            value.register_hook(functools.partial(self._note, slot, index))
        return value

    def run_knot(self, forward: _Forward, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The denoiser's output at a knot, with hooks that note how large its own VJP is.

        The knots share their parameters; views of them, one set per knot, tell their gradients apart.
        """
        k = next(i for i, step in enumerate(self.steps) if step is call)
        views = {name: p.view_as(p) for name, p in forward.denoiser.named_parameters() if p.requires_grad}
        for view in views.values():
            view.register_hook(functools.partial(_add_square, self._vjps, k))
        output = forward.with_parameters(views, args, kwargs)
        for value in _floating(output):
            if value.requires_grad:
                value.register_hook(functools.partial(_add_square, self._composites, k))
        return output

    @property
    def is_useful(self) -> bool:
        return bool(self.squares) and 0 < float(self._norms().sum()) < float("inf")

    def measurements(self) -> Measurements:
        values = [torch.stack([step.values[slot].detach() for step in self.steps]) for slot in self.slots]
        times = torch.stack([step.time for step in self.steps]).to(values[0].device)  # type: ignore[misc]
        return Measurements(
            times=times,
            values=tuple(value for value in values if value.shape[1:2] == values[0].shape[1:2]),
            norms=self._norms() * self._jacobian_sizes(times),
        )

    def packed(self) -> Tensor:
        return pack(self._norms().square().sum(1).sqrt(), self._scores, self._keep)

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
        first = next(iter(self.squares.values()))
        alike = {key: square for key, square in self.squares.items() if square.shape == first.shape}
        zero = torch.zeros_like(first)
        by_step = [sum((alike.get((slot, i), zero) for slot in self.slots), zero) for i in range(len(self.steps))]
        return torch.stack(by_step).sqrt()

    def _note(self, slot: int, index: int, cotangent: Tensor) -> None:
        self._measuring.cotangent_arrives()
        self.squares[slot, index] = interpolation.squared_norms(cotangent[None])[0]
        self._measuring.cotangent_arrived()


def _add_square(totals: dict[int, Tensor], k: int, gradient: Tensor) -> None:
    wide = gradient.detach().to(interpolation.working_dtype(gradient.dtype))
    totals[k] = totals.get(k, 0) + wide.square().sum()


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


def _floating(output: Any) -> list[Tensor]:
    return [value for value in tensors_in(output) if value.is_floating_point()]


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
