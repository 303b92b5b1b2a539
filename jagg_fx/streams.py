"""Group calls of denoisers into streams: the calls that follow one path, and whose Jacobians vary smoothly along it.

A loop that calls the denoiser once per step is one stream. Classifier-free guidance by two calls per step is two, and so are two
experts that share the steps between them (Wan 2.2): a Jacobian tells nothing about that of another prompt or of other weights.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from jagg_fx.errors import ChainedStatesError, StepMismatchError
from jagg_fx.region import CallNote


@dataclass(frozen=True)
class Call:
    """What is compared of one call; equal values have equal identities.

    Attributes:
        denoiser: which denoiser is called.
        kind: which computation it runs.
        time: its time.
        operands: what else it reads, argument by argument.
    """

    denoiser: Hashable
    kind: Hashable
    time: Hashable
    operands: tuple[Hashable, ...]


def group(calls: Sequence[Call]) -> list[list[int]]:
    """Indices of the calls of each stream, streams by their first call.

    Calls of different denoisers are different streams. Calls of one are told apart by what they keep from step to step (the
    prompt of guidance), or else, where several are at one time, by their order within the step.

    Raises:
        StepMismatchError: the number of calls changes from step to step, and nothing tells which belong together.
    """
    by_denoiser: dict[Hashable, list[int]] = defaultdict(list)
    for n, call in enumerate(calls):
        by_denoiser[call.denoiser].append(n)
    return sorted(stream for own in by_denoiser.values() for stream in _split(calls, own))


def _split(calls: Sequence[Call], own: list[int]) -> list[list[int]]:
    at: dict[Hashable, list[int]] = defaultdict(list)
    for n in own:
        at[calls[n].time].append(n)
    most = max(map(len, at.values()))
    kept = _kept_from_step_to_step(calls, own)
    if most == 1:
        return _by_prompt(own, kept)
    streams: dict[Hashable, list[int]] = defaultdict(list)
    for n in own:
        streams[calls[n].kind, kept[n]].append(n)
    if len(streams) == most and all(len({calls[n].time for n in stream}) == len(stream) for stream in streams.values()):
        return list(streams.values())
    if len(set(map(len, at.values()))) > 1:
        first, second = next(same for same in at.values() if len(same) > 1)[:2]
        raise StepMismatchError.uneven_calls(first, second)
    return [list(rank) for rank in zip(*at.values(), strict=True)]


def _by_prompt(own: list[int], kept: dict[int, tuple[Hashable, ...]]) -> list[list[int]]:
    """One stream, or several if some argument is the same at several steps and another one at all others.

    The halves of guidance whose times are not known to be equal, and the halves of a batch, are told apart by that.
    """
    if len({len(operands) for operands in kept.values()}) > 1:  # calls of another kind, which will be refused
        return [own]
    places = []
    for p, _ in enumerate(kept[own[0]]):
        values = Counter(kept[n][p] for n in own)
        # A prompt is kept for longer than there are prompts; a state that two calls share is not.
        if None not in values and len(values) <= min(values.values()):
            places.append(p)
    streams: dict[Hashable, list[int]] = defaultdict(list)
    for n in own:
        streams[tuple(kept[n][p] for p in places)].append(n)
    return list(streams.values())


def _kept_from_step_to_step(calls: Sequence[Call], own: list[int]) -> dict[int, tuple[Hashable, ...]]:
    """For each call its operands, with None for those that no call at another time has in that place."""
    times: Counter[Hashable] = Counter()
    for place, operand, _ in {(p, o, calls[n].time) for n in own for p, o in enumerate(calls[n].operands)}:
        times[place, operand] += 1
    return {n: tuple(o if times[p, o] > 1 else None for p, o in enumerate(calls[n].operands)) for n in own}


class RanCall(Protocol):
    """A call that was run: which denoiser, with which arguments, what kind of computation, at what time, on which tensors."""

    note: CallNote
    kind: Any
    operands: list[Tensor]

    @property
    def time(self) -> Tensor | None: ...

    @property
    def given_time(self) -> Tensor | None:
        """The argument itself, of which `time` is a copy: where it lies in memory tells two steps at equal times apart."""
        ...


def group_run(steps: Sequence[RanCall]) -> list[list[int]]:
    """`group` for calls that were run, not traced.

    Times, and operands with a gradient (a trained prompt that every step rebuilds), are equal where their elements are; but not
    times that lie in different places of one tensor, as those of a schedule that repeats a time. Other operands are equal where
    they are one piece of memory, as expressions are in a graph: equal elements can be chance.

    Raises:
        StepMismatchError: steps run different computations, or which calls belong together cannot be told.
        ChainedStatesError: a gradient flows into what belongs to one step alone.
    """
    known: list[Tensor] = []
    times: list[RanCall] = []

    def number_time(step: RanCall) -> int:
        for n, other in enumerate(times):
            if _are_at_one_time(step, other):
                return n
        times.append(step)
        return len(times) - 1

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

    keys = [
        Call(step.note.denoiser, repr(step.kind), number_time(step), tuple(map(number, step.operands)))
        for step in steps
    ]
    grouped = group(keys)
    for stream in grouped:
        first = stream[0]
        for index, n in enumerate(stream):
            check_alike(index, steps[n], steps[first])
    return grouped


def _are_at_one_time(a: RanCall, b: RanCall) -> bool:
    assert a.time is not None
    assert b.time is not None
    if a.time.dtype != b.time.dtype or a.time.device != b.time.device or not torch.equal(a.time, b.time):
        return False
    first, second = a.given_time, b.given_time
    assert first is not None
    assert second is not None
    in_one_tensor = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return not in_one_tensor or first.storage_offset() == second.storage_offset()


def check_alike(index: int, step: RanCall, first: RanCall) -> None:
    """Raise `StepMismatchError` if a step runs another computation than its stream's first."""
    if step.note.arguments != first.note.arguments:
        raise StepMismatchError.arguments(index, step.note.arguments, first.note.arguments)
    kind, expected = repr(step.kind), repr(first.kind)
    if kind != expected:
        raise StepMismatchError.shapes(index, [f"{kind} where step 0 has {expected}"])
    for operand, same in zip(step.operands, first.operands, strict=True):
        if (operand.requires_grad or same.requires_grad) and not _same_expression(operand, same):
            raise ChainedStatesError(index, f"{operand.dtype}{list(operand.shape)}", chained=False)


def _same_expression(a: Tensor, b: Tensor) -> bool:
    """Whether two trained operands are equal, and computed by the same operators from the same tensors.

    Equal elements do not suffice: at its zero initialisation a ControlNet gives every step the same residual.
    """
    if a is b:
        return True
    if not torch.equal(a, b):
        return False
    pending = [(a.grad_fn, b.grad_fn)]
    while pending:
        m, n = pending.pop()
        if m is n:
            continue
        if m is None or n is None or m.name() != n.name() or len(m.next_functions) != len(n.next_functions):
            return False
        if getattr(m, "variable", None) is not getattr(n, "variable", None):
            return False
        with contextlib.suppress(RuntimeError):  # freed by an earlier backward
            if not all(_same(getattr(m, name), getattr(n, name)) for name in dir(m) if name.startswith("_saved_")):
                return False
        pending += [(x, y) for (x, _), (y, _) in zip(m.next_functions, n.next_functions, strict=True)]
    return True


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and torch.equal(a, b))
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def kind_of(value: Any, time: Tensor) -> Any:
    """Arguments without the elements of tensors and without the time."""
    if isinstance(value, Tensor):
        return "time" if value is time else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return {key: kind_of(item, time) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [kind_of(item, time) for item in value]
    return value
