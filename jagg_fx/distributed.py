"""Several processes must agree on where the knots are: their gradients are averaged."""

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn

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


def is_sharded(*modules: nn.Module) -> bool:
    """Whether running one of the modules takes part in collective calls (FSDP), so that all ranks must run it as often."""
    if not is_distributed():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(inner, kinds) for module in modules for inner in module.modules())


def smallest(numbers: Tensor) -> Tensor:
    """The smallest of each number `[n]` over all ranks, in the dtype that was given; a collective call."""
    agreed = numbers.float()
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return agreed.to(numbers.dtype)
