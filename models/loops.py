"""Four public RL trainers of diffusion models, small: their inner loops, in this project's words and from the formulas.

    updates = flow_grpo(denoiser, optimizer, torch.Generator().manual_seed(0), prompts)

They have one shape, DDPO's: a rollout without gradients stores states and log-probs; then, for every micro-batch, a loop over
timesteps recomputes one step's log-prob and calls `backward()` there and then, before the next step; the optimizer steps when
enough backwards have been accumulated. The steps are independent: no gradient flows from state to state.

Each keeps its trainer's own calls, orders and divisions. Left out is what stands around them: data, text encoders, VAE, reward
models (a plain function of the last state stands in), logging, processes. Of the denoiser only the call, `parameters()`,
`train()`, `eval()` and `disable_adapter()` are used, so that a module that wraps one can take its place. All randomness is
drawn from the generator, which lives on the device of the prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from jagg_fx.models.grpo import gaussian_kl, group_advantages, grpo_loss
from jagg_fx.models.samplers import DDIM, DanceSDE, Euler, FlowSDE, Rollout, Sampler, rollout, schedule

MAX_NORM = 1.0  # of the gradient, in all four


class Prompts(NamedTuple):
    """What a loop samples for.

    Attributes:
        conditions: what the denoiser takes besides state and time, for every prompt `[P, *]` (see `zoo.Family.conditions`).
        negative: the same for the negative prompts of classifier-free guidance.
        shape: of one sample's state.
    """

    conditions: Mapping[str, Any]
    negative: Mapping[str, Any]
    shape: tuple[int, ...]

    @property
    def embeddings(self) -> Tensor:
        """`[P, L, D]`; states take their dtype and device."""
        embeddings: Tensor = self.conditions["encoder_hidden_states"]
        return embeddings

    def rows(self, group: int) -> Tensor:
        """The prompt of each sample `[P group]`; the samples of a group are neighbours."""
        return torch.arange(len(self.embeddings), device=self.embeddings.device).repeat_interleave(group)

    def noise(self, count: int, generator: Generator) -> Tensor:
        """`[count, *shape]`."""
        return self.embeddings.new_empty(count, *self.shape).normal_(generator=generator)


class Update(NamedTuple):
    """One optimizer step.

    Attributes:
        loss: the mean of the losses that went into it.
        ratio: the probability ratio to the rollout's weights that is farthest from 1.
    """

    loss: float
    ratio: float


class _Accumulation:
    """Gradient accumulation as accelerate has it: `step` is called after every backward, and acts after every `n`-th."""

    def __init__(self, denoiser: Any, optimizer: Optimizer, n: int, scaler: GradScaler | None = None) -> None:
        self.updates: list[Update] = []
        self._denoiser, self._optimizer = denoiser, optimizer
        self._scaler = scaler or GradScaler(enabled=False)  # then all its methods pass through
        self._n = n
        self._losses: list[float] = []
        self._ratios: list[float] = []

    def backward(
        self, log_prob: Tensor, old: Tensor, advantages: Tensor, kl: Tensor | None = None, beta: float = 0.0
    ) -> None:
        """Clipped PPO's gradient for one step of some samples, each argument `[B]`."""
        kl = kl if kl is None else kl[:, None]
        loss = grpo_loss(log_prob[:, None], old[:, None], advantages, kl=kl, beta=beta)
        self._scaler.scale(loss / self._n).backward()
        self._losses.append(loss.item())
        self._ratios += (log_prob.detach() - old).exp().tolist()

    def step(self) -> None:
        if len(self._losses) < self._n:
            return
        self._scaler.unscale_(self._optimizer)
        torch.nn.utils.clip_grad_norm_(self._denoiser.parameters(), MAX_NORM)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        ratio = max(self._ratios, key=lambda ratio: abs(ratio - 1))
        self.updates.append(Update(sum(self._losses) / self._n, ratio))
        self._losses, self._ratios = [], []


def reward(states: Tensor) -> Tensor:
    """`-|mean(x) - 1/2|` `[B]` of the last states `[B, *]`. It stands for a reward model: nothing differentiates it."""
    return -(states.flatten(1).mean(1) - 0.5).abs()


def _permutation(n: int, generator: Generator) -> Tensor:
    return torch.randperm(n, generator=generator, device=generator.device)


