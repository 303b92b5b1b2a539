"""The guard: which segments are interpolated, for every mixture of outcomes, in one compiled graph."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn

import jagg_fx
from jagg_fx.demo.measure import peak_memory
from jagg_fx.guard import Correction, Guard, draw, keep_segments, segment_scores
from jagg_fx.models.digits_dit import load_digits_dit
from jagg_fx.models.samplers import FlowSDE, replay, rollout, schedule
from jagg_fx.plan import Plan, Rule, Segment, explicit
from tests.problems import BATCH, DIM, MLP, PROBLEMS, STEPS, Problem, path, per_sample_times, relative_error, squared

PLAN = explicit((0, 3, 5, 9)).place(10, Rule())  # segments of 2, 1 and 3 intermediate steps


def best_first(scores: list[float], sizes: list[int], threshold: float | None, share: float | None) -> list[bool]:
    """The rule in plain Python."""
    passing = [s for s, score in enumerate(scores) if score == score and (threshold is None or score >= threshold)]
    keep, used = [False] * len(scores), 0
    for s in sorted(passing, key=lambda s: (-scores[s], s)):
        used += sizes[s]
        keep[s] = share is None or used <= share * sum(sizes) + 1e-9
    return keep


scores = st.one_of(st.floats(-1, 1), st.sampled_from([0.5, 0.9, float("nan")]))


@hypothesis.given(
    st.tuples(scores, scores, scores),
    st.one_of(st.none(), st.floats(-1, 1)),
    st.one_of(st.none(), st.floats(0, 1), st.sampled_from([1 / 6, 2 / 6, 3 / 6, 5 / 6])),
)
def test_the_decision_is_the_plain_rule(
    scores: tuple[float, ...], threshold: float | None, share: float | None
) -> None:
    guard = Guard.create(threshold, share)
    got = keep_segments(torch.tensor(scores, dtype=torch.float64), PLAN, guard).tolist()
    want = best_first(list(scores), [2, 1, 3], threshold, share) if guard.is_active else [True] * 3
    assert got == want


def test_the_worst_step_is_the_score_of_its_segment() -> None:
    agreement = torch.tensor([0.9, 0.5, 0.7, 0.8, 0.6, 0.99])
    assert segment_scores(agreement, PLAN).tolist() == pytest.approx([0.5, 0.7, 0.6])


class Pushed(MLP):
    """A denoiser whose velocity points wherever its third argument pushes it."""

    def forward(self, z: Tensor, t: Tensor, push: Tensor) -> Any:
        return super().forward(z, t) + 10 * push


KNOTS = (0, 3, 5, 8)
SEGMENTS = (Segment(0, 3), Segment(3, 5), Segment(5, 8))


def pushed(dtype: torch.dtype = torch.float64) -> tuple[Pushed, Callable[..., Tensor], Tensor, Tensor]:
    model = Pushed().to(dtype)

    def fn(z: Tensor, t: Tensor, push: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH), push[i])) for i in range(STEPS)], 1)

    return model, fn, *path(dtype)


def pushes(interpolated: Sequence[bool]) -> Tensor:
    """Velocities agree in the segments to be interpolated; in the others the middle steps point the other way."""
    push = torch.ones(STEPS, BATCH, DIM, dtype=torch.float64)
    for segment, agrees in zip(SEGMENTS, interpolated, strict=True):
        push[segment.a + 1 : segment.b] *= 1 if agrees else -1
    return push


def test_every_mixture_of_outcomes_in_one_compiled_graph() -> None:
    model, fn, z, t = pushed()
    options: dict[str, Any] = {"knots": KNOTS, "cos_threshold": 0.5}
    transformed = jagg_fx.transform(fn, lowering="eager", **options)
    reference = jagg_fx.transform(fn, lowering="reference", **options)
    for outcome in itertools.product((True, False), repeat=3):
        problem = Problem(model, fn, (z, t, pushes(outcome)), list(model.parameters()))
        plain, exact = problem.run(fn)
        values, got = problem.run(transformed)
        _, want = problem.run(reference)
        assert relative_error(got, want) < 1e-12, outcome
        assert torch.equal(values[0], plain[0])
        assert (relative_error(got, exact) < 1e-12) == (not any(outcome)), outcome
        assert transformed.stats is not None
        assert [transformed.stats.last.scores[s] >= 0.5 for s in SEGMENTS] == list(outcome)
        sizes = [len(s.intermediate) for s in SEGMENTS]
        share = sum(n for n, o in zip(sizes, outcome, strict=True) if o) / sum(sizes)
        assert transformed.stats.last.jagg_frac == pytest.approx(share)
        assert transformed.stats.last.exact_segments == 3 - sum(outcome)
    assert transformed.report.graphs == 1, "one compile serves all outcomes"


@pytest.mark.parametrize("share", [0.0, 0.4, 0.7, 1.0])
def test_the_cap_takes_the_best_segments_first(share: float) -> None:
    model, fn, z, t = pushed()
    push = pushes((True, True, True))
    push[6:8] *= 0.3  # the last segment's steps are pushed less: their own velocity shows
    problem = Problem(model, fn, (z, t, push), list(model.parameters()))
    options: dict[str, Any] = {"knots": KNOTS, "cos_threshold": None, "jagg_frac": share}
    transformed = jagg_fx.transform(fn, lowering="eager", **options)
    _, got = problem.run(transformed)
    _, want = problem.run(jagg_fx.transform(fn, lowering="reference", **options))
    assert relative_error(got, want) < 1e-12
    assert transformed.stats is not None
    scores = transformed.stats.last.scores
    keep = best_first([scores[s] for s in SEGMENTS], [len(s.intermediate) for s in SEGMENTS], None, share)
    interpolated = sum(len(s.intermediate) for s, k in zip(SEGMENTS, keep, strict=True) if k)
    assert transformed.stats.last.jagg_frac == pytest.approx(interpolated / 5)
    assert transformed.stats.last.jagg_frac <= share


@pytest.mark.parametrize("name", PROBLEMS)
def test_routing_and_statistics_on_every_problem(name: str) -> None:
    problem = PROBLEMS[name](torch.float64)
    options: dict[str, Any] = {"knots": (0, 2, 5, 8), "jagg_frac": 0.5, "cos_threshold": None}
    transformed = jagg_fx.transform(problem.fn, lowering="eager", **options)
    reference = jagg_fx.transform(problem.fn, lowering="reference", **options)
    # By torch.autograd.grad, which asks for the parameters' gradients only: statistics come all the same.
    (_, got), (_, want) = problem.run(transformed), problem.run(reference)
    assert relative_error(got, want) < 1e-10
    assert transformed.stats is not None
    assert reference.stats is not None
    own, theirs = transformed.stats.last, reference.stats.last
    assert own.cotangent_norms == pytest.approx(theirs.cotangent_norms, rel=1e-5)
    assert own.scores == pytest.approx(theirs.scores, abs=1e-5)
    assert 0 < own.jagg_frac == theirs.jagg_frac <= 0.5


@pytest.mark.parametrize("name", ["per_sample_times", "learned_condition", "two_outputs", "digits_dit"])
def test_routed_exact_is_exact(name: str) -> None:
    problem = PROBLEMS[name](torch.float64)
    _, got = problem.run(jagg_fx.transform(problem.fn, lowering="eager", knots=(0, 2, 5, 8), jagg_frac=0.0))
    assert relative_error(got, problem.run(problem.fn)[1]) < 1e-10


def test_a_guard_that_interpolates_everything_needs_no_more_memory() -> None:
    """Within 5 % of the peak of the unguarded rewrite, activations of the digits DiT at a batch of 96 included."""
    model = load_digits_dit()
    sigmas, labels = schedule(10), torch.arange(96) % 10
    latents = rollout(model, FlowSDE(), torch.randn(96, 1, 8, 8), sigmas, labels).latents[:10]

    def fn(latents: Tensor, sigmas: Tensor, labels: Tensor) -> Tensor:
        return replay(model, FlowSDE(), latents, sigmas, labels).log_probs

    peaks = []
    for threshold in (None, -1.0):
        transformed = jagg_fx.transform(fn, lowering="eager", cos_threshold=threshold)
        transformed(latents, sigmas[:10], labels).sum().backward()
        peaks.append(
            min(peak_memory(lambda: transformed(latents, sigmas[:10], labels).sum().backward()) for _ in range(3))  # noqa: B023
        )
    if peaks[0] != peaks[0]:
        pytest.skip("no way to reset the peak of the resident set here")
    assert peaks[1] < 1.05 * peaks[0]


def test_a_velocity_that_is_not_finite_is_never_interpolated() -> None:
    model, fn, z, t = pushed()
    push = pushes((True, True, True))
    push[1] = torch.nan
    problem = Problem(model, fn, (z, t, push), list(model.parameters()))
    transformed = jagg_fx.transform(fn, lowering="eager", knots=KNOTS, cos_threshold=-1.0)
    problem.run(transformed)
    assert transformed.stats is not None
    assert transformed.stats.last.exact_segments == 1


def test_a_dynamic_batch_and_a_guard() -> None:
    model = MLP().double()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(z.shape[1]))) for i in range(STEPS)], 1)

    transformed = jagg_fx.transform(fn, lowering="eager", cos_threshold=0.99)
    for batch in (4, 6, 3):
        z, t = path(torch.float64, batch)
        torch._dynamo.mark_dynamic(z, 1)
        problem = Problem(model, fn, (z, t), list(model.parameters()))
        _, got = problem.run(transformed)
        assert relative_error(got, problem.run(fn)[1]) < 1e-10
    assert transformed.report.graphs == 1


def test_a_branch_may_return_one_gradient_for_two_parameters() -> None:
    class TwoBiases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.rand(DIM)), nn.Parameter(torch.rand(DIM))

        def forward(self, z: Tensor, t: Tensor) -> Tensor:
            return z * t + self.a + self.b

    model = TwoBiases().double()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i])) for i in range(STEPS)], 1)

    problem = Problem(model, fn, path(torch.float64), list(model.parameters()))
    _, got = problem.run(jagg_fx.transform(fn, lowering="eager", jagg_frac=0.0, knots=(0, 2, 8)))
    assert relative_error(got, problem.run(fn)[1]) < 1e-12


class Beside(MLP):
    """A velocity, a loss that is one number, and a value without gradient."""

    def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        v = super().forward(z, t)
        return v, v.square().mean(), (2 * v).detach()


@pytest.mark.parametrize(
    "options", [{"cos_threshold": None}, {"jagg_frac": 0.5, "cos_threshold": None}, {"jagg_frac": 0.0}]
)
def test_outputs_of_other_shapes_and_without_gradient(options: dict[str, Any]) -> None:
    model = Beside().double()

    def fn(z: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        results = [model(z[i], t[i]) for i in range(STEPS)]
        losses = [squared(z, t, i, v) for i, (v, _, _) in enumerate(results)]
        return torch.stack(losses), torch.stack([s for _, s, _ in results]), results[3][2]

    problem = Problem(model, fn, path(torch.float64), list(model.parameters()))
    transformed = jagg_fx.transform(fn, lowering="eager", knots=(0, 2, 5, 8), **options)
    reference = jagg_fx.transform(fn, lowering="reference", knots=(0, 2, 5, 8), **options)
    assert relative_error(problem.run(transformed)[1], problem.run(reference)[1]) < 1e-10
    for function in (transformed, reference):
        assert [o.requires_grad for o in function(*problem.args)] == [True, True, False]


def test_a_parameter_used_inside_and_outside_the_denoiser() -> None:
    """Its gradient is the sum over steps and a part that comes through another operand's gradient."""
    model = MLP().double()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        condition = model.a.bias.tanh().expand(BATCH, -1)
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH), condition)) for i in range(STEPS)], 1)

    problem = Problem(model, fn, path(torch.float64), list(model.parameters()))
    for options in ({"jagg_frac": 0.0}, {"jagg_frac": 0.5, "cos_threshold": None}):
        _, got = problem.run(jagg_fx.transform(fn, lowering="eager", knots=(0, 2, 5, 8), **options))
        _, want = problem.run(jagg_fx.transform(fn, lowering="reference", knots=(0, 2, 5, 8), **options))
        assert relative_error(got, want) < 1e-10


