"""Every error a user can see. Each message quotes the call, names the cause and shows what to write instead."""

from collections.abc import Iterable, Sequence

_WRITE_TENSORS = "pass it as a tensor argument, or make it the same for every step"


class JaggError(RuntimeError):
    """Base class of every error raised on purpose by jagg_fx."""


class UnsupportedTorchError(JaggError):
    """The installed torch lacks a feature that jagg_fx stands on."""

    def __init__(self, feature: str, version: str) -> None:
        super().__init__(
            f"torch {version} has no {feature}, which jagg_fx needs. Install a torch that the README lists as tried "
            '(`pip install "torch>=2.12"`), or report this version.'
        )


class OptionError(JaggError, ValueError):
    """An argument of `transform` or an entry of `options` that cannot be used."""


class PlanError(OptionError):
    """Knots or a group size that do not fit the steps."""


class NotCalibratedError(PlanError):
    """Knots are to be placed by measured numbers, and nothing was measured for this number of steps."""

    def __init__(self, num_steps: int, budget: str) -> None:
        self.num_steps = num_steps
        super().__init__(
            f"{budget} places its knots by what a first backward measures, and a function of {num_steps} steps was not measured. "
            "`jagg_fx.transform(fn, knots=K)` measures by itself; elsewhere give plan=jagg_fx.plan.budget(K, schedule=...) or "
            "the plan that a transformed function saved (transformed.plan)."
        )


class VerificationError(JaggError):
    """The rewritten gradient is not what the reference computes: a bug."""

    def __init__(self, call: str, number: int, error: float, limit: float) -> None:
        super().__init__(
            f"{call}, verify: the rewritten gradient of call {number} differs from the reference's by {error:.2g} of it, and "
            f"rounding explains {limit:g}. jagg_fx or the compiler has computed something else than it should: do not use the "
            "gradients of this backward (optimizer.zero_grad()). lowering='eager' tells whether it is the code generator, "
            "lowering='reference' does without torch.compile; please report the function."
        )


class SavedReportError(JaggError, ValueError):
    """A saved report cannot be read, or not be written."""

    @classmethod
    def not_written(cls, path: str, reason: str) -> "SavedReportError":
        return cls(
            f"save_report({path!r}): the report cannot be written ({reason}). Give a path in a folder that exists."
        )

    @classmethod
    def not_read(cls, path: str, reason: str) -> "SavedReportError":
        return cls(
            f"jagg_fx.saved.load({path!r}): the file cannot be read ({reason}). Give the path that the report was saved to: "
            "fast.save_report(path)."
        )

    @classmethod
    def not_json(cls, path: str, reason: str) -> "SavedReportError":
        return cls(
            f"jagg_fx.saved.load({path!r}): the file is not JSON ({reason}). Give the file that fast.save_report(path) wrote; if "
            "it was cut short on the way, copy it again."
        )

    @classmethod
    def not_a_report(cls, path: str, reason: str) -> "SavedReportError":
        return cls(
            f"jagg_fx.saved.load({path!r}): the file is JSON, but not a saved report ({reason}). Give the file that "
            "fast.save_report(path) wrote, as it was written."
        )

    @classmethod
    def newer(cls, path: str, version: int, known: int) -> "SavedReportError":
        return cls(
            f"jagg_fx.saved.load({path!r}): the file is in format {version} of a newer jagg_fx, and this one reads formats up to "
            f"{known}. Read it with that version, or save the report again with this one."
        )


class DenoiserNotFoundError(JaggError):
    """No module with trainable parameters is reachable from the function."""

    @classmethod
    def not_reachable(cls, function: str, seen: Sequence[str]) -> "DenoiserNotFoundError":
        found = "\n".join(f"  - {line}" for line in seen) or "  (no nn.Module at all)"
        return cls(
            f"jagg_fx.transform({function}) found no denoiser: no nn.Module whose parameters need gradients is reachable "
            "from the function's closure, the globals it names, its bound object, defaults or call arguments.\n"
            f"Modules found, none of them trainable:\n{found}\n"
            f"Name it: jagg_fx.transform({function}, denoiser=model), and check model.requires_grad_(True)."
        )

    @classmethod
    def not_in_graph(cls, denoiser: str) -> "DenoiserNotFoundError":
        return cls(
            f"torch.compile(fn, backend='jagg', options={{'denoiser': {denoiser}}}): the captured graph holds no call of this "
            "module. Name the module that the function calls once per step."
        )


