"""A rewritten function at the level of steps: what every call of the denoiser computed before, and what it computes now.

view = fast.graphs[0]
print(view.print_readable())      # a line per call of the denoiser and per branch, in the order of the graph
print(view.diff())                # a line per step, before and after
view.draw("steps.svg")            # a picture; .png too
view.to_html("steps.html")        # all of it in one page that needs no network
"""

import difflib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from jagg_fx.interpolation import knot_weights
from jagg_fx.plan import Plan, Segment, Weights


class Kind(enum.StrEnum):
    """What one node of a step-level graph is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BRANCH = "branch"


@dataclass(frozen=True)
class StepNode:
    """One call of a denoiser's forward or backward, or a branch.

    Attributes:
        kind: which of them.
        stream: which stream of steps.
        step: index within the stream; of a branch, the knot before its segment.
        saves: number of tensors that a forward keeps for the backward; None where it is not known.
        carries: steps whose cotangents a backward takes beside its own.
        routes: steps that a branch may run exactly.
        is_drawn: whether a branch is the unbiased correction, which runs at most one of them.
    """

    kind: Kind
    stream: int
    step: int
    saves: int | None = None
    carries: tuple[int, ...] = ()
    routes: tuple[int, ...] = ()
    is_drawn: bool = False

    def name(self, several: bool) -> str:
        """Its name in a profiler's trace."""
        of = f" of stream {self.stream}" if several else ""
        if self.kind is not Kind.BRANCH:
            return f"jagg_fx {self.kind.value} {self.step}{of}"
        return f"jagg_fx {'correction' if self.is_drawn else 'exact or not'}: {_listed(self.routes)}{of}"

    def line(self, several: bool) -> str:
        """Readable, with its stream where there are several."""
        of = f"stream {self.stream}  " if several else ""
        if self.kind is Kind.FORWARD:
            saved = "its graph" if self.saves is None else f"{self.saves} tensors" if self.saves else "nothing"
            return f"{of}forward  {self.step:2}  returns the value, saves {saved}"
        if self.kind is Kind.BACKWARD:
            others = f" + those of steps {_listed(self.carries)} by their weights in time" if self.carries else ""
            return f"{of}backward {self.step:2}  takes its own cotangent{others}"
        if self.is_drawn:
            return f"{of}cond         one of steps {_listed(self.routes)} exactly, if it is drawn"
        return f"{of}cond         steps {_listed(self.routes)} exactly, if their velocities are not interpolated well enough"


@dataclass(frozen=True)
class StepGraph:
    """A graph at the level of steps: its nodes in the order in which they run."""

    nodes: tuple[StepNode, ...]

    def lines(self) -> list[str]:
        """A line per node."""
        several = len({node.stream for node in self.nodes}) > 1
        return [node.line(several) for node in self.nodes]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @classmethod
    def exact(cls, plans: Sequence[Plan]) -> "StepGraph":
        """Every step with its own backward: what runs without us."""
        steps = [(s, i) for s, plan in enumerate(plans) for i in range(plan.num_steps)]
        forwards = [StepNode(Kind.FORWARD, s, i) for s, i in steps]
        return cls((*forwards, *(StepNode(Kind.BACKWARD, s, i) for s, i in reversed(steps))))

    @classmethod
    def rewritten(cls, plans: Sequence[Plan], is_guarded: bool, is_drawn: bool) -> "StepGraph":
        """What runs under some plans where there is no graph to look at, because the rewrite happens in autograd."""
        nodes: list[StepNode] = []
        for s, plan in enumerate(plans):
            knots = set(plan.knots)
            nodes += [StepNode(Kind.FORWARD, s, i, saves=None if i in knots else 0) for i in range(plan.num_steps)]
        for s, plan in reversed(list(enumerate(plans))):
            for k in reversed(plan.knots):
                carried = [i for seg in plan.segments if k in (seg.a, seg.b) for i in seg.intermediate]
                nodes.append(StepNode(Kind.BACKWARD, s, k, carries=tuple(carried)))
            for segment in plan.segments:
                routes = tuple(segment.intermediate)
                nodes += [StepNode(Kind.BRANCH, s, segment.a, routes=routes)] if is_guarded else []
                nodes += [StepNode(Kind.BRANCH, s, segment.a, routes=routes, is_drawn=True)] if is_drawn else []
        return cls(tuple(nodes))


