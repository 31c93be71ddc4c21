"""The work profile: the FLOPs, memory traffic and memory use of one micro-batch. A trace
writes profiles as JSON-compatible data. A profile is evaluated with `StepSettings`.
"""

from collections.abc import Mapping, Sequence

from cavvy.domain.values import Struct

FORMAT = "cavvy-work-profile/1"


class ProfileError(ValueError):
    """Raised if the data is not a work profile. The message names the field and the reason."""


class KernelProfile(Struct, frozen=True, kw_only=True):
    """A group of equal kernels in one step; `count` is the number of kernels. All values except
    `count` are for a single kernel. `bytes` is the number of bytes that one kernel reads and
    writes.
    """

    kind: str  # matmul, recurrent, conv, attention, reduction, copy, index, pointwise
    wide: bool  # float32 operands
    backward: bool
    flops: float
    bytes: float
    # the part of `bytes` that belongs to parameters and gradients and does not grow with the batch
    fixed_bytes: float
    fused_bytes: float  # the bytes that are still moved if a compiler fuses kernels
    # For matrix products: their number, rows, columns and inner length. For recurrent layers: time
    # steps, rows, columns and inner length of the product of one time step. For convolutions:
    # groups, pixels, output channels, and inputs per output. For attention: heads x batch, queries,
    # keys, and width of a head. For batch normalization: samples, channels, pixels, and 1 in
    # channels-last memory. For other normalizations and softmax: rows, columns, 0, 0. For sums:
    # summed elements, results, 0, and 1 for sums over rows. For pointwise kernels and copies:
    # elements, 0, 0, and 1 if operands are repeated, slices or of several types, or 2 for
    # transpositions. Zeros for others, and in profiles of earlier versions.
    size: tuple[int, int, int, int]
    count: int
    # Whether the size of the result does not grow with the batch, as for gradients of parameters.
    fixed_result: bool = False
    # For convolutions: input channels of a group, elements of a window, pixels of a result, the
    # step between windows, 1 if the script uses channels-last memory, and the dilation if it
    # exceeds 1. () for others, and in profiles of earlier versions.
    window: tuple[int, ...] = ()
    name: str = ""  # PyTorch's name of the operation; "" in profiles of earlier versions


class PeakMemory(Struct, frozen=True, kw_only=True):
    """The memory in use at one moment of a micro-batch, in bytes. The memory does not include
    parameters, buffers and optimizer state.
    """

    activations: float  # all tensors of the step except gradients
    # the part of `activations` that does not grow with the batch: parameters and gradients that
    # were cast to another type
    fixed: float
    gradients: float


class ReservedMemory(Struct, frozen=True, kw_only=True):
    """The memory that PyTorch's allocator reserves for steps with a multiple of the profile's batch
    size, in bytes.
    """

    multiple: float
    gaps: float  # reserved bytes beyond those in use at the peak
    largest: float  # the largest tensor of the step


class CollectiveProfile(Struct, frozen=True, kw_only=True):
    """A group of equal data exchanges between accelerators in one step; `count` is the number of
    exchanges. `kind` is the kind of exchange, and `bytes` is the number of bytes that each
    accelerator sends in one exchange.
    """

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all
    bytes: float
    count: int


class WorkProfile(Struct, frozen=True, kw_only=True):
    """The forward and backward pass of one micro-batch of `batch` samples on one accelerator."""

    name: str
    batch: int
    precision: str
    optimizer: str
    parameters: int
    tensors: int  # number of parameter tensors
    parameter_bytes: float
    gradient_bytes: float
    buffer_bytes: float
    # Each entry is the moment with the highest memory use for some batch size or sharding.
    peaks: tuple[PeakMemory, ...]
    peaks_compiled: tuple[PeakMemory, ...]
    kernels: tuple[KernelProfile, ...]
    # operations that run no kernel, such as views; 0 in profiles of earlier versions
    views: int = 0
    # Whether products of float32 numbers use TF32 in a step of half precision; false in profiles
    # of earlier versions.
    tf32: bool = False
    # by increasing multiple; empty in profiles of earlier versions
    reserved: tuple[ReservedMemory, ...] = ()
    collectives: tuple[CollectiveProfile, ...] = ()
    # the optimizer's state, or None if the trace did not run the optimizer
    optimizer_bytes: float | None = None
    # A trace computes no values. For each size or number of iterations that depends on values, a
    # text states the line of code and the assumed number.
    assumed: tuple[str, ...] = ()

    # what one sample is, such as "sequence of 2,048 tokens"; "" if it is not known
    sample: str = ""

    @property
    def flops(self) -> float:
        """FLOPs of one micro-batch."""
        return sum(each.flops * each.count for each in self.kernels)


