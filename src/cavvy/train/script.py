"""Makes a work profile of a user's unchanged script. The module runs the script on fake tensors,
which store no data, up to the script's first optimizer step.
"""

import os
import runpy
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cavvy.train.operations import as_on_gpu
from cavvy.train.run import Run
from cavvy.train.trace import TraceRecorder, summarize


class _Done(BaseException):
    """Raised to end a traced script. This class is not an `Exception`, so the script's own
    `except Exception` does not catch it.
    """


def trace_script(path: str, arguments: list[str], *, name: str = "") -> dict[str, Any]:
    """Return the work profile of the first micro-batch of a script. The profile covers the first
    forward pass up to the first `optimizer.step`, or up to the second forward pass if the script
    accumulates gradients.

    The script runs as `python path arguments` would run it, but on fake tensors. The number of
    samples is the first dimension of the model's input.

    Raises: RuntimeError: the script ended without an optimizer step.
    """
    watch = _FirstBatchWatch()
    handles = (
        torch.nn.modules.module.register_module_forward_pre_hook(watch.forward),
        register_optimizer_step_pre_hook(watch.step),
    )
    try:
        with _patched(), fake_device() as fake, as_on_gpu():
            run_script(path, arguments)
    except _Done:
        return {**watch.profile(name or path), "assumed": list(fake.assumed)}
    finally:
        for handle in handles:
            handle.remove()
    raise RuntimeError(f"{path} ended without an optimizer step: there is no step to measure")


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script in this process as `python path arguments` would."""
    before = sys.argv, sys.path
    sys.argv, sys.path = [path, *arguments], [os.path.dirname(os.path.realpath(path)), *sys.path]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path = before


class _FirstBatchWatch:
    """Records the first micro-batch: from the model's first forward pass to the first optimizer
    step.
    """

    def __init__(self) -> None:
        self._recorder = TraceRecorder()
        self._model: torch.nn.Module | None = None
        self._parameters: dict[int, torch.nn.Parameter] = {}
        self._batch, self._micro, self._on = 0, 1, False
        self._precision = self._optimizer = ""

    def forward(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        tensors = [
            leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.dim()
        ]
        # If the model gets only keyword arguments, its first module with a tensor input is used.
        if tensors and not self._batch:
            self._batch = tensors[0].shape[0]
        if self._model is None and any(True for _ in module.parameters()):
            self._model, self._on = module, True
            self._recorder.watch(module)
            half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            self._precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(
                half or torch.float32, "fp32"
            )
            self._recorder.__enter__()  # type: ignore[no-untyped-call]  # as torch declares it
        elif module is self._model and any(each.grad is not None for each in module.parameters()):
            self._micro += 1
            self._off()

    def step(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        if self._model is None:
            return
        self._off()
        kind = type(optimizer).__name__.lower()
        self._optimizer = (
            "momentum" if kind == "sgd" and optimizer.defaults.get("momentum") else kind
        )
        every = [
            *self._model.parameters(),
            *(each for group in optimizer.param_groups for each in group["params"]),
        ]
        self._parameters = {id(each): each for each in every if each.requires_grad}
        self._recorder.close(every)
        raise _Done

    def _off(self) -> None:
        if self._on:
            # as torch declares it
            self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._on = False

    def profile(self, name: str) -> dict[str, Any]:
        made = summarize(
            self._recorder.tape,
            list(self._parameters.values()),
            batch=self._batch or 1,
            precision=self._precision,
            optimizer=self._optimizer,
            name=name,
        )
        return {**made, "run": {"accumulate": self._micro}}


@contextmanager
def _patched() -> Iterator[None]:
    """Keep a traced script from compiling, resuming, skipping an optimizer step, or computing on
    another device.
    """
    before = torch.autocast.__init__

    def on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        before(
            self,
            "cpu",
            dtype or (torch.bfloat16 if device_type == "cpu" else torch.float16),
            *args,
            **kwargs,
        )

    changes = (
        (
            torch,
            "compile",
            lambda model=None, **_: model if model is not None else lambda given: given,
        ),
        (
            torch.amp.GradScaler,
            "step",
            lambda _, optimizer, *args, **kwargs: optimizer.step(*args, **kwargs),
        ),
        (torch.autocast, "__init__", on_cpu),
        (Run, "resume", lambda _: False),
    )
    with ExitStack() as stack:
        for where, name, new in changes:
            stack.enter_context(patch.object(where, name, new))
        yield


@contextmanager
def fake_device() -> Iterator["_Fake"]:
    """Create only fake tensors. Models and batches that are created in this context have shapes but
    no data, and use no memory. Moving them to another device does not change these models and
    batches.
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
    possible size is assumed: a mask selects everything. Only experts that are chosen by `topk` get
    equal shares. `assumed` lists the lines of code with such sizes. Only one thread at a time
    enters the mode, because data loaders collate in several threads.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.assumed: dict[str, None] = {}

    def _assume(self, name: str, args: Any, made: "_Made") -> list[Any]:
        """Make tensors of these shapes and types, and record the assumption. Returns [] if `made`
        is empty.
        """
        if not made:
            return []
        count, most = args[0].numel(), made[-1][0][0]
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
    depend on values. Returns [] for other operations.
    """
    count = args[0].numel() if args and isinstance(args[0], torch.Tensor) else 0
    # If a mask has as many elements as the routed tensor, it selects an equal share for each
    # expert.
    even = {routed: routed // experts, routed * experts: routed}
    if name == "nonzero":
        return [((even.get(count, count), args[0].dim()), torch.int64)]
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
    number of bins. If neither number is known, the result has one bin for each value.
    """
    weights = args[1] if len(args) > 1 else None
    kind = torch.int64
    if weights is not None:
        kind = torch.float32 if weights.dtype is torch.float32 else torch.float64
    return [((max(*args[2:], experts, 0) or count,), kind)]


def _unique_most(args: Any, rows: int) -> _Made:
    """Return the largest possible results of `unique` and its variants. Without a dimension
    argument, at most `rows` values are different.
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


_OTHERS = (
    os.path.dirname(torch.__file__),
    os.path.dirname(__file__),
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
    booleans, otherwise 1. These values usually lead to the common branch.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            kind = args[0].dtype
            return False if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        return func(*args, **(kwargs or {}))
