"""The command line."""

import json
import math
import sys
from pathlib import Path

import pytest

from jagg_fx.__main__ import main
from jagg_fx.commands.printing import print_json
from jagg_fx.plan import Plan
from jagg_fx.saved import load
from tests.test_saved import by_hand, transformed

LOSSES = """
import torch
from torch import nn

print("noise of the user's own")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, z, t, sigma=None):
        return torch.tanh(self.linear(z) * (1 + t[:, None]))


model, number, steps = Net(), 3, 6


def loss(z, t):
    velocities = [model(z[i], t[i].expand(3)) for i in range(steps)]
    return torch.stack([(z[i + 1] - v).square().mean() for i, v in enumerate(velocities)])


def one(z):
    return loss(z, torch.linspace(1, 0.1, 7))


def alone():
    return loss(*positional())


def chained(z, t):
    for i in range(steps):
        state = z[0] if i == 0 else state + model(state, t[i].expand(3))
    return state


def positional():
    return torch.randn(7, 3, 4), torch.linspace(1, 0.1, 7)


def keywords():
    return dict(zip("zt", positional()))


def tensor():
    return positional()[0]


def too_wide():
    return torch.randn(7, 3, 5), torch.linspace(1, 0.1, 7)


def fails():
    raise RuntimeError("no data\\nhere")


def stops():
    alone()
    raise RuntimeError("no more")


def text():
    return "z"


def on_meta():
    assert model.linear.weight.device.type == "meta"
    return positional()
"""


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user's `losses.py`, which is the current one."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "losses.py").write_text(LOSSES)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "losses", raising=False)
    return folder


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
        ("plan --noise -1", "noise level is 0 or more"),
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


# A user's own function.


