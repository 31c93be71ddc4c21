"""The settings of a step that a user can choose, and their bytes per parameter."""

from dataclasses import dataclass

# Bytes of state per parameter, and bytes that a step moves per parameter in PyTorch's `foreach`
# implementation (torch/optim: reads and writes of each pass over float32 tensors, counted).
# Adafactor keeps a row and a column only.
OPTIMIZERS: dict[str, tuple[float, float]] = {
    "sgd": (0, 12),
    "momentum": (4, 24),
    "adam": (8, 76),
    "adamw": (8, 84),
    "adamw8bit": (2, 22),
    "adagrad": (4, 44),
    "rmsprop": (4, 52),
    "lion": (4, 36),
    "adafactor": (0.1, 60),
    "muon": (4, 60),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """One way to run a profile. A `batch`, `precision` or `optimizer` of None: as in the
    profile.
    """

    batch: int | None = None  # samples of one micro-batch on one accelerator
    precision: str | None = None
    optimizer: str | None = None
    compile: bool = False
    channels_last: bool = False
    math_attention: bool = False  # scores are materialized, as without a fused kernel
    accumulate: int = 1
    accelerators: int = 1
    nodes: int = 1
    # parameters, gradients and optimizer state are sharded over all accelerators (FSDP); else each
    # has all
    shard: bool = False


def optimizer_costs(name: str) -> tuple[float, float]:
    """Bytes of state, and bytes moved in a step, per parameter; an unknown optimizer counts as
    AdamW.
    """
    return OPTIMIZERS.get(name.lower().replace("_", ""), OPTIMIZERS["adamw"])
