"""Calls share a region only if nothing differs that would change its graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jagg_fx
from jagg_fx.errors import AdapterError, NotARegionError, StepMismatchError
from tests.problems import BATCH, DIM, MLP, STEPS, Problem, path, relative_error, squared


class Switched(MLP):
    """Its graph depends on a plain attribute, on train or eval, and on a Python argument."""

    scale = 1.0

    def forward(self, z: Tensor, t: Tensor, condition: Any = None) -> Any:
        v = super().forward(z, t) * self.scale
        if self.training:
            v = v + 0.5
        return v if condition is None else v * condition


def differs_under_no_grad(change: Callable[[Any], Any], restore: Callable[[Any], Any]) -> Callable[..., Any]:
    """A replay whose reference model is the same module in another state."""

    def make(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
        def fn(z: Tensor, t: Tensor) -> Tensor:
            losses = []
            for i in range(STEPS):
                v = model(z[i], t[i].expand(BATCH))
                with torch.no_grad():
                    change(model)
                    reference = model(z[i], t[i].expand(BATCH))
                    restore(model)
                losses.append(squared(z, t, i, v) + (v - reference).square().mean(-1))
            return torch.stack(losses, 1)

        return fn

    return make


@pytest.mark.parametrize(
    ("change", "restore"),
    [
        (lambda m: setattr(m, "scale", 3.0), lambda m: setattr(m, "scale", 1.0)),
        (lambda m: m.eval(), lambda m: m.train()),
    ],
    ids=["attribute", "eval"],
)
def test_a_reference_call_in_another_state_has_its_own_region(change: Any, restore: Any) -> None:
    model = Switched()
    fn = differs_under_no_grad(change, restore)(model)
    problem = Problem(model, fn, path(torch.float32), list(model.parameters()))
    plain, _ = problem.run(fn)
    _, want = problem.run(jagg_fx.transform(fn, lowering="reference", cos_threshold=None))
    values, got = problem.run(jagg_fx.transform(fn, lowering="eager", cos_threshold=None))
    assert torch.equal(values[0], plain[0])
    assert relative_error(got, want) < 1e-5


def test_a_state_that_changes_between_calls_of_the_function_is_seen() -> None:
    model = Switched()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH))) for i in range(STEPS)], 1)

    transformed = jagg_fx.transform(fn, lowering="eager")
    for change in (lambda: None, lambda: setattr(model, "scale", 2.0), model.eval, model.train):
        change()
        args = path(torch.float32)
        assert torch.equal(transformed(*args), fn(*args))


def test_autocast_around_some_calls_alone_is_seen() -> None:
    model = Switched()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            v = model(z[i], t[i].expand(BATCH))
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                reference = model(z[i], t[i].expand(BATCH))
            losses.append((v - reference.float()).square().mean(-1))
        return torch.stack(losses, 1)

    args = path(torch.float32)
    assert torch.equal(jagg_fx.transform(fn, lowering="eager")(*args), fn(*args))


@pytest.mark.parametrize("value", [2.0, "shape"])
def test_a_python_value_or_a_shape_that_changes_from_step_to_step_is_refused(value: Any) -> None:
    model = Switched()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        other = torch.ones(1) if value == "shape" else value
        return torch.stack(
            [model(z[i], t[i].expand(BATCH), torch.ones(DIM) if i != 3 else other).sum() for i in range(STEPS)]
        )

    with pytest.raises(StepMismatchError, match="step 3"):
        jagg_fx.transform(fn, lowering="eager")(*path(torch.float32))


class Adapted(nn.Module):
    """A denoiser with two LoRA adapters on it."""

    def __new__(cls) -> Any:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, target_modules=["a", "b"], init_lora_weights=False)
        model = get_peft_model(MLP(), config)
        model.add_adapter("other", config)
        model.set_adapter("default")
        return model


def _replay(model: Any, switch: Callable[[], None]) -> Callable[[Tensor, Tensor], Tensor]:
    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            losses.append(squared(z, t, i, model(z[i], t=t[i].expand(BATCH))))
            switch()
        return torch.stack(losses, 1)

    return fn


@pytest.mark.parametrize("lowering", ["eager", "reference"])
def test_training_another_adapter_than_the_one_that_was_active_is_refused(lowering: str) -> None:
    model = Adapted()
    transformed = jagg_fx.transform(_replay(model, lambda: model.set_adapter("other")), lowering=lowering)
    with pytest.raises(AdapterError, match="is called with gradients while other adapters are active") as error:
        transformed(*path(torch.float32))
    assert "user code" not in str(error.value)


@pytest.mark.parametrize("lowering", ["eager", "reference"])
def test_leaving_another_adapter_active_is_refused(lowering: str) -> None:
    model = Adapted()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        result = _replay(model, lambda: None)(z, t)
        model.set_adapter("other")
        return result

    with pytest.raises(AdapterError, match="left other adapters"):
        jagg_fx.transform(fn, lowering=lowering)(*path(torch.float32))
    assert "set_adapter" not in vars(model), "the switches are put back"


def test_the_switches_leave_requires_grad_alone_and_are_put_back() -> None:
    model = Adapted()
    before = [p.requires_grad for p in model.parameters()]

    def fn(z: Tensor, t: Tensor) -> Tensor:
        v = [model(z[i], t=t[i].expand(BATCH)) for i in range(STEPS)]
        with torch.no_grad(), model.disable_adapter():
            reference = [model(z[i], t=t[i].expand(BATCH)) for i in range(STEPS)]
        return torch.stack([(a - b).square().mean(-1) for a, b in zip(v, reference, strict=True)], 1)

    args = path(torch.float32)
    assert torch.equal(jagg_fx.transform(fn, lowering="eager")(*args), fn(*args))
    assert [p.requires_grad for p in model.parameters()] == before
    assert "disable_adapter" not in vars(model)


class Settings:
    scale = 1.0


class Holding(MLP):
    """Reads what it holds, and a global."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"scale": 1.0}
        self.factors = [1.0]
        self.config = Settings()
        self.condition: Any = None

    def forward(self, z: Tensor, t: Tensor, condition: Any = None) -> Any:
        v = super().forward(z, t) * self.settings["scale"] * self.factors[0] * self.config.scale * GLOBAL
        return v if self.condition is None else v * self.condition


