"""Finds copies of parameters that a script keeps, such as a moving average of the parameters."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cavvy.tracer.operations import find_place
from cavvy.tracer.trace import TraceRecorder

_CLONES = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
_COPY = torch.ops.aten.copy_.default


class CopyWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch declares it
    """Records which storages are copies of which other storages, except while `is_paused` returns
    true. Within a step, most copies are temporary, and the trace records these copies itself.
    """

    def __init__(self, is_paused: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch declares it
        self._is_paused = is_paused
        # for each copy: its source, the source of its source, and so on
        self._sources = weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (func in _CLONES or func is _COPY) and not self._is_paused():
            self._note(out, args[func is _COPY])
        return out

    def _note(self, made: torch.Tensor, source: torch.Tensor) -> None:
        try:
            own, other = made.untyped_storage(), source.untyped_storage()
        except NotImplementedError:  # Sparse tensors, for example, have no storage.
            return
        known = (*self._sources.get(other, ()), *self._sources.get(own, ()))
        self._sources[own] = tuple(dict.fromkeys((weakref.ref(other), *known)))
        place = find_place(other)
        if place:
            own.place = place  # type: ignore[attr-defined]  # an attribute of this module

    def add_to(self, recorder: TraceRecorder, others: set[int]) -> None:
        """Mark each copy of a parameter or buffer that exists now as a parameter or buffer. A copy
        on another device than its source does not count. `others` are the ids of storages that
        count elsewhere.
        """
        for copy, sources in [*self._sources.items()]:
            alive = [each for ref in sources if (each := ref()) is not None]
            kinds = [
                recorder.find_kept(each) for each in alive if find_place(each) == find_place(copy)
            ]
            kept = next((each for each in kinds if each in ("parameter", "buffer")), "")
            if kept and copy._cdata not in others and not recorder.find_kept(copy):
                recorder.see_storage(copy, kept)
