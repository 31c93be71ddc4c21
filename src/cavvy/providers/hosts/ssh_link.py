"""The link to one SSH host: an open connection, the host's supervisor, and the socket that is
forwarded for agents.

Raises the errors listed in `fleet/host_link.py`.
"""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from cavvy.domain.values import Struct
from cavvy.providers.base import Refused, TryAgain
from cavvy.providers.hosts import bundles
from cavvy.providers.hosts.bundles import Bundle
from cavvy.providers.hosts.connection import CannotConnect, HostConnection
from cavvy.providers.hosts.fleet.host_link import ASK_TIMEOUT_S, HostSetup
from cavvy.providers.hosts.fleet.machines import SupervisorFacts
from cavvy.providers.hosts.remote_calls import RemoteCalls

_T = TypeVar("_T")
# the time limit in seconds; enough to send a Python runtime over a slow connection
SETUP_TIMEOUT_S = 90
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0  # bounds of the pause between attempts to connect
# At most this much of the time between two failed attempts counts as silence of the host, because
# the server itself may have been suspended.
_COUNTED_S = 60.0
# The characters allowed in the path of the host's folder. The path is used in shell commands and in
# `ssh -R PATH:TARGET`, where `%`, `$`, `:` and `[` have special meanings.
_FOLDER = re.compile(r"/[\w ./@+,=~-]*")
_LONGEST_SOCKET = 100  # maximum bytes of a Unix socket's path; the kernel's limit is 108
# Unpacks a sent Python beside $1 and renames it. If an earlier try, which took longer than its time
# limit, has meanwhile made the folder $1, mv moves the new one into it, where it would count as a
# change.
UNPACK = (
    'mkdir "$1.d$$" && gzip -dc "$1.$$" | tar xf - -C "$1.d$$" && rm "$1.$$" && '
    'mv "$1.d$$" "$1" && rm -rf "$1/${1##*/}.d$$"'
)


class LinkedHost(Protocol):
    """The properties that a link needs from its host."""

    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> str:
        """Cavvy's folder on the host; `~` stands for the user's home."""

    @property
    def address(self) -> str | None: ...
    @property
    def port(self) -> int | None: ...


_H = TypeVar("_H", bound=LinkedHost)


class CountedVolume(Struct, frozen=True, kw_only=True):
    """A named volume, as its host reports it. `changed_at` is in seconds since the epoch, on the
    host's clock."""

    name: str
    files: int
    size_bytes: int
    changed_at: float


class SshRoute(Struct, frozen=True, kw_only=True):
    """The address, the port and the jump hosts to which `ssh` resolves a name."""

    address: str
    port: int
    jumps: Sequence[str] = ()
    known_hosts: Sequence[str] = ()
    checked: bool = True  # False: the user's configuration turns off the check of host keys


Dial = Callable[[], Awaitable[tuple[HostConnection, SshRoute]]]


class LinkDependencies(Struct, frozen=True, kw_only=True):
    """The dependencies that all links of a provider share."""

    mark: str  # the installation's identifier in the names of folders
    agent: Callable[[], Bundle | None]  # the agent's files; None if this server cannot start agents
    server_address: str  # where agents' requests are sent; if "", requests are not relayed
    cache: Path
    now: Callable[[], datetime]
    # called with the host and the gang that changed; if the gang is None, all its gangs may have
    # changed
    changed: Callable[[str, str | None], None]