GLOBAL = 1.0
CONDITIONS = [torch.full((DIM,), 1.0 + 0.1 * i) for i in range(STEPS)]


def in_a_dict(model: Any, i: int) -> None:
    model.settings["scale"] = 1.0 + i


def in_a_list(model: Any, i: int) -> None:
    model.factors[0] = 1.0 + i


def in_an_object(model: Any, i: int) -> None:
    model.config.scale = 1.0 + i


def a_tensor(model: Any, i: int) -> None:
    model.condition = CONDITIONS[i]


def a_global(model: Any, i: int) -> None:
    global GLOBAL
    GLOBAL = 1.0 + i


@pytest.mark.parametrize("change", [in_a_dict, in_a_list, in_an_object, a_tensor, a_global])
def test_what_the_function_changes_in_the_denoiser_from_step_to_step_is_refused(change: Callable[..., None]) -> None:
    model = Holding()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            change(model, i)
            losses.append(squared(z, t, i, model(z[i], t[i].expand(BATCH))))
        change(model, 0)
        return torch.stack(losses, 1)

    with pytest.raises(StepMismatchError, match="step 1 runs another computation"):
        jagg_fx.transform(fn, lowering="eager")(*path(torch.float32))


def test_a_reference_by_other_parameters_has_its_own_region() -> None:
    model = MLP()
    old = {name: 1.1 * p.detach() for name, p in model.named_parameters()}

    def fn(z: Tensor, t: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            v = model(z[i], t[i].expand(BATCH))
            with torch.no_grad():
                reference = torch.func.functional_call(model, old, (z[i], t[i].expand(BATCH)))
            losses.append((v - reference).square().mean(-1))
        return torch.stack(losses, 1)

    args = path(torch.float32)
    assert torch.equal(jagg_fx.transform(fn, lowering="eager")(*args), fn(*args))


@pytest.mark.parametrize("views", [True, False])
def test_one_tensor_in_two_places_is_not_taken_for_two(views: bool) -> None:
    """At step 0 the state is its own condition, as one tensor or as two views of one; later steps have another condition."""
    model = Switched()

    def fn(z: Tensor, t: Tensor, c: Tensor) -> Tensor:
        losses = []
        for i in range(STEPS):
            x = z[i]
            same = z[i] if views else x
            losses.append(model(x, t[i].expand(BATCH), same if i == 0 else c[i]).square().mean(-1))
        return torch.stack(losses)

    z, t = path(torch.float32)
    problem = Problem(model, fn, (z, t, torch.rand_like(z)), list(model.parameters()))
    plain, exact = problem.run(fn)
    try:
        values, got = problem.run(jagg_fx.transform(fn, W=2, lowering="eager"))
    except StepMismatchError:
        assert not views
        return
    assert torch.equal(values[0], plain[0])
    assert relative_error(got, exact) < 1e-6


@pytest.mark.parametrize("lowering", ["eager", "reference"])
@pytest.mark.parametrize("first", [True, False], ids=["in the first call", "in every call"])
def test_a_denoiser_that_leaves_something_behind_is_refused(lowering: str, first: bool) -> None:
    class Caching(MLP):
        cache: Any = None

        def forward(self, z: Tensor, t: Tensor, condition: Any = None) -> Any:
            v = super().forward(z, t)
            if self.cache is None or not first:
                self.cache = v.mean()
            return v

    model = Caching()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH))) for i in range(STEPS)], 1)

    with pytest.raises(NotARegionError, match=r"changes what it holds in its forward .*cache"):
        jagg_fx.transform(fn, lowering=lowering)(*path(torch.float32))


def test_an_unknown_adapter_is_pefts_own_error() -> None:
    model = Adapted()
    with pytest.raises(ValueError, match="typo"):
        jagg_fx.transform(_replay(model, lambda: model.set_adapter("typo")), lowering="eager")(*path(torch.float32))
