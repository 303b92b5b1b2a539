"""The compatibility table: every feature of `matrix.py` for every family of the zoo.

`make test` runs a covering subset. `make test-matrix` runs all cells and the Inductor diagonal, and writes what passed to
`compatibility.json` and into the README.
"""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import jagg_fx
from jagg_fx.models.zoo import Family, zoo
from tests.compatibility import README, RESULTS, cells_of, load, table
from tests.matrix import FEATURES, Case, Feature, covering_subset, diagonal, full_fine_tuning
from tests.problems import Problem, relative_error

SUBSET, DIAGONAL = covering_subset(), diagonal()


def _cells() -> list[Any]:
    return [
        pytest.param(
            family,
            feature,
            id=f"{name}-{feature.name}",
            marks=[] if (name, feature.name) in SUBSET else pytest.mark.matrix,
        )
        for feature in FEATURES
        for name, family in zoo.items()
    ]


def _around(case: Case) -> Any:
    return case.around() if case.around else contextlib.nullcontext()


def _plain_values(problem: Problem) -> list[Tensor]:
    with torch.no_grad():
        outputs = torch.compile(problem.fn, backend="aot_eager", fullgraph=True)(*problem.args)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


@pytest.mark.parametrize(("family", "feature"), _cells())
def test_cell(family: Family, feature: Feature, record_property: Any) -> None:
    record_property("cell", [feature.name, family.name, "eager"])
    case = feature.make(family)
    problem = case.problem
    with _around(case):
        if family.name in feature.unavailable:
            with pytest.raises((AttributeError, AssertionError, RuntimeError)):
                problem.run(problem.fn)
            return
        exact_values, exact = problem.run(problem.fn)
        _, want = problem.run(jagg_fx.transform(problem.fn, lowering="reference", cos_threshold=None, **case.options))
        transformed = jagg_fx.transform(problem.fn, lowering="eager", cos_threshold=None, **case.options)
        values, got = problem.run(transformed)
    assert relative_error(got.float(), want.float()) < case.tolerance
    assert relative_error(got.float(), exact.float()) > max(1e-2, 2 * case.tolerance), "nothing was approximated"
    assert all(torch.equal(a, b) for a, b in zip(values, exact_values, strict=True))
    if not case.options and case.around is None and not _switches_adapters(feature):
        assert all(torch.equal(a, b) for a, b in zip(values, _plain_values(problem), strict=True))
    assert all(plan.segments for plan in transformed.plans)
    assert transformed.report.notes == ()


def _switches_adapters(feature: Feature) -> bool:
    return feature.name.startswith("KL reference")  # which plain torch.compile cannot capture


@pytest.mark.matrix
@pytest.mark.inductor
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", sorted(DIAGONAL), ids="-".join)
def test_through_inductor(cell: tuple[str, str], record_property: Any) -> None:
    name, feature_name = cell
    record_property("cell", [feature_name, name, "inductor"])
    case = next(feature for feature in FEATURES if feature.name == feature_name).make(zoo[name])
    problem = case.problem
    with _around(case):
        exact_values, _ = problem.run(problem.fn)
        _, want = problem.run(jagg_fx.transform(problem.fn, lowering="reference", cos_threshold=None, **case.options))
        values, got = problem.run(jagg_fx.transform(problem.fn, cos_threshold=None, **case.options))
    for own, theirs in zip(values, exact_values, strict=True):
        assert relative_error(own.float(), theirs.float()) < max(case.tolerance, 1e-4)
    if not case.is_bfloat16:
        assert relative_error(got, want) < 1e-4
        return
    # Fused kernels round to bfloat16 at other places than eager does: neither is nearer to the truth.
    single = full_fine_tuning(zoo[name]).problem
    _, truth = single.run(jagg_fx.transform(single.fn, lowering="reference", cos_threshold=None))
    assert relative_error(got.float(), truth) < 1.5 * relative_error(want.float(), truth) + 1e-2


def test_the_committed_table_is_whole_and_in_the_readme() -> None:
    results = load(RESULTS)
    through_inductor = {(feature, family, "inductor") for family, feature in DIAGONAL}
    assert {tuple(cell) for cell in results["passed"]} >= set(cells_of(FEATURES, zoo)) | through_inductor
    assert not results["failed"]
    assert table(results) in README.read_text()
