"""How a graph that Dynamo captured is rewritten and lowered; also the `torch_dynamo_backends` entry point "jagg"."""

from collections.abc import Callable
from typing import Any

from torch import fx

from jagg_fx._compat import compile_with_inductor, compile_with_interpreter
from jagg_fx.config import Config, Lowering
from jagg_fx.passes.manager import JaggPass
from jagg_fx.report import Rewrite


def lower(gm: fx.GraphModule, inputs: Any, config: Config, on_rewrite: Callable[[Rewrite], None]) -> Any:
    """Compile a captured graph with the passes on its joint graph."""
    pass_ = JaggPass(config, on_rewrite)
    if config.lowering is Lowering.INDUCTOR:
        return compile_with_inductor(gm, inputs, pass_, dict(config.options))
    return compile_with_interpreter(gm, inputs, pass_)