class SeveralDenoisersError(JaggError):
    """More than one trainable module is reachable and none of them holds the others."""

    @classmethod
    def reachable(cls, function: str, found: Sequence[str]) -> "SeveralDenoisersError":
        lines = "\n".join(f"  - {line}" for line in found)
        return cls(
            f"jagg_fx.transform({function}) found {len(found)} modules that could be the denoiser:\n{lines}\n"
            f"Say which: jagg_fx.transform({function}, denoiser={found[0].split(':')[0]}), or name all that are called at the "
            f"steps: denoiser=[{', '.join(line.split(':')[0] for line in found)}]."
        )

    @classmethod
    def inside(cls, model: str, found: Sequence[str]) -> "SeveralDenoisersError":
        names = ", ".join(line.split(":")[0] for line in found)
        return cls(
            f"jagg_fx.transform({model}): it takes the function that calls the denoiser at every step, and {model} looks like "
            f"the denoiser itself, made of {names}. Write jagg_fx.transform(replay) with the function that replays the steps, or "
            f"jagg_fx.wrap({model}, num_steps=9) where the training loop calls backward at every step. If {model} does run "
            "the steps, name what it calls at each: denoiser=..."
        )

    @classmethod
    def in_graph(cls, found: Sequence[str]) -> "SeveralDenoisersError":
        lines = "\n".join(f"  - {line}" for line in found)
        return cls(
            f"torch.compile(fn, backend='jagg') found {len(found)} trainable modules that could be the denoiser:\n{lines}\n"
            "Say which: torch.compile(fn, backend='jagg', options={'denoiser': model})."
        )


class TimeArgumentError(JaggError):
    """The denoiser's time argument is not known or has a shape that gives no weight per sample."""

    @classmethod
    def not_found(cls, denoiser: str, parameters: Iterable[str], names: Sequence[str]) -> "TimeArgumentError":
        parameters = list(parameters)
        example = repr(parameters[1] if len(parameters) > 1 else "timestep")
        return cls(
            f"{denoiser}.forward({', '.join(parameters)}) has no argument named {', '.join(names)}, so jagg_fx does not "
            f"know the steps' times. Name it: jagg_fx.transform(fn, time={example})."
        )

    @classmethod
    def not_passed(cls, denoiser: str, name: str) -> "TimeArgumentError":
        return cls(
            f"{denoiser} was called without its time argument {name!r}. Pass it at every step, or name another one: "
            'jagg_fx.transform(fn, time="...").'
        )

    @classmethod
    def not_in_graph(cls, candidates: int) -> "TimeArgumentError":
        return cls(
            f"torch.compile(fn, backend='jagg') sees {candidates} inputs of the denoiser that could be its time (one number, "
            "or one per sample, that changes from step to step); it takes exactly one. jagg_fx.transform(fn, time=...) reads "
            "the name instead."
        )

    @classmethod
    def wrong_shape(cls, time: Sequence[object], value: Sequence[object]) -> "TimeArgumentError":
        return cls(
            f"the denoiser's time argument has shape {list(time)} and its value {list(value)}: a time must be a number, "
            "a tensor with one element, or one number per sample ([B] or [B, 1, ...]). Name the right argument: "
            'jagg_fx.transform(fn, time="...").'
        )


class NoStepsError(JaggError):
    """The function ran, but no call of the denoiser was captured."""

    def __init__(self, function: str, denoiser: str, reason: str) -> None:
        super().__init__(
            f"jagg_fx.transform({function}) captured no step: {reason}. Nothing was rewritten. Call {denoiser} inside "
            f"{function} through its __call__, with gradients enabled and on tensors, or run {function} untransformed."
        )


