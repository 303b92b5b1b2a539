"""A joint graph at the level of steps: a line per call of the denoiser, not thousands of operators."""

from collections.abc import Sequence
from typing import Any

from torch import fx

from jagg_fx._compat import cond, invoke_subgraph
from jagg_fx.passes.find_steps import Step


def step_lines(graph: fx.Graph, streams: Sequence[Sequence[Step]]) -> list[str]:
    """One line per call of a step's forward or backward and per branch, in the order of the graph, before or after."""
    forwards = {step.forward: step for steps in streams for step in steps}
    backwards = {step.backward: step for steps in streams for step in steps}
    several = len(streams) > 1
    lines = []
    for node in graph.nodes:
        if node.target is cond and "segment" in _origin(node):
            lines.append(_stream(several, _origin(node)["stream"]) + _branch(node))
        if node.target is not invoke_subgraph:
            continue
        if node in backwards:
            step = backwards[node]
            of = _stream(several, step.stream)
            lines.append(f"{of}backward {step.index:2}  takes {', '.join(map(_cotangent, step.cotangents))}")
            continue
        origin = _origin(node)
        forward = (
            streams[origin["stream"]][origin["step"]] if origin.get("pass") == "drop_saved" else forwards.get(node)
        )
        if forward is not None:
            saved = max(0, len(node.meta["val"]) - len(forward.cotangent_positions))
            of = _stream(several, forward.stream)
            lines.append(
                f"{of}forward  {forward.index:2}  returns the value, saves {f'{saved} tensors' if saved else 'nothing'}"
            )
    return lines


def _stream(several: bool, stream: int) -> str:
    return f"stream {stream}  " if several else ""


def _branch(node: fx.Node) -> str:
    a, b = _origin(node)["segment"]
    steps = ", ".join(map(str, range(a + 1, b)))
    if node.name.startswith("correction"):
        return f"cond         one of steps {steps} exactly, if it is drawn"
    return f"cond         steps {steps} exactly, if their velocities are not interpolated well enough"


def _cotangent(node: fx.Node) -> str:
    origin = _origin(node)
    if "from" not in origin:
        return "its own cotangent"
    return f"its own cotangent + those of steps {', '.join(map(str, origin['from']))} by their weights in time"


def _origin(node: fx.Node) -> dict[str, Any]:
    origin: dict[str, Any] = node.meta.get("custom", {}).get("jagg_fx", {})
    return origin
