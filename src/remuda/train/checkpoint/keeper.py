"""When a run saves, what, and when it leaves: one step for all ranks."""

import logging
from time import monotonic, perf_counter
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from remuda.train.checkpoint.agent import tell_cost
from remuda.train.checkpoint.interval import follow, told
from remuda.train.checkpoint.notice import Notices
from remuda.train.checkpoint.remote import Place
from remuda.train.checkpoint.store import Store, copy_tensors
from remuda.train.world import World

log = logging.getLogger("remuda.train")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter name: stages of a pipeline do not collide
LEAVE, SAVE = 2, 1  # wishes of a rank; the greatest counts
LOOK_S = 1.0  # between two looks at what Remuda says of the interval


class Keeper:
    """Saves a model and its optimizers, with facts that are plain data, into a place."""

    def __init__(self, where: str, world: World, every: "float | str") -> None:
        self.interval = told(every)
        self.notices = Notices()
        self._world = world
        self._place = Place(where, world)
        self.store = Store(self._place.local, world, self._place.send)
        self._began = monotonic()
        self._looked = 0.0
        self._stall: float | None = None  # of the save in flight, so far

    def wish(self) -> int:
        """What this rank wants to happen after the step at hand."""
        if self.notices.pending():
            return LEAVE
        return SAVE if self._world.is_first and self._is_due() else 0

    def resume(self, model: Any, optimizers: list[Any]) -> dict[str, Any] | None:
        """Load the newest complete checkpoint; its facts, None where there is none."""
        self._place.fetch()
        found = self.store.latest() if self._world.is_first else None
        step = self._world.tell(found.step if found else None)
        if self._world.is_first:
            self.store.clean()
        self._world.agree([0])  # nobody writes before it is clean
        if step is None:
            return None
        found = self.store.latest()
        if found is None or found.step != step:
            raise RuntimeError(f"rank {self._world.rank} does not see checkpoint {step} in {self.store.folder}")
        state = gather(model, optimizers)
        self.store.load(found, state)
        restore(model, optimizers, state)
        return found.facts

    def save(self, step: int, model: Any, optimizers: list[Any], facts: dict[str, Any], *, wait: bool) -> bool:
        """Begin to save, or with `wait` be done with it; whether what was waited for is safe. On all ranks."""
        begun = perf_counter()
        self._measured()
        self.store.wait()
        self.store.save(step, gather(model, optimizers), facts)
        self._stall = perf_counter() - begun
        self._began = monotonic()
        safe = self.store.wait() if wait else True
        if wait:
            self._stall = None  # this was no save beside the computation
            safe = not self._world.agree([not safe])[0]
        return safe

    def join(self) -> None:
        """From here on parameters may change."""
        if self._stall is None:
            return
        begun = perf_counter()
        self.store.join()
        self._stall += perf_counter() - begun
        self._measured()

    def close(self) -> None:
        self.notices.close()
        self.store.close()

    def _measured(self) -> None:
        """Learn from a save once it is safe."""
        if self._stall is not None and not self.store.is_busy and self.store.seconds:
            self.interval.measured(self._stall, self.store.seconds)
            if self._world.is_first:
                tell_cost(self._stall)
            self._stall = None

    def _is_due(self) -> bool:
        now = monotonic()
        if now - self._looked > LOOK_S:
            self._looked = now
            follow(self.interval)
        return not self.store.is_busy and now - self._began >= self.interval.seconds


def gather(model: Any, optimizers: list[Any]) -> dict[str, Any]:
    """The live tensors, but copies of buffers: a forward pass may change those while they are staged."""
    weights = get_model_state_dict(model)
    buffers = {name for name, _ in model.named_buffers()}
    weights |= copy_tensors({name: value for name, value in weights.items() if name in buffers})
    moments = {str(n): get_optimizer_state_dict(model, o, options=FLAT) for n, o in enumerate(optimizers)}
    return {"model": weights, "optimizers": moments}


def restore(model: Any, optimizers: list[Any], state: dict[str, Any]) -> None:
    set_model_state_dict(model, state["model"])
    for number, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(model, optimizer, state["optimizers"][str(number)], options=FLAT)
