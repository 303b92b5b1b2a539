"""Reports in files: what is read is what was written, and what is no report is refused."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import jagg_fx
from jagg_fx.errors import JaggError, SavedReportError
from jagg_fx.graphs import GraphView, SegmentDecision, StepGraph
from jagg_fx.page import page
from jagg_fx.plan import Rule, Weights, explicit, paper
from jagg_fx.saved import FORMAT, MARK, Saved, load
from tests.problems import BATCH, MLP, STEPS, path, per_sample_times, squared
from tests.test_streams import two_experts


def transformed(**options: Any) -> Any:
    problem = per_sample_times(torch.float32)
    fast = jagg_fx.transform(problem.fn, **options)
    problem.run(fast)
    return fast


def wrapped() -> Any:
    model, (z, t) = MLP(), path(torch.float32)
    fast = jagg_fx.wrap(model, num_steps=STEPS)
    for i in range(STEPS):
        squared(z, t, i, fast(z[i], t[i].expand(BATCH))).sum().backward()
    return fast


def streams() -> Any:
    problem, options = two_experts(torch.float32)
    fast = jagg_fx.transform(problem.fn, lowering="reference", **options)
    problem.run(fast)
    return fast


def explained() -> Any:
    problem = per_sample_times(torch.float32)
    return jagg_fx.explain(problem.fn, *problem.args, knots=(0, 3, 8), weights="index")


KINDS = {
    "whole": lambda: transformed(lowering="eager", debias=0.5),
    "reference": lambda: transformed(lowering="reference", knots=(0, 3, 8), degree=2),
    "denoiser": lambda: transformed(lowering="eager", capture="denoiser", jagg_frac=0.5),
    "wrap": wrapped,
    "streams": streams,
    "explain": explained,
}


def by_hand(function: str = "fn", denoiser: str = "Net", code: str = "x = 1") -> Saved:
    """A report of six steps with a NaN among its scores."""
    plan = explicit((0, 2, 5)).place(6, Rule(Weights.TIME))
    stages = {"before": StepGraph.exact([plan]), "after": StepGraph.rewritten([plan], True, True)}
    decisions = tuple(SegmentDecision(segment, math.nan, "exact") for segment in plan.segments)
    facts = (("function", function), ("steps", 6))
    view = GraphView(function, (denoiser,), (plan,), stages, {"before": lambda: code}, facts, decisions)
    return Saved("report", {"function": function}, facts, (view,))


def everything(view: GraphView) -> list[object]:
    shown = [view.print_readable(stage) for stage in view.stages]
    code = {name: make() for name, make in view.code.items()}
    return [view.diff(), view.to_dot(), list(view.stages), shown, code, view.facts, view.plans, view.decided()]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_was_written(kind: str, tmp_path: Path) -> None:
    original, file = KINDS[kind](), tmp_path / "reports" / "report.json"
    file.parent.mkdir()
    original.save_report(file)
    assert os.listdir(file.parent) == ["report.json"]
    saved = load(file)
    assert str(saved) == str(original if kind == "explain" else original.report)
    assert saved.values == (original if kind == "explain" else original.report).to_dict()
    assert len(saved.graphs) == 1
    for again, view in zip(saved.graphs, original.graphs, strict=True):
        assert everything(again) == everything(view)
        assert again.decisions == view.decisions
        assert bool(view.decisions) == (kind != "explain")
        assert page(again) == page(view)


def test_a_saved_report_can_be_saved_again(tmp_path: Path) -> None:
    by_hand().save(tmp_path / "report.json")
    first = (tmp_path / "report.json").read_text()
    again = load(tmp_path / "report.json")
    assert math.isnan(again.graphs[0].decisions[0].score)
    again.save(str(tmp_path / "report.json"))
    assert (tmp_path / "report.json").read_text() == first


def test_before_the_first_backward(tmp_path: Path) -> None:
    jagg_fx.transform(per_sample_times(torch.float32).fn, lowering="eager").save_report(tmp_path / "report.json")
    saved = load(tmp_path / "report.json")
    assert saved.graphs == ()
    assert "nothing rewritten yet" in str(saved)


def test_decisions_are_shown_where_they_were_made(tmp_path: Path) -> None:
    model, (z, t) = MLP(), path(torch.float32)

    def fn(z: torch.Tensor, t: torch.Tensor, steps: int) -> torch.Tensor:
        return torch.stack([squared(z, t, i, model(z[i], t[i].expand(BATCH))) for i in range(steps)], 1)

    fast = jagg_fx.transform(fn, lowering="eager")
    for steps in (STEPS, 4, STEPS):
        fast(z, t, steps).sum().backward()
    fast.save_report(tmp_path / "report.json")
    long, short = load(tmp_path / "report.json").graphs
    assert [plan.num_steps for view in (long, short) for plan in view.plans] == [STEPS, 4]
    assert {decision.segment for decision in long.decisions} == long.segments
    assert short.decisions == ()


def test_names_and_code_are_text_on_the_page(tmp_path: Path) -> None:
    evil = "</title><script>alert(1)</script><svg onload=alert(1)>$x$"
    by_hand(evil, evil, f"</pre>{evil}").save(tmp_path / "report.json")
    (view,) = load(tmp_path / "report.json").graphs
    view.to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "<script" not in text
    assert "onload=alert(1)&gt;" in text
    assert text.count("<svg") == 1


# Writing.


@pytest.mark.parametrize("failing", ["os.replace", "pathlib.Path.write_text"])
def test_a_failed_write_leaves_the_older_file(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    by_hand("older").save(tmp_path / "report.json")
    with monkeypatch.context() as patched:
        patched.setattr(failing, fail)
        with pytest.raises(SavedReportError, match=r"save_report\('.*report\.json'\).*No space left.*Give a path"):
            by_hand("newer").save(tmp_path / "report.json")
    assert os.listdir(tmp_path) == ["report.json"]
    assert load(tmp_path / "report.json").values == {"function": "older"}


def test_code_that_cannot_be_printed_leaves_the_older_file(tmp_path: Path) -> None:
    by_hand("older").save(tmp_path / "report.json")
    saved = by_hand()
    broken = dataclasses.replace(saved.graphs[0], code={"before": lambda: str(1 / 0)})
    with pytest.raises(ZeroDivisionError):
        dataclasses.replace(saved, graphs=(broken,)).save(tmp_path / "report.json")
    assert load(tmp_path / "report.json").values == {"function": "older"}


@pytest.mark.parametrize("name", ["", ".", "missing/report.json"])
def test_where_nothing_can_be_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SavedReportError, match="Give a path in a folder that exists"):
        by_hand().save(name)
    assert os.listdir(tmp_path) == []


# Reading what is no report.


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    by_hand().save(tmp_path / "good.json")
    found: dict[str, Any] = json.loads((tmp_path / "good.json").read_text())
    return found


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "cannot be read .No such file.*Give the path that the report was saved to"),
        (b"", "not JSON"),
        (b"\x80\x04\x95pickled\xff", "not JSON"),
        (b'{"jagg_fx_report": 1, "title": "rep', "not JSON.*cut short on the way, copy it again"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no 'jagg_fx_report'"),
        (b'{"jagg_fx_plan": 1}', "no 'jagg_fx_report'"),
        (b'{"jagg_fx_report": true}', "no 'jagg_fx_report'"),
        (b'{"jagg_fx_report": 1}', "not a saved report .'title' is missing.*Give the file that fast.save"),
        (json.dumps({MARK: FORMAT + 1}).encode(), "format 2 of a newer jagg_fx.*Read it with that version, or save"),
    ],
)
def test_files_that_are_no_report(data: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(SavedReportError, match=rf"jagg_fx.saved.load\('.*some\.json'\): .*{message}") as error:
        load(file)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, JaggError)
    assert "\n" not in str(error.value)


def test_a_folder_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(SavedReportError, match="Is a directory"):
        load(tmp_path)


def _set(*names: Any, to: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for name in names[:-1]:
            content = content[name]
        content[names[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("graphs", 0, "plans", 0, "num_steps", to=10**12), "not a saved report"),
        (_set("graphs", 0, "plans", 0, "knots", to=[0, 10**12]), "knots lie in"),
        (_set("graphs", 0, "plans", to=[]), "0 plans for 1 denoisers"),
        (_set("graphs", 0, "stages", "before", to=[]), "plans of 6 steps, and a graph of 0 others"),
        (_set("graphs", 0, "stages", "after", to=[]), "a knot without a backward"),
        (_set("graphs", 0, "stages", "after", 0, "step", to=6), "a forward of steps that are not there"),
        (_set("graphs", 0, "stages", "after", 0, "stream", to=1), "a forward of steps that are not there"),
        (_set("graphs", 0, "stages", "after", 0, "step", to=-1), "-1 is negative"),
        (_set("graphs", 0, "stages", "after", 0, "kind", to="eval"), "'eval' is not a valid Kind"),
        (_set("graphs", 0, "decisions", 0, "b", to=10**12), "a decision about steps that are in no segment"),
        (_set("graphs", 0, "decisions", 0, "score", to="high"), "str where float should be"),
        (_set("graphs", 0, "code", "before", to=["x"]), "list where str should be"),
        (_set("graphs", 0, "denoisers", to="Net"), "str where list should be"),
        (_set("rows", 0, to=["one", "two", "three"]), "too many values"),
        (_set("values", to=[]), "list where dict should be"),
    ],
)
def test_contents_that_do_not_fit(
    change: Callable[[Any], None], message: str, content: dict[str, Any], tmp_path: Path
) -> None:
    change(content)
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(SavedReportError, match=message):
        load(tmp_path / "bad.json")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a value, with every one of its keys."""
    for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(each, (dict, list)):
            yield from _places(each)


@pytest.mark.parametrize("other", [None, -1, 3, 10**30, "x", [], {}, math.inf])
def test_whatever_is_changed_it_is_refused_or_shown(other: Any, content: dict[str, Any], tmp_path: Path) -> None:
    outcomes = set()
    for container, key in list(_places(content)):
        kept, container[key] = container[key], other
        (tmp_path / "changed.json").write_text(json.dumps(content))
        container[key] = kept
        try:
            saved = load(tmp_path / "changed.json")
        except SavedReportError:
            outcomes.add("refused")
        else:
            outcomes.add("shown")
            assert str(saved)
            assert all(all(map(str, everything(view))) for view in saved.graphs)
    assert "refused" in outcomes


def test_plans_are_checked_when_they_are_read() -> None:
    text = paper(4).place(9, Rule()).to_json()
    for old, new in (('"num_steps": 9', '"num_steps": "nine"'), ('"num_steps": 9', f'"num_steps": 1{"0" * 400}.5')):
        with pytest.raises(jagg_fx.errors.PlanError, match="not a saved plan"):
            jagg_fx.plan.Plan.from_json(text.replace(old, new))
