"""The jobs in which sandboxes run: finds or submits the one of a project, and connects to it."""

import asyncio
import getpass
import json
import os
import shlex
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from hashlib import sha256
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any, NamedTuple

from cavvy.capabilities.functions.jobs import (
    ENDED,
    JobPlace,
    WaitTeller,
    ended_by_signals,
    list_runtime,
    read_state,
)
from cavvy.capabilities.functions.meeting import dial_here, is_own_place, make_meeting_place
from cavvy.capabilities.sandboxes.errors import SandboxLost, SandboxNotFound
from cavvy.capabilities.sandboxes.link import SandboxLink, tell
from cavvy.client import make_key
from cavvy.client.tunnel import NodeTunnel, RemoteError, TunnelLost, join, open_by_api
from cavvy.client.wire import JobDetail
from cavvy.sdk.connections import Connections
from cavvy.sdk.errors import CavvyError, JobNotFound
from cavvy.sdk.submission import SubmitOptions, prepare_task
from cavvy.sdk.task import Task

TAG = "cavvy-sandboxes"
ROOT = ".cavvy/sandboxes"  # where the files lie in the working folder
_PROGRAMS = f"{ROOT}/cavvy/capabilities/sandboxes/on_node"
BRIDGE = f"{_PROGRAMS}/bridge.py"  # carries the bytes of callers on other machines
_SPEC = f"{ROOT}/host.json"
_PACKAGE = Path(__file__).parents[2]  # of cavvy
# what hosts need of others: how they speak with callers, and with the agent of their node
_OTHER_FILES = (
    "capabilities/functions/frames.py",
    "capabilities/functions/on_node/reporter.py",
    "capabilities/functions/state/asking.py",
    "sdk/errors.py",
)
_IDLE_S = 60.0
_LOOK_S = 0.25
_DIAL_S = 0.004
_HERE_S = 2.0  # after which a running job is not on this machine
_OPEN_S = 90.0
_MOST_KEY = 64
_MOST_TRIES = 10  # to open the tunnel
_BEFORE = ("starting", "placed", "queued")
_UNENDED = ("running", *_BEFORE)


class HostNeeds(NamedTuple):
    """What a host's job needs: keys of its task, and variables of all its sandboxes."""

    keys: Mapping[str, Any]
    idle_s: float = _IDLE_S
    consent: bool = False
    free: bool = False  # whether consents that are stored do not count

    def digest(self) -> str:
        """Return what hosts with the same needs have in common."""
        text = json.dumps([self.keys, self.idle_s, self.free], sort_keys=True, default=str)
        return sha256(text.encode()).hexdigest()[:16]


