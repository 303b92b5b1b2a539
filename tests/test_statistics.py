"""Statistics: right numbers, of the last backward and as means, without an effect on values or gradients."""

import pytest
import torch

import jagg_fx
from jagg_fx.errors import NotRepeatableError
from jagg_fx.plan import Segment
from tests.problems import BATCH, STEPS, per_sample_times, squared


@pytest.mark.parametrize("lowering", ["eager", "reference"])
def test_the_numbers_are_those_of_plain_autograd(lowering: str) -> None:
    problem = per_sample_times(torch.float64)
    z, t = problem.args
    transformed = jagg_fx.transform(problem.fn, knots=(0, 2, 8), lowering=lowering, cos_threshold=-1.0)
    assert transformed.stats is None
    norms = []
    for scale in (1.0, 3.0):
        transformed(z, t).sum().mul(scale).backward()
        v = torch.stack([problem.model(z[i], t[i].expand(BATCH)) for i in range(STEPS)]).detach().requires_grad_()
        torch.stack([squared(z, t, i, v[i]) for i in range(STEPS)], 1).sum().mul(scale).backward()
        assert v.grad is not None
        norms.append(v.grad.flatten(1).norm(dim=1).tolist())
        stats = transformed.stats
        assert stats is not None
        assert stats.last.cotangent_norms == pytest.approx(norms[-1], rel=1e-5)
    assert stats.backwards == 2
    assert stats.mean.cotangent_norms == pytest.approx([sum(pair) / 2 for pair in zip(*norms, strict=True)], rel=1e-5)
    w = (t[1] - t[0]) / (t[2] - t[0])
    cosine = torch.cosine_similarity(v[1], (1 - w) * v[0] + w * v[2]).mean()
    assert stats.last.scores[Segment(0, 2)] == pytest.approx(cosine.item(), rel=1e-5)
    assert stats.last.jagg_frac == stats.mean.jagg_frac == 1
    assert stats.last.exact_segments == 0


def test_nothing_to_tell_without_intermediate_steps_or_without_backward() -> None:
    problem = per_sample_times(torch.float64)
    transformed = jagg_fx.transform(problem.fn, W=2, lowering="eager")
    problem.run(transformed)
    assert transformed.stats is None
    transformed = jagg_fx.transform(problem.fn, W=4, lowering="eager")
    transformed(*problem.args)
    assert transformed.stats is None


def test_means_start_anew_with_a_new_plan() -> None:
    problem = per_sample_times(torch.float64)
    transformed = jagg_fx.transform(problem.fn, knots=3, lowering="eager", cos_threshold=None)
    counts = []
    for _ in range(3):
        problem.run(transformed)
        assert transformed.stats is not None
        counts.append(transformed.stats.backwards)
    assert counts == [1, 1, 2], "the measuring call had a plan of its own"


def test_the_references_numbers_are_of_one_backward_also_after_one_that_stopped_halfway() -> None:
    problem = per_sample_times(torch.float64)

    def by_step(z: torch.Tensor, t: torch.Tensor) -> list[torch.Tensor]:
        return [squared(z, t, i, problem.model(z[i], t[i].expand(BATCH))) for i in range(STEPS)]

    transformed = jagg_fx.transform(by_step, lowering="reference", cos_threshold=None)
    outputs = transformed(*problem.args)
    sum(outputs[:2]).sum().backward(retain_graph=True)
    assert transformed.stats is None
    for scale in (1.0, 100.0):
        (scale * sum(outputs)).sum().backward(retain_graph=True)
        assert transformed.stats is not None
        norms = torch.tensor(transformed.stats.last.cotangent_norms)
        if scale == 1:
            first = norms
    torch.testing.assert_close(norms, 100 * first)


def test_the_reference_draws_beside_the_functions_own_random_numbers() -> None:
    problem = per_sample_times(torch.float64)

    def noisy(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return problem.fn(z + 0.01 * torch.randn_like(z), t)

    transformed = jagg_fx.transform(noisy, lowering="reference", debias=0.5, denoiser=problem.model)
    torch.manual_seed(3)
    want = noisy(*problem.args)
    torch.manual_seed(3)
    assert torch.equal(transformed(*problem.args), want)


def test_a_function_that_is_not_the_same_when_it_runs_again_is_refused() -> None:
    problem = per_sample_times(torch.float64)
    order = iter(range(100))

    def drifting(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return problem.fn(z, t + next(order))

    with pytest.raises(NotRepeatableError, match="Draw what is random"):
        jagg_fx.transform(drifting, lowering="reference", denoiser=problem.model)(*problem.args)
