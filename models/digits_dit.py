"""A small flow-matching diffusion transformer (DiT) on scikit-learn's 8x8 digits.

Architecture: Peebles & Xie, "Scalable Diffusion Models with Transformers" (arXiv 2212.09748), with adaLN-zero
blocks, 2x2 patches, a learned position embedding and class conditioning. The network predicts the rectified-flow
velocity of Liu et al. (arXiv 2209.03003): `v = eps - x0` at `z_t = (1 - t) x0 + t eps`, so `t = 1` is noise.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CHECKPOINT = Path(__file__).with_name("digits_dit.pt")
IMAGE_SIZE = 8
NUM_CLASSES = 10
NULL_CLASS = NUM_CLASSES  # the label of an unconditional sample


def timestep_embedding(timestep: Tensor, dim: int) -> Tensor:
    """Sinusoidal embedding `[B, dim]` of times `[B]` in [0, 1], at 1000 times the time as diffusion models have it."""
    half = dim // 2
    frequencies = torch.exp(-math.log(10_000.0) * torch.arange(half, device=timestep.device) / half)
    angles = 1000.0 * timestep[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """`x (1 + scale) + shift`, with scale and shift `[B, D]` for all tokens of a sample (DiT, arXiv 2212.09748)."""
    return x * (1 + scale[:, None]) + shift[:, None]


class DiTBlock(nn.Module):
    """Attention and MLP, each modulated and gated by the condition (adaLN-zero: the gates start at zero)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.modulation = nn.Linear(dim, 6 * dim)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        batch, tokens, dim = x.shape
        qkv = self.qkv(modulate(self.norm1(x), shift1, scale1))
        q, k, v = qkv.view(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + gate1[:, None] * self.proj(attended.transpose(1, 2).reshape(batch, tokens, dim))
        x = x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return x


class DigitsDiT(nn.Module):
    """The velocity model.

    Args:
        dim: width of the tokens.
        depth: number of blocks.
        heads: attention heads per block.
        patch: side of a square patch; the image has `(image_size / patch)**2` tokens.
        image_size: side of the image.
    """

    def __init__(
        self, dim: int = 128, depth: int = 4, heads: int = 4, patch: int = 2, image_size: int = IMAGE_SIZE
    ) -> None:
        super().__init__()
        self.patch = patch
        self.side = image_size // patch
        self.patchify = nn.Conv2d(1, dim, kernel_size=patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, self.side**2, dim))
        self.time_mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.label_embedding = nn.Embedding(NUM_CLASSES + 1, dim)
        self.blocks = nn.ModuleList(DiTBlock(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Linear(dim, 2 * dim)
        self.head = nn.Linear(dim, patch * patch)
        for layer in (self.modulation, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, hidden_states: Tensor, timestep: Tensor, labels: Tensor) -> Tensor:
        """Velocity `[B, 1, 8, 8]` of images `[B, 1, 8, 8]` at times `[B]` in [0, 1], given labels `[B]` in 0..10."""
        x: Tensor = self.patchify(hidden_states).flatten(2).transpose(1, 2) + self.position
        time = self.time_mlp(timestep_embedding(timestep, x.shape[-1]).to(x.dtype))
        condition = nn.functional.silu(time + self.label_embedding(labels))
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        x = self.head(modulate(self.norm(x), shift, scale))
        x = x.view(-1, self.side, self.side, self.patch, self.patch).permute(0, 1, 3, 2, 4)
        velocity: Tensor = x.reshape(-1, 1, self.side * self.patch, self.side * self.patch)
        return velocity


def load_digits_dit(path: Path = CHECKPOINT) -> DigitsDiT:
    """The model trained by `python -m jagg_fx.models.train_digits`, in float32 (stored in float16)."""
    stored: dict[str, Any] = torch.load(path, weights_only=True)
    model = DigitsDiT()
    model.load_state_dict({name: value.float() for name, value in stored.items()})
    return model


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits: images `[1797, 1, 8, 8]` scaled to [-1, 1] and labels `[1797]`."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return images, torch.tensor(data.target, dtype=torch.long)
