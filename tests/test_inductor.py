"""A chosen few through Inductor, which compiles C++ for each: what interpreting the graphs cannot show."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_fw_bw_and_get_code

import jagg_fx
from tests.problems import PROBLEMS, Problem, path, per_sample_times, relative_error
from tests.test_guard import KNOTS, pushed, pushes
from tests.test_streams import two_calls_per_step

pytestmark = pytest.mark.inductor


def nested_region(problem: Problem) -> Any:
    """Plain torch.compile of the same function, the denoiser marked as a nested region by torch's own decorator."""
    original = problem.model.forward

    @torch.compiler.nested_compile_region
    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    problem.model.forward = forward
    return torch.compile(problem.fn, fullgraph=True)


@pytest.mark.parametrize(
    ("name", "dtype", "gradient", "value"),
    [
        ("per_sample_times", torch.float64, 1e-10, 1e-14),
        ("digits_dit", torch.float32, 1e-5, 1e-6),
        ("sum_of_values", torch.float32, 1e-5, 1e-6),
        ("batch_first", torch.float32, 1e-5, 1e-6),
    ],
)
def test_gradient_and_values(name: str, dtype: torch.dtype, gradient: float, value: float) -> None:
    problem = PROBLEMS[name](dtype)
    _, want = problem.run(jagg_fx.transform(problem.fn, lowering="reference"))
    values, got = problem.run(jagg_fx.transform(problem.fn, capture="whole"))
    unrolled = name == "per_sample_times"  # without a region, Inductor compiles every step by itself
    plain, _ = problem.run(torch.compile(problem.fn, fullgraph=True) if unrolled else nested_region(problem))
    assert relative_error(got, want) < gradient
    for own, theirs in zip(values, plain, strict=True):
        assert relative_error(own, theirs) < value


@pytest.mark.parametrize("name", ["per_sample_times", "digits_dit"])
def test_without_intermediate_steps_it_is_plain_torch_compile_to_the_bit(name: str) -> None:
    problem = PROBLEMS[name](torch.float32)
    values, got = problem.run(jagg_fx.transform(problem.fn, W=2))
    plain, exact = problem.run(nested_region(problem))
    assert torch.equal(got, exact)
    assert all(torch.equal(a, b) for a, b in zip(values, plain, strict=True))


def test_every_outcome_of_the_guard_in_one_compiled_graph() -> None:
    model, fn, z, t = pushed()
    options: dict[str, Any] = {"knots": KNOTS, "cos_threshold": 0.5}
    transformed = jagg_fx.transform(fn, **options)
    reference = jagg_fx.transform(fn, lowering="reference", **options)
    for outcome in itertools.product((True, False), repeat=3):
        problem = Problem(model, fn, (z, t, pushes(outcome)), list(model.parameters()))
        _, got = problem.run(transformed)
        _, want = problem.run(reference)
        assert relative_error(got, want) < 1e-10, outcome
        assert transformed.stats is not None
        assert transformed.stats.last.exact_segments == 3 - sum(outcome)
        assert reference.stats is not None
        assert transformed.stats.last.cotangent_norms == pytest.approx(reference.stats.last.cotangent_norms, rel=1e-5)
    assert transformed.report.graphs == 1


