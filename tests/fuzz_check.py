"""Run a random replay every way that the library has, and compare.

`python -m tests.fuzz_check --cases 2000 --seed 0` (`make fuzz`) checks many, one of three captured whole too, and sums up.
"""

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import psutil
import torch
from torch import Tensor

import jagg_fx
from jagg_fx.errors import JaggError
from tests.fuzz import Case, Replay, cases
from tests.fuzz_oracle import Expected, expected

Result = tuple[list[Tensor], list[Tensor]]  # outputs and gradients


def check(case: Case, capture_whole: bool = True) -> str:
    """What came of it: "equal", "unsure" where a decision was too close to call, or the class of a refusal.

    Raises:
        AssertionError: a gradient or a value is not what it must be, or one way refuses what another one takes.
    """
    replay = Replay.of(case)
    ways = _ways(replay, capture_whole)
    announced = refusals(case)
    if announced:
        outcomes = {name: _outcome(way) for name, way in ways.items()}
        classes = {name: type(outcome).__name__ for name, outcome in outcomes.items()}
        assert set(classes.values()) <= announced, f"announced is {announced}, and these came: {classes}"
        return classes["reference"]
    plain, _ = replay.run(replay.fn)
    want = expected(replay)
    for name, way in ways.items():
        outcome = _outcome(way)
        if isinstance(outcome, JaggError):
            assert type(outcome).__name__ in refusals_of(name, case), f"{name} refuses: {outcome!r}"
        else:
            _compare_values(name, outcome, plain)
            if want.is_sure:
                _compare_gradients(name, replay, outcome, want)
    return "equal" if want.is_sure else "unsure"


def refusals(case: Case) -> set[str]:
    """The errors that the documentation announces for a case, whatever the way."""
    found = set()
    if case.loop == "chained" and case.chain == "error" and case.steps > 1:
        found.add("ChainedStatesError")
    if case.plan == "even" and any(n < case.size for n in case.lengths):
        found.add("PlanError")
    return found


def refusals_of(way: str, case: Case) -> set[str]:
    """Those of one way alone."""
    if way == "wrap" and case.schedule in ("repeated", "constant"):
        return {"StepOrderError"}
    # Dynamo of torch 2.13 cannot reuse the trace of a call that takes an object; steps of one denoiser are then traced each.
    if way == "capture='whole'" and case.condition == "dataclass" and case.streams == "experts":
        return {"DynamoFailedError"}
    return set()


def _ways(replay: Replay, capture_whole: bool) -> dict[str, Callable[[], Result]]:
    by_denoiser = _transformed(replay, lowering="eager", capture="denoiser")
    ways = {
        "reference": lambda: _run(replay, _transformed(replay, lowering="reference")),
        "capture='denoiser'": lambda: _run(replay, by_denoiser),
        "capture='denoiser', the knots foreseen": lambda: _run(replay, by_denoiser),
    }
    if capture_whole and can_be_captured_whole(replay.case):
        ways["capture='whole'"] = lambda: _run(replay, _transformed(replay, lowering="eager", capture="whole"))
    if can_be_wrapped(replay.case):
        ways["wrap"] = lambda: _run_wrapped(replay)
    return ways


def can_be_captured_whole(case: Case) -> bool:
    """The unbiased option draws for each stream in its backward there: in another order than the oracle."""
    return case.debias is None or len(case.lengths) == 1


def can_be_wrapped(case: Case) -> bool:
    """A loop that has one denoiser, uses every call, and asks for nothing that `wrap` lacks.

    The unbiased option draws group by group there: other numbers than those that the oracle draws.
    """
    return (
        case.streams in ("one", "reference", "guidance")
        and case.loop not in ("unused", "chained")
        and None not in case.cotangents
        and case.debias is None
    )


def _transformed(replay: Replay, **options: Any) -> Any:
    case = replay.case
    return jagg_fx.transform(replay.fn, denoiser=replay.models, chain=case.chain, **case.options, **options)


def _run(replay: Replay, transformed: Any) -> Result:
    result = replay.run(transformed)
    knots = [plan.knots for plan in transformed.plans]
    assert knots == [replay.case.knots(n) for n in replay.case.lengths], f"the knots are {knots}"
    return result


def _run_wrapped(replay: Replay) -> Result:
    case = replay.case
    plain = replay.train(replay.models)
    for parameter in replay.parameters:
        parameter.grad = None
    wrapped = jagg_fx.wrap(
        replay.models[0],
        num_steps=case.lengths[0],
        shuffled=case.schedule == "shuffled",
        calls_per_step=len(case.lengths),
        **case.options,
    )
    try:
        results = replay.train([wrapped])
    finally:
        wrapped.reset()
    assert all(map(_same, results, plain)), "wrap: values differ"
    return [], [torch.zeros_like(p) if p.grad is None else p.grad for p in replay.parameters]


