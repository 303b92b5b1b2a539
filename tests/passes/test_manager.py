"""The passes on real joint graphs: what is there before and after, and the cache key."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import jagg_fx
from jagg_fx import _compat
from jagg_fx.config import Config
from jagg_fx.denoiser import find_time
from jagg_fx.layouts import unify_layouts
from jagg_fx.passes import manager
from jagg_fx.passes.check_eligibility import check_eligibility, check_independent
from jagg_fx.passes.find_steps import find_steps, marked_calls, region_name
from jagg_fx.passes.value_numbers import value_numbers
from jagg_fx.plan import Rule, Schedule, budget, paper
from jagg_fx.region import TIME, Region
from jagg_fx.statistics import SLOT, make_probe
from jagg_fx.unstack import unstack_inputs
from tests.problems import PROBLEMS, STEPS, Problem, per_sample_times, two_outputs


class Recorder(_compat.CustomGraphPass):
    """Runs a function on the joint graph in place of our passes and keeps a copy of the graph before and after."""

    def __init__(self, fn: Callable[[fx.GraphModule], Any]) -> None:
        self.fn = fn
        self.results: list[Any] = []

    def uuid(self) -> None:
        return None

    def __call__(self, graph: fx.Graph) -> None:
        if graph.find_nodes(op="call_function", target=TIME):
            self.results.append(self.fn(graph.owning_module))


def on_joint_graph(problem: Problem, fn: Callable[[fx.GraphModule], Any]) -> Any:
    recorder = Recorder(fn)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        gm, inputs, unstack = unstack_inputs(gm, inputs)
        probe = unify_layouts(gm)
        compiled = _compat.compile_with_interpreter(gm, [*inputs, probe], recorder)
        return lambda *inputs: compiled(*unstack(inputs), make_probe(probe.numel(), probe.device))

    region = Region(problem.model, find_time(problem.model, None))
    with region.installed(), _compat.dynamo_settings():
        problem.run(torch.compile(problem.fn, backend=backend, fullgraph=True))
    (result,) = recorder.results
    return result


def calls(gm: fx.GraphModule, tag: str) -> list[fx.Node]:
    nodes = gm.graph.find_nodes(op="call_function", target=_compat.invoke_subgraph)
    return [node for node in nodes if node.meta.get("partitioner_tag") == tag]


@pytest.mark.parametrize("name", PROBLEMS)
def test_find_steps_pairs_every_call_with_its_own_backward(name: str) -> None:
    def check(gm: fx.GraphModule) -> None:
        before = str(gm.graph)
        steps = find_steps(gm.graph)
        check_independent(steps)
        check_eligibility(gm, steps, value_numbers(gm.graph))
        assert str(gm.graph) == before, "recognising must not change anything"
        assert [step.index for step in steps] == list(range(STEPS))
        assert len({step.region for step in steps}) == 1
        assert len({step.backward for step in steps}) == STEPS
        for step in steps:
            saved = {user for user in step.forward.users if user.target is operator.getitem}
            read = set(step.backward.all_input_nodes)
            assert saved & read or not (saved - {u for u in saved if u.args[1] == 0}), (
                "reads what its own forward saved"
            )
            others = [other.forward for other in steps if other is not step]
            assert not any(n.target is operator.getitem and n.args[0] in others for n in step.backward.args[2:])
            assert step.cotangents
            assert step.gradients
        clean(gm)

    on_joint_graph(PROBLEMS[name](torch.float32), check)


def clean(gm: fx.GraphModule) -> None:
    from jagg_fx.passes.clean_up import clean_up

    clean_up(gm)


def test_calls_under_no_grad_are_not_steps() -> None:
    def check(gm: fx.GraphModule) -> tuple[int, int]:
        found = len(marked_calls(gm.graph)), len(find_steps(gm.graph))
        clean(gm)
        return found

    assert on_joint_graph(PROBLEMS["reference_model"](torch.float32), check) == (2 * STEPS, STEPS)


@pytest.mark.parametrize("make", [per_sample_times, two_outputs])
def test_the_rewrite_leaves_one_backward_per_knot_and_saves_nothing_in_between(make: Any) -> None:
    def check(gm: fx.GraphModule) -> None:
        assert len(calls(gm, "is_backward")) == STEPS
        record = manager.rewrite_joint_graph(gm, Config.create(W=4, cos_threshold=None))
        assert record is not None
        (plan,) = record.plans
        assert plan == paper(4).place(STEPS, Rule())
        assert not gm.graph.find_nodes(op="call_function", target=TIME), "markers are erased"
        assert len(calls(gm, "is_backward")) == len(plan.knots)
        forwards = calls(gm, "is_forward")
        assert len(forwards) == STEPS
        value_only = [call for call in forwards if "value_only" in call.name]
        assert [call.name for call in value_only] == [f"step_{i}_value_only" for i in plan.intermediate]
        values = 2 if make is two_outputs else 1
        for call in value_only:
            assert len(call.meta["val"]) == values
            assert len(call.users) == values
            body = getattr(gm, call.args[0].target)
            assert len(body.graph.output_node().args[0]) == values
        composites = [node for node in gm.graph.nodes if node.name.startswith("composite_")]
        ends = {user for node in composites for user in node.users if user.target is _compat.invoke_subgraph}
        assert len(ends) == len(plan.knots)

    on_joint_graph(make(torch.float32), check)


def test_every_new_node_carries_value_tag_and_provenance() -> None:
    def check(gm: fx.GraphModule) -> None:
        old = set(gm.graph.nodes)
        manager.rewrite_joint_graph(gm, Config.create(knots=(0, 4, 8), debias=0.5))
        new = [node for node in gm.graph.nodes if node not in old and node.op == "call_function"]
        assert new
        for node in new:
            assert "val" in node.meta, node
            assert node.meta.get("partitioner_tag", "is_forward") in ("is_forward", "is_backward"), node
            assert hasattr(manager, node.meta["custom"]["jagg_fx"]["pass"]), node
            assert "partitioner_tag" in node.meta or node.name.startswith(("weights", "scores", "keep")), node

    on_joint_graph(per_sample_times(torch.float32), check)


def test_without_intermediate_steps_only_the_markers_go() -> None:
    """And outputs that lie in the memory of an operand, which are read from there."""

    def operators(gm: fx.GraphModule) -> list[Any]:
        own = {"clean_up", "reread_operands"}
        old = [node for node in gm.graph.nodes if node.meta.get("custom", {}).get("jagg_fx", {}).get("pass") not in own]
        return [node.target for node in old if node.target not in (TIME, SLOT, operator.getitem)]

    def check(gm: fx.GraphModule) -> None:
        before = operators(gm)
        manager.rewrite_joint_graph(gm, Config.create(W=2))
        assert operators(gm) == before

    on_joint_graph(per_sample_times(torch.float32), check)


@pytest.mark.parametrize("W", [2, 4])
def test_no_output_of_a_region_is_read_that_lies_in_memory_made_within_the_graph(W: int) -> None:
    def aliases(gm: fx.GraphModule) -> list[fx.Node]:
        found = []
        for call in gm.graph.find_nodes(op="call_function", target=_compat.invoke_subgraph):
            body = getattr(gm, region_name(call)).graph
            operands = dict(zip(body.find_nodes(op="placeholder"), call.args[2:], strict=True))
            for output in call.users:
                source = body.output_node().args[0][output.args[1]]
                while isinstance(source, fx.Node) and getattr(source.target, "is_view", False):
                    source = source.args[0]
                if source in operands and operands[source].op != "placeholder":
                    found.append(output)
        return found

    def check(gm: fx.GraphModule) -> None:
        assert aliases(gm)
        manager.rewrite_joint_graph(gm, Config.create(W=W))
        assert not aliases(gm)

    on_joint_graph(per_sample_times(torch.float32), check)


class TestCacheKey:
    def _uuid(self, **options: Any) -> str:
        return manager.JaggPass(Config.create(**options), lambda rewrite: None).uuid()

    def test_it_is_stable(self) -> None:
        assert self._uuid(W=4) == self._uuid(W=4)
        assert self._uuid(knots=(0, 8)) == self._uuid(knots=[8, 0])

    @pytest.mark.parametrize(
        "change",
        [
            {"W": 3},
            {"knots": (0, 8)},
            {"plan": budget(3, Schedule.create([2, 1, 0], [1, 1, 1]))},
            {"plan": budget(3, Schedule.create([2, 1, 0], [1, 2, 1]))},
            {"weights": "index"},
            {"degree": 2},
            {"cos_threshold": 0.5},
            {"cos_threshold": None},
            {"jagg_frac": 0.5},
            {"debias": 0.5},
            {"lowering": "eager"},
            {"chain": "stop"},
            {"plan": [paper(4), paper(4)]},
        ],
    )
    def test_any_option_changes_it(self, change: dict[str, Any]) -> None:
        assert self._uuid() != self._uuid(**change)

    def test_any_source_changes_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = self._uuid()
        read = manager.Path.read_bytes

        def edited(path: Any) -> bytes:
            return read(path) + (b"\n# edited" if path.name == "interpolate_vjps.py" else b"")

        monkeypatch.setattr(manager.Path, "read_bytes", edited)
        manager.sources_hash.cache_clear()
        try:
            assert self._uuid() != before
        finally:
            manager.sources_hash.cache_clear()


def test_two_plans_of_one_function_do_not_share_a_graph() -> None:
    problem = per_sample_times(torch.float64)
    gradients = [
        problem.run(jagg_fx.transform(problem.fn, lowering="eager", knots=knots, cos_threshold=None))[1]
        for knots in ((0, 8), (0, 4, 8), (0, 8))
    ]
    assert not torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
