"""What users see of a rewritten function: lines, a diff by step, pictures, one page."""

import html.parser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jagg_fx
from jagg_fx.graphs import GraphView, StepGraph
from jagg_fx.plan import Rule, Weights, even, explicit, paper
from tests.problems import BATCH, STEPS, per_sample_times, squared

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture
def view() -> GraphView:
    """Of a function in whose last backward one segment was exact."""
    problem = per_sample_times(torch.float32)
    measured = jagg_fx.transform(problem.fn, lowering="reference", cos_threshold=None)
    problem.run(measured)
    assert measured.stats is not None
    threshold = sum(measured.stats.last.scores.values()) / 2
    fast = jagg_fx.transform(problem.fn, lowering="eager", cos_threshold=threshold)
    problem.run(fast)
    (view,) = fast.graphs
    return view


def view_of(*plans: Any, guarded: bool = True) -> GraphView:
    stages = {"before": StepGraph.exact(plans), "after": StepGraph.rewritten(plans, guarded, False)}
    return GraphView("fn", tuple('A"$<b>' for _ in plans), plans, stages)


def test_every_stage_is_there_in_order(view: GraphView) -> None:
    assert list(view.stages) == ["before", "interpolate_vjps", "route_segments", "drop_saved", "after"]
    before, composed, routed = (view.print_readable(name) for name in list(view.stages)[:3])
    assert before.count("takes its own cotangent\n") + before.endswith("takes its own cotangent") == STEPS
    assert "backward  0  takes its own cotangent + those of steps 1, 2, 5, 6" in composed
    assert "cond" not in composed
    assert routed.count("cond") == 2
    assert view.print_readable().count("saves nothing") == 4
    with pytest.raises(KeyError, match="there are 'before', 'interpolate_vjps'"):
        view.print_readable("nonsense")


def test_the_diff_is_by_step(view: GraphView) -> None:
    lines = view.diff().splitlines()
    assert lines[:2] == ["--- before", "+++ after"]
    assert "-step  1  forward keeps 4 tensors, backward takes g1" in lines
    assert "+step  1  value only, g1 goes into knots 0 and 3, or exact in a branch" in lines
    assert "+step  0  forward keeps 2 tensors, backward takes g0 + (t3-t1)/(t3-t0) g1 + (t3-t2)/(t3-t0) g2" in lines


def test_nothing_changes_without_intermediate_steps() -> None:
    problem = per_sample_times(torch.float32)
    fast = jagg_fx.transform(problem.fn, W=2, lowering="eager")
    assert fast.graphs == ()
    problem.run(fast)
    assert fast.graphs[0].diff() == ""


def test_code_of_the_joint_graph_and_of_the_denoiser(view: GraphView) -> None:
    assert list(view.code) == ["before", "denoiser, forward", "denoiser, backward", "after"]
    assert "invoke_subgraph" in view.code["before"]()
    assert "aten.tanh" in view.code["denoiser, forward"]()
    assert "composite_step_0" in view.code["after"]()
    assert "composite_step_0" not in view.code["before"]()


def test_why_a_segment_was_exact(view: GraphView) -> None:
    worse, better = sorted(view.decisions, key=lambda decision: decision.score)
    assert better.outcome == "interpolated"
    assert worse.outcome.startswith(f"exact: {worse.score:.3f} is below cos_threshold=")


@pytest.mark.parametrize("kind", ["reference", "denoiser", "wrap"])
def test_where_there_is_no_joint_graph_the_plan_is_shown(kind: str) -> None:
    problem = per_sample_times(torch.float64)
    z, t = problem.args
    if kind == "wrap":
        fast: Any = jagg_fx.wrap(problem.model, num_steps=STEPS)
        for i in range(STEPS):
            squared(z, t, i, fast(z[i], t[i].expand(BATCH))).sum().backward()
    else:
        options = {"lowering": "reference"} if kind == "reference" else {"lowering": "eager", "capture": "denoiser"}
        fast = jagg_fx.transform(problem.fn, **options)  # type: ignore[arg-type]
        problem.run(fast)
    (view,) = fast.graphs
    assert "value only, g1 goes into knots 0 and 3" in view.diff()
    assert len(view.decisions) == 2


