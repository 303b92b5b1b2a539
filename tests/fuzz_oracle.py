"""What the gradient of a random replay must be, by plain autograd and numpy: nothing of the library is used.

Every term `J_k^T (w g_j)` is computed by itself and added in float64, so that the sum of their sizes is known: rounding errors
are measured against it.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.fuzz import Call, Case, Replay
from tests.oracle import hat_weights

CLEARLY = 1e-4  # scores are compared with thresholds and with each other; closer ones may be rounded either way


@dataclass(frozen=True)
class Expected:
    """Attributes:
    terms: of each parameter, flat, in float64 `[terms, elements]`.
    is_sure: whether no decision was so close that rounding could turn it.
    """

    terms: list[Tensor]
    is_sure: bool

    @property
    def gradients(self) -> list[Tensor]:
        return [terms.sum(0) for terms in self.terms]

    def sizes(self, among: Sequence[Tensor]) -> list[Tensor]:
        """The sum of the terms' norms, for each parameter, over the elements that are `among` some."""
        return [terms[:, mask].norm(dim=1).sum() for terms, mask in zip(self.terms, among, strict=True)]


@dataclass(frozen=True)
class _Recorded:
    call: Call
    time: Any  # [B] or [1], in the precision in which weights are computed
    run: Callable[[], list[Tensor]]
    leaves: list[Tensor]


def expected(replay: Replay) -> Expected:
    recorded: list[_Recorded] = []
    with _recording(replay, recorded):
        args, kwargs = replay.call
        loss = replay.loss(replay.fn(*args, **kwargs))
    steps = [step for step in recorded if step.call.kind == "step"]
    leaves = [leaf for step in steps for leaf in step.leaves]
    found = iter(torch.autograd.grad(loss, leaves, allow_unused=True))
    cotangents = {id(step): [_or_zeros(next(found), leaf) for leaf in step.leaves] for step in steps}
    torch.manual_seed(replay.case.seed)
    terms: list[list[Tensor]] = [[] for _ in replay.parameters]
    is_sure = True
    for stream in dict.fromkeys(step.call.stream for step in steps):
        own = [step for step in steps if step.call.stream == stream]
        carried, clear = _carried(replay.case, own)
        is_sure &= clear
        for i, weights in carried.items():
            values = own[i].run()
            for j, w in weights.items():
                given = [_times(w, cotangent) for cotangent in cotangents[id(own[j])]]
                gradients = torch.autograd.grad(values, replay.parameters, given, retain_graph=True, allow_unused=True)
                for n, (gradient, parameter) in enumerate(zip(gradients, replay.parameters, strict=True)):
                    terms[n].append(_or_zeros(gradient, parameter).double().flatten())
    return Expected([torch.stack(own) for own in terms], is_sure)


