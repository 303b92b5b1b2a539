"""Hand statistics out of the backward, as the gradient of the probe (see `jagg_fx/statistics.py`). Reads only."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from jagg_fx import interpolation, statistics
from jagg_fx.passes.emit import drop_summand, emit, value
from jagg_fx.passes.find_steps import Step
from jagg_fx.passes.score_segments import Decision
from jagg_fx.statistics import SLOT

PASS = "record_statistics"


def record_statistics(graph: fx.Graph, scored: Sequence[tuple[Sequence[Step], Decision]]) -> None:
    """Pack the numbers of all streams that have intermediate steps, stream after stream, each with its steps and decision."""
    slots = graph.find_nodes(op="call_function", target=SLOT)
    if not slots or not scored:
        return
    size = value(slots[0]).shape[0]
    packed = [_packed(slots[0], steps, decision) for steps, decision in scored]

    def joined(*packed: Tensor) -> Tensor:
        return statistics.pad(torch.cat(packed), size)

    node = emit(slots[0], joined, packed, name="statistics", origin={"pass": PASS})
    slots[0].replace_all_uses_with(node)
    for slot in slots[1:]:
        drop_summand(slot, slot.all_input_nodes[0], {"pass": PASS})


def _packed(before: fx.Node, steps: Sequence[Step], decision: Decision) -> fx.Node:
    groups = [[step.cotangents[slot] for step in steps] for slot in range(len(steps[0].cotangent_positions))]

    def packed(scores: Tensor, keep: Tensor, *cotangents: Tensor) -> Tensor:
        by_slot = [torch.stack(cotangents[n : n + len(steps)]) for n in range(0, len(cotangents), len(steps))]
        return statistics.pack(interpolation.cotangent_norms(by_slot), scores, keep)

    operands = (decision.scores, decision.keep, *(g for group in groups for g in group))
    return emit(before, packed, operands, name="statistics_of_stream", origin={"pass": PASS, "stream": steps[0].stream})
