"""One process of `test_robustness.py`: compiles a small function through Inductor, and saves two gradients and the reference's.

python -m tests.robustness_worker FILE
"""

import sys

import torch
from torch import Tensor, nn

import jagg_fx
from tests.problems import Problem

STEPS, BATCH, DIM = 3, 2, 4


class Elementwise(nn.Module):
    """Few kernels, so that little C++ is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, DIM))

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(self.w * z * t)


def small() -> Problem:
    """Three steps; the middle one can be interpolated."""
    model = Elementwise()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([model(z[i], t[i]) for i in range(STEPS)])

    z, t = torch.randn(STEPS, BATCH, DIM), torch.linspace(1, 0.2, STEPS)
    return Problem(model, fn, (z, t), list(model.parameters()))


def gradients(problem: Problem) -> list[Tensor]:
    """Two through Inductor, and the reference's."""
    fast = jagg_fx.transform(problem.fn, knots=(0, 2), cos_threshold=None, capture="whole")
    reference = jagg_fx.transform(problem.fn, knots=(0, 2), cos_threshold=None, lowering="reference")
    return [problem.run(fn)[1] for fn in (fast, fast, reference)]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save(gradients(small()), sys.argv[1])
