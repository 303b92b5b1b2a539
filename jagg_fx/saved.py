"""A report in a file: its table and every view of the graphs, as JSON.

fast.save_report("report.json")                    # a transformed function, a wrapped denoiser or an explanation
report = saved.load("report.json")          # reads JSON, and runs nothing
print(report, report.graphs[-1].diff())     # as they were
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jagg_fx.errors import SavedReportError
from jagg_fx.graphs import GraphView, Kind, SegmentDecision, StepGraph, StepNode
from jagg_fx.plan import Plan, Segment
from jagg_fx.report import Rows, table

FORMAT = 1
MARK = "jagg_fx_report"  # names the version of the format, and tells our files from others

T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    """A report that does not need the function any more; `str()` is its table.

    Attributes:
        title: "report", or "explain".
        values: `to_dict()` of the report or of the explanation.
        rows: lines of the table.
        graphs: a view of each specialisation, the newest last.
    """

    title: str
    values: dict[str, Any]
    rows: Rows
    graphs: tuple[GraphView, ...]

    def save(self, path: str | Path) -> None:
        """Write it to `path`, and nowhere else. What was there before is lost only when all is written.

        Raises:
            SavedReportError: it cannot be written.
        """
        content = {"title": self.title, "values": self.values, "rows": self.rows, "graphs": [*map(_plain, self.graphs)]}
        text = json.dumps({MARK: FORMAT} | content)
        target = Path(path)
        try:
            beside = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                beside.write_text(text, encoding="utf-8")
                os.replace(beside, target)
            finally:
                beside.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)  # without the name of the file beside
            raise SavedReportError.not_written(str(path), reason) from error

    def __str__(self) -> str:
        return table(self.title, self.rows)


def load(path: str | Path) -> Saved:
    """Read what `save` wrote.

    Args:
        path: the file. It may come from anywhere: it is checked, and nothing in it is run.

    Returns:
        The report. Its views give the same lines, pictures and pages as those that were saved.

    Raises:
        SavedReportError: the file is not there, is no saved report, or was written by a newer version.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise SavedReportError.not_read(str(path), error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise SavedReportError.not_json(str(path), str(error)) from error
    version = content.get(MARK) if isinstance(content, dict) else None
    if type(version) is not int or version < 1:
        raise SavedReportError.not_a_report(str(path), f"it has no {MARK!r}")
    if version > FORMAT:
        raise SavedReportError.newer(str(path), version, FORMAT)
    try:
        return Saved(
            title=_is(str, content["title"]),
            values=_is(dict, content["values"]),
            rows=_each(_row, content["rows"]),
            graphs=_each(_view, content["graphs"]),
        )
    except KeyError as error:
        raise SavedReportError.not_a_report(str(path), f"{error} is missing") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise SavedReportError.not_a_report(str(path), str(error)) from error


def _plain(view: GraphView) -> dict[str, Any]:
    return {
        "function": view.function,
        "denoisers": view.denoisers,
        "plans": [json.loads(plan.to_json()) for plan in view.plans],
        "stages": {name: [*map(dataclasses.asdict, graph.nodes)] for name, graph in view.stages.items()},
        "code": {name: make() for name, make in view.code.items()},
        "facts": view.facts,
        "decisions": [
            dataclasses.asdict(segment) | {"score": score, "outcome": outcome}
            for segment, score, outcome in view.decisions
        ],
    }


def _view(value: Any) -> GraphView:
    fields = _is(dict, value)
    view = GraphView(
        function=_is(str, fields["function"]),
        denoisers=_each(_text, fields["denoisers"]),
        plans=_each(lambda plan: Plan.from_json(json.dumps(plan)), fields["plans"]),
        stages={name: StepGraph(_each(_node, nodes)) for name, nodes in _is(dict, fields["stages"]).items()},
        code={name: functools.partial(str, _text(text)) for name, text in _is(dict, fields["code"]).items()},
        facts=_each(_row, fields["facts"]),
        decisions=_each(_decision, fields["decisions"]),
    )
    _check(view)
    return view


def _node(value: Any) -> StepNode:
    fields = _is(dict, value)
    return StepNode(
        kind=Kind(fields["kind"]),
        stream=_index(fields["stream"]),
        step=_index(fields["step"]),
        saves=None if fields["saves"] is None else _index(fields["saves"]),
        carries=_each(_index, fields["carries"]),
        routes=_each(_index, fields["routes"]),
        is_drawn=_is(bool, fields["is_drawn"]),
    )


def _decision(value: Any) -> SegmentDecision:
    fields = _is(dict, value)
    segment = Segment(*(_index(fields[name]) for name in ("a", "b", "stream")))
    return SegmentDecision(segment, _is(float, fields["score"]), _is(str, fields["outcome"]))


def _check(view: GraphView) -> None:
    """Raise `ValueError` where parts do not fit together, so that no view fails later, or grows as large as a number says."""
    if not view.plans or len(view.denoisers) != len(view.plans):
        raise ValueError(f"{len(view.plans)} plans for {len(view.denoisers)} denoisers")
    steps = _steps(view.before, Kind.FORWARD)
    planned = sum(plan.num_steps for plan in view.plans)
    if len(steps) != planned or steps != {(s, i) for s, plan in enumerate(view.plans) for i in range(plan.num_steps)}:
        raise ValueError(f"plans of {planned} steps, and a graph of {len(steps)} others")
    for node in (node for graph in view.stages.values() for node in graph.nodes):
        named = {(node.stream, step) for step in (node.step, *node.carries, *node.routes)}
        if not named <= steps or (node.kind is Kind.BRANCH and not node.routes):
            raise ValueError(f"a {node.kind.value} of steps that are not there")
    between = {(s, i) for s, plan in enumerate(view.plans) for i in plan.intermediate}
    for graph in (view.before, view.after):
        if steps - between - _steps(graph, Kind.BACKWARD):
            raise ValueError("a knot without a backward")
    if not {decision.segment for decision in view.decisions} <= view.segments:
        raise ValueError("a decision about steps that are in no segment")


def _steps(graph: StepGraph, kind: Kind) -> set[tuple[int, int]]:
    return {(node.stream, node.step) for node in graph.nodes if node.kind is kind}


def _row(value: Any) -> tuple[str, object]:
    name, answer = _is(list, value)
    return _text(name), answer if type(answer) is int else _text(answer)


def _text(value: Any) -> str:
    return _is(str, value)


def _index(value: Any) -> int:
    if _is(int, value) < 0:
        raise ValueError(f"{value} is negative")
    return value  # type: ignore[no-any-return]


def _each(read: Callable[[Any], T], value: Any) -> tuple[T, ...]:
    return tuple(map(read, _is(list, value)))


def _is(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} where {kind.__name__} should be")
    return value
