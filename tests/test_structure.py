"""Outputs of denoisers taken apart and put together: the user gets back what the denoiser returned."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor

import jagg_fx
from jagg_fx.structure import rebuild, structure_of, tensors_in
from tests.problems import BATCH, MLP, STEPS, Problem, path, relative_error, squared

Pair = namedtuple("Pair", ["velocity", "extra"])


@dataclass
class Output:
    velocity: Tensor
    extra: Any = None


MAKERS = {
    "diffusers": (lambda v: Transformer2DModelOutput(sample=v), lambda o: o.sample),
    "dataclass": (lambda v: Output(v, [v.sum(-1, keepdim=True), "text"]), lambda o: o.velocity + 0.1 * o.extra[0]),
    "namedtuple": (lambda v: Pair(v, None), lambda o: o.velocity),
    "dict": (lambda v: {"velocity": v, "count": 3}, lambda o: o["velocity"] * o["count"]),
    "nested": (lambda v: ([v, {"mask": v > 0}], 2.0), lambda o: o[0][0] * o[0][1]["mask"] * o[1]),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_rebuilt_as_it_was(kind: str) -> None:
    output = MAKERS[kind][0](torch.randn(2, 3))
    again = rebuild(structure_of(output, "D"), iter(tensors_in(output)))
    assert type(again) is type(output)
    assert all(a is b for a, b in zip(tensors_in(again), tensors_in(output), strict=True))
    assert structure_of(again, "D") == structure_of(output, "D")


@pytest.mark.parametrize("kind", MAKERS)
def test_a_denoiser_may_return_it(kind: str) -> None:
    make, read = MAKERS[kind]

    class Returning(MLP):
        def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
            return make(super().forward(z, t, condition))

    model = Returning()

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, read(model(z[i], t[i].expand(BATCH)))) for i in range(STEPS)], 1)

    problem = Problem(model, fn, path(torch.float32), list(model.parameters()))
    exact_values, _ = problem.run(fn)
    _, want = problem.run(jagg_fx.transform(fn, lowering="reference", cos_threshold=None))
    transformed = jagg_fx.transform(fn, lowering="eager", cos_threshold=None)
    values, got = problem.run(transformed)
    assert relative_error(got, want) < 1e-5
    assert torch.equal(values[0], exact_values[0])
    assert transformed.report.notes == (), "captured as a nested region"
