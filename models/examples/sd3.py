"""SD3 with LoRA: guidance by two calls per step, and the KL term by `disable_adapter()`."""

import torch
from peft import LoraConfig, get_peft_model

import jagg_fx
from jagg_fx.models.samplers import FlowSDE, replay
from jagg_fx.models.zoo import zoo

family = zoo["sd3"]
base = family.denoiser()  # for a real one: SD3Transformer2DModel.from_pretrained(...)
inputs = family.inputs(base, steps=9)
model = get_peft_model(base, LoraConfig(r=4, target_modules=list(family.lora_targets), init_lora_weights="gaussian"))


def guided(x, t, prompt, negative):
    text = model(x, timestep=t * 1000, **prompt, return_dict=False)[0]
    other = model(x, timestep=t * 1000, **negative, return_dict=False)[0]
    return other + 4.5 * (text - other)


def loss(latents, sigmas, prompt, negative, advantages):
    steps = replay(lambda x, t: guided(x, t, prompt, negative), FlowSDE(0.7), latents, sigmas)
    with torch.no_grad(), model.disable_adapter():
        reference = replay(lambda x, t: guided(x, t, prompt, negative), FlowSDE(0.7), latents, sigmas)
    kl = (steps.means - reference.means).square().flatten(2).mean(2) / (2 * steps.stds.square())
    return (-advantages * steps.log_probs).mean() + 0.04 * kl.mean()


def main(lowering: str = "inductor") -> jagg_fx.Transformed:
    fast = jagg_fx.transform(loss, W=4, lowering=lowering)
    advantages = torch.tensor([[1.0], [-1.0]])
    fast(inputs.latents, inputs.sigmas, inputs.conditions, inputs.negative, advantages).backward()
    return fast


if __name__ == "__main__":
    print(main().report)
