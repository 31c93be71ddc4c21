"""The fake device of a trace. Models and batches on this device have shapes, but store no data.
Results whose sizes depend on values are assumed to have the largest possible sizes.
"""

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from cavvy.capabilities.estimates.tracer.imports import short_imports
from cavvy.capabilities.estimates.tracer.operations import find_place
from cavvy.capabilities.estimates.tracer.values import (
    ReadValues,
    ValueFunctions,
    find_decided,
    find_known,
    guess_number,
    mark_likely,
    own_line,
)

Made = list[tuple[Any, torch.dtype]]


@contextmanager
def fake_device() -> Iterator["_Fake"]:
    """Create only fake tensors. Models and batches that are created in this context have shapes but
    no data, and use no memory. Moving a fake model or batch to another device does not change it.
    """
    with patch.object(torch.nn.Module, "_apply", _convert), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Accessing the data pointer of FakeTensor|.*CUDA is not available"
        )
        # Errors of operations are raised, so PyTorch does not have to print them too.
        with (
            short_imports(),
            patch.object(logging.getLogger(fake_tensor.__name__), "disabled", True),
            (fake := _Fake()),
            ReadValues(fake.assumed),
            ValueFunctions(),
            patch.object(torch, "load", fake.make_load(torch.load)),
        ):
            yield fake


_TURN = threading.RLock()

# Integers and booleans with at most so many elements keep their values, if these are known.
_KNOWN = 2**16
_KNOWN_REAL = 2**8  # the same for other numbers, from which models compute the widths of layers
_KNOWN_OWN = 2**22  # the same for results of the functions below that make tensors of integers
_MAKERS = frozenset({"arange", "linspace", "randint", "randperm", "zeros", "ones", "full"})
_GRIDS = frozenset({"arange", "linspace"})  # those whose real numbers keep their values, too
_DEPENDS_ON_VALUES = (
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
)


