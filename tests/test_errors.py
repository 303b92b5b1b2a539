"""Every refusal: the right error, with its cause and the call to write instead. Nothing runs untransformed silently."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jagg_fx
from jagg_fx import errors
from tests.problems import BATCH, DIM, MLP, STEPS, path, squared

Body = Callable[[nn.Module, Tensor, Tensor], Any]


class Dropping(MLP):
    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        return self.dropout(super().forward(z, t, condition))


class Noisy(MLP):
    def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        return super().forward(z + 0.1 * torch.randn_like(z), t, condition)


class Normalised(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        return self.norm(super().forward(z, t, condition))


@torch.library.custom_op("jagg_fx_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_autograd(lambda ctx, gradient: 2 * gradient)


class Untraceable(MLP):
    def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        return doubled(super().forward(z, t, condition))


OPAQUE = object()


class ReturnsAnObject(MLP):
    def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        return super().forward(z, t, condition), OPAQUE


class Counting(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        self.calls.add_(1)
        return super().forward(z, t, condition)


def plain(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
    return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH))) for i in range(STEPS)], 1)


def another_argument_at_step_three(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
    ones = {3: {"condition": torch.ones(2 * DIM)}}
    return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH), **ones.get(i, {}))) for i in range(STEPS)], 1)


def another_shape_at_step_two(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
    batches = [BATCH - 1 if i == 2 else BATCH for i in range(STEPS)]
    return torch.stack([model(z[i, :b], t[i].expand(b)).sum() for i, b in enumerate(batches)])


def a_second_call_at_some_steps(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
    v = [model(z[i], t[i].expand(BATCH)) + (model(2 * z[i], t[i].expand(BATCH)) if i < 2 else 0) for i in range(STEPS)]
    return torch.stack([squared(z, t, i, v[i]) for i in range(STEPS)], 1)


def chained(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
    x = z[0]
    for i in range(STEPS):
        x = x + (t[i + 1] - t[i]) * model(x, t[i].expand(BATCH))
    return x


def depends_on_a_value(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
    losses = []
    for i in range(STEPS):
        v = model(z[i], t[i].expand(BATCH))
        if v.sum().item() > 0:
            v = 2 * v
        losses.append(squared(z, t, i, v))
    return torch.stack(losses, 1)


def breaks_the_graph(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
    losses = []
    for i in range(STEPS):
        losses.append(squared(z, t, i, model(z[i], t[i].expand(BATCH))))
        torch._dynamo.graph_break()
    return torch.stack(losses, 1)


def calls_backward(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
    loss = plain(model, z, t).sum()
    loss.backward()
    return loss.detach()


def calls_autograd_grad(model: nn.Module, z: Tensor, t: Tensor) -> Any:
    return torch.autograd.grad(plain(model, z, t).sum(), list(model.parameters()))


def never_calls_it(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
    return z.sum() + next(model.parameters()).sum()


def detached(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
    weight: Tensor = next(model.parameters())
    return plain(model, z, t).detach() + weight.sum()


def without_a_tensor(model: nn.Module, z: Tensor, t: Tensor) -> int:
    return len(list(model.children()))


def without_time(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
    return torch.stack([model(z=z[i]).sum() for i in range(STEPS)])


def time_per_element(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
    return torch.stack([model(z[i], t[i].expand(BATCH, DIM)).sum() for i in range(STEPS)])


class PerElement(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        return super().forward(z * t)


REFUSALS: list[tuple[Body, Callable[[], nn.Module], type[errors.JaggError], str]] = [
    (another_argument_at_step_three, MLP, errors.StepMismatchError, r"step 3 .*\+condition"),
    (another_shape_at_step_two, MLP, errors.StepMismatchError, r"step 2 .*\[2, 8\] where step 0 has float32\[3, 8\]"),
    (a_second_call_at_some_steps, MLP, errors.StepMismatchError, r"calls 0 and 1 .*same time.*torch\.cat"),
    (chained, MLP, errors.ChainedStatesError, r"step 1: its input depends on the velocity of an earlier step.*detach"),
    (plain, Dropping, errors.DropoutError, r"native_dropout.*denoiser\.eval\(\)"),
    (plain, Noisy, errors.DropoutError, r"randn.*denoiser\.eval\(\)"),
    (plain, Counting, errors.NotARegionError, r"in place.*buffers: calls.*Return the new value"),
    (plain, Normalised, errors.BatchNormError, r"Normalised has batch normalisation.*\(norm\).*\.eval\(\)"),
    (plain, Untraceable, errors.FakeImplementationError, r"jagg_fx_tests::doubled.*register_fake"),
    (plain, ReturnsAnObject, errors.NotARegionError, r"returns object"),
    (
        depends_on_a_value,
        MLP,
        errors.GraphBreakError,
        r"Where: .*test_errors\.py:\d+: if v\.sum\(\)\.item\(\).*Usual reasons",
    ),
    (breaks_the_graph, MLP, errors.GraphBreakError, r"Where: .*test_errors\.py:\d+: torch\._dynamo\.graph_break"),
    (calls_backward, MLP, errors.BackwardInsideError, r"Where: .*loss\.backward\(\).*jagg_fx\.wrap"),
    (calls_autograd_grad, MLP, errors.BackwardInsideError, r"Where: .*torch\.autograd\.grad.*jagg_fx\.wrap"),
    (never_calls_it, MLP, errors.NoStepsError, r"holds no call of it.*Call MLP inside replay"),
    (detached, MLP, errors.NoStepsError, r"no output depends on any of its 9 calls with a gradient"),
    (without_a_tensor, MLP, errors.NoStepsError, r"never called"),
    (without_time, MLP, errors.TimeArgumentError, r"without its time argument 't'.*time="),
    (time_per_element, PerElement, errors.TimeArgumentError, r"shape \[3, 8\].*one number per sample"),
]


def _replay(body: Body, model: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    def replay(z: Tensor, t: Tensor) -> Any:
        return body(model, z, t)

    return replay


@pytest.mark.parametrize(
    ("body", "make", "kind", "message"), REFUSALS, ids=[body.__name__ + f"-{m.__name__}" for body, m, *_ in REFUSALS]
)
def test_refused(body: Body, make: Callable[[], nn.Module], kind: type[errors.JaggError], message: str) -> None:
    transformed = jagg_fx.transform(_replay(body, make()), lowering="eager", capture="whole")
    with pytest.raises(kind) as error:
        transformed(*path(torch.float32))
    assert type(error.value) is kind
    assert re.search(message, str(error.value), re.DOTALL), str(error.value)
    assert transformed.report.rewrite is None


@pytest.mark.parametrize(
    ("body", "make", "kind"),
    [
        (chained, MLP, errors.ChainedStatesError),
        (plain, Dropping, errors.DropoutError),
        (plain, Noisy, errors.DropoutError),
        (plain, Counting, errors.NotARegionError),
        (plain, Normalised, errors.BatchNormError),
        (plain, ReturnsAnObject, errors.NotARegionError),
        (never_calls_it, MLP, errors.NoStepsError),
        (detached, MLP, errors.NoStepsError),
        (without_time, MLP, errors.TimeArgumentError),
        (time_per_element, PerElement, errors.TimeArgumentError),
    ],
)
@pytest.mark.parametrize("options", [{"lowering": "reference"}, {"lowering": "eager", "capture": "denoiser"}], ids=str)
def test_refused_without_whole_capture(
    body: Body, make: Callable[[], nn.Module], kind: type[errors.JaggError], options: dict[str, Any]
) -> None:
    with pytest.raises(kind):
        jagg_fx.transform(_replay(body, make()), cos_threshold=None, **options)(*path(torch.float32))


def test_dropout_in_eval_mode_or_of_probability_zero_is_no_dropout() -> None:
    for model in (Dropping().eval(), Dropping(0.0)):
        transformed = jagg_fx.transform(_replay(plain, model), lowering="eager")
        transformed(*path(torch.float32)).sum().backward()
        assert transformed.report.to_dict()["backward_passes_after"] == 5


def test_latents_of_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        z, t = path(torch.float32)
    for lowering in ("eager", "reference"):
        with pytest.raises(errors.InferenceTensorError, match=r"argument 0 was made under.*latents\.clone\(\)"):
            jagg_fx.transform(_replay(plain, MLP()), lowering=lowering)(z, t)


def test_batch_norm_in_eval_mode_is_fine() -> None:
    transformed = jagg_fx.transform(_replay(plain, Normalised().eval()), lowering="eager")
    transformed(*path(torch.float32)).sum().backward()
    assert transformed.report.to_dict()["backward_passes_after"] == 5


def test_a_state_that_needs_a_gradient_of_its_own_is_refused() -> None:
    z, t = path(torch.float32)
    with pytest.raises(errors.ChainedStatesError, match="an input of that step alone needs gradients"):
        jagg_fx.transform(_replay(plain, MLP()), lowering="eager")(z.requires_grad_(), t)


@pytest.mark.parametrize("body", [breaks_the_graph, depends_on_a_value])
def test_steps_in_several_graphs_are_refused_with_fullgraph_false(body: Body) -> None:
    with pytest.raises(errors.SplitStepsError, match="so groups of steps would be cut apart"):
        jagg_fx.transform(_replay(body, MLP()), lowering="eager", fullgraph=False)(*path(torch.float32))


def test_a_function_that_torch_compile_skips_is_refused() -> None:
    transformed = jagg_fx.transform(_replay(plain, MLP()), lowering="eager")
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(errors.NoStepsError, match=r"torch\.compile ran the function eagerly"),
    ):
        transformed(*path(torch.float32))


def test_an_exception_of_the_function_itself_comes_out_as_it_is() -> None:
    def fails(model: nn.Module, z: Tensor, t: Tensor) -> Tensor:
        if len(z) < 100:
            raise KeyError("latents")
        return plain(model, z, t)

    with pytest.raises(KeyError, match="latents"):
        jagg_fx.transform(_replay(fails, MLP()), lowering="eager")(*path(torch.float32))


class TestTheBackendEntryPoint:
    def _compile(self, fn: Any, **options: Any) -> Any:
        return torch.compile(fn, backend="jagg", options={"lowering": "eager", **options}, fullgraph=True)

    def _refused(self, compiled: Any, message: str) -> None:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
            compiled(*path(torch.float32))

    def test_several_modules(self) -> None:
        first, second = MLP(), MLP()

        def both(z: Tensor, t: Tensor) -> Tensor:
            return plain(first, z, t) + plain(second, z, t)

        self._refused(self._compile(both), "(?s)2 trainable modules.*'denoiser': model")

    def test_a_module_that_is_not_called(self) -> None:
        self._refused(self._compile(_replay(plain, MLP()), denoiser=MLP()), "holds no call of this module")

    def test_a_time_that_cannot_be_told(self) -> None:
        self._refused(self._compile(_replay(time_per_element, PerElement())), "sees 0 inputs.*could be its time")

    def test_an_unknown_option(self) -> None:
        self._refused(self._compile(_replay(plain, MLP()), group=4), "'group'.*unknown option")

    def test_the_reference(self) -> None:
        self._refused(self._compile(_replay(plain, MLP()), lowering="reference"), "Write jagg_fx.transform")
