"""The synchronous client of the API. The client has one method per route and returns typed answers.
The client repeats requests where that is safe.

Compares the version of a server with the version of this client.
"""

import getpass
import re
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from math import inf
from typing import Self, TypeVar

from msgspec import UNSET, Raw, Struct
from msgspec.json import decode, encode

from cavvy import __version__
from cavvy.client import wire
from cavvy.client.answers import find_error, read_answer
from cavvy.client.errors import NO_DATABASE, ApiError, ConnectionLost, IncompatibleVersions
from cavvy.client.paths import job_path, machine_path, make_key, project_path, query, segment
from cavvy.client.transport import QUIET_S, ClientConnection, HttpAnswer, Patience

API = 1  # major version of the routes; two different versions are incompatible
REVISION = 107  # increases with every change to the routes
_MOVES = 63  # the first revision in which a retry can replace resources
_CHOOSES = 74  # the first revision in which a retry can name a checkpoint

_T = TypeVar("_T")
_TRIES = 4  # minimum number of tries of a request
_POLL_S = 1.5  # seconds that a long poll asks the server to wait for something new
_INPUT_S = 20.0  # seconds that the server waits until a node has read earlier input
_SHORTEST_S = 0.1  # the shortest wait for an answer, in seconds
_LONGEST_PAUSE_S = 2.0  # the longest pause between two tries, in seconds

_SERVER = "/v1/server"
_NO_ROUTE = "not-found"
# codes of the errors with which an older server refuses what only newer versions know
_REFUSALS = (_NO_ROUTE, "invalid-task")


class LogChunk(Struct, frozen=True, kw_only=True):
    """Bytes from the log of one rank. `attempt` is the number of the attempt that wrote them, and
    `offset` is the start of the next chunk.
    """

    data: bytes
    attempt: int
    offset: int
    over: bool  # the job has ended and the log is complete
    # (offset, time): the bytes from this offset on arrived at this time; empty unless requested
    times: list[tuple[int, float]] = []


class ExecChunk(Struct, frozen=True, kw_only=True):
    """Output of a command in the environment of a job; `exit_code` is set in the last chunk."""

    data: bytes
    exit_code: int | None