class _recording:  # noqa: N801
    """Within the block, calls of the models return leaves, and are noted."""

    def __init__(self, replay: Replay, recorded: list[_Recorded]) -> None:
        self._replay, self._recorded, self._calls = replay, recorded, iter(replay.case.calls)

    def __enter__(self) -> None:
        for model in self._replay.models:
            model.body = self._noting(model.body)  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        for model in self._replay.models:
            del model.body

    def _noting(self, own: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def body(z: Tensor, t: Tensor, *prompt: Tensor) -> list[Tensor]:
            call, z = next(self._calls), z.detach().clone()
            with torch.no_grad():
                values = own(z, t, *prompt)
            if not torch.is_grad_enabled():
                return values
            leaves = [value.clone().requires_grad_() for value in values]
            time = t.reshape(-1).to(
                torch.promote_types(t.dtype, torch.float32) if t.is_floating_point() else torch.float32
            )
            self._recorded.append(_Recorded(call, time.numpy(), lambda: own(z, t, *prompt), leaves))
            return [leaf.clone() for leaf in leaves]

        return body


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _times(weight: Any, cotangent: Tensor) -> Tensor:
    """A cotangent times its weight for each sample; what weighs nothing adds nothing, also where it is not finite."""
    w = torch.from_numpy(weight).view(-1, *[1] * (cotangent.dim() - 1))
    return torch.where(w == 0, 0, cotangent.double() * w).to(cotangent.dtype)


def _carried(case: Case, steps: Sequence[_Recorded]) -> tuple[dict[int, dict[int, Any]], bool]:
    """For each step that keeps a VJP, the steps that it carries and their weights `[B]`; and whether that is clear."""
    knots = case.knots(len(steps))
    carried: dict[int, dict[int, Any]] = {k: {k: np.ones(1)} for k in knots}
    segments = [(a, b) for a, b in itertools.pairwise(knots) if b - a > 1]
    if not segments:
        return carried, True
    times = np.stack([step.time for step in steps])
    if case.weights == "index":
        times = np.arange(len(steps), dtype=np.float64)[:, None]
    weights = {
        j: _weights(times[j], times[list(knots)], case.degree) for a, b in segments for j in range(a + 1, b)
    }  # [K, B]
    is_known = bool(np.isfinite(_velocities(steps)).all())
    scores = [
        min(_agreement(steps, j, knots, weights[j]) for j in range(a + 1, b)) if is_known else math.nan
        for a, b in segments
    ]
    keep, clear = _kept(case, segments, scores)
    drawn = torch.rand(2, len(segments)).numpy() if case.debias is not None else np.ones((2, len(segments)))
    for s, (a, b) in enumerate(segments):
        n = b - a - 1
        chosen = int(sum(drawn[1, s] >= sum([1 / n] * (m + 1)) for m in range(n - 1)))
        for j in range(a + 1, b):
            factor = 0.0 if keep[s] else 1.0
            if keep[s] and case.debias is not None and drawn[0, s] < case.debias and j == a + 1 + chosen:
                factor = n / case.debias
            if factor:
                carried.setdefault(j, {})[j] = np.full(1, factor)
            for k, weight in zip(knots, (1 - factor) * weights[j], strict=True):
                if weight.any():
                    carried[k][j] = weight
    return carried, clear


def _weights(t: Any, knots: Any, degree: int) -> Any:
    """Weights `[K, B]` of knots at `[K, B]` for a step at `[B]`."""
    if degree == 1:
        return _shared(hat_weights, t, knots)
    return _shared(_lagrange, t, knots)


def _shared(rule: Callable[..., Any], t: Any, knots: Any) -> Any:
    """By a rule for times that differ; knots at one time share its weight."""
    weights = np.zeros(knots.shape)
    for b in range(knots.shape[1]):
        distinct, place, count = np.unique(knots[:, b], return_inverse=True, return_counts=True)
        own = rule(t[None, b : b + 1], distinct[:, None])[0, :, 0]
        weights[:, b] = (own / count)[place]
    return weights


def _lagrange(t: Any, knots: Any) -> Any:
    """Weights `[1, K, 1]` by a parabola through the two neighbours in time and the nearest of the other knots."""
    weights = np.zeros((1, len(knots), 1))
    x, nodes = np.clip(t[0, 0], knots.min(), knots.max()), knots[:, 0]
    upper = int(np.searchsorted(nodes, x))
    if nodes[upper] == x or len(nodes) < 3:
        return hat_weights(t, knots)
    chosen = [upper - 1, upper]
    below = x - nodes[upper - 2] if upper >= 2 else np.inf
    above = nodes[upper + 1] - x if upper + 1 < len(nodes) else np.inf
    chosen.append(upper - 2 if below <= above else upper + 1)
    for k in chosen:
        others = [nodes[m].astype(np.float64) for m in chosen if m != k]
        weights[0, k, 0] = np.prod([(x - other) / (nodes[k] - other) for other in others])
    return weights


def _velocities(steps: Sequence[_Recorded]) -> Any:
    """`[N, B, *]`, all values of a step as one vector for each sample."""
    rows = [torch.cat([leaf.detach().double().reshape(len(leaf), -1) for leaf in step.leaves], 1) for step in steps]
    return torch.stack(rows).numpy()


def _agreement(steps: Sequence[_Recorded], j: int, knots: Sequence[int], weights: Any) -> float:
    v = _velocities(steps)
    interpolated = (weights[:, :, None] * v[list(knots)]).sum(0)
    norms = np.linalg.norm(v[j], axis=1) * np.linalg.norm(interpolated, axis=1)
    return float(((v[j] * interpolated).sum(1) / np.where(norms == 0, 1, norms)).mean())


def _kept(case: Case, segments: Sequence[tuple[int, int]], scores: Sequence[float]) -> tuple[list[bool], bool]:
    """Which segments are interpolated, and whether that is clear."""
    threshold, share = case.cos_threshold, case.jagg_frac
    is_capped = share is not None and share < 1
    if threshold is None and not is_capped:
        return [True] * len(scores), True
    keep = [not math.isnan(score) and (threshold is None or score >= threshold) for score in scores]
    clear = threshold is None or all(math.isnan(score) or abs(score - threshold) > CLEARLY for score in scores)
    if share is not None and is_capped:
        sizes = [b - a - 1 for a, b in segments]
        room = math.floor(share * sum(sizes) + 1e-9)
        best_first = sorted((s for s, kept in enumerate(keep) if kept), key=lambda s: -scores[s])
        clear &= all(scores[s] - scores[r] > CLEARLY for s, r in itertools.pairwise(best_first)) or room in (
            0,
            sum(sizes),
        )
        for s in best_first:
            room -= sizes[s]
            keep[s] = room >= 0
    return keep, clear
