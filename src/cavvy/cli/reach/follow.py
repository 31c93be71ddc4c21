"""Follows a job in the terminal: shows its log, events and progress until the job ends or the user
detaches with Ctrl-C.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import Empty, Queue
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, TypeAlias

import click

from cavvy.cli.reach.session import FOLLOW_PATIENCE_S, make_failure, named
from cavvy.cli.reach.setup_output import LogPart, SetupOutput
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.screen import job_ranks

if TYPE_CHECKING:
    from cavvy.cli.view.screen import FollowScreen
    from cavvy.client import ApiClient
    from cavvy.client.wire import EventView, JobDetail

    Item: TypeAlias = "LogPart | EventView | CommandFailure | None"

_LOOK_S = 0.5  # seconds between two reads of the job's progress
_STALL_S = 5.0  # seconds without news after which the server is asked whether it has a problem
_BILL_S = 2.0  # maximum seconds that the summary waits for the final bill
_AHEAD = 16  # maximum number of items that are read ahead of a slow terminal
_HELD_S = 5.0  # maximum seconds for which output waits for the event with which its attempt began
_SETUP_HELD_S = 1.0  # the same limit in seconds, after the attempt's setup has begun
# events before `running`
_BEFORE = frozenset({"queued", "placed", "claimed", "check", "image", "setup", "waits", "restored"})
_NO_FAILURES = frozenset({"preempted", "stopped"})  # outcomes of ranks, also of their setups
_DETACHED = 130  # the exit code that shells report for an interrupt


def follow(
    client: "ApiClient", project: str, name: str, *, after: int = 0, first: int | None = None
) -> None:
    """Show the job until it ends, then its summary, and exit with its exit code. Ctrl-C leaves it
    running.

    The output starts after event number `after` and with attempt number `first`. The name is
    resolved to an ID only once, at the start, because the name of a session passes to the machine's
    next session when the session ends.
    """
    from cavvy.cli.view.screen import open_screen
    from cavvy.cli.view.summary import summary_out

    client.patience.limit_s = FOLLOW_PATIENCE_S
    with leave_running(project, name):
        job = client.job(project, name, session=True)
        with open_screen(job) as screen:
            _show(client, job, screen, after, first)
            job = _billed(client, job.project, job.id)
            screen.job(job)
        summary_out(job, client.cost(job.project, job.id))
    sys.exit(exit_code(job))


def follow_start(
    client: "ApiClient", job: "JobDetail", *, after: int = 0, first: int | None = None
) -> None:
    """Show the job's log and events, such as the output of its setup, until it runs or ends.
    `after` and `first` are as for `follow`.
    """
    from cavvy.cli.view.screen import open_screen

    with open_screen(job) as screen:
        _show(client, job, screen, after, first, only_start=True)


@contextmanager
def leave_running(project: str, name: str, again: str = "logs -f") -> Iterator[None]:
    """On Ctrl-C, print that the job continues and which command follows the job (`again`), and
    exit.
    """
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"\ndetached: {name} keeps running", err=True)
        there = named(project, name)
        click.echo(
            f"follow it again: cavvy {again} {there}    stop it: cavvy stop {there}", err=True
        )
        sys.exit(_DETACHED)


def _billed(client: "ApiClient", project: str, job_id: str) -> "JobDetail":
    """Wait at most `_BILL_S` seconds until the job's bill is complete or the job's last gang has
    become a warm gang. Returns the job.
    """
    until = monotonic() + _BILL_S
    while True:
        job = client.job(project, job_id)
        over = all(attempt.phase in ("ended", "kept") for attempt in job.attempts)
        if over or monotonic() > until:
            return job
        sleep(_BILL_S / 50)


def exit_code(job: "JobDetail") -> int:
    """Return the job's own exit code, 130 if it was stopped, or 1 if it failed without an exit
    code.
    """
    if job.phase == "done":
        return 0
    if job.phase == "stopped":
        return _DETACHED
    return job.exit_code or 1


def _show(
    client: "ApiClient",
    job: "JobDetail",
    screen: "FollowScreen",
    after: int,
    first: int | None,
    *,
    only_start: bool = False,
) -> None:
    """Show the log and the events as they arrive, until both have ended or, with `only_start`, the
    job runs on all nodes.
    """
    queue, open_sources = _read_ahead(client, job, after, first)
    looked, asked, told = 0.0, monotonic(), ""
    order = _Order(screen)
    while open_sources:
        order.look()
        if monotonic() - looked > _LOOK_S:
            order.learn(client.job(job.project, job.id))
            looked = monotonic()
        try:
            item = queue.get(timeout=_LOOK_S)
        except Empty:
            if monotonic() - asked > _STALL_S:
                asked, told = monotonic(), _tell_problem(client, told)
            continue
        asked = monotonic()
        match item:
            case None:
                open_sources -= 1
            case CommandFailure():
                raise item
            case LogPart():
                order.log(item)
            case event:
                if event.kind not in _BEFORE:  # where the setup's output ends is known now
                    order.learn(client.job(job.project, job.id))
                order.event(event)
                looked = 0.0
                if only_start and event.kind == "running" and event.rank is None:
                    return
    order.end()


class _Order:
    """Shows the log and the events in the order in which they happened. Both arrive by different
    ways, so the first output of an attempt may arrive before the event that says that it runs.
    The output of setups is left out, except for the last lines of one that failed.
    """

    def __init__(self, screen: "FollowScreen") -> None:
        self._screen = screen
        self._open = 0  # the newest attempt whose output is shown at once
        self._setup = 0  # the newest attempt whose setup has begun
        self._held: list[tuple[float, LogPart]] = []
        self._setups = SetupOutput()

    def learn(self, job: "JobDetail") -> None:
        """Show the job's current state. The job also tells which output is that of setups."""
        for part in self._setups.learn(job):
            self._add(part)
        held, self._held = self._held, []
        for since, part in held:
            self._held += [(since, each) for each in self._setups.take(part)]
        self._screen.setup(self._setups.last_line, self._setups.lines)
        self._screen.job(job)

    def log(self, part: LogPart) -> None:
        for each in self._setups.take(part):
            self._add(each)
        self._screen.setup(self._setups.last_line, self._setups.lines)

    def _add(self, part: LogPart) -> None:
        if part.attempt <= self._open:
            self._screen.log(part.rank, part.data)
        else:
            self._held.append((monotonic(), part))

    def event(self, event: "EventView") -> None:
        attempt = event.attempt or 0
        if event.kind == "setup":
            self._setup = max(self._setup, attempt)
        if event.kind in _BEFORE:
            self._screen.event(event)
        elif event.kind == "running":
            self._screen.event(event)
            self._release(attempt)
        else:  # for example the end of an attempt: its output stands before it
            self._release(attempt)
            if event.kind == "exited":
                self._end_setup(attempt, event.rank or 0, shown=event.fact not in _NO_FAILURES)
            self._screen.event(event)

    def _end_setup(self, attempt: int, rank: int, *, shown: bool) -> None:
        if (failed := self._setups.end(attempt, rank)) and shown:
            self._screen.failed_setup(failed)

    def look(self) -> None:
        """Show output whose event does not come: an agent may say late that the work runs."""
        if not self._held:
            return
        since, part = self._held[0]
        if monotonic() - since > (_SETUP_HELD_S if part.attempt <= self._setup else _HELD_S):
            self._release(part.attempt)

    def end(self) -> None:
        self._release(max((part.attempt for _, part in self._held), default=0))
        for attempt, rank in self._setups.list_open():
            self._end_setup(attempt, rank, shown=True)

    def _release(self, attempt: int) -> None:
        self._open = max(self._open, attempt)
        held, self._held = self._held, []
        for since, part in held:
            if part.attempt <= self._open:
                self._screen.log(part.rank, part.data)
            else:
                self._held.append((since, part))