class SegmentDecision(NamedTuple):
    """What one backward decided for the steps between two knots.

    Attributes:
        segment: the knots.
        score: the least cosine between a velocity and its interpolation.
        outcome: interpolated, or exact and why.
    """

    segment: Segment
    score: float
    outcome: str


@dataclass(frozen=True)
class GraphView:
    """One compiled specialisation of a function (or one loop), before and after and in between.

    Attributes:
        function: its name.
        denoisers: class of each stream's denoiser.
        plans: of each stream.
        stages: step-level graphs by the name of the pass after which they were taken, the first "before", the last "after".
        code: readable code by name: the joint graph, and each region of the denoiser. Made when asked for.
        facts: lines of the report.
        decisions: what the last backward decided for each segment, and why; empty before it.
    """

    function: str
    denoisers: tuple[str, ...]
    plans: tuple[Plan, ...]
    stages: dict[str, StepGraph]
    code: dict[str, Callable[[], str]] = field(default_factory=dict)
    facts: tuple[tuple[str, object], ...] = ()
    decisions: tuple[SegmentDecision, ...] = ()

    @property
    def before(self) -> StepGraph:
        """The graph that autograd would run."""
        return self.stages["before"]

    @property
    def after(self) -> StepGraph:
        """The graph that runs."""
        return self.stages["after"]

    @property
    def segments(self) -> set[Segment]:
        """Those of all streams."""
        return {replace(segment, stream=s) for s, plan in enumerate(self.plans) for segment in plan.segments}

    def decided(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        """Headers and rows of a table of the decisions."""
        several = len(self.plans) > 1
        rows: list[tuple[object, ...]] = []
        for segment, score, outcome in self.decisions:
            of = (segment.stream,) if several else ()
            rows.append((*of, _listed(segment.intermediate), f"{segment.a} and {segment.b}", f"{score:.3f}", outcome))
        return (*(("stream",) if several else ()), "steps", "knots", "cosine of the velocities", ""), rows

    def print_readable(self, stage: str = "after") -> str:
        """A line per call of a denoiser and per branch.

        Args:
            stage: "before", "after", or the name of a pass: the graph as it left it.

        Raises:
            KeyError: there is no such stage; the message lists them.
        """
        if stage not in self.stages:
            raise KeyError(f"print_readable(stage={stage!r}): there are {', '.join(map(repr, self.stages))}.")
        return str(self.stages[stage])

    def diff(self, times: Sequence[float] | None = None) -> str:
        """A unified diff of before and after, a line per step: kept, value only, composite, routed.

        Args:
            times: of the steps; weights are then numbers, not formulas.

        Raises:
            ValueError: their number is not that of the steps.
        """
        if times is not None and any(len(times) != plan.num_steps for plan in self.plans):
            steps = ", ".join(str(plan.num_steps) for plan in self.plans)
            raise ValueError(f"diff(times=<{len(times)} of them>): there are {steps} steps. Give the time of each.")
        before, after = (self._by_step(graph, times) for graph in (self.before, self.after))
        return "\n".join(difflib.unified_diff(before, after, "before", "after", n=10_000, lineterm=""))

    def _by_step(self, graph: StepGraph, times: Sequence[float] | None) -> list[str]:
        lines = []
        for s, plan in enumerate(self.plans):
            weights = _weights_as_text(plan, times)
            own = [node for node in graph.nodes if node.stream == s]
            forwards, backwards = (
                {node.step: node for node in own if node.kind is kind} for kind in (Kind.FORWARD, Kind.BACKWARD)
            )
            routed = {i: node for node in own if node.kind is Kind.BRANCH for i in node.routes}
            for i in range(plan.num_steps):
                name = f"step {i:2}" if len(self.plans) == 1 else f"stream {s} step {i:2}"
                lines.append(
                    f"{name}  {self._describe(plan, weights, i, forwards.get(i), backwards.get(i), routed.get(i))}"
                )
        return lines

    def _describe(
        self,
        plan: Plan,
        weights: dict[tuple[int, int], str],
        i: int,
        forward: StepNode | None,
        backward: StepNode | None,
        branch: StepNode | None,
    ) -> str:
        saves = "its graph" if forward is None or forward.saves is None else f"{forward.saves} tensors"
        if backward is not None:
            terms = [f"{weights[j, i]} g{j}" for j in backward.carries if (j, i) in weights]
            return f"forward keeps {saves}, backward takes {' + '.join([f'g{i}', *terms])}"
        segment = next(segment for segment in plan.segments if i in segment.intermediate)
        routed = "" if branch is None else ", or exact in a branch"
        return f"value only, g{i} goes into knots {segment.a} and {segment.b}{routed}"

    def to_dot(self) -> str:
        """The graph after the rewrite in Graphviz' language."""
        lines = ["digraph steps {", "  rankdir=LR; node [shape=box, fontname=Helvetica];"]
        for s, plan in enumerate(self.plans):
            own = [node for node in self.after.nodes if node.stream == s]
            with_backward = {node.step for node in own if node.kind is Kind.BACKWARD}
            for i in range(plan.num_steps):
                style = "filled" if i in with_backward else "dashed"
                lines.append(f"  {_id('f', s, i)} [label={_quoted(f'forward {i}')}, style={style}];")
                if i in with_backward:
                    lines.append(f"  {_id('b', s, i)} [label={_quoted(f'backward {i}')}, style=filled];")
                    lines.append(f"  {_id('f', s, i)} -> {_id('b', s, i)};")
            for node in own:
                if node.kind is Kind.BACKWARD:
                    lines += [
                        f"  {_id('f', s, j)} -> {_id('b', s, node.step)} [label={_quoted(f'g{j}')}, style=dashed];"
                        for j in node.carries
                        if any(j in seg.intermediate and node.step in (seg.a, seg.b) for seg in plan.segments)
                    ]
                if node.kind is Kind.BRANCH:
                    name = _id("c" if node.is_drawn else "r", s, node.step)
                    what = "one of steps" if node.is_drawn else "steps"
                    lines.append(
                        f"  {name} [label={_quoted(f'{what} {_listed(node.routes)} exactly?')}, shape=diamond];"
                    )
                    lines += [f"  {_id('f', s, j)} -> {name} [style=dotted];" for j in node.routes]
        return "\n".join([*lines, "}"])

    def draw(self, path: str | Path) -> None:
        """Draw the graph after the rewrite, as SVG or PNG by the path's ending. Needs matplotlib."""
        from jagg_fx.drawing import draw

        draw(self, Path(path))

    def to_html(self, path: str | Path) -> None:
        """Write one page that needs no network: picture, tables, diff, the denoiser's own graph folded in. Needs matplotlib."""
        from jagg_fx.page import page

        Path(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        return self.diff()


def _weights_as_text(plan: Plan, times: Sequence[float] | None) -> dict[tuple[int, int], str]:
    """The weight of each intermediate step at the knots around it: a number, or by the steps' times (in order)."""
    if plan.rule.weights is Weights.INDEX:
        times = range(plan.num_steps)
    if times is not None and plan.segments:
        t, t_knots = ([times[i] for i in indices] for indices in (plan.intermediate, plan.knots))
        table = knot_weights(torch.tensor(t), torch.tensor(t_knots), plan.rule.degree).flatten(1).tolist()
        pairs = [(m, n) for m in range(len(t)) for n in range(len(t_knots))]
        return {(plan.intermediate[m], plan.knots[n]): f"{table[m][n]:.2f}" for m, n in pairs if table[m][n]}
    return {
        (i, k): f"w({i},{k})" if plan.rule.degree == 2 else f"(t{other}-t{i})/(t{other}-t{k})"
        for segment in plan.segments
        for i in segment.intermediate
        for k, other in ((segment.a, segment.b), (segment.b, segment.a))
    }


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


def _id(kind: str, stream: int, step: int) -> str:
    return f"{kind}{stream}_{step}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
