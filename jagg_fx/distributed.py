"""Several processes must agree on where the knots are: their gradients are averaged."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jagg_fx._compat import active_ddp
from jagg_fx.errors import WrapperError

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether a default process group of several ranks is there."""
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


@contextmanager
def without_buffer_broadcast(module: nn.Module) -> Iterator[None]:
    """Run the block without DDP's broadcast of buffers: for a call of the module that other ranks may not make."""
    broadcasting = [m for m in module.modules() if isinstance(m, DistributedDataParallel) and m.broadcast_buffers]
    for ddp in broadcasting:
        ddp.broadcast_buffers = False
    try:
        yield
    finally:
        for ddp in broadcasting:
            ddp.broadcast_buffers = True


def check_wrapper(call: str, wrapped: nn.Module, arguments: Iterable[Tensor]) -> None:
    """Raise `WrapperError` where what was put around `wrapped` cannot work with a backward per group of steps."""
    if not dist.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    ddp = active_ddp()
    if ddp is not None and ddp.module is wrapped and ddp.static_graph:
        raise WrapperError.static_graph(call)
    if isinstance(wrapped, FSDPModule) and any(argument.requires_grad for argument in arguments):
        raise WrapperError.trained_argument(call)


def gathers_in_hooks(module: nn.Module) -> bool:
    """Whether FSDP gathers the module's own parameters in hooks around its forward."""
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)
