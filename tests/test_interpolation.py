"""The weights and sums, and what they are exact for."""

import itertools
from typing import Any

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

finite = st.floats(-1e3, 1e3, allow_nan=False, width=32)


def numpy_weights(t: float, knots: list[float]) -> np.ndarray[Any, Any]:
    """Hat functions over the distinct knot times, by numpy; knots at one time share."""
    distinct = sorted(set(knots))
    hats = [np.interp(t, distinct, np.eye(len(distinct))[k]) for k in range(len(distinct))]
    return np.array([hats[distinct.index(k)] / knots.count(k) for k in knots])


@hypothesis.given(
    st.lists(st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=6),
    st.lists(st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=4),
    st.booleans(),
)
def test_weights_are_numpys_interpolation_for_every_sample(
    knots: list[list[float]], steps: list[list[float]], on_knots: bool
) -> None:
    steps = [*steps, knots[-1]] if on_knots else steps
    weights = interpolation.knot_weights(
        torch.tensor(steps, dtype=torch.float64), torch.tensor(knots, dtype=torch.float64)
    )
    assert weights.shape == (len(steps), len(knots), 3)
    for m, step in enumerate(steps):
        for b, t in enumerate(step):
            want = numpy_weights(t, [k[b] for k in knots])
            np.testing.assert_allclose(weights[m, :, b].numpy(), want, atol=1e-9)


@pytest.mark.parametrize("order", ["decreasing", "increasing", "shuffled"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_weights_are_float32_or_better_in_any_order(dtype: torch.dtype, order: str) -> None:
    knots = {"decreasing": [100, 60, 20], "increasing": [20, 60, 100], "shuffled": [60, 100, 20]}[order]
    weights = interpolation.knot_weights(torch.tensor([90, 30]).to(dtype), torch.tensor(knots).to(dtype))
    assert weights.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    by_time = {k: weights[:, n].tolist() for n, k in enumerate(knots)}
    assert by_time == {100: [0.75, 0.0], 60: [0.25, 0.25], 20: [0.0, 0.75]}


def test_a_step_outside_the_knots_takes_the_nearest_one() -> None:
    weights = interpolation.knot_weights(torch.tensor([0.9, 0.1]), torch.tensor([0.8, 0.4]))
    assert weights.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("degree", [1, 2])
def test_equal_times_share_and_give_finite_gradients(degree: int) -> None:
    t = torch.tensor([0.5, 0.7, 0.7]).requires_grad_()
    knots = torch.tensor([0.7, 0.3, 0.7]).requires_grad_()
    weights = interpolation.knot_weights(t, knots, degree)
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.5, 0.25], [0.5, 0, 0.5], [0.5, 0, 0.5]]))
    weights.square().sum().backward()
    assert t.grad is not None
    assert knots.grad is not None
    assert torch.isfinite(t.grad).all()
    assert torch.isfinite(knots.grad).all()
    alone = interpolation.knot_weights(torch.tensor([0.5, 0.9]), torch.tensor([0.7]), degree)
    assert alone.tolist() == [[1], [1]]


@hypothesis.given(st.lists(finite, min_size=3, max_size=6, unique=True), finite)
def test_quadratic_weights_reproduce_parabolas_on_the_three_nearest_knots(knots: list[float], t: float) -> None:
    hypothesis.assume(min(abs(a - b) for a, b in itertools.combinations(knots, 2)) > 1)
    t = min(max(t, min(knots)), max(knots))
    (weights,) = interpolation.knot_weights(
        torch.tensor([t], dtype=torch.float64), torch.tensor(knots, dtype=torch.float64), degree=2
    )
    assert float(weights.sum()) == pytest.approx(1)
    assert int((weights != 0).sum()) <= 3
    scale = max(map(abs, knots)) ** 2
    for power in (1, 2):
        values = torch.tensor(knots, dtype=torch.float64) ** power
        assert float(weights @ values) == pytest.approx(t**power, abs=1e-9 * scale)