@pytest.mark.parametrize(
    ("arguments", "knots"),
    [
        ("losses.py:loss --inputs losses.py:positional", "0, 3, 4, 5"),
        ("losses:loss --inputs losses:keywords --W 3", "0, 2, 3, 5"),
        ("losses.py:one --inputs losses.py:tensor --knots 3", "0, 2, 5"),
        ("losses.py:alone --knots 0,4,5 --time t --denoiser losses.py:model", "0, 4, 5"),
        ("losses.py:loss --inputs losses.py:on_meta --meta", "0, 3, 4, 5"),
    ],
)
def test_explain_a_function(arguments: str, knots: str, losses: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = list(sys.path)
    assert main(["explain", *arguments.split()]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("jagg_fx ")
    assert f"knots              {knots}\n" in printed.out
    assert "capturing" not in printed.err, "it is no terminal"
    assert sys.path == path


def test_explain_writes_what_report_reads(losses: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "explain losses.py:loss --inputs losses.py:positional --cos-threshold none"
    assert main([*asked.split(), "--save", "said.json", "--html", "said.html"]) == 0
    said = capsys.readouterr().out
    assert "none: interpolated always" in said
    assert main(["report", "said.json", "--html", "read.html"]) == 0
    read = capsys.readouterr().out
    assert read.startswith(said.rstrip())
    assert "+step  1  value only, g1 goes into knots 0 and 3\n" in read
    assert (losses / "read.html").read_bytes() == (losses / "said.html").read_bytes()


def test_explain_as_json_is_all_on_stdout(losses: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["explain", "losses.py:loss", "--inputs", "losses.py:positional", "--json", "--cos-threshold", "0.5"]) == 0
    )
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert said["report"]["streams"][0]["knots"] == [0, 3, 4, 5]
    assert said["report"]["cos_threshold"] == 0.5
    assert said["problem"] is None
    assert "noise of the user's own" in printed.err


def test_explain_exits_with_one_where_nothing_would_be_rewritten(
    losses: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chained = "explain losses.py:chained --inputs losses.py:positional --html no.html"
    assert main(chained.split()) == 1
    assert "a sampler differentiated end to end" in " ".join(capsys.readouterr().out.split())
    assert not (losses / "no.html").exists()
    assert main([*chained.split(), "--json"]) == 1
    assert "chain='stop'" in json.loads(capsys.readouterr().out)["problem"]
    assert main(["explain", "losses.py:loss", "--inputs", "losses.py:positional", "--W", "2"]) == 1
    assert "every step: no group has an intermediate step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("losses.py", "losses.py: write module:name or path/to/file.py:name."),
        ("nowhere.py:loss", "nowhere.py: there is no such file below"),
        ("nowhere:loss", "nowhere: there is no module nowhere in"),
        ("losses.nothing:loss", "losses.nothing: there is no module losses.nothing in"),
        ("broken.py:loss", "importing broken.py raised ModuleNotFoundError: No module named 'no_such_package' ("),
        ("wrong.py:loss", "importing wrong.py raised SyntaxError: invalid syntax"),
        ("script.py:loss", "importing script.py raised SystemExit: 3 ("),
        ("losses.py:lose", "there is no lose. Write one of what is there: loss."),
        ("losses.py:model.zzz", "there is no zzz. Write one of what is there: training."),
        ("losses.py:number", "losses.py:number is of type int, and cannot be called. Name a function."),
        (
            "losses.py:loss",
            "losses.py:loss cannot be called with no arguments: missing a required argument: 'z'. Write",
        ),
        (
            "losses.py:loss --inputs losses.py:tensor",
            "cannot be called with what --inputs losses.py:tensor returned: miss",
        ),
        ("losses.py:loss --inputs losses.py:model", "--inputs losses.py:model raised TypeError: "),
        ("losses.py:loss --inputs losses.py:fails", "--inputs losses.py:fails raised RuntimeError: no data here ("),
        (
            "losses.py:loss --inputs losses.py:text",
            "--inputs losses.py:text returned an object of type str. Let it return a tuple",
        ),
        ("losses.py:loss --inputs losses.py:too_wide", "losses.py:loss raised RuntimeError: a and b must have same"),
        ("losses.py:stops", "losses.py:stops raised RuntimeError: no more ("),
        ("losses.py:alone --denoiser losses.py:number", "denoiser=int): the denoiser is the nn.Module"),
        ("losses.py:alone --W 1", "W=1): W is the number of consecutive steps"),
        ("losses.py:alone --cos-threshold 3", "cos_threshold=3.0"),
        ("losses.py:alone --save missing/said.json", "the report cannot be written"),
        ("losses.py:alone --html missing/said.html", "No such file or directory: 'missing/said.html'"),
    ],
)
def test_explain_says_in_one_line_what_is_wrong(
    arguments: str, message: str, losses: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (losses / "broken.py").write_text("import no_such_package\n")
    (losses / "wrong.py").write_text("def loss(:\n")
    (losses / "script.py").write_text("import sys\n\nsys.exit(3)\n")
    assert main(["explain", *arguments.split()]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("jagg-fx explain: ")
    assert message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "jagg-fx: the following arguments are required: command (see jagg-fx --help)"),
        ("nonsense", "jagg-fx: argument command: invalid choice: 'nonsense'"),
        ("explain", "jagg-fx explain: the following arguments are required: module:function"),
        ("explain a:b --knots four", "argument --knots: 'four': write a number of knots, 4, or their steps, 0,3,8"),
        ("explain a:b --cos-threshold low", "'low': write a cosine such as 0.8, none or auto"),
        ("explain a:b --W 3 --knots 3", "argument --knots: not allowed with argument --W"),
        ("report a.json --stage after --json", "argument --json: not allowed with argument --stage"),
        ("plan --steps few", "jagg-fx plan: argument --steps: invalid int value: 'few'"),
    ],
)
def test_calls_that_cannot_be_read(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_terminal_shows_that_work_is_going_on(
    losses: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["explain", "losses.py:alone"]) == 0
    assert "capturing ... (minutes for a large model)\n" in capsys.readouterr().err


# A saved report.


def test_report_shows_what_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fast = transformed(lowering="eager", cos_threshold=1.0)
    (view,) = fast.graphs
    fast.save_report("report.json")
    assert main(["report", "report.json"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(str(fast.report))
    assert printed.endswith(view.diff() + "\n")
    assert all(decision.outcome in printed for decision in view.decisions)
    assert main(["report", "report.json", "--stage", "route_segments"]) == 0
    assert capsys.readouterr().out == view.print_readable("route_segments") + "\n"
    assert main(["report", "report.json", "--json", "--html", "page.html", "--draw", "steps.svg"]) == 0
    assert json.loads(capsys.readouterr().out) == fast.report.to_dict()
    view.to_html("own.html")
    assert Path("page.html").read_bytes() == Path("own.html").read_bytes()
    assert Path("steps.svg").read_text().startswith("<?xml")


def test_report_of_several_specialisations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, file = by_hand(), tmp_path / "report.json"
    (first,) = saved.graphs
    second = type(first)("other", first.denoisers, first.plans, first.stages, facts=(("function", "other"),))
    type(saved)("report", saved.values, (("function", "both"),), (first, second)).save(file)
    assert main(["report", str(file)]) == 0
    newest = capsys.readouterr().out
    assert "both" in newest
    assert "The last backward ran another specialisation: --view 0" in newest
    assert main(["report", str(file), "--view", "0"]) == 0
    assert "exact" in capsys.readouterr().out.partition("The last backward:")[2]
    assert main(["report", str(file), "--view", "1"]) == 0
    assert "other" in capsys.readouterr().out


def test_report_before_the_first_backward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, file = by_hand(), tmp_path / "report.json"
    type(saved)("report", saved.values, saved.rows, ()).save(file)
    assert main(["report", str(file)]) == 0
    assert "function" in capsys.readouterr().out
    assert main(["report", str(file), "--html", str(tmp_path / "page.html")]) == 2
    assert "--html: nothing had been rewritten" in capsys.readouterr().err


def test_a_file_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    by_hand("\x1b[2J\x9b2J\rfn\u00e9").save(file)
    assert load(file).values == {"function": "\x1b[2J\x9b2J\rfn\u00e9"}
    assert main(["report", str(file)]) == 0
    assert "\\x1b[2J\\x9b2J\\rfn\u00e9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("missing.json", "the file cannot be read (No such file or directory). Give the path"),
        ("text.json", "the file is not JSON"),
        ("report.json --view 1", "--view 1: the file holds 1; write 0 to 0."),
        ("report.json --view -1", "--view -1: the file holds 1; write 0 to 0."),
        ("report.json --stage drop_saved", "--stage drop_saved: there are before, after."),
        ("report.json --draw steps.gif", "pictures are .svg or .png"),
        ("report.json --html missing/page.html", "No such file or directory: 'missing/page.html'"),
    ],
)
def test_report_says_in_one_line_what_is_wrong(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    by_hand().save("report.json")
    Path("text.json").write_text("jagg_fx  report\n")
    assert main(["report", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jagg-fx report: ")
    assert message in error
    assert error.count("\n") == 1


def test_the_help_lists_exit_codes_and_every_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "exit codes:\n  0     done;" in capsys.readouterr().out
    for command in ("demo", "plan", "explain", "report", "doctor"):
        with pytest.raises(SystemExit) as exit_:
            main([command, "--help"])
        assert exit_.value.code == 0
        assert "--json" in capsys.readouterr().out


def test_json_has_no_number_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"peak": math.nan, "seconds": [1.5, math.inf, (2, None, True)]})
    assert json.loads(capsys.readouterr().out) == {"peak": None, "seconds": [1.5, None, [2, None, True]]}
