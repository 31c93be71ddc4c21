"""Turns one training step under fake tensors into a work profile, without a device: computation,
traffic and memory.

The profile is plain data (`cavvy estimate` and `cavvy plan` read it). Operations are recorded as a
CUDA device would run them: autocast's float32 list, dropout with byte masks and fused attention
replace the CPU's own.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cavvy.train.operations import FUSIBLE, as_on_gpu, classify, count_flops, moved_bytes

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
)  # multiples of the traced batch for which the peak should be right
_SHARES = (1, 1 / 8, 0)  # bytes of the gradients
_BLOCK = 512  # bytes: PyTorch's caching allocator rounds every request up to a multiple


@dataclass(slots=True)
class KernelEvent:
    """One kernel: its kind, its reads and writes (by storage), and the memory in use after it."""

    kind: str
    dtype: str
    backward: bool
    flops: float
    bytes: int
    size: tuple[int, int, int, int]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(slots=True)
class TracedStorage:
    """One allocation: its size and lifetime, in events. `kept` ones are parameters, gradients and
    the like.
    """

    bytes: int
    born: int
    died: int | None = None
    kept: str = ""


@dataclass(slots=True)
class TraceTape:
    """The record of a traced step."""

    events: list[KernelEvent] = field(default_factory=list)
    storages: list[TracedStorage] = field(default_factory=list)


class TraceRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch declares it
    """Writes every kernel and allocation of the code under it to `tape`."""

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
            return out  # a view
        kind = classify(str(func.overloadpacket))
        if kind:
            flops, size = count_flops(kind, str(func.overloadpacket), args, outs)
            wide = ins[0] if ins and kind in ("matmul", "conv", "attention") else outs[0]
            moved = moved_bytes(kind, ins, outs)
            backward = torch._C._current_graph_task_id() != -1
            name = str(wide.dtype).removeprefix("torch.")
            self.tape.events.append(
                KernelEvent(kind, name, backward, flops, moved, size, reads, writes)
            )
        return out

    def see(self, tensor: torch.Tensor, kept: str = "") -> int:
        """Return the number of the tensor's storage; register the storage if it is new."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse tensors and similar ones have no such storage
            return -1
        number = self._ids.get(storage._cdata)
        if number is None:
            number = self._ids[storage._cdata] = len(self.tape.storages)
            size = -(-storage.nbytes() // _BLOCK) * _BLOCK
            self.tape.storages.append(TracedStorage(size, len(self.tape.events)))
            self._refs.append(weakref.finalize(storage, self._free, storage._cdata))
        if kept:
            self.tape.storages[number].kept = kept
        return number

    def _free(self, key: int) -> None:
        number = self._ids.pop(key, None)
        if number is not None:
            self.tape.storages[number].died = len(self.tape.events)

    def watch(self, model: torch.nn.Module) -> None:
        """Separate parameters and buffers from the step's own tensors."""
        for each in model.parameters():
            self.see(each, "parameter")
        for tensor in model.buffers():
            self.see(tensor, "buffer")

    def close(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Mark these and their gradients, and stop watching the tensors that are still alive."""
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
    """The work profile of one micro-batch: `step` runs the forward pass on `batch` samples and
    returns the loss.

    Model and data may be fake (made under `fake_device`) or real. The optimizer is counted by its
    kind, not run.
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


def summarize(
    tape: TraceTape,
    parameters: list[torch.nn.Parameter],
    *,
    batch: int,
    precision: str,
    optimizer: str,
    name: str,
) -> dict[str, Any]:
    """The profile of a tape: equal kernels counted together, memory replayed unchanged and with
    fused pointwise code.
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
        "parameters": sum(each.numel() for each in parameters),
        "tensors": len(parameters),
        "memory": {
            "parameters": kept["parameter"],
            "gradients": kept["gradient"],
            "buffers": kept["buffer"],
            "activations": eager,
            "activations_compiled": compiled,
        },
        "ops": _count_kernels(tape, fused),
        "collectives": [],
    }


def _count_kernels(tape: TraceTape, fused: list[int]) -> list[dict[str, Any]]:
    """The kinds of kernels, each with how often it runs."""
    ops: Counter[tuple[Any, ...]] = Counter()
    for event, bytes_left in zip(tape.events, fused, strict=True):
        fixed = sum(tape.storages[each].bytes for each in {*event.reads} if _is_kept(tape, each))
        what = (event.kind, event.dtype, event.backward, event.flops, event.bytes)
        ops[*what, fixed, bytes_left, event.size] += 1
    names = ("kind", "dtype", "backward", "flops", "bytes", "fixed_bytes", "fused_bytes", "size")
    return [dict(zip(names, key, strict=True), count=count) for key, count in ops.items()]


def _is_kept(tape: TraceTape, number: int) -> bool:
    return number >= 0 and tape.storages[number].kept == "parameter"


def _fuse(tape: TraceTape) -> tuple[list[int], frozenset[int]]:
    """The result of a fusing compiler: bytes moved per event, and the storages that it recomputes
    or never creates.

    Pointwise and reducing kernels between matrix products become one. Tensors that only such
    kernels read are not written, or are recomputed in the backward pass (Inductor's partitioner
    keeps what a matrix product reads there).
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
    """Memory in use besides parameters and buffers, in bytes: activations, the part of them that
    does not grow with the batch (parameters cast to another type), and gradients.

    The result has the moments with the highest use for some batch and some sharding of the
    gradients.
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


def _list_size_changes(tape: TraceTape, gone: frozenset[int]) -> dict[int, list[tuple[int, int]]]:
    """By event: whether activations, casts (1) or gradients (2) change, and by how many bytes."""
    cast = {
        each
        for event in tape.events
        if all(_is_kept(tape, read) for read in event.reads)
        for each in event.writes
    }
    changes: dict[int, list[tuple[int, int]]] = {}
    for number, storage in enumerate(tape.storages):
        if number in gone or storage.kept in ("parameter", "buffer"):
            continue
        which = 2 if storage.kept == "gradient" else 1 if number in cast else 0
        changes.setdefault(storage.born, []).append((which, storage.bytes))
        if storage.died is not None and storage.kept != "gradient":
            changes.setdefault(storage.died, []).append((which, -storage.bytes))
    return changes
