"""The benchmarks' own parts: what they time must be what they say it is."""

import argparse
import functools
import json
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_check, harness, overhead, peak_memory, reward, rivals
from benchmarks.harness import Spread, Times
from benchmarks.reward import Run
from benchmarks.sizes import QUICK, SIZES, Problem, checkpoint_blocks, make_problem
from jagg_fx.demo.measure import Clock, flat_gradient, relative_error


@pytest.fixture
def problem() -> Problem:
    return make_problem("digits", "cpu", steps=6, quick=True)


def gradient(problem: Problem, loss: Tensor) -> Tensor:
    problem.model.zero_grad()
    loss.backward()
    return flat_gradient(list(problem.model.parameters()))


def test_variants_take_turns_and_what_is_measured_twice_is_added() -> None:
    order: list[str] = []

    def run(name: str, watch: Clock) -> None:
        order.append(name)
        for _ in range(2):
            with watch.measure("part"):
                time.sleep(0.001)

    times = harness.alternate({name: functools.partial(run, name) for name in "ab"}, rounds=3, warm_up=2)
    assert order == [*"aabb", *"ab" * 3]
    assert all(len(own.rounds["part"]) == 3 and min(own.rounds["part"]) > 0.002 for own in times.values())
    assert times["a"].rounds["update"] == times["a"].rounds["part"]


def test_ratios_are_paired_within_a_round() -> None:
    slow_round = Times(0, {"update": [1, 2, 10]}), Times(0, {"update": [0.5, 1, 5]})
    assert slow_round[1].speedup(slow_round[0], "update") == Spread(2, 2, 2)
    assert Spread.of([1.0, 2, 3, 4, 5]) == Spread(3, 2, 4)
    assert Spread.of([7.0]) == Spread(7, 7, 7)


def test_results_say_what_they_were_measured_on(tmp_path: Path) -> None:
    arguments = argparse.Namespace(device="cpu", quick=True, out=None)
    assert harness.save("nothing", arguments, {}) is None
    arguments.out = tmp_path / "some.json"
    harness.save("some", arguments, {"seconds": [0.123456789]})
    stored = json.loads(arguments.out.read_text())
    assert stored["seconds"] == [0.12346]
    assert stored["environment"]["torch"] == torch.__version__
    assert stored["command"].startswith("python -m benchmarks.")


def test_arguments_that_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    for given, message in (
        (["--device", "cuda:0"], "choose cpu or cuda"),
        (["--rounds", "0"], "a positive number"),
    ):
        options = harness.parser("")
        options.add_argument("--rounds", type=harness.positive)
        with pytest.raises(SystemExit):
            options.parse_args(given)
        assert message in capsys.readouterr().err


def test_the_cause_of_a_failure_in_another_process() -> None:
    trace = "measure() failed:\nTraceback:\n  File x\ntorch.OutOfMemoryError: CUDA out of memory.\nSee a page about it"
    assert harness.cause(RuntimeError(trace)) == "torch.OutOfMemoryError: CUDA out of memory."
    assert harness.cause(ValueError("one\ntwo")) == "ValueError: one"


def test_costs_are_shares_of_the_exact_update() -> None:
    base = Times(0, {"forward": [2.0, 4.0], "update": [10.0, 20.0]})
    own = Times(0, {"forward": [2.0, 4.0], "update": [11.0, 22.0]})
    assert overhead.cost(own, base, "update").median == pytest.approx(0.1)
    assert overhead.without_forwards(own, base, share=0.5) == pytest.approx(0.0)


def test_memory_is_measured_against_steps_and_against_knots() -> None:
    chosen = [(case.variant, case.steps) for case in peak_memory.cases([5, 9], [2, 4, 6]) if not case.checkpointing]
    against_steps = [(name, N) for name in ("exact", "W=4, no guard", "knots=4") for N in (5, 9)]
    assert chosen == [*against_steps, ("knots=2", 9), ("knots=6", 9)]


def test_when_a_reward_was_reached() -> None:
    run = Run(seconds=[1.0, 3.0, 1.0, 1.0], updates=[0, 2, 4], rewards=[-2.0, -1.0, 0.0])
    assert reward.goals(run) == pytest.approx((0.0, -0.1))
    assert reward.reached(run, -1.5) == (1.0, 1.0)  # halfway to the second evaluation
    assert reward.reached(run, -0.5) == (3.0, 5.0)
    assert reward.reached(run, 0.1) == (float("inf"), float("inf"))
    never = float("inf")
    assert reward._median([1.0, 3.0, never]) == "3 (1 to never)"
    assert reward._median([1.0, never]) == "never (1 to never)"


def test_a_table_lies_beside_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(device="cpu", quick=True, out=tmp_path / "some.json")
    harness.publish("some", arguments, {"seconds": [1.0]}, "| 1 |", "a note")
    first, *rest = (tmp_path / "some.md").read_text().splitlines()
    assert first.startswith("    python -m benchmarks.")
    assert rest == ["", "| 1 |", "", "a note"]
    assert "| 1 |\n\na note\n" in capsys.readouterr().out
    arguments.out = None
    harness.publish("none", arguments, {}, "| 2 |", "a note")
    assert "| 2 |" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"some.json", "some.md"}


