"""Wan 2.2: two experts share the steps, and each is called twice per step for guidance: four streams of calls."""

import torch

import jagg_fx
from jagg_fx.models.samplers import FlowSDE, replay
from jagg_fx.models.zoo import zoo

family = zoo["wan"]
high, low = family.denoiser(), family.denoiser()  # for a real one: WanTransformer3DModel.from_pretrained(...)
inputs = family.inputs(high, steps=8)
boundary = 4  # steps of the expert for high noise levels


def log_probs(latents, sigmas, prompt, negative):
    experts = iter([high] * boundary + [low] * (len(sigmas) - 1 - boundary))

    def guided(x, t):
        expert = next(experts)
        text = expert(x, timestep=t * 1000, **prompt, return_dict=False)[0]
        other = expert(x, timestep=t * 1000, **negative, return_dict=False)[0]
        return other + 4.0 * (text - other)

    return replay(guided, FlowSDE(0.7), latents, sigmas).log_probs


def main(lowering: str = "inductor") -> jagg_fx.Transformed:
    fast = jagg_fx.transform(log_probs, W=4, denoiser=[high, low], lowering=lowering)
    advantages = torch.tensor([[1.0], [-1.0]])
    loss = -(advantages * fast(inputs.latents, inputs.sigmas, inputs.conditions, inputs.negative)).mean()
    loss.backward()  # 8 backward passes instead of 16, where the guard lets it
    return fast


if __name__ == "__main__":
    print(main().report)
