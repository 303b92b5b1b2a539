"""Several calls per step, several denoisers: which calls belong together, and that each stream gets knots of its own."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jagg_fx
from jagg_fx.errors import OptionError, PlanError, SeveralDenoisersError, StepMismatchError
from jagg_fx.plan import explicit, paper
from jagg_fx.streams import Call, group
from tests.problems import BATCH, DIM, MLP, STEPS, Problem, TakesNumbers, path, relative_error, squared


def call(time: int, *operands: str, weights: str = "w", kind: str = "k") -> Call:
    return Call(weights, kind, time, operands)


class TestGrouping:
    def test_one_call_per_step_is_one_stream(self) -> None:
        assert group([call(t, f"z{t}", "prompt") for t in range(3)]) == [[0, 1, 2]]

    def test_calls_are_told_apart_by_what_they_keep_whatever_their_order(self) -> None:
        calls = [call(0, "z0", "a"), call(0, "z0", "b"), call(1, "z1", "b"), call(1, "z1", "a")]
        assert group(calls) == [[0, 3], [1, 2]]

    def test_or_else_by_their_order(self) -> None:
        assert group([call(t, f"z{t}{half}") for t in range(3) for half in "ab"]) == [[0, 2, 4], [1, 3, 5]]

    def test_a_second_call_at_some_steps_alone_is_known_by_its_prompt(self) -> None:
        calls = [call(0, "z0", "a"), call(1, "z1", "a"), call(1, "z1", "b"), call(2, "z2", "a"), call(2, "z2", "b")]
        assert group(calls) == [[0, 1, 3], [2, 4]]

    def test_but_not_without_one(self) -> None:
        with pytest.raises(StepMismatchError, match="not every step has as many calls"):
            group([call(0, "z0"), call(1, "z1"), call(1, "y1")])

    def test_halves_whose_times_are_not_known_to_be_equal_are_told_apart_by_their_prompts(self) -> None:
        calls = [call(2 * t + half, f"z{t}", "ab"[half]) for t in range(3) for half in (0, 1)]
        assert group(calls) == [[0, 2, 4], [1, 3, 5]]

    def test_other_weights_are_another_stream(self) -> None:
        assert group([call(t, f"z{t}", weights="low" if t > 1 else "high") for t in range(4)]) == [[0, 1], [2, 3]]

    def test_states_that_two_calls_share_with_a_neighbouring_step_do_not_tear_a_stream_apart(self) -> None:
        calls = [call(t, f"z{t + half}") for t in range(4) for half in (0, 1)]
        assert group(calls) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def guided(model: nn.Module, z: Tensor, t: Any, negative: Tensor, positive: Tensor, order: int) -> Tensor:
    first = model(z, t, positive if order else negative)
    second = model(z, t, negative if order else positive)
    c, u = (first, second) if order else (second, first)
    v: Tensor = u + 3 * (c - u)
    return v


def two_calls_per_step(dtype: torch.dtype) -> Problem:
    """The halves of guidance, not always in the same order."""
    model = MLP().to(dtype)
    negative, positive = torch.rand(2, BATCH, 2 * DIM, dtype=dtype)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        steps = [guided(model, z[i], t[i].expand(BATCH), negative, positive, i % 2) for i in range(STEPS)]
        return torch.stack([squared(z, t, i, v) for i, v in enumerate(steps)], 1)

    return Problem(model, fn, path(dtype), list(model.parameters()))


def two_calls_at_python_numbers(dtype: torch.dtype) -> Problem:
    model = TakesNumbers().to(dtype)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        times = [1 - 0.1 * i for i in range(STEPS)]
        pairs = [(model(z[i], times[i]), model(2 * z[i], times[i])) for i in range(STEPS)]
        return torch.stack([squared(z, t, i, u + 3 * (c - u)) for i, (u, c) in enumerate(pairs)], 1)

    return Problem(model, fn, path(dtype), list(model.parameters()))


def two_experts(dtype: torch.dtype) -> tuple[Problem, dict[str, Any]]:
    high, low = MLP().to(dtype), MLP().to(dtype)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        models = [high] * 4 + [low] * (STEPS - 4)
        return torch.stack([squared(z, t, i, models[i](z[i], t[i].expand(BATCH))) for i in range(STEPS)], 1)

    return Problem(high, fn, path(dtype), [*high.parameters(), *low.parameters()]), {"denoiser": [high, low]}


@pytest.mark.parametrize("make", [two_calls_per_step, two_calls_at_python_numbers])
@pytest.mark.parametrize(
    "options", [{"cos_threshold": None}, {"cos_threshold": 0.9995}, {"jagg_frac": 0.0, "debias": 1.0}]
)
def test_two_calls_per_step_are_two_streams(make: Any, options: dict[str, Any]) -> None:
    problem = make(torch.float64)
    transformed = jagg_fx.transform(problem.fn, lowering="eager", **options)
    reference = jagg_fx.transform(problem.fn, lowering="reference", **options)
    values, got = problem.run(transformed)
    plain, want = problem.run(reference)
    assert relative_error(got, want) < 1e-10
    assert torch.equal(values[0], plain[0])
    assert transformed.plans == reference.plans == (paper(4).place(STEPS, transformed.plans[0].rule),) * 2
    for statistics in (transformed.stats, reference.stats):
        assert statistics is not None
        assert {segment.stream for segment in statistics.last.scores} == {0, 1}
        assert len(statistics.last.cotangent_norms) == 2 * STEPS
    assert transformed.stats is not None
    assert reference.stats is not None
    assert transformed.stats.last.cotangent_norms == pytest.approx(reference.stats.last.cotangent_norms, rel=1e-5)
    assert transformed.stats.last.exact_segments == reference.stats.last.exact_segments
    with pytest.raises(PlanError, match=r"2 streams of calls. Write \.plans"):
        _ = transformed.plan


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("last", [4, STEPS - 1])
def test_steps_at_one_time_are_not_calls_of_one_step(calls: int, last: int) -> None:
    """A schedule that repeats a time, or holds one alone (as integers and half precision can)."""
    model = MLP().double()
    z, t = path(torch.float64)
    t[3 if last == 4 else 0 : last + 1] = t[3]
    prompts = torch.rand(2, BATCH, 2 * DIM, dtype=torch.float64)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        velocities = [[model(z[i], t[i].expand(BATCH), prompts[n]) for n in range(calls)] for i in range(STEPS)]
        return torch.stack([squared(z, t, i, sum(v, torch.zeros(()))) for i, v in enumerate(velocities)], 1)

    problem = Problem(model, fn, (z, t), list(model.parameters()))
    whole = jagg_fx.transform(fn, lowering="eager", capture="whole")
    _, want = problem.run(whole)
    for options in ({"lowering": "reference"}, {"lowering": "eager", "capture": "denoiser"}):
        other = jagg_fx.transform(fn, **options)
        assert relative_error(problem.run(other)[1], want) < 1e-12
        assert other.plans == whole.plans == (paper(4).place(STEPS, whole.plans[0].rule),) * calls


@pytest.mark.parametrize("options", [{"lowering": "reference"}, {"lowering": "eager", "capture": "denoiser"}], ids=str)
def test_but_nothing_tells_that_of_times_that_every_step_computes(options: dict[str, Any]) -> None:
    model = MLP()
    z, t = path(torch.float32)
    t[4] = t[3]

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], 1000 * t[i])) for i in range(STEPS)], 1)

    with pytest.raises(StepMismatchError, match=r"calls 3 and 4 .* take times from one tensor"):
        jagg_fx.transform(fn, **options)(z, t)


def test_two_experts_share_the_steps() -> None:
    problem, options = two_experts(torch.float64)
    transformed = jagg_fx.transform(problem.fn, lowering="eager", cos_threshold=None, **options)
    _, got = problem.run(transformed)
    _, want = problem.run(jagg_fx.transform(problem.fn, lowering="reference", cos_threshold=None, **options))
    assert relative_error(got, want) < 1e-10
    assert [plan.knots for plan in transformed.plans] == [(0, 3), (0, 3, 4)]
    report = str(transformed.report)
    assert "denoiser 0, MLP: steps 4; plan paper(W=4); groups 0-3; knots 0, 3" in report
    assert "backward passes    9 -> 5" in report
    assert transformed.report.exact() == ["step 4 of stream 1: alone in its group"]
    with pytest.raises(SeveralDenoisersError, match=r"denoiser=\[high, low\]"):
        jagg_fx.transform(problem.fn)(*problem.args)


def test_a_frozen_teacher_is_a_denoiser_without_gradients() -> None:
    student = MLP()
    teacher = copy.deepcopy(student).requires_grad_(False)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        pairs = [(teacher(z[i], t[i].expand(BATCH)), student(z[i], t[i].expand(BATCH))) for i in range(STEPS)]
        return torch.stack([(v - 0.9 * w).square().mean(-1) for w, v in pairs], 1)

    problem = Problem(student, fn, path(torch.float32), list(student.parameters()))
    transformed = jagg_fx.transform(fn, lowering="eager", denoiser=[student, teacher], cos_threshold=None)
    _, got = problem.run(transformed)
    _, want = problem.run(jagg_fx.transform(fn, lowering="reference", denoiser=[student, teacher], cos_threshold=None))
    assert relative_error(got, want) < 1e-5
    assert len(transformed.plans) == 1
    assert transformed.report.exact()[-1] == f"{STEPS} calls of the denoiser: no gradient reaches them"
    placed = jagg_fx.transform(fn, lowering="eager", denoiser=[teacher, student], knots=4)
    for _ in range(2):
        problem.run(placed)
    assert placed.report.graphs == 1
    assert [plan.origin for plan in placed.plans] == ["budget(K=4), measured"]


def test_every_stream_can_have_a_plan_of_its_own_also_a_measured_and_a_saved_one() -> None:
    problem = two_calls_per_step(torch.float64)
    own = jagg_fx.transform(problem.fn, lowering="eager", plan=[explicit((0, 4, 8)), paper(2)], cos_threshold=None)
    problem.run(own)
    assert [plan.knots for plan in own.plans] == [(0, 4, 8), tuple(range(STEPS))]
    placed = jagg_fx.transform(problem.fn, lowering="eager", knots=4)
    problem.run(placed)
    assert [len(plan.knots) for plan in placed.plans] == [4, 4]
    _, got = problem.run(placed)
    _, again = problem.run(jagg_fx.transform(problem.fn, lowering="eager", plan=placed.plans))
    assert torch.equal(got, again)
    with pytest.raises(PlanError, match="has 2 streams of calls"):
        problem.run(jagg_fx.transform(problem.fn, lowering="reference", plan=[paper(4)]))
    with pytest.raises(OptionError, match="placed for all streams alike"):
        jagg_fx.transform(problem.fn, plan=[jagg_fx.plan.budget(3)])


def test_placed_knots_fit_streams_that_are_short_or_get_no_gradient() -> None:
    high, low = MLP().double(), MLP().double()

    def shared_steps(z: Tensor, t: Tensor) -> Tensor:
        models = [high] * (STEPS - 2) + [low] * 2
        return torch.stack([squared(z, t, i, models[i](z[i], t[i].expand(BATCH))) for i in range(STEPS)], 1)

    def without_guidance(z: Tensor, t: Tensor) -> Tensor:
        pairs = [(high(z[i], t[i].expand(BATCH)), low(z[i], t[i].expand(BATCH))) for i in range(STEPS)]
        return torch.stack([squared(z, t, i, u + 1.0 * (c - u)) + 0 * u.mean(-1) for i, (c, u) in enumerate(pairs)], 1)

    for fn, knots in ((shared_steps, [4, 2]), (without_guidance, [4, 4])):
        problem = Problem(high, fn, path(torch.float64), [*high.parameters(), *low.parameters()])
        placed = jagg_fx.transform(fn, knots=4, lowering="eager", denoiser=[high, low])
        problem.run(placed)
        assert [len(plan.knots) for plan in placed.plans] == knots
        problem.run(placed)
        assert placed.report.graphs == 1, "compiled at the second call"


@pytest.mark.parametrize("denoiser", [[], "twice", "nested"])
def test_a_list_of_denoisers_that_makes_no_sense_is_refused(denoiser: Any) -> None:
    model = nn.Sequential(MLP())
    given = {"twice": [model, model], "nested": [model, model[0]]}.get(str(denoiser), denoiser)
    with pytest.raises(OptionError, match="none twice, and none that is part of another"):
        jagg_fx.transform(lambda z: z, denoiser=given)
