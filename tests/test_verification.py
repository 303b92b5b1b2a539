"""`verify=` finds what it is for: a gradient that is far from the exact one, and one that is wrong."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jagg_fx
from jagg_fx import errors
from jagg_fx.passes import interpolate_vjps
from jagg_fx.verification import Agreement, Verification, group_of
from tests.problems import MLP, Problem, path, per_sample_times, reference_model

PROBLEMS = [per_sample_times, reference_model]


def _gradient(problem: Problem, fn: Callable[..., Any]) -> Tensor:
    problem.model.zero_grad()
    outputs = fn(*problem.args)
    (outputs if isinstance(outputs, Tensor) else outputs[0]).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in problem.parameters if p.grad is not None])


def _verified(fast: Any) -> Verification:
    assert fast.verification is not None
    return fast.verification  # type: ignore[no-any-return]


@pytest.mark.parametrize("capture", ["whole", "denoiser"])
@pytest.mark.parametrize("make", PROBLEMS)
def test_it_measures_what_a_comparison_by_hand_does(make: Callable[..., Problem], capture: str) -> None:
    problem = make(torch.float64)
    fast = jagg_fx.transform(problem.fn, lowering="eager", cos_threshold=None, capture=capture, verify=True)
    assert fast.verification is None
    got, exact = _gradient(problem, fast), _gradient(problem, problem.fn)
    found = _verified(fast)
    assert found.exact.cosine == pytest.approx(float(torch.cosine_similarity(got, exact, dim=0)))
    assert found.exact.relative_error == pytest.approx(float((got - exact).norm() / exact.norm()))
    assert found.exact.relative_error > 1e-3
    assert found.reference is not None
    assert found.reference.relative_error < 1e-10
    assert set(found.groups) == {group_of(name) for name, _ in problem.model.named_parameters()}
    assert "verified" in str(fast.report)


def test_it_leaves_gradients_statistics_and_random_state_alone() -> None:
    problem = per_sample_times(torch.float64)
    plain = jagg_fx.transform(problem.fn, lowering="eager")
    checked = jagg_fx.transform(problem.fn, lowering="eager", verify=True)
    torch.manual_seed(3)
    want, then = _gradient(problem, plain), torch.rand(())
    torch.manual_seed(3)
    got, now = _gradient(problem, checked), torch.rand(())
    assert torch.equal(got, want)
    assert torch.equal(then, now)
    assert checked.stats == plain.stats


def test_every_nth_call_is_verified() -> None:
    problem = per_sample_times(torch.float64)
    fast = jagg_fx.transform(problem.fn, lowering="eager", verify=3)
    seen = []
    for _ in range(7):
        with torch.no_grad():
            fast(*problem.args)  # not counted
        _gradient(problem, fast)
        seen.append(fast.verification and fast.verification.call)
    assert seen == [None, None, 3, 3, 3, 6, 6]
    fast.verify(False)
    assert fast.verification is None


def test_it_warns_past_its_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = per_sample_times(torch.float64)
    warned: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("jagg_fx.verification"), "warning", lambda text, *args: warned.append(text % args)
    )
    for tolerance, count in ((1e-6, 1), (10.0, 1)):
        fast = jagg_fx.transform(
            problem.fn, lowering="eager", cos_threshold=None, verify=True, verify_tolerance=tolerance
        )
        _gradient(problem, fast)
        assert len(warned) == count
    assert "past verify_tolerance=1e-06" in warned[0]


def test_a_wrong_rewrite_raises_out_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = per_sample_times(torch.float64)
    compose = interpolate_vjps._compose

    def forgetful(knot: Any, *args: Any) -> None:
        if knot.index:
            compose(knot, *args)

    monkeypatch.setattr(interpolate_vjps, "_compose", forgetful)
    fast = jagg_fx.transform(problem.fn, lowering="eager", cos_threshold=None, verify=True)
    with pytest.raises(errors.VerificationError, match="call 1 differs from the reference's"):
        _gradient(problem, fast)


def test_autocast_around_the_call_is_the_checks_too() -> None:
    problem = per_sample_times(torch.float32)
    seen = []

    def fn(*args: Tensor) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return problem.fn(*args)

    fast = jagg_fx.transform(fn, lowering="eager", capture="denoiser", cos_threshold=None, verify=True)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = fast(*problem.args)
    assert seen == [True]
    outputs.square().sum().backward()  # outside of it
    assert seen == [True] * 6  # rewritten, exact, and three times by the reference
    assert _verified(fast).reference is not None


def test_what_has_changed_or_is_not_finite_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("jagg_fx.verification"), "warning", lambda text, *args: warned.append(text % args)
    )
    problem = per_sample_times(torch.float64)
    fast = jagg_fx.transform(problem.fn, lowering="eager", verify=True)
    (fast(*problem.args).sum() * float("inf")).backward()
    assert "not finite" in warned.pop()
    offset = torch.zeros(())
    shifted = jagg_fx.transform(lambda z, t, offset: problem.fn(z, t) + offset, lowering="eager", verify=True)
    outputs = shifted(*problem.args, offset)
    offset += 1
    outputs.sum().backward()
    assert "changed in place" in warned.pop()
    assert shifted.verification is None


def test_states_that_are_cut_are_cut_in_the_exact_gradient() -> None:
    model, (states, times) = MLP().double(), path(torch.float64)

    def sample(z: Tensor, t: Tensor) -> Tensor:
        for i in range(4):
            z = z - 0.1 * model(z, t[i].expand(z.shape[0]))
        return z

    fast = jagg_fx.transform(sample, W=2, lowering="eager", chain="stop", verify=True)
    fast(states[0], times).square().sum().backward()
    assert _verified(fast).exact.relative_error < 1e-10


def test_the_reference_is_not_compared_with_itself() -> None:
    problem = per_sample_times(torch.float64)
    fast = jagg_fx.transform(problem.fn, lowering="reference", cos_threshold=None, verify=True)
    _gradient(problem, fast)
    assert _verified(fast).reference is None
    assert _verified(fast).exact.relative_error > 1e-3


@pytest.mark.parametrize(
    "options",
    [{"verify": -1}, {"verify": "yes"}, {"verify": True, "verify_tolerance": 0}, {"verify": 2, "debias": 0.5}],
)
def test_what_cannot_be_verified_is_refused(options: dict[str, Any]) -> None:
    (name, value) = list(options.items())[-1]
    with pytest.raises(errors.OptionError, match=rf"jagg_fx\.transform\(.*{name}={value!r}"):
        jagg_fx.transform(per_sample_times(torch.float64).fn, **options)


def test_agreement_of_zeros() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    assert Agreement.of([zero], [zero]) == Agreement(1.0, 0.0)
    assert Agreement.of([one], [zero]) == Agreement(0.0, float("inf"))
    assert Agreement.of([zero], [one]) == Agreement(0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("blocks.3.attn.to_q.weight", "blocks.3"),
        ("base_model.model.transformer_blocks.0.ff.lora_A.default.weight", "base_model.model.transformer_blocks.0"),
        ("proj_out.weight", "proj_out"),
        ("scale", "scale"),
        ("argument 2", "argument 2"),
    ],
)
def test_parameters_are_grouped_by_block(name: str, group: str) -> None:
    assert group_of(name) == group
