"""Erase the markers, put every node after what it reads, remove what nobody reads. Exact."""

import torch
from torch import fx

from jagg_fx._compat import stable_topological_sort
from jagg_fx.passes.emit import emit
from jagg_fx.region import TIME
from jagg_fx.statistics import SLOT


def clean_up(gm: fx.GraphModule) -> None:
    """Run last."""
    for marker in gm.graph.find_nodes(op="call_function", target=TIME):
        marker.replace_all_uses_with(marker.args[0])
        gm.graph.erase_node(marker)
    for slot in gm.graph.find_nodes(op="call_function", target=SLOT):
        if slot.users:  # nothing was rewritten, so there is nothing to report
            zeros = emit(
                slot, torch.zeros_like, slot.all_input_nodes, name="no_statistics", origin={"pass": "clean_up"}
            )
            slot.replace_all_uses_with(zeros)
        gm.graph.erase_node(slot)
    stable_topological_sort(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
