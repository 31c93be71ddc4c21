"""Decides when a run saves, what it saves, and when it exits. All ranks save and exit at the same
step.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf, sqrt
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from cavvy.train.checkpoint import emergency_save, kept_objects, moments
from cavvy.train.checkpoint.agent import tell_cost
from cavvy.train.checkpoint.notice import PreemptionNotices, run_again
from cavvy.train.checkpoint.remote import CheckpointLocation
from cavvy.train.checkpoint.store import CheckpointStore, StoredCheckpoint
from cavvy.train.micro import OutOfMemory
from cavvy.train.step import StepGradients
from cavvy.train.world import RankWorld

log = logging.getLogger("cavvy.train")
# The time of this call is part of the measured cost of a save.
Facts = Callable[[], dict[str, Any]]
LEAVE, SAVE = 2, 1  # Requests of a rank; the highest request of all ranks is carried out.
LOOK_S = 1.0  # seconds between two reads of the interval that Cavvy sets
FIRST_S = 30.0  # seconds until the first save, which is early so that its cost can be measured
QUIET_H = 24.0  # assumed mean hours between losses of one node
# minimum number of losses per hour: one a year, even in a market without losses
LEAST_LOSSES = 1 / 24 / 365
STALL = 0.01  # maximum share of time for which saves may pause the computation
# maximum share of time in which a save may be running, because a save uses disk and CPU
WRITING = 0.5


@dataclass(slots=True)
class SaveInterval:
    """The time between two saves, measured by the clock of rank 0. It is derived from the cost of a
    save, the time for which the save pauses the computation, and the rate at which machines are
    lost.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974:
    sqrt(2 x cost x mean time between losses).
    """

    fixed_s: float | None = None
    losses_per_hour: float = 1 / QUIET_H
    stall_s: float | None = None  # measured seconds for which recent saves paused the computation
    write_s: float = 0.0  # measured seconds until a recent save was durable

    def measured(self, stall_s: float, write_s: float) -> None:
        self.stall_s = (
            stall_s if self.stall_s is None else max(stall_s, 0.5 * (self.stall_s + stall_s))
        )
        self.write_s = max(write_s, 0.5 * self.write_s)

    @property
    def seconds(self) -> float:
        if self.fixed_s is not None:
            return self.fixed_s
        if self.stall_s is None:
            return FIRST_S
        best = sqrt(2 * self.stall_s * 3600 / self.losses_per_hour)
        return max(best, self.stall_s / STALL, self.write_s / WRITING)


def told(every: "float | str") -> SaveInterval:
    """Return the interval that the user or Cavvy set, otherwise an interval that is derived from
    measured costs.
    """
    if every != "auto":
        return SaveInterval(fixed_s=float(every))
    interval = SaveInterval()
    with suppress(KeyError, ValueError):
        interval.losses_per_hour = max(float(os.environ["CAVVY_LOSSES_PER_HOUR"]), LEAST_LOSSES)
    follow(interval)
    return interval


def follow(interval: SaveInterval) -> None:
    """Adopt the current interval that Cavvy derives from the market. Cavvy can change the interval
    while the job runs.
    """
    said = os.environ.get("CAVVY_CHECKPOINT_EVERY_S")
    path = os.environ.get("CAVVY_CHECKPOINT_EVERY_FILE")
    if path:
        with suppress(OSError):
            said = Path(path).read_text().strip() or said
    with suppress(ValueError):
        interval.fixed_s = float(said) if said else interval.fixed_s


class CheckpointUnreadable(RuntimeError):
    """Raised if all checkpoints of the run are damaged. The user must repair one of the
    checkpoints, or remove all of them to start again.
    """


class CheckpointNotSaved(RuntimeError):
    """Raised if the final checkpoint could not be written. The user must free disk space and run
    the script again.
    """


class AsyncSaver:
    """Saves a model, its optimizers, and plain data ("facts") in a folder or at a URL."""

    def __init__(self, where: "str | Path", world: RankWorld, every: "float | str") -> None:
        self.interval = told(every)
        self.notices = PreemptionNotices()
        self._world = world
        self._location = here = CheckpointLocation(str(where), world)
        self.store = CheckpointStore(here.local, world, here.readers[0] == 0, here.send)
        self._began = monotonic()
        self._looked = 0.0
        # seconds for which the current save has paused the computation
        self._stall: float | None = None
        self.objects: dict[str, Any] = {}  # the script's objects with a state_dict, by name
        # the micro-batches that fit, by key, found after a rank ran out of memory
        self.fits: dict[str, int] = {}

    def wish(self) -> int:
        """Return what this rank requests after the current step: LEAVE, SAVE, or 0 for nothing."""
        if self.notices.pending():
            return LEAVE
        if self.notices.is_news():
            return SAVE
        return SAVE if self._world.is_first and self._is_due() else 0

    def resume(self, model: Any, optimizers: list[Any], plan: str) -> dict[str, Any] | None:
        """Load the newest complete, undamaged checkpoint, or an emergency save if that is newer.
        Returns the loaded facts, or None if neither a checkpoint nor an emergency save exists.

        Raises: CheckpointUnreadable: all existing checkpoints are damaged.
        """
        # The saving thread also exchanges values between ranks, so it must end first.
        self.store.wait()
        kept_objects.encode(self.objects)  # This reports an object that cannot be saved.
        found, damaged = self._find_whole()
        rescued = self._find_rescue(plan, -1 if found is None else found.step)
        if rescued is not None:
            facts, saved = emergency_save.load(self.store.folder, rescued, self._world)
            keys = sorted(flatten_state_dict(saved)[0])
            state = self._make_targets(model, optimizers, facts)
            emergency_save.fill(state, saved)
        elif found is not None:
            facts, keys = found.facts, self.store.list_keys(found)
            state = self._make_targets(model, optimizers, facts)
            self._load(found, state, model, keys)
        elif damaged:
            raise CheckpointUnreadable(
                f"no checkpoint in {self.store.folder} can be read: {list_damage(damaged)}. "
                "Repair one of the checkpoints, or remove the folder to train from the beginning"
            )
        else:
            return None
        if damaged:
            self._world.run_on_all(partial(self._set_aside, sorted(damaged)))
        set_model_state_dict(model, state["model"])
        moments.load(model, optimizers, state["optimizers"], keys)
        things = {name: facts["things"][name] for name in self.objects if name in facts["things"]}
        return facts | {"things": kept_objects.decode(things, state.get("things", {}))}

    def _load(
        self, found: StoredCheckpoint, state: dict[str, Any], model: Any, keys: list[str]
    ) -> None:
        """Load a checkpoint with these keys into the tensors of `state`.

        Raises: ValueError: the checkpoint contains a tensor that the script does not have.
        """
        known = moments.drop_unsaved(model, state["optimizers"], keys)
        known_state = state | {"optimizers": known}
        wanted = set[str]().union(*self._world.gather(set(flatten_state_dict(known_state)[0])))
        lost = [
            key
            for key in keys
            if key not in wanted and (key.startswith("model.") or ".state." in key)
        ]
        if lost:
            raise ValueError(
                f"the checkpoint of step {found.step} contains {lost[0]}, but the script has no "
                f"such tensor ({len(lost)} tensors would be lost). Before run.resume and the first "
                "run.batches, build the same model, and create the same optimizers with the same "
                "parameters"
            )
        self.store.load(found, known_state)
        for number, loaded in known.items():
            state["optimizers"][number] |= loaded

    def _find_whole(self) -> tuple[StoredCheckpoint | None, dict[int, str]]:
        """Return the newest undamaged checkpoint, and the fault of each newer checkpoint, keyed by
        step.
        """
        damaged: dict[int, str] = {}
        while found := self._find_newest(min(damaged, default=inf)):
            damage = self._location.repair(found)
            if not damage:
                self._world.run_on_all(partial(self.store.adopt, found))
                return found, damaged
            damaged[found.step] = damage
            log.warning("%s; trying the previous checkpoint", list_damage({found.step: damage}))
        return None, damaged

    def _find_newest(self, below: float) -> StoredCheckpoint | None:
        """Return the newest checkpoint before step `below` that the first rank finds locally or in
        remote storage.
        """

        def find() -> StoredCheckpoint | None:
            both = (self._location.latest(below), self.store.latest(below))
            return max(filter(None, both), key=lambda each: each.step, default=None)

        found, *_ = self._world.run_on_all(lambda: find() if self._world.is_first else None)
        return found and replace(found, path=self.store.folder / found.path.name)

    def _set_aside(self, steps: list[int]) -> None:
        for step in steps:
            self.store.set_aside(step)
            self._location.set_aside(step)

    def _find_rescue(self, plan: str, newest: int) -> int | None:
        """Return the step of an emergency save that is newer than the checkpoint `newest`, or
        None.
        """
        asked = None
        self.store.clean()
        if self._world.is_first:
            asked = emergency_save.find(self.store.folder, self._world, plan, newest)
        step: int | None
        step, self.fits = self._world.tell(asked)  # All ranks wait here until the folder is clean.
        return step

    def _collect(
        self, model: Any, optimizers: list[Any], facts: Facts
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the run's tensors and the run's facts. The model's tensors are not copied."""
        plain, tensors = kept_objects.encode(self.objects)
        state = {"model": gather(model), "optimizers": moments.collect(model, optimizers)}
        return state | ({"things": tensors} if tensors else {}), facts() | {"things": plain}

    def _make_targets(self, model: Any, optimizers: list[Any], facts: Any) -> dict[str, Any]:
        """Return the tensors into which a checkpoint can be loaded. `facts` contains the facts of
        the checkpoint.
        """
        things = kept_objects.make_targets(facts["things"], self.objects)
        state = {"model": gather(model), "optimizers": moments.make_targets(model, optimizers)}
        return state | ({"things": things} if things else {})

    def save(
        self, step: int, model: Any, optimizers: list[Any], facts: Facts, *, wait: bool
    ) -> bool:
        """Start a save. If `wait` is true, wait until the save ends and return whether the save is
        durable; otherwise return True. All ranks must call this method.
        """
        begun = perf_counter()
        self._measured()
        if self.store.save(step, partial(self._collect, model, optimizers, facts)):
            self._stall = perf_counter() - begun
        self._began = monotonic()
        safe = self.store.wait() if wait else True
        if wait:
            # The cost is not measured, because this save did not run in the background.
            self._stall = None
            safe = not self._world.agree([not safe])[0]
        return safe

    def warn(self, step: int) -> None:
        """Warn if less time is left than a save takes. The save is started anyway, because it may
        be faster than earlier saves, and an incomplete save does no harm.
        """
        left, needed = self.notices.left_s(), self.store.seconds * (2 if self.store.is_busy else 1)
        if left is not None and left < needed:
            text = (
                "the machine is reclaimed in %.1f s, but a save takes %.1f s. If the save of step "
                "%d does not complete, the newest checkpoint is the checkpoint of step %s"
            )
            log.warning(
                text, left, needed, step, safe.step if (safe := self.store.latest()) else "0"
            )

    def part_ways(
        self, error: Exception, step: int, made: StepGradients, optimizers: list[Any], facts: Facts
    ) -> None:
        """If a rank of a split model ran out of memory, save this rank's part of the state and run
        the program again. When this process ends, the collectives of the other ranks fail, so these
        ranks also save and run again. The method returns only if no rank ran out of memory.

        Raises: SystemExit: with the exit code for "run me again".
        """
        fits = error.fits if isinstance(error, OutOfMemory) else {}
        begun = (
            not emergency_save.note(self.store.folder, step).items() <= self.fits.items()
        )  # whether there is a note that this attempt did not read when it started
        if self._world.size == 1 or not (fits or begun):
            return
        made.undo()
        state, plain = self._collect(
            made.placed.model, optimizers if step else [], facts
        )  # Before the first step, torch would create the moments by stepping the optimizer.
        emergency_save.write(
            self.store.folder,
            step,
            self._world,
            state if step else None,
            plain,
            fits and self.fits | fits,
        )
        log.warning(
            "%s; this rank saved its part of step %d and resumes with a smaller micro-batch",
            error,
            step,
        )
        run_again(self._world)

    def join(self) -> None:
        """Wait until the state is copied. After this method has returned, the script can change the
        parameters.
        """
        if self._stall is None:
            return
        begun = perf_counter()
        self.store.join()
        self._stall += perf_counter() - begun
        self._measured()

    def count(self, seconds: float) -> None:
        """Record a save by another library. The training loop waited for the whole save, so
        `seconds` counts as the loop's wait and as the save's duration.
        """
        self._began = monotonic()
        self._price(seconds, seconds)

    def close(self) -> None:
        self.notices.close()
        self.store.close()

    def _measured(self) -> None:
        """If the last save is durable, compute the interval between saves again from the measured
        cost of this save.
        """
        if self._stall is not None and not self.store.is_busy and self.store.seconds:
            self._price(self._stall, self.store.seconds)
            self._stall = None

    def _price(self, stall_s: float, write_s: float) -> None:
        self.interval.measured(stall_s, write_s)
        if self._world.is_first:
            tell_cost(stall_s)

    def _is_due(self) -> bool:
        now = monotonic()
        if now - self._looked > LOOK_S:
            self._looked = now
            follow(self.interval)
        return not self.store.is_busy and now - self._began >= self.interval.seconds


def list_damage(damaged: dict[int, str]) -> str:
    return ", ".join(
        f"the checkpoint of step {step} is damaged ({text})" for step, text in damaged.items()
    )


def gather(model: Any) -> dict[str, Any]:
    """Collect the tensors of a model. Only buffers are copied immediately, because a forward pass
    can change buffers before the background copy is complete.
    """
    weights: dict[str, Any] = get_model_state_dict(model)
    buffers = {name for name, _ in model.named_buffers()}
    return weights | {name: value.clone() for name, value in weights.items() if name in buffers}
