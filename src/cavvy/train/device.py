"""Selects the device for the computation, with torch.accelerator: CUDA, ROCm, MPS, XPU or the
CPU.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("auto", "cpu", "cuda", "rocm", "mps", "xpu")


@dataclass(frozen=True, slots=True)
class TrainDevice:
    """The device of one rank. `name` is the GPU type, under which the micro-batch is stored."""

    torch: Any
    kind: str
    name: str

    @property
    def is_accelerator(self) -> bool:
        return self.kind != "cpu"

    @property
    def memory_bytes(self) -> int | None:
        """The device's total memory in bytes. The value is None on the CPU, because the memory
        limit of the CPU is unknown.
        """
        if self.kind == "mps":
            return int(torch.mps.recommended_max_memory())
        if not self.is_accelerator:
            return None
        return int(
            torch.get_device_module(self.torch).get_device_properties(self.torch).total_memory
        )

    def synchronize(self) -> None:
        if self.is_accelerator:
            torch.accelerator.synchronize()

    def peak_bytes(self) -> int:
        """Return the peak memory of tensors since `reset_peak`, in bytes. On the CPU, the peak is
        not recorded, and the result is 0.
        """
        if not self.is_accelerator:
            return 0
        if self.kind == "mps":
            return int(torch.mps.driver_allocated_memory())
        return int(torch.accelerator.max_memory_allocated())

    def reset_peak(self) -> None:
        if self.is_accelerator and self.kind != "mps":
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()

    def free_cache(self) -> None:
        if self.is_accelerator:
            torch.accelerator.empty_cache()


def pick(wanted: str = "auto", local_rank: int = 0) -> TrainDevice:
    """Select the named device, or the best available device.

    Raises: ValueError: the device is not available or not supported.
    """
    if wanted == "tpu":
        raise ValueError(
            "TPUs need a PyTorch backend of their own (torch_xla, or its successor TorchTPU), "
            "which cavvy.train does not support; JAX programs run on TPUs unchanged"
        )
    if wanted not in KINDS:
        raise ValueError(f"device {wanted!r} is not one of {', '.join(KINDS)}")
    found = (
        torch.accelerator.current_accelerator(check_available=True)
        if torch.accelerator.is_available()
        else None
    )
    if wanted == "cpu" or (wanted == "auto" and found is None):
        return TrainDevice(torch.device("cpu"), "cpu", "cpu")
    if found is None:
        raise ValueError(
            f"device {wanted!r} is not available: this PyTorch ({torch.__version__}) finds no "
            "accelerator"
        )
    kind = "rocm" if found.type == "cuda" and torch.version.hip else str(found.type)
    if wanted not in ("auto", kind):
        raise ValueError(f"device {wanted!r} is not available, but {kind!r} is")
    index = local_rank % max(torch.accelerator.device_count(), 1)
    torch.accelerator.set_device_index(index)
    return TrainDevice(torch.device(found.type, index), kind, _name(kind, index))


def _name(kind: str, index: int) -> str:
    if kind == "mps":
        return os.uname().machine + " " + kind
    return str(torch.get_device_module().get_device_name(index))
