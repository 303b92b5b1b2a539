"""The demo as a user runs it, as small as it gets."""

import json
import re
from pathlib import Path

import pytest
import torch

from jagg_fx import __main__ as command_line
from jagg_fx.demo import measure, train
from jagg_fx.demo.task import DigitsTask, frechet_distance
from jagg_fx.models.digits_dit import digits

SMALL = ["demo", "--quick", "--updates", "2", "--steps", "6"]


@pytest.mark.slow
def test_quick_run_prints_one_table_and_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([*SMALL, "--more-seeds", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for row in ("backward passes per update", "backward, median seconds", "gradient cosine", "held-out accuracy"):
        assert len(re.findall(rf"^\| {row}", printed, re.MULTILINE)) == 1, printed
    assert "Quick form" in printed
    assert "under 2 seeds" in printed
    assert "compile time" in printed
    for picture in ("reward.png", "samples.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "demo.json").read_text())
    exact, paper, placed = numbers["variants"]
    assert [v["backward_passes"] for v in numbers["variants"]] == [5, 3, 4]
    assert min(exact["gradient_cosines"]) > 1 - 1e-6
    assert 0.9 < min(placed["gradient_cosines"]) < 1 - 1e-5, "approximate, and said so"
    assert min(paper["gradient_cosines"]) > 0.9, "so few steps lie far apart, and the guard may keep them exact"
    assert [len(variant["rewards"]) for variant in numbers["variants"]] == [2, 2, 2]
    assert "knots=4: placed by the first backward at steps 0, " in printed


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_done_and_json_is_all_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    update, calls = train.Run._update, 0

    def interrupted(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise KeyboardInterrupt
        update(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(train.Run, "_update", interrupted)
    assert command_line.main([*SMALL, "--json", "--out", str(tmp_path)]) == 130
    printed = capsys.readouterr()
    assert "what was done so far" in printed.err
    assert "1 of 2 updates" in printed.err
    numbers = json.loads(printed.out)
    assert [variant["name"] for variant in numbers["variants"]] == ["exact", "W=4", "knots=4"]
    assert all(variant["median_seconds"]["backward"] > 0 for variant in numbers["variants"])
    assert numbers["variants"][0]["final_reward"] is None, "no number where nothing was measured"
    assert (tmp_path / "reward.png").exists()


@pytest.mark.parametrize("arguments", [["--updates", "0"], ["--steps", "2"], ["--more-seeds", "-1"]])
def test_impossible_settings_are_refused_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["demo", *arguments]) == 2
    assert re.fullmatch(r"jagg-fx demo: --updates is at least 1, .*\n", capsys.readouterr().err)


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["demo", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as exit_:
            command_line.main(arguments)
        assert exit_.value.code == 0
    printed = capsys.readouterr().out
    for option in ("--updates", "--seed", "--out", "--steps", "--quick"):
        assert option in printed


def test_the_reward_falls_with_wrong_ink_and_with_the_wrong_class() -> None:
    task, (images, labels) = DigitsTask(), digits()
    right, wrong = task.reward(images, labels), task.reward(images, (labels + 1) % 10)
    assert right.mean() > wrong.mean() + 3
    fatter = (images + 0.4).clamp(-1, 1)  # a mean ink near zero, still the same digits
    assert task.reward(fatter, labels).mean() > right.mean() + 3
    for collapsed in (torch.zeros_like(images), torch.ones_like(images)):  # the right ink, or all of it, but no digit
        assert task.reward(collapsed, labels).mean() < task.reward(fatter, labels).mean() - 0.5


def test_held_out_quality_tells_digits_from_noise() -> None:
    task, (images, labels) = DigitsTask(), digits()
    real, noise = task.quality(images[:400], labels[:400]), task.quality(torch.randn(400, 1, 8, 8), labels[:400])
    assert real.accuracy > 0.95 > 0.5 > noise.accuracy
    assert noise.distance > 20 * real.distance


def test_frechet_distance_of_gaussians() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(50_000, 2, generator=generator).double().numpy()
    b = 2 * torch.randn(50_000, 2, generator=generator).double().numpy() + 3
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(a, b) == pytest.approx(2 * 9 + 2 * (1 - 2) ** 2, rel=0.02)


def test_peak_memory_follows_the_tensors() -> None:
    size = 64 * measure.MIB

    def allocate() -> None:
        tensors = [torch.zeros(size // 4) for _ in range(3)]
        del tensors

    peak = measure.peak_memory(allocate)
    if peak != peak:
        pytest.skip("no way to reset the peak of the resident set here")
    assert 180 < peak < 215
