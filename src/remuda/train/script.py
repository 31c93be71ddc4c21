"""A user's whole script, run on fake tensors up to its first optimizer step, becomes a work profile."""

import runpy
import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from remuda.train.operations import as_on_gpu, fake_device
from remuda.train.trace import Recorder, summarize


def _not_compiled(model: Any = None, **options: Any) -> Any:
    return model if model is not None else lambda given: given


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
        for handle in handles:
            handle.remove()
    raise RuntimeError(f"{path} ended without an optimizer's step: there is no step to measure")
