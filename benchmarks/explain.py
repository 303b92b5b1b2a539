"""How long does `jagg_fx.explain` take on FLUX's own configuration, and how much memory?

19 double and 38 single blocks, 3072 wide, 11.9 billion parameters on the meta device, in bfloat16; 1024 image and 512 text tokens
(512 x 512 pixels), 6 trained steps. Nothing is allocated, run or compiled.

    python -m benchmarks.explain
"""

import resource
import time
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

import jagg_fx
from benchmarks import harness

STEPS, IMAGE, TEXT = 6, 1024, 512


def measure(**options: Any) -> dict[str, Any]:
    """Seconds, peak memory and the explanation. Options are the model's."""
    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True, **options).to(torch.bfloat16)
        width, pooled = model.config.joint_attention_dim, model.config.pooled_projection_dim
        latents = torch.empty(STEPS + 1, 1, IMAGE, model.config.in_channels, dtype=torch.bfloat16)
        prompt = {
            "encoder_hidden_states": torch.empty(1, TEXT, width, dtype=torch.bfloat16),
            "pooled_projections": torch.empty(1, pooled, dtype=torch.bfloat16),
            "txt_ids": torch.empty(TEXT, 3),
            "img_ids": torch.empty(IMAGE, 3),
            "guidance": torch.empty(1),
        }
        times = torch.empty(STEPS)

    def loss(latents: Tensor, times: Tensor, prompt: dict[str, Tensor]) -> Tensor:
        velocities = [model(latents[i], timestep=times[i].expand(1), **prompt).sample for i in range(STEPS)]
        return sum((latents[i + 1] - v).float().square().mean() for i, v in enumerate(velocities))

    began = time.perf_counter()
    found = jagg_fx.explain(loss, latents, times, prompt, W=3)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": time.perf_counter() - began,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "explanation": str(found),
    }


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    small = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2} if arguments.quick else {}
    results = measure(**small)
    note = f"{results['seconds']:.0f} s, peak {results['peak_gib']:.1f} GiB; {harness.caption(arguments.device)}"
    harness.publish("explain", arguments, results, results["explanation"], note)


if __name__ == "__main__":
    main()
