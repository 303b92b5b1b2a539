"""`transform`: the front door. Capture a function, mark its steps, rewrite its joint graph, lower it."""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, fx, nn

from jagg_fx import canaries, reference
from jagg_fx._compat import compile_isolated, dynamo_errors, dynamo_settings, trace_artifact
from jagg_fx.backend import lower
from jagg_fx.calibration import MeasuredStream, place_by_measurements
from jagg_fx.config import Capture, Chain, Config, Lowering, choice
from jagg_fx.denoiser import check_denoiser, describe_function, find_denoiser, find_time
from jagg_fx.denoiser_capture import DenoiserCapture
from jagg_fx.distributed import is_distributed
from jagg_fx.errors import (
    DynamoFailedError,
    FakeImplementationError,
    GraphBreakError,
    LoweringFailedError,
    NoStepsError,
    NotCalibratedError,
    OptionError,
    PlanError,
    RaisedInCaptureError,
    SplitStepsError,
)
from jagg_fx.graphs import GraphView
from jagg_fx.outline import outline
from jagg_fx.plan import Calibrated, Placement, Plan, paper
from jagg_fx.preconditions import check_call
from jagg_fx.region import TIME, Region
from jagg_fx.report import Report, Rewrite
from jagg_fx.saved import Saved
from jagg_fx.statistics import Recorder, Statistics
from jagg_fx.velocities import Velocities
from jagg_fx.verification import Variants, Verification, Verifier

log = logging.getLogger(__name__)

# A call replaces denoisers' forwards and settings of torch for as long as it runs: other threads' calls wait for its end.
_one_at_a_time = threading.RLock()

P = ParamSpec("P")
R = TypeVar("R")


