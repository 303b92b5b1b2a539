"""What is refused before anything runs, because it can be told from the denoiser and the arguments alone."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from jagg_fx.errors import BatchNormError, InferenceTensorError
from jagg_fx.structure import tensors_in

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_call(call: str, denoisers: Iterable[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check a call with gradients. `call` is what the user wrote, for the message.

    Raises:
        BatchNormError: a denoiser has batch normalisation in training mode.
        InferenceTensorError: an argument was made under `torch.inference_mode`.
    """
    for denoiser in denoisers:
        found = denoiser.named_modules()
        in_training = [name for name, module in found if isinstance(module, BATCH_NORMS) and module.training]
        if in_training:
            raise BatchNormError(type(denoiser).__name__, in_training)
    named = [(f"argument {i}", value) for i, value in enumerate(args)] + list(kwargs.items())
    for name, value in named:
        if any(tensor.is_inference() for tensor in tensors_in(value)):
            raise InferenceTensorError(call, name)