def test_exact_branches_meet_the_layouts_they_were_compiled_for() -> None:
    """Losses and states whose memory is not in the order of their dimensions."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 3, 3, padding=1)).double()

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, z: Tensor, t: Tensor) -> Tensor:
            v: Tensor = self.body(z * t)
            return v

    denoiser = Denoiser()
    z = torch.randn(10, 2, 3, 5, 4, dtype=torch.float64).transpose(-1, -2)
    t = torch.linspace(1, 0.2, 10, dtype=torch.float64)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(9):
            state = z[i].contiguous(memory_format=torch.channels_last)
            v = denoiser(state, t[i]).permute(0, 3, 1, 2)
            losses.append((v - z[i + 1].permute(0, 3, 1, 2)).square().flatten(1).mean(1))
        return torch.stack(losses)

    problem = Problem(denoiser, fn, (z, t), list(denoiser.parameters()))
    _, exact = problem.run(fn)
    for options in ({"jagg_frac": 0.0}, {"cos_threshold": -1.0}):
        transformed = jagg_fx.transform(fn, knots=(0, 2, 5, 8), **options)
        _, got = problem.run(transformed)
        _, want = problem.run(jagg_fx.transform(fn, knots=(0, 2, 5, 8), lowering="reference", **options))
        assert relative_error(got, want) < 1e-10
        assert (relative_error(got, exact) < 1e-10) == ("jagg_frac" in options)


def test_corrections() -> None:
    """Inductor draws numbers of its own; with `fallback_random` they are torch's, and so the reference's."""
    problem = per_sample_times(torch.float64)
    options: dict[str, Any] = {"knots": (0, 4, 8), "debias": 0.7, "cos_threshold": 0.0}
    transformed = jagg_fx.transform(problem.fn, options={"fallback_random": True}, **options)
    for seed in range(4):
        gradients = []
        for function in (transformed, jagg_fx.transform(problem.fn, lowering="reference", **options)):
            torch.manual_seed(seed)
            gradients.append(problem.run(function)[1])
        assert relative_error(*gradients) < 1e-10


def test_a_dynamic_batch_compiles_once() -> None:
    transformed, model = None, None
    for batch in (4, 6):
        problem = per_sample_times(torch.float64)
        model = model or problem.model
        fn = transformed.original if transformed else problem.fn
        transformed = transformed or jagg_fx.transform(fn)
        z, t = path(torch.float64, batch)
        torch._dynamo.mark_dynamic(z, 1)
        problem = Problem(model, fn, (z, t), list(model.parameters()))
        _, got = problem.run(transformed)
        _, want = problem.run(jagg_fx.transform(fn, lowering="reference"))
        assert relative_error(got, want) < 1e-10
    assert transformed is not None
    assert transformed.report.graphs == 1


def test_the_backend_entry_point() -> None:
    problem = per_sample_times(torch.float64)
    _, want = problem.run(jagg_fx.transform(problem.fn, knots=(0, 3, 8), lowering="reference"))
    compiled = torch.compile(problem.fn, backend="jagg", options={"knots": (0, 3, 8)}, fullgraph=True)
    assert relative_error(problem.run(compiled)[1], want) < 1e-10


def test_a_change_of_plan_or_weights_never_meets_a_stale_graph_in_the_cache() -> None:
    problem = per_sample_times(torch.float64)
    plans: list[dict[str, Any]] = [
        {"knots": (0, 8), "cos_threshold": None},
        {"knots": (0, 8), "cos_threshold": 0.0},
        {"knots": (0, 8), "cos_threshold": None, "weights": "index"},
    ]
    for plan in [*plans, plans[0]]:
        torch.compiler.reset()  # as in a new process that shares the cache on disk
        transformed = jagg_fx.transform(problem.fn, **plan)
        _, got = problem.run(transformed)
        _, want = problem.run(jagg_fx.transform(problem.fn, lowering="reference", **plan))
        assert relative_error(got, want) < 1e-10, plan
        assert transformed.report.graphs == 1, "the report is filled whether or not the code came from the cache"


def test_the_users_own_inductor_options_and_passes_are_kept() -> None:
    seen: list[int] = []

    class Counter(torch._inductor.custom_graph_pass.CustomGraphPass):
        def uuid(self) -> str:
            return "counter"

        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(len(graph.nodes))

    problem = per_sample_times(torch.float64)
    transformed = jagg_fx.transform(problem.fn, options={"joint_custom_pre_pass": Counter()})
    _, got = problem.run(transformed)
    _, want = problem.run(jagg_fx.transform(problem.fn, lowering="reference"))
    assert seen
    assert relative_error(got, want) < 1e-10


def test_guarded_streams() -> None:
    problem = two_calls_per_step(torch.float64)
    options: dict[str, Any] = {"cos_threshold": 0.5}
    transformed = jagg_fx.transform(problem.fn, **options)
    reference = jagg_fx.transform(problem.fn, lowering="reference", **options)
    _, got = problem.run(transformed)
    _, want = problem.run(reference)
    assert relative_error(got, want) < 1e-10
    assert transformed.stats is not None
    assert reference.stats is not None
    assert transformed.stats.last.exact_segments == reference.stats.last.exact_segments > 0
    assert transformed.stats.last.jagg_frac == reference.stats.last.jagg_frac


def test_generated_code_reads_only_predicates_and_calls_only_knots() -> None:
    problem = per_sample_times(torch.float32)
    fast = jagg_fx.transform(problem.fn, W=4, capture="whole", options={"fx_graph_cache": False})
    _, codes = run_fw_bw_and_get_code(lambda: fast(*problem.args))
    forward, backward = codes
    plan = fast.plans[0]
    assert ".item()" not in forward
    assert backward.count(".item()") == len(plan.segments) > 0  # a predicate each
    assert {k for k in range(plan.num_steps) if f"'jagg_fx backward {k}'" in backward} == set(plan.knots)
    assert backward.count("'jagg_fx backward ") == len(plan.knots)


class SavesViewsOfItsState(nn.Module):
    """Its forward saves a view of its state for the backward, which returns its cotangent as the gradient of `shift`."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(4, 16), nn.Linear(16, 4)
        self.shift = nn.Parameter(torch.zeros(12, 8))

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        hidden = torch.nn.functional.silu(self.inp(z.unflatten(1, (2, 4))) + t[:, None, None])
        return self.out(hidden).flatten(1) + self.shift


@pytest.mark.parametrize("W", [2, 4])
def test_what_a_region_returns_of_its_operands_outlives_them(W: int) -> None:
    model, states, times = SavesViewsOfItsState(), torch.randn(12, 7, 8), torch.linspace(1, 0.5, 7)

    def fn(states: Tensor) -> Tensor:
        total = torch.zeros(())
        for i in range(6):
            step = times[i + 1] - times[i]
            mean = states[:, i] + model(1.5 * states[:, i], times[i].expand(12)) * step
            total = total + ((states[:, i + 1] - mean) ** 2 / (-step)).mean()
        return total

    problem = Problem(model, fn, (states,), list(model.parameters()))
    _, got = problem.run(jagg_fx.transform(fn, W=W, cos_threshold=None))
    _, want = problem.run(jagg_fx.transform(fn, W=W, cos_threshold=None, lowering="reference"))
    assert relative_error(got, want) < 1e-5
