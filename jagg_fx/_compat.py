"""The only file that names torch's private modules. Each name is probed where it is first used.

A missing name raises `UnsupportedTorchError` with the name of the feature, so that a new torch fails with one clear
sentence instead of an `ImportError` from deep inside.
"""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx

from jagg_fx.errors import (
    BackwardInsideError,
    DynamoFailedError,
    GraphBreakError,
    JaggError,
    NotARegionError,
    RaisedInCaptureError,
    UnsupportedTorchError,
)

F = TypeVar("F", bound=Callable[..., Any])


def _probe(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedTorchError(f"{module}.{name}", torch.__version__) from error


# The higher-order operator that one step's forward or backward is in Dynamo's and AOTAutograd's graphs.
invoke_subgraph = _probe("torch._higher_order_ops", "invoke_subgraph")

# `torch.cond` as AOTAutograd's graphs hold it.
cond = torch.ops.higher_order.cond

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
else:
    CustomGraphPass = _probe("torch._inductor.custom_graph_pass", "CustomGraphPass")


def mark_region(fn: F) -> F:
    """Mark `fn` as a nested compile region whose number of distinct traces is not limited."""
    region = _probe("torch.compiler", "nested_compile_region")
    if "max_reuse_entries" in inspect.signature(region).parameters:
        # A function of many steps with Python values that change is refused with our own message, not torch's.
        marked: F = region(fn, max_reuse_entries=1_000_000)
    else:
        marked = region(fn)
    return marked


def compile_isolated(fn: Callable[..., Any], backend: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """`torch.compile` whose recompilations are counted for this call alone, where torch can do that."""
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        kwargs["isolate_recompiles"] = True
    compiled: Callable[..., Any] = torch.compile(fn, backend=backend, **kwargs)
    return compiled


def compile_with_inductor(gm: fx.GraphModule, inputs: Any, pass_: CustomGraphPass, options: dict[str, Any]) -> Any:
    """Lower a Dynamo graph through Inductor with `pass_` as the last of the joint graph's custom pre-passes.

    AOTAutograd's cache is off for this graph: a hit there would skip the pass, and the report with it. Inductor's own
    cache of generated code stays on; it is looked up after the rewrite, so its key holds the rewritten graph itself.
    """
    config = importlib.import_module("torch._inductor.config")
    present = options.get("joint_custom_pre_pass", config.joint_custom_pre_pass)
    passes = [] if present is None else list(present) if isinstance(present, (list, tuple)) else [present]
    # `config_patches` reach the backward, which is compiled at the first `.backward()`, after this call returned.
    # Branches are compiled for exact strides (see `passes/route_segments.py`), which padding would change.
    patches = {
        "comprehensive_padding": False,
        **options,
        "joint_custom_pre_pass": [*passes, pass_] if passes else pass_,
    }
    functorch_config = importlib.import_module("torch._functorch.config")
    with functorch_config.patch(enable_autograd_cache=False), _schemas_once():
        return _probe("torch._inductor.compile_fx", "compile_fx")(gm, inputs, config_patches=patches)


def compile_with_interpreter(gm: fx.GraphModule, inputs: Any, pass_: CustomGraphPass) -> Any:
    """Run AOTAutograd with `pass_` on its joint graph, then interpret the partitioned graphs."""
    from functorch.compile import min_cut_rematerialization_partition

    interpret = _probe("torch._dynamo.backends.debugging", "boxed_nop")

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        pass_(joint.graph)
        return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)

    def infer(inference: fx.GraphModule, example_inputs: Any) -> Any:
        pass_(inference.graph)
        return interpret(inference, example_inputs)

    backend = _probe("torch._dynamo.backends.common", "aot_autograd")(
        fw_compiler=interpret,
        bw_compiler=interpret,
        inference_compiler=infer,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    functorch_config = importlib.import_module("torch._functorch.config")
    with functorch_config.patch(enable_autograd_cache=False), _schemas_once():
        return backend(gm, inputs)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table: what is written into a joint graph must be decomposed already, as the rest of it is."""
    table: dict[Any, Callable[..., Any]] = _probe("torch._inductor.decomposition", "select_decomp_table")()
    return table


def copy_source(placeholder: fx.Node, to: fx.Node, index: int | None = None) -> None:
    """Tell AOTAutograd that an input is another one of Dynamo's, or an item of it."""
    source: Any = getattr(placeholder, "_dynamo_source", None)
    if source is not None:
        to._dynamo_source = source if index is None else _probe("torch._dynamo.source", "GetItemSource")(source, index)


def without_source(placeholder: fx.Node) -> None:
    """Tell AOTAutograd that an input comes from nowhere in the user's code."""
    node: Any = placeholder
    node._dynamo_source = None


def sets_grad_mode(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph enters or leaves no_grad."""
    return node.op == "call_function" and node.target is _probe("torch._C", "_set_grad_enabled")


def stable_topological_sort(graph: fx.Graph) -> None:
    """Order nodes after what they read, otherwise as they were."""
    _probe("torch._inductor.pattern_matcher", "stable_topological_sort")(graph)


@contextlib.contextmanager
def _schemas_once() -> Iterator[None]:
    """Compute a region's schema once per subgraph. Torch asks for it at every call and traces the subgraph to answer."""
    known: dict[Any, Any] = {}
    compute = invoke_subgraph.gen_schema

    def gen_schema(subgraph: Any, identifier: Any, *operands: Any) -> Any:
        key = (subgraph, identifier, tuple(map(type, operands)))
        if key not in known:
            known[key] = compute(subgraph, identifier, *operands)
        return known[key]

    invoke_subgraph.gen_schema = gen_schema
    try:
        yield
    finally:
        del invoke_subgraph.gen_schema


@contextlib.contextmanager
def dynamo_settings() -> Iterator[None]:
    """What Dynamo must not do while it captures steps as regions."""
    config = importlib.import_module("torch._dynamo.config")
    # A float that changed from call to call would become an input of the graph, which fails inside a region.
    settings = {"specialize_float": True}
    # A region that is called only once would be inlined, and the step would no longer be a call. (Torch before 2.13 keeps
    # every region and has no such switch.)
    if hasattr(config, "inline_single_use_invoke_subgraph"):
        settings["inline_single_use_invoke_subgraph"] = False
    with config.patch(settings):
        yield


@contextlib.contextmanager
def dynamo_errors(function: str, dynamic: bool) -> Iterator[None]:
    """Turn what Dynamo raises into our own errors: those a backend raised come out as they were, graph breaks named."""
    exc = importlib.import_module("torch._dynamo.exc")
    try:
        yield
    except exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, JaggError):
            raise error.inner_exception from None
        if "in-place input or buffer mutations" in str(error):
            raise NotARegionError.mutation() from error
        raise
    except (exc.InternalTorchDynamoError, AssertionError) as error:
        if isinstance(error, AssertionError) and "from user code" not in str(error):
            raise  # the user's own, from code that runs outside the graph
        raise DynamoFailedError(function, torch.__version__, str(error).strip().splitlines()[0], dynamic) from error
    except (exc.Unsupported, exc.UserError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        where = _user_line(getattr(error, "real_stack", None))
        if "Observed exception" in reason:
            raise RaisedInCaptureError(function, where, reason) from error
        if "autograd.grad" in reason or ".backward()" in reason:
            raise BackwardInsideError(function, where) from error
        raise GraphBreakError(function, where, reason) from error


def _user_line(stack: Any) -> str:
    """The innermost line of user code on Dynamo's stack."""
    ours = (importlib.import_module("jagg_fx").__path__[0], torch.__path__[0])
    frames = [frame for frame in stack or () if not frame.filename.startswith(ours)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "unknown"
