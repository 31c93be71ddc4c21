"""Decides when a run saves, what, and when it exits: at the same step on all ranks."""

import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from cavvy.train.checkpoint import emergency_save
from cavvy.train.checkpoint.agent import tell_cost
from cavvy.train.checkpoint.interval import follow, told
from cavvy.train.checkpoint.notice import AGAIN, PreemptionNotices
from cavvy.train.checkpoint.remote import CheckpointLocation
from cavvy.train.checkpoint.store import CheckpointStore
from cavvy.train.micro import OutOfMemory
from cavvy.train.step import StepGradients
from cavvy.train.world import RankWorld

log = logging.getLogger("cavvy.train")
FLAT = StateDictOptions(
    flatten_optimizer_state_dict=True
)  # by parameter name, so that pipeline stages do not collide
Facts = Callable[[], dict[str, Any]]  # collecting them is part of the cost of a save
LEAVE, SAVE = 2, 1  # requests of a rank; the highest one wins
LOOK_S = 1.0  # seconds between two checks of Cavvy's interval


class AsyncSaver:
    """Saves a model and its optimizers, with plain-data facts, to a location."""

    def __init__(self, where: "str | Path", world: RankWorld, every: "float | str") -> None:
        self.interval = told(every)
        self.notices = PreemptionNotices()
        self._world = world
        self._place = CheckpointLocation(str(where), world)
        self.store = CheckpointStore(self._place.local, world, self._place.send)
        self._began = monotonic()
        self._looked = 0.0
        self._stall: float | None = None  # duration of the save in flight, so far
        self.fits: dict[str, int] = {}  # micro-batches by key, after a larger one ran out of memory

    def wish(self) -> int:
        """This rank's request after the current step."""
        if self.notices.pending():
            return LEAVE
        if self.notices.is_news():
            return SAVE
        return SAVE if self._world.is_first and self._is_due() else 0

    def resume(self, model: Any, optimizers: list[Any], plan: str) -> dict[str, Any] | None:
        """Load the newest complete checkpoint, or a later emergency save; returns its facts, None
        without one.
        """
        self._place.fetch()
        found = self.store.latest() if self._world.is_first else None
        step = self._world.tell(found.step if found else None)
        if self._world.is_first:
            self.store.clean()
        newest = -1 if step is None else step
        asked = (
            emergency_save.find(self.store.folder, self._world, plan, newest)
            if self._world.is_first
            else None
        )
        rescued, self.fits = self._world.tell(asked)  # no rank writes before the folder is clean
        if rescued is None and step is None:
            return None
        state = gather(model, optimizers)
        if rescued is not None:
            facts = emergency_save.load(self.store.folder, rescued, self._world, state)
        else:
            found = self.store.latest()
            if found is None or found.step != step:
                raise RuntimeError(
                    f"rank {self._world.rank} does not see checkpoint {step} in {self.store.folder}"
                )
            self.store.load(found, state)
            facts = found.facts
        restore(model, optimizers, state)
        return facts

    def save(
        self, step: int, model: Any, optimizers: list[Any], facts: Facts, *, wait: bool
    ) -> bool:
        """Start a save, or with `wait` complete one; returns whether the awaited save is durable.
        Call it on all ranks.
        """
        begun = perf_counter()
        self._measured()
        self.store.wait()
        self.store.save(step, gather(model, optimizers), facts())
        self._stall = perf_counter() - begun
        self._began = monotonic()
        safe = self.store.wait() if wait else True
        if wait:
            self._stall = None  # this save did not run beside the computation
            safe = not self._world.agree([not safe])[0]
        return safe

    def warn(self, step: int) -> None:
        """Warn if the notice is shorter than a save. The save starts anyway: it may be faster, and
        an incomplete one does not count.
        """
        left, needed = self.notices.left_s(), self.store.seconds * (2 if self.store.is_busy else 1)
        if left is not None and left < needed:
            text = (
                "%.1f s are left and a save takes %.1f s: if the save of step %d does not "
                "complete, step %s stays the newest checkpoint"
            )
            log.warning(
                text, left, needed, step, safe.step if (safe := self.store.latest()) else "0"
            )

    def part_ways(
        self, error: Exception, step: int, made: StepGradients, optimizers: list[Any], facts: Facts
    ) -> None:
        """If a rank of a split model has run out of memory, save this rank's part of the step, and
        exit.

        Raises: SystemExit: to be run again. Returns if the cause was something else.
        """
        fits = error.fits if isinstance(error, OutOfMemory) else {}
        begun = (
            not emergency_save.note(self.store.folder, step).items() <= self.fits.items()
        )  # the note is from this attempt
        if self._world.size == 1 or not (fits or begun):
            return
        made.undo()
        state = (
            gather(made.placed.model, optimizers) if step else None
        )  # torch makes a step if there are no moments yet
        emergency_save.write(
            self.store.folder, step, self._world, state, facts(), fits and self.fits | fits
        )
        log.warning(
            "%s: saved this rank's part of step %d, to resume with a smaller micro-batch",
            error,
            step,
        )
        raise SystemExit(AGAIN) from error

    def join(self) -> None:
        """After this, parameters may change."""
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
        """Update the interval with a durable save."""
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
    """The live tensors, but copies of buffers: a forward pass may change buffers during staging."""
    weights: dict[str, Any] = get_model_state_dict(model)
    buffers = {name for name, _ in model.named_buffers()}
    weights |= {name: value.clone() for name, value in weights.items() if name in buffers}
    for optimizer in [
        o for o in optimizers if not o.state
    ]:  # torch creates missing moments by a step, which counts
        get_optimizer_state_dict(model, optimizer)
        for kept in [kept for kept in optimizer.state.values() if "step" in kept]:
            kept["step"] = kept["step"] * 0
    moments = {
        str(n): get_optimizer_state_dict(model, o, options=FLAT) for n, o in enumerate(optimizers)
    }
    return {"model": weights, "optimizers": moments}


def restore(model: Any, optimizers: list[Any], state: dict[str, Any]) -> None:
    set_model_state_dict(model, state["model"])
    for number, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(model, optimizer, state["optimizers"][str(number)], options=FLAT)
