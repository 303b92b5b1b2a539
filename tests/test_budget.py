"""Placement of knots: the dynamic programme, calibration, prediction, and several processes."""

import itertools
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

import jagg_fx
from jagg_fx import interpolation
from jagg_fx.budget import DRIFT, Measurements, Schedule, best_knots
from jagg_fx.errors import JaggError, OptionError, PlanError
from jagg_fx.models.samplers import FlowSDE, gains, schedule
from jagg_fx.plan import Plan, Rule, budget, even
from tests.problems import BATCH, MLP, PROBLEMS, STEPS, Problem, path, per_sample_times, relative_error, squared


def cost(knots: tuple[int, ...], errors: Callable[[int, int], list[float]]) -> float:
    return sum(e * e for a, b in itertools.pairwise(knots) for e in errors(a, b))


def test_the_dynamic_programme_finds_what_brute_force_finds() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(9, 9, 9, generator=generator)

    def errors(a: int, b: int) -> list[float]:
        return [float(table[a, i, b]) for i in range(a + 1, b)]

    found = list(best_knots(9, errors))
    assert [len(knots) for knots in found] == list(range(2, 10))
    for knots in found:
        every = [(0, *inner, 8) for inner in itertools.combinations(range(1, 8), len(knots) - 2)]
        assert cost(knots, errors) == pytest.approx(min(cost(k, errors) for k in every))


def test_the_schedule_puts_knots_where_gains_are() -> None:
    times, growing = torch.linspace(1, 0.1, 10), torch.arange(1.0, 11.0) ** 2
    late = budget(4, Schedule.create(times, growing)).place(10, Rule())
    early = budget(4, Schedule.create(times, growing.flip(0))).place(10, Rule())
    assert late.knots == tuple(9 - k for k in reversed(early.knots))
    assert late.knots[1] > 4
    assert late.predicted_error is None
    assert late.step_errors is not None


def test_the_samplers_own_gains() -> None:
    """|c / S| of Flow-SDE by its definition: the derivative of the step's mean by v, over its standard deviation."""
    sigmas = schedule(10)
    x, v = torch.randn(2, 3, 4, dtype=torch.float64)
    for i, gain in enumerate(gains(FlowSDE(), sigmas[:-1].double())):
        step = [sigmas[k].double() for k in (i, i + 1, 1)]
        mean, std = FlowSDE().step(v, x, *step)
        moved, _ = FlowSDE().step(v + 1e-3, x, *step)
        assert float(gain) == pytest.approx(float(((moved - mean) / 1e-3 / std).abs().mean()), rel=1e-6)


def test_a_schedule_has_one_finite_number_per_step() -> None:
    with pytest.raises(PlanError, match="one finite"):
        Schedule.create([1.0, 0.5], [1.0])
    with pytest.raises(PlanError, match="one finite"):
        Schedule.create([1.0, 0.5], [1.0, math.inf])
    problem = per_sample_times(torch.float32)
    plan = budget(2, Schedule.create([1.0, 0.5], [1.0, 1.0]))
    with pytest.raises(PlanError, match=r"2 steps.*the function has 9 steps"):
        jagg_fx.transform(problem.fn, plan=plan, lowering="eager")(*problem.args)


@pytest.mark.parametrize("lowering", ["eager", "reference"])
@pytest.mark.parametrize("name", ["per_sample_times", "two_outputs", "shuffled_times_per_sample", "digits_dit"])
def test_the_first_backward_measures_and_the_second_call_is_placed(name: str, lowering: str) -> None:
    problem = PROBLEMS[name](torch.float64)
    transformed = jagg_fx.transform(problem.fn, knots=4, lowering=lowering, cos_threshold=None)
    assert transformed.plan is None
    _, first = problem.run(transformed)
    _, want = problem.run(jagg_fx.transform(problem.fn, plan=even(4), lowering="reference", cos_threshold=None))
    assert relative_error(first, want) < 1e-12, "the measuring call runs with even knots"
    plan = transformed.plan
    assert plan is not None
    assert len(plan.knots) == 4
    assert plan.predicted_error is not None
    assert plan.origin == "budget(K=4), measured"
    _, second = problem.run(transformed)
    _, want = problem.run(jagg_fx.transform(problem.fn, knots=plan.knots, lowering="reference", cos_threshold=None))
    assert relative_error(second, want) < 1e-10
    saved = Plan.from_json(plan.to_json())
    again = jagg_fx.transform(problem.fn, plan=saved, lowering="eager", cos_threshold=None)
    assert relative_error(problem.run(again)[1], second) < 1e-10
    assert again.plan == plan


