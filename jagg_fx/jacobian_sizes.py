"""How large the Jacobians are at the knots: measured during one backward, and interpolated between them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jagg_fx import interpolation
from jagg_fx.structure import tensors_in


class JacobianSizes:
    """Notes `|J_k^T G_k|` and `|G_k|` of the knots that are run through it."""

    def __init__(self, denoiser: nn.Module, call: Callable[..., Any]) -> None:
        self._denoiser, self._call = denoiser, call
        self._composites: dict[int, Tensor] = {}  # by knot: squared norm of `G_k`
        self._vjps: dict[int, Tensor] = {}  # by knot: squared norm of `J_k^T G_k`

    def at(self, k: int) -> Callable[..., Any]:
        """What runs the denoiser at knot `k`, with hooks that note how large its own VJP is.

        The knots share their parameters; views of them, one set per knot, tell their gradients apart.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            views = {name: p.view_as(p) for name, p in self._denoiser.named_parameters() if p.requires_grad}
            for view in views.values():
                view.register_hook(functools.partial(_add_square, self._vjps, k))
            output = self._call(views, args, kwargs)
            for value in tensors_in(output):
                if value.requires_grad:
                    value.register_hook(functools.partial(_add_square, self._composites, k))
            return output

        return run

    def of_steps(self, times: Tensor, knots: Sequence[int]) -> Tensor:
        """`|J_i|` of every step `[N, B or 1]`: `|J_k^T G_k| / |G_k|` at the knots, interpolated between them.

        Where the backward did not pass the hooks at some knot (gradient checkpointing runs the denoiser anew, on the
        parameters themselves), all count alike.

        Args:
            times: of all steps `[N, *]`.
            knots: indices of the knots.
        """
        if not all(self._composites.get(k) and k in self._vjps for k in knots):
            return torch.ones(len(times), 1, device=times.device)
        sizes = torch.stack([(self._vjps[k] / self._composites[k]).sqrt() for k in knots])
        weights = interpolation.knot_weights(times, times[list(knots)]).to(sizes.device)
        sizes = sizes.to(weights.dtype).reshape(1, -1, *[1] * (weights.dim() - 2))
        return (weights * sizes).sum(1).reshape(len(times), -1)


def _add_square(totals: dict[int, Tensor], k: int, gradient: Tensor | None) -> None:
    if gradient is None:  # an output that the loss does not use
        return
    wide = gradient.detach().to(interpolation.working_dtype(gradient.dtype))
    totals[k] = totals.get(k, 0) + wide.square().sum()
