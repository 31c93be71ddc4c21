"""The client for notebooks and scripts: submits tasks and finds jobs."""

import getpass
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from itertools import islice
from numbers import Integral
from os import PathLike, fspath
from typing import TYPE_CHECKING, Self, Unpack

from cavvy.client.array_wire import read_array
from cavvy.client.errors import ApiError
from cavvy.client.maintenance_wire import (
    CordonAsk,
    DrainAsk,
    ReservationAsk,
    UncordonAsk,
    add_reservation,
    cordon_host,
    delete_reservation,
    drain_host,
    list_hosts,
    list_reservations,
    uncordon_host,
)
from cavvy.client.policy_wire import delete_policy, list_policies, put_policy
from cavvy.client.queue_wire import read_shares
from cavvy.domain.arrays import MOST_MEMBERS
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.sdk.array import JobArray
from cavvy.sdk.connections import Connections
from cavvy.sdk.job import Job, TimeLimit, Until
from cavvy.sdk.operation import (
    HostReservation,
    OwnHost,
    PolicyStatus,
    ShareStatus,
    change_policy,
    read_host,
    read_policy,
    read_reservation,
    read_share,
)
from cavvy.sdk.status import JobEvent, JobStatus, Phase, read_detail, read_listing
from cavvy.sdk.submission import SubmitOptions, submit_task
from cavvy.sdk.task import Task, make_batch
from cavvy.sdk.values import (
    check_params,
    check_text,
    check_texts,
    check_type,
    list_after,
    read_begin,
    read_seconds,
)

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.spec.fields.task import TaskKeys

Earlier = Job | JobArray | str  # a job that another one waits for, or its name


