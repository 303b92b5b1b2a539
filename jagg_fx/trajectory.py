"""Steps of one trajectory, rewritten in autograd while a loop in Python runs: no graph of the whole is needed.

Intermediate steps run for their values alone. What the loop gets of a step is a copy behind a `_Record`, a node that notes the
cotangent which the loop's backward brings. The knots' own graphs hang on a `_Flush`: once it is reached, it hands the composite
cotangents to them, inside the loop's own backward. Distributed wrappers, gradient scalers and hooks see an ordinary backward.

    v_i  ->  _Record  ->  the loop's own computation  ->  loss
    v_k with its graph  ->  _Flush  ->  (a token, with the last value or with the outputs)  ->  loss

In a backward over several steps the engine would run `_Flush` as soon as its token is reached. Among the nodes that are ready it
takes the youngest, so `_Flush` is made older than every `_Record`; what has not arrived by then is an error.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from jagg_fx import interpolation
from jagg_fx._compat import make_older, version
from jagg_fx.adapters import adapted_layers
from jagg_fx.budget import Measurements
from jagg_fx.config import Config
from jagg_fx.decision import Decision, decide
from jagg_fx.denoiser import TimeArgument
from jagg_fx.distributed import without_buffer_broadcast
from jagg_fx.errors import (
    ArgumentChangedError,
    DropoutError,
    MissingCotangentError,
    NoStepsError,
    NotARegionError,
    StepMismatchError,
)
from jagg_fx.jacobian_sizes import JacobianSizes
from jagg_fx.plan import Plan
from jagg_fx.region import CallNote
from jagg_fx.report import Stream
from jagg_fx.statistics import pack
from jagg_fx.streams import kind_of
from jagg_fx.structure import Output, map_tensors, tensors_in
from jagg_fx.surroundings import Surroundings, random_state


@dataclass
class Step:
    """One call of a denoiser with gradients.

    Attributes:
        args, kwargs: its arguments; kept, so that it can be run again and its operands' memory is not given to others.
        versions: how often each tensor among them had been changed in place.
        time: its time.
        given_time: the argument itself, of which `time` is a copy.
        note: which denoiser was called, with which arguments.
        kind: all of the arguments but the tensors' elements.
        operands: the tensors among the arguments, but for the time.
        surroundings: what it ran in.
        output: what it returned, without its graph.
        graph: the floating-point tensors of the output with their graph, where it ran with one.
        drew_random: whether torch's random state moved.
        cotangents: what the backward brought so far, one for each floating-point tensor of the output.
        squares: squared norm of the cotangents per sample `[B]`; None before the first one came.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]
    time: Tensor
    given_time: Tensor
    note: CallNote
    kind: Any
    operands: list[Tensor]
    surroundings: Surroundings
    output: Output
    graph: list[Tensor] | None
    drew_random: bool
    cotangents: list[Tensor | None] = field(default_factory=list)
    squares: Tensor | None = None

    def __post_init__(self) -> None:
        self.forget_cotangents()

    def forget_cotangents(self) -> None:
        self.cotangents = [None] * len(self.output.values)
        self.squares = None

    def add(self, cotangents: Sequence[Tensor | None]) -> None:
        """Add what one backward brings."""
        pairs = zip(self.cotangents, cotangents, strict=True)
        self.cotangents = [old if new is None else new.clone() if old is None else old + new for old, new in pairs]
        arrived = [cotangent for cotangent in self.cotangents if cotangent is not None]
        if arrived:
            squares = [interpolation.squared_norms(cotangent[None])[0] for cotangent in arrived]
            self.squares = torch.stack([s for s in squares if s.shape == squares[0].shape]).sum(0)


