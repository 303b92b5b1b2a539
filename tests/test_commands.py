"""The command line."""

import json

import pytest

from jagg_fx.__main__ import main
from jagg_fx.plan import Plan


def test_plan_by_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "plan --steps 20 --shift 3 --sampler flow-sde --noise 0.7 --knots 5"
    assert main(arguments.split()) == 0
    text = capsys.readouterr().out
    assert "knots 0, 12, 15, 17, 18" in text
    assert "backward passes 19 -> 5" in text
    assert main([*arguments.split(), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    plan = Plan.from_json(json.dumps(result["plan"]))
    assert list(plan.knots) == result["knots"] == [0, 12, 15, 17, 18]
    assert result["predicted_saving"] == pytest.approx(1 - (19 + 10) / 57)


@pytest.mark.parametrize("arguments", ["plan", "plan --W 3 --steps 8", "plan --even 3 --sampler cps --backward 1"])
def test_other_placements(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 0
    assert "knots 0, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan --steps 5 --trained 9", "between 1 and 5 steps can be trained"),
        ("plan --steps 5 --knots 9", "the function has 4 steps, fewer than knots"),
        ("plan --sampler cps --steps 10 --trained 10", "Leave it out: --trained 9"),
    ],
)
def test_errors_are_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("jagg-fx plan: ")
    assert message in error
    assert error.count("\n") == 1


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor"]) == 0
    assert "gradient equal to the reference" in capsys.readouterr().out
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["C++ compiler"]["works"]
    assert "lowering='eager' works without" in found["C++ compiler"]["found"]
    assert found["rewrite, eager"]["works"]