class SandboxHosts:
    """The hosts that this program uses."""

    def __init__(self) -> None:
        self._connections = Connections(None, None, None)
        self._lock = threading.Lock()
        self._links: dict[str, SandboxLink] = {}  # by the job's ID
        self._known: dict[tuple[str, str], JobPlace] = {}  # by project and digest
        self._process = os.getpid()

    def find(self, project: str | None, needs: HostNeeds) -> tuple[SandboxLink, JobPlace]:
        """Return a connection to a host with these needs. Submit its job, unless it waits or runs.
        Raises CavvyError.
        """
        chosen = self.choose_project(project)
        key = (chosen, needs.digest())
        with self._lock:
            self._leave_parent()
            place = self._known.get(key)
            if place is not None and (link := self._find_open(place)) is not None:
                return link, place
            if (place := self._search(*key)) is not None:
                # an idle host may end just now, or who has submitted one that is queued
                with suppress(SandboxLost):
                    self._known[key] = place
                    return self._connect(place), place
            with ended_by_signals():
                self._known[key] = place = self._submit(*key, needs)
                try:
                    return self._connect(place), place
                except (KeyboardInterrupt, SystemExit):
                    self._stop_queued(place)
                    raise

    def reach(self, project: str | None, job: str) -> tuple[SandboxLink, JobPlace]:
        """Return a connection to the host with this job. Raises SandboxNotFound, CavvyError."""
        chosen = self.choose_project(project)
        with self._lock:
            self._leave_parent()
            detail = self._find_job(chosen, job)
            if TAG not in detail.tags or detail.phase in ENDED:
                raise SandboxNotFound(f"the host of this sandbox has ended (job {job})")
            place = JobPlace(chosen, detail.id, _read_meet(detail.task))
            return self._find_open(place) or self._connect(place), place

    def _find_job(self, project: str, job: str) -> JobDetail:
        try:
            with self._connections.use() as connection:
                return connection.job(project, job)
        except JobNotFound as error:
            text = f"project {project} has no job {job}, so the sandbox is not there"
            raise SandboxNotFound(text) from error

    def list_jobs(self, project: str | None) -> list[str]:
        """Return the IDs of the jobs that run hosts now."""
        chosen = self.choose_project(project)
        with self._connections.use() as connection:
            page = connection.search_jobs(project=chosen, tag=TAG, phase="running", limit=200)
        return [each.id for each in page.jobs if TAG in each.tags]

    def choose_project(self, project: str | None) -> str:
        return project or self._connections.default_project()

    def _leave_parent(self) -> None:
        if self._process != os.getpid():  # a fork: the threads that read are not here
            self._process = os.getpid()
            self._links.clear()

    def _find_open(self, place: JobPlace) -> SandboxLink | None:
        link = self._links.get(place.id)
        return None if link is None or link.lost else link

    def _search(self, project: str, digest: str) -> JobPlace | None:
        """Return the job of a host with these needs that has not ended."""
        with self._connections.use() as connection:
            page = connection.search_jobs(project=project, tag=f"{TAG}={digest}", limit=20)
            for each in page.jobs:
                if each.tags.get(TAG) == digest and each.phase in _UNENDED:
                    detail = connection.job(project, each.id)
                    return JobPlace(project, detail.id, _read_meet(detail.task))
        return None

    def _submit(self, project: str, digest: str, needs: HostNeeds) -> JobPlace:
        meet, _, _ = make_meeting_place(f"sandboxes-{token_hex(8)}").rpartition(":")
        spec = _keep(json.dumps({"idle_s": needs.idle_s, "env": {}}).encode())
        run = shlex.join(["exec", "python3", f"{_PROGRAMS}/host.py", _SPEC, meet])
        task = Task(run, **{"name": "sandboxes", "tags": {TAG: digest}, **needs.keys})
        options = SubmitOptions(
            project=project, files=list_files() | {_SPEC: spec}, consent=needs.consent
        )
        with self._connections.use() as connection:
            find = self._connections.default_project
            sent = prepare_task(connection, task, options, None, find)
            made = connection.submit(
                sent.text,
                project=sent.project,
                path=sent.path,
                origin=sent.origin,
                user=getpass.getuser(),
                consent=needs.consent or (sent.budget and not needs.free),
                own_consent=needs.free,
                key=make_key(),
            )
        return JobPlace(made.project, made.id, meet)

    def _stop_queued(self, place: JobPlace) -> None:
        """Stop a job that has not begun, as its caller ends. Others that wait for it submit their
        own.
        """
        with suppress(CavvyError), self._connections.use() as connection:
            if connection.job(place.project, place.id).phase in _BEFORE:
                connection.stop(place.project, place.id, reason="its caller has ended")

    def _connect(self, place: JobPlace) -> SandboxLink:
        link = self._links[place.id] = SandboxLink(self._dial(place))
        return link

    def _dial(self, place: JobPlace) -> socket.socket:
        """Return a connection, once the job runs. Raises SandboxLost, CavvyError."""
        looked = running_at = 0.0
        told, tries = WaitTeller("sandboxes", tell), 1
        while True:
            with suppress(OSError):
                return dial_host(place.meet)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                phase, reason = read_state(self._connections, place)
                if phase in ENDED:
                    raise SandboxLost(
                        f"the job of the sandboxes has ended:\n{self._read_log(place)}",
                        f"`cavvy status {place.id}` shows its events",
                    )
                if phase == "running":
                    running_at = running_at or now
                told.take(place, phase, reason)
            if running_at and now - running_at > _HERE_S:
                try:
                    return _HostTunnel(self._connections, place).open()
                except CavvyError:
                    if tries == _MOST_TRIES:
                        raise
                    tries, running_at = tries + 1, 0.0  # its node may have been replaced
            time.sleep(_DIAL_S)

    def _read_log(self, place: JobPlace) -> str:
        with suppress(CavvyError), self._connections.use() as connection:
            from cavvy.cli.view.job_output import EscapeFilter

            data = connection.log(place.project, place.id, tail_bytes=2000).data
            data = EscapeFilter().take(data, final=True)
            return "\n".join(f"  {line}" for line in data.decode(errors="replace").splitlines())
        return "  (no output)"


