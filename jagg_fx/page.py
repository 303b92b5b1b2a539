"""One self-contained page about a rewritten function: picture, tables, diff, and the denoiser's own graph folded in."""

import html
from collections.abc import Iterable, Sequence

from jagg_fx.drawing import svg
from jagg_fx.graphs import GraphView

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; } td, th { border: 1px solid #ccc; padding: .25rem .6rem; text-align: left; }
td { white-space: pre-line; } th { background: #f3f4f6; }
pre { background: #f8f8f6; padding: .8rem; overflow-x: auto; font-size: 13px; line-height: 1.45; }
.picture { overflow-x: auto; border: 1px solid #ddd; } .picture svg { min-width: 60rem; width: 100%; height: auto; }
.minus { background: #fbe3e0; } .plus { background: #e2f2e1; } details { margin: .5rem 0; } summary { cursor: pointer; }
"""


def page(view: GraphView) -> str:
    """The page as text."""
    before, after = (sum(map(count, view.plans)) for count in (lambda p: p.num_steps, lambda p: len(p.knots)))
    title = f"{view.function}: {before} backward passes before, {after} after"
    parts = [f"<h1>{_text(title)}</h1>", "<h2>What runs</h2>", f'<div class="picture">{svg(view)}</div>']
    parts += [
        "<p>Blue forwards keep what their backward needs; grey ones run for their value alone. The cotangents g of grey steps go "
        "into the composites of the knots on both sides (orange), by the steps' times. A diamond is a branch: it is taken where "
        "the velocities of its steps are badly interpolated, and runs those steps exactly.</p>"
    ]
    if view.decisions:
        parts += ["<h2>The last backward</h2>", _table(*view.decided())]
    if view.facts:
        parts += ["<h2>Report</h2>", _table((), view.facts)]
    parts += ["<h2>Step by step, before and after</h2>", _diff(view.diff()), "<h2>After each pass</h2>"]
    parts += [_folded(name, str(graph)) for name, graph in view.stages.items()]
    if view.code:
        parts += ["<h2>Graphs</h2>", *(_folded(name, make()) for name, make in view.code.items())]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{_text(header)}</th>" for header in headers)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>" if head else f"<table>{body}</table>"


def _diff(text: str) -> str:
    classes = {"-": "minus", "+": "plus"}
    lines = [
        f'<span class="{classes.get(line[:1], "same")}">{_text(line)}</span>'
        for line in text.splitlines()
        if not line.startswith(("---", "+++", "@@"))
    ]
    return "<pre>" + "\n".join(lines) + "</pre>"


def _folded(name: str, text: str) -> str:
    return f"<details><summary>{_text(name)}</summary><pre>{_text(text)}</pre></details>"


def _text(value: object) -> str:
    return html.escape(str(value))
