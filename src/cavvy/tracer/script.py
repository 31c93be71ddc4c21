"""Makes a work profile of a user's unchanged script. The module runs the script on fake tensors,
which store no data, up to the script's first optimizer step.
"""

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributions import Distribution
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from cavvy.tracer.fake_device import fake_device
from cavvy.tracer.one_process import TORCHRUN, one_process, torchrun_environment
from cavvy.tracer.operations import as_on_gpu
from cavvy.tracer.trace import TraceRecorder, summarize
from cavvy.train.run import Run


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
            _run_as_rank(path, arguments)
    except _Done:
        return {**watch.profile(name or path), "assumed": list(fake.assumed)}
    finally:
        for handle in handles:
            handle.remove()
    raise RuntimeError(f"{path} ended without an optimizer step: there is no step to measure")


def _run_as_rank(path: str, arguments: Sequence[str]) -> None:
    """Run a script as `python` would run it. If the script needs a variable that torchrun sets, run
    the script again as the only rank of torchrun. Libraries start process groups if they find these
    variables, so the first run does not have them.
    """
    try:
        with one_process():
            run_script(path, arguments)
    except KeyError as error:
        if not error.args or error.args[0] not in TORCHRUN:
            raise
        with one_process(), torchrun_environment():
            run_script(path, arguments)


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
        # Values of fake tensors cannot be checked.
        (Distribution, "_validate_args", False),
    )
    with ExitStack() as stack:
        for where, name, new in changes:
            stack.enter_context(patch.object(where, name, new))
        yield
