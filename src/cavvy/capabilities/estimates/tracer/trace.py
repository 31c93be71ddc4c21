"""Makes a work profile of one training step (computation, memory traffic and memory). No GPU is
needed, because the step runs on fake tensors.

The profile is plain data, which `cavvy estimate` and `cavvy plan` read. Operations are recorded as
a CUDA device would run them. For example, the record uses autocast's float32 list, dropout with
byte masks, and fused attention, as on CUDA.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cavvy.capabilities.estimates.tracer.allocator import simulate
from cavvy.capabilities.estimates.tracer.operations import (
    FUSIBLE,
    as_on_gpu,
    classify,
    count_flops,
    find_window,
    moved_bytes,
    needs_conversion,
)

_BATCHES = (
    1 / 64,
    1 / 16,
    1 / 4,
    1 / 2,
    1,
    2,
    4,
    16,
    64,
)  # multiples of the traced batch size for which the recorded peak is exact
# multiples for which the memory that the allocator reserves is recorded
_RESERVED = (1 / 16, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)
_SHARES = (1, 1 / 8, 0)  # shares of the gradients per rank for which the recorded peak is exact
_PRODUCTS = ("matmul", "recurrent", "conv", "attention")
_BLOCK = 512  # bytes; PyTorch's caching allocator rounds every request up to a multiple of this


@dataclass(slots=True)
class KernelEvent:
    """One kernel: its kind, FLOPs and bytes, and the numbers of the storages that it reads and
    writes. For a matrix product, `size` is (batch, m, n, k).
    """

    kind: str
    name: str  # PyTorch's name of the operation, such as "native_layer_norm"
    dtype: str
    backward: bool
    flops: float
    bytes: int
    size: tuple[int, int, int, int]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    window: tuple[int, ...] = ()  # of a convolution, as `operations.find_window` describes it


@dataclass(slots=True)
class TracedStorage:
    """One allocation of memory: its size in bytes, and its lifetime as indices of events. `died` is
    None if the allocation outlives the step. `kept` is "parameter", "buffer", "gradient", or "" for
    other tensors.
    """

    bytes: int
    born: int
    died: int | None = None
    kept: str = ""


@dataclass(slots=True)
class TraceTape:
    """The record of a traced step."""

    events: list[KernelEvent] = field(default_factory=list)
    views: int = 0  # operations that run no kernel, but take time of the host
    storages: list[TracedStorage] = field(default_factory=list)

    def drop(self, events: int, views: int) -> None:
        """Forget the first `events` events and `views` views, and storages that died before."""
        del self.events[:events]
        self.views -= views
        for each in self.storages:
            if each.died is not None and each.died <= events:
                each.born, each.died, each.bytes = 0, 0, 0
                continue
            each.born = max(0, each.born - events)
            each.died = each.died and each.died - events


class TraceRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch declares it
    """Records on `tape` every kernel and every allocation of the code that runs in its context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch declares it
        self.tape = TraceTape()
        self._ids: dict[int, int] = {}
        self._refs: list[weakref.finalize[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        reads = tuple(self.see(each) for each in ins)
        writes = tuple(self.see(each) for each in outs)
        if not outs or (not func._schema.is_mutable and all(each in reads for each in writes)):
            self.tape.views += bool(outs)
            return out  # This operation runs no kernel, for example a view.
        kind = classify(str(func.overloadpacket))
        if kind:
            name = str(func.overloadpacket).removeprefix("aten.")
            flops, size = count_flops(kind, name, args, ins, outs)
            wide = ins[0] if ins and kind in _PRODUCTS else outs[0]
            moved = moved_bytes(kind, name, ins, outs)
            backward = torch._C._current_graph_task_id() != -1
            dtype = str(wide.dtype).removeprefix("torch.")
            window = find_window(kind, name, args, outs)
            self.tape.events.append(
                KernelEvent(kind, name, dtype, backward, flops, moved, size, reads, writes, window)
            )
        return out

    def see(self, tensor: torch.Tensor, kept: str = "") -> int:
        """Return the number of the tensor's storage; register the storage if it is new."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # Sparse tensors, for example, have no storage.
            return -1
        return self.see_storage(storage, kept)

    def see_storage(self, storage: Any, kept: str = "") -> int:
        """Do the same as `see` for a storage."""
        number = self._ids.get(storage._cdata)
        if number is None:
            number = self._ids[storage._cdata] = len(self.tape.storages)
            size = -(-storage.nbytes() // _BLOCK) * _BLOCK
            self.tape.storages.append(TracedStorage(size, len(self.tape.events)))
            self._refs.append(weakref.finalize(storage, self._free, storage._cdata))
        if kept:
            self.tape.storages[number].kept = kept
        return number

    def find_kept(self, storage: Any) -> str:
        """Return for what a storage is kept, as in `TracedStorage`."""
        number = self._ids.get(storage._cdata)
        return "" if number is None else self.tape.storages[number].kept

    def _free(self, key: int) -> None:
        number = self._ids.pop(key, None)
        if number is not None:
            self.tape.storages[number].died = len(self.tape.events)

    def watch(self, model: torch.nn.Module, recurse: bool = True) -> None:
        """Mark the storages of the model's parameters and buffers, to distinguish these storages
        from tensors of the step. If `recurse` is false, submodules are left out.
        """
        for each in model.parameters(recurse):
            self.see(each, "parameter")
        for tensor in model.buffers(recurse):
            self.see(tensor, "buffer")

    def close(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Mark the parameters and their gradients, and stop recording when tensors are freed."""
        for each in parameters:
            self.see(each, "parameter")
            if each.grad is not None:
                self.see(each.grad, "gradient")
        for ref in self._refs:
            ref.detach()


def trace_step(
    model: torch.nn.Module,
    step: Callable[[], torch.Tensor],
    *,
    batch: int,
    precision: str = "fp32",
    optimizer: str = "adamw",
    name: str = "",
) -> dict[str, Any]:
    """Run one micro-batch and return its work profile. `step` runs the forward pass on `batch`
    samples and returns the loss.

    The model and the data can be fake (created in `fake_device`) or real. The optimizer does not
    run; the profile contains only its name.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    model.zero_grad()
    recorder = TraceRecorder()
    recorder.watch(model)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with as_on_gpu(), recorder:
        with torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None):
            loss = step()
        torch.autograd.backward(loss.float().sum())
    recorder.close(model.parameters())
    return summarize(
        recorder.tape, parameters, batch=batch, precision=precision, optimizer=optimizer, name=name
    )


def allows_tf32() -> bool:
    """Return whether the script allows TF32 for the products of float32 numbers on CUDA."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # The script used the newer setting, which the older function refuses.
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def summarize(
    tape: TraceTape,
    parameters: list[torch.nn.Parameter],
    *,
    batch: int,
    precision: str,
    optimizer: str,
    name: str,
) -> dict[str, Any]:
    """Compute the profile from a tape. Equal kernels become one entry with a count. Memory is
    computed twice: once for eager execution, and once for a compiler that fuses pointwise kernels.
    """
    fused, gone = _fuse(tape)
    kept = Counter[str]()
    for each in tape.storages:
        kept[each.kept] += each.bytes
    eager, compiled = _peaks(tape, frozenset()), _peaks(tape, gone)
    return {
        "format": "cavvy-work-profile/1",
        "name": name,
        "batch": batch,
        "precision": precision,
        "optimizer": optimizer,
        "tf32": allows_tf32(),
        "parameters": sum(each.numel() for each in parameters),
        "tensors": len(parameters),
        "views": tape.views,
        "memory": {
            "parameters": kept["parameter"],
            "gradients": kept["gradient"],
            "buffers": kept["buffer"],
            "activations": eager,
            "activations_compiled": compiled,
            "reserved": _list_reserved(tape),
        },
        "ops": _count_kernels(tape, fused),
        "collectives": [],
    }


def _count_kernels(tape: TraceTape, fused: list[int]) -> list[dict[str, Any]]:
    """Return the distinct kernels, each with the number of times that it runs."""
    ops: Counter[tuple[Any, ...]] = Counter()
    fixed = _list_fixed(tape)
    for event, bytes_left in zip(tape.events, fused, strict=True):
        # A look-up reads a part of a table for each sample, so what it reads grows with the batch.
        reads = set() if event.kind == "index" else {*event.reads} & fixed
        writes = {*event.writes} & fixed
        fixed_bytes = sum(tape.storages[each].bytes for each in reads | writes)
        what = (event.kind, event.name, event.dtype, event.backward, event.flops, event.bytes)
        is_fixed = bool(writes) and len(writes) == len({*event.writes})
        ops[*what, fixed_bytes, is_fixed, bytes_left, event.size, event.window] += 1
    names = (
        *("kind", "name", "dtype", "backward", "flops", "bytes"),
        *("fixed_bytes", "fixed_result", "fused_bytes", "size", "window"),
    )
    return [dict(zip(names, key, strict=True), count=count) for key, count in ops.items()]


def _is_kept(tape: TraceTape, number: int) -> bool:
    return number >= 0 and tape.storages[number].kept == "parameter"


def _list_casts(tape: TraceTape) -> set[int]:
    """Return the storages that are computed from parameters only, such as parameters cast to
    another type.
    """
    return {
        each
        for event in tape.events
        if event.reads and all(_is_kept(tape, read) for read in event.reads)
        for each in event.writes
        if each >= 0
    }


def _list_fixed(tape: TraceTape) -> set[int]:
    """Return the storages whose size does not depend on the batch: parameters and their gradients,
    parameters cast to another type, and gradients before they are cast or added.
    """
    kept = {
        number
        for number, each in enumerate(tape.storages)
        if each.kept in ("parameter", "gradient")
    }
    return kept | _list_casts(tape) | _list_raw_gradients(tape)


def _list_raw_gradients(tape: TraceTape) -> set[int]:
    """Return the storages from which casts and additions alone make the gradients of parameters. A
    storage that is more than twice as large as the result is left out, because the operation may
    sum over the batch.
    """
    grads = {number for number, each in enumerate(tape.storages) if each.kept == "gradient"}
    readers: dict[int, list[KernelEvent]] = {}
    for event in tape.events:
        for each in event.reads:
            readers.setdefault(each, []).append(event)

    def only_becomes(number: int, event: KernelEvent) -> bool:
        size = tape.storages[number].bytes
        return (
            event.kind in ("copy", "pointwise")
            and all(each in grads for each in event.writes)
            # An unknown operation, which counts as pointwise, may sum over the batch.
            and all(size <= 2 * tape.storages[each].bytes for each in event.writes)
        )

    raw = set[int]()
    # in reverse, because the readers of a storage run after the kernel that writes it
    for event in reversed(tape.events):
        for each in event.writes:
            read_by = readers.get(each)
            if each < 0 or tape.storages[each].kept or not read_by:
                continue
            if all(only_becomes(each, reader) for reader in read_by):
                raw.add(each)
                grads.add(each)
    return raw


def _fuse(tape: TraceTape) -> tuple[list[int], frozenset[int]]:
    """Simulate a compiler that fuses kernels. Returns the bytes that each event moves, and the
    storages that the compiler recomputes or never creates.

    All pointwise and reduction kernels between two matrix products become one kernel. If all
    kernels that read a tensor are pointwise or reduction kernels, the tensor is not written to
    memory. If the backward pass needs such a tensor, the tensor is recomputed. A tensor that a
    matrix product reads in the backward pass stays in memory. The partitioner of PyTorch's compiler
    Inductor chooses tensors by these rules too.
    """
    maker: dict[int, KernelEvent] = {}
    readers: dict[int, list[KernelEvent]] = {}
    for event in tape.events:
        for each in event.reads:
            readers.setdefault(each, []).append(event)
        for each in event.writes:
            maker.setdefault(each, event)
    gone = frozenset(
        number
        for number, event in maker.items()
        if number >= 0
        and not tape.storages[number].kept
        and event.kind in FUSIBLE
        and readers.get(number)
        and all(each.kind in FUSIBLE for each in readers[number])
    )
    seen: set[tuple[int, bool]] = set()
    moved = []
    for event in tape.events:
        if event.kind not in FUSIBLE:
            moved.append(event.bytes)
            continue
        total = 0
        for each in {*event.reads, *event.writes} - gone - {-1}:
            if (each, event.backward) not in seen:
                seen.add((each, event.backward))
                total += tape.storages[each].bytes
        moved.append(min(total, event.bytes))
    return moved, gone


def _peaks(tape: TraceTape, gone: frozenset[int]) -> list[tuple[int, int, int]]:
    """Return the bytes of memory in use at the moments of highest use, without parameters and
    buffers. The result covers several moments, because the moment of the peak depends on the batch
    size and on the sharding of the gradients.

    Each result is a tuple (activations, fixed, gradients). `fixed` is the part of the activations
    that does not grow with the batch: cast parameters, and gradients before they are cast.
    """
    changes = _list_size_changes(tape, gone)
    alive = [0, 0, 0]
    best: dict[tuple[float, float], tuple[float, tuple[int, int, int]]] = {}
    for index in sorted(changes):
        for which, size in changes[index]:
            alive[which] += size
        for batch in _BATCHES:
            for share in _SHARES:
                height = alive[0] * batch + alive[1] + alive[2] * share
                if height > best.get((batch, share), (-1.0, ()))[0]:
                    best[batch, share] = height, (alive[0] + alive[1], alive[1], alive[2])
    return sorted({moment for _, moment in best.values()})


def _list_reserved(tape: TraceTape) -> list[tuple[float, int, int]]:
    """Return for some multiples of the batch size: the multiple, the bytes that PyTorch's allocator
    reserves beyond those in use at the peak, and the bytes of the largest tensor of the step.
    """
    fixed = _list_casts(tape) | _list_raw_gradients(tape)
    found = []
    for multiple in _RESERVED:
        sizes = [
            each.bytes
            if each.kept or number in fixed or not each.bytes
            else max(_BLOCK, int(each.bytes * multiple))
            for number, each in enumerate(tape.storages)
        ]
        spaces = {
            index: int(event.bytes * multiple)
            for index, event in enumerate(tape.events)
            if needs_conversion(event.window, event.size)
        }
        reserved, used = simulate(tape.storages, sizes, spaces)
        largest = max(
            (size for size, each in zip(sizes, tape.storages, strict=True) if not each.kept),
            default=0,
        )
        found.append((multiple, reserved - used, largest))
    return found


def _list_size_changes(tape: TraceTape, gone: frozenset[int]) -> dict[int, list[tuple[int, int]]]:
    """Return a dictionary that maps the index of each event to the changes of memory at this event.
    Each change is a pair: the kind (0: activations, 1: activations of a fixed size, 2: gradients)
    and the number of bytes.
    """
    fixed = _list_casts(tape) | _list_raw_gradients(tape)
    changes: dict[int, list[tuple[int, int]]] = {}
    for number, storage in enumerate(tape.storages):
        if number in gone or storage.kept in ("parameter", "buffer"):
            continue
        which = 2 if storage.kept == "gradient" else 1 if number in fixed else 0
        changes.setdefault(storage.born, []).append((which, storage.bytes))
        if storage.died is not None and storage.kept != "gradient":
            changes.setdefault(storage.died, []).append((which, -storage.bytes))
    return changes