class Client:
    """A client of a Cavvy server. Any number of threads may use the client.

    `Client()` uses the embedded server of this machine, and starts this server if necessary, as the
    commands do. `Client(address, token=...)` uses the server at `address`. The address must begin
    with https://. The address may begin with http:// if the address is on this machine, such as the
    local end of an SSH tunnel. `project` is the project of the jobs. If `project` is not given,
    `submit` uses the project that the task names, and otherwise, as other methods do,
    CAVVY_PROJECT, the choice of `cavvy project use`, `default`, or the account's only project.
    `home` is the state folder; the default is CAVVY_HOME or ~/.cavvy.

    Raises ServerUnavailable if the server cannot be reached, and CavvyError if the server refuses
    the token.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        project: str | None = None,
        home: str | PathLike[str] | None = None,
    ) -> None:
        check_texts(address=address, token=token, project=project)
        self._home = None if home is None else fspath(home)
        check_texts(home=self._home)
        self._project = project
        self._connections = Connections(address, token, self._home)
        with self._connections.use():  # reports a missing server now
            pass

    def submit(
        self,
        task: Task,
        *,
        params: Mapping[str, object] | None = None,
        name: str | None = None,
        project: str | None = None,
        after: Earlier | Iterable[Earlier] | None = None,
        consent: bool = False,
        max_cost: str | float | Decimal | None = None,
    ) -> Job:
        """Queue a task and return its job. Before the task is queued, the working folder is copied
        to the server. `params` replace the defaults of the task's parameters. `name` is the name of
        the job. `after` are the jobs or arrays that must succeed before this job starts; a string
        is a name or ID, which a condition may follow, such as "prepare:any".

        Set `consent` to agree to offers that cost money. Set `max_cost`, in US dollars, to agree to
        costs up to this amount; the job is stopped before it costs more. A budget in the task also
        counts as consent to the costs. Raises InvalidTask, NoOffer, ConsentNeeded.
        """
        if not isinstance(task, Task):
            raise TypeError(
                f"task must be of type Task, not {type(task).__name__}; Task.from_file(path) reads "
                "a task file"
            )
        check_params(params)
        check_texts(name=name, project=project)
        options = SubmitOptions(
            params=params,
            name=name,
            project=project or self._project,
            consent=consent,
            max_cost=max_cost,
        )
        if after is not None:
            task = task.replace(after=list_after(after))
        with self._connections.use() as connection:
            made, notes = submit_task(connection, task, options, self._home, self._choose)
            detail = connection.job(made.project, made.id)
        return Job(self._connections, read_detail(detail), notes)

    run = submit  # the name of the command

    def submit_array(
        self,
        task: Task,
        *,
        array: str | None = None,
        sweep: Mapping[str, object] | None = None,
        parallel: int | None = None,
        params: Mapping[str, object] | None = None,
        name: str | None = None,
        project: str | None = None,
        after: Earlier | Iterable[Earlier] | None = None,
        consent: bool = False,
        max_cost: str | float | Decimal | None = None,
    ) -> JobArray:
        """Queue a task as an array of jobs, as the options --array and --sweep do: a job for each
        index in `array`, such as "0-99", or for each combination of the values in `sweep`, such as
        `{"lr": [0.1, 0.01], "seed": "0..4"}`. At most `parallel` jobs run at the same time. Other
        arguments are as for `submit`. Raises InvalidTask, NoOffer, ConsentNeeded.
        """
        if not isinstance(task, Task):
            raise TypeError(f"task must be of type Task, not {type(task).__name__}")
        check_params(params)
        check_texts(name=name, project=project)
        waits = None if after is None else list_after(after)
        keys = {"array": array, "sweep": sweep, "parallel": parallel, "after": waits}
        given = {key: value for key, value in keys.items() if value is not None}
        options = SubmitOptions(
            params=params,
            name=name,
            project=project or self._project,
            consent=consent,
            max_cost=max_cost,
            array=True,
        )
        changed = task.replace(**given) if given else task  # type: ignore[arg-type]  # checked
        with self._connections.use() as connection:
            made, _ = submit_task(connection, changed, options, self._home, self._choose)
        return JobArray(self._connections, made.id, made.project, made.name)

    def map(
        self,
        run: str | Callable[..., object],
        items: Iterable[str | int | float | bool] | str | PathLike[str],
        *,
        output: str | PathLike[str] | None = None,
        rows: int | None = None,
        consent: bool = False,
        max_cost: str | float | Decimal | None = None,
        **keys: Unpack["TaskKeys"],
    ) -> JobArray:
        """Run a command for each of the items, as an array of jobs in the order of the items. The
        command reads its item from the variable CAVVY_PARAM_ITEM, or contains it as
        `${{ params.item }}`. `keys` are keys of `Task`, such as `parallel`, `name` and `resources`.
        Other arguments are as for `submit`. Raises InvalidTask, NoOffer, ConsentNeeded.

        If `items` is a path or URL of rows, they are processed as a [batch](task-file.md#batch):
        each row exactly once, in shards of at most `rows` rows, by `parallel` jobs, which write
        their results to the folder `output`. `run` is a command, or a function in a module of the
        current folder. See `JobArray.progress`.
        """
        if isinstance(items, (str, PathLike)):
            task = make_batch(run, fspath(items), output, rows, keys)
        else:
            if not isinstance(run, str) or output is not None or rows is not None:
                hint = "functions, `output` and `rows` are for a file or folder of rows"
                raise TypeError(f"items is no path: {hint}")
            sweep = {"item": [*islice(items, MOST_MEMBERS + 1)]}  # a generator may have no end
            # a sweep in keys: TypeError
            task = Task(run, **keys, sweep=sweep)  # type: ignore[misc]
        return self.submit_array(task, consent=consent, max_cost=max_cost)

    def array(self, name: str, *, project: str | None = None) -> JobArray:
        """Return an array by its name or ID. Raises JobNotFound."""
        check_text(name, "name")
        chosen = self._choose(project)
        with self._connections.use() as connection:
            row = read_array(connection, chosen, name).array
        return JobArray(self._connections, row.id, row.project, row.name)

    def job(self, name: str, *, project: str | None = None) -> Job:
        """Return a job by its name or ID. Raises JobNotFound."""
        check_text(name, "name")
        chosen = self._choose(project)
        with self._connections.use() as connection:
            try:
                detail = connection.job(chosen, name, session=True)
            except ApiError as error:
                raise _name_array(connection, chosen, name, error) from error
        return Job(self._connections, read_detail(detail))

    def jobs(
        self, *, phases: Collection[Phase] = (), limit: int = 50, project: str | None = None
    ) -> list[Job]:
        """Return the newest jobs of a project, at most `limit` (1 to 500), newest first. If
        `phases` is given, only jobs in these phases are returned.
        """
        check_type(limit, Integral, "limit")
        check_type(phases, Collection, "phases")
        for phase in phases:
            check_text(phase, "phases")
        chosen = self._choose(project)
        with self._connections.use() as connection:
            page = connection.jobs(chosen, phases=phases, limit=limit)
        return [Job(self._connections, read_listing(each)) for each in page.jobs]

    ps = jobs  # as the command says

    def status(self, name: str, *, project: str | None = None) -> JobStatus:
        """Return the state of the job with this name or ID. Raises JobNotFound, as all methods do
        that take the name of a job."""
        return self.job(name, project=project).last_status

    def logs(
        self,
        name: str,
        *,
        follow: bool = False,
        rank: int = 0,
        attempt: int | None = None,
        project: str | None = None,
    ) -> Generator[str, None, None]:
        """Yield the lines of a job's log, as `Job.logs` does."""
        yield from self.job(name, project=project).logs(follow=follow, rank=rank, attempt=attempt)

    def events(
        self, name: str, *, follow: bool = False, project: str | None = None
    ) -> Generator[JobEvent, None, None]:
        """Yield the events of a job, as `Job.events` does."""
        yield from self.job(name, project=project).events(follow=follow)

    def wait(
        self,
        name: str,
        until: Until = "end",
        *,
        timeout: TimeLimit | None = None,
        check: bool = True,
        project: str | None = None,
    ) -> JobStatus:
        """Wait for a job, as `Job.wait` does."""
        return self.job(name, project=project).wait(until, timeout=timeout, check=check)

    def stop(self, name: str, *, wait: bool = True, project: str | None = None) -> JobStatus:
        """Stop a job, as `Job.stop` does."""
        return self.job(name, project=project).stop(wait=wait)

    def retry(self, name: str, *, project: str | None = None) -> JobStatus:
        """Queue an ended job again, as `Job.retry` does."""
        return self.job(name, project=project).retry()

    def rm(self, name: str, *, project: str | None = None) -> None:
        """Remove an ended job, as `Job.remove` does."""
        self.job(name, project=project).remove()

    def cost(self, *, since: datetime | None = None, project: str | None = None) -> Decimal:
        """Return what a project has cost in US dollars, in total or since a point in time."""
        if since is not None:
            check_type(since, datetime, "since")
        chosen = self._choose(project)
        with self._connections.use() as connection:
            found = connection.project_cost(chosen, since=since)
        return Money(found.total_micros).usd

    def hosts(self) -> list[OwnHost]:
        """Return the server's own hosts, and who holds what on them until when."""
        with self._connections.use() as connection:
            return [read_host(each) for each in list_hosts(connection)]

    def cordon(self, host: str, *, reason: str = "", gpus: Iterable[int] = ()) -> OwnHost:
        """Place no new work on an own host, or only on these of its GPUs, counted from 0. Running
        work goes on, but jobs with checkpoints leave the GPUs."""
        check_text(host, "host")
        check_text(reason, "reason")
        ask = CordonAsk(node=host, reason=reason, user=getpass.getuser(), gpus=tuple(gpus))
        with self._connections.use() as connection:
            return read_host(cordon_host(connection, ask))

    def uncordon(self, host: str) -> OwnHost:
        """Place work on an own host again."""
        check_text(host, "host")
        with self._connections.use() as connection:
            return read_host(uncordon_host(connection, UncordonAsk(node=host)))

    def drain(self, host: str, *, within: TimeLimit = "30m", reason: str = "") -> OwnHost:
        """Cordon an own host, and let its work leave within a time: seconds, a `timedelta`, or a
        string such as "30m". Jobs with checkpoints save one and go on elsewhere."""
        check_text(host, "host")
        check_text(reason, "reason")
        length = read_seconds(within, "within")
        ask = DrainAsk(node=host, reason=reason, user=getpass.getuser(), within_s=length)
        with self._connections.use() as connection:
            return read_host(drain_host(connection, ask))

    def reservations(self, *, project: str | None = None) -> list[HostReservation]:
        """Return the reservations that have not ended, of a project or of all projects."""
        check_texts(project=project)
        with self._connections.use() as connection:
            return [read_reservation(each) for each in list_reservations(connection, project)]

    def reserve(
        self,
        length: TimeLimit,
        *,
        hosts: Iterable[str] = (),
        gpus: int = 0,
        begin: datetime | None = None,
        user: str = "",
        name: str = "",
        reason: str = "",
        drain: bool = False,
        project: str | None = None,
    ) -> HostReservation:
        """Reserve own `hosts`, or a number of `gpus` of any host, for a project or for one `user`
        of it, from `begin` (now) for this length. Other work that may still run at the begin leaves
        if `drain` is set; otherwise, the reservation is refused."""
        for text, what in ((user, "user"), (name, "name"), (reason, "reason")):
            check_text(text, what)
        check_type(gpus, Integral, "gpus")
        if isinstance(hosts, str):
            raise TypeError("hosts must be a list, not a string")
        ask = ReservationAsk(
            project=project or "",
            user=user,
            name=name,
            nodes=list(hosts),
            gpus=gpus,
            begins_at=read_begin(begin),
            length_s=read_seconds(length, "length"),
            reason=reason,
            made_by=getpass.getuser(),
            moves=drain,
        )
        with self._connections.use() as connection:
            chosen = replace(ask, project=self._choose(project))
            return read_reservation(add_reservation(connection, chosen))

    def remove_reservation(self, name: str) -> None:
        """Give what is reserved back."""
        check_text(name, "name")
        with self._connections.use() as connection:
            delete_reservation(connection, name)

    def shares(self, *, project: str | None = None) -> list[ShareStatus]:
        """Return where the projects that use or want something stand in the queue; with `project`,
        only this one."""
        check_texts(project=project)
        with self._connections.use() as connection:
            return [read_share(each) for each in read_shares(connection, project).projects]

    def policies(self, *, project: str | None = None) -> list[PolicyStatus]:
        """Return the policies that apply to the jobs of a project, that of the server first and
        the project's own last."""
        chosen = self._choose(project)
        with self._connections.use() as connection:
            return [read_policy(each) for each in list_policies(connection, chosen)]

    def set_policy(
        self, *, project: str | None = None, accept_exceeded: bool = False, **limits: object
    ) -> PolicyStatus:
        """Change the policy of a project: its share, quotas and limits. `limits` are fields of
        `PolicyStatus`; the others keep their values. Quotas and limits are lowered below what is in
        use only with `accept_exceeded`. Return the new policy."""
        chosen = self._choose(project)
        with self._connections.use() as connection:
            own = [each for each in list_policies(connection, chosen) if each.project == chosen]
            ask = change_policy(own[0] if own else None, limits)
            put_policy(connection, chosen, ask, accept_exceeded=accept_exceeded)
            return read_policy(list_policies(connection, chosen)[-1])

    def delete_policy(self, *, project: str | None = None) -> None:
        """Delete the policy of a project. The policies of the projects above it still apply."""
        chosen = self._choose(project)
        with self._connections.use() as connection:
            delete_policy(connection, chosen)

    def close(self) -> None:
        """Close the connections. Jobs continue to run."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self._connections.address or 'the embedded server'}>"

    def _choose(self, project: str | None = None) -> str:
        check_texts(project=project)
        return project or self._project or self._connections.default_project()


def _name_array(connection: "ApiClient", project: str, name: str, error: ApiError) -> ApiError:
    """Return the error for a job that does not exist: if there is an array of this name, it says
    how to get the array."""
    if error.code != "job-not-found" or "." in name:
        return error
    try:
        read_array(connection, project, name)
    except ApiError:
        return error
    hint = f"`Client.array({name!r})` returns it; it has wait, stop, retry and remove"
    return ApiError(error.code, f"{name} is an array of jobs", hint, error.status)
