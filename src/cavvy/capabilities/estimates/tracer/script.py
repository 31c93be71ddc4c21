"""Makes a work profile of a user's unchanged script. The module runs the script on fake tensors,
which store no data, up to the script's first optimizer step.
"""

import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch.distributions import Distribution
from torch.utils import _device

from cavvy.capabilities.estimates import MODULE
from cavvy.capabilities.estimates.tracer.fake_cuda import fake_cuda
from cavvy.capabilities.estimates.tracer.fake_device import fake_device
from cavvy.capabilities.estimates.tracer.one_process import (
    end_processes,
    find_ranks,
    is_rank_missing,
    one_process,
    torchrun_environment,
    watch_rank_variables,
)
from cavvy.capabilities.estimates.tracer.operations import as_on_gpu
from cavvy.capabilities.estimates.tracer.step_watch import StepDone, StepWatch
from cavvy.train.run import Run

__all__ = [
    "NoStep",
    "find_ranks",
    "is_rank_missing",
    "run_script",
    "trace_script",
    "watch_rank_variables",
]


class NoStep(RuntimeError):
    """A script ended without an optimizer step."""


def trace_script(path: str, arguments: list[str], *, name: str = "") -> dict[str, Any]:
    """Return the work profile of one step of a script: see `StepWatch`.

    The script runs as `python path arguments` would run it, but on fake tensors. The number of
    samples is usually the first dimension of the model's input. In its first run, the script sees
    one GPU. If the first run fails, the script runs a second time, without a GPU. There is no
    second run if the script did not ask for a GPU, or if a file or module is missing.

    Raises: NoStep: the script ended without an optimizer step. Any other error was raised by the
    script in the run with a GPU.
    """
    questions = None
    try:
        with fake_cuda() as questions:
            return _trace(path, arguments, name or path)
    except (ModuleNotFoundError, FileNotFoundError):
        raise
    except Exception:
        if questions is not None and not questions.asked:
            raise
        with suppress(Exception, SystemExit):
            return _trace(path, arguments, name or path)
        raise


def _trace(path: str, arguments: list[str], name: str) -> dict[str, Any]:
    with (
        _keep_default_device(),
        _keep_signal_handlers(),
        torch.random.fork_rng(devices=()),
        end_processes(),
        suppress(StepDone),
        _patched(),
        fake_device() as fake,
        as_on_gpu(),
        StepWatch() as watch,
    ):
        torch.manual_seed(0)  # the same random integers in each trace
        _run_as_rank(path, arguments)
    profile = watch.profile(name)
    if profile is None:
        raise NoStep(f"{path} ended without an optimizer step: there is no step to measure")
    return {**profile, "assumed": [*fake.assumed, *watch.assumed]}


def _run_as_rank(path: str, arguments: Sequence[str]) -> None:
    """Run a script as `python` would run it. If the script stops because an environment variable of
    torchrun is not set, run the script a second time as the only rank of torchrun. Torchrun's
    variables are not set in the first run, because libraries start process groups if the variables
    exist.
    """
    missed: set[str] = set()
    try:
        with one_process(), watch_rank_variables(missed):
            run_script(path, arguments)
    except (Exception, SystemExit) as error:
        if not is_rank_missing(error, missed):
            raise
        with one_process(), torchrun_environment():
            run_script(path, arguments)


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script in this process as `python path arguments` would. The path "-m package.module"
    runs a module.
    """
    before = sys.argv, sys.path
    module = path.removeprefix(MODULE) if path.startswith(MODULE) else ""
    folder = os.getcwd() if module else os.path.dirname(os.path.realpath(path))
    sys.argv, sys.path = [module or path, *arguments], [folder, *sys.path]
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path = before


@contextmanager
def _keep_default_device() -> Iterator[None]:
    """Restore the device of new tensors, and the modes that a script has entered and not left."""
    stack = range(torch._C._len_torch_function_stack())
    modes = [torch._C._get_function_stack_at(each) for each in stack]
    own, context = _device.CURRENT_DEVICE, torch._GLOBAL_DEVICE_CONTEXT
    kept = getattr(context, "device_context", None)
    try:
        yield
    finally:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        for mode in modes:
            torch._C._push_on_torch_function_stack(mode)
        _device.CURRENT_DEVICE, context.device_context = own, kept


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that a script replaces, for example to save a checkpoint. They
    would otherwise keep signals from ending the command that traces the script.
    """
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None and signal.getsignal(number) != handler:
                    signal.signal(number, handler)


def _call(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **(kwargs or {}))


@contextmanager
def _patched() -> Iterator[None]:
    """Prevent a traced script from compiling, resuming, skipping an optimizer step, or computing on
    a real GPU.
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
        # In inference mode, PyTorch does not split composite operations, such as `item`, into the
        # operations that the trace knows.
        (torch._C, "_InferenceMode", lambda enabled: torch.set_grad_enabled(not enabled)),
        (Run, "resume", lambda _: False),
        # The device for new tensors; all fake tensors are on one device.
        (_device.DeviceContext, "__torch_function__", _call),
        (torch, "save", lambda *_, **__: None),  # Fake tensors have no data to write.
        # Values of fake tensors cannot be checked.
        (Distribution, "_validate_args", False),
    )
    with ExitStack() as stack:
        for where, name, new in changes:
            stack.enter_context(patch.object(where, name, new))
        yield