def test_the_error_of_a_step() -> None:
    t, v, norms = torch.tensor([0.8, 0.6, 0.2]), torch.randn(3, 2, 5), torch.rand(3, 2)
    (error,) = Measurements(t, (v,), norms).errors(0, 2)
    residual = (v[1] - (2 * v[0] + v[2]) / 3).norm(dim=1) / v[1].norm(dim=1)
    want = norms[1] * (residual**2 + DRIFT**2 * 0.2 * 0.4 / 0.64).sqrt()
    assert error == pytest.approx(float(want.norm()))


def test_the_measured_numbers_are_those_of_plain_autograd() -> None:
    problem = per_sample_times(torch.float64)
    z, t = problem.args
    v = torch.stack([problem.model(z[i], t[i].expand(BATCH)) for i in range(STEPS)]).detach().requires_grad_()
    torch.stack([squared(z, t, i, v[i]) for i in range(STEPS)], 1).sum().backward()
    assert v.grad is not None
    knots, middle = [0, 4, 8], [1, 2, 3, 5, 6, 7]  # of the measuring call
    weights = interpolation.knot_weights(t[middle], t[knots])
    sizes = []
    for column, k in enumerate(knots):
        composite = interpolation.composite(v.grad[k], v.grad[middle], weights[:, column])
        output = problem.model(z[k], t[k].expand(BATCH))
        vjp = torch.autograd.grad(output, list(problem.model.parameters()), composite)
        sizes.append(torch.cat([g.flatten() for g in vjp]).norm() / composite.norm())
    every = interpolation.knot_weights(t[:STEPS], t[knots]) @ torch.stack(sizes)

    transformed = jagg_fx.transform(problem.fn, knots=3, lowering="eager", cos_threshold=None)
    transformed(z, t).sum().backward()
    assert transformed._measuring is not None
    (stream,) = transformed._measuring
    measured = stream.measurements()
    torch.testing.assert_close(measured.norms, v.grad.norm(dim=-1) * every[:, None])
    torch.testing.assert_close(measured.values[0], v.detach())
    placed = next(k for k in best_knots(STEPS, measured.errors) if len(k) == 3)
    assert transformed.plan is not None
    assert transformed.plan.knots == placed


def test_a_call_without_backward_measures_nothing_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = per_sample_times(torch.float64)
    transformed = jagg_fx.transform(problem.fn, knots=3, lowering="eager")
    with torch.no_grad():
        assert torch.equal(transformed(*problem.args), problem.fn(*problem.args))
    transformed(*problem.args)
    warnings: list[str] = []
    monkeypatch.setattr(
        sys.modules["jagg_fx.calibration"].log, "warning", lambda message, *args: warnings.append(message % args)
    )
    assert transformed.plan is None
    assert not warnings
    problem.run(transformed)
    (warning,) = warnings
    assert "could not place its knots" in warning
    assert transformed.plan is not None
    problem.run(transformed)
    assert transformed.report.graphs == 1, "the measuring call compiles nothing"


def test_old_log_probs_between_forward_and_backward_do_no_harm() -> None:
    problem = per_sample_times(torch.float64)
    transformed = jagg_fx.transform(problem.fn, knots=3, lowering="eager")
    log_probs = transformed(*problem.args)
    with torch.no_grad():
        transformed(*problem.args)
    assert transformed.plan is None
    log_probs.sum().backward()
    assert transformed.plan is not None


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_a_backward_that_tells_nothing_places_no_knots(scale: float) -> None:
    problem = per_sample_times(torch.float64)
    transformed = jagg_fx.transform(problem.fn, knots=3, lowering="eager")
    (transformed(*problem.args) * scale).sum().backward()
    assert transformed.plan is None
    problem.run(transformed)
    assert transformed.plan is not None


def test_a_loss_over_some_steps_or_outputs_still_places_knots() -> None:
    problem = PROBLEMS["two_outputs"](torch.float64)
    for loss in (lambda out: out[0].sum(), lambda out: out[1].sum(), lambda out: out[0][:, 2:].sum()):
        transformed = jagg_fx.transform(problem.fn, knots=3, lowering="eager")
        loss(transformed(*problem.args)).backward()
        assert transformed.plan is not None


