"""One call of the denoiser as a region of the graph, with its time marked.

While a transformed call runs, `Region.forward` stands in for the denoiser's own. It makes each call a nested compile region,
which Dynamo traces once for all calls that are alike (see `reuse.py`), however many steps there are.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jagg_fx._compat import mark_region, nodes_in_local, trace_time_hook
from jagg_fx.adapters import STATE, traceable_switches
from jagg_fx.ancestry import with_sources
from jagg_fx.denoiser import TimeArgument
from jagg_fx.errors import AdapterError, JaggError, NotARegionError
from jagg_fx.reuse import Alike
from jagg_fx.structure import detached, rebuild, structure_of, tensors_in


@torch.library.custom_op("jagg_fx::time", mutates_args=())
def mark_time(time: Tensor, note: str) -> Tensor:
    """Identity on a step's time. It survives into the joint graph, where the passes read it and erase it.

    `note` is what a `CallNote` says about the call.
    """
    return time.clone()


@mark_time.register_fake
def _(time: Tensor, note: str) -> Tensor:
    return torch.empty_like(time)


mark_time.register_autograd(lambda ctx, gradient: (gradient, None))

TIME = torch.ops.jagg_fx.time.default  # the marker as the graphs hold it


@dataclass(frozen=True)
class CallNote:
    """What a marker says about its call, as far as it is known.

    Attributes:
        denoiser: which of the function's denoisers is called.
        arguments: sorted names of the arguments that are given a value other than None; empty where not known.
        is_cut: whether `chain="stop"` cut a gradient that would have flowed into the state.
    """

    denoiser: int = 0
    arguments: tuple[str, ...] = ()
    is_cut: bool = False

    def encode(self) -> str:
        return f"{self.denoiser} {int(self.is_cut)} {','.join(self.arguments)}"

    @classmethod
    def decode(cls, note: str) -> "CallNote":
        denoiser, cut, arguments = note.split(" ")
        return cls(int(denoiser), tuple(arguments.split(",")) if arguments else (), cut == "1")


class Region:
    """One denoiser as a compile region.

    Args:
        denoiser: the module.
        time: its time argument.
        index: its place among the function's denoisers.
        stop: cut the gradient that flows into a call's state (`chain="stop"`).
        failure: why Dynamo cannot make nested regions of this denoiser, if it was tried. Then only the time is marked, every step
            is traced, and `outline` makes the regions afterwards.
    """

    def __init__(
        self, denoiser: nn.Module, time: TimeArgument, *, index: int = 0, stop: bool = False, failure: str | None = None
    ) -> None:
        self.denoiser = denoiser
        self.time = time
        self.failure = failure
        self.nested = nested = failure is None
        self.original = original = denoiser.forward
        self.eager_calls = 0
        self.refusal: JaggError | None = None  # raised while Dynamo traced, which would make an error of its own of it
        self._alike = alike = Alike(denoiser)
        at_trace_time, current_key = trace_time_hook(), alike.current_key
        chained = False

        def region(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            structure = structure_of(output, time.denoiser)  # noqa: F841  (`remember` reads it)
            at_trace_time(remember)
            return tuple(tensors_in(output))

        def key(*args: Any, **kwargs: Any) -> int:
            return current_key()  # type: ignore[no-any-return]

        region = mark_region(region, key)

        def refuse(error: JaggError) -> None:
            self.refusal = copy.copy(error)  # Dynamo adds to the message of the one that is raised
            raise error

        def check_adapters(context: Any) -> None:
            if torch.is_grad_enabled() and any(mutation.name in STATE for mutation in alike.changes(context)):
                refuse(AdapterError.trained(time.denoiser))

        def remember(context: Any) -> None:
            new = [mutation for mutation in alike.changes(context) if mutation not in alike.changed]
            if new:
                refuse(NotARegionError.state(time.denoiser, sorted({str(mutation.name) for mutation in new})))
            alike.remember(context)

        def look_at_state(context: Any) -> None:
            nonlocal chained
            # Every call marks its time.
            chained = any(node.target is TIME for node in with_sources(nodes_in_local(context, "state")))

        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def is_chained() -> bool:
            return chained

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.eager_calls += torch.is_grad_enabled()
                time.read(args, kwargs)  # raises if the time is missing
                output = original(*args, **kwargs)
                structure_of(output, time.denoiser)  # raises if a region could not return it
                return output
            at_trace_time(check_adapters)
            if not nested and not torch.is_grad_enabled():  # `outline` leaves such calls as they are
                return original(*args, **kwargs)
            is_cut = False
            if stop and torch.is_grad_enabled():
                state = time.state(args, kwargs)
                at_trace_time(look_at_state)
                if is_chained() and any(tensor.requires_grad for tensor in tensors_in(state)):
                    is_cut = True
                    args, kwargs = time.replace_state(args, kwargs, detached(state))
            note = CallNote(index, time.given(args, kwargs), is_cut).encode()
            args, kwargs = time.replace(args, kwargs, mark_time(time.read(args, kwargs), note))
            if not nested:
                return original(*args, **kwargs)
            at_trace_time(alike.look_up)
            # To Dynamo, what a call returns that it did not trace anew is a leaf, and a loop could not change it in place.
            tensors = [tensor.clone() for tensor in region(*args, **kwargs)]
            return rebuild(alike.current_structure(), iter(tensors))

        self.forward = forward

    def is_current(self) -> bool:
        """False once the denoiser's forward was replaced by someone else (accelerate, a hook) since this was made."""
        return bool(self.denoiser.forward == self.original)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the denoiser's forward on the instance, and put back what was there whatever happens."""
        with replaced_forward(self.denoiser, self.forward), traceable_switches(self.denoiser):
            self.eager_calls, self.refusal = 0, None
            self._alike.forget()
            yield


@contextlib.contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module.forward` is `forward` inside the block, on this instance alone."""
    attributes = module.__dict__
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before
