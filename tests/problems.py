"""Small replay functions of every shape that users write; each is a model, a function over it, and arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jagg_fx.models.digits_dit import DigitsDiT
from jagg_fx.models.linear_gaussian import GaussianVelocity
from jagg_fx.models.samplers import FlowSDE, replay, rollout, schedule

STEPS, BATCH, DIM = 9, 3, 8


@dataclass(frozen=True)
class Problem:
    """`fn(*args)` runs `model` over the steps; `parameters` are what the gradient is compared on."""

    model: nn.Module
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    parameters: list[Tensor]

    def run(self, fn: Callable[..., Any]) -> tuple[list[Tensor], Tensor]:
        """Outputs and the gradient of a fixed random functional of them, as one vector."""
        outputs = fn(*self.args)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        generator = torch.Generator().manual_seed(1)
        loss = sum((o * torch.randn(o.shape, generator=generator).to(o)).sum() for o in outputs if o.requires_grad)
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        flat = [
            (torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(self.parameters, gradients, strict=True)
        ]
        return [o.detach() for o in outputs], torch.cat(flat)


class MLP(nn.Module):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.outputs = outputs

    def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        t = t.to(z.dtype)
        h = torch.tanh(self.a(z) * (1 + (t[:, None] if t.dim() else t)))
        v = self.b(h if condition is None else h * condition)
        return v if self.outputs == 1 else (v, v.sum(-1).sin())


class TakesNumbers(MLP):
    """Accepts a number as diffusers' UNet does: a float becomes a float64 tensor."""

    def forward(self, z: Tensor, t: Any, condition: Tensor | None = None) -> Any:
        return super().forward(z, t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64), condition)


def path(dtype: torch.dtype, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """States `[N + 1, B, D]` and times `[N + 1]` from 1 to 0.2, not evenly spaced."""
    t = torch.linspace(1, 0.2, STEPS + 1, dtype=torch.float64) ** 1.5
    return torch.randn(STEPS + 1, batch, DIM, dtype=dtype), t.to(dtype)


def squared(z: Tensor, t: Tensor, i: int, v: Tensor) -> Tensor:
    return (z[i + 1] - z[i] - (t[i + 1] - t[i]) * v).square().mean(-1)


def _problem(
    model: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], extra: tuple[Tensor, ...] = ()
) -> Problem:
    return Problem(model, fn, args, [p for p in model.parameters() if p.requires_grad] + list(extra))


def per_sample_times(dtype: torch.dtype) -> Problem:
    model = MLP().to(dtype)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(z.shape[1]))) for i in range(STEPS)], 1)

    return _problem(model, fn, path(dtype))


def scalar_times(dtype: torch.dtype) -> Problem:
    model = MLP().to(dtype)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i])) for i in range(STEPS)], 1)

    return _problem(model, fn, path(dtype))


def different_times_per_sample(dtype: torch.dtype) -> Problem:
    model = MLP().to(dtype)
    z, t = path(dtype)
    shift = torch.tensor([0.0, 0.01, 0.02], dtype=dtype)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i] + shift)) for i in range(STEPS)], 1)

    return _problem(model, fn, (z, t))


def shuffled_times_per_sample(dtype: torch.dtype) -> Problem:
    """DanceGRPO's and DDPO's replay: every sample goes through its steps in an order of its own."""
    model = MLP().to(dtype)
    z, t = path(dtype)
    order = torch.stack([torch.randperm(STEPS) for _ in range(BATCH)], dim=1)

    def fn(z: Tensor, t: Tensor, order: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            samples = torch.arange(BATCH)
            now, later = z[order[i], samples], z[order[i] + 1, samples]
            losses.append((later - now - model(now, t[order[i]])).square().mean(-1))
        return torch.stack(losses, 1)

    return _problem(model, fn, (z, t, order))


def python_numbers(dtype: torch.dtype) -> Problem:
    model = TakesNumbers().to(dtype)
    times = [1 - 0.08 * i for i in range(STEPS + 1)]

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], times[i])) for i in range(STEPS)], 1)

    return _problem(model, fn, path(dtype))


def integer_times(dtype: torch.dtype) -> Problem:
    model = MLP().to(dtype)

    def fn(z: Tensor, t: Tensor, steps: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], steps[i].expand(BATCH))) for i in range(STEPS)], 1)

    return _problem(model, fn, (*path(dtype), torch.arange(STEPS, 0, -1)))


def keywords(dtype: torch.dtype) -> Problem:
    model = MLP().to(dtype)
    condition = torch.rand(BATCH, 2 * DIM, dtype=dtype)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack(
            [squared(z, t, i, model(condition=condition, t=t[i].expand(BATCH), z=z[i])) for i in range(STEPS)], 1
        )

    return _problem(model, fn, path(dtype))


