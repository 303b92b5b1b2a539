"""The ways out, rung by rung: each does what the README says."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import jagg_fx
from jagg_fx import errors
from tests.problems import Problem, per_sample_times, relative_error

PASSES = ("interpolate_vjps", "route_segments", "record_statistics", "drop_saved")
ROUNDING = 1e-12  # float64


@pytest.fixture
def problem() -> Problem:
    return per_sample_times(torch.float64)


def _gradient(problem: Problem, fn: Any) -> Tensor:
    return problem.run(fn)[1]


def _backward_calls(fast: Any) -> int:
    return str(fast.graphs[0].after).count("backward ")


def test_the_original_is_the_function_itself(problem: Problem) -> None:
    assert jagg_fx.transform(problem.fn).original is problem.fn


def test_a_cosine_of_one_keeps_every_step_exact(problem: Problem) -> None:
    for lowering in ("eager", "reference"):
        fast = jagg_fx.transform(problem.fn, cos_threshold=1.0, lowering=lowering)
        assert relative_error(_gradient(problem, fast), _gradient(problem, problem.fn)) < ROUNDING
        assert fast.stats.last.jagg_frac == 0
        assert "every step exact" in str(fast.report)


def test_a_perfect_segment_is_exact_too_at_a_cosine_of_one() -> None:
    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, z: Tensor, t: Tensor) -> Tensor:
            return self.slope * (1 + t[:, None]) + 0 * z

    model, z, t = Linear(), torch.randn(5, 2, 3).double(), torch.linspace(1, 0, 5).double()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([(z[i] - model(z[i], t[i].expand(2))).square().mean(1) for i in range(5)])

    for threshold, share in ((1.0, 0), (0.999, 1)):
        fast = jagg_fx.transform(fn, W=5, cos_threshold=threshold, lowering="eager")
        fast(z, t).sum().backward()
        assert fast.stats.last.jagg_frac == share
    assert "cos_threshold=1 keeps" not in str(fast.graphs[0].decisions)


def test_the_lowerings_agree(problem: Problem) -> None:
    options = [{"lowering": name, "cos_threshold": None} for name in ("eager", "reference")]
    found = [_gradient(problem, jagg_fx.transform(problem.fn, **each)) for each in options]
    assert relative_error(*found) < ROUNDING
    assert relative_error(found[0], _gradient(problem, problem.fn)) > 1e-3


@pytest.mark.parametrize("capture", ["whole", "auto"])
def test_without_interpolation_every_step_is_exact(problem: Problem, capture: str) -> None:
    fast = jagg_fx.transform(problem.fn, lowering="eager", disable_passes=["interpolate_vjps"], capture=capture)
    assert torch.equal(_gradient(problem, fast), _gradient(problem, jagg_fx.transform(problem.fn, 2, lowering="eager")))
    assert _backward_calls(fast) == 9
    assert "interpolate_vjps" in str(fast.report)
    assert fast.report.to_dict()["disabled_passes"] == ["interpolate_vjps"]


def test_without_routing_nothing_is_exact(problem: Problem) -> None:
    strict = functools.partial(jagg_fx.transform, problem.fn, lowering="eager", cos_threshold=0.999)
    routed, always = strict(), strict(disable_passes=["route_segments"])
    free = jagg_fx.transform(problem.fn, lowering="eager", cos_threshold=None)
    assert torch.equal(_gradient(problem, always), _gradient(problem, free))
    assert relative_error(_gradient(problem, always), _gradient(problem, routed)) > 1e-3
    assert "cond" not in str(always.graphs[0].after)
    assert "cond" in str(routed.graphs[0].after)


def test_without_statistics_nothing_is_counted(problem: Problem) -> None:
    fast = jagg_fx.transform(problem.fn, lowering="eager", disable_passes=["record_statistics"])
    assert torch.equal(_gradient(problem, fast), _gradient(problem, jagg_fx.transform(problem.fn, lowering="eager")))
    assert fast.stats is None


def test_without_pruning_forwards_save_what_they_saved(problem: Problem) -> None:
    fast = jagg_fx.transform(problem.fn, lowering="eager", disable_passes=["drop_saved"])
    assert torch.equal(_gradient(problem, fast), _gradient(problem, jagg_fx.transform(problem.fn, lowering="eager")))
    assert "drop_saved" not in fast.graphs[0].stages
    assert "saves nothing" not in str(fast.graphs[0].after)


@pytest.mark.parametrize("name", PASSES)
def test_inductors_own_switch_is_heeded(problem: Problem, name: str) -> None:
    with torch._inductor.config.patch(disabled_passes=f"something_else,{name.upper()}"):
        fast = jagg_fx.transform(problem.fn, lowering="eager")
    asked = jagg_fx.transform(problem.fn, lowering="eager", disable_passes=[name])
    assert torch.equal(_gradient(problem, fast), _gradient(problem, asked))
    by_options = jagg_fx.transform(problem.fn, options={"disabled_passes": name})
    assert fast.report.config.disabled == asked.report.config.disabled == by_options.report.config.disabled == {name}


@pytest.mark.parametrize(
    "options",
    [
        {"disable_passes": ["no_such_pass"]},
        {"disable_passes": "drop_saved"},
        {"disable_passes": ["drop_saved"], "capture": "denoiser"},
        {"disable_passes": ["drop_saved"], "lowering": "reference"},
    ],
)
def test_what_cannot_be_disabled_is_refused(problem: Problem, options: dict[str, Any]) -> None:
    with pytest.raises(errors.OptionError, match="disable_passes"):
        jagg_fx.transform(problem.fn, **options)


def test_a_mode_is_its_options(problem: Problem) -> None:
    mode = "max-autotune-no-cudagraphs"
    asked = jagg_fx.transform(problem.fn, mode=mode).report.config
    assert (
        asked.options
        == jagg_fx.transform(problem.fn, options=torch._inductor.list_mode_options(mode)).report.config.options
    )
    assert dict(asked.options)["max_autotune"] is True


CUDA_GRAPHS: list[dict[str, Any]] = [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}]


@pytest.mark.parametrize("options", CUDA_GRAPHS, ids=["mode", "options"])
def test_cuda_graphs_and_routing_exclude_each_other(problem: Problem, options: dict[str, Any]) -> None:
    for routing in ({}, {"cos_threshold": None, "debias": 0.5}, {"cos_threshold": None, "jagg_frac": 0.5}):
        with pytest.raises(errors.OptionError, match=r"CUDA graphs.*read on the host"):
            jagg_fx.transform(problem.fn, **options, **routing)
    for free in ({"cos_threshold": None}, {"W": 2}, {"knots": 4}):
        assert dict(jagg_fx.transform(problem.fn, **options, **free).report.config.options)["triton.cudagraphs"]


@pytest.mark.parametrize("options", [{"mode": "fast"}, {"mode": "default", "options": {"max_autotune": True}}], ids=str)
def test_a_mode_that_cannot_be_is_refused(problem: Problem, options: dict[str, Any]) -> None:
    with pytest.raises(errors.OptionError, match=r"jagg_fx\.transform\(fn, mode="):
        jagg_fx.transform(problem.fn, **options)