class ApiClient:
    """A connection to one server, for use by one thread. If the server does not answer, the request
    is repeated until the time limit of `patience`. Before each repetition, `revive` is called; it
    returns the server's current address and token. `ca` is passed to `ClientConnection`. Requests
    that have no answer at the time `until` fail; None sets no such limit.
    """

    until: float | None = None  # in seconds of `time.monotonic`
    before_change: Callable[[], None] | None = None  # called before each request that is no GET

    def __init__(
        self,
        address: str,
        token: str,
        *,
        timeout_s: float = 30.0,
        revive: Callable[[], tuple[str, str]] | None = None,
        patience: Patience | None = None,
        ca: str = "",
    ) -> None:
        self.address = address
        self.patience = patience or Patience()
        self._token = token
        self._timeout_s = timeout_s
        self.revive = revive
        self.ca = ca
        self._connection = ClientConnection(address, ca=ca)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    # Jobs

    def submit(
        self,
        text: str,
        *,
        project: str = "default",
        path: str = "task",
        params: Mapping[str, wire.Scalar] | None = None,
        origin: object = None,
        name: str | None = None,
        user: str = "",
        consent: bool = False,
        own_consent: bool = False,
        ceiling_micros: int | None = None,
        key: str | None = None,
    ) -> wire.Submitted:
        """Queue a task. `origin` is a `RunOrigin` of the domain model. If several submissions have
        the same `key` (see `make_key`), only one job is created.

        Raises ApiError: `invalid-task`, `no-offer`, `task-refused`, `consent-needed` (the message
        shows the price), `secret-missing`, `snapshot-missing`, `disk-full`.
        """
        ask = wire.SubmitRequest(
            text=text,
            path=path,
            params=dict(params or {}),
            origin=UNSET if origin is None else Raw(encode(origin)),
            name=name,
            user=user,
            consent=consent,
            own_consent=own_consent,
            ceiling_micros=ceiling_micros,
        )
        headers = {"Idempotency-Key": key or make_key()}
        return self.ask(f"{project_path(project)}/jobs", wire.Submitted, ask, headers)

    def submit_graph(self, project: str, ask: wire.GraphRequest) -> list[wire.Submitted]:
        """Queue several tasks. Raises ApiError with the codes of `submit`."""
        return self.ask(f"{project_path(project)}/job-graphs", list[wire.Submitted], ask)

    def submit_batch(self, project: str, ask: wire.BatchRequest) -> wire.SubmittedBatch:
        """Queue up to 10,000 tasks in one transaction. Raises ApiError with the codes of
        `submit`."""
        return self.ask(f"{project_path(project)}/job-batches", wire.SubmittedBatch, ask)

    def check_graph(
        self, project: str, ask: wire.GraphRequest, *, placements: int = 0
    ) -> list[wire.SubmissionCheck]:
        """Check several tasks as `submit_graph` does, and queue nothing. Otherwise like
        `check_submission`, for each task.
        """
        target = f"{project_path(project)}/job-graph-check" + query(placements=placements or None)
        return self.ask(target, list[wire.SubmissionCheck], ask)

    def check_submission(
        self,
        text: str,
        *,
        project: str,
        path: str,
        params: Mapping[str, wire.Scalar],
        origin: object,
        name: str | None = None,
        user: str = "",
        own_consent: bool = False,
        placements: int = 0,
    ) -> wire.SubmissionCheck:
        """Check a task as `submit` does, without the working folder, and queue nothing. The answer
        has the best `placements` offers, at most 50. Raises ApiError with the codes of `submit`,
        except `consent-needed`.
        """
        ask = wire.SubmitRequest(
            text=text,
            path=path,
            params=dict(params),
            origin=Raw(encode(origin)),
            name=name,
            user=user,
            own_consent=own_consent,
        )
        target = f"{project_path(project)}/job-check" + query(placements=placements or None)
        return self.ask(target, wire.SubmissionCheck, ask)

    def jobs(
        self,
        project: str | None = None,
        *,
        phases: Collection[str] = (),
        cursor: str | None = None,
        limit: int = 50,
        arrays: bool = False,
    ) -> wire.JobPage:
        """Return one page of jobs, newest first, of one project or, if `project` is None, of all
        projects. If `arrays` is set, each array is one row.
        """
        base = "/v1/jobs" if project is None else f"{project_path(project)}/jobs"
        asked = query(limit=limit, phase=phases, cursor=cursor, arrays=arrays)
        return self.ask(base + asked, wire.JobPage)

    def search_jobs(self, **wanted: object) -> wire.JobMatches:
        """Return a page of the jobs that match. `wanted` are parameters of the route: project,
        phase, user, text, job, provider, gpu, tag, since, until, sort, ascending, offset, limit and
        arrays.
        """
        return self.ask("/v1/job-search" + query(**wanted), wire.JobMatches)

    def job(self, project: str, name: str, *, session: bool = False) -> wire.JobDetail:
        """Return a job by its name or ID. If `session` is set, `name` can also be the name of a
        machine. If no unfinished job has this name, the newest unfinished session of the machine is
        returned. Raises ApiError `job-not-found`.
        """
        asked = query(session=session)
        return self.ask(job_path(project, name) + asked, wire.JobDetail)

    def figures(
        self,
        project: str,
        name: str,
        *,
        attempt: int | None = None,
        ranks: Collection[int] = (),
        names: Collection[str] = (),
        since: datetime | None = None,
        until: datetime | None = None,
        points: int = 300,
    ) -> wire.JobFigures:
        """Return what the job's nodes measured, and its program reported, over time: at most
        `points` values of each figure. By default, all figures of the first ranks in the last day
        before the job's end or before now. Raises ApiError `job-not-found`, `invalid-request`.
        """
        asked = query(
            attempt=attempt,
            rank=ranks,
            figure=names,
            since=since and since.isoformat(),
            until=until and until.isoformat(),
            points=points,
        )
        return self.ask(job_path(project, name) + "/figures" + asked, wire.JobFigures)

    def forecast(self, project: str, name: str) -> wire.ForecastView:
        """Return the expected remaining cost of a job with a deadline. Raises ApiError
        `job-not-found`.
        """
        return self.ask(job_path(project, name) + "/forecast", wire.ForecastView)

    def offers(self, project: str, **wanted: object) -> wire.OfferPage:
        """Return what the project's jobs can rent, and the catalog's prices. `wanted` are
        parameters of the route: gpu, provider, region, spot, ready and limit. Raises ApiError
        `invalid-request`.
        """
        return self.ask(f"{project_path(project)}/offers" + query(**wanted), wire.OfferPage)

    def markets(self) -> list[wire.MarketListing]:
        """Return, for each offer that was ever used, a summary of its launches, refusals and
        preemptions.
        """
        return self.ask("/v1/markets", list[wire.MarketListing])

    def events(
        self, project: str, name: str, *, after: int = 0, wait_s: float = 0
    ) -> wire.EventPage:
        """Return the events whose IDs are above `after`. If the job has no newer event yet, wait up
        to `wait_s` seconds for a new event.
        """
        target = job_path(project, name) + "/events" + query(after=after, wait_s=wait_s)
        return self.ask(target, wire.EventPage, wait_s=wait_s)

    def follow(self, project: str, name: str, *, after: int = 0) -> Iterator[wire.EventView]:
        """Yield the events whose IDs are above `after`, including new events as they happen,
        until the job has ended."""
        over = False
        while not over:
            page = self.events(project, name, after=after, wait_s=_POLL_S)
            yield from page.events
            after, over = page.last, page.over and not page.events

    def logs(
        self,
        project: str,
        name: str,
        *,
        rank: int = 0,
        attempt: int | None = None,
        tail_bytes: int | None = None,
        follow: bool = False,
    ) -> Iterator[bytes]:
        """Yield the bytes of the log of one attempt or, if `attempt` is None, of all attempts in
        order. With `follow`, yields new bytes until the job has ended.
        """
        for chunk in self.log_chunks(
            project, name, rank=rank, attempt=attempt, tail_bytes=tail_bytes, follow=follow
        ):
            if chunk.data:
                yield chunk.data

    def log_chunks(
        self,
        project: str,
        name: str,
        *,
        rank: int = 0,
        attempt: int | None = None,
        tail_bytes: int | None = None,
        follow: bool = False,
        first: int | None = None,
        since: datetime | None = None,
        times: bool = False,
    ) -> Iterator[LogChunk]:
        """Yield the log as `logs` does, in chunks with their positions. An empty chunk means that
        nothing new arrived during a long poll.

        `attempt` limits the log to one attempt. Otherwise, the log begins with the attempt number
        `first`. Bytes that arrived before `since` are skipped. With `times`, chunks contain the
        times at which the server received their bytes.
        """
        at, offset = attempt or first, 0
        while True:
            chunk = self.log(
                project,
                name,
                rank=rank,
                attempt=at,
                offset=offset,
                tail_bytes=tail_bytes,
                wait_s=_POLL_S if follow else 0,
                only=attempt is not None,
                since=since,
                times=times,
            )
            yield chunk
            moved = chunk.attempt != at
            at, offset, tail_bytes, since = chunk.attempt, chunk.offset, None, None
            if chunk.over or (not follow and not chunk.data and not moved):
                return

    def log(
        self,
        project: str,
        name: str,
        *,
        rank: int = 0,
        attempt: int | None = None,
        offset: int = 0,
        tail_bytes: int | None = None,
        wait_s: float = 0,
        only: bool = False,
        since: datetime | None = None,
        times: bool = False,
    ) -> LogChunk:
        """Return one chunk of the log of `attempt`, from `offset` on. If `attempt` is None, start
        with the first attempt. At the end of an attempt's log, the next attempt's log follows,
        unless `only` is set.
        """
        asked = query(
            rank=rank,
            offset=offset,
            wait_s=wait_s,
            only=only,
            attempt=attempt,
            tail_bytes=tail_bytes,
            since=since and since.isoformat(),
            times=times,
        )
        answer = self.call("GET", job_path(project, name) + "/logs" + asked, wait_s=wait_s)
        return LogChunk(
            data=answer.body,
            attempt=int(answer.headers["cavvy-log-attempt"]),
            offset=int(answer.headers["cavvy-log-offset"]),
            over=answer.headers["cavvy-log-over"] == "true",
            times=_read_times(answer.headers.get("cavvy-log-times", "")),
        )

    def stop(self, project: str, name: str, *, reason: str = "") -> wire.JobListing:
        """Request that the job stops, and return immediately. An ended job is not changed. Without
        a reason, the job's events say who has stopped it."""
        return self.ask(
            job_path(project, name) + "/stop", wire.JobListing, wire.StopAsk(reason=reason)
        )

    def remove(self, project: str, name: str) -> wire.JobRemoved:
        """Delete an ended job except its bill. Raises ApiError `job-not-found`, `job-not-ended`."""
        target = job_path(project, name)
        return self.ask(target, wire.JobRemoved, method="DELETE", retry=False, wait_s=60)

    def retry(
        self,
        project: str,
        name: str,
        *,
        resources: Mapping[str, object] | None = None,
        consent: bool = False,
        checkpoint: int | None = None,
    ) -> wire.JobListing:
        """Queue a failed or stopped job again. `resources` replace keys of its task's `resources`.
        The job resumes from the stored checkpoint with the number `checkpoint`, or from its newest.
        Raises ApiError `job-not-ended`, `job-done` and, if there are such resources,
        `invalid-task`, `no-offer`, `machine-unfit`, `policy-refused`, `consent-needed`, and
        `server-too-old` instead of starting the job in its old place.
        """
        if resources:
            require_revision(self.call, _MOVES, "the resources that replace those of the job")
        if checkpoint is not None:
            require_revision(self.call, _CHOOSES, "the checkpoint from which the job resumes")
        given = Raw(encode(resources)) if resources else UNSET
        ask = wire.RetryAsk(resources=given, consent=consent, checkpoint=checkpoint)
        target = job_path(project, name) + "/retry"
        return self.ask(target, wire.JobListing, ask, retry=False)

    def drill_preempt(
        self, project: str, name: str, *, notice_s: float = 30.0, rank: int | None = None
    ) -> wire.JobListing:
        """Reclaim the job's nodes, or only the node of `rank`, as a spot market would. Raises
        ApiError `job-not-running`."""
        target = job_path(project, name) + "/drill/preempt"
        ask = wire.DrillAsk(notice_s=notice_s, rank=rank)
        return self.ask(target, wire.JobListing, ask, retry=False)

    def resize(self, project: str, name: str, nodes: int) -> wire.JobListing:
        """Let an elastic job have at most this many nodes. Raises ApiError `invalid-request`,
        `conflict`."""
        target = job_path(project, name) + "/resize"
        return self.ask(target, wire.JobListing, wire.ResizeAsk(nodes=nodes))

    def exec(
        self, project: str, name: str, command: list[str], *, rank: int = 0
    ) -> Generator[ExecChunk]:
        """Run a command in a running job's environment. The last chunk contains the exit code. If
        the iterator is closed or interrupted earlier, the command ends as in a closed terminal.
        """
        base = job_path(project, name) + "/exec"
        ask = wire.ExecAsk(command=command, rank=rank)
        started = self.ask(base + query(user=own_user_name()), wire.ExecStarted, ask, retry=False)
        offset, exit_code = 0, None
        try:
            while exit_code is None:
                piece = self.read_exec(project, name, started.id, offset=offset)
                offset, exit_code = offset + len(piece.data), piece.exit_code
                if piece.data or exit_code is not None:
                    yield piece
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            with suppress(ApiError):
                self.send("POST", f"{base}/{started.id}/input" + query(offset=0, end=True))
            raise

    def open_tunnel(self, project: str, name: str, rank: int = 0, program: str = "") -> str:
        """Open a remote session on a node and return its ID. Used by `client.tunnel`. The job's
        event names `program`, the command of Cavvy that opens the session.
        """
        ask = wire.ExecAsk(rank=rank, session=True)
        target = job_path(project, name) + "/exec" + query(user=own_user_name(), program=program)
        return self.ask(target, wire.ExecStarted, ask, retry=False).id

    def read_exec(self, project: str, name: str, exec_id: str, *, offset: int) -> ExecChunk:
        """Return the command's output from `offset` on. If there is no output yet, wait briefly."""
        where = f"{job_path(project, name)}/exec/{exec_id}"
        target = where + query(offset=offset, wait_s=_POLL_S)
        answer = self.call("GET", target, wait_s=_POLL_S)
        code = answer.headers.get("cavvy-exit-code", "")
        return ExecChunk(data=answer.body, exit_code=int(code) if code else None)

    def write_exec(
        self, project: str, name: str, exec_id: str, *, offset: int, data: bytes, end: bool
    ) -> wire.InputTaken:
        """Send a session's input. Wait up to 20 s if the node has not read the earlier input."""
        target = f"{job_path(project, name)}/exec/{exec_id}/input" + query(offset=offset, end=end)
        answer = self.call("POST", target, data, wait_s=_INPUT_S)
        return read_answer(answer, wire.InputTaken)

    def cost(self, project: str, name: str) -> wire.CostView:
        return self.ask(job_path(project, name) + "/cost", wire.CostView)

    def project_cost(self, project: str, *, since: datetime | None = None) -> wire.ProjectCost:
        """Return the spending of a project, in total or since a point in time."""
        target = f"{project_path(project)}/cost" + query(since=since and since.isoformat())
        return self.ask(target, wire.ProjectCost)

    def audit(self, project: str, name: str | None = None) -> wire.AuditReport:
        """Compare the bills of one job, or of the project's newest jobs, with the providers' own
        records.
        """
        target = f"{project_path(project)}/audit" + query(job=name)
        return self.ask(target, wire.AuditReport)

    # Nodes

    def nodes(self, project: str | None = None) -> list[wire.NodeListing]:
        """Return nodes that are running or billed now, of one project or, if `project` is None, of
        all projects.
        """
        return self.ask("/v1/nodes" + query(project=project), list[wire.NodeListing])

    def invite(
        self,
        *,
        name: str | None = None,
        group: str | None = None,
        valid_s: float = 3600,
        labels: Mapping[str, str] | None = None,
        session_s: float = 0,
    ) -> wire.InvitationView:
        """Return two commands that do the same. A machine on which one of them is run becomes a
        node.
        """
        ask = wire.InviteAsk(
            name=name,
            group=group,
            valid_s=valid_s,
            labels=dict(labels or {}),
            session_s=session_s,
        )
        return self.ask("/v1/invitations", wire.InvitationView, ask, wait_s=30)

    def joined(self) -> list[wire.MachineRow]:
        """Return the machines that have joined."""
        return self.ask("/v1/joined", list[wire.MachineRow])

    def dismiss(self, name: str) -> None:
        """End the work on a machine that has joined, and revoke its token."""
        self.call("DELETE", f"/v1/joined/{segment('machine', name)}", retry=False)

    def quotas(self, provider: str | None = None) -> wire.QuotaReport:
        """Return the account's quotas at `provider` or, if `provider` is None, at all providers."""
        return self.ask("/v1/quotas" + query(provider=provider), wire.QuotaReport, wait_s=60)

    # Named machines

    def machines(self, project: str | None = None) -> list[wire.MachineView]:
        """Return the named machines of one project or, if `project` is None, of all projects."""
        return self.ask("/v1/machines" + query(project=project), list[wire.MachineView])

    def machine(self, project: str, name: str) -> wire.MachineView:
        """Return a named machine. Raises ApiError `machine-not-found`."""
        return self.ask(machine_path(project, name), wire.MachineView)

    def start_machine(
        self, project: str, name: str, *, user: str = "", consent: bool = False
    ) -> wire.Submitted:
        """Start a stopped machine. The server submits a job without a command, which requests new
        nodes for the machine. Raises ApiError `machine-not-found`, `consent-needed`.
        """
        ask = wire.MachineStartAsk(user=user, consent=consent)
        return self.ask(machine_path(project, name) + "/start", wire.Submitted, ask, retry=False)

    def stop_machine(self, project: str, name: str) -> wire.MachineView:
        """Stop the machine's jobs and release its nodes. The machine's name and settings are
        kept."""
        return self.ask(machine_path(project, name) + "/stop", wire.MachineView, method="POST")

    def keep_machine(self, project: str, name: str, *, keep_s: float) -> wire.MachineView:
        """Set how long the machine's nodes are kept without work. For an idle machine, the new keep
        time starts now.
        """
        ask = wire.MachineKeepAsk(keep_s=keep_s)
        return self.ask(machine_path(project, name) + "/keep", wire.MachineView, ask)

    def delete_machine(self, project: str, name: str) -> None:
        """Delete a machine. Raises ApiError `machine-in-use` unless the machine is stopped."""
        self.call("DELETE", machine_path(project, name), retry=False)

    def down(self, *, project: str | None = None, dry_run: bool = False) -> list[wire.CleanupItem]:
        """Stop all unfinished jobs of one project or, if `project` is None, of all projects, and
        remove the nodes of these jobs."""
        ask = wire.DownAsk(project=project, dry_run=dry_run)
        return self.ask("/v1/down", wire.CleanupReport, ask, wait_s=90).found

    def gc(self, *, dry_run: bool = True) -> list[wire.CleanupItem]:
        """Find nodes that belong to no unfinished job, and remove them unless `dry_run` is set."""
        return self.ask("/v1/gc", wire.CleanupReport, wire.GcAsk(dry_run=dry_run), wait_s=90).found

    # Secrets

    def secrets(self, project: str) -> list[wire.SecretRow]:
        return self.ask(f"{project_path(project)}/secrets", wire.SecretList).secrets

    def put_secret(self, project: str, name: str, value: str) -> None:
        self.call(
            "PUT",
            f"{project_path(project)}/secrets/{segment('secret', name)}",
            encode(wire.SecretAsk(value=value)),
        )

    def delete_secret(self, project: str, name: str) -> None:
        """Delete a secret. Raises ApiError `secret-not-found`."""
        self.call(
            "DELETE", f"{project_path(project)}/secrets/{segment('secret', name)}", retry=False
        )

    # Volumes

    def volumes(self, project: str) -> list[wire.VolumeView]:
        """Return the named volumes of the server's own machine and of hosts reached by SSH."""
        return self.ask(f"{project_path(project)}/volumes", list[wire.VolumeView])

    def delete_volume(self, project: str, name: str, provider: str = "") -> None:
        """Delete a named volume with its files; if several providers have one of this name, state
        which. Raises ApiError `volume-not-found`, `volume-in-use`."""
        target = f"{project_path(project)}/volumes/{segment('volume', name)}"
        self.call("DELETE", target + query(provider=provider or None), retry=False)

    # Recipes

    def recipes(self, project: str) -> list[wire.RecipeView]:
        """Return the task files that the project's members share, sorted by name."""
        return self.ask(f"{project_path(project)}/recipes", list[wire.RecipeView])

    def put_recipe(self, project: str, name: str, text: str) -> None:
        """Store a task file for all members. Raises ApiError `invalid-task`."""
        target = f"{project_path(project)}/recipes/{segment('recipe', name)}"
        self.call("PUT", target, encode(wire.RecipeAsk(text=text)))

    def delete_recipe(self, project: str, name: str) -> None:
        """Delete a recipe. Raises ApiError `recipe-not-found`."""
        target = f"{project_path(project)}/recipes/{segment('recipe', name)}"
        self.call("DELETE", target, retry=False)

    # Blobs

    def missing_blobs(self, project: str, blobs: Collection[str]) -> list[str]:
        ask = wire.BlobsAsk(blobs=list(blobs))
        return self.ask(f"{project_path(project)}/blobs/missing", wire.BlobsMissing, ask).missing

    def sibling(self) -> "ApiClient":
        """Open another connection to the same server, for another thread."""
        return ApiClient(
            self.address,
            self._token,
            timeout_s=self._timeout_s,
            revive=self.revive,
            patience=self.patience,
            ca=self.ca,
        )

    # The server

    def health(self) -> wire.Health:
        return self.ask("/v1/health", wire.Health)

    def server(self) -> wire.ServerView:
        return self.ask("/v1/server", wire.ServerView)

    def stop_server(self) -> None:
        """Ask the server to stop. Nodes continue to run their work."""
        self.call("POST", "/v1/server/stop", retry=False)

    # Requests

    def ask(
        self,
        target: str,
        kind: type[_T],
        body: wire.Ask | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "",
        wait_s: float = 0,
        retry: bool = True,
    ) -> _T:
        """Send a request as `call` does, and return the decoded answer. By default, the method is
        POST if there is a body, otherwise GET. Raises ApiError `answer-unknown`, too.
        """
        method = method or ("GET" if body is None else "POST")
        data = b"" if body is None else encode(body)
        answer = self.call(method, target, data, headers, wait_s=wait_s, retry=retry)
        return read_answer(answer, kind)

    def call(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        wait_s: float = 0,
        retry: bool = True,
    ) -> HttpAnswer:
        """Send a request. If `retry` is set, repeat the request until a server answers; set `retry`
        only for requests that are safe to repeat. The server may take `wait_s` seconds longer than
        usual to answer.
        """
        return self.repeat(
            lambda: self.send(method, target, body, headers, wait_s=wait_s), retry=retry
        )

    def repeat(self, send: Callable[[], HttpAnswer], *, retry: bool = True) -> HttpAnswer:
        """Call `send` until a server answers or the time limit of `patience` has passed. Raises
        Unreachable, StartFailed.
        """
        began, tries, pause = time.monotonic(), 0, 0.05
        while True:
            tries += 1
            try:
                if tries > 1:
                    self._reconnect()
                return send()
            except ApiError as error:
                waited = time.monotonic() - began
                done = isinstance(error, ConnectionLost) or error.status > 0  # perhaps
                again = error.passing and (retry or not done)
                if not again or (tries >= _TRIES and waited > self.patience.limit_s):
                    raise
                if self._left_s() <= pause:
                    raise
                if waited > QUIET_S:
                    if error.code == NO_DATABASE:
                        self.patience.note_silence("the server cannot use its database yet")
                    else:
                        self.patience.note_silence()
                time.sleep(pause)
                pause = min(_LONGEST_PAUSE_S, pause * 3)

    def send(
        self,
        method: str,
        target: str,
        body: bytes | Iterator[bytes] = b"",
        headers: Mapping[str, str] | None = None,
        *,
        length: int | None = None,
        wait_s: float = 0,
        take: Callable[[int, bytes], None] | None = None,
    ) -> HttpAnswer:
        """Send a request once. The server may take `wait_s` seconds longer than usual to answer.
        `take` gets the status and the pieces of the body, if the status is 200 or 206.
        Raises ApiError.
        """
        if self.before_change is not None and method != "GET":
            self.before_change()
        every = {
            "Authorization": f"Bearer {self._token}",
            "Cavvy-Api": f"{API}.{REVISION}",
            **(headers or {}),
        }
        answer = self._connection.request(
            method,
            target,
            every,
            body,
            length=length,
            take=take,
            timeout_s=max(_SHORTEST_S, min(self._timeout_s + wait_s, self._left_s())),
            # a server that does not answer during a long poll is no reason for a report
            quiet=(
                QUIET_S + (wait_s if wait_s <= _INPUT_S else 0),
                self.patience.note_silence,
            ),
        )
        error = find_error(answer)
        if error is None or not error.passing:
            self.patience.note_answer()
        if error is not None:
            raise explain_older(error, target, self.send, REVISION)
        return answer

    def _left_s(self) -> float:
        """Return the seconds until the time `until`."""
        return inf if self.until is None else self.until - time.monotonic()

    def _reconnect(self) -> None:
        self._connection.close()
        if self.revive is None:
            return
        self.address, self._token = self.revive()
        self._connection = ClientConnection(self.address, ca=self.ca)


