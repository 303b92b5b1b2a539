"""What jagg_fx is held against: exact gradients by torch.compile, and other ways to run fewer backward passes.

`compiled` and `compiled_blocks` give exact gradients. `BeforePaper` is the scheme that was published before the paper, with an
eager loop over groups. `steps_only` trains some steps and leaves the others out.

All compile for fixed shapes: variants share their code, and torch.compile would take one's number of steps and another's for a
size that changes.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.sizes import SAMPLER, Conditions, LogProbs, Problem, blocks_of
from jagg_fx.models.grpo import grpo_loss

_numbers = itertools.count()


def region(model: Callable[..., Any]) -> Callable[..., Tensor]:
    """The denoiser as a nested compile region, which torch.compile compiles once for all steps of a loop."""
    number = next(_numbers)

    # Without a key torch 2.13 cannot see that the steps of a FLUX are alike ("failed to resolve source").
    @torch.compiler.nested_compile_region(reuse_hash_fn=lambda *_, **__: number)
    def denoiser(**kwargs: Any) -> Tensor:
        output = model(**kwargs)
        velocity: Tensor = output if isinstance(output, Tensor) else output[0]
        return velocity

    return denoiser


def compiled(problem: Problem, backend: str) -> LogProbs:
    """torch.compile of the whole replay, the denoiser as a nested region: exact, and compiled once for all steps."""
    return torch.compile(problem.replay(region(problem.model)), fullgraph=True, dynamic=False, backend=backend)


def compiled_blocks(problem: Problem, backend: str) -> LogProbs:
    """Every block compiled by itself, as diffusers' `compile_repeated_blocks` does; the rest is eager."""
    twin = problem.twin()
    for block in itertools.chain.from_iterable(blocks_of(twin)):
        block.compile(fullgraph=True, dynamic=False, backend=backend)
    return problem.replay(twin)


def steps_only(problem: Problem, backend: str) -> Callable[[Tensor], Tensor]:
    """The log-probs `[B, K]` of the steps `[K]` alone; the others are not run at all. One compile serves all choices of K."""
    denoiser = region(problem.model)

    def log_probs(
        x: Tensor, x_next: Tensor, s: Tensor, s_next: Tensor, s_max: Tensor, conditions: Conditions
    ) -> Tensor:
        found = []
        for i in range(len(x)):
            v = problem.call(denoiser, x[i], s[i].expand(x.shape[1]), conditions).float()
            mean, std = SAMPLER.step(v, x[i], s[i], s_next[i], s_max)
            found.append(SAMPLER.log_prob(x_next[i], mean, std))
        return torch.stack(found, dim=1)

    fast = torch.compile(log_probs, fullgraph=True, dynamic=False, backend=backend)

    def chosen(steps: Tensor) -> Tensor:
        z, s = problem.latents, problem.sigmas
        values: Tensor = fast(z[steps], z[steps + 1], s[steps], s[steps + 1], s[1], problem.conditions)
        return values

    return chosen


class BeforePaper:
    """The scheme that was published before the paper, in groups of W steps and eager Python.

    All W forwards of a group without gradients; the cotangents `g_i` of their values; then, at the first and the last step, a
    forward with gradients and its backward, one after the other, with `G_a = sum_i (b - i) / (b - a) g_i` and
    `G_b = sum_i (i - a) / (b - a) g_i`: weights by position. That is two forwards per group more than the loop has, and
    activations of one step at a time.

    Args:
        problem: what is replayed.
        W: steps per group.
        denoiser: the model, or the model compiled.
    """

    def __init__(self, problem: Problem, W: int, denoiser: Callable[..., Any]) -> None:
        self._problem, self._denoiser = problem, denoiser
        N = problem.num_steps
        self._groups = [range(first, min(first + W, N)) for first in range(0, N, W)]

    @property
    def passes(self) -> int:
        return sum(min(2, len(group)) for group in self._groups)

    def _value(self, i: int) -> Tensor:
        problem = self._problem
        s = problem.sigmas[i].expand(problem.latents.shape[1])
        return problem.call(self._denoiser, problem.latents[i], s, problem.conditions)

    def values(self) -> list[list[Tensor]]:
        """Of every group's steps, as leaves."""
        with torch.no_grad():
            return [[self._value(i).detach().requires_grad_() for i in group] for group in self._groups]

    def cotangents(self, values: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
        """`g_i` of every group's steps."""
        problem, found = self._problem, []
        for group, leaves in zip(self._groups, values, strict=True):
            a, b = group[0], group[-1] + 1
            given = iter(leaves)
            log_probs = problem.replay(lambda given=given, **_: next(given))(
                problem.latents[a : b + 1], problem.sigmas[a : b + 1], problem.conditions
            )
            loss = grpo_loss(log_probs, problem.log_probs[:, a:b], problem.advantages) * len(group) / problem.num_steps
            found.append(torch.autograd.grad(loss, leaves))
        return found

    def backward(self, cotangents: Sequence[Sequence[Tensor]]) -> None:
        """Two sequential passes per group; a group of one step has one."""
        for group, given in zip(self._groups, cotangents, strict=True):
            if len(group) == 1:
                self._value(group[0]).backward(given[0])
                continue
            shares = torch.linspace(0, 1, len(group)).tolist()
            for end, weights in ((group[0], [1 - share for share in shares]), (group[-1], shares)):
                composite = sum(weight * g.float() for weight, g in zip(weights, given, strict=True))
                value = self._value(end)
                value.backward(composite.to(value.dtype))
