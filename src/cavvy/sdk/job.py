"""A submitted job."""

import logging
import time
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from numbers import Integral
from types import NoneType
from typing import TYPE_CHECKING, Literal

from cavvy.client.metrics import last_figures
from cavvy.sdk.errors import CavvyError, InvalidArgument, JobFailed, WaitTimeout
from cavvy.sdk.status import (
    FigureSeries,
    JobCost,
    JobEvent,
    JobStatus,
    read_cost,
    read_detail,
    read_event,
    read_figures,
)
from cavvy.sdk.values import check_type, read_seconds

if TYPE_CHECKING:
    from cavvy.client import ApiClient, LogChunk, wire
    from cavvy.sdk.connections import Connections

Until = Literal["end", "running"]
TimeLimit = float | str | timedelta
# Without other settings, Python prints the warnings of a logger to standard error.
_log = logging.getLogger(__name__)
_QUIET_S = 2.0  # seconds in the queue after which a wait says why the job waits
_POLL_S = 1.5  # seconds that the server waits for the next event
# bytes at the end of the log that are read, and number of lines in the message of JobFailed
_TAIL_BYTES, _TAIL_LINES = 4000, 10


class Job:
    """A job. `Client.submit`, `Client.job` and `Client.jobs` return jobs.

    `id`, `name` and `project` never change. `last_status` is the newest state that a method has
    read. `status()` reads the state from the server. `notes` are remarks about the submitted files.
    A notebook shows the job as a table. Every method may raise CavvyError.
    """

    def __init__(
        self, connections: "Connections", status: JobStatus, notes: tuple[str, ...] = ()
    ) -> None:
        self._connections = connections
        self.id = status.id
        self.name = status.name
        self.project = status.project
        self.last_status = status
        self.notes = notes

    def status(self) -> JobStatus:
        """Return the state of the job now."""
        self.last_status = read_detail(self._detail())
        return self.last_status

    def wait(
        self, until: Until = "end", *, timeout: TimeLimit | None = None, check: bool = True
    ) -> JobStatus:
        """Wait until the job has ended or, with `until="running"`, until it is running or has
        ended. Returns its state. If the job waits in the queue, a warning of the logger `cavvy.sdk`
        gives the reason, and another warning each new reason. By default, Python prints warnings to
        standard error.

        Raises JobFailed if the job has failed or was stopped, unless `check` is False. Raises
        WaitTimeout after `timeout`, which is a number of seconds, a text such as "2h", or a
        timedelta. Ctrl-C ends only the wait; the job continues to run.
        """
        waiting = JobWaiter(self, until, timeout, check=check)
        with self._interruptible():
            return waiting.finish()

    def logs(
        self, *, follow: bool = False, rank: int = 0, attempt: int | None = None
    ) -> Generator[str, None, None]:
        """Yield the lines of the log of one node, without line ends. If `follow` is true, waits for
        further lines until the job has ended. Ctrl-C ends only this wait; the job continues to run.
        `attempt` selects one attempt. By default, the lines of all attempts are returned in order.
        While a followed job waits in the queue, the reason is logged as by `wait`.
        """
        for lines in self._log_parts(follow=follow, rank=rank, attempt=attempt):
            yield from lines

    def _log_parts(
        self, *, follow: bool, rank: int, attempt: int | None
    ) -> Generator[list[str], None, None]:
        """Do the same as `logs`, but yield a list of all lines that arrived together."""
        check_type(rank, Integral, "rank")
        check_type(attempt, (Integral, NoneType), "attempt")
        with self._interruptible(), self._connections.use() as connection:
            chunks = connection.log_chunks(
                self.project, self.id, rank=rank, attempt=attempt, follow=follow
            )
            yield from read_lines(self._with_reasons(connection, chunks) if follow else chunks)

    def _with_reasons(
        self, connection: "ApiClient", chunks: "Iterator[LogChunk]"
    ) -> "Iterator[LogChunk]":
        """Yield the chunks of a followed log. While no bytes arrive, log why the job waits."""
        reasons = _QueueReasons()
        for chunk in chunks:
            if not chunk.data and not chunk.over:
                reasons.tell(read_detail(connection.job(self.project, self.id)))
            yield chunk

    def events(self, *, follow: bool = False) -> Generator[JobEvent, None, None]:
        """Yield the events of the job in order, for example its placement and the loss of a node.
        If `follow` is true, waits for further events until the job has ended.
        """
        with self._interruptible(), self._connections.use() as connection:
            if follow:
                yield from map(read_event, connection.follow(self.project, self.id))
                return
            after = 0
            while (page := connection.events(self.project, self.id, after=after)).events:
                yield from map(read_event, page.events)
                after = page.last

    def metrics(self) -> dict[str, float | str]:
        """Return the values that the program last reported, such as `loss`. A program reports
        values with lines such as `CAVVY_PROGRESS {"loss": 0.12}` or with `cavvy.train`.
        """
        return last_figures(self._detail())

    def figures(
        self,
        *,
        names: Collection[str] = (),
        ranks: Collection[int] = (),
        attempt: int | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        points: int = 300,
    ) -> list[FigureSeries]:
        """Return what the nodes measured and the program reported over time, at most `points`
        values for each rank and name, such as gpu_percent or loss. By default, all figures of the
        first eight ranks in the last day before the end of the job, or before now. Figures are kept
        for 30 days.
        """
        with self._connections.use() as connection:
            return read_figures(
                connection.figures(
                    self.project,
                    self.id,
                    attempt=attempt,
                    ranks=ranks,
                    names=names,
                    since=since,
                    until=until,
                    points=points,
                )
            )

    def cost(self) -> JobCost:
        """Return the job's cost so far, and the time that the job spent in each phase."""
        with self._connections.use() as connection:
            job = connection.job(self.project, self.id)
            return read_cost(job, connection.cost(self.project, self.id))

    def outputs(self) -> dict[str, str]:
        """Return the targets of the job's outputs, as a dict from the source of each output to its
        target.
        """
        from msgspec.json import decode

        from cavvy.domain.tasks import TaskSpec

        return {
            each.source: each.target for each in decode(self._detail().task, type=TaskSpec).outputs
        }

    def stop(self, *, wait: bool = True) -> JobStatus:
        """Stop the job. The job's program gets the grace period to end, and then the job's nodes
        are released. If `wait` is true, returns after the job has ended.
        """
        with self._connections.use() as connection:
            connection.stop(self.project, self.id)
        return JobWaiter(self, "end", None, check=False).finish() if wait else self.status()

    def retry(self) -> JobStatus:
        """Queue the job again after it has failed or was stopped."""
        with self._connections.use() as connection:
            connection.retry(self.project, self.id)
        return self.status()

    def remove(self) -> None:
        """Delete the ended job with its log and checkpoints. The bill is kept."""
        with self._connections.use() as connection:
            connection.remove(self.project, self.id)

    def __repr__(self) -> str:
        return f"<Job {self.name} ({self.id}): {self.last_status.phase}>"

    def _repr_html_(self) -> str:
        from cavvy.sdk.status import show_job

        try:
            return show_job(self.status())
        except CavvyError as error:
            return show_job(self.last_status, f"not up to date: {error.message}")

    def _detail(self) -> "wire.JobDetail":
        with self._connections.use() as connection:
            return connection.job(self.project, self.id)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """When the user presses Ctrl-C, add a message to the KeyboardInterrupt. The message states
        that the job continues, and which command stops the job.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"the job {self.name} keeps running; job.stop() or `cavvy stop {self.id}` stops "
                "it, and job.logs(follow=True) follows it again"
            ) from None


class JobWaiter:
    """Waits for one job. Each wait is divided into steps, so that threads and coroutines can use
    the same code.
    """

    def __init__(self, job: Job, until: Until, timeout: TimeLimit | None, *, check: bool) -> None:
        if until not in ("end", "running"):
            raise InvalidArgument(f"until must be 'end' or 'running', not {until!r}")
        self._job = job
        self._running_is_enough = until == "running"
        self._check = check
        self._timeout_s = None if timeout is None else read_seconds(timeout)
        self._began = time.monotonic()
        self._after = 0
        self._reasons = _QueueReasons()

    def finish(self) -> JobStatus:
        """Call `look` repeatedly until the wait is over. Raises JobFailed, WaitTimeout."""
        while (status := self.look()) is None:
            pass
        return status

    def look(self) -> JobStatus | None:
        """Return the state of the job if the wait is over; otherwise wait for the next event, at
        most 1.5 s, and return None. Raises JobFailed, WaitTimeout.
        """
        job = self._job
        status = job.status()
        if status.ended:
            if self._check and status.phase != "done":
                raise _make_failure(job, status)
            return status
        if self._running_is_enough and status.phase == "running":
            return status
        self._reasons.tell(status)
        wait_s = _POLL_S
        if self._timeout_s is not None:
            wait_s = min(wait_s, self._began + self._timeout_s - time.monotonic())
        if wait_s <= 0:
            raise _make_timeout(job, status)
        with job._connections.use() as connection:
            page = connection.events(job.project, job.id, after=self._after, wait_s=wait_s)
        self._after = page.last
        return None


class _QueueReasons:
    """Logs why a job waits in the queue."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told = ""  # the last reason that was logged

    def tell(self, status: JobStatus) -> None:
        """Log the reason if it is new and the wait is not short."""
        early = time.monotonic() - self._began < _QUIET_S
        if status.phase == "queued" and not early and status.reason != self._told:
            self._told = status.reason
            place = status.queue_position
            where = f"; position {place} in the queue" if place else ""
            _log.warning("the job %s is queued: %s%s", status.name, status.reason, where)