def _read_times(text: str) -> list[tuple[int, float]]:
    pairs = (pair.partition(":") for pair in text.split(",") if pair)
    return [(int(offset), float(at)) for offset, _, at in pairs]


def own_user_name() -> str:
    """Return the name of the user on this machine, or "" if the user has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


class _ServerVersion(Struct, frozen=True):
    version: str
    revision: int | None = None  # the oldest servers do not state it


def parse_version(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def require_revision(send: Callable[[str, str], HttpAnswer], revision: int, what: str) -> None:
    """Raise IncompatibleVersions if the server's routes are older than `revision`. Such a server
    would ignore `what` a request asks for.
    """
    server = decode(send("GET", _SERVER).body, type=_ServerVersion)
    if (server.revision or 0) < revision:
        raise IncompatibleVersions(
            "server-too-old",
            f"the server (cavvy {server.version}, revision {server.revision or 0}) is older than "
            f"this client (cavvy {__version__}) and would ignore {what}",
            f"update the server to a version with revision {revision} or later",
        )


def explain_older(
    error: ApiError, target: str, send: Callable[[str, str], HttpAnswer], revision: int
) -> ApiError:
    """Return the error that a request to `target` caused. If the server may have refused the
    request because the server is older than this client, the returned error names both versions.
    `revision` is that of the routes that this client knows.
    """
    if error.code not in _REFUSALS or target == _SERVER:
        return error
    try:
        server = decode(send("GET", _SERVER).body, type=_ServerVersion)
    except (ApiError, ValueError):
        return error
    theirs, mine = parse_version(server.version), parse_version(__version__)
    its_revision = revision if server.revision is None else server.revision
    if (theirs, its_revision) >= (mine, revision):
        return error
    its, own = f"cavvy {server.version}", f"cavvy {__version__}"
    if theirs == mine:  # builds of the same version
        its, own = f"{its}, revision {its_revision}", f"{own}, revision {revision}"
    versions = f"the server ({its}) is older than this client ({own})"
    remedy = f"update the server, or use {its} as the client"
    if error.code == _NO_ROUTE:
        message = f"{versions}: {error.message} on the server"
        return IncompatibleVersions("server-too-old", message, remedy, error.status)
    hint = f"{versions}; if the file is valid for the client, {remedy}"
    return ApiError(error.code, error.message, hint, error.status)
