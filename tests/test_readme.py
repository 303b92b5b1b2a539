"""The README's example runs and prints what the README says; its links lead somewhere."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

import jagg_fx
from jagg_fx.models.digits_dit import load_digits_dit
from jagg_fx.passes import manager
from jagg_fx.plan import Rule

README = Path(__file__).parents[1] / "README.md"
TRANSFORM = jagg_fx.transform
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


class _Accelerator:
    """Prepares nothing: accelerate, DDP and fully_shard themselves run in tests/test_wrap_distributed.py."""

    def prepare(self, *things: Any) -> tuple[Any, ...]:
        return things


def _names_around(number: int) -> dict[str, Any]:
    """What the text around a sample takes for granted, beside the names of the example."""
    latents, steps = torch.randn(4, 10, 1, 8, 8), torch.linspace(1, 0.1, 9)
    return {
        "old_log_probs": torch.zeros(8, 9),
        "advantages": torch.linspace(-1, 1, 8),
        "timesteps": steps.expand(4, 9),
        "prompt": torch.arange(4),
        "x": latents[:, 0],
        "t": steps[0].expand(4),
        "step_log_prob": lambda velocity, *_: velocity.square().mean((1, 2, 3)),
        "clipped_loss": lambda log_prob, *_: log_prob.mean(),
        "velocities": [latents[:, i] for i in range(8)],  # of the other steps
        "DistributedDataParallel": lambda module: module,
        "fully_shard": lambda module: module,
        "accelerator": _Accelerator(),
        "high": load_digits_dit(),
        "low": load_digits_dit(),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        **({"latents": latents} if "latents[:, j]" in _blocks("py")[number] else {}),
    }


def _eager(fn: Any, *args: Any, **options: Any) -> Any:
    """`jagg_fx.transform` for what is not about generated code."""
    return TRANSFORM(fn, *args, **{"lowering": "eager", **options})


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The names of the example, after it ran."""
    (text,) = _blocks("python")
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()):
        patched.setattr(jagg_fx, "transform", _eager)
        exec(compile(text, str(README), "exec"), names)
    return names


@pytest.mark.parametrize("number", range(len(_blocks("py"))))
def test_each_sample_runs(
    number: int, example: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    monkeypatch.setattr(jagg_fx, "transform", _eager)
    sample = _blocks("py")[number]
    names = example | _names_around(number)
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), 0.0)
    if "model.reuse" in sample:
        names["model"] = jagg_fx.wrap(names["model"], num_steps=9, W=4)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(sample, str(README), "exec"), names)
    if "recalibrate" in sample:
        assert names["resumed"].plan is None
        assert names["schedule_alone"].place(9, Rule()).knots[-1] == 8
    if "to_html" in sample:
        assert {"steps.svg", "steps.html"} <= {path.name for path in tmp_path.iterdir()}
    if "loss.backward()" in sample:
        assert names["model"].stats.backwards == 1


def test_links_and_pictures_are_there() -> None:
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", README.read_text()) if "://" not in t]
    assert targets
    for target in targets:
        assert (README.parent / target).exists(), target


def test_tables_are_those_of_the_committed_results() -> None:
    results = README.parent / "benchmarks" / "results"
    shown = re.findall(r"(?m)(?:^\|.*\n)+", README.read_text())
    for name in ("step_time_small_cpu", "peak_memory_small_cpu", "compile_time_digits_cpu"):
        (table,) = re.findall(r"(?m)(?:^\|.*\n)+", (results / f"{name}.md").read_text())
        assert table in shown, name


def test_nothing_is_left_to_fill_in() -> None:
    assert "@@" not in README.read_text()