def _tell_problem(client: "ApiClient", told: str) -> str:
    """Print why the server cannot do its work, unless the user knows the problem `told` already.
    Returns the problem, or "".
    """
    problem = client.server().problem
    if problem and problem != told:
        click.echo(f"cavvy: {problem}", err=True)
    return problem


def _read_ahead(
    client: "ApiClient", job: "JobDetail", after: int, first: int | None
) -> "tuple[Queue[Item], int]":
    """Start a thread for the log of each rank, and a thread for the events. Returns the queue that
    the threads fill, and the number of threads.
    """
    queue: Queue[Item] = Queue(_AHEAD)

    def read_log(rank: int) -> Iterator["Item"]:
        with client.sibling() as own:
            for chunk in own.log_chunks(job.project, job.id, rank=rank, first=first, follow=True):
                if chunk.data:
                    at = chunk.offset - len(chunk.data)
                    yield LogPart(rank, chunk.attempt, chunk.data, at)

    def read_events() -> Iterator["Item"]:
        with client.sibling() as own:
            yield from own.follow(job.project, job.id, after=after)

    sources: list[Callable[[], Iterator[Item]]] = [
        partial(read_log, rank) for rank in range(job_ranks(job))
    ]
    sources.append(read_events)
    for source in sources:
        Thread(target=_pump, args=(source, queue), daemon=True).start()
    return queue, len(sources)


def _pump(source: "Callable[[], Iterator[Item]]", queue: "Queue[Item]") -> None:
    """Put all items of a source into the queue. At the end, put the source's error into the queue,
    or None if there was no error.
    """
    from cavvy.client import ApiError

    try:
        for item in source():
            queue.put(item)
    except ApiError as error:
        queue.put(make_failure(error))
    queue.put(None)