def _outcome(way: Callable[[], Result]) -> Result | JaggError:
    try:
        return way()
    except JaggError as error:
        return error


def _compare_values(name: str, got: Result, plain: list[Tensor]) -> None:
    outputs, _ = got
    assert not outputs or len(outputs) == len(plain), f"{name}: another number of outputs"
    assert all(map(_same, outputs, plain)), f"{name}: values differ"


def _compare_gradients(name: str, replay: Replay, got: Result, want: Expected) -> None:
    _, gradients = got
    masks = [total.isfinite() for total in want.gradients]
    checked = zip(gradients, want.gradients, masks, want.sizes(masks), strict=True)
    for n, (gradient, total, mask, size) in enumerate(checked):
        gradient = gradient.double().flatten()
        assert torch.equal(gradient.isfinite(), mask), (
            f"{name}: parameter {n} is not finite elsewhere than it should be"
        )
        error = (gradient - total)[mask].norm()
        assert error <= tolerance(name, replay.case) * size, (
            f"{name}: parameter {n} is off by {error:.3g} of {size:.3g}"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(_without_nan(a), _without_nan(b))


def _without_nan(values: Tensor) -> Tensor:
    return values.masked_fill(values.isnan(), 0)


def tolerance(name: str, case: Case) -> float:
    """Relative to the sum of the terms' sizes: how often a term is rounded on its way, times the size of one rounding.

    A backward through the model rounds at most 16 times in a row, the sum over the knots once for each. The sum of cotangents is
    rounded once, but by the eager twin once for each step. Weights are computed in float32 unless times are in float64.
    """
    knots = max(len(case.knots(n)) for n in case.lengths)
    roundings = 16 + knots + (max(case.lengths) if name == "reference" else 1)
    in_float32 = case.times == "integers" or case.weights == "index"
    eps = torch.finfo(getattr(torch, case.dtype)).eps
    return roundings * (max(eps, torch.finfo(torch.float32).eps) if in_float32 else eps)


CHUNK = 50  # cases between two lines of progress, and between two searches for the simplest case that fails


def fuzz(count: int, seed: int, whole_every: int) -> int:
    """Check so many cases, print a summary, and return the number of failures. One that is known is not searched for again."""
    outcomes: Counter[str] = Counter()
    failures: dict[str, Case] = {}  # the simplest case found, by what it says
    newest: list[tuple[str, Case]] = []
    begin = time.monotonic()

    def attempt(case: Case) -> None:
        try:
            outcome = check(case, capture_whole=case.seed % whole_every == 0)
        except Exception as error:
            said = re.sub(r"\d[\d.e+-]*", "#", f"{type(error).__name__}: {error}"[:200])
            outcome = "failed"
            if said not in failures:
                newest.append((said, case))
                raise
        finally:
            torch._dynamo.reset()
        outcomes[outcome] += 1 if not newest else 0

    while outcomes.total() < count:
        newest.clear()
        chunk = hypothesis.settings(
            max_examples=min(CHUNK, count - outcomes.total()),
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        try:
            hypothesis.seed(1000 * seed + outcomes.total() + len(failures))(chunk(hypothesis.given(cases())(attempt)))()
        except Exception:
            if not newest:
                raise
            said, case = newest[-1]  # the last one that hypothesis runs is the simplest
            failures[said] = case
            outcomes["failed"] += 1
            print(f"FAILED {case!r}\n       {said}", flush=True)
        memory = psutil.Process().memory_info().rss / 2**20
        print(f"{outcomes.total()} of {count}, {time.monotonic() - begin:.0f} s, {memory:.0f} MiB", flush=True)
    print(f"\n{outcomes.total()} cases in {time.monotonic() - begin:.0f} s, seed {seed}")
    for outcome, number in outcomes.most_common():
        print(f"{number:6d}  {outcome}")
    for said, case in failures.items():
        print(f"\n{said}\n    python -m tests.fuzz_check --case {str(case)!r}")
    return len(failures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run random replay functions every way, and compare.")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whole-every", type=int, default=3, help="one of so many cases is compiled whole too")
    parser.add_argument("--case", help="the repr of one case, to check it alone")
    arguments = parser.parse_args()
    if arguments.case:
        print(check(eval(arguments.case)))
    else:
        raise SystemExit(bool(fuzz(arguments.cases, arguments.seed, arguments.whole_every)))