def _make_failure(job: Job, status: JobStatus) -> JobFailed:
    """Create the exception for a job that did not succeed. The exception's text contains the end of
    the log."""
    lines = _read_tail(job, status)
    end = "\nThe log ends with:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
    done = "was stopped" if status.phase == "stopped" else "failed"
    failure = JobFailed(
        f"the job {status.name} {done}: {status.reason}{end}",
        "job.logs() has the whole log, and job.events() the history",
    )
    failure.status = status
    return failure


def _read_tail(job: Job, status: JobStatus) -> list[str]:
    """Return the last lines of the log of the node that failed first, or [] if there is no log."""
    try:
        with job._connections.use() as connection:
            chunks = connection.log_chunks(
                job.project,
                job.id,
                rank=status.first_failed_rank or 0,
                attempt=status.attempt or None,
                tail_bytes=_TAIL_BYTES,
                follow=True,  # the last bytes may arrive after the end of the job
            )
            return [line for part in read_lines(chunks) for line in part][-_TAIL_LINES:]
    except CavvyError:
        return []


def _make_timeout(job: Job, status: JobStatus) -> WaitTimeout:
    error = WaitTimeout(
        f"the job {job.name} is still {status.phase}: {status.reason}",
        "the job continues; call job.wait() again, or job.stop()",
    )
    error.status = status
    return error


def read_lines(chunks: "Iterable[LogChunk]") -> Iterator[list[str]]:
    """For each chunk, yield the lines that the chunk completes, without line ends. Bytes that are
    not UTF-8 become U+FFFD. The last line of an attempt or of the log is yielded even if it is
    incomplete.
    """
    rest, attempt = b"", None
    for chunk in chunks:
        found = []
        if rest and chunk.attempt != attempt:
            found, rest = [_text(rest)], b""
        *lines, rest = (rest + chunk.data).split(b"\n")
        attempt = chunk.attempt
        if found := found + [_text(line) for line in lines]:
            yield found
    if rest:
        yield [_text(rest)]


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").removesuffix("\r")
