"""The GRPO loss of the flow-matching trainers (Flow-GRPO, arXiv 2505.05470; DanceGRPO, arXiv 2505.07818)."""

from torch import Tensor


def group_advantages(rewards: Tensor, group_size: int, clip: float = 5.0) -> Tensor:
    """Advantages `[B]`: rewards `[B]` standardised within groups of consecutive samples, clipped to `[-clip, clip]`.

    `A = (r - mean) / (std + 1e-4)` over the samples of one prompt (DeepSeekMath, arXiv 2402.03300).

    Raises:
        ValueError: the batch is not a whole number of groups.
    """
    if len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not divide into groups of {group_size}.")
    groups = rewards.view(-1, group_size)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return advantages.view(-1).clamp(-clip, clip)


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_range: float = 1e-4,
    kl: Tensor | None = None,
    beta: float = 0.0,
) -> Tensor:
    """`mean(max(-A r, -A clip(r, 1 - c, 1 + c))) + beta mean(KL)` with `r = exp(log_prob - old_log_prob)`.

    Args:
        log_probs, old_log_probs: `[B, S]` under the current weights and those of the rollout.
        advantages: `[B]`.
        clip_range: `c`, dimensionless; 1e-4 to 1e-5 is usual, since log-probs are means over the elements.
        kl: optional `[B, S]`, see `gaussian_kl`.
        beta: weight of the KL term.
    """
    ratio = (log_probs - old_log_probs).exp()
    advantage = advantages[:, None]
    loss = (-advantage * ratio).maximum(-advantage * ratio.clamp(1 - clip_range, 1 + clip_range)).mean()
    return loss if kl is None else loss + beta * kl.mean()


def gaussian_kl(means: Tensor, reference_means: Tensor, stds: Tensor) -> Tensor:
    """KL `[B, S]` between steps of equal standard deviation: `mean((mu - mu_ref)^2) / (2 S^2)` over the elements.

    Args:
        means, reference_means: `[B, S, *]`.
        stds: `[S]`.
    """
    return (means - reference_means).square().flatten(2).mean(2) / (2 * stds.square())
