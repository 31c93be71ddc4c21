"""The modes of a window of steps. Each mode removes or adds one cost. The size of the cost is the
difference in time between windows with and without the mode.
"""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from cavvy.capabilities.tuning.probe.look import APART, INSIDE
from cavvy.train import run as runs
from cavvy.train.checkpoint.async_saver import SAVE, AsyncSaver
from cavvy.train.data import stream
from cavvy.train.data.stream import Batch, Data
from cavvy.train.parallel.reduce import GradientReducer
from cavvy.train.parallel.replicas import ReplicaCheck
from cavvy.train.step import StepGradients

NAMES = ("", "cached", "resident", "alone", "double", "larger", "bf16", "saving")
GROWN = ("double", "larger")
# By how much the micro-batch is enlarged, for each kind of device. The factor is 2 for other kinds,
# which have less memory.
GROWTH = {"cpu": 4}
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
)

# In the mode "alone", gradients are not summed, so the copies of the model differ afterwards.
# In the mode "double", a batch contains more samples than its size.
UNCOMPARED: list[tuple[Any, str, Any]] = [
    (Batch, "check", lambda batch: None),
    (ReplicaCheck, "due", lambda check: False),
    (ReplicaCheck, "compare", lambda check: None),
]


class WindowModes:
    """Applies the current mode. `cached` repeats the last batch without reading. `resident` is like
    `cached`, and also keeps the batch on the device. Each of four other modes is `resident` with
    one more change. `alone` sends no gradients, `double` doubles the batch, `larger` makes the
    micro-batch `GROWTH` times as large, and `bf16` lowers the precision. `saving` reads data as
    usual and saves a checkpoint.
    """

    def __init__(self) -> None:
        self.run: Any = None
        self.data: Any = None
        self.name = ""
        self._reading: dict[str, int] = {}
        self._moved: Any = None
        self._saves = 0
        self._size = 0  # the micro-batch before the current mode
        self._ours: list[Any] = []  # wrapped collectives, which measure the time of each call

    def choose(self, name: str, skip: int = 0, reading: "dict[str, int] | None" = None) -> None:
        if name not in NAMES:
            raise ValueError(f"mode {name!r} is not one of {', '.join(NAMES)}")
        micro = self.run._state.micro
        if self.name in GROWN and self._size:
            micro.settle(
                self._size
            )  # This restores the size even if the mode ran out of memory and reduced it.
        self._size = micro.size
        if name == "larger":
            micro.settle(self._size * GROWTH.get(self.run.world.device.kind, 2))
        if self._ours:
            self._time_collectives()  # The script may have replaced collectives.
        self.name, self._reading = name, reading or {}
        self._saves = skip + 1 if name == "saving" else 0  # Save after the first measured step.

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for where, name, new in self._list_patches():
                stack.enter_context(patch.object(where, name, new))
            for name in COLLECTIVES if dist.is_available() else ():
                # Each function is replaced by itself, so that the original is restored at the end.
                stack.enter_context(patch.object(dist, name, getattr(dist, name)))
            self._time_collectives()
            yield

    def _list_patches(self) -> list[tuple[Any, str, Any]]:
        """Return the patches that implement the modes. Each patch is a tuple of an object, the name
        of the attribute to replace, and the replacement.
        """
        modes, read, move, forward = self, Data.read, stream.move, StepGradients.forward

        def read_as_told(data: Any, share: Any, until: int, **options: int) -> Generator[Any]:
            return modes._read(read, data, share, until, options)

        def move_as_told(values: Any, device: Any, **options: bool) -> Any:
            if modes.name in ("", "cached", "saving") or modes._moved is None:
                modes._moved = move(values, device, **options)
            return tree_map(_twice, modes._moved) if modes.name == "double" else modes._moved

        def forward_as_told(gradients: Any) -> Any:
            if modes.name == "bf16":
                return torch.autocast(modes.run.world.device.torch.type, torch.bfloat16)
            return forward(gradients)

        def unless_alone(method: Any) -> Any:
            return lambda reducer: None if modes.name == "alone" else method(reducer)

        return [
            (Data, "read", read_as_told),
            (runs, "move", move_as_told),
            (AsyncSaver, "wish", lambda saver: modes._wish()),
            (StepGradients, "forward", forward_as_told),
            *UNCOMPARED,
            *(
                (GradientReducer, name, unless_alone(getattr(GradientReducer, name)))
                for name in ("arm", "finish")
            ),
        ]

    def _wish(self) -> int:
        self._saves -= 1
        return SAVE if self._saves == 0 else 0

    def _time_collectives(self) -> None:
        """Wrap collectives that are not wrapped yet. The first call wraps all collectives; later
        calls wrap collectives that the script has replaced.
        """
        for name in COLLECTIVES if dist.is_available() else ():
            made = getattr(dist, name)
            if made not in self._ours:
                self._ours.append(self._timed(made))
                setattr(dist, name, self._ours[-1])

    def _timed(self, collective: Any) -> Any:
        """Wrap a collective, so that the script's calls of the collective are counted as
        communication. During communication, a rank can wait for a late rank.
        """

        @wraps(collective)
        def call(*given: Any, **options: Any) -> Any:
            clock = None if self.run is None else self.run.clock
            if clock is None or any(clock.part(name).begun for name in APART):
                return collective(*given, **options)
            before = clock.parts["communication"]
            with clock.part("communication"):
                made = collective(*given, **options)
            for name in INSIDE:
                if clock.part(name).begun:
                    clock.parts[name] -= clock.parts["communication"] - before
            return made

        return call

    def _read(
        self, read: Any, data: Any, share: Any, until: int, options: dict[str, int]
    ) -> Generator[Any]:
        """Yield new batches or repeat the last batch, depending on the mode. If the number of
        readers changes, reading starts a second time, at the run's current position.
        """
        self.data, kept, batches, opened = data, None, None, self._reading
        try:
            while True:
                if self.name not in ("", "saving") and kept is not None:
                    yield kept
                    continue
                if batches is None or opened != self._reading:
                    if batches is not None:
                        batches.close()
                    opened = self._reading
                    batches = read(data, share, until, **{**options, **opened})
                kept = next(batches)
                yield kept
        finally:
            if batches is not None:
                batches.close()


def _twice(value: Any) -> Any:
    return torch.cat([value, value]) if isinstance(value, torch.Tensor) and value.dim() else value
