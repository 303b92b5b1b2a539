"""jagg_fx: RL post-training of diffusion and flow models with fewer backward passes through the denoiser."""

from jagg_fx import plan
from jagg_fx.explain import Explanation, explain
from jagg_fx.transform import Transformed, transform
from jagg_fx.wrap import Wrapped, wrap

__all__ = ["Explanation", "Transformed", "Wrapped", "explain", "plan", "transform", "wrap"]
__version__ = "0.1.0"
