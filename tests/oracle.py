"""What `jagg_fx.wrap` must compute, written a second time and as plainly as possible: keep everything, then run the knots again.

Nothing of the library is used but a plan's knots, so that an error in one is not an error in both.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from jagg_fx.plan import Plan


class _Call(NamedTuple):
    """A call of the denoiser with gradients, and what came back to its value."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    time: Tensor
    around: Callable[[], Any]
    cotangents: list[Tensor]


class Oracle(nn.Module):
    """A denoiser in whose place every trajectory of calls gets the gradient `sum_k J_k^T G_k`, `G_k = g_k + sum_i w_ik g_i`.

    Calls with gradients are counted; `plan.num_steps` of them are a trajectory. Each returns a fresh leaf, whose cotangent is
    noted. When the last of a trajectory's cotangents has arrived, the knots run again, and their gradients are added to `.grad`
    by hand, so that it is there when the loop clips it.

    Args:
        denoiser: has one tensor in its output (a tuple or a diffusers dataclass), the samples first.
        plan: with linear weights in time.
        time_index: position of the time where it is not given as `timestep=`.
    """

    def __init__(self, denoiser: nn.Module, plan: Plan, time_index: int = 1) -> None:
        super().__init__()
        self.denoiser, self._plan, self._time_index = denoiser, plan, time_index
        self._calls: list[_Call] = []

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("denoiser"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.denoiser(*args, **kwargs)
        assert len(self._calls) < self._plan.num_steps, "a trajectory ended without all of its cotangents"
        with torch.no_grad():
            output = self.denoiser(*args, **kwargs)
        torch.clear_autocast_cache()  # it holds weights that were cast without a graph
        value = _value(output).detach().requires_grad_()
        time = kwargs["timestep"] if "timestep" in kwargs else args[self._time_index]
        device = value.device.type
        around = functools.partial(
            torch.autocast, device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        )
        call = _Call(args, kwargs, time.detach().clone(), around, [])
        self._calls.append(call)
        value.register_hook(functools.partial(self._arrive, call))
        return (value,) if isinstance(output, tuple) else type(output)(value)

    def _arrive(self, call: _Call, cotangent: Tensor) -> None:
        call.cotangents.append(cotangent.detach().clone())
        if len(self._calls) == self._plan.num_steps and all(call.cotangents for call in self._calls):
            calls, self._calls = self._calls, []
            self._finish(calls)

    def _finish(self, calls: Sequence[_Call]) -> None:
        parameters = [p for p in self.denoiser.parameters() if p.requires_grad]
        others = [i for i in range(len(calls)) if i not in self._plan.knots]
        times = np.stack([call.time.double().cpu().numpy() for call in calls])
        weights = hat_weights(times[others], times[list(self._plan.knots)])
        for n, k in enumerate(self._plan.knots):
            (g,) = calls[k].cotangents
            total = g.to(torch.promote_types(g.dtype, torch.float32))
            for m, i in enumerate(others):
                w = torch.tensor(weights[m, n]).to(total).view(-1, *[1] * (g.dim() - 1))
                total = total + w * calls[i].cotangents[0]
            with torch.enable_grad(), calls[k].around():  # a hook of the backward pass runs without
                value = _value(self.denoiser(*calls[k].args, **calls[k].kwargs))
            gradients = torch.autograd.grad(value, parameters, total.to(g.dtype), allow_unused=True)
            for p, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    p.grad = gradient if p.grad is None else p.grad + gradient


def hat_weights(times: Any, knot_times: Any) -> Any:
    """Weights `[M, K, B]` of knots at `[K, B]` for steps at `[M, B]`: linear between neighbours in time, constant outside."""
    (m, samples), k = times.shape, len(knot_times)
    weights = np.zeros((m, k, samples))
    for b in range(samples):
        order = np.argsort(knot_times[:, b])
        for n in range(k):
            peak = np.zeros(k)
            peak[n] = 1
            weights[:, n, b] = np.interp(times[:, b], knot_times[order, b], peak[order])
    return weights


def _value(output: Any) -> Tensor:
    (value,) = output if isinstance(output, tuple) else output.to_tuple()
    assert isinstance(value, Tensor)
    return value
