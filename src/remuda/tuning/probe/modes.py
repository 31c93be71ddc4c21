"""What a window of steps changes: each mode takes one cost away, so that the difference is that cost."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map

from remuda.train import run as runs
from remuda.train.checkpoint.keeper import SAVE, Keeper
from remuda.train.data import stream
from remuda.train.data.stream import Data
from remuda.train.parallel.reduce import Reducer
from remuda.train.step import Gradients

NAMES = ("", "cached", "resident", "alone", "double", "larger", "bf16", "saving")


class Modes:
    """The mode at hand. `cached`: the last batch again, without reading. `resident`: it also lies on the device
    already. The others build upon that: `alone`: no gradients are sent; `double`: a batch twice as large; `larger`:
    twice the micro-batch; `bf16`: lower precision. `saving`: real data, and a checkpoint.
    """

    def __init__(self) -> None:
        self.run: Any = None
        self.data: Any = None
        self.name = ""
        self._reading: dict[str, int] = {}
        self._moved: Any = None
        self._saves = 0

    def choose(self, name: str, skip: int = 0, reading: "dict[str, int] | None" = None) -> None:
        if name not in NAMES:
            raise ValueError(f"mode {name!r} is none of {', '.join(NAMES)}")
        micro = self.run._state.micro
        if self.name == "larger" != name:
            micro.settle(max(micro.size // 2, 1))
        elif name == "larger" != self.name:
            micro.settle(micro.size * 2)
        self.name, self._reading = name, reading or {}
        self._saves = skip + 1 if name == "saving" else 0  # after the first step that counts

    @contextmanager
    def installed(self) -> Iterator[None]:
        modes, read, move, forward = self, Data.read, stream.move, Gradients._forward

        def read_as_told(data: Any, share: Any, until: int, **options: int) -> Generator[Any]:
            return modes._read(read, data, share, until, options)

        def move_as_told(values: Any, device: Any, **options: bool) -> Any:
            if modes.name in ("", "cached", "saving") or modes._moved is None:
                modes._moved = move(values, device, **options)
            return tree_map(_twice, modes._moved) if modes.name == "double" else modes._moved

        def wish(keeper: Any) -> int:
            modes._saves -= 1
            return SAVE if modes._saves == 0 else 0

        def forward_as_told(gradients: Any) -> Any:
            if modes.name == "bf16":
                return torch.autocast(modes.run.world.device.torch.type, torch.bfloat16)
            return forward(gradients)

        def unless_alone(method: Any) -> Any:
            return lambda reducer: None if modes.name == "alone" else method(reducer)

        with ExitStack() as stack:
            for where, name, new in (
                (Data, "read", read_as_told), (runs, "move", move_as_told), (Keeper, "wish", wish),
                (Gradients, "_forward", forward_as_told), (Reducer, "arm", unless_alone(Reducer.arm)),
                (Reducer, "finish", unless_alone(Reducer.finish)),
            ):  # fmt: skip
                stack.enter_context(patch.object(where, name, new))
            yield

    def _read(self, read: Any, data: Any, share: Any, until: int, options: dict[str, int]) -> Generator[Any]:
        """Batches as ever, or the last one again; a change of how data is read begins again from where the run is."""
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
