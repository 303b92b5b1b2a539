"""Switches of peft adapters that Dynamo can trace, in place of peft's own while a transformed call runs.

The KL term of GRPO runs the same denoiser without its adapter, or with another one, under no_grad: `model.disable_adapter()`,
`model.set_adapter("reference")`. Peft's own switches also set `requires_grad` on parameters and inspect the whole model, which
Dynamo cannot trace (torch 2.13, peft 0.21). These set the same attributes and leave `requires_grad` alone; under no_grad that
is no difference. Where it would be one, an error says so.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from jagg_fx.errors import AdapterError

STATE = ("_active_adapter", "_disable_adapters")  # of a layer


def adapted_layers(denoiser: nn.Module) -> list[Any]:
    """The layers of a module that hold adapters."""
    return [module for module in denoiser.modules() if all(hasattr(module, name) for name in STATE)]


def active(layers: Sequence[Any]) -> list[Any]:
    """Which adapters each layer applies."""
    return [[getattr(layer, name) for name in STATE] for layer in layers]


@contextlib.contextmanager
def traceable_switches(denoiser: nn.Module) -> Iterator[None]:
    """Replace the switches on the instances, and put back what was there whatever happens.

    Raises:
        AdapterError: the function left other adapters active than it found.
    """
    layers = adapted_layers(denoiser)
    before = active(layers)
    replaced: list[tuple[nn.Module, str]] = []

    def replace(module: nn.Module, name: str, switch: Callable[..., Any]) -> None:
        if name not in module.__dict__:
            module.__dict__[name] = switch
            replaced.append((module, name))

    for layer in layers:
        set_adapter, enable = _switches_of(layer)
        replace(layer, "set_adapter", set_adapter)
        replace(layer, "enable_adapters", enable)
    for module in denoiser.modules() if layers else ():
        known: Any = getattr(module, "peft_config", None)
        if known is not None:
            for name, switch in _switches_of_all(layers, list(known)).items():
                if hasattr(type(module), name):
                    replace(module, name, switch)
    try:
        yield
    finally:
        for module, name in replaced:
            del module.__dict__[name]
    if active(layers) != before:
        raise AdapterError.left(type(denoiser).__name__)


def _switches_of(layer: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    def set_adapter(adapter_names: Any, inference_mode: bool = False) -> None:
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        layer._active_adapter = names[0] if isinstance(layer._active_adapter, str) else names  # as the layer keeps it

    def enable_adapters(enabled: bool) -> None:
        layer._disable_adapters = not enabled

    return set_adapter, enable_adapters


def _switches_of_all(layers: Sequence[Any], known: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Peft's and diffusers' switches of a whole model that has the adapters `known`."""

    @contextlib.contextmanager
    def disable_adapter() -> Iterator[None]:
        before = [layer._disable_adapters for layer in layers]
        disable_adapters()
        try:
            yield
        finally:
            for layer, was in zip(layers, before, strict=True):
                layer._disable_adapters = was

    def disable_adapters() -> None:
        for layer in layers:
            layer._disable_adapters = True

    def enable_adapters() -> None:
        for layer in layers:
            layer._disable_adapters = False

    def set_adapter(adapter_name: Any, inference_mode: bool = False) -> None:
        for name in [adapter_name] if isinstance(adapter_name, str) else adapter_name:
            if name not in known:
                raise ValueError(f"Adapter {name} not found. There are {', '.join(known)}.")
        for layer in layers:
            layer.set_adapter(adapter_name)

    return {
        "disable_adapter": disable_adapter,
        "disable_adapters": disable_adapters,
        "enable_adapters": enable_adapters,
        "set_adapter": set_adapter,
    }
