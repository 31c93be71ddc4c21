"""The settings of a step that a user can choose, and the bytes that each optimizer needs per
parameter.
"""

from dataclasses import dataclass

# Bytes of state per parameter, and bytes that a step moves per parameter in PyTorch's `foreach`
# implementation (counted in torch/optim: the reads and writes of each pass over float32 tensors).
# Adafactor keeps only one row and one column of a matrix as its state.
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
    """The settings that a profile runs with. If `batch`, `precision` or `optimizer` is None, the
    profile's own value applies.
    """

    batch: int | None = None  # samples of one micro-batch on one accelerator
    precision: str | None = None
    optimizer: str | None = None
    compile: bool = False
    channels_last: bool = False
    math_attention: bool = False  # whether unfused attention is used, which stores all scores
    accumulate: int = 1
    accelerators: int = 1
    nodes: int = 1
    # Whether parameters, gradients and optimizer state are sharded over all accelerators (FSDP);
    # otherwise each accelerator has a full copy.
    shard: bool = False


def optimizer_costs(name: str) -> tuple[float, float]:
    """The bytes of state and the bytes that a step moves, both per parameter. An unknown optimizer
    counts as AdamW.
    """
    return OPTIMIZERS.get(name.lower().replace("_", ""), OPTIMIZERS["adamw"])