class StepMismatchError(JaggError):
    """Two steps do not run the same computation, so one Jacobian cannot stand for the other."""

    @classmethod
    def arguments(cls, step: int, given: Iterable[str], expected: Iterable[str]) -> "StepMismatchError":
        extra, missing = sorted(set(given) - set(expected)), sorted(set(expected) - set(given))
        difference = ", ".join([f"+{name}" for name in extra] + [f"-{name}" for name in missing])
        return cls(
            f"step {step} has a different argument set than step 0: {difference}. Pass the same arguments to the denoiser "
            "at every step (a neutral tensor where a step has nothing to say)."
        )

    @classmethod
    def shapes(cls, step: int, differences: Sequence[str]) -> "StepMismatchError":
        return cls(
            f"step {step} runs another computation than step 0: {'; '.join(differences)}. Interpolation needs the same "
            f"shapes and dtypes, and the same Python values, at every step. If a Python value changes from step to step, "
            f"{_WRITE_TENSORS}."
        )

    @classmethod
    def swapped_calls(cls, call: str, step: int) -> "StepMismatchError":
        return cls(
            f"{call}: the calls of step {step} come in another order than those of step 0 (one gets the arguments of the other). "
            "With calls_per_step, make the calls of a step in the same order at every step."
        )

    @classmethod
    def uneven_calls(cls, first: int, second: int) -> "StepMismatchError":
        return cls(
            f"calls {first} and {second} of the denoiser are at the same time, but not every step has as many calls, and nothing "
            "tells which of them belong together from step to step. Call the denoiser as often at every step, or concatenate the "
            "calls of a step into one batch, e.g. denoiser(torch.cat([z, z]), torch.cat([t, t]), torch.cat([neg, pos])). If they "
            "are two steps, of a schedule that repeats a time, take times from one tensor: denoiser(z, times[i])."
        )


class ChainedStatesError(JaggError):
    """Gradients flow into a step's own inputs, where the sum of per-step VJPs does not describe the gradient."""

    def __init__(self, step: int, operand: str, chained: bool) -> None:
        cause = (
            "its input depends on the velocity of an earlier step (a sampler differentiated end to end)"
            if chained
            else "an input of that step alone needs gradients"
        )
        cut = (
            "or write jagg_fx.transform(fn, chain='stop') to cut the gradient that flows through the denoiser's state, as "
            "DRTune does, while the sampler's own path from state to state keeps its gradient; "
            if chained
            else ""
        )
        super().__init__(
            f"a gradient flows into an input ({operand}) of step {step}: {cause}. JAGG interpolates the VJPs of independent "
            f"steps and would be wrong here. Replay stored latents (z.detach()), as GRPO and DDPO loops do; {cut}or run the "
            "function untransformed."
        )


class DropoutError(JaggError):
    """The denoiser draws random numbers inside a step."""

    def __init__(self, operators: Sequence[str]) -> None:
        super().__init__(
            f"the denoiser draws random numbers ({', '.join(operators)}), usually dropout in train mode: every step would "
            "have its own mask, and Jacobians of different masks cannot be interpolated. Call denoiser.eval(), or set the "
            "dropout probability to 0."
        )


class NotARegionError(JaggError):
    """A call of the denoiser could not become one shared region of the graph."""

    @classmethod
    def mutation(cls, buffers: Iterable[str]) -> "NotARegionError":
        named = ", ".join(buffers) or "it has no buffers"
        return cls(
            f"the denoiser changes one of its arguments or buffers in place (a cache, running statistics; buffers: {named}), so "
            "its calls cannot share one region of the graph. Return the new value instead, or switch the cache off."
        )

    @classmethod
    def state(cls, denoiser: str, names: Sequence[str]) -> "NotARegionError":
        return cls(
            f"{denoiser} changes what it holds in its forward ({', '.join(names)}): a cache, or a loss that it leaves there. A "
            "call that is not run, or run again, would leave something else. Return it from forward, or switch the cache off."
        )

    @classmethod
    def output(cls, denoiser: str, kind: str) -> "NotARegionError":
        return cls(
            f"{denoiser} returns {kind}; a step's region returns tensors and plain Python values, alone or in tuples, lists, "
            "dicts and dataclasses. Diffusers models return a tuple with return_dict=False: denoiser(..., return_dict=False)[0]."
        )

    @classmethod
    def inlined(cls) -> "NotARegionError":
        return cls(
            "torch.compile did not keep a call of the denoiser as one region of the graph, so it cannot be paired with its "
            "backward. Usual reasons: a hook or wrapper around the denoiser that torch.compile cannot put into a region. "
            "Name the module below it: jagg_fx.transform(fn, denoiser=...)."
        )


