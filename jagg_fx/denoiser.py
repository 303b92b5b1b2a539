"""Find the denoiser, mark one call of it as a region of the graph, and mark its time argument."""

import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jagg_fx._compat import mark_region
from jagg_fx.errors import (
    DenoiserNotFoundError,
    NotARegionError,
    OptionError,
    SeveralDenoisersError,
    TimeArgumentError,
)

TIME_NAMES = ("timestep", "timesteps", "t", "time", "sigma")


@torch.library.custom_op("jagg_fx::time", mutates_args=())
def mark_time(time: Tensor, arguments: str) -> Tensor:
    """Identity on a step's time. It survives into the joint graph, where the passes read it and erase it.

    `arguments` names what the denoiser was called with, for messages about steps that differ.
    """
    return time.clone()


@mark_time.register_fake
def _(time: Tensor, arguments: str) -> Tensor:
    return torch.empty_like(time)


mark_time.register_autograd(lambda ctx, gradient: (gradient, None))

TIME = torch.ops.jagg_fx.time.default  # the marker as the graphs hold it


@dataclass(frozen=True)
class TimeArgument:
    """Where the denoiser's forward takes its time: by keyword, or by its place among the positional arguments."""

    denoiser: str
    name: str
    positional: tuple[str, ...]

    def mark(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with the time marked. Runs inside Dynamo's trace."""
        marked = mark_time(self.read(args, kwargs), ",".join(self.arguments(args, kwargs)))
        if self.name in kwargs:
            return args, {**kwargs, self.name: marked}
        position = self.positional.index(self.name)
        return (*args[:position], marked, *args[position + 1 :]), kwargs

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
        """Sorted names of the arguments that the call gives a value other than None."""
        given = [name for name, value in zip(self.positional, args, strict=False) if value is not None]
        return tuple(sorted(given + [name for name, value in kwargs.items() if value is not None]))

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The call's time as a tensor."""
        if self.name in kwargs:
            return _as_tensor(kwargs[self.name])
        if self.name in self.positional[: len(args)]:
            return _as_tensor(args[self.positional.index(self.name)])
        raise TimeArgumentError.not_passed(self.denoiser, self.name)


def _as_tensor(time: Any) -> Tensor:
    # A Python number would be a constant of the step's graph, and every step would be a graph of its own. A 0-d float64
    # (or int64) tensor takes part in arithmetic as the number did: it does not promote the other operand's dtype.
    if isinstance(time, Tensor):
        return time
    return torch.tensor(time, dtype=torch.float64 if isinstance(time, float) else None)


def find_time(denoiser: nn.Module, time: str | None) -> TimeArgument:
    """The time argument of `denoiser.forward`, by the name `time` or by the field's usual names.

    Raises:
        TimeArgumentError: no argument has one of the names.
    """
    parameters = inspect.signature(denoiser.forward).parameters
    kinds = inspect.Parameter
    open_ended = any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters.values())
    positional = tuple(
        name
        for name, parameter in parameters.items()
        if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    )
    for name in (time,) if time is not None else TIME_NAMES:
        if name in parameters or (time is not None and open_ended):
            return TimeArgument(type(denoiser).__name__, name, positional)
    raise TimeArgumentError.not_found(type(denoiser).__name__, positional, TIME_NAMES if time is None else (time,))


