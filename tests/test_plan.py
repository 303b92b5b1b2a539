import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import jagg_fx
from jagg_fx.config import Config
from jagg_fx.errors import OptionError, PlanError
from jagg_fx.guard import DEFAULT_COS_THRESHOLD
from jagg_fx.plan import Placement, Plan, Rule, Schedule, Segment, Weights, budget, even, explicit, paper
from tests.problems import per_sample_times


def test_the_papers_grouping_of_nine_steps() -> None:
    plan = paper(4).place(9, Rule())
    assert plan.groups == ((0, 3), (4, 7), (8, 8))
    assert plan.knots == (0, 3, 4, 7, 8)
    assert plan.segments == (Segment(0, 3), Segment(4, 7))
    assert plan.intermediate == (1, 2, 5, 6)


@hypothesis.given(st.integers(1, 60), st.integers(2, 70))
def test_every_step_is_a_knot_or_lies_in_one_segment(num_steps: int, W: int) -> None:
    plan = paper(W).place(num_steps, Rule())
    inside = [i for segment in plan.segments for i in segment.intermediate]
    assert sorted([*plan.knots, *inside]) == list(range(num_steps))
    assert [step for a, b in plan.groups for step in range(a, b + 1)] == list(range(num_steps))
    assert all(b - a < W for a, b in plan.groups)


def test_explicit_knots() -> None:
    plan = explicit((0, 5, 8)).place(9, Rule())
    assert plan.segments == (Segment(0, 5), Segment(5, 8))
    assert plan.groups == ((0, 5), (5, 8))
    assert explicit((0,)).place(1, Rule()).segments == ()


@pytest.mark.parametrize("W", [1, 0, -3, 2.0, "4", True, None])
def test_a_group_has_at_least_two_steps(W: object) -> None:
    with pytest.raises(PlanError, match=r"W=.*at least 2"):
        jagg_fx.transform(lambda: None, W=W)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("knots", "message"),
    [
        ((), "sequence of step indices"),
        ("03", "sequence of step indices"),
        (4.0, "sequence of step indices"),
        (True, "sequence of step indices"),
        (1, "at least 2"),
        (-4, "at least 2"),
        ((0, 1.5), "integer"),
        ((0, -1), "negative"),
        ((0, 3, 3), "twice"),
    ],
)
def test_knots_that_can_never_be(knots: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        jagg_fx.transform(lambda: None, knots=knots)  # type: ignore[arg-type]


@pytest.mark.parametrize("lowering", ["eager", "reference"])
@pytest.mark.parametrize(
    ("knots", "message"),
    [
        ((0, 9), r"has 9 steps.*0\.\.8; 9 does not"),
        ((1, 8), r"write|Write knots=\(0, 1, 8\)"),
        ((0, 4), r"Write knots=\(0, 4, 8\)"),
    ],
)
def test_knots_that_do_not_fit_the_function(knots: tuple[int, ...], message: str, lowering: str) -> None:
    problem = per_sample_times(torch.float32)
    with pytest.raises(PlanError, match=message):
        jagg_fx.transform(problem.fn, knots=knots, lowering=lowering)(*problem.args)


def test_the_order_of_knots_does_not_matter() -> None:
    assert Config.create(knots=[8, 0, 3]) == Config.create(knots=(0, 3, 8))


def test_unknown_choices_are_named() -> None:
    with pytest.raises(OptionError, match=r"weights='linear'.*'time', 'index'"):
        jagg_fx.transform(lambda: None, weights="linear")
    with pytest.raises(OptionError, match=r"lowering='cuda'.*'inductor', 'eager', 'reference'"):
        jagg_fx.transform(lambda: None, lowering="cuda")
    with pytest.raises(OptionError, match=r"'w'.*unknown option.*'W'"):
        Config.from_options({"w": 4})
    with pytest.raises(OptionError, match="first argument is the function"):
        jagg_fx.transform(4)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"nn\.Module that is called at every step"):
        jagg_fx.transform(lambda: None, denoiser="unet")  # type: ignore[arg-type]


