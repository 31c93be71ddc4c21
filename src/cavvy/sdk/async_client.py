"""The client for programs that use asyncio. Each request runs in its own thread."""

import asyncio
import threading
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from functools import partial, wraps
from os import PathLike
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from cavvy.sdk.array import ArrayResult, ArrayWaiter, JobArray
from cavvy.sdk.client import Client
from cavvy.sdk.errors import CavvyError
from cavvy.sdk.job import Job, JobWaiter, TimeLimit, Until
from cavvy.sdk.operation import PolicyStatus
from cavvy.sdk.status import JobEvent, JobStatus, Phase
from cavvy.sdk.task import Task
from cavvy.sdk.values import list_after

if TYPE_CHECKING:
    from cavvy.spec.fields.task import TaskKeys

_P = ParamSpec("_P")
_T = TypeVar("_T")
_THREADS = 32  # maximum requests at the same time; further requests wait


class _Threads:
    """The threads in which a client's requests run."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="cavvy")
        self._closed = False

    async def run(self, act: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a function in a thread. If the caller is cancelled, the call still continues in its
        thread. Raises CavvyError if the client is closed."""
        if self._closed:
            raise CavvyError("the client is closed", "make a new AsyncClient()")
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, partial(act, *args, **kwargs)
        )

    async def iterate(self, items: Generator[_T, None, None]) -> AsyncIterator[_T]:
        """Read a generator in threads, one item at a time."""
        lock = threading.Lock()  # a cancelled read still uses the generator until its poll is over

        def read() -> _T | None:
            with lock:
                return next(items, None)

        def close() -> None:
            with lock:
                items.close()

        try:
            while (item := await self.run(read)) is not None:
                yield item
        finally:
            with suppress(RuntimeError):  # the client is closed, and so are its connections
                self._pool.submit(close)

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)


