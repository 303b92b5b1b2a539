"""Samplers that are differentiated end to end: refused, or with the gradient through the denoiser's state cut."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import jagg_fx
from jagg_fx.errors import ChainedStatesError
from tests.problems import BATCH, DIM, MLP, STEPS, Problem, path, relative_error

DECODER = nn.Linear(DIM, 2).double().requires_grad_(False)


def sampler(model: nn.Module, cut: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    def reward(z: Tensor, t: Tensor) -> Tensor:
        x = z[0]
        for i in range(STEPS):
            v = model(x.detach() if cut else x, t[i].expand(BATCH))
            x = x + (t[i + 1] - t[i]) * v
        return DECODER(x).sin().sum(-1)

    return reward


@pytest.mark.parametrize("lowering", ["eager", "reference"])
def test_stop_is_the_function_that_detaches_the_state(lowering: str) -> None:
    model = MLP().double()
    args, parameters = path(torch.float64), list(model.parameters())
    stopped = jagg_fx.transform(sampler(model), W=2, chain="stop", lowering=lowering)
    values, got = Problem(model, stopped, args, parameters).run(stopped)
    by_hand = sampler(model, cut=True)
    plain, want = Problem(model, by_hand, args, parameters).run(by_hand)
    assert torch.equal(values[0], plain[0])
    assert relative_error(got, want) < 1e-12
    _, whole = Problem(model, stopped, args, parameters).run(sampler(model))
    assert relative_error(want, whole) > 1e-3, "the gradient through the states is none, so this shows nothing"
    (stream,) = stopped.report.to_dict()["streams"]
    assert stream["cut"] == list(range(1, STEPS))
    assert "no gradient through the state of steps 1, 2, 3" in str(stopped.report)


def test_stop_interpolates_as_the_reference_does() -> None:
    model = MLP().double()
    args, parameters = path(torch.float64), list(model.parameters())
    fn = sampler(model)
    run = Problem(model, fn, args, parameters).run
    _, got = run(jagg_fx.transform(fn, W=4, chain="stop", lowering="eager", cos_threshold=None))
    by_hand = sampler(model, cut=True)
    _, want = run(jagg_fx.transform(by_hand, W=4, lowering="reference", cos_threshold=None))
    _, exact = run(by_hand)
    assert relative_error(got, want) < 1e-10
    assert relative_error(got, exact) > 1e-4


@pytest.mark.parametrize("lowering", ["eager", "reference"])
def test_only_chained_states_are_cut(lowering: str) -> None:
    """A trained encoder in front of the denoiser keeps its gradient, or is refused as ever."""
    model, encoder = MLP().double(), nn.Linear(DIM, DIM).double()

    def replay(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([model(encoder(z[i]), t[i].expand(BATCH)).square().mean() for i in range(STEPS)])

    with pytest.raises(ChainedStatesError, match="an input of that step alone") as error:
        jagg_fx.transform(replay, chain="stop", denoiser=model, lowering=lowering)(*path(torch.float64))
    assert "chain='stop'" not in str(error.value)


def test_the_error_offers_it() -> None:
    model = MLP().double()
    for lowering in ("eager", "reference"):
        with pytest.raises(ChainedStatesError, match=r"chain='stop'"):
            jagg_fx.transform(sampler(model), lowering=lowering)(*path(torch.float64))


def test_nothing_is_cut_where_nothing_is_chained() -> None:
    model = MLP()

    def replay(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([model(z[i], t[i].expand(BATCH)).square().mean() for i in range(STEPS)])

    transformed = jagg_fx.transform(replay, chain="stop", lowering="eager")
    transformed(*path(torch.float32)).sum().backward()
    assert transformed.report.to_dict()["streams"][0]["cut"] == []