class Runner:
    """Runs one denoiser. `step` raises `NotARegionError` for one that changes its buffers, or returns what cannot be rebuilt.

    Args:
        denoiser: the module.
        time: its time argument.
        call: what runs it: the module itself, or its compiled forward.
        index: its place among the function's denoisers.
        through: runs a forward as the denoiser's own call does, where `call` is only what lies inside of that.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        time: TimeArgument,
        call: Callable[..., Any],
        index: int = 0,
        through: Callable[..., Any] | None = None,
    ) -> None:
        self.denoiser = denoiser
        self.time = time
        self.call = call
        self.index = index
        self._again = functools.partial(through, call) if through else call
        self.look()

    def look(self) -> None:
        """See what the denoiser holds now; once for each trajectory, for the walk takes its time."""
        self.modules = list(self.denoiser.modules())
        self.layers = adapted_layers(self.denoiser)
        self.device = next((p.device for p in self.denoiser.parameters()), torch.device("cpu"))
        # DDP sends rank 0's buffers to all before every call: that is no change of the denoiser's own.
        is_ddp = isinstance(self.denoiser, DistributedDataParallel)
        self._buffers = [] if is_ddp else list(self.denoiser.named_buffers())

    def step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        with_graph: bool,
        is_cut: bool = False,
        call: Callable[..., Any] | None = None,
    ) -> tuple[Step, Any]:
        """One call, with its graph or for its values alone, by `call` if given. Returns it, and what the denoiser returned."""
        time = self.time.read(args, kwargs)
        given = list(self.time.replace(args, kwargs, time))
        surroundings = Surroundings.of(self.modules, self.layers, self.device)
        before = [version(buffer) for _, buffer in self._buffers]
        output = self._run(call or self.call, args, kwargs, with_graph)
        pairs = zip(self._buffers, before, strict=True)
        if changed := [name for (name, buffer), count in pairs if version(buffer) != count]:
            raise NotARegionError.mutation(changed)
        taken_apart = Output.of(output, self.time.denoiser)
        step = Step(
            args=map_tensors(args, lambda tensor: tensor),  # containers of its own: the loop may fill its own anew
            kwargs=map_tensors(kwargs, lambda tensor: tensor),
            versions=[version(tensor) for tensor in tensors_in(given)],
            time=time.detach().clone(),
            given_time=time,
            note=CallNote(self.index, self.time.given(args, kwargs), is_cut),
            kind=kind_of(given, time),
            operands=[tensor for tensor in tensors_in(given) if tensor is not time],
            surroundings=surroundings,
            output=taken_apart.with_values([value.detach() for value in taken_apart.values]),
            graph=taken_apart.values if with_graph else None,
            drew_random=not all(map(torch.equal, surroundings.random, random_state())),
        )
        return step, output

    def run_again(self, step: Step, call: Callable[..., Any] | None = None) -> None:
        """Give a step its graph, in the surroundings of its call.

        Raises:
            ArgumentChangedError: an argument was changed in place since.
        """
        time = self.time.read(step.args, step.kwargs)
        given = tensors_in(list(self.time.replace(step.args, step.kwargs, time)))
        if [version(tensor) for tensor in given] != step.versions:
            raise ArgumentChangedError(self.time.denoiser, step.note.arguments)
        torch.clear_autocast_cache()  # casts that steps shared would sum their gradients in half precision
        with (
            step.surroundings.restored(self.modules, self.layers, self.device),
            without_buffer_broadcast(self.denoiser),
        ):
            step.graph = Output.of(self._run(call or self._again, step.args, step.kwargs, True), "").values
        torch.clear_autocast_cache()

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], with_graph: bool) -> Any:
        with torch.set_grad_enabled(with_graph):
            output = call(*args, **kwargs)
        if not with_graph:
            torch.clear_autocast_cache()  # it may hold weights that were cast without a graph
        return output


class _Record(torch.autograd.Function):
    """Copies of values whose cotangents are noted."""

    @staticmethod
    def forward(ctx: Any, note: Any, anchor: Tensor, token: Tensor | None, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.note, ctx.token, ctx.count = note, token is not None, len(values)
        ctx.set_materialize_grads(False)
        return tuple(value.clone() for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        ctx.note(cotangents)
        device = next((cotangent.device for cotangent in cotangents if cotangent is not None), None)
        token = torch.zeros((), device=device) if ctx.token else None
        return None, None, token, *[None] * ctx.count


class _Flush(torch.autograd.Function):
    """A token whose backward hands composite cotangents to the knots' values."""

    @staticmethod
    def forward(ctx: Any, composites: Callable[[], list[Tensor | None]], *values: Tensor) -> Tensor:
        ctx.composites = composites
        return torch.zeros((), device=values[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.composites()


class _Link(torch.autograd.Function):
    """A scalar that leads to tensors without a gradient for them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.count = len(tensors)
        ctx.set_materialize_grads(False)
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> Any:
        return tuple([None] * ctx.count)


class _Tie(torch.autograd.Function):
    """Identity on an output that also leads to tokens."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *tokens: Tensor) -> Tensor:
        ctx.count = len(tokens)
        return output.clone()  # a view could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return cotangent, *[torch.zeros((), device=cotangent.device)] * ctx.count


def make_anchor(device: torch.device, leads_to: Iterable[Tensor] = ()) -> Tensor:
    """What records hang on: a node older than they are.

    Args:
        device: of the denoiser.
        leads_to: tensors that `torch.autograd.grad` may be asked for: it visits only nodes that lead to what it wants. Not for
            loops with a backward per step: each of them would reach those tensors' hooks.
    """
    tensors = tuple(leads_to)
    with torch.enable_grad():
        anchor: Tensor = _Link.apply(*(tensors or (torch.zeros((), device=device, requires_grad=True),)))  # type: ignore[no-untyped-call]
    return anchor


def record(
    output: Output, anchor: Tensor, note: Callable[[Sequence[Tensor | None]], None], token: Tensor | None = None
) -> Any:
    """What the denoiser returned, as copies that note their cotangents, and lead to `token`."""
    values = _Record.apply(note, anchor, token, *output.values)  # type: ignore[no-untyped-call]
    return output.rebuilt(values)


def tie(output: Tensor, tokens: Sequence[Tensor]) -> Tensor:
    """An output that leads to the tokens too."""
    tied: Tensor = _Tie.apply(output, *tokens)  # type: ignore[no-untyped-call]
    return tied


def records_below(tensors: Sequence[Tensor]) -> dict[Any, set[int]]:
    """The records that tensors depend on, by what they note their cotangents with, and which of their values."""
    found: dict[Any, set[int]] = {}
    pending = [(tensor.grad_fn, tensor.output_nr) for tensor in tensors if tensor.grad_fn is not None]
    seen = set()
    while pending:
        node, output = pending.pop()
        note = getattr(node, "note", None) if type(node).__name__ == "_RecordBackward" else None
        if note is not None:
            found.setdefault(note, set()).add(output)
        elif node not in seen:
            seen.add(node)
            pending += [(parent, number) for parent, number in node.next_functions if parent is not None]
    return found


class Trajectory:
    """Steps under one plan: what is decided for them, and the composites of the knots.

    Args:
        plan: of all the steps, also of those that are still to come.
        config: guard, rule and unbiased option.
        runner: runs the denoiser.
        anchor: see `make_anchor`.
        together: see `decision.decide`.
        sizes: measures the Jacobians at the knots, in a run that measures.
    """

    def __init__(
        self,
        plan: Plan,
        config: Config,
        runner: Runner,
        anchor: Tensor,
        together: bool,
        sizes: JacobianSizes | None = None,
    ) -> None:
        self.plan = plan
        self.steps: list[Step] = []
        self._config, self._runner, self._anchor, self._together = config, runner, anchor, together
        self._sizes = sizes
        self._factors: dict[int, float] = {}  # `c_i` of the steps that were decided
        self._weights: dict[int, dict[int, Tensor]] = {}  # of those, by knot
        self._decisions: list[Decision] = []
        self._delivered: set[int] = set()  # steps whose graph was handed its cotangent
        self.has_failed = False  # whether its backward has raised
        self._flags: list[bool] | None = None  # which outputs of the first knot need gradients

    def window(self, knots: Sequence[int]) -> Plan:
        """The plan of the steps between some neighbouring knots."""
        return replace(self.plan, knots=tuple(knots))

    def decide(self, window: Plan, slots: Sequence[int] | None = None) -> None:
        """Decide for the window's intermediate steps, and run those again that stay exact.

        Args:
            window: all of its steps were called.
            slots: which values of the denoiser count; all by default.

        Raises:
            DropoutError: a step that would be interpolated, or stand in for others, drew random numbers.
        """
        known = {i: self.steps[i] for i in sorted({*window.knots, *window.intermediate})}
        slots = range(len(next(iter(known.values())).output.values)) if slots is None else slots
        with record_function(f"jagg_fx exact or not: {', '.join(map(str, window.intermediate))}"):
            decision = decide(
                window,
                self._config,
                {i: step.time for i, step in known.items()},
                [{i: step.output.values[slot] for i, step in known.items()} for slot in slots],
                self._together,
            )
        self._decisions.append(decision)
        if any(factor != 1 for factor in decision.factors) and any(step.drew_random for step in known.values()):
            raise DropoutError(["torch's random state moved"])
        for m, (i, factor) in enumerate(zip(window.intermediate, decision.factors, strict=True)):
            self._factors[i] = factor
            self._weights[i] = {k: decision.weights[m : m + 1, n] for n, k in enumerate(window.knots)}
            if factor:
                self.run_again(i)
            self.steps[i].args, self.steps[i].kwargs, self.steps[i].operands = (), {}, []

    def run_again(self, i: int) -> None:
        with record_function(f"jagg_fx forward {i} again"):
            self._runner.run_again(self.steps[i], self.measured_call(i))

    def measured_call(self, i: int) -> Callable[..., Any] | None:
        """What runs the denoiser at a knot whose Jacobian is measured; None at other steps."""
        return self._sizes.at(i) if self._sizes is not None and i in self.plan.knots else None

    def exact(self, window: Plan) -> list[int]:
        """The window's intermediate steps that keep a VJP."""
        return [i for i in window.intermediate if self._factors.get(i)]

    def flush(self, carriers: Sequence[int], *, needs_all: bool, before: Callable[[], None] = lambda: None) -> Tensor:
        """A token whose backward hands the steps `carriers` what they carry.

        Args:
            carriers: knots and exact steps; no step is decided later that they would carry.
            needs_all: whether every step that they carry must have got its cotangent by then.
        """
        places = [
            (i, slot, value)
            for i in carriers
            for slot, value in enumerate(self.steps[i].graph or ())
            if value.requires_grad
        ]
        self.check_outputs(carriers)
        composites = functools.partial(self._composites, [(i, slot) for i, slot, _ in places], needs_all, before)
        token: Tensor = _Flush.apply(composites, *[value for *_, value in places])  # type: ignore[no-untyped-call]
        make_older(token, self._anchor)
        for i in carriers:
            self.steps[i].graph = None  # the token holds it
        return token

    def check_outputs(self, carriers: Sequence[int]) -> list[int]:
        """Which of the denoiser's values need gradients; all of these steps ran with their graph.

        Raises:
            StepMismatchError: not the same at each step.
            NoStepsError: none. Such a step would drop what it should carry.
        """
        for i in carriers:
            flags = [value.requires_grad for value in self.steps[i].graph or ()]
            self._flags = flags if self._flags is None else self._flags
            if not any(flags):
                raise NoStepsError("the loop", self._runner.time.denoiser, f"the output of step {i} needs no gradient")
            if flags != self._flags:
                raise StepMismatchError.shapes(
                    i, [f"outputs that need gradients: {flags}, at the first knot {self._flags}"]
                )
        return [slot for slot, needs_gradient in enumerate(self._flags or ()) if needs_gradient]

    def carriers_of(self, i: int) -> set[int] | None:
        """The steps whose graphs take step `i`'s cotangent; None as long as that is not decided."""
        if i in self.plan.knots:
            return {i}
        if i not in self._factors:
            return None
        return {*(self._weights[i] if self._factors[i] != 1 else ()), *((i,) if self._factors[i] else ())}

    def is_delivered(self, i: int) -> bool:
        """Whether all graphs that take step `i`'s cotangent were handed it."""
        carriers = self.carriers_of(i)
        return carriers is not None and carriers <= self._delivered

    def is_begun(self, i: int) -> bool:
        """Whether some graph that takes step `i`'s cotangent was handed it."""
        return bool((self.carriers_of(i) or set()) & self._delivered)

    def forget_deliveries(self) -> None:
        self._delivered = set()

    def stream(self) -> Stream:
        """For the report."""
        return Stream.of(self.plan, [step.note for step in self.steps])

    def _composites(
        self, places: Sequence[tuple[int, int]], needs_all: bool, before: Callable[[], None]
    ) -> list[Tensor | None]:
        before()
        carriers = {i for i, _ in places}
        carried = [j for j in range(len(self.steps)) if (self.carriers_of(j) or set()) & carriers]
        missing = [j for j in carried if self.steps[j].squares is None]
        if needs_all and missing:
            self.has_failed = True
            raise MissingCotangentError(self._runner.time.denoiser, missing, max(carriers))
        with record_function(f"jagg_fx cotangents of {', '.join(map(str, sorted(carriers)))}"):
            composites = [self._composite(i, slot) for i, slot in places]
        self._delivered |= carriers
        for j in carried:
            if self.is_delivered(j):
                self.steps[j].cotangents = [None] * len(self.steps[j].cotangents)
        return composites

    def _composite(self, i: int, slot: int) -> Tensor | None:
        own, value = self.steps[i].cotangents[slot], self.steps[i].output.values[slot]
        if i in self._factors:
            return None if own is None else (self._factors[i] * own).to(value.dtype)
        carried = [
            (cotangent, (1 - self._factors[j]) * weights[i])
            for j, weights in self._weights.items()
            if i in weights and self._factors[j] != 1 and (cotangent := self.steps[j].cotangents[slot]) is not None
        ]
        if not carried:
            return own
        cotangents, weights = zip(*carried, strict=True)
        own = torch.zeros_like(value) if own is None else own
        return interpolation.composite(own, torch.stack(cotangents), torch.cat(weights)).to(value.dtype)

    def packed(self) -> Tensor:
        """Numbers for `statistics.Recorder`."""
        norms = self._norms().square().sum(1).sqrt()
        scores, keep = (torch.cat([getattr(d, name).to(norms) for d in self._decisions]) for name in ("scores", "keep"))
        return pack(norms, scores, keep)

    @property
    def is_useful(self) -> bool:
        """Whether a backward came by, and its numbers are finite and not all zero (as where all rewards are alike)."""
        came = any(step.squares is not None for step in self.steps)
        return came and 0 < float(self._norms().sum()) < float("inf")

    def measurements(self) -> Measurements:
        """What a budget is placed by. Call when `is_useful`."""
        first = self.steps[0].output.values[0]
        values = [
            torch.stack([step.output.values[slot] for step in self.steps])
            for slot, value in enumerate(self.steps[0].output.values)
            if value.shape[:1] == first.shape[:1]
        ]
        times = torch.stack([step.time for step in self.steps]).to(first.device)
        norms = self._norms()
        if self._sizes is not None:
            norms = norms * self._sizes.of_steps(times, list(self.plan.knots))
        return Measurements(times, tuple(values), norms)

    def _norms(self) -> Tensor:
        """`|g_i|` per sample `[N, B]`; a step that no backward reached has none."""
        first = next((step.squares for step in self.steps if step.squares is not None), None)
        zero = torch.zeros(1, device=self._anchor.device) if first is None else torch.zeros_like(first)
        squares = [step.squares for step in self.steps]
        return torch.stack([zero if s is None or s.shape != zero.shape else s for s in squares]).sqrt()