def test_quadratic_weights_have_no_prediction() -> None:
    problem = per_sample_times(torch.float64)
    transformed = jagg_fx.transform(problem.fn, knots=3, degree=2, lowering="reference")
    problem.run(transformed)
    assert transformed.plan is not None
    assert transformed.plan.predicted_error is None
    with pytest.raises(OptionError, match="degree=1 only"):
        jagg_fx.transform(problem.fn, max_rel_error=0.2, degree=2)


def test_recalibrate_measures_again() -> None:
    model = MLP().double()
    scale = torch.ones(STEPS, dtype=torch.float64)
    z, t = path(torch.float64)

    def fn(z: Tensor, t: Tensor, scale: Tensor) -> Tensor:
        return torch.stack([scale[i] * squared(z, t, i, model(z[i], t[i].expand(BATCH))) for i in range(STEPS)], 1)

    transformed = jagg_fx.transform(fn, knots=3, lowering="eager", cos_threshold=None)
    plans = []
    for weight in (torch.logspace(0, 6, STEPS), torch.logspace(6, 0, STEPS)):
        problem = Problem(model, fn, (z, t, scale * weight), list(model.parameters()))
        problem.run(transformed)
        plans.append(transformed.plan)
        _, got = problem.run(transformed)
        assert transformed.plan is not None
        knots = transformed.plan.knots
        _, want = problem.run(jagg_fx.transform(fn, knots=knots, lowering="reference", cos_threshold=None))
        assert relative_error(got, want) < 1e-10
        transformed.recalibrate()
        assert transformed.plan is None
    assert plans[0] != plans[1]
    with pytest.raises(OptionError, match="knots=K"):
        jagg_fx.transform(fn, W=4).recalibrate()


def test_another_number_of_steps_is_measured_by_itself() -> None:
    model = MLP().double()
    z, t = path(torch.float64)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH))) for i in range(len(t) - 1)], 1)

    transformed = jagg_fx.transform(fn, knots=3, lowering="eager", cos_threshold=None)
    for steps in (9, 9, 6, 6, 9):
        problem = Problem(model, fn, (z[: steps + 1], t[: steps + 1]), list(model.parameters()))
        _, got = problem.run(transformed)
        assert transformed.plan is not None
    plan = next(p for (p,) in transformed._config.placement.plans if p.num_steps == 9)
    _, want = problem.run(jagg_fx.transform(fn, knots=plan.knots, lowering="reference", cos_threshold=None))
    assert relative_error(got, want) < 1e-10


def test_the_fewest_knots_within_a_predicted_error() -> None:
    problem = PROBLEMS["gaussian"](torch.float64)
    counts = []
    for limit in (0.05, 0.3, 1.0, 100.0):
        transformed = jagg_fx.transform(problem.fn, max_rel_error=limit, lowering="reference")
        problem.run(transformed)
        plan = transformed.plan
        assert plan is not None
        assert plan.predicted_error is not None
        assert plan.predicted_error <= limit
        counts.append(len(plan.knots))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 2


def test_a_backend_cannot_measure() -> None:
    problem = per_sample_times(torch.float32)
    compiled = torch.compile(problem.fn, backend="jagg", options={"knots": 4, "lowering": "eager"}, fullgraph=True)
    with pytest.raises(Exception, match="was not measured") as caught:
        compiled(*problem.args)
    assert isinstance(caught.value.inner_exception, JaggError)


def _rank(rank: int, port: int, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(rank)
    problem = per_sample_times(torch.float64)
    transformed = jagg_fx.transform(problem.fn, knots=3, lowering="reference")
    problem.run(transformed)
    assert transformed.plan is None
    problem.run(transformed)
    assert transformed.plan is not None
    results[rank] = transformed.plan.to_json()
    torch.distributed.destroy_process_group()


def test_all_ranks_get_rank_zeros_plan() -> None:
    torch.manual_seed(0)
    alone = per_sample_times(torch.float64)
    transformed = jagg_fx.transform(alone.fn, knots=3, lowering="reference")
    alone.run(transformed)
    assert transformed.plan is not None
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank, args=(_free_port(), results), nprocs=2)
        assert results[0] == results[1] == transformed.plan.to_json()


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])