class Region:
    """One denoiser as a compile region: `forward` stands in for the denoiser's own while a transformed call runs.

    Args:
        denoiser: the module.
        time: its time argument.
        nested: make each call a nested compile region, which Dynamo traces once for all steps. It fails on some models
            (torch 2.13: an attribute of a parameter such as `weight.T`). Otherwise only the time is marked, every step is
            traced, and `outline` makes the regions afterwards.
    """

    def __init__(self, denoiser: nn.Module, time: TimeArgument, nested: bool = True) -> None:
        self.denoiser = denoiser
        self.time = time
        self.nested = nested
        self.original = original = denoiser.forward
        self.eager_calls = 0

        @mark_region
        def region(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        def checked(output: Any) -> Any:
            if not isinstance(output, (Tensor, tuple, list)):
                raise NotARegionError.output(time.denoiser, type(output).__name__)
            return output

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.eager_calls += torch.is_grad_enabled()
                time.read(args, kwargs)  # raises if the time is missing
                return checked(original(*args, **kwargs))
            if nested:
                args, kwargs = time.mark(args, kwargs)
                return checked(region(*args, **kwargs))
            if torch.is_grad_enabled():  # `outline` leaves calls under no_grad as they are
                args, kwargs = time.mark(args, kwargs)
            return checked(original(*args, **kwargs))

        self.forward = forward

    def is_current(self) -> bool:
        """False once the denoiser's forward was replaced by someone else (accelerate, a hook) since this was made."""
        return bool(self.denoiser.forward == self.original)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the denoiser's forward on the instance, and put back what was there whatever happens."""
        with replaced_forward(self.denoiser, self.forward):
            self.eager_calls = 0
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


def check_denoiser(denoiser: object) -> nn.Module:
    if not isinstance(denoiser, nn.Module):
        raise OptionError(
            f"jagg_fx.transform(fn, denoiser={type(denoiser).__name__}): the denoiser is the nn.Module that is called "
            "once per step."
        )
    return denoiser


def find_denoiser(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """The outermost trainable module reachable from `fn`.

    Looks at the function's closure, the globals it names, its bound object and that object's attributes, partials,
    defaults and the arguments of the call, through plain functions and containers on the way.

    Raises:
        DenoiserNotFoundError: no module with a parameter that needs gradients.
        SeveralDenoisersError: several, none of which holds the others.
    """
    name = describe_function(fn)
    found = _reachable_modules(fn, args, kwargs)
    trainable = {path: module for path, module in found.items() if any(p.requires_grad for p in module.parameters())}
    inner = {id(child) for module in trainable.values() for child in module.modules() if child is not module}
    outermost = {path: module for path, module in trainable.items() if id(module) not in inner}
    if not outermost:
        raise DenoiserNotFoundError.not_reachable(name, [_describe(*item) for item in found.items()])
    if len(outermost) > 1:
        raise SeveralDenoisersError.reachable(name, [_describe(*item) for item in outermost.items()])
    return next(iter(outermost.values()))


def describe_function(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _describe(path: str, module: nn.Module) -> str:
    parameters = list(module.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    return (
        f"{path}: {type(module).__name__}, {trainable:,} of {sum(p.numel() for p in parameters):,} parameters trainable"
    )


def _reachable_modules(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(path: str, value: Any, depth: int) -> None:
        if id(value) in seen or isinstance(value, (Tensor, type, types.ModuleType, str, bytes, int, float, type(None))):
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found[path] = value
        elif isinstance(value, functools.partial):
            visit(path, value.func, depth)
            visit_values([(f"{path}.args[{i}]", v) for i, v in enumerate(value.args)], depth)
            visit_values([(k, v) for k, v in value.keywords.items()], depth)
        elif isinstance(value, types.MethodType):
            visit_bound(value.__self__, depth)
            visit(path, value.__func__, depth)
        elif isinstance(value, types.FunctionType):
            if (value.__module__ or "").partition(".")[0] != "torch":
                visit_values(_names_used(value), depth)
        elif isinstance(value, (list, tuple, set, frozenset)):
            visit_values([(f"{path}[{i}]", v) for i, v in enumerate(value)], depth - 1)
        elif isinstance(value, dict):
            visit_values([(f"{path}[{k!r}]", v) for k, v in value.items()], depth - 1)
        elif hasattr(value, "__dict__"):
            visit_values([(f"{path}.{k}", v) for k, v in vars(value).items()], depth - 1)

    def visit_values(values: list[tuple[str, Any]], depth: int) -> None:
        if depth >= 0:
            for path, value in values:
                visit(path, value, depth)

    def visit_bound(owner: Any, depth: int) -> None:
        # The object whose method loops over the steps is not the step itself, even where it is a module.
        seen.add(id(owner))
        members = dict(owner.named_children()) if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {})
        visit_values([(f"self.{name}", member) for name, member in members.items()], depth)

    depth = 2  # an attribute of an object in a container is as far as a user would call it "named by the function"
    if isinstance(fn, (types.FunctionType, types.MethodType, functools.partial)):
        visit(describe_function(fn), fn, depth)
    else:  # a module or another callable object: its parts are what it may call
        visit_bound(fn, depth)
    visit_values([(f"args[{i}]", value) for i, value in enumerate(args)], depth)
    visit_values(list(kwargs.items()), depth)
    return found


def _names_used(fn: types.FunctionType) -> list[tuple[str, Any]]:
    """Values that a function's own code names: closure, globals (also in functions nested in it), defaults."""
    values: list[tuple[str, Any]] = []
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            values.append((name, cell.cell_contents))
    codes = [fn.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval in fn.__globals__:
                values.append((instruction.argval, fn.__globals__[instruction.argval]))
    defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    return values + [(f"default {i}", value) for i, value in enumerate(defaults)]
