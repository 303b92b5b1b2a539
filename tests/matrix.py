"""The cells of the compatibility table: what users do with a denoiser, for every family of the zoo.

A feature makes a `Problem` of a family. Where the class or torch itself cannot do it, `unavailable` says why, and the test
checks that it is so.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from jagg_fx.models.samplers import replay
from jagg_fx.models.schedulers import restart
from jagg_fx.models.zoo import Conditions, Family
from tests.problems import Problem

STEPS, BATCH = 5, 2
BF16 = 2e-2  # bfloat16 keeps 8 bits: sums of a few terms differ by that much between two orders


@dataclass(frozen=True)
class Case:
    """A problem, and how to transform it."""

    problem: Problem
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    around: Callable[[], Any] | None = None  # a context in which everything runs

    @property
    def is_bfloat16(self) -> bool:
        return self.tolerance >= BF16


@dataclass(frozen=True)
class Feature:
    """One row of the table.

    Attributes:
        name: for people.
        make: makes the case for a family.
        unavailable: families for which the class itself refuses, with the reason; the test checks that eager fails too.
    """

    name: str
    make: Callable[[Family], Case]
    unavailable: Mapping[str, str] = field(default_factory=dict)


def _case(model: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], **rest: Any) -> Case:
    trained = [p for p in model.parameters() if p.requires_grad]
    return Case(Problem(model, fn, args, trained), **rest)


def _log_probs(family: Family, step: Callable[..., Tensor], latents: Tensor, sigmas: Tensor) -> Tensor:
    return replay(step, family.sampler, latents, sigmas).log_probs


def _setup(family: Family, steps: int = STEPS) -> tuple[Any, Any]:
    torch.manual_seed(0)
    denoiser = family.denoiser()
    return denoiser, family.inputs(denoiser, BATCH, steps)


def full_fine_tuning(family: Family) -> Case:
    denoiser, inputs = _setup(family)
    return _case(denoiser, family.replay(denoiser), (inputs.latents, inputs.sigmas, inputs.conditions))


def _lora_config(family: Family) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=list(family.lora_targets))


def lora_by_get_peft_model(family: Family) -> Case:
    from peft import get_peft_model

    denoiser, inputs = _setup(family)
    model = get_peft_model(denoiser, _lora_config(family))
    return _case(model, family.replay(model), (inputs.latents, inputs.sigmas, inputs.conditions))


def lora_by_add_adapter(family: Family) -> Case:
    denoiser, inputs = _setup(family)
    denoiser.requires_grad_(False)
    denoiser.add_adapter(_lora_config(family))
    return _case(denoiser, family.replay(denoiser), (inputs.latents, inputs.sigmas, inputs.conditions))


def _beside_reference(family: Family, model: Any, reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Log-probs minus the KL term of GRPO, with the reference's velocity computed at every step under no_grad."""

    def fn(latents: Tensor, sigmas: Tensor, conditions: Conditions) -> Tensor:
        kl = []

        def step(x: Tensor, t: Tensor) -> Tensor:
            v = family.velocity(model, x, t, conditions)
            with torch.no_grad():
                v_reference = reference(x, t, conditions)
            kl.append((v - v_reference).square().flatten(1).mean(1))
            return v

        log_probs = _log_probs(family, step, latents, sigmas)
        return log_probs - 0.1 * torch.stack(kl, 1)

    return fn


