"""The weights and sums, and what they are exact for."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import sympy
import torch

import jagg_fx
from jagg_fx import interpolation
from jagg_fx.errors import TimeArgumentError
from jagg_fx.models.linear_gaussian import GaussianVelocity, LinearVelocity
from tests.problems import Problem, relative_error

times = st.floats(-1e3, 1e3, allow_nan=False, width=32)


@hypothesis.given(times, times, times)
def test_time_weight_is_numpys_interpolation_between_distinct_knots(a: float, i: float, b: float) -> None:
    hypothesis.assume(abs(b - a) > 1e-3)
    low, high = min(a, b), max(a, b)
    inside = min(max(i, low), high)
    weight = interpolation.time_weight(*(torch.tensor(x, dtype=torch.float64) for x in (a, inside, b)))
    want = np.interp(inside, [low, high], [0.0, 1.0] if a < b else [1.0, 0.0])
    assert float(weight) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_weights_are_float32_or_better(dtype: torch.dtype) -> None:
    a, i, b = (torch.tensor([x, 2 * x], dtype=dtype) for x in (100, 70, 20))
    weight = interpolation.time_weight(a, i, b)
    assert weight.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(weight.double(), torch.full((2,), 0.375, dtype=torch.float64), rtol=1e-2, atol=0)


def test_a_step_outside_its_knots_takes_the_nearer_one() -> None:
    a, b = torch.tensor(0.8), torch.tensor(0.4)
    assert interpolation.time_weight(a, torch.tensor(0.9), b).item() == 0
    assert interpolation.time_weight(a, torch.tensor(0.1), b).item() == 1


def test_knots_at_one_time_share_equally_and_give_finite_gradients() -> None:
    t = torch.ones(2, requires_grad=True)
    weight = interpolation.time_weight(t, t, t)
    assert weight.tolist() == [0.5, 0.5]
    weight.sum().backward()
    assert t.grad is not None
    assert torch.isfinite(t.grad).all()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1), (3, 1, 1, 1)])
def test_one_weight_per_sample_broadcasts(shape: tuple[int, ...]) -> None:
    weight = torch.rand(shape)
    value = torch.rand(3, 2, 4)
    product = interpolation.per_sample(weight, value.shape) * value
    assert product.shape == value.shape
    want = weight.reshape(-1).expand(3) if weight.numel() == 1 else weight.reshape(3)
    torch.testing.assert_close(product[:, 0, 0], want * value[:, 0, 0])


@pytest.mark.parametrize("shape", [(2,), (3, 2), (4, 1)])
def test_other_shapes_of_time_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TimeArgumentError, match="one number per sample"):
        interpolation.per_sample(torch.rand(shape), (3, 2, 4))


def test_a_composite_is_summed_in_float32_and_rounded_once() -> None:
    own = torch.tensor([256.0], dtype=torch.bfloat16)
    small = torch.tensor([0.75], dtype=torch.bfloat16)  # lost one by one beside 256, whose neighbours are 2 apart
    composite = interpolation.composite(own, [(small, 1.0)] * 4)
    assert composite.dtype == torch.bfloat16
    assert composite.item() == torch.tensor(259.0).bfloat16().item() != own.item()


def test_the_algebra_of_exactness() -> None:
    """For v = A z + b t + c, the gradient of g . v in the weights is affine in (z, t); on a segment it interpolates."""
    z_a, z_b, t_a, t_b, w, g = sympy.symbols("z_a z_b t_a t_b w g")
    A, b, c = sympy.symbols("A b c")

    def vjp(z: sympy.Expr, t: sympy.Expr) -> sympy.Matrix:
        return sympy.Matrix([g * (A * z + b * t + c)]).jacobian([A, b, c])

    t_i = (1 - w) * t_a + w * t_b
    on_the_path = vjp((1 - w) * z_a + w * z_b, t_i)
    interpolated = (1 - w) * vjp(z_a, t_a) + w * vjp(z_b, t_b)
    assert sympy.simplify(on_the_path - interpolated) == sympy.zeros(1, 3)
    assert sympy.simplify((t_i - t_a) / (t_b - t_a) - w) == 0  # and the time weight is that w
    off_the_path = vjp((1 - w) * z_a + w * z_b + 1, t_i)
    assert sympy.simplify(off_the_path - interpolated) != sympy.zeros(1, 3)  # a bent path is not covered


def _straight(model: torch.nn.Module, steps: int, bend: float = 0.0) -> Problem:
    """A loss on velocities along a straight line in (z, t) with steps of unequal length, or a bent one."""
    s = torch.linspace(0, 1, steps, dtype=torch.float64) ** 2
    start, direction, curve = torch.randn(3, 4, 6, dtype=torch.float64)
    t = 1 - 0.8 * s
    z = start + s[:, None, None] * direction + bend * (s * (1 - s))[:, None, None] * curve

    def fn(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.stack([model(z[i], t[i].expand(4)) for i in range(steps)])

    return Problem(model, fn, (z, t), list(model.parameters()))


@pytest.mark.parametrize("lowering", ["reference", "eager"])
def test_exact_for_a_linear_velocity_on_a_straight_path_and_only_there(lowering: str) -> None:
    straight = _straight(LinearVelocity(6).double(), steps=9)
    _, exact = straight.run(straight.fn)
    for plan in ({"W": 4}, {"knots": (0, 8)}):
        _, got = straight.run(jagg_fx.transform(straight.fn, lowering=lowering, **plan))
        assert relative_error(got, exact) < 1e-12
    bent = _straight(LinearVelocity(6).double(), steps=9, bend=1.0)
    _, exact = bent.run(bent.fn)
    _, got = bent.run(jagg_fx.transform(bent.fn, knots=(0, 8), lowering=lowering))
    assert relative_error(got, exact) > 1e-3


def test_index_weights_are_not_exact_where_steps_are_unequal() -> None:
    problem = _straight(LinearVelocity(6).double(), steps=9)
    _, exact = problem.run(problem.fn)
    _, got = problem.run(jagg_fx.transform(problem.fn, knots=(0, 8), weights="index", lowering="reference"))
    assert relative_error(got, exact) > 1e-3


def test_the_error_falls_with_the_square_of_the_step() -> None:
    """Linear interpolation of a smooth Jacobian: halving the spacing of the knots quarters the relative error."""
    torch.manual_seed(3)
    model = GaussianVelocity(6).double()
    start, direction, curve = torch.randn(3, 4, 6, dtype=torch.float64)
    spacings, errors = [], []
    for steps in (9, 17, 33, 65):
        s = torch.linspace(0, 1, steps, dtype=torch.float64)
        z = start + s[:, None, None] * direction + (s**2)[:, None, None] * curve
        t = 0.9 - 0.8 * s
        # A smooth cotangent: the same loss on every step.
        weight = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

        def fn(z: torch.Tensor, t: torch.Tensor, steps: int = steps, weight: torch.Tensor = weight) -> torch.Tensor:
            return torch.stack([(model(z[i], t[i].expand(4)) * weight).sum() for i in range(steps)])

        def gradient(function: object) -> torch.Tensor:
            outputs = function(z, t)  # type: ignore[operator] # noqa: B023
            return torch.cat([g.flatten() for g in torch.autograd.grad(outputs.mean(), list(model.parameters()))])

        knots = tuple(range(0, steps, 4))
        exact, got = gradient(fn), gradient(jagg_fx.transform(fn, knots=knots, lowering="reference"))
        spacings.append(4 / (steps - 1))
        errors.append(relative_error(got, exact))
    slope = np.polyfit(np.log(spacings), np.log(errors), 1)[0]
    assert 1.8 < slope < 2.2, (slope, errors)