class GraphBreakError(JaggError):
    """torch.compile could not capture the function whole."""

    def __init__(self, function: str, where: str, reason: str) -> None:
        self.why = f"{reason} ({where})"
        super().__init__(
            f"jagg_fx.transform({function}) could not capture {function} as one graph.\n"
            f"Where: {where}\nWhat: {reason}\n"
            "Usual reasons: .item(), .tolist(), print or an if on a tensor's value; numpy; a scheduler that looks its step "
            "up by value (diffusers' scheduler.step without set_begin_index). Pass sigmas and indices as tensors or plain "
            "Python numbers, move the rest out of the function, or leave capture='whole' out: the function then runs in "
            "Python as it is, and the denoiser alone is compiled."
        )


class RaisedInCaptureError(GraphBreakError):
    """The function raises an exception on the path that torch.compile captures."""


class DynamoFailedError(JaggError):
    """torch.compile failed inside itself while it captured the function."""

    def __init__(self, function: str, version: str, reason: str, dynamic: bool) -> None:
        self.reason = self.why = reason
        way_out = (
            "Leave dynamic=None and mark what varies, torch._dynamo.mark_dynamic(latents, 1); a second shape then costs no "
            "compile."
            if dynamic
            else "Leave capture='whole' out: the denoiser alone is then compiled. Or try "
            f"jagg_fx.transform({function}, lowering='reference') for the same gradient without torch.compile."
        )
        super().__init__(
            f"jagg_fx.transform({function}{', dynamic=True' if dynamic else ''}): Dynamo of torch {version} failed while it "
            f"captured {function}: {reason}. {way_out}"
        )


class LoweringFailedError(JaggError):
    """Inductor failed on a rewritten graph."""

    def __init__(self, function: str, version: str, reason: str) -> None:
        self.why = f"Inductor failed: {reason}"
        super().__init__(
            f"jagg_fx.transform({function}): Inductor of torch {version} failed on the graph of {function}: {reason}. Write "
            "capture='denoiser' to compile the denoiser alone, or lowering='eager' for the same graph, interpreted."
        )


class BackwardInsideError(JaggError):
    """The function calls `backward()` or `torch.autograd.grad` itself."""

    def __init__(self, function: str, where: str) -> None:
        super().__init__(
            f"jagg_fx.transform({function}): {function} runs a backward pass inside itself.\nWhere: {where}\n"
            f"transform needs the whole loop first and one backward after it: return the loss (or log-probs) from "
            f"{function} and call backward() on the result. For loops with a backward per step there is "
            "denoiser = jagg_fx.wrap(denoiser, num_steps=N, W=4)."
        )


class SplitStepsError(JaggError):
    """With fullgraph=False, the steps ended up in several graphs or ran outside of them."""

    def __init__(self, function: str, reason: str) -> None:
        super().__init__(
            f"jagg_fx.transform({function}, fullgraph=False): {reason}, so groups of steps would be cut apart. Use "
            "fullgraph=True to see the graph break and move its cause out of the loop over the steps."
        )


class AdapterError(JaggError):
    """Adapters (peft) are switched in a way that changes which parameters get gradients."""

    @classmethod
    def left(cls, denoiser: str) -> "AdapterError":
        return cls(
            f"the transformed function left other adapters of {denoiser} active than it found. Switch back before it returns, "
            "as `with model.disable_adapter():` does, or switch outside the function."
        )

    @classmethod
    def trained(cls, denoiser: str) -> "AdapterError":
        return cls(
            f"{denoiser} is called with gradients while other adapters are active than when the function was entered (or the "
            "trajectory of a wrapped denoiser began). There, adapters can be switched for calls under no_grad alone: with "
            "torch.no_grad(), model.disable_adapter(): ... Select the trained one before, and train several one after the other."
        )


class BatchNormError(JaggError):
    """The denoiser normalises by the statistics of the batch, and updates its own."""

    def __init__(self, denoiser: str, modules: Sequence[str]) -> None:
        super().__init__(
            f"{denoiser} has batch normalisation in training mode ({', '.join(modules[:3])}{', ...' * (len(modules) > 3)}): "
            "every step updates its running statistics, and a step that is run again would update them twice. Call .eval() on "
            "these modules, or normalise by groups (nn.GroupNorm)."
        )


