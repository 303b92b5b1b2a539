"""Find the denoiser that a function calls, and the argument that is its time."""

import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jagg_fx.errors import (
    DenoiserNotFoundError,
    OptionError,
    SeveralDenoisersError,
    TimeArgumentError,
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

TIME_NAMES = ("timestep", "timesteps", "t", "time", "sigma")


@dataclass(frozen=True)
class TimeArgument:
    """Where the denoiser's forward takes its time, and its state: by keyword, or by place among the positional arguments.

    Attributes:
        denoiser: class of the denoiser.
        name: name of the time argument.
        positional: names of the arguments that can be given by place. The first one is the state `z`.

    The methods run inside Dynamo's trace.
    """

    denoiser: str
    name: str
    positional: tuple[str, ...]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The call's time as a tensor."""
        if not self._has(self.name, args, kwargs):
            raise TimeArgumentError.not_passed(self.denoiser, self.name)
        return _as_tensor(self._get(self.name, args, kwargs))

    def replace(self, args: tuple[Any, ...], kwargs: dict[str, Any], time: Tensor) -> Arguments:
        """The call's arguments with another time."""
        return self._set(self.name, args, kwargs, time)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
        """Sorted names of the arguments that the call gives a value other than None."""
        names = [name for name, value in zip(self.positional, args, strict=False) if value is not None]
        return tuple(sorted(names + [name for name, value in kwargs.items() if value is not None]))

    def state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call's state: a tensor, usually. None where the call leaves it out."""
        name = self.positional[0]
        return self._get(name, args, kwargs) if self._has(name, args, kwargs) else None

    def replace_state(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: Any) -> Arguments:
        """The call's arguments with another state."""
        return self._set(self.positional[0], args, kwargs, state)

    def _has(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return name in kwargs or name in self.positional[: len(args)]

    def _get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kwargs[name] if name in kwargs else args[self.positional.index(name)]

    def _set(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Arguments:
        if name in kwargs:
            return args, {**kwargs, name: value}
        position = self.positional.index(name)
        return (*args[:position], value, *args[position + 1 :]), kwargs


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
    kinds = inspect.Parameter
    parameters = inspect.signature(denoiser.forward).parameters
    while not any(p.kind is kinds.POSITIONAL_OR_KEYWORD for p in parameters.values()):
        # A wrapper that passes all on (peft's, DistributedDataParallel): it takes what the one module inside it takes.
        children = list(denoiser.children())
        if len(children) != 1:
            break
        denoiser = children[0]
        parameters = inspect.signature(denoiser.forward).parameters
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


def check_denoiser(denoiser: object) -> nn.Module:
    if not isinstance(denoiser, nn.Module):
        raise OptionError(
            f"jagg_fx.transform(fn, denoiser={type(denoiser).__name__}): the denoiser is the nn.Module that is called "
            "at every step, or a list of them."
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
        several = SeveralDenoisersError.inside if isinstance(fn, nn.Module) else SeveralDenoisersError.reachable
        raise several(name, [_describe(*item) for item in outermost.items()])
    return next(iter(outermost.values()))


def describe_function(fn: Callable[..., Any]) -> str:
    """A function's name, for reports and errors."""
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
