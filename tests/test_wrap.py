"""`wrap`: loops with a backward per step, against the eager reference of the same replay."""

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jagg_fx
import jagg_fx.errors
from tests.problems import BATCH, DIM, MLP, STEPS, path, relative_error

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Loop:
    """A trajectory of an MLP in float64: states, times `[N, B]`, and one loss per step."""

    model: nn.Module
    z: Tensor
    t: Tensor

    def losses(self, denoiser: Callable[..., Tensor], steps: int = STEPS) -> Iterator[Tensor]:
        for i in range(steps):
            yield self.loss(i, denoiser(self.z[i], self.t[i]))

    def loss(self, i: int, v: Tensor) -> Tensor:
        return (self.z[i + 1] - self.z[i] - 0.1 * v.to(self.z)).square().mean(-1).dot(
            torch.linspace(1, 2, BATCH).to(self.z)
        ) * (1 + i)

    def gradient(self) -> Tensor:
        """The gradient that is there, taken away."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        for p in parameters:
            p.grad = None
        return flat

    def expected(self, steps: int = STEPS, **options: Any) -> Tensor:
        def fn(z: Tensor, t: Tensor) -> Tensor:
            return torch.stack(list(self.losses(self.model, steps)))

        jagg_fx.transform(fn, lowering="reference", denoiser=self.model, **options)(self.z, self.t).sum().backward()
        return self.gradient()

    def exact(self, steps: int = STEPS) -> Tensor:
        torch.stack(list(self.losses(self.model, steps))).sum().backward()
        return self.gradient()


def loop(*, shuffled: bool = False) -> Loop:
    z, t = path(torch.float64)
    times = t[:, None] + torch.tensor([0.0, 0.01, 0.02], dtype=torch.float64)
    if shuffled:
        order = torch.stack([torch.randperm(STEPS) for _ in range(BATCH)], 1)
        times[:STEPS] = times[order, torch.arange(BATCH)]
        z[:STEPS] = z[order, torch.arange(BATCH)]
    return Loop(MLP().double(), z, times)


def per_step(losses: Iterator[Tensor]) -> None:
    for loss in losses:
        loss.backward()


def per_group(losses: Iterator[Tensor]) -> None:
    group = []
    for i, loss in enumerate(losses):
        group.append(loss)
        if i % 4 == 3 or i == STEPS - 1:
            torch.stack(group).sum().backward()
            group = []


def once(losses: Iterator[Tensor]) -> None:
    torch.stack(list(losses)).sum().backward()


BACKWARDS = [per_step, per_group, once]
PLANS: dict[str, dict[str, Any]] = {
    "W=4": {"W": 4},
    "W=3": {"W": 3},
    "W=9": {"W": 9},
    "knots": {"knots": (0, 3, 5, 8)},
    "even": {"plan": jagg_fx.plan.even(3)},
    "by index": {"W": 4, "weights": "index"},
    "quadratic": {"knots": (0, 3, 5, 8), "degree": 2},
}


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_gradients_are_the_references(options: dict[str, Any], backward: Callable[..., None]) -> None:
    case = loop()
    want = case.expected(cos_threshold=None, **options)
    backward(case.losses(jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None, **options)))
    got = case.gradient()
    assert relative_error(got, want) < TOLERANCE
    assert relative_error(got, case.exact()) > 1e-3


@pytest.mark.parametrize("backward", BACKWARDS)
def test_shuffled_times_have_weights_over_all_knots(backward: Callable[..., None]) -> None:
    case = loop(shuffled=True)
    want = case.expected(cos_threshold=None)
    backward(case.losses(jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None, shuffled=True)))
    assert relative_error(case.gradient(), want) < TOLERANCE


def test_all_knots_are_the_plain_loop_to_the_bit() -> None:
    case = loop()
    per_step(case.losses(case.model))
    want = case.gradient()
    per_step(case.losses(jagg_fx.wrap(case.model, num_steps=STEPS, W=2)))
    assert torch.equal(case.gradient(), want)


def test_values_are_the_denoisers_own() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS)
    for i in range(STEPS):
        assert torch.equal(wrapped(case.z[i], case.t[i]), case.model(case.z[i], case.t[i]))
    wrapped.reset()


GUARDS: dict[str, dict[str, Any]] = {
    "some exact": {"cos_threshold": 0.04},
    "share": {"cos_threshold": None, "jagg_frac": 0.5},
    "share, threshold": {"cos_threshold": 0.0, "jagg_frac": 0.5},
}


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("options", GUARDS.values(), ids=GUARDS)
def test_guarded_segments_are_the_references(options: dict[str, Any], backward: Callable[..., None]) -> None:
    case = loop()
    want = case.expected(**options)
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, **options)
    backward(case.losses(wrapped))
    assert relative_error(case.gradient(), want) < TOLERANCE
    assert wrapped.stats is not None
    assert 0 < wrapped.stats.last.jagg_frac < 1


@pytest.mark.parametrize("options", [{"cos_threshold": 1.0}, {"jagg_frac": 0.0}, {"W": 3, "debias": 1.0}])
def test_everything_exact_is_the_plain_loop(options: dict[str, Any]) -> None:
    case = loop()
    want = case.exact()
    per_step(case.losses(jagg_fx.wrap(case.model, num_steps=STEPS, **({"cos_threshold": None} | options))))
    assert relative_error(case.gradient(), want) < TOLERANCE


def test_corrections_have_the_exact_gradient_as_their_mean() -> None:
    case = loop()
    exact, plain = case.exact(), case.expected(cos_threshold=None)
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None, debias=0.5)
    draws = []
    for _ in range(400):
        per_step(case.losses(wrapped))
        draws.append(case.gradient())
    mean = torch.stack(draws).mean(0)
    spread = torch.stack(draws).std(0).norm() / 20  # standard error of the mean
    assert (mean - exact).norm() < 3 * spread < (plain - exact).norm()


def test_statistics_are_those_of_transform() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=0.04)
    per_step(case.losses(wrapped))
    transformed = jagg_fx.transform(
        lambda z, t: torch.stack(list(case.losses(case.model))),
        lowering="reference",
        cos_threshold=0.04,
        denoiser=case.model,
    )
    transformed(case.z, case.t).sum().backward()
    assert wrapped.stats is not None
    assert transformed.stats is not None
    got, want = wrapped.stats.last, transformed.stats.last
    assert got.scores == pytest.approx(want.scores)
    assert got.cotangent_norms == pytest.approx(want.cotangent_norms)
    assert got.jagg_frac == want.jagg_frac


def test_two_calls_per_step_are_two_streams() -> None:
    case = loop()
    prompts = torch.randn(2, BATCH, 2 * DIM, dtype=torch.float64)

    def losses(denoiser: Callable[..., Tensor]) -> Iterator[Tensor]:
        for i in range(STEPS):
            negative, positive = (denoiser(case.z[i], case.t[i], prompt) for prompt in prompts)
            yield case.loss(i, negative + 3 * (positive - negative))

    def fn(z: Tensor, t: Tensor, prompts: Tensor) -> Tensor:
        return torch.stack(list(losses(case.model)))

    transformed = jagg_fx.transform(fn, lowering="reference", denoiser=case.model, cos_threshold=0.04)
    transformed(case.z, case.t, prompts).sum().backward()
    want = case.gradient()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, calls_per_step=2, cos_threshold=0.04)
    per_step(losses(wrapped))
    assert relative_error(case.gradient(), want) < TOLERANCE
    assert len(wrapped.plans) == 2
    assert wrapped.stats is not None
    assert transformed.stats is not None
    assert wrapped.stats.last.scores == pytest.approx(transformed.stats.last.scores)


def test_placed_knots_are_those_that_transform_places() -> None:
    case = loop()
    transformed = jagg_fx.transform(
        lambda z, t: torch.stack(list(case.losses(case.model))), lowering="reference", knots=4, denoiser=case.model
    )
    transformed(case.z, case.t).sum().backward()
    case.gradient()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, knots=4)
    assert wrapped.plans == ()
    per_step(case.losses(wrapped))
    case.gradient()
    per_step(case.losses(wrapped))
    (got,), (want,) = wrapped.plans, transformed.plans
    assert got.knots == want.knots
    assert got.predicted_error == pytest.approx(want.predicted_error)
    assert relative_error(case.gradient(), case.expected(plan=want)) < TOLERANCE
    wrapped.recalibrate()
    assert wrapped.plans == ()


class Bends(MLP):
    """Its output depends on the mode, on autocast and, with `p`, on random numbers."""

    p = 0.0

    def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        v = super().forward(z.to(self.a.weight.dtype), t, condition)
        return nn.functional.dropout(v if self.training else 2 * v, self.p, training=True)


@pytest.mark.parametrize("what", ["mode", "autocast", "random"])
def test_a_step_runs_again_in_the_surroundings_of_its_call(what: str) -> None:
    case = loop()
    model = Bends().to(torch.float32 if what == "autocast" else torch.float64)
    model.p = 0.5 if what == "random" else 0.0
    case = Loop(model, case.z, case.t)

    def losses(denoiser: nn.Module) -> Iterator[Tensor]:
        torch.manual_seed(5)
        for i in range(STEPS):
            denoiser.train(not (what == "mode" and i % 2))
            with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast" and i % 4 != 3):
                v = denoiser(case.z[i], case.t[i])
            assert denoiser.training == (not (what == "mode" and i % 2))
            yield case.loss(i, v.double())

    per_step(losses(model))
    want = case.gradient()
    per_step(losses(jagg_fx.wrap(model, num_steps=STEPS, cos_threshold=1.0)))
    assert relative_error(case.gradient(), want) < (1e-6 if what == "autocast" else TOLERANCE)


def test_random_numbers_in_a_step_that_would_be_interpolated_are_an_error() -> None:
    case = loop()
    model = Bends().double()
    model.p = 0.5
    wrapped = jagg_fx.wrap(model, num_steps=STEPS, cos_threshold=None)
    with pytest.raises(jagg_fx.errors.DropoutError, match="draws random numbers"):
        per_step(Loop(model, case.z, case.t).losses(wrapped))
    wrapped.reset()


def test_autocast_around_the_whole_loop_keeps_the_weights_gradients() -> None:
    z, t = path(torch.float32)
    case = Loop(MLP(), z, t[:, None].expand(-1, BATCH))
    with torch.autocast("cpu", torch.bfloat16):
        want = case.expected(cos_threshold=None)
        per_step(case.losses(jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None)))
    assert relative_error(case.gradient(), want) < 1e-2
    assert want.norm() > 0


def test_calls_without_gradients_pass_through_and_do_not_count() -> None:
    case = loop()
    want = case.expected(cos_threshold=None)
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None)
    with torch.no_grad():  # a rollout
        assert torch.equal(wrapped(case.z[0], case.t[0]), case.model(case.z[0], case.t[0]))
    for i in range(STEPS):
        v = wrapped(case.z[i], case.t[i])
        with torch.no_grad():  # the reference of a KL term
            wrapped(case.z[i], case.t[i])
        case.loss(i, v).backward()
    assert relative_error(case.gradient(), want) < TOLERANCE


def test_a_scaled_and_accumulated_loss() -> None:
    case = loop()
    want = 2 * case.expected(cos_threshold=None)
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=1.0)
    before = torch.cat([p.detach().flatten() for p in case.model.parameters()])
    for _ in range(2):
        for loss in case.losses(wrapped):
            scaler.scale(loss / 4).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    after = torch.cat([p.detach().flatten() for p in case.model.parameters()])
    assert relative_error(4 * (before - after), want) < 1e-10


def test_cotangents_of_zero_give_gradients_of_zero() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS)
    per_step(0 * loss for loss in case.losses(wrapped))
    assert case.gradient().abs().max() == 0
    assert wrapped.stats is not None


def test_several_outputs_in_a_dataclass() -> None:
    @dataclass
    class Prediction:
        sample: Tensor
        extra: Tensor

    class Two(MLP):
        def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
            v = super().forward(z, t, condition)
            return Prediction(v, v.sum(-1).sin())

    case = loop()
    model = Two().double()

    def losses(denoiser: Callable[..., Any]) -> Iterator[Tensor]:
        for i in range(STEPS):
            out = denoiser(case.z[i], case.t[i])
            yield case.loss(i, out.sample) + out.extra.sum() * i

    case = Loop(model, case.z, case.t)
    transformed = jagg_fx.transform(
        lambda z: torch.stack(list(losses(model))), lowering="reference", denoiser=model, cos_threshold=None
    )
    transformed(case.z).sum().backward()
    want = case.gradient()
    per_step(losses(jagg_fx.wrap(model, num_steps=STEPS, cos_threshold=None)))
    assert relative_error(case.gradient(), want) < TOLERANCE


def test_checkpointing_inside_the_denoiser() -> None:
    class Checkpointed(MLP):
        def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
            return torch.utils.checkpoint.checkpoint(super().forward, z, t, condition, use_reentrant=False)

    plain = loop()
    want = plain.expected(cos_threshold=0.04)
    model = Checkpointed().double()
    model.load_state_dict(plain.model.state_dict())
    case = Loop(model, plain.z, plain.t)
    per_step(case.losses(jagg_fx.wrap(model, num_steps=STEPS, cos_threshold=0.04)))
    assert relative_error(case.gradient(), want) < TOLERANCE


def test_memory_is_that_of_the_open_knots() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None)
    alive: list[weakref.ref[Any]] = []

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def pack(tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        alive.append(weakref.ref(saved))
        return saved

    counts = []
    for i in range(STEPS):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            v = wrapped(case.z[i], case.t[i])
        counts.append(sum(ref() is not None for ref in alive))
        case.loss(i, v).backward()
        del v
    one = counts[0]
    assert one > 0
    assert counts == [one, one, one, 2 * one, one, one, one, 2 * one, one]
    assert not any(ref() is not None for ref in alive)


@pytest.mark.inductor
def test_compiled_denoiser() -> None:
    z, t = path(torch.float32)
    case = Loop(MLP(), z, t[:, None].expand(-1, BATCH).contiguous())
    want = case.expected(cos_threshold=0.04)
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=0.04, compile=True)
    with torch.no_grad():
        wrapped(z[0], case.t[0])
    per_step(case.losses(wrapped))
    assert relative_error(case.gradient(), want) < 1e-5
    per_step(case.losses(wrapped))
    assert relative_error(case.gradient(), want) < 1e-5


# What came out wrong once.


def test_containers_that_the_loop_fills_anew() -> None:
    class Scaled(MLP):
        def forward(self, z: Tensor, t: Tensor, extra: Any = None) -> Any:  # type: ignore[override]
            return super().forward(z, t) * extra["scale"]

    case = loop()
    model = Scaled().double()
    case = Loop(model, case.z, case.t)

    def losses(denoiser: Callable[..., Tensor]) -> Iterator[Tensor]:
        extra: dict[str, Tensor] = {}
        for i in range(STEPS):
            extra["scale"] = torch.full((BATCH, 1), 1.0 + i, dtype=torch.float64)
            yield case.loss(i, denoiser(case.z[i], case.t[i], extra))

    per_step(losses(model))
    want = case.gradient()
    per_step(losses(jagg_fx.wrap(model, num_steps=STEPS, cos_threshold=1.0)))
    assert relative_error(case.gradient(), want) < TOLERANCE


def test_cotangents_in_one_buffer_for_all_steps() -> None:
    case = loop()
    wanted = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None)
    cotangents = torch.randn(STEPS, BATCH, DIM, dtype=torch.float64)
    for i in range(STEPS):
        wanted(case.z[i], case.t[i]).backward(cotangents[i])
    want = case.gradient()
    wrapped, buffer = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None), torch.empty_like(cotangents[0])
    for i in range(STEPS):
        wrapped(case.z[i], case.t[i]).backward(buffer.copy_(cotangents[i]))
    assert relative_error(case.gradient(), want) < TOLERANCE


def test_outputs_that_need_no_gradient_do_not_decide() -> None:
    class WithMask(MLP):
        def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
            return super().forward(z, t, condition), torch.full((BATCH, 1000), 9.0, dtype=z.dtype)

    case = loop()
    model = WithMask().double()
    model.load_state_dict(case.model.state_dict())
    both = []
    for denoiser, pick in ((case.model, lambda v: v), (model, lambda v: v[0])):
        wrapped = jagg_fx.wrap(denoiser, num_steps=STEPS, cos_threshold=0.04)
        per_step(case.loss(i, pick(wrapped(case.z[i], case.t[i]))) for i in range(STEPS))
        assert wrapped.stats is not None
        both.append(wrapped.stats.last.scores)
    assert both[0] == both[1]


def test_a_second_backward_between_the_flushes_of_a_steps_knots() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, knots=(0, 3, 8), cos_threshold=None)
    losses = case.losses(wrapped)
    next(losses).backward()
    kept = next(losses)
    kept.backward(retain_graph=True)
    next(losses).backward()
    next(losses).backward()
    with pytest.raises(jagg_fx.errors.SecondBackwardError, match="reached step 1"):
        kept.backward()
    wrapped.reset()


@pytest.mark.parametrize("what", ["rows of a table", "some steps", "time", "equal but other"])
def test_arguments_trained_for_one_step_alone_are_errors(what: str) -> None:
    case = loop()
    table = torch.rand(STEPS, BATCH, 2 * DIM, dtype=torch.float64, requires_grad=True)
    control = nn.Linear(DIM, 2 * DIM).double()
    nn.init.zeros_(control.weight)

    def argument(i: int) -> Tensor:
        rows = {"rows of a table": table[i], "some steps": table[0] if i else table[0].detach()}
        return rows[what] if what in rows else control(case.z[i])

    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS)
    wrapped(
        case.z[0], case.t[0] * table[0, 0, 0] if what == "time" else case.t[0], argument(0)
    ) if what != "time" else None
    with pytest.raises(jagg_fx.errors.ChainedStatesError, match="an input of that step alone needs gradients"):
        wrapped(case.z[1], case.t[1] * table[0, 0, 0] if what == "time" else case.t[1], argument(1))
    wrapped.reset()


def test_an_expert_that_is_frozen_at_some_steps_is_an_error() -> None:
    class Frozen(MLP):
        def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
            v = super().forward(z, t, condition)
            return v.detach() if float(t[0]) < 0.5 else v

    case = loop()
    wrapped = jagg_fx.wrap(Frozen().double(), num_steps=STEPS, knots=(0, 8))
    with pytest.raises(jagg_fx.errors.JaggError, match=r"needs no gradient|need gradients"):
        per_step(case.losses(wrapped))
    wrapped.reset()


def test_an_optimizer_of_a_trained_prompt_is_watched_too() -> None:
    case = loop()
    case.model.requires_grad_(False)
    prompt = torch.rand(BATCH, 2 * DIM, dtype=torch.float64, requires_grad=True)
    wrapped, optimizer = jagg_fx.wrap(case.model, num_steps=4), torch.optim.SGD([prompt], lr=1.0)
    case.loss(0, wrapped(case.z[0], case.t[0], prompt)).backward()
    with pytest.raises(jagg_fx.errors.PendingStepsError, match=r"SGD\.step"):
        optimizer.step()
    wrapped.reset()


def test_nothing_is_kept_after_the_last_backward() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None)
    seen: list[weakref.ref[Tensor]] = []
    for i in range(STEPS):
        prompt = torch.ones(2 * DIM, dtype=torch.float64)
        seen.append(weakref.ref(prompt))
        case.loss(i, wrapped(case.z[i], case.t[i], prompt)).backward()
    del prompt
    assert sum(ref() is not None for ref in seen) <= 5  # the knots'
    run = weakref.ref(wrapped._current)
    wrapped(case.z[0], case.t[0])
    assert run() is None
    wrapped.reset()


def test_copies_and_checkpoints() -> None:
    wrapped = jagg_fx.wrap(MLP(), num_steps=STEPS, W=3)
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert isinstance(twin, jagg_fx.Wrapped)
        assert twin.plans == wrapped.plans
        assert twin._current is None
        assert torch.equal(twin.a.weight, wrapped.a.weight)
    parent = nn.ModuleDict({"d": wrapped})
    assert str(parent.load_state_dict(parent.state_dict())) == "<All keys matched successfully>"


def test_calls_of_a_step_in_another_order_are_an_error() -> None:
    case = loop()
    prompts = torch.randn(2, BATCH, 2 * DIM, dtype=torch.float64)
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, calls_per_step=2)
    for prompt in prompts:
        wrapped(case.z[0], case.t[0], prompt)
    with pytest.raises(jagg_fx.errors.StepMismatchError, match="step 1 come in another order"):
        wrapped(case.z[1], case.t[1], prompts[1])
    wrapped.reset()


@pytest.mark.parametrize("num_steps", [8, 10])
def test_a_wrong_number_of_steps_is_noticed(num_steps: int) -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=num_steps)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.0)

    def updates() -> None:
        for _ in range(2):
            per_step(case.losses(wrapped))
            optimizer.step()

    with pytest.raises(jagg_fx.errors.PendingStepsError, match="num_steps is the number of trained steps"):
        updates()
    wrapped.reset()


@pytest.mark.parametrize("backward", [per_step, once])
def test_compiled_around(backward: Callable[..., None]) -> None:
    case = loop()
    want = case.expected(cos_threshold=None)
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None)
    backward(case.losses(torch.compile(wrapped, backend="eager")))
    assert relative_error(case.gradient(), want) < TOLERANCE


def test_bad_velocities_do_not_outlive_their_block() -> None:
    case = loop()
    want = case.expected(cos_threshold=None)
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None)
    wrong = [torch.ones(BATCH, DIM, dtype=torch.float64)] * STEPS
    with pytest.raises(jagg_fx.errors.VelocityMismatchError), wrapped.reuse(velocities=wrong):
        per_step(case.losses(wrapped))
    per_step(case.losses(wrapped))
    assert relative_error(case.gradient(), want) < TOLERANCE
    with pytest.raises(jagg_fx.errors.OptionError, match="<NoneType>"), wrapped.reuse(velocities=None):  # type: ignore[arg-type]
        pass


def test_leaving_the_block_of_reuse_early_is_an_error() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS)
    with torch.no_grad():
        velocities = [wrapped(case.z[i], case.t[i]) for i in range(STEPS)]
    with pytest.raises(jagg_fx.errors.PendingStepsError, match="was left"), wrapped.reuse(velocities=velocities):
        wrapped(case.z[0], case.t[0])
    wrapped.reset()


# Nothing is lost silently.


def test_an_optimizers_step_within_a_group_is_an_error() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for i in range(4):
        v = wrapped(case.z[i], case.t[i])
        if i == 2:
            other.step()
            with pytest.raises(
                jagg_fx.errors.PendingStepsError, match=r"SGD.step.*steps 0, 1, 2 are pending.*for 0, 1;.*step 3"
            ):
                optimizer.step()
        case.loss(i, v).backward()
    optimizer.step()  # the group is closed
    wrapped.reset()


def test_an_optimizers_step_after_the_last_backward_is_none() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS)
    optimizer = torch.optim.AdamW(case.model.parameters())
    per_step(case.losses(wrapped))
    optimizer.step()
    for loss in case.losses(wrapped):
        del loss  # a trajectory that was looked at and not trained on
    optimizer.step()


def test_a_new_trajectory_in_the_middle_of_one_is_an_error_and_can_be_dropped() -> None:
    case = loop()
    want = case.expected(cos_threshold=None)
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None)

    def fails_halfway() -> None:
        for i, loss in enumerate(case.losses(wrapped)):
            loss.backward()
            _ = 1 / (1 - i)

    with pytest.raises(ZeroDivisionError):
        fails_halfway()
    case.gradient()
    with pytest.raises(jagg_fx.errors.PendingStepsError, match=r"the times of steps 0 to 3.*wrapped.reset\(\)"):
        per_step(case.losses(wrapped))
    wrapped.reset()
    case.gradient()
    per_step(case.losses(wrapped))
    assert relative_error(case.gradient(), want) < TOLERANCE


def test_a_repeated_time_of_a_shuffled_trajectory_is_an_error() -> None:
    case = loop(shuffled=True)
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, shuffled=True)
    case.loss(0, wrapped(case.z[0], case.t[0])).backward()
    with pytest.raises(jagg_fx.errors.StepOrderError, match="a time comes twice"):
        per_step(case.losses(wrapped))
    wrapped.reset()


def test_a_new_trajectory_after_one_whose_last_backward_is_missing_is_an_error() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=4)
    for i in range(4):
        v = wrapped(case.z[i], case.t[i])
        if i < 3:
            case.loss(i, v).backward()
    with pytest.raises(
        jagg_fx.errors.PendingStepsError, match=r"a new trajectory begins.*steps 0, 1, 2, 3 are pending"
    ):
        wrapped(case.z[0], case.t[0])
    wrapped.reset()


def test_the_forwards_of_two_trajectories_before_their_backwards() -> None:
    case = loop()
    want = 2 * case.expected(cos_threshold=None)
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.0)
    first, second = list(case.losses(wrapped)), list(case.losses(wrapped))
    first[0].backward()
    with pytest.raises(jagg_fx.errors.PendingStepsError, match=r"SGD.step.*for 0;"):
        optimizer.step()
    per_step(iter(first[1:]))
    per_step(iter(second))
    optimizer.step()
    assert relative_error(case.gradient(), want) < TOLERANCE


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_trajectory_that_is_thrown_away_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    case = loop()
    said: list[str] = []
    monkeypatch.setattr("sys.unraisablehook", lambda event: said.append(str(event.exc_value)))
    wrapped = jagg_fx.wrap(case.model, num_steps=4)
    case.loss(0, wrapped(case.z[0], case.t[0])).backward()
    del wrapped
    gc.collect()
    assert len(said) == 1
    assert "the trajectory was thrown away, but the gradients of its steps 0 are pending" in said[0]


def test_unordered_times_are_an_error_that_names_the_option() -> None:
    case = loop(shuffled=True)
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS)
    with pytest.raises(jagg_fx.errors.StepOrderError, match=r"wrap\(\.\.\., shuffled=True\)"):
        per_step(case.losses(wrapped))
    wrapped.reset()


def test_backwards_in_reverse_order_are_an_error() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=4)
    losses = list(case.losses(wrapped, steps=4))
    with pytest.raises(jagg_fx.errors.MissingCotangentError, match=r"step 3 came before that of steps 0, 1, 2"):
        losses[3].backward()
    wrapped.reset()


def test_gradients_of_chosen_inputs_alone_are_an_error() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=4)
    loss = torch.stack(list(case.losses(wrapped, steps=4))).sum()
    with pytest.raises(jagg_fx.errors.MissingCotangentError, match=r"use backward\(\)"):
        torch.autograd.grad(loss, list(case.model.parameters()))
    wrapped.reset()


def test_two_losses_of_a_step() -> None:
    case = loop()
    want = case.expected(cos_threshold=None, steps=4)
    wrapped = jagg_fx.wrap(case.model, num_steps=4, cos_threshold=None)
    for i in range(4):
        loss = case.loss(i, wrapped(case.z[i], case.t[i]))
        (loss / 2).backward(retain_graph=True)
        if i < 3:
            (loss / 2).backward()
    with pytest.raises(jagg_fx.errors.SecondBackwardError, match="Sum the losses of a step"):
        (loss / 2).backward()
    (case.loss(3, case.model(case.z[3], case.t[3])) * 0).backward()
    assert relative_error(case.gradient(), want) > 1e-3  # half of the last step's loss is missing, and that was said


def test_steps_that_are_not_alike_are_errors() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS)
    wrapped(case.z[0], case.t[0])
    with pytest.raises(jagg_fx.errors.StepMismatchError, match=r"\[2, 8\]"):
        wrapped(case.z[1, :2], case.t[1, :2])
    with pytest.raises(jagg_fx.errors.StepMismatchError, match=r"\+condition"):
        wrapped(case.z[1], case.t[1], torch.ones(2 * DIM, dtype=torch.float64))
    with pytest.raises(jagg_fx.errors.ChainedStatesError, match="a gradient flows into an input"):
        wrapped(case.z[1].clone().requires_grad_(), case.t[1])
    wrapped.reset()


def test_an_argument_changed_in_place_is_an_error_where_it_is_needed_again() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=1.0)
    x = case.z[0].clone()

    def losses() -> Iterator[Tensor]:
        for i in range(STEPS):
            x.copy_(case.z[i])
            yield case.loss(i, wrapped(x, case.t[i]))

    with pytest.raises(jagg_fx.errors.ArgumentChangedError, match=r"x\.clone\(\)"):
        per_step(losses())
    wrapped.reset()


def test_batch_normalisation_and_inference_tensors_are_refused() -> None:
    case = loop()
    with torch.inference_mode():
        z = case.z[0] + 0
    with pytest.raises(jagg_fx.errors.InferenceTensorError, match=r"jagg_fx.wrap\(MLP, num_steps=9\): argument 0"):
        jagg_fx.wrap(case.model, num_steps=STEPS)(z, case.t[0])
    model = MLP().double()
    model.norm = nn.BatchNorm1d(3)
    with pytest.raises(jagg_fx.errors.BatchNormError):
        jagg_fx.wrap(model, num_steps=STEPS)(case.z[0], case.t[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, r"jagg_fx.wrap\(MLP, num_steps=0\)"),
        ({"num_steps": 9, "W": 1}, r"jagg_fx.wrap\(MLP, W=1\)"),
        ({"num_steps": 9, "knots": 12}, r"jagg_fx.wrap\(MLP, knots=12\): the function has 9 steps"),
        ({"num_steps": 9, "knots": (0, 12)}, r"jagg_fx.wrap\(MLP, knots=\(0, 12\)\)"),
        ({"num_steps": 9, "calls_per_step": 0}, r"calls_per_step=0"),
        ({"num_steps": 9, "cos_threshold": 2}, r"jagg_fx.wrap\(MLP, cos_threshold=2\)"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(jagg_fx.errors.OptionError, match=message):
        jagg_fx.wrap(MLP(), **options)


# What it stands in for.


def test_it_stands_in_for_the_denoiser() -> None:
    model = MLP()
    model.config = {"in_channels": 4}
    model.register_buffer("table", torch.ones(2))
    wrapped = jagg_fx.wrap(model, num_steps=STEPS)
    assert list(wrapped.state_dict()) == list(model.state_dict())
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(wrapped.parameters(), model.parameters(), strict=True))
    assert dict(wrapped.named_buffers()).keys() == {"table"}
    assert dict(nn.ModuleDict({"x": wrapped}).state_dict()).keys() == {f"x.{n}" for n in model.state_dict()}
    assert wrapped.config is model.config
    assert wrapped.module is model
    assert wrapped.a is model.a
    wrapped.outputs = 1
    wrapped.new_attribute = 5
    assert model.outputs == 1
    assert not hasattr(model, "new_attribute")
    assert wrapped.eval() is wrapped
    assert not any([model.training, wrapped.training, model.a.training])
    nn.Sequential(wrapped).train()
    assert all([model.training, wrapped.training])
    assert wrapped.to(torch.float64) is wrapped
    assert model.a.weight.dtype == torch.float64
    assert wrapped.float() is wrapped
    assert model.a.weight.dtype == torch.float32
    wrapped.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert not model.a.weight.any()
    wrapped.requires_grad_(False)
    assert not model.a.weight.requires_grad
    with pytest.raises(AttributeError, match="nonsense"):
        _ = wrapped.nonsense
    twin = copy.deepcopy(wrapped)
    assert isinstance(twin, jagg_fx.Wrapped)
    assert twin.original is not model
    assert twin.a.weight is twin.original.a.weight
    assert jagg_fx.wrap(wrapped, num_steps=2).original is model
    assert repr(wrapped) == "jagg_fx.wrap(MLP, num_steps=9)"


def test_adapters_are_the_denoisers_own() -> None:
    case = loop()
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(case.model, peft.LoraConfig(r=2, target_modules=["a", "b"], init_lora_weights=False))
    case = Loop(model.double(), case.z, case.t)

    def losses(denoiser: Any) -> Iterator[Tensor]:
        for i in range(STEPS):
            v = denoiser(case.z[i], case.t[i])
            with torch.no_grad(), denoiser.disable_adapter():
                reference = denoiser(case.z[i], case.t[i])
            yield case.loss(i, v) + (v - reference).square().mean()

    per_step(losses(model))
    want = case.gradient()
    wrapped = jagg_fx.wrap(model, num_steps=STEPS, cos_threshold=1.0)
    per_step(losses(wrapped))
    assert relative_error(case.gradient(), want) < TOLERANCE
    with wrapped.disable_adapter():
        wrapped(case.z[0], case.t[0])  # nothing is trained then: it does not count
    assert not wrapped._current.pending()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["a"]))
    wrapped(case.z[0], case.t[0])
    wrapped.set_adapter("other")
    with pytest.raises(jagg_fx.errors.AdapterError, match="other adapters are active"):
        wrapped(case.z[1], case.t[1])
    wrapped.reset()


def test_the_report_says_what_is_done() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS)
    assert wrapped.report.rewrite is None
    per_step(case.losses(wrapped))
    text = str(wrapped.report)
    assert "9 -> 5, up to 9 (see stats)" in text
    assert "step by step" in text
    assert wrapped.report.to_dict()["streams"][0]["knots"] == [0, 3, 4, 7, 8]


# The rollout's velocities.


@pytest.mark.parametrize("backward", [per_step, once])
def test_velocities_of_the_rollout_replace_forwards(backward: Callable[..., None]) -> None:
    case = loop()
    want = case.expected(cos_threshold=None)
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None)
    with torch.no_grad():
        velocities = torch.stack([wrapped(case.z[i], case.t[i]) for i in range(STEPS)])
    ran: list[int] = []
    handle = case.model.register_forward_hook(lambda *_: ran.append(1))
    with wrapped.reuse(velocities=velocities):
        backward(case.losses(wrapped))
    handle.remove()
    assert len(ran) == 5
    assert relative_error(case.gradient(), want) < TOLERANCE


def test_exact_segments_with_the_rollouts_velocities() -> None:
    case = loop()
    want = case.exact()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=1.0)
    with torch.no_grad():
        velocities = [wrapped(case.z[i], case.t[i]) for i in range(STEPS)]
    with wrapped.reuse(velocities=velocities):
        per_step(case.losses(wrapped))
    assert relative_error(case.gradient(), want) < TOLERANCE


def test_velocities_of_other_weights_are_an_error_or_are_moved() -> None:
    case = loop()
    wrapped = jagg_fx.wrap(case.model, num_steps=STEPS, cos_threshold=None)
    with torch.no_grad():
        old = torch.stack([wrapped(case.z[i], case.t[i]) for i in range(STEPS)])
        case.model.b.bias += 0.01
        fresh = torch.stack([wrapped(case.z[i], case.t[i]) for i in range(STEPS)])
    with pytest.raises(jagg_fx.errors.VelocityMismatchError, match="extrapolate=True"), wrapped.reuse(velocities=old):
        per_step(case.losses(wrapped))
    wrapped.reset()
    with wrapped.reuse(velocities=old, extrapolate=True):
        seen = torch.stack([wrapped(case.z[i], case.t[i]).detach() for i in range(STEPS)])
    wrapped.reset()
    assert relative_error(seen, fresh) < 1e-12  # the same everywhere, so that the knots tell all of it
    assert relative_error(old, fresh) > 1e-3
    with pytest.raises(jagg_fx.errors.OptionError, match="<8 of them>"), wrapped.reuse(velocities=old[:8]):
        pass
    with pytest.raises(jagg_fx.errors.OptionError, match="second trajectory"), wrapped.reuse(velocities=fresh):
        per_step(itertools.chain(case.losses(wrapped), case.losses(wrapped)))
    wrapped(case.z[0], case.t[0])
    with pytest.raises(jagg_fx.errors.PendingStepsError), wrapped.reuse(velocities=old):
        pass
    wrapped.reset()
    with pytest.raises(jagg_fx.errors.VelocityMismatchError, match="shape"), wrapped.reuse(velocities=old[:, :2]):
        wrapped(case.z[0], case.t[0])
    wrapped.reset()
