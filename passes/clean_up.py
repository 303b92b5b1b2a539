"""Erase the markers, put every node after what it reads, remove what nobody reads. Exact."""

from torch import fx

from jagg_fx._compat import stable_topological_sort
from jagg_fx.denoiser import TIME


def clean_up(gm: fx.GraphModule) -> None:
    for marker in gm.graph.find_nodes(op="call_function", target=TIME):
        marker.replace_all_uses_with(marker.args[0])
        gm.graph.erase_node(marker)
    stable_topological_sort(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
