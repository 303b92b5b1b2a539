"""diffusers schedulers inside a transformed function: those of the table, a multistep solver, and what cannot be traced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

import jagg_fx
from jagg_fx.errors import NotRepeatableError, SchedulerError
from jagg_fx.models.schedulers import restart
from tests.problems import BATCH, MLP, STEPS, Problem, path, relative_error

MODEL = MLP()


def replay(scheduler: Any, prepare: Callable[[], None]) -> Callable[[Tensor, Tensor], Tensor]:
    def fn(z: Tensor, t: Tensor) -> Tensor:
        prepare()
        losses = []
        for i, time in enumerate(scheduler.timesteps[:STEPS]):
            v = MODEL(z[i], time.expand(BATCH) / 1000)
            losses.append((z[i + 1] - scheduler.step(v, time, z[i]).prev_sample).square().mean(-1))
        return torch.stack(losses, 1)

    return fn


@pytest.mark.parametrize("make", [DPMSolverMultistepScheduler, UniPCMultistepScheduler])
def test_a_multistep_solver(make: Any) -> None:
    scheduler = make()
    scheduler.set_timesteps(STEPS + 1)
    fn = replay(scheduler, lambda: restart(scheduler))
    problem = Problem(MODEL, fn, path(torch.float32), list(MODEL.parameters()))
    plain, exact = problem.run(fn)
    _, want = problem.run(jagg_fx.transform(fn, lowering="reference", cos_threshold=None))
    transformed = jagg_fx.transform(fn, lowering="eager", cos_threshold=None)
    for _ in range(2):  # the scheduler starts anew
        values, got = problem.run(transformed)
        assert relative_error(got, want) < 1e-5
        assert torch.equal(values[0], plain[0])
    assert relative_error(got, exact) > 1e-3
    assert transformed.report.graphs == 1


@pytest.mark.parametrize(
    ("make", "prepare", "line"),
    [
        (FlowMatchEulerDiscreteScheduler, lambda s: None, r"scheduling_flow_match_euler_discrete\.py"),
        (DPMSolverMultistepScheduler, lambda s: s.set_timesteps(STEPS + 1), r"scheduling_dpmsolver_multistep\.py"),
        (DDIMScheduler, lambda s: None, r"scheduling_ddim\.py"),
    ],
)
def test_what_cannot_be_traced_names_the_line_and_the_fix(make: Any, prepare: Any, line: str) -> None:
    scheduler = make()
    scheduler.set_timesteps(STEPS + 1)
    fn = replay(scheduler, lambda: prepare(scheduler))
    with pytest.raises(
        SchedulerError, match=rf"(?s)Where: .*test_schedulers\.py:\d+:.*Inside: .*{line}.*restart\(scheduler\)"
    ):
        jagg_fx.transform(fn, lowering="eager", capture="whole")(*path(torch.float32))


@pytest.mark.falls_back
def test_flow_grpos_lookup_by_value_runs_by_the_denoiser() -> None:
    """The trainer's own step, `index_for_timestep` of every sample: the scheduler's shape that nothing captures."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS + 1)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            times = scheduler.timesteps[i].expand(z.shape[1])
            v = MODEL(z[i], times / 1000)
            indices = [scheduler.index_for_timestep(time) for time in times]
            now, later = scheduler.sigmas[indices], scheduler.sigmas[[n + 1 for n in indices]]
            losses.append((z[i + 1] - z[i] - (later - now)[:, None] * v).square().mean(-1))
        return torch.stack(losses, 1)

    problem = Problem(MODEL, fn, path(torch.float32), list(MODEL.parameters()))
    _, want = problem.run(jagg_fx.transform(fn, lowering="reference", cos_threshold=None))
    fast = jagg_fx.transform(fn, lowering="eager", cos_threshold=None)
    for _ in range(2):
        _, got = problem.run(fast)
        assert relative_error(got, want) < 1e-5
    assert "index_for_timestep" in fast.report.capture


def test_a_scheduler_that_goes_on_counting_is_noticed_by_the_reference() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)  # with even steps going on changes nothing
    scheduler.set_timesteps(4 * STEPS)
    scheduler.set_begin_index(0)
    with pytest.raises(NotRepeatableError, match=r"restart\(scheduler\)"):
        jagg_fx.transform(replay(scheduler, lambda: None), lowering="reference")(*path(torch.float32))
