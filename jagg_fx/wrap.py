"""`wrap`: a module in the denoiser's place, for training loops that call backward at every step."""

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.profiler import record_function

from jagg_fx import distributed
from jagg_fx._compat import share_contents
from jagg_fx.adapters import active
from jagg_fx.calibration import place_by_measurements
from jagg_fx.config import Config
from jagg_fx.denoiser import check_denoiser, find_time
from jagg_fx.errors import (
    AdapterError,
    ChainedStatesError,
    InferenceTensorError,
    JaggError,
    OptionError,
    PendingStepsError,
    SecondBackwardError,
    StepMismatchError,
    StepOrderError,
    TimeArgumentError,
    VelocityMismatchError,
)
from jagg_fx.graphs import GraphView
from jagg_fx.jacobian_sizes import JacobianSizes
from jagg_fx.plan import Calibrated, Placement, Plan
from jagg_fx.preconditions import check_call
from jagg_fx.report import Report, Rewrite, Stream
from jagg_fx.saved import Saved
from jagg_fx.statistics import Recorder, Statistics
from jagg_fx.streams import check_alike
from jagg_fx.structure import Output, leaves_below, tensors_in
from jagg_fx.trajectory import Runner, Step, Trajectory, make_anchor, record, records_below
from jagg_fx.velocities import Velocities

log = logging.getLogger(__name__)


