"""torch's own ways to look: profiler ranges, the structured trace, the observer of passes, the log."""

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.passes import graph_transform_observer
from torch.profiler import ProfilerActivity, profile

import jagg_fx
from tests.problems import MLP, Problem, gaussian, path, per_sample_times

STEPS = 9
KNOTS = (0, 3, 4, 7, 8)


def _backward(problem: Problem, fast: Any) -> None:
    outputs = fast(*problem.args)
    (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).sum().backward()


def _ranges(problem: Problem, fast: Any) -> Counter[str]:
    _backward(problem, fast)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        _backward(problem, fast)
    return Counter(event.name for event in profiled.events() if event.name.startswith("jagg_fx "))


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_profile_reads_by_step_and_branch(lowering: str) -> None:
    problem = gaussian(torch.float32)
    fast = jagg_fx.transform(problem.fn, lowering=lowering, capture="whole")
    steps = [f"jagg_fx forward {i}" for i in range(STEPS)] + [f"jagg_fx backward {k}" for k in KNOTS]
    branches = ["jagg_fx exact or not: 1, 2", "jagg_fx exact or not: 5, 6"]
    assert _ranges(problem, fast) == Counter(steps + branches)


def test_a_function_whose_denoiser_alone_is_compiled_has_them_too() -> None:
    problem = gaussian(torch.float32)
    fast = jagg_fx.transform(problem.fn, lowering="eager", capture="denoiser", cos_threshold=None)
    expected = Counter(f"jagg_fx forward, call {i}" for i in range(STEPS))
    expected += Counter(["jagg_fx exact or not: 1, 2, 5, 6", "jagg_fx cotangents of 0, 3, 4, 7, 8"])
    assert _ranges(problem, fast) == expected


def test_a_loop_with_a_backward_per_step_has_them_too() -> None:
    model, (states, times) = MLP(), path(torch.float32)
    wrapped = jagg_fx.wrap(model, num_steps=STEPS, cos_threshold=1.0)

    def loop() -> torch.Tensor:
        return torch.stack([wrapped(states[i], times[i].expand(len(states[i]))).sum() for i in range(STEPS)])

    seen = _ranges(Problem(model, loop, (), list(model.parameters())), loop)
    expected = Counter(f"jagg_fx forward {i}" for i in range(STEPS))
    expected += Counter(f"jagg_fx forward {i} again" for i in (1, 2, 5, 6))
    expected += Counter(["jagg_fx exact or not: 1, 2", "jagg_fx exact or not: 5, 6"])
    expected += Counter(["jagg_fx cotangents of 0, 1, 2, 3", "jagg_fx cotangents of 4, 5, 6, 7"])
    assert seen == expected


def test_other_compiled_functions_have_no_ranges() -> None:
    problem = gaussian(torch.float32)
    assert not _ranges(problem, torch.compile(problem.fn, backend="aot_eager"))


def test_each_pass_runs_under_torchs_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    enter = graph_transform_observer.GraphTransformObserver.__enter__

    def note(self: Any) -> Any:
        seen.append(self.passname)
        return enter(self)

    monkeypatch.setattr(graph_transform_observer.GraphTransformObserver, "__enter__", note)
    problem = per_sample_times(torch.float32)
    _backward(problem, jagg_fx.transform(problem.fn, lowering="eager"))
    changing = ["interpolate_vjps", "route_segments", "reread_operands", "drop_saved", "clean_up"]
    assert seen == ["weigh_steps", "score_segments", "record_statistics", *changing]


def test_the_observer_sees_what_each_pass_makes_and_takes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    made, taken = {}, {}
    leave = graph_transform_observer.GraphTransformObserver.__exit__

    def note(self: Any, *args: Any) -> None:
        made[self.passname], taken[self.passname] = set(self.created_nodes), set(self.erased_nodes)
        leave(self, *args)

    monkeypatch.setattr(graph_transform_observer.GraphTransformObserver, "__exit__", note)
    problem = per_sample_times(torch.float32)
    with torch._inductor.config.patch({"trace.provenance_tracking_level": 1}):
        _backward(problem, jagg_fx.transform(problem.fn, lowering="eager"))
    assert {f"composite_step_{k}" for k in KNOTS} <= made["interpolate_vjps"]
    assert not taken["interpolate_vjps"]
    assert "segment_0_3" in made["route_segments"]
    assert len([name for name in taken["route_segments"] if "invoke_subgraph" in name]) == STEPS - len(KNOTS)


def test_the_log_is_made_only_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = per_sample_times(torch.float32)
    formatted = []
    monkeypatch.setattr("jagg_fx.graphs.StepGraph.__str__", lambda self: formatted.append(self) or "")
    _backward(problem, jagg_fx.transform(problem.fn, lowering="eager"))
    assert not formatted
    logger = logging.getLogger("jagg_fx")
    handler = logging.StreamHandler(open(os.devnull, "w"))  # noqa: SIM115
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    _backward(problem, jagg_fx.transform(problem.fn, lowering="eager"))
    assert len(formatted) == 2


SCRIPT = """
import torch, jagg_fx
from tests.problems import gaussian
problem = gaussian(torch.float32)
fast = jagg_fx.transform(problem.fn, lowering="eager", capture="whole")
fast(*problem.args).sum().backward()
"""


def _run(environment: dict[str, str]) -> str:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=root,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


@pytest.mark.slow
def test_torchs_trace_holds_the_graphs_and_the_report(tmp_path: Path) -> None:
    log = _run({"TORCH_TRACE": str(tmp_path), "TORCH_LOGS": "+jagg_fx"})
    assert "backward  4  takes its own cotangent" in log
    artifacts = {}
    lines = [line for trace in tmp_path.glob("*.log") for line in trace.read_text().splitlines()]
    for n, line in enumerate(lines):
        found = json.loads(line[line.index("{") :]) if "{" in line and not line.startswith("\t") else {}
        name = found.get("artifact", {}).get("name", "")
        if name.startswith("jagg_fx"):
            rest = lines[n + 1 :]
            end = next((m for m, other in enumerate(rest) if not other.startswith("\t")), len(rest))
            artifacts[name] = "\n".join(rest[:end])
    graphs = {f"jagg_fx_{kind}_{when}" for kind in ("steps", "joint_graph") for when in ("before", "after")}
    assert set(artifacts) == {*graphs, "jagg_fx_report"}
    assert "steps 1, 2 exactly" in artifacts["jagg_fx_steps_after"]
    has_composites = {
        when: "composite_step_3" in artifacts[f"jagg_fx_joint_graph_{when}"] for when in ("before", "after")
    }
    assert has_composites == {"before": False, "after": True}
    assert "9 -> 5" in artifacts["jagg_fx_report"]
