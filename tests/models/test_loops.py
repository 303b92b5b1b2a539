"""The loops run and repeat, and the only difference between two runs is the one line that wraps the denoiser."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jagg_fx
from jagg_fx.models.loops import Prompts, Update, dance_grpo, ddpo, flow_grpo, mix_grpo
from jagg_fx.models.samplers import replay
from jagg_fx.models.zoo import Conditions, zoo
from jagg_fx.plan import Rule, paper
from tests.oracle import Oracle, hat_weights

PROMPTS = 2


@dataclass(frozen=True)
class Loop:
    """A loop, and how a user of it would call `jagg_fx.wrap`.

    Attributes:
        family: key in the zoo.
        num_steps: calls with gradients per micro-batch.
        lr: large enough that the second update's gradients depend on the first's.
        with_lora: whether only an adapter is trained.
        shuffled: whether the steps come in random order.
    """

    run: Callable[..., list[Update]]
    family: str
    num_steps: int
    lr: float
    with_lora: bool = False
    shuffled: bool = False

    def setup(self, dtype: torch.dtype) -> tuple[nn.Module, Prompts]:
        torch.manual_seed(0)
        family = zoo[self.family]
        denoiser = family.denoiser()
        config: Any = denoiser.config
        conditions, negative = (_cast(family.conditions(config, PROMPTS), dtype) for _ in range(2))
        if self.with_lora:
            from peft import LoraConfig, get_peft_model

            # Initialised at random: as trainers do it, B = 0, the adapter is its own reference and A gets no gradient.
            lora = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=list(family.lora_targets))
            denoiser = get_peft_model(denoiser, lora)
        return denoiser.to(dtype), Prompts(conditions, negative, family.state(config))

    def train(
        self,
        around: Callable[[nn.Module], Any] = lambda denoiser: denoiser,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> tuple[Tensor, list[Update]]:
        """How far all trained parameters moved, and the updates."""
        denoiser, prompts = self.setup(dtype)
        trained = [p for p in denoiser.parameters() if p.requires_grad]
        before = nn.utils.parameters_to_vector(trained).detach().clone()
        denoiser = around(denoiser)
        # Not Adam: where a gradient is nearly zero, it makes large steps of rounding errors.
        optimizer = torch.optim.SGD(trained, lr=self.lr)
        updates = self.run(denoiser, optimizer, torch.Generator().manual_seed(0), prompts, **options)
        return nn.utils.parameters_to_vector(trained).detach() - before, updates

    def oracle(self, W: int) -> Callable[[nn.Module], nn.Module]:
        return functools.partial(Oracle, plan=paper(W).place(self.num_steps, Rule()))

    def wrapped(self, W: int, **options: Any) -> Callable[[nn.Module], nn.Module]:
        return lambda denoiser: jagg_fx.wrap(denoiser, num_steps=self.num_steps, W=W, **options)


LOOPS = {
    "flow_grpo": Loop(flow_grpo, "sd3", num_steps=9, lr=1.0, with_lora=True),
    "dance_grpo": Loop(dance_grpo, "flux", num_steps=5, lr=0.1, shuffled=True),
    "mix_grpo": Loop(mix_grpo, "flux", num_steps=4, lr=1.0),
    "ddpo": Loop(ddpo, "unet", num_steps=10, lr=0.02, shuffled=True),
}
each_loop = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
# Not hasattr alone: importing the module `jagg_fx.wrap` sets the name, too.
needs_wrap = pytest.mark.skipif(not callable(getattr(jagg_fx, "wrap", None)), reason="jagg_fx.wrap is being written")


def _cast(conditions: Conditions, dtype: torch.dtype) -> Conditions:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in conditions.items()
    }


def _difference(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@each_loop
def test_a_loop_trains_and_repeats(loop: Loop) -> None:
    moved, updates = loop.train(dtype=torch.float32)
    again, same_updates = loop.train(dtype=torch.float32)
    assert torch.equal(moved, again)
    assert updates == same_updates
    assert len(updates) == 2
    assert all(torch.isfinite(torch.tensor(update)).all() for update in updates)
    assert updates[0].ratio == pytest.approx(1, abs=1e-5)
    assert torch.isfinite(moved).all()
    assert float(moved.norm()) > 0


@each_loop
def test_the_second_update_depends_on_the_first(loop: Loop) -> None:
    """Else the comparisons below would not see a first update that went wrong."""
    _, (first, second) = loop.train()
    rollouts_are_fresh = loop.run is mix_grpo
    assert (abs(second.ratio - 1) > 1e-5) != rollouts_are_fresh
    assert second.loss != first.loss


@each_loop
def test_the_oracle_with_every_step_a_knot_is_exact(loop: Loop) -> None:
    moved, updates = loop.train()
    by_oracle, oracle_updates = loop.train(loop.oracle(2))
    assert _difference(by_oracle, moved) < 1e-6
    torch.testing.assert_close(torch.tensor(oracle_updates), torch.tensor(updates))


@each_loop
def test_the_oracle_with_few_knots_is_not(loop: Loop) -> None:
    moved, updates = loop.train()
    by_oracle, oracle_updates = loop.train(loop.oracle(4))
    assert 1e-3 < _difference(by_oracle, moved) < 1
    assert oracle_updates[0] == pytest.approx(updates[0])  # values are exact: what the first update saw is unchanged


def test_the_oracle_agrees_with_the_eager_twin() -> None:
    """Two ways to the same number, on a replay with one backward for all steps."""
    torch.manual_seed(0)
    family = zoo["sd3"]
    denoiser = family.denoiser().double()
    inputs = family.inputs(family.denoiser(), steps=9)
    latents, sigmas = inputs.latents.double(), inputs.sigmas.double()
    conditions = _cast(inputs.conditions, torch.float64)

    def gradient(called: nn.Module, W: int | None) -> Tensor:
        def log_probs(latents: Tensor, sigmas: Tensor) -> Tensor:
            step = functools.partial(family.velocity, called, conditions=conditions)
            return replay(step, family.sampler, latents, sigmas).log_probs.sum()

        fn = log_probs if W is None else jagg_fx.transform(log_probs, W=W, cos_threshold=None, lowering="reference")
        denoiser.zero_grad()
        fn(latents, sigmas).backward()
        return torch.cat([p.grad.flatten() for p in denoiser.parameters() if p.grad is not None])

    twin, oracle = gradient(denoiser, 4), gradient(Oracle(denoiser, paper(4).place(9, Rule())), None)
    assert _difference(oracle, twin) < 1e-6
    assert _difference(oracle, gradient(denoiser, None)) > 1e-3


def test_the_oracles_weights_repeat_the_times_of_every_sample() -> None:
    """Hat functions sum to 1 and reproduce straight lines, between the knots' times; outside, the nearest knot counts."""
    knots = torch.tensor([[0.1, 0.9], [0.5, 0.2], [0.9, 0.6]]).numpy()  # [K, B], in another order for each sample
    times = torch.tensor([[0.3, 0.3], [0.95, 0.1], [0.5, 0.7]]).numpy()
    weights = hat_weights(times, knots)
    assert weights.sum(1) == pytest.approx(1)
    assert (weights >= 0).all()
    assert (weights * knots).sum(1) == pytest.approx(times.clip(knots.min(0), knots.max(0)))