def wrap(
    denoiser: nn.Module,
    num_steps: int,
    W: int = 4,
    *,
    weights: str | None = None,
    knots: int | Sequence[int] | None = None,
    degree: int | None = None,
    plan: Placement | Sequence[Placement] | None = None,
    max_rel_error: float | None = None,
    cos_threshold: float | Literal["auto"] | None = "auto",
    jagg_frac: float | None = None,
    debias: float | None = None,
    time: str | None = None,
    shuffled: bool = False,
    calls_per_step: int = 1,
    compile: bool = False,
) -> "Wrapped":
    """Put a module in the denoiser's place so that a loop with a backward per step needs fewer passes through it.

    **The gradients are approximations**, values are not; see `transform`, which does the same for functions that run all steps
    before one backward, and describes the options that are not described here.

    Calls with gradients are counted: `num_steps` of them (times `calls_per_step`) make a trajectory, then the next one begins.
    Intermediate steps run without a graph, and their backward only notes the cotangent `dL/dv_i`; when the last step of a group
    runs its backward, the composite cotangents go through the graphs of the group's knots. So gradients arrive group by group:
    the optimizer may step between groups, and never within one. Calls under `torch.no_grad` (rollouts, the reference of a KL
    term) pass straight through and do not count.

    Args:
        denoiser: the module called at every step; it is not changed. It may be wrapped already (DistributedDataParallel,
            `fully_shard`, accelerate, peft), or be wrapped so afterwards.
        num_steps: trained steps of one trajectory: how many one micro-batch goes through.
        W, weights, knots, degree, plan, max_rel_error, cos_threshold, jagg_frac, debias, time: as in `transform`.
        shuffled: the times of a trajectory come in any order, also one of its own per sample (DanceGRPO, DDPO). Then all knots'
            graphs are kept until the trajectory's last step, as they are with `jagg_frac` and `degree=2`; otherwise those of one
            group at a time.
        calls_per_step: calls with gradients at each step, the same in the same order (two for guidance by two calls); each is
            a stream with knots of its own.
        compile: run the denoiser through `torch.compile`, once for calls with a graph and once for those without.

    Returns:
        A module with the denoiser's parameters, state_dict, attributes and methods, and a `report`, `plans` and `stats`.

    Raises:
        OptionError, PlanError: an argument that cannot be used.
        TimeArgumentError: the denoiser's time argument is not known.
        PendingStepsError: later, where the optimizer steps or a trajectory begins while cotangents would be lost.
    """
    name = type(denoiser).__name__
    if isinstance(denoiser, Wrapped):
        denoiser = denoiser.original
    for option, value in (("num_steps", num_steps), ("calls_per_step", calls_per_step)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(
                f"jagg_fx.wrap({name}, {option}={value!r}): a whole number of at least 1. num_steps is the number of calls with "
                "gradients that one micro-batch makes (times calls_per_step, 1 unless guidance calls the denoiser twice)."
            )
    try:
        check_denoiser(denoiser)
        config = Config.create(
            W=W,
            knots=knots,
            weights=weights,
            degree=degree,
            plan=plan,
            max_rel_error=max_rel_error,
            cos_threshold=cos_threshold,
            jagg_frac=jagg_frac,
            debias=debias,
            lowering="inductor" if compile else "eager",
        )
        config = config.with_memory()
        first = config.calibration() if isinstance(config.placement, Calibrated) else config
        first.plans([num_steps] * calls_per_step)  # raises if they do not fit
        find_time(denoiser, time)
    except (OptionError, TimeArgumentError) as error:
        raise type(error)(str(error).replace("jagg_fx.transform(fn", f"jagg_fx.wrap({name}")) from None
    return Wrapped(denoiser, config, num_steps, time, shuffled, calls_per_step)


class Wrapped(nn.Module):
    """A denoiser whose calls with gradients are steps of trajectories; made by `wrap`.

    Attributes that it does not have itself are the denoiser's, also when they are set.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        config: Config,
        num_steps: int,
        time: str | None,
        shuffled: bool,
        calls_per_step: int,
    ) -> None:
        self.__dict__["original"] = denoiser
        super().__init__()
        share_contents(denoiser, self)
        call = torch.compile(denoiser) if config.lowering == "inductor" else denoiser
        self.__dict__ |= {
            "_config": config,
            "_num_steps": num_steps,
            "_time": time,
            "_shuffled": shuffled,
            "_calls_per_step": calls_per_step,
            "_runner": Runner(denoiser, find_time(denoiser, time), call),
            "_recorder": Recorder(),
            "_current": None,
            "_runs": weakref.WeakSet(),  # trajectories whose graphs are alive
            "_velocities": None,
            "_rewrite": None,
        }
        _watch_optimizers(self)

    _config: Config
    _current: "_Run | None"
    _runs: "weakref.WeakSet[_Run]"
    _velocities: Velocities | None
    _rewrite: Rewrite | None
    _runner: Runner
    _recorder: Recorder
    original: nn.Module

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a loop that is compiled breaks here, and goes on
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The denoiser's own output. With gradients, a step of the trajectory."""
        if not self._is_step(args, kwargs):
            return self._runner.call(*args, **kwargs)
        if self._current is None or self._current.is_complete:
            self._current = self._begin(args, kwargs)
        return self._current.call(args, kwargs)

    def _is_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return torch.is_grad_enabled() and (
            any(parameter.requires_grad for parameter in self.original.parameters())
            or any(tensor.requires_grad for tensor in tensors_in([list(args), kwargs]))
        )

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Run":
        self._check_delivered("a new trajectory begins")
        if self._velocities is not None and self._current is not None and self._current.velocities is self._velocities:
            raise OptionError(
                f"{self!r}.reuse(velocities=...): a second trajectory begins in the block. Give each its own velocities, in a "
                "block of its own."
            )
        check_call(repr(self), [self.original], args, kwargs)
        self._finish_calibration()
        placement, config = self._config.placement, self._config
        is_calibration = isinstance(placement, Calibrated) and not placement.plans
        if is_calibration:
            config = config.calibration()
        is_sharded = distributed.is_sharded(self, self.original)
        is_capped = config.guard.jagg_frac is not None and config.guard.jagg_frac < 1
        plans = config.plans([self._num_steps] * self._calls_per_step)
        if any(plan.segments for plan in plans):
            distributed.check_wrapper(repr(self), self, tensors_in([list(args), kwargs]))
        rewrite = self._describe(plans, args, kwargs)
        is_new, self._rewrite = rewrite != self._rewrite, rewrite
        if is_new:
            log.info("%s", self.report)
        run = _Run(
            repr(self),
            self._runner,
            config,
            plans,
            keep_all=self._shuffled or config.rule.degree == 2 or is_capped,
            shuffled=self._shuffled,
            together=is_sharded,
            measures=is_calibration,
            measures_jacobians=is_calibration and not is_sharded,
            velocities=self._velocities,
            recorder=self._recorder,
        )
        self._runs.add(run)
        return run

    def _describe(self, plans: Sequence[Plan], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rewrite:
        arguments = self._runner.time.given(args, kwargs)
        return Rewrite.of_modules([Stream(0, plan, arguments) for plan in plans], [self.original], 0)

    def _check_delivered(self, event: str) -> None:
        for run in list(self._runs):
            run.check_delivered(event)

    def _finish_calibration(self) -> None:
        """Place the knots by what the last trajectory measured, if it did."""
        run, placement = self._current, self._config.placement
        if run is None or not run.measures:
            return
        run.measures = False
        assert isinstance(placement, Calibrated)
        plans = place_by_measurements(repr(self), placement.budget, self._config.rule, run.trajectories)
        if plans is not None:
            self.__dict__["_config"] = replace(self._config, placement=placement.with_plans(plans))

    def reset(self) -> None:
        """Drop what was abandoned in the middle (after an exception, say). Its cotangents are lost."""
        for run in list(self._runs):
            run.is_dropped = True
        self._current = None

    @contextmanager
    def reuse(
        self, velocities: Tensor | Sequence[Tensor], *, extrapolate: bool = False, tolerance: float | None = None
    ) -> Iterator[None]:
        """Within the block, intermediate steps of one trajectory take the rollout's velocities, and their forward is not run.

        The first update after a rollout runs with the weights of the rollout: its velocities are those of the rollout, and a
        group costs two forwards and two backwards. Every knot is run, and its value compared with the given one.

        Args:
            velocities: of each call with gradients `[B, *]`, in the order of the calls; a tensor `[calls, B, *]` or a list.
            extrapolate: the weights may have moved since the rollout. **Values are approximations then too**: intermediate
                velocities are moved by what changed at the knots that ran before them (by their weights in time).
            tolerance: largest relative difference at a knot. By default 1e-4, and 2e-2 in half precision.

        Raises:
            OptionError: their number is not that of the calls.
            VelocityMismatchError: a knot's value is another one: the weights have moved.
            PendingStepsError: a trajectory has begun already.
        """
        given = Velocities.create(velocities, extrapolate, tolerance)
        given.check_count(self._num_steps * self._calls_per_step, repr(self))
        if self._current is not None and not self._current.is_complete:
            raise PendingStepsError.not_over(repr(self), "reuse(velocities=...) was entered")
        self._velocities = given
        try:
            yield
        except VelocityMismatchError:
            self.reset()  # what has run of this trajectory is worth nothing
            raise
        finally:
            self._velocities = None
        run = self._current
        if run is not None and run.velocities is given and not run.is_complete:
            raise PendingStepsError.not_over(repr(self), "the block of reuse(velocities=...) was left")

    def recalibrate(self) -> None:
        """Measure again in the next trajectory, and place the knots anew. Raises `OptionError` if nothing measures."""
        placement = self._config.placement
        if not isinstance(placement, Calibrated):
            raise OptionError(
                f"{self!r}.recalibrate(): its knots are not placed by a measurement. Write knots=K for such."
            )
        self.__dict__["_config"] = replace(self._config, placement=replace(placement, plans=()))

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each call of a step. Empty, with `knots=K`, before the second trajectory began."""
        placement = self._config.placement
        if isinstance(placement, Calibrated):
            return placement.latest
        return tuple(self._config.plans([self._num_steps] * self._calls_per_step))

    @property
    def stats(self) -> Statistics | None:
        """Numbers of the last whole trajectory and means over all, see `jagg_fx.statistics`; None before the first one."""
        return self._recorder.read()

    @property
    def graphs(self) -> tuple[GraphView, ...]:
        """What is done with the steps of a trajectory; empty before the first one. See `jagg_fx.graphs`."""
        return self.report.graphs_of([self._rewrite] if self._rewrite else [], self.stats)

    @property
    def report(self) -> Report:
        """What was found, rewritten and left exact; it claims nothing before the first step with gradients."""
        return Report(
            function="a loop with a backward per step",
            denoisers=(type(self.original).__name__,),
            config=self._config,
            rewrite=self._rewrite,
            graphs=0,
            capture="none: rewritten in autograd, step by step",
        )

    def save_report(self, path: str | Path) -> None:
        """Write the report and the graphs as JSON for `jagg_fx.saved.load` and `jagg-fx report`: text alone, and no weights.

        Raises:
            SavedReportError: it cannot be written.
        """
        Saved("report", self.report.to_dict(), tuple(self.report.rows()), self.graphs).save(path)

    def __repr__(self) -> str:
        return f"jagg_fx.wrap({type(self.original).__name__}, num_steps={self._num_steps})"

    # What makes it stand in for the denoiser.

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" and not hasattr(self.__dict__["original"], "module"):
                return self.original  # as with DistributedDataParallel
            return getattr(self.__dict__["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in self.__dict__ or hasattr(type(self), name)
        if not is_own and hasattr(self.original, name):
            setattr(self.original, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def training(self) -> bool:
        return self.original.training

    @training.setter
    def training(self, mode: bool) -> None:
        pass  # set by `train`, on the denoiser

    def train(self, mode: bool = True) -> "Wrapped":
        self.original.train(mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> "Wrapped":
        self.original.to(*args, **kwargs)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> "Wrapped":
        self.original._apply(*args, **kwargs)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.load_state_dict(*args, **kwargs)

    def __reduce__(self) -> Any:  # copies and pickles begin no trajectory, and watch optimizers of their own
        options = (self._config, self._num_steps, self._time, self._shuffled, self._calls_per_step)
        return Wrapped, (self.original, *options)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.original._load_from_state_dict(*args, **kwargs)

    def set_extra_state(self, state: Any) -> None:
        self.original.set_extra_state(state)

    def get_extra_state(self) -> Any:
        return self.original.get_extra_state()


class _Run:
    """One trajectory: its streams of steps, and what is still pending.

    Args:
        name: of the wrapped denoiser, for errors.
        runner: runs it.
        config: what was asked for.
        plans: one for each stream.
        keep_all: keep all knots' graphs until the last step.
        shuffled: whether times may come in any order.
        together: see `decision.decide`.
        measures: whether knots are to be placed by this trajectory.
        measures_jacobians: whether the knots' Jacobians can be measured.
        velocities: of the rollout, where they are reused.
        recorder: receives the statistics.
    """

    def __init__(
        self,
        name: str,
        runner: Runner,
        config: Config,
        plans: Sequence[Plan],
        *,
        keep_all: bool,
        shuffled: bool,
        together: bool,
        measures: bool,
        measures_jacobians: bool,
        velocities: Velocities | None,
        recorder: Recorder,
    ) -> None:
        self.is_dropped = False
        self.is_told = False  # whether an error has said that steps are pending
        self.measures = measures
        self._name, self._runner, self._recorder = name, runner, recorder
        self._keep_all, self._shuffled = keep_all, shuffled
        self.velocities = velocities
        runner.look()
        self._anchor = make_anchor(runner.device)
        run = functools.partial(torch.func.functional_call, runner.denoiser)
        self.trajectories = [
            Trajectory(
                plan,
                config,
                runner,
                self._anchor,
                together,
                JacobianSizes(runner.denoiser, run) if measures_jacobians else None,
            )
            for plan in plans
        ]
        self._adapters = active(runner.layers)
        self._is_recorded_already = False

    @property
    def _count(self) -> int:
        return sum(len(trajectory.steps) for trajectory in self.trajectories)

    @property
    def is_complete(self) -> bool:
        return self._count == sum(trajectory.plan.num_steps for trajectory in self.trajectories)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._call(args, kwargs)
        except JaggError:
            self.is_told = True
            raise

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._count
        s = number % len(self.trajectories)
        trajectory = self.trajectories[s]
        i, plan = len(trajectory.steps), trajectory.plan
        self._check(i, args, kwargs)
        step, output = self._run(number, s, i, args, kwargs)
        first = trajectory.steps[0] if trajectory.steps else step
        check_alike(i, step, first)
        self._check_order_of_calls(s, i, step)
        trajectory.steps.append(step)
        if i == plan.num_steps - 1 and plan.segments:
            self._check_times(trajectory)
        if not self._is_noted(plan, i):  # it keeps its own VJP, and stands in for no other step
            step.graph = None
            for slot, value in enumerate(Output.of(output, "").values):
                if value.grad_fn is not None and plan.segments:
                    value.register_hook(functools.partial(self._arrive_plain, s, i, slot))
            return output
        token = self._close(trajectory, i)
        return record(step.output, self._anchor, functools.partial(self._arrive, s, i), token)

    def _run(self, number: int, s: int, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Step, Any]:
        trajectory, given = self.trajectories[s], self.velocities
        is_knot = i in trajectory.plan.knots
        call = trajectory.measured_call(i)
        if given is not None and not is_knot:
            call = self._given(number, s, args, kwargs)
        of = f" of stream {s}" if len(self.trajectories) > 1 else ""
        with record_function(f"jagg_fx forward {i}{of}"):
            step, output = self._runner.step(args, kwargs, with_graph=is_knot, call=call)
        if given is not None and is_knot:
            given.check(number, step.output.values, self._name)
        return step, output

    def _given(self, number: int, s: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """What returns the rollout's velocity in the denoiser's place."""
        assert self.velocities is not None
        steps, knots = self.trajectories[s].steps, self.trajectories[s].plan.knots
        streams = len(self.trajectories)
        before = [(k * streams + s, steps[k].time, steps[k].output.values[0]) for k in knots if k < len(steps)]
        return self.velocities.instead(number, steps[0].output, self._runner.time.read(args, kwargs), before)

    def _check(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        time, tensors = self._runner.time, tensors_in([list(args), kwargs])
        state = time.state(args, kwargs) if time.positional else None
        if time.read(args, kwargs).requires_grad:
            raise ChainedStatesError(i, "time", chained=False)
        if any(tensor.requires_grad for tensor in tensors_in(state)) or records_below(tensors):
            raise ChainedStatesError(i, "argument", chained=bool(records_below(tensors)))
        if any(tensor.is_inference() for tensor in tensors):
            raise InferenceTensorError(self._name, "an argument of the denoiser")
        if active(self._runner.layers) != self._adapters:
            raise AdapterError.trained(time.denoiser)

    def _is_noted(self, plan: Plan, i: int) -> bool:
        if self._keep_all:
            return bool(plan.segments)
        return any(segment.a <= i <= segment.b for segment in plan.segments)

    def _close(self, trajectory: Trajectory, i: int) -> Tensor | None:
        """At the last step of a segment (or of the trajectory): decide, and let this step's backward lead to the knots."""
        plan = trajectory.plan
        if self._keep_all:
            if i < plan.num_steps - 1:
                return None
            window, done = plan, set(plan.knots)
        else:
            segment = next((segment for segment in plan.segments if segment.b == i), None)
            if segment is None:
                return None
            window, done = trajectory.window((segment.a, segment.b)), {segment.a, segment.b}
            done -= {following.a for following in plan.segments if following.a == i}
        self._check_times(trajectory)
        trajectory.decide(window, trajectory.check_outputs(window.knots))
        return trajectory.flush(sorted({*done, *trajectory.exact(window)}), needs_all=True)

    def _check_order_of_calls(self, s: int, i: int, step: Step) -> None:
        """Raise where a call gets what another call of the step got at first; the state and what all share tell nothing."""
        if i == 0 or len(self.trajectories) == 1:
            return

        def kept(other: Step) -> list[int]:
            return [operand.data_ptr() for operand in other.operands[1:]]

        firsts = [kept(trajectory.steps[0]) for trajectory in self.trajectories]
        if kept(step) != firsts[s] and kept(step) in firsts:
            raise StepMismatchError.swapped_calls(self._name, i)

    def _check_times(self, trajectory: Trajectory) -> None:
        """Raise where the times say that this is not one trajectory; waits for the device."""
        times = torch.stack([step.time.reshape(-1) for step in trajectory.steps])
        if self._shuffled:
            ordered = times.sort(0).values
            if bool((ordered[1:] == ordered[:-1]).any()):
                raise StepOrderError.repeated(self._name, 0, len(times) - 1)
            return
        change = times[1:] - times[:-1]
        if not bool(((change > 0).all(0) | (change < 0).all(0)).all()):
            raise StepOrderError.unordered(self._name, 0, times[:, 0].tolist())

    def _arrive(self, s: int, i: int, cotangents: Sequence[Tensor | None]) -> None:
        trajectory = self.trajectories[s]
        if trajectory.is_begun(i):
            raise SecondBackwardError(self._name, i)
        trajectory.steps[i].add(cotangents)
        self._record_statistics()

    def _arrive_plain(self, s: int, i: int, slot: int, cotangent: Tensor) -> None:
        step = self.trajectories[s].steps[i]
        step.add([cotangent if n == slot else None for n in range(len(step.output.values))])
        self._record_statistics()

    def _record_statistics(self) -> None:
        """Once, when every step has got its cotangent."""
        if self._is_recorded_already or not self.is_complete:
            return
        rewritten = [trajectory for trajectory in self.trajectories if trajectory.plan.segments]
        if rewritten and all(step.squares is not None for trajectory in rewritten for step in trajectory.steps):
            self._is_recorded_already = True
            packed = torch.cat([trajectory.packed() for trajectory in rewritten])
            self._recorder.record(tuple(trajectory.plan for trajectory in self.trajectories), packed)

    def pending(self) -> list[int]:
        """Steps whose cotangent has not reached all of the graphs that take it."""
        return sorted({i for trajectory in self.trajectories for i in self._pending_in(trajectory)})

    def _pending_in(self, trajectory: Trajectory) -> list[int]:
        noted = [i for i in range(len(trajectory.steps)) if self._is_noted(trajectory.plan, i)]
        return [i for i in noted if not trajectory.is_delivered(i)]

    def check_delivered(self, event: str) -> None:
        """Raise `PendingStepsError` if cotangents arrived, or may still arrive, that `event` would make worthless."""
        pending = [] if self.is_dropped else self.pending()
        arrived = [
            i for i in pending if any(i < len(t.steps) and t.steps[i].squares is not None for t in self.trajectories)
        ]
        if pending and (arrived or not self.is_complete):
            self.is_told = True
            raise PendingStepsError.lost(self._name, event, pending, arrived, self._closing(pending))

    def _closing(self, pending: Sequence[int]) -> int:
        """The step whose backward delivers the first pending one."""
        plan = next(t.plan for t in self.trajectories if set(self._pending_in(t)) & set(pending))
        if self._keep_all:
            return plan.num_steps - 1
        return next(
            (segment.b for segment in plan.segments if segment.b >= pending[0] + (pending[0] in plan.knots)), pending[0]
        )

    def __del__(self) -> None:
        # Nobody can reach the pending steps any more. Python prints what is raised here, and goes on.
        is_told = self.is_told or any(trajectory.has_failed for trajectory in getattr(self, "trajectories", ()))
        if hasattr(self, "trajectories") and not is_told and not sys.is_finalizing():
            self.check_delivered("the trajectory was thrown away")


def _watch_optimizers(wrapped: Wrapped) -> None:
    """Refuse an optimizer's step on the wrapped parameters while cotangents are pending."""
    reference = weakref.ref(wrapped)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        module = reference()
        if module is None or not any(run.pending() for run in list(module._runs)):
            return
        operands = [x for run in module._runs for t in run.trajectories for step in t.steps for x in step.operands]
        own = set(map(id, module.parameters())) | leaves_below(operands)
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            module._check_delivered(f"{type(optimizer).__name__}.step() was called")

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(wrapped, handle.remove)
