"""Data parallel: sums gradients over the replicas, in buckets, while the backward pass is still
running. Computes the norm of the gradient over all ranks, and clips the gradient; unsharded and
sharded parameters can be mixed.

The reduction differs from DistributedDataParallel in two ways. The model is not wrapped, and stays
the user's own module. A rank whose backward pass ran out of memory can still send its incomplete
buckets, so that the other ranks do not wait for this rank. If a backward pass ran out of memory,
all ranks discard the gradients of the step.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

BUCKET_BYTES = 25 * 2**20  # bytes of a bucket; the default of DistributedDataParallel


class GradientBucket:
    """Parameters whose gradients are sent together in one buffer. At its end, the buffer has a
    number for each parameter: the number of ranks that have a gradient for that parameter.
    """

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        sizes = [*(local(p).numel() for p in parameters), len(parameters)]
        self.flat = torch.zeros(
            sum(sizes), dtype=parameters[0].dtype, device=local(parameters[0]).device
        )
        *parts, self.used = torch.split(self.flat, sizes)
        self.views = [v.view(local(p).shape) for v, p in zip(parts, parameters, strict=True)]
        self.waiting = 0
        self.work: Any = None

    def fill(self) -> None:
        """Copy the gradients into the buffer that is sent."""
        pairs = self._pairs()
        if len(pairs) == len(self.parameters):
            self.used.fill_(1)
        else:
            self.flat.zero_()
            has = [float(p.grad is not None) for p in self.parameters]
            self.used.copy_(torch.tensor(has))
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])

    def store(self) -> None:
        """Copy the sums from the buffer to the gradients. If only other ranks used a parameter,
        this rank still gets a gradient for the parameter. Otherwise the ranks would update the
        parameter differently.
        """
        if any(p.grad is None for p in self.parameters):
            for p, used in zip(self.parameters, self.used.tolist(), strict=True):
                if p.grad is None and used:
                    p.grad = torch.empty_like(p)
        if pairs := self._pairs():
            torch._foreach_copy_([grad for _, grad in pairs], [view for view, _ in pairs])

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Return one pair for each parameter that has a gradient: the parameter's part of the
        buffer, and the gradient.
        """
        return [
            (view, local(p.grad))
            for p, view in zip(self.parameters, self.views, strict=True)
            if p.grad is not None
        ]


class GradientReducer:
    """Sums gradients over one process group. Because `StepGradients` weights each loss, the sum is
    the gradient of the mean loss.
    """

    def __init__(self, parameters: list[Any], group: Any) -> None:
        self._group = group
        self._buckets: list[GradientBucket] = []
        self._of: dict[int, GradientBucket] = {}
        self._armed = False
        self._next = 0
        self._append(parameters)

    def list_new(self, model: Any) -> list[Any]:
        """Return the trained parameters of the model that are in no bucket, for example because
        they were frozen before.
        """
        return [p for p in model.parameters() if p.requires_grad and id(p) not in self._of]

    def add(self, parameters: list[Any]) -> None:
        """Sum the gradients of further parameters from now on. If the parameters already have
        gradients, these are summed, too. All ranks must call this method with the same parameters.
        """
        self._next = first = len(self._buckets)
        self._append(parameters)
        self._complete(first)

    def arm(self) -> None:
        """From now on, send each bucket as soon as it is full. The method must be called before the
        last backward pass of a step.
        """
        self._armed, self._next = True, 0
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)

    def finish(self) -> None:
        """Send the remaining buckets, wait for all of them, and copy the sums to the gradients. The
        method allocates little memory.
        """
        if not self._armed:
            self.arm()
        self._armed = False
        self._complete(0)

    def _append(self, parameters: list[Any]) -> None:
        made = [GradientBucket(some) for some in _fill(parameters)]
        self._buckets += made
        self._of |= {id(p): bucket for bucket in made for p in bucket.parameters}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _complete(self, first: int) -> None:
        """Send all buckets that were not sent yet. Then wait for bucket `first` and all later
        buckets.
        """
        while self._next < len(self._buckets):
            self._send(self._buckets[self._next])
        for bucket in self._buckets[first:]:
            bucket.work.wait()
            bucket.work = None
            bucket.store()

    def _ready(self, parameter: Any) -> None:
        if not self._armed:
            return
        self._of[id(parameter)].waiting -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].waiting <= 0:
            self._send(
                self._buckets[self._next]
            )  # Buckets are sent in the same order on all ranks, no matter which is full first.

    def _send(self, bucket: GradientBucket) -> None:
        self._next += 1
        bucket.fill()
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)


def local(tensor: Any) -> Any:
    """Return this rank's part of a sharded tensor."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor.detach()


def _fill(parameters: list[Any]) -> list[list[Any]]:
    """Group parameters into buckets in the order in which their gradients become ready (last layer
    first). All parameters of a bucket have the same number type.
    """
    buckets: list[list[Any]] = []
    room: dict[Any, int] = {}
    newest: dict[Any, list[Any]] = {}
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        size = local(parameter).numel() * parameter.element_size()
        if kind not in newest or room[kind] < size:
            newest[kind], room[kind] = [], BUCKET_BYTES
            buckets.append(newest[kind])
        newest[kind].append(parameter)
        room[kind] -= size
    return buckets


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