class SshLink(Generic[_H]):
    """Implements `HostLink`. `dial` connects to the host. After a failed attempt to connect, the
    next attempt is made only after a pause.
    """

    leaving = False

    def __init__(self, entry: _H, base: LinkDependencies, dial: Dial) -> None:
        self.entry, self._dial = entry, dial
        self.setup: HostSetup | None = None
        self.host: HostConnection | None = None  # set while the host is connected
        self.route: SshRoute | None = None  # the route of the last connection
        self.problem = ""  # why the host is not connected
        self.let_in = True  # False: the host answers but refuses the login
        self.silent_since: datetime | None = None
        self.silent_s = 0.0  # how long all attempts to reach the host have failed
        self._base = base
        self._serving = False  # True while the host's supervisor runs for this link
        self._dropped: list[
            HostConnection
        ] = []  # closed connections whose processes may still be running
        self._reading: asyncio.Task[None] | None = None
        self._calls = RemoteCalls(entry.name)
        self._opening = asyncio.Lock()
        self._failed_at = 0.0  # when the last attempt failed, on the event loop's clock
        self._pause_s = 0.0

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def up(self) -> bool:
        return self._serving

    @property
    def due(self) -> bool:
        """Whether the link is down and the pause after the last failed attempt is over."""
        return not self.up and asyncio.get_running_loop().time() >= self._failed_at + self._pause_s

    @property
    def target(self) -> tuple[str, int]:
        """The address and port of the host's SSH server, if known."""
        if self.route is not None:
            return self.route.address, self.route.port
        return self.entry.address or self.entry.name, self.entry.port or 22

    async def connect(self) -> HostSetup:
        """Connect if necessary. Raises LoginRefused and CannotConnect. During the pause after a
        failed attempt, raises CannotConnect without another attempt.
        """
        async with self._opening:
            if self.up and self.setup is not None:
                return self.setup
            if not self.due:
                raise CannotConnect(self.problem)
            try:
                async with asyncio.timeout(SETUP_TIMEOUT_S):
                    return await self._open()
            except (TryAgain, Refused, OSError) as error:
                self._drop()
                text = str(error) or f"{self.entry.name} did not answer within {SETUP_TIMEOUT_S} s"
                self._count_failure(text, answered=isinstance(error, Refused))
                if isinstance(error, (TryAgain, Refused)):
                    raise
                raise CannotConnect(f"{self.entry.name}: {text}") from error
            except BaseException:
                self._drop()
                raise

    async def ask(self, do: str, kind: type[_T], **fields: object) -> _T:
        """Send a request to the supervisor. Raises the errors of
        `HostLink`, and NoCapacity if devices are in use.
        """
        await self.connect()
        if self.host is None:
            raise CannotConnect(self.problem or f"{self.entry.name}: the connection is lost")
        return await self._calls.ask(self.host.send, do, kind, timeout_s=ASK_TIMEOUT_S, **fields)

    async def read_facts(self) -> SupervisorFacts:
        """Read the host's facts. The call takes seconds if the host's drivers are slow. Raises the
        same errors as `ask`.
        """
        setup = await self.connect()
        out = await self._run([*setup.supervisor, "facts", setup.root])
        return msgspec.json.decode(out.strip().rpartition(b"\n")[2], type=SupervisorFacts)

    async def count_volumes(self, project: str) -> Sequence[CountedVolume]:
        """Count the files of a project's named volumes. The call takes as long as the host takes to
        read all their folders. Raises the same errors as `ask`."""
        setup = await self.connect()
        out = await self._run([*setup.supervisor, "volumes", setup.root, project])
        return msgspec.json.decode(out.strip().rpartition(b"\n")[2], type=list[CountedVolume])

    async def reaches(self, address: str, port: int) -> bool:
        """Check from this host whether the SSH port of another host answers. An answer shows that
        the other host is alive, even if the server itself cannot reach the other host.
        """
        return self.host is not None and await self.host.reaches(address, port)

    async def can_relay(self) -> str:
        """Return the reason why agents on the host cannot reach the server, or "" if the agents can
        reach the server or if the answer is unknown.
        """
        if self.setup is None or self.host is None:
            return ""
        path = f"{self.setup.root}/s-{os.urandom(8).hex()}"
        try:
            await self.host.forward(path, "unix:/nonexistent")
            await self.host.forward(path, "unix:/nonexistent", cancel=True)
            await self._run(["rm", "-f", path])
        except (Refused, TryAgain) as error:
            return str(error).removeprefix(f"{self.entry.name}: ")
        return ""

    def hang_up(self) -> None:
        """Close the connection. Agents keep running."""
        self._drop()

    async def close(self) -> None:
        """Close the connection and wait until its processes have ended."""
        self._drop()
        for host in self._dropped:
            await host.closed()

    # Setting up

    async def _open(self) -> HostSetup:
        self.host, self.route = await self._dial()
        setup = await self._prepare()
        self.host.start([*setup.supervisor, "serve", setup.root])
        self._serving, self.setup = True, setup
        self._reading = asyncio.create_task(self._read(self.host), name=f"ssh {self.entry.name}")
        if self._base.server_address:
            await self._relay(setup)
        self.problem, self.let_in, self.silent_since, self.silent_s, self._pause_s = (
            "",
            True,
            None,
            0.0,
            0.0,
        )
        self._base.changed(self.entry.name, None)
        return setup

    async def _prepare(self) -> HostSetup:
        """Create Cavvy's folder on the host and send the files that are missing there."""
        supervisor, agent = bundles.pack_supervisor(), self._base.agent()
        wanted = [supervisor, *([agent] if agent is not None else [])]
        script = Path(__file__).with_name("ssh_link.sh").read_bytes()
        names = [
            self.entry.folder,
            self._base.mark,
            self.entry.name,
            *(bundle.name for bundle in wanted),
        ]
        packed = sorted(path.name for path in self._base.cache.glob("*.python"))
        said, has = self._read_host(await self._run(["sh", "-s", *names, *packed], script))
        folder = said["base"]
        for bundle in wanted:
            if bundle.name not in has:
                await self._bring(bundle, folder, 'mv -f "$1.$$" "$1"')
        python = (
            [said["python"]]
            if "python" in said
            else await self._bring_python(folder, said["system"], has)
        )
        root = f"{folder}/{self._base.mark}/{self.entry.name}"
        if len(root) + len("/s-0123456789abcdef") > _LONGEST_SOCKET:
            raise Refused(
                f"{self.entry.name}: the path {root} is too long for a socket; set a shorter "
                "`folder`"
            )
        start = (*python, "-I", "-S")
        return HostSetup(
            root=root,
            cache=f"{folder}/cache",
            agent=(*start, f"{folder}/{agent.name}") if agent is not None else (),
            supervisor=(*start, f"{folder}/{supervisor.name}"),
        )

    def _read_host(self, out: bytes) -> tuple[Mapping[str, str], set[str]]:
        """Parse the output of `ssh_link.sh`: facts by name, and the names of existing files."""
        lines = out.decode(errors="replace").splitlines()
        words = [line.split("=", 1) for line in lines if "=" in line]
        said = {name: value for name, value in words if name != "has"}
        if not {"base", "system"} <= said.keys():
            raise CannotConnect(
                f"{self.entry.name}: the login shell does not run a plain script; it printed "
                f"{out[-200:]!r}"
            )
        if not said["system"].startswith("Linux "):
            raise Refused(f"{self.entry.name} runs {said['system']}; only Linux hosts can be used")
        if not _FOLDER.fullmatch(said["base"]):
            raise Refused(
                f"{self.entry.name}: the path of the host's folder for Cavvy has unusual "
                f"characters: {said['base'][:100]!r}; set another `folder`"
            )
        return said, {value for name, value in words if name == "has"}

    async def _bring_python(self, folder: str, system: str, has: set[str]) -> Sequence[str]:
        if system != bundles.platform():
            raise Refused(
                f"{self.entry.name} has no Python 3.8 or newer, and the server can send one "
                f"only for {bundles.platform()}, not for {system}: install python3 on the host"
            )
        bundle = await asyncio.to_thread(bundles.pack_python, self._base.cache)
        if bundle.name not in has:
            await self._bring(bundle, folder, UNPACK)
        # remembered locally, so that the next setup asks the host for this file
        (self._base.cache / bundle.name).touch()
        return bundles.python_command(f"{folder}/{bundle.name}")

    async def _bring(self, bundle: Bundle, folder: str, finish: str) -> None:
        """Write a file on the host atomically. The file's name depends on the file's content."""
        script = (
            f'umask 077; cat > "$1.$$" && [ "$(wc -c < "$1.$$")" -eq "$2" ] && {{ {finish}; '
            f'}} || [ -e "$1" ]'
        )
        await self._run(
            ["sh", "-c", script, "sh", f"{folder}/{bundle.name}", str(len(bundle.content))],
            bundle.content,
        )

    async def _run(self, command: Sequence[str], given: bytes = b"") -> bytes:
        assert self.host is not None
        return await self.host.run(command, given, timeout_s=SETUP_TIMEOUT_S)

    async def _relay(self, setup: HostSetup) -> None:
        """Forward a socket on the host to the control plane, for the host's agents.

        Each connection uses a new socket, because the socket of a dead connection may still exist.
        A symbolic link whose name never changes points to the current socket.
        """
        assert self.host is not None
        name = f"s-{os.urandom(8).hex()}"
        await self.host.forward(f"{setup.root}/{name}", self._base.server_address)
        await self._calls.ask(self.host.send, "relay", dict, timeout_s=SETUP_TIMEOUT_S, socket=name)

    # While connected

    async def _read(self, host: HostConnection) -> None:
        async for head, _ in host.frames():
            if "changed" in head:
                self._base.changed(self.entry.name, head["changed"])
            else:
                self._calls.take(head)
        if self.host is host:
            self._reading = None
            self._drop()
            await host.closed()
            problem = f"{self.entry.name}: the connection was lost {host.said}".strip()
            self._count_failure(problem, answered=False)
            self._base.changed(self.entry.name, None)

    def _drop(self) -> None:
        self._calls.give_up()
        if self._reading is not None:
            self._reading.cancel()
        if self.host is not None:
            self.host.close()
            living = [each for each in self._dropped if each.exit_code is None]
            self._dropped = [*living, self.host]
        self._serving, self._reading, self.host = False, None, None

    def _count_failure(self, problem: str, *, answered: bool) -> None:
        now = asyncio.get_running_loop().time()
        if self.silent_since is None:
            self.silent_since = self._base.now()
            self._pause_s = 0.0
        elif not answered:
            self.silent_s += min(now - self._failed_at, _COUNTED_S)
        else:
            self.silent_s = 0.0
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2 or FIRST_PAUSE_S)
        self.problem, self.let_in, self._failed_at = problem, not answered, now
