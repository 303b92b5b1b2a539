"""`explain`: what would be done, without running anything."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import jagg_fx
from jagg_fx.errors import OptionError
from tests.problems import BATCH, DIM, MLP, PROBLEMS, STEPS, path, per_sample_times, squared
from tests.test_errors import another_argument_at_step_three, chained, depends_on_a_value


def test_operations_are_those_that_torch_counts() -> None:
    problem = PROBLEMS["digits_dit"](torch.float32)
    said = jagg_fx.explain(problem.fn, *problem.args, W=2).to_dict()
    with FlopCounterMode(display=False) as counter:
        problem.run(problem.fn)
    assert said["flops"] == said["flops_exact"] == said["flops_at_most"]
    assert said["flops"] == pytest.approx(
        counter.get_total_flops(), rel=0.02
    )  # attention's backward counts what it recomputes


def test_what_would_be_saved() -> None:
    problem = PROBLEMS["digits_dit"](torch.float32)
    explanation = jagg_fx.explain(problem.fn, *problem.args)
    said = explanation.to_dict()
    assert said["report"]["backward_passes_after"] == 5
    assert said["flops"] < said["flops_exact"] < said["flops_at_most"]
    assert said["activation_bytes"] == said["activation_bytes_exact"] * 5 // 9
    assert "value only, g1 goes into knots 0 and 3" in explanation.graphs[0].diff()
    assert "FLOPs" in str(explanation)


def test_nothing_runs_and_meta_tensors_will_do() -> None:
    with torch.device("meta"):
        model, z, t = MLP(), torch.empty(STEPS + 1, BATCH, DIM), torch.empty(STEPS + 1)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH))) for i in range(STEPS)], 1)

    explanation = jagg_fx.explain(fn, z, t, knots=4)
    assert explanation.problem is None
    assert explanation.graphs[0].plans[0].knots == (0, 3, 5, 8)


@pytest.mark.parametrize(
    ("body", "calls", "problem"),
    [
        (another_argument_at_step_three, 9, r"step 3 has a different argument set than step 0: +condition"),
        (chained, 9, "its input depends on the velocity of an earlier step"),
        (depends_on_a_value, 0, "could not capture"),
    ],
)
def test_the_nearest_miss(body: Any, calls: int, problem: str) -> None:
    model = MLP()
    explanation = jagg_fx.explain(lambda z, t: body(model, z, t), *path(torch.float32), denoiser=model)
    assert explanation.calls == calls
    assert explanation.problem is not None
    assert problem in explanation.problem
    assert explanation.graphs == ()
    assert f"{calls} of MLP" in str(explanation)


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="cos_threshold=3"):
        jagg_fx.explain(per_sample_times(torch.float32).fn, cos_threshold=3)


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OptionError, match=r"jagg_fx\.explain\(fn, <1 arguments>\).*missing a required argument: 't'"):
        jagg_fx.explain(per_sample_times(torch.float32).fn, torch.zeros(9, 3, 8))


def test_a_function_under_no_grad_has_nothing_to_rewrite() -> None:
    problem = per_sample_times(torch.float32)
    found = jagg_fx.explain(torch.no_grad()(problem.fn), *problem.args)
    assert found.problem is not None
    assert "gradient" in found.problem
