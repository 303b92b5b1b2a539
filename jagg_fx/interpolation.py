"""The one definition of the interpolation: weights at the knots, composite cotangents, and how well velocities agree.

The eager twin (`reference.py`) calls these functions, and the passes trace them into the joint graph, so both compute the
same numbers. Shapes: `M` intermediate steps, `K` knots, `B` samples, `*` the remaining dimensions of the denoiser's value.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jagg_fx.errors import TimeArgumentError


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Weights and sums of cotangents run in float32 or better, whatever the value's own dtype."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float32


def knot_weights(t: Tensor, t_knots: Tensor, degree: int = 1) -> Tensor:
    """Weights of the knots for each intermediate step: hat functions over the knots' times, for every sample its own.

    Between neighbouring knot times `l < u` the weights are `(u - t) / (u - l)` and `(t - l) / (u - l)` (arXiv 2607.17572 for
    a group's two ends). With `degree=2` and a third knot time `x`, the nearest one outside `[l, u]`, they are Lagrange's:
    `(t - u)(t - x) / ((l - u)(l - x))` and so on. Where fewer than three knot times differ, degree 2 is degree 1.

    Args:
        t: times of the intermediate steps, `[M, *]` with `*` nothing, `B`, or `B, 1, ...`.
        t_knots: times of the knots `[K, *]`, in any order and unit, of any real dtype.
        degree: 1 or 2.

    Returns:
        `[M, K, *]` in float32 or better; the weights of a step sum to 1. A step outside the knots' times takes the nearest
        knot: nothing is extrapolated. Knots at one time share its weight equally, so no division by zero reaches a gradient.
    """
    dtype = working_dtype(t.dtype)
    knots = t_knots.to(dtype).unsqueeze(0)
    t = t.to(dtype).unsqueeze(1)
    t = torch.minimum(torch.maximum(t, knots.amin(1, keepdim=True)), knots.amax(1, keepdim=True))
    infinity = torch.full_like(knots, torch.inf)
    lower = torch.where(knots <= t, knots, -infinity).amax(1, keepdim=True)
    upper = torch.where(knots >= t, knots, infinity).amin(1, keepdim=True)
    at_knot = upper == lower
    span = torch.where(at_knot, torch.ones_like(t), upper - lower)
    fraction = torch.where(at_knot, torch.zeros_like(t), (t - lower) / span)
    nodes = [(lower, 1 - fraction), (upper, fraction)]
    if degree == 2:
        below = torch.where(knots < lower, knots, -infinity).amax(1, keepdim=True)
        above = torch.where(knots > upper, knots, infinity).amin(1, keepdim=True)
        nearest = torch.where(t - below <= above - t, below, above)
        quadratic = nearest.isfinite() & ~at_knot
        third = torch.where(quadratic, nearest, upper + span)
        at_third = (t - lower) * (t - upper) / ((third - lower) * (third - upper))
        at_third = torch.where(quadratic, at_third, torch.zeros_like(t))
        # What the third knot takes is taken from the two others so that constants and straight lines stay exact.
        nodes = [
            (lower, 1 - fraction - at_third * (upper - third) / span),
            (upper, fraction - at_third * (third - lower) / span),
            (third, at_third),
        ]
    weights = torch.zeros_like(t + knots)
    for time, weight in nodes:
        here = knots == time
        weights = weights + weight * here / here.sum(1, keepdim=True).clamp(min=1)
    return weights


def per_sample(weights: Tensor, value_shape: Sequence[int | torch.SymInt]) -> Tensor:
    """Reshape weights `[M]`, `[M, 1]`, `[M, B]` or `[M, B, 1, ...]` so that they broadcast against values `[M, B, *]`.

    Raises:
        TimeArgumentError: the times give no weight per sample.
    """
    shape = tuple(weights.shape)
    if all(isinstance(size, int) and size == 1 for size in shape[1:]):
        return weights.reshape(shape[0], *[1] * len(value_shape))
    one_each = all(isinstance(size, int) and size == 1 for size in shape[2:])
    if not value_shape or not one_each or shape[1] != value_shape[0]:
        raise TimeArgumentError.wrong_shape(shape[1:], value_shape)
    return weights.reshape(shape[0], shape[1], *[1] * (len(value_shape) - 1))


def composite(own: Tensor, others: Tensor, weights: Tensor) -> Tensor:
    """Composite cotangent `G_k = g_k + sum_i w_ik g_i` of one knot.

    Args:
        own: cotangent `g_k` `[B, *]` of the knot itself.
        others: cotangents `g_i` `[M, B, *]` of the intermediate steps.
        weights: `w_ik`, as `per_sample` takes them.

    Returns:
        `[B, *]` in the dtype of `own`; the sum runs in float32 or better and is rounded once.
    """
    dtype = working_dtype(own.dtype)
    total = own.to(dtype) + (others.to(dtype) * per_sample(weights, own.shape).to(dtype)).sum(0)
    return total.to(own.dtype)


def agreement(values: Sequence[Tensor], at_knots: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Cosine similarity of each intermediate step's velocity and its interpolation `sum_k w_ik v_k`, mean over samples.

    Args:
        values: the velocities `[M, B, *]` of the intermediate steps, one tensor per differentiable value of the denoiser;
            several count as one long vector, without those that have another number of samples than the first.
        at_knots: the same of the knots, `[K, B, *]`.
        weights: `[M, K, *]` from `knot_weights`.

    Returns:
        `[M]` in float32 or better; 0 where a velocity vanishes, NaN where one is not finite.
    """
    dots, squares, interpolated_squares = [], [], []
    for v, v_knots in zip(values, at_knots, strict=True):
        if v.shape[1:2] != values[0].shape[1:2]:
            continue  # not one per sample as the first value is (a loss beside the velocity)
        dtype = working_dtype(v.dtype)
        v, v_knots = v.to(dtype), v_knots.to(dtype)
        factors = [per_sample(weights[:, k], v.shape[1:]).to(dtype) for k in range(weights.shape[1])]
        interpolated = sum((factor * v_knots[k] for k, factor in enumerate(factors)), torch.zeros_like(v))
        per_step_and_sample = (v.shape[0], v.shape[1] if v.dim() > 1 else 1, -1)
        v, interpolated = v.reshape(per_step_and_sample), interpolated.reshape(per_step_and_sample)
        dots.append((v * interpolated).sum(-1))
        squares.append((v * v).sum(-1))
        interpolated_squares.append((interpolated * interpolated).sum(-1))
    norms = torch.stack(squares).sum(0).sqrt() * torch.stack(interpolated_squares).sum(0).sqrt()
    cosine = torch.stack(dots).sum(0) / torch.where(norms == 0, torch.ones_like(norms), norms)
    return cosine.mean(1)


def squared_norms(x: Tensor) -> Tensor:
    """Sum of squares per step and sample `[N, B]` (`[N, 1]` without samples) of `[N, B, *]`, in float32 or better."""
    squares = x.to(working_dtype(x.dtype)).square()
    return squares.reshape(x.shape[0], x.shape[1] if x.dim() > 1 else 1, -1).sum(-1)


def cotangent_norms(cotangents: Sequence[Tensor]) -> Tensor:
    """`|g_i|` of each step `[N]` from its cotangents `[N, B, *]`, one tensor per differentiable value."""
    squares = [g.to(working_dtype(g.dtype)).square().reshape(g.shape[0], -1).sum(1) for g in cotangents]
    return torch.stack(squares).sum(0).sqrt()
