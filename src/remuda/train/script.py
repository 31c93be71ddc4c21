"""A user's whole script, run on fake tensors up to its first optimizer step, becomes a work profile."""

import runpy
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remuda.train.operations import as_on_gpu
from remuda.train.run import Run
from remuda.train.trace import Recorder, summarize


def _not_compiled(model: Any = None, **options: Any) -> Any:
    return model if model is not None else lambda given: given


def _from_the_start(run: Run) -> bool:
    return False


class _Done(BaseException):
    """Ends a traced script; no `except Exception` of the script stops it."""


def trace_script(path: str, arguments: list[str], *, name: str = "") -> dict[str, Any]:
    """The work profile of the first step of a script: from its first forward pass to its first `optimizer.step`.

    The script runs as `python path arguments` would, on fake tensors, with the step's samples counted along the first
    dimension of what the model is given. Raises RuntimeError where no optimizer was stepped.
    """
    found: dict[str, Any] = {}
    recorder = Recorder()

    def start(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if tensors and not found.get("batch"):  # of the first module that is given one, where the model got names only
            found["batch"] = tensors[0].shape[0]
        if "model" in found or not any(True for _ in module.parameters()):
            return
        found["model"] = module
        recorder.watch(module)
        found["half"] = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        recorder.__enter__()  # type: ignore[no-untyped-call]  # as torch declares it

    def stop(optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        if "model" in found:
            recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # as torch declares it
            found["optimizer"] = type(optimizer).__name__.lower()
            raise _Done

    handles = (
        torch.nn.modules.module.register_module_forward_pre_hook(start),
        register_optimizer_step_pre_hook(stop),
    )
    argv, sys.argv = sys.argv, [path, *arguments]
    compile_, torch.compile = torch.compile, _not_compiled  # what compiling gains is worked out from the trace
    resume = Run.resume
    setattr(Run, "resume", _from_the_start)  # noqa: B010 - checkpoints are left alone
    try:
        with fake_device(), as_on_gpu():
            runpy.run_path(path, run_name="__main__")
    except _Done:
        half = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(found["half"] or torch.float32, "fp32")
        recorder.close(found["model"])
        parameters = [each for each in found["model"].parameters() if each.requires_grad]
        kind = found["optimizer"]
        return summarize(
            recorder.tape, parameters, batch=found.get("batch", 1), precision=half, optimizer=kind, name=name or path
        )
    finally:
        sys.argv, torch.compile = argv, compile_
        setattr(Run, "resume", resume)  # noqa: B010 - as above
        for handle in handles:
            handle.remove()
    raise RuntimeError(f"{path} ended without an optimizer's step: there is no step to measure")


@contextmanager
def fake_device() -> Iterator[None]:
    """Models and batches made under it weigh nothing: tensors have shapes and no data, and moving them does nothing."""
    apply = torch.nn.Module._apply
    setattr(torch.nn.Module, "_apply", _convert)  # noqa: B010 - so that types stay as they were declared
    try:
        with warnings.catch_warnings(), _Fake(allow_non_fake_inputs=True), _Guesses():  # type: ignore[no-untyped-call]  # torch's
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copying a layer does
            yield
    finally:
        setattr(torch.nn.Module, "_apply", apply)  # noqa: B010 - as above


_TURN = threading.RLock()


class _Fake(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's
    """One thread at a time: a loader's threads collate fake samples while the model runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _TURN:
            return super().__torch_dispatch__(func, types, args, kwargs)

    def __deepcopy__(self, memo: Any) -> "_Fake":
        return self  # models copy their layers, and all belong to one mode


def _convert(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply` for fake parameters, which cannot be swapped: one of another type takes the place of the old."""
    made: dict[int, torch.nn.Parameter] = {}
    for each in module.modules() if recurse else [module]:
        for name, parameter in each._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    new = fn(parameter)
                if new.dtype is not parameter.dtype:
                    fresh = made.setdefault(id(parameter), torch.nn.Parameter(new, parameter.requires_grad))
                    each._parameters[name] = fresh
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = fn(buffer)
    return module


class _Guesses(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch declares it
    """A value that code asks of a fake tensor (`if x.any():`, `.item()`) is false, or 1: the usual way through."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            kind = args[0].dtype
            return False if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        return func(*args, **(kwargs or {}))
