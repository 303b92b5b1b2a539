"""Velocities in closed form: one that JAGG treats exactly on straight paths, and one that is smooth but not linear."""

import torch
from torch import Tensor, nn


class LinearVelocity(nn.Module):
    """`v(z, t) = A z + b t + c` on `[B, D]`: affine in `(z, t)`, so its Jacobian in the weights is, too.

    JAGG is exact for it where `(z_i, t_i)` lies on the segment between the knots with the weight of the interpolation.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(dim, dim) / dim**0.5)
        self.b = nn.Parameter(torch.randn(dim))
        self.c = nn.Parameter(torch.randn(dim))

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        """Velocity `[B, D]` at states `[B, D]` and times `[B]`."""
        return z @ self.A.T + t[:, None] * self.b + self.c


class GaussianVelocity(nn.Module):
    """Rectified flow from `N(0, 1)` at t = 1 to `N(m, s^2)` per dimension at t = 0, in closed form.

    `v(z, t) = E[eps - x0 | z] = (t - (1 - t) s^2) / ((1 - t)^2 s^2 + t^2) (z - (1 - t) m) - m`, the conditional mean of
    jointly Gaussian variables with `z = (1 - t) x0 + t eps`. Linear in z, smooth and nonlinear in t and the weights.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.randn(dim))
        self.log_std = nn.Parameter(0.3 * torch.randn(dim))

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        """Velocity `[B, D]` at states `[B, D]` and times `[B]`."""
        t = t[:, None]
        variance = (2 * self.log_std).exp()
        gain = (t - (1 - t) * variance) / ((1 - t).square() * variance + t.square())
        return gain * (z - (1 - t) * self.mean) - self.mean