def test_the_quadratic_weights_are_lagranges() -> None:
    """Derive the three weights from what they must reproduce (1, t, t^2) and compare with the code's own form."""
    t, low, high, third = sympy.symbols("t l u x")
    w = sympy.symbols("w_l w_u w_x")
    nodes = (low, high, third)
    (solution,) = sympy.linsolve([sum(a * n**p for a, n in zip(w, nodes, strict=True)) - t**p for p in range(3)], *w)
    fraction = (t - low) / (high - low)
    at_third = (t - low) * (t - high) / ((third - low) * (third - high))
    ours = (
        1 - fraction - at_third * (high - third) / (high - low),
        fraction - at_third * (third - low) / (high - low),
        at_third,
    )
    for want, own in zip(solution, ours, strict=True):
        assert sympy.simplify(want - own) == 0
    numbers = {t: 0.6, low: 0.5, high: 0.8, third: 0.2}
    weights = interpolation.knot_weights(torch.tensor([0.6]), torch.tensor([0.5, 0.8, 0.2]), degree=2)
    np.testing.assert_allclose(weights[0].numpy(), [float(x.subs(numbers)) for x in ours], rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1), (3, 1, 1, 1)])
def test_one_weight_per_sample_broadcasts(shape: tuple[int, ...]) -> None:
    weights = torch.rand(2, *shape)
    values = torch.rand(2, 3, 2, 4)
    product = interpolation.per_sample(weights, values.shape[1:]) * values
    assert product.shape == values.shape
    want = weights.reshape(2, -1).expand(2, 3)
    torch.testing.assert_close(product[:, :, 0, 0], want * values[:, :, 0, 0])


@pytest.mark.parametrize("shape", [(2,), (3, 2), (4, 1)])
def test_other_shapes_of_time_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TimeArgumentError, match="one number per sample"):
        interpolation.per_sample(torch.rand(5, *shape), (3, 2, 4))


def test_a_composite_is_summed_in_float32_and_rounded_once() -> None:
    own = torch.tensor([256.0], dtype=torch.bfloat16)
    small = torch.tensor([[0.75]] * 4, dtype=torch.bfloat16)  # lost one by one beside 256, whose neighbours are 2 apart
    composite = interpolation.composite(own, small, torch.ones(4))
    assert composite.dtype == torch.bfloat16
    assert composite.item() == torch.tensor(259.0).bfloat16().item() != own.item()


@pytest.mark.parametrize("slots", [1, 2])
def test_agreement_is_the_cosine_per_sample_averaged(slots: int) -> None:
    v, at_knots = torch.randn(slots, 4, 3, 2, 5), torch.randn(slots, 2, 3, 2, 5)
    weights = interpolation.knot_weights(torch.rand(4, 3), torch.tensor([[1.0] * 3, [0.0] * 3]))
    got = interpolation.agreement(list(v), list(at_knots), weights)
    guess = torch.einsum("mkb,skbij->smbij", weights, at_knots)
    flat = [x.permute(1, 2, 0, 3, 4).flatten(2) for x in (v, guess)]
    torch.testing.assert_close(got, torch.cosine_similarity(*flat, dim=-1).mean(1))
    v[0, 1, 0, 0, 0] = torch.nan
    v[:, 2] = 0
    scores = interpolation.agreement(list(v), list(at_knots), weights)
    assert scores[1].isnan()
    assert scores[2] == 0


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
        _, got = straight.run(jagg_fx.transform(straight.fn, lowering=lowering, cos_threshold=None, **plan))
        assert relative_error(got, exact) < 1e-12
    bent = _straight(LinearVelocity(6).double(), steps=9, bend=1.0)
    _, exact = bent.run(bent.fn)
    _, got = bent.run(jagg_fx.transform(bent.fn, knots=(0, 8), cos_threshold=None, lowering=lowering))
    assert relative_error(got, exact) > 1e-3


def test_index_weights_are_not_exact_where_steps_are_unequal() -> None:
    problem = _straight(LinearVelocity(6).double(), steps=9)
    _, exact = problem.run(problem.fn)
    _, got = problem.run(
        jagg_fx.transform(problem.fn, knots=(0, 8), weights="index", cos_threshold=None, lowering="reference")
    )
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
        exact, got = (
            gradient(fn),
            gradient(jagg_fx.transform(fn, knots=knots, cos_threshold=None, lowering="reference")),
        )
        spacings.append(4 / (steps - 1))
        errors.append(relative_error(got, exact))
    slope = np.polyfit(np.log(spacings), np.log(errors), 1)[0]
    assert 1.8 < slope < 2.2, (slope, errors)
