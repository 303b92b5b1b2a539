"""Several processes must agree on where the knots are: their gradients are averaged."""

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def from_rank_zero(value: T) -> T:
    """Rank 0's value on every rank; a collective call when a default process group with several ranks exists."""
    if not is_distributed():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