class _Fake(fake_tensor.FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's
    """Fake tensors that also support operations whose result size depends on values. The mode
    assumes the largest possible size, for example that a mask selects all elements. If `topk`
    chooses experts, the mode instead assumes that each expert gets an equal share of the samples.
    `assumed` lists the lines of code with assumed sizes. Only one thread at a time enters the mode,
    because data loaders collate in several threads.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.assumed: dict[str, None] = {}

    def _assume(self, name: str, args: Any, made: Made) -> list[Any]:
        """Create the tensors that `made` describes. If the input has more than one value, also
        record the size that is assumed for the result. Returns [] if `made` is empty.
        """
        if not made:
            return []
        count, most = args[0].numel(), made[-1][0][0]
        if count > 1:
            note = f"{own_line()}: {name} of {count:,} values is assumed to return {most:,}"
            self.assumed[note] = None
        with self:
            return [args[0].new_empty(shape, dtype=dtype) for shape, dtype in made]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _TURN:
            if func._schema.name == "aten::_grouped_mm":
                return self._multiply_groups(*args, **(kwargs or {}))
            return self._dispatch(func, types, args, kwargs or {})

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        name = func._schema.name.removeprefix("aten::")
        if not leaves and name in _MAKERS:
            return self._make_known(func, types, args, kwargs)
        if self._can_compute(func, leaves):
            return self._compute(func, types, args, kwargs)
        given = [each for each in leaves if hasattr(each, "routed")]
        # If `==` or one-hot is applied to a choice of experts, the result is still a choice of
        # experts. A value that requires a gradient is not a choice.
        routed, experts = next((each.routed for each in given if not each.requires_grad), (0, 1))
        outs = self._assume(name, args, find_largest(name, args, kwargs, routed, experts))
        if outs and name != "bincount":
            return outs[0] if len(outs) == 1 else tuple(outs)
        try:
            out: Any = outs[0] if outs else super().__torch_dispatch__(func, types, args, kwargs)
        except _DEPENDS_ON_VALUES as error:
            raise RuntimeError(explain_size(name)) from error
        routed = _mark_routed(func, args, out, routed, experts)
        mark_likely(name, args, out, routed)
        self._keep_decided(name, leaves, out)
        guess_number(func, args, kwargs, out)
        return out

    def _multiply_groups(
        self, left: Any, right: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
    ) -> Any:
        """Create the result of `torch._grouped_mm`. PyTorch's own rule for the result refuses
        float32 and float16, although GPUs support these types.
        """
        groups = [len(offs)] if left.dim() == right.dim() == 2 else []
        groups = [len(left)] if left.dim() == right.dim() == 3 else groups
        with self:
            shape = (*groups, left.shape[-2], right.shape[-1])
            return left.new_empty(shape, dtype=out_dtype or left.dtype)

    def may_turn_const(self, t: torch.Tensor) -> bool:
        """Return whether the fake copy of a tensor also stores the tensor's values.
        `FakeTensorMode` calls this method.
        """
        limit = _KNOWN_REAL if t.is_floating_point() or t.is_complex() else _KNOWN
        is_plain = t.layout is torch.strided and t.device.type == "cpu"
        return is_plain and t.numel() <= limit and not self.is_our_fake(t)

    def _make_known(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Create a new tensor. A tensor of integers or booleans gets the values that it has in a
        real run.
        """
        out: Any = super().__torch_dispatch__(func, types, args, kwargs)
        limit = _KNOWN_OWN
        if out.is_floating_point() or out.is_complex():
            limit = _KNOWN_REAL if func._schema.name.removeprefix("aten::") in _GRIDS else 0
        if 0 < out.numel() <= limit and out.device.type == "cpu":
            with no_dispatch():
                known = func(*args, **{**kwargs, "pin_memory": False})
            self._keep(out, known)
        return out

    def _can_compute(self, func: Any, leaves: list[torch.Tensor]) -> bool:
        """Return whether the values of all arguments are known, and at least one argument is not a
        single value. If each argument consists of a single known value, PyTorch itself computes the
        operation.
        """
        return (
            any(each.numel() != 1 for each in leaves)
            and all(find_known(each) is not None for each in leaves)
            and torch.Tag.nondeterministic_seeded not in func.tags
            and torch.Tag.inplace_view not in func.tags
        )

    def _compute(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on fake tensors. If the results of the operation are small, also compute
        their real values.
        """

        def run() -> Any:
            real = tree_map_only(torch.Tensor, find_known, (args, kwargs))
            with no_dispatch():
                return func(*real[0], **real[1])

        if torch.Tag.dynamic_output_shape in func.tags:
            return tree_map_only(torch.Tensor, self._wrap, run())
        given = _list_tensors((args, kwargs))
        known = [find_known(each) for each in given]
        try:
            for each in given:
                each.constant = None  # type: ignore[attr-defined]  # of fake tensors
            out = super().__torch_dispatch__(func, types, args, kwargs)
            outs = _list_tensors(out)
        except _DEPENDS_ON_VALUES:
            outs = []
        finally:
            for each, value in zip(given, known, strict=True):
                each.constant = value  # type: ignore[attr-defined]
        if not outs:
            made = run()
            return tree_map_only(torch.Tensor, self._wrap, made)
        if func._schema.is_mutable or all(each.numel() <= _KNOWN for each in outs):
            made = _list_tensors(run())
            for each, value in zip(outs, made, strict=True):
                if self.may_turn_const(value):
                    self._keep(each, value)
        return out

    def _wrap(self, known: torch.Tensor) -> Any:
        fake: Any = self.fake_tensor_converter.from_real_tensor(self, known, make_constant=True)
        return fake

    def _keep(self, fake: Any, known: torch.Tensor) -> None:
        fake.constant = known
        self.fake_tensor_converter.add_constant_storage_mapping(fake)

    def make_load(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `torch.load` that makes the loaded tensors fake."""

        def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                with (
                    no_dispatch(),
                    patch.object(torch._guards, "detect_fake_mode", lambda _: None),
                    patch.object(torch._guards, "active_fake_mode", lambda: None),
                ):
                    try:  # A mapped file uses no memory.
                        loaded = before(file, "cpu", *args, **{"mmap": True, **kwargs})
                    except (RuntimeError, ValueError):  # an old format, or an open file
                        loaded = before(file, "cpu", *args, **kwargs)
                return tree_map_only(torch.Tensor, self._convert_loaded, loaded)

        return load

    def _convert_loaded(self, tensor: torch.Tensor) -> Any:
        return self.fake_tensor_converter.from_real_tensor(
            self, tensor, make_constant=self.may_turn_const(tensor)
        )

    def _keep_decided(self, name: str, leaves: list[torch.Tensor], out: Any) -> None:
        decided = find_decided(name, leaves, out)
        if decided is not None and self.may_turn_const(decided):
            self._keep(out, decided)

    def __deepcopy__(self, memo: Any) -> "_Fake":
        return self  # Layers that a model copies must stay in the same mode.


def _mark_routed(func: Any, args: Any, out: Any, routed: int, experts: int) -> int:
    """If the operation chooses experts for samples, or computes something from such a choice, mark
    its results as a choice of experts. Return the number of choices, or 0 for any other operation.
    """
    if func is torch.ops.aten.topk.default:
        # the number of samples times the number of experts per sample
        routed, experts = out[0].numel(), args[0].shape[args[2] if len(args) > 2 else -1]
    for each in _list_tensors(out) if routed else ():
        made: Any = each
        made.routed = routed, experts
        # The samples for which any of the choices is this expert.
        made.joined = func._schema.name == "aten::any"
    return routed


def _list_tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def _convert(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """Apply `Module._apply` to fake parameters, whose data cannot be replaced in place. If `fn`
    changes the data type of a parameter, a new parameter object replaces it in the module.
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
                    continue
                if new.stride() != parameter.stride():  # another memory format
                    with torch.no_grad():
                        parameter.as_strided_(new.shape, new.stride())
                if place := find_place(new.untyped_storage()):
                    storage: Any = parameter.untyped_storage()
                    storage.place = place
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = fn(buffer)
    return module


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
