"""`jagg-fx report`: read a saved report."""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from tabulate import tabulate

from jagg_fx.commands.printing import print_json, visible
from jagg_fx.graphs import GraphView
from jagg_fx.report import table
from jagg_fx.saved import Saved, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="what fast.save_report(...) or `jagg-fx explain --save` wrote")
    parser.add_argument(
        "--view", type=int, metavar="N", help="which of the compiled specialisations, from 0 (default: the newest)"
    )
    parser.add_argument("--html", type=Path, metavar="OUT.html", help="write the page")
    parser.add_argument("--draw", type=Path, metavar="OUT.svg", help="write the picture, .svg or .png")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--stage", metavar="NAME", help="print the graph at that stage instead: before, after, or as a pass left it"
    )
    shown.add_argument("--json", action="store_true", help="print the report as JSON")


def main(arguments: argparse.Namespace) -> int:
    saved = load(arguments.file)
    view = _view(saved, arguments)
    if arguments.json:
        print_json(saved.values)
    elif arguments.stage is not None and view is not None:
        print(_stage(view, arguments.stage))
    else:
        rows = saved.rows if arguments.view is None or view is None else view.facts
        print("\n\n".join([table(saved.title, _visible(rows)), *_graph(saved, view)]))
    if view is not None and arguments.html:
        view.to_html(arguments.html)
    if view is not None and arguments.draw:
        view.draw(arguments.draw)
    return 0


def _view(saved: Saved, arguments: argparse.Namespace) -> GraphView | None:
    count, number = len(saved.graphs), arguments.view
    if not count:
        asked = [name for name in ("view", "stage", "html", "draw") if getattr(arguments, name) is not None]
        if asked:
            raise ValueError(
                f"--{asked[0]}: nothing had been rewritten when the report was saved, so that there is no graph in it. Save it "
                "after the first backward."
            )
        return None
    if number is not None and not 0 <= number < count:
        raise ValueError(f"--view {number}: the file holds {count}; write 0 to {count - 1}.")
    return saved.graphs[-1 if number is None else number]


def _stage(view: GraphView, name: str) -> str:
    if name not in view.stages:
        raise ValueError(f"--stage {name}: there are {', '.join(view.stages)}.")
    return view.print_readable(name)


def _visible(rows: Iterable[tuple[object, ...]]) -> list[tuple[str, ...]]:
    return [tuple(visible(str(cell)) for cell in row) for row in rows]


def _graph(saved: Saved, view: GraphView | None) -> Iterator[str]:
    if view is None:
        return
    if view.decisions:
        headers, rows = view.decided()
        yield "The last backward:\n" + tabulate(_visible(rows), headers, tablefmt="simple", disable_numparse=True)
    elif others := [n for n, other in enumerate(saved.graphs) if other.decisions]:
        yield f"The last backward ran another specialisation: --view {others[0]}"
    yield view.diff() or "Nothing was changed: every step keeps its backward."
