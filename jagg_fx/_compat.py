"""The only file that names torch's private modules. Each name is probed where it is first used.

A missing name raises `UnsupportedTorchError` with the name of the feature, so that a new torch fails with one clear
sentence instead of an `ImportError` from deep inside.
"""

import contextlib
import copy
import functools
import importlib
import inspect
import logging
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx

from jagg_fx.errors import (
    BackwardInsideError,
    DynamoFailedError,
    FakeImplementationError,
    GraphBreakError,
    JaggError,
    LoweringFailedError,
    NotARegionError,
    RaisedInCaptureError,
    SchedulerError,
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


def mark_region(fn: F, key: Callable[..., int]) -> F:
    """Mark `fn` as a nested compile region; Dynamo traces it once for all calls with the same `key(*args, **kwargs)`."""
    region = _probe("torch.compiler", "nested_compile_region")
    if "reuse_hash_fn" not in inspect.signature(region).parameters:
        raise UnsupportedTorchError("torch.compiler.nested_compile_region(reuse_hash_fn=...)", torch.__version__)
    # A function of many steps with Python values that change is refused with our own message, not torch's.
    marked: F = region(fn, max_reuse_entries=1_000_000, reuse_hash_fn=key)
    return marked


def trace_time_hook() -> Callable[[Callable[[Any], None]], None]:
    """A function for code that Dynamo traces: `hook(note)` runs `note(context)` while the call is being traced."""
    hook: Callable[[Callable[[Any], None]], None] = _probe("torch._dynamo.comptime", "comptime")
    return hook


def describe_locals(context: Any, names: Sequence[str]) -> Any:
    """Local variables of the function that called the `trace_time_hook`: constants as they are, tensors by their metadata.

    Equal descriptions are alike in everything but the tensors' elements; which of the tensors are one and the same is in them.
    """
    seen: list[fx.Node] = []

    def tensor(node: fx.Node, example: torch.Tensor) -> Any:
        if node not in seen:
            seen.append(node)
        kind = (example.dtype, example.device, tuple(example.shape), example.stride(), example.requires_grad)
        return (*kind, seen.index(node))

    return [_describe(_variable(context, name), tensor) for name in names]


def nodes_in_local(context: Any, name: str) -> list[fx.Node]:
    """The graph nodes of the tensors in a local variable of the function that called the `trace_time_hook`."""
    nodes: list[fx.Node] = []
    _describe(_variable(context, name), lambda node, example: nodes.append(node))
    return nodes


@dataclass(frozen=True)
class Mutation:
    """Something that a function being traced has changed; the real object is still as it was.

    Attributes:
        owner: identity of the object; None for a global variable.
        name: the attribute or variable; None for a container, whose contents were changed.
        value: what it is now: constants as they are, tensors by what computes them.
    """

    owner: int | None
    name: str | None
    value: Any


def pending_mutations(context: Any) -> list[Mutation]:
    """All changes so far of objects that were there before the trace."""
    from torch._dynamo.variables.base import ValueMutationExisting

    effects = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.side_effects
    owners = {id(variable): owner for owner, variable in effects.id_to_variable.items()}
    found = []
    for target, attributes in list(effects.store_attr_mutations.items()):  # describing may add to them
        is_global = type(target).__name__ in ("NewGlobalVariable", "PythonModuleVariable")
        if is_global or getattr(target, "source", None) is not None:
            owner = None if is_global else owners.get(id(target), id(getattr(target, "value", target)))
            found += [Mutation(owner, name, _describe(value, _by_node)) for name, value in attributes.items()]
    for owner, variable in list(effects.id_to_variable.items()):
        kind = getattr(variable, "mutation_type", None)
        if isinstance(kind, ValueMutationExisting) and kind.is_modified:
            found.append(Mutation(owner, None, _describe(variable, _by_node)))
    return found


def _by_node(node: fx.Node, example: torch.Tensor) -> Any:
    given = getattr(node.meta.get("grapharg"), "example", None)
    return tensor_identity(given) if isinstance(given, torch.Tensor) else ("computed by", node.name)


def tensor_identity(tensor: torch.Tensor) -> tuple[str, int]:
    """What stands for a tensor that existed before the trace in `Mutation.value`."""
    return ("tensor", id(tensor))


def _variable(context: Any, name: str) -> Any:
    return context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()


def _describe(variable: Any, tensor: Callable[[fx.Node, torch.Tensor], Any]) -> Any:
    variable = variable.realize()
    if hasattr(variable, "sym_num"):
        return variable.sym_num
    if variable.is_python_constant():
        return variable.as_python_constant()
    node = getattr(getattr(variable, "proxy", None), "node", None)
    if node is not None and isinstance(example := node.meta.get("example_value"), torch.Tensor):
        return tensor(node, example)
    items = getattr(variable, "items", None)
    if isinstance(items, dict):
        return {_describe(getattr(key, "vt", key), tensor): _describe(value, tensor) for key, value in items.items()}
    if isinstance(items, (list, tuple)):
        return [_describe(item, tensor) for item in items]
    return (type(variable).__name__, id(getattr(variable, "value", variable)))


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
        compile_fx = _probe("torch._inductor.compile_fx", "compile_fx")
        return compile_fx(gm, inputs, inner_compile=_compile_with_ranges, config_patches=patches)


def _compile_with_ranges(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    """Inductor's own compiler of one graph, forward or backward."""
    with _ranges_in_generated_code():
        return _probe("torch._inductor.compile_fx", "compile_fx_inner")(gm, inputs, **kwargs)


@contextlib.contextmanager
def _ranges_in_generated_code() -> Iterator[None]:
    """Write a profiler range around each call and branch whose node names one; Inductor drops the operators for that."""
    codegen: Any = _probe("torch._inductor.codegen.wrapper", "PythonWrapperCodegen")
    targets = {"codegen_invoke_subgraph": invoke_subgraph, "codegen_conditional": cond}
    own = {name: getattr(codegen, name) for name in targets}

    def in_range(write: Callable[[Any, Any], None], target: Any) -> Callable[[Any, Any], None]:
        def write_in_range(wrapper: Any, call: Any) -> None:
            name = _range_among(call.origins, target)
            if name is None or wrapper.supports_intermediate_hooks is False:  # a wrapper in C++
                write(wrapper, call)
                return
            wrapper.writeline(f"range_ = torch.ops.profiler._record_function_enter_new({name!r}, None)")
            write(wrapper, call)
            wrapper.writeline("torch.ops.profiler._record_function_exit._RecordFunction(range_)")

        return write_in_range

    for name, write in own.items():
        setattr(codegen, name, in_range(write, targets[name]))
    try:
        yield
    finally:
        for name, write in own.items():
            setattr(codegen, name, write)


RANGE = "jagg_fx_range"  # where a node's meta["custom"] holds the name of its profiler range


def _range_of(node: fx.Node) -> str | None:
    name: str | None = node.meta.get("custom", {}).get(RANGE)
    return name


def _range_among(origins: Iterable[fx.Node], target: Any) -> str | None:
    """Of the nodes that generated code comes from, the call's own."""
    return next(filter(None, (_range_of(node) for node in origins if node.target is target)), None)


def compile_with_interpreter(gm: fx.GraphModule, inputs: Any, pass_: CustomGraphPass) -> Any:
    """Run AOTAutograd with `pass_` on its joint graph, then interpret the partitioned graphs."""
    from functorch.compile import min_cut_rematerialization_partition

    def interpret(graph: fx.GraphModule, _: Any) -> Any:
        interpreter = _InterpreterWithRanges(graph)

        def run(inputs: list[Any]) -> Any:
            return copy.copy(interpreter).boxed_run(inputs)  # it holds the values of a run: threads need one each

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

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


class _InterpreterWithRanges(fx.Interpreter):
    """Runs a graph; calls and branches whose node names a profiler range run within it."""

    def run_node(self, n: fx.Node) -> Any:
        name = _range_of(n)
        with contextlib.nullcontext() if name is None else torch.profiler.record_function(name):
            return super().run_node(n)


def run_on_joint_graph(gm: fx.GraphModule, inputs: Any, pass_: CustomGraphPass, is_done: Callable[[], bool]) -> None:
    """Trace the joint graph and run `pass_` on it until `is_done()`; nothing is compiled.

    Regions' own joint graphs come first, and are partitioned as ever.
    """
    from functorch.compile import min_cut_rematerialization_partition

    class _DoneError(Exception):
        pass

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        pass_(joint.graph)
        if is_done():
            raise _DoneError
        return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)

    backend = _probe("torch._dynamo.backends.common", "aot_autograd")(
        fw_compiler=lambda *_: None, bw_compiler=lambda *_: None, partition_fn=partition
    )
    functorch_config = importlib.import_module("torch._functorch.config")
    settings = functorch_config.patch(enable_autograd_cache=False)
    with settings, _schemas_once(), _without_unread_prints(), contextlib.suppress(_DoneError):
        backend(gm, inputs)


@contextlib.contextmanager
def _without_unread_prints() -> Iterator[None]:
    """Do not print the joint graph for logs that are off: AOTAutograd prints it, with all regions, before it asks."""
    module: Any = importlib.import_module("torch._functorch._aot_autograd.graph_compile")
    is_read = module.aot_joint_log.isEnabledFor(logging.INFO) or "TORCH_TRACE" in os.environ
    prints = getattr(
        module, "_log_joint_graph", None
    )  # torch before 2.13 may do without; then there is nothing to save
    if is_read or prints is None:
        yield
        return
    module._log_joint_graph = lambda *_: None
    try:
        yield
    finally:
        module._log_joint_graph = prints


def options_of_mode(mode: str) -> dict[str, Any]:
    """Inductor's options that a mode of `torch.compile` stands for. Raises `KeyError` with the modes' names."""
    modes: dict[str, dict[str, Any]] = _probe("torch._inductor", "list_mode_options")()
    if mode not in modes:
        raise KeyError(", ".join(map(repr, modes)))
    return modes[mode]


def disabled_passes() -> str:
    """Inductor's passes that are switched off, as TORCHINDUCTOR_DISABLED_PASSES names them."""
    config = importlib.import_module("torch._inductor.config")
    return str(getattr(config, "disabled_passes", ""))


def observed(gm: fx.GraphModule, name: str) -> contextlib.AbstractContextManager[Any]:
    """Let torch see a pass: it draws the graph before and after it, and follows where nodes come from, where it is asked to."""
    observer: Any = _probe("torch.fx.passes.graph_transform_observer", "GraphTransformObserver")
    return observer(gm, name)  # type: ignore[no-any-return]


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Hand a text to torch's structured trace (TORCH_TRACE), where tlparse shows it; made only if one is written."""
    trace_structured = _probe("torch._logging", "trace_structured")
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


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


def backward_id() -> int:
    """A number that tells the backward that is running from other ones."""
    number: int = _probe("torch._C", "_current_graph_task_id")()
    return number


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


def make_older(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let autograd run the node that made `tensor` after all that are younger than the one that made `other`.

    Autograd numbers nodes thread by thread, and has a queue for each device: this holds for nodes of one thread and device.
    """
    node: Any = tensor.grad_fn
    origin: Any = other.grad_fn
    node._set_sequence_nr(origin._sequence_nr())


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call when the backward that is running has run all of its nodes; what is raised there comes out of it."""
    engine: Any = _probe("torch.autograd.variable", "Variable")._execution_engine
    engine.queue_callback(call)


def share_contents(of: torch.nn.Module, to: torch.nn.Module) -> None:
    """Let one module hold the parameters, buffers and children of another, under their own names: DDP and `fully_shard` see them.

    The hooks of state_dict are shared too: `fully_shard` shards in them.
    """
    tensors = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    saving = ("_state_dict_hooks", "_state_dict_pre_hooks")
    loading = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    for name in (*tensors, *saving, *loading):
        if name not in of.__dict__:
            raise UnsupportedTorchError(f"nn.Module.{name}", torch.__version__)
        to.__dict__[name] = of.__dict__[name]


def sets_grad_mode(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph enters or leaves no_grad."""
    return node.op == "call_function" and node.target is _probe("torch._C", "_set_grad_enabled")


def stable_topological_sort(graph: fx.Graph) -> None:
    """Order nodes after what they read, otherwise as they were."""
    _probe("torch._inductor.pattern_matcher", "stable_topological_sort")(graph)


@contextlib.contextmanager
def _schemas_once() -> Iterator[None]:
    """Compute a region's schema once per subgraph, and from its graph where it is made of operators already.

    Torch (before 2.13 at every call) traces the subgraph to answer, also a backward that it has just traced.
    """
    known: dict[Any, Any] = {}
    compute = invoke_subgraph.gen_schema
    utils: Any = importlib.import_module("torch._higher_order_ops.utils")
    trace = _probe("torch._higher_order_ops.utils", "materialize_as_graph")

    def materialised(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return fn if _is_made_of_operators(fn) else trace(fn, *args, **kwargs)

    def gen_schema(subgraph: Any, identifier: Any, *operands: Any) -> Any:
        key = (subgraph, tuple(map(type, operands)))
        if key not in known:
            utils.materialize_as_graph = materialised
            try:
                known[key] = compute(subgraph, identifier, *operands)
            finally:
                utils.materialize_as_graph = trace
        return known[key]

    invoke_subgraph.gen_schema = gen_schema
    try:
        yield
    finally:
        del invoke_subgraph.gen_schema


def _is_made_of_operators(fn: Any) -> bool:
    """Whether it is a graph of torch's operators, with the fake values that came out of each."""
    return isinstance(fn, fx.GraphModule) and all(
        "val" in node.meta and (node.op == "placeholder" or isinstance(node.target, torch._ops.OpOverload))
        for node in fn.graph.nodes
        if node.op != "output" and node.target is not operator.getitem
    )


@contextlib.contextmanager
def dynamo_settings() -> Iterator[None]:
    """What Dynamo must not do while it captures steps as regions."""
    with _settings(), _nested_calls_once():
        yield


@functools.cache
def _settings() -> Any:
    """One patch for all calls: torch makes a context variable for each patch, and Python keeps those for ever."""
    config = importlib.import_module("torch._dynamo.config")
    # A float that changed from call to call would become an input of the graph, which fails inside a region.
    settings = {"specialize_float": True}
    # A region that is called only once would be inlined, and the step would no longer be a call. (Torch before 2.13 keeps
    # every region and has no such switch.)
    if hasattr(config, "inline_single_use_invoke_subgraph"):
        settings["inline_single_use_invoke_subgraph"] = False
    return config.patch(settings)


@contextlib.contextmanager
def _nested_calls_once() -> Iterator[None]:
    """Let Dynamo prune a checkpointed block inside a region once, not once for each call of the region.

    Torch 2.13 lists a call inside a region again for each call of the region, renumbers its outputs as often, and trips over an
    assertion where one of them is unused ("Expected unused getitem node"; Qwen-Image with gradient checkpointing).
    """
    try:
        module: Any = importlib.import_module("torch._dynamo.dce_extra_outputs")
        collect = module._collect_all_subgraph_usages
    except (ImportError, AttributeError):  # another torch, without the pass or with another one
        yield
        return

    def collect_once(gm: fx.GraphModule, callers: dict[int, list[Any]]) -> None:
        collect(gm, callers)
        for found in callers.values():
            found[:] = {call: (parent, name, call) for parent, name, call in found}.values()

    module._collect_all_subgraph_usages = collect_once
    try:
        yield
    finally:
        module._collect_all_subgraph_usages = collect


@contextlib.contextmanager
def dynamo_errors(function: str, dynamic: bool, denoisers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Turn what Dynamo raises into our own errors: those a backend raised come out as they were, graph breaks named."""
    exc = importlib.import_module("torch._dynamo.exc")
    try:
        yield
    except exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, JaggError):
            raise error.inner_exception from None
        if isinstance(error.inner_exception, (AssertionError, KeyError)) and re.search(r"\bz?uf?\d+\b", str(error)):
            reason = "a number that is read from a tensor (.item()) goes into the graph: read it before the function"
            raise GraphBreakError(function, "unknown", reason) from error
        if "in-place input or buffer mutations" in str(error):
            buffers = [name for denoiser in denoisers for name, _ in denoiser.named_buffers()]
            raise NotARegionError.mutation(buffers) from error
        raise
    except _probe("torch._inductor.exc", "InductorError") as error:
        raise LoweringFailedError(function, torch.__version__, str(error).strip().splitlines()[0]) from error
    except IndexError as error:
        if "SymInt" not in str(error):
            raise  # the user's own
        reason = "a number that is read from a tensor (.item()) indexes another one"
        raise GraphBreakError(function, "unknown", reason) from error
    except (exc.InternalTorchDynamoError, AssertionError) as error:
        if isinstance(error, AssertionError) and "from user code" not in str(error):
            raise  # the user's own, from code that runs outside the graph
        raise DynamoFailedError(function, torch.__version__, str(error).strip().splitlines()[0], dynamic) from error
    except exc.TorchRuntimeError as error:
        if operator := re.search(r"no fake impl registered for <?(?:CustomOpDef\()?([\w:.]+)", str(error)):
            raise FakeImplementationError(function, operator.group(1)) from error
        raise
    except (exc.Unsupported, exc.UserError, exc.UncapturedHigherOrderOpError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if isinstance(error, exc.UncapturedHigherOrderOpError):  # the first line says that it lies inside the denoiser
            lines = lines[1:]
        reason = next(iter(lines), "no reason given")
        if "aliasing during higher order op" in reason:  # a region cannot take one tensor twice
            raise DynamoFailedError(function, torch.__version__, reason, dynamic) from error
        where, inside = _user_lines(getattr(error, "real_stack", None))
        if "/diffusers/schedulers/" in inside:
            raise SchedulerError(function, where, inside, reason) from error
        if "Observed exception" in reason or reason.startswith("raised exception"):
            raise RaisedInCaptureError(function, where, reason) from error
        if "autograd.grad" in reason or ".backward()" in reason:
            raise BackwardInsideError(function, where) from error
        raise GraphBreakError(function, where, reason) from error


def _user_lines(stack: Any) -> tuple[str, str]:
    """The innermost line of the user's own code on Dynamo's stack, and the innermost one outside torch and jagg_fx."""
    ours = (importlib.import_module("jagg_fx").__path__[0], torch.__path__[0])
    frames = [frame for frame in stack or () if not frame.filename.startswith(ours)]
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    where, inside = (f"{f[-1].filename}:{f[-1].lineno}: {f[-1].line}" if f else "unknown" for f in (own, frames))
    return where, inside


def active_ddp() -> Any:
    """The DistributedDataParallel module whose forward is running, or None."""
    return _probe("torch.nn.parallel", "DistributedDataParallel")._get_active_ddp_module()
