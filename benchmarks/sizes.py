"""A ladder of denoisers, and the replay of a GRPO loss over their stored latents that the benchmarks time.

digits  the trained digits DiT: 4 blocks, 128 wide, 16 tokens
small   a DiT of 6 blocks, 384 wide, 64 tokens
medium  a DiT of 12 blocks, 768 wide, 256 tokens
sd3     diffusers' SD3Transformer2DModel as in SD3-medium: 24 blocks, 1536 wide, 1024 image and 154 text tokens
flux    diffusers' FluxTransformer2DModel with FLUX.1's blocks of 3072, 1024 image and 512 text tokens, but 4 double and 8 single
        of its 19 and 38: with weights, gradients and AdamW's moments all of them would not leave room for activations on one GPU

All but the first have random weights.
"""

import argparse
import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import positive
from jagg_fx.models.digits_dit import IMAGE_SIZE, NUM_CLASSES, DigitsDiT, load_digits_dit
from jagg_fx.models.grpo import grpo_loss
from jagg_fx.models.samplers import FlowSDE, gains, replay, rollout, schedule
from jagg_fx.plan import Plan, Rule, Schedule, budget

SAMPLER = FlowSDE(0.7)
Conditions = dict[str, Tensor]
LogProbs = Callable[[Tensor, Tensor, Conditions], Tensor]  # of latents [S + 1, B, *] at sigmas [S + 1]: [B, S]


@dataclass(frozen=True)
class Size:
    """One rung of the ladder.

    Attributes:
        make: the model of so many blocks.
        blocks: how many it has.
        state: shape of one sample.
        conditions: `batch -> arguments` besides state and time.
        batch: samples of an update, by device.
        time_scale: what the model's times are, in sigmas.
        dtype: of the weights on a GPU; on a CPU they are float32.
    """

    make: Callable[[int], nn.Module]
    blocks: int
    state: tuple[int, ...]
    conditions: Callable[[int], Conditions]
    batch: Mapping[str, int]
    time_scale: float = 1.0
    dtype: torch.dtype = torch.bfloat16


def _labels(batch: int) -> Conditions:
    return {"labels": torch.arange(batch) % NUM_CLASSES}


def _dit(dim: int, blocks: int, heads: int, image_size: int, cpu: int, cuda: int) -> Size:
    def make(blocks: int) -> nn.Module:
        return DigitsDiT(dim, blocks, heads, image_size=image_size)

    return Size(make, blocks, (1, image_size, image_size), _labels, {"cpu": cpu, "cuda": cuda})


def _digits(blocks: int) -> nn.Module:
    trained = load_digits_dit()
    return trained if blocks == len(trained.blocks) else DigitsDiT(depth=blocks)


def _sd3(blocks: int, heads: int, side: int, text: int, joint: int, pooled: int, cuda: int) -> Size:
    def make(blocks: int) -> nn.Module:
        from diffusers import SD3Transformer2DModel

        model: nn.Module = SD3Transformer2DModel(
            num_layers=blocks,
            num_attention_heads=heads,
            attention_head_dim=64,
            caption_projection_dim=64 * heads,
            joint_attention_dim=joint,
            pooled_projection_dim=pooled,
            pos_embed_max_size=max(192, side),
        )
        return model

    def conditions(batch: int) -> Conditions:
        text_states = torch.randn(batch, text, joint)
        return {"encoder_hidden_states": text_states, "pooled_projections": torch.randn(batch, pooled)}

    return Size(make, blocks, (16, side, side), conditions, {"cpu": 1, "cuda": cuda}, time_scale=1000.0)


def _flux(blocks: int, heads: int, side: int, text: int, joint: int, pooled: int, cuda: int) -> Size:
    def make(blocks: int) -> nn.Module:
        from diffusers import FluxTransformer2DModel

        model: nn.Module = FluxTransformer2DModel(
            num_layers=blocks // 3,
            num_single_layers=blocks - blocks // 3,
            num_attention_heads=heads,
            joint_attention_dim=joint,
            pooled_projection_dim=pooled,
            guidance_embeds=True,
        )
        return model

    def conditions(batch: int) -> Conditions:
        rows = torch.arange(side)
        ids = torch.stack([torch.zeros(side, side), rows[:, None].expand(side, side), rows.expand(side, side)], dim=-1)
        return {
            "guidance": torch.full((batch,), 3.5),
            "encoder_hidden_states": torch.randn(batch, text, joint),
            "pooled_projections": torch.randn(batch, pooled),
            "txt_ids": torch.zeros(text, 3),
            "img_ids": ids.reshape(-1, 3),
        }

    return Size(make, blocks, (side * side, 64), conditions, {"cpu": 1, "cuda": cuda})


SIZES = {
    "digits": replace(_dit(128, 4, 4, IMAGE_SIZE, cpu=96, cuda=96), make=_digits, dtype=torch.float32),
    "small": _dit(384, 6, 6, 16, cpu=8, cuda=96),
    "medium": _dit(768, 12, 12, 32, cpu=2, cuda=32),
    "sd3": _sd3(24, 24, side=64, text=154, joint=4096, pooled=2048, cuda=2),
    "flux": _flux(12, 24, side=32, text=512, joint=4096, pooled=768, cuda=1),
}
QUICK = {
    "digits": replace(_dit(32, 1, 2, IMAGE_SIZE, cpu=4, cuda=4), dtype=torch.float32),
    "small": _dit(32, 2, 2, IMAGE_SIZE, cpu=4, cuda=4),
    "medium": _dit(48, 3, 2, IMAGE_SIZE, cpu=4, cuda=4),
    "sd3": _sd3(2, 1, side=4, text=5, joint=16, pooled=16, cuda=2),
    "flux": _flux(3, 1, side=2, text=5, joint=16, pooled=16, cuda=2),
}


