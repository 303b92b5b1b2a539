"""Draw a rewritten function: a row of forwards, a row of backwards, and where the cotangents go."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jagg_fx.graphs import GraphView, Kind, StepNode

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KNOT, VALUE_ONLY, COMPOSITE, BRANCH = "#2f6db5", "#dfe3e8", "#e08a2e", "#f4efe4"
WIDTH = 1.15  # inches per step
ROW = 3.4  # inches per stream


def draw(view: GraphView, path: Path) -> None:
    """Write an SVG or PNG picture, by the ending of `path`. Raises `ValueError` for another one."""
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("svg", "png"):
        raise ValueError(f"draw({str(path)!r}): pictures are .svg or .png.")
    figure = _figure(view)
    figure.savefig(path, format=kind, dpi=130)


def svg(view: GraphView) -> str:
    """The picture as an SVG element, its text as text."""
    target = io.StringIO()
    figure = _figure(view)
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jagg_fx"}):
        figure.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    return text[text.index("<svg") :]


def _figure(view: GraphView) -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('drawing needs matplotlib: pip install "jagg_fx[demo]"') from error
    steps = max(plan.num_steps for plan in view.plans)
    figure = Figure(figsize=(1.4 + WIDTH * steps, ROW * len(view.plans) + 0.5), layout="constrained")
    for s, axes in enumerate(figure.subplots(len(view.plans), 1, squeeze=False)[:, 0]):
        _draw_stream(axes, view, s)
    return figure


def _draw_stream(axes: "Axes", view: GraphView, s: int) -> None:
    plan = view.plans[s]
    own = [node for node in view.after.nodes if node.stream == s]
    backwards = {node.step: node for node in own if node.kind is Kind.BACKWARD}
    saves = {node.step: node.saves for node in own if node.kind is Kind.FORWARD}
    title = f"stream {s}: " if len(view.plans) > 1 else ""
    passes = f"{plan.num_steps} backward passes before, {len(plan.knots)} after"
    axes.set_title(f"{title}{_plain(view.denoisers[s])}, {_plain(plan.origin)}: {passes}", loc="left", fontsize=11)
    for i in range(plan.num_steps):
        is_knot = i in backwards
        kept = "value only" if not is_knot else "keeps its graph" if saves.get(i) is None else f"saves {saves[i]}"
        _box(axes, i, 1, f"forward {i}\n{kept}", KNOT if is_knot else VALUE_ONLY, "white" if is_knot else "#333333")
        if is_knot:
            composite = any(i in (segment.a, segment.b) for segment in plan.segments)
            label = f"backward {i}\n{'composite' if composite else 'own g'}"
            _box(axes, i, 0, label, COMPOSITE if composite else KNOT, "white")
            _arrow(axes, (i, 0.76), (i, 0.24), f"g{i}", KNOT)
    for segment in plan.segments:
        for i in segment.intermediate:
            for knot in (segment.a, segment.b):
                side = 0.44 if knot < i else -0.44
                _arrow(axes, (i, 0.76), (knot + side, 0.1), "", COMPOSITE)
            axes.text(i, 0.62, f"g{i}", ha="center", va="center", fontsize=9, color="#8a4b08", backgroundcolor="white")
    for node in own:
        if node.kind is Kind.BRANCH:
            _branch(axes, node)
    axes.set(xlim=(-0.7, plan.num_steps - 0.3), ylim=(-1.25, 1.45))
    axes.axis("off")


def _box(axes: "Axes", x: float, y: float, label: str, color: str, text: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch((x - 0.4, y - 0.22), 0.8, 0.44, boxstyle="round,pad=0.02", fc=color, ec="#555555", lw=0.8)
    )
    axes.text(x, y, label, ha="center", va="center", fontsize=8.5, color=text)


def _arrow(axes: "Axes", start: tuple[float, float], end: tuple[float, float], label: str, color: str) -> None:
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
    )
    if label:
        axes.text(start[0] + 0.06, (start[1] + end[1]) / 2, label, fontsize=9, color=color, va="center")


def _branch(axes: "Axes", node: StepNode) -> None:
    from matplotlib.patches import Polygon

    first, last = node.routes[0], node.routes[-1]
    x, y = (first + last) / 2, -0.78
    half = max(0.75, (last - first) / 2 + 0.55)
    corners = [(x - half, y), (x, y + 0.38), (x + half, y), (x, y - 0.38)]
    for i in node.routes:
        axes.plot([i, x], [0.54, y + 0.38], color="#999999", linestyle=":", linewidth=1, zorder=0)
    axes.add_patch(Polygon(corners, closed=True, fc=BRANCH, ec="#555555", lw=0.8))
    steps = f"{first}-{last}" if last > first else f"{first}"
    label = f"one of {steps}\nexact if drawn" if node.is_drawn else f"steps {steps}\nexact if cos is low"
    axes.text(x, y, label, ha="center", va="center", fontsize=8)


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # matplotlib would read mathematics between two of them
