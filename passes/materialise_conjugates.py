"""Conjugate complex tensors where they arise: a region cannot take or return a lazily conjugated view.

Complex rotary embeddings (Qwen-Image) multiply by `freqs`, and their backward by its conjugate, which torch keeps as a view
with a flag. `invoke_subgraph` has no kernel for tensors with that flag (torch 2.13). No number changes.
"""

import torch
from torch import Tensor, fx


def materialise_conjugates(gm: fx.GraphModule) -> None:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            views = module.graph.find_nodes(op="call_function", target=torch.ops.aten._conj.default)
            for view in views:
                view.target = torch.ops.aten.conj_physical.default
            for node in module.graph.nodes:
                if "val" in node.meta:
                    node.meta["val"] = _physical(node.meta["val"])
            if views:
                module.recompile()


def _physical(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_physical, value))
    return value.resolve_conj() if isinstance(value, Tensor) and value.is_conj() else value