def test_weights_as_text() -> None:
    def knot(times: Any = None, **options: Any) -> str:
        plan = explicit([0, 2, 4]).place(5, Rule(**options))
        stages = {"before": StepGraph.exact([plan]), "after": StepGraph.rewritten([plan], False, False)}
        lines = GraphView("fn", ("Model",), (plan,), stages).diff(times).splitlines()
        return next(line for line in lines if line.startswith("+step  2")).partition("takes ")[2]

    assert knot() == "g2 + (t0-t1)/(t0-t2) g1 + (t4-t3)/(t4-t2) g3"
    assert knot([1.0, 0.9, 0.6, 0.2, 0.1]) == "g2 + 0.25 g1 + 0.20 g3"
    assert knot(weights=Weights.INDEX) == "g2 + 0.50 g1 + 0.50 g3"
    assert knot(degree=2) == "g2 + w(1,2) g1 + w(3,2) g3"
    assert knot([4, 3, 2, 1, 0], degree=2) == "g2 + 0.75 g1 + 0.75 g3"
    with pytest.raises(ValueError, match="there are 5 steps"):
        knot([1.0])


def test_dot_quotes_labels() -> None:
    text = view_of(paper(4).place(9, Rule())).to_dot()
    assert text.startswith("digraph steps {")
    assert text.count("shape=diamond") == 2
    assert 'f0_1 -> b0_0 [label="g1", style=dashed];' in text
    assert "f0_1 -> b0_4" not in text


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_pictures(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"steps.{ending}"
    view_of(even(5).place(20, Rule()), paper(4).place(20, Rule())).draw(path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    with pytest.raises(ValueError, match=r"pictures are \.svg or \.png"):
        view_of(paper(4).place(9, Rule())).draw(tmp_path / "steps.gif")


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.links += [value for name, value in attributes if name in ("src", "href") and not value.startswith("#")]


def test_the_page_needs_no_network_and_escapes_what_it_shows(tmp_path: Path, view: GraphView) -> None:
    view.to_html(tmp_path / "steps.html")
    text = (tmp_path / "steps.html").read_text()
    reader = _Page()
    reader.feed(text)
    assert reader.links == []
    assert not re.search(r"url\(\s*['\"]?http|@import", text)
    assert "is below cos_threshold=" in text
    other = view_of(paper(4).place(9, Rule()))
    other.to_html(tmp_path / "other.html")
    assert "<b>" not in (tmp_path / "other.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_the_page_in_a_browser(tmp_path: Path, view: GraphView) -> None:
    path = tmp_path / "steps.html"
    view.to_html(path)
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    quiet += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path}/profile"]
    run = [CHROMIUM, *quiet, "--window-size=1300,1400"]
    subprocess.run(  # type: ignore[call-overload]
        [*run, f"--screenshot={tmp_path}/page.png", path.as_uri()], check=True, timeout=120, capture_output=True
    )
    shown = subprocess.run([*run, "--dump-dom", path.as_uri()], check=True, timeout=120, capture_output=True, text=True)  # type: ignore[call-overload]
    assert "9 backward passes before, 5 after" in shown.stdout
    assert shown.stdout.count("forward ") > STEPS
    from matplotlib.image import imread

    picture = torch.from_numpy(imread(str(tmp_path / "page.png")).copy())[..., :3]

    def share(color: tuple[float, float, float]) -> float:
        near: Tensor = (picture - torch.tensor(color)).abs().amax(-1) < 0.05
        return float(near.float().mean())

    assert share((0.184, 0.427, 0.710)) > 0.01  # knots' forwards
    assert share((0.878, 0.541, 0.180)) > 0.005  # composites
