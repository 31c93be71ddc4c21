"""Selects the device for the computation, with torch.accelerator (CUDA, ROCm, MPS, XPU or the CPU),
and checks whether the device supports the precision: fp32, tf32, bf16, fp16 with loss scaling, or
fp8.
"""

import os
from contextlib import AbstractContextManager, nullcontext
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


LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class PrecisionContext:
    """One precision on one device. The object provides the context of the forward pass and the loss
    scale.
    """

    def __init__(self, precision: str, device: TrainDevice) -> None:
        self.precision = precision
        self._device = device
        self.scaler: Any = None
        self.weight = (
            # The mean weight of a sample's loss. With a loss scale, it is the value of the last
            # step.
            1.0
        )
        # whether optimizers have stepped since the loss scale was updated
        self.has_stepped = False
        _check(precision, device)
        if device.kind in ("cuda", "rocm", "xpu"):
            torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        if device.kind in ("cuda", "rocm"):
            torch.backends.cudnn.allow_tf32 = precision != "fp32"
        if precision == "fp16":
            self.scaler = torch.amp.GradScaler(
                device.torch.type
            )  # If gradients are sharded, the scaler combines the overflows of all ranks.

    @property
    def low(self) -> Any:
        """The number type in which layers compute, or None for fp32."""
        return LOW.get(self.precision)

    def forward(self) -> AbstractContextManager[Any]:
        if self.low is None:
            return nullcontext()
        context: AbstractContextManager[Any] = torch.autocast(self._device.torch.type, self.low)
        return context

    def settle(self) -> None:
        """Update the loss scale after the steps of all optimizers, and before the next gradients.
        The scale must not change between the optimizers of one step, because their gradients were
        multiplied by the same scale.
        """
        if self.has_stepped and self.scaler is not None:
            self.scaler.update()
        self.has_stepped = False

    def state(self) -> dict[str, Any] | None:
        """Return the loss scale as plain data for checkpoints; None without loss scaling."""
        self.settle()
        return None if self.scaler is None else {**self.scaler.state_dict(), "weight": self.weight}

    def load(self, state: dict[str, Any] | None) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
            self.weight = state.get("weight", 1.0)

    def convert(self, model: Any) -> None:
        """Convert the layers that are faster in fp8, if the precision is fp8."""
        if self.precision != "fp8":
            return
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("rowwise")
        convert_to_float8_training(model, config=config, module_filter_fn=_fits_fp8)


def best(device: TrainDevice) -> str:
    """Return the precision for the plan `auto`: bf16 if the device supports it; otherwise the
    precision is fp16 on CUDA and ROCm, and fp32 on other devices.
    """
    if device.kind in ("cuda", "rocm"):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if device.kind == "xpu" else "fp32"


def _fits_fp8(module: Any, name: str) -> bool:
    """Return whether both sides of a linear layer are multiples of 16, which the fp8 kernels
    require, and at least 256. The fp8 kernels do not speed up layers with a side below 256.
    """
    return isinstance(module, torch.nn.Linear) and all(
        n % 16 == 0 and n >= 256 for n in module.weight.shape
    )


def _check(precision: str, device: TrainDevice) -> None:
    """Check that this device and this installation support the precision.

    Raises: ValueError: the device or the installation does not support the precision.
    """
    if precision == "tf32" and (device.kind != "cuda" or torch.cuda.get_device_capability()[0] < 8):
        raise ValueError(
            "tf32 needs an NVIDIA GPU of the generation Ampere or newer, but this device is "
            f"{device.name}: use fp32 or bf16"
        )
    if precision == "fp8":
        if device.kind != "cuda" or torch.cuda.get_device_capability() < (8, 9):
            raise ValueError(
                "fp8 needs an NVIDIA GPU of the generation Ada, Hopper or newer, but this device "
                f"is {device.name}: use bf16"
            )
        try:
            import torchao  # noqa: F401
        except ImportError as error:
            raise ValueError("fp8 needs torchao; install it with pip install torchao") from error
    low = LOW.get(precision)
    if low is not None and not torch.amp.is_autocast_available(device.torch.type):
        raise ValueError(f"{precision} needs autocast, which {device.name} does not have: use fp32")