def transform(
    fn: Callable[P, R],
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
    denoiser: nn.Module | Sequence[nn.Module] | None = None,
    time: str | None = None,
    chain: str = "error",
    lowering: str = "inductor",
    capture: str = "auto",
    fullgraph: bool = True,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    disable_passes: Sequence[str] = (),
    verify: bool | int = False,
    verify_tolerance: float = 0.3,
) -> "Transformed[P, R]":
    """Compile a function that runs a denoiser over many steps so that its backward needs fewer passes through it.

    **The gradients are approximations.** Values are not: every step's forward is computed as before. Steps between two
    knots lose their own VJP; their cotangents are carried to the knots, weighted by time (JAGG, arXiv 2607.17572). That
    is exact where the velocity is linear in (z, t) along the path, and it is only defined for steps that do not feed
    each other with gradients: replays of stored latents, as in Flow-GRPO, DanceGRPO, MixGRPO, DDPO and their kin.

    Args:
        fn: the function, e.g. `replay(latents, sigmas, labels) -> log_probs`. It calls the denoiser at every step. Of an
            already transformed function, the original is taken.
        W: consecutive steps per group; each group keeps the VJPs of its first and last step. At least 2, which keeps
            every step exact. The last group may be shorter.
        weights: "time" (the default) interpolates by the steps' times, "index" by their position.
        knots: instead of `W`, the indices of the steps that keep their VJP, the first and the last among them; or their
            number, which are then placed where they are worth most: the first call with gradients runs
            uncompiled and measures, and the compiled rewrite starts at the second (see `plan` and `recalibrate`). With a
            default process group, every rank must make the same calls: the second broadcasts rank 0's plan.
        degree: 1 (the default) interpolates linearly between the two nearest knots, 2 quadratically between three.
        plan: instead of `W` and `knots`, a placement of `jagg_fx.plan` or a plan made and saved earlier; or a list of them, one
            for each stream of calls.
        max_rel_error: instead of `knots`, the largest predicted relative error of the gradient; the least number of knots
            that keeps to it is chosen by a measurement as with `knots=K`. The prediction is an estimate, not a bound.
        cos_threshold: a segment between two knots is interpolated where the cosine between its steps' velocities and their
            own interpolation, the worst step's, is at least this; elsewhere its steps get their exact VJPs. None: always.
            "auto" is 0.8 (`jagg_fx.guard.DEFAULT_COS_THRESHOLD`), and None for knots that a measurement placed.
        jagg_frac: largest share of intermediate steps that are interpolated in one call, best segments first.
        debias: with this probability per segment, one of its steps adds the error that it makes, scaled so that the mean
            gradient is exact (over the draws; with `cos_threshold` too). Costs up to one more pass per segment.
        denoiser: the module called at every step, or several (experts that share the steps, a student and a teacher). By
            default the one trainable module that the function can reach. Calls that follow different paths (the halves of
            guidance, two experts) are streams with knots of their own; see `jagg_fx/streams.py`.
        time: name of the denoiser's time argument. By default timestep, timesteps, t, time or sigma.
        chain: what to do where a gradient would flow into a step's state, as in a sampler that is differentiated end to end:
            "error" refuses, "stop" cuts it at the denoiser's first argument, while the sampler's own path from state to state
            keeps its gradient (what DRTune, arXiv 2405.00760, does).
        lowering: "inductor" compiles to machine code; "eager" rewrites the same graphs and interprets them; "reference"
            computes the same approximation by plain autograd, without torch.compile.
        capture: "whole" has torch.compile capture the function whole and rewrites its joint graph. "denoiser" leaves the function
            to Python, compiles the denoiser alone and rewrites in autograd, with the same plans, guard and statistics: for
            functions with `.item()`, prints, lookups by value, generators or collectives between the steps. "auto" tries whole,
            and settles for the other with a warning; the report says why.
        fullgraph: as in `torch.compile`. With False the graph may break before and after the loop over the steps.
        dynamic: as in `torch.compile`.
        options, mode: Inductor's options, or a mode that stands for some of them, as in `torch.compile`. CUDA graphs
            ("reduce-overhead", "max-autotune") do not go with segments that may run exactly: set `cos_threshold=None`.
        disable_passes: leave out some of "interpolate_vjps" (every step is then exact), "route_segments" (no guard and no
            unbiased correction), "record_statistics" and "drop_saved": to find which one is to blame. Implies `capture="whole"`.
        verify: also compute the exact gradient and the reference's after the backward of a call, on the same batch, and compare
            (see `jagg_fx.verification`); a whole number n does so at every n-th call with gradients. The function runs again
            five times for that. Calls that measure knots or reuse velocities are not verified.
        verify_tolerance: relative error of the rewritten gradient past which there is a warning.

    Returns:
        An object with the signature and outputs of `fn`, a `report`, the `plans` and the `stats` of its backwards.

    Raises:
        OptionError, PlanError: an argument that cannot be used. Everything that depends on the function itself is
            raised by the first call; see `jagg_fx.errors`.
        VerificationError: from the backward of a verified call, if the rewritten gradient is not the reference's.
    """
    if isinstance(fn, Transformed):
        fn = fn.original
    if not callable(fn):
        raise OptionError(f"jagg_fx.transform({fn!r}): the first argument is the function that loops over the steps.")
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
        lowering=lowering,
        chain=chain,
        options=options,
        mode=mode,
        disable_passes=disable_passes,
    )
    given = (
        tuple(denoiser)
        if isinstance(denoiser, (list, tuple, nn.ModuleList))
        else ()
        if denoiser is None
        else (denoiser,)
    )
    denoisers = tuple(map(check_denoiser, given))
    chosen = choice(Capture, "capture", capture)
    if config.lowering is Lowering.REFERENCE and chosen is not Capture.AUTO:
        raise OptionError(
            f"jagg_fx.transform(fn, lowering='reference', capture={capture!r}): the reference captures nothing and runs the "
            "function three times. Leave one of them out; lowering='eager', capture='denoiser' runs it once, uncompiled."
        )
    if disable_passes and (chosen is Capture.DENOISER or config.lowering is Lowering.REFERENCE):
        raise OptionError(
            f"jagg_fx.transform(fn, disable_passes={list(disable_passes)!r}, capture={capture!r}, lowering={lowering!r}): these "
            "passes work on the joint graph of a function that is captured whole. Leave capture and lowering='reference' out."
        )
    inner = {id(child) for module in denoisers for child in module.modules() if child is not module}
    if (
        (denoiser is not None and not denoisers)
        or len(set(denoisers)) < len(denoisers)
        or inner & set(map(id, denoisers))
    ):
        raise OptionError(
            f"jagg_fx.transform(fn, denoiser=[{', '.join(type(module).__name__ for module in denoisers)}]): a list names at "
            "least one module, none twice, and none that is part of another one. Name the modules that the function calls itself."
        )
    if disable_passes:
        chosen = Capture.WHOLE
    transformed = Transformed(fn, config, denoisers, time, capture=chosen, fullgraph=fullgraph, dynamic=dynamic)
    transformed.verify(verify, verify_tolerance)
    return transformed


