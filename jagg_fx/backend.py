"""How a graph that Dynamo captured is rewritten and lowered; also the `torch_dynamo_backends` entry point "jagg"."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx

from jagg_fx._compat import compile_with_inductor, compile_with_interpreter, run_on_joint_graph, trace_artifact
from jagg_fx.config import Chain, Config, Lowering, Pass
from jagg_fx.denoiser import check_denoiser
from jagg_fx.errors import JaggError, OptionError
from jagg_fx.layouts import denoiser_calls, unify_layouts
from jagg_fx.outline import outline
from jagg_fx.passes.manager import JaggPass
from jagg_fx.report import Report, Rewrite
from jagg_fx.statistics import Plans, make_probe, on_backward
from jagg_fx.unstack import unstack_inputs

log = logging.getLogger(__name__)


def lower(
    gm: fx.GraphModule,
    inputs: Any,
    config: Config,
    on_rewrite: Callable[[Rewrite], None],
    on_statistics: Callable[[Plans, Tensor], None],
) -> Any:
    """Compile a captured graph with the passes on its joint graph.

    Args:
        gm, inputs: as a Dynamo backend gets them.
        config: what the user asked for.
        on_rewrite: receives the record of every joint graph that was rewritten.
        on_statistics: receives the streams' plans and the packed statistics of every backward with intermediate steps.
    """
    if not denoiser_calls(gm):
        return _compile(gm, inputs, JaggPass(config, on_rewrite), config)
    gm, inputs, unstack = unstack_inputs(gm, inputs)
    example_probe = unify_layouts(gm)
    rewrites: list[Rewrite] = []
    compiled = _compile(gm, [*inputs, example_probe], JaggPass(config, rewrites.append), config)
    for rewrite in rewrites:
        on_rewrite(rewrite)

    is_recorded = Pass.RECORD_STATISTICS not in config.disabled

    def run(*inputs: Any) -> Any:
        probe = make_probe(example_probe.numel(), example_probe.device)
        outputs = compiled(*unstack(inputs), probe)
        if is_recorded and rewrites and any(plan.segments for plan in rewrites[0].plans):
            on_backward(outputs, probe, functools.partial(on_statistics, rewrites[0].plans))
        return outputs

    return run


class PlannedError(JaggError):
    """A graph was captured and rewritten, and nothing else was asked for."""


def plan_only(
    gm: fx.GraphModule,
    inputs: Any,
    config: Config,
    on_rewrite: Callable[[Rewrite], None],
    on_calls: Callable[[int], None],
) -> Any:
    """Rewrite the joint graph of a captured graph, and stop there.

    Raises:
        PlannedError: always, unless the passes refuse.
    """
    on_calls(len(denoiser_calls(gm)))
    gm, inputs, _ = unstack_inputs(gm, inputs)
    example_probe = unify_layouts(gm) if denoiser_calls(gm) else None
    rewrites: list[Rewrite] = []
    given = inputs if example_probe is None else [*inputs, example_probe]
    run_on_joint_graph(gm, given, JaggPass(config, rewrites.append), lambda: bool(rewrites))
    for rewrite in rewrites:
        on_rewrite(rewrite)
    raise PlannedError("planned")


def _compile(gm: fx.GraphModule, inputs: Any, pass_: JaggPass, config: Config) -> Any:
    if config.lowering is Lowering.INDUCTOR:
        return compile_with_inductor(gm, inputs, pass_, dict(config.options))
    return compile_with_interpreter(gm, inputs, pass_)


def jagg(gm: fx.GraphModule, inputs: Any, *, options: Mapping[str, Any] | None = None) -> Any:
    """The Dynamo backend: `torch.compile(fn, backend="jagg", options={"W": 4})`.

    Takes the options of `jagg_fx.transform` by name, but for `time`, and no plan that needs a measurement (`knots=K`,
    `max_rel_error`); `fullgraph` and `dynamic` are torch.compile's own. The report goes to the log: `TORCH_LOGS="jagg_fx"`.

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
    if config.chain is Chain.STOP:
        raise OptionError(
            "torch.compile(fn, backend='jagg', options={'chain': 'stop'}): a backend comes too late to cut a gradient. Write "
            "jagg_fx.transform(fn, chain='stop')."
        )
    calls, name = outline(gm, None if denoiser is None else check_denoiser(denoiser))
    if not calls:
        log.warning("no call of a trainable module in this graph: it is compiled as it is, nothing is rewritten")

    def report(rewrite: Rewrite) -> None:
        found = Report("fn", (name,), config, rewrite, 1)
        log.info("%s", found)
        trace_artifact("jagg_fx_report", lambda: str(found))

    return lower(gm, inputs, config, report, lambda plans, packed: None)
