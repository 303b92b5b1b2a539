"""Which calls of a denoiser run the same computation, so that Dynamo may trace it once for all of them.

Dynamo's own check fails on some models (torch 2.13, FLUX: "failed to resolve source"). A key of ours replaces it, and with it
all of torch's guards between the calls of one trace: it must change with everything that could change what is traced. Real
objects do not change while a function is traced; what the function changes is pending in Dynamo until the graph has run.
"""

import itertools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from jagg_fx._compat import Mutation, describe_locals, pending_mutations, tensor_identity
from jagg_fx.structure import Structure

_numbers = itertools.count()  # Dynamo tells two regions apart by their number alone: their functions share their code


class Alike:
    """Numbers calls of one denoiser that run the same computation, and remembers what each kind returns.

    A key holds the arguments (structure, values, the tensors' shapes, strides, dtypes, devices, and which are the same tensor),
    grad mode, autocast, and what the function has changed so far in anything that the denoiser holds, or in global variables.

    `look_up(context)` and `remember(context)` run while Dynamo traces, before a call and inside it; `current_key` and
    `current_structure` are constants to Dynamo.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        self._denoiser = denoiser
        self._held: dict[int, Any] | None = None
        self.changed: list[Mutation] = []  # before the call that is being traced
        kinds: dict[int, tuple[Any, str]] = {}  # arguments and everything else, by number
        structures: dict[int, Structure] = {}
        current = -1

        def look_up(context: Any) -> None:
            nonlocal current
            self.changed = self.changes(context)
            arguments, rest = describe_locals(context, ("args", "kwargs")), repr((_modes(), self.changed))
            # Arguments are written out anew each time: a symbolic size may have become a number since.
            alike = (n for n, (known, other) in kinds.items() if other == rest and repr(known) == repr(arguments))
            current = next(alike, -1)
            if current < 0:
                current = next(_numbers)
                kinds[current] = (arguments, rest)

        def remember(context: Any) -> None:
            structures[current] = context.get_local("structure").as_python_constant()

        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def current_key() -> int:
            return current

        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def current_structure() -> Structure:
            return structures[current]

        self.look_up, self.remember = look_up, remember
        self.current_key, self.current_structure = current_key, current_structure

    def forget(self) -> None:
        """Before a call of the transformed function: what the denoiser holds may have been replaced."""
        self._held = None

    def changes(self, context: Any) -> list[Mutation]:
        """What the function being traced has changed in the denoiser and all it holds, or in global variables."""
        if self._held is None:
            self._held = _held_by(self._denoiser)
        held = self._held
        return [
            mutation
            for mutation in pending_mutations(context)
            if mutation.owner is None or (mutation.owner in held and _differs(mutation, held[mutation.owner]))
        ]


def _differs(mutation: Mutation, owner: Any) -> bool:
    """False for what was changed and changed back."""
    now = owner if mutation.name is None else getattr(owner, mutation.name, None)
    return bool(mutation.value != _plain(now))


def _modes() -> tuple[Any, ...]:
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    return torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled()


_HOLDS_NOTHING = (
    *(Tensor, type, str, bytes, int, float, type(None)),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)


def _held_by(denoiser: nn.Module) -> dict[int, Any]:
    """The modules of a denoiser, and the containers and plain objects in their attributes, by identity."""
    held: dict[int, Any] = {}
    pending: list[Any] = [denoiser]
    while pending:
        value = pending.pop()
        if id(value) not in held and not isinstance(value, _HOLDS_NOTHING):
            held[id(value)] = value
            pending += _parts(value)
    return held


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())


def _plain(value: Any) -> Any:
    """As `Mutation.value`: constants, and lists and dicts of them."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return tensor_identity(value) if isinstance(value, Tensor) else value