class _HostTunnel:
    """A connection to a host on another machine, carried by a thread."""

    def __init__(self, connections: Connections, place: JobPlace) -> None:
        self._connections, self._place = connections, place

    def open(self) -> socket.socket:
        opened: Future[socket.socket] = Future()
        threading.Thread(
            target=lambda: asyncio.run(self._serve(opened)), daemon=True, name="cavvy-tunnel"
        ).start()
        try:
            return opened.result(_OPEN_S)
        except (TunnelLost, RemoteError, TimeoutError) as error:
            text = f"the node of the job {self._place.id} cannot be reached: {error}"
            raise SandboxLost(text) from error

    async def _serve(self, opened: "Future[socket.socket]") -> None:
        place = self._place
        try:
            with self._connections.use() as client:
                carrier = open_by_api(client, place.project, place.id, 0, "sandboxes")
                async with NodeTunnel(carrier) as tunnel:
                    channel = await tunnel.run(argv=["python3", BRIDGE])
                    ours, theirs = socket.socketpair()
                    reader, writer = await asyncio.open_connection(sock=theirs)
                    opened.set_result(ours)
                    await join(channel, reader, writer)
        except Exception as error:  # noqa: BLE001 - reported where `open` waits
            if not opened.done():
                opened.set_exception(error)


def dial_host(meet: str) -> socket.socket:
    """Return a connection to the host that listens at this socket of this machine, with the key
    that it has written beside it. Raises OSError.
    """
    if not meet or os.lstat(os.path.dirname(meet)).st_uid != os.geteuid():
        raise ConnectionRefusedError(f"{meet} is in no folder of this user")
    with open(os.open(f"{meet}.key", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        key = file.read(_MOST_KEY).decode("ascii", "replace")
    return dial_here(f"{meet}:{key}")


def list_files() -> dict[str, Path]:
    """Return the files of Cavvy that hosts need, by their path in the working folder."""
    own = Path(__file__).parent / "on_node"
    empty = own / "__init__.py"
    found = {
        f"{ROOT}/cavvy/capabilities/sandboxes/on_node/{each.name}": each
        for each in sorted(own.glob("*.py"))
    }
    for path in _OTHER_FILES:
        found[f"{ROOT}/cavvy/{path}"] = _PACKAGE / path
        for above in [*PurePosixPath(path).parents]:
            name = "" if above == PurePosixPath(".") else f"{above}/"
            found[f"{ROOT}/cavvy/{name}__init__.py"] = empty
    found[f"{ROOT}/cavvy/capabilities/sandboxes/__init__.py"] = empty
    return found | list_runtime(f"{ROOT}/client")


def _read_meet(task: bytes) -> str:
    """Return the socket at which callers on this machine meet the host: the last word of its job's
    command. That of a job that others have written, which leads elsewhere, is "".
    """
    words = shlex.split(json.loads(bytes(task)).get("run") or "")
    return words[-1] if words and is_own_place(f"{words[-1]}:") else ""


def _keep(data: bytes) -> Path:
    """Return a file with this content in the cache of the state folder."""
    from cavvy.client.state import default_home

    folder = Path(default_home()) / "cache" / "sandboxes"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{sha256(data).hexdigest()[:32]}.json"
    if not path.exists():
        made = path.with_suffix(f".{token_hex(4)}")
        made.write_bytes(data)
        made.replace(path)
    return path
