"""Copies batches to the device of a rank. If the device is an accelerator, a thread with a separate
stream copies batches before they are needed.
"""

import atexit
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

WITH_STREAMS = ("cuda", "xpu")  # Torch also uses "cuda" for ROCm; MPS has only one stream.
LOOK_S = 0.1  # seconds after which a waiting thread checks again whether it must end
END_S = 5.0  # maximum seconds to wait for a thread to end, because its data source may not answer
Move = Callable[[Any], Any]


class BatchReader(Protocol):
    """Yields batches for one rank in two steps, read and place, which the clock measures
    separately.
    """

    def read(self) -> Any:
        """Return the next batch, or None at the end. Before a batch is used, it must be passed to
        `place`.
        """

    def place(self, values: Any) -> Any:
        """Return the batch on the device. Operations after this call can use the batch."""

    def close(self) -> None:
        """Stop reading. Later calls do nothing."""


def open_batches(batches: Generator[Any], move: Move, device: Any) -> BatchReader:
    """Read batches for a device. `move` copies a batch to the device."""
    if device.type in WITH_STREAMS:
        return StagedBatches(batches, move, AcceleratorStream(device))
    return DirectBatches(batches, move)


def count_staged(device: Any) -> int:
    """Return the maximum number of batches that are copied to this device in advance."""
    return 2 if device.type in WITH_STREAMS else 0


class DirectBatches:
    """Batches that `place` copies to the device."""

    def __init__(self, batches: Generator[Any], move: Move) -> None:
        self._batches, self._move = batches, move

    def read(self) -> Any:
        return next(self._batches, None)

    def place(self, values: Any) -> Any:
        return self._move(values)

    def close(self) -> None:
        self._batches.close()


class CopyStream(Protocol):
    """The device stream on which a background thread copies batches. The model does not compute on
    this stream.
    """

    def begin(self) -> None:
        """Use the stream for the operations of the calling thread."""

    def mark(self) -> Any:
        """Return an event that completes when all copies so far are complete."""

    def wait(self, event: Any, values: Any) -> None:
        """Make the current stream of the calling thread wait for an event. The batch's memory is
        not reused before the operations of the current stream have used the batch.
        """


class AcceleratorStream:
    """A stream of a CUDA, ROCm or XPU device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream: Any = None

    def begin(self) -> None:
        if self._device.index is not None:  # Each thread has a separate current device and stream.
            torch.accelerator.set_device_index(self._device.index)
        self._stream = torch.Stream(self._device)
        torch.accelerator.set_stream(self._stream)

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, event: Any, values: Any) -> None:
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(event)
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.device.type == self._device.type:
                value.record_stream(current)


class StagedBatches:
    """Batches that a thread reads, puts into page-locked memory and copies while the model
    computes. At most two batches are prepared in advance: one that waits to be read and one that is
    being copied.
    """

    def __init__(self, batches: Generator[Any], move: Move, stream: CopyStream) -> None:
        self._batches, self._move, self._stream = batches, move, stream
        self._ready: Queue[tuple[Any, Any, BaseException | None]] = Queue(maxsize=1)
        self._ended = Event()
        self._thread = Thread(target=self._stage, name="batch stager", daemon=True)
        # A thread that is still running when the interpreter exits would abort the process.
        atexit.register(self.close)
        self._thread.start()

    def read(self) -> Any:
        """Return the next batch with its event, or None at the end. If the thread failed, its error
        is raised.
        """
        if self._ended.is_set():
            return None
        values, event, error = self._ready.get()
        if values is None:
            self.close()
            if error is not None:
                raise error
            return None
        return values, event

    def place(self, values: Any) -> Any:
        batch, event = values
        self._stream.wait(event, batch)
        return batch

    def close(self) -> None:
        """Stop reading. Wait up to END_S seconds until the reader thread has finished its current
        batch and ends.
        """
        atexit.unregister(self.close)
        self._ended.set()
        with suppress(Empty):
            self._ready.get_nowait()
        self._thread.join(END_S)

    def _stage(self) -> None:
        error: BaseException | None = None
        try:
            with closing(self._batches):
                self._stream.begin()
                for values in self._until_ended():
                    moved = self._move(values)
                    self._put(moved, self._stream.mark(), None)
        except BaseException as raised:  # noqa: BLE001 - the training loop raises it
            error = raised
        self._put(None, None, error)

    def _until_ended(self) -> Iterator[Any]:
        while not self._ended.is_set() and (values := next(self._batches, None)) is not None:
            yield values

    def _put(self, values: Any, event: Any, error: BaseException | None) -> None:
        while not self._ended.is_set():
            with suppress(Full):
                return self._ready.put((values, event, error), timeout=LOOK_S)
        return None