def _in_thread(
    method: Callable[Concatenate[Any, _P], _T],
) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]:
    """Return the coroutine that calls a method of the form without asyncio in a thread."""

    @wraps(method)
    async def call(form: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        threads: _Threads = form._threads
        return await threads.run(method, await form._plain(), *args, **kwargs)

    call.__doc__ = f"See `{method.__qualname__}`."
    return call


class AsyncJob:
    """A form of `Job` for asyncio: its methods are coroutines. A notebook shows the job's state
    that was read most recently.
    """

    def __init__(self, job: Job, threads: _Threads) -> None:
        self._job = job
        self._threads = threads
        self.id = job.id
        self.name = job.name
        self.project = job.project
        self.notes = job.notes

    @property
    def last_status(self) -> JobStatus:
        """The newest state that any method has read from the server."""
        return self._job.last_status

    status = _in_thread(Job.status)

    async def wait(
        self, until: Until = "end", *, timeout: TimeLimit | None = None, check: bool = True
    ) -> JobStatus:
        """See `Job.wait`. If the wait is cancelled, the job continues to run."""
        waiting = JobWaiter(self._job, until, timeout, check=check)
        while (status := await self._threads.run(waiting.look)) is None:
            pass
        return status

    async def logs(
        self, *, follow: bool = False, rank: int = 0, attempt: int | None = None
    ) -> AsyncIterator[str]:
        """See `Job.logs`."""
        parts = self._job._log_parts(follow=follow, rank=rank, attempt=attempt)
        async for lines in self._threads.iterate(parts):
            for line in lines:
                yield line

    async def events(self, *, follow: bool = False) -> AsyncIterator[JobEvent]:
        """See `Job.events`."""
        async for event in self._threads.iterate(self._job.events(follow=follow)):
            yield event

    metrics = _in_thread(Job.metrics)
    figures = _in_thread(Job.figures)
    cost = _in_thread(Job.cost)
    outputs = _in_thread(Job.outputs)

    async def stop(self, *, wait: bool = True) -> JobStatus:
        """See `Job.stop`."""
        status = await self._threads.run(self._job.stop, wait=False)
        return await self.wait(check=False) if wait else status

    retry = _in_thread(Job.retry)
    remove = _in_thread(Job.remove)

    async def _plain(self) -> Job:
        return self._job

    def __repr__(self) -> str:
        return f"<AsyncJob {self.name} ({self.id}): {self.last_status.phase}>"

    def _repr_html_(self) -> str:
        from cavvy.sdk.status import show_job

        return show_job(self.last_status)


class AsyncJobArray:
    """A form of `JobArray` for asyncio: its methods are coroutines."""

    def __init__(self, array: JobArray, threads: _Threads) -> None:
        self._array = array
        self._threads = threads
        self.id = array.id
        self.name = array.name
        self.project = array.project

    counts = _in_thread(JobArray.counts)
    progress = _in_thread(JobArray.progress)
    results = _in_thread(JobArray.results)
    best = _in_thread(JobArray.best)

    async def job(self, index: int) -> AsyncJob:
        """See `JobArray.job`."""
        return AsyncJob(await self._threads.run(self._array.job, index), self._threads)

    async def wait(
        self, *, timeout: TimeLimit | None = None, check: bool = True
    ) -> list[ArrayResult]:
        """See `JobArray.wait`. If the wait is cancelled, the jobs continue to run."""
        waiting = ArrayWaiter(self._array, timeout, check=check)
        while (found := await self._threads.run(waiting.look)) is None:
            pass
        return found

    stop = _in_thread(JobArray.stop)
    retry = _in_thread(JobArray.retry)
    remove = _in_thread(JobArray.remove)

    async def _plain(self) -> JobArray:
        return self._array

    def __repr__(self) -> str:
        return f"<AsyncJobArray {self.name} ({self.id})>"


AsyncEarlier = AsyncJob | AsyncJobArray | str  # see `cavvy.sdk.client.Earlier`


class AsyncClient:
    """A form of `Client` for asyncio: its methods are coroutines. The first request connects to the
    server. `async with` closes the connections when its block ends.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        project: str | None = None,
        home: str | PathLike[str] | None = None,
    ) -> None:
        self._make = partial(Client, address, token=token, project=project, home=home)
        self._threads = _Threads()
        self._client: Client | None = None
        self._connecting = asyncio.Lock()

    async def submit(
        self,
        task: Task,
        *,
        params: Mapping[str, object] | None = None,
        name: str | None = None,
        project: str | None = None,
        after: AsyncEarlier | Iterable[AsyncEarlier] | None = None,
        consent: bool = False,
        max_cost: str | float | Decimal | None = None,
    ) -> AsyncJob:
        """See `Client.submit`."""
        client = await self._plain()
        job = await self._threads.run(
            client.submit,
            task,
            params=params,
            name=name,
            project=project,
            after=None if after is None else list_after(after),
            consent=consent,
            max_cost=max_cost,
        )
        return AsyncJob(job, self._threads)

    run = submit  # the name of the command

    async def submit_array(
        self,
        task: Task,
        *,
        array: str | None = None,
        sweep: Mapping[str, object] | None = None,
        parallel: int | None = None,
        params: Mapping[str, object] | None = None,
        name: str | None = None,
        project: str | None = None,
        after: AsyncEarlier | Iterable[AsyncEarlier] | None = None,
        consent: bool = False,
        max_cost: str | float | Decimal | None = None,
    ) -> AsyncJobArray:
        """See `Client.submit_array`."""
        client = await self._plain()
        made = await self._threads.run(
            client.submit_array,
            task,
            array=array,
            sweep=sweep,
            parallel=parallel,
            params=params,
            name=name,
            project=project,
            after=None if after is None else list_after(after),
            consent=consent,
            max_cost=max_cost,
        )
        return AsyncJobArray(made, self._threads)

    async def map(
        self,
        run: str | Callable[..., object],
        items: Iterable[str | int | float | bool] | str | PathLike[str],
        *,
        output: str | PathLike[str] | None = None,
        rows: int | None = None,
        consent: bool = False,
        max_cost: str | float | Decimal | None = None,
        **keys: Unpack["TaskKeys"],
    ) -> AsyncJobArray:
        """See `Client.map`."""
        client = await self._plain()
        submit = partial(
            client.map,
            run,
            items,
            output=output,
            rows=rows,
            consent=consent,
            max_cost=max_cost,
            **keys,
        )
        return AsyncJobArray(await self._threads.run(submit), self._threads)

    async def array(self, name: str, *, project: str | None = None) -> AsyncJobArray:
        """See `Client.array`."""
        client = await self._plain()
        found = await self._threads.run(client.array, name, project=project)
        return AsyncJobArray(found, self._threads)

    async def job(self, name: str, *, project: str | None = None) -> AsyncJob:
        """See `Client.job`."""
        client = await self._plain()
        return AsyncJob(await self._threads.run(client.job, name, project=project), self._threads)

    async def jobs(
        self, *, phases: Collection[Phase] = (), limit: int = 50, project: str | None = None
    ) -> list[AsyncJob]:
        """See `Client.jobs`."""
        client = await self._plain()
        found = await self._threads.run(client.jobs, phases=phases, limit=limit, project=project)
        return [AsyncJob(each, self._threads) for each in found]

    ps = jobs  # as the command says
    status = _in_thread(Client.status)

    async def logs(
        self,
        name: str,
        *,
        follow: bool = False,
        rank: int = 0,
        attempt: int | None = None,
        project: str | None = None,
    ) -> AsyncIterator[str]:
        """See `Client.logs`."""
        job = await self.job(name, project=project)
        async for line in job.logs(follow=follow, rank=rank, attempt=attempt):
            yield line

    async def events(
        self, name: str, *, follow: bool = False, project: str | None = None
    ) -> AsyncIterator[JobEvent]:
        """See `Client.events`."""
        async for event in (await self.job(name, project=project)).events(follow=follow):
            yield event

    async def wait(
        self,
        name: str,
        until: Until = "end",
        *,
        timeout: TimeLimit | None = None,
        check: bool = True,
        project: str | None = None,
    ) -> JobStatus:
        """See `Client.wait`."""
        job = await self.job(name, project=project)
        return await job.wait(until, timeout=timeout, check=check)

    async def stop(self, name: str, *, wait: bool = True, project: str | None = None) -> JobStatus:
        """See `Client.stop`."""
        return await (await self.job(name, project=project)).stop(wait=wait)

    retry = _in_thread(Client.retry)
    rm = _in_thread(Client.rm)
    cost = _in_thread(Client.cost)
    hosts = _in_thread(Client.hosts)
    cordon = _in_thread(Client.cordon)
    uncordon = _in_thread(Client.uncordon)
    drain = _in_thread(Client.drain)
    reservations = _in_thread(Client.reservations)
    reserve = _in_thread(Client.reserve)
    remove_reservation = _in_thread(Client.remove_reservation)
    shares = _in_thread(Client.shares)
    policies = _in_thread(Client.policies)

    async def set_policy(
        self, *, project: str | None = None, accept_exceeded: bool = False, **limits: object
    ) -> PolicyStatus:
        """See `Client.set_policy`."""
        client = await self._plain()
        return await self._threads.run(
            client.set_policy, project=project, accept_exceeded=accept_exceeded, **limits
        )

    delete_policy = _in_thread(Client.delete_policy)

    async def close(self) -> None:
        """Close the connections. Jobs continue to run."""
        self._threads.close()
        if self._client is not None:
            self._client.close()

    async def __aenter__(self) -> Self:
        await self._plain()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _plain(self) -> Client:
        async with self._connecting:
            if self._client is None:
                self._client = await self._threads.run(self._make)
            return self._client