class NotRepeatableError(JaggError):
    """The eager reference runs the function several times, and it did not do the same thing each time."""

    def __init__(self, function: str) -> None:
        super().__init__(
            f"jagg_fx.transform({function}): {function} called the denoiser otherwise when it ran again. The eager reference "
            "(lowering='reference') runs it three times and puts back torch's random state alone. Draw what is random (the "
            "window of steps, a shuffle) outside and pass it in, and bring schedulers back to "
            "their first step inside: jagg_fx.models.schedulers.restart(scheduler). Or write lowering='eager', "
            "capture='denoiser', which runs it once."
        )


class InferenceTensorError(JaggError):
    """An argument cannot take part in autograd."""

    def __init__(self, call: str, argument: str) -> None:
        super().__init__(
            f"{call}: {argument} was made under torch.inference_mode, and such tensors cannot take part "
            "in autograd. Make the rollout under torch.no_grad, or pass a copy: latents.clone()."
        )


class FakeImplementationError(JaggError):
    """A custom operator cannot be traced."""

    def __init__(self, function: str, operator: str) -> None:
        self.why = f"the custom operator {operator} has no fake implementation"
        super().__init__(
            f"jagg_fx.transform({function}): the custom operator {operator} has no fake implementation, so that torch.compile "
            "cannot trace it. Register one (torch.library.register_fake: the shape and dtype of what it returns), or use "
            f"jagg_fx.transform({function}, lowering='reference')."
        )


class SchedulerError(GraphBreakError):
    """A diffusers scheduler does something inside the function that cannot be captured."""

    def __init__(self, function: str, where: str, inside: str, reason: str) -> None:
        self.why = f"{reason} ({where}, inside {inside})"
        JaggError.__init__(
            self,
            f"jagg_fx.transform({function}) could not capture {function} as one graph: a scheduler cannot be traced there.\n"
            f"Where: {where}\nInside: {inside}\nWhat: {reason}\n"
            "Call scheduler.set_timesteps before the function, not in it, and jagg_fx.models.schedulers.restart(scheduler) first "
            "thing in it (set_begin_index(0) and no step taken yet: otherwise the step is looked up by value). DDIM takes its "
            "timesteps as Python numbers: scheduler.timesteps.tolist(). Code that calls scheduler.index_for_timestep itself "
            "(Flow-GRPO's step) takes the loop's index instead: scheduler.sigmas[j], scheduler.sigmas[j + 1].",
        )


_WHOLE_TRAJECTORIES = (
    "Run all steps of a trajectory (num_steps of them, each with its backward) before the optimizer steps or the next one "
    "begins: a group's steps need the same weights. num_steps is the number of trained steps of one micro-batch; where a step "
    "calls the denoiser twice with gradients, write calls_per_step=2 too. If the trajectory was given up (an exception in the "
    "loop), drop it: wrapped.reset()."
)


class PendingStepsError(JaggError):
    """Cotangents of a trajectory's steps would be lost."""

    @classmethod
    def lost(
        cls, call: str, event: str, pending: Sequence[int], arrived: Sequence[int], closing: int
    ) -> "PendingStepsError":
        steps, come = (", ".join(map(str, numbers)) for numbers in (pending, arrived))
        return cls(
            f"{call}: {event}, but the gradients of its steps {steps} are pending. Cotangents have come for "
            f"{come or 'none of them'}; they are handed on by the backward of step {closing}, which closes their group and has "
            f"not run. {_WHOLE_TRAJECTORIES}"
        )

    @classmethod
    def not_over(cls, call: str, event: str) -> "PendingStepsError":
        return cls(f"{call}: {event}, but the present trajectory is not over. {_WHOLE_TRAJECTORIES}")


class MissingCotangentError(JaggError):
    """The backward of a group's last step ran before that of other steps."""

    def __init__(self, denoiser: str, missing: Sequence[int], closing: int) -> None:
        super().__init__(
            f"the backward of {denoiser}'s step {closing} came before that of steps {', '.join(map(str, missing))}, "
            "whose gradients it carries. Call backward() step by step in the order of the calls, or once for all; every step's "
            "output must reach the loss (multiply by zero what does not count), and torch.autograd.grad(..., inputs) does not "
            "visit other steps: use backward(). After this, wrapped.reset() drops the trajectory."
        )

    @classmethod
    def late(cls, function: str, step: int) -> "MissingCotangentError":
        error = cls.__new__(cls)
        JaggError.__init__(
            error,
            f"jagg_fx.transform({function}, capture='denoiser'): the cotangent of call {step} came after the knots' backward. "
            "Part of the loss was computed in another thread or on another device than the denoiser's calls. Compute it where "
            "they run.",
        )
        return error


