"""The samplers' formulas against each other, by finite differences, and against what they imply."""

import itertools
import math

import pytest
import torch
from diffusers import DDIMScheduler

from jagg_fx.models.linear_gaussian import GaussianVelocity
from jagg_fx.models.samplers import CPS, DDIM, DanceSDE, Euler, FlowSDE, replay, rollout, schedule

SAMPLERS = [FlowSDE(0.7), DanceSDE(0.3), CPS(0.8)]
S, S_NEXT, S_MAX = (torch.tensor(x, dtype=torch.float64) for x in (0.8, 0.65, 0.9))


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(3, 4, 5, 6, dtype=torch.float64))  # type: ignore[return-value]


def test_schedule_runs_from_one_to_zero_and_shifts() -> None:
    assert schedule(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert schedule(4, shift=3.0)[2] == pytest.approx(3 * 0.5 / (1 + 2 * 0.5))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_mean_is_affine_in_v_with_the_published_slope(sampler: FlowSDE | DanceSDE | CPS) -> None:
    x, v, _ = tensors()
    mean = sampler.step(v, x, S, S_NEXT, S_MAX)[0]
    slope = (sampler.step(v + 1, x, S, S_NEXT, S_MAX)[0] - mean).mean()
    dt, s, s_next = float(S_NEXT - S), float(S), float(S_NEXT)
    if isinstance(sampler, FlowSDE):
        want = dt * (1 + sampler.noise_level**2 / 2)  # the std^2 (1 - s) / (2 s) of the formula, for s < 1
    elif isinstance(sampler, DanceSDE):
        want = dt * (1 + sampler.eta**2 * (1 - s) / (2 * s))
    else:
        std = s_next * math.sin(sampler.noise_level * math.pi / 2)
        want = (1 - s) * math.sqrt(s_next**2 - std**2) - s * (1 - s_next)
    assert float(slope) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_cotangent_of_v_by_finite_differences(sampler: FlowSDE | DanceSDE | CPS) -> None:
    x, v, y = tensors()

    def log_prob(v: torch.Tensor) -> torch.Tensor:
        mean, std = sampler.step(v, x, S, S_NEXT, S_MAX)
        return sampler.log_prob(y, mean, std).sum()

    assert torch.autograd.gradcheck(log_prob, (v.requires_grad_(),))


def test_flow_sde_and_dance_sde_agree_where_their_noise_does() -> None:
    x, v, _ = tensors()
    flow = FlowSDE(0.7)
    eta = 0.7 * math.sqrt(0.8 / 0.2)
    for a, b in zip(flow.step(v, x, S, S_NEXT, S_MAX), DanceSDE(eta).step(v, x, S, S_NEXT, S_MAX), strict=True):
        torch.testing.assert_close(a, b)


def test_without_noise_all_are_euler() -> None:
    x, v, _ = tensors()
    want = Euler().step(v, x, S, S_NEXT, S_MAX)[0]
    for sampler in (FlowSDE(0.0), DanceSDE(0.0), CPS(0.0)):
        mean, std = sampler.step(v, x, S, S_NEXT, S_MAX)
        torch.testing.assert_close(mean, want)
        assert float(std) == 0


@pytest.mark.parametrize("sampler", SAMPLERS[:2])
def test_the_log_prob_is_the_gaussians(sampler: FlowSDE | DanceSDE) -> None:
    x, v, y = tensors()
    mean, std = sampler.step(v, x, S, S_NEXT, S_MAX)
    want = torch.distributions.Normal(mean, std).log_prob(y).flatten(1).mean(1)
    torch.testing.assert_close(sampler.log_prob(y, mean, std), want)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_replay_repeats_the_rollouts_log_probs(sampler: FlowSDE | DanceSDE | CPS) -> None:
    model, sigmas = GaussianVelocity(6).double(), schedule(10).double()
    result = rollout(model, sampler, torch.randn(4, 6, dtype=torch.float64), sigmas)
    again = replay(model, sampler, result.latents[:10], sigmas[:10])
    assert torch.isfinite(again.log_probs).all()
    torch.testing.assert_close(again.log_probs, result.log_probs[:, :9])


def test_samples_follow_the_data_distribution() -> None:
    """The closed-form velocity is the right one: Euler and Flow-SDE both end in N(m, s^2)."""
    model, sigmas = GaussianVelocity(2).double(), schedule(200).double()
    for sampler in (Euler(), FlowSDE(0.5)):
        samples = rollout(model, sampler, torch.randn(20_000, 2, dtype=torch.float64), sigmas).latents[-1]
        # 20,000 samples: the mean is known to about 0.01 standard deviations, and the discretisation adds its own part.
        torch.testing.assert_close(samples.mean(0), model.mean.detach(), atol=0.05, rtol=0)
        torch.testing.assert_close(samples.std(0), model.log_std.exp().detach(), atol=0.05, rtol=0.05)


def test_euler_has_no_log_prob() -> None:
    with pytest.raises(NotImplementedError, match="deterministic"):
        Euler().log_prob(S, S, S)


@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_ddim_is_diffusers_ddim(eta: float) -> None:
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False
    )
    scheduler.set_timesteps(10)
    x, e, noise = torch.randn(3, 2, 4, 8, 8, dtype=torch.float64)
    for t, t_next in itertools.pairwise(scheduler.timesteps.tolist()):
        want = scheduler.step(e, t, x, eta=eta, variance_noise=noise, return_dict=False)[0]
        mean, std = DDIM(eta).step(e, x, torch.tensor(t / 1000), torch.tensor(t_next / 1000), torch.tensor(1.0))
        torch.testing.assert_close(mean + std * noise, want, rtol=1e-5, atol=1e-5)