def two_outputs(dtype: torch.dtype) -> Problem:
    model = MLP(outputs=2).to(dtype)

    def fn(z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [model(z[i], t[i].expand(BATCH)) for i in range(STEPS)]
        return torch.stack([squared(z, t, i, v) for i, (v, _) in enumerate(pairs)], 1), torch.stack(
            [s for _, s in pairs], 1
        )

    return _problem(model, fn, path(dtype))


def guidance_in_one_batch(dtype: torch.dtype) -> Problem:
    model = MLP().to(dtype)
    negative, positive = torch.rand(2, BATCH, 2 * DIM, dtype=dtype)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            times = t[i].expand(2 * BATCH)
            u, c = model(torch.cat([z[i], z[i]]), times, torch.cat([negative, positive])).chunk(2)
            losses.append(squared(z, t, i, u + 3 * (c - u)))
        return torch.stack(losses, 1)

    return _problem(model, fn, path(dtype))


def learned_condition(dtype: torch.dtype) -> Problem:
    """A trained embedding outside the denoiser, rebuilt by `torch.cat` at every step."""
    model = MLP().to(dtype)
    embedding = torch.rand(BATCH, DIM, dtype=dtype).requires_grad_()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack(
            [
                squared(z, t, i, model(z[i], t[i].expand(BATCH), torch.cat([embedding, 2 * embedding], 1)))
                for i in range(STEPS)
            ],
            1,
        )

    return _problem(model, fn, path(dtype), (embedding,))


def beside_a_reference(model: nn.Module) -> Callable[..., Tensor]:
    """The KL term of GRPO: the same module again under no_grad, between two trained calls."""

    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            v = model(z[i], t[i].expand(BATCH))
            with torch.no_grad():
                reference = model(z[i], t[i].expand(BATCH))
            losses.append(squared(z, t, i, v) + (v - 0.9 * reference).square().mean(-1))
        return torch.stack(losses, 1)

    return fn


def reference_model(dtype: torch.dtype) -> Problem:
    model = MLP().to(dtype)
    return _problem(model, beside_a_reference(model), path(dtype))


def frozen_base(dtype: torch.dtype) -> Problem:
    model = MLP().to(dtype)
    model.a.requires_grad_(False)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH))) for i in range(STEPS)], 1)

    return _problem(model, fn, path(dtype))


def sum_of_values(dtype: torch.dtype) -> Problem:
    """Cotangents that autograd makes by expansion, with stride zero."""
    model = MLP().to(dtype)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([model(z[i], t[i].expand(BATCH)).sum() for i in range(STEPS)])

    return _problem(model, fn, path(dtype))


def stacked_values(dtype: torch.dtype) -> Problem:
    """Cotangents that are slices of one tensor, each with its own offset."""
    model = MLP().to(dtype)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([model(z[i], t[i].expand(BATCH)) for i in range(STEPS)])

    return _problem(model, fn, path(dtype))


def batch_first(dtype: torch.dtype) -> Problem:
    """States `[B, N + 1, D]`, as trainers store them, sliced in the loop."""
    model = MLP().to(dtype)
    z, t = path(dtype)

    def fn(latents: Tensor, t: Tensor) -> Tensor:
        values = [model(latents[:, i], t[None, i].expand(BATCH)) for i in range(STEPS)]
        return torch.stack([(latents[:, i + 1] - v).square().mean(-1) for i, v in enumerate(values)], 1)

    return _problem(model, fn, (z.transpose(0, 1).contiguous(), t))


def half_square(dtype: torch.dtype) -> Problem:
    """A loss whose cotangent is the value itself."""
    model = MLP().to(dtype)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        values = [model(z[i], t[i].expand(BATCH)) for i in range(STEPS)]
        return torch.stack([(v * v.detach()).sum() for v in values])

    return _problem(model, fn, path(dtype))


def changed_in_place(dtype: torch.dtype) -> Problem:
    """Glue that writes into what the denoiser returned, and into views of it."""
    model = MLP().to(dtype)

    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            v = model(z[i], t[i].expand(BATCH))
            v.mul_(0.5).add_(z[i])
            v[:, 0].mul_(2)
            losses.append(squared(z, t, i, v))
        return torch.stack(losses, 1)

    return _problem(model, fn, path(dtype))


def gaussian(dtype: torch.dtype) -> Problem:
    """Flow-GRPO's own replay of a closed-form velocity."""
    model = GaussianVelocity(DIM).to(dtype)
    sigmas = schedule(STEPS + 1).to(dtype)
    latents = rollout(model, FlowSDE(), torch.randn(BATCH, DIM, dtype=dtype), sigmas).latents

    def fn(latents: Tensor, sigmas: Tensor) -> Tensor:
        return replay(model, FlowSDE(), latents, sigmas).log_probs

    return _problem(model, fn, (latents[: STEPS + 1], sigmas[: STEPS + 1]))


def digits_dit(dtype: torch.dtype) -> Problem:
    model = DigitsDiT(dim=16, depth=1, heads=2, patch=4).to(dtype)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    sigmas, labels = schedule(STEPS + 1).to(dtype), torch.arange(BATCH)
    latents = rollout(model, FlowSDE(), torch.randn(BATCH, 1, 8, 8, dtype=dtype), sigmas, labels).latents

    def fn(latents: Tensor, sigmas: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        result = replay(model, FlowSDE(), latents, sigmas, labels)
        return result.log_probs, result.means

    return _problem(model, fn, (latents[: STEPS + 1], sigmas[: STEPS + 1], labels))


PROBLEMS: dict[str, Callable[[torch.dtype], Problem]] = {
    make.__name__: make
    for make in (
        per_sample_times,
        scalar_times,
        different_times_per_sample,
        shuffled_times_per_sample,
        python_numbers,
        integer_times,
        keywords,
        two_outputs,
        guidance_in_one_batch,
        learned_condition,
        reference_model,
        frozen_base,
        sum_of_values,
        stacked_values,
        batch_first,
        half_square,
        changed_in_place,
        gaussian,
        digits_dit,
    )
}


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())