class SecondBackwardError(JaggError):
    """A step's cotangent came after it had been handed on."""

    def __init__(self, call: str, step: int) -> None:
        super().__init__(
            f"{call}: a second backward reached step {step} after its group's gradients had been computed. Sum the losses of a "
            "step and call backward() once."
        )


class StepOrderError(PendingStepsError):
    """The times of a trajectory's steps are not in order."""

    @classmethod
    def unordered(cls, call: str, first: int, times: Sequence[float]) -> "StepOrderError":
        return cls(
            f"{call}: the times of steps {first} to {first + len(times) - 1} neither rise nor fall for every sample (the first "
            f"sample's: {', '.join(f'{time:.4g}' for time in times)}). If the loop shuffles its timesteps, write "
            "wrap(..., shuffled=True). If a new trajectory began before the last one was over, their steps are pending. "
            f"{_WHOLE_TRAJECTORIES}"
        )

    @classmethod
    def repeated(cls, call: str, first: int, last: int) -> "StepOrderError":
        return cls(
            f"{call}: a time comes twice among the steps {first} to {last} of one sample. If a new trajectory began before the "
            f"last one was over, their steps are pending. {_WHOLE_TRAJECTORIES}"
        )


class ArgumentChangedError(JaggError):
    """A step has to run again, and its arguments are not what they were."""

    def __init__(self, denoiser: str, arguments: Sequence[str]) -> None:
        super().__init__(
            f"a step of {denoiser} has to run again to be exact, and one of its arguments ({', '.join(arguments)}) was changed "
            "in place since. Pass a copy (x.clone()), or write cos_threshold=None, which never runs a step again."
        )


class VelocityMismatchError(JaggError):
    """A rollout's velocities are not those of the present weights."""

    @classmethod
    def value(cls, call: str, number: int, difference: float, limit: float) -> "VelocityMismatchError":
        return cls(
            f"{call}.reuse(velocities=...): call {number} gives another velocity than the rollout (relative difference "
            f"{difference:.2g}, allowed {limit:.2g}). They are valid in the first update after a rollout, while the weights, "
            "guidance, precision and the order of the steps are the rollout's. Leave reuse out in later updates, or write "
            "extrapolate=True, which moves them and approximates the values too."
        )

    @classmethod
    def shape(cls, call: str, number: int, given: Sequence[int], fresh: Sequence[int]) -> "VelocityMismatchError":
        return cls(
            f"{call}.reuse(velocities=...): velocity {number} has the shape {list(given)}, and the denoiser "
            f"returns {list(fresh)}. Give what the denoiser itself returned in the rollout, before guidance is applied, for the "
            "same samples."
        )


class LostStepsError(JaggError):
    """A step's cotangent came, and nothing led from there to the knots."""

    def __init__(self, function: str) -> None:
        super().__init__(
            f"jagg_fx.transform({function}, capture='denoiser'): a backward reached steps of the denoiser, but not through what "
            f"{function} returned, so that their gradients would be lost. Return every tensor that the loss is made of (tensors, "
            "tuples, lists, dicts, dataclasses), rather than leave it in an attribute or a list outside."
        )


class WrapperError(JaggError):
    """What was put around a wrapped denoiser cannot work with a backward per group of steps."""

    @classmethod
    def static_graph(cls, call: str) -> "WrapperError":
        return cls(
            f"DistributedDataParallel({call}, static_graph=True): the backwards of intermediate steps reach no parameter, DDP "
            "takes that for all backwards, and would not average gradients. Leave static_graph out, or put wrap outside: "
            "jagg_fx.wrap(DistributedDataParallel(denoiser, static_graph=True), ...)."
        )

    @classmethod
    def trained_argument(cls, call: str) -> "WrapperError":
        return cls(
            f"fully_shard({call}), called with an argument that needs gradients: FSDP would free the root's parameters after the "
            "backward of a group's first knot. Put wrap outside: jagg_fx.wrap(fully_shard(denoiser), ...)."
        )
