"""A rollout's own velocities in place of the forward of intermediate steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagg_fx import interpolation
from jagg_fx.errors import OptionError, VelocityMismatchError
from jagg_fx.structure import Output


@dataclass(frozen=True)
class Velocities:
    """What the rollout computed, call by call, while the weights were those of the rollout.

    Attributes:
        values: `[B, *]` of each call with gradients, in the order of the calls.
        extrapolate: whether the weights may have moved since. Then values are approximations: those of intermediate steps are
            moved by what changed at the knots that ran before them, `v_i + sum_k w_ik (v_k' - v_k)`.
        tolerance: largest relative difference, `|v_k' - v_k| / |v_k|`, at a knot; None: by the dtype.
    """

    values: Sequence[Tensor]
    extrapolate: bool
    tolerance: float | None

    @classmethod
    def create(cls, velocities: Tensor | Sequence[Tensor], extrapolate: bool, tolerance: float | None) -> "Velocities":
        """From a tensor `[calls, B, *]` or a list. Raises `OptionError` for anything else."""
        if not isinstance(velocities, (Tensor, list, tuple)) or not all(isinstance(v, Tensor) for v in velocities):
            raise OptionError(
                f"reuse(velocities=<{type(velocities).__name__}>): velocities are a tensor [calls, B, *], or a list of tensors "
                "[B, *]: what the denoiser returned in the rollout (return_dict=False)[0], before guidance."
            )
        return cls(list(velocities), extrapolate, tolerance)

    def check_count(self, count: int, call: str) -> None:
        """Raises `OptionError` unless there is one for each call."""
        if len(self.values) != count:
            raise OptionError(
                f"{call}.reuse(velocities=<{len(self.values)} of them>): {count} calls with gradients follow. Give the rollout's "
                "velocity of each, in the order of the calls: a list, or a tensor [calls, B, *]."
            )

    def check(self, n: int, values: Sequence[Tensor], call: str) -> None:
        """Compare what a knot returned with what is given; waits for the device.

        Raises:
            OptionError: the denoiser returns other than one floating-point tensor.
            VelocityMismatchError: another value, or another shape.
        """
        if len(values) != 1:
            raise OptionError(
                f"{call}.reuse(velocities=...): the denoiser returns {len(values)} floating-point tensors, and one velocity is "
                "given. Leave reuse out."
            )

        given, fresh = self.values[n], values[0].detach()
        if given.shape != fresh.shape:
            raise VelocityMismatchError.shape(call, n, list(given.shape), list(fresh.shape))
        if self.extrapolate:
            return
        wide = interpolation.working_dtype(fresh.dtype)
        difference = (fresh.to(wide) - given.to(fresh.device, wide)).norm() / given.to(wide).norm().clamp(min=1e-30)
        limit = self.tolerance if self.tolerance is not None else _tolerance(fresh)
        if not float(difference) <= limit:
            raise VelocityMismatchError.value(call, n, float(difference), limit)

    def instead(
        self, n: int, like: Output, time: Tensor, knots: Sequence[tuple[int, Tensor, Tensor]]
    ) -> Callable[..., Any]:
        """What returns the value of call `n` in the denoiser's place.

        Args:
            like: an output of the denoiser: its structure, dtype and device are taken.
            time: of the call.
            knots: number, time and fresh value of the calls that ran before.
        """
        value = self._value(n, like.values[0], time, knots)
        return lambda *_, **__: like.rebuilt([value])

    def _value(self, n: int, like: Tensor, time: Tensor, knots: Sequence[tuple[int, Tensor, Tensor]]) -> Tensor:
        given = self.values[n].to(like)
        if not self.extrapolate:
            return given
        weights = interpolation.knot_weights(time[None], torch.stack([t for _, t, _ in knots])).to(like.device)
        moved = given.to(interpolation.working_dtype(like.dtype))
        for k, (number, _, fresh) in enumerate(knots):
            change = (fresh - self.values[number].to(fresh)).to(moved.dtype)
            moved = moved + interpolation.per_sample(weights[:, k], like.shape)[0] * change
        return moved.to(like.dtype)


def _tolerance(value: Tensor) -> float:
    """Rounding of the dtype that the denoiser computes in, with room for another batch size or kernel."""
    low = value.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(value.device.type)
    return 2e-2 if low else 1e-4
