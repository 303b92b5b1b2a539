"""Group the steps into streams, each a path of its own with its own knots (see `jagg_fx/streams.py`). Changes nothing."""

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from jagg_fx.passes.find_steps import Step
from jagg_fx.passes.value_numbers import Numbers
from jagg_fx.streams import Call, group


def group_streams(steps: Sequence[Step], numbers: Numbers) -> list[list[Step]]:
    """The steps of each stream, which count from 0 in each. Raises `StepMismatchError` if they cannot be told apart."""
    return [
        [replace(steps[n], index=index, stream=stream) for index, n in enumerate(own)]
        for stream, own in enumerate(group([_call(step, numbers) for step in steps]))
    ]


def _call(step: Step, numbers: Numbers) -> Call:
    return Call(
        denoiser=step.note.denoiser,
        kind=step.region,
        time=numbers[step.time],
        operands=tuple(numbers[o] if isinstance(o, fx.Node) else o for o in step.operands),
    )
