"""Numbers about each backward, read without slowing the step.

The compiled backward packs them into one small vector and hands it out as the gradient of a *probe*, an extra input of the
graph that no value depends on: no operator with side effects, no synchronisation. A hook on the graph's autograd node keeps
the vector on its device; nothing waits for it until `transformed.stats` is read.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jagg_fx.plan import Plan, Segment

Plans = tuple[Plan, ...]  # one for each stream

FIELDS_PER_STEP = 3  # a norm for each step; a score and a decision for each segment, of which there are fewer


@torch.library.custom_op("jagg_fx::statistics", mutates_args=())
def statistics_slot(probe: Tensor) -> Tensor:
    """Where a step's backward could report: zeros, which the pass `record_statistics` replaces in the joint graph."""
    return torch.zeros_like(probe)


@statistics_slot.register_fake
def _(probe: Tensor) -> Tensor:
    return torch.empty_like(probe)


SLOT = torch.ops.jagg_fx.statistics.default  # the slot as the graphs hold it


def pack(norms: Tensor, scores: Tensor, keep: Tensor) -> Tensor:
    """Numbers of one stream `[|g_i| of N steps, score of S segments, whether each was interpolated]` in float32."""
    return torch.cat([norms.float(), scores.float(), keep.float()])


def pad(packed: Tensor, size: int) -> Tensor:
    """The numbers of all streams that have segments, stream after stream, with zeros up to `[size]`."""
    return torch.nn.functional.pad(packed, (0, size - packed.shape[0]))


@dataclass(frozen=True)
class Numbers:
    """Numbers of one backward, or means over several.

    Attributes:
        jagg_frac: share of the intermediate steps that were interpolated.
        exact_segments: number of segments whose steps got their exact VJPs.
        scores: score of each segment: the least agreement (cosine) of a step's velocity with its interpolation.
        cotangent_norms: `|g_i|` of every step, stream after stream (those with segments).
        kept: whether each segment was interpolated (the share of backwards, in means).
    """

    jagg_frac: float
    exact_segments: float
    scores: dict[Segment, float]
    cotangent_norms: tuple[float, ...]
    kept: dict[Segment, float]


@dataclass(frozen=True)
class Statistics:
    """What `transformed.stats` gives.

    Attributes:
        backwards: how many backwards `mean` is over: those since the first one under the present plan.
        last: numbers of the last backward.
        mean: means over them.
        plans: under which they ran, one for each stream.
    """

    backwards: int
    last: Numbers
    mean: Numbers
    plans: Plans


class Recorder:
    """Keeps the packed numbers of the last backward and their sum, on their device."""

    def __init__(self) -> None:
        self._plans: Plans | None = None
        self._count = 0
        self._last = self._sum = torch.zeros(0)
        self._aside: Recorder | None = None

    @contextlib.contextmanager
    def aside(self) -> Iterator["Recorder"]:
        """Within the block, what is recorded goes into another recorder."""
        self._aside = other = Recorder()
        try:
            yield other
        finally:
            self._aside = None

    def record(self, plans: Plans, packed: Tensor) -> None:
        if self._aside is not None:
            self._aside.record(plans, packed)
            return
        packed = packed.detach()
        if plans != self._plans or packed.shape != self._sum.shape:
            self._plans, self._count, self._sum = plans, 0, torch.zeros_like(packed)
        self._count, self._last, self._sum = self._count + 1, packed.clone(), self._sum + packed

    def read(self) -> Statistics | None:
        """The statistics so far; waits for the device. None before the first backward with intermediate steps."""
        if self._plans is None:
            return None
        mean = self._sum / self._count
        return Statistics(self._count, _unpack(self._plans, self._last), _unpack(self._plans, mean), self._plans)


def _unpack(plans: Plans, packed: Tensor) -> Numbers:
    numbers = iter(packed.tolist())
    norms: list[float] = []
    scores: dict[Segment, float] = {}
    kept: dict[Segment, float] = {}
    for stream, plan in enumerate(plans):
        if plan.segments:
            segments = [replace(segment, stream=stream) for segment in plan.segments]
            norms += itertools.islice(numbers, plan.num_steps)
            scores |= zip(segments, itertools.islice(numbers, len(segments)), strict=True)
            kept |= zip(segments, itertools.islice(numbers, len(segments)), strict=True)
    interpolated = sum(keep * len(segment.intermediate) for segment, keep in kept.items())
    return Numbers(
        jagg_frac=interpolated / sum(len(segment.intermediate) for segment in kept),
        exact_segments=len(kept) - math.fsum(kept.values()),
        scores=scores,
        cotangent_norms=tuple(norms),
        kept=kept,
    )


def make_probe(size: int, device: torch.device) -> Tensor:
    """The extra input of a graph; `FIELDS_PER_STEP` elements for each call of the denoiser are enough."""
    return torch.zeros(size, device=device, requires_grad=torch.is_grad_enabled())


def on_backward(outputs: Iterable[Any], probe: Tensor, record: Any) -> None:
    """Call `record(packed)` whenever a backward through the graph that made `outputs` computes the probe's gradient.

    A hook on the probe itself would miss `torch.autograd.grad(loss, parameters)`, which does not ask for that gradient.
    """
    pending = [output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        for position, (parent, _) in enumerate(node.next_functions):
            if getattr(parent, "variable", None) is probe:

                def hook(gradients: Any, _: Any, position: int = position) -> None:
                    record(gradients[position])

                node.register_hook(hook)
                return
            if parent is not None and parent not in seen:
                seen.add(parent)
                pending.append(parent)
