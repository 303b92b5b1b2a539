"""Known bugs of torch that give wrong gradients without a word, each with a tiny program that shows it.

They are tried once per process and kind of device, before the first compile that could meet them. Where one shows, its workaround
is turned on, or a warning says what to avoid; the report names it either way.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Canary:
    """One bug.

    Attributes:
        name: what goes wrong.
        issue: where it is reported.
        since: first torch release that has it.
        device: the kind of device it needs.
        is_right: `(device, compile) -> whether the compiled program gives eager's result`.
        workaround: Inductor options that avoid it; empty if there are none.
        advice: what to do where there is no workaround.
    """

    name: str
    issue: str
    since: tuple[int, int]
    device: str
    is_right: Callable[[torch.device, Compile], bool]
    workaround: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""


@dataclass(frozen=True)
class Finding:
    """A bug that this process has: a sentence for the report, and Inductor options that avoid it."""

    note: str
    options: Mapping[str, Any]


def adaln_is_right(device: torch.device, compile: Compile) -> bool:
    """Two layer norms in a row, modulated by slices of one tensor that is broadcast over the batch (adaLN at batch 1)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 256, 1536, generator=generator).to(device)
    modulation = torch.randn(1, 4, 1536, generator=generator).to(device)

    def blocks(x: Tensor, modulation: Tensor) -> Tensor:
        for i in (0, 2):
            normed = torch.nn.functional.layer_norm(x, x.shape[-1:])
            x = x + normed * (1 + modulation[:, i : i + 1]) + modulation[:, i + 1 : i + 2]
        return x.square().sum()

    def gradients(fn: Callable[..., Any]) -> Tensor:
        inputs = x.detach().requires_grad_(), modulation.detach().requires_grad_()
        return torch.cat([g.flatten() for g in torch.autograd.grad(fn(*inputs), inputs)])

    want, got = gradients(blocks), gradients(compile(blocks))
    return bool((got - want).norm() < 1e-3 * want.norm())


def dropout_is_right(device: torch.device, compile: Compile) -> bool:
    """Dropout after a transpose: neighbouring channels draw their own numbers, and the backward uses the forward's mask."""

    def drop(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x.transpose(1, 2).contiguous(), 0.5, training=True)

    x = torch.ones(4, 64, 256, device=device, requires_grad=True)
    y = compile(drop)(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    kept = (y.detach() != 0).unflatten(-1, (-1, 4))
    share_of_equal_groups = ((kept == kept[..., :1]).all(-1)).float().mean()  # 1/8 where the four are independent
    same_mask = torch.equal(gradient.transpose(1, 2) != 0, y.detach() != 0)
    return bool(share_of_equal_groups < 0.5) and same_mask


CANARIES = (
    Canary(
        name="gradients of adaLN at a batch of 1",
        issue="pytorch issue 193061",
        since=(2, 10),
        device="cuda",
        is_right=adaln_is_right,
        workaround={"triton.mix_order_reduction": False},
    ),
    Canary(
        name="dropout masks after a transpose",
        issue="pytorch issue 198333",
        since=(2, 13),
        device="cuda",
        is_right=dropout_is_right,
        advice="Set dropout to 0 in all that is compiled.",
    ),
)


@functools.cache
def findings(device: str) -> tuple[Finding, ...]:
    """The bugs that this torch shows on that kind of device. Compiles a small program for each that it might have."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    found = []
    for canary in CANARIES:
        if canary.device == device and version >= canary.since:
            log.info("trying whether torch %s has %s: %s", torch.__version__, canary.issue, canary.name)
            # The user's call may stand under no_grad or autocast.
            with (
                torch.random.fork_rng(devices=[torch.cuda.current_device()] if device == "cuda" else []),
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast(device, enabled=False),
                torch.compiler.set_stance("default"),
            ):
                if not canary.is_right(torch.device(device), torch.compile):
                    found.append(report(canary))
    return tuple(found)


def report(canary: Canary) -> Finding:
    """What is said and done about a bug that showed."""
    if canary.workaround:
        options = ", ".join(f"{name}={value}" for name, value in canary.workaround.items())
        note = f"torch {torch.__version__} gets {canary.name} wrong ({canary.issue}): compiled with {options}"
    else:
        note = f"torch {torch.__version__} gets {canary.name} wrong ({canary.issue}). {canary.advice}"
        warnings.warn(f"jagg_fx: {note}", stacklevel=2)
    return Finding(note, canary.workaround)
