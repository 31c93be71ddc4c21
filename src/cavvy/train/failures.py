"""Reports the first rank that fails to all ranks and to Cavvy's agent, and ends ranks that would
otherwise wait for the failed rank.

The ranks share the first failure through the rendezvous store. Without the store, a rank would see
only that a collective operation lost its connection. Some collective operations report a lost
connection only after minutes.
"""

import atexit
import json
import logging
import os
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from types import TracebackType
from typing import Any

import torch.distributed as dist

from cavvy.train.checkpoint.agent import tell_failed, tell_started

log = logging.getLogger("cavvy.train")
POLL_S = 0.5  # seconds between two checks of the store
GRACE_S = 10.0  # seconds that a rank has to end by itself after another rank has failed
ANSWER_S = 3.0  # seconds that each running rank has to answer that it is running
LONGEST = 500  # maximum characters of an error that are reported
FIRST, SEARCH, RUNS = "cavvy/failed", "cavvy/search", "cavvy/runs"
SILENT = (
    "the rank's process ended without reporting an error, for example because the kernel or a "
    "signal "
    "killed it"
)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The first failure of a run. `ranks` is the total number of ranks."""

    rank: int
    ranks: int
    error: str


class FailureWatch:
    """Reports an error that ends this rank. Until `close` is called, a thread also checks for
    failures of other ranks.

    `store` is the rendezvous store of the ranks; None for a single rank. `ours` is true if the
    process of rank 0, which belongs to this job, runs the rendezvous store.
    """

    def __init__(self, store: Any, rank: int, ranks: int, *, ours: bool = False) -> None:
        self._store: Any = None if store is None else store.clone()
        self._rank, self._ranks, self._ours = rank, ranks, ours
        self._ended, self._told = threading.Event(), False
        tell_started()
        self._before, self._hook = sys.excepthook, self._hear
        sys.excepthook = self._hook
        # A thread that is still running when the interpreter exits would abort the process.
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._watch, name="failure watch", daemon=True)
        if self._store is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop watching. Later calls do nothing."""
        atexit.unregister(self.close)
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(ANSWER_S)
        if sys.excepthook is self._hook:
            sys.excepthook = self._before

    def report(self, error: BaseException) -> RankFailure:
        """Report the error that ends this rank. Returns the failure that was reported first on any
        rank, because a failed collective can be a mere result of that failure.
        """
        mine = RankFailure(self._rank, self._ranks, describe(error))
        if self._store is None:
            self._tell(mine)
            return mine
        try:
            failure = self._search(mine) if is_lost_connection(error) else self._put(mine)
        except RuntimeError:
            # The store has ended together with its process, which may be that of rank 0.
            gone = RankFailure(0, self._ranks, SILENT)
            failure = gone if self._ours and self._rank else mine
        self._tell(failure)
        if self._ours and not self._rank:
            # The store ends with this process, so the other ranks must read it first.
            sleep(2 * POLL_S)
        return failure

    def _hear(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._before(kind, error, trace)
        if isinstance(error, Exception):
            self.report(error)

    def _put(self, failure: RankFailure) -> RankFailure:
        """Store this failure, unless another failure is already stored. Returns the stored
        failure.
        """
        stored = self._store.compare_set(FIRST, "", json.dumps(asdict(failure)))
        return RankFailure(**json.loads(stored))

    def _search(self, mine: RankFailure) -> RankFailure:
        """Wait for the failure of another rank. If no other rank reports a failure, report the
        failure of a rank that does not answer. If all ranks answer and no other rank reports a
        failure, report `mine`, which is the failure of this rank.
        """
        searches = self._store.compare_set(SEARCH, "", str(self._rank)) == str(self._rank).encode()
        until = monotonic() + (ANSWER_S if searches else 2 * ANSWER_S)
        while not self._store.check([FIRST]) and monotonic() < until:
            sleep(POLL_S / 5)
        silent = [
            rank
            for rank in range(self._ranks)
            if searches and rank != self._rank and not self._store.check([f"{RUNS}/{rank}"])
        ]
        return self._put(RankFailure(silent[0], self._ranks, SILENT) if silent else mine)

    def _watch(self) -> None:
        answered = False
        while not self._ended.wait(POLL_S):
            try:
                if self._store.check([FIRST]):
                    failure = RankFailure(**json.loads(self._store.get(FIRST)))
                    return self._leave(failure)
                if not answered and self._store.check([SEARCH]):
                    self._store.set(f"{RUNS}/{self._rank}", "")
                    answered = True
            except RuntimeError:
                return None  # The store was in the process of rank 0, which has ended.
        return None

    def _leave(self, failure: RankFailure) -> None:
        """End this process, unless it ends on its own within GRACE_S seconds."""
        self._tell(failure)
        if failure.rank != self._rank:
            log.error("rank %d failed, so this rank ends: %s", failure.rank, failure.error)
        if not self._ended.wait(GRACE_S):
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(1)

    def _tell(self, failure: RankFailure) -> None:
        if not self._told:
            self._told = True
            tell_failed(**asdict(failure))


def describe(error: BaseException) -> str:
    """Return the type and the first line of an error, truncated to LONGEST characters."""
    first = next(iter(str(error).strip().splitlines()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def is_lost_connection(error: BaseException) -> bool:
    """Return whether the error is a failed collective, which may be the result of another rank's
    failure. The library gloo reports a failed collective as a RuntimeError that names gloo's source
    file.
    """
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "third_party/gloo" in str(error)
    )
