import torch

import jagg_fx
from jagg_fx.guard import DEFAULT_COS_THRESHOLD
from tests.problems import per_sample_times, reference_model


def test_it_claims_nothing_before_the_first_backward_graph() -> None:
    problem = per_sample_times(torch.float32)
    transformed = jagg_fx.transform(problem.fn, lowering="eager")
    for _ in range(2):
        report = transformed.report.to_dict()
        asked = {"weights", "degree", "cos_threshold", "jagg_frac", "debias", "chain", "lowering", "capture"}
        assert set(report) == {"function", "denoisers", "torch", "rewritten_graphs", "notes", "disabled_passes"} | asked
        assert report["rewritten_graphs"] == 0
        assert "nothing rewritten yet" in str(transformed.report)
        with torch.no_grad():  # compiles, but no backward
            transformed(*problem.args)


def test_it_says_what_was_rewritten() -> None:
    problem = per_sample_times(torch.float32)
    transformed = jagg_fx.transform(problem.fn, lowering="eager")
    problem.run(transformed)
    assert transformed.report.to_dict() == {
        "function": "fn",
        "denoisers": ["MLP"],
        "notes": [],
        "chain": "error",
        "weights": "time",
        "degree": 1,
        "cos_threshold": DEFAULT_COS_THRESHOLD,
        "jagg_frac": None,
        "debias": None,
        "lowering": "eager",
        "capture": "whole",
        "disabled_passes": [],
        "torch": torch.__version__,
        "rewritten_graphs": 1,
        "steps": 9,
        "streams": [
            {
                "denoiser": "MLP",
                "steps": 9,
                "plan": "paper(W=4)",
                "predicted_error": None,
                "groups": [[0, 3], [4, 7], [8, 8]],
                "knots": [0, 3, 4, 7, 8],
                "interpolated": [1, 2, 5, 6],
                "arguments": ["t", "z"],
                "cut": [],
            }
        ],
        "backward_passes_before": 9,
        "backward_passes_after": 5,
        "tensors_covered": 4,
        "elements_covered": sum(p.numel() for p in problem.model.parameters()),
        "left_exact": ["step 8: alone in its group"],
    }
    table = str(transformed.report)
    for line in ("groups             0-3, 4-7, 8", "backward passes    9 -> 5", "step 8: alone in its group"):
        assert line in table


def test_it_names_calls_without_a_gradient_and_plans_that_keep_everything() -> None:
    problem = reference_model(torch.float32)
    transformed = jagg_fx.transform(problem.fn, W=2, lowering="eager")
    problem.run(transformed)
    assert transformed.report.exact() == [
        "every step: no group has an intermediate step",
        "9 calls of the denoiser: no gradient reaches them",
    ]


def test_the_reference_reports_the_same() -> None:
    problem = reference_model(torch.float32)
    reports = []
    for lowering in ("eager", "reference"):
        transformed = jagg_fx.transform(problem.fn, lowering=lowering)
        problem.run(transformed)
        reports.append(transformed.report.to_dict() | {"lowering": None})
    assert reports[0] == reports[1]
