"""The ranks of this run: their numbers, their process groups, the values that they exchange in each
step, and the first rank that fails.
"""

import atexit
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from time import monotonic, sleep
from types import TracebackType
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch does not list them
    PrefixStore,
    TCPStore,
)

from cavvy.train import rejoin
from cavvy.train.checkpoint.agent import tell_failed, tell_started
from cavvy.train.device import TrainDevice, pick

# a variable that is set by a program that runs again in the same process
ATTEMPT = "CAVVY_TRAIN_ATTEMPT"
PATIENCE = timedelta(minutes=10)  # maximum time that a collective waits for another rank
T = TypeVar("T")
log = logging.getLogger("cavvy.train")
POLL_S = 0.5  # seconds between two checks of the store
GRACE_S = 10.0  # seconds that a rank has to end by itself after another rank has failed
REPORT_S = 1.0  # seconds in which a rank that fails reports this, before its connections close
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
    """Reports an error that ends this rank to all ranks and to Cavvy's agent. Until `close` is
    called, a thread also checks for failures of other ranks, and ends this rank if it would
    otherwise wait for a failed rank.

    The ranks share the first failure through the rendezvous store. Without the store, a rank would
    see only that a collective operation lost its connection. Some collective operations report a
    lost connection only after minutes.

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
        # who is told in these cases knows which node was lost: no search for a silent rank
        is_known = (rejoin.is_kept() or rejoin.is_forked()) and is_lost_connection(error)
        is_lost = is_known and not self._has_failure()
        if is_lost and rejoin.is_kept():
            rejoin.leave_lost(describe(error))
        self._before(kind, error, trace)
        if isinstance(error, Exception) and not is_lost:
            self.report(error)

    def _has_failure(self) -> bool:
        """Wait a moment for the report of a rank that has failed. Return False if there is none,
        so that the rank has vanished, perhaps with its node."""
        until = monotonic() + REPORT_S
        try:
            while not self._store.check([FIRST]):
                if monotonic() > until or rejoin.must_end():
                    return False
                sleep(POLL_S / 25)
        except RuntimeError:  # the store has vanished, with the process of rank 0
            return False
        return True

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
    of_torch = isinstance(error, getattr(dist, "DistError", ()))
    return of_torch or (isinstance(error, RuntimeError) and "third_party/gloo" in str(error))


class RankWorld:
    """One of `size` ranks. Small values are exchanged over gloo (on the CPU), so that accelerators
    do not have to wait.
    """

    def __init__(self, device: str = "auto") -> None:
        rank, size, local = _place()
        self.rank, self.size = rank, size
        self.device: TrainDevice = pick(device, local)
        self._ours = False
        self._facts: Any = None
        self._files: Any = None
        if size > 1 or dist.is_initialized():
            self._join(rank, size)
        self._failures = self._watch_failures()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def can_join_again(self) -> bool:
        """Whether this program can run again in the same process. A restart requires that torchrun
        started the program and holds the rendezvous store, and that this class joined the process
        group.
        """
        held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return self._ours and held and "TORCHELASTIC_RUN_ID" in os.environ

    @property
    def file_group(self) -> Any:
        """The gloo group of the thread that writes checkpoints; None for a single rank."""
        return self._files

    def agree(self, facts: Sequence[int]) -> list[int]:
        """Return the maximum of each value over all ranks. All ranks must call this method."""
        if self.size == 1:
            return list(facts)
        shared = torch.tensor(list(facts), dtype=torch.int64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._facts)
        return [int(n) for n in shared.tolist()]

    def least(self, fact: int) -> int:
        return -self.agree([-fact])[0]

    def gather(self, fact: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. All ranks must call this method."""
        if self.size == 1:
            return [fact]
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, fact, group=self._facts)
        return said

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Run `work`, which reads or writes checkpoints, on all ranks. Returns the results of all
        ranks, in rank order. All ranks must call this method, with only one thread of each rank at
        a time.

        Raises: RuntimeError: the work failed on at least one rank. All ranks raise this error.
        """
        if self._files is None:
            return [work()]
        result: T | None = None
        fault, cause = "", None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - all ranks raise this error below
            fault, cause = str(error) or repr(error), error
        said: list[Any] = [None] * dist.get_world_size(self._files)
        dist.all_gather_object(said, (result, fault), group=self._files)
        for rank, (_, text) in enumerate(said):
            if text:
                raise RuntimeError(f"rank {rank}: {text}") from cause
        return [each for each, _ in said]

    def tell(self, fact: Any) -> Any:
        """Return the value that rank 0 passed. All ranks must call this method."""
        if self.size == 1:
            return fact
        said = [fact]
        dist.broadcast_object_list(said, src=0, group=self._facts)
        return said[0]

    def close(self) -> None:
        """Wait for all ranks, then destroy the process groups. The threads of a group that still
        exists can abort a process that has finished.
        """
        if self._ours and dist.is_initialized():
            self.agree([0])
        self.leave()

    def leave(self) -> None:
        """Destroy the process groups immediately, so that the collectives of other ranks fail
        instead of waiting.
        """
        self._failures.close()
        if self._ours and dist.is_initialized():
            dist.destroy_process_group()
        self._ours, self.size = False, 1

    def _join(self, rank: int, size: int) -> None:
        if not dist.is_initialized():
            kind = self.device.torch.type
            backend = (
                "gloo"
                if kind == "cpu"
                else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
            )
            if os.environ.get("LOCAL_WORLD_SIZE") == str(size) and sys.platform == "linux":
                os.environ.setdefault(
                    "GLOO_SOCKET_IFNAME", "lo"
                )  # All ranks are on this machine, but its name may resolve to another address.
            own: dict[str, Any] = {"device_id": self.device.torch} if kind == "cuda" else {}
            if run := _name_rerun(size):
                own["store"] = _open_store(run)
            dist.init_process_group(backend, rank=rank, world_size=size, timeout=PATIENCE, **own)
            self._ours = True
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._facts = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._files = dist.new_group(backend="gloo", timeout=timedelta(hours=2))

    def _watch_failures(self) -> FailureWatch:
        if self.size == 1:
            return FailureWatch(None, self.rank, self.size)
        held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.distributed_c10d._get_default_store()
        # Torchrun keeps its store when it restarts the ranks, so it still contains earlier
        # failures.
        store = PrefixStore(self.tell(uuid4().hex), store)
        return FailureWatch(store, self.rank, self.size, ours=not held)


def _name_rerun(size: int) -> str:
    """Return a name for this start of the program, which differs from the names of earlier starts.
    The name is "" if this is the first start with torchrun's store. Several starts can share one
    store of torchrun: a program can start again in the same process, and torchrun can restart the
    ranks. The restart counts of torchrun are not used, because they can differ between nodes.
    """
    is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_node and held else "0"
    attempt = os.environ.get(ATTEMPT, "0")
    return "" if restarts == attempt == "0" else f"{restarts}-{attempt}"


def _open_store(run: str) -> Any:
    """Return the store of torchrun. The store's keys get a new prefix for this run, because the
    keys of earlier runs refer to closed connections.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=PATIENCE)
    return PrefixStore(f"cavvy-{run}", store)


def _place() -> tuple[int, int, int]:
    """Return the rank, the number of ranks, and the rank within this node. The ranks and the number
    of ranks are read from variables that torchrun sets or, for jobs with one process per node, that
    Cavvy sets.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0"))
    if (
        int(env.get("NNODES", "1")) > 1
        and env.get("NPROC_PER_NODE", "1") == "1"
        and "MASTER_ADDR" in env
    ):
        return int(env["NODE_RANK"]), int(env["NNODES"]), 0
    return 0, 1, 0
