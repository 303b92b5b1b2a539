import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import jagg_fx
from jagg_fx.config import Config
from jagg_fx.errors import OptionError, PlanError
from jagg_fx.plan import Segment, explicit, paper
from tests.problems import per_sample_times


def test_the_papers_grouping_of_nine_steps() -> None:
    plan = paper(9, 4)
    assert plan.groups == ((0, 3), (4, 7), (8, 8))
    assert plan.knots == (0, 3, 4, 7, 8)
    assert plan.segments == (Segment(0, 3), Segment(4, 7))
    assert plan.intermediate == (1, 2, 5, 6)


@hypothesis.given(st.integers(1, 60), st.integers(2, 70))
def test_every_step_is_a_knot_or_lies_in_one_segment(num_steps: int, W: int) -> None:
    plan = paper(num_steps, W)
    inside = [i for segment in plan.segments for i in segment.intermediate]
    assert sorted([*plan.knots, *inside]) == list(range(num_steps))
    assert [step for a, b in plan.groups for step in range(a, b + 1)] == list(range(num_steps))
    assert all(b - a < W for a, b in plan.groups)


def test_explicit_knots() -> None:
    plan = explicit(9, (0, 5, 8))
    assert plan.segments == (Segment(0, 5), Segment(5, 8))
    assert plan.groups == ((0, 5), (5, 8))
    assert explicit(1, (0,)).segments == ()


@pytest.mark.parametrize("W", [1, 0, -3, 2.0, "4", True, None])
def test_a_group_has_at_least_two_steps(W: object) -> None:
    with pytest.raises(PlanError, match=r"W=.*at least 2"):
        jagg_fx.transform(lambda: None, W=W)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("knots", "message"),
    [
        ((), "sequence of step indices"),
        ("03", "sequence of step indices"),
        (4, "sequence of step indices"),
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
    with pytest.raises(OptionError, match=r"nn\.Module that is called once per step"):
        jagg_fx.transform(lambda: None, denoiser="unet")  # type: ignore[arg-type]
