"""What decides, beside its arguments, what a call of the denoiser computes: so that a call can be run again later."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jagg_fx.adapters import STATE, active


@dataclass(frozen=True)
class Surroundings:
    """Autocast, active adapters, train or eval mode and random state at one moment.

    Attributes:
        autocast: device type, whether autocast is on there, and its dtype.
        adapters: which adapters each adapted layer applies.
        training: the mode of each module.
        random: torch's random state on the CPU and on each GPU.
    """

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    adapters: list[Any]
    training: list[bool]
    random: tuple[Tensor, ...]

    @classmethod
    def of(cls, modules: Sequence[nn.Module], layers: Sequence[Any], device: torch.device) -> "Surroundings":
        """The present ones of a denoiser's modules, and of those among them that hold adapters."""
        kinds = sorted({"cpu", device.type} - {"meta"})
        return cls(
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            active(layers),
            [module.training for module in modules],
            random_state(),
        )

    @contextlib.contextmanager
    def restored(self, modules: Sequence[nn.Module], layers: Sequence[Any], device: torch.device) -> Iterator[None]:
        """Run the block in these surroundings, and put back the present ones."""
        present = Surroundings.of(modules, layers, device)
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            self._apply(modules, layers)
            try:
                yield
            finally:
                present._apply(modules, layers)

    def _apply(self, modules: Sequence[nn.Module], layers: Sequence[Any]) -> None:
        for layer, values in zip(layers, self.adapters, strict=True):
            for name, value in zip(STATE, values, strict=True):
                setattr(layer, name, value)
        for module, mode in zip(modules, self.training, strict=True):
            module.training = mode
        torch.set_rng_state(self.random[0])
        if len(self.random) > 1:
            torch.cuda.set_rng_state_all(list(self.random[1:]))


def random_state() -> tuple[Tensor, ...]:
    """Torch's random state on the CPU and, where it is in use, on each GPU."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return (torch.get_rng_state(), *on_gpus)
