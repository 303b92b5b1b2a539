"""A few random replay functions, always the same ones; `make fuzz` runs many others."""

from collections import Counter

import hypothesis
import pytest
import torch
from hypothesis import given, settings

from tests.fuzz import Case, cases
from tests.fuzz_check import can_be_captured_whole, check

always_the_same = settings(derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck))


@pytest.mark.slow
def test_loops_in_python() -> None:
    outcomes: Counter[str] = Counter()

    @settings(always_the_same, max_examples=100)
    @given(cases())
    def run(case: Case) -> None:
        outcomes[check(case, capture_whole=False)] += 1

    run()
    assert outcomes["equal"] >= 0.8 * outcomes.total(), outcomes


@pytest.mark.slow
def test_captured_whole() -> None:
    captured: Counter[str] = Counter()

    @settings(always_the_same, max_examples=10)
    @given(cases())
    def run(case: Case) -> None:
        captured[check(case)] += can_be_captured_whole(case)
        torch._dynamo.reset()

    run()
    assert captured["equal"] >= 5, captured


def test_a_case_can_be_pasted() -> None:
    case = Case(steps=7, streams="guidance", cotangents=(1.0, None), cos_threshold=0.8, seed=3)
    assert repr(case) == "Case(steps=7, streams='guidance', cotangents=(1.0, None), cos_threshold=0.8, seed=3)"
    assert eval(repr(case)) == case
