"""`capture="denoiser"`: functions whose loop stays in Python, against the eager reference and whole capture."""

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import jagg_fx
from jagg_fx import errors
from tests.problems import BATCH, DIM, MLP, PROBLEMS, STEPS, Problem, path, per_sample_times, relative_error, squared

TOLERANCE = 1e-12
pytestmark = pytest.mark.falls_back


def transformed(problem: Problem, **options: Any) -> Any:
    defaults: dict[str, Any] = {"lowering": "eager", "capture": "denoiser", "cos_threshold": None}
    chosen = defaults | options
    if chosen["lowering"] == "reference":
        del chosen["capture"]
    return jagg_fx.transform(problem.fn, **chosen)


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_the_references(name: str) -> None:
    problem = PROBLEMS[name](torch.float64)
    _, want = problem.run(transformed(problem, lowering="reference"))
    exact_values, exact = problem.run(problem.fn)
    fast = transformed(problem)
    for _ in range(2):  # the second run knows which calls are knots
        values, got = problem.run(fast)
        assert relative_error(got, want) < TOLERANCE
        assert all(torch.equal(a, b) for a, b in zip(values, exact_values, strict=True))
    assert relative_error(want, exact) > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"W": 3},
        {"knots": (0, 3, 5, 8), "degree": 2},
        {"cos_threshold": 0.04},
        {"jagg_frac": 0.5, "weights": "index"},
    ],
    ids=str,
)
def test_options_are_those_of_the_reference(options: dict[str, Any]) -> None:
    problem = per_sample_times(torch.float64)
    reference, fast = transformed(problem, lowering="reference", **options), transformed(problem, **options)
    _, want = problem.run(reference)
    _, got = problem.run(fast)
    assert relative_error(got, want) < TOLERANCE
    assert fast.stats.last.scores == pytest.approx(reference.stats.last.scores)
    assert fast.stats.last.cotangent_norms == pytest.approx(reference.stats.last.cotangent_norms)
    assert fast.stats.last.jagg_frac == reference.stats.last.jagg_frac
    assert fast.plan == reference.plan


def test_no_intermediate_steps_are_the_plain_function_to_the_bit() -> None:
    problem = per_sample_times(torch.float32)
    values, got = problem.run(transformed(problem, W=2))
    plain_values, plain = problem.run(problem.fn)
    assert torch.equal(got, plain)
    assert all(map(torch.equal, values, plain_values))


# Shapes of public trainers' step code that torch.compile cannot capture.


class Scheduler:
    """Flow-GRPO's use of diffusers' scheduler: steps are looked up by the value of their timestep, and counted in Python."""

    def __init__(self, sigmas: Tensor) -> None:
        self.sigmas = sigmas
        self.taken = 0

    def index(self, time: Tensor) -> int:
        (indices,) = (self.sigmas == time).nonzero(as_tuple=True)
        self.taken += 1
        return int(indices[1 if len(indices) > 1 else 0].item())


def step_by_value(model: nn.Module) -> Callable[..., Tensor]:
    def fn(z: Tensor, t: Tensor) -> Tensor:
        scheduler, losses = Scheduler(t), []
        for i in range(STEPS):
            v = model(z[i], t[i].expand(BATCH))
            indices = [scheduler.index(time) for time in t[i].expand(BATCH)]
            now, later = t[indices], t[[n + 1 for n in indices]]
            losses.append((z[i + 1] - z[i] - (later - now)[:, None] * v).square().mean(-1))
        return torch.stack(losses, 1)

    return fn


def prints(model: nn.Module) -> Callable[..., Tensor]:
    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            losses.append(squared(z, t, i, model(z[i], t[i].expand(BATCH))))
            print("ratio", losses[-1].mean().item())
        return torch.stack(losses, 1)

    return fn


def indices_in_a_list(model: nn.Module) -> Callable[..., Tensor]:
    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            step = [int(t[i : i + 1].argmax()) + i, i + 1]
            now, later = t[step]
            losses.append((z[i + 1] - z[i] - (later - now) * model(z[i], t[i].expand(BATCH))).square().mean(-1))
        return torch.stack(losses, 1)

    return fn


def generators(model: nn.Module) -> Callable[..., Tensor]:
    def fn(z: Tensor, t: Tensor) -> Tensor:
        generator, draw = torch.Generator().manual_seed(1), random.Random(2)
        losses = []
        for i in range(STEPS):
            noise = torch.randn(z[i].shape, generator=generator, dtype=z.dtype)
            losses.append(squared(z, t, i, model(z[i], t[i].expand(BATCH))) * (1 + noise.mean() + draw.random()))
        return torch.stack(losses, 1)

    return fn