class Transformed(Generic[P, R]):
    """A function whose backward runs fewer passes through its denoiser; made by `transform`.

    Attributes:
        original: the function as it was given.
    """

    def __init__(
        self,
        fn: Callable[P, R],
        config: Config,
        denoisers: tuple[nn.Module, ...],
        time: str | None,
        *,
        capture: Capture,
        fullgraph: bool,
        dynamic: bool | None,
    ) -> None:
        self.original = fn
        self._config = config.with_memory()
        self._measuring: Sequence[MeasuredStream] = ()  # what the last call measures
        self._capture = capture
        self._uncaptured: str | None = None  # why the function is not captured whole
        self._by_denoiser: DenoiserCapture | None = None
        self._velocities: Velocities | None = None
        self._recorder = Recorder()
        self._verifier: Verifier | None = None
        self._given = denoisers
        self._time = time
        self._fullgraph = fullgraph
        self._dynamic = dynamic
        self._regions: tuple[Region, ...] = ()
        self._rewrites: list[Rewrite] = []
        self._captured = False  # whether any graph held a step
        self._findings: tuple[canaries.Finding, ...] = ()  # bugs of torch on the device in use
        self._runs = 0  # graphs with steps that ran during the present call
        functools.update_wrapper(self, fn, updated=())

        def entry(*args: P.args, **kwargs: P.kwargs) -> R:
            return fn(*args, **kwargs)

        # Dynamo remembers per code object (by file, line and name) which sizes and numbers changed from call to call.
        # This function's code is shared by every transformed function; a name of its own keeps their histories apart.
        entry.__code__ = entry.__code__.replace(co_name=f"{describe_function(fn)}_{id(self):x}")
        self._entry = entry
        self._lower = lower
        self._compiled = self._compile()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with _one_at_a_time:
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        self._regions = regions = self._current_regions(args, kwargs)
        if torch.is_grad_enabled():
            denoisers = [region.denoiser for region in regions]
            check_call(repr(self).strip("<>"), denoisers, args, kwargs)
        if self._measuring and torch.is_grad_enabled():
            self._finish_calibration()
        placement = self._config.placement
        if isinstance(placement, Calibrated) and not placement.plans and torch.is_grad_enabled():
            return self._calibrate(regions, args, kwargs)
        verifier = self._verifier if torch.is_grad_enabled() and self._velocities is None else None
        call = None if verifier is None else verifier.begin([region.denoiser for region in regions], args, kwargs)
        try:
            outputs = self._run(regions, args, kwargs)
        except NotCalibratedError:  # a number of steps that no plan was made for
            return self._calibrate(regions, args, kwargs)
        if verifier is not None and call is not None:
            verifier.watch(call, outputs, self._variants(regions, args, kwargs))
        return outputs

    def _variants(self, regions: tuple[Region, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variants:
        def by_reference(config: Config) -> R:
            return self._run_reference(regions, config, args, kwargs)[0]

        config = self._config
        uncut = config.chain is Chain.ERROR
        return Variants(
            rewritten=lambda: self._run(regions, args, kwargs),
            exact=lambda: (
                self.original(*args, **kwargs) if uncut else by_reference(replace(config, placement=paper(2)))
            ),
            reference=None if config.lowering is Lowering.REFERENCE else lambda: by_reference(config),
        )

    def _run(self, regions: tuple[Region, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        if self._config.lowering is Lowering.REFERENCE and self._velocities is None:
            outputs, record, _ = self._run_reference(regions, self._config, args, kwargs)
            if record is not None:
                self._rewrites = [record]
            return outputs
        if self._uncaptured is not None or self._capture is Capture.DENOISER or self._velocities is not None:
            return self._run_by_denoiser(regions, args, kwargs)
        try:
            return self._run_compiled(regions, args, kwargs)
        except (GraphBreakError, DynamoFailedError, FakeImplementationError, LoweringFailedError) as error:
            if self._capture is Capture.WHOLE:
                raise
            try:
                outputs = self._run_by_denoiser(regions, args, kwargs)
            except Exception:
                self._by_denoiser = None
                raise
            self._uncaptured = error.why
            log.warning("%s is not captured whole, the denoiser alone is compiled: %s", self, error.why)
            return outputs

    def _run_reference(
        self, regions: tuple[Region, ...], config: Config, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[R, Rewrite | None, Sequence[MeasuredStream]]:
        denoisers = [(region.denoiser, region.time) for region in regions]
        return reference.run(self.original, denoisers, config, args, kwargs, self._recorder.record)

    def _run_by_denoiser(self, regions: tuple[Region, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        if self._by_denoiser is None:
            self._look_for_bugs(regions)
            self._by_denoiser = self._make_denoiser_capture(regions, self._compile_denoiser)
            if len(self._rewrites) == 1 and len(plans := self._rewrites[0].plans) == 1:  # of the whole capture
                self._by_denoiser.foreseen = [(0, i in plans[0].knots) for i in range(plans[0].num_steps)]
        run = self._by_denoiser.run(self.original, self._config, args, kwargs, self._velocities)
        outputs, record, self._measuring = run
        if record is not None:  # the newest is last
            is_new = record not in self._rewrites
            self._rewrites = [*(other for other in self._rewrites if other != record), record]
            if is_new:
                log.info("%s", self.report)
        return outputs  # type: ignore[no-any-return]

    def _make_denoiser_capture(
        self, regions: tuple[Region, ...], compiled: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> DenoiserCapture:
        denoisers = [(region.denoiser, region.time) for region in regions]
        return DenoiserCapture(describe_function(self.original), denoisers, compiled, self._recorder.record)

    def _compile_denoiser(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        if self._config.lowering is not Lowering.INDUCTOR:
            return forward
        return torch.compile(forward, dynamic=self._dynamic, options=self._options_around_bugs() or None)

    def _look_for_bugs(self, regions: tuple[Region, ...]) -> None:
        if self._config.lowering is Lowering.INDUCTOR:
            self._findings = canaries.findings(_device(regions[0].denoiser))

    def _options_around_bugs(self) -> dict[str, Any]:
        """Inductor's options: those that avoid the bugs found, and the user's, which win."""
        avoid = {name: value for finding in self._findings for name, value in finding.options.items()}
        return avoid | dict(self._config.options)

    def _run_compiled(self, regions: tuple[Region, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        self._runs = 0
        self._look_for_bugs(regions)
        try:
            with (
                _installed(regions),
                dynamo_settings(),
                dynamo_errors(
                    describe_function(self.original), bool(self._dynamic), [region.denoiser for region in regions]
                ),
            ):
                outputs = self._compiled(*args, **kwargs)
        except RaisedInCaptureError:
            if self._capture is Capture.WHOLE:
                with _installed(regions):
                    self.original(*args, **kwargs)  # nothing has run yet: let the function raise its own exception
            raise
        except DynamoFailedError as error:
            if refusal := next((region.refusal for region in regions if region.refusal), None):
                raise refusal from None
            if len(regions) > 1 or not regions[0].nested:
                raise
            log.info("%s is traced at every step: a nested region failed (%s)", self._names()[0], error)
            self._regions = self._make_regions([regions[0].denoiser], failure=error.reason)
            return self._run_compiled(self._regions, args, kwargs)
        self._check_capture()
        return outputs

    def _calibrate(self, regions: tuple[Region, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Run with even knots, uncompiled, and measure; `_finish_calibration` places the knots afterwards."""
        assert isinstance(self._config.placement, Calibrated)
        log.info("the knots of %s are not placed yet: this call measures, uncompiled", self)
        if self._config.lowering is Lowering.REFERENCE:
            config = self._config.calibration()
            outputs, _, self._measuring = self._run_reference(regions, config, args, kwargs)
        else:
            eager = self._make_denoiser_capture(regions, lambda forward: forward)
            outputs, _, self._measuring = eager.run(self.original, self._config, args, kwargs)
        return outputs

    def _finish_calibration(self) -> None:
        """Place the knots by what the last call and its backward measured; without a backward, the next call measures."""
        streams, self._measuring = self._measuring, ()
        placement = self._config.placement
        assert isinstance(placement, Calibrated)
        plans = place_by_measurements(str(self), placement.budget, self._config.rule, streams)
        if plans is not None:
            self._config = replace(self._config, placement=placement.with_plans(plans))

    @contextlib.contextmanager
    def reuse(
        self, velocities: Tensor | Sequence[Tensor], *, extrapolate: bool = False, tolerance: float | None = None
    ) -> Iterator[None]:
        """Within the block, intermediate steps take the rollout's velocities, and their forward is not run.

        The first update after a rollout runs with the weights of the rollout: its velocities are those of the rollout, and a
        group costs two forwards and two backwards. Every knot is run, and its value compared with the given one. Calls within
        the block run with `capture="denoiser"`; the first of them may run every forward still, to learn which steps are knots.

        Args:
            velocities: of each call with gradients `[B, *]`, in the order of the calls; a tensor `[calls, B, *]` or a list.
            extrapolate: the weights may have moved since the rollout. **Values are approximations then too**: intermediate
                velocities are moved by what changed at the knots that ran before them (by their weights in time).
            tolerance: largest relative difference at a knot. By default 1e-4, and 2e-2 in half precision.

        Raises:
            OptionError: their number is not that of the calls.
            VelocityMismatchError: a knot's value is another one: the weights have moved.
        """
        self._velocities = Velocities.create(velocities, extrapolate, tolerance)
        try:
            yield
        finally:
            self._velocities = None

    def _compile(self) -> Callable[P, R]:
        return compile_isolated(self._entry, self._backend, fullgraph=self._fullgraph, dynamic=self._dynamic)

    def dry_run(self, lower: Callable[..., Any]) -> None:
        """Hand captured graphs to another function than the one that lowers them; see `jagg_fx.explain`."""
        self._lower = lower
        if isinstance(self._config.placement, Calibrated):
            self._config = self._config.calibration()

    def verify(self, every: bool | int = True, tolerance: float = 0.3) -> None:
        """Verify every n-th call with gradients from now on; see `transform`. False stops it.

        Raises:
            OptionError: not a number of calls, or not a tolerance; or the unbiased correction is on.
        """
        if every and self._config.debias is not None:
            raise OptionError(
                f"jagg_fx.transform({describe_function(self.original)}, verify={every!r}, debias={self._config.debias!r}): the "
                "reference would draw other corrections, and its gradient would differ by chance. Verify without debias."
            )
        self._verifier = Verifier.create(str(self), every, tolerance, self._recorder)

    @property
    def verification(self) -> Verification | None:
        """What the last verified call found; None before its backward."""
        return None if self._verifier is None else self._verifier.latest

    def recalibrate(self) -> None:
        """Measure again at the next call with gradients, and place the knots anew.

        Raises:
            OptionError: the knots are not placed by a measurement.
        """
        placement = self._config.placement
        if not isinstance(placement, Calibrated):
            raise OptionError(
                f"{self}.recalibrate(): its knots are not placed by a measurement. Write "
                f"jagg_fx.transform({describe_function(self.original)}, knots=K) for knots that are."
            )
        self._measuring, self._rewrites = (), []
        self._config = replace(self._config, placement=replace(placement, plans=()))
        self._compiled = self._compile()  # graphs compiled so far hold the old knots

    @property
    def plan(self) -> Plan | None:
        """The newest plan: which steps are knots. None before the steps were found (or, with `knots=K`, measured).

        Raises:
            PlanError: the function has several streams of calls, each with a plan of its own.
        """
        if len(self.plans) > 1:
            raise PlanError(
                f"{self}.plan: the function has {len(self.plans)} streams of calls. Write .plans, a plan for each."
            )
        return self.plans[0] if self.plans else None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The newest plans, one for each stream of calls. Empty before the steps were found (or, with `knots=K`, measured).

        With several processes, the knots that a measurement placed appear at the next call with gradients: rank 0 decides
        for all, by a broadcast in which every rank of the default process group takes part.
        """
        if any(stream.is_useful for stream in self._measuring) and not is_distributed():
            self._finish_calibration()
        placement = self._config.placement
        if isinstance(placement, Calibrated):
            return placement.latest
        return self._rewrites[-1].plans if self._rewrites else ()

    @property
    def stats(self) -> Statistics | None:
        """Numbers of the last backward and means over all: see `jagg_fx.statistics`. Reading waits for the device.

        None before the first backward in which steps could be interpolated.
        """
        return self._recorder.read()

    @property
    def graphs(self) -> tuple[GraphView, ...]:
        """What was rewritten, at the level of steps: one view for each specialisation. See `jagg_fx.graphs`."""
        return self.report.graphs_of(self._rewrites, self.stats)

    @property
    def report(self) -> Report:
        """What was found, rewritten and left exact; it claims nothing before the first backward graph was compiled."""
        return Report(
            function=describe_function(self.original),
            denoisers=self._names(),
            config=self._config,
            rewrite=self._rewrites[-1] if self._rewrites else None,
            graphs=0 if self._by_denoiser else len(self._rewrites),
            notes=self._notes(),
            capture=self._describe_capture(),
        )

    def save_report(self, path: str | Path) -> None:
        """Write the report and the graphs as JSON for `jagg_fx.saved.load` and `jagg-fx report`: text alone, and no weights.

        Raises:
            SavedReportError: it cannot be written.
        """
        Saved("report", self.report.to_dict(), tuple(self.report.rows()), self.graphs).save(path)

    def _describe_capture(self) -> str:
        if self._by_denoiser is None:
            return "whole"
        reasons = {
            Capture.DENOISER: "as asked for",
            Capture.AUTO: self._uncaptured or "in calls that reuse velocities",
            Capture.WHOLE: "in calls that reuse velocities",
        }
        return f"the denoiser alone, rewritten in autograd: {reasons[self._capture]}"

    def _notes(self) -> tuple[str, ...]:
        notes = [finding.note for finding in self._findings]
        if found := self.verification:
            near = "" if found.reference is None else f"; from the reference {found.reference.relative_error:.1g}"
            notes.append(f"call {found.call} verified: the gradient is {found.exact} from the exact one{near}")
        notes += [
            f"{type(region.denoiser).__name__} is traced at every step: Dynamo cannot make a region of it ({region.failure})"
            for region in self._regions
            if region.failure
        ]
        return tuple(notes)

    def __repr__(self) -> str:
        return f"<jagg_fx.transform({describe_function(self.original)})>"

    def _names(self) -> tuple[str, ...]:
        return tuple(type(region.denoiser).__name__ for region in self._regions)

    def _current_regions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Region, ...]:
        denoisers = self._given or (find_denoiser(self.original, args, kwargs),)
        known = [region.denoiser for region in self._regions]
        same = len(known) == len(denoisers) and all(a is b for a, b in zip(known, denoisers, strict=True))
        if same and all(region.is_current() for region in self._regions):
            return self._regions
        self._by_denoiser = None
        return self._make_regions(denoisers)

    def _make_regions(self, denoisers: Sequence[nn.Module], failure: str | None = None) -> tuple[Region, ...]:
        stop = self._config.chain is Chain.STOP
        times = [find_time(denoiser, self._time) for denoiser in denoisers]
        if stop and not all(time.positional for time in times):
            raise OptionError(
                f"jagg_fx.transform({describe_function(self.original)}, chain='stop'): the denoiser's forward names no argument, "
                "so that its state is not known. Name the module below it: denoiser=..."
            )
        return tuple(
            Region(denoiser, time, index=index, stop=stop, failure=failure)
            for index, (denoiser, time) in enumerate(zip(denoisers, times, strict=True))
        )

    def _backend(self, gm: fx.GraphModule, inputs: Any) -> Any:
        steps = bool(gm.graph.find_nodes(op="call_function", target=TIME))
        if steps and not self._regions[0].nested:
            outline(gm, self._regions[0].denoiser)
        if not steps and self._fullgraph and torch.is_grad_enabled():
            inside = any("checkpoint" in str(node.target) for node in gm.graph.nodes)
            hint = ": they lie inside torch.utils.checkpoint; checkpoint within the denoiser instead" if inside else ""
            raise self._no_steps(f"the captured graph holds no call of it{hint}")
        config = replace(self._config, options=tuple(self._options_around_bugs().items()))
        compiled = self._lower(gm, inputs, config, self._add, self._recorder.record)
        if not steps:
            return compiled
        self._captured = True
        if self._fullgraph:
            return compiled

        def counted(*inputs: Any) -> Any:
            self._runs += 1
            return compiled(*inputs)

        return counted

    def _add(self, rewrite: Rewrite) -> None:
        self._rewrites.append(rewrite)
        log.info("%s", self.report)
        trace_artifact("jagg_fx_report", lambda: str(self.report))

    def _check_capture(self) -> None:
        """A function must never run untransformed, or in pieces, without saying so."""
        name = describe_function(self.original)
        eager_calls = sum(region.eager_calls for region in self._regions)
        if eager_calls and self._fullgraph:
            raise self._no_steps(
                "torch.compile ran the function eagerly (a stance, TORCH_COMPILE_DISABLE, suppressed errors)"
            )
        if eager_calls:
            raise SplitStepsError(name, f"{eager_calls} calls of the denoiser ran outside every captured graph")
        if self._runs > 1:
            raise SplitStepsError(name, f"the steps lie in {self._runs} graphs")
        if not self._captured and torch.is_grad_enabled():
            raise self._no_steps("it was never called while the function was captured")

    def _no_steps(self, reason: str) -> NoStepsError:
        return NoStepsError(describe_function(self.original), ", ".join(self._names()), reason)


def _device(denoiser: nn.Module) -> str:
    return next((parameter.device.type for parameter in denoiser.parameters()), "cpu")


@contextlib.contextmanager
def _installed(regions: Sequence[Region]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for region in regions:
            stack.enter_context(region.installed())
        yield
