import pytest
import torch

from jagg_fx.models.grpo import gaussian_kl, group_advantages, grpo_loss


def test_advantages_are_standardised_per_group() -> None:
    advantages = group_advantages(torch.tensor([1.0, 2.0, 3.0, 10.0, 10.0, 10.0]), 3)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]), atol=2e-4, rtol=0)
    assert group_advantages(torch.tensor([0.0] * 99 + [1.0]), 100).max() == 5
    with pytest.raises(ValueError, match="5 rewards do not divide into groups of 3"):
        group_advantages(torch.rand(5), 3)


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    old, advantages = torch.randn(4, 3), torch.randn(4)
    log_probs = old.clone().requires_grad_()
    grpo_loss(log_probs, old, advantages).backward()
    torch.testing.assert_close(log_probs.grad, -advantages[:, None].expand(4, 3) / 12)


def test_the_clip_stops_the_gradient_on_the_far_side_only() -> None:
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    log_probs = torch.tensor([[0.1], [-0.1], [0.1], [-0.1]], requires_grad=True)
    grpo_loss(log_probs, torch.zeros(4, 1), advantages, clip_range=0.01).backward()
    assert log_probs.grad is not None
    assert (log_probs.grad.squeeze() != 0).tolist() == [False, True, True, False]


def test_the_kl_of_equal_variances() -> None:
    means, reference, stds = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.rand(3) + 0.5
    p = torch.distributions.Normal(means, stds[:, None])
    q = torch.distributions.Normal(reference, stds[:, None])
    want = torch.distributions.kl_divergence(p, q).mean(2)
    torch.testing.assert_close(gaussian_kl(means, reference, stds), want)
    loss = grpo_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), kl=want, beta=0.5)
    torch.testing.assert_close(loss, 0.5 * want.mean())
