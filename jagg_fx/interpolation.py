"""The one definition of the interpolation: weights between two knots and composite cotangents.

The eager twin (`reference.py`) calls these functions, and the pass `interpolate_vjps` traces them into the joint
graph, so both compute the same numbers. Shapes: `B` samples, `*` the remaining dimensions of the denoiser's value.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jagg_fx.errors import TimeArgumentError


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Weights and sums of cotangents run in float32 or better, whatever the value's own dtype."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float32


def time_weight(t_a: Tensor, t_i: Tensor, t_b: Tensor) -> Tensor:
    """Weight of knot `b` for a step at `t_i`, `(t_i - t_a) / (t_b - t_a)` (arXiv 2607.17572); knot `a` has the rest.

    Args:
        t_a, t_i, t_b: times of the opening knot, the step and the closing knot, all of one shape (`[]` or `[B]`),
            in any unit and of any real dtype.

    Returns:
        Weights of the same shape in [0, 1], in float32 or better. A step outside the knots' times (steps that are not in
        the order of time) takes the nearer knot: nothing is extrapolated. Where both knots share one time the weight is
        1/2, so that no division by zero reaches a gradient.
    """
    dtype = working_dtype(t_i.dtype)
    t_a, t_i, t_b = t_a.to(dtype), t_i.to(dtype), t_b.to(dtype)
    span = t_b - t_a
    degenerate = span == 0
    weight = (t_i - t_a) / torch.where(degenerate, torch.ones_like(span), span)
    return torch.where(degenerate, torch.full_like(span, 0.5), weight.clamp(0, 1))


def index_weight(a: int, i: int, b: int) -> float:
    """Weight of knot `b` by position alone, `(i - a) / (b - a)`."""
    return (i - a) / (b - a)


def per_sample(weight: Tensor, value_shape: Sequence[int | torch.SymInt]) -> Tensor:
    """Reshape weights `[]`, `[1]`, `[B]` or `[B, 1, ...]` so that they broadcast against a value `[B, *]`.

    Raises:
        TimeArgumentError: the times give no weight per sample.
    """
    shape = tuple(weight.shape)
    if weight.dim() == 0 or all(isinstance(size, int) and size == 1 for size in shape):
        return weight.reshape(())
    one_each = all(isinstance(size, int) and size == 1 for size in shape[1:])
    if not value_shape or not one_each or shape[0] != value_shape[0]:
        raise TimeArgumentError.wrong_shape(shape, value_shape)
    return weight.reshape(shape[0], *[1] * (len(value_shape) - 1))


def composite(own: Tensor, others: Sequence[tuple[Tensor, Tensor | float]]) -> Tensor:
    """Composite cotangent `G_k = g_k + sum_i w_ik g_i` of one knot.

    Args:
        own: cotangent `g_k` `[B, *]` of the knot itself.
        others: pairs `(g_i, w_ik)` of cotangents `[B, *]` and weights (a number, or a tensor that broadcasts).

    Returns:
        `[B, *]` in the dtype of `own`; the sum runs in float32 or better and is rounded once.
    """
    dtype = working_dtype(own.dtype)
    total = own.to(dtype)
    for cotangent, weight in others:
        total = total + cotangent.to(dtype) * (weight.to(dtype) if isinstance(weight, Tensor) else weight)
    return total.to(own.dtype)
