"""Computes the norm of the gradient over all ranks and clips the gradient. Unsharded and sharded
parameters can be mixed.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from cavvy.train.parallel.reduce import local


def clip(parameters: Iterable[Any], limit: float, pipeline: Any = None) -> Any:
    """Scale gradients so that their norm is at most `limit`. Returns the norm before clipping.

    `pipeline` is the process group over which the layers are split; None without a pipeline.
    """
    plain, split = sort(p for p in parameters if p.grad is not None)
    squares = [
        _whole(get_total_norm([p.grad for p in some])) ** 2 for some in (plain, *split) if some
    ]
    square = torch.stack(squares).sum()
    if pipeline is not None:
        dist.all_reduce(square, group=pipeline)
    total = square.sqrt()
    factor = torch.clamp(
        limit / (total + 1e-6), max=1.0
    )  # the same as in torch's gradient clipping, which does not wait for the device
    grads = [local(p.grad) for some in (plain, *split) for p in some]
    torch._foreach_mul_(grads, factor)
    return total


def sort(parameters: Iterable[Any]) -> tuple[list[Any], list[list[Any]]]:
    """Group parameters by kind: the unsharded parameters, and the sharded parameters of each mesh.
    An optimizer cannot update different kinds of tensors in one call.
    """
    plain: list[Any] = []
    split: dict[Any, list[Any]] = {}
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        (plain if mesh is None else split.setdefault(mesh, [])).append(parameter)
    return plain, list(split.values())


def _whole(norm: Any) -> Any:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
