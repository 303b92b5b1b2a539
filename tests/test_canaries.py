"""The self-tests for known bugs of torch: no false alarm, and each sees its own bug."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import jagg_fx
from jagg_fx import canaries
from jagg_fx.canaries import CANARIES, adaln_is_right, dropout_is_right
from tests.problems import per_sample_times

CPU = torch.device("cpu")


def uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def test_they_can_be_tried_under_no_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    canary = replace(CANARIES[0], device="cpu", is_right=lambda device, compile: adaln_is_right(device, uncompiled))
    monkeypatch.setattr(canaries, "CANARIES", (canary,))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert canaries.findings.__wrapped__("cpu") == ()


def test_eager_has_none_of_them() -> None:
    assert adaln_is_right(CPU, uncompiled)
    assert dropout_is_right(CPU, uncompiled)


class _RepeatsItsGradient(torch.autograd.Function):
    """What issue 193061 does: the end of the gradient is what the step before left there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.cat([gradient[..., :-64], gradient[..., -128:-64]], -1)


def test_a_gradient_that_is_partly_never_written_is_seen() -> None:
    assert not adaln_is_right(CPU, lambda fn: lambda x, m: fn(x, _RepeatsItsGradient.apply(m)))


def test_a_mask_that_neighbours_share_is_seen() -> None:
    def shared(fn: Callable[..., Any]) -> Callable[..., Any]:
        def drop(x: Tensor) -> Tensor:
            x = x.transpose(1, 2)
            mask = (torch.rand(*x.shape[:-1], x.shape[-1] // 4) > 0.5).repeat_interleave(4, -1)
            return x * mask * 2

        return drop

    assert not dropout_is_right(CPU, shared)


def test_a_workaround_reaches_the_compiler_and_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    finding = canaries.report(CANARIES[0])
    monkeypatch.setattr(canaries, "findings", lambda device: (finding,))
    monkeypatch.setattr(
        "jagg_fx.backend.compile_with_inductor", lambda gm, inputs, pass_, options: seen.append(options) or gm
    )
    transformed = jagg_fx.transform(per_sample_times(torch.float32).fn, options={"epilogue_fusion": False})
    transformed(*per_sample_times(torch.float32).args)
    assert seen == [{"triton.mix_order_reduction": False, "epilogue_fusion": False}]
    assert "pytorch issue 193061" in str(transformed.report)


def test_a_workaround_reaches_a_denoiser_that_is_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    finding = canaries.report(CANARIES[0])
    monkeypatch.setattr(canaries, "findings", lambda device: (finding,))
    problem = per_sample_times(torch.float32)
    transformed = jagg_fx.transform(problem.fn, capture="denoiser", options={"epilogue_fusion": False})
    monkeypatch.setattr(torch, "compile", lambda fn, options, **_: seen.append(options) or fn)
    transformed(*problem.args)
    assert seen == [{"triton.mix_order_reduction": False, "epilogue_fusion": False}]
    assert "pytorch issue 193061" in str(transformed.report)


def test_without_a_workaround_it_warns() -> None:
    with pytest.warns(UserWarning, match=r"issue 198333.*Set dropout to 0"):
        assert canaries.report(CANARIES[1]).options == {}


def test_nothing_is_tried_on_a_device_that_cannot_have_the_bug() -> None:
    assert canaries.findings("cpu") == ()
