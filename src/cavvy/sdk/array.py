"""An array of jobs: one task that runs as many jobs."""

import time
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from cavvy.client.array_wire import read_array, remove_array, retry_array, stop_array
from cavvy.client.metrics import figures, measure_batch
from cavvy.domain.units import Money
from cavvy.sdk.errors import CavvyError, WaitTimeout
from cavvy.sdk.job import Job
from cavvy.sdk.status import ENDS, read_detail
from cavvy.sdk.values import check_text, read_seconds

if TYPE_CHECKING:
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.sdk.connections import Connections
    from cavvy.sdk.job import TimeLimit

_SHORTEST_S, _LONGEST_S = 0.2, 2.0  # seconds between two requests to the server


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayResult:
    """One job of an array: its values of the parameters of the sweep, and the values that its
    program last reported."""

    index: int
    name: str
    phase: str
    exit_code: int | None
    params: dict[str, str | int | float | bool]
    metrics: dict[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProgress:
    """How far a batch is: its rows, and its costs in US dollars. `left_s` and `total_cost` are
    forecasts, None if they are unknown. `cost_per_million` rows includes what preemptions cost."""

    done: int
    total: int
    rows_per_s: float
    left_s: float | None
    cost: Decimal
    cost_per_million: Decimal | None
    total_cost: Decimal | None


class JobArray:
    """An array of jobs. `Client.submit_array` and `Client.array` return arrays. `id`, `name` and
    `project` never change. Every method may raise CavvyError.
    """

    def __init__(self, connections: "Connections", array_id: str, project: str, name: str) -> None:
        self._connections = connections
        self.id = array_id
        self.project = project
        self.name = name

    def counts(self) -> dict[str, int]:
        """Return the number of jobs in each phase."""
        return self._read().array.members

    def progress(self) -> RowProgress | None:
        """Return how far a batch is, or None if no job has begun, or if the array is no batch."""
        found = measure_batch(self._read())
        if found is None:
            return None
        return RowProgress(
            done=found.done,
            total=found.total,
            rows_per_s=found.rows_per_s,
            left_s=found.left_s,
            cost=Money(found.spent_micros).usd,
            cost_per_million=_to_usd(found.micros_per_million),
            total_cost=_to_usd(found.total_micros),
        )

    def results(self) -> list[ArrayResult]:
        """Return the jobs with their parameters and metrics, sorted by index."""
        return [
            ArrayResult(
                index=each.index,
                name=each.name,
                phase=each.phase,
                exit_code=each.exit_code,
                params=each.params,
                metrics=figures(each.progress),
            )
            for each in self._read().jobs
        ]

    def best(self, metric: str, *, highest: bool = False) -> ArrayResult:
        """Return the job with the lowest value of a metric or, if `highest` is set, with the
        highest. Raises CavvyError if no job has reported the metric.
        """
        check_text(metric, "metric")
        found = {
            each.index: (value, each)
            for each in self.results()
            if isinstance(value := each.metrics.get(metric), (int, float)) and value == value
        }
        if not found:
            raise CavvyError(f"no job of the array {self.name} has reported {metric}")
        ranked = sorted(found.values(), key=lambda each: (each[0], each[1].index))
        return ranked[-1 if highest else 0][1]

    def job(self, index: int) -> Job:
        """Return the job with this index. Raises JobNotFound."""
        with self._connections.use() as connection:
            detail = connection.job(self.project, f"{self.name}.{index}")
        return Job(self._connections, read_detail(detail))

    def wait(self, *, timeout: "TimeLimit | None" = None, check: bool = True) -> list[ArrayResult]:
        """Wait until all jobs have ended, and return them. Raises JobFailed for the first job that
        has failed or was stopped, unless `check` is False. Raises WaitTimeout.
        """
        waiting = ArrayWaiter(self, timeout, check=check)
        while (found := waiting.look()) is None:
            pass
        return found

    def stop(self) -> None:
        """Request that all jobs stop, and return immediately."""
        with self._connections.use() as connection:
            stop_array(connection, self.project, self.id)

    def retry(self) -> None:
        """Queue all failed and stopped jobs again."""
        with self._connections.use() as connection:
            retry_array(connection, self.project, self.id)

    def remove(self) -> None:
        """Delete all jobs with their logs and checkpoints; their bills are kept. Each job must have
        ended.
        """
        with self._connections.use() as connection:
            remove_array(connection, self.project, self.id)

    def __repr__(self) -> str:
        return f"<JobArray {self.name} ({self.id})>"

    def _read(self) -> "ArrayDetail":
        with self._connections.use() as connection:
            return read_array(connection, self.project, self.id)


def _to_usd(micros: int | None) -> Decimal | None:
    return None if micros is None else Money(micros).usd


class ArrayWaiter:
    """A wait for the end of all jobs of an array; see `JobArray.wait`."""

    def __init__(self, array: JobArray, timeout: "TimeLimit | None", *, check: bool) -> None:
        self._array, self._check = array, check
        self._timeout_s = None if timeout is None else read_seconds(timeout)
        self._began = time.monotonic()
        self._pause = 0.0

    def look(self) -> list[ArrayResult] | None:
        """Return the jobs if all have ended, and otherwise None. All calls but the first wait a
        moment before they ask the server."""
        time.sleep(self._pause)
        self._pause = min(_LONGEST_S, max(_SHORTEST_S, self._pause * 1.5))
        found = self._array.results()
        left = [each for each in found if each.phase not in ENDS]
        if left:
            if self._timeout_s is not None and time.monotonic() - self._began >= self._timeout_s:
                raise self._make_timeout(left, len(found))
            return None
        failed = [each for each in found if each.phase != "done"]
        if failed and self._check:
            self._array.job(failed[0].index).wait()
        return found

    def _make_timeout(self, left: list[ArrayResult], count: int) -> WaitTimeout:
        message = f"{len(left)} of {count} jobs of {self._array.name} have not ended"
        error = WaitTimeout(message, "the jobs continue; array.stop() stops them")
        error.status = self._array.job(left[0].index).status()
        return error
