"""Run a function whose loop stays in Python: the denoiser alone is compiled, and the rewrite happens in autograd.

For functions that torch.compile cannot capture whole. Which calls are knots is known when the function has returned; while it
runs, it is taken to be as in the run before, and a knot that was not foreseen runs again. The function itself runs once.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from jagg_fx import distributed, streams
from jagg_fx._compat import at_end_of_backward, backward_id
from jagg_fx.adapters import active
from jagg_fx.config import Chain, Config
from jagg_fx.denoiser import TimeArgument
from jagg_fx.errors import (
    AdapterError,
    ChainedStatesError,
    LostStepsError,
    MissingCotangentError,
    NoStepsError,
    NotCalibratedError,
)
from jagg_fx.jacobian_sizes import JacobianSizes
from jagg_fx.region import replaced_forward
from jagg_fx.report import Rewrite
from jagg_fx.statistics import Plans
from jagg_fx.structure import Output, detached, map_tensors, tensors_in
from jagg_fx.trajectory import Runner, Step, Trajectory, make_anchor, record, records_below, tie
from jagg_fx.velocities import Velocities


class DenoiserCapture:
    """Runs a function with its denoisers replaced.

    Args:
        function: its name, for errors.
        denoisers: each with its time argument.
        compiled: what compiles a denoiser's forward.
        on_statistics: receives the packed statistics of each backward.
    """

    def __init__(
        self,
        function: str,
        denoisers: Sequence[tuple[nn.Module, TimeArgument]],
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
        on_statistics: Callable[[Plans, Tensor], None],
    ) -> None:
        self._function = function
        self._runners = [
            Runner(denoiser, time, compiled(denoiser.forward), index, through=_again(denoiser))
            for index, (denoiser, time) in enumerate(denoisers)
        ]
        self._own = [denoiser.forward for denoiser, _ in denoisers]
        self._on_statistics = on_statistics
        self.foreseen: list[tuple[int, bool]] = []  # of each call with gradients: its stream, and whether it is a knot
        self._outputs: dict[int, Output] = {}  # what each denoiser returned last

    def run(
        self,
        fn: Callable[..., Any],
        config: Config,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        velocities: Velocities | None = None,
    ) -> tuple[Any, Rewrite | None, list[Trajectory]]:
        """Call `fn(*args, **kwargs)` with interpolated VJPs.

        Args:
            config: where its knots are still to be placed, this run measures (uncompiled, with even knots).
            velocities: of the rollout, in place of intermediate forwards.

        Returns:
            Its outputs, a record (None without gradients, or where it measures), and the streams that its backward measures.

        Raises:
            NoStepsError: no call of a denoiser reaches the outputs with a gradient.
            ChainedStatesError: a step's argument depends on the value of an earlier step.
            DropoutError: a step that would be interpolated draws random numbers.
            AdapterError: adapters are switched for a call with gradients.
            StepMismatchError: steps run different computations, or which calls belong together cannot be told.
            OptionError, VelocityMismatchError: velocities that do not fit.
        """
        run = _Run(self, config, velocities)
        with ExitStack() as stack:
            for runner in self._runners:
                stack.enter_context(replaced_forward(runner.denoiser, functools.partial(run.arrive, runner)))
            outputs = fn(*args, **kwargs)
        if not run.steps and not torch.is_grad_enabled():
            return outputs, None, []
        outputs, rewrite, measures = run.finish(outputs)
        return outputs, None if measures else rewrite, run.trajectories if measures else []

    def sizes(self, index: int) -> JacobianSizes:
        denoiser, forward = self._runners[index].denoiser, _Forward(self._runners[index].denoiser, self._own[index])

        def with_parameters(parameters: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            named = {f"denoiser.{name}": parameter for name, parameter in parameters.items()}
            return torch.func.functional_call(forward, named, args, kwargs)

        return JacobianSizes(denoiser, with_parameters)


class _Forward(nn.Module):
    """A denoiser's forward without its hooks, whose part the function's own call has played already."""

    def __init__(self, denoiser: nn.Module, own: Callable[..., Any]) -> None:
        super().__init__()
        self.denoiser, self.own = denoiser, own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own(*args, **kwargs)


def _again(denoiser: nn.Module) -> Callable[..., Any] | None:
    """How a denoiser's forward is run another time. Its hooks have played their part; FSDP gathers parameters in them."""
    if not distributed.gathers_in_hooks(denoiser):
        return None

    def through(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with replaced_forward(denoiser, forward):
            return denoiser(*args, **kwargs)

    return through


class _Run:
    """One run of the function, and the backwards through it."""

    def __init__(self, capture: DenoiserCapture, config: Config, velocities: Velocities | None) -> None:
        self.steps: list[Step] = []  # all calls with gradients
        self.trajectories: list[Trajectory] = []
        self._places: dict[int, tuple[Trajectory, int]] = {}  # of the calls that are steps
        self._capture, self._config, self._velocities = capture, config, velocities
        self._anchor: Tensor | None = None
        for runner in capture._runners:
            runner.look()
        self._adapters = [active(runner.layers) for runner in capture._runners]
        self._without_gradients = 0
        self._backward = -1

    def arrive(self, runner: Runner, *args: Any, **kwargs: Any) -> Any:
        """A call of a denoiser."""
        args, kwargs = runner.time.replace(args, kwargs, runner.time.read(args, kwargs))  # numbers become tensors
        inputs = tensors_in([list(args), kwargs])
        trained = [p for p in runner.denoiser.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in [*trained, *inputs]):
            self._without_gradients += 1
            return runner.call(*args, **kwargs)
        if active(runner.layers) != self._adapters[runner.index]:
            raise AdapterError.trained(runner.time.denoiser)
        if runner.time.read(args, kwargs).requires_grad:
            raise ChainedStatesError(len(self.steps), "time", chained=False)
        state = tensors_in(runner.time.state(args, kwargs)) if runner.time.positional else []
        is_cut = self._config.chain is Chain.STOP and bool(records_below(state))
        if is_cut:
            args, kwargs = runner.time.replace_state(args, kwargs, detached(runner.time.state(args, kwargs)))
        if records_below(tensors_in([list(args), kwargs])):
            raise ChainedStatesError(len(self.steps), "argument", chained=True)
        n = len(self.steps)
        is_knot = n < len(self._capture.foreseen) and self._capture.foreseen[n][1]
        call = None if is_knot else self._given(runner, args, kwargs)
        with record_function(f"jagg_fx forward, call {n}"):  # which stream it belongs to shows only later
            step, _ = runner.step(args, kwargs, with_graph=is_knot, is_cut=is_cut, call=call)
        self._capture._outputs[runner.index] = step.output
        if self._anchor is None:
            everything = [p for other in self._capture._runners for p in other.denoiser.parameters() if p.requires_grad]
            self._anchor = make_anchor(step.time.device, [*everything, *(x for x in step.operands if x.requires_grad)])
        self.steps.append(step)
        return record(step.output, self._anchor, functools.partial(self._arrive_cotangents, n))

    def _given(self, runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """What returns the rollout's velocity in the denoiser's place; None where there is none, or none was foreseen."""
        n, foreseen, like = len(self.steps), self._capture.foreseen, self._capture._outputs.get(runner.index)
        if self._velocities is None or n >= len(foreseen) or like is None or n >= len(self._velocities.values):
            return None
        before = [
            (k, step.time, step.output.values[0])
            for k, step in enumerate(self.steps)
            if foreseen[k] == (foreseen[n][0], True)
        ]
        return self._velocities.instead(n, like, runner.time.read(args, kwargs), before)

    def finish(self, outputs: Any) -> tuple[Any, Rewrite, bool]:
        """Decide, run again what must be, and let the outputs lead to the knots. Also whether this run measures."""
        capture, config = self._capture, self._config
        reached = records_below(tensors_in(outputs))
        slots = {n: reached[note] for n, note in self._notes(reached)}
        if not slots:
            reason = (
                f"{len(self.steps)} calls of the denoiser ran with gradients, and the outputs depend on none of them"
            )
            names = ", ".join(type(runner.denoiser).__name__ for runner in capture._runners)
            raise NoStepsError(capture._function, names, reason)
        call = f"jagg_fx.transform({capture._function})"
        if self._velocities is not None:
            self._velocities.check_count(len(self.steps), call)
        numbers = sorted(slots)
        grouped = streams.group_run([self.steps[n] for n in numbers])
        lengths = [len(stream) for stream in grouped]
        try:
            plans, measures = config.plans(lengths), False
        except NotCalibratedError:
            config, measures = config.calibration(), True
            plans = config.plans(lengths)
        together = distributed.is_sharded(*(runner.denoiser for runner in capture._runners))
        foreseen = dict.fromkeys(range(len(self.steps)), (-1, False))
        tokens = []
        assert self._anchor is not None
        for s, stream in enumerate(grouped):
            own = [numbers[n] for n in stream]
            plan = plans[s]
            runner = capture._runners[self.steps[own[0]].note.denoiser]
            sizes = capture.sizes(runner.index) if measures and not together else None
            trajectory = Trajectory(plan, config, runner, self._anchor, together, sizes)
            trajectory.steps = [self.steps[n] for n in own]
            for i, n in enumerate(own):
                foreseen[n] = (s, i in plan.knots)
                self._places[n] = trajectory, i
                if i not in plan.knots:
                    self.steps[n].graph = None
                elif self.steps[n].graph is None or measures:
                    trajectory.run_again(i)
                if i in plan.knots and self._velocities is not None:
                    self._velocities.check(n, self.steps[n].graph or (), call)
            if plan.segments:
                trajectory.decide(plan, sorted(set.intersection(*(slots[n] for n in own))))
            tokens.append(
                trajectory.flush([*plan.knots, *trajectory.exact(plan)], needs_all=False, before=self._begin_backward)
            )
            self.trajectories.append(trajectory)
        for n, step in enumerate(self.steps):
            if n not in slots:
                step.graph = None
        capture.foreseen = list(foreseen.values())
        outputs = map_tensors(outputs, lambda output: tie(output, tokens) if output.grad_fn is not None else output)
        rewrite = Rewrite.of_modules(
            [trajectory.stream() for trajectory in self.trajectories],
            [runner.denoiser for runner in capture._runners],
            self._without_gradients + len(self.steps) - len(slots),
        )
        return outputs, rewrite, measures

    def _notes(self, reached: dict[Any, set[int]]) -> list[tuple[int, Any]]:
        return [(note.args[0], note) for note in reached if note.func == self._arrive_cotangents]

    def _begin_backward(self) -> None:
        if self._backward != backward_id():  # an earlier one may have stopped halfway
            self._backward = backward_id()
            for step in self.steps:
                step.forget_cotangents()
            for trajectory in self.trajectories:
                trajectory.forget_deliveries()
            at_end_of_backward(self._check_deliveries)

    def _arrive_cotangents(self, n: int, cotangents: Sequence[Tensor | None]) -> None:
        self._begin_backward()
        if n in self._places:
            trajectory, i = self._places[n]
            if trajectory.is_delivered(i):
                raise MissingCotangentError.late(self._capture._function, i)
        self.steps[n].add(cotangents)

    def _check_deliveries(self) -> None:
        arrived = [n for n, step in enumerate(self.steps) if step.squares is not None]
        if not all(n in self._places and self._places[n][0].is_delivered(self._places[n][1]) for n in arrived):
            raise LostStepsError(self._capture._function)
        packed = [trajectory.packed() for trajectory in self.trajectories if trajectory.plan.segments]
        if arrived and packed:
            self._capture._on_statistics(tuple(trajectory.plan for trajectory in self.trajectories), torch.cat(packed))
