"""`verify=`: beside the rewritten gradient of a call, the exact one and the reference's, on the same batch and weights.

When the backward of a verified call has run, its outputs' cotangents are known. The function then runs again, rewritten, exact
and by the reference (`lowering="reference"`), each with those cotangents, and the three gradients are compared. Gradients in
`.grad` stay what the backward made them.
"""

import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from jagg_fx._compat import at_end_of_backward, backward_id, version
from jagg_fx.adapters import adapted_layers
from jagg_fx.distributed import is_distributed
from jagg_fx.errors import OptionError, VerificationError
from jagg_fx.statistics import Recorder
from jagg_fx.structure import tensors_in
from jagg_fx.surroundings import Surroundings

log = logging.getLogger(__name__)

# Largest relative difference of the rewritten gradient to the reference's: both compute the same thing, and differ by rounding.
# Half precision rounds differently in fused kernels; a segment's VJP that is lost or taken twice shows all the same.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.3}


@dataclass(frozen=True)
class Agreement:
    """How near one gradient is to another.

    Attributes:
        cosine: between them; 1 where both are zero.
        relative_error: norm of their difference by the norm of the second; infinite where only that is zero.
    """

    cosine: float
    relative_error: float

    @classmethod
    def of(cls, got: Sequence[Tensor], want: Sequence[Tensor]) -> "Agreement":
        """Of two gradients, each a list of tensors in the same order."""
        squares = [
            torch.stack([(x * x).sum(), (y * y).sum(), (x * y).sum(), (x - y).square().sum()]).cpu()
            for x, y in ((x.double(), y.double()) for x, y in zip(got, want, strict=True))
        ]
        of_got, of_want, both, off = torch.stack(squares).sum(0).tolist()
        if of_want == 0:
            return cls(1.0, 0.0) if of_got == 0 else cls(0.0, math.inf)
        return cls(both / math.sqrt(of_got * of_want) if of_got else 0.0, math.sqrt(off / of_want))

    def __str__(self) -> str:
        return f"off by {self.relative_error:.3g}, cosine {self.cosine:.4f}"


@dataclass(frozen=True)
class Verification:
    """What one verified call found.

    Attributes:
        call: which call with gradients it was, from 1.
        exact: the rewritten gradient beside the exact one, all trained parameters together.
        groups: the same for each group of parameters: those of one block, or of one module outside the blocks.
        reference: the rewritten gradient beside the reference's. None where the reference itself ran (`lowering="reference"`),
            and where the two decided differently about a segment whose score is at the threshold but for rounding.
    """

    call: int
    exact: Agreement
    groups: dict[str, Agreement]
    reference: Agreement | None

    def __str__(self) -> str:
        found = {"all": self.exact, **self.groups}
        rows = [(name, f"{a.cosine:.4f}", f"{a.relative_error:.3g}") for name, a in found.items()]
        table: str = tabulate(rows, headers=["gradient of", "cosine to exact", "relative error"], disable_numparse=True)
        return f"{table}\nto the reference: {self.reference or 'not compared'}"


@dataclass(frozen=True)
class Call:
    """One call that is verified.

    Attributes:
        number: which, from 1.
        modules: the denoisers and what they hold.
        layers: those among them that hold adapters.
        given: what its gradient is for, by name: trained parameters, and tensors among the arguments.
        read: arguments and parameters.
        versions: theirs, to see whether they are still the same.
        surroundings: autocast, adapters, modes and random state.
        device: of the denoisers.
    """

    number: int
    modules: Sequence[nn.Module]
    layers: Sequence[Any]
    given: dict[str, Tensor]
    read: Sequence[Tensor]
    versions: Sequence[int]
    surroundings: Surroundings
    device: torch.device


@dataclass(frozen=True)
class Variants:
    """Three ways to run a call again. Each returns the outputs; the first and the last record statistics."""

    rewritten: Callable[[], Any]
    exact: Callable[[], Any]
    reference: Callable[[], Any] | None