def converts_to_numpy(model: nn.Module) -> Callable[..., Tensor]:
    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            v = model(z[i], t[i].expand(BATCH))
            weight = np.clip(v.detach().numpy(), -1, 1).mean()
            losses.append(squared(z, t, i, v) * float(weight))
        return torch.stack(losses, 1)

    return fn


def decides_by_a_value(model: nn.Module) -> Callable[..., Tensor]:
    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            loss = squared(z, t, i, model(z[i], t[i].expand(BATCH)))
            losses.append(loss * 2 if loss.sum() > 1 else loss)
        return torch.stack(losses, 1)

    return fn


def shares_a_statistic(model: nn.Module) -> Callable[..., Tensor]:
    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            losses.append(squared(z, t, i, model(z[i], t[i].expand(BATCH))))
            mean = losses[-1].detach().mean()
            dist.all_reduce(mean)
            losses[-1] = losses[-1] * float(mean > 0)
        return torch.stack(losses, 1)

    return fn


@pytest.fixture(autouse=True, scope="module")
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


UNCAPTURED = {
    make.__name__: make
    for make in (
        step_by_value,
        prints,
        indices_in_a_list,
        generators,
        converts_to_numpy,
        decides_by_a_value,
        shares_a_statistic,
    )
}
_AT = r"test_denoiser_capture\.py:\d+: "
# What the report must name: the line, where Dynamo tells.
LINES = {
    "step_by_value": _AT + "return int",
    "prints": _AT + r"print\(",
    "indices_in_a_list": _AT + "now, later",
    "generators": _AT + ".*(torch.randn|Random)",
    "converts_to_numpy": "",  # Dynamo traces numpy
    "decides_by_a_value": _AT + ".*if loss.sum",
    "shares_a_statistic": "a number that is read from a tensor",
}


@pytest.mark.parametrize("name", UNCAPTURED)
def test_what_cannot_be_captured_whole_runs_by_its_denoiser(name: str) -> None:
    plain = per_sample_times(torch.float64)
    problem = Problem(plain.model, UNCAPTURED[name](plain.model), plain.args, plain.parameters)
    _, want = problem.run(transformed(problem, lowering="reference"))
    values, _ = problem.run(problem.fn)
    fast = transformed(problem, capture="auto")
    for _ in range(2):
        got_values, got = problem.run(fast)
        assert relative_error(got, want) < TOLERANCE
        assert all(map(torch.allclose, got_values, values))
    capture = fast.report.capture
    if not LINES[name]:
        assert capture == "whole"
        return
    assert "the denoiser alone" in str(fast.report)
    assert re.search(LINES[name], capture)
    with pytest.raises(errors.JaggError):
        problem.run(transformed(problem, capture="whole"))


def test_the_function_runs_once() -> None:
    problem = per_sample_times(torch.float64)
    calls: list[int] = []

    def fn(z: Tensor, t: Tensor) -> Any:
        calls.append(1)
        return problem.fn(z, t)

    fast = jagg_fx.transform(fn, lowering="eager", capture="denoiser", denoiser=problem.model)
    fast(*problem.args).sum().backward()
    fast(*problem.args).sum().backward()
    assert len(calls) == 2


def test_the_denoiser_runs_with_a_graph_at_knots_alone() -> None:
    problem = per_sample_times(torch.float64)
    ran: list[bool] = []
    problem.model.a.register_forward_hook(lambda *_: ran.append(torch.is_grad_enabled()))
    fast = transformed(problem)
    problem.run(fast)
    assert ran == [False] * STEPS + [True] * 5  # the knots were not foreseen
    ran.clear()
    problem.run(fast)
    assert ran == [i in (0, 3, 4, 7, 8) for i in range(STEPS)]


def test_another_number_of_steps_is_another_plan() -> None:
    model = MLP().double()
    z, t = path(torch.float64)

    def fn(z: Tensor, t: Tensor, steps: int) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH))) for i in range(steps)], 1)

    fast = jagg_fx.transform(fn, lowering="eager", capture="denoiser", cos_threshold=None)
    reference = jagg_fx.transform(fn, lowering="reference", cos_threshold=None)
    for steps in (9, 4, 7, 9):
        problem = Problem(model, fn, (z, t, steps), list(model.parameters()))
        assert relative_error(problem.run(fast)[1], problem.run(reference)[1]) < TOLERANCE


