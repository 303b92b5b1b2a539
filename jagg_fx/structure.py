"""What a denoiser returns, taken apart into tensors and put together again.

A region of the graph returns a flat tuple of tensors; users get back what their denoiser returned: a tensor, a tuple or list
(also a named one), a dict, a dataclass, diffusers' and transformers' outputs. Dynamo traces these functions, so that they hold
to what it understands.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from jagg_fx.errors import NotARegionError

Structure = tuple[Any, ...]  # a kind or class; for containers also names or keys, and the structures of what they hold


def structure_of(output: Any, denoiser: str) -> Structure:
    """Nested tuples of constants that say how `output` is built. Raises `NotARegionError` for what cannot be rebuilt."""
    if isinstance(output, Tensor):
        if output.is_complex():
            raise NotARegionError.output(denoiser, "complex tensor")
        return ("tensor",)
    if output is None or isinstance(output, (bool, int, float, str)):
        return ("constant", output)
    # Dynamo cannot take a built-in class for a constant: those have kinds of their own.
    if isinstance(output, dict):
        inner = tuple(structure_of(value, denoiser) for value in output.values())
        return ("dict", tuple(output), inner) if type(output) is dict else (type(output), tuple(output), inner)
    if isinstance(output, (tuple, list)):
        inner = tuple(structure_of(value, denoiser) for value in output)
        if hasattr(output, "_fields"):
            return (type(output), output._fields, inner)
        return ("list" if isinstance(output, list) else "tuple", (), inner)
    if dataclasses.is_dataclass(output) and all(field.init for field in dataclasses.fields(output)):
        names = tuple(field.name for field in dataclasses.fields(output))
        return (type(output), names, tuple(structure_of(getattr(output, name), denoiser) for name in names))
    raise NotARegionError.output(denoiser, type(output).__name__)


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors of `output`, in the order in which `rebuild` takes them."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        return [tensor for value in output.values() for tensor in tensors_in(value)]
    if isinstance(output, (tuple, list)):
        return [tensor for value in output for tensor in tensors_in(value)]
    if dataclasses.is_dataclass(output):
        return [tensor for field in dataclasses.fields(output) for tensor in tensors_in(getattr(output, field.name))]
    return []


def detached(value: Any) -> Any:
    """A tensor, or a list or tuple of them, without their history."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)):
        return type(value)([detached(item) for item in value])
    return value


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting with its tensors changed; what is no tensor, tuple, list, dict or dataclass stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = copy.copy(value)
        for key, item in value.items():
            changed[key] = map_tensors(item, change)
        return changed
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{f.name: map_tensors(getattr(value, f.name), change) for f in fields})
    return value


def rebuild(structure: Structure, tensors: Iterator[Tensor]) -> Any:
    """The output of that structure, with the next tensors in their places."""
    kind = structure[0]
    if kind == "tensor":
        return next(tensors)
    if kind == "constant":
        return structure[1]
    _, names, inner = structure
    values = [rebuild(part, tensors) for part in inner]
    if kind == "list":
        return values
    if kind == "tuple":
        return tuple(values)
    named = dict(zip(names, values, strict=True))
    return named if kind == "dict" else kind(**named)


@dataclasses.dataclass(frozen=True)
class Output:
    """What one call of a denoiser returned.

    Attributes:
        structure: how it is built.
        is_floating: which of its tensors are values.
        values: the floating-point tensors.
        others: the other tensors.
    """

    structure: Structure
    is_floating: tuple[bool, ...]
    values: list[Tensor]
    others: list[Tensor]

    @classmethod
    def of(cls, output: Any, denoiser: str) -> "Output":
        """Raises `NotARegionError` for what cannot be rebuilt."""
        structure, tensors = structure_of(output, denoiser), tensors_in(output)
        is_floating = tuple(tensor.is_floating_point() for tensor in tensors)
        values, others = ([t for t, f in zip(tensors, is_floating, strict=True) if f is kind] for kind in (True, False))
        return cls(structure, is_floating, values, others)

    def rebuilt(self, values: Sequence[Tensor]) -> Any:
        """The output with other values."""
        floating, others = iter(values), iter(self.others)
        tensors = (next(floating) if is_floating else next(others) for is_floating in self.is_floating)
        return rebuild(self.structure, tensors)

    def with_values(self, values: Sequence[Tensor]) -> "Output":
        return dataclasses.replace(self, values=list(values))


def leaves_below(outputs: Any) -> set[int]:
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