class Verifier:
    """Verifies every n-th call with gradients.

    Args:
        name: of the transformed function, for messages.
        every: n.
        tolerance: relative error of the gradient past which there is a warning.
        recorder: what the rewritten function records its statistics with.
    """

    def __init__(self, name: str, every: int, tolerance: float, recorder: Recorder) -> None:
        self.latest: Verification | None = None
        self._name, self._every, self._tolerance, self._recorder = name, every, tolerance, recorder
        self._calls = 0

    @classmethod
    def create(cls, name: str, verify: bool | int, tolerance: float, recorder: Recorder) -> "Verifier | None":
        """Validate the user's arguments; None if nothing is to be verified. Raises `OptionError`."""
        if not isinstance(verify, int) or verify < 0:
            raise OptionError(
                f"jagg_fx.transform(fn, verify={verify!r}): True verifies each call with gradients, n each n-th."
            )
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance > 0:
            raise OptionError(
                f"jagg_fx.transform(fn, verify_tolerance={tolerance!r}): the relative error of the gradient past which there is "
                "a warning, a number above 0 such as 0.3."
            )
        return cls(name, int(verify), tolerance, recorder) if verify else None

    def begin(self, denoisers: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Before a call with gradients runs; None if it is not verified."""
        self._calls += 1
        if self._calls % self._every:
            return None
        if is_distributed():
            raise OptionError(
                f"{self._name}, verify={self._every}: gradients are compared within one process, and a process group is "
                "initialised, whose other ranks would wait. Verify in a run of one process, or leave verify out."
            )
        arguments = tensors_in([list(args), kwargs])
        several = len(denoisers) > 1
        given = {
            f"denoiser {d}.{name}" if several else name: parameter
            for d, denoiser in enumerate(denoisers)
            for name, parameter in denoiser.named_parameters()
            if parameter.requires_grad
        } | {f"argument {n}": tensor for n, tensor in enumerate(arguments) if tensor.requires_grad}
        read = [*arguments, *(parameter for denoiser in denoisers for parameter in denoiser.parameters())]
        modules = [module for denoiser in denoisers for module in denoiser.modules()]
        device = next((tensor.device for tensor in given.values()), torch.device("cpu"))
        layers = [layer for denoiser in denoisers for layer in adapted_layers(denoiser)]
        surroundings = Surroundings.of(modules, layers, device)
        return Call(
            self._calls, modules, layers, given, read, [version(tensor) for tensor in read], surroundings, device
        )

    def watch(self, call: Call, outputs: Any, variants: Variants) -> None:
        """Compare when the backward of these outputs has run, the first one."""
        tensors = tensors_in(outputs)
        cotangents: dict[int, Tensor] = {}
        backward: list[int] = []

        def arrive(n: int, cotangent: Tensor) -> None:
            if not backward:
                backward.append(backward_id())
                at_end_of_backward(lambda: self._compare(call, variants, cotangents))
            if backward[0] == backward_id():
                cotangents[n] = cotangent.detach().clone()

        for n, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(arrive, n))

    def _compare(self, call: Call, variants: Variants, cotangents: dict[int, Tensor]) -> None:
        is_finite = all(bool(cotangent.isfinite().all()) for cotangent in cotangents.values())
        if not is_finite or [version(tensor) for tensor in call.read] != call.versions:
            reason = (
                "arguments or weights changed in place before its backward ended"
                if is_finite
                else "its loss is not finite"
            )
            log.warning("%s: call %d is not verified, because %s.", self._name, call.number, reason)
            return
        run = functools.partial(_gradient, call, cotangents)
        with self._recorder.aside() as of_rewritten:
            rewritten = run(variants.rewritten)
        with self._recorder.aside() as of_reference:
            reference = None if variants.reference is None else run(variants.reference)
        exact = run(variants.exact)
        members: dict[str, list[int]] = {}
        for n, name in enumerate(call.given):
            members.setdefault(group_of(name), []).append(n)
        comparable = reference is not None and not _differ_by_rounding(of_rewritten, of_reference)
        near = Agreement.of(rewritten, reference or ()) if comparable else None
        self.latest = found = Verification(
            call=call.number,
            exact=Agreement.of(rewritten, exact),
            groups={
                name: Agreement.of([rewritten[n] for n in own], [exact[n] for n in own])
                for name, own in members.items()
            },
            reference=near,
        )
        log.info("%s, call %d verified:\n%s", self._name, call.number, found)
        limit = max(ROUNDING.get(dtype, 0.0) for dtype in _dtypes(call, rewritten))
        if near is not None and not near.relative_error <= limit:
            raise VerificationError(self._name, call.number, near.relative_error, limit)
        if not found.exact.relative_error <= self._tolerance:
            worst = max(found.groups, key=lambda name: found.groups[name].relative_error)
            log.warning(
                "%s, call %d: the gradient is %s from the exact one, past verify_tolerance=%g (most in %s, %s). "
                "More knots or a higher cos_threshold bring it nearer.",
                self._name,
                call.number,
                found.exact,
                self._tolerance,
                worst,
                found.groups[worst],
            )


def group_of(name: str) -> str:
    """The group of a parameter: its block, up to the first number in its name; else the module that holds it."""
    block = re.match(r"(.*?\.)??\d+(?=\.)", name)
    return block.group(0) if block else name.rpartition(".")[0] or name


def _gradient(call: Call, cotangents: dict[int, Tensor], variant: Callable[[], Any]) -> list[Tensor]:
    with torch.enable_grad(), call.surroundings.restored(call.modules, call.layers, call.device):
        outputs = tensors_in(variant())
    given = list(call.given.values())
    found = torch.autograd.grad(
        [outputs[n] for n in cotangents], given, list(cotangents.values()), allow_unused=True, materialize_grads=True
    )
    return list(found)


def _dtypes(call: Call, gradient: Sequence[Tensor]) -> set[torch.dtype]:
    """What it was computed in, as far as it is known."""
    half = {dtype for _, enabled, dtype in call.surroundings.autocast if enabled}
    return half | {tensor.dtype for tensor in [*gradient, *call.read] if tensor.is_floating_point()}


def _differ_by_rounding(rewritten: Recorder, reference: Recorder) -> bool:
    """Whether they interpolated different segments because a score was at the limit: scores alike, decisions not."""
    one, other = rewritten.read(), reference.read()
    if one is None or other is None or one.last.kept == other.last.kept:
        return False
    return all(
        abs(score - other.last.scores.get(segment, math.inf)) < 1e-2 for segment, score in one.last.scores.items()
    )
