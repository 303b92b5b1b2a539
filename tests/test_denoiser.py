"""Finding the denoiser and its time argument."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from jagg_fx.denoiser import find_denoiser, find_time
from jagg_fx.errors import DenoiserNotFoundError, SeveralDenoisersError, TimeArgumentError

MODEL = nn.Linear(2, 2)
OTHER = nn.Linear(2, 2)
PIPE = SimpleNamespace(transformer=MODEL, scheduler=object())


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def names_a_global(x: Tensor) -> Any:
    return MODEL(x)


def names_two(x: Tensor) -> Any:
    return MODEL(x) + OTHER(x)


def names_an_attribute(x: Tensor) -> Any:
    return PIPE.transformer(x)


def through_another_function(x: Tensor) -> Any:
    return names_a_global(x)


def has_a_default(x: Tensor, model: nn.Module = MODEL) -> Any:
    return model(x)


def attribute_of_the_same_name(x: Any) -> Any:
    return x.OTHER + MODEL(x)


def takes_it(x: Tensor, model: nn.Module | None = None, models: Any = ()) -> Any:
    return x


class Trainer:
    def __init__(self) -> None:
        self.model = MODEL

    def replay(self, x: Tensor) -> Any:
        return self.model(x)

    def __call__(self, x: Tensor) -> Any:
        return self.model(x)


class ModuleTrainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = MODEL

    def forward(self, x: Tensor) -> Any:
        return self.model(x)

    def replay(self, x: Tensor) -> Any:
        return self.model(x)


def closure() -> Any:
    model = MODEL

    def replay(x: Tensor) -> Any:
        return [model(y) for y in x]

    return replay


@pytest.mark.parametrize(
    ("fn", "args", "kwargs"),
    [
        (names_a_global, (), {}),
        (names_an_attribute, (), {}),
        (through_another_function, (), {}),
        (has_a_default, (), {}),
        (attribute_of_the_same_name, (), {}),
        (closure(), (), {}),
        (lambda x: MODEL(x), (), {}),
        (functools.partial(takes_it, model=MODEL), (), {}),
        (functools.partial(lambda model, x: x, MODEL), (), {}),
        (Trainer().replay, (), {}),
        (Trainer(), (), {}),
        (ModuleTrainer(), (), {}),
        (ModuleTrainer().replay, (), {}),
        (takes_it, (None, MODEL), {}),
        (takes_it, (None,), {"model": MODEL}),
        (takes_it, (None,), {"models": {"a": [MODEL]}}),
    ],
)
def test_the_one_trainable_module_is_found(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert find_denoiser(fn, args, kwargs) is MODEL


def test_the_outermost_module_is_taken() -> None:
    wrapper = Wrapper(MODEL)
    assert find_denoiser(takes_it, (None, MODEL), {"models": wrapper}) is wrapper


def test_frozen_modules_are_passed_over() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert find_denoiser(takes_it, (None, MODEL), {"models": [frozen]}) is MODEL


def test_none_found_lists_what_there_was() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(DenoiserNotFoundError, match=r"models\[0\]: Linear, 0 of 6 parameters trainable") as error:
        find_denoiser(takes_it, (None,), {"models": [frozen]})
    assert "jagg_fx.transform(takes_it, denoiser=model)" in str(error.value)
    with pytest.raises(DenoiserNotFoundError, match=r"no nn\.Module at all"):
        find_denoiser(takes_it, (), {})


def test_several_found_are_listed_with_the_call_to_write() -> None:
    with pytest.raises(SeveralDenoisersError, match="found 2 modules") as error:
        find_denoiser(names_two, (), {})
    assert "MODEL: Linear, 6 of 6 parameters trainable" in str(error.value)
    assert "jagg_fx.transform(names_two, denoiser=MODEL)" in str(error.value)


def test_the_model_in_place_of_the_function_that_calls_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(SeveralDenoisersError, match="Sequential looks like the denoiser itself, made of") as error:
        find_denoiser(model, (), {})
    assert "jagg_fx.wrap(Sequential, num_steps=9)" in str(error.value)


def _with(signature: str) -> nn.Module:
    scope: dict[str, Any] = {"nn": nn}
    exec(f"class M(nn.Module):\n    def forward(self, {signature}): pass", scope)
    module: nn.Module = scope["M"]()
    return module


@pytest.mark.parametrize(
    ("signature", "name", "positional"),
    [
        ("hidden_states, timestep, labels", "timestep", ("hidden_states", "timestep", "labels")),
        ("sample, timesteps", "timesteps", ("sample", "timesteps")),
        ("x, t", "t", ("x", "t")),
        ("x, *, time", "time", ("x",)),
        ("x, sigma=None", "sigma", ("x", "sigma")),
        ("t, timestep", "timestep", ("t", "timestep")),
    ],
)
def test_time_is_found_by_name(signature: str, name: str, positional: tuple[str, ...]) -> None:
    found = find_time(_with(signature), None)
    assert (found.name, found.positional) == (name, positional)


def test_time_can_be_named() -> None:
    assert find_time(_with("x, noise_level"), "noise_level").name == "noise_level"
    assert find_time(_with("x, **kwargs"), "s").name == "s"
    with pytest.raises(TimeArgumentError, match=r"M\.forward\(x, noise_level\).*timestep.*time='noise_level'"):
        find_time(_with("x, noise_level"), None)
    with pytest.raises(TimeArgumentError, match="no argument named s,"):
        find_time(_with("x, t"), "s")
