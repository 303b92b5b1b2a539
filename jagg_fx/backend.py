"""How a graph that Dynamo captured is rewritten and lowered; also the `torch_dynamo_backends` entry point "jagg"."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from jagg_fx._compat import compile_with_inductor, compile_with_interpreter
from jagg_fx.config import Config, Lowering
from jagg_fx.denoiser import check_denoiser
from jagg_fx.errors import OptionError
from jagg_fx.layouts import unify_layouts
from jagg_fx.outline import outline
from jagg_fx.passes.manager import JaggPass
from jagg_fx.report import Report, Rewrite
from jagg_fx.unstack import unstack_inputs

log = logging.getLogger(__name__)


def lower(gm: fx.GraphModule, inputs: Any, config: Config, on_rewrite: Callable[[Rewrite], None]) -> Any:
    """Compile a captured graph with the passes on its joint graph."""
    gm, inputs, unstack = unstack_inputs(gm, inputs)
    unify_layouts(gm)
    pass_ = JaggPass(config, on_rewrite)
    if config.lowering is Lowering.INDUCTOR:
        compiled = compile_with_inductor(gm, inputs, pass_, dict(config.options))
    else:
        compiled = compile_with_interpreter(gm, inputs, pass_)

    def run(*inputs: Any) -> Any:
        return compiled(*unstack(inputs))

    return run


def jagg(gm: fx.GraphModule, inputs: Any, *, options: Mapping[str, Any] | None = None) -> Any:
    """The Dynamo backend: `torch.compile(fn, backend="jagg", options={"W": 4})`.

    Takes the options of `jagg_fx.transform` by name (W, knots, weights, lowering, denoiser, options); `fullgraph` and
    `dynamic` are torch.compile's own. The report goes to the log: `TORCH_LOGS="jagg_fx"`.

    Raises:
        OptionError and the errors of `jagg_fx.transform`, wrapped by Dynamo in its BackendCompilerFailed.
    """
    given = dict(options or {})
    denoiser = given.pop("denoiser", None)
    config = Config.from_options(given)
    if config.lowering is Lowering.REFERENCE:
        raise OptionError(
            "torch.compile(fn, backend='jagg', options={'lowering': 'reference'}): the reference runs the function itself, "
            "which a backend never sees. Write jagg_fx.transform(fn, lowering='reference')."
        )
    calls, name = outline(gm, None if denoiser is None else check_denoiser(denoiser))
    if not calls:
        log.warning("no call of a trainable module in this graph: it is compiled as it is, nothing is rewritten")

    def report(rewrite: Rewrite) -> None:
        log.info("%s", Report("fn", name, config, rewrite, 1))

    return lower(gm, inputs, config, report)
