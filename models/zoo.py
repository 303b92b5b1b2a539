"""The denoisers of the public trainers, at the size of a test: real diffusers classes, random weights, real calls.

    family = zoo["flux"]
    denoiser = family.denoiser()                  # tiny, random weights; or FluxTransformer2DModel.from_pretrained(...)
    inputs = family.inputs(denoiser, batch=2, steps=6)
    log_probs = family.replay(denoiser)(inputs.latents, inputs.sigmas, inputs.conditions)

Everything is sized by `denoiser.config`, so that the same replay runs a real checkpoint. Each `velocity` passes the arguments
of one public training script: names, time scaling, packed latents, guidance, ids, masks, Python lists.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from torch import Tensor, nn

from jagg_fx.models.samplers import DDIM, FlowSDE, Sampler, replay, rollout, schedule

Conditions = dict[str, Any]
SIDE = 4  # latent height and width: four tokens for models with patches of two
TEXT = 5  # text tokens


@dataclass(frozen=True)
class Inputs:
    """What one update replays.

    Attributes:
        latents: stored states `[steps + 1, B, *]`.
        sigmas: their noise levels `[steps + 1]`, in (0, 1].
        conditions: the denoiser's other arguments for the prompt.
        negative: the same for the negative prompt of classifier-free guidance.
    """

    latents: Tensor
    sigmas: Tensor
    conditions: Conditions
    negative: Conditions


@dataclass(frozen=True)
class Family:
    """One class of denoisers and how trainers call it.

    Attributes:
        name: key in `zoo`.
        kind: the diffusers class.
        config: arguments of a tiny instance.
        state: shape of one sample's state, from the model's config.
        conditions: `(config, batch) -> arguments` besides state and time.
        time_scale: what the script multiplies sigma by.
        unbatched: names of conditions without a batch dimension.
        sampler: the sampler of the rollouts.
        lora_targets: the layers that the scripts adapt.
        source: where the call is written this way.
    """

    name: str
    kind: Any
    config: Mapping[str, Any]
    state: Callable[[Any], tuple[int, ...]]
    conditions: Callable[[Any, int], Conditions]
    time_scale: float
    source: str
    unbatched: tuple[str, ...] = ()
    sampler: Sampler = field(default_factory=FlowSDE)
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")

    def denoiser(self, **changes: Any) -> nn.Module:
        """A tiny instance with random weights; zero-initialised layers are made random too, so that gradients flow."""
        model: nn.Module = self.kind(**{**self.config, **changes})
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.02)
        return model

    def inputs(self, denoiser: nn.Module, batch: int = 2, steps: int = 6) -> Inputs:
        """A rollout of `steps` steps (and one more, which trainers leave out) and two sets of conditions."""
        config: Any = denoiser.config
        conditions, negative = self.conditions(config, batch), self.conditions(config, batch)
        negative.update({name: conditions[name] for name in self.unbatched})
        sigmas = schedule(steps + 1, shift=3.0)
        step = functools.partial(self.velocity, denoiser, conditions=conditions)
        latents = rollout(step, self.sampler, torch.randn(batch, *self.state(config)), sigmas).latents
        return Inputs(latents[: steps + 1], sigmas[: steps + 1], conditions, negative)

    def velocity(self, denoiser: Any, x: Tensor, t: Any, conditions: Conditions, return_dict: bool = False) -> Tensor:
        """The call itself: state `[B, *]`, time in sigma (a tensor `[B]` or `[]`, or a number), velocity `[B, *]`."""
        output = denoiser(x, timestep=t * self.time_scale, **conditions, return_dict=return_dict)
        velocity: Tensor = output.sample if return_dict else output[0]
        return velocity

    def replay(self, denoiser: Any) -> Callable[[Tensor, Tensor, Conditions], Tensor]:
        """`(latents, sigmas, conditions) -> log-probs [B, steps]`, as one update of a trainer computes them."""

        def log_probs(latents: Tensor, sigmas: Tensor, conditions: Conditions) -> Tensor:
            step = functools.partial(self.velocity, denoiser, conditions=conditions)
            return replay(step, self.sampler, latents, sigmas).log_probs

        return log_probs

    def concatenate(self, negative: Conditions, conditions: Conditions) -> Conditions:
        """One batch of both, the negative first, for guidance in one call."""
        return {
            name: value if name in self.unbatched or value is None else _join(negative[name], value)
            for name, value in conditions.items()
        }


def _join(a: Any, b: Any) -> Any:
    return torch.cat([a, b]) if isinstance(a, Tensor) else a + b


def _sd3(config: Any, batch: int) -> Conditions:
    return {
        "encoder_hidden_states": torch.randn(batch, TEXT, config.joint_attention_dim),
        "pooled_projections": torch.randn(batch, config.pooled_projection_dim),
    }


def _flux(config: Any, batch: int) -> Conditions:
    rows = torch.arange(SIDE)
    ids = torch.stack([torch.zeros(SIDE, SIDE), rows[:, None].expand(SIDE, SIDE), rows.expand(SIDE, SIDE)], dim=-1)
    return {
        "guidance": torch.full((batch,), 3.5) if config.guidance_embeds else None,
        "pooled_projections": torch.randn(batch, config.pooled_projection_dim),
        "encoder_hidden_states": torch.randn(batch, TEXT, config.joint_attention_dim),
        "txt_ids": torch.zeros(TEXT, 3),
        "img_ids": ids.reshape(-1, 3).float(),
        "joint_attention_kwargs": None,
    }


def _wan(config: Any, batch: int) -> Conditions:
    return {"encoder_hidden_states": torch.randn(batch, TEXT, config.text_dim), "attention_kwargs": None}


def _qwen(config: Any, batch: int) -> Conditions:
    return {
        "guidance": None,
        "encoder_hidden_states": torch.randn(batch, TEXT, config.joint_attention_dim),
        "encoder_hidden_states_mask": torch.ones(batch, TEXT, dtype=torch.long),
        "img_shapes": [[(1, SIDE, SIDE)]] * batch,
    }


def _sana(config: Any, batch: int) -> Conditions:
    return {
        "encoder_hidden_states": torch.randn(batch, TEXT, config.caption_channels),
        "encoder_attention_mask": torch.ones(batch, TEXT, dtype=torch.long),
    }


def _unet(config: Any, batch: int) -> Conditions:
    return {"encoder_hidden_states": torch.randn(batch, TEXT, config.cross_attention_dim)}


def _image(config: Any) -> tuple[int, ...]:
    return config.in_channels, SIDE, SIDE


def _video(config: Any) -> tuple[int, ...]:
    return config.in_channels, 1, SIDE, SIDE


def _packed(config: Any) -> tuple[int, ...]:
    return SIDE * SIDE, config.in_channels


zoo: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="sd3",
            kind=SD3Transformer2DModel,
            config={
                "sample_size": 8,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 8,
                "num_attention_heads": 2,
                "joint_attention_dim": 16,
                "caption_projection_dim": 16,
                "pooled_projection_dim": 16,
                "pos_embed_max_size": 8,
            },
            state=_image,
            conditions=_sd3,
            time_scale=1000,
            source="Flow-GRPO, scripts/train_sd3.py",
        ),
        Family(
            name="flux",
            kind=FluxTransformer2DModel,
            config={
                "in_channels": 8,
                "num_layers": 1,
                "num_single_layers": 1,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 16,
                "pooled_projection_dim": 16,
                "guidance_embeds": True,
                "axes_dims_rope": (4, 4, 8),
            },
            state=_packed,
            conditions=_flux,
            time_scale=1,
            unbatched=("txt_ids", "img_ids", "joint_attention_kwargs"),
            source="Flow-GRPO, scripts/train_flux.py",
        ),
        Family(
            name="wan",
            kind=WanTransformer3DModel,
            config={
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 12,
                "num_attention_heads": 2,
                "text_dim": 16,
                "freq_dim": 16,
                "ffn_dim": 32,
                "rope_max_seq_len": 32,
            },
            state=_video,
            conditions=_wan,
            time_scale=1000,
            unbatched=("attention_kwargs",),
            source="Flow-GRPO, scripts/train_wan2_1.py",
        ),
        Family(
            name="qwen",
            kind=QwenImageTransformer2DModel,
            config={
                "in_channels": 16,
                "out_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 16,
                "axes_dims_rope": (4, 4, 8),
            },
            state=_packed,
            conditions=_qwen,
            time_scale=1,
            source="Flow-GRPO, scripts/train_qwenimage.py",
        ),
        Family(
            name="sana",
            kind=SanaTransformer2DModel,
            config={
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 8,
                "num_attention_heads": 2,
                "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 8,
                "cross_attention_dim": 16,
                "caption_channels": 16,
                "sample_size": 4,
            },
            state=_image,
            conditions=_sana,
            time_scale=1000,
            source="diffusers, pipelines/sana/pipeline_sana.py",
        ),
        Family(
            name="unet",
            kind=UNet2DConditionModel,
            config={
                "sample_size": 4,
                "block_out_channels": (16, 32),
                "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
                "layers_per_block": 1,
                "cross_attention_dim": 16,
                "attention_head_dim": 8,
                "norm_num_groups": 8,
            },
            state=_image,
            conditions=_unet,
            time_scale=1000,
            sampler=DDIM(),
            source="DDPO, scripts/train.py; TRL, ddpo_trainer.py",
        ),
    )
}