def flow_grpo(
    denoiser: Any,
    optimizer: Optimizer,
    generator: Generator,
    prompts: Prompts,
    *,
    steps: int = 10,
    group: int = 4,
    micro_batch: int = 2,
    accumulation: int = 2,
    guidance: float = 4.5,
    beta: float = 0.04,
) -> list[Update]:
    """Flow-GRPO on SD3 with LoRA (arXiv 2505.05470; yifan123/flow_grpo, scripts/train_sd3.py).

    Guidance is part of the trained forward, in one batch, the negative first. All steps but the last are trained, in the order of
    sampling: `steps - 1` backwards per micro-batch. The KL term's reference is the model without its adapter, called between the
    policy's call and the loss; its denominator is `2 std^2` of the SDE, without the step's `-dt`.
    """
    sampler, sigmas, trained = FlowSDE(0.7), schedule(steps, shift=3.0).to(prompts.embeddings), steps - 1
    rows = prompts.rows(group)

    def velocity(x: Tensor, s: Tensor, rows: Tensor = rows) -> Tensor:
        both = {name: torch.cat([prompts.negative[name][rows], c[rows]]) for name, c in prompts.conditions.items()}
        times = 1000 * torch.cat([s, s])
        v = denoiser(hidden_states=torch.cat([x, x]), timestep=times, **both, return_dict=False)[0]
        negative, text = v.chunk(2)
        guided: Tensor = negative + guidance * (text - negative)
        return guided

    states, old_log_probs = rollout(velocity, sampler, prompts.noise(len(rows), generator), sigmas, generator=generator)
    advantages = group_advantages(reward(states[-1]), group)

    training = _Accumulation(denoiser, optimizer, accumulation * trained)
    for batch in _permutation(len(rows), generator).split(micro_batch):
        for j in range(trained):
            x, x_next, old, s = states[j, batch], states[j + 1, batch], old_log_probs[batch, j], sigmas[j]
            levels = s, sigmas[j + 1], sigmas[1]
            mean, std = sampler.step(velocity(x, s.expand(len(x)), rows[batch]), x, *levels)
            log_prob = sampler.log_prob(x_next, mean, std)
            with torch.no_grad(), denoiser.disable_adapter():
                reference, _ = sampler.step(velocity(x, s.expand(len(x)), rows[batch]), x, *levels)
            kl = gaussian_kl(mean[:, None], reference[:, None], std / (s - sigmas[j + 1]).sqrt())[:, 0]
            training.backward(log_prob, old, advantages[batch], kl, beta)
            training.step()
    return training.updates


@dataclass(frozen=True)
class _Flux:
    """What DanceGRPO and MixGRPO share: FLUX's call for one sample `[1, *]`, its sampling, and its log-prob.

    The time is in thousandths, cut to integers on the host. The model is put in train or eval mode before every call; autocast is
    around the call alone, and the step that follows is not in half precision.
    """

    denoiser: Any
    prompts: Prompts
    sigmas: Tensor
    autocast: bool = False

    def rollout(self, samplers: Sequence[Sampler], noise: Tensor, row: int, generator: Generator) -> Rollout:
        """One sampler a step."""

        def velocity(x: Tensor, s: Tensor) -> Tensor:
            self.denoiser.eval()
            return self._velocity(x, s, row)

        states, log_probs = [noise], []
        for j, sampler in enumerate(samplers):
            step = rollout(velocity, sampler, states[-1], self.sigmas[j : j + 2], generator=generator)
            states.append(step.latents[1])
            log_probs.append(step.log_probs)
        return Rollout(torch.stack(states), torch.cat(log_probs, dim=1))

    def log_prob(self, sampler: Sampler, states: Tensor, j: int, row: int) -> Tensor:
        """`[1]`, of step `j` of the states `[N + 1, 1, *]`."""
        self.denoiser.train()
        v = self._velocity(states[j], self.sigmas[j], row)
        mean, std = sampler.step(v, states[j], self.sigmas[j], self.sigmas[j + 1], self.sigmas[1])
        return sampler.log_prob(states[j + 1], mean, std)

    def train(
        self,
        training: _Accumulation,
        sampler: Sampler,
        rows: Sequence[int],
        rollouts: Sequence[Rollout],
        advantages: Tensor,
        orders: Sequence[Sequence[int]],
    ) -> None:
        """Sample after sample, with a backward for each step of its order."""
        samples = zip(rows, rollouts, advantages.split(1), orders, strict=True)
        for row, (states, old_log_probs), advantage, order in samples:
            for j in order:
                log_prob, old = self.log_prob(sampler, states, j, row), old_log_probs[:, j]
                training.backward(log_prob, old, advantage)
                training.step()

    def _velocity(self, x: Tensor, s: Tensor, row: int) -> Tensor:
        conditions = self.prompts.conditions
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            v: Tensor = self.denoiser(
                hidden_states=x,
                encoder_hidden_states=conditions["encoder_hidden_states"][row : row + 1],
                timestep=torch.full((1,), int(s * 1000), device=x.device) / 1000,
                guidance=torch.tensor([3.5], device=x.device, dtype=x.dtype),
                txt_ids=conditions["txt_ids"],
                pooled_projections=conditions["pooled_projections"][row : row + 1],
                img_ids=conditions["img_ids"],
                joint_attention_kwargs=None,
                return_dict=False,
            )[0]
        return v.to(x.dtype)