@dataclass(frozen=True)
class Problem:
    """A replay to train on: a model and what one update needs.

    Attributes:
        latents: stored states `[N + 1, B, *]` of the trained steps and the one after, float32.
        sigmas: their noise levels `[N + 1]`.
        conditions: what the model takes besides state and time.
        log_probs: of the rollout `[B, N]`.
        advantages: `[B]`.
        velocities: what the model returned in the rollout `[N, B, *]`.
    """

    size: Size
    model: nn.Module
    latents: Tensor
    sigmas: Tensor
    conditions: Conditions
    log_probs: Tensor
    advantages: Tensor
    velocities: Tensor

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    def call(self, model: Callable[..., Any], x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        """The velocity `[B, *]` in the model's dtype, at noise levels `[B]`."""
        output = model(hidden_states=x.to(self.velocities.dtype), timestep=t * self.size.time_scale, **conditions)
        velocity: Tensor = output if isinstance(output, Tensor) else output[0]
        return velocity

    def replay(self, model: Callable[..., Any]) -> LogProbs:
        """A function of `(latents, sigmas, conditions)`; the model is what is called, e.g. compiled or the model itself."""

        def log_probs(latents: Tensor, sigmas: Tensor, conditions: Conditions) -> Tensor:
            def denoiser(x: Tensor, t: Tensor) -> Tensor:
                return self.call(model, x, t, conditions).float()

            return replay(denoiser, SAMPLER, latents, sigmas).log_probs

        return log_probs

    def loss(self, log_probs: LogProbs) -> Tensor:
        values = log_probs(self.latents, self.sigmas, self.conditions)
        return grpo_loss(values, self.log_probs, self.advantages)

    def plan(self, K: int) -> Plan:
        """`K` knots placed by the schedule alone."""
        known = Schedule.create(self.sigmas[:-1].cpu(), gains(SAMPLER, self.sigmas.cpu()))
        return budget(K, schedule=known).place(self.num_steps, Rule())

    def twin(self) -> nn.Module:
        """Another module with the same parameters and buffers."""
        shared = {id(tensor): tensor for tensor in itertools.chain(self.model.parameters(), self.model.buffers())}
        return copy.deepcopy(self.model, shared)


def add_size_arguments(options: argparse.ArgumentParser, default: str, steps: int | list[int] = 9) -> None:
    """`--size`, `--batch` and `--steps`: one number, or several where the default is a list."""
    options.add_argument("--size", choices=SIZES, default=default, help=f"the denoiser (default {default})")
    several = "+" if isinstance(steps, list) else None
    options.add_argument(
        "--steps", type=positive, nargs=several, default=steps, help=f"trained steps N (default {steps})"
    )
    options.add_argument(
        "--batch", type=positive, help="samples of an update (default: by size and device, or the benchmark's own)"
    )


def add_blocks_argument(options: argparse.ArgumentParser) -> None:
    """`--blocks`: a denoiser as wide as the size says, but shallower."""
    options.add_argument("--blocks", type=positive, help="blocks of the denoiser (default: by size)")


def named_size(args: argparse.Namespace) -> str:
    """The size, and the number of blocks where one was chosen."""
    return f"{args.size} with {args.blocks} blocks" if args.blocks else args.size


def make_problem(
    name: str, device: str, steps: int = 9, batch: int | None = None, quick: bool = False, blocks: int | None = None
) -> Problem:
    """A problem of the ladder: the trained `steps` of a rollout with one step more, as Flow-GRPO has it."""
    size = (QUICK if quick else SIZES)[name]
    torch.manual_seed(0)
    dtype = size.dtype if device == "cuda" else torch.float32
    model = size.make(blocks or size.blocks)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # adaLN-zero starts with gates of zero
                parameter.normal_(std=0.02)
    model = model.to(device, dtype)
    batch = batch or size.batch[device]
    conditions = {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        for name, value in size.conditions(batch).items()
    }
    empty = torch.empty(0, dtype=dtype)
    sigmas = schedule(steps + 1, shift=1.0 if name == "digits" else 3.0).to(device)
    bare = Problem(size, model, empty, sigmas, conditions, empty, empty, velocities=empty)
    velocities: list[Tensor] = []

    def denoiser(x: Tensor, t: Tensor) -> Tensor:
        velocities.append(bare.call(model, x, t, conditions))
        return velocities[-1].float()

    latents, log_probs = rollout(denoiser, SAMPLER, torch.randn(batch, *size.state).to(device), sigmas)
    return replace(
        bare,
        latents=latents[: steps + 1],
        sigmas=sigmas[: steps + 1],
        log_probs=log_probs[:, :steps],
        advantages=torch.randn(batch).to(device),
        velocities=torch.stack(velocities[:steps]),
    )


def blocks_of(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of repeated blocks."""
    return [child for child in model.children() if isinstance(child, nn.ModuleList)]


class Checkpointed(nn.Module):
    """A block that keeps its inputs alone and runs again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def checkpoint_blocks(model: nn.Module) -> None:
    """Gradient checkpointing in every block."""
    if hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    else:
        for blocks in blocks_of(model):
            for i, block in enumerate(blocks):
                blocks[i] = Checkpointed(block)