def read_profile(data: object) -> WorkProfile:
    """Read a profile from JSON data. Raises ProfileError if the data is not a work profile."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ProfileError(f"not a work profile: its `format` is not {FORMAT!r}")
    try:
        memory = data["memory"]
        return WorkProfile(
            name=str(data["name"]),
            batch=_positive(data["batch"], "batch"),
            precision=str(data["precision"]),
            optimizer=str(data["optimizer"]),
            parameters=int(data["parameters"]),
            tensors=int(data["tensors"]),
            parameter_bytes=float(memory["parameters"]),
            gradient_bytes=float(memory["gradients"]),
            buffer_bytes=float(memory["buffers"]),
            peaks=_peaks(memory["activations"]),
            peaks_compiled=_peaks(memory["activations_compiled"]),
            kernels=tuple(_kernel(each) for each in data["ops"]),
            views=int(_number(data.get("views", 0))),
            tf32=data.get("tf32") is True,
            reserved=_reserved(memory.get("reserved", ())),
            optimizer_bytes=_number(memory["optimizer"]) if "optimizer" in memory else None,
            collectives=tuple(_collective(each) for each in data.get("collectives", ())),
            assumed=tuple(_text(each, "assumed") for each in data.get("assumed", ())),
            sample=_text(data.get("sample", ""), "sample"),
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ProfileError(f"the work profile is incomplete: {error!r}") from error
    except ValueError as error:
        raise ProfileError(f"the work profile is wrong: {error}") from error


def _positive(value: object, name: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must contain only strings, not {value!r}")
    return value


def _peaks(rows: list[list[float]]) -> tuple[PeakMemory, ...]:
    if not rows:
        raise ValueError("`memory` has no entries")
    return tuple(
        PeakMemory(activations=_number(row[0]), fixed=_number(row[1]), gradients=_number(row[2]))
        for row in rows
    )


def _reserved(rows: Sequence[Sequence[float]]) -> tuple[ReservedMemory, ...]:
    return tuple(
        ReservedMemory(multiple=_number(row[0]), gaps=_number(row[1]), largest=_number(row[2]))
        for row in sorted(rows, key=lambda row: row[0])
    )


def _kernel(data: Mapping[str, object]) -> KernelProfile:
    size = data["size"]
    assert isinstance(size, list | tuple)
    # Profiles of earlier versions lack the key. In these, a single product without fixed bytes
    # computes the gradient of parameters.
    is_gradient = data["kind"] == "matmul" and not data["fixed_bytes"] and size[0] == 1
    return KernelProfile(
        kind=str(data["kind"]),
        wide=data["dtype"] in ("float32", "float64"),
        backward=bool(data["backward"]),
        flops=_number(data["flops"]),
        bytes=_number(data["bytes"]),
        fixed_bytes=min(_number(data["fixed_bytes"]), _number(data["bytes"])),
        fused_bytes=_number(data["fused_bytes"]),
        size=(int(size[0]), int(size[1]), int(size[2]), int(size[3])),
        count=int(_number(data["count"])),
        fixed_result=bool(data.get("fixed_result", is_gradient)),
        window=_window(data.get("window", ())),
        name=str(data.get("name", "")),
    )


def _window(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) not in (0, 5, 6):
        raise ValueError(f"window must contain 5 or 6 numbers, not {value!r}")
    return tuple(int(_number(each)) for each in value)


def _collective(data: Mapping[str, object]) -> CollectiveProfile:
    return CollectiveProfile(
        kind=str(data["kind"]), bytes=_number(data["bytes"]), count=int(_number(data["count"]))
    )


def _number(value: object) -> float:
    if not isinstance(value, int | float) or value < 0:
        raise ValueError(f"expected a number of at least 0, not {value!r}")
    return float(value)


# For each optimizer: the bytes of its state per parameter, and the bytes that one step reads and
# writes per parameter in PyTorch's `foreach` implementation (counted in torch/optim as the reads
# and writes of each pass over float32 tensors). Adafactor's state is only one row and one column
# per matrix. SparseAdam's state is dense, but a step updates only the rows that the batch used.
OPTIMIZERS: dict[str, tuple[float, float]] = {
    "sgd": (0, 12),
    "momentum": (4, 24),
    "adam": (8, 76),
    "adamw": (8, 84),
    # `fused=True`: one pass reads the gradient, and reads and writes the rest
    "adamwfused": (8, 28),
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
    accelerators: int = 1  # on each node
    nodes: int = 1
    # Whether parameters, gradients and optimizer state are sharded over the accelerators of all
    # nodes (FSDP). Otherwise each accelerator has a full copy.
    shard: bool = False

    @property
    def devices(self) -> int:
        """The number of accelerators of all nodes together."""
        return self.accelerators * self.nodes

    @property
    def shards(self) -> int:
        """The number of accelerators that share one copy of the state."""
        return self.devices if self.shard else 1


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
