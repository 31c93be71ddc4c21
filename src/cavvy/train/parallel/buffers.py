"""Handles buffers that forward passes change, such as running means. The buffers are restored
before a step is repeated, and are kept equal on all ranks.

As in DistributedDataParallel, all ranks copy the buffers of the first rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LARGEST = 2**16  # maximum number of elements; larger buffers are assumed to be constant tables


class ModelBuffers:
    """The small buffers of a model that are saved in checkpoints."""

    def __init__(self, model: nn.Module, mesh: Any) -> None:
        saved = model.state_dict(keep_vars=True)
        named = dict(model.named_buffers())
        self._live = [b for name, b in named.items() if name in saved and 0 < b.numel() <= LARGEST]
        self._means = [b for b in self._live if b.is_floating_point()]
        self._kept: list[Any] = []
        axes = ("shards", "replicas") if mesh is not None and self._means else ()
        self._groups = [mesh[axis].get_group() for axis in axes if mesh[axis].size() > 1]

    def keep(self) -> None:
        if self._live and not self._kept:
            self._kept = [torch.empty_like(b) for b in self._live]
        if self._live:
            torch._foreach_copy_(self._kept, [buffer.data for buffer in self._live])

    def undo(self) -> None:
        if self._kept:
            torch._foreach_copy_([buffer.data for buffer in self._live], self._kept)

    def align(self) -> None:
        for group in self._groups:
            flat = torch.cat([b.detach().reshape(-1).float() for b in self._means])
            dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group)
            means = [b.data for b in self._means]
            parts = torch.split(flat, [each.numel() for each in means])
            views = [p.view(each.shape) for p, each in zip(parts, means, strict=True)]
            torch._foreach_copy_(means, views)
