"""Reports one GPU to a traced script, so that the script runs its GPU code, such as autocast."""

import os
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

# The GPU that the script sees. The figures are those of an H100 SXM with 80 GB (NVIDIA's data
# sheet). A trace contains none of them: it serves for all accelerators.
_PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    multi_processor_count=132,
    is_integrated=False,
    is_multi_gpu_board=False,
)
_ZERO = """memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached
max_memory_cached utilization"""
_NOTHING = """set_device synchronize empty_cache reset_peak_memory_stats reset_max_memory_allocated
reset_max_memory_cached reset_accumulated_memory_stats manual_seed manual_seed_all seed seed_all
ipc_collect init set_per_process_memory_fraction set_sync_debug_mode set_rng_state set_rng_state_all
set_stream"""


class _Stream:
    """A fake stream or event that never blocks. The class is also a context manager."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def elapsed_time(self, _: Any) -> float:
        """Return 1 as the number of milliseconds, because a trace does not measure time."""
        return 1.0

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        """Return false: no graph of kernels is recorded."""
        return False

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def wait_stream(self, *_: Any) -> None:
        """Do nothing; this function replaces `wait_event`, `record`, `wait` and `synchronize`."""

    wait_event = record = wait = synchronize = wait_stream


class _Generator(torch.Generator):
    """A generator of random numbers that also accepts a device that the machine does not have."""

    def __new__(cls, *_: Any, **__: Any) -> "_Generator":
        return super().__new__(cls)


# the older names of types of tensors on a GPU, such as torch.cuda.FloatTensor
_KINDS = tuple(
    f"{each}Tensor"
    for each in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Byte", "Bool")
)
_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda *_, **__: True,
    "is_current_stream_capturing": lambda: False,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda *_: _PROPERTIES.name,
    "get_device_capability": lambda *_: (_PROPERTIES.major, _PROPERTIES.minor),
    "get_device_properties": lambda *_: _PROPERTIES,
    "get_arch_list": lambda: ["sm_90"],
    "mem_get_info": lambda *_: (_PROPERTIES.total_memory, _PROPERTIES.total_memory),
    "memory_stats": lambda *_: {},
    "memory_summary": lambda *_, **__: "",
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "device": lambda *_: nullcontext(),
    "stream": lambda *_: nullcontext(),
    "current_stream": lambda *_: _Stream(),
    "default_stream": lambda *_: _Stream(),
    "Stream": _Stream,
    "Event": _Stream,
    **{each: lambda *_, **__: 0 for each in _ZERO.split()},
    **{each: lambda *_, **__: None for each in _NOTHING.split()},
}
_ACCELERATOR: dict[str, Any] = {
    "is_available": lambda: True,
    "current_accelerator": lambda *_, **__: torch.device("cuda"),
    "device_count": lambda: 1,
    "current_device_index": lambda: 0,
    "synchronize": lambda *_: None,
    "set_device_index": lambda *_: None,
    "current_stream": lambda *_: _Stream(),
}


class GpuQuestions:
    """Records whether a script or a library called a function that describes the GPU. Calls that
    PyTorch itself makes do not count. Calls made while a module is imported do not count either,
    because a second run of the script would not repeat the import.
    """

    asked = False

    def count(self, function: Any) -> Any:
        """Return a function that records its calls."""

        def ask(*args: Any, **kwargs: Any) -> Any:
            self.asked = self.asked or _is_asked_by_script()
            return function(*args, **kwargs)

        return ask


def _is_asked_by_script() -> bool:
    frame: Any = sys._getframe(2)
    if frame.f_code.co_filename.startswith(os.path.dirname(torch.__file__)):
        return False
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is None


_QUESTIONS = frozenset(
    {
        *("is_available", "device_count", "current_accelerator", "is_bf16_supported"),
        *("get_device_name", "get_device_capability", "get_device_properties", "mem_get_info"),
    }
)


@contextmanager
def fake_cuda() -> Iterator[GpuQuestions]:
    """Report one GPU in `torch.cuda` and `torch.accelerator`. Tensors stay fake; `fake_device` and
    `as_on_gpu` imitate computation on the GPU.
    """
    questions = GpuQuestions()
    with ExitStack() as stack:
        for module, changes in ((torch.cuda, _CUDA), (torch.accelerator, _ACCELERATOR)):
            for name, new in changes.items():
                if hasattr(module, name):
                    told = questions.count(new) if name in _QUESTIONS else new
                    stack.enter_context(patch.object(module, name, told))
        for name in ("range_push", "range_pop", "mark"):
            stack.enter_context(patch.object(torch.cuda.nvtx, name, lambda *_, **__: 0))
        for name in _KINDS:
            plain = vars(torch)[name]
            stack.enter_context(patch.object(torch.cuda, name, plain, create=True))
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        yield questions