def test_a_scaled_loss_trains_alike() -> None:
    moved, _ = LOOPS["ddpo"].train()
    scaler = functools.partial(torch.amp.GradScaler, "cpu")
    scaled, _ = LOOPS["ddpo"].train(scaler=scaler())
    assert _difference(scaled, moved) < 1e-6
    by_oracle, _ = LOOPS["ddpo"].train(LOOPS["ddpo"].oracle(2), scaler=scaler())
    assert _difference(by_oracle, moved) < 1e-6


def test_autocast_around_the_call() -> None:
    loop = LOOPS["dance_grpo"]
    moved, updates = loop.train(dtype=torch.float32, autocast=True)
    assert updates[0].ratio == pytest.approx(1, abs=1e-5)
    by_oracle, _ = loop.train(loop.oracle(2), dtype=torch.float32, autocast=True)
    assert _difference(by_oracle, moved) < 1e-5
    without, _ = loop.train(dtype=torch.float32)
    assert _difference(moved, without) > 1e-5


@needs_wrap
@each_loop
def test_wrapped_with_every_step_a_knot_is_exact(loop: Loop) -> None:
    moved, updates = loop.train()
    wrapped, wrapped_updates = loop.train(loop.wrapped(2))
    assert _difference(wrapped, moved) < 1e-6
    torch.testing.assert_close(torch.tensor(wrapped_updates), torch.tensor(updates))


@needs_wrap
@each_loop
def test_wrapped_is_the_oracle(loop: Loop) -> None:
    wrapped, updates = loop.train(loop.wrapped(4, cos_threshold=None, shuffled=loop.shuffled))
    by_oracle, oracle_updates = loop.train(loop.oracle(4))
    assert _difference(wrapped, by_oracle) < 1e-5
    assert _difference(wrapped, loop.train()[0]) > 1e-3
    torch.testing.assert_close(torch.tensor(updates), torch.tensor(oracle_updates))


@needs_wrap
def test_wrapped_under_a_scaled_loss() -> None:
    loop = LOOPS["ddpo"]
    around = loop.wrapped(4, cos_threshold=None, shuffled=True)
    wrapped, _ = loop.train(around, scaler=torch.amp.GradScaler("cpu"))
    assert _difference(wrapped, loop.train(loop.oracle(4))[0]) < 1e-5


@needs_wrap
def test_wrapped_under_autocast() -> None:
    loop = LOOPS["dance_grpo"]
    moved, updates = loop.train(dtype=torch.float32, autocast=True)
    wrapped, wrapped_updates = loop.train(loop.wrapped(2), dtype=torch.float32, autocast=True)
    assert wrapped_updates[0] == updates[0]  # values are the plain denoiser's, bit for bit
    assert _difference(wrapped, moved) < 1e-5