@hypothesis.given(st.integers(2, 40), st.data())
def test_even_knots(num_steps: int, data: st.DataObject) -> None:
    K = data.draw(st.integers(2, num_steps))
    plan = even(K).place(num_steps, Rule())
    assert len(plan.knots) == K
    assert (plan.knots[0], plan.knots[-1]) == (0, num_steps - 1)
    gaps = [b - a for a, b in itertools.pairwise(plan.knots)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("placement", [even(10), budget(10), budget(10, Schedule.create(range(9), [1] * 9))])
def test_more_knots_than_steps(placement: Placement) -> None:
    problem = per_sample_times(torch.float32)
    with pytest.raises(PlanError, match=r"knots=10\): the function has 9 steps.*at most knots=9"):
        jagg_fx.transform(problem.fn, plan=placement, lowering="eager")(*problem.args)


@pytest.mark.parametrize("make", [even, budget])
@pytest.mark.parametrize("K", [1, 0, -2, 2.5, "4", True])
def test_a_number_of_knots_is_at_least_two(make: Callable[[Any], Placement], K: object) -> None:
    with pytest.raises(PlanError, match="at least 2"):
        make(K)


def test_a_plan_survives_json() -> None:
    schedule = Schedule.create([0.9, 0.7, 0.4, 0.2, 0.1], [1, 2, 3, 4, 5])
    for placement in (paper(4), even(3), explicit((0, 2, 4)), budget(3, schedule)):
        plan = placement.place(5, Rule(Weights.INDEX, 2))
        again = Plan.from_json(plan.to_json())
        assert again == plan
        assert again.segments == plan.segments
        assert again.place(5, Rule()) is again
    assert paper(4).place(5, Rule()) != even(3).place(5, Rule())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a saved plan"),
        ("[]", "not a saved plan"),
        ("{}", "not a saved plan.*jagg_fx_plan"),
        ('{"jagg_fx_plan": 0}', "another version"),
        (paper(4).place(5, Rule()).to_json().replace('"degree": 1', '"degree": 3'), "degree 3"),
        (
            paper(4).place(5, Rule()).to_json().replace('"step_errors": null', '"step_errors": [1]'),
            "1 step_errors for 5",
        ),
        (paper(4).place(5, Rule()).to_json().replace("[0, 3, 4]", "[0, 3]"), r"Write knots=\(0, 3, 4\)"),
        (paper(4).place(5, Rule()).to_json().replace("[0, 3, 4]", "[0, 3, 9]"), "has 5 steps"),
    ],
)
def test_what_is_not_a_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


def test_a_plan_for_another_number_of_steps() -> None:
    problem = per_sample_times(torch.float32)
    plan = paper(4).place(10, Rule())
    for lowering in ("eager", "reference"):
        with pytest.raises(PlanError, match=r"paper\(W=4\) of 10 steps.*the function has 9 steps"):
            jagg_fx.transform(problem.fn, plan=plan, lowering=lowering)(*problem.args)


def test_one_way_to_choose_knots_at_a_time() -> None:
    for options in ({"knots": 4, "plan": paper(4)}, {"knots": (0, 8), "max_rel_error": 0.1}, {"W": 3, "knots": 4}):
        with pytest.raises(OptionError, match="Give one of them"):
            jagg_fx.transform(lambda: None, **options)
    with pytest.raises(OptionError, match="a plan is made by"):
        jagg_fx.transform(lambda: None, plan="paper")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="made for weights='time', degree=1"):
        jagg_fx.transform(lambda: None, plan=paper(4).place(9, Rule()), degree=2)
    with pytest.raises(OptionError, match="linear"):
        jagg_fx.transform(lambda: None, degree=3)
    for error in (0, -1, True, "small"):
        with pytest.raises(OptionError, match="positive number"):
            jagg_fx.transform(lambda: None, max_rel_error=error)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("cos_threshold", (1.5, -1.01, "0.9", True, float("nan")), r"\[-1, 1\]"),
        ("jagg_frac", (1.5, -0.1, "all", float("nan")), r"\[0, 1\]"),
        ("debias", (0, 1.5, -1, True, float("nan")), r"\(0, 1\]"),
    ],
)
def test_limits_of_the_guard(option: str, values: tuple[object, ...], message: str) -> None:
    for value in values:
        with pytest.raises(OptionError, match=message):
            jagg_fx.transform(lambda: None, **{option: value})


def test_the_threshold_where_none_is_given() -> None:
    def threshold(**options: Any) -> float | None:
        return Config.create(**options).guard.cos_threshold

    measured = dataclasses.replace(paper(4).place(9, Rule()), predicted_error=0.2)
    for options in ({}, {"knots": (0, 8)}, {"plan": even(3)}, {"plan": paper(4).place(9, Rule())}):
        assert threshold(**options) == DEFAULT_COS_THRESHOLD
    for options in ({"knots": 4}, {"max_rel_error": 0.2}, {"plan": budget(4)}, {"plan": measured}):
        assert threshold(**options) is None
        assert threshold(**options, cos_threshold=0.5) == 0.5
