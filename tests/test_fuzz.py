"""A few random replay functions, always the same ones; `make fuzz` runs many others."""

import hypothesis
import pytest
import torch
from hypothesis import given, settings

from tests.fuzz import Case, cases
from tests.fuzz_check import check

always_the_same = settings(derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck))


@pytest.mark.slow
@settings(always_the_same, max_examples=100)
@given(cases())
def test_loops_in_python(case: Case) -> None:
    check(case, capture_whole=False)


@pytest.mark.slow
@settings(always_the_same, max_examples=10)
@given(cases())
def test_captured_whole(case: Case) -> None:
    check(case)
    torch._dynamo.reset()


def test_a_case_can_be_pasted() -> None:
    case = Case(steps=7, streams="guidance", cotangents=(1.0, None), cos_threshold=0.8, seed=3)
    assert repr(case) == "Case(steps=7, streams='guidance', cotangents=(1.0, None), cos_threshold=0.8, seed=3)"
    assert eval(repr(case)) == case
