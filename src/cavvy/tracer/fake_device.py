"""The fake device of a trace. Models and batches on it have shapes, but store no data."""

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def fake_device() -> Iterator["_Fake"]:
    """Create only fake tensors. Models and batches that are created in this context have shapes but
    no data, and use no memory. Moving a fake model or batch to another device does not change it.
    """
    with patch.object(torch.nn.Module, "_apply", _convert), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Accessing the data pointer of FakeTensor|.*CUDA is not available"
        )
        with (fake := _Fake()), _Guesses():  # type: ignore[no-untyped-call]  # torch's
            yield fake


_TURN = threading.RLock()


class _Fake(fake_tensor.FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's
    """Fake tensors that also support operations whose result size depends on values. The largest
    possible size is assumed: a mask selects everything. The exception is experts that `topk`
    chooses: each expert is assumed to get an equal share. `assumed` lists the lines of code with
    assumed sizes. Only one thread at a time enters the mode, because data loaders collate in
    several threads.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.assumed: dict[str, None] = {}

    def _assume(self, name: str, args: Any, made: "_Made") -> list[Any]:
        """Make the tensors that `made` describes, and record the assumed size unless it is a single
        value. Returns [] if `made` is empty.
        """
        if not made:
            return []
        count, most = args[0].numel(), made[-1][0][0]
        if count > 1:
            note = f"{_own_line()}: {name} of {count:,} values is assumed to return {most:,}"
            self.assumed[note] = None
        with self:
            return [args[0].new_empty(shape, dtype=dtype) for shape, dtype in made]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _TURN:
            given = [each for each in tree_leaves((args, kwargs)) if hasattr(each, "routed")]
            # If `==` or one-hot is applied to a choice of experts, the result is still a choice of
            # experts. A value that requires a gradient is not a choice.
            routed, experts = next(
                (each.routed for each in given if not each.requires_grad), (0, 1)
            )
            name = func._schema.name.removeprefix("aten::")
            outs = self._assume(name, args, _most(name, args, kwargs or {}, routed, experts))
            if outs and name != "bincount":
                return outs[0] if len(outs) == 1 else tuple(outs)
            try:
                out: Any = (
                    outs[0] if outs else super().__torch_dispatch__(func, types, args, kwargs)
                )
            except (
                fake_tensor.DynamicOutputShapeException,
                fake_tensor.DataDependentOutputException,
            ) as error:
                raise RuntimeError(_explain_size(name)) from error
            if (
                func is torch.ops.aten.topk.default
            ):  # the number of samples times the number of experts per sample
                routed, experts = out[0].numel(), args[0].shape[args[2] if len(args) > 2 else -1]
            for each in filter(torch.is_tensor, tree_leaves(out) if routed else ()):
                each.routed = routed, experts
                # The samples for which any of the choices is this expert.
                each.joined = name == "any"
            return out

    def __deepcopy__(self, memo: Any) -> "_Fake":
        return self  # Layers that a model copies must stay in the same mode.


def _explain_size(name: str) -> str:
    """Return an error message for a script that cannot be traced. The message gives the reason, and
    what to do."""
    hint = "pass `output_size`" if name == "repeat_interleave" else "avoid this operation"
    return (
        f"{_own_line()}: the size of the result of {name} depends on values, which a trace does "
        f"not have: {hint}, or measure the script with `cavvy bench`"
    )


_Made = list[tuple[Any, torch.dtype]]


def _most(name: str, args: Any, kwargs: Any, routed: int, experts: int) -> _Made:
    """Return shapes and types of the largest possible results of an operation whose result sizes
    depend on values. Returns [] if the result sizes of the operation do not depend on values.
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


def _count_most(args: Any, count: int, experts: int) -> _Made:
    """Return the largest possible result of `bincount`: one bin for each expert, or the requested
    number of bins. If the number of experts is unknown and no number of bins was requested, the
    result has one bin for each value.
    """
    weights = args[1] if len(args) > 1 else None
    kind = torch.int64
    if weights is not None:
        kind = torch.float32 if weights.dtype is torch.float32 else torch.float64
    return [((max(*args[2:], experts, 0) or count,), kind)]


def _unique_most(args: Any, rows: int) -> _Made:
    """Return the largest possible results of `unique` and its variants. If the call names no
    dimension, the result has at most `rows` distinct values.
    """
    # The dimension is the only integer argument; the others are booleans.
    dim = next((each for each in args[1:] if type(each) is int), None)
    shape, inverse = (rows,), args[0].shape
    if dim is not None:
        rows = args[0].shape[dim]
        shape, inverse = args[0].shape, (rows,)
    return [(shape, args[0].dtype), (inverse, torch.int64), ((rows,), torch.int64)]


def _own_line() -> str:
    """Return the line of the user's own code that is being executed."""
    frame: Any = sys._getframe(1)
    while frame.f_back and any(part in frame.f_code.co_filename for part in _OTHERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_HERE = os.path.dirname(__file__)
_OTHERS = (
    os.path.dirname(torch.__file__),
    _HERE,
    os.path.join(os.path.dirname(_HERE), "train"),  # a script may use the library for training
    "-packages",
    "/lib/python",
    "<",
)


def _convert(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """Apply `Module._apply` to fake parameters, whose data cannot be replaced in place. If the data
    type changes, a new parameter replaces the old one.
    """
    made: dict[int, torch.nn.Parameter] = {}
    for each in module.modules() if recurse else [module]:
        for name, parameter in each._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    new = fn(parameter)
                if new.dtype is not parameter.dtype:
                    fresh = made.setdefault(
                        id(parameter), torch.nn.Parameter(new, parameter.requires_grad)
                    )
                    each._parameters[name] = fresh
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = fn(buffer)
    return module


class _Guesses(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch declares it
    """Supplies a value when code reads one from a fake tensor (`if x.any():`, `.item()`): False for
    booleans, otherwise 1. With the values False and 1, code usually takes its common branch.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            kind = args[0].dtype
            return False if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        return func(*args, **(kwargs or {}))
