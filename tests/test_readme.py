"""The README's example runs and prints what the README says; its links lead somewhere."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from jagg_fx.passes import manager
from jagg_fx.plan import Rule

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README.read_text(), re.DOTALL)


def _blocks(kind: str) -> list[str]:
    return [text for name, text in BLOCKS if name == kind]


@pytest.mark.inductor
def test_the_example_prints_what_the_readme_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = _blocks("python")
    report, graph = _blocks("text")
    logged: list[str] = []
    monkeypatch.setattr(manager.log, "isEnabledFor", lambda level: True)
    monkeypatch.setattr(manager.log, "debug", lambda message, *args: logged.append(message % args))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, str(README), "exec"), {})
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 12

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines() if not line.startswith("torch ")]

    assert lines(printed.getvalue()) == lines(report)
    assert lines("\n".join(logged)) == lines(graph)


def test_the_knots_sample_runs() -> None:
    (example,) = _blocks("python")
    (sample,) = (block for block in _blocks("py") if "recalibrate" in block)
    names: dict[str, Any] = {}
    exec(compile(example.partition("fast =")[0], str(README), "exec"), names)
    exec(compile(sample, str(README), "exec"), names)
    assert names["resumed"].plan is None
    assert names["schedule_alone"].place(9, Rule()).knots[-1] == 8


def test_links_and_pictures_are_there() -> None:
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", README.read_text()) if "://" not in t]
    assert targets
    for target in targets:
        assert (README.parent / target).exists(), target


def test_nothing_is_left_to_fill_in() -> None:
    assert "@@" not in README.read_text()