def reference_by_disable_adapter(family: Family) -> Case:
    from peft import get_peft_model

    denoiser, inputs = _setup(family)
    model = get_peft_model(denoiser, _lora_config(family))

    def reference(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        with model.disable_adapter():
            return family.velocity(model, x, t, conditions)

    return _case(model, _beside_reference(family, model, reference), (inputs.latents, inputs.sigmas, inputs.conditions))


def reference_by_a_second_adapter(family: Family) -> Case:
    from peft import get_peft_model

    denoiser, inputs = _setup(family)
    model = get_peft_model(denoiser, _lora_config(family))
    model.add_adapter("reference", _lora_config(family))
    model.set_adapter("default")

    def reference(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        model.set_adapter("reference")
        try:
            return family.velocity(model, x, t, conditions)
        finally:
            model.set_adapter("default")

    return _case(model, _beside_reference(family, model, reference), (inputs.latents, inputs.sigmas, inputs.conditions))


def guidance_in_one_batch(family: Family) -> Case:
    denoiser, inputs = _setup(family)

    def fn(latents: Tensor, sigmas: Tensor, conditions: Conditions, negative: Conditions) -> Tensor:
        def step(x: Tensor, t: Tensor) -> Tensor:
            both = family.concatenate(negative, conditions)
            u, c = family.velocity(denoiser, torch.cat([x, x]), torch.cat([t, t]), both).chunk(2)
            return u + 3.0 * (c - u)

        return _log_probs(family, step, latents, sigmas)

    return _case(denoiser, fn, (inputs.latents, inputs.sigmas, inputs.conditions, inputs.negative))


def _guided(family: Family, combine: Callable[[Tensor, Tensor], Tensor], negative_grad: bool = True) -> Case:
    denoiser, inputs = _setup(family)

    def fn(latents: Tensor, sigmas: Tensor, conditions: Conditions, negative: Conditions) -> Tensor:
        def step(x: Tensor, t: Tensor) -> Tensor:
            c = family.velocity(denoiser, x, t, conditions)
            with torch.set_grad_enabled(negative_grad):
                u = family.velocity(denoiser, x, t, negative)
            return combine(u, c)

        return _log_probs(family, step, latents, sigmas)

    return _case(denoiser, fn, (inputs.latents, inputs.sigmas, inputs.conditions, inputs.negative))


def guidance_by_two_calls(family: Family) -> Case:
    return _guided(family, lambda u, c: u + 3.0 * (c - u))


def guidance_with_negative_under_no_grad(family: Family) -> Case:
    return _guided(family, lambda u, c: u + 3.0 * (c - u), negative_grad=False)


def guidance_rescaled(family: Family) -> Case:
    """Qwen-Image's: the combined velocity gets the conditional one's norm, which is not linear in either."""

    def combine(u: Tensor, c: Tensor) -> Tensor:
        combined = u + 4.0 * (c - u)
        return combined * (c.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    return _guided(family, combine)


def gradient_checkpointing(family: Family) -> Case:
    case = full_fine_tuning(family)
    model: Any = case.problem.model
    model.enable_gradient_checkpointing()
    model.train()
    return case


def autocast_around_the_replay(family: Family) -> Case:
    case = full_fine_tuning(family)
    return Case(case.problem, tolerance=BF16, around=lambda: torch.autocast("cpu", torch.bfloat16))


def autocast_around_the_call(family: Family) -> Case:
    denoiser, inputs = _setup(family)

    def fn(latents: Tensor, sigmas: Tensor, conditions: Conditions) -> Tensor:
        def step(x: Tensor, t: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                v = family.velocity(denoiser, x, t, conditions)
            return v.float()

        return _log_probs(family, step, latents, sigmas)

    return _case(denoiser, fn, (inputs.latents, inputs.sigmas, inputs.conditions), tolerance=BF16)


def autocast_by_accelerate(family: Family) -> Case:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    denoiser, inputs = _setup(family)
    AcceleratorState._reset_state(reset_partial_state=True)
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(denoiser)
    AcceleratorState._reset_state(reset_partial_state=True)
    return _case(model, family.replay(model), (inputs.latents, inputs.sigmas, inputs.conditions), tolerance=BF16)


def bfloat16_weights(family: Family) -> Case:
    denoiser, inputs = _setup(family)
    denoiser.to(torch.bfloat16)
    half = {
        name: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.conditions.items()
    }

    def fn(latents: Tensor, sigmas: Tensor, conditions: Conditions) -> Tensor:
        def step(x: Tensor, t: Tensor) -> Tensor:
            return family.velocity(denoiser, x.bfloat16(), t, conditions).float()

        return _log_probs(family, step, latents, sigmas)

    return _case(denoiser, fn, (inputs.latents, inputs.sigmas, half), tolerance=BF16)


def output_as_a_dataclass(family: Family) -> Case:
    denoiser, inputs = _setup(family)

    def fn(latents: Tensor, sigmas: Tensor, conditions: Conditions) -> Tensor:
        step = functools.partial(family.velocity, denoiser, conditions=conditions, return_dict=True)
        return _log_probs(family, step, latents, sigmas)

    return _case(denoiser, fn, (inputs.latents, inputs.sigmas, inputs.conditions))


class WithValueHead(nn.Module):
    """A denoiser with a critic beside it, as in PPO: two outputs."""

    def __init__(self, denoiser: nn.Module) -> None:
        super().__init__()
        self.denoiser, self.head = denoiser, nn.Linear(1, 1)

    def forward(self, hidden_states: Tensor, timestep: Tensor, **conditions: Any) -> tuple[Tensor, Tensor]:
        v = self.denoiser(hidden_states, timestep=timestep, **conditions)[0]
        return v, self.head(v.flatten(1).square().mean(1, keepdim=True))


def several_outputs(family: Family) -> Case:
    denoiser, inputs = _setup(family)
    model = WithValueHead(denoiser)

    def fn(latents: Tensor, sigmas: Tensor, conditions: Conditions) -> tuple[Tensor, Tensor]:
        values = []

        def step(x: Tensor, t: Tensor) -> Tensor:
            v, value = model(x, timestep=t * family.time_scale, **conditions, return_dict=False)
            values.append(value)
            return v

        return _log_probs(family, step, latents, sigmas), torch.cat(values, 1)

    return _case(model, fn, (inputs.latents, inputs.sigmas, inputs.conditions))


def channels_last(family: Family) -> Case:
    denoiser, inputs = _setup(family)
    layout = torch.channels_last_3d if inputs.latents.dim() == 6 else torch.channels_last
    denoiser.to(memory_format=layout)

    def fn(latents: Tensor, sigmas: Tensor, conditions: Conditions) -> Tensor:
        def step(x: Tensor, t: Tensor) -> Tensor:
            return family.velocity(denoiser, x.to(memory_format=layout), t, conditions)

        return _log_probs(family, step, latents, sigmas)

    return _case(denoiser, fn, (inputs.latents, inputs.sigmas, inputs.conditions))


def _with_times(family: Family, times: Callable[[Tensor, int], Any]) -> Case:
    """`times(sigmas, i)` is what the denoiser gets at step `i`."""
    denoiser, inputs = _setup(family)
    numbers = [times(inputs.sigmas, i) for i in range(STEPS)]

    def fn(latents: Tensor, sigmas: Tensor, conditions: Conditions) -> Tensor:
        order = iter(numbers)

        def step(x: Tensor, t: Tensor) -> Tensor:
            time = next(order)
            output = denoiser(x, timestep=time, **conditions, return_dict=False)
            return output[0]

        return _log_probs(family, step, latents, sigmas)

    return _case(denoiser, fn, (inputs.latents, inputs.sigmas, inputs.conditions))


def times_as_python_floats(family: Family) -> Case:
    return _with_times(family, lambda sigmas, i: float(sigmas[i]) * family.time_scale)


def times_as_python_integers(family: Family) -> Case:
    return _with_times(family, lambda sigmas, i: round(float(sigmas[i]) * 1000))


def times_as_scalars(family: Family) -> Case:
    return _with_times(family, lambda sigmas, i: sigmas[i] * family.time_scale)


def times_as_long_tensors(family: Family) -> Case:
    return _with_times(family, lambda sigmas, i: (sigmas[i] * 1000).round().long().expand(BATCH))


def two_experts(family: Family) -> Case:
    """Wan 2.2: one transformer for the high noise levels, another one for the low ones."""
    high, inputs = _setup(family, steps=8)
    low = family.denoiser()

    def fn(latents: Tensor, sigmas: Tensor, conditions: Conditions) -> Tensor:
        experts = iter([high] * 4 + [low] * 4)

        def step(x: Tensor, t: Tensor) -> Tensor:
            return family.velocity(next(experts), x, t, conditions)

        return _log_probs(family, step, latents, sigmas)

    return _case(
        nn.ModuleList([high, low]),
        fn,
        (inputs.latents, inputs.sigmas, inputs.conditions),
        options={"denoiser": [high, low]},
    )


def chained_with_stop(family: Family) -> Case:
    """Reward back-propagation through the whole sampler, as in DRTune: z_T through a small decoder."""
    denoiser, inputs = _setup(family)
    decoder = nn.Linear(inputs.latents[0, 0].numel(), 3).requires_grad_(False)

    def fn(latents: Tensor, sigmas: Tensor, conditions: Conditions) -> Tensor:
        x = latents[0]
        for i in range(STEPS):
            v = family.velocity(denoiser, x, sigmas[i].expand(BATCH), conditions)
            x = x + (sigmas[i + 1] - sigmas[i]) * v
        return decoder(x.flatten(1)).sin()

    return _case(denoiser, fn, (inputs.latents, inputs.sigmas, inputs.conditions), options={"chain": "stop"})


def scheduler_step(family: Family) -> Case:
    """The scheduler's own step over stored latents; DDIM for the UNet, with timesteps as Python numbers."""
    denoiser, inputs = _setup(family)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    if family.name == "unet":
        scheduler = DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
        )
    scheduler.set_timesteps(STEPS + 1)
    numbers = scheduler.timesteps.tolist()

    def fn(latents: Tensor, conditions: Conditions) -> Tensor:
        restart(scheduler)
        losses = []
        for i in range(STEPS):
            t = numbers[i] if family.name == "unet" else scheduler.timesteps[i]
            v = family.velocity(denoiser, latents[i], scheduler.timesteps[i].expand(BATCH) / 1000, conditions)
            x = scheduler.step(v, t, latents[i], return_dict=False)[0]
            losses.append((latents[i + 1] - x).square().flatten(1).mean(1))
        return torch.stack(losses, 1)

    return _case(denoiser, fn, (inputs.latents, inputs.conditions))


PACKED = "packed latents have no channels dimension to put last"
TRANSFORMERS = ("sd3", "flux", "wan", "qwen", "sana")
TAKES_TENSORS = "the class takes a tensor [B]"
FEATURES = (
    Feature("full fine-tuning", full_fine_tuning),
    Feature("LoRA, get_peft_model", lora_by_get_peft_model),
    Feature("LoRA, add_adapter", lora_by_add_adapter),
    Feature("KL reference, disable_adapter()", reference_by_disable_adapter),
    Feature("KL reference, a second adapter", reference_by_a_second_adapter),
    Feature("guidance, one batch", guidance_in_one_batch),
    Feature("guidance, two calls", guidance_by_two_calls),
    Feature("guidance, negative under no_grad", guidance_with_negative_under_no_grad),
    Feature("guidance, rescaled", guidance_rescaled),
    Feature("gradient checkpointing", gradient_checkpointing),
    Feature("bf16 autocast around the replay", autocast_around_the_replay),
    Feature("bf16 autocast around the call", autocast_around_the_call),
    Feature("bf16 autocast by accelerate", autocast_by_accelerate),
    Feature("bf16 weights", bfloat16_weights),
    Feature("return_dict=True", output_as_a_dataclass),
    Feature("several outputs", several_outputs),
    Feature("channels_last", channels_last, {"flux": PACKED, "qwen": PACKED}),
    Feature("times: Python floats", times_as_python_floats, dict.fromkeys(TRANSFORMERS, TAKES_TENSORS)),
    Feature("times: Python integers", times_as_python_integers, dict.fromkeys(TRANSFORMERS, TAKES_TENSORS)),
    Feature("times: 0-d tensors", times_as_scalars, dict.fromkeys(TRANSFORMERS, TAKES_TENSORS)),
    Feature("times: long tensors [B]", times_as_long_tensors),
    Feature("two experts", two_experts),
    Feature("chained, chain='stop'", chained_with_stop),
    Feature("diffusers' scheduler.step", scheduler_step),
)

# What `make test` runs of the table: every family, every feature, and the pairs where something special happens (complex rotary
# embeddings in regions, their checkpointing, convolutions, masks).
RISKY = {
    ("qwen", "gradient checkpointing"),
    ("qwen", "guidance, rescaled"),
    ("flux", "LoRA, get_peft_model"),
    ("wan", "two experts"),
    ("unet", "channels_last"),
    ("unet", "times: Python floats"),
    ("unet", "times: Python integers"),
    ("unet", "times: 0-d tensors"),
}


def covering_subset() -> set[tuple[str, str]]:
    """Family and feature of the cells that `make test` runs: the risky ones, and for every other feature one family in turn."""
    chosen = set(RISKY)
    left = [feature for feature in FEATURES if not any(name == feature.name for _, name in RISKY)]
    turn = itertools.cycle(TRANSFORMERS)
    return chosen | {(next(turn), feature.name) for feature in left}


def diagonal() -> set[tuple[str, str]]:
    """The cells that go through Inductor: every feature once, the families in turn."""
    turn = itertools.cycle((*TRANSFORMERS, "unet"))
    cells = set()
    for feature in FEATURES:
        family = next(turn)
        while family in feature.unavailable:
            family = next(turn)
        cells.add((family, feature.name))
    return cells
