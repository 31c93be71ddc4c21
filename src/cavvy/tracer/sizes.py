"""Computes the sizes that a trace assumes for results whose sizes depend on values: the largest
possible sizes.
"""

from typing import Any

import torch

from cavvy.tracer.own_code import own_line

Made = list[tuple[Any, torch.dtype]]


def explain_size(name: str) -> str:
    """Return an error message for a script that cannot be traced. The message states the reason and
    suggests a change of the script."""
    hint = "pass `output_size`" if name == "repeat_interleave" else "avoid this operation"
    return (
        f"{own_line()}: the size of the result of {name} depends on values, which a trace does "
        f"not have: {hint}, or measure the script with `cavvy bench`"
    )


def find_largest(name: str, args: Any, kwargs: Any, routed: int, experts: int) -> Made:
    """Return the largest possible shape, and the type, of each result of an operation such as
    `nonzero`, whose result has a size that depends on values. Returns [] if the result sizes of the
    operation do not depend on values.
    """
    count = args[0].numel() if args and isinstance(args[0], torch.Tensor) else 0
    share = routed // experts
    # If a mask has as many elements as the routed tensor, it selects an equal share for each
    # expert.
    even = {routed: share, routed * experts: routed}
    if name == "nonzero":
        found = min(count, share) if getattr(args[0], "joined", False) else even.get(count, count)
        return [((found, args[0].dim()), torch.int64)]
    if name == "masked_select":
        mask = args[1].numel()
        whole: Any = torch.broadcast_tensors(*args)  # type: ignore[no-untyped-call]  # torch's
        return [((even.get(mask, mask) * (whole[0].numel() // max(mask, 1)),), args[0].dtype)]
    if name == "bincount":
        return _count_most(args, count, experts if routed else 0)
    if name == "repeat_interleave" and routed and not kwargs.get("output_size"):
        return [((routed,), torch.int64)]  # The repeats are the numbers of samples of the experts.
    if name in ("_unique2", "unique_dim", "unique_consecutive"):
        return _unique_most(args, min(count, experts) if routed else count)
    return []


def _count_most(args: Any, count: int, experts: int) -> Made:
    """Return the largest possible result of `bincount`: one bin for each expert, or the requested
    number of bins if that number is larger. If the number of experts is unknown and the call
    requests no number of bins, the result has as many bins as the input has values.
    """
    weights = args[1] if len(args) > 1 else None
    kind = torch.int64
    if weights is not None:
        kind = torch.float32 if weights.dtype is torch.float32 else torch.float64
    return [((max(*args[2:], experts, 0) or count,), kind)]


def _unique_most(args: Any, rows: int) -> Made:
    """Return the largest possible results of `unique` and its variants. If the call has no
    dimension as an argument, `rows` is the largest possible number of distinct values.
    """
    # The dimension is the only integer argument; the others are booleans.
    dim = next((each for each in args[1:] if type(each) is int), None)
    shape, inverse = (rows,), args[0].shape
    if dim is not None:
        rows = args[0].shape[dim]
        shape, inverse = args[0].shape, (rows,)
    return [(shape, args[0].dtype), (inverse, torch.int64), ((rows,), torch.int64)]