class TestDebias:
    PLAN = Plan(6, (0, 5), ((0, 5),), step_errors=(0, 1, 2, 3, 0, 0))

    def test_chances_follow_the_errors_and_leave_none_out(self) -> None:
        (correction,) = Correction.of_segments(self.PLAN, 0.5)
        assert sum(correction.chances) == pytest.approx(1)
        assert correction.chances[3] == pytest.approx(0.1 / 4)
        assert correction.chances[2] == pytest.approx(0.9 / 2 + 0.1 / 4)
        (even,) = Correction.of_segments(explicit((0, 5)).place(6, Rule()), 0.5)
        assert even.chances == (0.25,) * 4

    def test_factors_have_mean_one(self) -> None:
        """20000 draws: the mean of each factor within 5 standard errors of 1 (a false alarm in 10^6 runs)."""
        generator = torch.Generator().manual_seed(0)
        (correction,) = Correction.of_segments(self.PLAN, 0.4)
        u = torch.rand(20_000, 2, generator=generator)
        factors = torch.stack([correction.factors(a < 0.4, correction.choose(b)) for a, b in u])
        assert ((factors > 0).sum(1) <= 1).all()
        error = factors.std(0) / len(u) ** 0.5
        assert ((factors.mean(0) - 1).abs() < 5 * error).all()

    def test_draws_are_seeded(self) -> None:
        torch.manual_seed(3)
        first = draw(self.PLAN, torch.device("cpu"))
        torch.manual_seed(3)
        assert torch.equal(first, draw(self.PLAN, torch.device("cpu")))

    @pytest.mark.parametrize("guard", [{"cos_threshold": None}, {"jagg_frac": 0.5, "cos_threshold": None}])
    def test_the_mean_gradient_is_exact(self, guard: dict[str, Any]) -> None:
        """400 draws through the compiled graph: the mean's distance from the exact gradient is what chance leaves.

        If the draws are unbiased the squared distance is trace(covariance) / n on average. It is a sum of squares of nearly
        normal numbers; with all of the variance in one direction, the worst case, it exceeds 16 times that with
        probability 6e-5. The uncorrected gradient is further away than that.
        """
        torch.manual_seed(0)
        problem = per_sample_times(torch.float64)
        _, exact = problem.run(problem.fn)
        options: dict[str, Any] = {"knots": (0, 4, 8), **guard}
        transformed = jagg_fx.transform(problem.fn, lowering="eager", debias=0.5, **options)
        draws = torch.stack([problem.run(transformed)[1] for _ in range(400)])
        spread = draws.var(0).sum() / len(draws)
        distance = (draws.mean(0) - exact).square().sum()
        _, biased = problem.run(jagg_fx.transform(problem.fn, lowering="reference", **options))
        assert distance < 16 * spread < (biased - exact).square().sum()

    @pytest.mark.parametrize("name", ["per_sample_times", "two_outputs", "learned_condition", "digits_dit"])
    def test_the_same_draws_give_the_references_gradient(self, name: str) -> None:
        problem = PROBLEMS[name](torch.float64)
        gradients = []
        for lowering in ("eager", "reference"):
            transformed = jagg_fx.transform(problem.fn, lowering=lowering, knots=(0, 4, 8), debias=0.8)
            torch.manual_seed(11)
            gradients.append(problem.run(transformed)[1])
        assert relative_error(*gradients) < 1e-10