def dance_grpo(
    denoiser: Any,
    optimizer: Optimizer,
    generator: Generator,
    prompts: Prompts,
    *,
    steps: int = 10,
    group: int = 2,
    accumulation: int = 2,
    fraction: float = 0.6,
    autocast: bool = False,
) -> list[Update]:
    """DanceGRPO on FLUX, all weights (arXiv 2505.07818; XueZeyue/DanceGRPO, fastvideo/train_grpo_flux.py).

    Samples are trained one at a time. Each permutes its steps (all but the last) at random and trains the first `fraction` of
    them: `int(fraction (steps - 1))` backwards. The samples of a group start from the same noise.
    """
    sampler, trained = DanceSDE(0.3), int(fraction * (steps - 1))
    flux = _Flux(denoiser, prompts, schedule(steps, shift=3.0).to(prompts.embeddings), autocast)
    rows = prompts.rows(group).tolist()
    noise = prompts.noise(len(prompts.embeddings), generator)
    rollouts = [flux.rollout([sampler] * steps, noise[row : row + 1], row, generator) for row in rows]
    advantages = group_advantages(reward(torch.cat([sample.latents[-1] for sample in rollouts])), group)
    orders = [_permutation(steps - 1, generator)[:trained].tolist() for _ in rows]

    training = _Accumulation(denoiser, optimizer, accumulation * trained)
    flux.train(training, sampler, rows, rollouts, advantages, orders)
    return training.updates


def mix_grpo(
    denoiser: Any,
    optimizer: Optimizer,
    generator: Generator,
    prompts: Prompts,
    *,
    steps: int = 8,
    iterations: int = 2,
    group: int = 2,
    window: int = 4,
) -> list[Update]:
    """MixGRPO on FLUX, all weights (arXiv 2507.21802; Tencent-Hunyuan/MixGRPO, fastvideo/train_grpo_flux.py).

    Only a window of consecutive steps is stochastic (Flow-SDE) and trained, in the order of sampling: `window` backwards per
    sample. The other steps are Euler's. An iteration is a rollout and an update; after it the window moves on by one step
    (theirs: after 25). Samples are trained one at a time.
    """
    sampler = FlowSDE(0.7)
    flux = _Flux(denoiser, prompts, schedule(steps, shift=3.0).to(prompts.embeddings))
    rows = prompts.rows(group).tolist()
    training = _Accumulation(denoiser, optimizer, len(rows) * window)
    for first in range(iterations):
        inside = range(first, first + window)
        samplers = [sampler if j in inside else Euler() for j in range(steps)]
        rollouts = [flux.rollout(samplers, prompts.noise(1, generator), row, generator) for row in rows]
        advantages = group_advantages(reward(torch.cat([sample.latents[-1] for sample in rollouts])), group)
        flux.train(training, sampler, rows, rollouts, advantages, [inside] * len(rows))
    return training.updates


def ddpo(
    denoiser: Any,
    optimizer: Optimizer,
    generator: Generator,
    prompts: Prompts,
    *,
    steps: int = 10,
    group: int = 2,
    inner_epochs: int = 2,
    micro_batch: int = 2,
    accumulation: int = 2,
    guidance: float = 5.0,
    scaler: GradScaler | None = None,
) -> list[Update]:
    """DDPO on Stable Diffusion's UNet (arXiv 2305.13301; kvablack/ddpo-pytorch, scripts/train.py).

    Every inner epoch shuffles the samples, and for every sample its steps: those of a micro-batch are at different timesteps. All
    steps are trained: `steps` backwards per micro-batch. Guidance is part of the trained forward, in one batch. Advantages
    are those of groups here, of a prompt's history there. A `scaler` scales the loss, as fp16 needs it.
    """
    timesteps = 1000 // steps * torch.arange(steps - 1, -1, -1) + 1  # 901, 801, .., 1: "leading" spacing, offset by one
    sampler, sigmas = DDIM(1.0), (torch.cat([timesteps, torch.zeros(1)]) / 1000).to(prompts.embeddings)
    rows = prompts.rows(group)

    def epsilon(x: Tensor, s: Tensor, rows: Tensor = rows) -> Tensor:
        t = (1000 * s).round().long()
        both = torch.cat([prompts.negative["encoder_hidden_states"][rows], prompts.embeddings[rows]])
        negative, text = denoiser(torch.cat([x, x]), torch.cat([t, t]), both).sample.chunk(2)
        guided: Tensor = negative + guidance * (text - negative)
        return guided

    states, old_log_probs = rollout(epsilon, sampler, prompts.noise(len(rows), generator), sigmas, generator=generator)
    advantages = group_advantages(reward(states[-1]), group)

    training = _Accumulation(denoiser, optimizer, accumulation * steps, scaler)
    for _ in range(inner_epochs):
        samples = _permutation(len(rows), generator)
        orders = torch.stack([_permutation(steps, generator) for _ in rows])
        for batch, order in zip(samples.split(micro_batch), orders.split(micro_batch), strict=True):
            for j in order.unbind(1):  # [B]: every sample is at a step of its own
                x, x_next, old = states[j, batch], states[j + 1, batch], old_log_probs[batch, j]
                s, s_next = (level.view(-1, *[1] * len(prompts.shape)) for level in (sigmas[j], sigmas[j + 1]))
                mean, std = sampler.step(epsilon(x, sigmas[j], rows[batch]), x, s, s_next, sigmas[1])
                log_prob = sampler.log_prob(x_next, mean, std)
                training.backward(log_prob, old, advantages[batch])
                training.step()
    return training.updates