def test_backward_and_backward_again_with_the_graph_kept() -> None:
    problem = per_sample_times(torch.float64)
    _, want = problem.run(transformed(problem, lowering="reference"))
    fast = transformed(problem)
    generator = torch.Generator().manual_seed(1)
    outputs = fast(*problem.args)
    loss = (outputs * torch.randn(outputs.shape, generator=generator).to(outputs)).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        got = torch.cat([p.grad.flatten() for p in problem.parameters if p.grad is not None])
        assert relative_error(got, want) < TOLERANCE
        problem.model.zero_grad()
    assert fast.stats.backwards == 2


def test_steps_that_leave_by_another_way_are_an_error() -> None:
    problem = per_sample_times(torch.float64)
    left: list[Tensor] = []

    def fn(z: Tensor, t: Tensor) -> Any:
        left.append(problem.fn(z, t))
        return left[-1].sum()

    fast = jagg_fx.transform(fn, lowering="eager", capture="denoiser", denoiser=problem.model)
    fast(*problem.args)
    with pytest.raises(errors.LostStepsError, match="not through what fn returned"):
        left[-1].sum().backward()


def test_no_step_is_an_error_and_no_gradients_are_none() -> None:
    problem = per_sample_times(torch.float64)
    fast = jagg_fx.transform(
        lambda z, t: problem.fn(z, t).detach(), lowering="eager", capture="denoiser", denoiser=problem.model
    )
    with pytest.raises(errors.NoStepsError, match="9 calls of the denoiser ran with gradients"):
        fast(*problem.args)
    with torch.no_grad():
        assert torch.equal(fast(*problem.args), problem.fn(*problem.args))


@pytest.mark.parametrize("chain", ["error", "stop"])
def test_chained_samplers(chain: str) -> None:
    model = MLP().double()
    z, t = path(torch.float64)

    def fn(x: Tensor, t: Tensor) -> Tensor:
        for i in range(STEPS):
            x = x + (t[i + 1] - t[i]) * model(x, t[i].expand(BATCH))
        return x.square().mean(-1)

    problem = Problem(model, fn, (z[0], t), list(model.parameters()))
    if chain == "error":
        with pytest.raises(errors.ChainedStatesError, match="chain='stop'"):
            problem.run(transformed(problem))
        return
    fast = transformed(problem, chain="stop")
    _, want = problem.run(transformed(problem, chain="stop", lowering="reference"))
    assert relative_error(problem.run(fast)[1], want) < TOLERANCE
    assert fast.report.rewrite.streams[0].cut == tuple(range(1, STEPS))


def test_two_denoisers_and_two_calls_per_step() -> None:
    high, low = MLP().double(), MLP().double()
    z, t = path(torch.float64)
    prompts = torch.randn(2, BATCH, 2 * DIM, dtype=torch.float64)

    def fn(z: Tensor, t: Tensor, prompts: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            expert = high if t[i].item() > 0.4 else low
            negative, positive = (expert(z[i], t[i].expand(BATCH), prompt) for prompt in prompts)
            losses.append(squared(z, t, i, negative + 2 * (positive - negative)))
        return torch.stack(losses, 1)

    problem = Problem(high, fn, (z, t, prompts), [*high.parameters(), *low.parameters()])
    reference = transformed(problem, denoiser=[high, low], lowering="reference")
    fast = transformed(problem, denoiser=[high, low])
    _, want = problem.run(reference)
    for _ in range(2):
        assert relative_error(problem.run(fast)[1], want) < TOLERANCE
    assert fast.plans == reference.plans
    assert len(fast.plans) == 4


def test_knots_are_placed_without_running_the_function_twice() -> None:
    problem = per_sample_times(torch.float64)
    reference, fast = transformed(problem, knots=4, lowering="reference"), transformed(problem, knots=4)
    problem.run(reference)
    problem.run(fast)
    assert fast.plan.knots == reference.plan.knots
    assert fast.plan.predicted_error == pytest.approx(reference.plan.predicted_error)
    assert relative_error(problem.run(fast)[1], problem.run(reference)[1]) < TOLERANCE


@pytest.mark.parametrize("capture", ["denoiser", "auto"])
def test_velocities_of_the_rollout(capture: str) -> None:
    problem = per_sample_times(torch.float64)
    z, t = problem.args
    with torch.no_grad():
        velocities = torch.stack([problem.model(z[i], t[i].expand(BATCH)) for i in range(STEPS)])
    ran: list[int] = []
    fast = transformed(problem, capture=capture)
    _, want = problem.run(transformed(problem, lowering="reference"))
    problem.run(fast)
    problem.model.a.register_forward_hook(lambda *_: ran.append(1))
    for _ in range(2):
        ran.clear()
        with fast.reuse(velocities=velocities):
            _, got = problem.run(fast)
        assert relative_error(got, want) < TOLERANCE
    assert len(ran) == 5
    assert "the denoiser alone" in fast.report.capture
    with (
        pytest.raises(errors.VelocityMismatchError, match=r"jagg_fx.transform\(fn\).reuse"),
        fast.reuse(velocities=2 * velocities),
    ):
        problem.run(fast)
    with pytest.raises(errors.OptionError, match="<8 of them>"), fast.reuse(velocities=velocities[:8]):
        problem.run(fast)
    with fast.reuse(velocities=2 * velocities, extrapolate=True):
        problem.run(fast)


def test_dropout_and_adapters_are_refused() -> None:
    plain = per_sample_times(torch.float64)

    class Drops(MLP):
        def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
            return nn.functional.dropout(super().forward(z, t, condition), 0.5)

    model = Drops().double()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH))) for i in range(STEPS)], 1)

    with pytest.raises(errors.DropoutError):
        jagg_fx.transform(fn, lowering="eager", capture="denoiser", cos_threshold=None)(*plain.args)


