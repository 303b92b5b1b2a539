"""The examples run as they are, and stay as short as they are meant to be."""

import importlib
import inspect

import pytest
import torch

from jagg_fx.models import examples

LINES = 40


@pytest.mark.parametrize(("name", "streams"), [("sd3", 2), ("wan", 4)])
def test_example(name: str, streams: int) -> None:
    example = importlib.import_module(f"{examples.__name__}.{name}")
    assert len(inspect.getsource(example).splitlines()) <= LINES
    fast = example.main(lowering="eager")
    assert len(fast.plans) == streams
    trained = [p for module in fast._given or (example.model,) for p in module.parameters() if p.requires_grad]
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in trained)
