"""Changes a plain training loop without editing the script: its DataLoader, and the precision,
memory format and compilation of its model. The module also finds the lines of the script that
contain the settings to change.
"""

import inspect
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules import module as modules
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cavvy.capabilities.tuning.probe.look import calling_line

_SIGNATURE = inspect.signature(DataLoader.__init__)


class PlainLevers:
    """Applies `levers` to a script, and observes the script's first steps.

    `levers` may have the following keys. `workers`, `pin` and `batch_size` are for one DataLoader;
    `loader` is the DataLoader's number in the order of creation. DataLoaders that the same line
    creates later, such as in each epoch, are changed, too. `precision` is "tf32" or "bf16".
    The values of `channels_last` and `compile` are True. Missing keys change nothing.
    """

    def __init__(self, levers: dict[str, Any]) -> None:
        self._levers = levers
        # the DataLoaders, each with the line that creates it, until `apply` is called
        self._loaders: list[tuple[Any, str]] = []
        self._line = ""  # the line that creates the changed DataLoader, after `apply` is called
        # the DataLoader of each iterator
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # the number of batches from each DataLoader in the observed step
        self._reads: dict[int, int] = {}
        # the modules that the script calls, each with the line of the call
        self._called: dict[Any, str] = {}
        self._precision = "fp32"
        self._images = False
        self._samples = self._depth = 0
        self._autocast: Any = None  # active from a forward pass until the backward pass
        self._hooks, self._stack = ExitStack(), ExitStack()

    def install(self) -> None:
        """Observe and change the script until `remove` is called."""
        for hook in (
            modules.register_module_forward_pre_hook(self._before_forward),
            modules.register_module_forward_hook(self._after_forward, always_call=True),
        ):
            self._hooks.callback(hook.remove)
        changes: list[tuple[Any, str, Any]] = [
            (DataLoader, "__init__", self._make_loader(DataLoader.__init__)),
            (_BaseDataLoaderIter, "__init__", self._number(_BaseDataLoaderIter.__init__)),
            (_BaseDataLoaderIter, "__next__", self._count_reads(_BaseDataLoaderIter.__next__)),
        ]
        if self._levers.get("pin"):
            copies = ((name, getattr(torch.Tensor, name)) for name in ("to", "cuda"))
            changes += [(torch.Tensor, name, _without_waiting(copy)) for name, copy in copies]
        for where, name, new in changes:
            self._stack.enter_context(patch.object(where, name, new))

    def remove(self) -> None:
        self.leave_autocast()
        self._hooks.close()
        self._stack.close()

    def restart_counts(self) -> None:
        """Count samples and batches from now on."""
        self._reads, self._samples = {}, 0

    def apply(self, optimizer: Any) -> dict[str, Any]:
        """Apply the levers of the computation, stop observing, and return the observed facts. The
        method is called at the end of a step, because changed hooks or a changed `forward` are used
        from the next call on.
        """
        self._hooks.close()
        given = {id(each) for group in optimizer.param_groups for each in group["params"]}
        models = [
            each for each in self._called if any(id(one) in given for one in each.parameters())
        ]
        facts = self._facts(models)
        self._line = dict(enumerate(line for _, line in self._loaders)).get(
            self._levers.get("loader", -1), "none"
        )
        self._loaders.clear()  # The loop's DataLoaders, and their workers, may end with an epoch.
        if self._levers.get("precision") == "tf32":
            torch.set_float32_matmul_precision("high")
        if self._levers.get("precision") == "bf16":
            for each in models:
                each.register_forward_pre_hook(self._enter_autocast, prepend=True)
            backward = torch.autograd.backward
            self._stack.enter_context(
                patch.object(torch.autograd, "backward", self._outside_autocast(backward))
            )
        if self._levers.get("compile"):
            for each in models:
                inner = (
                    each.module
                    if isinstance(each, torch.nn.parallel.DistributedDataParallel)
                    else each
                )
                inner.forward = torch.compile(inner.forward)
        return facts

    def _facts(self, models: list[Any]) -> dict[str, Any]:
        number = max(self._reads, key=lambda each: self._reads[each], default=-1)
        loader = self._describe_loader(number) if number >= 0 else None
        samples = self._samples
        if loader is not None and loader["batch_size"]:
            samples = loader["batch_size"] * loader["reads"]
        return {
            "batch": samples or 1,
            "samples": loader["samples"] if loader is not None else 0,
            "loader": loader,
            "precision": self._precision,
            "images": self._images,
            "compiled": any(map(_is_compiled, models)),
            "model_line": self._called[models[0]] if models else "",
        }

    def _describe_loader(self, number: int) -> dict[str, Any]:
        loader, line = self._loaders[number]
        data = loader.dataset
        return {
            "number": number,
            "line": line,
            "workers": loader.num_workers,
            "prefetch": loader.prefetch_factor or 0,
            "pin": loader.pin_memory,
            "batch_size": loader.batch_size,
            "iterable": isinstance(data, IterableDataset),
            "reads": self._reads[number],
            "samples": len(data) if hasattr(data, "__len__") else 0,
        }

    def _make_loader(self, make: Callable[..., None]) -> Callable[..., None]:
        names = {"workers": "num_workers", "pin": "pin_memory", "batch_size": "batch_size"}

        def call(loader: Any, *given: Any, **options: Any) -> None:
            bound = _SIGNATURE.bind(loader, *given, **options)
            line = calling_line()
            is_first = not self._line and len(self._loaders) == self._levers.get("loader")
            if is_first or line == self._line:
                for lever, name in names.items():
                    if lever in self._levers:
                        bound.arguments[name] = self._levers[lever]
            if not self._line:
                self._loaders.append((loader, line))
            make(*bound.args, **bound.kwargs)

        return call

    def _number(self, make: Callable[..., None]) -> Callable[..., None]:
        def call(iterator: Any, loader: Any) -> None:
            for number, (each, _) in enumerate(self._loaders):
                if each is loader:
                    self._numbers[iterator] = number
            make(iterator, loader)

        return call

    def _count_reads(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def call(iterator: Any) -> Any:
            number = self._numbers.get(iterator)
            if number is not None:
                self._reads[number] = self._reads.get(number, 0) + 1
            return read(iterator)

        return call

    def _before_forward(self, module: Any, values: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        weights = list(module.parameters())
        if module not in self._called and weights:
            self._called[module] = calling_line()
            self._precision = _precision(weights[0])
            wide = [each for each in weights if each.dim() == 4]
            to_last = {"memory_format": torch.channels_last}
            self._images |= any(not each.is_contiguous(**to_last) for each in wide)
            if self._levers.get("channels_last") and wide:
                module.to(memory_format=torch.channels_last)
        if module is next(iter(self._called), None):
            first = next((v for v in tree_leaves(values) if isinstance(v, torch.Tensor)), None)
            self._samples += len(first) if first is not None and first.dim() else 0

    def _after_forward(self, module: Any, values: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)

    def _enter_autocast(self, module: Any, values: Any) -> None:
        if self._autocast is None:
            on = next(module.parameters()).device.type
            self._autocast = torch.autocast(on, torch.bfloat16)
            self._autocast.__enter__()

    def leave_autocast(self) -> None:
        """Restore the script's own precision. Does nothing if autocast is not active."""
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
            self._autocast = None

    def _outside_autocast(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            self.leave_autocast()
            return work(*given, **options)

        return call


def describe_device(on: torch.device) -> dict[str, Any]:
    """Return the kind and name of the device, whether it has tensor cores, and the number of CPU
    cores that can be used.
    """
    name = "cpu" if on.type == "cpu" else str(torch.get_device_module(on).get_device_name(on))
    return {
        "device": on.type,
        "name": name,
        "tensor_cores": has_tensor_cores(on.type),
        "cores": len(os.sched_getaffinity(0)),
    }


def has_tensor_cores(kind: str) -> bool:
    return kind == "cuda" and torch.cuda.get_device_capability() >= (8, 0)


def _precision(weight: torch.Tensor) -> str:
    """Return the number type in which the model computes."""
    on = weight.device.type
    if torch.is_autocast_enabled(on):
        return str(torch.get_autocast_dtype(on))
    if weight.dtype != torch.float32:
        return str(weight.dtype)
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _is_compiled(model: Any) -> bool:
    return any(
        isinstance(each, torch._dynamo.OptimizedModule)
        or getattr(each, "_compiled_call_impl", None) is not None
        for each in model.modules()
    )


def _without_waiting(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `copy` that does not wait if its source is in page-locked memory."""

    def call(tensor: torch.Tensor, *given: Any, **options: Any) -> Any:
        is_told = "non_blocking" in options or any(isinstance(each, bool) for each in given)
        if not is_told and tensor.device.type == "cpu" and tensor.is_pinned():
            options["non_blocking"] = True
        return copy(tensor, *given, **options)

    return call