def test_an_unknown_capture_is_an_error() -> None:
    with pytest.raises(errors.OptionError, match="capture is one of 'auto', 'whole', 'denoiser'"):
        jagg_fx.transform(lambda: None, capture="half")


@pytest.mark.inductor
def test_a_compiled_denoiser() -> None:
    plain = per_sample_times(torch.float32)
    problem = Problem(plain.model, step_by_value(plain.model), plain.args, plain.parameters)
    _, want = problem.run(transformed(problem, lowering="reference", cos_threshold=0.04))
    fast = transformed(problem, lowering="inductor", capture="auto", cos_threshold=0.04)
    for _ in range(2):
        _, got = problem.run(fast)
        assert relative_error(got, want) < 1e-5


# What came out wrong once.


def test_hooks_of_the_denoiser_run_once() -> None:
    problem = per_sample_times(torch.float64)
    problem.model.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    problem.model.register_forward_hook(lambda module, args, output: 2 * output)
    _, exact = problem.run(problem.fn)
    for options in ({"W": 2}, {"cos_threshold": 1.0}, {"knots": STEPS}):
        fast = transformed(problem, **options)
        for _ in range(2):
            assert relative_error(problem.run(fast)[1], exact) < TOLERANCE


def test_a_backward_that_meets_no_step_hands_nothing_on_again() -> None:
    problem = per_sample_times(torch.float64)

    def fn(z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return problem.fn(z, t), problem.model.a.bias.square().sum()

    gradients = []
    for options in ({"lowering": "reference"}, {"lowering": "eager", "capture": "denoiser"}):
        problem.model.zero_grad()
        fast = jagg_fx.transform(fn, cos_threshold=None, denoiser=problem.model, **options)  # type: ignore[arg-type]
        log_probs, other = fast(*problem.args)
        log_probs.sum().backward(retain_graph=True)
        other.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in problem.parameters if p.grad is not None]))
    assert relative_error(gradients[1], gradients[0]) < TOLERANCE


def test_outputs_can_be_changed_in_place() -> None:
    problem = per_sample_times(torch.float64)
    log_probs = transformed(problem)(*problem.args)
    log_probs -= 1
    log_probs.sum().backward()


def test_a_call_that_raises_does_not_turn_whole_capture_off() -> None:
    problem = per_sample_times(torch.float64)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        if z.shape[-1] != DIM:
            raise ValueError("wrong shape")
        return problem.fn(z, t)

    fast = jagg_fx.transform(fn, lowering="eager", denoiser=problem.model)
    z, t = problem.args
    with pytest.raises(ValueError, match="wrong shape"):
        fast(z[..., :4], t)
    fast(z, t).sum().backward()
    assert fast.report.capture == "whole"


def test_another_number_of_steps_measures_without_running_twice() -> None:
    model = MLP().double()
    z, t = path(torch.float64)
    calls: list[int] = []

    def fn(z: Tensor, t: Tensor, steps: int) -> Tensor:
        calls.append(steps)
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH))) for i in range(steps)], 1)

    fast = jagg_fx.transform(fn, knots=3, lowering="eager", capture="denoiser", denoiser=model)
    for steps in (9, 9, 5, 5, 9):
        fast(z, t, steps).sum().backward()
    assert calls == [9, 9, 5, 5, 9]
    assert fast.report.rewrite is not None
    assert fast.report.rewrite.plans[0].num_steps == 9


def test_the_reference_captures_nothing() -> None:
    with pytest.raises(errors.OptionError, match="the reference captures nothing"):
        jagg_fx.transform(lambda z: z, lowering="reference", capture="denoiser")