def test_a_fresh_process_returns_its_result_or_says_why_not() -> None:
    assert harness.in_fresh_process("json", "loads", s="[1, 2]") == [1, 2]
    with pytest.raises(RuntimeError, match="JSONDecodeError"):
        harness.in_fresh_process("json", "loads", s="[1, 2")


@pytest.mark.parametrize("name", SIZES)
def test_every_size_replays_its_own_rollout(name: str) -> None:
    assert QUICK.keys() == SIZES.keys()
    problem = make_problem(name, "cpu", steps=3, quick=True)
    with torch.no_grad():
        log_probs = problem.replay(problem.model)(problem.latents, problem.sigmas, problem.conditions)
    torch.testing.assert_close(log_probs, problem.log_probs)
    assert problem.size.dtype is (torch.bfloat16 if name != "digits" else torch.float32)
    knots = make_problem(name, "cpu", steps=5, quick=True).plan(3).knots
    assert (knots[0], knots[-1], len(knots)) == (0, 4, 3)


def test_a_twin_shares_parameters_and_checkpoints_change_no_gradient(problem: Problem) -> None:
    exact = gradient(problem, problem.loss(problem.replay(problem.model)))
    twin = problem.twin()
    checkpoint_blocks(twin)
    assert type(twin.blocks[0]) is not type(problem.model.blocks[0])
    assert relative_error(gradient(problem, problem.loss(problem.replay(twin))), exact) < 1e-6


@pytest.mark.parametrize("W", [2, 3, 4])
def test_the_scheme_before_the_paper_by_its_formula(problem: Problem, W: int) -> None:
    """`sum_i ((1 - w_i) J_a + w_i J_b)^T g_i` in one backward, through values whose own gradient is interpolated by index."""
    scheme = rivals.BeforePaper(problem, W, problem.model)
    problem.model.zero_grad()
    scheme.backward(scheme.cotangents(scheme.values()))
    got = flat_gradient(list(problem.model.parameters()))
    N = problem.num_steps
    v = [
        problem.call(problem.model, problem.latents[i], problem.sigmas[i].expand(4), problem.conditions)
        for i in range(N)
    ]
    interpolated = []
    for i in range(N):
        a = i - i % W
        b = min(a + W, N) - 1
        w = (i - a) / (b - a) if b > a else 0.0
        moving = (1 - w) * v[a] + w * v[b]
        interpolated.append(v[i].detach() + moving - moving.detach())
    given = iter(interpolated)
    loss = problem.loss(problem.replay(lambda **_: next(given)))
    assert relative_error(got, gradient(problem, loss)) < 1e-6
    assert scheme.passes == len({end for a in range(0, N, W) for end in (a, min(a + W, N) - 1)})


def test_a_subset_of_steps_has_their_log_probs_and_gradient(problem: Problem) -> None:
    steps = torch.tensor([0, 2, 5])
    log_probs = rivals.steps_only(problem, "aot_eager")(steps)
    every = problem.replay(problem.model)(problem.latents, problem.sigmas, problem.conditions)[:, steps]
    torch.testing.assert_close(log_probs, every)
    assert relative_error(gradient(problem, log_probs.sum()), gradient(problem, every.sum())) < 1e-6


@pytest.mark.slow
def test_the_exact_rivals_are_exact(problem: Problem) -> None:
    want = gradient(problem, problem.loss(problem.replay(problem.model)))
    for make in (rivals.compiled, rivals.compiled_blocks):
        assert relative_error(gradient(problem, problem.loss(make(problem, "aot_eager"))), want) < 1e-5


@pytest.mark.slow
def test_the_gpu_check_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "check.json"
    arguments = ["--quick", "--device", "cpu", "--sizes", "digits", "--minutes", "60", "--out", str(out)]
    assert gpu_check.main(arguments) == 0
    rows = {(part, case): verdict for part, case, _, _, verdict in json.loads(out.read_text())["rows"]}
    assert {verdict for (part, _), verdict in rows.items() if part == "gradient"} == {"ok"}
    assert [case for part, case in rows if part == "digits"] == list(gpu_check.timed(quick=True))
    assert "update" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verdict", "code"), [("ok", 0), ("left out", 2), ("FAILED", 1)], ids=["ok", "left out", "failed"]
)
def test_the_gpu_check_fails_unless_gradients_were_right(
    verdict: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "correctness", lambda *_: [["gradient", "some", "", "", verdict]])
    arguments = ["--quick", "--device", "cpu", "--minutes", "0"]
    assert gpu_check.main(arguments) == code
    shown = capsys.readouterr().out
    assert verdict in shown
    assert "no time left" in shown


def test_the_gpu_check_goes_on_after_a_variant_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("out of memory")

    made = dict.fromkeys(gpu_check.VARIANTS, fails)
    monkeypatch.setattr(gpu_check, "make_variants", lambda *_: made)
    found = gpu_check.measure("digits", "cpu", True, seconds=60.0, rounds=1)
    rows = gpu_check.rows("digits", found, quick=True)
    assert [(row[2], row[-1]) for row in rows] == [("RuntimeError: out of memory", "FAILED")] * 3


def test_the_gpu_check_says_what_it_left_out() -> None:
    rows = list(gpu_check.correctness("cpu", True, deadline=0.0)) + gpu_check.rows("small", {}, quick=False)
    assert {row[-1] for row in rows} == {"left out"}
    assert len(rows) == len(gpu_check.CHECKS) + len(gpu_check.VARIANTS)
