"""The settings of a training step that a user can choose, and the bytes that each optimizer needs
per parameter.
"""

from cavvy.domain.values import Struct
from cavvy.planner.estimate.profile import WorkProfile

# For each optimizer: the bytes of its state per parameter, and the bytes that one step reads and
# writes per parameter in PyTorch's `foreach` implementation (counted in torch/optim as the reads
# and writes of each pass over float32 tensors). Adafactor's state is only one row and one column
# per matrix. SparseAdam's state is dense, but a step updates only the rows that the batch used.
OPTIMIZERS: dict[str, tuple[float, float]] = {
    "sgd": (0, 12),
    "momentum": (4, 24),
    "adam": (8, 76),
    "adamw": (8, 84),
    "adamw8bit": (2, 22),
    "sparseadam": (8, 0),
    "adagrad": (4, 44),
    "rmsprop": (4, 52),
    "lion": (4, 36),
    "adafactor": (0.1, 60),
    "muon": (4, 60),
}


class StepSettings(Struct, frozen=True, kw_only=True):
    """The settings with which a profile is evaluated. If `batch`, `precision` or `optimizer` is
    None, the value in the profile is used.
    """

    batch: int | None = None  # number of samples in one micro-batch on one accelerator
    precision: str | None = None
    optimizer: str | None = None
    compile: bool = False
    channels_last: bool = False
    # whether attention runs without a fused kernel and therefore stores all scores
    math_attention: bool = False
    accumulate: int = 1
    accelerators: int = 1
    nodes: int = 1
    # Whether parameters, gradients and optimizer state are sharded over all accelerators (FSDP).
    # Otherwise each accelerator has a full copy.
    shard: bool = False


def optimizer_costs(profile: WorkProfile, run: StepSettings) -> tuple[float, float]:
    """Return the bytes of the optimizer's state, and the bytes that a step of the optimizer reads
    and writes. An unknown optimizer is treated as AdamW. If the trace ran the optimizer of the
    script, the state has the traced size. Each byte by which the traced state exceeds the state in
    `OPTIMIZERS` is read once and written once in a step.
    """
    name = (run.optimizer or profile.optimizer).lower().replace("_", "")
    each, moved = OPTIMIZERS.get(name, OPTIMIZERS["adamw"])
    state, moved = profile.parameters * each, profile.parameters * moved
    traced = None if run.optimizer else profile.optimizer_bytes
    if traced is None:
        return state, moved
    return traced, max(moved + 2 * (traced - state), 0)
